//! Locates the disks of a machine, in its container's image or on the node, and builds the machine's document.

use super::container::UnsupportedContainerField;
use super::passthrough::PassthroughError;
use super::volume_error::VolumeError;
use super::volumes::{image_volume_path, image_with_disk};
use nacelle_base::{Classify, FailureKind};
use nacelle_image::{ImageError, ImageStore};
use nacelle_model::machine::{DiskSource, INITRD_SOURCE_KEY, KERNEL_SOURCE_KEY, MachineDocument};
use nacelle_model::machine_pod::{MachinePod, RequestedDiskSource};
use nacelle_model::record::ContainerRecord;
use std::collections::BTreeMap;

/// The directory of disks in an image.
const DISK_DIRECTORY: &str = "disk";

/// Why a disk cannot be located.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The image cannot be read.
    #[error("cannot read the image of disk {disk}")]
    Image {
        /// The disk's name.
        disk: String,
        /// The cause.
        source: ImageError,
    },
    /// The available image is not the requested one.
    #[error(
        "cannot take disk {disk} from image {requested:?}: {available} is another one; name the same image in both, or give the \
         container an image volume of it at {at}"
    )]
    OtherImage {
        /// The disk's name.
        disk: String,
        /// The image in the specification.
        requested: String,
        /// The available image: "the container's image".
        available: &'static str,
        /// The path at which an image volume would be used.
        at: String,
    },
    /// The image does not contain the disk.
    #[error("disk {disk}: {rule}")]
    NotInImage {
        /// The disk's name.
        disk: String,
        /// The expected file.
        rule: &'static str,
    },
    /// The container lacks a suitable volume.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The container has a setting that only containers support.
    #[error(transparent)]
    Container(#[from] UnsupportedContainerField),
    /// A PCI device of the node is not available.
    #[error(transparent)]
    Passthrough(#[from] PassthroughError),
    /// The document cannot be serialized.
    #[error("cannot serialize the document of the machine")]
    Document(#[from] serde_json::Error),
}

impl Classify for SourceError {
    fn kind(&self) -> FailureKind {
        match self {
            SourceError::Image { source, .. } => source.kind(),
            SourceError::Volume(error) => error.kind(),
            SourceError::Container(error) => error.kind(),
            SourceError::Passthrough(error) => error.kind(),
            SourceError::Document(_) => FailureKind::Internal,
            SourceError::OtherImage { .. } | SourceError::NotInImage { .. } => FailureKind::Invalid,
        }
    }
}

/// Returns the document of the machine in this container. `node_sources` holds the disks from its volumes, by name.
pub async fn build_document(
    machine: &MachinePod,
    container: &ContainerRecord,
    store: &ImageStore,
    node_sources: BTreeMap<String, DiskSource>,
) -> Result<Vec<u8>, SourceError> {
    let mut found = node_sources;
    let kernel = machine.kernel.iter().map(|kernel| (KERNEL_SOURCE_KEY, &kernel.kernel));
    let initrd = machine.kernel.iter().filter_map(|kernel| Some((INITRD_SOURCE_KEY, kernel.initrd.as_ref()?)));
    let disks = machine.disks.iter().map(|disk| (disk.name.as_str(), &disk.source));
    for (name, source) in kernel.chain(initrd).chain(disks) {
        if let RequestedDiskSource::Image { image, path } = source {
            found.insert(name.to_owned(), locate_in_image(name, image, path, container, store).await?);
        }
    }
    let mut document: MachineDocument = machine.with(|name, source| match source {
        RequestedDiskSource::Empty { bytes } => Ok(DiskSource::Empty { bytes: *bytes }),
        RequestedDiskSource::CloudInit(data) => Ok(DiskSource::CloudInit(data.clone())),
        _ => found
            .remove(name)
            .ok_or(SourceError::NotInImage { disk: name.to_owned(), rule: "another disk has the same name" }),
    })?;
    if let Some(pins) = &mut document.processors.pins {
        *pins = super::container::pinned_cpus(machine, &container.config)?;
    }
    Ok(serde_json::to_vec(&document)?)
}

async fn locate_in_image(
    disk: &str,
    requested: &str,
    path: &str,
    container: &ContainerRecord,
    store: &ImageStore,
) -> Result<DiskSource, SourceError> {
    let own = &container.image;
    let image = image_with_disk(disk, &container.config, &container.volumes, own);
    let failed = |source| SourceError::Image { disk: disk.to_owned(), source };
    let not_in_image = |rule| SourceError::NotInImage { disk: disk.to_owned(), rule };
    if store.status(requested).map_err(failed)?.is_none_or(|known| known.id != image.id) {
        let available = if image.id == own.id { "the container's image" } else { "that of its image volume" };
        let at = image_volume_path(disk).display().to_string();
        return Err(SourceError::OtherImage { disk: disk.to_owned(), requested: requested.to_owned(), available, at });
    }
    let (directory, name) = match path.trim_matches('/').rsplit_once('/') {
        Some((directory, name)) => (directory, Some(name)),
        None if path.is_empty() => (DISK_DIRECTORY, None),
        None => ("", Some(path.trim_matches('/'))),
    };
    let files = store.list_files(&image.id, directory).await.map_err(failed)?;
    let files = files.ok_or_else(|| not_in_image("the image has no such directory; disks of images are in /disk"))?;
    let file = match name {
        Some(name) => {
            files.iter().find(|file| file.name == name).ok_or_else(|| not_in_image("the image has no such file"))?
        }
        None => match files.as_slice() {
            [file] => file,
            [] => return Err(not_in_image("the image has no file in /disk")),
            _ => return Err(not_in_image("the image has several files in /disk: set path")),
        },
    };
    let (path, offset) = file.extent_start.clone().ok_or_else(|| {
        not_in_image(
            "the file is sparse in the image's layer, and cannot be read as one piece: store it without holes, or as qcow2",
        )
    })?;
    // The file system fills the last block of a file with zeros.
    Ok(DiskSource::Image { image: image.id.to_string(), file: path, offset, length: file.size.next_multiple_of(512) })
}
