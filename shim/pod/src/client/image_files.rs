//! Opens the files of a container's images, for the daemon. The pod process receives the descriptors only, so that it reads no other
//! image of the node.

use super::{ClientError, Offer, PodClient};
use crate::images::{MAX_EXTENTS, PlacementError, images_of};
use nacelle_base::Classify;
use nacelle_base::files::{FileError, at};
use nacelle_base::task::run_blocking_or_panic;
use nacelle_proto::pod as proto;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

impl PodClient {
    /// Opens the files of the images of a container that will be created, and sends them to the pod process. It keeps them until the
    /// container is created. Returns an offer for each image; dropping it withdraws the files.
    pub(super) async fn offer_images(
        &self,
        request: &proto::CreateContainerRequest,
    ) -> Result<Vec<Offer>, ClientError> {
        let images = images_of(request).map(|(key, extents)| (key.to_owned(), extents.to_owned()));
        let images: Vec<_> = images.collect();
        if let Some((key, extents)) = images.iter().find(|(_, extents)| extents.len() > MAX_EXTENTS) {
            let extents = extents.len();
            let error = PlacementError::Extents { key: key.clone(), extents };
            return Err(ClientError::Rejected { kind: error.kind(), message: error.to_string() });
        }
        let open = move || {
            let open = |(key, extents): (String, Vec<proto::Extent>)| Ok((key, open_files(&extents)?));
            images.into_iter().map(open).collect::<Result<Vec<_>, FileError>>()
        };
        let mut offers = Vec::new();
        for (key, files) in run_blocking_or_panic(open).await? {
            offers.push(self.offer_image(&request.id, &key, &files).await?);
        }
        Ok(offers)
    }
}

/// Opens the file of each extent for reading. Blocks.
fn open_files(extents: &[proto::Extent]) -> Result<Vec<OwnedFd>, FileError> {
    let open = |extent: &proto::Extent| {
        let path = Path::new(&extent.path);
        Ok(File::open(path).map_err(at("open", path))?.into())
    };
    extents.iter().map(open).collect()
}
