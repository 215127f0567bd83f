//! Implements the service with which the node's commands ask the daemon for what CRI does not cover.

use crate::cri::status::{refuse, status};
use crate::guest_shell::{self, ShellEvents};
use crate::lifecycle::Node;
use crate::lifecycle::template::{TemplateEntry, TemplateKey, TemplateState};
use crate::log::{LogControl, LogFilter};
use nacelle_base::{Chain, FailureKind};
use nacelle_image::{ImageVerification, Installation, Reference};
use nacelle_proto::node;
use std::path::Path;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// The service on one node.
pub(crate) struct NodeService {
    node: Node,
    log: LogControl,
}

impl NodeService {
    pub(crate) fn new(node: Node, log: LogControl) -> NodeService {
        NodeService { node, log }
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

    async fn list_installations(
        &self,
        _: Request<node::ListInstallationsRequest>,
    ) -> Result<Response<node::ListInstallationsResponse>, Status> {
        let installations = self.node.services().images.installations().into_iter().map(|found| {
            let Installation { name, layers, finished_layers, total_bytes, bytes } = found;
            node::Installation { name, layers, finished_layers, total_bytes, bytes }
        });
        Ok(Response::new(node::ListInstallationsResponse { installations: installations.collect() }))
    }

    async fn verify_images(
        &self,
        request: Request<node::VerifyImagesRequest>,
    ) -> Result<Response<node::VerifyImagesResponse>, Status> {
        let node::VerifyImagesRequest { images, repair } = request.into_inner();
        let report = self.node.services().images.verify(&images, repair).await.map_err(status)?;
        Ok(Response::new(verification(report)))
    }

    async fn list_templates(
        &self,
        _: Request<node::ListTemplatesRequest>,
    ) -> Result<Response<node::ListTemplatesResponse>, Status> {
        Ok(Response::new(self.node.templates().look(|catalogue| node::ListTemplatesResponse {
            templates: catalogue.entries().map(|(key, entry)| template(key, entry)).collect(),
            hits: catalogue.hits,
            misses: catalogue.misses.iter().map(|(reason, count)| (reason.to_string(), *count)).collect(),
        })))
    }

    async fn build_templates(
        &self,
        request: Request<node::BuildTemplatesRequest>,
    ) -> Result<Response<node::BuildTemplatesResponse>, Status> {
        let handler = request.into_inner().handler;
        if !handler.is_empty() && !self.node.services().config.handlers.contains_key(&handler) {
            return Err(refuse(FailureKind::NotFound, &format!("there is no handler {handler:?}")));
        }
        let only = Some(handler.as_str()).filter(|handler| !handler.is_empty());
        let built = self.node.build_templates_now(only).await.map_err(status)?;
        if built.is_empty() {
            let why = "only VMs of engine kvm without huge pages have templates, and with sandbox.templates = \"namespace\" they are built \
                       after a pod";
            return Err(refuse(FailureKind::Conflict, &format!("there is no template to build: {why}")));
        }
        let keys = built.into_iter().map(|(key, state)| match state {
            Some(TemplateState::Ready { .. }) => Ok(key.to_string()),
            Some(TemplateState::Failed { why, .. }) => {
                Err(refuse(FailureKind::Conflict, &format!("template {key} cannot be built: {why}")))
            }
            _ => Err(refuse(FailureKind::Conflict, &format!("template {key} was dropped, or too many are wanted"))),
        });
        Ok(Response::new(node::BuildTemplatesResponse { keys: keys.collect::<Result<_, _>>()? }))
    }

    async fn drop_templates(
        &self,
        request: Request<node::DropTemplatesRequest>,
    ) -> Result<Response<node::DropTemplatesResponse>, Status> {
        let key = request.into_inner().key;
        let templates = self.node.templates();
        let named = match key.as_str() {
            "" => templates.look(|catalogue| catalogue.entries().map(|(key, _)| key.clone()).collect()),
            text => vec![TemplateKey::parse(text).ok_or_else(|| {
                refuse(FailureKind::Invalid, &format!("key is {text:?}: 16 hexadecimal digits are needed"))
            })?],
        };
        let mut keys = Vec::new();
        for named in named {
            if templates.drop_template(&named).await {
                keys.push(named.to_string());
            }
        }
        if keys.is_empty() && !key.is_empty() {
            return Err(refuse(FailureKind::NotFound, &format!("there is no template {key}")));
        }
        Ok(Response::new(node::DropTemplatesResponse { keys }))
    }

    async fn set_log_filter(
        &self,
        request: Request<node::SetLogFilterRequest>,
    ) -> Result<Response<node::SetLogFilterResponse>, Status> {
        let text = request.into_inner().filter;
        if !text.is_empty() {
            let filter: LogFilter =
                text.parse().map_err(|invalid| refuse(FailureKind::Invalid, &Chain(&invalid).to_string()))?;
            self.log.set(filter);
            tracing::info!(filter = text, "the log filter was changed");
        }
        Ok(Response::new(node::SetLogFilterResponse { filter: self.log.filter().to_string() }))
    }

    type OpenGuestShellStream = ReceiverStream<ShellEvents>;

    async fn open_guest_shell(
        &self,
        request: Request<Streaming<node::GuestShellRequest>>,
    ) -> Result<Response<Self::OpenGuestShellStream>, Status> {
        let events = guest_shell::open(&self.node, request.into_inner()).await?;
        Ok(Response::new(ReceiverStream::new(events)))
    }
}

/// Returns the result of a verification as a message. `nacelle image verify` uses it without a daemon, too.
pub(crate) fn verification(report: ImageVerification) -> node::VerifyImagesResponse {
    let damaged = report.damaged.into_iter().map(|damage| node::ImageDamage {
        image: damage.image,
        names: damage.names,
        path: damage.path.display().to_string(),
        damage: damage.damage.to_string(),
        repaired: damage.repaired,
        repair_error: damage.repair_error.unwrap_or_default(),
    });
    let damaged = damaged.collect();
    let (images, files, bytes, verity_files) = (report.images, report.files, report.bytes, report.verity_files);
    node::VerifyImagesResponse { images, files, bytes, damaged, verity_files }
}

fn template(key: &TemplateKey, entry: &TemplateEntry) -> node::Template {
    let shape = &entry.content.shape;
    let (state, bytes) = match &entry.state {
        TemplateState::Wanted => ("wanted".to_owned(), 0),
        TemplateState::Building => ("building".to_owned(), 0),
        TemplateState::Ready { bytes } => ("ready".to_owned(), *bytes),
        TemplateState::Failed { why, .. } => (format!("failed: {why}"), 0),
    };
    node::Template {
        key: key.to_string(),
        state,
        vcpus: shape.vcpus,
        max_vcpus: shape.max_vcpus,
        memory_mib: shape.memory_mib,
        namespace: entry.content.namespace.clone().unwrap_or_default(),
        kernel: shape.kernel.display().to_string(),
        kernel_args: shape.kernel_args.clone(),
        bytes,
        uses: entry.uses,
    }
}
