//! Tests the network device over a real tap, with a scripted driver. Needs root and /dev/net/tun. The tests also run with
//! vhost-net if the node supports it.

#[path = "../../src/testing.rs"]
#[allow(dead_code, reason = "each test file uses a part of it")]
mod testing;

mod control;
mod frames;
mod guest;
mod host;
mod hostile;
