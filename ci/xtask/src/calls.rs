//! Finds system calls that a signal can interrupt and that are not repeated (`nacelle_base::retry`).

use crate::Finding;
use crate::source::{Token, blank_literals, tokens};
use std::collections::BTreeMap;
use std::ops::Range;

/// Programs that run on a node or in a guest.
const DIRECTORIES: [&str; 2] = ["agent/src", "shim"];

/// The file that makes such calls for the others.
const RETRY_HELPER: &str = "shim/base/src/retry.rs";

/// The beginning of the names of the files that list system calls by their numbers and make none.
const SYSCALL_NUMBERS: &str = "shim/jail/src/table";

/// Crates whose functions are system calls as they are; the standard library repeats most of its own.
const SYSCALL_CRATES: [&str; 3] = ["nix", "libc", "rustix"];

/// Functions of those crates that can fail with EINTR (signal(7)).
const INTERRUPTIBLE_CALLS: [&str; 59] = [
    "accept",
    "accept4",
    "clock_nanosleep",
    "connect",
    "copy_file_range",
    "epoll_pwait",
    "epoll_wait",
    "fallocate",
    "fdatasync",
    "flock",
    "fsync",
    "ftruncate",
    "getrandom",
    "ioctl",
    "lockf",
    "msync",
    "nanosleep",
    "open",
    "openat",
    "openat2",
    "poll",
    "posix_fallocate",
    "ppoll",
    "pread",
    "preadv",
    "preadv2",
    "preadv64",
    "preadv64v2",
    "pselect",
    "pwrite",
    "pwritev",
    "pwritev2",
    "pwritev64",
    "pwritev64v2",
    "read",
    "readv",
    "recv",
    "recvfrom",
    "recvmmsg",
    "recvmsg",
    "select",
    "send",
    "sendfile",
    "sendmmsg",
    "sendmsg",
    "sendto",
    "sigtimedwait",
    "sigwait",
    "sigwaitinfo",
    "splice",
    "sync_file_range",
    "syncfs",
    "tee",
    "vmsplice",
    "wait",
    "waitid",
    "waitpid",
    "write",
    "writev",
];

/// Arguments that make fcntl(2) wait.
const BLOCKING_LOCKS: [&str; 2] = ["F_SETLKW", "F_OFD_SETLKW"];

/// The files whose `connect_unix` connects sockets that do not block: connect(2) fails with EAGAIN while a listener's queue is full.
const CONNECTING_FILES: [&str; 2] = ["shim/pod/src/client/mod.rs", "shim/keeper/src/streams.rs"];

/// The functions of the helper that take such a call.
const RETRY_FUNCTIONS: [&str; 3] = ["retry_interrupted", "retry_transient", "when_ready"];

/// `files` are all Rust files: their places and their texts.
pub fn check(files: &[(String, String)]) -> Vec<Finding> {
    let runs = |place: &str| DIRECTORIES.iter().any(|directory| place.starts_with(&format!("{directory}/")));
    let mut found = Vec::new();
    for (place, text) in files.iter().filter(|(place, _)| runs(place) && !is_test(place)) {
        if place == RETRY_HELPER || place.starts_with(SYSCALL_NUMBERS) {
            continue;
        }
        let raw = raw_calls(text, CONNECTING_FILES.contains(&place.as_str()));
        found.extend(raw.into_iter().map(|(line, rule)| Finding { place: format!("{place}:{line}"), rule }));
    }
    found
}

/// Whether a file has nothing but tests.
fn is_test(place: &str) -> bool {
    let name = place.rsplit('/').next().unwrap_or_default();
    place.contains("/tests/") || place.contains("/contract/") || name == "tests.rs" || name.ends_with("_tests.rs")
}

/// The lines with calls that are not repeated, and what is wrong there. `connector`: see [`CONNECTING_FILES`].
fn raw_calls(text: &str, connector: bool) -> Vec<(usize, String)> {
    let code = without_tests(&blank_literals(text));
    let tokens = tokens(&code);
    let (names, uses) = imported_names(&tokens);
    let repeated = call_arguments(&tokens);
    let mut found = Vec::new();
    let mut next = 0;
    while let Some(token) = tokens.get(next) {
        let first = next;
        next += 1;
        let before = first.checked_sub(1).and_then(|before| tokens.get(before)).map_or("", |token| token.text);
        if !token.is_name() || matches!(before, "." | "fn" | "::") || uses.iter().any(|range| range.contains(&first)) {
            continue;
        }
        let mut path: Vec<&str> = names.get(token.text).cloned().unwrap_or_else(|| vec![token.text]);
        while let (Some("::"), Some(part)) = (tokens.get(next).map(|token| token.text), tokens.get(next + 1)) {
            if !part.is_name() {
                break;
            }
            path.push(part.text);
            next += 2;
        }
        // Called, or passed on to be called; not a type or a variable of that name.
        let after = tokens.get(next).map_or("", |token| token.text);
        if after != "(" && (next == first + 1 || !matches!(after, ")" | "," | ";")) {
            continue;
        }
        if connector && path == ["tokio", "net", "UnixStream", "connect"] {
            continue;
        }
        let Some(rule) =
            violation(&path, repeated.iter().filter(|(range, _)| range.contains(&first)).map(|(_, by)| *by))
        else {
            continue;
        };
        found.push((token.line, rule));
    }
    found
}

/// What is wrong with naming this function inside of the arguments of those.
fn violation<'a>(path: &[&str], mut inside: impl Iterator<Item = &'a str>) -> Option<String> {
    let (root, last) = (path.first()?, path.last()?);
    let name = path.join("::");
    if path.ends_with(&["UnixStream", "connect"]) {
        return match *root {
            "tokio" => Some(format!("{name} fails with EAGAIN while a listener's queue is full: use connect_unix")),
            "std" if inside.next().is_none() => {
                Some(format!("{name} can fail with EINTR: wrap it in retry_interrupted"))
            }
            _ => None,
        };
    }
    if !SYSCALL_CRATES.contains(root) {
        return None;
    }
    match *last {
        "openat2" | "SYS_openat2" | "SYS_bpf" => (!inside.any(|by| by == "retry_transient"))
            .then(|| format!("{name} can fail with EINTR, and with EAGAIN when it races: wrap it in retry_transient")),
        call if INTERRUPTIBLE_CALLS.contains(&call) || BLOCKING_LOCKS.contains(&call) => inside
            .next()
            .is_none()
            .then(|| format!("{name} can fail with EINTR: wrap it in a function of nacelle_base::retry")),
        _ => None,
    }
}

/// The full paths of imported names, and where the `use` items are.
fn imported_names<'a>(tokens: &[Token<'a>]) -> (BTreeMap<&'a str, Vec<&'a str>>, Vec<Range<usize>>) {
    let (mut names, mut uses) = (BTreeMap::new(), Vec::new());
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        at += 1;
        if token.text == "use" {
            let start = at;
            let end = tokens.iter().skip(at).position(|token| token.text == ";").map_or(tokens.len(), |more| at + more);
            collect_imports(tokens.get(start..end).unwrap_or_default(), &[], &mut names);
            uses.push(start..end);
            at = end;
        }
    }
    (names, uses)
}

/// Notes the names that one tree of a `use` item brings.
fn collect_imports<'a>(tree: &[Token<'a>], above: &[&'a str], names: &mut BTreeMap<&'a str, Vec<&'a str>>) {
    let mut path = above.to_vec();
    for (number, token) in tree.iter().enumerate() {
        match token.text {
            "::" => {}
            "{" => {
                let inner = tree.get(number + 1..tree.len().saturating_sub(1)).unwrap_or_default();
                let mut depth = 0_i32;
                for part in inner.split(|token| {
                    depth += i32::from(token.text == "{") - i32::from(token.text == "}");
                    token.text == "," && depth == 0
                }) {
                    collect_imports(part, &path, names);
                }
                return;
            }
            "as" => {
                if let Some(name) = tree.get(number + 1) {
                    names.insert(name.text, path);
                }
                return;
            }
            "self" => {}
            name => path.push(name),
        }
    }
    if let Some(name) = path.last().copied().filter(|_| path.len() > 1) {
        names.insert(name, path);
    }
}

/// Where the arguments of the helper's functions are.
fn call_arguments<'a>(tokens: &[Token<'a>]) -> Vec<(Range<usize>, &'a str)> {
    let mut found = Vec::new();
    for (number, token) in tokens.iter().enumerate().filter(|(_, token)| RETRY_FUNCTIONS.contains(&token.text)) {
        let start = number + 1;
        if tokens.get(start).is_none_or(|token| token.text != "(") {
            continue;
        }
        let mut depth = 0_i32;
        let end = tokens.iter().skip(start).position(|token| {
            depth += i32::from(token.text == "(") - i32::from(token.text == ")");
            depth == 0
        });
        found.push((start..end.map_or(tokens.len(), |length| start + length), token.text));
    }
    found
}

/// A program up to its module of tests.
fn without_tests(code: &str) -> String {
    let end = code.match_indices("#[cfg(test)]").map(|(at, _)| at).find(|at| {
        let rest = code.get(at + "#[cfg(test)]".len()..).unwrap_or_default().trim_start();
        rest.starts_with("mod ")
            && rest.find(['{', ';']).is_some_and(|at| rest.get(at..).unwrap_or_default().starts_with('{'))
    });
    code.get(..end.unwrap_or(code.len())).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        raw_calls(text, false).into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn a_call_that_is_not_repeated_is_found() {
        assert_eq!(lines("fn f() {\n    nix::unistd::read(fd, b)?;\n}"), [2]);
        assert_eq!(lines("use nix::sys::socket::{MsgFlags, recvmsg};\nlet m = recvmsg(fd, MsgFlags::empty());"), [2]);
        assert_eq!(lines("use nix::poll::{PollFd, poll as wait_for};\nwait_for(&mut fds);"), [2]);
        assert_eq!(lines("use nix::libc;\nlet x = libc::ioctl(fd, 1);"), [2]);
        assert_eq!(lines("use nix::unistd;\nlet f = unistd::write;"), [2]);
        assert_eq!(lines("use rustix::fs::{self, openat2};\nfs::open(p);\nopenat2(p);"), [2, 3]);
        assert_eq!(lines("use std::os::unix::net::UnixStream;\nUnixStream::connect(p)"), [2]);
        assert_eq!(lines("use tokio::net::UnixStream;\nretry_interrupted(|| UnixStream::connect(p))"), [2]);
        assert!(raw_calls("tokio::net::UnixStream::connect(p).await", true).is_empty());
        assert_eq!(lines("fcntl(f, nix::fcntl::FcntlArg::F_SETLKW(l))"), [1]);
    }

    #[test]
    fn a_call_that_is_repeated_is_not() {
        assert!(lines("retry_interrupted(|| { let x = (1); nix::unistd::read(fd, b) })?;").is_empty());
        assert!(lines("timed.when_ready(PollFlags::POLLIN, || nix::sys::socket::recv(fd, b, f))").is_empty());
        assert!(lines("retry_transient(|| nix::fcntl::openat2(a, b, how))").is_empty());
        assert_eq!(lines("retry_interrupted(|| nix::fcntl::openat2(a, b, how))"), [1]);
        assert_eq!(lines("unsafe_call(libc::syscall(libc::SYS_bpf, 5, p, n))"), [1]);
        assert!(lines("retry_transient(|| libc::syscall(libc::SYS_bpf, 5, p, n))").is_empty());
        assert_eq!(lines("retry_interrupted(|| a());\nnix::unistd::read(fd, b);"), [2]);
    }

    #[test]
    fn what_is_no_system_call_is_not() {
        for text in [
            "file.read(&mut bytes)?; std::fs::write(path, text)?; tokio::fs::read(path).await?;",
            "fn read(&self) {} // nix::unistd::read(fd)",
            "let text = \"nix::unistd::read(fd)\"; let c = '\"'; let d = 'x';",
            "use nix::unistd::read as _;\nself::files::open(path)",
            "fn f<'a>(x: &'a str) {}\n#[cfg(test)]\nmod tests { fn g() { nix::unistd::read(fd, b); } }",
            "use crate::sys::{connect, send};\nconnect(a); send(b);",
            "use nix::fcntl::open;\nopen.push(1); let lock: libc::flock = libc::flock { l_pid: 0 };",
        ] {
            assert!(lines(text).is_empty(), "{text}");
        }
        assert_eq!(lines("#[cfg(test)]\nmod tests;\nlibc::poll(f)"), [3]);
    }
}
