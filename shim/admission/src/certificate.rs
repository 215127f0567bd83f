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
const READ_INTERVAL: Duration = Duration::from_secs(5);

/// A TLS acceptor with the newest certificate.
pub(super) struct Certificate {
    newest: watch::Receiver<TlsAcceptor>,
    _task: AbortOnDropHandle<()>,
}

impl Certificate {
    /// Reads the files for the first time, and starts the task that watches them.
    pub async fn load(files: Tls) -> Result<Certificate, AdmissionError> {
        let pem = read(&files).await?;
        let (sender, newest) = watch::channel(pem.acceptor()?);
        let task = tokio::spawn(watch_files(files, pem, sender));
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
async fn read_if_changed(files: &Tls, known: &Pem) -> Result<Option<(Pem, TlsAcceptor)>, AdmissionError> {
    let pem = read(files).await?;
    if pem == *known {
        return Ok(None);
    }
    let acceptor = pem.acceptor()?;
    Ok(Some((pem, acceptor)))
}

/// Applies changes of the files. A half-finished change, whose key does not match the certificate, is ignored until it is
/// complete.
async fn watch_files(files: Tls, mut pem: Pem, newest: watch::Sender<TlsAcceptor>) {
    let mut last_warning = String::new();
    loop {
        tokio::time::sleep(READ_INTERVAL).await;
        match read_if_changed(&files, &pem).await {
            Ok(None) => last_warning.clear(),
            Ok(Some((new, acceptor))) => {
                pem = new;
                newest.send_replace(acceptor);
                last_warning.clear();
                tracing::info!(certificate = %files.certificate.display(), "a new TLS certificate is in use");
            }
            Err(error) => {
                let text = Chain(&error).to_string();
                if text != last_warning {
                    tracing::warn!(
                        "cannot use the changed certificate files; the previous certificate stays in use: {text}"
                    );
                    last_warning = text;
                }
            }
        }
    }
}
