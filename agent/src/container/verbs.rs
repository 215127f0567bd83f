//! Owns: the verbs on containers, each of which may be said twice: create, start, signal, exec, resize, remove.

use libcontainer::oci_spec::runtime::{LinuxNamespaceType, Mount, Spec};
use nacelle_base::share;
use nacelle_base::undo::UndoStack;
use nacelle_proto::agent::{CreateContainerResponse, EmptyDir, PidMode, UpdateContainerRequest};
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
use super::volumes::{self, Volume};
use super::{Container, Pod, PodError, Process, cgroup, check_id, limits, root, shown, user};
use crate::empty_dirs::Place as Own;
use crate::huge_pages::{self, Limits};
use crate::stdio::Stdio;
use crate::userns::{self, UserNs};
use crate::zygote::{Create, Exec, Made, Request, ZygoteError};
use crate::{paths, sys};

/// How long killed processes may take to be gone.
const DEATH: Duration = Duration::from_secs(30);
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

/// What was prepared for a container before libcontainer sees it.
struct Prepared {
    spec: Spec,
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
        // The table's and ours: nobody waits for it.
        if Arc::strong_count(&turn) == 2 && !state.containers.contains_key(id) {
            state.turns.remove(id);
        }
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
        let shares_pid = pid != PidNamespace::Own;
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
            let made = self.make(&id, prepared, stdin, shares_pid).await?;
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
        let response = container.created.clone();
        self.lock().containers.insert(id, Arc::new(container));
        Ok(response)
    }

    async fn make(
        self: &Arc<Self>,
        id: &str,
        prepared: Prepared,
        stdin: bool,
        last: bool,
    ) -> Result<Container, PodError> {
        let failed = |what| move |source| PodError::Io { what, id: id.to_owned(), source };
        let Prepared { spec, response } = prepared;
        let missing = |part| PodError::Spec { id: id.to_owned(), source: super::spec::SpecError::Missing { part } };
        let process = spec.process().clone().ok_or_else(|| missing("process"))?;
        let linux = spec.linux().clone().ok_or_else(|| missing("linux"))?;
        let tty = process.terminal().unwrap_or(false);
        let path = cgroup::path(id);

        let making = self.making();
        let request = Request::Create(Create { id: id.to_owned(), tty });
        let (made, stdio) = self.make_process(id, request, vec![], tty, stdin, (response.uid, response.gid)).await?;
        let init = self.know(made.pid, stdio, path.clone(), last);
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
    ) -> Result<(Made, Stdio), PodError> {
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
            return Ok(PidNamespace::Of(target.init.pid));
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
            let pid = tokio::task::spawn_blocking(hold).await?.map_err(failed)?.pid;
            if user_namespace {
                let named = userns::name(&format!("/proc/{pid}/ns/pid"), paths::PID_NAMESPACE);
                named.map_err(|source| PodError::Io {
                    what: "name the PID namespace",
                    id: options.id.clone(),
                    source,
                })?;
            }
            Ok::<i32, PodError>(pid)
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
            // A socket of libcontainer's, whose listener is the container's first process: connecting does not wait.
            let path = Path::new(paths::CONTAINERS).join(&id).join("notify.sock");
            let mut socket = UnixStream::connect(path).map_err(failed)?;
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
        let cell = self.exec_cell(&container, &options.exec_id);
        let exec_id = options.exec_id.clone();
        let result = cell.get_or_try_init(|| self.make_exec(&container, options)).await.map(drop);
        if result.is_err() {
            let mut execs = container.execs.lock().unwrap_or_else(PoisonError::into_inner);
            if execs.get(&exec_id).is_some_and(|(_, cell)| !cell.initialized()) {
                execs.remove(&exec_id);
            }
        }
        result
    }

    /// The place for an exec; forgets the oldest that ended long ago.
    fn exec_cell(&self, container: &Container, exec_id: &str) -> Arc<OnceCell<Arc<Process>>> {
        let count = {
            let mut state = self.lock();
            state.exec_count += 1;
            state.exec_count
        };
        let mut execs = container.execs.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = |cell: &OnceCell<Arc<Process>>| cell.get().is_some_and(|process| process.exit().is_some());
        let over: Vec<(u64, String)> =
            execs.iter().filter(|(_, (_, cell))| ended(cell)).map(|(id, (count, _))| (*count, id.clone())).collect();
        if over.len() > REMEMBERED
            && let Some((_, oldest)) = over.iter().min()
        {
            execs.remove(oldest);
        }
        Arc::clone(&execs.entry(exec_id.to_owned()).or_insert_with(|| (count, Arc::default())).1)
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
        let request = Request::Exec(Box::new(Exec {
            process,
            seccomp: container.seccomp.clone(),
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
        Ok(self.know(made.pid, stdio, container.cgroup.clone(), false))
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
    if let Some(process) = spec.process() {
        root::make_folder(&root, process.cwd(), owner).map_err(in_root)?;
    }
    for mount in spec.mounts().iter().flatten() {
        let bind = |option: &String| option == "bind" || option == "rbind";
        if mount.typ().as_deref() == Some("bind") || mount.options().iter().flatten().any(bind) {
            let folder = mount.source().as_ref().is_some_and(|source| source.is_dir());
            root::make_target(&root, mount.destination(), folder, owner).map_err(in_root)?;
        }
    }
    let path = Path::new(paths::BUNDLES).join(id).join("config.json");
    let json = serde_json::to_vec(&spec).map_err(|source| in_spec(source.into()))?;
    std::fs::write(path, json).map_err(|source| PodError::Io { what: "write the bundle", id: id.clone(), source })?;
    Ok(Prepared { spec, response })
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
