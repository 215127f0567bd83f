//! Provides the server's certificate and key, and reads them again while the server runs, so that a renewal needs no restart. One
//! task watches the files; each accepted client uses the newest certificate.

use super::AdmissionError;
use nacelle_base::Chain;
use nacelle_base::task::run_blocking;
use nacelle_stream::{Pem, Tls};
use std::time::Duration;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

/// The interval at which the files are read.
const EVERY: Duration = Duration::from_secs(5);

/// A TLS acceptor with the newest certificate.
pub(super) struct Certificate {
    newest: watch::Receiver<TlsAcceptor>,
    _task: AbortOnDropHandle<()>,
}

impl Certificate {
    /// Reads the files for the first time, and starts the task that watches them.
    pub async fn of(files: Tls) -> Result<Certificate, AdmissionError> {
        let pem = read(&files).await?;
        let (sender, newest) = watch::channel(pem.acceptor()?);
        let task = tokio::spawn(follow(files, pem, sender));
        Ok(Certificate { newest, _task: AbortOnDropHandle::new(task) })
    }

    /// Returns the acceptor with the newest certificate.
    pub fn acceptor(&self) -> TlsAcceptor {
        self.newest.borrow().clone()
    }
}

async fn read(files: &Tls) -> Result<Pem, AdmissionError> {
    let files = files.clone();
    Ok(run_blocking("read the TLS certificate", move || files.read()).await??)
}

/// Reads the files; returns their contents and an acceptor for them if they differ from `known`.
async fn changed(files: &Tls, known: &Pem) -> Result<Option<(Pem, TlsAcceptor)>, AdmissionError> {
    let pem = read(files).await?;
    if pem == *known {
        return Ok(None);
    }
    let acceptor = pem.acceptor()?;
    Ok(Some((pem, acceptor)))
}

/// Applies changes of the files. A half-finished change, whose key does not match the certificate, is ignored until it is
/// complete.
async fn follow(files: Tls, mut pem: Pem, newest: watch::Sender<TlsAcceptor>) {
    let mut told = String::new();
    loop {
        tokio::time::sleep(EVERY).await;
        match changed(&files, &pem).await {
            Ok(None) => told.clear(),
            Ok(Some((new, acceptor))) => {
                pem = new;
                newest.send_replace(acceptor);
                told.clear();
                tracing::info!(certificate = %files.certificate.display(), "a new certificate");
            }
            Err(error) => {
                let text = Chain(&error).to_string();
                if text != told {
                    tracing::warn!("the certificate stays the one that it was: {text}");
                    told = text;
                }
            }
        }
    }
}
