//! Contains the loops that `nacelle-hardware` measures, the same in its guest and on the host: memory, disks, TCP, and the
//! network interface that TCP needs.

pub mod disk;
pub mod link;
pub mod loops;
pub mod tcp;

/// The line that the init of the measuring guest prints on its console.
pub const MARK: &str = "nacelle-hardware: init is here";

/// The guest's vsock port for commands, one a line; each is answered by one line.
pub const COMMAND_PORT: u32 = 1025;

/// The guest's TCP port for received data.
pub const RECEIVE_PORT: u16 = 5001;
