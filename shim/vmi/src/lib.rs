//! Turns annotations or documents into the specification of a VM, with defaults and validated, or into a list of everything that
//! is wrong with them. The crate depends on `nacelle-base`; it has no side effects and knows neither engines nor CRI types. The
//! daemon, the commands and an admission server use the same code.
//!
//! The stages of a specification: text (`read`) -> tree -> its shape (`shape`, by the `schema` of the types) -> v1 from any
//! version (`version`) -> short annotations merged (`annotations`) -> presets, instance type, preference (`preset`) -> defaults
//! (`default`) -> rules (`rules`) -> `Admitted` (`admit`). `complete` goes back: from an admitted specification to annotations
//! that need no catalogue.

pub mod admit;
mod annotation_name;
pub mod annotations;
pub mod cause;
pub mod complete;
pub mod default;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod manifest;
mod names;
pub mod preset;
pub mod quantity;
pub mod read;
pub mod refused;
pub mod rules;
pub mod schema;
pub mod shape;
pub mod spec;
pub mod tree;
pub mod version;

pub use cause::{Cause, Causes, Problem, Rule};
pub use quantity::{Quantity, QuantityError};
