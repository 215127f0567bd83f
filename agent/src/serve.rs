//! Owns: the agent's life after the boot: the runtime, the service, the streams, reaping, and the end.
//! Threads: one runtime thread, and short-lived ones for calls that block.

use nacelle_proto::agent::agent_server::AgentServer;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use tokio_stream::{Stream, StreamExt};
use tokio_vsock::{VsockListener, VsockStream};

use crate::boot::Ready;
use crate::container::Pod;
use crate::image::Disks;
use crate::rpc::{DEADLINE, Service};
use crate::{streams, sys};

/// How long the answer to Shutdown has to reach the host.
const FAREWELL: Duration = Duration::from_millis(50);

/// Serves until the host says Shutdown.
pub fn serve(ready: Ready) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(64).build()?;
    runtime.block_on(run(ready))
}

async fn run(ready: Ready) -> io::Result<()> {
    let disks = Disks::new(ready.config.image_disk, ready.config.scratch_disk);
    let pod = Pod::new(ready.zygote, disks, ready.config.shared_pid);
    let end = Arc::new(Notify::new());
    let mut children = signal(SignalKind::child())?;
    let reaper = Arc::clone(&pod);
    tokio::spawn(async move {
        loop {
            reaper.reap();
            if children.recv().await.is_none() {
                return;
            }
        }
    });
    // The first container will want it; if it fails, that container's creation says why.
    let early = Arc::clone(&pod);
    tokio::task::spawn_blocking(move || early.disks.scratch());
    tokio::spawn(streams::serve(sys::vsock_listener(ready.streams), Arc::clone(&pod)));
    let service = Service { pod: Arc::clone(&pod), end: Arc::clone(&end), generation: Mutex::default() };
    let server = tonic::transport::Server::builder()
        .timeout(DEADLINE)
        .concurrency_limit_per_connection(256)
        .add_service(AgentServer::new(service))
        .serve_with_incoming(from_host(sys::vsock_listener(ready.rpc)));
    tokio::select! {
        result = server => result.map_err(io::Error::other),
        () = end.notified() => {
            if let Err(error) = pod.kill_everything() {
                tracing::warn!(%error, "cannot kill the containers");
            }
            tokio::time::sleep(FAREWELL).await;
            Ok(())
        }
    }
}

/// The host's connections. Whoever else reaches the port, such as a container of this machine, is turned away: the
/// service obeys everybody.
fn from_host(listener: VsockListener) -> impl Stream<Item = io::Result<VsockStream>> {
    listener.incoming().filter(|connection| match connection {
        Ok(connection) => connection.peer_addr().is_ok_and(|peer| peer.cid() == libc::VMADDR_CID_HOST),
        Err(_) => true,
    })
}
