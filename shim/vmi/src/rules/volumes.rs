//! Checks the rules of volumes.

use crate::cause::{Causes, Rule};
use crate::names::{
    ABSOLUTE_PATH_RULE, IMAGE_RULE, NameRules, SUBDOMAIN_RULE, check_names, is_absolute_path, is_dns_label,
    is_dns_subdomain, is_image_reference,
};
use crate::spec::{CloudInit, HostDisk, HostDiskKind, InstanceSpec, Volume};
use base64::Engine;

const AT: &str = "spec.volumes";
const NAMES: NameRules = NameRules {
    required: Rule("volume-name-missing"),
    well_formed: Rule("volume-name"),
    unique: Rule("volume-name-twice"),
};
/// The fields of a pod that a downwardAPI volume can contain.
const FIELDS: &[&str] =
    &["metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels", "metadata.annotations"];

/// Checks all volumes.
pub fn check(spec: &InstanceSpec, causes: &mut Causes) {
    check_names(spec.volumes.iter().map(|volume| volume.name.as_str()), AT, &NAMES, causes);
    let mut cloud_init = 0;
    for (index, volume) in spec.volumes.iter().enumerate() {
        let at = format!("{AT}[{index}]");
        match volume.sources().as_slice() {
            [] => causes.required(Rule("volume-source"), &at, "must have one source"),
            [_] => {}
            several => {
                let message = format!("must have one source, and has {}", several.join(", "));
                causes.forbidden(Rule("volume-sources"), &at, message);
            }
        }
        let devices = &spec.domain.devices;
        let used = devices.disks.iter().any(|disk| disk.name == volume.name)
            || devices.filesystems.iter().any(|one| one.name == volume.name);
        if !used && is_dns_label(&volume.name) {
            let message = "no disk and no file system has this name";
            causes.invalid(Rule("volume-unused"), format!("{at}.name"), &volume.name, message);
        }
        source(volume, &at, causes);
        if let Some((name, data)) = volume.cloud_init() {
            cloud_init += 1;
            if cloud_init == 2 {
                let message = "a machine has one volume for cloud-init";
                causes.forbidden(Rule("cloud-init-twice"), format!("{at}.{name}"), message);
            }
            cloud(data, &format!("{at}.{name}"), causes);
        }
    }
}

fn source(volume: &Volume, at: &str, causes: &mut Causes) {
    if let Some(disk) = &volume.container_disk {
        let at = format!("{at}.containerDisk");
        if disk.image.is_empty() {
            causes.required(Rule("container-disk-missing"), format!("{at}.image"), "must say the image");
        } else if !is_image_reference(&disk.image) {
            causes.invalid(Rule("container-disk-image"), format!("{at}.image"), &disk.image, IMAGE_RULE);
        }
        if !disk.path.is_empty() && !is_absolute_path(&disk.path) {
            causes.invalid(Rule("container-disk-path"), format!("{at}.path"), &disk.path, ABSOLUTE_PATH_RULE);
        }
    }
    if let Some(claim) = &volume.persistent_volume_claim {
        named(&claim.claim_name, &format!("{at}.persistentVolumeClaim.claimName"), causes);
    }
    if let Some(disk) = &volume.empty_disk {
        let at = format!("{at}.emptyDisk.capacity");
        match &disk.capacity {
            None => causes.required(Rule("empty-disk-missing"), at, "must say the disk's size"),
            Some(size) if size.bytes().is_none_or(|bytes| bytes < 1 << 20) => {
                causes.invalid(Rule("empty-disk-size"), at, size, "must be a whole number of bytes, at least 1Mi");
            }
            Some(_) => {}
        }
    }
    if let Some(disk) = &volume.host_disk {
        host_disk(disk, &format!("{at}.hostDisk"), causes);
    }
    if let Some(map) = &volume.config_map {
        named(&map.name, &format!("{at}.configMap.name"), causes);
        disk_label(&map.volume_label, &format!("{at}.configMap.volumeLabel"), causes);
    }
    if let Some(secret) = &volume.secret {
        named(&secret.secret_name, &format!("{at}.secret.secretName"), causes);
        disk_label(&secret.volume_label, &format!("{at}.secret.volumeLabel"), causes);
    }
    let Some(downward) = &volume.downward_api else { return };
    let at = format!("{at}.downwardAPI");
    disk_label(&downward.volume_label, &format!("{at}.volumeLabel"), causes);
    if downward.fields.is_empty() {
        causes.required(Rule("downward-empty"), format!("{at}.fields"), "must have at least one file");
    }
    for (index, file) in downward.fields.iter().enumerate() {
        let at = format!("{at}.fields[{index}]");
        if file.path.is_empty() || file.path.starts_with('/') || file.path.split('/').any(|part| part == "..") {
            let message = "must be a relative path without '..'";
            causes.invalid(Rule("downward-path"), format!("{at}.path"), &file.path, message);
        }
        let field = file.field_ref.as_ref().map_or("", |field| field.field_path.as_str());
        let one =
            |known: &&str| field.strip_prefix(*known).is_some_and(|rest| rest.is_empty() || rest.starts_with("['"));
        if !FIELDS.iter().any(one) {
            causes.unsupported(Rule("downward-field"), format!("{at}.fieldRef.fieldPath"), field, FIELDS);
        }
    }
}

fn named(name: &str, at: &str, causes: &mut Causes) {
    if name.is_empty() {
        causes.required(Rule("reference-missing"), at, "must have a name");
    } else if !is_dns_subdomain(name) {
        causes.invalid(Rule("reference-name"), at, name, SUBDOMAIN_RULE);
    }
}

fn disk_label(label: &str, at: &str, causes: &mut Causes) {
    if label.len() > 32 || !label.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b)) {
        let message = "must be at most 32 letters, digits, '-' and '_': ISO 9660 has room for no more";
        causes.invalid(Rule("volume-label"), at, label, message);
    }
}

fn host_disk(disk: &HostDisk, at: &str, causes: &mut Causes) {
    if !is_absolute_path(&disk.path) {
        causes.invalid(Rule("host-disk-path"), format!("{at}.path"), &disk.path, ABSOLUTE_PATH_RULE);
    }
    match (disk.kind, &disk.capacity) {
        (None, _) => causes.required(Rule("host-disk-type"), format!("{at}.type"), "must be Disk or DiskOrCreate"),
        (Some(HostDiskKind::DiskOrCreate), None) => {
            let message = "must say the size of a disk that is made";
            causes.required(Rule("host-disk-capacity"), format!("{at}.capacity"), message);
        }
        (Some(HostDiskKind::Disk), Some(size)) => {
            let message = "a disk that is there has its size: say DiskOrCreate, or no capacity";
            causes.invalid(Rule("host-disk-size"), format!("{at}.capacity"), size, message);
        }
        _ => {}
    }
}

fn cloud(data: &CloudInit, at: &str, causes: &mut Causes) {
    let user = [
        ("userData", !data.user_data.is_empty()),
        ("userDataBase64", !data.user_data_base64.is_empty()),
        ("secretRef", data.secret_ref.is_some()),
    ];
    let network = [
        ("networkData", !data.network_data.is_empty()),
        ("networkDataBase64", !data.network_data_base64.is_empty()),
        ("networkDataSecretRef", data.network_data_secret_ref.is_some()),
    ];
    let said = |list: &[(&'static str, bool); 3]| -> Vec<&'static str> {
        list.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect()
    };
    if said(&user).is_empty() && said(&network).is_empty() {
        let message = "must have user data: userData, userDataBase64 or secretRef";
        causes.required(Rule("cloud-init-empty"), at, message);
    }
    for several in [said(&user), said(&network)] {
        if several.len() > 1 {
            let message = format!("must say it once, and says {}", several.join(" and "));
            causes.forbidden(Rule("cloud-init-sources"), at, message);
        }
    }
    for (name, text) in [("userDataBase64", &data.user_data_base64), ("networkDataBase64", &data.network_data_base64)] {
        if base64::engine::general_purpose::STANDARD.decode(text.trim()).is_err() {
            causes.invalid(Rule("cloud-init-base64"), format!("{at}.{name}"), text, "must be base64");
        }
    }
    for (name, reference) in [("secretRef", &data.secret_ref), ("networkDataSecretRef", &data.network_data_secret_ref)]
    {
        if let Some(reference) = reference {
            named(&reference.name, &format!("{at}.{name}.name"), causes);
        }
    }
}
