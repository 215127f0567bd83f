//! Owns: what the pod process gives up before the first guest byte.
