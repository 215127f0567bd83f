//! Names the annotations `vm.nacelle.dev/...` in keys and in causes.

/// The prefix of all of these annotations.
pub const PREFIX: &str = "vm.nacelle.dev/";

/// Returns the path of an annotation, for causes.
pub fn field(name: &str) -> String {
    format!("metadata.annotations[{PREFIX}{name}]")
}
