//! Tests pulls from servers that break connections, send wrong data, stall, redirect in a loop and flood.

use crate::common::server::{Asked, Reply, Server, honest};
use crate::common::{Image, Packing, Tar, digest, image, noise, store_config};
use nacelle_base::{Classify, FailureKind};
use nacelle_image::{Auth, ImageError, ImageStore, ImageStoreConfig, Reference, RegistryConfig};
use nacelle_model::digest::ImageId;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn sample() -> Image {
    image(&[(Tar::new().file("f", 0o644, &noise(600_000)).done(), Packing::Gzip)])
}

fn store(directory: &Path, host: &str) -> ImageStore {
    patient(directory, host, 60)
}

/// Opens a store with this progress timeout.
fn patient(directory: &Path, host: &str, timeout_seconds: u64) -> ImageStore {
    let special = RegistryConfig { http: true, ..RegistryConfig::default() };
    let config = ImageStoreConfig {
        registries: [(host.to_owned(), special)].into(),
        progress_timeout: Duration::from_secs(timeout_seconds),
        ..store_config()
    };
    ImageStore::open(directory, config).unwrap()
}

async fn pull(store: &ImageStore, server: &Server) -> Result<ImageId, ImageError> {
    store.pull(&Reference::parse(&format!("{}/x:t", server.host())).unwrap(), None).await
}

/// Returns the file of what this server has delivered of an unfinished layer.
fn partial_path(directory: &Path, server: &Server, layer: &str) -> PathBuf {
    let name = digest(format!("{} {layer}", server.host()).as_bytes());
    directory.join("partial").join(name.strip_prefix("sha256:").unwrap())
}

fn files(directory: &Path, part: &str) -> usize {
    std::fs::read_dir(directory.join(part)).unwrap().count()
}

/// Waits until a condition holds, for a minute at most.
async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not after a minute: {what}");
}

/// Pulls once from a server that answers with `answer`, and expects an error of this kind and an empty store.
async fn refused(kind: FailureKind, answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Server {
    let server = Server::start(answer);
    let directory = tempfile::tempdir().unwrap();
    let store = patient(directory.path(), &server.host(), if kind == FailureKind::Timeout { 1 } else { 60 });
    let error = pull(&store, &server).await.unwrap_err();
    assert_eq!(error.kind(), kind, "{}", nacelle_base::Chain(&error));
    assert!(store.list().is_empty());
    for part in ["configs", "layers", "trees", "work"] {
        assert_eq!(files(directory.path(), part), 0, "{part}: {}", nacelle_base::Chain(&error));
    }
    server
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_is_cut_again_and_again_goes_on_where_it_was() {
    let good = sample();
    let layer = good.layers[0].clone();
    let length = good.blobs[&layer].len();
    let image = good.clone();
    let server = Server::start(move |asked| Reply {
        cut: asked.path.contains(&image.layers[0]).then_some(length / 5),
        ..honest(&image, asked)
    });
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), &server.host());
    assert_eq!(pull(&store, &server).await.unwrap().to_string(), good.config);
    let froms: Vec<_> = server.asked().iter().filter(|asked| asked.path.contains(&layer)).map(Asked::from).collect();
    assert!(froms.len() >= 5 && froms.is_sorted() && froms[1] > 0, "{froms:?}");
    assert_eq!(files(directory.path(), "partial"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_ranges_is_asked_for_all_again() {
    let good = sample();
    let (image, tries) = (good.clone(), AtomicUsize::new(0));
    let server = Server::start(move |asked| {
        let whole = Asked { headers: Default::default(), ..asked.clone() };
        let cut = asked.path.contains(&image.layers[0]) && tries.fetch_add(1, Ordering::SeqCst) == 0;
        Reply { cut: cut.then_some(100_000), ..honest(&image, &whole) }
    });
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(pull(&store(directory.path(), &server.host()), &server).await.unwrap().to_string(), good.config);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_is_dropped_is_continued_by_the_next_even_after_a_restart() {
    let good = sample();
    let layer = good.layers[0].clone();
    let (image, calls) = (good.clone(), Arc::new(AtomicUsize::new(0)));
    let server = Server::start(move |asked| {
        let mut reply = honest(&image, asked);
        if asked.path.contains(&image.layers[0]) && calls.fetch_add(1, Ordering::SeqCst) == 0 {
            reply.body.truncate(300_000);
            reply.stall = true;
        }
        reply
    });
    let directory = tempfile::tempdir().unwrap();
    let place = store(directory.path(), &server.host());
    let partial = partial_path(directory.path(), &server, &layer);
    let here = || std::fs::metadata(&partial).map_or(0, |metadata| metadata.len());
    tokio::select! {
        _ = pull(&place, &server) => panic!("the server stalls"),
        () = eventually("the first part is here", || here() >= 300_000) => {}
    }
    drop(place);
    // The thread of the dropped pull releases the store by itself.
    let special = RegistryConfig { http: true, ..RegistryConfig::default() };
    let config = ImageStoreConfig { registries: [(server.host(), special)].into(), ..store_config() };
    let mut again = None;
    eventually("the store is free", || {
        again = ImageStore::open(directory.path(), config.clone()).ok();
        again.is_some()
    })
    .await;
    assert_eq!(pull(&again.unwrap(), &server).await.unwrap().to_string(), good.config);
    let froms: Vec<_> = server.asked().iter().filter(|asked| asked.path.contains(&layer)).map(Asked::from).collect();
    assert_eq!((froms[0], *froms.last().unwrap()), (0, 300_000), "{froms:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_beginning_that_a_crash_has_damaged_is_brought_again() {
    let good = sample();
    let directory = tempfile::tempdir().unwrap();
    let image = good.clone();
    let server = Server::start(move |asked| honest(&image, asked));
    std::fs::create_dir_all(directory.path().join("partial")).unwrap();
    std::fs::write(partial_path(directory.path(), &server, &good.layers[0]), vec![0; 1000]).unwrap();
    assert_eq!(pull(&store(directory.path(), &server.host()), &server).await.unwrap().to_string(), good.config);
    let froms: Vec<_> = server.asked().iter().filter(|asked| asked.path.contains("/blobs/")).map(Asked::from).collect();
    assert!(froms.contains(&1000), "{froms:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_content_is_refused_and_nothing_is_kept() {
    for (part, kinds) in
        [("layer", [FailureKind::Invalid, FailureKind::Unavailable]), ("config", [FailureKind::Unavailable; 2])]
    {
        for place in [20, 5_000] {
            let image = sample();
            let name = if part == "layer" { image.layers[0].clone() } else { image.config.clone() };
            let bytes = image.blobs[&name].len();
            let server = Server::start(move |asked| {
                let mut reply = honest(&image, asked);
                if asked.path.contains(&name) {
                    reply.body[place % bytes] ^= 0x10;
                }
                reply
            });
            let directory = tempfile::tempdir().unwrap();
            let store = store(directory.path(), &server.host());
            let error = pull(&store, &server).await.unwrap_err();
            assert!(kinds.contains(&error.kind()), "{part}: {error:?}");
            for directory_name in ["configs", "layers", "trees", "work", "partial"] {
                assert_eq!(files(directory.path(), directory_name), 0, "{part}: {directory_name}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_layer_than_the_configuration_says_is_refused() {
    // The digest of the layer matches, the digest of its content does not.
    let tar = Tar::new().file("f", 0o644, b"x").done();
    let mut lying = image(&[(tar.clone(), Packing::Plain)]);
    let config = String::from_utf8(lying.blobs[&lying.config].clone()).unwrap();
    let config = config.replace(&crate::common::digest(&tar), &crate::common::digest(b"other")).into_bytes();
    let manifest = String::from_utf8(lying.blobs[&lying.manifest].clone()).unwrap();
    let manifest = manifest.replace(&lying.config, &crate::common::digest(&config));
    let manifest = manifest
        .replace(&format!("\"size\":{}", lying.blobs[&lying.config].len()), &format!("\"size\":{}", config.len()));
    lying.manifest = crate::common::digest(manifest.as_bytes());
    lying.blobs.insert(lying.manifest.clone(), manifest.into_bytes());
    lying.blobs.insert(crate::common::digest(&config), config);
    let server = refused(FailureKind::Unavailable, move |asked| honest(&lying, asked)).await;
    assert_eq!(server.asked().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_with_another_digest_is_refused() {
    let image = sample();
    let other = crate::common::image(&[(Tar::new().done(), Packing::Plain)]);
    let wanted = image.manifest.clone();
    let server = Server::start(move |_| Reply::ok(&other.blobs[&other.manifest]));
    let directory = tempfile::tempdir().unwrap();
    let reference = Reference::parse(&format!("{}/x@{wanted}", server.host())).unwrap();
    let error = store(directory.path(), &server.host()).pull(&reference, None).await.unwrap_err();
    assert!(error.to_string().contains("is damaged"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_without_end_are_refused() {
    for part in ["manifest", "config", "layer"] {
        let image = sample();
        let name = match part {
            "manifest" => "/manifests/t".to_owned(),
            "config" => image.config.clone(),
            _ => image.layers[0].clone(),
        };
        refused(FailureKind::Invalid, move |asked| match asked.path.contains(&name) {
            true => Reply { endless: true, ..Reply::ok(&vec![b' '; 65536]) },
            false => honest(&image, asked),
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_is_given_up() {
    let silent = |asked: &Asked| Reply { stall: true, ..Reply::ok(if asked.path.contains("t") { b"{" } else { b"" }) };
    let server = refused(FailureKind::Timeout, silent).await;
    eventually("the server has seen the request", || !server.asked().is_empty()).await;
    assert_eq!(server.asked().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn server_errors_are_retried_and_then_returned() {
    let body = br#"{"errors":[{"code":"X","message":"out of order"}]}"#;
    let server = refused(FailureKind::Unavailable, |_| Reply { status: 503, ..Reply::ok(body) }).await;
    assert_eq!(server.asked().len(), 5);
    let (good, calls) = (sample(), AtomicUsize::new(0));
    let image = good.clone();
    let server = Server::start(move |asked| match calls.fetch_add(1, Ordering::SeqCst) % 3 {
        2 => honest(&image, asked),
        _ => Reply::status(500),
    });
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(pull(&store(directory.path(), &server.host()), &server).await.unwrap().to_string(), good.config);
}

#[tokio::test(flavor = "multi_thread")]
async fn redirects_and_challenges_in_circles_end() {
    let server =
        refused(FailureKind::Unavailable, |asked| Reply::status(307).header("Location", &format!("{}x", asked.path)))
            .await;
    assert_eq!(server.asked().len(), 11);
    refused(FailureKind::Unavailable, |_| Reply::status(302)).await;
    let circle = |asked: &Asked| match asked.path.starts_with("/token") {
        true => Reply::ok(br#"{"token":"abc"}"#),
        false => {
            let realm = format!("Bearer realm=\"http://{}/token\",service=\"s\"", asked.headers["host"]);
            Reply::status(401).header("WWW-Authenticate", &realm)
        }
    };
    let server = refused(FailureKind::Denied, circle).await;
    assert_eq!(server.asked().len(), 3);
    refused(FailureKind::Denied, |_| Reply::status(401)).await;
    refused(FailureKind::Unavailable, |_| {
        Reply::status(401).header("WWW-Authenticate", "Bearer realm=\"file:///etc\"")
    })
    .await;
    let flood = |asked: &Asked| match asked.path.starts_with("/token") {
        true => Reply { endless: true, ..Reply::ok(&vec![b' '; 65536]) },
        false => {
            let realm = format!("Bearer realm=\"http://{}/token\"", asked.headers["host"]);
            Reply::status(401).header("WWW-Authenticate", &realm)
        }
    };
    refused(FailureKind::Invalid, flood).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_fetched_with_the_credentials_and_not_shown_to_other_hosts() {
    let good = sample();
    let image = good.clone();
    let elsewhere = Arc::new(Server::start(move |asked| honest(&image, asked)));
    let (image, other) = (good.clone(), elsewhere.host());
    let server = Server::start(move |asked| {
        if asked.path.starts_with("/token") {
            let right = asked.headers.get("authorization").is_some_and(|value| value == "Basic dTpw");
            return if right { Reply::ok(br#"{"access_token":"abc"}"#) } else { Reply::status(401) };
        }
        if asked.headers.get("authorization").is_none_or(|value| value != "Bearer abc") {
            let realm = format!("Bearer realm=\"http://{}/token?x=1\",service=\"s p\"", asked.headers["host"]);
            return Reply::status(401).header("WWW-Authenticate", &realm);
        }
        match asked.path.contains(&image.layers[0]) {
            true => Reply::status(307).header("Location", &format!("http://{other}{}", asked.path)),
            false => honest(&image, asked),
        }
    });
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), &server.host());
    let reference = Reference::parse(&format!("{}/x:t", server.host())).unwrap();
    let auth = Auth { username: "u".into(), password: "p".into(), ..Auth::default() };
    assert_eq!(store.pull(&reference, Some(auth)).await.unwrap().to_string(), good.config);
    let token: Vec<_> = server.asked().into_iter().filter(|asked| asked.path.starts_with("/token")).collect();
    assert_eq!(token.len(), 1);
    assert_eq!(token[0].path, "/token?x=1&scope=repository%3Ax%3Apull&service=s%20p");
    let redirected = elsewhere.asked();
    assert_eq!(redirected.len(), 1);
    assert!(!redirected[0].headers.contains_key("authorization"));
}

#[tokio::test(flavor = "multi_thread")]
async fn pulls_of_the_same_image_are_one() {
    let good = sample();
    let image = good.clone();
    let server = Server::start(move |asked| {
        // Long enough for all requests to arrive.
        std::thread::sleep(Duration::from_millis(30));
        honest(&image, asked)
    });
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), &server.host());
    let reference = Reference::parse(&format!("{}/x:t", server.host())).unwrap();
    let mut pulls = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (store, reference) = (store.clone(), reference.clone());
        pulls.spawn(async move { store.pull(&reference, None).await.unwrap() });
    }
    while let Some(id) = pulls.join_next().await {
        assert_eq!(id.unwrap().to_string(), good.config);
    }
    let layers = server.asked().iter().filter(|asked| asked.path.contains(&good.layers[0])).count();
    assert_eq!(layers, 1);
    assert_eq!(files(directory.path(), "layers"), 4); // .blob, .idx, .sum, .origins
}
