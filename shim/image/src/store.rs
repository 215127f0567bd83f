//! The public interface of the image store. Concurrent pulls of the same image are one pull.

use crate::budget::{Cancel, MemoryPool};
use crate::catalogue::{ImageCatalogue, find_image, image_record};
use crate::damage::DamageRecord;
use crate::directory::{ContentKind, StoreDirectory};
use crate::files::{CopyOutcome, ImageFile};
use crate::install::{StoreState, live_content};
use crate::progress::{Installation, Installations};
use crate::registry::HttpClients;
use crate::sums::{ContentSums, sum_path};
use crate::{Auth, ImageError, ImageStoreConfig, Reference, load, pull};
use nacelle_base::files::at;
use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_base::task::run_blocking;
use nacelle_base::timeline::Timeline;
use nacelle_model::digest::{Digest, ImageId};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

/// The images of this node. A cheap handle: clones share one store.
#[derive(Clone)]
pub struct ImageStore {
    pub(crate) shared: Arc<StoreState>,
    pulls: Arc<Mutex<HashMap<PullKey, Weak<OngoingPull>>>>,
    installations: Installations,
}

type PullKey = (Reference, Option<Auth>);
type PullOutcome = Result<ImageId, Arc<ImageError>>;

/// A pull in progress. It is cancelled when the last caller stops waiting for it.
struct OngoingPull {
    task: AbortHandle,
    timeline: Timeline,
    outcome: watch::Receiver<Option<PullOutcome>>,
}

impl Drop for OngoingPull {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The public record of one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRecord {
    /// The digest of the image's configuration, or of the artifact's manifest: CRI's image id and image_ref.
    pub id: ImageId,
    /// The artifact type if it is an artifact, of which containers can only mount the files; `None` for an image.
    pub artifact_type: Option<String>,
    /// The tags, `registry/repository:tag`, sorted.
    pub repo_tags: Vec<String>,
    /// The digest references, `registry/repository@sha256:...`, sorted.
    pub repo_digests: Vec<String>,
    /// The size in the store in bytes; layers that other images share count in full.
    pub size: u64,
    /// The user of the image's configuration.
    pub user: ImageUser,
    /// The configuration of the store excludes the image from garbage collection.
    pub pinned: bool,
    /// When the image was added, in seconds since 1970.
    pub added: u64,
}

/// The user in an image's configuration, without its group part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageUser {
    /// A UID; 0 if the image has no user.
    Uid(i64),
    /// A name. The agent looks it up in the image's /etc/passwd in the guest.
    Name(String),
}

/// The part of an image's configuration that says how to run it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageConfig {
    /// The fixed beginning of the command.
    pub entrypoint: Vec<String>,
    /// The default arguments.
    pub cmd: Vec<String>,
    /// The environment, `NAME=value`.
    pub env: Vec<String>,
    /// The user: "user", "uid", "user:group", "uid:gid", or empty.
    pub user: String,
    /// The working directory, or empty.
    pub working_dir: String,
    /// The stop signal, "SIGTERM" or "15", if there is one.
    pub stop_signal: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// The paths that the image declares as volumes, sorted.
    pub volumes: Vec<String>,
    /// The exposed ports, "80/tcp", sorted.
    pub exposed_ports: Vec<String>,
}

/// The parts of a container's root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootFs {
    /// The pieces of the read-only device; the guest mounts it as EROFS.
    pub disk: ImageDisk,
    /// The configuration of the image.
    pub config: ImageConfig,
}

/// One image that was loaded from an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedImage {
    /// The image's id.
    pub id: ImageId,
    /// The tags that the image has now.
    pub names: Vec<String>,
}

/// The disk usage of the images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsInfo {
    /// The directory of the store.
    pub path: PathBuf,
    /// The bytes in use.
    pub used_bytes: u64,
    /// The inodes in use.
    pub inodes_used: u64,
}

/// The number of images in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageCounts {
    /// Images of which no damage is known.
    pub sound: u64,
    /// Images with a file that is known to be damaged.
    pub damaged: u64,
}

impl ImageStore {
    /// Opens the store in this directory, which is created if it is missing. Completes or rolls back what a crash left
    /// unfinished, and logs which images have lost files. Blocks; called once at the start of the process. Fails if another process
    /// has the store open.
    pub fn open(root: &Path, config: ImageStoreConfig) -> Result<ImageStore, ImageError> {
        let pinned = config.pinned.iter().map(|name| Reference::parse(name).map(|reference| reference.to_string()));
        let pinned = pinned.collect::<Result<_, _>>()?;
        let directory = StoreDirectory::open(root)?;
        let catalogue = ImageCatalogue::open(&directory.catalogue_path())?;
        directory.remove_leftovers(&live_content(&catalogue))?;
        let damage = DamageRecord::open(&directory.health_path());
        let (published, catalogue) = (catalogue.published(), Mutex::new(catalogue));
        let http = Arc::new(HttpClients::new(config.clone()));
        let pool = MemoryPool::new(config.unpack_memory()?);
        let layers = Semaphore::new(config.layers_at_a_time());
        let shared =
            Arc::new(StoreState { config, pinned, directory, http, layers, pool, catalogue, published, damage });
        shared.collect_garbage_blocking(None, None)?;
        shared.check_all_images();
        Ok(ImageStore { shared, pulls: Arc::default(), installations: Installations::default() })
    }

    /// Pulls an image or artifact, or finds that the store has it, and gives it the reference's name. Dropping the future cancels the pull
    /// unless other callers wait for the same one; the next pull continues its downloads.
    pub async fn pull(&self, reference: &Reference, auth: Option<Auth>) -> Result<ImageId, ImageError> {
        self.pull_with_timeline(reference, auth, &Timeline::default()).await
    }

    /// Does the same as [`ImageStore::pull`], and adds the steps of the pull to `timeline` when it has ended. Those of a pull that
    /// another caller began may be earlier than this call.
    pub async fn pull_with_timeline(
        &self,
        reference: &Reference,
        auth: Option<Auth>,
        timeline: &Timeline,
    ) -> Result<ImageId, ImageError> {
        let pull = self.join_or_start_pull(reference, auth);
        let mut outcome = pull.outcome.clone();
        let ended = outcome.wait_for(Option::is_some).await;
        timeline.add(pull.timeline.steps());
        match ended.as_deref() {
            Ok(Some(Ok(id))) => Ok(*id),
            Ok(Some(Err(error))) => Err(ImageError::SharedPull(Arc::clone(error))),
            // The task was cancelled with its runtime, or panicked.
            Ok(None) | Err(_) => Err(ImageError::Aborted { name: reference.to_string() }),
        }
    }

    /// Returns the pull of this image that is in progress, or starts one.
    fn join_or_start_pull(&self, reference: &Reference, auth: Option<Auth>) -> Arc<OngoingPull> {
        let key = (reference.clone(), auth.clone());
        let mut pulls = self.pulls.lock().unwrap_or_else(PoisonError::into_inner);
        pulls.retain(|_, pull| pull.strong_count() > 0);
        if let Some(pull) = pulls.get(&key).and_then(Weak::upgrade) {
            return pull;
        }
        let (sender, outcome) = watch::channel(None);
        let (shared, others, name) = (Arc::clone(&self.shared), Arc::clone(&self.pulls), key.clone());
        let counter = self.installations.begin(reference.to_string());
        let timeline = Timeline::default();
        let steps = timeline.clone();
        let task = tokio::spawn(async move {
            let pulled = pull::pull(&shared, &name.0, auth, &counter, &steps).await;
            drop(shared); // A caller that has the result may close the store.
            // Later callers start a new pull.
            others.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
            sender.send_replace(Some(pulled.map_err(Arc::new)));
        });
        let pull = Arc::new(OngoingPull { task: task.abort_handle(), timeline, outcome });
        pulls.insert(key, Arc::downgrade(&pull));
        pull
    }

    /// Loads the images of an OCI layout (directory or tar archive) or of a docker archive. An image that is the only one of its
    /// archive also gets the name `name`.
    pub async fn load(&self, path: &Path, name: Option<&Reference>) -> Result<Vec<LoadedImage>, ImageError> {
        let counter = self.installations.begin(path.display().to_string());
        load::load(&self.shared, path, name, &counter).await
    }

    /// Returns the pulls and loads in progress, oldest first. Does not block.
    pub fn installations(&self) -> Vec<Installation> {
        self.installations.list()
    }

    /// Returns all images, ordered by id, also those with damaged files.
    pub fn list(&self) -> Vec<ImageRecord> {
        let images = self.shared.published.images();
        let listed = images.iter().filter(|(_, stored)| !stored.removed);
        listed.map(|(id, stored)| image_record(id, stored, &self.shared.pinned)).collect()
    }

    /// Counts the images, without a look at their files. Does not block.
    pub fn count_images(&self) -> ImageCounts {
        let mut counts = ImageCounts::default();
        for (id, stored) in self.shared.published.images().iter().filter(|(_, stored)| !stored.removed) {
            match self.shared.is_known_damaged(id, stored) {
                true => counts.damaged += 1,
                false => counts.sound += 1,
            }
        }
        counts
    }

    /// Returns the bytes that registries have sent to this process, with manifests and repeated downloads.
    pub fn received_bytes(&self) -> u64 {
        self.shared.http.received_bytes()
    }

    /// Returns the image of this reference, id (with or without `sha256:`), or prefix of an id (3 digits or more); `None` if
    /// there is no such image, the text is not a valid name, or the image is known to be damaged. Does not block.
    pub fn status(&self, name: &str) -> Result<Option<ImageRecord>, ImageError> {
        let images = self.shared.published.images();
        let id = find_image(&images, name)?;
        let found = id.and_then(|id| Some((id, images.get(&id)?)));
        let sound = found.filter(|(id, stored)| !self.shared.is_known_damaged(id, stored));
        Ok(sound.map(|(id, stored)| image_record(&id, stored, &self.shared.pinned)))
    }

    /// Returns the image of this name like `status`, after a look at its files.
    ///
    /// # Errors
    ///
    /// `Damaged`, with the file, if one of them is missing, has another length, or is known to be damaged.
    pub async fn find_sound(&self, name: &str) -> Result<Option<ImageRecord>, ImageError> {
        let (shared, name) = (Arc::clone(&self.shared), name.to_owned());
        run_blocking("check the files of an image", move || {
            let Some(id) = find_image(&shared.published.images(), &name)? else { return Ok(None) };
            match shared.require_sound_image(&id) {
                Ok(stored) => Ok(Some(image_record(&id, &stored, &shared.pinned))),
                Err(ImageError::NotFound { .. }) => Ok(None), // It was removed meanwhile.
                Err(error) => Err(error),
            }
        })
        .await?
    }

    /// Removes an image with all its names. Succeeds if there is no such image. If its id is among `in_use`, its files stay and
    /// `rootfs` finds it until `remove` or `collect` is called without it.
    pub async fn remove(&self, name: &str, in_use: &HashSet<ImageId>) -> Result<(), ImageError> {
        let (shared, name, in_use) = (Arc::clone(&self.shared), name.to_owned(), in_use.clone());
        run_blocking("remove an image", move || shared.collect_garbage_blocking(Some(&name), Some(&in_use))).await?
    }

    /// Deletes the files that no image needs any more. The caller calls it when `in_use` has become smaller.
    pub async fn collect(&self, in_use: &HashSet<ImageId>) -> Result<(), ImageError> {
        self.shared.collect_garbage(Some(in_use.clone())).await
    }

    /// Returns the clients for registries.
    pub(crate) fn http_clients(&self) -> Arc<HttpClients> {
        Arc::clone(&self.shared.http)
    }

    /// Returns the directory of the store, the same as in [`FsInfo`].
    pub fn directory(&self) -> &Path {
        self.shared.directory.root()
    }

    /// Returns the reason that fs-verity does not protect the files of the store, or `None` if it does. Does not block.
    pub fn verity_error(&self) -> Option<&std::io::Error> {
        self.shared.directory.verity().unavailable()
    }

    /// Returns the disk usage of the store.
    pub async fn fs_info(&self) -> Result<FsInfo, ImageError> {
        let shared = Arc::clone(&self.shared);
        Ok(run_blocking("measure the image store", move || shared.directory.measure_usage()).await??)
    }

    /// Returns the regular files of a directory of an image, for callers that read them in place. The image must be in the store
    /// or have been in use since it was removed. Returns `None` if the image has no such directory.
    pub async fn list_files(&self, id: &ImageId, directory: &str) -> Result<Option<Vec<ImageFile>>, ImageError> {
        let (shared, id, directory, cancel) = (Arc::clone(&self.shared), *id, directory.to_owned(), Cancel::default());
        let _cancelled_with_this_future = cancel.on_drop();
        run_blocking("list the files of an image", move || shared.list_files(id, &directory, &cancel)).await?
    }

    /// Copies a file of an image, by its path in it, into an empty file. Links to directories are followed inside the image. A
    /// file of more than `most` bytes is not copied. The condition for the image is that of `files`.
    pub async fn copy_file_from_image(
        &self,
        id: &ImageId,
        path: &str,
        most: u64,
        mut to: File,
    ) -> Result<CopyOutcome, ImageError> {
        let (shared, id, path, cancel) = (Arc::clone(&self.shared), *id, path.to_owned(), Cancel::default());
        let _cancelled_with_this_future = cancel.on_drop();
        run_blocking("copy a file of an image", move || shared.copy_file_from_image(id, &path, most, &mut to, &cancel))
            .await?
    }

    /// Returns the root file system of an image, which must be in the store or have been in use since it was removed.
    ///
    /// # Errors
    ///
    /// `Damaged`, with the file, if a file of the image is missing, has another length, or is known to be damaged.
    pub async fn rootfs(&self, id: &ImageId) -> Result<RootFs, ImageError> {
        let (shared, id) = (Arc::clone(&self.shared), *id);
        run_blocking("find the root file system of an image", move || {
            let stored = shared.require_sound_image(&id)?;
            let tree = (ContentKind::Tree, stored.tree, stored.tree_length);
            let blobs = stored.blobs.iter().map(|&(diff_id, length)| (ContentKind::Layer, diff_id, length));
            let extents = [tree].into_iter().chain(blobs).map(|(part, digest, length)| Extent {
                path: shared.directory.path((part, digest)),
                offset: 0,
                length,
            });
            Ok(RootFs {
                disk: ImageDisk { extents: extents.collect() },
                config: shared.read_image_config(id, &stored)?,
            })
        })
        .await?
    }

    /// Returns a digest of how the root file system of an image is laid out on a disk: of the lengths and digests of its files. A guest that
    /// has mounted the image finds it again in every image with the same digest. The condition for the image is that of `rootfs`.
    pub async fn layout(&self, id: &ImageId) -> Result<Digest, ImageError> {
        let (shared, id) = (Arc::clone(&self.shared), *id);
        run_blocking("find the layout of an image", move || {
            let stored = shared.require_sound_image(&id)?;
            let blobs = stored.blobs.iter().map(|&(diff_id, _)| (ContentKind::Layer, diff_id));
            let mut text = String::new();
            for key in [(ContentKind::Tree, stored.tree)].into_iter().chain(blobs) {
                let path = shared.directory.sums_path(key);
                // Stores of Nacelle 0.1 have no record.
                let sum = match ContentSums::read(&path).map_err(at("read", &path))? {
                    Some(sums) => sums.main,
                    None => sum_path(&shared.directory.path(key))?,
                };
                text.push_str(&format!("{} {}\n", sum.length, sum.digest.hex()));
            }
            Ok(Digest::of(text.as_bytes()))
        })
        .await?
    }
}
