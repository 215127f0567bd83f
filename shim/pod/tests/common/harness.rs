//! Provides the `main` of test programs that are their own pod process: `TEST --dir DIR` serves a pod; with any other
//! arguments the program behaves as cargo's test programs do.

use nacelle_pod::identity;
use nacelle_pod::spec::PodSpec;
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
    let filters: Vec<&String> = args.iter().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let wanted = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()));
    let tests: Vec<_> = tests.iter().filter(|(name, _)| wanted(name)).collect();
    if args.iter().any(|arg| arg == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", tests.len());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut failed = Vec::new();
    for (name, test) in &tests {
        let passed = runtime.block_on(async {
            let local = tokio::task::LocalSet::new();
            local.run_until(async { tokio::task::spawn_local(test()).await.is_ok() }).await
        });
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
        if !passed {
            failed.push(name);
        }
    }
    if !failed.is_empty() {
        println!("\nfailures:");
        failed.iter().for_each(|name| println!("    {name}"));
    }
    let (word, passed) = (if failed.is_empty() { "ok" } else { "FAILED" }, tests.len() - failed.len());
    println!(
        "\ntest result: {word}. {passed} passed; {} failed; 0 ignored; 0 measured; 0 filtered out\n",
        failed.len()
    );
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn serve(dir: &Path) -> ExitCode {
    tracing_subscriber::fmt().with_ansi(false).init();
    let is_fake = PodSpec::read(dir).is_ok_and(|spec| spec.engine == super::fake_engine_spec());
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
