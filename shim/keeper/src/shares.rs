//! Serves the directories of the node that a VM shares with its guest (virtio-fs): one device each, which QEMU drives over
//! vhost-user. The files are opened in another process (`nacelle-fs`), which answers the guest in its memory; this process opens
//! none. Each device has a thread for QEMU's messages and one for each queue.

use crate::error::KeeperError;
use nacelle_base::Chain;
use nacelle_base::files::remove_if_there;
use nacelle_base::share::{self, QUEUES};
use nacelle_model::machine::Filesystem;
use nacelle_vmm::fs::Fs;
use nacelle_vmm::vhost_user::{self, VhostUserServer};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A device that QEMU connects to by a socket; it serves one QEMU after the other. Dropping it ends it, and blocks for that.
#[derive(Debug)]
pub struct SharedDirectory {
    /// The path of the socket.
    pub socket: PathBuf,
    server: Option<VhostUserServer>,
}

/// Creates the devices for the file systems of the VM of container `id`, with sockets in this directory. Blocks.
pub fn serve_directories(
    filesystems: &[Filesystem],
    id: &str,
    directory: &Path,
    connections: &[[UnixStream; QUEUES]],
) -> Result<Vec<SharedDirectory>, KeeperError> {
    if filesystems.len() > connections.len() {
        let value = filesystems.len().to_string();
        let rule = "the pod was created with fewer shared directories: create it again";
        return Err(KeeperError::InvalidField { field: "filesystems", value, rule });
    }
    let one = |(number, (filesystem, [first, second])): (usize, (&Filesystem, &[UnixStream; QUEUES]))| {
        let failed = |source| KeeperError::Share { name: filesystem.name.clone(), source };
        let streams = [first.try_clone().map_err(failed)?, second.try_clone().map_err(failed)?];
        let device =
            Fs::for_volume(streams, &share::volume_name(id, number)).map_err(failed)?.sharing_queues().device();
        let socket = directory.join(format!("share-{number}.sock"));
        // A socket of an earlier VM, which ended with its process.
        remove_if_there(&socket).map_err(KeeperError::StateFile)?;
        let listener = UnixListener::bind(&socket).map_err(KeeperError::file("listen on", &socket))?;
        let mut share = SharedDirectory { socket, server: None };
        let server = vhost_user::serve(device, listener);
        share.server = Some(server.map_err(|error| failed(std::io::Error::other(error)))?);
        Ok(share)
    };
    filesystems.iter().zip(connections).enumerate().map(one).collect()
}

impl Drop for SharedDirectory {
    fn drop(&mut self) {
        drop(self.server.take());
        if let Err(error) = remove_if_there(&self.socket) {
            tracing::warn!("cannot remove the socket of a shared directory: {}", Chain(&error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::share::{REPLY_HEADER, REQUEST_HEADER, SELECT_VOLUME};
    use std::io::{Read, Write};

    /// Answers the request for the share, and returns the name in it.
    fn answer_request(mut stream: UnixStream, errno: i32) -> std::thread::JoinHandle<String> {
        std::thread::spawn(move || {
            let mut header = [0; REQUEST_HEADER];
            stream.read_exact(&mut header).unwrap();
            let (word, length) = header.split_at(4);
            assert_eq!(u32::from_le_bytes(word.try_into().unwrap()), SELECT_VOLUME);
            let mut name = vec![0; u32::from_le_bytes(length.try_into().unwrap()) as usize];
            stream.read_exact(&mut name).unwrap();
            stream.write_all(&errno.to_le_bytes()[..REPLY_HEADER]).unwrap();
            String::from_utf8(name).unwrap()
        })
    }

    #[test]
    fn each_shared_directory_has_a_socket_until_it_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let filesystems = ["one", "two"].map(|name| Filesystem { name: name.into(), what: String::new() });
        let serve_with = |errnos: [i32; 2]| {
            let (mut connections, mut requests) = (Vec::new(), Vec::new());
            for errno in errnos {
                let ((first, far), (second, _)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
                connections.push([first, second]);
                requests.push(answer_request(far, errno));
            }
            (serve_directories(&filesystems, "c", directory.path(), &connections), requests)
        };
        let (shares, requests) = serve_with([0, 0]);
        let requests: Vec<_> = requests.into_iter().map(|requests| requests.join().unwrap()).collect();
        assert_eq!(requests, ["c/0", "c/1"]);
        let shares = shares.unwrap();
        assert!(shares.iter().all(|share| share.socket.exists()));
        drop(shares);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let (shares, _asked) = serve_with([0, nix::libc::ENOTDIR]);
        let error = shares.unwrap_err();
        assert!(Chain(&error).to_string().contains("two") && matches!(error, KeeperError::Share { .. }), "{error}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        assert!(matches!(
            serve_directories(&filesystems, "c", directory.path(), &[]),
            Err(KeeperError::InvalidField { .. })
        ));
    }
}
