//! Owns: the verbs on containers, each of which may be said twice: create, start, signal, exec, resize, remove.

use libcontainer::oci_spec::runtime::{LinuxNamespaceType, Mount, Spec};
use nacelle_base::retry::retry_interrupted;
use nacelle_base::share;
use nacelle_base::undo::UndoStack;
use nacelle_proto::agent::{EmptyDir, PidMode};
use nacelle_proto::common::{CreateContainerResponse, UpdateContainerRequest};
use std::collections::HashMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::OnceCell;

use super::devices::{self, Device};
use super::spec::{PidNamespace, Place, adjust, exec_process, own_capabilities, own_oom_score_adj, parse};
use super::targets::{Shape, TargetError, Targets};
use super::volumes::{self, Volume};
use super::{Container, ExecEntry, Pod, PodError, Process, cgroup, check_id, limits, places, root, shown, user};
use crate::empty_dirs::Place as Own;
use crate::huge_pages::{self, Limits};
use crate::stdio::Stdio;
use crate::userns::{self, UserNs};
use crate::zygote::{Create, Exec, NewProcess, Request, ZygoteError};
use crate::{paths, sys};

/// How long killed processes may take to be gone.
const DEATH: Duration = Duration::from_secs(30);
/// How long the processes that are frozen while a container is made may take to stand still.
const FREEZE: Duration = Duration::from_secs(10);
/// How many execs of a container that have ended are remembered.
const REMEMBERED: usize = 256;

/// What a container is made of.
#[derive(Debug)]
pub struct CreateOptions {
    /// Its id.
    pub id: String,
    /// The OCI specification, JSON.
    pub spec: Vec<u8>,
    /// Its image.
    pub partition: u32,
    /// The user to look up; empty: the specification's.
    pub user: String,
    /// Add the groups that the image gives the user.
    pub merge_groups: bool,
    /// Keep its stdin open.
    pub stdin: bool,
    /// The container whose PID namespace it enters; empty: none.
    pub pid_of: String,
    /// Otherwise: the pod's way, or its own.
    pub pid_mode: PidMode,
    /// Images that it sees beside its own, in the order in which they are mounted.
    pub volumes: Vec<Volume>,
    /// Block devices of the node that it has.
    pub devices: Vec<Device>,
    /// Its volumes that are the machine's own.
    pub empty_dirs: Vec<EmptyDir>,
}

/// What an exec is made of.
#[derive(Debug)]
pub struct ExecOptions {
    /// The container.
    pub id: String,
    /// Its own id.
    pub exec_id: String,
    /// The program and its arguments.
    pub args: Vec<String>,
    /// It gets a terminal.
    pub tty: bool,
    /// Keep its stdin open.
    pub stdin: bool,
    /// The terminal's columns and rows; 0: unknown.
    pub size: (u16, u16),
}

/// While one is held, no process that could trace it sees how a container is made.
struct Unseen<'a> {
    // Thawed before the next one freezes.
    _frozen: Option<cgroup::Frozen>,
    _turn: Turn<'a>,
}

/// Several containers are made at once only where none of those that see them may trace.
#[expect(dead_code, reason = "the guards are held, not read")]
enum Turn<'a> {
    Shared(tokio::sync::RwLockReadGuard<'a, ()>),
    Alone(tokio::sync::RwLockWriteGuard<'a, ()>),
}

/// What was prepared for a container before libcontainer sees it.
struct Prepared {
    spec: Spec,
    /// What is mounted when libcontainer is done.
    late: Vec<Mount>,
    response: CreateContainerResponse,
}

impl Pod {
    /// Runs `work` with the container's turn: creation, start and removal of one container never overlap.
    async fn in_turn<T>(&self, id: &str, work: impl Future<Output = Result<T, PodError>>) -> Result<T, PodError> {
        let turn = Arc::clone(self.lock().turns.entry(id.to_owned()).or_default());
        let result = {
            let _held = turn.lock().await;
            work.await
        };
        let mut state = self.lock();
        let there = state.containers.contains_key(id);
        release_entry(&mut state.turns, id, turn, |_| there);
        result
    }

    /// Makes a container up to, and without, its first instruction.
    pub async fn create(self: Arc<Self>, options: CreateOptions) -> Result<CreateContainerResponse, PodError> {
        check_id(&options.id)?;
        let id = options.id.clone();
        self.in_turn(&id, self.create_in_turn(options)).await
    }

    async fn create_in_turn(self: &Arc<Self>, options: CreateOptions) -> Result<CreateContainerResponse, PodError> {
        if let Ok(there) = self.container(&options.id) {
            return Ok(there.created.clone());
        }
        let id = options.id.clone();
        let pid = self.pid_namespace(&options).await?;
        let namespace = pid.clone();
        // Dropped after the rest: what is left of a failed attempt has the agent's rights until it is killed.
        let mut unseen = None;
        let mut undo = UndoStack::new();
        undo.push("root", {
            let id = id.clone();
            move || root::remove(&id)
        });
        undo.push("huge pages", {
            let (pod, id) = (Arc::clone(self), id.clone());
            move || pod.huge_pages.release(&id)
        });
        undo.push("cgroup", {
            let path = cgroup::path(&id);
            move || cgroup::clear(&path, DEATH)
        });
        let pod = Arc::clone(self);
        let stdin = options.stdin;
        let made = async {
            let prepared = tokio::task::spawn_blocking(move || prepare(&pod, &options, pid)).await??;
            unseen = self.freeze_tracers(&id, &namespace).await?;
            let made = self.make(&id, prepared, stdin, namespace).await?;
            // It has mounted what it was shown; what is of others is not held longer.
            let shown = id.clone();
            let cleared = tokio::task::spawn_blocking(move || shown::clear(&shown)).await?;
            cleared.map_err(|source| PodError::Io { what: "take the mounts", id: id.clone(), source })?;
            Ok(made)
        };
        let container = match made.await {
            Ok(container) => container,
            Err(error) => {
                // Dropped where it may block: it says itself what could not be undone.
                tokio::task::spawn_blocking(move || drop(undo)).await?;
                return Err(error);
            }
        };
        undo.keep();
        drop(unseen);
        let response = container.created.clone();
        self.lock().containers.insert(id, Arc::new(container));
        Ok(response)
    }

    /// The cgroups of the containers that may trace the processes of this PID namespace.
    fn tracers(&self, namespace: &PidNamespace) -> Vec<PathBuf> {
        let state = self.lock();
        let tracers = state.containers.values().filter(|container| container.is_in(namespace) && container.may_trace());
        tracers.map(|container| container.cgroup.clone()).collect()
    }

    /// Freezes the containers that may trace the processes of this PID namespace: until it has the container's root and
    /// rights, the first process of a container has the agent's.
    async fn freeze_tracers(&self, id: &str, namespace: &PidNamespace) -> Result<Option<Unseen<'_>>, PodError> {
        if matches!(namespace, PidNamespace::Own | PidNamespace::Node) {
            return Ok(None);
        }
        let shared = self.unseen.read().await;
        if self.tracers(namespace).is_empty() {
            return Ok(Some(Unseen { _turn: Turn::Shared(shared), _frozen: None }));
        }
        drop(shared);
        let turn = Turn::Alone(self.unseen.write().await);
        let cgroups = self.tracers(namespace);
        let what = "freeze the containers with CAP_SYS_PTRACE that would see the first process";
        let frozen = cgroup::Frozen::new(cgroups, FREEZE).await;
        let frozen = frozen.map_err(|source| PodError::Io { what, id: id.to_owned(), source })?;
        Ok(Some(Unseen { _turn: turn, _frozen: Some(frozen) }))
    }

    async fn make(
        self: &Arc<Self>,
        id: &str,
        prepared: Prepared,
        stdin: bool,
        namespace: PidNamespace,
    ) -> Result<Container, PodError> {
        let failed = |what| move |source| PodError::Io { what, id: id.to_owned(), source };
        let Prepared { spec, late, response } = prepared;
        let missing = |part| PodError::Spec { id: id.to_owned(), source: super::spec::SpecError::Missing { part } };
        let process = spec.process().clone().ok_or_else(|| missing("process"))?;
        let linux = spec.linux().clone().ok_or_else(|| missing("linux"))?;
        let tty = process.terminal().unwrap_or(false);
        let path = cgroup::path(id);

        let making = self.making();
        let in_proc = places::in_proc(&spec);
        let request = Request::Create(Create { id: id.to_owned(), tty, in_proc, late });
        let (made, stdio) = self.make_process(id, request, vec![], tty, stdin, (response.uid, response.gid)).await?;
        let init = self.know(made, stdio, path.clone(), namespace != PidNamespace::Own);
        drop(making);
        let rules = linux.resources().as_ref().and_then(|resources| resources.devices().clone()).unwrap_or_default();
        devices::attach(&path, &rules).map_err(failed("limit the devices"))?;
        if let (Some(terminal), Some(size)) = (&init.stdio.terminal, process.console_size()) {
            let cut = |number: u64| u16::try_from(number).unwrap_or(u16::MAX);
            sys::set_window_size(terminal, cut(size.width()), cut(size.height()))
                .map_err(failed("size the terminal"))?;
        }
        let namespaces = linux.namespaces().as_deref().unwrap_or_default();
        Ok(Container {
            id: id.to_owned(),
            process,
            seccomp: linux.seccomp().clone(),
            cgroup_namespace: namespaces.iter().any(|namespace| namespace.typ() == LinuxNamespaceType::Cgroup),
            pid_namespace: namespace,
            cgroup: path,
            created: response,
            init,
            started: AtomicBool::new(false),
            execs: Mutex::new(HashMap::new()),
        })
    }

    /// Has the zygote make a process, with pipes or a terminal. The caller holds a `Making`.
    async fn make_process(
        self: &Arc<Self>,
        id: &str,
        request: Request,
        mut fds: Vec<OwnedFd>,
        tty: bool,
        stdin: bool,
        (uid, gid): (u32, u32),
    ) -> Result<(NewProcess, Stdio), PodError> {
        let failed = |source| PodError::Io { what: "set up the streams", id: id.to_owned(), source };
        let mut stdio = Stdio::default();
        let (uid, gid) = self.users.as_ref().map_or((uid, gid), |users| users.outside(uid, gid));
        if !tty {
            let (ours, theirs) = Stdio::pipes(stdin, uid, gid).map_err(failed)?;
            stdio = ours;
            fds.extend(theirs);
        }
        let pod = Arc::clone(self);
        let call = move || pod.zygote.call(&request, &fds.iter().collect::<Vec<_>>());
        let made = tokio::task::spawn_blocking(call).await?;
        let mut made = made.map_err(|source| PodError::Zygote { id: id.to_owned(), source })?;
        if let Some(master) = made.terminal.take() {
            stdio = Stdio::of_terminal(master, stdin).map_err(failed)?;
        }
        Ok((made, stdio))
    }

    async fn pid_namespace(self: &Arc<Self>, options: &CreateOptions) -> Result<PidNamespace, PodError> {
        if !options.pid_of.is_empty() {
            let target = self.container(&options.pid_of)?;
            if target.init.exit().is_some() {
                return Err(PodError::NotRunning { id: options.pid_of.clone() });
            }
            return Ok(target.processes_namespace());
        }
        if self.node_pid && options.pid_mode == PidMode::Pod {
            return Ok(PidNamespace::Node);
        }
        if !self.shared_pid || options.pid_mode == PidMode::Container {
            return Ok(PidNamespace::Own);
        }
        let failed = |source: ZygoteError| PodError::Zygote { id: options.id.clone(), source };
        let holder = self.pause.get_or_try_init(|| async {
            let pod = Arc::clone(self);
            let user_namespace = self.users.is_some();
            let hold = move || pod.zygote.call(&Request::Pause { user_namespace }, &[]);
            let holder = tokio::task::spawn_blocking(hold).await?.map_err(failed)?;
            if user_namespace {
                let named = userns::name(&format!("/proc/{}/ns/pid", holder.pid), paths::PID_NAMESPACE);
                named.map_err(|source| PodError::Io {
                    what: "name the PID namespace",
                    id: options.id.clone(),
                    source,
                })?;
            }
            // It lives as long as the agent, which never signals it.
            Ok::<i32, PodError>(holder.keep().0)
        });
        let holder = *holder.await?;
        Ok(if self.users.is_some() { PidNamespace::Named } else { PidNamespace::Of(holder) })
    }

    /// Lets a created container run.
    pub async fn start(self: Arc<Self>, id: String) -> Result<(), PodError> {
        self.in_turn(&id, async {
            let container = self.container(&id)?;
            if container.started.load(Ordering::Acquire) {
                return Ok(());
            }
            if container.init.exit().is_some() {
                return Err(PodError::NotRunning { id: id.clone() });
            }
            let failed = |source| PodError::Io { what: "start the first process", id: id.clone(), source };
            // Not while a container is made from which this one, not frozen, could take the agent's rights.
            let _unseen = if container.may_trace() { Some(self.unseen.write().await) } else { None };
            // A socket of libcontainer's, whose listener is the container's first process: connecting does not wait.
            let path = Path::new(paths::CONTAINERS).join(&id).join("notify.sock");
            let mut socket = retry_interrupted(|| UnixStream::connect(&path)).map_err(failed)?;
            socket.write_all(b"start container").map_err(failed)?;
            container.started.store(true, Ordering::Release);
            Ok(())
        })
        .await
    }

    /// Sends a signal to a process or to all of a container; to something gone: success.
    pub fn signal(&self, id: &str, exec_id: &str, signal: u32, all: bool) -> Result<(), PodError> {
        let number = i32::try_from(signal).ok().filter(|number| (1..=64).contains(number));
        let number = number.ok_or(PodError::Signal { signal })?;
        let failed = |source| PodError::Io { what: "signal a process", id: id.to_owned(), source };
        if all {
            return match self.container(id) {
                Ok(container) if number == libc::SIGKILL => cgroup::kill(&container.cgroup).map_err(failed),
                Ok(container) => {
                    for pid in cgroup::processes(&container.cgroup).map_err(failed)? {
                        match sys::pidfd_open(pid).and_then(|pidfd| sys::pidfd_signal(pidfd, number)) {
                            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => return Err(failed(error)),
                            _ => {}
                        }
                    }
                    Ok(())
                }
                Err(_) => Ok(()),
            };
        }
        if number == libc::SIGKILL
            && check_id(exec_id).is_ok()
            && let Ok(container) = self.container(id)
        {
            // Before it looks for the process: one that is being made, or is asked for later, sees this.
            self.exec_entry(&container, exec_id).killed.store(true, Ordering::SeqCst);
        }
        match self.process(id, exec_id) {
            Ok(process) => process.signal(number).map_err(failed),
            // Gone, or never there: nothing to signal.
            Err(_) => Ok(()),
        }
    }

    /// Starts a further process in a running container.
    pub async fn exec(self: Arc<Self>, options: ExecOptions) -> Result<(), PodError> {
        check_id(&options.exec_id)?;
        if options.args.first().is_none_or(String::is_empty) {
            return Err(PodError::NoProgram);
        }
        let container = self.container(&options.id)?;
        if !container.started.load(Ordering::Acquire) || container.init.exit().is_some() {
            return Err(PodError::NotRunning { id: options.id });
        }
        let entry = self.exec_entry(&container, &options.exec_id);
        let exec_id = options.exec_id.clone();
        let made = entry.process.get_or_try_init(|| async {
            // The caller has given it up already: its signal was faster than its request.
            if entry.killed.load(Ordering::SeqCst) {
                return Err(PodError::Killed { id: options.id.clone(), exec_id: exec_id.clone() });
            }
            self.make_exec(&container, options).await
        });
        match made.await {
            Ok(process) if entry.killed.load(Ordering::SeqCst) => {
                let failed = |source| PodError::Io { what: "kill a command", id: container.id.clone(), source };
                process.signal(libc::SIGKILL).map_err(failed)
            }
            Ok(_) => Ok(()),
            Err(error) => {
                let mut execs = container.execs.lock().unwrap_or_else(PoisonError::into_inner);
                // A repeated request may be making the process now: later requests must find it.
                release_entry(&mut execs, &exec_id, entry, |entry| entry.process.initialized());
                Err(error)
            }
        }
    }

    /// The entry of an exec; forgets the oldest that ended long ago.
    fn exec_entry(&self, container: &Container, exec_id: &str) -> Arc<ExecEntry> {
        let count = {
            let mut state = self.lock();
            state.exec_count += 1;
            state.exec_count
        };
        let mut execs = container.execs.lock().unwrap_or_else(PoisonError::into_inner);
        let over: Vec<(u64, String)> =
            execs.iter().filter(|(_, entry)| entry.is_over()).map(|(id, entry)| (entry.count, id.clone())).collect();
        if over.len() > REMEMBERED
            && let Some((_, oldest)) = over.iter().min()
        {
            execs.remove(oldest);
        }
        let new = || Arc::new(ExecEntry { count, process: OnceCell::new(), killed: AtomicBool::new(false) });
        Arc::clone(execs.entry(exec_id.to_owned()).or_insert_with(new))
    }

    async fn make_exec(
        self: &Arc<Self>,
        container: &Container,
        options: ExecOptions,
    ) -> Result<Arc<Process>, PodError> {
        let gone = || PodError::NotRunning { id: options.id.clone() };
        let pidfd = container.init.pidfd.as_ref().ok_or_else(gone)?;
        let failed = |source| PodError::Io { what: "refer to the first process", id: options.id.clone(), source };
        let pidfd = pidfd.try_clone().map_err(failed)?;
        let process = exec_process(&container.process, options.args, options.tty);
        let owner = (process.user().uid(), process.user().gid());
        // Until the program runs, no container is frozen that this process joins, and none begins that may trace it.
        let _unseen = self.unseen.read().await;
        let request = Request::Exec(Box::new(Exec {
            process,
            seccomp: container.seccomp.clone(),
            may_be_traced: !self.tracers(&container.processes_namespace()).is_empty(),
            user_namespace: self.users.is_some(),
            cgroup_namespace: container.cgroup_namespace,
            cgroup: container.cgroup.display().to_string(),
            init_cgroup: cgroup::of_process(container.init.pid, &container.cgroup),
            size: options.size,
        }));
        let _making = self.making();
        let made = self.make_process(&options.id, request, vec![pidfd], options.tty, options.stdin, owner).await;
        // It ended meanwhile: that is the reason, whatever the zygote saw of it.
        let (made, stdio) = made.map_err(|error| if container.init.exit().is_some() { gone() } else { error })?;
        Ok(self.know(made, stdio, container.cgroup.clone(), false))
    }

    /// Changes the limits of a container that has not ended.
    pub async fn update(self: Arc<Self>, request: UpdateContainerRequest) -> Result<(), PodError> {
        // Processors of the node are a keeper's business: no container in a guest has any.
        let UpdateContainerRequest { id, limits, oom_score_adj, processors: _ } = request;
        check_id(&id)?;
        self.in_turn(&id, async {
            let container = self.container(&id)?;
            if container.init.exit().is_some() {
                return Err(PodError::NotRunning { id: id.clone() });
            }
            let (cgroup, pod, id) = (container.cgroup.clone(), Arc::clone(&self), id.clone());
            let limits: Vec<_> = limits.into_iter().map(|limit| (limit.file, limit.value)).collect();
            let change = move || {
                let pages = huge_pages::among(limits.iter().map(|(file, value)| (file.as_str(), value.as_str())));
                let before = pod.give_huge_pages(&id, &pages)?;
                let changed = limits::change(&cgroup, Path::new("/proc"), &limits, oom_score_adj);
                if changed.is_err() {
                    // The first error is the one that matters; this one is fewer pages, or as many as there were.
                    let _ = pod.huge_pages.set(&id, &before);
                }
                changed.map_err(|source| PodError::Limits { id, source })
            };
            tokio::task::spawn_blocking(change).await?
        })
        .await
    }

    /// Has the kernel keep what these limits of a container allow; returns what takes that back. Containers that have ended
    /// keep theirs no longer than until the next one needs some.
    fn give_huge_pages(&self, id: &str, limits: &Limits) -> Result<Limits, PodError> {
        if limits.is_empty() {
            return Ok(Limits::new());
        }
        let failed = |source| PodError::HugePages { id: id.to_owned(), source };
        for ended in self.list().into_iter().filter(|container| container.exit.is_some()) {
            self.huge_pages.release(&ended.id).map_err(failed)?;
        }
        self.huge_pages.set(id, limits).map_err(failed)
    }

    /// Changes a terminal's size; of a process that is gone: success.
    pub fn resize(&self, id: &str, exec_id: &str, columns: u32, rows: u32) -> Result<(), PodError> {
        let process = self.process(id, exec_id)?;
        let cut = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
        let terminal = process.stdio.terminal.as_ref().ok_or_else(|| PodError::NoTerminal { id: id.to_owned() })?;
        sys::set_window_size(terminal, cut(columns), cut(rows)).map_err(|source| PodError::Io {
            what: "size a terminal",
            id: id.to_owned(),
            source,
        })
    }

    /// Kills what is left of a container and removes it. One that is not there is a success.
    pub async fn remove(self: Arc<Self>, id: String) -> Result<(), PodError> {
        check_id(&id)?;
        self.in_turn(&id, async {
            let Ok(container) = self.container(&id) else { return Ok(()) };
            kill_all(&id, &container.cgroup, &container.init).await?;
            let path = container.cgroup.clone();
            let (folder, pod) = (id.clone(), Arc::clone(&self));
            let remove = move || (cgroup::remove(&path), root::remove(&folder), pod.huge_pages.release(&folder));
            let removed = tokio::task::spawn_blocking(remove).await?;
            removed.0.map_err(|source| PodError::Io { what: "remove the cgroup", id: id.clone(), source })?;
            removed.1.map_err(|source| PodError::Root { id: id.clone(), source })?;
            removed.2.map_err(|source| PodError::HugePages { id: id.clone(), source })?;
            self.lock().containers.remove(&id);
            Ok(())
        })
        .await
    }

    /// Kills every container. For the end of the machine.
    pub fn kill_everything(&self) -> std::io::Result<()> {
        cgroup::kill(&PathBuf::from(format!("{}{}", paths::CGROUP, paths::POD_CGROUP)))
    }
}

/// Releases a handle on an entry of a table, and removes the entry if the table has the last handle and `keep` is false for it.
fn release_entry<T>(table: &mut HashMap<String, Arc<T>>, key: &str, handle: Arc<T>, keep: impl FnOnce(&T) -> bool) {
    drop(handle);
    if table.get(key).is_some_and(|entry| Arc::strong_count(entry) == 1 && !keep(entry)) {
        table.remove(key);
    }
}

/// Kills all processes of a container and waits until they are gone.
async fn kill_all(id: &str, path: &Path, init: &Process) -> Result<(), PodError> {
    let failed = |source| PodError::Io { what: "kill the processes", id: id.to_owned(), source };
    cgroup::kill(path).map_err(failed)?;
    let alive = || PodError::StillAlive { id: id.to_owned(), seconds: DEATH.as_secs() };
    let deadline = Instant::now() + DEATH;
    init.wait(DEATH).await.ok_or_else(alive)?;
    while cgroup::populated(path) {
        if Instant::now() >= deadline {
            return Err(alive());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        // An exec that was under way may have come in since.
        cgroup::kill(path).map_err(failed)?;
    }
    Ok(())
}

/// Everything about a container that is done before a process of it exists: root, user, specification on disk.
fn prepare(pod: &Pod, options: &CreateOptions, pid: PidNamespace) -> Result<Prepared, PodError> {
    let id = &options.id;
    let in_spec = |source| PodError::Spec { id: id.clone(), source };
    let in_root = |source| PodError::Root { id: id.clone(), source };
    let spec = parse(&options.spec).map_err(in_spec)?;
    pod.give_huge_pages(id, &limits::huge_pages(&spec))?;
    let image = pod.disks.image(options.partition)?;
    pod.disks.scratch()?;
    let users = pod.users.as_ref();
    let (owner, last) = (users.map(UserNs::root), users.map(UserNs::limits));
    let root = root::make(id, &image, users).map_err(in_root)?;
    let passwd = root::read_file(&root, "/etc/passwd").map_err(in_root)?;
    let group = root::read_file(&root, "/etc/group").map_err(in_root)?;
    let asked = spec.process().as_ref().map(|process| process.user().clone()).unwrap_or_default();
    let user = if options.user.is_empty() {
        user::of_numbers(asked.uid(), asked.gid(), &passwd)
    } else {
        user::find(&options.user, &passwd, &group).map_err(|source| PodError::User { id: id.clone(), source })?
    };
    let mut groups = vec![user.gid];
    let merged = match &user.name {
        Some(name) if options.merge_groups => user::memberships(name, &group),
        _ => Vec::new(),
    };
    for gid in asked.additional_gids().iter().flatten().copied().chain(merged) {
        if !groups.contains(&gid) {
            groups.push(gid);
        }
    }
    user::check([user.uid], last.map(|(user, _)| user))
        .and_then(|()| user::check(groups.iter().copied(), last.map(|(_, group)| group)))
        .map_err(|source| PodError::Numbers { id: id.clone(), source })?;
    let response = CreateContainerResponse { uid: user.uid, gid: user.gid, supplemental_groups: groups.clone() };
    let mut mounts = Vec::with_capacity(options.volumes.len());
    for volume in &options.volumes {
        let image = pod.disks.image(volume.partition)?;
        let mount = volumes::prepare(&root, &image, volume, owner);
        mounts.push(mount.map_err(|source| PodError::Volume { id: id.clone(), source })?);
    }
    let shared = |mount: &Mount| mount.source().as_ref().is_some_and(|source| source.starts_with(share::FOLDER));
    if spec.mounts().iter().flatten().any(shared) {
        pod.disks.share()?;
    }
    let spec = own_volumes(pod, id, spec, &options.empty_dirs)?;
    let capabilities = own_capabilities();
    let in_users = users.map(|users| users.network);
    let place = Place {
        id,
        root: &root,
        pid,
        user: &user,
        groups: &groups,
        volumes: mounts,
        capabilities,
        oom_score_adj: own_oom_score_adj(),
        users: in_users,
    };
    let mut spec = adjust(spec, place).map_err(in_spec)?;
    if let (Some(users), Some(mounts)) = (users, spec.mounts_mut()) {
        shown::of_mounts(id, users, mounts).map_err(in_root)?;
    }
    for device in &options.devices {
        let numbers = pod.disks.device(device.partition)?;
        devices::give(&mut spec, device, numbers).map_err(|source| in_spec(source.into()))?;
    }
    let controllers = Path::new(paths::CGROUP).join("cgroup.controllers");
    limits::leave_out(&mut spec, &std::fs::read_to_string(controllers).unwrap_or_default(), &huge_pages::sizes());
    places::check(&root, spec.mounts().as_deref().unwrap_or_default(), Path::new(shown::SYS))
        .map_err(|source| PodError::Mount { id: id.clone(), source })?;
    let late = places::take_late(&mut spec);
    prepare_targets(&root, &mut spec, owner).map_err(|source| PodError::Target { id: id.clone(), source })?;
    let path = Path::new(paths::BUNDLES).join(id).join("config.json");
    let json = serde_json::to_vec(&spec).map_err(|source| in_spec(source.into()))?;
    std::fs::write(path, json).map_err(|source| PodError::Io { what: "write the bundle", id: id.clone(), source })?;
    Ok(Prepared { spec, late, response })
}

/// Finds the mounts and the working directory in the root, and makes what is missing. libcontainer gets paths without links.
fn prepare_targets(root: &Path, spec: &mut Spec, owner: root::Owner) -> Result<(), TargetError> {
    let mut targets = Targets::open(root, owner)?;
    targets.check_plain()?;
    for mount in spec.mounts_mut().iter_mut().flatten() {
        let of_file = places::is_bind(mount) && mount.source().as_ref().is_some_and(|source| !source.is_dir());
        let shape = if of_file { Shape::File } else { Shape::Directory };
        let destination = targets.mount(mount.destination(), shape)?;
        mount.set_destination(destination);
    }
    if let Some(process) = spec.process() {
        targets.prepare("working directory", process.cwd(), Shape::Directory)?;
    }
    let devices = spec.linux().as_ref().and_then(|linux| linux.devices().as_ref());
    devices.into_iter().flatten().try_for_each(|device| targets.device(device.path()))
}

/// The specification with its volumes that are the machine's own: each mount comes from where the volume, or its part, is.
fn own_volumes(pod: &Pod, id: &str, mut spec: Spec, volumes: &[EmptyDir]) -> Result<Spec, PodError> {
    for (number, volume) in volumes.iter().enumerate() {
        let source = match pod.empty_dirs.place(volume, &pod.disks)? {
            Own::Whole(path) => path,
            Own::Part(mount) => shown::keep(id, mount, &format!("own{number}"))
                .map_err(|source| PodError::Root { id: id.to_owned(), source })?,
        };
        let asked = Path::new(&volume.source);
        for mount in spec.mounts_mut().iter_mut().flatten() {
            if mount.source().as_deref() == Some(asked) {
                mount.set_source(Some(source.clone()));
            }
        }
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_stays_while_another_handle_is_held() {
        let mut table = HashMap::from([("a".to_owned(), Arc::new(()))]);
        let (first, second) = (Arc::clone(&table["a"]), Arc::clone(&table["a"]));
        release_entry(&mut table, "a", first, |()| false);
        assert!(table.contains_key("a"));
        let kept = Arc::clone(&second);
        release_entry(&mut table, "a", second, |()| true);
        release_entry(&mut table, "a", kept, |()| true);
        assert!(table.contains_key("a"));
        let last = Arc::clone(&table["a"]);
        release_entry(&mut table, "a", last, |()| false);
        assert!(table.is_empty());
    }
}
