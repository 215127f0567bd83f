//! Contains the tests of this crate that need external resources: mounts, a registry, servers that misbehave, a full disk. They
//! are one program, so that it is linked once.

mod artifact;
mod common;
mod cost;
mod crash;
mod disk_full;
mod file_artifact;
mod health;
mod hostile;
mod possession;
mod registry;
mod rootfs;
mod speed;
