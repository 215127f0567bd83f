//! Implements `nacelle image`: loads, pulls, lists, verifies and removes images, through the daemon if it runs, otherwise in the store
//! itself.

use super::table::format_table;
use super::{status_error, try_connect};
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
use serde_json::{Value, json};
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
    /// Reads all files of images and compares their digests. Fails if damage was found and not repaired.
    Verify {
        /// The names or ids of the images [default: all].
        images: Vec<String>,
        /// Pulls damaged images again, by digest and without credentials.
        #[arg(long)]
        repair: bool,
        /// Prints JSON.
        #[arg(long)]
        json: bool,
    },
}

pub(super) fn run(config: Config, command: ImageCommand) -> anyhow::Result<ExitCode> {
    super::runtime()?.block_on(async {
        match try_connect(&config.paths.socket).await {
            Some(channel) => run_through_daemon(channel, command).await,
            None => run_in_store(&config, command).await,
        }
    })
}

async fn run_through_daemon(channel: Channel, command: ImageCommand) -> anyhow::Result<ExitCode> {
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
        ImageCommand::Verify { images, repair, json } => {
            let request = node::VerifyImagesRequest { images, repair };
            // The response of a store with damage everywhere is larger than the default limit.
            let mut client = NodeClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT);
            let report = client.verify_images(request).await.map_err(status_error)?.into_inner();
            return Ok(print_verification(&report, json));
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn run_in_store(config: &Config, command: ImageCommand) -> anyhow::Result<ExitCode> {
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
        ImageCommand::Verify { images, repair, json } => {
            let report = verification(store.verify(&images, repair).await?);
            return Ok(print_verification(&report, json));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the result of a verification, and returns the exit code.
fn print_verification(report: &node::VerifyImagesResponse, json: bool) -> ExitCode {
    if json {
        println!("{:#}", verification_json(report));
    } else {
        print!("{}", format_verification(report));
    }
    match report.damaged.iter().all(|damage| damage.repaired) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn verification_json(report: &node::VerifyImagesResponse) -> Value {
    let damaged = report.damaged.iter().map(|damage| {
        json!({
            "image": damage.image, "names": damage.names, "file": damage.path, "damage": damage.damage,
            "repaired": damage.repaired, "repairError": damage.repair_error,
        })
    });
    let damaged: Vec<Value> = damaged.collect();
    json!({ "images": report.images, "files": report.files, "bytes": report.bytes, "damaged": damaged })
}

/// Returns a table of the damaged files, unless there are none, and a summary.
fn format_verification(report: &node::VerifyImagesResponse) -> String {
    let mut text = String::new();
    if !report.damaged.is_empty() {
        let mut rows = vec![["IMAGE", "FILE", "DAMAGE", "STATE"].map(str::to_owned)];
        rows.extend(report.damaged.iter().map(|damage| {
            let state = match (damage.repaired, damage.repair_error.as_str()) {
                (true, _) => "repaired".to_owned(),
                (false, "") => "damaged".to_owned(),
                (false, why) => format!("not repaired: {why}"),
            };
            let image = damage.names.first().unwrap_or(&damage.image).clone();
            [image, damage.path.clone(), damage.damage.clone(), state]
        }));
        text += &format_table(&rows);
        text.push('\n');
    }
    let repaired = report.damaged.iter().filter(|damage| damage.repaired).count();
    text += &format!("{} images, {} files, {} MiB read: ", report.images, report.files, report.bytes >> 20);
    text += &match (report.damaged.len(), repaired) {
        (0, _) => "no damage\n".to_owned(),
        (damaged, repaired) => format!("{damaged} damaged, {repaired} of them repaired\n"),
    };
    text
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

#[cfg(test)]
mod tests {
    use super::*;

    fn damage(image: &str, repaired: bool, repair_error: &str) -> node::ImageDamage {
        let names = vec![format!("r.test/{image}:1")];
        let (path, damage) = (format!("/images/layers/{image}.blob"), "is missing".to_owned());
        node::ImageDamage { image: image.into(), names, path, damage, repaired, repair_error: repair_error.into() }
    }

    #[test]
    fn a_verification_is_a_table_and_a_summary() {
        let mut report = node::VerifyImagesResponse { images: 2, files: 9, bytes: 5 << 20, damaged: vec![] };
        assert_eq!(format_verification(&report), "2 images, 9 files, 5 MiB read: no damage\n");
        assert_eq!(print_verification(&report, false), ExitCode::SUCCESS);
        report.damaged = vec![damage("a", true, "")];
        assert_eq!(print_verification(&report, true), ExitCode::SUCCESS);
        report.damaged.extend([damage("bb", false, "no registry"), damage("c", false, "")]);
        assert_eq!(print_verification(&report, false), ExitCode::FAILURE);
        let expected = "\
IMAGE        FILE                    DAMAGE      STATE
r.test/a:1   /images/layers/a.blob   is missing  repaired
r.test/bb:1  /images/layers/bb.blob  is missing  not repaired: no registry
r.test/c:1   /images/layers/c.blob   is missing  damaged

2 images, 9 files, 5 MiB read: 3 damaged, 1 of them repaired
";
        assert_eq!(format_verification(&report), expected);
        let value = verification_json(&report);
        assert_eq!(
            (&value["damaged"][1]["repairError"], &value["damaged"][0]["repaired"]),
            (&json!("no registry"), &json!(true))
        );
    }
}
