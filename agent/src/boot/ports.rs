//! Defines the vsock ports between host and guest.

/// The host's port for the handshake.
pub const HANDSHAKE_PORT: u32 = 1024;
/// The guest's port of the gRPC service.
pub const RPC_PORT: u32 = 1025;
/// The guest's port of the streams.
pub const STREAM_PORT: u32 = 1026;
