//! Defines the volumes of disks and file systems, and the networks of interfaces. The doc comments of the fields are descriptions
//! in the OpenAPI schema.

use super::{Empty, document, words};
use crate::Quantity;

document! {
    /// A volume: its name and one source.
    pub struct Volume {
        /// The name.
        pub name: String,
        /// A disk image in a container image.
        pub container_disk: Option<ContainerDisk>,
        /// A PersistentVolumeClaim, which the pod must also have as a volume.
        pub persistent_volume_claim: Option<Claim>,
        /// An empty disk that is removed with the VM.
        pub empty_disk: Option<EmptyDisk>,
        /// A disk image in a file of the node.
        pub host_disk: Option<HostDisk>,
        /// A cloud-init disk of the type NoCloud.
        pub cloud_init_no_cloud: Option<CloudInit>,
        /// A cloud-init disk of the type config drive.
        pub cloud_init_config_drive: Option<CloudInit>,
        /// A disk with the files of a ConfigMap, which the pod must also have as a volume.
        pub config_map: Option<ConfigMap>,
        /// A disk with the files of a Secret, which the pod must also have as a volume.
        pub secret: Option<Secret>,
        /// A disk with fields of the pod (downwardAPI).
        #[serde(rename = "downwardAPI")]
        pub downward_api: Option<DownwardApi>,
    }

    /// A disk image in a container image.
    pub struct ContainerDisk {
        /// The image.
        pub image: String,
        /// The path of the disk image; by default the only file of `/disk`.
        pub path: String,
    }

    /// A PersistentVolumeClaim.
    pub struct Claim {
        /// The name.
        pub claim_name: String,
        /// The guest cannot write to it.
        pub read_only: Option<bool>,
    }

    /// An empty disk.
    pub struct EmptyDisk {
        /// The size.
        pub capacity: Option<Quantity>,
    }

    /// A disk image in a file of the node.
    pub struct HostDisk {
        /// The file.
        pub path: String,
        /// `DiskOrCreate` creates a missing file.
        #[serde(rename = "type")]
        pub kind: Option<HostDiskKind>,
        /// The size of a created file.
        pub capacity: Option<Quantity>,
    }

    /// The data for cloud-init.
    pub struct CloudInit {
        /// User data.
        pub user_data: String,
        /// User data in base64.
        #[serde(rename = "userDataBase64")]
        pub user_data_base64: String,
        /// A Secret with user data, which the pod must also have as a volume.
        pub secret_ref: Option<LocalReference>,
        /// Network data.
        pub network_data: String,
        /// Network data in base64.
        #[serde(rename = "networkDataBase64")]
        pub network_data_base64: String,
        /// A Secret with network data, which the pod must also have as a volume.
        pub network_data_secret_ref: Option<LocalReference>,
    }

    /// A reference to an object in the namespace of the pod.
    pub struct LocalReference {
        /// The name.
        pub name: String,
    }

    /// A ConfigMap.
    pub struct ConfigMap {
        /// The name.
        pub name: String,
        /// The object may be missing.
        pub optional: Option<bool>,
        /// The volume label of the disk.
        pub volume_label: String,
    }

    /// A Secret.
    pub struct Secret {
        /// The name.
        pub secret_name: String,
        /// The object may be missing.
        pub optional: Option<bool>,
        /// The volume label of the disk.
        pub volume_label: String,
    }

    /// Fields of the pod (downwardAPI).
    pub struct DownwardApi {
        /// Files.
        pub fields: Vec<DownwardFile>,
        /// The volume label of the disk.
        pub volume_label: String,
    }

    /// A file with a field of the pod.
    pub struct DownwardFile {
        /// The file's path on the disk.
        pub path: String,
        /// The field.
        pub field_ref: Option<FieldRef>,
    }

    /// A field of the pod.
    pub struct FieldRef {
        /// The path of the field.
        pub field_path: String,
    }

    /// A network: its name and one source.
    pub struct Network {
        /// The name.
        pub name: String,
        /// The default network of the pod.
        pub pod: Option<Empty>,
        /// An additional network of the pod, by Multus.
        pub multus: Option<Multus>,
    }

    /// A network by Multus.
    pub struct Multus {
        /// The NetworkAttachmentDefinition: NAME or NAMESPACE/NAME.
        pub network_name: String,
        /// The network replaces the default network of the cluster.
        pub default: Option<bool>,
    }
}

words! {
    /// The kind of a host disk: existing or created if missing.
    pub enum HostDiskKind {
        Disk = "Disk",
        DiskOrCreate = "DiskOrCreate",
    }
}

impl Volume {
    /// Returns the names of the source fields that are set.
    pub fn sources(&self) -> Vec<&'static str> {
        let named = [
            ("containerDisk", self.container_disk.is_some()),
            ("persistentVolumeClaim", self.persistent_volume_claim.is_some()),
            ("emptyDisk", self.empty_disk.is_some()),
            ("hostDisk", self.host_disk.is_some()),
            ("cloudInitNoCloud", self.cloud_init_no_cloud.is_some()),
            ("cloudInitConfigDrive", self.cloud_init_config_drive.is_some()),
            ("configMap", self.config_map.is_some()),
            ("secret", self.secret.is_some()),
            ("downwardAPI", self.downward_api.is_some()),
        ];
        named.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect()
    }

    /// Returns the data for cloud-init, if this is such a volume.
    pub fn cloud_init(&self) -> Option<(&'static str, &CloudInit)> {
        let no_cloud = self.cloud_init_no_cloud.as_ref().map(|data| ("cloudInitNoCloud", data));
        no_cloud.or(self.cloud_init_config_drive.as_ref().map(|data| ("cloudInitConfigDrive", data)))
    }
}
