//! Defines the specification of a VM: the shape of KubeVirt's VirtualMachineInstanceSpec (kubevirt.io/v1) without the fields that
//! have no meaning here (`crate::refused`). It is the internal type and, field by field, version v1.
//!
//! Every field is optional in the type: required fields are a matter of the rules, so that all problems are reported at once. The
//! doc comments of the fields are descriptions in the OpenAPI schema.

mod device;
mod domain;
mod instance;
mod machine;
mod volume;

pub use device::*;
pub use domain::*;
pub use instance::*;
pub use machine::*;
pub use volume::*;

/// Returns whether a field is unset, so that it is not serialized.
pub(crate) fn unset<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Defines structures of a document: camelCase, unknown fields are rejected, unset fields are not serialized.
macro_rules! document {
    ($($(#[$about:meta])* pub struct $name:ident { $($(#[$of:meta])* pub $field:ident: $type:ty,)* })*) => { $(
        #[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        #[serde(rename_all = "camelCase", deny_unknown_fields, default)]
        $(#[$about])*
        pub struct $name {
            $($(#[$of])* #[serde(skip_serializing_if = "crate::spec::unset")] pub $field: $type,)*
        }
    )* };
}
pub(crate) use document;

/// Defines an enum of keywords.
macro_rules! words {
    ($($(#[$about:meta])* pub enum $name:ident { $($variant:ident = $word:literal,)* })*) => { $(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name { $(#[doc = concat!("`", $word, "`")] #[serde(rename = $word)] $variant,)* }

        impl $name {
            /// All keywords, as they are serialized.
            pub const WORDS: &[&str] = &[$($word),*];

            /// Returns the keyword, as it is serialized.
            pub fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)* }
            }

            /// Parses a keyword.
            pub fn of(word: &str) -> Option<$name> {
                match word { $($word => Some($name::$variant),)* _ => None }
            }
        }

        impl schemars::JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({ "type": "string", "enum": [$($word),*] })
            }
        }
    )* };
}
pub(crate) use words;
