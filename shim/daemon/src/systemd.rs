//! Creates a systemd scope for each pod, over D-Bus, in the slice that kubelet has created for it.
//!
//! systemd enables the controllers in its cgroups that it considers necessary, and disables the others whenever it checks. It
//! does not know a cgroup that another process creates in a slice: kubelet's slices would lose controllers, and kubelet takes a
//! slice without its controllers for a missing one, kills the pod and creates it again. A scope with `Delegate=` keeps them
//! (systemd's "Control Group APIs and Delegation").

use nacelle_base::retry::retry_interrupted;
use nacelle_base::{Classify, FailureKind, PodId};
use nacelle_pod::MemoryPolicy;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::{sleep, timeout};
use zbus::connection::Builder;
use zbus::{Connection, Variant};

/// Exists if systemd is the first process (sd_booted(3)).
const SYSTEMD_DIR: &str = "/run/systemd/system";
/// The socket of the system bus.
const SYSTEM_BUS: &str = "/run/dbus/system_bus_socket";
const BUS_NAME: &str = "org.freedesktop.systemd1";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER_INTERFACE: &str = "org.freedesktop.systemd1.Manager";
/// The CPUs that the node may ever have.
const POSSIBLE_CPUS: &str = "/sys/devices/system/cpu/possible";
/// Time limit for all requests to systemd for one pod.
const LIMIT: Duration = Duration::from_secs(20);
/// Pause between two checks of a job's result.
const POLL_PAUSE: Duration = Duration::from_millis(1);

/// Returns whether systemd is the node's first process.
pub(crate) fn is_running() -> bool {
    Path::new(SYSTEMD_DIR).is_dir()
}

/// Returns whether the system bus accepts connections. Blocks.
pub(crate) fn has_bus() -> bool {
    retry_interrupted(|| std::os::unix::net::UnixStream::connect(SYSTEM_BUS)).is_ok()
}

/// Why a pod does not get its scope.
#[derive(Debug, thiserror::Error)]
pub enum ScopeError {
    /// The system bus does not accept connections.
    #[error(
        "cannot connect to the system bus, which sandbox.cgroup_driver = \"systemd\" needs: install dbus, or set it to \"cgroupfs\""
    )]
    Connect(#[source] Box<zbus::Error>),
    /// systemd rejected the request.
    #[error("systemd rejected the request for {unit}")]
    Rejected {
        /// The scope.
        unit: String,
        /// The error of systemd.
        source: Box<zbus::Error>,
    },
    /// The process ended meanwhile.
    #[error("process {pid} ended before systemd could put it into {unit}")]
    Ended {
        /// The scope.
        unit: String,
        /// The process id.
        pid: u32,
        /// Why the process's cgroup cannot be read.
        source: io::Error,
    },
    /// systemd did not finish within the time limit.
    #[error("systemd did not complete the request for {unit} within {LIMIT:?}")]
    Timeout {
        /// The scope.
        unit: String,
    },
}

impl Classify for ScopeError {
    fn kind(&self) -> FailureKind {
        match self {
            ScopeError::Connect(_) => FailureKind::Unavailable,
            ScopeError::Rejected { .. } | ScopeError::Ended { .. } => FailureKind::Internal,
            ScopeError::Timeout { .. } => FailureKind::Timeout,
        }
    }
}

/// Returns the name, without ".slice", of the slice at a path; `None` if the path is not a slice.
pub(crate) fn slice_of(path: &str) -> Option<&str> {
    path.trim_end_matches('/').rsplit('/').next()?.strip_suffix(".slice").filter(|name| !name.is_empty())
}

/// Returns the cgroup of a pod's scope in a slice (its name without ".slice"). "a-b.slice" lies in "a.slice".
pub(crate) fn scope_in(slice: &str, id: &PodId) -> PathBuf {
    let ends = slice.match_indices('-').map(|(end, _)| end).chain([slice.len()]);
    let slices = ends.filter_map(|end| slice.get(..end)).map(|slice| format!("{slice}.slice"));
    slices.collect::<PathBuf>().join(format!("nacelle-{id}.scope"))
}

/// Converts a CPU list in the kernel's format ("0-3,8") into a bit mask, the lowest eight CPUs in the first byte.
fn cpu_mask(list: &str) -> Vec<u8> {
    let mut mask = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else { continue };
        for cpu in first..=last {
            let byte = usize::from(cpu / 8);
            mask.resize(mask.len().max(byte + 1), 0);
            if let Some(byte) = mask.get_mut(byte) {
                *byte |= 1 << (cpu % 8);
            }
        }
    }
    mask
}

/// Connects to the system bus, as kubelet does; systemd's private socket is reserved for its own programs.
async fn connect() -> Result<Connection, ScopeError> {
    Builder::system().build().await.map_err(|error| ScopeError::Connect(Box::new(error)))
}

/// Sets properties of a unit until the next boot.
async fn set_properties(
    connection: &Connection,
    unit: &str,
    properties: &[(&str, Variant<'_>)],
) -> Result<(), ScopeError> {
    let reply = connection
        .call_method(
            Some(BUS_NAME),
            MANAGER_PATH,
            Some(MANAGER_INTERFACE),
            "SetUnitProperties",
            &(unit, true, properties),
        )
        .await;
    reply.map_err(|source| ScopeError::Rejected { unit: unit.to_owned(), source: Box::new(source) })?;
    Ok(())
}

/// A pod's scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scope {
    /// The scope's cgroup.
    pub group: PathBuf,
    unit: String,
    slice: String,
}

impl Scope {
    /// Returns the scope of this cgroup, if it is a scope's.
    pub fn of(group: &Path) -> Option<Scope> {
        let name = |path: &Path, end| path.file_name()?.to_str().filter(|name| name.ends_with(end)).map(str::to_owned);
        Some(Scope { group: group.to_owned(), unit: name(group, ".scope")?, slice: name(group.parent()?, ".slice")? })
    }

    /// Makes systemd start the scope with this process. It ends with its last process.
    pub async fn start(&self, pid: u32) -> Result<(), ScopeError> {
        self.within_limit(async { self.start_over(&connect().await?, pid, Path::new("/proc")).await }).await
    }

    /// Makes systemd keep the slice's controllers, although it knows no unit in it.
    pub async fn keep_slice(&self) -> Result<(), ScopeError> {
        let possible = std::fs::read_to_string(POSSIBLE_CPUS).unwrap_or_default();
        self.within_limit(async { self.keep_slice_over(&connect().await?, &possible).await }).await
    }

    /// Makes systemd set the files of the scope's memory policy.
    pub async fn set_memory_policy(&self, policy: MemoryPolicy) -> Result<(), ScopeError> {
        self.within_limit(async { self.set_memory_policy_over(&connect().await?, policy).await }).await
    }

    async fn within_limit(&self, work: impl Future<Output = Result<(), ScopeError>>) -> Result<(), ScopeError> {
        timeout(LIMIT, work).await.map_err(|_elapsed| ScopeError::Timeout { unit: self.unit.clone() })?
    }

    /// Keeps the other controllers; cpu is kept by kubelet's own settings.
    async fn keep_slice_over(&self, connection: &Connection, possible: &str) -> Result<(), ScopeError> {
        let properties = [
            ("AllowedCPUs", Variant::from(cpu_mask(possible))),
            ("IOAccounting", Variant::from(true)),
            ("MemoryAccounting", Variant::from(true)),
            ("TasksAccounting", Variant::from(true)),
        ];
        set_properties(connection, &self.slice, &properties).await
    }

    async fn set_memory_policy_over(&self, connection: &Connection, policy: MemoryPolicy) -> Result<(), ScopeError> {
        let properties = [
            ("MemorySwapMax", Variant::from(policy.swap_max)),
            ("MemoryLow", Variant::from(policy.low)),
            ("MemoryMin", Variant::from(policy.min)),
        ];
        set_properties(connection, &self.unit, &properties).await
    }

    async fn start_over(&self, connection: &Connection, pid: u32, proc: &Path) -> Result<(), ScopeError> {
        let properties = [
            ("Description", Variant::from("A pod of Nacelle")),
            ("Slice", Variant::from(self.slice.as_str())),
            ("PIDs", Variant::from(vec![pid])),
            // The pod owns the cgroups below the scope, and all controllers are needed there.
            ("Delegate", Variant::from(true)),
            // At a shutdown of the node, pods are stopped last.
            ("DefaultDependencies", Variant::from(false)),
            // A failed scope leaves nothing that would need a reset.
            ("CollectMode", Variant::from("inactive-or-failed")),
            // kubelet limits the slice.
            ("TasksMax", Variant::from(u64::MAX)),
        ];
        let none: [(&str, Vec<(&str, Variant<'_>)>); 0] = [];
        let body = (self.unit.as_str(), "fail", &properties[..], &none[..]);
        let reply = connection
            .call_method(Some(BUS_NAME), MANAGER_PATH, Some(MANAGER_INTERFACE), "StartTransientUnit", &body)
            .await;
        reply.map_err(|source| ScopeError::Rejected { unit: self.unit.clone(), source: Box::new(source) })?;
        // The job has only been queued.
        loop {
            let groups = std::fs::read_to_string(proc.join(format!("{pid}/cgroup")));
            let ended = |source| ScopeError::Ended { unit: self.unit.clone(), pid, source };
            let end = format!("/{}", self.unit);
            if groups.map_err(ended)?.lines().any(|line| line.ends_with(&end)) {
                return Ok(());
            }
            sleep(POLL_PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use zbus::OwnedObjectPath;
    use zbus::zvariant::OwnedVariant;

    const GROUP: &str = "kubepods.slice/kubepods-podab.slice/nacelle-x.scope";

    #[test]
    fn a_scope_has_a_name_and_a_slice() {
        let scope = Scope::of(Path::new(GROUP)).unwrap();
        assert_eq!((scope.unit.as_str(), scope.slice.as_str()), ("nacelle-x.scope", "kubepods-podab.slice"));
        for other in ["nacelle/ID", "a.slice/b/nacelle-x", "a.slice/b/nacelle-x.scope", "nacelle-x.scope", ""] {
            assert_eq!(Scope::of(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn slice_names_and_cpu_masks() {
        assert_eq!(slice_of("/a.slice/a-b.slice/"), Some("a-b"));
        assert_eq!(["", "/", "a.slice/b", ".slice", "/x/.slice"].map(slice_of), [None; 5]);
        assert_eq!(cpu_mask("0-3\n"), [15]);
        assert_eq!(cpu_mask("0,9-10,x,4"), [17, 6]);
        assert_eq!(cpu_mask(""), [0u8; 0]);
    }

    type Properties = Vec<(String, OwnedVariant)>;

    /// A systemd with the methods that this module calls.
    struct FakeManager {
        proc: PathBuf,
        seen: Arc<Mutex<Vec<String>>>,
    }

    #[zbus::interface(name = "org.freedesktop.systemd1.Manager")]
    impl FakeManager {
        async fn start_transient_unit(
            &self,
            name: String,
            mode: String,
            properties: Properties,
            auxiliary: Vec<(String, Properties)>,
        ) -> zbus::fdo::Result<OwnedObjectPath> {
            if name != "nacelle-x.scope" {
                return Err(zbus::fdo::Error::Failed(format!("Unit {name} was already loaded")));
            }
            let mut seen = vec![format!("{name} {mode} {}", auxiliary.len())];
            seen.extend(properties.iter().map(|(name, value)| format!("{name}={value:?}")));
            *self.seen.lock().unwrap() = seen;
            std::fs::write(self.proc.join("77/cgroup"), format!("1:name=systemd:/x\n0::/{GROUP}\n")).unwrap();
            Ok("/org/freedesktop/systemd1/job/1".try_into().unwrap())
        }

        async fn set_unit_properties(&self, name: String, runtime: bool, properties: Properties) {
            let mut seen = vec![format!("{name} {runtime}")];
            seen.extend(properties.iter().map(|(name, value)| format!("{name}={value:?}")));
            *self.seen.lock().unwrap() = seen;
        }
    }

    #[tokio::test]
    async fn systemd_starts_a_scope() {
        let proc = tempfile::tempdir().unwrap();
        std::fs::create_dir(proc.path().join("77")).unwrap();
        std::fs::write(proc.path().join("77/cgroup"), "0::/system.slice/nacelle.service\n").unwrap();
        let seen = Arc::default();
        let manager = FakeManager { proc: proc.path().to_owned(), seen: Arc::clone(&seen) };
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let server = Builder::unix_stream(theirs).server(zbus::Guid::generate()).p2p();
        let server = server.serve_at(MANAGER_PATH, manager).build();
        let client = Builder::unix_stream(ours).p2p().build();
        let (_server, client) = tokio::try_join!(server, client).unwrap();

        let scope = Scope::of(Path::new(GROUP)).unwrap();
        scope.start_over(&client, 77, proc.path()).await.unwrap();
        let text = seen.lock().unwrap().join(" ");
        assert!(text.starts_with("nacelle-x.scope fail 0"), "{text}");
        for property in
            ["Slice=", "kubepods-podab.slice", "PIDs=", "77", "Delegate=", "TasksMax=", "18446744073709551615"]
        {
            assert!(text.contains(property), "{property}: {text}");
        }

        let other = Scope::of(Path::new("a.slice/nacelle-y.scope")).unwrap();
        let error = other.start_over(&client, 77, proc.path()).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string()),
            (FailureKind::Internal, "systemd rejected the request for nacelle-y.scope".into())
        );
        scope.keep_slice_over(&client, "0-1").await.unwrap();
        let text = seen.lock().unwrap().join(" ");
        assert!(text.starts_with("kubepods-podab.slice true AllowedCPUs="), "{text}");
        for property in ["U8(3)", "IOAccounting=", "MemoryAccounting=", "TasksAccounting="] {
            assert!(text.contains(property), "{property}: {text}");
        }
        let policy = MemoryPolicy { swap_max: 5, low: 6, min: 7, oom_score_adj: 0 };
        scope.set_memory_policy_over(&client, policy).await.unwrap();
        let expected = [("MemorySwapMax", 5), ("MemoryLow", 6), ("MemoryMin", 7)]
            .map(|(name, bytes)| format!("{name}=OwnedVariant(U64({bytes}))"));
        assert_eq!(*seen.lock().unwrap(), [&["nacelle-x.scope true".to_owned()][..], &expected].concat());
        let ended = scope.start_over(&client, 78, proc.path()).await.unwrap_err();
        assert!(matches!(ended, ScopeError::Ended { pid: 78, .. }), "{ended:?}");
    }
}
