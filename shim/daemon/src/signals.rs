//! Maps names of signals to their numbers on Linux, x86_64.

/// Names without "SIG", and numbers; the first name of a number is the canonical one.
const NAMES: [(&str, u32); 37] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("IOT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("POLL", 29),
    ("PWR", 30),
    ("SYS", 31),
    ("UNUSED", 31),
    ("RTMIN", 34),
    ("RTMAX", 64),
];
const LAST: u32 = 64;

/// Returns the number of a signal: "SIGTERM", "TERM", "15", "SIGRTMIN+3", "RTMAX-1".
pub fn number(text: &str) -> Option<u32> {
    if let Ok(number) = text.parse::<u32>() {
        return (1..=LAST).contains(&number).then_some(number);
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let plain = |name: &str| NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    let step = |text: &str| text.parse::<u32>().ok().filter(|n| *n <= 30);
    match (name.strip_prefix("RTMIN+"), name.strip_prefix("RTMAX-")) {
        (Some(up), _) => step(up).map(|up| 34 + up),
        (_, Some(down)) => step(down).map(|down| LAST - down),
        _ => plain(name),
    }
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn names_and_numbers() {
        for (text, expected) in [
            ("SIGTERM", Some(15)),
            ("term", Some(15)),
            ("9", Some(9)),
            ("SIGRTMIN", Some(34)),
            ("SIGRTMIN+1", Some(35)),
            ("RTMAX-14", Some(50)),
            ("SIGCLD", Some(17)),
            ("0", None),
            ("65", None),
            ("SIGFOO", None),
            ("RTMIN+31", None),
            ("", None),
            ("SIG", None),
            ("+9", Some(9)),
            ("RTMIN+", None),
        ] {
            assert_eq!(number(text), expected, "{text}");
        }
    }
}
