//! Tests that a pull gives no access to stored content that its registry would not deliver to this client.

use crate::common::server::{Asked, Reply, Server, honest};
use crate::common::{Image, Packing, Tar, digest, image, store_config};
use nacelle_base::{Classify, FailureKind};
use nacelle_image::{ImageError, ImageStore, ImageStoreConfig, Reference, RegistryConfig};
use nacelle_model::digest::ImageId;
use std::path::Path;

fn secret() -> Image {
    image(&[(Tar::new().file("secret", 0o644, b"of one tenant").done(), Packing::Gzip)])
}

fn serve(image: &Image) -> Server {
    let image = image.clone();
    Server::start(move |asked| honest(&image, asked))
}

fn open(directory: &Path, servers: &[&Server]) -> ImageStore {
    let special = |server: &&Server| (server.host(), RegistryConfig { http: true, ..RegistryConfig::default() });
    let config = ImageStoreConfig { registries: servers.iter().map(special).collect(), ..store_config() };
    ImageStore::open(directory, config).unwrap()
}

async fn pull(store: &ImageStore, server: &Server, name: &str) -> Result<ImageId, ImageError> {
    store.pull(&Reference::parse(&format!("{}/{name}", server.host())).unwrap(), None).await
}

/// Pulls the secret image from its own registry and then a forged one from another, which must be refused.
async fn pull_forged(
    forged: Image,
    answer: impl Fn(&Image, &Asked) -> Reply + Send + Sync + 'static,
) -> (ImageError, Server) {
    let own = serve(&secret());
    let other = Server::start(move |asked| answer(&forged, asked));
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), &[&own, &other]);
    pull(&store, &own, "x:t").await.unwrap();
    let before = store.list();
    let error = pull(&store, &other, "x:t").await.unwrap_err();
    assert_eq!(store.list(), before, "{}", nacelle_base::Chain(&error));
    (error, other)
}

/// Returns an image without the named blobs, whose manifest lists these layers with the image's own configuration.
fn forge(image: &Image, layers: &[(&str, usize)]) -> Image {
    let mut forged = image.clone();
    let listed: Vec<_> = layers
        .iter()
        .map(|(digest, size)| {
            serde_json::json!({"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest, "size": size})
        })
        .collect();
    let manifest = serde_json::to_vec(&serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": image.config,
                   "size": image.blobs[&image.config].len()},
        "layers": listed,
    }))
    .unwrap();
    forged.manifest = digest(&manifest);
    forged.blobs.insert(digest(&manifest), manifest);
    forged
}

#[tokio::test(flavor = "multi_thread")]
async fn the_digest_of_a_configuration_does_not_give_its_image() {
    let image = secret();
    let mut forged = forge(&image, &[]);
    forged.blobs.remove(&image.config);
    let (error, _) = pull_forged(forged, honest).await;
    assert_eq!(error.kind(), FailureKind::NotFound, "{}", nacelle_base::Chain(&error));
    // With the configuration, the number of layers is wrong.
    let (error, _) = pull_forged(forge(&image, &[]), honest).await;
    assert_eq!(error.kind(), FailureKind::Invalid, "{}", nacelle_base::Chain(&error));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_only_says_that_it_has_a_layer_does_not_get_it() {
    let image = secret();
    let layer = image.layers[0].clone();
    let (error, server) = pull_forged(image, move |image, asked| match asked.method.as_str() {
        "HEAD" => Reply::ok(b""),
        _ if asked.path.contains(&layer) => Reply::status(404),
        _ => honest(image, asked),
    })
    .await;
    assert_eq!(error.kind(), FailureKind::NotFound, "{}", nacelle_base::Chain(&error));
    assert!(server.asked().iter().any(|asked| asked.method == "GET" && asked.path.contains("/blobs/")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_of_other_content_does_not_give_a_layer() {
    // One registry, two repositories: the secret one, and one whose manifest pairs a blob of its own with the secret diff id.
    let image = secret();
    let own = crate::common::compress_file(&Tar::new().file("own", 0o644, b"x").done(), Packing::Gzip);
    let mut forged = forge(&image, &[(&digest(&own), own.len())]);
    forged.blobs.remove(&image.layers[0]);
    forged.blobs.insert(digest(&own), own);
    let server = Server::start(move |asked| {
        if asked.path.starts_with("/v2/forged/") { honest(&forged, asked) } else { honest(&image, asked) }
    });
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), &[&server]);
    pull(&store, &server, "x:t").await.unwrap();
    let before = store.list();
    let error = pull(&store, &server, "forged:t").await.unwrap_err();
    assert_eq!(error.kind(), FailureKind::Unavailable, "{}", nacelle_base::Chain(&error));
    assert_eq!(store.list(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_may_not_read_a_layer_does_not_get_it_from_the_store() {
    // One registry that accepts a manifest without checking whether its blobs belong to the repository.
    let image = secret();
    let layer = image.layers[0].clone();
    let server = Server::start(move |asked| {
        let foreign = asked.path.starts_with("/v2/other/") && asked.path.contains(&layer);
        if foreign { Reply::status(403) } else { honest(&image, asked) }
    });
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), &[&server]);
    pull(&store, &server, "x:t").await.unwrap();
    let before = store.list();
    let error = pull(&store, &server, "other:t").await.unwrap_err();
    assert_eq!(error.kind(), FailureKind::Denied, "{}", nacelle_base::Chain(&error));
    assert_eq!(store.list(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_complete_download_is_not_given_to_a_client_that_may_not_read_it() {
    let image = secret();
    let layer = image.layers[0].clone();
    let blob = image.blobs[&layer].clone();
    let server = Server::start(
        move |asked| {
            if asked.path.contains(&layer) { Reply::status(403) } else { honest(&image, asked) }
        },
    );
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), &[&server]);
    // What the pull of another client leaves that failed after its last byte.
    let name = digest(format!("{} {}", server.host(), digest(&blob)).as_bytes());
    std::fs::write(directory.path().join("partial").join(name.strip_prefix("sha256:").unwrap()), &blob).unwrap();
    let error = pull(&store, &server, "x:t").await.unwrap_err();
    assert_eq!(error.kind(), FailureKind::Denied, "{}", nacelle_base::Chain(&error));
    assert!(store.list().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_registry_does_not_delay_others() {
    let image = secret();
    let layer = image.layers[0].clone();
    let own = serve(&image);
    let slow = Server::start(move |asked| Reply {
        stall: asked.path.contains(&layer),
        cut: asked.path.contains(&layer).then_some(1),
        ..honest(&image, asked)
    });
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), &[&own, &slow]);
    let id = pull(&store, &own, "x:t").await.unwrap();
    tokio::select! {
        _ = pull(&store, &slow, "x:t") => panic!("the registry stalls"),
        () = async {
            while !slow.asked().iter().any(|asked| asked.path.contains("/blobs/") && asked.method == "GET" && asked.path.contains(&secret().layers[0])) {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            assert_eq!(pull(&store, &own, "y:t").await.unwrap(), id);
        } => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_is_not_continued_from_another_registry() {
    let image = secret();
    let layer = image.layers[0].clone();
    let length = image.blobs[&layer].len();
    let cut = {
        let (image, layer) = (image.clone(), layer.clone());
        move |asked: &Asked| {
            let here = asked.path.contains(&layer);
            match here && asked.from() > 0 {
                true => Reply::status(404),
                false => Reply { cut: here.then_some(length - 1), ..honest(&image, asked) },
            }
        }
    };
    let own = Server::start(cut);
    let other = {
        let layer = layer.clone();
        Server::start(move |asked| match asked.path.contains(&layer) && asked.from() == 0 {
            true => Reply::status(404),
            false => honest(&image, asked),
        })
    };
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), &[&own, &other]);
    pull(&store, &own, "x:t").await.unwrap_err();
    pull(&store, &other, "x:t").await.unwrap_err();
    assert!(store.list().is_empty());
    assert!(other.asked().iter().filter(|asked| asked.path.contains(&layer)).all(|asked| asked.from() == 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entitled_client_uses_stored_layers() {
    let image = secret();
    let layer = image.layers[0].clone();
    let gets = |server: &Server| {
        let of_layer = |asked: &&Asked| asked.method == "GET" && asked.path.contains(&layer);
        server.asked().iter().filter(of_layer).count()
    };
    let (own, mirror) = (serve(&image), serve(&image));
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), &[&own, &mirror]);
    let id = pull(&store, &own, "x:t").await.unwrap();
    // The same manifest again: only the manifest is requested. Another repository: the registry is asked whether it has the layer.
    let before = own.asked().len();
    assert_eq!(pull(&store, &own, "x:t").await.unwrap(), id);
    assert_eq!(own.asked().len(), before + 1);
    assert_eq!(pull(&store, &own, "y:t").await.unwrap(), id);
    assert_eq!(gets(&own), 1);
    // Another registry delivers the layer once, even if the store was opened again meanwhile.
    assert_eq!(pull(&store, &mirror, "x:t").await.unwrap(), id);
    drop(store);
    let special = |server: &Server| (server.host(), RegistryConfig { http: true, ..RegistryConfig::default() });
    let config = ImageStoreConfig { registries: [special(&mirror)].into(), ..store_config() };
    let store = crate::common::reopen(directory.path(), &config);
    assert_eq!(pull(&store, &mirror, "y:t").await.unwrap(), id);
    assert_eq!(gets(&mirror), 1);
    assert_eq!(store.list().len(), 1);
    assert_eq!(store.list()[0].repo_tags.len(), 4);
}
