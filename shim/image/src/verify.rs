//! Verifies the files of images: reads them whole and compares their digests. On demand it runs at full speed, in the background on a
//! thread of its own at idle priority and a limited rate. Damage is recorded, so that the image counts as absent and its next pull
//! repairs it; a file in use is never removed. Sound files get fs-verity, if the store offers it
//! and they do not have it yet.

use crate::ImageError;
use crate::Reference;
use crate::budget::Cancel;
use crate::catalogue::{Images, find_image};
use crate::damage::{DamagedFile, FileDamage, ImageDamage, ImageVerification};
use crate::directory::{ContentKey, ContentKind};
use crate::idle::lower_thread_priority;
use crate::install::{StoreState, needed_content};
use crate::layer::index::CHECKSUM_BYTES;
use crate::plan::ImageNames;
use crate::store::ImageStore;
use crate::sums::{ContentSums, FileSum, sum_file};
use nacelle_base::Chain;
use nacelle_base::files::{FileError, at, remove_if_there};
use nacelle_base::retry::retry_interrupted;
use nacelle_base::task::run_blocking;
use nacelle_model::digest::{Digest, ImageId};
use rustix::fs::{Advice, fadvise};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::oneshot;

/// The maximum rate of a verification in the background, in bytes per second; on average, where files get fs-verity.
const BACKGROUND_RATE: u32 = 32 << 20;
/// The minimum time between the start of the store and the first verification in the background.
const START_DELAY: Duration = Duration::from_secs(600);
/// How often content is examined again that is replaced meanwhile.
const ATTEMPTS: u32 = 3;

/// The speed of a verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyPace {
    /// As fast as possible.
    Full,
    /// At most [`BACKGROUND_RATE`].
    Background,
}

/// A verification in progress.
struct Verifier<'c> {
    pace: VerifyPace,
    cancel: &'c Cancel,
    files: u64,
    bytes: u64,
    verity_files: u64,
    /// The pause that bytes which the kernel has read to enable fs-verity require before the next file.
    owed_pause: Duration,
}

/// One file that has been read.
struct ExaminedFile {
    path: PathBuf,
    /// Device and inode, and the sum of the file; its damage if it cannot be read.
    read: Result<((u64, u64), FileSum), FileDamage>,
}

/// Returns the time that this number of bytes takes at [`BACKGROUND_RATE`].
fn pause_for(bytes: u64) -> Duration {
    Duration::from_micros(bytes.saturating_mul(1_000_000) / u64::from(BACKGROUND_RATE))
}

impl Verifier<'_> {
    /// Waits. Returns false, at once, if the verification is cancelled.
    fn pause(&self, mut time: Duration) -> bool {
        const SLICE: Duration = Duration::from_millis(100);
        while !time.is_zero() && !self.cancel.is_cancelled() {
            std::thread::sleep(time.min(SLICE));
            time = time.saturating_sub(SLICE);
        }
        !self.cancel.is_cancelled()
    }

    /// Reads a file. Returns `None` if the verification is cancelled.
    fn read_file(&mut self, path: PathBuf) -> Result<Option<ExaminedFile>, FileError> {
        let pace = self.pace;
        let owed = std::mem::take(&mut self.owed_pause);
        if pace == VerifyPace::Background && !self.pause(owed) {
            return Ok(None);
        }
        let mut count = 0;
        let mut read = || {
            let file = File::open(&path)?;
            let metadata = file.metadata()?;
            if pace == VerifyPace::Background {
                // The pages of the containers' files should stay in memory instead. Not all file systems support the advice.
                let _ = fadvise(&file, 0, None, Advice::NoReuse);
            }
            let sum = sum_file(&file, None, |bytes| {
                count += bytes as u64;
                if pace == VerifyPace::Background {
                    std::thread::sleep(pause_for(bytes as u64));
                }
                !self.cancel.is_cancelled()
            })?;
            Ok::<_, io::Error>(sum.map(|sum| ((metadata.dev(), metadata.ino()), sum)))
        };
        let read = match read() {
            Ok(None) => return Ok(None),
            Ok(Some(read)) => Ok(read),
            Err(error) => match FileDamage::from_read_error(&error) {
                Some(damage) => Err(damage),
                None => return Err(at("read", &path)(error)),
            },
        };
        self.files += 1;
        self.bytes += count;
        Ok(Some(ExaminedFile { path, read }))
    }
}

impl ExaminedFile {
    /// Compares the file with its sum.
    fn compare(&self, expected: Option<FileSum>) -> Option<DamagedFile> {
        let damage = match (&self.read, expected) {
            (Err(damage), _) => Some(damage.clone()),
            (Ok((_, found)), Some(expected)) if found.length != expected.length => {
                Some(FileDamage::Length { found: found.length, expected: expected.length })
            }
            (Ok((_, found)), Some(expected)) if found.digest != expected.digest => {
                Some(FileDamage::Content { found: found.digest, expected: expected.digest })
            }
            _ => None,
        };
        damage.map(|damage| DamagedFile { path: self.path.clone(), damage })
    }

    /// Returns whether the path still leads to the file that was read, or still to none.
    fn is_current(&self) -> bool {
        match (&self.read, fs::metadata(&self.path)) {
            (Ok((identity, _)), Ok(metadata)) => *identity == (metadata.dev(), metadata.ino()),
            (Err(FileDamage::Missing), found) => found.is_err(),
            (Err(_), found) => found.is_ok(),
            (Ok(_), Err(_)) => false,
        }
    }

    fn sum(&self) -> Option<FileSum> {
        self.read.as_ref().ok().map(|(_, sum)| *sum)
    }
}

impl StoreState {
    /// Verifies the images of these names, or all images. Returns `None` if it was cancelled. Blocks.
    pub fn verify_images(
        &self,
        names: &[String],
        pace: VerifyPace,
        cancel: &Cancel,
    ) -> Result<Option<ImageVerification>, ImageError> {
        let images = self.published.images();
        let unreadable = self.lock_catalogue().unreadable().clone();
        let mut chosen = BTreeSet::new();
        for name in names {
            match find_image(&images, name)? {
                Some(id) => drop(chosen.insert(id.to_string())),
                None if unreadable.contains_key(name) => drop(chosen.insert(name.clone())),
                None => return Err(ImageError::NotFound { name: name.clone() }),
            }
        }
        if names.is_empty() {
            chosen.extend(images.keys().map(ImageId::to_string));
            chosen.extend(unreadable.into_keys());
        }
        let report = self.verify_entries(&chosen, pace, cancel);
        if names.is_empty() && report.is_some() {
            self.damage.set_verified(now());
        }
        Ok(report)
    }

    /// Verifies the images of these keys of the list, which are ids unless their entries are invalid. Leaves keys out that the list no
    /// longer has. A file that cannot be read is reported, and the image is not recorded as damaged if the error proves no damage.
    /// Returns `None` if it was cancelled.
    fn verify_entries(&self, keys: &BTreeSet<String>, pace: VerifyPace, cancel: &Cancel) -> Option<ImageVerification> {
        let images = self.published.images();
        let unreadable = self.lock_catalogue().unreadable().clone();
        let (entries, chosen): (Vec<&String>, Vec<&String>) =
            keys.iter().partition(|key| unreadable.contains_key(*key));
        let chosen: BTreeSet<ImageId> = chosen.into_iter().filter_map(|key| key.parse().ok()).collect();
        let mut verifier = Verifier { pace, cancel, files: 0, bytes: 0, verity_files: 0, owed_pause: Duration::ZERO };
        let mut verified: HashMap<ContentKey, Vec<DamagedFile>> = HashMap::new();
        let mut damaged = Vec::new();
        for id in &chosen {
            let Some(stored) = images.get(id) else { continue };
            for (key, length) in stored.content(id) {
                let files = match verified.get(&key) {
                    Some(files) => files,
                    None => {
                        let files = match self.verify_content(key, length, &mut verifier) {
                            Ok(files) => self.keep_if_needed(key, files?),
                            Err(error) => vec![unreadable_file(error)],
                        };
                        verified.entry(key).or_insert(files)
                    }
                };
                let names = if stored.tags.is_empty() { &stored.digests } else { &stored.tags };
                damaged.extend(files.iter().map(|file| ImageDamage {
                    image: id.to_string(),
                    names: names.iter().cloned().collect(),
                    path: file.path.clone(),
                    damage: file.damage.clone(),
                    repaired: false,
                    repair_error: None,
                }));
            }
        }
        damaged.extend(entries.iter().map(|key| ImageDamage {
            image: (*key).clone(),
            names: unreadable.get(key.as_str()).map(|entry| strings_of(entry, "tags")).unwrap_or_default(),
            path: self.directory.catalogue_path(),
            damage: FileDamage::Unreadable { why: "the entry of the image is invalid".to_owned() },
            repaired: false,
            repair_error: None,
        }));
        let images = (chosen.len() + entries.len()) as u64;
        let Verifier { files, bytes, verity_files, .. } = verifier;
        Some(ImageVerification { images, files, bytes, verity_files, damaged })
    }

    /// Verifies a layer, whether an image uses it or not. A damaged layer of no image is removed. Blocks.
    pub fn verify_layer(&self, diff_id: Digest) -> Result<(), ImageError> {
        let (key, cancel) = ((ContentKind::Layer, diff_id), Cancel::default());
        let mut verifier = Verifier {
            pace: VerifyPace::Full,
            cancel: &cancel,
            files: 0,
            bytes: 0,
            verity_files: 0,
            owed_pause: Duration::ZERO,
        };
        let damaged = self.verify_content(key, None, &mut verifier)?.unwrap_or_default();
        if !damaged.is_empty() {
            self.remove_damaged_layer(diff_id)?;
        }
        Ok(())
    }

    /// Removes a layer that is still damaged, that no image uses and that no pull writes at the moment.
    fn remove_damaged_layer(&self, diff_id: Digest) -> Result<(), FileError> {
        let key = (ContentKind::Layer, diff_id);
        let pin = self.directory.pin(key);
        let Ok(_writing) = pin.try_lock() else { return Ok(()) };
        if self.damage.get(&key).is_some() && !needed_content(&self.published.images()).contains(&key) {
            remove_if_there(&self.directory.index_path(diff_id))?;
            self.damage.set(key, None);
        }
        Ok(())
    }

    /// Verifies one piece of content and records the result. Content without sums gets them. Returns the damaged files; `None` if the
    /// verification is cancelled. Content that a pull writes at the moment counts as sound.
    fn verify_content(
        &self,
        key: ContentKey,
        length: Option<u64>,
        verifier: &mut Verifier<'_>,
    ) -> Result<Option<Vec<DamagedFile>>, FileError> {
        let pin = self.directory.pin(key);
        for _ in 0..ATTEMPTS {
            let sums = self.read_sums(key)?;
            let Some(main) = verifier.read_file(self.directory.path(key))? else { return Ok(None) };
            let index = match key.0 {
                ContentKind::Layer => match verifier.read_file(self.directory.index_path(key.1))? {
                    Some(index) => Some(index),
                    None => return Ok(None),
                },
                _ => None,
            };
            let Ok(_writing) = pin.try_lock() else { return Ok(Some(Vec::new())) };
            let current = main.is_current() && index.as_ref().is_none_or(ExaminedFile::is_current);
            if !current || self.read_sums(key)? != sums {
                continue;
            }
            let (expected, mut damaged) = match sums {
                Ok(sums) => (sums, Vec::new()),
                Err(file) => (None, vec![file]),
            };
            let expected_main = match key.0 {
                ContentKind::Config => {
                    main.sum().map(|sum| FileSum { length: length.unwrap_or(sum.length), digest: key.1, verity: None })
                }
                _ => expected
                    .map(|sums| sums.main)
                    .or(length.and_then(|length| main.sum().map(|sum| FileSum { length, ..sum }))),
            };
            damaged.extend(main.compare(expected_main));
            if let Some(index) = &index {
                damaged.extend(index.compare(expected.and_then(|sums| sums.index)));
                if expected.is_none() && damaged.is_empty() && !has_own_checksum(&index.path)? {
                    damaged.push(DamagedFile { path: index.path.clone(), damage: FileDamage::Checksum });
                }
            }
            if damaged.is_empty() && key.0 != ContentKind::Config {
                self.complete_sums(key, expected, &main, index.as_ref(), verifier);
            }
            self.record_verified(key, &damaged);
            return Ok(Some(damaged));
        }
        Ok(Some(Vec::new()))
    }

    /// Records what the record of sound content lacks: its sums, and the fs-verity digests of its files, for which it is enabled. A
    /// recorded digest that the file does not have is replaced, or dropped if the file cannot have one, because the digests have proved the
    /// content. The caller holds the lock of the content's pin.
    fn complete_sums(
        &self,
        key: ContentKey,
        recorded: Option<ContentSums>,
        main: &ExaminedFile,
        index: Option<&ExaminedFile>,
        verifier: &mut Verifier<'_>,
    ) {
        let Some(main_sum) = main.sum() else { return };
        let mut sums = recorded.unwrap_or_else(|| ContentSums::new(main_sum, index.and_then(ExaminedFile::sum)));
        let mut files = vec![(&main.path, &mut sums.main)];
        if let (Some(index), Some(sum)) = (index, &mut sums.index) {
            files.push((&index.path, sum));
        }
        let verity = self.directory.verity();
        for (path, sum) in files {
            let enabled = verity.enable(path);
            if let Ok(Some(digest)) = enabled {
                verifier.verity_files += 1;
                if sum.verity.replace(digest) != Some(digest) {
                    verifier.owed_pause += pause_for(sum.length);
                }
                continue;
            }
            if let Err(error) = enabled {
                let error = Chain(&error);
                tracing::warn!(%error, "fs-verity does not protect a file of the image store; the next verification tries again");
            }
            // The content is right: a digest that the file does not have would make the image absent, now or under a kernel that can enable
            // fs-verity.
            sum.verity = sum.verity.filter(|recorded| verity.has(path, *recorded));
        }
        if recorded != Some(sums)
            && let Err(error) = sums.write(&self.directory.sums_path(key))
        {
            let error = Chain(&error);
            tracing::warn!(%error, "cannot record the digests of a file of the image store; the next verification does");
        }
    }

    /// Forgets the damage of content whose images were removed during the verification.
    fn keep_if_needed(&self, key: ContentKey, damaged: Vec<DamagedFile>) -> Vec<DamagedFile> {
        if damaged.is_empty() || needed_content(&self.published.images()).contains(&key) {
            return damaged;
        }
        self.damage.set(key, None);
        Vec::new()
    }

    fn record_verified(&self, key: ContentKey, damaged: &[DamagedFile]) {
        let is_news = self.damage.set(key, damaged.first().cloned());
        match damaged.first() {
            Some(file) if is_news => tracing::warn!(
                file = %file.path.display(),
                damage = %file.damage,
                "a file of the image store is damaged; its images count as absent until they are pulled again"
            ),
            None if is_news => tracing::info!(digest = %key.1, "a file of the image store is no longer damaged"),
            _ => {}
        }
    }

    /// Verifies images again after their repairs, of which `results` has the results by image. Returns their damage before with what
    /// has become of it, and new damage. Leaves out images that were removed meanwhile. Blocks.
    fn look_after_repair(
        &self,
        before: Vec<ImageDamage>,
        results: &BTreeMap<String, Result<(), String>>,
        cancel: &Cancel,
    ) -> Vec<ImageDamage> {
        let keys = results.keys().cloned().collect();
        let Some(again) = self.verify_entries(&keys, VerifyPace::Full, cancel) else { return before };
        let mut after = again.damaged;
        let images = self.published.images();
        let mut all = Vec::new();
        for mut damage in before {
            let remaining = after.iter().position(|other| other.image == damage.image && other.path == damage.path);
            let is_listed = damage.image.parse().is_ok_and(|id: ImageId| images.contains_key(&id));
            match remaining.map(|index| after.remove(index)) {
                Some(remaining) => {
                    let why = match results.get(&damage.image) {
                        Some(Err(why)) => why.clone(),
                        _ => format!("after the repair, the file {}", remaining.damage),
                    };
                    damage.repair_error = Some(why);
                }
                // The repair of the list removes an entry that names no image.
                None if is_listed || damage.path == self.directory.catalogue_path() => damage.repaired = true,
                None => continue,
            }
            all.push(damage);
        }
        all.extend(after);
        all
    }

    /// Gives an image these tags, but for those that another image has by now. Blocks.
    fn restore_tags(&self, id: ImageId, tags: Vec<String>) -> Result<(), ImageError> {
        if tags.is_empty() {
            return Ok(());
        }
        self.lock_catalogue().update(|images| {
            let is_free = |tag: &String| !images.values().any(|stored| stored.tags.contains(tag));
            let tags = tags.into_iter().filter(is_free).collect();
            ImageNames { tags, digests: Vec::new() }.assign(images, &id);
        })
    }

    /// Removes an entry of the list that cannot be read. Blocks.
    fn remove_unreadable_entry(&self, key: &str) -> Result<(), ImageError> {
        self.lock_catalogue().remove_unreadable(key)?;
        self.collect_garbage_blocking(None, None)
    }
}

/// Returns whether the index of a layer matches the checksum at its end.
fn has_own_checksum(path: &std::path::Path) -> Result<bool, FileError> {
    let file = File::open(path).map_err(at("open", path))?;
    let length = file.metadata().map_err(at("read", path))?.len();
    let Some(body) = length.checked_sub(CHECKSUM_BYTES as u64) else { return Ok(false) };
    let mut checksum = [0; CHECKSUM_BYTES];
    retry_interrupted(|| file.read_exact_at(&mut checksum, body)).map_err(at("read", path))?;
    let sum = sum_file(&file, Some(body), |_| true).map_err(at("read", path))?;
    Ok(sum.is_some_and(|sum| sum.digest == Digest(checksum)))
}

/// Returns the report of a file that cannot be read for a reason that proves no damage.
fn unreadable_file(error: FileError) -> DamagedFile {
    tracing::warn!(error = %Chain(&error), "cannot verify a file of the image store");
    DamagedFile { path: error.path, damage: FileDamage::Unreadable { why: error.source.to_string() } }
}

/// Returns the time until the next verification in the background; `None` if it is due. `verified` is the time of the last one, both
/// times in seconds since 1970. A last one in the future was before the clock was set back, and nothing is known of its age.
fn time_until_due(verified: Option<u64>, now: u64, interval: Duration) -> Option<Duration> {
    let age = now.checked_sub(verified?)?;
    interval.checked_sub(Duration::from_secs(age)).filter(|left| !left.is_zero())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the strings of a list in an entry that cannot be read as a whole.
fn strings_of(entry: &serde_json::Value, field: &str) -> Vec<String> {
    let list = entry.get(field).and_then(serde_json::Value::as_array);
    list.into_iter().flatten().filter_map(|text| text.as_str().map(str::to_owned)).collect()
}

/// Returns the references by digest of an image. A name could have become that of another image.
fn digest_references(images: &Images, unreadable: Option<&serde_json::Value>, image: &str) -> Vec<String> {
    let stored = image.parse::<ImageId>().ok().and_then(|id| images.get(&id));
    match (stored, unreadable) {
        (Some(stored), _) => stored.digests.iter().cloned().collect(),
        (None, Some(entry)) => strings_of(entry, "digests"),
        (None, None) => Vec::new(),
    }
}

impl ImageStore {
    /// Verifies the images of these names or ids, or all images: reads every file and compares its digest. With `repair`, pulls
    /// damaged images again, by digest and without credentials, and writes damaged metadata again. Images that cannot be repaired
    /// stay damaged: they count as absent until their next pull. Dropping the future ends the verification.
    pub async fn verify(&self, names: &[String], repair: bool) -> Result<ImageVerification, ImageError> {
        let (shared, names, cancel) = (Arc::clone(&self.shared), names.to_vec(), Cancel::default());
        let _cancelled_with_this_future = cancel.on_drop();
        let (verified, cancelled) = (Arc::clone(&shared), cancel.clone());
        let report =
            run_blocking("verify the images", move || verified.verify_images(&names, VerifyPace::Full, &cancelled));
        let mut report = report.await??.unwrap_or_default();
        if repair && !report.damaged.is_empty() {
            // Lost metadata need no registry.
            let (rebuilt, cancelled) = (Arc::clone(&shared), cancel.clone());
            run_blocking("write the metadata of images again", move || rebuilt.rebuild_lost_trees(&cancelled)).await?;
            let images: BTreeSet<String> = report.damaged.iter().map(|damage| damage.image.clone()).collect();
            let mut results = BTreeMap::new();
            for image in images {
                let result = self.repair_image(&image).await;
                results.insert(image, result);
            }
            let before = std::mem::take(&mut report.damaged);
            let look = move || shared.look_after_repair(before, &results, &cancel);
            report.damaged = run_blocking("verify the repaired images", look).await?;
        }
        Ok(report)
    }

    /// Pulls a damaged image again. Returns the reason that it stays damaged.
    async fn repair_image(&self, image: &str) -> Result<(), String> {
        let shared = Arc::clone(&self.shared);
        let id = image.parse::<ImageId>().ok();
        let images = self.shared.published.images();
        if id.and_then(|id| images.get(&id)).is_some_and(|stored| stored.removed) {
            return Err("the image was removed, and only running pods still use it: delete these pods".to_owned());
        }
        let key = image.to_owned();
        let looked = run_blocking("look for damage", move || {
            let damaged = id.map(|id| shared.is_damaged(&id)).transpose()?.unwrap_or(false);
            let unreadable = shared.lock_catalogue().unreadable().get(&key).cloned();
            let references = digest_references(&shared.published.images(), unreadable.as_ref(), &key);
            let tags = unreadable.as_ref().map(|entry| strings_of(entry, "tags")).unwrap_or_default();
            Ok::<_, ImageError>((damaged, unreadable.is_some(), references, tags))
        });
        let (damaged, unreadable, references, tags) =
            looked.await.map_err(|error| one_line(&error))?.map_err(|error| one_line(&error))?;
        if !damaged && !unreadable {
            return Ok(());
        }
        let mut why = "no registry is known for it: load it again from its archive, or pull it by its name".to_owned();
        // An entry that names an image stays until that image is here again.
        let mut pulled = references.is_empty() && tags.is_empty();
        for reference in references {
            let result = match Reference::parse(&reference) {
                Ok(reference) => self.pull(&reference, None).await,
                Err(error) => Err(error),
            };
            match result {
                Ok(got) if Some(got) == id => {
                    let shared = Arc::clone(&self.shared);
                    let restored = run_blocking("restore the tags of an image", move || shared.restore_tags(got, tags));
                    return restored.await.map_err(|error| one_line(&error))?.map_err(|error| one_line(&error));
                }
                Ok(got) => {
                    pulled = true;
                    why = format!("{reference} is the image {got} now");
                }
                Err(error) => why = one_line(&error),
            }
        }
        if unreadable && pulled {
            let (shared, key) = (Arc::clone(&self.shared), image.to_owned());
            let removed =
                run_blocking("remove an entry of the list of images", move || shared.remove_unreadable_entry(&key));
            return removed.await.map_err(|error| one_line(&error))?.map_err(|error| one_line(&error));
        }
        Err(why)
    }

    /// Verifies all images in the background, at idle priority, once per `interval`, also over restarts. Never returns. Dropping the
    /// future ends a verification in progress.
    pub async fn verify_periodically(&self, interval: Duration) {
        tokio::time::sleep(interval.min(START_DELAY)).await;
        loop {
            if let Some(left) = time_until_due(self.shared.damage.verified(), now(), interval) {
                // The wall clock may be set meanwhile.
                tokio::time::sleep(left.clamp(Duration::from_secs(1), Duration::from_secs(3600))).await;
                continue;
            }
            match self.verify_in_background().await {
                Ok(report) => tracing::info!(
                    images = report.images,
                    files = report.files,
                    bytes = report.bytes,
                    damaged = report.damaged.len(),
                    "verified the images"
                ),
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "cannot verify the images; this is tried again");
                    tokio::time::sleep(interval.min(START_DELAY)).await;
                }
            }
            // A clock that was set back must not make this a busy loop.
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// Verifies all images once, on a thread of idle priority.
    async fn verify_in_background(&self) -> Result<ImageVerification, ImageError> {
        let (shared, cancel, (sender, receiver)) = (Arc::clone(&self.shared), Cancel::default(), oneshot::channel());
        let _cancelled_with_this_future = cancel.on_drop();
        let aborted = || ImageError::Aborted { name: "all images".to_owned() };
        let work = move || {
            if let Err(error) = lower_thread_priority() {
                tracing::warn!(%error, "cannot lower the priority of the verification of images");
            }
            let verified = shared.verify_images(&[], VerifyPace::Background, &cancel);
            drop(shared);
            // The receiver is gone if the verification was cancelled.
            let _ = sender.send(verified);
        };
        let spawned = std::thread::Builder::new().name("image verify".into()).spawn(work);
        spawned.map_err(at("start a thread for", self.directory()))?;
        receiver.await.map_err(|_panicked| aborted())??.ok_or_else(aborted)
    }
}

fn one_line(error: &(dyn std::error::Error + 'static)) -> String {
    Chain(error).to_string()
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
