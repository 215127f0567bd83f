//! Owns: the server's certificate and key, from their files.

use nacelle_base::{Classify, Kind};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::path::PathBuf;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;

/// The files of a server that speaks TLS.
#[derive(Clone, Debug)]
pub struct Tls {
    /// PEM: its certificate, and those between it and one that clients know.
    pub certificate: PathBuf,
    /// PEM: its private key.
    pub key: PathBuf,
}

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file.
    #[error("cannot read {} as PEM", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: pem::Error,
    },
    /// The certificate has no use, or not with this key.
    #[error("certificate {} and key {} cannot be used", certificate.display(), key.display())]
    Unfit {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why.
        source: rustls::Error,
    },
}

impl Classify for TlsError {
    fn kind(&self) -> Kind {
        Kind::Invalid
    }
}

impl Tls {
    /// Reads the files.
    pub(crate) fn acceptor(&self) -> Result<TlsAcceptor, TlsError> {
        let in_file = |path: &PathBuf| {
            let path = path.clone();
            move |source| TlsError::File { path, source }
        };
        let chain = CertificateDer::pem_file_iter(&self.certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let chain = chain.map_err(in_file(&self.certificate))?;
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(in_file(&self.key))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.and_then(|config| config.with_no_client_auth().with_single_cert(chain, key));
        let mut config = config.map_err(|source| TlsError::Unfit {
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            source,
        })?;
        // Upgrades are of HTTP/1.1.
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}
