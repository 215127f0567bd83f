//! Compiles the tables to seccomp filters and installs them, for the process and for single threads. Filters accumulate: a
//! thread has its own and those of the threads by which it was created. Any thread may call [`thread`].

use crate::table::{Allow, Only, alone, forbidden, table};
use crate::{Mode, Profile, ThreadKind};
use crate::{spawn, sys};
use nacelle_base::{Classify, Kind};
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
    #[error("the system calls of {kind:?} threads make no filter")]
    Compile {
        /// The kind of the table.
        kind: ThreadKind,
        /// The cause.
        source: BackendError,
    },
    /// The kernel rejects the filter.
    #[error("the filter of {kind:?} threads cannot be installed")]
    Install {
        /// The kind of the filter.
        kind: ThreadKind,
        /// The cause.
        source: seccompiler::Error,
    },
    /// The starter thread could not be created.
    #[error("the thread that starts threads cannot be started")]
    Starter {
        /// The cause.
        source: std::io::Error,
    },
    /// The process has its filters already.
    #[error("this process has its filters already")]
    Armed,
}

impl Classify for SeccompError {
    fn kind(&self) -> Kind {
        Kind::Internal
    }
}

/// The maximum number of malloc arenas in an armed process; threads share them.
const HEAPS: i32 = 4;

/// The filters of an armed process, by kind.
static FILTERS: OnceLock<BTreeMap<ThreadKind, BpfProgram>> = OnceLock::new();

/// Installs the process's filter, and enables [`thread`]. Must be called on the first thread before there are others,
/// because existing threads are not filtered. Does nothing with [`Mode::Off`].
pub fn arm(mode: Mode, profile: Profile) -> Result<(), SeccompError> {
    if mode == Mode::Off {
        return Ok(());
    }
    let mut filters = BTreeMap::new();
    for kind in ThreadKind::ALL {
        filters.insert(kind, compile(kind, mode, profile)?);
    }
    sys::quiet_heaps(HEAPS);
    FILTERS.set(filters).map_err(|_full| SeccompError::Armed)?;
    install(ThreadKind::Main)?;
    spawn::begin().map_err(|source| SeccompError::Starter { source })
}

/// Installs a filter for a process that has one thread and never starts another, and executes nothing. It forbids the calls
/// of [`forbidden`], and also starting programs and processes, and creating sockets. Does nothing with [`Mode::Off`].
pub fn arm_single(mode: Mode) -> Result<(), SeccompError> {
    let kind = ThreadKind::Main;
    let Some(bad) = action(mode) else { return Ok(()) };
    let rules = forbidden().iter().chain(alone()).map(|call| (call.syscall, Vec::new())).collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, bad, TargetArch::x86_64);
    let program: BpfProgram =
        filter.and_then(TryInto::try_into).map_err(|source| SeccompError::Compile { kind, source })?;
    apply_filter(&program).map_err(|source| SeccompError::Install { kind, source })
}

fn action(mode: Mode) -> Option<SeccompAction> {
    match mode {
        Mode::Off => None,
        Mode::Log => Some(SeccompAction::Log),
        Mode::Kill => Some(SeccompAction::KillProcess),
    }
}

/// Installs the filter of its kind for the calling thread; does nothing before [`arm`]. For threads that are not started by
/// [`spawn`](crate::spawn). Aborts the process if the filter cannot be installed.
pub fn thread(kind: ThreadKind) {
    if let Err(error) = install(kind) {
        tracing::error!("{}", nacelle_base::Chain(&error));
        std::process::abort();
    }
}

fn install(kind: ThreadKind) -> Result<(), SeccompError> {
    let filter = FILTERS.get().and_then(|filters| filters.get(&kind));
    // An empty filter forbids nothing.
    match filter.filter(|filter| !filter.is_empty()) {
        Some(filter) => apply_filter(filter).map_err(|source| SeccompError::Install { kind, source }),
        None => Ok(()),
    }
}

/// Compiles the filter of a kind; empty if the thread needs no filter besides the process's.
fn compile(kind: ThreadKind, mode: Mode, profile: Profile) -> Result<BpfProgram, SeccompError> {
    let Some(bad) = action(mode) else { return Ok(BpfProgram::new()) };
    let failed = |source| SeccompError::Compile { kind, source };
    let filter = match profile {
        Profile::Spawns if kind == ThreadKind::Main => {
            let rules = forbidden().iter().map(|call| (call.syscall, Vec::new())).collect();
            SeccompFilter::new(rules, SeccompAction::Allow, bad, TargetArch::x86_64)
        }
        // These threads start programs, or threads that do.
        Profile::Spawns if matches!(kind, ThreadKind::Blocking | ThreadKind::Machine | ThreadKind::Warden) => {
            return Ok(BpfProgram::new());
        }
        _ => SeccompFilter::new(rules(kind).map_err(failed)?, bad, SeccompAction::Allow, TargetArch::x86_64),
    };
    filter.and_then(TryInto::try_into).map_err(failed)
}

/// Returns the rules of a kind's table; a call that is always allowed has no conditions.
fn rules(kind: ThreadKind) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let entries: Vec<&Allow> = table(kind).collect();
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for entry in &entries {
        let rule = rules.entry(entry.syscall).or_default();
        for (op, value) in conditions(&entry.only) {
            let condition = SeccompCondition::new(entry.only.argument(), SeccompCmpArgLen::Dword, op, value)?;
            rule.push(SeccompRule::new(vec![condition])?);
        }
    }
    for entry in entries.iter().filter(|entry| matches!(entry.only, Only::Always)) {
        rules.insert(entry.syscall, Vec::new());
    }
    Ok(rules)
}

fn conditions(only: &Only) -> Vec<(SeccompCmpOp, u64)> {
    match *only {
        Only::Always => Vec::new(),
        Only::Arg(_, values) => values.iter().map(|value| (SeccompCmpOp::Eq, *value)).collect(),
        Only::Own(_) => vec![(SeccompCmpOp::Eq, std::process::id().into())],
        Only::Masked(_, mask, value) => vec![(SeccompCmpOp::MaskedEq(mask), value)],
    }
}
