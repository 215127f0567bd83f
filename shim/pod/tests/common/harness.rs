//! Provides the `main` of test programs that are their own pod process: `TEST --dir DIR` serves a pod; with any other
//! arguments the program behaves as cargo's test programs do.

use nacelle_base::test_program::run_tests;
use nacelle_pod::identity;
use nacelle_pod::spec::{EngineSpec, PodSpec};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

pub type Test = std::pin::Pin<Box<dyn Future<Output = ()>>>;
pub type Start = fn() -> Test;

/// Serves a pod, or runs the tests one after the other.
pub fn main(tests: &[(&str, Start)]) -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    match args.as_slice() {
        [_, flag, dir] if flag == "--dir" => {
            return if nacelle_pod::wait_for_admission() { serve(Path::new(dir)) } else { ExitCode::FAILURE };
        }
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    run_tests(tests, |test| {
        runtime.block_on(async {
            let local = tokio::task::LocalSet::new();
            local.run_until(async { tokio::task::spawn_local(test()).await.is_ok() }).await
        })
    })
}

fn serve(dir: &Path) -> ExitCode {
    tracing_subscriber::fmt().with_ansi(false).init();
    let is_fake = PodSpec::read(dir).is_ok_and(|spec| match &spec.engine {
        EngineSpec::Keeper { qemu, .. } => qemu == Path::new("/fake"),
        engine => *engine == super::fake_engine_spec(),
    });
    if is_fake {
        let agent = Arc::default();
        nacelle_pod::run_with(dir, |_| Ok(Arc::new(super::engine(&agent))))
    } else {
        nacelle_pod::run(dir)
    }
}

/// Kills the pod process of a directory, unless it is this process.
pub fn end(dir: &Path) {
    if let Ok(Some(identity)) = identity::read(dir)
        && identity::is_alive(&identity).unwrap_or(false)
        && identity.pid != i32::try_from(std::process::id()).unwrap_or_default()
    {
        let pid = nix::unistd::Pid::from_raw(identity.pid);
        // The process may have ended meanwhile.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    }
}
