//! Makes the image of the container with which a template is rehearsed: a program that only sleeps.

use nacelle_image::{SmallImageError, write_small_image};
use nacelle_pod::template::PROGRAM;

/// The address at which the program is loaded.
const ADDRESS: u64 = 0x40_0000;
const HEADER_BYTES: u16 = 64;
const SEGMENT_BYTES: u16 = 56;
/// `pause()` (system call 34), for ever: mov eax, 34; syscall; jmp -9.
const CODE: [u8; 9] = [0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];

/// Returns the image, with the program [`PROGRAM`].
pub(super) fn rehearsal_image() -> Result<Vec<u8>, SmallImageError> {
    write_small_image(&[(PROGRAM.trim_start_matches('/'), &idle_program())])
}

/// Returns a static program for x86-64 (System V ABI, ELF-64 object file format): its header, one segment, and the code.
fn idle_program() -> Vec<u8> {
    const EXECUTABLE: u16 = 2;
    const X86_64: u16 = 62;
    const LOAD: u32 = 1;
    const READ_EXECUTE: u32 = 5;
    const PAGE: u64 = 4096;
    let code_at = u64::from(HEADER_BYTES + SEGMENT_BYTES);
    let length = code_at + CODE.len() as u64;
    let mut program = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    program.extend([EXECUTABLE, X86_64].map(u16::to_le_bytes).concat());
    program.extend(1_u32.to_le_bytes());
    // Entry point, position of the segments, and that of the sections, of which there are none.
    program.extend([ADDRESS + code_at, HEADER_BYTES.into(), 0].map(u64::to_le_bytes).concat());
    program.extend(0_u32.to_le_bytes());
    program.extend([HEADER_BYTES, SEGMENT_BYTES, 1, 0, 0, 0].map(u16::to_le_bytes).concat());
    program.extend([LOAD, READ_EXECUTE].map(u32::to_le_bytes).concat());
    program.extend([0, ADDRESS, ADDRESS, length, length, PAGE].map(u64::to_le_bytes).concat());
    program.extend(CODE);
    program
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn the_program_runs_until_it_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("idle");
        fs::write(&path, idle_program()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let mut child = Command::new(&path).spawn().unwrap();
        let sleeps =
            || fs::read_to_string(format!("/proc/{}/syscall", child.id())).is_ok_and(|call| call.starts_with("34 "));
        let deadline = Instant::now() + Duration::from_secs(20);
        while !sleeps() {
            assert!(Instant::now() < deadline, "it is not in pause()");
            std::thread::yield_now();
        }
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
        assert!(rehearsal_image().unwrap().len().is_multiple_of(4096));
    }
}
