//! Implements TCP loops: one end sends for a time, the other one counts what arrives until the end of the connection.

use std::io::{self, Read, Write};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// The size of one system call in bytes.
const CHUNK: usize = 128 << 10;

/// Connects, with retries until `timeout` is over, and sends for `time`; returns bytes per second.
pub fn send(address: SocketAddrV4, time: Duration, timeout: Duration) -> io::Result<f64> {
    let deadline = Instant::now() + timeout;
    let mut stream = loop {
        match TcpStream::connect_timeout(&address.into(), timeout) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_not_yet) => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    stream.set_write_timeout(Some(timeout))?;
    let chunk = vec![0x5a; CHUNK];
    let (start, mut bytes) = (Instant::now(), 0.0);
    while start.elapsed() < time {
        stream.write_all(&chunk)?;
        bytes += CHUNK as f64;
    }
    Ok(bytes / start.elapsed().as_secs_f64())
}

/// Accepts one connection and reads it to its end; returns bytes per second.
pub fn receive(listener: &TcpListener, timeout: Duration) -> io::Result<f64> {
    let (mut stream, _peer) = listener.accept()?;
    stream.set_read_timeout(Some(timeout))?;
    let mut chunk = vec![0; CHUNK];
    let (start, mut bytes) = (Instant::now(), 0.0);
    loop {
        match stream.read(&mut chunk)? {
            0 => return Ok(bytes / start.elapsed().as_secs_f64()),
            count => bytes += count as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, SocketAddr};

    #[test]
    fn sent_data_arrives() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!("not of version 4") };
        let timeout = Duration::from_secs(20);
        let sender = std::thread::spawn(move || send(address, Duration::from_millis(20), timeout));
        assert!(receive(&listener, timeout).unwrap() > 0.0);
        assert!(sender.join().unwrap().unwrap() > 0.0);
    }
}
