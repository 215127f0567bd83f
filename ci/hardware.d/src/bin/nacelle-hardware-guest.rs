//! Runs as the init of the measuring guest: it prints a mark, sends hello over vsock, and runs the loops that it is asked for.
//!
//! Without vsock (the peers of a boot have none) it prints the mark and waits. Each connection is served by a thread of its own;
//! each line is a command, and each answer is a line: `ok` and numbers, or `error` and a text.

use nacelle_hardware::{COMMAND_PORT, MARK, RECEIVE_PORT, disk, link, loops, tcp};
use nix::mount::{MsFlags, mount};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::path::Path;
use std::time::Duration;
use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockListener, VsockStream};

/// The host's vsock port for the hello (`nacelle_engine::BOOT_PORT`).
const HELLO_PORT: u32 = 1024;
/// Longer than any step of a loop takes.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

fn main() {
    println!("{MARK}");
    for (name, path) in [("devtmpfs", "/dev"), ("sysfs", "/sys"), ("proc", "/proc")] {
        // The initramfs may have mounted it, and a loop that needs it reports if it is missing.
        let _ = mount(Some(name), path, Some(name), MsFlags::empty(), None::<&str>);
    }
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, COMMAND_PORT);
    let hello = VsockStream::connect_with_cid_port(VMADDR_CID_HOST, HELLO_PORT);
    if let (Ok(listener), Ok(mut hello)) = (listener, hello)
        && hello.write_all(b"hello\n").is_ok()
    {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || serve(stream));
        }
    }
    // An exit of the first process would panic the kernel.
    loop {
        std::thread::park();
    }
}

fn serve(stream: VsockStream) {
    let Ok(mut answers) = stream.try_clone() else { return };
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let answer = match run_command(&line) {
            Ok(numbers) => numbers.iter().fold("ok".to_owned(), |text, number| format!("{text} {number}")),
            Err(error) => format!("error {line}: {error}").replace('\n', " "),
        };
        if writeln!(answers, "{answer}").is_err() {
            return;
        }
    }
}

type CommandError = Box<dyn std::error::Error>;

fn run_command(line: &str) -> Result<Vec<f64>, CommandError> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let parse_milliseconds =
        |text: &str| -> Result<Duration, CommandError> { Ok(Duration::from_millis(text.parse()?)) };
    Ok(match words[..] {
        ["nothing"] => vec![],
        ["pages", mode] => {
            std::fs::write("/sys/kernel/mm/transparent_hugepage/enabled", mode)?;
            vec![]
        }
        ["touch", mib] => vec![loops::touch(mib.parse()?)],
        ["chase", mib, ms] => vec![loops::chase(mib.parse()?, parse_milliseconds(ms)?)],
        ["stream", mib, ms] => {
            let (read, written) = loops::stream(mib.parse()?, parse_milliseconds(ms)?);
            vec![read, written]
        }
        ["read", device, ms] => vec![disk::read(Path::new(device), true, parse_milliseconds(ms)?)?],
        ["write", device, ms] => vec![disk::write(Path::new(device), true, parse_milliseconds(ms)?)?],
        ["random", device, threads, ms] => {
            vec![disk::random_reads(Path::new(device), true, threads.parse()?, parse_milliseconds(ms)?)?]
        }
        ["address", address, prefix] => {
            link::set_up("eth0", address.parse()?, prefix.parse()?)?;
            vec![]
        }
        ["send", address, port, ms] => {
            vec![tcp::send(SocketAddrV4::new(address.parse()?, port.parse()?), parse_milliseconds(ms)?, STEP_TIMEOUT)?]
        }
        ["receive"] => {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, RECEIVE_PORT))?;
            vec![tcp::receive(&listener, STEP_TIMEOUT)?]
        }
        _ => return Err("no such command".into()),
    })
}
