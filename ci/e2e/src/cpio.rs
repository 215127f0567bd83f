//! Writes archives in the "newc" format of cpio, for initial file systems (the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst). The kernel accepts several concatenated archives.

/// Returns an archive of files with their contents and modes.
pub fn archive(files: &[(&str, &[u8], u32)]) -> Vec<u8> {
    let mut archive = Vec::new();
    let files = files.iter().map(|(name, content, mode)| (*name, *content, mode | 0o100_000));
    for (number, (name, content, mode)) in files.chain([("TRAILER!!!", &b""[..], 0)]).enumerate() {
        let fields = [number + 1, mode as usize, 0, 0, 1, 0, content.len(), 0, 0, 0, 0, name.len() + 1, 0];
        let words: String = fields.iter().map(|field| format!("{field:08x}")).collect();
        archive.extend(format!("070701{words}{name}\0").into_bytes());
        pad(&mut archive);
        archive.extend(content);
        pad(&mut archive);
    }
    archive
}

fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(4), 0);
}
