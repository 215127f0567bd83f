//! Owns: what the configuration says of machine pods.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Machines of machine pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Machines {
    /// UEFI's program.
    pub efi_code: PathBuf,
    /// The variables of a machine that never ran.
    pub efi_variables: PathBuf,
    /// UEFI's program for machines that start signed systems only.
    pub efi_secure_code: PathBuf,
    /// Their variables, with the keys of whom they trust.
    pub efi_secure_variables: PathBuf,
}

impl Default for Machines {
    /// As Debian's package ovmf has them.
    fn default() -> Self {
        Machines {
            efi_code: "/usr/share/OVMF/OVMF_CODE_4M.fd".into(),
            efi_variables: "/usr/share/OVMF/OVMF_VARS_4M.fd".into(),
            efi_secure_code: "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd".into(),
            efi_secure_variables: "/usr/share/OVMF/OVMF_VARS_4M.ms.fd".into(),
        }
    }
}
