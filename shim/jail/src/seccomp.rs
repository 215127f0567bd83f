//! Owns: compiling the tables and installing them, for the process and for single threads.
//! Threads: any. Filters add up: a thread has its own, and those of the threads it descends from.

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

/// Why a filter is not in force.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    /// The table makes no filter.
    #[error("the system calls of {kind:?} threads make no filter")]
    Compile {
        /// Whose table.
        kind: ThreadKind,
        /// Why.
        source: BackendError,
    },
    /// The kernel does not take it.
    #[error("the filter of {kind:?} threads cannot be installed")]
    Install {
        /// Whose.
        kind: ThreadKind,
        /// Why.
        source: seccompiler::Error,
    },
    /// There is no thread that starts the others.
    #[error("the thread that starts threads cannot be started")]
    Starter {
        /// Why.
        source: std::io::Error,
    },
    /// It has been done before.
    #[error("this process has its filters already")]
    Armed,
}

impl Classify for SeccompError {
    fn kind(&self) -> Kind {
        Kind::Internal
    }
}

/// Heaps of the C library in an armed process: threads share them.
const HEAPS: i32 = 4;

/// The filters of an armed process.
static FILTERS: OnceLock<BTreeMap<ThreadKind, BpfProgram>> = OnceLock::new();

/// Puts the process under its filter, and has [`thread`] do its work from now on. To be called on the first thread,
/// before there are others: those that exist are not filtered. With [`Mode::Off`] nothing happens.
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

/// Puts a process that has and will have one thread, and executes nothing, under a filter that forbids what a process with
/// programs is forbidden, and programs, processes and sockets besides. With [`Mode::Off`] nothing happens.
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

/// Puts the calling thread under the filter of its kind; until [`arm`] was called it does nothing. For threads that
/// are not started by [`spawn`](crate::spawn). If an armed process cannot filter a thread, it ends.
pub fn thread(kind: ThreadKind) {
    if let Err(error) = install(kind) {
        tracing::error!("{}", nacelle_base::Chain(&error));
        std::process::abort();
    }
}

fn install(kind: ThreadKind) -> Result<(), SeccompError> {
    let filter = FILTERS.get().and_then(|filters| filters.get(&kind));
    // An empty one is one that forbids nothing.
    match filter.filter(|filter| !filter.is_empty()) {
        Some(filter) => apply_filter(filter).map_err(|source| SeccompError::Install { kind, source }),
        None => Ok(()),
    }
}

/// The program of a kind; empty if the process's own filter is all it has.
fn compile(kind: ThreadKind, mode: Mode, profile: Profile) -> Result<BpfProgram, SeccompError> {
    let Some(bad) = action(mode) else { return Ok(BpfProgram::new()) };
    let failed = |source| SeccompError::Compile { kind, source };
    let filter = match profile {
        Profile::Spawns if kind == ThreadKind::Main => {
            let rules = forbidden().iter().map(|call| (call.syscall, Vec::new())).collect();
            SeccompFilter::new(rules, SeccompAction::Allow, bad, TargetArch::x86_64)
        }
        // These start programs, or threads that do.
        Profile::Spawns if matches!(kind, ThreadKind::Blocking | ThreadKind::Machine | ThreadKind::Warden) => {
            return Ok(BpfProgram::new());
        }
        _ => SeccompFilter::new(rules(kind).map_err(failed)?, bad, SeccompAction::Allow, TargetArch::x86_64),
    };
    filter.and_then(TryInto::try_into).map_err(failed)
}

/// The rules of a kind's table: one that is always allowed has no conditions.
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
