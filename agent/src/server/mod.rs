//! Owns: the agent's life after the boot: the runtime, the service, the streams, reaping, and the end.
//! Threads: one runtime thread, and short-lived ones for calls that block.

mod rpc;
mod streams;

use nacelle_proto::agent::agent_server::AgentServer;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, oneshot};

use crate::boot::Ready;
use crate::container::Pod;
use crate::listener::Listener;
use rpc::{DEADLINE, Service};

/// How long after Shutdown a host may leave its answers unread.
const FAREWELL: Duration = Duration::from_millis(50);

/// Serves until the host says Shutdown.
pub fn serve(ready: Ready) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(64).build()?;
    runtime.block_on(run(ready))
}

async fn run(ready: Ready) -> io::Result<()> {
    let pod =
        Pod::new(ready.zygote, ready.disks, ready.huge_pages, ready.config.shared_pid, ready.node_pid, ready.users);
    let end = Arc::new(Notify::new());
    let mut children = signal(SignalKind::child())?;
    let reaper = Arc::clone(&pod);
    tokio::spawn(async move {
        loop {
            reaper.reap_processes();
            if children.recv().await.is_none() {
                return;
            }
        }
    });
    // The first container will want it; if it fails, that container's creation says why.
    let early = Arc::clone(&pod);
    tokio::task::spawn_blocking(move || early.disks.scratch());
    tokio::spawn(streams::serve(Listener::new(ready.streams)?, Arc::clone(&pod)));
    let service = Service {
        pod: Arc::clone(&pod),
        processors: Arc::new(ready.processors),
        memory: Arc::new(ready.memory),
        end: Arc::clone(&end),
        generation: Mutex::default(),
    };
    let (tell, told) = oneshot::channel::<()>();
    let farewell = async move {
        end.notified().await;
        if let Err(error) = pod.kill_all_containers() {
            tracing::warn!(%error, "cannot kill the containers");
        }
        drop(tell);
    };
    // It ends when what was asked has been answered, Shutdown among it.
    let server = nacelle_proto::server::builder()
        .timeout(DEADLINE)
        .concurrency_limit_per_connection(256)
        .add_service(AgentServer::new(service))
        .serve_with_incoming_shutdown(Listener::new(ready.rpc)?.incoming(), farewell);
    let late = async {
        let _ = told.await;
        tokio::time::sleep(FAREWELL).await;
    };
    tokio::select! {
        result = server => result.map_err(io::Error::other),
        () = late => Ok(()),
    }
}
