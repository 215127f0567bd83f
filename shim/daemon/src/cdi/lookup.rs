//! Finds devices in the specifications of directories. Blocks on files that other programs have written.

use super::CdiError;
use super::spec::{CdiDevice, CdiSpec, MAX_FILE, SpecFormat};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The largest number of specifications in one directory.
const MAX_FILES: usize = 256;
/// The largest number of files that are read from one directory, invalid ones included.
const MAX_TRIED: usize = 4096;
/// The largest number of skipped files that an error names.
const MAX_SKIPPED: usize = 8;

/// A specification with its file.
pub(super) type SpecFile = (PathBuf, CdiSpec);

/// A device with its specification and the specification's file.
pub(super) type FoundDevice<'a> = (&'a PathBuf, &'a CdiSpec, &'a CdiDevice);

/// Returns the only device of this name in a directory's specifications.
pub(super) fn find_device<'a>(
    specs: &'a [SpecFile],
    name: &str,
    kind: &str,
    device: &str,
) -> Result<Option<FoundDevice<'a>>, CdiError> {
    let of_kind = specs.iter().filter(|(_, spec)| spec.kind == kind);
    let mut found = of_kind.flat_map(|(path, spec)| spec.devices.iter().map(move |device| (path, spec, device)));
    let mut found = found.by_ref().filter(|(_, _, found)| found.name == device);
    match (found.next(), found.next()) {
        (Some((one, ..)), Some((other, ..))) => {
            Err(CdiError::Ambiguous { name: name.to_owned(), one: one.clone(), other: other.clone() })
        }
        (first, _) => Ok(first),
    }
}

/// Returns the specifications in a directory, sorted by file name. Invalid files are skipped and added to `skipped_files`.
pub(super) fn read_specs(directory: &Path, skipped_files: &mut Vec<String>) -> Vec<SpecFile> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let (mut specs, mut tried) = (Vec::new(), 0);
    for path in paths {
        let read = match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => read_spec(&path, SpecFormat::Json, &mut tried, specs.len()),
            Some("yaml") => read_spec(&path, SpecFormat::Yaml, &mut tried, specs.len()),
            Some("yml") => Err(io::Error::other("only .json and .yaml files are read")),
            _ => continue,
        };
        match read {
            Ok(spec) => specs.push((path, spec)),
            Err(why) if skipped_files.len() < MAX_SKIPPED => {
                skipped_files.push(format!("skipped {}: {why}", path.display()));
            }
            Err(_) => {}
        }
    }
    specs
}

/// Reads a file. `tried` is the number of files of the directory that were read, `valid` that of the specifications.
fn read_spec(path: &Path, format: SpecFormat, tried: &mut usize, valid: usize) -> io::Result<CdiSpec> {
    if valid == MAX_FILES || *tried == MAX_TRIED {
        return Err(io::Error::other(format!("more than {MAX_FILES} specifications, or {MAX_TRIED} files")));
    }
    *tried += 1;
    // Opening a pipe would block without this flag.
    let file = File::options().read(true).custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut text = Vec::new();
    file.take(MAX_FILE as u64 + 1).read_to_end(&mut text)?;
    CdiSpec::parse(&text, format)
}
