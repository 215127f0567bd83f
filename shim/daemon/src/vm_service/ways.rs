//! Connects clients with a machine's console and screen, with data in both directions.

use crate::cri::status::{refuse, status};
use crate::streaming::Guests;
use nacelle_base::Kind;
use nacelle_proto::vm;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

/// The port of VNC, if the machine has a screen.
const SCREEN: u16 = 5900;
/// Time limit for the first message.
const FIRST: Duration = Duration::from_secs(30);
/// The largest message in bytes.
const PIECE: usize = 32 << 10;
/// The largest number of queued messages.
const PIECES: usize = 4;

/// The data from the machine.
pub(super) type Pieces = mpsc::Receiver<Result<vm::Piece, Status>>;

/// A channel into a machine.
#[derive(Clone, Copy)]
pub(super) enum Way {
    Console,
    Screen,
}

/// Returns the machine of the first message, and the data in that message.
pub(super) async fn first(
    asked: &mut (impl Stream<Item = Result<vm::WayRequest, Status>> + Unpin),
) -> Result<(vm::MachineRef, Vec<u8>), Status> {
    let missing = || refuse(Kind::Invalid, "the first message names no machine");
    let first = tokio::time::timeout(FIRST, asked.next()).await.map_err(|_elapsed| missing())?;
    let vm::WayRequest { machine, data } = first.ok_or_else(missing)??;
    Ok((machine.ok_or_else(missing)?, data))
}

/// Opens the channel to the machine in this container of this pod.
pub(super) async fn open(
    guests: &Guests,
    (pod, container): (&str, &str),
    way: Way,
    said: Vec<u8>,
    asked: impl Stream<Item = Result<vm::WayRequest, Status>> + Send + Unpin + 'static,
) -> Result<Pieces, Status> {
    let (tell, told) = mpsc::channel(PIECES);
    match way {
        Way::Console => {
            let (input, output) = guests.console(container).await.map_err(status)?;
            tokio::spawn(pass(output, input, said, asked, tell));
        }
        Way::Screen => {
            let screen = nacelle_stream::Guests::dial(guests, pod, SCREEN).await.map_err(status)?;
            let (output, input) = screen.into_split();
            tokio::spawn(pass(output, input, said, asked, tell));
        }
    }
    Ok(told)
}

/// Forwards data until the machine's output ends or the client is gone. The output continues after the end of the client's input.
async fn pass(
    mut from: impl AsyncRead + Send + Unpin,
    mut to: impl AsyncWrite + Send + Unpin,
    said: Vec<u8>,
    mut asked: impl Stream<Item = Result<vm::WayRequest, Status>> + Send + Unpin,
    tell: mpsc::Sender<Result<vm::Piece, Status>>,
) {
    let speaking = async {
        let mut said = said;
        loop {
            if to.write_all(&said).await.is_err() {
                break;
            }
            match asked.next().await {
                Some(Ok(vm::WayRequest { data, .. })) => said = data,
                // An error means that the client is gone, and `tell` is closed.
                Some(Err(_)) | None => break,
            }
        }
        // The end of the input does not end the channel.
        let _ = to.shutdown().await;
        std::future::pending::<()>().await;
    };
    let listening = async {
        loop {
            let mut data = vec![0; PIECE];
            let piece = match from.read(&mut data).await {
                Ok(0) => break,
                Ok(count) => {
                    data.truncate(count);
                    Ok(vm::Piece { data })
                }
                Err(error) => Err(refuse(Kind::Unavailable, &format!("the machine does not answer any more: {error}"))),
            };
            let last = piece.is_err();
            if tell.send(piece).await.is_err() || last {
                break;
            }
        }
    };
    tokio::select! {
        () = listening => {}
        () = speaking => {}
        () = tell.closed() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixStream;

    #[tokio::test]
    async fn both_ends_say_what_they_have_to_say() {
        let (near, mut machine) = UnixStream::pair().unwrap();
        let (output, input) = near.into_split();
        let (tell, mut told) = mpsc::channel(PIECES);
        let (ask, asked) = mpsc::channel(1);
        let asked = tokio_stream::wrappers::ReceiverStream::new(asked);
        let passing = tokio::spawn(pass(output, input, b"lo".to_vec(), asked, tell));
        ask.send(Ok(vm::WayRequest { machine: None, data: b"gin".to_vec() })).await.unwrap();
        let mut said = [0; 5];
        machine.read_exact(&mut said).await.unwrap();
        assert_eq!(&said, b"login");
        // The channel stays open after the end of the input.
        drop(ask);
        let mut rest = Vec::new();
        machine.read_to_end(&mut rest).await.unwrap();
        assert!(rest.is_empty());
        machine.write_all(b"welcome").await.unwrap();
        assert_eq!(told.recv().await.unwrap().unwrap().data, b"welcome");
        drop(machine);
        assert!(told.recv().await.is_none());
        passing.await.unwrap();
    }

    #[tokio::test]
    async fn the_first_message_names_the_machine() {
        let machine = vm::MachineRef { namespace: "a".into(), name: "b".into() };
        let message = |machine| Ok(vm::WayRequest { machine, data: b"x".to_vec() });
        let mut asked = tokio_stream::iter([message(Some(machine.clone()))]);
        assert_eq!(first(&mut asked).await.unwrap(), (machine, b"x".to_vec()));
        for wrong in [vec![message(None)], vec![]] {
            let refused = first(&mut tokio_stream::iter(wrong)).await.unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        }
    }
}
