//! Owns: the server's certificate and key: read again while it serves, so that a new one needs no restart.
//! Threads: a task that looks at the files; whoever accepts a client takes what is newest.

use super::AdmissionError;
use nacelle_base::Chain;
use nacelle_base::task::run_blocking;
use nacelle_stream::{Pem, Tls};
use std::time::Duration;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

/// How often the files are looked at.
const EVERY: Duration = Duration::from_secs(5);

/// What speaks TLS, with the newest certificate.
pub(super) struct Certificate {
    newest: watch::Receiver<TlsAcceptor>,
    _task: AbortOnDropHandle<()>,
}

impl Certificate {
    /// Reads the files for the first time.
    pub async fn of(files: Tls) -> Result<Certificate, AdmissionError> {
        let pem = read(&files).await?;
        let (sender, newest) = watch::channel(pem.acceptor()?);
        let task = tokio::spawn(follow(files, pem, sender));
        Ok(Certificate { newest, _task: AbortOnDropHandle::new(task) })
    }

    /// The newest.
    pub fn acceptor(&self) -> TlsAcceptor {
        self.newest.borrow().clone()
    }
}

async fn read(files: &Tls) -> Result<Pem, AdmissionError> {
    let files = files.clone();
    Ok(run_blocking("read the TLS certificate", move || files.read()).await??)
}

/// What is in the files, and speaks TLS with it, if it is not this.
async fn changed(files: &Tls, known: &Pem) -> Result<Option<(Pem, TlsAcceptor)>, AdmissionError> {
    let pem = read(files).await?;
    if pem == *known {
        return Ok(None);
    }
    let acceptor = pem.acceptor()?;
    Ok(Some((pem, acceptor)))
}

/// Takes over what is new in the files. Half of a change, a key that does not go with the certificate, is no change yet.
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
