//! Tests pulls from a real registry: http, https, password, mirrors, indexes, names.

use crate::common::registry::{Registry, missing};
use crate::common::{Image, Packing, Tar, image, reopen, store_config};
use nacelle_base::{Classify, FailureKind};
use nacelle_image::{Auth, ClientCertificate, ImageStore, ImageStoreConfig, ProxyConfig, Reference, RegistryConfig};
use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

macro_rules! need_registry {
    () => {
        if let Some(why) = missing() {
            eprintln!("skipped: {why}");
            return;
        }
    };
}

fn store(directory: &Path, special: &[(&str, RegistryConfig)]) -> ImageStore {
    let registries = special.iter().map(|(host, config)| ((*host).to_owned(), config.clone())).collect();
    ImageStore::open(directory, ImageStoreConfig { registries, ..store_config() }).unwrap()
}

fn http() -> RegistryConfig {
    RegistryConfig { http: true, ..RegistryConfig::default() }
}

fn sample(text: &str) -> Image {
    let shared = Tar::new().file("shared", 0o644, &vec![7; 100_000]).done();
    let own = Tar::new().file("own", 0o644, text.as_bytes()).done();
    image(&[(shared.clone(), Packing::Gzip), (own, Packing::Zstd), (shared, Packing::Gzip)])
}

fn reference(host: &str, name: &str) -> Reference {
    Reference::parse(&format!("{host}/{name}")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn images_are_pulled_named_shared_and_removed() {
    need_registry!();
    let registry = Registry::start(false, false);
    let (one, two) = (sample("one"), sample("two"));
    registry.push(&one, "a/one:1", &[]);
    registry.push(&one, "a/one:also", &[]);
    registry.push(&two, "two:1", &[]);
    let directory = tempfile::tempdir().unwrap();
    let host = registry.host();
    let store = store(directory.path(), &[(&host, http())]);
    let id = store.pull(&reference(&host, "a/one:1"), None).await.unwrap();
    assert_eq!(id.to_string(), one.config);
    assert_eq!(store.pull(&reference(&host, "a/one:also"), None).await.unwrap(), id);
    let by_digest = format!("{host}/a/one@{}", one.manifest);
    assert_eq!(store.pull(&Reference::parse(&by_digest).unwrap(), None).await.unwrap(), id);
    let record = store.status(&by_digest).unwrap().unwrap();
    assert_eq!(record.repo_tags, [format!("{host}/a/one:1"), format!("{host}/a/one:also")]);
    assert_eq!(record.repo_digests, std::slice::from_ref(&by_digest));
    let before = store.fs_info().await.unwrap();
    let other = store.pull(&reference(&host, "two:1"), None).await.unwrap();
    let after = store.fs_info().await.unwrap();
    assert!(
        after.used_bytes > before.used_bytes && after.used_bytes < before.used_bytes + 90_000,
        "{before:?} {after:?}"
    );
    assert_eq!(store.list().len(), 2);
    // The other image keeps the shared layer.
    store.remove(&format!("{host}/a/one:1"), &HashSet::new()).await.unwrap();
    assert_eq!(store.list().iter().map(|record| record.id).collect::<Vec<_>>(), [other]);
    for extent in store.rootfs(&other).await.unwrap().disk.extents {
        assert_eq!(std::fs::metadata(&extent.path).unwrap().len(), extent.length);
    }
    // When a tag moves, the old image loses the name.
    registry.push(&one, "two:1", &[]);
    store.pull(&reference(&host, "two:1"), None).await.unwrap();
    let tags: Vec<_> = store.list().into_iter().map(|record| (record.id, record.repo_tags.len())).collect();
    assert!(tags.contains(&(other, 0)) && tags.contains(&(id, 1)), "{tags:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_manifests_and_unknown_names() {
    need_registry!();
    let registry = Registry::start(false, false);
    let tar = Tar::new().file("f", 0o644, b"x").done();
    let mut docker = image(&[(tar, Packing::Gzip)]);
    let manifest = String::from_utf8(docker.blobs[&docker.manifest].clone()).unwrap();
    let manifest = manifest
        .replace("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
        .replace("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
        .replace("application/vnd.oci.image.layer.v1.tar+gzip", "application/vnd.docker.image.rootfs.diff.tar.gzip");
    let oci = docker.manifest.clone();
    docker.manifest = crate::common::digest(manifest.as_bytes());
    docker.blobs.remove(&oci);
    docker.blobs.insert(docker.manifest.clone(), manifest.into_bytes());
    registry.push(&docker, "d:1", &["--format", "v2s2"]);
    let directory = tempfile::tempdir().unwrap();
    let host = registry.host();
    let store = store(directory.path(), &[(&host, http())]);
    let id = store.pull(&reference(&host, "d:1"), None).await.unwrap();
    assert_eq!(id.to_string(), docker.config);
    for name in ["d:2", "unknown:1"] {
        let error = store.pull(&reference(&host, name), None).await.unwrap_err();
        assert_eq!(error.kind(), FailureKind::NotFound, "{error:?}");
        assert!(error.to_string().contains("404"), "{error}");
    }
    assert_eq!(store.list().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn passwords_are_asked_for_and_https_is_checked() {
    need_registry!();
    let registry = Registry::start(true, true);
    registry.push(&sample("secret"), "s:1", &[]);
    let host = registry.host();
    let name = reference(&host, "s:1");
    let auth = Auth { username: "u".into(), password: "p:w".into(), ..Auth::default() };
    let directory = tempfile::tempdir().unwrap();
    let pull = async |special: RegistryConfig, auth: Option<Auth>| {
        let place = tempfile::tempdir_in(directory.path()).unwrap();
        store(place.path(), &[(&host, special)]).pull(&name, auth).await.map_err(|error| error.kind())
    };
    let trusted = RegistryConfig { ca_file: Some(registry.ca()), ..RegistryConfig::default() };
    assert_eq!(pull(RegistryConfig::default(), Some(auth.clone())).await, Err(FailureKind::Unavailable));
    assert_eq!(pull(trusted.clone(), None).await, Err(FailureKind::Denied));
    let wrong = Auth { password: "x".into(), ..auth.clone() };
    assert_eq!(pull(trusted.clone(), Some(wrong)).await, Err(FailureKind::Denied));
    let elsewhere = Auth { server_address: "https://elsewhere.example/v1/".into(), ..auth.clone() };
    assert_eq!(pull(trusted.clone(), Some(elsewhere)).await, Err(FailureKind::Denied));
    let encoded = Auth { auth: "dTpwOnc=".into(), server_address: host.clone(), ..Auth::default() };
    assert!(pull(trusted.clone(), Some(encoded)).await.is_ok());
    assert!(pull(trusted, Some(auth.clone())).await.is_ok());
    let unchecked = RegistryConfig { skip_tls_verify: true, ..RegistryConfig::default() };
    assert!(pull(unchecked, Some(auth)).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn client_certificates_are_sent_to_their_host_only() {
    need_registry!();
    let (registry, other) = (Registry::start_for_certificates(), Registry::start(false, false));
    let (certificate, key) = registry.certificate();
    let client = tempfile::tempdir().unwrap();
    std::fs::copy(&certificate, client.path().join("client.cert")).unwrap();
    std::fs::copy(&key, client.path().join("client.key")).unwrap();
    registry.push(&sample("certified"), "c:1", &["--dest-cert-dir", client.path().to_str().unwrap()]);
    let name = reference(&registry.host(), "c:1");
    let pull = async |client_certificate: Option<(PathBuf, PathBuf)>, host: &str| {
        let client_certificate = client_certificate.map(|(certificate, key)| ClientCertificate { certificate, key });
        let with = RegistryConfig { client_certificate, ca_file: Some(registry.ca()), ..RegistryConfig::default() };
        let without = RegistryConfig { ca_file: Some(registry.ca()), ..RegistryConfig::default() };
        let directory = tempfile::tempdir().unwrap();
        let special = [(registry.host(), without), (host.to_owned(), with)];
        let special: Vec<_> = special.iter().map(|(host, config)| (host.as_str(), config.clone())).collect();
        store(directory.path(), &special).pull(&name, None).await
    };
    let ours = (certificate.clone(), key.clone());
    assert!(pull(Some(ours.clone()), &registry.host()).await.is_ok());
    for (client_certificate, host) in [(None, registry.host()), (Some(ours), other.host())] {
        let error = pull(client_certificate, &host).await.unwrap_err();
        assert_eq!(error.kind(), FailureKind::Unavailable, "{error:?}");
    }
    for (files, named) in [
        ((certificate.clone(), registry.ca()), "ca.pem"),
        ((PathBuf::from("/no/cert.pem"), key.clone()), "/no/cert.pem"),
        ((certificate.clone(), client.path().join("none.key")), "none.key"),
    ] {
        let error = pull(Some(files), &registry.host()).await.unwrap_err();
        assert!(nacelle_base::Chain(&error).to_string().contains(named), "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_are_asked_first_and_may_be_down() {
    need_registry!();
    let mirror = Registry::start(false, false);
    let origin = Registry::start(false, false);
    let (both, only) = (sample("both"), sample("only"));
    mirror.push(&both, "library/x:1", &[]);
    origin.push(&only, "library/y:1", &[]);
    let (mirror_host, origin_host) = (mirror.host(), origin.host());
    let directory = tempfile::tempdir().unwrap();
    let down = "http://127.0.0.1:1";
    let special = RegistryConfig {
        http: true,
        mirrors: vec![down.into(), format!("http://{mirror_host}/")],
        ..RegistryConfig::default()
    };
    let store = store(directory.path(), &[(&origin_host, special)]);
    let id = store.pull(&reference(&origin_host, "library/x:1"), None).await.unwrap();
    assert_eq!(id.to_string(), both.config);
    assert_eq!(store.list()[0].repo_tags, [format!("{origin_host}/library/x:1")]);
    let id = store.pull(&reference(&origin_host, "library/y:1"), None).await.unwrap();
    assert_eq!(id.to_string(), only.config);
}

#[tokio::test(flavor = "multi_thread")]
async fn default_mirrors_serve_registries_without_an_entry() {
    need_registry!();
    let mirror = Registry::start(false, false);
    mirror.push(&sample("mirrored"), "library/x:1", &[]);
    let default = RegistryConfig { mirrors: vec![format!("http://{}", mirror.host())], ..RegistryConfig::default() };
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), &[("_default", default), ("127.0.0.1:2", http())]);
    assert!(store.pull(&reference("127.0.0.1:1", "library/x:1"), None).await.is_ok());
    let error = store.pull(&reference("127.0.0.1:2", "library/x:1"), None).await.unwrap_err();
    assert_eq!(error.kind(), FailureKind::Unavailable, "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_receives_its_own_credentials_only() {
    need_registry!();
    let mirror = Registry::start(true, true);
    mirror.push(&sample("guarded"), "library/x:1", &[]);
    let directory = tempfile::tempdir().unwrap();
    let auth_file = directory.path().join("auth.json");
    let settings =
        RegistryConfig { ca_file: Some(mirror.ca()), auth_file: Some(auth_file.clone()), ..RegistryConfig::default() };
    let default = RegistryConfig { mirrors: vec![format!("https://{}", mirror.host())], ..RegistryConfig::default() };
    let place = directory.path().join("store");
    let store = store(&place, &[("_default", default), (&mirror.host(), settings)]);
    let right = Auth { username: "u".into(), password: "p:w".into(), ..Auth::default() };
    let name = reference("127.0.0.1:1", "library/x:1");
    let write = |host: &str| {
        std::fs::write(&auth_file, format!(r#"{{"auths": {{"{host}": {{"auth": "dTpwOnc="}}}}}}"#)).unwrap();
    };
    write("elsewhere.example");
    // The credentials of the request are for the registry of the reference, which does not answer.
    assert!(store.pull(&name, Some(right.clone())).await.is_err());
    // A registry's own entry does not give its credentials to pulls that name the registry.
    write(&mirror.host());
    let direct = store.pull(&reference(&mirror.host(), "library/x:1"), None).await.unwrap_err();
    assert_eq!(direct.kind(), FailureKind::Denied, "{direct:?}");
    assert!(store.pull(&name, None).await.is_ok());
}

/// Starts a proxy that connects every host to the same port of loopback. Returns its port and the heads of its requests.
fn start_proxy(authorization: Option<&'static str>) -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let heads = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&heads);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, seen) = (client.unwrap(), Arc::clone(&seen));
            std::thread::spawn(move || {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    client.read_exact(&mut byte).ok()?;
                    head.push(byte[0]);
                }
                let text = String::from_utf8(head).ok()?;
                seen.lock().unwrap().push(text.clone());
                if authorization.is_some_and(|wanted| !text.contains(wanted)) {
                    return client
                        .write_all(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                        .ok();
                }
                let target = text.split(' ').nth(1)?.trim_start_matches("http://").split('/').next()?;
                let mut server = TcpStream::connect(("127.0.0.1", target.rsplit(':').next()?.parse().ok()?)).ok()?;
                match text.starts_with("CONNECT ") {
                    true => client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").ok()?,
                    false => server.write_all(text.as_bytes()).ok()?,
                }
                let (mut from, mut to) = (client.try_clone().ok()?, server.try_clone().ok()?);
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
                std::io::copy(&mut server, &mut client).ok().map(drop)
            });
        }
    });
    (port, heads)
}

#[tokio::test(flavor = "multi_thread")]
async fn pulls_go_through_the_proxy_of_their_scheme() {
    need_registry!();
    let (plain, secure) = (Registry::start(false, false), Registry::start(true, false));
    plain.push(&sample("plain"), "x:1", &[]);
    secure.push(&sample("secure"), "x:1", &[]);
    let (plain_host, secure_host) = (format!("registry.test:{}", plain.port), format!("registry.test:{}", secure.port));
    let trusted = RegistryConfig { ca_file: Some(secure.ca()), ..RegistryConfig::default() };
    let (port, heads) = start_proxy(Some("Basic dTpwQHc="));
    let pull = async |host: &str, user: &str, no_proxy: &str| {
        let url = format!("http://{user}127.0.0.1:{port}");
        let proxy = ProxyConfig { http_proxy: url.clone(), https_proxy: url, no_proxy: no_proxy.into() };
        let registries = [(plain_host.clone(), http()), (secure_host.clone(), trusted.clone())].into();
        let directory = tempfile::tempdir().unwrap();
        let config = ImageStoreConfig { registries, proxy, ..store_config() };
        ImageStore::open(directory.path(), config).unwrap().pull(&reference(host, "x:1"), None).await
    };
    for (host, method) in [(&plain_host, "GET http://registry.test:"), (&secure_host, "CONNECT registry.test:")] {
        heads.lock().unwrap().clear();
        pull(host, "u:p%40w@", "").await.unwrap();
        let seen = heads.lock().unwrap().clone();
        assert!(!seen.is_empty() && seen.iter().all(|head| head.starts_with(method)), "{seen:?}");
        for (user, no_proxy) in [("u:secret@", ""), ("u:p%40w@", "registry.test")] {
            let error = pull(host, user, no_proxy).await.unwrap_err();
            let text = format!("{error:?} {}", nacelle_base::Chain(&error));
            assert!(!text.contains("secret") && !text.contains("p%40w"), "{text}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_leads_to_the_variant_of_this_machine() {
    need_registry!();
    let registry = Registry::start(false, false);
    let ours = sample("ours");
    registry.push(&ours, "i:ours", &[]);
    let index = serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [
            {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": ours.manifest,
             "size": ours.blobs[&ours.manifest].len(), "platform": {"os": "linux", "architecture": "amd64"}},
        ],
    });
    let index = serde_json::to_vec(&index).unwrap();
    let mut stream = std::net::TcpStream::connect(registry.host()).unwrap();
    let head = format!(
        "PUT /v2/i/manifests/all HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\
         Content-Type: application/vnd.oci.image.index.v1+json\r\n\r\n",
        index.len()
    );
    std::io::Write::write_all(&mut stream, &[head.as_bytes(), &index].concat()).unwrap();
    let answer = std::io::read_to_string(stream).unwrap();
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
    let directory = tempfile::tempdir().unwrap();
    let host = registry.host();
    let store = store(directory.path(), &[(&host, http())]);
    let id = store.pull(&reference(&host, "i:all"), None).await.unwrap();
    assert_eq!(id.to_string(), ours.config);
    assert_eq!(store.list()[0].repo_digests, [format!("{host}/i@{}", crate::common::digest(&index))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_is_open_once_and_found_again() {
    need_registry!();
    let registry = Registry::start(false, false);
    registry.push(&sample("x"), "x:1", &[]);
    let directory = tempfile::tempdir().unwrap();
    let host = registry.host();
    let first = store(directory.path(), &[(&host, http())]);
    let second = ImageStore::open(directory.path(), store_config()).map(drop).unwrap_err();
    assert_eq!(second.kind(), FailureKind::Conflict);
    first.pull(&reference(&host, "x:1"), None).await.unwrap();
    let (list, info) = (first.list(), first.fs_info().await.unwrap());
    drop(first);
    let again = reopen(directory.path(), &ImageStoreConfig { pinned: vec![format!("{host}/x:1")], ..store_config() });
    let mut pinned = list;
    pinned[0].pinned = true;
    assert_eq!(again.list(), pinned);
    assert_eq!(again.fs_info().await.unwrap().inodes_used, info.inodes_used);
}
