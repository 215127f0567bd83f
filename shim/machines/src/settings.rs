//! Defines the section `machines` of the configuration.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The firmware of machine pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MachineSettings {
    /// The UEFI firmware.
    pub efi_code: PathBuf,
    /// The template of its variables.
    pub efi_variables: PathBuf,
    /// The UEFI firmware for machines with secure boot.
    pub efi_secure_code: PathBuf,
    /// The template of its variables, with the enrolled keys.
    pub efi_secure_variables: PathBuf,
}

impl Default for MachineSettings {
    /// Returns the paths of Debian's package ovmf.
    fn default() -> Self {
        MachineSettings {
            efi_code: "/usr/share/OVMF/OVMF_CODE_4M.fd".into(),
            efi_variables: "/usr/share/OVMF/OVMF_VARS_4M.fd".into(),
            efi_secure_code: "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd".into(),
            efi_secure_variables: "/usr/share/OVMF/OVMF_VARS_4M.ms.fd".into(),
        }
    }
}
