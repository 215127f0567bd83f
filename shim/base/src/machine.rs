//! Defines the components of a VM as plain data that pod, engine and devices share: engine, CPU topology and model, memory
//! pages, console, image disks.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The engine that runs a pod.
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

/// The CPU topology of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// The number of sockets, 1 or more.
    pub sockets: u32,
    /// The number of cores in a socket, 1 or more.
    pub cores: u32,
    /// The number of threads in a core: 1 or 2.
    pub threads: u32,
}

impl Topology {
    /// Returns a topology of one socket with so many cores.
    pub fn single_socket(cores: u32) -> Topology {
        Topology { sockets: 1, cores, threads: 1 }
    }

    /// Returns the number of vCPUs.
    pub fn count(&self) -> u32 {
        self.sockets.saturating_mul(self.cores).saturating_mul(self.threads)
    }
}

/// The CPU model that the guest sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuModel {
    /// The name of a QEMU CPU model; `None` for all features that the accelerator supports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// CPU features by QEMU's names, added to the model (true) or removed from it (false).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<(String, bool)>,
    /// The start fails if a feature is missing.
    #[serde(default)]
    pub strict: bool,
}

impl CpuModel {
    /// Returns the first invalid name: a name has only letters, digits, `-`, `_` and `.`.
    pub fn find_invalid_name(&self) -> Option<&str> {
        let names = self.name.iter().chain(self.features.iter().map(|(name, _)| name));
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        names.map(String::as_str).find(|name| name.is_empty() || !name.bytes().all(is_valid))
    }
}

/// The page size that backs a VM's memory on the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryPages {
    /// Normal pages, or transparent huge pages where the node has them; allocated when the guest touches them.
    #[default]
    Transparent,
    /// Pages of 2 MiB of the node's pool (hugetlb), all allocated when the VM starts.
    Hugetlb,
}

/// The kind of the guest's console device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConsoleKind {
    /// The serial port, from the first message of the kernel to the last; slow, because each byte is an exit.
    #[default]
    Serial,
    /// The serial port until the kernel has found the virtio console, then that: for guests that print much.
    Virtio,
}

/// An extent of a file: bytes `offset..offset + length` of `path`. Offset and length are multiples of 512.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The path of a file or block device.
    pub path: PathBuf,
    /// The offset in bytes from the start of the file.
    pub offset: u64,
    /// The length in bytes.
    pub length: u64,
}

/// One read-only image: extents that lie one after the other on its block device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageDisk {
    /// The extents, in order.
    pub extents: Vec<Extent>,
}

impl ImageDisk {
    /// Returns the total length of the extents in bytes.
    pub fn length(&self) -> u64 {
        self.extents.iter().map(|extent| extent.length).sum()
    }
}
