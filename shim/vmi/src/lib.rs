//! Owns: the machine's specification. Annotations or documents in; a defaulted and checked specification, or everything
//! that is wrong with them at once, out.
//! May use: `nacelle-base`. No effects, no engine, no CRI type: the daemon, the commands and an admission server call this
//! same code.
//!
//! The way of a specification: text (`read`) -> tree -> its shape (`shape`, by the `schema` of the types) -> v1 from any
//! version (`version`) -> short annotations merged (`annotations`) -> presets, instance type, preference (`preset`) ->
//! defaults (`default`) -> rules (`rules`) -> `Admitted` (`admit`). `complete` goes back: from what was admitted to annotations
//! that need no catalogue.

pub mod admit;
pub mod annotations;
pub mod cause;
pub mod complete;
pub mod default;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod manifest;
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
