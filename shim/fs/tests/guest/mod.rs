//! Implements the guest of the tests: sends requests as bytes, over streams or over shared virtqueues.

#[path = "../../../vmm/tests/guest/mod.rs"]
#[allow(dead_code, reason = "written for other tests")]
mod front;

pub use front::{FrontEnd, Queue, eventually};
use nacelle_base::copied_in::{CopyInMessage, CopyInRequest};
use nacelle_base::descriptors::send_with_descriptor;
use nacelle_base::sockets::SocketClient;
use nacelle_fs::{
    FileServerChannels, FileServerConfig, FileServerProcess, ShareError, ShareLayout, VolumeTarget, VolumeToMount,
    mount_volumes, unmount_volumes,
};
use nacelle_jail::{Mode, SocketUse};
use nacelle_proto::agent::{Tree, TreeEntry};
use nacelle_vmm::fs::Fs;
use nix::sys::wait::waitpid;
use prost::Message;
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use vm_memory::{Bytes, GuestAddress};

const LOOKUP: u32 = 1;
pub const FORGET: u32 = 2;
pub const GETATTR: u32 = 3;
pub const SETATTR: u32 = 4;
const MKNOD: u32 = 8;
pub const UNLINK: u32 = 10;
pub const RENAME: u32 = 12;
const OPEN: u32 = 14;
pub const READ: u32 = 15;
pub const WRITE: u32 = 16;
pub const RELEASE: u32 = 18;
pub const INIT: u32 = 26;
pub const CREATE: u32 = 35;
pub const TMPFILE: u32 = 51;
/// The share's root.
pub const ROOT: u64 = 1;
/// A file-server process, the directory of its root, and the guest's side of its requests.
pub struct Guest {
    /// The streams; empty if the virtqueues are shared.
    pub streams: Vec<UnixStream>,
    /// The streams of further shares.
    pub others: Vec<[UnixStream; 2]>,
    pub machine: Option<FrontEnd>,
    /// The guest address of requests and replies.
    pub buffer_address: u64,
    pub copied_in: UnixStream,
    pub pid: nix::unistd::Pid,
    pub user: u32,
    pub group: u32,
    _scaffold: tempfile::TempDir,
}

/// The space for a request, and for its reply, in bytes.
pub const BUFFER_BYTES: u32 = 70_000;

/// Starts a file-server process whose inotify instance is charged to a user.
pub fn start_for(scaffold: &Path, layout: ShareLayout, sockets: SocketUse, user: Option<u32>) -> FileServerProcess {
    let config = FileServerConfig { seccomp: Mode::Kill, cache: Duration::ZERO, layout, sockets, user };
    nacelle_fs::start_file_server(scaffold, config).unwrap()
}

impl Guest {
    pub fn new() -> Guest {
        Guest::start(false)
    }

    /// Starts a guest whose share serves one volume, with or without shared virtqueues.
    pub fn of_volume(shared: bool, container: &str, volumes: &[VolumeToMount], part: &str) -> std::io::Result<Guest> {
        let scaffold = tempfile::tempdir().unwrap();
        let share = start_for(scaffold.path(), ShareLayout::PerVolume(2), SocketUse::Open, None);
        let pid = share.pid();
        let FileServerChannels { file_requests: mut files, copied_in } = share.wait_until_ready().unwrap();
        let namespace = File::open(format!("/proc/{pid}/ns/mnt")).unwrap();
        mount_volumes(namespace.as_fd(), VolumeTarget::Share, container, volumes).unwrap();
        let streams = files.pop().unwrap();
        let copies = [&streams[0], &streams[1]].map(|stream| stream.try_clone().unwrap());
        let device = Fs::for_volume(copies, part)?;
        let (streams, machine) = match shared {
            true => (Vec::new(), Some(FrontEnd::new(device.sharing_queues().device(), 2))),
            false => {
                streams.iter().for_each(|stream| stream.set_nonblocking(false).unwrap());
                (Vec::from(streams), None)
            }
        };
        let mut guest = Guest::with(streams, machine, copied_in, pid, scaffold);
        guest.others = files;
        Ok(guest)
    }

    /// Starts a guest whose virtqueues the file-server process serves.
    pub fn with_shared_virtqueues() -> Guest {
        Guest::start(true)
    }

    fn start(shared: bool) -> Guest {
        let scaffold = tempfile::tempdir().unwrap();
        let share = start_for(scaffold.path(), ShareLayout::Single, SocketUse::Connect, None);
        let pid = share.pid();
        let FileServerChannels { file_requests: mut files, copied_in } = share.wait_until_ready().unwrap();
        let files = files.pop().unwrap();
        let (streams, machine) = match shared {
            false => (Vec::from(files), None),
            true => (Vec::new(), Some(FrontEnd::new(Fs::new(files).unwrap().sharing_queues().device(), 2))),
        };
        Guest::with(streams, machine, copied_in, pid, scaffold)
    }

    fn with(
        streams: Vec<UnixStream>,
        mut machine: Option<FrontEnd>,
        copied_in: UnixStream,
        pid: nix::unistd::Pid,
        scaffold: tempfile::TempDir,
    ) -> Guest {
        let (shared, others) = (machine.is_some(), Vec::new());
        let buffer_address = machine.as_mut().map_or(0, |machine| machine.allocate(u64::from(2 * BUFFER_BYTES)));
        let mut guest =
            Guest { streams, others, machine, buffer_address, copied_in, pid, user: 0, group: 0, _scaffold: scaffold };
        guest.send_init();
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert_eq!(maps.contains("memfd:guest"), shared);
        guest
    }

    /// Sends the first request of a guest's kernel: the oldest protocol version with the needed features, and all flags of
    /// Linux 6.12, including submounts.
    pub fn send_init(&mut self) {
        let init = [7u32, 38, 1 << 20, 0x3fff_ffff].map(u32::to_le_bytes).concat();
        self.send_request(INIT, 0, &init).unwrap();
    }

    pub fn mount_volumes(&self, container: &str, volumes: &[VolumeToMount]) -> Result<(), ShareError> {
        self.mount_volumes_for(VolumeTarget::Share, container, volumes)
    }

    pub fn mount_volumes_for(
        &self,
        target: VolumeTarget,
        container: &str,
        volumes: &[VolumeToMount],
    ) -> Result<(), ShareError> {
        let namespace = File::open(format!("/proc/{}/ns/mnt", self.pid)).unwrap();
        mount_volumes(namespace.as_fd(), target, container, volumes)
    }

    /// Receives the next message about copied-in volumes.
    pub fn next_message(&mut self) -> CopyInMessage {
        let mut length = [0; 4];
        self.copied_in.read_exact(&mut length).unwrap();
        let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
        self.copied_in.read_exact(&mut bytes).unwrap();
        CopyInMessage::decode(&bytes).unwrap()
    }

    pub fn send_copy_in_request(&mut self, request: CopyInRequest) -> CopyInMessage {
        let bytes = request.encode();
        let length = u32::try_from(bytes.len()).unwrap();
        self.copied_in.write_all(&[length.to_le_bytes().as_slice(), &bytes].concat()).unwrap();
        self.next_message()
    }

    /// Sends a request to connect this socket to one of a socket volume.
    pub fn connect_socket(&mut self, id: u32, name: &str, socket: &impl AsFd) -> CopyInMessage {
        let bytes =
            CopyInRequest::Connect { id, client: SocketClient::new(1234, 77).unwrap(), name: name.into() }.encode();
        let length = u32::try_from(bytes.len()).unwrap();
        let message = [length.to_le_bytes().as_slice(), &bytes].concat();
        assert_eq!(send_with_descriptor(&self.copied_in, &message, socket).unwrap(), message.len());
        self.next_message()
    }

    /// Returns the files of a copied-in volume, with their contents.
    pub fn files(&mut self, id: u32) -> Vec<(String, String)> {
        let mut request = CopyInRequest::Begin { id, full: true };
        let mut files = Vec::new();
        loop {
            let CopyInMessage::Part { last, tree, .. } = self.send_copy_in_request(request) else {
                panic!("the volume was not read")
            };
            let text = |bytes| String::from_utf8(bytes).unwrap();
            let regular = |entry: &TreeEntry| entry.mode & libc::S_IFMT == libc::S_IFREG;
            let entries = Tree::decode(tree.as_slice()).unwrap().entries.into_iter().filter(regular);
            files.extend(entries.map(|entry| (text(entry.path), text(entry.data))));
            if last {
                return files;
            }
            request = CopyInRequest::Next { id };
        }
    }

    pub fn unmount_volumes(&self, container: &str) {
        let namespace = File::open(format!("/proc/{}/ns/mnt", self.pid)).unwrap();
        unmount_volumes(namespace.as_fd(), VolumeTarget::Share, container).unwrap();
    }

    /// Sends a request; returns the reply without its header, or the error.
    pub fn send_request(&mut self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        let request = self.request(opcode, node, body);
        self.send_raw(&request)
    }

    /// Sends a request that has no reply.
    pub fn request_without_reply(&mut self, opcode: u32, node: u64, body: &[u8]) {
        let request = self.request(opcode, node, body);
        let answer = match self.machine {
            None => self.send_over_stream(&request),
            Some(_) => self.send_over_virtqueue(&request, &[]),
        };
        assert!(answer.is_empty(), "{answer:?}");
    }

    /// Builds a request with its header.
    pub fn request(&self, opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(40 + body.len()).unwrap();
        let mut request = Vec::new();
        request.extend(length.to_le_bytes());
        request.extend(opcode.to_le_bytes());
        request.extend(77u64.to_le_bytes());
        request.extend(node.to_le_bytes());
        request.extend([self.user, self.group, 0, 0].map(u32::to_le_bytes).concat());
        request.extend(body);
        request
    }

    pub fn send_raw(&mut self, request: &[u8]) -> Result<Vec<u8>, i32> {
        let mut answer = match self.machine {
            None => self.send_over_stream(request),
            Some(_) => self.send_over_virtqueue(request, &[7, 40, 100, 9000]),
        };
        let Some(error) = answer.get(4..8) else { return Ok(Vec::new()) };
        match i32::from_le_bytes(error.try_into().unwrap()) {
            0 => Ok(answer.split_off(16)),
            error => Err(-error),
        }
    }

    fn send_over_stream(&mut self, request: &[u8]) -> Vec<u8> {
        let stream = &mut self.streams[1];
        let header = [u32::try_from(request.len()).unwrap(), BUFFER_BYTES].map(u32::to_le_bytes).concat();
        stream.write_all(&[header.as_slice(), request].concat()).unwrap();
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut answer = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut answer).unwrap();
        answer
    }

    /// Sends a request over the virtqueue; request and reply are split into buffers at these offsets.
    pub fn send_over_virtqueue(&mut self, request: &[u8], cuts: &[u32]) -> Vec<u8> {
        let (request_at, reply_at) = (self.buffer_address, self.buffer_address + u64::from(BUFFER_BYTES));
        let machine = self.machine.as_mut().unwrap();
        machine.memory.write_slice(request, GuestAddress(request_at)).unwrap();
        machine.memory.write_slice(&[0xee; BUFFER_BYTES as usize], GuestAddress(reply_at)).unwrap();
        let pieces = |at: u64, length: u32, writable| {
            let mut ends: Vec<u32> = cuts.iter().copied().filter(|cut| *cut < length).collect();
            ends.push(length);
            let starts = [0].into_iter().chain(ends.clone());
            starts.zip(ends).map(|(start, end)| (at + u64::from(start), end - start, writable)).collect::<Vec<_>>()
        };
        let buffers =
            [pieces(request_at, u32::try_from(request.len()).unwrap(), false), pieces(reply_at, BUFFER_BYTES, true)];
        let written = submit_chain(machine, &buffers.concat());
        let mut answer = vec![0; written as usize];
        machine.memory.read_slice(&mut answer, GuestAddress(reply_at)).unwrap();
        answer
    }

    /// Makes a descriptor chain available and returns the number of bytes that were written to its buffers.
    pub fn send_chain(&mut self, buffers: &[(u64, u32, bool)]) -> u32 {
        submit_chain(self.machine.as_mut().unwrap(), buffers)
    }

    pub fn lookup(&mut self, node: u64, name: &str) -> Result<u64, i32> {
        let entry = self.send_request(LOOKUP, node, CString::new(name).unwrap().as_bytes_with_nul())?;
        Ok(u64::from_le_bytes(entry[..8].try_into().unwrap()))
    }

    pub fn find(&mut self, path: &str) -> Result<u64, i32> {
        path.split('/').try_fold(ROOT, |node, name| self.lookup(node, name))
    }

    /// Returns user and group of a file: `fuse_attr` follows 40 bytes of `fuse_entry_out` and contains them from byte 68 on.
    pub fn owner(&mut self, path: &str) -> Result<(u32, u32), i32> {
        let node = self.find(path)?;
        // `fuse_attr_out`: 16 bytes, then the attributes.
        let answer = self.send_request(GETATTR, node, &[0; 16])?;
        let number = |at: usize| u32::from_le_bytes(answer[at..at + 4].try_into().unwrap());
        Ok((number(16 + 68), number(16 + 72)))
    }

    pub fn open(&mut self, node: u64, flags: i32) -> Result<u64, i32> {
        Ok(self.opened(node, flags)?.0)
    }

    /// Opens a file; returns its handle and the flags for Linux.
    pub fn opened(&mut self, node: u64, flags: i32) -> Result<(u64, u32), i32> {
        let opened = self.send_request(OPEN, node, &[flags as u32, 0].map(u32::to_le_bytes).concat())?;
        let flags = u32::from_le_bytes(opened[8..12].try_into().unwrap());
        Ok((u64::from_le_bytes(opened[..8].try_into().unwrap()), flags))
    }

    pub fn read(&mut self, path: &str) -> Result<String, i32> {
        let node = self.find(path)?;
        let handle = self.open(node, libc::O_RDONLY)?;
        let mut body = [handle, 0].map(u64::to_le_bytes).concat();
        body.extend([60_000u32, 0].map(u32::to_le_bytes).concat());
        body.extend([0; 16]);
        Ok(String::from_utf8(self.send_request(READ, node, &body)?).unwrap())
    }

    /// Creates a file; returns its handle and the flags for Linux, which follow 128 bytes of `fuse_entry_out`.
    pub fn created(&mut self, directory: u64, name: &str) -> Result<(u64, u32), i32> {
        let answer = self.create(directory, name)?;
        let flags = u32::from_le_bytes(answer[136..140].try_into().unwrap());
        Ok((u64::from_le_bytes(answer[128..136].try_into().unwrap()), flags))
    }

    pub fn create(&mut self, directory: u64, name: &str) -> Result<Vec<u8>, i32> {
        let mut body = [libc::O_RDWR as u32, 0o100644, 0, 0].map(u32::to_le_bytes).concat();
        body.extend(CString::new(name).unwrap().as_bytes_with_nul());
        self.send_request(CREATE, directory, &body)
    }

    /// Changes a file's mode (FUSE_SETATTR with FATTR_MODE).
    pub fn chmod(&mut self, node: u64, mode: u32) -> Result<Vec<u8>, i32> {
        let mut body = vec![0; 88];
        body[..4].copy_from_slice(&1u32.to_le_bytes());
        body[68..72].copy_from_slice(&mode.to_le_bytes());
        self.send_request(SETATTR, node, &body)
    }

    pub fn mknod(&mut self, directory: u64, name: &str, mode: u32, device: u32) -> Result<Vec<u8>, i32> {
        let mut body = [mode, device, 0, 0].map(u32::to_le_bytes).concat();
        body.extend(CString::new(name).unwrap().as_bytes_with_nul());
        self.send_request(MKNOD, directory, &body)
    }
}

fn submit_chain(machine: &mut FrontEnd, buffers: &[(u64, u32, bool)]) -> u32 {
    let queue = &mut machine.queues[1];
    let head = queue.driver.submit(buffers);
    queue.kick();
    let (done, written) = queue.wait_used();
    assert_eq!(done, head);
    written
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The streams end with the device.
        self.machine = None;
        for stream in &self.streams {
            let _ = stream.shutdown(std::net::Shutdown::Both); // the process may be gone
        }
        let _ = waitpid(self.pid, None); // the process may have been reaped
    }
}
