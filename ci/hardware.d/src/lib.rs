//! The loops that `nacelle-hardware` measures, the same in its guest and on the host: memory, disks, TCP, and the interface that TCP needs.

pub mod disk;
pub mod link;
pub mod loops;
pub mod tcp;

/// The line that the measuring guest prints on its console when its init runs.
pub const MARK: &str = "nacelle-hardware: init is here";

/// The guest's vsock port on which it takes commands, one a line, and answers each with one line.
pub const COMMANDS: u32 = 1025;

/// The guest's TCP port for what it receives.
pub const RECEIVE_PORT: u16 = 5001;
