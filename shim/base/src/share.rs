//! Owns: what the three programs that take part in volumes of the node agree on: the guest's agent mounts the share, the
//! device in the pod process passes requests on, the process beside it (`nacelle-fs`) answers them. Pure.

/// The tag by which the guest knows the share.
pub const TAG: &str = "nacelle";
/// Where the agent mounts it; each volume is `FOLDER/CONTAINER/NUMBER` in it.
pub const FOLDER: &str = "/run/nacelle/volumes";
/// The queues of the device, and the streams to the process that answers: requests of high priority, and the others.
pub const QUEUES: usize = 2;
/// The descriptors of a queue. Linux makes no request that does not fit into one: less than half a MiB of data.
pub const QUEUE_SIZE: u16 = 128;
/// The most bytes of a request, and of an answer.
pub const MAX_MESSAGE: usize = (1 << 20) + (64 << 10);
/// Before each request on a stream: its bytes, and the bytes of the largest answer, both as little-endian 32 bits. Before
/// each answer stand its bytes, in the same way; a request that has no answer gets an empty one.
pub const HEADER: usize = 8;
/// The bytes before each answer.
pub const ANSWER_HEADER: usize = 4;
