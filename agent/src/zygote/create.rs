//! Owns: making a container with libcontainer, in a child of the zygote. The container's first process outlives the
//! child and becomes the agent's.

use libcontainer::container::builder::ContainerBuilder;
use libcontainer::syscall::syscall::SyscallType;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use super::child::defect;
use super::executor::Program;
use super::{Create, Made, Refusal, Why, receive_with};
use crate::paths;

pub(super) fn create(request: &Create, stdio: Vec<OwnedFd>) -> Result<Made, Refusal> {
    let (reason, report) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK)
        .map_err(|error| defect("make a pipe", &error))?;
    let bundle = Path::new(paths::BUNDLES).join(&request.id);
    let failed = |error: libcontainer::error::LibcontainerError| {
        let mut refusal = defect("make the container", &error);
        let mut code = [0];
        if nix::unistd::read(&reason, &mut code) == Ok(1) {
            refusal.why = match code[0] {
                code if code == Why::NoSuchProgram as u8 => Why::NoSuchProgram,
                code if code == Why::Unusable as u8 => Why::Unusable,
                _ => Why::Defect,
            };
        }
        refusal
    };
    let mut builder = ContainerBuilder::new(request.id.clone(), SyscallType::default())
        .with_executor(Program { report: Arc::new(report) })
        .with_root_path(paths::CONTAINERS)
        .map_err(failed)?;
    let mut console = None;
    if request.tty {
        let path = bundle.join("console");
        console = Some(UnixListener::bind(&path).map_err(|error| defect("listen for the terminal", &error))?);
        builder = builder.with_console_socket(Some(path));
    } else {
        let mut stdio = stdio.into_iter();
        if let (Some(stdin), Some(stdout), Some(stderr)) = (stdio.next(), stdio.next(), stdio.next()) {
            builder = builder.with_stdin(stdin).with_stdout(stdout).with_stderr(stderr);
        }
    }
    let container = builder.as_init(&bundle).with_systemd(false).with_detach(true).build().map_err(failed)?;
    let pid = container.pid().map(|pid| pid.as_raw()).ok_or_else(|| Refusal {
        message: "cannot make the container: it has no process".to_owned(),
        why: Why::Defect,
    })?;
    let terminal = console.map(receive_terminal).transpose();
    let terminal = terminal.map_err(|error| defect("receive the container's terminal", &error))?;
    Ok(Made { pid, terminal })
}

fn receive_terminal(console: UnixListener) -> io::Result<OwnedFd> {
    // The container's first process has connected and sent before `build` returned.
    let (peer, _) = console.accept()?;
    receive_with(&peer)?.1.pop().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}
