//! Owns: the port of the streams: one connection per stream, its preamble, and joining it to the process.

use nacelle_base::Chain;
use nacelle_proto::agent::{Stream, StreamOpen};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio_vsock::{VsockListener, VsockStream};

use crate::container::Pod;
use crate::frame;

/// How many connections there may be at once.
const CONNECTIONS: usize = 1024;
/// How long a connection may take to say what it is.
const PREAMBLE: Duration = Duration::from_secs(30);

/// Serves for ever.
pub async fn serve(listener: VsockListener, pod: Arc<Pod>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((connection, peer)) if peer.cid() == libc::VMADDR_CID_HOST => {
                let pod = Arc::clone(&pod);
                tokio::spawn(async move {
                    join(connection, &pod).await;
                    drop(place);
                });
            }
            Ok((_, peer)) => tracing::warn!(cid = peer.cid(), "a stream that does not come from the host"),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a stream");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn join(mut connection: VsockStream, pod: &Pod) {
    let open = match tokio::time::timeout(PREAMBLE, frame::read_async::<StreamOpen>(&mut connection)).await {
        Ok(Ok(open)) => open,
        Ok(Err(error)) => return tracing::warn!(error = %Chain(&error), "a stream without a preamble"),
        Err(_late) => return tracing::warn!("a stream that does not say what it is"),
    };
    let process = match pod.process(&open.id, &open.exec_id) {
        Ok(process) => process,
        Err(error) => return tracing::warn!(error = %Chain(&error), "a stream of no process"),
    };
    let stdio = &process.stdio;
    let result = match open.stream() {
        Stream::Stdin => match &stdio.stdin {
            // The end of input of a terminal is a character, not the end of the connection.
            Some(channel) => channel.take_input(&mut connection, stdio.terminal.is_none()).await,
            None => Ok(()),
        },
        Stream::Stdout | Stream::Stderr => {
            let channel = if open.stream() == Stream::Stdout { &stdio.stdout } else { &stdio.stderr };
            match channel {
                Some(channel) => channel.send_output(&mut connection).await,
                None => Ok(()),
            }
        }
        Stream::Unspecified => Ok(()),
    };
    if let Err(error) = result {
        tracing::debug!(%error, id = open.id, "a stream broke");
    }
}
