//! Owns: what a machine is made of, as plain data that pod, engine and devices share.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Which engine gives a pod its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// Nacelle's own VMM on KVM, in the pod process.
    Kvm,
    /// QEMU's microvm machine.
    Qemu,
    /// No guest: the agent in namespaces of the node.
    Host,
}

impl std::fmt::Display for EngineKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            EngineKind::Kvm => "kvm",
            EngineKind::Qemu => "qemu",
            EngineKind::Host => "host",
        })
    }
}

/// How the processors of a machine are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Sockets, 1 or more.
    pub sockets: u32,
    /// Cores of a socket, 1 or more.
    pub cores: u32,
    /// Threads of a core: 1 or 2.
    pub threads: u32,
}

impl Topology {
    /// So many cores in one socket.
    pub fn flat(cores: u32) -> Topology {
        Topology { sockets: 1, cores, threads: 1 }
    }

    /// How many virtual processors that is.
    pub fn count(&self) -> u32 {
        self.sockets.saturating_mul(self.cores).saturating_mul(self.threads)
    }
}

/// What a machine's processors are to the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuModel {
    /// A model that QEMU knows; none: all that the accelerator can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Abilities, in QEMU's words, that are there or are not, beside the model's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<(String, bool)>,
    /// Without one of them there is no machine.
    #[serde(default)]
    pub strict: bool,
}

impl CpuModel {
    /// The first name that is none: letters, digits, `-`, `_` and `.` make one.
    pub fn wrong(&self) -> Option<&str> {
        let names = self.name.iter().chain(self.features.iter().map(|(name, _)| name));
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        names.map(String::as_str).find(|name| name.is_empty() || !name.bytes().all(plain))
    }
}

/// What lies under a machine's memory on the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryPages {
    /// Usual pages, large ones where the node has transparent huge pages; taken when the guest touches them.
    #[default]
    Transparent,
    /// Pages of 2 MiB of the node's pool (hugetlb), all of them taken when the machine starts.
    Hugetlb,
}

/// What a guest prints on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConsoleKind {
    /// The serial port: from the kernel's first word to its last, a byte at a time.
    #[default]
    Serial,
    /// A virtio console as soon as the kernel has found it, the serial port until then: for guests that print much.
    Virtio,
}

/// A piece of a file: bytes `offset..offset + length` of `path`. Offset and length are multiples of 512.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The file or block device.
    pub path: PathBuf,
    /// Bytes from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// One read-only image: the pieces that lie one after the other on its block device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageDisk {
    /// The pieces, in order.
    pub extents: Vec<Extent>,
}

impl ImageDisk {
    /// The bytes of all pieces together.
    pub fn length(&self) -> u64 {
        self.extents.iter().map(|extent| extent.length).sum()
    }
}
