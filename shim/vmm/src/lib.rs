//! Owns: nothing yet.
