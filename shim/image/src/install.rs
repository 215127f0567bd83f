//! Installs an image in the store from its parts, whatever source the parts come from.
//!
//! One blocking thread works on a layer, with the workers and threads that `worker::unpack` adds. The number of layers at a time and the
//! memory of all of them are bounded over the whole store. Dropping a future stops its downloads and cancels its threads, which keep
//! their locks until they and their workers have ended.

use crate::budget::{Budget, Cancel, MemoryPool};
use crate::catalogue::{ImageCatalogue, Images, PublishedImages, StoredImage, find_image, remove_image};
use crate::damage::{DamageRecord, DamagedFile, FileDamage};
use crate::directory::{ContentKey, ContentKind, Pin, StoreDirectory, delete_files};
use crate::health::damaged_error;
use crate::layer::file_tar::{FileTar, MAX_FRAME};
use crate::layer::ingest::{LayerError, LayerLimits};
use crate::manifest::Descriptor;
use crate::origins::{self, LayerOrigin};
use crate::plan::{ImageNames, ImagePlan, LayerForm, LayerPlan, LayerSource};
use crate::progress::{InstallationCounter, LayerCounter};
use crate::registry::download::DownloadMessage;
use crate::registry::{HttpClients, RegistrySession};
use crate::sums::ContentSums;
use crate::worker::{Launch, UnpackError, UnpackTarget, unpack_file, unpack_layer};
use crate::{ImageConfig, ImageError, ImageStoreConfig, manifest};
use bytes::{Buf, Bytes};
use nacelle_base::files::{at, remove_if_there, write_whole};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::timeline::Timeline;
use nacelle_base::{Classify, FailureKind};
use nacelle_model::digest::{Digest, ImageId};
use serde::Deserialize;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::Receiver;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::task::TaskTracker;

/// The maximum number of pieces of a download that wait for the unpacking thread.
const MAX_PIECES_IN_TRANSIT: usize = 16;

/// The state that all handles of a store share.
pub struct StoreState {
    /// The configuration.
    pub config: ImageStoreConfig,
    /// The references that must not be garbage-collected, in their full form.
    pub pinned: HashSet<String>,
    /// The files.
    pub directory: StoreDirectory,
    /// The HTTP clients.
    pub http: Arc<HttpClients>,
    /// Permits for layers in progress.
    pub layers: Semaphore,
    /// The memory of all work on images.
    pub pool: Arc<MemoryPool>,
    /// The list of images, for changes; locked on blocking threads only.
    pub catalogue: Mutex<ImageCatalogue>,
    /// The list of images, for readers.
    pub published: PublishedImages,
    /// The known damage of files.
    pub damage: DamageRecord,
}

/// A layer that an image needs.
#[derive(Clone)]
struct WantedLayer {
    /// The layer's name in the store.
    diff_id: Digest,
    form: LayerForm,
    counter: LayerCounter,
}

impl StoreState {
    /// Locks the list of images for a change.
    pub fn lock_catalogue(&self) -> MutexGuard<'_, ImageCatalogue> {
        self.catalogue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives names to an image if its repository has delivered the same manifest before: the image has one of these digest references
    /// already. Returns whether it did; false if the image is damaged.
    pub async fn assign_names_if_delivered(
        self: &Arc<Self>,
        id: ImageId,
        names: ImageNames,
    ) -> Result<bool, ImageError> {
        let shared = Arc::clone(self);
        run_blocking("name an image", move || {
            if shared.is_damaged(&id)? {
                tracing::info!(image = %id, "the store has a damaged copy of this image, which is repaired now");
                return Ok(false);
            }
            let mut known = false;
            shared.lock_catalogue().update(|images| {
                known = images
                    .get(&id)
                    .is_some_and(|stored| names.digests.iter().any(|name| stored.digests.contains(name)))
                    && names.assign(images, &id);
            })?;
            Ok(known)
        })
        .await?
    }

    /// Gives names to an image of the store. Returns false if the store does not have it, or if it is damaged. The caller has verified
    /// that the source has all of the image.
    pub async fn assign_names(self: &Arc<Self>, id: ImageId, names: ImageNames) -> Result<bool, ImageError> {
        let shared = Arc::clone(self);
        run_blocking("name an image", move || {
            if shared.is_damaged(&id)? {
                return Ok(false);
            }
            let mut here = false;
            shared.lock_catalogue().update(|images| here = names.assign(images, &id))?;
            Ok(here)
        })
        .await?
    }

    /// Fetches the layers, builds the tree and adds the image to the list; counts the layers, and records how long each step takes. If the
    /// disk is full, removes everything that it wrote.
    pub async fn install_image(
        self: &Arc<Self>,
        plan: ImagePlan,
        counter: &InstallationCounter,
        timeline: &Timeline,
    ) -> Result<ImageId, ImageError> {
        let layers: Vec<Digest> = plan.layers.iter().map(|layer| layer.name).collect();
        let tree = tree_name(&layers);
        let keys = layers.iter().map(|layer| (ContentKind::Layer, *layer));
        let keys: Vec<_> = keys.chain([(ContentKind::Config, plan.id), (ContentKind::Tree, tree)]).collect();
        let pins: Vec<Pin> = keys.iter().map(|key| self.directory.pin(*key)).collect();
        let (threads, cancel) = (TaskTracker::new(), Cancel::default());
        let _cancelled_with_this_future = cancel.on_drop();
        let installed = self.install_pinned(plan, &threads, &pins, &cancel, counter, timeline).await;
        if installed.as_ref().is_err_and(|error| error.kind() == FailureKind::Exhausted && !error.is_over_budget()) {
            cancel.cancel();
            threads.close();
            threads.wait().await; // Threads of cancelled layers may still have run.
            drop(pins);
            self.directory.forget_unfinished();
            self.collect_garbage(None).await?;
        }
        installed
    }

    async fn install_pinned(
        self: &Arc<Self>,
        mut plan: ImagePlan,
        threads: &TaskTracker,
        pins: &[Pin],
        cancel: &Cancel,
        counter: &InstallationCounter,
        timeline: &Timeline,
    ) -> Result<ImageId, ImageError> {
        let missing = self.missing_layers(plan.layers.iter().map(|layer| layer.name).collect()).await?;
        self.check_free_space(&plan.layers, &missing)?;
        let layers: Vec<Digest> = plan.layers.iter().map(|layer| layer.name).collect();
        let mut fetches = JoinSet::new();
        let mut seen = HashSet::new();
        for layer in std::mem::take(&mut plan.layers) {
            if seen.insert(layer.name) {
                let counted = missing.contains(&layer.name).then(|| counter.add_layer(layer.size));
                let LayerPlan { name: diff_id, source, size: _, form } = layer;
                let layer = WantedLayer { diff_id, form, counter: counted.unwrap_or_default() };
                let fetch = Arc::clone(self).fetch_layer(layer, source, threads.clone(), cancel.clone());
                let timeline = timeline.clone();
                fetches.spawn(async move { timeline.measure("layer", fetch).await });
            }
        }
        while let Some(fetched) = fetches.join_next().await {
            if let Err(error) = fetched.map_err(|error| TaskError::new("install a layer", error).into()).flatten() {
                fetches.shutdown().await;
                return Err(error);
            }
        }
        let id = plan.id;
        // Another source may have installed the same image; this source has now delivered all of it.
        if self.assign_names(id, plan.names.clone()).await? {
            return Ok(id);
        }
        // The thread continues if this future is dropped, so it owns the pins of what it adds to the list.
        let (shared, pins, cancel) = (Arc::clone(self), pins.to_vec(), cancel.clone());
        let committed = async {
            run_blocking("install an image", move || {
                let finished = shared.commit_image(plan, layers, &cancel);
                drop(pins);
                finished
            })
            .await?
        };
        timeline.measure("tree", committed).await
    }

    /// Returns those of these layers that the store lacks or that are damaged.
    async fn missing_layers(self: &Arc<Self>, names: HashSet<Digest>) -> Result<HashSet<Digest>, ImageError> {
        let shared = Arc::clone(self);
        run_blocking("check the layers of an image", move || {
            let mut missing = HashSet::new();
            for name in names {
                if !shared.has_sound_layer(name)? {
                    missing.insert(name);
                }
            }
            Ok(missing)
        })
        .await?
    }

    fn check_free_space(&self, layers: &[LayerPlan], missing: &HashSet<Digest>) -> Result<(), ImageError> {
        let missing = layers.iter().filter(|layer| missing.contains(&layer.name));
        let needed = missing.map(|layer| match (&layer.source, &layer.form) {
            // The download and the layer exist at the same time, and the layer is not compressed.
            (LayerSource::Registry(_, blob), LayerForm::File(_)) => blob.size.saturating_mul(2),
            (LayerSource::Registry(_, blob), LayerForm::Tar) => blob.size,
            (LayerSource::Archive(..), LayerForm::File(file)) => file.blob.size,
            (LayerSource::Archive(..), LayerForm::Tar) => 0,
        });
        let needed = needed.fold(0u64, u64::saturating_add);
        let free = self.directory.free_bytes()?;
        if needed > free {
            return Err(ImageError::NoSpace { path: self.directory.root().to_owned(), needed, free });
        }
        Ok(())
    }

    /// Fetches one layer, unless the store has it and the source has proved that it has the layer.
    async fn fetch_layer(
        self: Arc<Self>,
        layer: WantedLayer,
        source: LayerSource,
        threads: TaskTracker,
        cancel: Cancel,
    ) -> Result<(), ImageError> {
        let diff_id = layer.diff_id;
        let is_sound = async || {
            let shared = Arc::clone(&self);
            run_blocking("check a layer", move || shared.has_sound_layer(diff_id)).await?
        };
        let (mut layer_lock, mut sound) = (None, is_sound().await?);
        if !sound {
            layer_lock = Some(self.directory.pin((ContentKind::Layer, diff_id)).lock_owned().await);
            sound = is_sound().await?;
        }
        if sound {
            // No other pull waits for what follows, which may be slow.
            layer_lock = None;
            let may_reuse = match &source {
                LayerSource::Archive(..) => true, // Root loads archives.
                LayerSource::Registry(session, blob) => self.may_reuse_layer(diff_id, session, blob).await?,
            };
            if may_reuse {
                layer.counter.finish();
                return Ok(());
            }
        }
        let counter = layer.counter.clone();
        self.fetch_missing_layer(layer, source, layer_lock, threads, cancel).await?;
        counter.finish();
        Ok(())
    }

    async fn fetch_missing_layer(
        self: Arc<Self>,
        layer: WantedLayer,
        source: LayerSource,
        layer_lock: Option<tokio::sync::OwnedMutexGuard<()>>,
        threads: TaskTracker,
        cancel: Cancel,
    ) -> Result<(), ImageError> {
        let _permit = self.layers.acquire().await; // The semaphore is never closed.
        match source {
            LayerSource::Archive(stream, digest) => {
                let shared = Arc::clone(&self);
                threads
                    .spawn_blocking(move || {
                        let _layer_lock = layer_lock;
                        shared.unpack_layer(&layer, digest, stream, &cancel)
                    })
                    .await
                    .map_err(|error| TaskError::new("unpack a layer", error))?
            }
            LayerSource::Registry(session, blob) => {
                let layer_lock = Arc::new(layer_lock);
                let download = |layer_lock| self.download(&session, &blob, &layer, layer_lock, &threads, &cancel);
                let (fetched, resumed) = download(Arc::clone(&layer_lock)).await;
                match fetched {
                    // A crash may have damaged the partial download: try once more from the start.
                    Err(ImageError::Digest { .. } | ImageError::Layer { .. })
                        if resumed && !self.has_partial(&session.origin_of(&blob)) =>
                    {
                        download(layer_lock).await.0
                    }
                    fetched => fetched,
                }
            }
        }
    }

    /// Returns whether an image of this registry may use the layer of the store: the registry has delivered it before as `blob`, and
    /// lets this client read that now.
    async fn may_reuse_layer(
        self: &Arc<Self>,
        diff_id: Digest,
        session: &RegistrySession,
        blob: &Descriptor,
    ) -> Result<bool, ImageError> {
        let (path, origin) = (self.directory.origins_path(diff_id), session.origin_of(blob));
        let delivered = run_blocking("read the origins of a layer", move || origins::contains(&path, &origin)).await?;
        Ok(delivered && session.may_read_blob(blob.digest).await)
    }

    fn has_partial(&self, origin: &LayerOrigin) -> bool {
        self.directory.path((ContentKind::Partial, origin.partial_name())).exists()
    }

    /// Downloads and unpacks at the same time. Also returns whether it resumed an earlier download.
    async fn download(
        self: &Arc<Self>,
        session: &RegistrySession,
        blob: &Descriptor,
        layer: &WantedLayer,
        layer_lock: Arc<Option<tokio::sync::OwnedMutexGuard<()>>>,
        threads: &TaskTracker,
        cancel: &Cancel,
    ) -> (Result<(), ImageError>, bool) {
        let origin = session.origin_of(blob);
        let partial = self.directory.pin((ContentKind::Partial, origin.partial_name())).lock_owned().await;
        let (sender, receiver) = mpsc::channel(MAX_PIECES_IN_TRANSIT);
        let (start_sender, start) = oneshot::channel();
        let (shared, size, layer, cancel) = (Arc::clone(self), blob.size, layer.clone(), cancel.clone());
        let unpacking = threads.spawn_blocking(move || {
            let _locks = (layer_lock, partial);
            shared.unpack_download(&layer, &origin, size, start_sender, receiver, &cancel)
        });
        let from = start.await.unwrap_or(0); // If the thread failed at once, the download has no receiver.
        let (sent, unpacked) = tokio::join!(session.download_blob(blob, from, sender), unpacking);
        let unpacked = unpacked.map_err(|error| TaskError::new("unpack a layer", error));
        (sent.and_then(|()| unpacked?), from > 0)
    }

    /// Unpacks one layer from a download of `size` bytes, and records its origin. Blocks.
    fn unpack_download(
        &self,
        layer: &WantedLayer,
        origin: &LayerOrigin,
        size: u64,
        start: oneshot::Sender<u64>,
        receiver: Receiver<DownloadMessage>,
        cancel: &Cancel,
    ) -> Result<(), ImageError> {
        let (file, mut length) = self.directory.open_partial(origin.partial_name())?;
        let path = self.directory.path((ContentKind::Partial, origin.partial_name()));
        // At least one byte is requested: the registry decides for this client, too, which may not be the one that began.
        let resumable = if length > size { 0 } else { length.min(size.saturating_sub(1)) };
        if length != resumable {
            file.set_len(resumable).map_err(at("truncate", &path))?;
            length = resumable;
        }
        let before = file.try_clone().map_err(at("open", &path))?.take(length);
        let _ = start.send(length); // If the future was dropped, there is no sender, and the stream below returns the error.
        let stream = before.chain(DownloadReader { receiver, piece: Bytes::new(), partial: file, ended: false });
        let unpacked = self.unpack_layer(layer, Some(origin.blob), Box::new(stream), cancel);
        let keep = match &unpacked {
            Err(ImageError::Layer { source: UnpackError::Source(error), .. }) => {
                error.kind() == io::ErrorKind::ConnectionAborted
            }
            Err(ImageError::Layer { source: UnpackError::Layer(LayerError::Budget(error)), .. }) => {
                error.is_transient()
            }
            _ => false,
        };
        if !keep {
            remove_if_there(&path)?;
        }
        unpacked?;
        Ok(origins::add(&self.directory.origins_path(layer.diff_id), origin)?)
    }

    /// Unpacks one layer from a stream. Blocks. Keeps nothing unless both digests match.
    fn unpack_layer(
        &self,
        layer: &WantedLayer,
        digest: Option<Digest>,
        stream: Box<dyn Read + Send>,
        cancel: &Cancel,
    ) -> Result<(), ImageError> {
        let WantedLayer { diff_id, form, counter } = layer;
        let (diff_id, stream) = (*diff_id, Box::new(counter.reader(stream)));
        let limits = LayerLimits { bytes: self.config.max_layer_bytes, entries: self.config.max_layer_entries };
        let (blob, index) = (self.directory.create_temporary()?, self.directory.create_temporary()?);
        let target = UnpackTarget { blob: &blob.file, index: &index.file };
        let name = digest.unwrap_or(diff_id);
        let mut budget = Budget::layer(&self.pool, cancel);
        let launch = Launch::Process(&self.config.worker);
        let unpacked = match form {
            LayerForm::Tar => unpack_layer(launch, stream, target, limits, &mut budget),
            LayerForm::File(file) => {
                let framed = FileTar::new(&file.path, file.blob.size, stream);
                let limits = LayerLimits { bytes: limits.bytes.saturating_add(MAX_FRAME), ..limits };
                unpack_file(launch, framed, target, limits, &mut budget)
            }
        };
        let unpacked = unpacked.map_err(|source| ImageError::Layer { digest: name, source })?;
        tracing::debug!(layer = %name, bytes = budget.peak(), entries = unpacked.entries, "unpacked a layer");
        // What follows may wait for a worker that needs memory.
        drop(budget);
        if digest.is_some_and(|digest| digest != unpacked.digest) {
            return Err(ImageError::Digest { what: format!("layer {name}"), got: unpacked.digest });
        }
        if matches!(form, LayerForm::Tar) && unpacked.diff_id != diff_id {
            return Err(ImageError::Digest {
                what: format!("the content {diff_id} of layer {name}"),
                got: unpacked.diff_id,
            });
        }
        if self.has_sound_layer(diff_id)? {
            return Ok(()); // It was downloaded to prove that the registry has it.
        }
        let (blob, index) = (self.directory.finish(blob)?, self.directory.finish(index)?);
        let sums = ContentSums::new(blob.sum(), Some(index.sum()));
        let key = (ContentKind::Layer, diff_id);
        // Another version of Nacelle may have written the damaged blob in another layout.
        if !matches!(self.read_sums(key)?, Ok(Some(before)) if before.main.has_same_content(&sums.main)) {
            self.remove_trees_of_layer(diff_id)?;
        }
        self.directory.commit_layer(diff_id, blob, index, &sums)?;
        if self.damage.set(key, None) {
            tracing::info!(layer = %diff_id, "repaired a damaged layer");
        }
        Ok(())
    }

    /// Writes the tree, the document and the entry in the list. Blocks.
    pub fn commit_image(&self, plan: ImagePlan, layers: Vec<Digest>, cancel: &Cancel) -> Result<ImageId, ImageError> {
        let id = plan.id;
        let (tree, tree_length, blobs) = self.build_tree(&layers, cancel)?;
        let config = (ContentKind::Config, id);
        let document_length = plan.document.len() as u64;
        let listed = self.published.images().contains_key(&id);
        let pin = self.directory.pin(config);
        let writing = pin.blocking_lock();
        if !listed || self.check_content(config, Some(document_length))?.is_some() {
            write_whole(&self.directory.path(config), &plan.document)?;
            self.damage.set(config, None);
        }
        drop(writing);
        let different: HashSet<Digest> = layers.iter().copied().collect();
        let parts = different
            .iter()
            .map(|diff_id| (ContentKind::Layer, *diff_id))
            .chain([(ContentKind::Config, id), (ContentKind::Tree, tree)]);
        let stored = StoredImage {
            tags: Default::default(),
            digests: Default::default(),
            user: plan.user,
            artifact_type: plan.artifact_type,
            size: parts.map(|key| self.directory.disk_usage_of(key)).sum(),
            added: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            layers,
            tree,
            tree_length,
            blobs,
            removed: false,
            document_length: Some(document_length),
        };
        self.lock_catalogue().update(|images| {
            let repaired = images.get(&id).map(|before| StoredImage {
                tags: before.tags.clone(),
                digests: before.digests.clone(),
                added: before.added,
                ..stored.clone()
            });
            images.insert(id, repaired.unwrap_or(stored));
            plan.names.assign(images, &id);
        })?;
        self.rebuild_lost_trees(cancel);
        Ok(id)
    }

    /// Deletes what no image needs. With `in_use`, first drops the removed images that are not in it.
    pub async fn collect_garbage(self: &Arc<Self>, in_use: Option<HashSet<ImageId>>) -> Result<(), ImageError> {
        let shared = Arc::clone(self);
        run_blocking("remove unused files of the image store", move || {
            shared.collect_garbage_blocking(None, in_use.as_ref())
        })
        .await?
    }

    /// Removes an image from the list, if `remove` names one, and deletes what no image needs. Blocks.
    pub fn collect_garbage_blocking(
        &self,
        remove: Option<&str>,
        in_use: Option<&HashSet<ImageId>>,
    ) -> Result<(), ImageError> {
        let mut catalogue = self.lock_catalogue();
        if let Some(name) = remove {
            catalogue.remove_unreadable(name)?;
        }
        let remove = remove.map(|name| find_image(&catalogue.images(), name)).transpose()?.flatten();
        let before = needed_content(&catalogue.images());
        if let Some(in_use) = in_use {
            catalogue.update(|images| match &remove {
                Some(id) => remove_image(images, id, in_use),
                None => images.retain(|id, stored| !stored.removed || in_use.contains(id)),
            })?;
        }
        let live = live_content(&catalogue);
        self.directory.unprotect(before.difference(&live).copied());
        self.damage.retain(&live);
        let detached = self.directory.detach_unneeded(&live)?;
        drop(catalogue);
        Ok(delete_files(detached)?)
    }

    /// Returns the configuration of an image of the list; an artifact has an empty one. Blocks.
    pub fn read_image_config(&self, id: ImageId, stored: &StoredImage) -> Result<ImageConfig, ImageError> {
        if stored.artifact_type.is_some() {
            return Ok(ImageConfig::default());
        }
        let path = self.directory.path((ContentKind::Config, id));
        let bytes = std::fs::read(&path).map_err(at("read", &path))?;
        let found = Digest::of(&bytes);
        if found != id {
            let file = DamagedFile { path, damage: FileDamage::Content { found, expected: id } };
            self.damage.set((ContentKind::Config, id), Some(file.clone()));
            return Err(damaged_error(&id, stored, file));
        }
        let parsed = manifest::parse_config(&bytes);
        Ok(parsed.map_err(|source| ImageError::Manifest { what: format!("configuration {id}"), source })?.0)
    }
}

/// Returns all content that these images need.
pub fn needed_content(images: &Images) -> HashSet<ContentKey> {
    images.iter().flat_map(|(id, stored)| stored.content(id)).map(|(key, _)| key).collect()
}

/// Returns the content that must not be removed: that of the images, and all that an unreadable entry of the list may need. Each digest
/// anywhere in the text of such an entry counts as content of every kind.
pub fn live_content(catalogue: &ImageCatalogue) -> HashSet<ContentKey> {
    let mut live = needed_content(&catalogue.images());
    for (key, entry) in catalogue.unreadable() {
        let text = format!("{key} {entry}");
        let words = text.split(|letter: char| !letter.is_ascii_digit() && !matches!(letter, 'a'..='f'));
        let digests: Vec<Digest> = words.filter_map(Digest::from_hex).collect();
        live.extend(digests.iter().flat_map(|digest| ContentKind::ALL.map(|kind| (kind, *digest))));
        // The entry may have lost the name of its metadata.
        if let Some(Ok(layers)) = entry.get("layers").map(Vec::<Digest>::deserialize) {
            live.insert((ContentKind::Tree, tree_name(&layers)));
        }
    }
    live
}

/// Returns the name of the metadata of these layers. The number in it changes whenever the writer's output changes.
pub fn tree_name(diff_ids: &[Digest]) -> Digest {
    let text: String = diff_ids.iter().map(|diff_id| format!("{diff_id}\n")).collect();
    Digest::of(format!("tree 2\n{text}").as_bytes())
}

/// A download as a stream that keeps what it reads for the next attempt.
struct DownloadReader {
    receiver: Receiver<DownloadMessage>,
    piece: Bytes,
    partial: File,
    ended: bool,
}

impl Read for DownloadReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.receiver.blocking_recv() {
                Some(DownloadMessage::Data(data)) => {
                    self.partial.write_all(&data)?;
                    self.piece = data;
                }
                Some(DownloadMessage::End) => self.ended = true,
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let length = buffer.len().min(self.piece.len());
        self.piece.copy_to_slice(buffer.get_mut(..length).unwrap_or_default());
        Ok(length)
    }
}
