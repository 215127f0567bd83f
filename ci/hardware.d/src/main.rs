//! `nacelle-hardware` measures Nacelle on a machine whose KVM runs guests on hardware. `ci/hardware` packs it with its parts.
//!
//! It checks KVM first and exits at once, with exit code 3, if guests do not run on hardware. Then it runs section after section,
//! and writes one JSON object a line to standard output. It reverts all changes on the host, also after a signal and at the end
//! of its time.

mod facts;
mod memory;
mod page;
mod peers;
mod pods;
mod report;
mod sections;
mod settings;
mod undo;
mod vm;

use anyhow::{Context, bail};
use nacelle_engine::{KvmVerdict, probe_kvm};
use nix::sys::signal::{SigSet, Signal};
use pods::PodFactory;
use report::FigureReport;
use sections::SectionInput;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// A section failed, or the time limit was reached.
const FAILED: u8 = 1;
/// Nothing was started: an argument, the user, the bundle or the work directory is wrong.
const USAGE: u8 = 2;
/// KVM does not run guests on hardware here.
const NO_HARDWARE: u8 = 3;
/// The program was ended by a signal.
const INTERRUPTED: u8 = 130;

const HELP: &str = "\
usage: nacelle-hardware [run] [--quick] [--only NAME,...] [--work DIR]    measures; JSON lines on standard output
       nacelle-hardware page <figures.jsonl                               the figures as Markdown
       nacelle-hardware scratch DIR                                       creates the template of scratch disks (for ci/hardware)
exit codes of a run: 0, 1 a section failed, 2 not started (arguments, not root, parts missing, no work directory), 3 KVM does not run guests
on hardware here";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        [vm::CHILD_ARGUMENT, description] => vm::serve(description).map(|()| ExitCode::SUCCESS),
        ["page"] => page::render_page(std::io::stdin().lock()).map(|page| {
            print!("{page}");
            ExitCode::SUCCESS
        }),
        ["scratch", directory] => {
            let created = nacelle_pod::scratch::create_template(Path::new(directory), pods::SCRATCH_MIB);
            created.map(|_path| ExitCode::SUCCESS).context("cannot create the template of scratch disks")
        }
        ["help" | "--help" | "-h"] => {
            println!("{HELP}");
            Ok(ExitCode::SUCCESS)
        }
        ref words => match RunOptions::parse(words) {
            Ok(options) => run(&options),
            Err(error) => {
                eprintln!("{error}\n{HELP}");
                Ok(ExitCode::from(USAGE))
            }
        },
    };
    let code = done.unwrap_or_else(|error| {
        eprintln!("nacelle-hardware: {error:#}");
        ExitCode::from(FAILED)
    });
    undo::wait_if_ending();
    code
}

/// The options of a run.
#[derive(Debug, Default, PartialEq)]
struct RunOptions {
    quick: bool,
    only: Vec<String>,
    work: Option<PathBuf>,
}

impl RunOptions {
    fn parse(words: &[&str]) -> anyhow::Result<RunOptions> {
        let mut options = RunOptions::default();
        let mut words = words.iter().skip(usize::from(words.first() == Some(&"run")));
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} has no value"));
            match *word {
                "--quick" => options.quick = true,
                "--only" => options.only = value()?.split(',').map(str::to_owned).collect(),
                "--work" => options.work = Some(value()?.into()),
                other => bail!("unknown argument {other}"),
            }
        }
        let known = sections::all::<Vec<u8>>().map(|(name, ..)| name);
        match options.only.iter().find(|name| !known.contains(&name.as_str())) {
            Some(name) => bail!("no section is named {name}; there are {}", known.join(", ")),
            None => Ok(options),
        }
    }
}

/// Returns the reason that nothing is measured; `None` if KVM runs guests on hardware.
fn refusal_reason(verdict: &KvmVerdict) -> Option<String> {
    match verdict {
        KvmVerdict::Hardware { .. } => None,
        KvmVerdict::Absent => {
            Some("there is no /dev/kvm; enable virtualization and load kvm_intel or kvm_amd".to_owned())
        }
        KvmVerdict::NoPermission => Some("/dev/kvm may not be opened; run this as root".to_owned()),
        KvmVerdict::Interpreted { took } => Some(format!(
            "KVM interprets guest kernels instead of running them on the processor: the probe took {:.1} ms, on hardware it takes well \
             under one",
            took.as_secs_f64() * 1e3
        )),
        KvmVerdict::Broken { why } => Some(format!("KVM cannot run a guest: {why}")),
    }
}

fn run(options: &RunOptions) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let verdict = probe_kvm();
    if let Some(why) = refusal_reason(&verdict) {
        eprintln!("nacelle-hardware: nothing is measured on this machine: {why}");
        return Ok(ExitCode::from(NO_HARDWARE));
    }
    let mut report = FigureReport::new(std::io::stdout());
    let prepared = prepare(options).and_then(|prepared| {
        report.write_line(&facts::describe_host(&prepared.version, &verdict, &prepared.disk.path))?;
        Ok(prepared)
    });
    let PreparedRun { disk, run, input, .. } = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            eprintln!("nacelle-hardware: nothing was started: {error:#}");
            return Ok(ExitCode::from(USAGE));
        }
    };
    let deadline = begun + sections::LIMIT;
    for (name, seconds, section) in sections::all() {
        if !options.only.is_empty() && !options.only.iter().any(|wanted| wanted == name) {
            continue;
        }
        eprintln!("nacelle-hardware: {name}, at {} s", begun.elapsed().as_secs());
        // A quick run only checks that everything works, also on a slow machine: it takes few samples and has a generous time
        // limit.
        let own = Instant::now() + Duration::from_secs(if options.quick { 10 * seconds } else { seconds });
        let until = if options.quick { own } else { own.min(deadline) };
        if let Err(error) = section(&input, &mut report, until) {
            report.write_error(name, &error)?;
        }
    }
    let failed = report.failed;
    eprintln!("nacelle-hardware: done after {} s", begun.elapsed().as_secs());
    drop((input, disk, run));
    Ok(if failed { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

/// The input of the sections, and the directories that are removed after them.
struct PreparedRun {
    input: SectionInput,
    /// The version of the bundle.
    version: String,
    disk: WorkDirectory,
    run: WorkDirectory,
}

/// Prepares the first section. An error here is for the user to fix, and the program exits with [`USAGE`].
fn prepare(options: &RunOptions) -> anyhow::Result<PreparedRun> {
    if !nix::unistd::geteuid().is_root() {
        bail!("measuring needs root, for network namespaces, control groups and huge pages");
    }
    let bundle = Bundle::find()?;
    watch_signals_and_limit(if options.quick { None } else { Some(sections::LIMIT) })?;
    let disk = work_directory(options.work.as_deref().unwrap_or(&bundle.directory))?;
    // Paths of sockets are limited to 108 bytes.
    let run = WorkDirectory::new(&PathBuf::from(format!("/tmp/nacelle-hardware-{}", std::process::id())))
        .context("cannot use /tmp for the sockets of pods; make it a writable directory")?;
    let scratch = disk.path.join("scratch");
    copy_templates(&bundle.scratch, &scratch).with_context(|| {
        format!("cannot fill {}; name a directory on a writable disk with free space by --work DIR", scratch.display())
    })?;
    let input = SectionInput {
        pods: PodFactory {
            program: bundle.pod,
            kernel: bundle.kernel,
            initrd: bundle.agent,
            image: bundle.container_image,
            scratch,
            run: run.path.clone(),
        },
        guest: bundle.guest,
        disk: disk.path.clone(),
        quick: options.quick,
        runtime: tokio::runtime::Runtime::new().context("cannot create the tokio runtime")?,
    };
    Ok(PreparedRun { input, version: bundle.version, disk, run })
}

/// Creates the directory of this run, below a directory on the disk that is measured.
fn work_directory(disk: &Path) -> anyhow::Result<WorkDirectory> {
    let directory = disk.canonicalize().map_err(anyhow::Error::from);
    let created =
        directory.and_then(|directory| WorkDirectory::new(&directory.join(format!("work-{}", std::process::id()))));
    created.with_context(|| {
        format!("cannot work in {}; name an existing directory on a writable disk by --work DIR", disk.display())
    })
}

/// Waits for signals, and for the end of the time limit, if there is one: then reverts all changes and ends the program.
fn watch_signals_and_limit(limit: Option<Duration>) -> anyhow::Result<()> {
    let mut signals = SigSet::empty();
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().for_each(|signal| signals.add(signal));
    // Before any other thread exists, so that none receives them.
    signals.thread_block().context("cannot block signals")?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if signals.wait().is_ok() {
            undo::undo_all_and_exit(INTERRUPTED);
        }
    })?;
    let Some(limit) = limit else { return Ok(()) };
    std::thread::Builder::new().name("limit".to_owned()).spawn(move || {
        std::thread::sleep(limit);
        let over = anyhow::anyhow!("the run was not done after {} s and was ended", limit.as_secs());
        let _ = FigureReport::new(std::io::stdout()).write_error("run", &over);
        undo::undo_all_and_exit(FAILED);
    })?;
    Ok(())
}

/// The files of the bundle next to this program.
struct Bundle {
    directory: PathBuf,
    version: String,
    pod: PathBuf,
    kernel: PathBuf,
    agent: PathBuf,
    guest: PathBuf,
    /// The EROFS image of the container in the measured pods.
    container_image: PathBuf,
    scratch: PathBuf,
}

impl Bundle {
    fn find() -> anyhow::Result<Bundle> {
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let directory = program.parent().context("this program has no directory")?.to_owned();
        let find_file = |name: &str| {
            let path = directory.join(name);
            if path.exists() {
                Ok(path)
            } else {
                bail!("{} is missing; ci/hardware creates the bundle", path.display())
            }
        };
        let version = fs::read_to_string(find_file("version")?)?.trim().to_owned();
        Ok(Bundle {
            version,
            pod: find_file("nacelle-pod")?,
            kernel: find_file("vmlinux")?,
            agent: find_file("agent.cpio")?,
            guest: find_file("guest.cpio")?,
            container_image: find_file("image.erofs")?,
            scratch: find_file("scratch")?,
            directory,
        })
    }
}

/// A directory that is removed at the end.
struct WorkDirectory {
    path: PathBuf,
    _guard: undo::UndoGuard,
}

impl WorkDirectory {
    fn new(path: &Path) -> anyhow::Result<WorkDirectory> {
        let created = fs::DirBuilder::new().mode(0o700).create(path);
        created.with_context(|| format!("cannot create {}", path.display()))?;
        let to_remove = path.to_owned();
        let guard = undo::register(move || {
            if let Err(error) = fs::remove_dir_all(&to_remove) {
                eprintln!("cannot remove {}: {error}", to_remove.display());
            }
        });
        Ok(WorkDirectory { path: path.to_owned(), _guard: guard })
    }
}

/// Copies the templates of scratch disks to the directory where pods create theirs.
fn copy_templates(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir(to).with_context(|| format!("cannot create {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let template = entry?.path();
        let name = template.file_name().context("a template has no name")?;
        nacelle_pod::scratch::copy_template(&template, &to.join(name))
            .context("cannot copy the template of scratch disks")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_parsed() {
        assert_eq!(RunOptions::parse(&[]).unwrap(), RunOptions::default());
        let options = RunOptions::parse(&["run", "--quick", "--only", "boot,exec", "--work", "/w"]).unwrap();
        assert_eq!(
            options,
            RunOptions { quick: true, only: vec!["boot".into(), "exec".into()], work: Some("/w".into()) }
        );
        for wrong in [&["--only"][..], &["--only", "nothing"], &["fast"], &["page", "now"]] {
            assert!(RunOptions::parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_unusable_work_directory_is_named_with_the_remedy() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in [Path::new("/nonexistent"), file.path()] {
            let Err(error) = work_directory(path) else { panic!("{} is used", path.display()) };
            let text = format!("{error:#}");
            assert!(text.contains(&path.display().to_string()) && text.contains("--work DIR"), "{text}");
        }
        let directory = tempfile::tempdir().unwrap();
        let work = work_directory(directory.path()).unwrap();
        let path = work.path.clone();
        assert!(path.is_dir());
        drop(work);
        assert!(!path.exists());
    }

    #[test]
    fn only_hardware_is_measured() {
        let took = Duration::from_millis(45);
        assert_eq!(refusal_reason(&KvmVerdict::Hardware { took: Duration::from_micros(60) }), None);
        for (verdict, words) in [
            (KvmVerdict::Absent, "no /dev/kvm"),
            (KvmVerdict::NoPermission, "may not be opened"),
            (KvmVerdict::Interpreted { took }, "the probe took 45.0 ms"),
            (KvmVerdict::Broken { why: "version 11".to_owned() }, "version 11"),
        ] {
            let why = refusal_reason(&verdict).unwrap();
            assert!(why.contains(words), "{why}");
        }
    }
}
