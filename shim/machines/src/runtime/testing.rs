//! Provides a pod runtime for tests. Commands are recorded and succeed, or give their output to the test; consoles and locks are not available.

use super::{ExecOutput, ExecStreams, MachinePodView, PodRuntime, PodRuntimeError};
use crate::vms::{UnknownVms, VmError, VmLock, Vms};
use nacelle_base::{ContainerId, PodId};
use nacelle_model::record::VmRecord;
use nacelle_store::Store;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};

/// A pod runtime without pod processes.
pub(crate) struct FakeRuntime {
    pods: Mutex<Vec<MachinePodView>>,
    changes: watch::Sender<()>,
    vms: Vms,
    images: nacelle_image::ImageStore,
    execs: mpsc::UnboundedSender<Vec<String>>,
    streams: watch::Sender<Vec<UnixStream>>,
    directory: tempfile::TempDir,
}

fn unavailable<T>() -> Result<T, PodRuntimeError> {
    Err(PodRuntimeError::new(VmError::NotFound { id: "test/none".to_owned() }))
}

impl FakeRuntime {
    /// Returns a runtime without pods, and the commands that will be run in it.
    pub fn new() -> (FakeRuntime, mpsc::UnboundedReceiver<Vec<String>>) {
        let directory = tempfile::tempdir().unwrap();
        let (store, contents) = Store::open(&directory.path().join("s.redb"), None).unwrap();
        let vms = Vms::open(directory.path().join("vms"), store, contents.vms, UnknownVms::Remove).unwrap();
        let images = nacelle_image::ImageStore::open(&directory.path().join("images"), Default::default()).unwrap();
        let (execs, received) = mpsc::unbounded_channel();
        (
            FakeRuntime {
                pods: Mutex::default(),
                changes: watch::Sender::new(()),
                vms,
                images,
                execs,
                streams: watch::Sender::default(),
                directory,
            },
            received,
        )
    }

    /// Waits until a command with streams is started, and returns the other end of its output.
    pub async fn next_stream(&self) -> UnixStream {
        let mut streams = self.streams.subscribe();
        streams.wait_for(|streams| !streams.is_empty()).await.unwrap();
        let mut next = None;
        self.streams.send_modify(|streams| next = streams.pop());
        next.unwrap()
    }

    /// Replaces the pods and notifies of the change.
    pub fn set_pods(&self, pods: Vec<MachinePodView>) {
        *self.pods.lock().unwrap() = pods;
        self.changes.send_replace(());
    }
}

#[tonic::async_trait]
impl PodRuntime for FakeRuntime {
    fn machine_pods(&self) -> Vec<MachinePodView> {
        self.pods.lock().unwrap().clone()
    }

    fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    fn vms(&self) -> &Vms {
        &self.vms
    }

    fn images(&self) -> &nacelle_image::ImageStore {
        &self.images
    }

    fn pod_directory(&self, _pod: &PodId) -> PathBuf {
        self.directory.path().to_owned()
    }

    fn allows_annotation(&self, _handler: &str, _annotation: &str) -> bool {
        true
    }

    fn lock_vm(&self, _vm: &str, _operation: &'static str) -> Result<(VmRecord, VmLock), PodRuntimeError> {
        unavailable()
    }

    async fn exec(
        &self,
        _container: &ContainerId,
        args: Vec<String>,
        _timeout: Duration,
    ) -> Result<ExecOutput, PodRuntimeError> {
        self.execs.send(args).unwrap();
        Ok(ExecOutput { stdout: br#"{"phase": "Running"}"#.to_vec(), ..ExecOutput::default() })
    }

    async fn start_exec(&self, _container: &ContainerId, args: Vec<String>) -> Result<ExecStreams, PodRuntimeError> {
        self.execs.send(args).unwrap();
        let ((stdout, output), (stderr, _)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        self.streams.send_modify(|streams| streams.push(output));
        Ok(ExecStreams { stdout, stderr, exit_code: Box::pin(std::future::pending()) })
    }

    async fn open_console(&self, _container: &ContainerId) -> Result<(UnixStream, UnixStream), PodRuntimeError> {
        unavailable()
    }

    async fn connect_tcp(&self, _pod: &PodId, _port: u16) -> Result<UnixStream, PodRuntimeError> {
        unavailable()
    }
}
