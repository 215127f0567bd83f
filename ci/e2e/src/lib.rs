//! Owns: the harness.
