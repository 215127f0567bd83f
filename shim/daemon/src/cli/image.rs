//! Implements `nacelle image`: loads, pulls, lists and removes images, through the daemon if it runs, otherwise in the store
//! itself.

use super::{connect, told};
use crate::config::Config;
use anyhow::Context;
use clap::Subcommand;
use nacelle_base::task::run_blocking;
use nacelle_image::{Reference, Store};
use nacelle_proto::cri::image_service_client::ImageServiceClient;
use nacelle_proto::node::node_client::NodeClient;
use nacelle_proto::{cri, node};
use std::collections::HashSet;
use std::path::PathBuf;
use std::process::ExitCode;
use tonic::transport::Channel;

#[derive(Subcommand)]
pub(super) enum Image {
    /// Takes images out of an OCI layout (directory or archive) or a docker archive.
    Load {
        /// The directory or archive.
        archive: PathBuf,
        /// The image's name, if the archive holds one only.
        #[arg(long)]
        name: Option<String>,
    },
    /// Pulls an image from its registry.
    Pull {
        /// Its name.
        image: String,
    },
    /// Lists images.
    Ls,
    /// Removes images with all their names.
    Rm {
        /// Names or ids.
        #[arg(required = true)]
        images: Vec<String>,
    },
}

pub(super) fn run(config: Config, command: Image) -> anyhow::Result<ExitCode> {
    super::runtime()?.block_on(async {
        match connect(&config.paths.socket).await {
            Some(channel) => through_daemon(channel, command).await,
            None => in_store(&config, command).await,
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn through_daemon(channel: Channel, command: Image) -> anyhow::Result<()> {
    let mut images = ImageServiceClient::new(channel.clone());
    let spec = |image: String| Some(cri::ImageSpec { image, ..Default::default() });
    match command {
        Image::Load { archive, name } => {
            let path = archive.canonicalize().with_context(|| format!("cannot find {}", archive.display()))?;
            let path = path.to_str().context("the path of the archive is not UTF-8")?.to_owned();
            let request = node::LoadImagesRequest { path, name: name.unwrap_or_default() };
            let loaded = NodeClient::new(channel).load_images(request).await.map_err(told)?;
            for image in loaded.into_inner().images {
                print_loaded(&image.id, &image.names);
            }
        }
        Image::Pull { image } => {
            let request = cri::PullImageRequest { image: spec(image), ..Default::default() };
            println!("{}", images.pull_image(request).await.map_err(told)?.into_inner().image_ref);
        }
        Image::Ls => {
            let listed = images.list_images(cri::ListImagesRequest::default()).await.map_err(told)?;
            for image in listed.into_inner().images {
                print_image(&image.id, image.size, &image.repo_tags, &image.repo_digests);
            }
        }
        Image::Rm { images: names } => {
            for name in names {
                let request = cri::RemoveImageRequest { image: spec(name) };
                images.remove_image(request).await.map_err(told)?;
            }
        }
    }
    Ok(())
}

async fn in_store(config: &Config, command: Image) -> anyhow::Result<()> {
    let (directory, options) = (config.paths.images(), config.image_options());
    let store = run_blocking("open the image store", move || {
        std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        anyhow::Ok(Store::open(&directory, options)?)
    });
    let store = store.await??;
    match command {
        Image::Load { archive, name } => {
            let name = name.map(|name| Reference::parse(&name)).transpose()?;
            for image in store.load(&archive, name.as_ref()).await? {
                print_loaded(&image.id.to_string(), &image.names);
            }
        }
        Image::Pull { image } => println!("{}", store.pull(&Reference::parse(&image)?, None).await?),
        Image::Ls => {
            for image in store.list() {
                print_image(&image.id.to_string(), image.size, &image.repo_tags, &image.repo_digests);
            }
        }
        Image::Rm { images } => {
            // Only the daemon knows which images containers use. It does not run, and their files stay until it does.
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
