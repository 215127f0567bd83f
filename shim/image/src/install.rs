//! Installs an image in the store from its parts, whatever source the parts come from.
//!
//! One blocking thread works on a layer (and the one that `ingest` adds). The number of layers at a time and the memory of all of
//! them are bounded over the whole store. Dropping a future stops its downloads and cancels its threads, which keep their locks
//! until they have ended.

use crate::budget::{Budget, BudgetError, Cancel, Pool};
use crate::catalogue::{Catalogue, Images, Published, Stored, find, give_tag, take_away};
use crate::directory::{Part, Pin, StoreDirectory, delete};
use crate::erofs::{self, Blob};
use crate::layer::index::LayerIndex;
use crate::layer::ingest::{LayerError, Limits, ingest};
use crate::manifest::Descriptor;
use crate::registry::download::Part as Piece;
use crate::registry::{Http, Session};
use crate::tree::Tree;
use crate::{Config, ImageConfig, ImageError, manifest};
use bytes::{Buf, Bytes};
use nacelle_base::files::{at, remove_if_there, write_whole};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Classify, Kind};
use nacelle_model::digest::{Digest, ImageId};
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::Receiver;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::task::TaskTracker;

/// The maximum size in bytes of all indexes of an image, which are read one after the other.
const MAX_INDEXES: u64 = 512 << 20;

/// The maximum number of pieces of a download that wait for the unpacking thread.
const PIECES: usize = 16;

/// The state that all handles of a store share.
pub struct Shared {
    /// The configuration.
    pub config: Config,
    /// The references that must not be garbage-collected, in their full form.
    pub pinned: HashSet<String>,
    /// The files.
    pub directory: StoreDirectory,
    /// The HTTP clients.
    pub http: Arc<Http>,
    /// Permits for layers in progress.
    pub layers: Semaphore,
    /// The memory of all work on images.
    pub pool: Arc<Pool>,
    /// The list of images, for changes; locked on blocking threads only.
    pub catalogue: Mutex<Catalogue>,
    /// The list of images, for readers.
    pub published: Published,
}

/// The source of a layer.
pub enum Source {
    /// A registry.
    Registry(Arc<Session>, Descriptor),
    /// A stream from an archive, and the digest of its content if the archive has one.
    Archive(Box<dyn Read + Send>, Option<Digest>),
}

/// The digest that names the metadata, the length of the metadata, and the blobs that follow them with their lengths.
type BuiltTree = (Digest, u64, Vec<(Digest, u64)>);

/// The names that an image gets.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Tags. Other images lose them.
    pub tags: Vec<String>,
    /// Digest references.
    pub digests: Vec<String>,
}

impl Names {
    fn give(&self, images: &mut Images, id: &ImageId) -> bool {
        let Some(stored) = images.get_mut(id) else { return false };
        stored.removed = false;
        stored.digests.extend(self.digests.iter().cloned());
        for tag in &self.tags {
            give_tag(images, id, tag);
        }
        true
    }
}

impl Shared {
    /// Locks the list of images for a change.
    fn catalogue(&self) -> MutexGuard<'_, Catalogue> {
        self.catalogue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives names to an image of the store. Returns false if the store does not have it.
    pub async fn name(self: &Arc<Self>, id: ImageId, names: Names) -> Result<bool, ImageError> {
        let shared = Arc::clone(self);
        run_blocking("name an image", move || {
            let mut here = false;
            shared.catalogue().change(|images| here = names.give(images, &id))?;
            Ok(here)
        })
        .await?
    }

    /// Fetches the layers, builds the tree and adds the image to the list. If the disk is full, removes everything that it wrote.
    pub async fn install(
        self: &Arc<Self>,
        config: Vec<u8>,
        layers: Vec<(Digest, Source)>,
        names: Names,
    ) -> Result<ImageId, ImageError> {
        let id = Digest::of(&config);
        let diff_ids: Vec<Digest> = layers.iter().map(|(diff_id, _)| *diff_id).collect();
        let tree = tree_name(&diff_ids);
        let keys = diff_ids.iter().map(|diff_id| (Part::Layer, *diff_id));
        let keys: Vec<_> = keys.chain([(Part::Config, id), (Part::Tree, tree)]).collect();
        let pins: Vec<Pin> = keys.iter().map(|key| self.directory.pin(*key)).collect();
        let (threads, cancel) = (TaskTracker::new(), Cancel::default());
        let _cancelled_with_this_future = cancel.on_drop();
        let installed = self.install_pinned(config, layers, names, &threads, &pins, &cancel).await;
        if installed.as_ref().is_err_and(|error| error.kind() == Kind::Exhausted && !error.is_over_budget()) {
            cancel.cancel();
            threads.close();
            threads.wait().await; // Threads of cancelled layers may still have run.
            drop(pins);
            self.directory.forget_unfinished();
            self.sweep(None).await?;
        }
        installed
    }

    async fn install_pinned(
        self: &Arc<Self>,
        config: Vec<u8>,
        layers: Vec<(Digest, Source)>,
        names: Names,
        threads: &TaskTracker,
        pins: &[Pin],
        cancel: &Cancel,
    ) -> Result<ImageId, ImageError> {
        let diff_ids: Vec<Digest> = layers.iter().map(|(diff_id, _)| *diff_id).collect();
        self.enough_space(&layers)?;
        let mut bringing = JoinSet::new();
        let mut seen = HashSet::new();
        for (diff_id, source) in layers {
            if seen.insert(diff_id) {
                bringing.spawn(Arc::clone(self).bring(diff_id, source, threads.clone(), cancel.clone()));
            }
        }
        while let Some(brought) = bringing.join_next().await {
            if let Err(error) = brought.map_err(|error| TaskError::new("install a layer", error).into()).flatten() {
                bringing.shutdown().await;
                return Err(error);
            }
        }
        // The thread continues if this future is dropped, so it owns the pins of what it adds to the list.
        let (shared, pins, cancel) = (Arc::clone(self), pins.to_vec(), cancel.clone());
        run_blocking("install an image", move || {
            let finished = shared.finish(config, diff_ids, names, &cancel);
            drop(pins);
            finished
        })
        .await?
    }

    fn enough_space(&self, layers: &[(Digest, Source)]) -> Result<(), ImageError> {
        let needed =
            layers.iter().filter(|(diff_id, _)| !self.directory.has_layer(*diff_id)).map(|(_, source)| match source {
                Source::Registry(_, blob) => blob.size,
                Source::Archive(..) => 0,
            });
        let needed = needed.fold(0u64, u64::saturating_add);
        let free = self.directory.free()?;
        if needed > free {
            return Err(ImageError::NoSpace { path: self.directory.root().to_owned(), needed, free });
        }
        Ok(())
    }

    /// Fetches one layer, unless the store has it or another pull is fetching it.
    async fn bring(
        self: Arc<Self>,
        diff_id: Digest,
        source: Source,
        threads: TaskTracker,
        cancel: Cancel,
    ) -> Result<(), ImageError> {
        let making = self.directory.pin((Part::Layer, diff_id)).lock_owned().await;
        if self.directory.has_layer(diff_id) {
            return Ok(());
        }
        let _permit = self.layers.acquire().await; // The semaphore is never closed.
        match source {
            Source::Archive(stream, digest) => {
                let shared = Arc::clone(&self);
                threads
                    .spawn_blocking(move || {
                        let _making = making;
                        shared.take(diff_id, digest, stream, &cancel)
                    })
                    .await
                    .map_err(|error| TaskError::new("unpack a layer", error))?
            }
            Source::Registry(session, blob) => {
                let making = Arc::new(making);
                let download = |making| self.download(&session, &blob, diff_id, making, &threads, &cancel);
                let (brought, resumed) = download(Arc::clone(&making)).await;
                match brought {
                    // A crash may have damaged the partial download: try once more from the start.
                    Err(ImageError::Digest { .. } | ImageError::Layer { .. })
                        if resumed && !self.partial_is_here(&blob) =>
                    {
                        download(making).await.0
                    }
                    brought => brought,
                }
            }
        }
    }

    fn partial_is_here(&self, blob: &Descriptor) -> bool {
        self.directory.path((Part::Partial, blob.digest)).exists()
    }

    /// Downloads and unpacks at the same time. Also returns whether it resumed an earlier download.
    async fn download(
        self: &Arc<Self>,
        session: &Session,
        blob: &Descriptor,
        diff_id: Digest,
        making: Arc<tokio::sync::OwnedMutexGuard<()>>,
        threads: &TaskTracker,
        cancel: &Cancel,
    ) -> (Result<(), ImageError>, bool) {
        let partial = self.directory.pin((Part::Partial, blob.digest)).lock_owned().await;
        let (sender, receiver) = mpsc::channel(PIECES);
        let (start_sender, start) = oneshot::channel();
        let (shared, wanted, cancel) = (Arc::clone(self), blob.clone(), cancel.clone());
        let taking = threads.spawn_blocking(move || {
            let _locks = (making, partial);
            shared.unpack_download(diff_id, &wanted, start_sender, receiver, &cancel)
        });
        let from = start.await.unwrap_or(0); // If the thread failed at once, the download has no receiver.
        let (sent, taken) = tokio::join!(session.download(blob, from, sender), taking);
        let taken = taken.map_err(|error| TaskError::new("unpack a layer", error));
        (sent.and_then(|()| taken?), from > 0)
    }

    /// Unpacks one layer from a download. Blocks.
    fn unpack_download(
        &self,
        diff_id: Digest,
        blob: &Descriptor,
        start: oneshot::Sender<u64>,
        receiver: Receiver<Piece>,
        cancel: &Cancel,
    ) -> Result<(), ImageError> {
        let (file, mut length) = self.directory.partial(blob.digest)?;
        let path = self.directory.path((Part::Partial, blob.digest));
        if length > blob.size {
            file.set_len(0).map_err(at("truncate", &path))?;
            length = 0;
        }
        let before = file.try_clone().map_err(at("open", &path))?.take(length);
        let _ = start.send(length); // If the future was dropped, there is no sender, and the stream below returns the error.
        let stream = before.chain(Downloading { receiver, piece: Bytes::new(), partial: file, ended: false });
        let taken = self.take(diff_id, Some(blob.digest), Box::new(stream), cancel);
        let keep = match &taken {
            Err(ImageError::Layer { source: LayerError::Source(error), .. }) => {
                error.kind() == io::ErrorKind::ConnectionAborted
            }
            Err(ImageError::Layer { source: LayerError::Budget(error), .. }) => error.is_passing(),
            _ => false,
        };
        if !keep {
            remove_if_there(&path)?;
        }
        taken
    }

    /// Unpacks one layer from a stream. Blocks. Keeps nothing unless both digests match.
    fn take(
        &self,
        diff_id: Digest,
        digest: Option<Digest>,
        stream: Box<dyn Read + Send>,
        cancel: &Cancel,
    ) -> Result<(), ImageError> {
        let limits = Limits { bytes: self.config.max_layer_bytes, entries: self.config.max_layer_entries };
        let blob = self.directory.temporary()?;
        let name = digest.unwrap_or(diff_id);
        let mut budget = Budget::layer(&self.pool, cancel);
        let ingested = ingest(stream, &blob.file, limits, &mut budget);
        tracing::debug!(layer = %name, bytes = budget.peak(), entries = budget.steps(), "what unpacking the layer took");
        let ingested = ingested.map_err(|source| ImageError::Layer { digest: name, source })?;
        if digest.is_some_and(|digest| digest != ingested.digest) {
            return Err(ImageError::Digest { what: format!("layer {name}"), got: ingested.digest });
        }
        if ingested.diff_id != diff_id {
            return Err(ImageError::Digest {
                what: format!("the content {diff_id} of layer {name}"),
                got: ingested.diff_id,
            });
        }
        Ok(self.directory.keep_layer(diff_id, blob, &ingested.index)?)
    }

    /// Writes the tree, the configuration and the entry in the list. Blocks.
    fn finish(
        &self,
        config: Vec<u8>,
        diff_ids: Vec<Digest>,
        names: Names,
        cancel: &Cancel,
    ) -> Result<ImageId, ImageError> {
        let id = Digest::of(&config);
        let parsed = manifest::parse_config(&config);
        let (parsed, _) =
            parsed.map_err(|source| ImageError::Manifest { what: format!("configuration {id}"), source })?;
        let (tree, tree_length, blobs) = self.tree(&diff_ids, cancel)?;
        write_whole(&self.directory.path((Part::Config, id)), &config)?;
        let different: HashSet<Digest> = diff_ids.iter().copied().collect();
        let parts =
            different.iter().map(|diff_id| (Part::Layer, *diff_id)).chain([(Part::Config, id), (Part::Tree, tree)]);
        let stored = Stored {
            tags: Default::default(),
            digests: Default::default(),
            user: parsed.user,
            size: parts.map(|key| self.directory.size(key)).sum(),
            added: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            layers: diff_ids,
            tree,
            tree_length,
            blobs,
            removed: false,
        };
        self.catalogue().change(|images| {
            images.entry(id).or_insert(stored);
            names.give(images, &id);
        })?;
        Ok(id)
    }

    /// Returns the metadata of these layers, and writes them unless another image has the same. Blocks.
    fn tree(&self, diff_ids: &[Digest], cancel: &Cancel) -> Result<BuiltTree, ImageError> {
        let tree = tree_name(diff_ids);
        if let Some(same) = self.published.images().values().find(|stored| stored.tree == tree) {
            return Ok((tree, same.tree_length, same.blobs.clone()));
        }
        let (merged, blobs, mut budget) = self.merge(diff_ids, cancel)?;
        let metadata = erofs::write(&merged, &blobs, &mut budget)?;
        tracing::debug!(tree = %tree, bytes = budget.peak(), steps = budget.steps(), "what merging the layers took");
        write_whole(&self.directory.path((Part::Tree, tree)), &metadata.bytes)?;
        let used = metadata.used.iter().filter_map(|layer| blobs.get(*layer)).map(|blob| (blob.diff_id, blob.length));
        Ok((tree, metadata.bytes.len() as u64, used.collect()))
    }

    /// Merges these layers. Returns the tree, its blobs and the budget that the tree is charged to. Blocks.
    pub fn merge(&self, diff_ids: &[Digest], cancel: &Cancel) -> Result<(Tree, Vec<Blob>, Budget), ImageError> {
        let lengths =
            diff_ids.iter().map(|diff_id| self.directory.index_length(*diff_id)).collect::<Result<Vec<_>, _>>()?;
        let all = lengths.iter().sum::<u64>();
        if all > MAX_INDEXES {
            return Err(ImageError::TooLarge {
                what: "the indexes of the layers together".to_owned(),
                limit: MAX_INDEXES,
            });
        }
        let mut budget = Budget::image(&self.pool, cancel, all);
        let over = |source: BudgetError| ImageError::Tree(source.into());
        let (mut tree, mut blobs) = (Tree::new(), Vec::new());
        for (layer, (diff_id, length)) in diff_ids.iter().zip(lengths).enumerate() {
            budget.charge(length).map_err(over)?;
            let (bytes, path) = self.directory.index(*diff_id)?;
            let index = LayerIndex::open(&bytes).map_err(|source| ImageError::Index { path, source })?;
            tree.apply(layer, &index, &mut budget)?;
            blobs.push(Blob { diff_id: *diff_id, length: index.blob_length });
            budget.refund(length);
        }
        Ok((tree, blobs, budget))
    }

    /// Deletes what no image needs. With `in_use`, first drops the removed images that are not in it.
    pub async fn sweep(self: &Arc<Self>, in_use: Option<HashSet<ImageId>>) -> Result<(), ImageError> {
        let shared = Arc::clone(self);
        run_blocking("remove unused files of the image store", move || shared.sweep_now(None, in_use.as_ref())).await?
    }

    /// Removes an image from the list, if `remove` names one, and deletes what no image needs. Blocks.
    pub fn sweep_now(&self, remove: Option<&str>, in_use: Option<&HashSet<ImageId>>) -> Result<(), ImageError> {
        let mut catalogue = self.catalogue();
        let remove = remove.map(|name| find(&catalogue.images(), name)).transpose()?.flatten();
        let before = needed(&catalogue.images());
        if let Some(in_use) = in_use {
            catalogue.change(|images| match &remove {
                Some(id) => take_away(images, id, in_use),
                None => images.retain(|id, stored| !stored.removed || in_use.contains(id)),
            })?;
        }
        let live = needed(&catalogue.images());
        self.directory.release(before.difference(&live).copied());
        let away = self.directory.take_away(&live)?;
        drop(catalogue);
        Ok(delete(away)?)
    }

    /// Returns an image's configuration. Blocks.
    pub fn image_config(&self, id: ImageId) -> Result<ImageConfig, ImageError> {
        let path = self.directory.path((Part::Config, id));
        let bytes = std::fs::read(&path).map_err(at("read", &path))?;
        let parsed = manifest::parse_config(&bytes);
        Ok(parsed.map_err(|source| ImageError::Manifest { what: format!("configuration {id}"), source })?.0)
    }
}

/// Returns all content that these images need.
fn needed(images: &Images) -> HashSet<(Part, Digest)> {
    let of = |(id, stored): (&ImageId, &Stored)| {
        let layers: Vec<_> = stored.layers.iter().map(|diff_id| (Part::Layer, *diff_id)).collect();
        layers.into_iter().chain([(Part::Config, *id), (Part::Tree, stored.tree)])
    };
    images.iter().flat_map(of).collect()
}

/// Returns the name of the metadata of these layers. The number in it changes whenever the writer's output changes.
fn tree_name(diff_ids: &[Digest]) -> Digest {
    let text: String = diff_ids.iter().map(|diff_id| format!("{diff_id}\n")).collect();
    Digest::of(format!("tree 1\n{text}").as_bytes())
}

/// A download as a stream that keeps what it reads for the next attempt.
struct Downloading {
    receiver: Receiver<Piece>,
    piece: Bytes,
    partial: File,
    ended: bool,
}

impl Read for Downloading {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.receiver.blocking_recv() {
                Some(Piece::Data(data)) => {
                    self.partial.write_all(&data)?;
                    self.piece = data;
                }
                Some(Piece::End) => self.ended = true,
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let length = buffer.len().min(self.piece.len());
        self.piece.copy_to_slice(buffer.get_mut(..length).unwrap_or_default());
        Ok(length)
    }
}
