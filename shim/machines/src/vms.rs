//! Manages persistent VMs, which outlive their pods: their identity, their files and their location. A pod that names one is a
//! run of it. Functions may be called on any thread; changes are serialized, and each takes effect after it is on the disk.

use nacelle_base::files::{FileError, at, remove_tree_if_there};
use nacelle_base::jailed::JailedDir;
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Chain, Classify, FailureKind, random};
use nacelle_model::digest::ImageId;
use nacelle_model::record::VmRecord;
use nacelle_store::{Change, Contents, Store, StoreError};
use nacelle_vmi::annotations::machine_id::ExpectedMachineId;
use std::collections::BTreeMap;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use tokio::sync::watch;

/// The reason why an operation on a persistent VM failed.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// The record cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The VM's directory failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The kernel provided no random bytes for the identity.
    #[error("cannot create the identity of a VM: the kernel provided no random bytes")]
    Random {
        /// The cause.
        source: std::io::Error,
    },
    /// There is no VM of this name.
    #[error("VM {id} does not exist")]
    NotFound {
        /// Namespace and name.
        id: String,
    },
    /// A VM of this name exists.
    #[error("VM {id} exists already: delete it, or choose another name")]
    Exists {
        /// Namespace and name.
        id: String,
    },
    /// Another operation holds the VM.
    #[error("VM {id} is being {operation}: wait until that has ended")]
    Busy {
        /// Namespace and name.
        id: String,
        /// The operation: "exported", "imported".
        operation: &'static str,
    },
    /// Another VM has the same identity.
    #[error(
        "VM {id} of this node has the same identity ({identity}) as the imported VM: delete it, or import with a new identity"
    )]
    SameIdentity {
        /// Namespace and name of the other VM.
        id: String,
        /// What the two have in common: the UUID, the MAC address or the machine id.
        identity: String,
    },
    /// A pod expects a VM that this node does not have, and does not allow to create it.
    #[error(
        "cannot run VM {id}, whose pod expects the machine id {machine_id}: this node has no VM of this name, and a new one would have blank disks; run the pod on the node that has the VM, bring it here (nacelle vm import), or create it by the annotation vm.nacelle.dev/machine-id: {machine_id},new"
    )]
    UnknownMachineId {
        /// Namespace and name.
        id: String,
        /// The machine id.
        machine_id: String,
    },
    /// The VM has another machine id than the pod expects.
    #[error(
        "cannot run VM {id}, whose pod expects the machine id {expected}: the VM of this name on this node has the machine id {recorded}; correct the annotation vm.nacelle.dev/machine-id or the VM's name, or delete the VM with its disks (nacelle vm rm)"
    )]
    OtherMachineId {
        /// Namespace and name.
        id: String,
        /// The machine id of the VM.
        recorded: String,
        /// The machine id that the pod expects.
        expected: String,
    },
    /// The VM is to be created, but one without a machine id has the name.
    #[error(
        "cannot create VM {id} with machine id {machine_id}: this node has a VM of this name without a machine id; to run that VM and give it this id, remove \",new\" from the annotation vm.nacelle.dev/machine-id, otherwise delete it with its disks (nacelle vm rm)"
    )]
    HasNoMachineId {
        /// Namespace and name.
        id: String,
        /// The machine id that the pod expects.
        machine_id: String,
    },
    /// Another VM of this node has the machine id.
    #[error(
        "cannot give VM {id} the machine id {machine_id}: another VM of this node has it; correct the annotation vm.nacelle.dev/machine-id or the VM's name"
    )]
    MachineIdTaken {
        /// Namespace and name.
        id: String,
        /// The machine id.
        machine_id: String,
    },
    /// A blocking task panicked or was cancelled.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for VmError {
    fn kind(&self) -> FailureKind {
        match self {
            VmError::Store(error) => error.kind(),
            VmError::File(error) => error.kind(),
            VmError::NotFound { .. } => FailureKind::NotFound,
            VmError::Exists { .. } => FailureKind::AlreadyExists,
            VmError::Busy { .. }
            | VmError::SameIdentity { .. }
            | VmError::UnknownMachineId { .. }
            | VmError::OtherMachineId { .. }
            | VmError::HasNoMachineId { .. }
            | VmError::MachineIdTaken { .. } => FailureKind::Conflict,
            VmError::Task(error) => error.kind(),
            VmError::Random { .. } => FailureKind::Internal,
        }
    }
}

/// The persistent VMs of this node.
pub struct Vms {
    directory: PathBuf,
    store: Store,
    records: RwLock<BTreeMap<String, VmRecord>>,
    change_lock: tokio::sync::Mutex<()>,
    locked: LockedNames,
    changes: watch::Sender<()>,
    left_in_place: usize,
}

/// Locked names, with the operation that holds each and the image that it needs.
type LockedNames = Arc<Mutex<BTreeMap<String, (&'static str, Option<ImageId>)>>>;

fn names(locked: &LockedNames) -> MutexGuard<'_, BTreeMap<String, (&'static str, Option<ImageId>)>> {
    locked.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lock on a name, held until this is dropped, whether or not the VM exists.
#[derive(Debug)]
pub struct VmLock {
    id: String,
    locked: LockedNames,
}

impl VmLock {
    /// Keeps an image in the store while the lock is held.
    pub fn keep_image(&self, image: ImageId) {
        if let Some((_, needed)) = names(&self.locked).get_mut(&self.id) {
            *needed = Some(image);
        }
    }
}

impl Drop for VmLock {
    fn drop(&mut self) {
        names(&self.locked).remove(&self.id);
    }
}

/// Returns namespace and name as one key.
pub fn id(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

/// The treatment of the directories of VMs without a record when the table is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnknownVms {
    /// They are removed: their VMs were deleted, or never finished.
    Remove,
    /// They are moved to this directory, because records may have been lost. One that cannot be moved stays.
    KeepIn(PathBuf),
}

impl UnknownVms {
    /// Returns the treatment for these contents of the store: directories are kept in `lost` if records may have been lost.
    pub fn after(contents: &Contents, lost: PathBuf) -> UnknownVms {
        match contents.records_lost {
            true => UnknownVms::KeepIn(lost),
            false => UnknownVms::Remove,
        }
    }
}

impl Vms {
    /// Creates the table from these records, and removes or keeps directories without a record. Blocks. The caller asks for
    /// [`UnknownVms::KeepIn`] again at the next start while [`left_in_place`](Vms::left_in_place) is not 0.
    pub fn open(
        directory: PathBuf,
        store: Store,
        records: Vec<VmRecord>,
        unknown: UnknownVms,
    ) -> Result<Vms, FileError> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(at("create", &directory))?;
        let mut left_in_place = 0;
        for entry in std::fs::read_dir(&directory).map_err(at("read", &directory))? {
            let entry = entry.map_err(at("read", &directory))?;
            let known = |record: &VmRecord| entry.file_name().to_str() == Some(&record.uid);
            if records.iter().any(known) {
                continue;
            }
            match &unknown {
                UnknownVms::Remove => remove_tree_if_there(&entry.path())?,
                UnknownVms::KeepIn(lost) => {
                    let to = lost.join(entry.file_name());
                    let moved = std::fs::DirBuilder::new()
                        .recursive(true)
                        .mode(0o700)
                        .create(lost)
                        .and_then(|()| std::fs::rename(entry.path(), &to));
                    match moved {
                        Ok(()) => tracing::warn!(
                            path = %to.display(),
                            "the state store has no record of the VM with these disks: they are kept here; remove them, or create a VM from them"
                        ),
                        Err(error) => {
                            left_in_place += 1;
                            tracing::warn!(
                                path = %entry.path().display(), to = %to.display(), %error,
                                "the state store has no record of the VM with these disks, and they cannot be moved: they stay; move them away, or remove them"
                            );
                        }
                    }
                }
            }
        }
        let records = records.into_iter().map(|record| (record.id.clone(), record)).collect();
        Ok(Vms {
            directory,
            store,
            records: RwLock::new(records),
            change_lock: tokio::sync::Mutex::new(()),
            locked: LockedNames::default(),
            changes: watch::Sender::new(()),
            left_in_place,
        })
    }

    /// Returns the number of directories without a record that could not be moved when the table was created.
    pub fn left_in_place(&self) -> usize {
        self.left_in_place
    }

    /// Returns a receiver that is notified after each change of a record.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Returns all persistent VMs.
    pub fn list(&self) -> Vec<VmRecord> {
        self.records.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Returns a persistent VM, if it exists.
    pub fn find(&self, id: &str) -> Option<VmRecord> {
        self.records.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// Returns a persistent VM, or an error if it does not exist.
    pub fn get(&self, id: &str) -> Result<VmRecord, VmError> {
        self.find(id).ok_or_else(|| VmError::NotFound { id: id.to_owned() })
    }

    /// Returns the images that persistent VMs and running operations need.
    pub fn images(&self) -> Vec<ImageId> {
        // The images of operations are read first: when an operation ends, a record may have its image.
        let mut images: Vec<_> = names(&self.locked).values().filter_map(|(_, image)| *image).collect();
        let known = self.records.read().unwrap_or_else(PoisonError::into_inner);
        images.extend(known.values().flat_map(VmRecord::images));
        images
    }

    /// Locks a name.
    pub fn lock(&self, id: &str, operation: &'static str) -> Result<VmLock, VmError> {
        let mut locked = names(&self.locked);
        if let Some(&(operation, _)) = locked.get(id) {
            return Err(VmError::Busy { id: id.to_owned(), operation });
        }
        locked.insert(id.to_owned(), (operation, None));
        Ok(VmLock { id: id.to_owned(), locked: Arc::clone(&self.locked) })
    }

    /// Fails if the name is locked.
    pub fn check_unlocked(&self, id: &str) -> Result<(), VmError> {
        match names(&self.locked).get(id) {
            Some(&(operation, _)) => Err(VmError::Busy { id: id.to_owned(), operation }),
            None => Ok(()),
        }
    }

    /// Locks the name of a persistent VM that does not exist.
    pub async fn lock_new_name(&self, id: &str, operation: &'static str) -> Result<VmLock, VmError> {
        // Keeps a concurrent creation of this VM away.
        let _guard = self.change_lock.lock().await;
        match self.find(id) {
            Some(_) => Err(VmError::Exists { id: id.to_owned() }),
            None => self.lock(id, operation),
        }
    }

    /// Fails if this VM cannot be added: its name or its identity exists.
    pub fn check_new(&self, record: &VmRecord) -> Result<(), VmError> {
        let known = self.records.read().unwrap_or_else(PoisonError::into_inner);
        if known.contains_key(&record.id) {
            return Err(VmError::Exists { id: record.id.clone() });
        }
        let in_common = |other: &VmRecord| match &record.machine_id {
            _ if other.uuid == record.uuid => Some(format!("UUID {}", other.uuid)),
            _ if other.mac == record.mac => Some(format!("MAC address of UUID {}", other.uuid)),
            Some(machine_id) if other.machine_id.as_ref() == Some(machine_id) => {
                Some(format!("machine id {machine_id}"))
            }
            _ => None,
        };
        match known.values().find_map(|other| Some((other.id.clone(), in_common(other)?))) {
            Some((id, identity)) => Err(VmError::SameIdentity { id, identity }),
            None => Ok(()),
        }
    }

    /// Adds a VM whose directory is complete.
    pub async fn add(&self, record: VmRecord) -> Result<(), VmError> {
        let _guard = self.change_lock.lock().await;
        self.check_new(&record)?;
        self.write(record).await
    }

    /// Returns the path for a temporary directory; the next daemon removes leftovers.
    pub fn work_directory(&self) -> PathBuf {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        self.directory.join(format!("work-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// Returns the directory of a VM's disks.
    pub fn directory(&self, record: &VmRecord) -> PathBuf {
        self.directory.join(&record.uid)
    }

    /// Returns the VM of this name, which is created if it does not exist. If the pod expects a machine id, the VM must have it:
    /// one without a machine id gets it, and none is created unless the pod allows it.
    pub async fn get_or_create(
        &self,
        namespace: &str,
        name: &str,
        expected: Option<&ExpectedMachineId>,
    ) -> Result<VmRecord, VmError> {
        let _guard = self.change_lock.lock().await;
        let id = id(namespace, name);
        let machine_id = expected.map(|expected| expected.id.clone());
        if let Some(record) = self.find(&id) {
            return match (&record.machine_id, expected) {
                (_, None) => Ok(record),
                (Some(recorded), Some(expected)) if *recorded == expected.id => Ok(record),
                (Some(recorded), Some(expected)) => {
                    Err(VmError::OtherMachineId { id, recorded: recorded.clone(), expected: expected.id.clone() })
                }
                (None, Some(expected)) if expected.may_create => {
                    Err(VmError::HasNoMachineId { id, machine_id: expected.id.clone() })
                }
                (None, Some(expected)) => {
                    self.check_unlocked(&id)?;
                    self.check_machine_id_unused(&id, expected)?;
                    let record = VmRecord { machine_id, ..record };
                    self.write(record.clone()).await.map(|()| record)
                }
            };
        }
        self.check_unlocked(&id)?;
        if let Some(expected) = expected {
            if !expected.may_create {
                return Err(VmError::UnknownMachineId { id, machine_id: expected.id.clone() });
            }
            self.check_machine_id_unused(&id, expected)?;
        }
        let record = VmRecord { machine_id, ..new_record(namespace, name)? };
        let directory = self.directory(&record);
        let create =
            move || std::fs::DirBuilder::new().mode(0o700).create(&directory).map_err(at("create", &directory));
        run_blocking("create the directory of a persistent VM", create).await??;
        let written = self.write(record.clone()).await;
        if written.is_err() {
            self.remove_directory(&self.directory(&record)).await;
        }
        written.map(|()| record)
    }

    /// Fails if another VM has this machine id.
    fn check_machine_id_unused(&self, id: &str, expected: &ExpectedMachineId) -> Result<(), VmError> {
        let known = self.records.read().unwrap_or_else(PoisonError::into_inner);
        match known.values().find(|other| other.machine_id.as_ref() == Some(&expected.id)) {
            Some(other) => {
                // The pod may not know the VMs of other namespaces.
                tracing::warn!(vm = id, other = other.id, "refusing a machine id that another VM has");
                Err(VmError::MachineIdTaken { id: id.to_owned(), machine_id: expected.id.clone() })
            }
            None => Ok(()),
        }
    }

    /// Records the images that back the VM's disks from now on.
    pub async fn set_images(&self, id: &str, images: Vec<ImageId>) -> Result<(), VmError> {
        let _guard = self.change_lock.lock().await;
        match self.find(id) {
            None => Err(VmError::NotFound { id: id.to_owned() }),
            Some(record) if record.images().eq(images.iter().copied()) => Ok(()),
            Some(record) => {
                let mut images = images.into_iter();
                self.write(VmRecord { image: images.next(), more_images: images.collect(), ..record }).await
            }
        }
    }

    async fn write(&self, record: VmRecord) -> Result<(), VmError> {
        self.store.commit(vec![Change::Vm(Box::new(record.clone()))]).await?;
        self.records.write().unwrap_or_else(PoisonError::into_inner).insert(record.id.clone(), record);
        self.changes.send_replace(());
        Ok(())
    }

    /// Creates a VM with an identity of its own and a copy of the files of another VM, which must not run.
    pub async fn copy(&self, from: &str, namespace: &str, name: &str) -> Result<VmRecord, VmError> {
        let _guard = self.change_lock.lock().await;
        let source = self.get(from)?;
        if self.find(&id(namespace, name)).is_some() {
            return Err(VmError::Exists { id: id(namespace, name) });
        }
        self.check_unlocked(&id(namespace, name))?;
        let record =
            VmRecord { image: source.image, more_images: source.more_images.clone(), ..new_record(namespace, name)? };
        let (from, to) = (self.directory(&source), self.directory(&record));
        let copied = run_blocking("copy the disks of a persistent VM", move || copy_directory(&from, &to)).await?;
        let written = match copied {
            Ok(()) => self.write(record.clone()).await,
            Err(error) => Err(error.into()),
        };
        if written.is_err() {
            self.remove_directory(&self.directory(&record)).await;
        }
        written.map(|()| record)
    }

    /// Deletes the VM and its files. The caller must hold the lock ([`lock`](Vms::lock)).
    pub async fn delete(&self, id: &str) -> Result<(), VmError> {
        let _guard = self.change_lock.lock().await;
        let record = self.get(id)?;
        self.store.commit(vec![Change::ForgetVm(id.to_owned())]).await?;
        self.records.write().unwrap_or_else(PoisonError::into_inner).remove(id);
        self.changes.send_replace(());
        self.remove_directory(&self.directory(&record)).await;
        Ok(())
    }

    /// Removes the directory. The next daemon removes what is left.
    async fn remove_directory(&self, directory: &Path) {
        let directory = directory.to_owned();
        match run_blocking("remove the disks of a persistent VM", move || remove_tree_if_there(&directory)).await {
            Ok(Err(error)) => tracing::warn!("{}", Chain(&error)),
            Err(error) => tracing::warn!("{}", Chain(&error)),
            Ok(Ok(())) => {}
        }
    }
}

/// Returns the record of a VM with a new identity.
pub fn new_record(namespace: &str, name: &str) -> Result<VmRecord, VmError> {
    let mut bytes = [0; 22];
    random::fill(&mut bytes).map_err(|source| VmError::Random { source })?;
    Ok(VmRecord::new(namespace, name, &bytes, nacelle_base::timeline::unix_nanos()))
}

/// Copies the files of a flat directory; blocks are shared where the file system supports it.
fn copy_directory(from: &Path, to: &Path) -> Result<(), FileError> {
    std::fs::DirBuilder::new().mode(0o700).create(to).map_err(at("create", to))?;
    // The VM's own processes have written to this directory.
    let from = JailedDir::new(from);
    for name in from.files()? {
        let Some(mut source) = from.open(&name)? else { continue };
        let copy = to.join(name);
        let opened = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&copy);
        let mut target = opened.map_err(at("create", &copy))?;
        std::io::copy(&mut source, &mut target).map_err(at("copy", &copy))?;
        target.sync_all().map_err(at("write", &copy))?;
    }
    std::fs::File::open(to).and_then(|directory| directory.sync_all()).map_err(at("write", to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_vms(directory: &Path) -> Vms {
        let (store, contents) = Store::open(&directory.join("s.redb"), None).unwrap();
        Vms::open(directory.join("machines"), store, contents.vms, UnknownVms::Remove).unwrap()
    }

    #[tokio::test]
    async fn the_disks_of_vms_whose_records_are_lost_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let vms = open_vms(directory.path());
        let record = vms.get_or_create("default", "db", None).await.unwrap();
        std::fs::write(vms.directory(&record).join("root.qcow2"), "data").unwrap();
        drop(vms);
        let (store, _) = Store::open(&directory.path().join("other.redb"), None).unwrap();
        let lost = directory.path().join("lost-machines");
        let vms = Vms::open(directory.path().join("machines"), store, vec![], UnknownVms::KeepIn(lost.clone()));
        assert_eq!(vms.unwrap().list(), []);
        assert_eq!(std::fs::read(lost.join(&record.uid).join("root.qcow2")).unwrap(), b"data");
        assert_eq!(std::fs::read_dir(directory.path().join("machines")).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn disks_without_a_record_that_cannot_be_moved_stay() {
        let directory = tempfile::tempdir().unwrap();
        let vms = open_vms(directory.path());
        let record = vms.get_or_create("default", "db", None).await.unwrap();
        std::fs::write(vms.directory(&record).join("root.qcow2"), "data").unwrap();
        let disks = vms.directory(&record);
        drop(vms);
        let lost = directory.path().join("lost-machines");
        let taken = lost.join(&record.uid);
        std::fs::create_dir_all(&taken).unwrap();
        std::fs::write(taken.join("root.qcow2"), "older").unwrap();
        let open = |name: &str| {
            let (store, _) = Store::open(&directory.path().join(name), None).unwrap();
            Vms::open(directory.path().join("machines"), store, vec![], UnknownVms::KeepIn(lost.clone())).unwrap()
        };
        assert_eq!(open("a.redb").left_in_place(), 1);
        assert_eq!(std::fs::read(disks.join("root.qcow2")).unwrap(), b"data");
        assert_eq!(std::fs::read(taken.join("root.qcow2")).unwrap(), b"older");
        std::fs::remove_dir_all(&taken).unwrap();
        assert_eq!(open("b.redb").left_in_place(), 0);
        assert!(!disks.exists());
    }

    /// The first daemon after the loss ends before it has moved the disks.
    #[tokio::test]
    async fn the_second_start_after_a_loss_of_records_keeps_the_disks_too() {
        let directory = tempfile::tempdir().unwrap();
        let vms = open_vms(directory.path());
        let record = vms.get_or_create("default", "db", None).await.unwrap();
        drop(vms);
        for entry in std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_file() {
                std::fs::remove_file(entry).unwrap();
            }
        }
        let path = directory.path().join("s.redb");
        drop(Store::open(&path, None).unwrap());
        let (store, contents) = Store::open(&path, None).unwrap();
        let (machines, lost) = (directory.path().join("machines"), directory.path().join("lost-machines"));
        let unknown = UnknownVms::after(&contents, lost.clone());
        Vms::open(machines, store, contents.vms, unknown).unwrap();
        assert!(lost.join(&record.uid).is_dir());
    }

    #[tokio::test]
    async fn a_persistent_vm_survives_a_restart_until_it_is_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let vms = open_vms(directory.path());
        let first = vms.get_or_create("default", "db", None).await.unwrap();
        assert_eq!(vms.get_or_create("default", "db", None).await.unwrap(), first);
        assert_ne!(vms.get_or_create("other", "db", None).await.unwrap().uuid, first.uuid);
        assert!(first.mac[0] & 3 == 2, "a locally administered unicast address");
        assert_eq!(first.uuid.len(), 36);
        vms.set_images("default/db", [7, 8].map(|byte| nacelle_model::digest::Digest([byte; 32])).into())
            .await
            .unwrap();
        std::fs::write(vms.directory(&first).join("root.qcow2"), "data").unwrap();
        let stray = directory.path().join("machines/stray");
        std::fs::create_dir(&stray).unwrap();
        drop(vms);

        let vms = open_vms(directory.path());
        assert!(!stray.exists() && vms.directory(&first).join("root.qcow2").exists());
        assert_eq!(vms.images(), [7, 8].map(|byte| nacelle_model::digest::Digest([byte; 32])));
        let again = vms.get_or_create("default", "db", None).await.unwrap();
        assert_eq!((&again.uuid, again.mac), (&first.uuid, first.mac));
        std::os::unix::fs::symlink("/etc/shadow", vms.directory(&first).join("efi-variables")).unwrap();
        let copy = vms.copy("default/db", "default", "db2").await.unwrap();
        assert!(!vms.directory(&copy).join("efi-variables").exists(), "the target of a link is not copied");
        assert!(copy.uuid != first.uuid && copy.mac != first.mac && copy.images().eq(again.images()));
        assert_eq!(std::fs::read(vms.directory(&copy).join("root.qcow2")).unwrap(), b"data");
        assert_eq!(vms.copy("default/db", "default", "db2").await.unwrap_err().kind(), FailureKind::AlreadyExists);
        assert_eq!(vms.copy("default/no", "default", "db3").await.unwrap_err().kind(), FailureKind::NotFound);
        vms.delete("default/db").await.unwrap();
        assert!(!vms.directory(&first).exists());
        assert_eq!(vms.delete("default/db").await.unwrap_err().kind(), FailureKind::NotFound);
        assert_ne!(vms.get_or_create("default", "db", None).await.unwrap().uuid, first.uuid);
    }

    #[tokio::test]
    async fn a_vm_with_a_machine_id_runs_for_no_other_id_and_is_created_only_if_the_pod_allows_it() {
        let directory = tempfile::tempdir().unwrap();
        let vms = open_vms(directory.path());
        let expect = |id: &str, may_create| ExpectedMachineId { id: id.to_owned(), may_create };
        let refused = async |vms: &Vms, name: &str, expected: ExpectedMachineId| {
            let error = vms.get_or_create("default", name, Some(&expected)).await.unwrap_err();
            assert_eq!(error.kind(), FailureKind::Conflict, "{error}");
            error.to_string()
        };
        let unknown = refused(&vms, "db", expect("one", false)).await;
        assert!(unknown.contains("blank disks") && unknown.contains("vm.nacelle.dev/machine-id: one,new"), "{unknown}");
        assert_eq!((vms.list(), std::fs::read_dir(directory.path().join("machines")).unwrap().count()), (vec![], 0));

        let created = vms.get_or_create("default", "db", Some(&expect("one", true))).await.unwrap();
        assert_eq!(created.machine_id.as_deref(), Some("one"));
        drop(vms);
        let vms = open_vms(directory.path());
        // A repeated request and the pods after it run the same VM, also without the annotation.
        for expected in [Some(expect("one", true)), Some(expect("one", false)), None] {
            assert_eq!(vms.get_or_create("default", "db", expected.as_ref()).await.unwrap(), created);
        }
        for may_create in [false, true] {
            let other = refused(&vms, "db", expect("two", may_create)).await;
            assert!(
                other.contains("expects the machine id two") && other.contains("has the machine id one"),
                "{other}"
            );
        }
        let twin = refused(&vms, "twin", expect("one", true)).await;
        assert!(twin.contains("another VM of this node has it") && !twin.contains("default/db"), "{twin}");

        // A VM from before: not a new one, but it gets the id of the pod that expects an existing VM.
        vms.get_or_create("default", "old", None).await.unwrap();
        let not_new = refused(&vms, "old", expect("three", true)).await;
        assert!(not_new.contains("remove \",new\""), "{not_new}");
        let twin = refused(&vms, "old", expect("one", false)).await;
        assert!(twin.contains("another VM of this node has it") && !twin.contains("default/db"), "{twin}");
        // A VM that is being exported does not change.
        let lock = vms.lock("default/old", "export").unwrap();
        assert!(refused(&vms, "old", expect("three", false)).await.contains("export"));
        assert_eq!(vms.get("default/old").unwrap().machine_id, None);
        drop(lock);
        let adopted = vms.get_or_create("default", "old", Some(&expect("three", false))).await.unwrap();
        assert_eq!(adopted.machine_id.as_deref(), Some("three"));
        assert_eq!(vms.copy("default/old", "default", "copy").await.unwrap().machine_id, None);
        drop(vms);
        let vms = open_vms(directory.path());
        assert_eq!(vms.get("default/old").unwrap(), adopted);
        vms.delete("default/db").await.unwrap();
        refused(&vms, "db", expect("one", false)).await;
    }
}
