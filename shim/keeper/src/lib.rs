//! Runs the VM of a machine pod in a process of its own (`nacelle-keeper`). The process takes the place of the agent in other
//! pods and implements the same protocol (agent.proto), but its single container is a whole VM in QEMU with disks, firmware and a
//! console. The crate depends on `base`, `proto`, and the process supervision of `engine`; it knows neither CRI nor the image
//! store. One thread runs the runtime, one more watches each child process, and blocking work runs on the runtime's pool.

mod added;
mod console;
mod credentials;
mod dhcp;
mod disk;
mod dump;
mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod guest_agent;
mod hold;
mod keeper;
mod lines;
mod live;
mod machine;
mod network;
mod pins;
mod place;
pub mod qcow2;
mod qemu;
mod rpc;
mod runs;
mod seed;
mod shares;
mod snapshots;
mod streams;
mod sys;
mod verbs;

pub use added::{Added, LIST as ADDED, check as check_volume, read as read_added};
pub use credentials::NOBODY;
pub use error::KeeperError;
pub use verbs::has_long_answer;

use crate::keeper::Keeper;
use crate::machine::Settings;
use crate::place::Place;
use crate::rpc::Service;
use nacelle_base::Chain;
use nacelle_proto::agent::agent_server::AgentServer;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::Notify;
use tokio_stream::wrappers::UnixListenerStream;

/// The longest time that a request may take; a caller's own deadline may be shorter.
const DEADLINE: Duration = Duration::from_secs(120);
/// How long after Shutdown the pod process may take to read the remaining answers.
const FAREWELL: Duration = Duration::from_millis(50);

/// Runs the process with the arguments from the pod process (see `Place::parse`).
pub fn run(arguments: impl IntoIterator<Item = String>) -> ExitCode {
    let Some(mut place) = Place::parse(arguments) else {
        eprintln!("nacelle-keeper is started by nacelle-pod, and runs nowhere else");
        return ExitCode::from(2);
    };
    let served = place.greet().map_err(|error| Chain(&error).to_string()).and_then(|network| {
        let Place { directory, scratch, qemu, accelerator, host, rpc, streams, taps, dhcp, shares } = place;
        drop(host);
        let settings = Settings { directory, scratch, qemu, accelerator, taps, dhcp, shares, network };
        serve(settings, rpc, streams).map_err(|error| error.to_string())
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nacelle-keeper: {error}");
            ExitCode::FAILURE
        }
    }
}

type StdListener = std::os::unix::net::UnixListener;

/// Serves until the pod process sends Shutdown.
fn serve(settings: Settings, rpc: StdListener, streams: StdListener) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(16).build()?;
    let served = runtime.block_on(async {
        let listener = |listener: StdListener| {
            listener.set_nonblocking(true)?;
            UnixListener::from_std(listener)
        };
        let keeper = Arc::new(Keeper::new(settings));
        tokio::spawn(streams::serve(listener(streams)?, Arc::clone(&keeper)));
        let end = Arc::new(Notify::new());
        let service = Service { keeper: Arc::clone(&keeper), end: Arc::clone(&end) };
        let service = AgentServer::new(service).max_decoding_message_size(nacelle_proto::wire::LARGE);
        let server = nacelle_proto::server::builder()
            .timeout(DEADLINE)
            .concurrency_limit_per_connection(256)
            .add_service(service)
            .serve_with_incoming(UnixListenerStream::new(listener(rpc)?));
        tokio::select! {
            served = server => served.map_err(io::Error::other),
            () = async {
                end.notified().await;
                if let Some(machine) = keeper.last() {
                    machine.kill();
                }
                tokio::time::sleep(FAREWELL).await;
            } => Ok(()),
        }
    });
    // The remaining blocking work holds nothing that must be released.
    runtime.shutdown_background();
    served
}
