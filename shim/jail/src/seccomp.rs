//! Compiles the tables to seccomp filters and installs them, for the process and for single threads. Filters accumulate: a
//! thread has its own and those of the threads by which it was created. Any thread may call [`filter_thread`].

use crate::table::{
    ArgumentRule, SyscallRule, allowed_calls, forbidden_calls, forbidden_to_programs, forbidden_when_single_threaded,
    worker_calls,
};
use crate::{Mode, Profile, SocketUse, ThreadKind};
use crate::{spawn, sys};
use nacelle_base::{Classify, FailureKind};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// A filter could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    /// The table cannot be compiled to a filter.
    #[error("cannot compile the seccomp filter of {kind:?} threads")]
    Compile {
        /// The kind of the table.
        kind: ThreadKind,
        /// The cause.
        source: BackendError,
    },
    /// The kernel rejects the filter.
    #[error("cannot install the seccomp filter of {kind:?} threads")]
    Install {
        /// The kind of the filter.
        kind: ThreadKind,
        /// The cause.
        source: seccompiler::Error,
    },
    /// The starter thread could not be created.
    #[error("cannot start the thread that starts all other threads")]
    Starter {
        /// The cause.
        source: std::io::Error,
    },
    /// The process has its filters already.
    #[error("this process has installed its seccomp filters already")]
    AlreadyInstalled,
}

impl Classify for SeccompError {
    fn kind(&self) -> FailureKind {
        FailureKind::Internal
    }
}

/// The maximum number of malloc arenas in an armed process; threads share them.
const MALLOC_ARENAS: i32 = 4;

/// The filters of an armed process, by kind.
static FILTERS: OnceLock<BTreeMap<ThreadKind, BpfProgram>> = OnceLock::new();

/// Installs the process's filter, and enables [`filter_thread`]. Must be called on the first thread before there are others,
/// because existing threads are not filtered. Does nothing with [`Mode::Off`].
pub fn install_process_filter(mode: Mode, profile: Profile) -> Result<(), SeccompError> {
    if mode == Mode::Off {
        return Ok(());
    }
    let mut filters = BTreeMap::new();
    for kind in ThreadKind::ALL {
        filters.insert(kind, compile_filter(kind, mode, profile)?);
    }
    sys::limit_malloc_arenas(MALLOC_ARENAS);
    FILTERS.set(filters).map_err(|_full| SeccompError::AlreadyInstalled)?;
    install_guard_filter(mode)?;
    install_filter(ThreadKind::Main)?;
    spawn::start_starter().map_err(|source| SeccompError::Starter { source })
}

/// Installs a filter for a process that has one thread and never starts another, and executes nothing. It forbids the calls
/// of [`forbidden_calls`], and also starting programs and processes, creating sockets, and except with [`SocketUse::Connect`]
/// connecting them. Does nothing with [`Mode::Off`].
pub fn install_single_thread_filter(mode: Mode, sockets: SocketUse) -> Result<(), SeccompError> {
    let kind = ThreadKind::Main;
    let Some(violation) = violation_action(mode) else { return Ok(()) };
    let rules = build_rules(forbidden_calls().iter().chain(forbidden_when_single_threaded(sockets)));
    let filter = rules.and_then(|rules| SeccompFilter::new(rules, SeccompAction::Allow, violation, TargetArch::x86_64));
    let program: BpfProgram =
        filter.and_then(TryInto::try_into).map_err(|source| SeccompError::Compile { kind, source })?;
    install_guard_filter(mode)?;
    apply_filter(&program).map_err(|source| SeccompError::Install { kind, source })
}

/// Installs the filter of a worker, a process of one thread that may make the calls of [`worker_calls`] only. Does nothing with
/// [`Mode::Off`].
pub(crate) fn install_worker_filter(mode: Mode) -> Result<(), SeccompError> {
    let kind = ThreadKind::Main;
    let Some(violation) = violation_action(mode) else { return Ok(()) };
    let rules = build_rules(worker_calls());
    let filter = rules.and_then(|rules| SeccompFilter::new(rules, violation, SeccompAction::Allow, TargetArch::x86_64));
    let program: BpfProgram =
        filter.and_then(TryInto::try_into).map_err(|source| SeccompError::Compile { kind, source })?;
    sys::limit_malloc_arenas(1);
    apply_filter(&program).map_err(|source| SeccompError::Install { kind, source })
}

/// The bit that marks the numbers of the x32 calls (`__X32_SYSCALL_BIT` in arch/x86/include/uapi/asm/unistd.h).
const X32_SYSCALL_BIT: u32 = 0x4000_0000;

/// Installs what every profile has beside its table, which the tables cannot express. x32 calls are forbidden: they have numbers of
/// their own, so a table of forbidden calls does not contain them. clone3, whose arguments no filter can read, and io_uring, whose
/// operations pass no filter, return ENOSYS: the C library and QEMU do without.
fn install_guard_filter(mode: Mode) -> Result<(), SeccompError> {
    let Some(violation) = violation_action(mode) else { return Ok(()) };
    let kind = ThreadKind::Main;
    apply_filter(&guard_filter(violation)).map_err(|source| SeccompError::Install { kind, source })
}

/// Returns the guard filter as classic BPF (Documentation/userspace-api/seccomp_filter.rst). The architecture is checked by the table's
/// filter, which is always installed too.
fn guard_filter(violation: SeccompAction) -> BpfProgram {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const JUMP_IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let instruction = |code, jt, jf, k| seccompiler::sock_filter { code, jt, jf, k };
    let number_offset = u32::try_from(std::mem::offset_of!(libc::seccomp_data, nr)).unwrap_or_default();
    let number = |syscall: i64| u32::try_from(syscall).unwrap_or_default();
    let (clone3, io_uring_setup) = (number(libc::SYS_clone3), number(libc::SYS_io_uring_setup));
    vec![
        instruction(LOAD, 0, 0, number_offset),
        instruction(JUMP_IF_AT_LEAST, 3, 0, X32_SYSCALL_BIT),
        instruction(JUMP_IF_EQUAL, 3, 0, clone3),
        instruction(JUMP_IF_EQUAL, 2, 0, io_uring_setup),
        instruction(RETURN, 0, 0, SeccompAction::Allow.into()),
        instruction(RETURN, 0, 0, violation.into()),
        instruction(RETURN, 0, 0, SeccompAction::Errno(libc::ENOSYS.unsigned_abs()).into()),
    ]
}

fn violation_action(mode: Mode) -> Option<SeccompAction> {
    match mode {
        Mode::Off => None,
        Mode::Log => Some(SeccompAction::Log),
        Mode::Kill => Some(SeccompAction::KillProcess),
    }
}

/// Installs the filter of its kind for the calling thread; does nothing before [`install_process_filter`]. For threads that are not started by
/// [`spawn`](crate::spawn). Aborts the process if the filter cannot be installed.
pub fn filter_thread(kind: ThreadKind) {
    if let Err(error) = install_filter(kind) {
        tracing::error!("{}", nacelle_base::Chain(&error));
        std::process::abort();
    }
}

fn install_filter(kind: ThreadKind) -> Result<(), SeccompError> {
    let filter = FILTERS.get().and_then(|filters| filters.get(&kind));
    // An empty filter forbids nothing.
    match filter.filter(|filter| !filter.is_empty()) {
        Some(filter) => apply_filter(filter).map_err(|source| SeccompError::Install { kind, source }),
        None => Ok(()),
    }
}

/// Compiles the filter of a kind; empty if the thread needs no filter besides the process's.
fn compile_filter(kind: ThreadKind, mode: Mode, profile: Profile) -> Result<BpfProgram, SeccompError> {
    let Some(violation) = violation_action(mode) else { return Ok(BpfProgram::new()) };
    let failed = |source| SeccompError::Compile { kind, source };
    let filter = match profile {
        Profile::StartsPrograms if kind == ThreadKind::Main => {
            let rules = build_rules(forbidden_calls().iter().chain(forbidden_to_programs())).map_err(failed)?;
            SeccompFilter::new(rules, SeccompAction::Allow, violation, TargetArch::x86_64)
        }
        // These threads start programs, or threads that do.
        Profile::StartsPrograms if matches!(kind, ThreadKind::Blocking | ThreadKind::Machine | ThreadKind::Warden) => {
            return Ok(BpfProgram::new());
        }
        _ => {
            let rules = build_rules(allowed_calls(kind)).map_err(failed)?;
            SeccompFilter::new(rules, violation, SeccompAction::Allow, TargetArch::x86_64)
        }
    };
    filter.and_then(TryInto::try_into).map_err(failed)
}

/// Returns the rules of a table; a call that matches with any arguments has no conditions.
fn build_rules(
    table: impl IntoIterator<Item = &'static SyscallRule>,
) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let entries: Vec<&SyscallRule> = table.into_iter().collect();
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for entry in &entries {
        let rule = rules.entry(entry.syscall).or_default();
        for alternative in build_conditions(&entry.arguments) {
            let condition = |(op, value)| {
                SeccompCondition::new(entry.arguments.argument_index(), SeccompCmpArgLen::Dword, op, value)
            };
            let conditions = alternative.into_iter().map(condition).collect::<Result<Vec<_>, _>>()?;
            rule.push(SeccompRule::new(conditions)?);
        }
    }
    for entry in entries.iter().filter(|entry| matches!(entry.arguments, ArgumentRule::Any)) {
        rules.insert(entry.syscall, Vec::new());
    }
    Ok(rules)
}

/// Returns the alternatives with which the arguments match; all conditions of an alternative must hold.
fn build_conditions(arguments: &ArgumentRule) -> Vec<Vec<(SeccompCmpOp, u64)>> {
    let own_pid = u64::from(std::process::id());
    match *arguments {
        ArgumentRule::Any => Vec::new(),
        ArgumentRule::OneOf(_, values) => values.iter().map(|value| vec![(SeccompCmpOp::Eq, *value)]).collect(),
        ArgumentRule::OwnPid(_) => vec![vec![(SeccompCmpOp::Eq, own_pid)]],
        ArgumentRule::OtherPid(_) => vec![vec![(SeccompCmpOp::Ne, own_pid)]],
        ArgumentRule::OtherProcess(_) => vec![vec![(SeccompCmpOp::Ne, own_pid), (SeccompCmpOp::Ne, 0)]],
        ArgumentRule::Masked(_, mask, value) => vec![vec![(SeccompCmpOp::MaskedEq(mask), value)]],
    }
}
