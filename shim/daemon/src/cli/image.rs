//! Implements `nacelle image`: loads, pulls, lists, verifies and removes images, through the daemon if it runs, otherwise in the store
//! itself.

pub(super) mod views;

use super::ExitStatus;
use super::daemon::{status_error, try_connect};
use super::exit::CommandError;
use super::output::OutputArgument;
use super::progress::{OperationProgress, with_progress};
use crate::config::Config;
use crate::node_service::verification;
use crate::server::MESSAGE_LIMIT;
use anyhow::Context;
use clap::Subcommand;
use nacelle_base::task::run_blocking;
use nacelle_image::{ImageStore, Reference};
use nacelle_proto::cri::image_service_client::ImageServiceClient;
use nacelle_proto::node::node_client::NodeClient;
use nacelle_proto::{cri, node};
use std::collections::HashSet;
use std::path::PathBuf;
use tonic::transport::Channel;
pub(super) use views::ImageView;
use views::{LoadedView, PulledView, VerificationView};

#[derive(Subcommand)]
pub(super) enum ImageCommand {
    /// Loads images from an OCI layout (directory or archive) or a docker archive.
    Load {
        /// The directory or archive.
        archive: PathBuf,
        /// The name of the image, if the archive contains only one.
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Pulls an image from its registry.
    Pull {
        /// The name of the image.
        image: String,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Lists images.
    #[command(alias = "list")]
    Ls {
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Removes images with all their names. Fails for names that do not exist, after it has removed the others.
    #[command(aliases = ["delete", "remove"])]
    Rm {
        /// The names or ids of the images.
        #[arg(required = true)]
        images: Vec<String>,
    },
    /// Reads all files of images and compares their digests. Fails if damage was found and not repaired.
    Verify {
        /// The names or ids of the images [default: all].
        images: Vec<String>,
        /// Pulls damaged images again, by digest and without credentials.
        #[arg(long)]
        repair: bool,
        #[command(flatten)]
        output: OutputArgument,
    },
}

pub(super) fn run(config: Config, command: ImageCommand) -> anyhow::Result<ExitStatus> {
    super::runtime()?.block_on(async {
        match try_connect(&config.paths.socket).await? {
            Some(channel) => run_through_daemon(channel, command).await,
            None => run_in_store(&config, command).await,
        }
    })
}

async fn run_through_daemon(channel: Channel, command: ImageCommand) -> anyhow::Result<ExitStatus> {
    let mut images = ImageServiceClient::new(channel.clone());
    let spec = |image: String| Some(cri::ImageSpec { image, ..Default::default() });
    match command {
        ImageCommand::Load { archive, name, output } => {
            let path = archive.canonicalize().with_context(|| format!("cannot find archive {}", archive.display()))?;
            let path = path.to_str().context("cannot load the archive: its path is not UTF-8")?.to_owned();
            let request = node::LoadImagesRequest { path: path.clone(), name: name.unwrap_or_default() };
            let mut client = NodeClient::new(channel.clone());
            let loading = client.load_images(request);
            let loaded = with_progress(loading, async || ask_for_progress(&channel, &path).await).await;
            let loaded = loaded.map_err(status_error)?.into_inner();
            let views = loaded.images.into_iter().map(|image| LoadedView { id: image.id, names: image.names });
            output.print(&views.collect::<Vec<_>>())?;
        }
        ImageCommand::Pull { image, output } => {
            let name = Reference::parse(&image).map(|reference| reference.to_string()).unwrap_or_default();
            let request = cri::PullImageRequest { image: spec(image), ..Default::default() };
            let pulling = images.pull_image(request);
            let pulled = with_progress(pulling, async || ask_for_progress(&channel, &name).await).await;
            let id = pulled.map_err(status_error)?.into_inner().image_ref;
            output.print(&PulledView { id })?;
        }
        ImageCommand::Ls { output } => output.print(&list(channel).await?)?,
        ImageCommand::Rm { images: names } => {
            let mut missing = Vec::new();
            for name in names {
                // CRI's RemoveImage succeeds for an image that does not exist, and its ImageStatus hides damaged images.
                let before = list(channel.clone()).await?;
                let request = cri::RemoveImageRequest { image: spec(name.clone()) };
                images.remove_image(request).await.map_err(status_error)?;
                if list(channel.clone()).await? == before {
                    missing.push(name);
                }
            }
            return report_missing(&missing);
        }
        ImageCommand::Verify { images, repair, output } => {
            let request = node::VerifyImagesRequest { images, repair };
            // The response of a store with damage everywhere is larger than the default limit.
            let mut client = NodeClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT);
            let report = client.verify_images(request).await.map_err(status_error)?.into_inner();
            return VerificationView::new(report).print(output);
        }
    }
    Ok(ExitStatus::Success)
}

/// Returns the progress of the daemon's pull or load of this name, if there is one. A daemon of an earlier version does not say.
async fn ask_for_progress(channel: &Channel, name: &str) -> Option<OperationProgress> {
    let asked = NodeClient::new(channel.clone()).list_installations(node::ListInstallationsRequest {}).await;
    let found = asked.ok()?.into_inner().installations.into_iter().find(|found| found.name == name)?;
    Some(installation_progress(found.finished_layers, found.layers, found.bytes, found.total_bytes))
}

/// Returns the progress of the only pull or load of this process.
fn own_progress(store: &ImageStore) -> Option<OperationProgress> {
    let found = store.installations().into_iter().next()?;
    Some(installation_progress(found.finished_layers, found.layers, found.bytes, found.total_bytes))
}

fn installation_progress(finished_layers: u64, layers: u64, bytes: u64, total_bytes: u64) -> OperationProgress {
    let step = match layers {
        0 => "finding the missing layers".to_owned(),
        _ if finished_layers == layers => "completing".to_owned(),
        _ => format!("{finished_layers} of {layers} layers"),
    };
    OperationProgress { step, bytes, total_bytes }
}

/// Lists the daemon's images.
pub(super) async fn list(channel: Channel) -> anyhow::Result<Vec<ImageView>> {
    let mut images = ImageServiceClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT);
    let listed = images.list_images(cri::ListImagesRequest::default()).await.map_err(status_error)?.into_inner();
    Ok(listed.images.into_iter().map(ImageView::from).collect())
}

async fn run_in_store(config: &Config, command: ImageCommand) -> anyhow::Result<ExitStatus> {
    let unpack = crate::program::unpack_program().context("cannot find the path of this program")?;
    let (directory, options) = (config.paths.images(), config.image_options(&unpack));
    let store = run_blocking("open the image store", move || {
        std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        anyhow::Ok(ImageStore::open(&directory, options)?)
    });
    let store = store.await??;
    match command {
        ImageCommand::Load { archive, name, output } => {
            let name = name.map(|name| Reference::parse(&name)).transpose()?;
            let loaded = with_progress(store.load(&archive, name.as_ref()), async || own_progress(&store)).await?;
            let views = loaded.into_iter().map(|image| LoadedView { id: image.id.to_string(), names: image.names });
            output.print(&views.collect::<Vec<_>>())?;
        }
        ImageCommand::Pull { image, output } => {
            let reference = Reference::parse(&image)?;
            let id = with_progress(store.pull(&reference, None), async || own_progress(&store)).await?.to_string();
            output.print(&PulledView { id })?;
        }
        ImageCommand::Ls { output } => {
            output.print(&store.list().into_iter().map(ImageView::from).collect::<Vec<_>>())?;
        }
        ImageCommand::Rm { images } => {
            // Only the daemon knows which images containers use, so no file is deleted before it runs.
            let in_use: HashSet<_> = store.list().into_iter().map(|image| image.id).collect();
            let mut missing = Vec::new();
            for name in images {
                let before = store.list();
                store.remove(&name, &in_use).await?;
                if store.list() == before {
                    missing.push(name);
                }
            }
            return report_missing(&missing);
        }
        ImageCommand::Verify { images, repair, output } => {
            return VerificationView::new(verification(store.verify(&images, repair).await?)).print(output);
        }
    }
    Ok(ExitStatus::Success)
}

/// Reports images that did not exist.
fn report_missing(missing: &[String]) -> anyhow::Result<ExitStatus> {
    match missing {
        [] => Ok(ExitStatus::Success),
        [name] => Err(CommandError::NotFound { kind: "image", name: name.clone() }.into()),
        names => Err(CommandError::NotFound { kind: "each of the images", name: names.join(", ") }.into()),
    }
}
