//! Connects to UNIX sockets from a container of a test, because busybox cannot.
//!
//! `ask PATH TEXT` sends the text, ends its direction, and prints the reply. `repeat PATH TEXT` does so every 200 ms until it is killed,
//! and ignores failures. `many PATH COUNT CLOSED` holds so many connections open until so many of them are closed by the other side.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The time in which connections must be closed.
const LIMIT: Duration = Duration::from_secs(120);

fn ask(path: &str, text: &str) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.write_all(text.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    Ok(reply)
}

fn count_closed(streams: &[UnixStream]) -> usize {
    let is_closed = |mut stream: &UnixStream| !matches!(stream.read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock);
    streams.iter().filter(|stream| is_closed(stream)).count()
}

fn many(path: &str, count: usize, expected: usize) -> std::io::Result<String> {
    let streams: Vec<UnixStream> = (0..count).map(|_| UnixStream::connect(path)).collect::<Result<_, _>>()?;
    streams.iter().try_for_each(|stream| stream.set_nonblocking(true))?;
    let begun = Instant::now();
    while count_closed(&streams) < expected && begun.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(100));
    }
    // More of them would be closed soon.
    std::thread::sleep(Duration::from_secs(1));
    Ok(format!("{} of {count} closed", count_closed(&streams)))
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let reply = match words.as_slice() {
        ["ask", path, text] => ask(path, text),
        ["repeat", path, text] => loop {
            let _ = ask(path, text);
            std::thread::sleep(Duration::from_millis(200));
        },
        ["many", path, count, expected] => match (count.parse(), expected.parse()) {
            (Ok(count), Ok(expected)) => many(path, count, expected),
            _ => Err(std::io::ErrorKind::InvalidInput.into()),
        },
        _ => Err(std::io::ErrorKind::InvalidInput.into()),
    };
    match reply {
        Ok(reply) => {
            println!("{reply}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
