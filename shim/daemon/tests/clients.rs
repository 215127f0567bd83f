//! Tests that the daemon's socket answers clients of other gRPC libraries than its own, byte by byte.

mod common;

use common::World;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// All bytes that a grpcio client sends to request CRI's Version; its authority is `run%2Fnacelle-rec%2Fnacelle.sock`.
const GRPCIO: &[u8] = include_bytes!("../../stream/tests/corpus/authority/grpcio");

/// The HTTP/2 frame types of a response, and of a rejection.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;

/// Returns the next frame: its type, its stream and its payload.
async fn frame(connection: &mut UnixStream) -> (u8, u32, Vec<u8>) {
    let mut head = [0; 9];
    connection.read_exact(&mut head).await.unwrap();
    let [a, b, c, kind, _flags, stream @ ..] = head;
    let mut bytes = vec![0; u32::from_be_bytes([0, a, b, c]).try_into().unwrap()];
    connection.read_exact(&mut bytes).await.unwrap();
    (kind, u32::from_be_bytes(stream), bytes)
}

#[test]
fn a_client_of_grpcs_c_core_is_answered() {
    let world = World::new();
    let _daemon = world.daemon();
    for piece in [GRPCIO.len(), 1, 7] {
        world.run(async {
            let mut connection = UnixStream::connect(world.config().paths.socket).await.unwrap();
            // Without the acknowledgement of the settings, which may arrive earlier here, and without the last frame, which
            // cancels the request.
            let asked = [&GRPCIO[..82], &GRPCIO[91..400]].concat();
            for bytes in asked.chunks(piece) {
                connection.write_all(bytes).await.unwrap();
                if piece > 1 {
                    tokio::time::sleep(Duration::from_micros(50)).await;
                }
            }
            let mut kinds = Vec::new();
            while kinds.iter().filter(|kind| **kind == HEADERS).count() < 2 {
                let (kind, stream, bytes) = frame(&mut connection).await;
                assert!(![RST_STREAM, GOAWAY].contains(&kind), "{bytes:?}");
                if stream == 1 {
                    kinds.push(kind);
                }
                if kind == DATA {
                    assert!(bytes.windows(7).any(|window| window == b"nacelle"), "{bytes:?}");
                }
            }
            // The headers, the message, and its status in trailers.
            assert!(kinds.contains(&DATA), "{kinds:?}");
        });
    }
}
