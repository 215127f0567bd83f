//! Owns: the network device over a real tap, driven by a scripted driver. Needs root and /dev/net/tun; with
//! vhost-net where the node has it.

#[path = "../../src/testing.rs"]
#[allow(dead_code, reason = "each test file uses a part of it")]
mod testing;

mod control;
mod frames;
mod guest;
mod host;
mod hostile;
