//! Reads images from files: OCI layouts, as a directory or a tar archive, and docker archives. Everything that is kept of an
//! archive until its images are installed is charged to a budget, and reading it ends when the caller has cancelled.

use crate::budget::{Budget, BudgetError, Cancel, heap};
use crate::install::{Names, Shared, Source};
use crate::layer::tar::{Archive, Kind};
use crate::manifest::{self, Descriptor, Document, MAX_CONFIG, MAX_MANIFEST, ManifestError, RawDescriptor};
use crate::{ImageError, Loaded, Reference};
use nacelle_base::files::at;
use nacelle_base::task::run_blocking;
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
const MEMBER: u64 = 128;
/// The memory in bytes that a layer takes in a plan: its digest and its boxed stream.
const LAYER: u64 = 256;

/// Loads all images of an archive. `name` is an additional name if the archive has only one image.
pub async fn load(shared: &Arc<Shared>, path: &Path, name: Option<&Reference>) -> Result<Vec<Loaded>, ImageError> {
    let (opened, pool, cancel) = (path.to_owned(), Arc::clone(&shared.pool), Cancel::default());
    let _cancelled_with_this_future = cancel.on_drop();
    // The budget lives until all images are installed.
    let (plans, path, _budget) = run_blocking("read an image archive", move || {
        let mut budget = Budget::archive(&pool, &cancel);
        let container = Container::open(&opened, &mut budget)?;
        Ok::<_, ImageError>((plans(&container, &mut budget)?, opened, budget))
    })
    .await??;
    if plans.is_empty() {
        return Err(ImageError::Archive { path, why: "it holds no image for this machine" });
    }
    if name.is_some() && plans.len() > 1 {
        return Err(ImageError::Archive { path, why: "it holds several images, which cannot all get the one name" });
    }
    let mut loaded = Vec::new();
    for mut plan in plans {
        plan.names.tags.extend(name.map(Reference::to_string));
        let id = plan.id;
        if !shared.name(id, plan.names.clone()).await? {
            shared.install(plan.config, plan.layers, plan.names).await?;
        }
        let names = shared.published.images().get(&id).map(|stored| stored.tags.iter().cloned().collect());
        loaded.push(Loaded { id, names: names.unwrap_or_default() });
    }
    Ok(loaded)
}

/// One image, ready to be installed.
struct Plan {
    /// The digest of the configuration.
    id: Digest,
    config: Vec<u8>,
    layers: Vec<(Digest, Source)>,
    names: Names,
}

fn plans(container: &Container, budget: &mut Budget) -> Result<Vec<Plan>, ImageError> {
    let mut plans = Plans { container, budget, all: Vec::new() };
    if let Some(index) = container.small("index.json", MAX_MANIFEST)? {
        let wrong = |source| container.wrong("index.json", source);
        let images = manifest::parse_layout_index(&index).map_err(wrong)?;
        let images: Vec<_> = images.iter().filter(|image| image.is_image()).collect();
        plans.check_count(images.len())?;
        for image in images {
            plans.add(layout_plan(container, image)?)?;
        }
        return Ok(plans.all);
    }
    if let Some(list) = container.small("manifest.json", MAX_MANIFEST)? {
        let images = manifest::parse_archive(&list).map_err(|source| container.wrong("manifest.json", source))?;
        plans.check_count(images.len())?;
        for image in &images {
            plans.add(docker_plan(container, image)?)?;
        }
        return Ok(plans.all);
    }
    let why = "it is neither an OCI layout (no index.json) nor a docker archive (no manifest.json)";
    Err(ImageError::Archive { path: container.path().to_owned(), why })
}

/// The plans for an archive's images, each image once.
struct Plans<'c> {
    container: &'c Container,
    budget: &'c mut Budget,
    all: Vec<Plan>,
}

impl Plans<'_> {
    fn check_count(&self, images: usize) -> Result<(), ImageError> {
        if images > MAX_IMAGES {
            let why = "it holds more than 1000 images";
            return Err(ImageError::Archive { path: self.container.path().to_owned(), why });
        }
        Ok(())
    }

    /// Adds a plan. The same image under several names is one plan.
    fn add(&mut self, plan: Plan) -> Result<(), ImageError> {
        self.budget.step(1).map_err(|source| self.container.over(source))?;
        match self.all.iter_mut().find(|other| other.id == plan.id) {
            Some(other) => {
                other.names.tags.extend(plan.names.tags);
                other.names.digests.extend(plan.names.digests);
            }
            None => {
                let bytes = heap(plan.config.capacity()) + plan.layers.len() as u64 * LAYER;
                self.budget.charge(bytes).map_err(|source| self.container.over(source))?;
                self.all.push(plan);
            }
        }
        Ok(())
    }
}

fn layout_plan(container: &Container, image: &RawDescriptor) -> Result<Plan, ImageError> {
    let named = image.check().map_err(|source| container.wrong("index.json", source))?;
    let mut descriptor = named.clone();
    for _ in 0..3 {
        let bytes = container.blob(&descriptor, MAX_MANIFEST)?;
        let what = format!("manifest {}", descriptor.digest);
        match manifest::parse(&bytes).map_err(|source| container.wrong(&what, source))? {
            Document::Index(ours) => descriptor = ours,
            Document::Manifest(manifest) => {
                let config = container.blob(&manifest.config, MAX_CONFIG)?;
                let what = format!("configuration {}", manifest.config.digest);
                let wrong = |source| container.wrong(&what, source);
                let (_, diff_ids) = manifest::parse_config(&config).map_err(wrong)?;
                let mut layers = Vec::new();
                for (blob, diff_id) in manifest::pair(&manifest, &diff_ids).map_err(wrong)? {
                    let member = container.need(&blob_name(blob.digest))?;
                    layers.push((diff_id, Source::Archive(Box::new(member.take(blob.size)), Some(blob.digest))));
                }
                let name = name_in(image);
                let digests = name.iter().map(|name| name.with_digest(named.digest).to_string()).collect();
                let tags = name.iter().filter(|name| name.tag().is_some()).map(Reference::to_string).collect();
                return Ok(Plan { id: Digest::of(&config), config, layers, names: Names { tags, digests } });
            }
        }
    }
    Err(container.wrong("index.json", ManifestError::Kind { kind: "an index of indexes of indexes".to_owned() }))
}

/// Returns the full name that a layout gives an image; `None` for a bare tag.
fn name_in(image: &RawDescriptor) -> Option<Reference> {
    let annotation = |key| image.annotations.as_ref().and_then(|all| all.get(key));
    let whole = annotation("io.containerd.image.name");
    let name =
        whole.or_else(|| annotation("org.opencontainers.image.ref.name").filter(|name| name.contains([':', '/'])));
    name.and_then(|name| Reference::parse(name).ok())
}

fn docker_plan(container: &Container, image: &manifest::ArchiveImage) -> Result<Plan, ImageError> {
    let mut config = Vec::new();
    let limit = io::Read::take(container.need(&image.config)?, MAX_CONFIG + 1).read_to_end(&mut config);
    if limit.map_err(at("read", container.path()))? as u64 > MAX_CONFIG {
        return Err(ImageError::TooLarge { what: image.config.clone(), limit: MAX_CONFIG });
    }
    let wrong = |source| container.wrong(&image.config, source);
    let (_, diff_ids) = manifest::parse_config(&config).map_err(wrong)?;
    if diff_ids.len() != image.layers.len() {
        return Err(wrong(ManifestError::Layers { layers: image.layers.len(), diff_ids: diff_ids.len() }));
    }
    let mut layers = Vec::new();
    for (diff_id, name) in diff_ids.iter().zip(&image.layers) {
        layers.push((*diff_id, Source::Archive(Box::new(container.need(name)?), None)));
    }
    let tags = image.repo_tags.iter().flatten().map(|tag| Ok(Reference::parse(tag)?.to_string()));
    let tags = tags.collect::<Result<_, ImageError>>()?;
    Ok(Plan { id: Digest::of(&config), config, layers, names: Names { tags, digests: Vec::new() } })
}

fn blob_name(digest: Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// A directory or archive with members.
enum Container {
    Directory(PathBuf),
    Tar { path: PathBuf, file: Arc<File>, members: HashMap<Vec<u8>, (u64, u64)> },
}

/// A part of a file.
struct Member {
    file: Arc<File>,
    at: u64,
    left: u64,
}

impl Read for Member {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let got = self.file.read_at(buffer.get_mut(..length).unwrap_or_default(), self.at)?;
        self.at += got as u64;
        self.left -= got as u64;
        Ok(got)
    }
}

impl Container {
    fn open(path: &Path, budget: &mut Budget) -> Result<Container, ImageError> {
        let file = File::open(path).map_err(at("open", path))?;
        if file.metadata().map_err(at("read", path))?.is_dir() {
            return Ok(Container::Directory(path.to_owned()));
        }
        let read_error = |source| ImageError::ArchiveRead { path: path.to_owned(), source };
        let mut archive = Archive::new(BufReader::new(&file));
        let (mut members, mut links) = (HashMap::new(), Vec::new());
        let over = |source| ImageError::ArchiveBudget { path: path.to_owned(), source };
        while let Some(header) = archive.next().map_err(read_error)? {
            budget.step(1).map_err(over)?;
            budget
                .charge(MEMBER + heap(header.path.len()) + heap(header.path.len() + header.link.len()))
                .map_err(over)?;
            let name = crate::layer::clean(&header.path).join(&b'/');
            match header.kind {
                Kind::File if header.sparse.is_none() => {
                    members.insert(name, (header.data_at, header.size));
                }
                // `docker save` writes a layer of several images once and links to it.
                Kind::Symlink => links.push(([&name[..], b"/../", &header.link].concat(), name)),
                Kind::Hardlink => links.push((header.link, name)),
                _ => {}
            }
            if members.len() + links.len() > MAX_MEMBERS {
                return Err(ImageError::Archive { path: path.to_owned(), why: "it has too many members" });
            }
            archive.jump().map_err(read_error)?;
        }
        for (target, name) in links {
            if let Some(&member) = members.get(&crate::layer::clean(&target).join(&b'/')) {
                members.entry(name).or_insert(member);
            }
        }
        Ok(Container::Tar { path: path.to_owned(), file: Arc::new(file), members })
    }

    fn path(&self) -> &Path {
        match self {
            Container::Directory(path) | Container::Tar { path, .. } => path,
        }
    }

    fn over(&self, source: BudgetError) -> ImageError {
        ImageError::ArchiveBudget { path: self.path().to_owned(), source }
    }

    fn wrong(&self, what: &str, source: ManifestError) -> ImageError {
        ImageError::Manifest { what: format!("{what} of {}", self.path().display()), source }
    }

    fn member(&self, name: &str) -> Result<Option<Member>, ImageError> {
        let parts = crate::layer::clean(name.as_bytes());
        match self {
            Container::Tar { file, members, .. } => Ok(members
                .get(parts.join(&b'/').as_slice())
                .map(|&(at, left)| Member { file: Arc::clone(file), at, left })),
            Container::Directory(directory) => {
                let path = directory.join(String::from_utf8_lossy(&parts.join(&b'/')).as_ref());
                match File::open(&path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                    file => {
                        Ok(Some(Member { file: Arc::new(file.map_err(at("open", &path))?), at: 0, left: u64::MAX }))
                    }
                }
            }
        }
    }

    fn need(&self, name: &str) -> Result<Member, ImageError> {
        let missing = || ImageError::Archive { path: self.path().to_owned(), why: "a part that it names is not in it" };
        self.member(name)?.ok_or_else(missing)
    }

    fn small(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, ImageError> {
        let Some(member) = self.member(name)? else { return Ok(None) };
        let mut bytes = Vec::new();
        member.take(limit + 1).read_to_end(&mut bytes).map_err(at("read", self.path()))?;
        if bytes.len() as u64 > limit {
            return Err(ImageError::TooLarge { what: name.to_owned(), limit });
        }
        Ok(Some(bytes))
    }

    /// Returns a small blob of a layout, verified.
    fn blob(&self, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>, ImageError> {
        let name = blob_name(descriptor.digest);
        let bytes = self.small(&name, limit)?;
        let missing = || ImageError::Archive { path: self.path().to_owned(), why: "a part that it names is not in it" };
        let bytes = bytes.ok_or_else(missing)?;
        match Digest::of(&bytes) {
            got if got == descriptor.digest => Ok(bytes),
            got => Err(ImageError::Digest { what: format!("{name} in {}", self.path().display()), got }),
        }
    }
}
