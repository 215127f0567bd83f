//! Serves the port of the streams: each connection begins with a preamble, which names a stream of a process or a TCP port of the pod,
//! and is joined to that.

use nacelle_base::Chain;
use nacelle_proto::agent::{StreamOpen, StreamOpened};
use nacelle_proto::common::Stream;
use prost::Message;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::container::AgentPod;
use crate::frame;
use crate::listener::{HostConnection, HostListener};

/// The most connections at the same time.
const MAX_CONNECTIONS: usize = 1024;
/// The time in which a connection must send its preamble.
const PREAMBLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The time in which a port of the pod must accept a connection.
const DIAL_TIMEOUT: Duration = Duration::from_secs(30);
/// The buffer of a connection to a port, in bytes in each direction.
const FORWARD_BUFFER: usize = 16 << 10;

/// Accepts connections until the agent ends.
pub async fn serve_streams(listener: HostListener, pod: Arc<AgentPod>) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        match listener.accept().await {
            Ok(connection) => {
                let pod = Arc::clone(&pod);
                tokio::spawn(async move {
                    join_stream(connection, &pod).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a stream");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn join_stream(mut connection: HostConnection, pod: &AgentPod) {
    let open = match tokio::time::timeout(PREAMBLE_TIMEOUT, frame::read_async::<StreamOpen>(&mut connection)).await {
        Ok(Ok(open)) => open,
        Ok(Err(error)) => return tracing::warn!(error = %Chain(&error), "a stream has an invalid preamble"),
        Err(_late) => return tracing::warn!("a stream sent no preamble in time"),
    };
    if open.stream() == Stream::Port {
        if let Err(error) = forward_port(connection, open.port).await {
            tracing::debug!(%error, port = open.port, "forwarding a port failed");
        }
        return;
    }
    let process = match pod.find_process(&pod.ids.in_guest(open.id.clone()), &open.exec_id) {
        Ok(process) => process,
        Err(error) => return tracing::warn!(error = %Chain(&error), "a stream names a process that does not exist"),
    };
    let stdio = &process.stdio;
    let result = match open.stream() {
        Stream::Stdin => match &stdio.stdin {
            // The end of input of a terminal is a character, not the end of the connection.
            Some(channel) => channel.copy_input(&mut connection, stdio.terminal.is_none() && !open.keep_open).await,
            None => Ok(()),
        },
        Stream::Stdout | Stream::Stderr => {
            let channel = if open.stream() == Stream::Stdout { &stdio.stdout } else { &stdio.stderr };
            match channel {
                Some(channel) => channel.send_output(&mut connection).await,
                None => Ok(()),
            }
        }
        // Ports are handled above; devices, logs and images go to the pod process or the keeper only.
        Stream::Port | Stream::Device | Stream::Log | Stream::Image | Stream::Checkpoint | Stream::Unspecified => {
            Ok(())
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, id = open.id, "a stream failed");
    }
}

async fn forward_port(mut connection: HostConnection, port: u32) -> io::Result<()> {
    let dialled = tokio::time::timeout(DIAL_TIMEOUT, dial(port)).await;
    let dialled = dialled.unwrap_or_else(|_late| Err(io::ErrorKind::TimedOut.into()));
    let error = dialled.as_ref().err().map_or_else(String::new, ToString::to_string);
    let answer = frame::encode_frame(&StreamOpened { error }.encode_to_vec(), frame::MAX).map_err(io::Error::other)?;
    connection.write_all(&answer).await?;
    let mut port = dialled?;
    tokio::io::copy_bidirectional_with_sizes(&mut connection, &mut port, FORWARD_BUFFER, FORWARD_BUFFER).await.map(drop)
}

/// Connects to a port of the pod: all containers are in one network namespace, the agent's.
async fn dial(port: u32) -> io::Result<TcpStream> {
    let port = u16::try_from(port).map_err(|_too_large| io::Error::from(io::ErrorKind::InvalidInput))?;
    match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
        // The error of IPv4 is reported.
        Err(first) => TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await.map_err(|_second| first),
        connected => connected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[test]
    fn a_port_is_found_by_either_address() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for address in ["127.0.0.1:0", "[::1]:0"] {
                // The node may have no IPv6.
                let Ok(listener) = TcpListener::bind(address).await else { continue };
                let port = listener.local_addr().unwrap().port();
                assert_eq!(dial(port.into()).await.unwrap().peer_addr().unwrap(), listener.local_addr().unwrap());
            }
            assert_eq!(dial(70_000).await.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        });
    }
}
