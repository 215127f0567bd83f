//! Checks the files that the configuration names, as the daemon reads them.

use super::check::BrokenRule;
use super::key::KeyPath;
use super::{Config, RegistrySettings};
use nacelle_base::Chain;
use std::error::Error;
use std::path::Path;

/// Returns the files of the streaming server that cannot be used: without them no exec is possible. Blocks.
pub(super) fn check_streaming(config: &Config) -> Vec<BrokenRule> {
    let tls = config.streaming_options().tls.into_iter();
    let broken = tls.filter_map(|tls| {
        let error = tls.read().and_then(|pem| pem.acceptor().map(drop)).err()?;
        Some(unusable(KeyPath::from("streaming.tls_cert_file"), &tls.certificate, &error))
    });
    broken.collect()
}

/// Returns the files of registries that cannot be used: without one of them, pulls from that registry fail. Blocks.
pub(super) fn check_registries(config: &Config) -> Vec<BrokenRule> {
    let mut broken = Vec::new();
    let registries = KeyPath::from("images.registries");
    for (host, registry) in &config.images.registries {
        check_registry(&registries.child(host), host, registry, &mut broken);
    }
    broken
}

fn check_registry(key: &KeyPath, host: &str, registry: &RegistrySettings, broken: &mut Vec<BrokenRule>) {
    if let Some(file) = &registry.ca_file
        && let Err(error) = nacelle_image::check_authorities(file)
    {
        broken.push(unusable(key.child("ca_file"), file, &error));
    }
    if let Some(certificate) = registry.client_certificate()
        && let Err(error) = nacelle_image::check_client_certificate(&certificate)
    {
        broken.push(unusable(key.child("client_cert_file"), &certificate.certificate, &error));
    }
    if let Some(file) = &registry.auth_file
        && let Err(error) = nacelle_image::read_auth_file(file, host)
    {
        broken.push(unusable(key.child("auth_file"), file, &error));
    }
}

fn unusable(key: KeyPath, file: &Path, error: &dyn Error) -> BrokenRule {
    BrokenRule::new(key, file, Chain(error).to_string())
}
