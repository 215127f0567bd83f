//! Runs the VM of a machine pod in a process of its own (`nacelle-keeper`). The process takes the place of the agent in other
//! pods and implements the same protocol (agent.proto), but its single container is a whole VM in QEMU with disks, firmware and a
//! console. The crate depends on `base`, `proto`, and the process supervision of `engine`; it knows neither CRI nor the image
//! store. One thread runs the runtime, one more watches each child process, and blocking work runs on the runtime's pool.

mod changes;
mod client;
mod console;
mod credentials;
mod dhcp;
mod disk;
mod dump;
mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod guest_agent;
mod hotplug;
mod hotplug_list;
mod json_lines;
mod network;
mod pins;
pub mod qcow2;
mod qemu;
mod qemu_process;
mod quiesce;
mod restart;
mod rpc;
mod seed;
mod shares;
mod snapshots;
mod startup;
mod streams;
mod sys;
mod verbs;
mod vm;
mod vm_manager;

pub use credentials::NO_GUEST_AGENT;
pub use error::KeeperError;
pub use hotplug::check_volume;
pub use hotplug_list::{HOTPLUG_LIST, HotplugDisk, parse_hotplug_list};
pub use verbs::streams_output;

use crate::rpc::KeeperService;
use crate::startup::StartupResources;
use crate::vm::Settings;
use crate::vm_manager::VmManager;
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
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// How long after Shutdown the pod process may take to read the remaining answers.
const SHUTDOWN_DELAY: Duration = Duration::from_millis(50);

/// Runs the process with the arguments from the pod process (see `StartupResources::parse`).
pub fn run(arguments: impl IntoIterator<Item = String>) -> ExitCode {
    let Some(mut startup) = StartupResources::parse(arguments) else {
        eprintln!("nacelle-keeper: invalid arguments; only nacelle-pod starts this program");
        return ExitCode::from(2);
    };
    let result = startup.handshake().map_err(|error| Chain(&error).to_string()).and_then(|network| {
        let StartupResources { directory, scratch, qemu, accelerator, connection, rpc, streams, taps, dhcp, shares } =
            startup;
        drop(connection);
        let settings = Settings { directory, scratch, qemu, accelerator, taps, dhcp, shares, network };
        serve(settings, rpc, streams).map_err(|error| error.to_string())
    });
    match result {
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
    let result = runtime.block_on(async {
        let listener = |listener: StdListener| {
            listener.set_nonblocking(true)?;
            UnixListener::from_std(listener)
        };
        let manager = Arc::new(VmManager::new(settings));
        tokio::spawn(streams::serve(listener(streams)?, Arc::clone(&manager)));
        let shutdown = Arc::new(Notify::new());
        let service = KeeperService { manager: Arc::clone(&manager), shutdown: Arc::clone(&shutdown) };
        let service = AgentServer::new(service).max_decoding_message_size(nacelle_proto::wire::MAX_LARGE_MESSAGE);
        let server = nacelle_proto::server::builder()
            .timeout(REQUEST_TIMEOUT)
            .concurrency_limit_per_connection(256)
            .add_service(service)
            .serve_with_incoming(UnixListenerStream::new(listener(rpc)?));
        tokio::select! {
            result = server => result.map_err(io::Error::other),
            () = async {
                shutdown.notified().await;
                if let Some(vm) = manager.newest() {
                    vm.kill();
                }
                tokio::time::sleep(SHUTDOWN_DELAY).await;
            } => Ok(()),
        }
    });
    // The remaining blocking work holds nothing that must be released.
    runtime.shutdown_background();
    result
}
