//! Defines the volumes of disks and file systems, and the networks of interfaces. The doc comments of the fields are descriptions
//! in the OpenAPI schema.

use super::{Empty, document, words};
use crate::Quantity;

document! {
    /// A volume: its name and one source.
    pub struct Volume {
        /// Its name.
        pub name: String,
        /// A disk in an image.
        pub container_disk: Option<ContainerDisk>,
        /// A claim of the pod's namespace, which the pod must have as a volume.
        pub persistent_volume_claim: Option<Claim>,
        /// An empty disk that goes with the machine.
        pub empty_disk: Option<EmptyDisk>,
        /// A disk in a file of the node.
        pub host_disk: Option<HostDisk>,
        /// A disk for cloud-init, in the form of NoCloud.
        pub cloud_init_no_cloud: Option<CloudInit>,
        /// A disk for cloud-init, in the form of a config drive.
        pub cloud_init_config_drive: Option<CloudInit>,
        /// A disk with the files of a ConfigMap, which the pod must have as a volume.
        pub config_map: Option<ConfigMap>,
        /// A disk with the files of a Secret, which the pod must have as a volume.
        pub secret: Option<Secret>,
        /// A disk with what the pod knows of itself.
        #[serde(rename = "downwardAPI")]
        pub downward_api: Option<DownwardApi>,
    }

    /// A disk in an image.
    pub struct ContainerDisk {
        /// The image.
        pub image: String,
        /// The disk's path in it; the only file of `/disk` if it is missing.
        pub path: String,
    }

    /// A claim.
    pub struct Claim {
        /// Its name.
        pub claim_name: String,
        /// The guest cannot write.
        pub read_only: Option<bool>,
    }

    /// An empty disk.
    pub struct EmptyDisk {
        /// Its size.
        pub capacity: Option<Quantity>,
    }

    /// A disk in a file of the node.
    pub struct HostDisk {
        /// The file.
        pub path: String,
        /// Whether it is made where it is missing.
        #[serde(rename = "type")]
        pub kind: Option<HostDiskKind>,
        /// The size of one that is made.
        pub capacity: Option<Quantity>,
    }

    /// What cloud-init reads.
    pub struct CloudInit {
        /// User data.
        pub user_data: String,
        /// User data in base64.
        #[serde(rename = "userDataBase64")]
        pub user_data_base64: String,
        /// A secret with user data, which the pod must have as a volume.
        pub secret_ref: Option<LocalReference>,
        /// Network data.
        pub network_data: String,
        /// Network data in base64.
        #[serde(rename = "networkDataBase64")]
        pub network_data_base64: String,
        /// A secret with network data, which the pod must have as a volume.
        pub network_data_secret_ref: Option<LocalReference>,
    }

    /// Something of the pod's namespace.
    pub struct LocalReference {
        /// Its name.
        pub name: String,
    }

    /// A ConfigMap.
    pub struct ConfigMap {
        /// Its name.
        pub name: String,
        /// It may be missing.
        pub optional: Option<bool>,
        /// The disk's label.
        pub volume_label: String,
    }

    /// A Secret.
    pub struct Secret {
        /// Its name.
        pub secret_name: String,
        /// It may be missing.
        pub optional: Option<bool>,
        /// The disk's label.
        pub volume_label: String,
    }

    /// What the pod knows of itself.
    pub struct DownwardApi {
        /// Files.
        pub fields: Vec<DownwardFile>,
        /// The disk's label.
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
        /// Its path.
        pub field_path: String,
    }

    /// A network: its name and one source.
    pub struct Network {
        /// Its name.
        pub name: String,
        /// The pod's own.
        pub pod: Option<Empty>,
        /// A further one of the pod, by Multus.
        pub multus: Option<Multus>,
    }

    /// A network by Multus.
    pub struct Multus {
        /// The NetworkAttachmentDefinition: NAME or NAMESPACE/NAME.
        pub network_name: String,
        /// It takes the place of the cluster's own.
        pub default: Option<bool>,
    }
}

words! {
    /// Whether a disk is made where it is missing.
    pub enum HostDiskKind {
        Disk = "Disk",
        DiskOrCreate = "DiskOrCreate",
    }
}

impl Volume {
    /// The sources that it names, by their fields.
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

    /// What cloud-init reads, if it is that.
    pub fn cloud_init(&self) -> Option<(&'static str, &CloudInit)> {
        let no_cloud = self.cloud_init_no_cloud.as_ref().map(|data| ("cloudInitNoCloud", data));
        no_cloud.or(self.cloud_init_config_drive.as_ref().map(|data| ("cloudInitConfigDrive", data)))
    }
}
