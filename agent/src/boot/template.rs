//! Determines whether this VM is to be a template.

/// The kernel parameter of a template, which the engine adds: the kernel makes it a variable of init's environment.
const PARAMETER: &str = "nacelle_template";

/// Returns whether this VM is booted to be saved as a template.
pub(super) fn is_template() -> bool {
    std::env::var_os(PARAMETER).is_some()
}
