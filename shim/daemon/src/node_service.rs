//! Implements the service with which the node's commands ask the daemon for what CRI does not cover.

use crate::cri::status::{refuse, status};
use crate::lifecycle::Node;
use nacelle_base::FailureKind;
use nacelle_image::Reference;
use nacelle_proto::node;
use std::path::Path;
use tonic::{Request, Response, Status};

/// The service on one node.
pub(crate) struct NodeService {
    node: Node,
}

impl NodeService {
    pub(crate) fn new(node: Node) -> NodeService {
        NodeService { node }
    }
}

#[tonic::async_trait]
impl node::node_server::Node for NodeService {
    async fn load_images(
        &self,
        request: Request<node::LoadImagesRequest>,
    ) -> Result<Response<node::LoadImagesResponse>, Status> {
        let request = request.into_inner();
        let path = Path::new(&request.path);
        if !path.is_absolute() {
            return Err(refuse(
                FailureKind::Invalid,
                &format!("path is {:?}: an absolute path is needed", request.path),
            ));
        }
        let name = match request.name.as_str() {
            "" => None,
            name => Some(Reference::parse(name).map_err(status)?),
        };
        let loaded = self.node.services().images.load(path, name.as_ref()).await.map_err(status)?;
        let images = loaded
            .into_iter()
            .map(|image| node::LoadedImage { id: image.id.to_string(), names: image.names })
            .collect();
        Ok(Response::new(node::LoadImagesResponse { images }))
    }
}
