//! Tests copies of a disk that are made while the guest writes to it.

#[allow(dead_code, reason = "each test file uses a part of it")]
mod guest;

use guest::FrontEnd;
use guest::disk::{DISCARD, WRITE, ZEROES, request};
use nacelle_vmm::block::{BlockError, CopiedDisk, DiskCopy, Slot};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

const PAGE: u64 = 4096;
const SECTORS: u64 = PAGE / 512;
/// The size of the disk: more than one unit of copying, and not a multiple of a page.
const SIZE: u64 = (3 << 20) + 512;
static NO_STOP: AtomicBool = AtomicBool::new(false);

/// A disk in whose every fourth page there is a hole, and its guest.
struct World {
    directory: TempDir,
    path: PathBuf,
    slot: Slot,
    front_end: FrontEnd,
}

impl World {
    fn new(directory: TempDir) -> World {
        let path = directory.path().join("disk");
        let file = File::create(&path).unwrap();
        file.set_len(SIZE).unwrap();
        for page in (0..SIZE / PAGE).filter(|page| page % 4 != 0) {
            file.write_all_at(&[page as u8 | 1; PAGE as usize], page * PAGE).unwrap();
        }
        file.write_all_at(&[0xee; 512], SIZE - 512).unwrap();
        let slot = Slot::read_write("scratch", &path, SIZE).unwrap();
        let front_end = FrontEnd::new(slot.device(), 1);
        World { directory, path, slot, front_end }
    }

    fn content(&self) -> Vec<u8> {
        std::fs::read(&self.path).unwrap()
    }

    fn target(&self) -> PathBuf {
        self.directory.path().join("copy")
    }

    fn begin(&self) -> DiskCopy {
        self.slot.prepare_copy(create(&self.target())).unwrap().begin().unwrap()
    }

    fn write(&mut self, page: u64, bytes: &[u8]) {
        assert_eq!(request(&mut self.front_end, WRITE, page * SECTORS, bytes, 0).0, 0);
    }

    /// Discards or zeroes pages.
    fn clear(&mut self, kind: u32, page: u64, pages: u32) {
        let sectors = pages * SECTORS as u32;
        let range = [&(page * SECTORS).to_le_bytes()[..], &sectors.to_le_bytes(), &0u32.to_le_bytes()].concat();
        assert_eq!(request(&mut self.front_end, kind, 0, &range, 0).0, 0);
    }
}

fn create(path: &Path) -> File {
    File::options().read(true).write(true).create_new(true).open(path).unwrap()
}

#[test]
fn a_copy_holds_what_the_disk_held_when_it_began() {
    let mut world = World::new(tempfile::tempdir().unwrap());
    let before = world.content();
    let copy = world.begin();
    world.write(1, &[0xaa; PAGE as usize]);
    world.write(4, &[0xab; PAGE as usize]); // a hole before
    world.write(9, &[0xac; 512]); // a part of a page
    world.write(254, &[0xad; 4 * PAGE as usize]); // in two units of copying
    world.clear(DISCARD, 20, 5);
    world.clear(ZEROES, 30, 5);
    assert!(world.content()[20 * PAGE as usize..25 * PAGE as usize] == before[20 * PAGE as usize..25 * PAGE as usize]);
    world.clear(DISCARD, 30, 5); // it is copied
    world.write(21, &[0xae; PAGE as usize]);
    assert_eq!(request(&mut world.front_end, WRITE, SIZE / 512 - 1, &[0xaf; 512], 0).0, 0);
    let after = world.content();
    world.slot.resize(SIZE + (1 << 20)).unwrap();
    let copied = copy.finish(&NO_STOP).unwrap();
    assert!(std::fs::read(world.target()).unwrap() == before, "as it was");
    assert!(world.content()[..SIZE as usize] == after, "the disk is as the guest has written it");
    let kib = std::fs::metadata(world.target()).unwrap().blocks() / 2;
    assert!(kib <= 3 * 1024 * 3 / 4 + 64, "holes stay holes: {kib} KiB");
    // Pages 1, 9, 254, 255, 257, 21, 30, 31, 33, 34, and a sector; the pages 4, 32 and 256 were holes.
    assert_eq!(copied, CopiedDisk { copied: 576 * PAGE + 512, preserved: 10 * PAGE + 512 });

    // What is written now is not preserved, and the next copy has it.
    world.write(1, &[0xba; PAGE as usize]);
    assert!(std::fs::read(world.target()).unwrap() == before, "a complete copy does not change");
    std::fs::remove_file(world.target()).unwrap();
    let now = world.content();
    world.begin().finish(&NO_STOP).unwrap();
    assert!(std::fs::read(world.target()).unwrap() == now);
}

#[test]
fn a_disk_is_copied_while_the_guest_writes() {
    let mut world = World::new(tempfile::tempdir().unwrap());
    for round in 0..4 {
        let before = world.content();
        let copy = world.begin();
        let copied = std::thread::scope(|scope| {
            let copied = scope.spawn(|| copy.finish(&NO_STOP).unwrap());
            let mut page = round;
            for number in 0..40 {
                page = (page * 31 + 17) % (SIZE / PAGE - 2);
                match number % 4 {
                    3 => world.clear(DISCARD, page, 2),
                    _ => world.write(page, &[number as u8 ^ 0xff; 5000 / 512 * 512]),
                }
            }
            copied.join().unwrap()
        });
        assert!(std::fs::read(world.target()).unwrap() == before, "round {round}");
        assert!(copied.preserved <= copied.copied);
        std::fs::remove_file(world.target()).unwrap();
    }
}

#[test]
fn a_copy_that_fails_does_not_fail_the_guest() {
    let mut world = World::new(tempfile::tempdir().unwrap());
    let copy = {
        let sealed = File::from(memfd_create("copy", MFdFlags::MFD_ALLOW_SEALING).unwrap());
        let prepared = world.slot.prepare_copy(sealed.try_clone().unwrap()).unwrap();
        fcntl(&sealed, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)).unwrap();
        prepared.begin().unwrap()
    };
    let other = world.slot.prepare_copy(create(&world.target())).unwrap().begin();
    assert!(matches!(other, Err(BlockError::Copying { .. })), "{other:?}");
    world.write(1, &[0xaa; PAGE as usize]);
    world.write(2, &[0xab; PAGE as usize]);
    let failed = copy.finish(&NO_STOP);
    assert!(matches!(&failed, Err(BlockError::Copy { source, .. }) if source.raw_os_error() == Some(libc::EPERM)));

    // Another one is stopped, a third one abandoned; both end for the guest.
    std::fs::remove_file(world.target()).unwrap();
    let stopped = world.begin().finish(&AtomicBool::new(true));
    assert!(matches!(stopped, Err(BlockError::CopyStopped { .. })), "{stopped:?}");
    std::fs::remove_file(world.target()).unwrap();
    drop(world.begin());
    world.write(5, &[0xac; PAGE as usize]);
    assert_eq!(std::fs::metadata(world.target()).unwrap().blocks(), 0, "nothing was preserved for it");

    let images = Slot::read_only("images").unwrap();
    let refused = images.prepare_copy(create(&world.directory.path().join("images")));
    assert!(matches!(refused, Err(BlockError::WrongKind { operation: "copy", .. })), "{refused:?}");
}

/// A mounted file system whose files can share blocks.
struct XfsMount {
    directory: TempDir,
}

impl XfsMount {
    /// Returns `None` where such a file system cannot be made or mounted.
    fn new() -> Option<XfsMount> {
        let directory = tempfile::tempdir().unwrap();
        let (image, mounted) = (directory.path().join("image"), directory.path().join("mounted"));
        File::create(&image).unwrap().set_len(512 << 20).unwrap();
        std::fs::create_dir(&mounted).unwrap();
        let is_made = run(Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&image));
        let is_mounted = is_made && run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mounted));
        is_mounted.then_some(XfsMount { directory })
    }

    fn new_directory(&self) -> TempDir {
        tempfile::tempdir_in(self.directory.path().join("mounted")).unwrap()
    }
}

impl Drop for XfsMount {
    fn drop(&mut self) {
        run(Command::new("umount").arg("--lazy").arg(self.directory.path().join("mounted")));
    }
}

fn run(command: &mut Command) -> bool {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    command.env("PATH", path).output().is_ok_and(|output| output.status.success())
}

#[test]
fn a_copy_shares_the_blocks_of_the_disk_where_that_is_possible() {
    let Some(mount) = XfsMount::new() else {
        println!("skipped: xfs cannot be mounted here");
        return;
    };
    let mut world = World::new(mount.new_directory());
    let prepared = world.slot.prepare_copy(create(&world.target())).unwrap();
    world.write(1, &[0xa9; PAGE as usize]);
    let before = world.content();
    let copy = prepared.begin().unwrap();
    world.write(1, &[0xaa; PAGE as usize]);
    world.slot.resize(SIZE + (1 << 20)).unwrap();
    assert_eq!(copy.finish(&NO_STOP).unwrap(), CopiedDisk::default());
    assert!(std::fs::read(world.target()).unwrap() == before);
}
