//! Reads the server's certificate and key from their files.

use nacelle_base::{Classify, FailureKind};
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;

/// The maximum size of a certificate file with its chain, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The certificate and key of a TLS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The PEM file with the server's certificate and the intermediate certificates.
    pub certificate: PathBuf,
    /// The PEM file with the private key.
    pub key: PathBuf,
    /// The PEM file with the certificates of the authorities that sign clients' certificates; `None` if clients need none. A client may
    /// connect without a certificate; one that these authorities did not sign ends the handshake. The caller checks `peer_certificates`.
    pub client_authority: Option<PathBuf>,
}

/// Reasons that TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {} as PEM", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: pem::Error,
    },
    /// The certificate is unusable, or does not match the key.
    #[error("cannot use certificate {} with key {}", certificate.display(), key.display())]
    Unfit {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The reason.
        source: rustls::Error,
    },
    /// The certificates of the authorities are unusable.
    #[error("cannot verify clients with the certificates in {}", path.display())]
    ClientAuthority {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Classify for TlsError {
    fn kind(&self) -> FailureKind {
        FailureKind::Invalid
    }
}

/// The content of the files.
#[derive(Clone, PartialEq, Eq)]
pub struct Pem {
    files: Tls,
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_authority: Option<Vec<u8>>,
}

impl Tls {
    /// Reads the files.
    pub fn read(&self) -> Result<Pem, TlsError> {
        let read = |path: &PathBuf| {
            let text = File::open(path).and_then(|file| {
                let mut text = Vec::new();
                file.take(MAX_BYTES).read_to_end(&mut text)?;
                Ok(text)
            });
            text.map_err(|error| TlsError::File { path: path.clone(), source: pem::Error::Io(error) })
        };
        let client_authority = self.client_authority.as_ref().map(read).transpose()?;
        Ok(Pem { certificate: read(&self.certificate)?, key: read(&self.key)?, client_authority, files: self.clone() })
    }
}

impl Pem {
    /// Returns the acceptor for TLS connections.
    pub fn acceptor(&self) -> Result<TlsAcceptor, TlsError> {
        let in_file = |path: &PathBuf| {
            let path = path.clone();
            move |source| TlsError::File { path, source }
        };
        let Tls { certificate, key, .. } = &self.files;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&self.certificate).collect();
        let chain = chain.map_err(in_file(certificate))?;
        let private = PrivateKeyDer::from_pem_slice(&self.key).map_err(in_file(key))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let clients = self.client_verifier(&provider)?;
        let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config =
            config.and_then(|config| config.with_client_cert_verifier(clients).with_single_cert(chain, private));
        let mut config =
            config.map_err(|source| TlsError::Unfit { certificate: certificate.clone(), key: key.clone(), source })?;
        // Upgrades require HTTP/1.1.
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    /// Returns the verifier of clients' certificates.
    fn client_verifier(&self, provider: &Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
        let (Some(path), Some(authorities)) = (&self.files.client_authority, &self.client_authority) else {
            return Ok(WebPkiClientVerifier::no_client_auth());
        };
        let unusable =
            |source: Box<dyn std::error::Error + Send + Sync>| TlsError::ClientAuthority { path: path.clone(), source };
        let mut roots = RootCertStore::empty();
        for authority in CertificateDer::pem_slice_iter(authorities) {
            let authority = authority.map_err(|source| TlsError::File { path: path.clone(), source })?;
            roots.add(authority).map_err(|error| unusable(error.into()))?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
        verifier.allow_unauthenticated().build().map_err(|error| unusable(error.into()))
    }
}
