//! Implements `nacelle image`: loads, pulls, lists and removes images, through the daemon if it runs, otherwise in the store
//! itself.

use super::{status_error, try_connect};
use crate::config::Config;
use anyhow::Context;
use clap::Subcommand;
use nacelle_base::task::run_blocking;
use nacelle_image::{ImageStore, Reference};
use nacelle_proto::cri::image_service_client::ImageServiceClient;
use nacelle_proto::node::node_client::NodeClient;
use nacelle_proto::{cri, node};
use std::collections::HashSet;
use std::path::PathBuf;
use std::process::ExitCode;
use tonic::transport::Channel;

#[derive(Subcommand)]
pub(super) enum ImageCommand {
    /// Loads images from an OCI layout (directory or archive) or a docker archive.
    Load {
        /// The directory or archive.
        archive: PathBuf,
        /// The name of the image, if the archive contains only one.
        #[arg(long)]
        name: Option<String>,
    },
    /// Pulls an image from its registry.
    Pull {
        /// The name of the image.
        image: String,
    },
    /// Lists images.
    Ls,
    /// Removes images with all their names.
    Rm {
        /// The names or ids of the images.
        #[arg(required = true)]
        images: Vec<String>,
    },
}

pub(super) fn run(config: Config, command: ImageCommand) -> anyhow::Result<ExitCode> {
    super::runtime()?.block_on(async {
        match try_connect(&config.paths.socket).await {
            Some(channel) => run_through_daemon(channel, command).await,
            None => run_in_store(&config, command).await,
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn run_through_daemon(channel: Channel, command: ImageCommand) -> anyhow::Result<()> {
    let mut images = ImageServiceClient::new(channel.clone());
    let spec = |image: String| Some(cri::ImageSpec { image, ..Default::default() });
    match command {
        ImageCommand::Load { archive, name } => {
            let path = archive.canonicalize().with_context(|| format!("cannot find archive {}", archive.display()))?;
            let path = path.to_str().context("cannot load the archive: its path is not UTF-8")?.to_owned();
            let request = node::LoadImagesRequest { path, name: name.unwrap_or_default() };
            let loaded = NodeClient::new(channel).load_images(request).await.map_err(status_error)?;
            for image in loaded.into_inner().images {
                print_loaded(&image.id, &image.names);
            }
        }
        ImageCommand::Pull { image } => {
            let request = cri::PullImageRequest { image: spec(image), ..Default::default() };
            println!("{}", images.pull_image(request).await.map_err(status_error)?.into_inner().image_ref);
        }
        ImageCommand::Ls => {
            let listed = images.list_images(cri::ListImagesRequest::default()).await.map_err(status_error)?;
            for image in listed.into_inner().images {
                print_image(&image.id, image.size, &image.repo_tags, &image.repo_digests);
            }
        }
        ImageCommand::Rm { images: names } => {
            for name in names {
                let request = cri::RemoveImageRequest { image: spec(name) };
                images.remove_image(request).await.map_err(status_error)?;
            }
        }
    }
    Ok(())
}

async fn run_in_store(config: &Config, command: ImageCommand) -> anyhow::Result<()> {
    let unpack = crate::program::unpack_program().context("cannot find the path of this program")?;
    let (directory, options) = (config.paths.images(), config.image_options(&unpack));
    let store = run_blocking("open the image store", move || {
        std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        anyhow::Ok(ImageStore::open(&directory, options)?)
    });
    let store = store.await??;
    match command {
        ImageCommand::Load { archive, name } => {
            let name = name.map(|name| Reference::parse(&name)).transpose()?;
            for image in store.load(&archive, name.as_ref()).await? {
                print_loaded(&image.id.to_string(), &image.names);
            }
        }
        ImageCommand::Pull { image } => println!("{}", store.pull(&Reference::parse(&image)?, None).await?),
        ImageCommand::Ls => {
            for image in store.list() {
                print_image(&image.id.to_string(), image.size, &image.repo_tags, &image.repo_digests);
            }
        }
        ImageCommand::Rm { images } => {
            // Only the daemon knows which images containers use, so no file is deleted before it runs.
            let in_use: HashSet<_> = store.list().into_iter().map(|image| image.id).collect();
            for name in images {
                store.remove(&name, &in_use).await?;
            }
        }
    }
    Ok(())
}

fn print_loaded(id: &str, names: &[String]) {
    match names {
        [] => println!("{id}"),
        names => names.iter().for_each(|name| println!("{name} {id}")),
    }
}

fn print_image(id: &str, size: u64, tags: &[String], digests: &[String]) {
    let names = if tags.is_empty() { digests } else { tags };
    println!("{} {:>8} KiB  {}", id.get(..19).unwrap_or(id), size >> 10, names.join(" "));
}
