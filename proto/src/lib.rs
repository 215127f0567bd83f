//! Contains the contracts as Rust: generated code, one module per package, and the bounded decoder of its messages. The
//! documentation of messages and fields is in the `.proto` files of this crate.

#![allow(missing_docs, reason = "generated from the .proto files, which carry the documentation")]
#![allow(clippy::all, reason = "generated")]

/// CRI v1: the protocol of kubelet and crictl.
pub mod cri {
    tonic::include_proto!("runtime.v1");
}

/// Messages that [`agent`] and [`pod`] share.
pub mod common {
    tonic::include_proto!("nacelle.common.v1");
}

/// The protocol between the pod process and the agent in its guest.
pub mod agent {
    tonic::include_proto!("nacelle.agent.v1");
}

/// The protocol between the daemon and a pod process.
pub mod pod {
    tonic::include_proto!("nacelle.pod.v1");
}

/// The protocol between the commands of the node and the daemon, in addition to CRI.
pub mod node {
    tonic::include_proto!("nacelle.node.v1");
}

/// The protocol between the commands of persistent VMs and the daemon, in addition to CRI.
pub mod vm {
    tonic::include_proto!("nacelle.vm.v1");
}

pub mod server;
pub mod status;
pub mod wire;

/// The compiled descriptors (a `FileDescriptorSet`) of all packages.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
