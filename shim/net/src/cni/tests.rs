//! Owns: nothing yet
