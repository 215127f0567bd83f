//! Serves after the boot: starts the runtime, the gRPC service, the streams and the reaper, and stops when the host sends Shutdown.
//!
//! The runtime has one thread, and further ones for calls that block.

mod rpc;
mod streams;

use nacelle_proto::agent::agent_server::AgentServer;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, oneshot};

use crate::boot::BootedAgent;
use crate::container::AgentPod;
use crate::listener::HostListener;
use rpc::{AgentService, DEADLINE};

/// The time that the host has after Shutdown to read its answers.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(50);

/// Serves until the host sends Shutdown.
pub fn serve(ready: BootedAgent) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(64).build()?;
    runtime.block_on(run(ready))
}

async fn run(ready: BootedAgent) -> io::Result<()> {
    let pod = AgentPod::new(
        ready.zygote,
        ready.disks,
        ready.huge_pages,
        ready.config.shared_pid,
        ready.node_pid,
        ready.users,
    );
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
    // The first container needs the scratch disk. If mounting fails here, it is tried again, and reported, when the container is created.
    let early = Arc::clone(&pod);
    tokio::task::spawn_blocking(move || early.disks.mount_scratch());
    tokio::spawn(streams::serve_streams(HostListener::new(ready.streams)?, Arc::clone(&pod)));
    let service = AgentService {
        pod: Arc::clone(&pod),
        processors: Arc::new(ready.processors),
        memory: Arc::new(ready.memory),
        end: Arc::clone(&end),
        has_guest: ready.has_guest,
        generation: Mutex::default(),
    };
    let (shutdown_begun, begun) = oneshot::channel::<()>();
    let shutdown = async move {
        end.notified().await;
        if let Err(error) = pod.kill_all_containers() {
            tracing::warn!(%error, "cannot kill the containers");
        }
        drop(shutdown_begun);
    };
    // The server ends when it has answered all requests, Shutdown among them.
    let server = nacelle_proto::server::builder()
        .timeout(DEADLINE)
        .concurrency_limit_per_connection(256)
        .add_service(AgentServer::new(service))
        .serve_with_incoming_shutdown(HostListener::new(ready.rpc)?.incoming(), shutdown);
    let late = async {
        let _ = begun.await;
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    };
    tokio::select! {
        result = server => result.map_err(io::Error::other),
        () = late => Ok(()),
    }
}
