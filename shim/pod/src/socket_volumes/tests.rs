//! Tests the relay between a guest that is a socket pair, a file-server process that is a thread, and a real server.

use super::*;
use nacelle_base::descriptors::receive_with_descriptors;
use nacelle_base::sockets::{MAX_CONNECTIONS, SocketClient};
use nacelle_engine::{LinkError, LinkListener};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc;

const GOOD: [u8; TOKEN] = [1; TOKEN];

/// The host's end of the vsock port.
struct TestListener(mpsc::Receiver<UnixStream>);

impl LinkListener for TestListener {
    fn accept(&self, limit: Duration) -> Result<UnixStream, LinkError> {
        match self.0.recv_timeout(limit) {
            Ok(stream) => Ok(stream),
            Err(mpsc::RecvTimeoutError::Timeout) => Err(LinkError::Timeout { port: PORT, limit }),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(LinkError::Stopped),
        }
    }
}

/// Acts as the file-server process: connects to the socket `NAME` of the directory; other names are refused.
fn serve_files(mut stream: UnixStream, directory: PathBuf) {
    loop {
        let mut length = [0; 4];
        let Ok((received @ 1.., descriptors)) = receive_with_descriptors(&stream, &mut length) else { return };
        stream.read_exact(&mut length[received..]).unwrap();
        let mut message = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut message).unwrap();
        let Some(CopyInRequest::Connect { id, client, name }) = CopyInRequest::decode(&message) else {
            panic!("{message:?}")
        };
        assert_eq!((client.uid(), client.gid()), (1000, 77));
        let path = directory.join(String::from_utf8(name).unwrap());
        let address = nix::sys::socket::UnixAddr::new(&path).unwrap();
        let reply = match nix::sys::socket::connect(descriptors[0].as_raw_fd(), &address) {
            Ok(()) => CopyInMessage::Done { id },
            Err(error) => {
                let reason = nacelle_base::copied_in::CopyInFailure::Failed;
                CopyInMessage::Failed { id, reason, text: error.to_string() }
            }
        };
        let bytes = reply.encode();
        let length = u32::try_from(bytes.len()).unwrap().to_le_bytes();
        stream.write_all(&[length.as_slice(), &bytes].concat()).unwrap();
    }
}

/// A relay with one volume, whose token is `GOOD`.
struct Relay {
    guest: mpsc::Sender<UnixStream>,
    server: UnixListener,
    volumes: SocketVolumes,
    _directory: tempfile::TempDir,
}

impl Relay {
    fn start() -> Relay {
        let directory = tempfile::tempdir().unwrap();
        let server = UnixListener::bind(directory.path().join("server.sock")).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let path = directory.path().to_owned();
        std::thread::spawn(move || serve_files(theirs, path));
        let channel = FileServerChannel::new(ours, Duration::from_secs(60)).unwrap();
        let id = channel.allocate().id;
        let volumes = SocketVolumes::new(Some(channel));
        let attached = AttachedVolume {
            token: SocketToken::new(GOOD),
            id,
            _closing: oneshot::channel().0,
            connections: watch::Sender::new(()),
        };
        volumes.lock().insert("c.0".into(), attached);
        let (guest, accepted) = mpsc::channel();
        tokio::spawn(relay::accept(Box::new(TestListener(accepted)), volumes.clone()));
        Relay { guest, server, volumes, _directory: directory }
    }

    /// Opens a connection of the guest that begins with these bytes.
    fn connect(&self, bytes: &[u8]) -> UnixStream {
        let (mut near, far) = UnixStream::pair().unwrap();
        near.write_all(bytes).unwrap();
        near.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        self.guest.send(far).unwrap();
        near
    }
}

fn header(token: [u8; TOKEN], name: &str) -> Vec<u8> {
    let client = SocketClient::new(1000, 77).unwrap();
    SocketHeader { token: SocketToken::new(token), client, name: name.into() }.encode().unwrap()
}

fn is_closed(mut stream: &UnixStream) -> bool {
    match stream.read(&mut [0]) {
        Ok(count) => count == 0,
        // The bytes that it had sent were not read.
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_direction_ends_by_itself() {
    let relay = Relay::start();
    tokio::task::spawn_blocking(move || {
        let mut guest = relay.connect(&[header(GOOD, "server.sock").as_slice(), b"question"].concat());
        let (mut server, _) = relay.server.accept().unwrap();
        guest.shutdown(Shutdown::Write).unwrap();
        let mut text = String::new();
        server.read_to_string(&mut text).unwrap();
        assert_eq!(text, "question");
        server.write_all(b"answer").unwrap();
        drop(server);
        let mut text = String::new();
        guest.read_to_string(&mut text).unwrap();
        assert_eq!(text, "answer");
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_token_of_the_pod_reaches_a_server() {
    let relay = Relay::start();
    tokio::task::spawn_blocking(move || {
        let mut other = GOOD;
        other[TOKEN - 1] = 2;
        for bytes in [
            header(other, "server.sock"),
            header([0; TOKEN], ""),
            header(GOOD, "none.sock"),
            [GOOD.as_slice(), &[2], b".."].concat(),
            [GOOD.as_slice(), &[255], &[b'n'; 255]].concat(),
        ] {
            assert!(is_closed(&relay.connect(&bytes)), "{bytes:?}");
        }
        relay.server.set_nonblocking(true).unwrap();
        assert_eq!(relay.server.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_has_a_limited_number_of_connections() {
    let relay = Relay::start();
    tokio::task::spawn_blocking(move || {
        let good = header(GOOD, "server.sock");
        let mut open: Vec<_> =
            (0..MAX_CONNECTIONS).map(|_| (relay.connect(&good), relay.server.accept().unwrap().0)).collect();
        assert!(is_closed(&relay.connect(&good)));
        drop(open.pop());
        // The relay sees the end a moment later.
        let again = (0..600).find_map(|_| {
            let mut stream = relay.connect(&good);
            stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let read = stream.read(&mut [0]);
            matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock).then_some(stream)
        });
        assert!(again.is_some());
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_end_with_their_volume() {
    let relay = Relay::start();
    tokio::task::spawn_blocking(move || {
        let guest = relay.connect(&header(GOOD, "server.sock"));
        let (mut server, _) = relay.server.accept().unwrap();
        relay.volumes.detach(&[pod::SocketVolume { name: "c.0".into(), ..Default::default() }]);
        assert!(is_closed(&guest));
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
    })
    .await
    .unwrap();
}
