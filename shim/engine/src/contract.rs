//! Owns: what every engine must show.
