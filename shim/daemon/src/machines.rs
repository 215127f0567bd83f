//! Gives the machines crate access to the machine pods of the node: implements its trait [`PodRuntime`] for [`Node`]. Nothing
//! here is used for container pods.

use crate::lifecycle::{LifecycleError, Node};
use crate::streaming::NodeStreams;
use nacelle_base::{ContainerId, PodId};
use nacelle_machines::PodRuntime;
use nacelle_machines::runtime::{ExecOutput, ExecStreams, MachinePodView, PodRuntimeError};
use nacelle_machines::vms::{VmLock, Vms};
use nacelle_model::record::VmRecord;
use nacelle_stream::{Exec, ProcessStreams, StreamBackend as _};
use std::path::PathBuf;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;

#[tonic::async_trait]
impl PodRuntime for Node {
    fn machine_pods(&self) -> Vec<MachinePodView> {
        let views = self.views();
        let machines = views.iter().filter(|view| view.pod.config.kind.machine().is_some());
        machines.map(|view| MachinePodView { pod: view.pod.clone(), containers: view.containers.clone() }).collect()
    }

    fn changes(&self) -> watch::Receiver<()> {
        self.services().events.changes()
    }

    fn vms(&self) -> &Vms {
        &self.services().vms
    }

    fn images(&self) -> &nacelle_image::ImageStore {
        &self.services().images
    }

    fn pod_directory(&self, pod: &PodId) -> PathBuf {
        self.services().pod_dir(pod)
    }

    fn allows_annotation(&self, handler: &str, annotation: &str) -> bool {
        let handler = self.services().config.handler(handler);
        handler.is_some_and(|(_, handler)| handler.allowed_annotations.iter().any(|allowed| allowed == annotation))
    }

    fn lock_vm(&self, vm: &str, operation: &'static str) -> Result<(VmRecord, VmLock), PodRuntimeError> {
        Node::lock_vm(self, vm, operation).map_err(PodRuntimeError::new)
    }

    async fn exec(
        &self,
        container: &ContainerId,
        args: Vec<String>,
        timeout: Duration,
    ) -> Result<ExecOutput, PodRuntimeError> {
        let ended = Node::exec(self, container.as_str(), args, Some(timeout)).await.map_err(PodRuntimeError::new)?;
        Ok(ExecOutput { stdout: ended.stdout, stderr: ended.stderr, exit_code: ended.exit_code })
    }

    async fn start_exec(&self, container: &ContainerId, args: Vec<String>) -> Result<ExecStreams, PodRuntimeError> {
        let id = container.to_string();
        let exec = Exec { container: id.clone(), args, tty: false, stdin: false, stdout: true, stderr: true };
        let process = NodeStreams::new(self.clone()).exec(&exec).await.map_err(PodRuntimeError::new)?;
        let ProcessStreams { stdout: Some(stdout), stderr: Some(stderr), end, .. } = process else {
            // Unreachable: a requested stream is open, or its error was returned.
            return Err(PodRuntimeError::new(LifecycleError::NotRunning { id, why: String::new() }));
        };
        Ok(ExecStreams { stdout, stderr, exit_code: Box::pin(async move { end.await.map_err(PodRuntimeError::new) }) })
    }

    async fn open_console(&self, container: &ContainerId) -> Result<(UnixStream, UnixStream), PodRuntimeError> {
        NodeStreams::new(self.clone()).console(container.as_str()).await.map_err(PodRuntimeError::new)
    }

    async fn connect_tcp(&self, pod: &PodId, port: u16) -> Result<UnixStream, PodRuntimeError> {
        NodeStreams::new(self.clone()).connect_to_port(pod.as_str(), port).await.map_err(PodRuntimeError::new)
    }
}
