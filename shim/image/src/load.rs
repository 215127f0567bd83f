//! Reads images and artifacts from files: OCI layouts, as a directory or a tar archive, and docker archives. Everything that is kept of an
//! archive until its images are installed is charged to a budget, and reading it ends when the caller has cancelled.

use crate::budget::{Budget, BudgetError, Cancel, heap_bytes};
use crate::install::StoreState;
use crate::layer::tar::{EntryType, TarReader};
use crate::manifest::{
    self, Descriptor, MAX_CONFIG, MAX_MANIFEST, Manifest, ManifestDocument, ManifestError, RawDescriptor,
};
use crate::plan::{ImageNames, ImagePlan, LayerForm, LayerPlan, LayerSource};
use crate::progress::InstallationCounter;
use crate::{ImageError, LoadedImage, Reference};
use nacelle_base::files::at;
use nacelle_base::task::run_blocking;
use nacelle_base::timeline::Timeline;
use nacelle_model::digest::Digest;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The maximum number of members of an archive.
const MAX_MEMBERS: usize = 1_000_000;
/// The maximum number of images of an archive.
const MAX_IMAGES: usize = 1000;
/// The memory in bytes that a member takes in a map in addition to its name, and the names before they are in the map.
const MEMBER_MEMORY: u64 = 128;
/// The memory in bytes that a layer takes in a plan: its digest and its boxed stream.
const LAYER_PLAN_MEMORY: u64 = 256;

/// Loads all images of an archive. `name` is an additional name if the archive has only one image.
pub async fn load(
    shared: &Arc<StoreState>,
    path: &Path,
    name: Option<&Reference>,
    counter: &InstallationCounter,
) -> Result<Vec<LoadedImage>, ImageError> {
    let (opened, pool, cancel) = (path.to_owned(), Arc::clone(&shared.pool), Cancel::default());
    let _cancelled_with_this_future = cancel.on_drop();
    let max_file_bytes = shared.config.max_layer_bytes;
    // The budget lives until all images are installed.
    let (plans, path, _budget) = run_blocking("read an image archive", move || {
        let mut budget = Budget::archive(&pool, &cancel);
        let archive = ArchiveFile::open(&opened, &mut budget)?;
        Ok::<_, ImageError>((plan_images(&archive, &mut budget, max_file_bytes)?, opened, budget))
    })
    .await??;
    if plans.is_empty() {
        return Err(ImageError::Archive { path, why: "it contains no image for this node's architecture" });
    }
    if name.is_some() && plans.len() > 1 {
        return Err(ImageError::Archive {
            path,
            why: "it contains several images; a name can be given to a single image only",
        });
    }
    let mut loaded = Vec::new();
    for mut plan in plans {
        plan.names.tags.extend(name.map(Reference::to_string));
        let id = plan.id;
        if !shared.assign_names(id, plan.names.clone()).await? {
            shared.install_image(plan, counter, &Timeline::default()).await?;
        }
        let names = shared.published.images().get(&id).map(|stored| stored.tags.iter().cloned().collect());
        loaded.push(LoadedImage { id, names: names.unwrap_or_default() });
    }
    Ok(loaded)
}

fn plan_images(archive: &ArchiveFile, budget: &mut Budget, max_file_bytes: u64) -> Result<Vec<ImagePlan>, ImageError> {
    let mut plans = ImagePlans { archive, budget, all: Vec::new() };
    if let Some(index) = archive.read_small("index.json", MAX_MANIFEST)? {
        let wrong = |source| archive.manifest_error("index.json", source);
        let images = manifest::parse_layout_index(&index).map_err(wrong)?;
        let images: Vec<_> = images.iter().filter(|image| image.is_image()).collect();
        plans.check_count(images.len())?;
        for image in images {
            plans.add(plan_layout_image(archive, image, max_file_bytes)?)?;
        }
        return Ok(plans.all);
    }
    if let Some(list) = archive.read_small("manifest.json", MAX_MANIFEST)? {
        let images =
            manifest::parse_docker_archive(&list).map_err(|source| archive.manifest_error("manifest.json", source))?;
        plans.check_count(images.len())?;
        for image in &images {
            plans.add(plan_docker_image(archive, image)?)?;
        }
        return Ok(plans.all);
    }
    let why = "it is neither an OCI layout (no index.json) nor a docker archive (no manifest.json)";
    Err(ImageError::Archive { path: archive.path().to_owned(), why })
}

/// The plans for an archive's images, each image once.
struct ImagePlans<'c> {
    archive: &'c ArchiveFile,
    budget: &'c mut Budget,
    all: Vec<ImagePlan>,
}

impl ImagePlans<'_> {
    fn check_count(&self, images: usize) -> Result<(), ImageError> {
        if images > MAX_IMAGES {
            let why = "it contains more than 1000 images";
            return Err(ImageError::Archive { path: self.archive.path().to_owned(), why });
        }
        Ok(())
    }

    /// Adds a plan. The same image under several names is one plan.
    fn add(&mut self, plan: ImagePlan) -> Result<(), ImageError> {
        self.budget.step(1).map_err(|source| self.archive.budget_error(source))?;
        match self.all.iter_mut().find(|other| other.id == plan.id) {
            Some(other) => {
                other.names.tags.extend(plan.names.tags);
                other.names.digests.extend(plan.names.digests);
            }
            None => {
                let paths = plan.layers.iter().map(|layer| match &layer.form {
                    LayerForm::Tar => 0,
                    LayerForm::File(file) => heap_bytes(file.path.capacity()),
                });
                let bytes = heap_bytes(plan.document.capacity()) + plan.layers.len() as u64 * LAYER_PLAN_MEMORY;
                let bytes = bytes + paths.sum::<u64>();
                self.budget.charge(bytes).map_err(|source| self.archive.budget_error(source))?;
                self.all.push(plan);
            }
        }
        Ok(())
    }
}

fn plan_layout_image(
    archive: &ArchiveFile,
    image: &RawDescriptor,
    max_file_bytes: u64,
) -> Result<ImagePlan, ImageError> {
    let named = image.validate().map_err(|source| archive.manifest_error("index.json", source))?;
    let mut descriptor = named.clone();
    for _ in 0..3 {
        let bytes = archive.read_blob(&descriptor, MAX_MANIFEST)?;
        let what = format!("manifest {}", descriptor.digest);
        match manifest::parse_manifest(&bytes).map_err(|source| archive.manifest_error(&what, source))? {
            ManifestDocument::Index(ours) => descriptor = ours,
            ManifestDocument::Manifest(manifest) => {
                let name = annotated_name(image);
                let digests = name.iter().map(|name| name.with_digest(named.digest).to_string()).collect();
                let tags = name.iter().filter(|name| name.tag().is_some()).map(Reference::to_string).collect();
                let names = ImageNames { tags, digests };
                let source = |blob: Descriptor| {
                    let member = archive.require_member(&blob_path(blob.digest))?;
                    Ok(LayerSource::Archive(Box::new(member.take(blob.size)), Some(blob.digest)))
                };
                return match manifest {
                    Manifest::Artifact(artifact) => {
                        ImagePlan::of_artifact(artifact, bytes, names, max_file_bytes, source)
                    }
                    Manifest::Image(manifest) => {
                        let config = archive.read_blob(&manifest.config, MAX_CONFIG)?;
                        let what = format!("configuration {}", manifest.config.digest);
                        let wrong = |source| archive.manifest_error(&what, source);
                        ImagePlan::of_image(&manifest, config, names, source, wrong)
                    }
                };
            }
        }
    }
    Err(archive.manifest_error(
        "index.json",
        ManifestError::UnsupportedType { kind: "an index of indexes of indexes".to_owned() },
    ))
}

/// Returns the full name that a layout gives an image; `None` for a bare tag.
fn annotated_name(image: &RawDescriptor) -> Option<Reference> {
    let annotation = |key| image.annotations.as_ref().and_then(|all| all.get(key));
    let whole = annotation("io.containerd.image.name");
    let name =
        whole.or_else(|| annotation("org.opencontainers.image.ref.name").filter(|name| name.contains([':', '/'])));
    name.and_then(|name| Reference::parse(name).ok())
}

fn plan_docker_image(archive: &ArchiveFile, image: &manifest::DockerArchiveImage) -> Result<ImagePlan, ImageError> {
    let mut config = Vec::new();
    let limit = io::Read::take(archive.require_member(&image.config)?, MAX_CONFIG + 1).read_to_end(&mut config);
    if limit.map_err(at("read", archive.path()))? as u64 > MAX_CONFIG {
        return Err(ImageError::TooLarge { what: image.config.clone(), limit: MAX_CONFIG });
    }
    let wrong = |source| archive.manifest_error(&image.config, source);
    let (parsed, diff_ids) = manifest::parse_config(&config).map_err(wrong)?;
    if diff_ids.len() != image.layers.len() {
        return Err(wrong(ManifestError::Layers { layers: image.layers.len(), diff_ids: diff_ids.len() }));
    }
    let mut layers = Vec::new();
    for (diff_id, name) in diff_ids.iter().zip(&image.layers) {
        let member = archive.require_member(name)?;
        let size = member.size().map_err(at("read", archive.path()))?;
        let source = LayerSource::Archive(Box::new(member), None);
        layers.push(LayerPlan { name: *diff_id, source, size, form: LayerForm::Tar });
    }
    let tags = image.repo_tags.iter().flatten().map(|tag| Ok(Reference::parse(tag)?.to_string()));
    let tags = tags.collect::<Result<_, ImageError>>()?;
    let names = ImageNames { tags, digests: Vec::new() };
    let id = Digest::of(&config);
    Ok(ImagePlan { id, document: config, user: parsed.user, artifact_type: None, layers, names })
}

fn blob_path(digest: Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// The bytes with which compressed files begin: gzip, zstd and xz. None is the beginning of the name of an archive's first member.
const COMPRESSED: [&[u8]; 3] = [&[0x1f, 0x8b], &[0x28, 0xb5, 0x2f, 0xfd], &[0xfd, b'7', b'z', b'X', b'Z', 0]];

/// A directory or archive with members.
enum ArchiveFile {
    Directory(PathBuf),
    Tar { path: PathBuf, file: Arc<File>, members: HashMap<Vec<u8>, (u64, u64)> },
}

/// A part of a file.
struct ArchiveMember {
    file: Arc<File>,
    at: u64,
    left: u64,
}

impl ArchiveMember {
    /// Returns the number of bytes that are left.
    fn size(&self) -> io::Result<u64> {
        Ok(self.left.min(self.file.metadata()?.len()))
    }
}

impl Read for ArchiveMember {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let got = self.file.read_at(buffer.get_mut(..length).unwrap_or_default(), self.at)?;
        self.at += got as u64;
        self.left -= got as u64;
        Ok(got)
    }
}

impl ArchiveFile {
    fn open(path: &Path, budget: &mut Budget) -> Result<ArchiveFile, ImageError> {
        let file = File::open(path).map_err(at("open", path))?;
        if file.metadata().map_err(at("read", path))?.is_dir() {
            return Ok(ArchiveFile::Directory(path.to_owned()));
        }
        let mut start = [0; 6];
        let length = file.read_at(&mut start, 0).map_err(at("read", path))?;
        if COMPRESSED.iter().any(|magic| start.get(..length).is_some_and(|start| start.starts_with(magic))) {
            return Err(ImageError::Archive {
                path: path.to_owned(),
                why: "the archive is compressed; decompress it first, with gzip -d, zstd -d or xz -d",
            });
        }
        let read_error = |source| ImageError::ArchiveRead { path: path.to_owned(), source };
        let mut archive = TarReader::new(BufReader::new(&file));
        let (mut members, mut links) = (HashMap::new(), Vec::new());
        let over = |source| ImageError::ArchiveBudget { path: path.to_owned(), source };
        while let Some(header) = archive.next_entry().map_err(read_error)? {
            budget.step(1).map_err(over)?;
            budget
                .charge(
                    MEMBER_MEMORY + heap_bytes(header.path.len()) + heap_bytes(header.path.len() + header.link.len()),
                )
                .map_err(over)?;
            let name = crate::layer::split_clean(&header.path).join(&b'/');
            match header.kind {
                EntryType::File if header.sparse.is_none() => {
                    members.insert(name, (header.data_at, header.size));
                }
                // `docker save` writes a layer of several images once and links to it.
                EntryType::Symlink => links.push(([&name[..], b"/../", &header.link].concat(), name)),
                EntryType::Hardlink => links.push((header.link, name)),
                _ => {}
            }
            if members.len() + links.len() > MAX_MEMBERS {
                return Err(ImageError::Archive { path: path.to_owned(), why: "it has too many members" });
            }
            archive.seek_past_data().map_err(read_error)?;
        }
        for (target, name) in links {
            if let Some(&member) = members.get(&crate::layer::split_clean(&target).join(&b'/')) {
                members.entry(name).or_insert(member);
            }
        }
        Ok(ArchiveFile::Tar { path: path.to_owned(), file: Arc::new(file), members })
    }

    fn path(&self) -> &Path {
        match self {
            ArchiveFile::Directory(path) | ArchiveFile::Tar { path, .. } => path,
        }
    }

    fn budget_error(&self, source: BudgetError) -> ImageError {
        ImageError::ArchiveBudget { path: self.path().to_owned(), source }
    }

    fn manifest_error(&self, what: &str, source: ManifestError) -> ImageError {
        ImageError::Manifest { what: format!("{what} of {}", self.path().display()), source }
    }

    fn member(&self, name: &str) -> Result<Option<ArchiveMember>, ImageError> {
        let parts = crate::layer::split_clean(name.as_bytes());
        match self {
            ArchiveFile::Tar { file, members, .. } => Ok(members
                .get(parts.join(&b'/').as_slice())
                .map(|&(at, left)| ArchiveMember { file: Arc::clone(file), at, left })),
            ArchiveFile::Directory(directory) => {
                let path = directory.join(String::from_utf8_lossy(&parts.join(&b'/')).as_ref());
                match File::open(&path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                    file => Ok(Some(ArchiveMember {
                        file: Arc::new(file.map_err(at("open", &path))?),
                        at: 0,
                        left: u64::MAX,
                    })),
                }
            }
        }
    }

    fn require_member(&self, name: &str) -> Result<ArchiveMember, ImageError> {
        let missing =
            || ImageError::Archive { path: self.path().to_owned(), why: "a file that it refers to is missing" };
        self.member(name)?.ok_or_else(missing)
    }

    fn read_small(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, ImageError> {
        let Some(member) = self.member(name)? else { return Ok(None) };
        let mut bytes = Vec::new();
        member.take(limit + 1).read_to_end(&mut bytes).map_err(at("read", self.path()))?;
        if bytes.len() as u64 > limit {
            return Err(ImageError::TooLarge { what: name.to_owned(), limit });
        }
        Ok(Some(bytes))
    }

    /// Returns a small blob of a layout, verified.
    fn read_blob(&self, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>, ImageError> {
        let name = blob_path(descriptor.digest);
        let bytes = self.read_small(&name, limit)?;
        let missing =
            || ImageError::Archive { path: self.path().to_owned(), why: "a file that it refers to is missing" };
        let bytes = bytes.ok_or_else(missing)?;
        match Digest::of(&bytes) {
            got if got == descriptor.digest => Ok(bytes),
            got => Err(ImageError::Digest { what: format!("{name} in {}", self.path().display()), got }),
        }
    }
}
