//! Names templates: a template may be used only on the CPU, with the kernel, initramfs and program, and for the shape of VM and the
//! namespace for which it was built. All of that is in its key.

use nacelle_base::files::{FileError, at};
use nacelle_model::digest::Digest;
use nacelle_pod::template::TemplateShape;
use serde::Serialize;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The lines of /proc/cpuinfo that tell CPUs apart. Others change from one reading to the next, or differ between the CPUs of a node.
const CPU_LINES: [&str; 6] = ["vendor_id", "cpu family", "model", "stepping", "microcode", "flags"];

/// The length of a key.
const KEY_DIGITS: usize = 16;

/// The key of a template: the name of its directory, 16 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TemplateKey(String);

impl fmt::Display for TemplateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TemplateKey {
    /// Parses the name of a directory.
    pub(crate) fn parse(name: &str) -> Option<TemplateKey> {
        let digits = name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        (name.len() == KEY_DIGITS && digits).then(|| TemplateKey(name.to_owned()))
    }
}

/// What identifies a version of a file without reading it.
#[derive(Serialize)]
struct FileVersion {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileVersion {
    fn of(path: &Path) -> Result<FileVersion, FileError> {
        let file = path.metadata().map_err(at("stat", path))?;
        Ok(FileVersion {
            device: file.dev(),
            inode: file.ino(),
            bytes: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }
}

/// What the keys of all templates of a node have in common.
pub(crate) struct KeyBase {
    /// The program that builds templates and runs pods.
    program: PathBuf,
    /// The CPU and the node's kernel.
    node: Vec<String>,
}

/// All that is in a key.
#[derive(Serialize)]
struct KeyContent<'a> {
    version: &'static str,
    snapshot_format: u32,
    node: &'a [String],
    files: [FileVersion; 3],
    shape: &'a TemplateShape,
    namespace: Option<&'a str>,
}

impl KeyBase {
    /// Reads what identifies this node; blocks for a moment.
    pub(crate) fn read(program: PathBuf) -> KeyBase {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut node = vec![release.trim().to_owned()];
        node.extend(node_cpu());
        KeyBase { program, node }
    }

    /// Returns the key of the template for VMs of this shape, for all namespaces or for one. Blocks for a moment.
    pub(crate) fn key(&self, shape: &TemplateShape, namespace: Option<&str>) -> Result<TemplateKey, FileError> {
        let files = [&self.program, &shape.kernel, &shape.initrd];
        let [program, kernel, initrd] = files.map(|path| FileVersion::of(path));
        let content = KeyContent {
            version: env!("CARGO_PKG_VERSION"),
            snapshot_format: nacelle_engine::SNAPSHOT_VERSION,
            node: &self.node,
            files: [program?, kernel?, initrd?],
            shape,
            namespace,
        };
        // Numbers, texts and lists of them cannot fail.
        let text = serde_json::to_vec(&content).unwrap_or_default();
        Ok(TemplateKey(Digest::of(&text).hex().chars().take(KEY_DIGITS).collect()))
    }
}

/// Returns the lines of `/proc/cpuinfo` that tell CPUs apart, of the node's first CPU. Blocks for a moment.
pub(crate) fn node_cpu() -> Vec<String> {
    cpu_lines(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default()).collect()
}

/// Returns the lines of the first CPU that tell CPUs apart.
fn cpu_lines(text: &str) -> impl Iterator<Item = String> + '_ {
    let first = text.lines().take_while(|line| !line.is_empty());
    let known = |line: &&str| line.split_once(':').is_some_and(|(name, _)| CPU_LINES.contains(&name.trim_end()));
    first.filter(known).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::machine::ConsoleKind;

    #[test]
    fn a_key_changes_with_all_that_a_template_depends_on() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, name).unwrap();
            path
        };
        let base = KeyBase { program: file("program"), node: vec!["flags\t: fpu".into()] };
        let shape = TemplateShape {
            vcpus: 1,
            max_vcpus: 1,
            memory_mib: 256,
            console: ConsoleKind::Serial,
            kernel: file("kernel"),
            initrd: file("initrd"),
            kernel_args: vec![],
        };
        let key = base.key(&shape, None).unwrap();
        assert_eq!(TemplateKey::parse(&key.to_string()), Some(key.clone()));
        assert_eq!(base.key(&shape, None).unwrap(), key);
        let mut keys = vec![key];
        keys.push(base.key(&shape, Some("default")).unwrap());
        keys.push(base.key(&TemplateShape { vcpus: 2, max_vcpus: 2, ..shape.clone() }, None).unwrap());
        keys.push(base.key(&TemplateShape { memory_mib: 512, ..shape.clone() }, None).unwrap());
        keys.push(base.key(&TemplateShape { kernel_args: vec!["debug".into()], ..shape.clone() }, None).unwrap());
        let other = KeyBase { program: base.program.clone(), node: vec!["flags\t: fpu avx".into()] };
        keys.push(other.key(&shape, None).unwrap());
        // An upgrade replaces a file.
        for name in ["kernel", "initrd", "program"] {
            std::fs::write(directory.path().join("new"), name).unwrap();
            std::fs::rename(directory.path().join("new"), directory.path().join(name)).unwrap();
            keys.push(base.key(&shape, None).unwrap());
        }
        let count = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), count);
        std::fs::remove_file(directory.path().join("kernel")).unwrap();
        let error = base.key(&shape, None).unwrap_err();
        assert_eq!(error.path, directory.path().join("kernel"));
    }

    #[test]
    fn only_keys_are_names_of_templates() {
        for name in ["", "a", "building", "0123456789abcdeF", "../456789abcdef0", "0123456789abcdef0"] {
            assert_eq!(TemplateKey::parse(name), None, "{name}");
        }
    }

    #[test]
    fn the_speed_of_a_cpu_is_no_part_of_it() {
        let text = "processor\t: 0\nvendor_id\t: X\ncpu MHz\t\t: 1\nflags\t\t: fpu\n\nprocessor\t: 1\nflags\t\t: avx\n";
        assert_eq!(cpu_lines(text).collect::<Vec<_>>(), ["vendor_id\t: X", "flags\t\t: fpu"]);
    }
}
