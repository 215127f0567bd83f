//! Forwards ports: pairs of streams, one for the bytes of a connection and one for the error if it could not be made.

use crate::backend::StreamBackend;
use crate::mux::{CHUNK, ConnectionLifetime, Reader, Writer};
use crate::spdy::{Connection, Stream};
use crate::websocket::{Coding, PortChannels};
use bytes::{Bytes, BytesMut};
use nacelle_base::Chain;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

/// The only version of the protocol.
pub(crate) const PROTOCOL: &str = "portforward.k8s.io";
/// The same protocol inside a WebSocket.
pub(crate) const TUNNEL_PROTOCOL: &str = "SPDY/3.1+portforward.k8s.io";
/// The protocols in which a WebSocket has numbered channels for the ports of the request. Clients that offer none use the first.
const CHANNEL_PROTOCOLS: [(&str, Coding); 2] =
    [("v4.channel.k8s.io", Coding::Binary), ("v4.base64.channel.k8s.io", Coding::Base64)];
/// The maximum number of ports of one request: two channels each, whose numbers must fit into one character of text.
const MAX_PORTS: usize = 32;
/// The maximum number of streams that wait for the other one of their pair.
const MAX_INCOMPLETE_PAIRS: usize = 64;

/// The streams of a pair that have arrived.
#[derive(Default)]
struct Pair {
    data: Option<Stream>,
    error: Option<Writer>,
}

/// Serves a client until it disconnects. All of its connections to the pod end with it.
pub(crate) async fn serve_spdy<G: StreamBackend>(backend: Arc<G>, pod: &str, connection: &mut Connection) {
    let mut pairs: HashMap<String, Pair> = HashMap::new();
    let mut connections = JoinSet::new();
    while let Some(stream) = connection.streams.recv().await {
        while connections.try_join_next().is_some() {}
        let port = stream.headers.get("port").and_then(|port| port.parse::<u16>().ok()).filter(|port| *port != 0);
        // Old clients do not number their requests.
        let request = stream.headers.get("requestid").or(stream.headers.get("port")).unwrap_or_default().to_owned();
        if pairs.len() >= MAX_INCOMPLETE_PAIRS && !pairs.contains_key(&request) {
            tracing::info!(
                pod,
                "disconnecting a port-forward client: it opens data or error streams without their counterpart"
            );
            return;
        }
        let kind = stream.headers.get("streamtype").unwrap_or_default().to_owned();
        let pair = pairs.entry(request.clone()).or_default();
        match kind.as_str() {
            "data" => pair.data = Some(stream),
            "error" => pair.error = Some(stream.writer),
            other => tracing::debug!(other, "ignoring a stream of an unknown type"),
        }
        if let Pair { data: Some(_), error: Some(_) } = pair
            && let Some(Pair { data: Some(data), error: Some(error) }) = pairs.remove(&request)
        {
            let (backend, pod) = (Arc::clone(&backend), pod.to_owned());
            connections
                .spawn(async move { forward_port(&*backend, &pod, port, (data.reader, data.writer), error).await });
        }
    }
}

/// Returns the name of the subprotocol and its coding if the client has named its ports and offers a supported one. The name is
/// empty if the client offers none.
pub(crate) fn choose_channels(offered: &[&str], ports: &[u16]) -> Option<(&'static str, Coding)> {
    if !can_be_channels(ports) {
        return None;
    }
    match offered {
        [] => Some(("", CHANNEL_PROTOCOLS[0].1)),
        offered => offered.iter().find_map(|name| CHANNEL_PROTOCOLS.into_iter().find(|(known, _)| known == name)),
    }
}

/// Returns whether the ports of a request can be channels.
fn can_be_channels(ports: &[u16]) -> bool {
    (1..=MAX_PORTS).contains(&ports.len())
}

/// Returns the names of the subprotocols that are accepted for these ports.
pub(crate) fn websocket_names(ports: &[u16]) -> impl Iterator<Item = &'static str> {
    let channels = CHANNEL_PROTOCOLS.into_iter().map(|(name, _)| name).filter(|_| can_be_channels(ports));
    [TUNNEL_PROTOCOL].into_iter().chain(channels)
}

/// Connects each port once, until the client disconnects.
pub(crate) async fn serve_ports_over_channels<G: StreamBackend>(
    backend: Arc<G>,
    pod: &str,
    ends: Vec<PortChannels>,
    life: &ConnectionLifetime,
) {
    let mut connections = JoinSet::new();
    for PortChannels { port, reader, writer, error } in ends {
        let (backend, pod) = (Arc::clone(&backend), pod.to_owned());
        connections.spawn(async move { forward_port(&*backend, &pod, Some(port), (reader, writer), error).await });
    }
    // The end of one connection does not end the others: channels cannot be closed individually.
    life.closed.cancelled().await;
}

async fn forward_port<G: StreamBackend>(
    backend: &G,
    pod: &str,
    port: Option<u16>,
    (reader, writer): (Reader, Writer),
    error: Writer,
) {
    let failure = match port {
        None => "the stream has no valid port".to_owned(),
        Some(port) => match backend.connect_to_port(pod, port).await {
            Ok(connected) => {
                copy_connection(connected, reader, writer).await;
                error.finish().await;
                return;
            }
            Err(error) => Chain(&error).to_string(),
        },
    };
    // A client that has disconnected needs no error.
    let _ = error.send(Bytes::from(failure)).await;
    error.finish().await;
    writer.finish().await;
}

/// Copies until both directions have ended, or the client has reset the stream.
async fn copy_connection(connection: UnixStream, mut reader: Reader, writer: Writer) {
    let (mut from, mut to) = connection.into_split();
    let ended = writer.ended();
    let out = async {
        let mut buffer = BytesMut::new();
        loop {
            buffer.reserve(CHUNK);
            // A broken connection ends like any other.
            match from.read_buf(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(_) if writer.send(buffer.split().freeze()).await.is_err() => return None,
                Ok(_) => {}
            }
        }
        Some(())
    };
    let input = async {
        while let Some(bytes) = reader.next().await {
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
        // A broken connection cannot be shut down.
        let _ = to.shutdown().await;
    };
    tokio::pin!(input);
    let mut over = false;
    {
        tokio::pin!(out);
        loop {
            tokio::select! {
                () = ended.cancelled() => return,
                sent = &mut out => match sent {
                    Some(()) => break,
                    None => return,
                },
                () = &mut input, if !over => over = true,
            }
        }
    }
    // The pod has sent everything. The client may send until it notices, or longer.
    writer.finish().await;
    if !over {
        input.await;
    }
}
