//! Compiles the tables to seccomp filters and installs them, for the process and for single threads. Filters accumulate: a
//! thread has its own and those of the threads by which it was created. Any thread may call [`filter_thread`].

use crate::table::{ArgumentRule, SyscallRule, allowed_calls, forbidden_calls, forbidden_when_single_threaded};
use crate::{Mode, Profile, ThreadKind};
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
    install_filter(ThreadKind::Main)?;
    spawn::start_starter().map_err(|source| SeccompError::Starter { source })
}

/// Installs a filter for a process that has one thread and never starts another, and executes nothing. It forbids the calls
/// of [`forbidden_calls`], and also starting programs and processes, and creating sockets. Does nothing with [`Mode::Off`].
pub fn install_single_thread_filter(mode: Mode) -> Result<(), SeccompError> {
    let kind = ThreadKind::Main;
    let Some(violation) = violation_action(mode) else { return Ok(()) };
    let rules = forbidden_calls()
        .iter()
        .chain(forbidden_when_single_threaded())
        .map(|call| (call.syscall, Vec::new()))
        .collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, violation, TargetArch::x86_64);
    let program: BpfProgram =
        filter.and_then(TryInto::try_into).map_err(|source| SeccompError::Compile { kind, source })?;
    apply_filter(&program).map_err(|source| SeccompError::Install { kind, source })
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
            let rules = forbidden_calls().iter().map(|call| (call.syscall, Vec::new())).collect();
            SeccompFilter::new(rules, SeccompAction::Allow, violation, TargetArch::x86_64)
        }
        // These threads start programs, or threads that do.
        Profile::StartsPrograms if matches!(kind, ThreadKind::Blocking | ThreadKind::Machine | ThreadKind::Warden) => {
            return Ok(BpfProgram::new());
        }
        _ => {
            SeccompFilter::new(build_rules(kind).map_err(failed)?, violation, SeccompAction::Allow, TargetArch::x86_64)
        }
    };
    filter.and_then(TryInto::try_into).map_err(failed)
}

/// Returns the rules of a kind's table; a call that is always allowed has no conditions.
fn build_rules(kind: ThreadKind) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let entries: Vec<&SyscallRule> = allowed_calls(kind).collect();
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for entry in &entries {
        let rule = rules.entry(entry.syscall).or_default();
        for (op, value) in build_conditions(&entry.arguments) {
            let condition =
                SeccompCondition::new(entry.arguments.argument_index(), SeccompCmpArgLen::Dword, op, value)?;
            rule.push(SeccompRule::new(vec![condition])?);
        }
    }
    for entry in entries.iter().filter(|entry| matches!(entry.arguments, ArgumentRule::Any)) {
        rules.insert(entry.syscall, Vec::new());
    }
    Ok(rules)
}

fn build_conditions(arguments: &ArgumentRule) -> Vec<(SeccompCmpOp, u64)> {
    match *arguments {
        ArgumentRule::Any => Vec::new(),
        ArgumentRule::OneOf(_, values) => values.iter().map(|value| (SeccompCmpOp::Eq, *value)).collect(),
        ArgumentRule::OwnPid(_) => vec![(SeccompCmpOp::Eq, std::process::id().into())],
        ArgumentRule::Masked(_, mask, value) => vec![(SeccompCmpOp::MaskedEq(mask), value)],
    }
}
