//! Implements the RPCs that return a URL: checks the request, finds its container or pod, and registers it with the streaming
//! server.

use super::Cri;
use super::sandbox::required;
use super::status::{refuse, status};
use nacelle_base::FailureKind;
use nacelle_proto::cri;
use nacelle_stream::{Attach, Exec, TooManyTokens};
use tonic::Status;

impl Cri {
    pub(super) async fn on_exec(&self, request: cri::ExecRequest) -> Result<cri::ExecResponse, Status> {
        let cri::ExecRequest { container_id, cmd, tty, stdin, stdout, stderr } = request;
        let requested = required("container_id", &container_id)?;
        if cmd.is_empty() {
            return Err(refuse(FailureKind::Invalid, "cmd is missing"));
        }
        check_streams(tty, [stdin, stdout, stderr])?;
        let container = self.node.running(requested).map_err(status)?.id.to_string();
        let url = self
            .streams
            .exec(Exec { container, args: cmd, tty, stdin, stdout, stderr })
            .map_err(to_exhausted_status)?;
        Ok(cri::ExecResponse { url })
    }

    pub(super) async fn on_attach(&self, request: cri::AttachRequest) -> Result<cri::AttachResponse, Status> {
        let cri::AttachRequest { container_id, stdin, tty, stdout, stderr } = request;
        let requested = required("container_id", &container_id)?;
        check_streams(tty, [stdin, stdout, stderr])?;
        let found = self.node.running(requested).map_err(status)?;
        if found.tty != tty {
            let message = format!("tty is {tty}, that of container {requested} is {}: they must be the same", !tty);
            return Err(refuse(FailureKind::Invalid, &message));
        }
        let attach = Attach { container: found.id.to_string(), tty, stdin, stdout, stderr };
        Ok(cri::AttachResponse { url: self.streams.attach(attach).map_err(to_exhausted_status)? })
    }

    pub(super) async fn on_port_forward(
        &self,
        request: cri::PortForwardRequest,
    ) -> Result<cri::PortForwardResponse, Status> {
        let requested = required("pod_sandbox_id", &request.pod_sandbox_id)?;
        let port = |port: &i32| match u16::try_from(*port) {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(refuse(FailureKind::Invalid, &format!("port is {port}: 1 to 65535 are ports"))),
        };
        let ports = request.port.iter().map(port).collect::<Result<_, _>>()?;
        let pod = self.node.ready(requested).map_err(status)?.0.pod.id.to_string();
        Ok(cri::PortForwardResponse { url: self.streams.forward(pod, ports).map_err(to_exhausted_status)? })
    }
}

/// Checks CRI's rules for streams.
fn check_streams(tty: bool, [stdin, stdout, stderr]: [bool; 3]) -> Result<(), Status> {
    if tty && stderr {
        return Err(refuse(FailureKind::Invalid, "tty and stderr are true: a terminal's errors are in its stdout"));
    }
    if !stdin && !stdout && !stderr {
        return Err(refuse(FailureKind::Invalid, "stdin, stdout and stderr are false: one of them is needed"));
    }
    Ok(())
}

fn to_exhausted_status(error: TooManyTokens) -> Status {
    refuse(FailureKind::Exhausted, &error.to_string())
}
