//! Defines the fuzz harnesses for what the agent reads from the pod process, and from the image of a container. ci/fuzz calls them; the
//! tests run the committed corpus (`tests/corpus/TARGET/*`). A harness fails by a panic, by an effect outside of its directory, or by a
//! cost that does not follow from the input.

use crate::container::spec::{PidNamespace, SpecContext, adjust_spec, derive_exec_process, parse_spec};
use crate::container::user::{MAX_ID, check_ids, find_user, list_memberships, user_with_ids};
use crate::copied_in::{CopiedInVolumeError, CopiedInVolumes, VolumeDraft};
use crate::{frame, paths};
use libcontainer::oci_spec::runtime::LinuxNamespaceType;
use nacelle_base::allocations::AllocationLimit;
use nacelle_proto::agent::{BootConfig, StreamOpen, TreeEntry, WriteVolumeRequest};
use nacelle_proto::wire::{self, Shaped};
use prost::Message;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs;
use std::path::Path;

/// The cost of reading a frame: twice its bytes while the buffer grows, and the message.
const FRAME_LIMIT: AllocationLimit =
    AllocationLimit { base: 8 << 10, per_byte: 600, base_count: 60, count_per_byte: 2 };
/// The cost of an OCI specification: two bytes can become an element of a list that doubles. It is copied twice.
const SPEC_LIMIT: AllocationLimit =
    AllocationLimit { base: 32 << 10, per_byte: 900, base_count: 400, count_per_byte: 8 };
/// The cost of looking a user up: its names, which may be all of the input, twice.
const USER_LIMIT: AllocationLimit = AllocationLimit { base: 256, per_byte: 4, base_count: 4, count_per_byte: 0 };
/// The cost of the groups: four bytes name one, and the list doubles.
const GROUP_LIMIT: AllocationLimit = AllocationLimit { base: 64, per_byte: 12, base_count: 32, count_per_byte: 0 };

/// Reads the bytes as a framed message, from a blocking and from an asynchronous stream.
pub fn agent_frames(data: &[u8]) {
    read_frame::<StreamOpen>(data);
    read_frame::<BootConfig>(data);
}

fn read_frame<M: Message + Shaped + Default + PartialEq + Debug>(data: &[u8]) {
    let blocking = FRAME_LIMIT.enforce(data.len(), || frame::read::<M>(&mut &*data));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let read = async { frame::read_async::<M>(&mut &*data).await };
    let other = FRAME_LIMIT.enforce(data.len(), || runtime.block_on(read));
    match (blocking, other) {
        (Ok(one), Ok(other)) => assert_eq!(one, other),
        (Err(one), Err(other)) => assert_eq!(one.is_hung_up(), other.is_hung_up()),
        (one, other) => panic!("{one:?} and {other:?}"),
    }
}

/// Reads the bytes as the OCI specification of a container, and adjusts it to a guest.
pub fn oci_spec(data: &[u8]) {
    let Ok(spec) = SPEC_LIMIT.enforce(data.len(), || parse_spec(data)) else { return };
    let user = user_with_ids(5, 6, "");
    for (pid, users) in [
        (PidNamespace::Own, None),
        (PidNamespace::Of(42), Some(true)),
        (PidNamespace::Named, Some(false)),
        (PidNamespace::Node, None),
    ] {
        let context = SpecContext {
            id: "c1",
            root: Path::new("/r"),
            pid,
            user: &user,
            groups: &[6, 7],
            volumes: Vec::new(),
            capabilities: 1 << 5,
            oom_score_adj: 0,
            users,
        };
        let Ok(adjusted) = SPEC_LIMIT.enforce(data.len(), || adjust_spec(spec.clone(), context)) else { continue };
        assert_eq!(adjusted.root().as_ref().map(|root| root.path().as_path()), Some(Path::new("/r")));
        assert!(adjusted.hooks().is_none() && adjusted.hostname().is_none());
        let linux = adjusted.linux().as_ref().expect("it has one");
        assert_eq!(linux.cgroups_path().as_deref(), Some(Path::new(paths::POD_CGROUP).join("c1").as_path()));
        let namespaces = linux.namespaces().iter().flatten();
        for namespace in namespaces {
            let own = [paths::USER_NAMESPACE, paths::PID_NAMESPACE, "/proc/42/ns/pid"].map(Path::new);
            assert!(namespace.path().as_ref().is_none_or(|path| own.contains(&path.as_path())), "{namespace:?}");
            assert!(namespace.typ() != LinuxNamespaceType::Network, "{namespace:?}");
        }
        let process = adjusted.process().as_ref().expect("it has one");
        assert_eq!((process.user().uid(), process.user().gid()), (5, 6));
        let capabilities = process.capabilities().as_ref().and_then(|sets| sets.effective().as_ref());
        assert!(capabilities.is_none_or(|set| set.len() <= 1), "{capabilities:?}");
        let exec = derive_exec_process(process, vec!["sh".to_owned()], true);
        assert_eq!(exec.user().uid(), 5);
    }
}

/// Finds a user in the files of an image: the requested user, /etc/passwd and /etc/group, with a zero byte between them.
pub fn users(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut parts = text.splitn(3, '\0');
    let [requested, passwd, group] = [(); 3].map(|()| parts.next().unwrap_or_default());
    let Ok(user) = USER_LIMIT.enforce(text.len(), || find_user(requested, passwd, group)) else { return };
    assert!(user.home.as_ref().is_none_or(|home| home.starts_with('/')));
    assert!(user.name.as_ref().is_none_or(|name| passwd.contains(name)));
    let groups = user.name.as_ref().map(|name| GROUP_LIMIT.enforce(text.len(), || list_memberships(name, group)));
    let numbers = groups.into_iter().flatten().chain([user.uid, user.gid]);
    if check_ids(numbers.clone(), None).is_ok() {
        assert!(numbers.into_iter().all(|number| number <= MAX_ID));
    }
    USER_LIMIT.enforce(text.len(), || user_with_ids(user.uid, user.gid, passwd));
}

/// Writes a copied-in volume: messages, each behind its length in two bytes. A message that completes the volume publishes it, and the
/// next one begins its next state. Nothing outside of the volumes' directory changes.
pub fn volumes(data: &[u8]) {
    let outer = memory_directory();
    let (directory, secret) = (outer.path().join("volumes"), outer.path().join("secret"));
    fs::create_dir(&directory).expect("the directory is new");
    fs::write(&secret, "secret").expect("the directory is new");
    write_volumes(&CopiedInVolumes::in_directory(&directory), data);
    let names = |path: &Path| -> BTreeSet<String> {
        let names = fs::read_dir(path).expect("it is there");
        names.map(|name| name.expect("it can be read").file_name().to_string_lossy().into_owned()).collect()
    };
    assert_eq!(names(outer.path()), ["secret", "volumes"].map(str::to_owned).into());
    assert!(names(&directory).iter().all(|name| name == "v"), "{:?}", names(&directory));
    assert_eq!(fs::read(&secret).expect("it is there"), b"secret");
    assert_eq!(fs::metadata(&secret).expect("it is there").len(), 6);
    // Files of mode 0 would otherwise stay when this process is not root.
    fs::remove_dir_all(outer.path()).expect("it can be removed");
}

/// Returns a directory in memory, where syncing takes no time.
fn memory_directory() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    directory.expect("a temporary directory")
}

fn write_volumes(volumes: &CopiedInVolumes, mut data: &[u8]) {
    let mut draft = None;
    while let Some((length, rest)) = data.split_first_chunk::<2>() {
        let (message, rest) = rest.split_at(rest.len().min(usize::from(u16::from_le_bytes(*length))));
        data = rest;
        let Ok(WriteVolumeRequest { name: _, tree, complete }) = wire::decode(message) else { continue };
        let mut entries = tree.unwrap_or_default().entries;
        for entry in &mut entries {
            // Any other owner needs root, and a directory that its owner may not enter cannot be removed without root.
            (entry.uid, entry.gid) = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
            entry.mode |= 0o700;
        }
        draft = write_part(volumes, draft, entries, complete).unwrap_or_default();
    }
}

/// Writes the next entries as the server does; returns the draft of a volume that is not complete.
fn write_part(
    volumes: &CopiedInVolumes,
    draft: Option<VolumeDraft>,
    entries: Vec<TreeEntry>,
    complete: bool,
) -> Result<Option<VolumeDraft>, CopiedInVolumeError> {
    let mut draft = draft.map_or_else(|| volumes.begin("v"), Ok)?;
    draft.add(entries)?;
    if complete { draft.publish().map(|()| None) } else { Ok(Some(draft)) }
}

/// A fuzz harness.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 4] =
    [("agent_frames", agent_frames), ("oci_spec", oci_spec), ("users", users), ("volumes", volumes)];

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::allocations::CountingAllocator;
    use nacelle_base::corpus::{read_corpus, run_corpora, run_mutated_corpora};

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn the_corpus() {
        run_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS);
    }

    #[test]
    fn the_mutated_corpus() {
        run_mutated_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS, 512);
    }

    #[test]
    fn the_corpus_has_volumes_that_are_published() {
        let publishes = |data: &Vec<u8>| {
            let directory = tempfile::tempdir().unwrap();
            write_volumes(&CopiedInVolumes::in_directory(directory.path()), data);
            directory.path().join("v").exists()
        };
        assert!(read_corpus(env!("CARGO_MANIFEST_DIR"), "volumes").iter().filter(|data| publishes(data)).count() >= 3);
    }
}
