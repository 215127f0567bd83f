//! Compares the sandboxing of the systemd unit with docs/reference/unit-sandboxing.md: the unit sets each directive of
//! systemd.exec(5) and systemd.resource-control(5) that restricts a service, or the page names what it would break.

use crate::Finding;
use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;

const UNIT: &str = "ci/package.d/nacelle.service";
const DROP_IN: &str = "docs/examples/systemd/vm-only.conf";
const PAGE: &str = "docs/reference/unit-sandboxing.md";

/// Every directive that restricts what a service can do or see, of systemd 252 (`PrivatePIDs`: 257).
const DIRECTIVES: &str = "
    AmbientCapabilities AppArmorProfile BindPaths BindReadOnlyPaths CacheDirectory CacheDirectoryMode CapabilityBoundingSet
    ConfigurationDirectory ConfigurationDirectoryMode DeviceAllow DevicePolicy DynamicUser ExecPaths IPAddressAllow IPAddressDeny
    IPCNamespacePath InaccessiblePaths KeyringMode LockPersonality LogsDirectory LogsDirectoryMode MemoryDenyWriteExecute MountFlags
    NetworkNamespacePath NoExecPaths NoNewPrivileges PrivateDevices PrivateIPC PrivateMounts PrivateNetwork PrivatePIDs PrivateTmp
    PrivateUsers ProcSubset ProtectClock ProtectControlGroups ProtectHome ProtectHostname ProtectKernelLogs ProtectKernelModules
    ProtectKernelTunables ProtectProc ProtectSystem ReadOnlyPaths ReadWritePaths RemoveIPC RestrictAddressFamilies
    RestrictFileSystems RestrictNamespaces RestrictRealtime RestrictSUIDSGID RootDirectory RootImage RuntimeDirectory
    RuntimeDirectoryMode RuntimeDirectoryPreserve SELinuxContext SecureBits SmackProcessLabel StateDirectory StateDirectoryMode
    SupplementaryGroups SystemCallArchitectures SystemCallErrorNumber SystemCallFilter SystemCallLog TemporaryFileSystem
    TimeoutCleanSec UMask User";

pub fn check(root: &Path) -> Result<Vec<Finding>, Box<dyn Error>> {
    let read = |place: &str| std::fs::read_to_string(root.join(place));
    let page = read(PAGE)?;
    let mut found = compare(&read(UNIT)?, &read(DROP_IN)?, &page);
    let files = section_rows(&page, "## Not applied").flat_map(|row| spans(row.rsplit('|').nth(1).unwrap_or_default()));
    found.extend(
        files
            .filter(|file| !root.join(file).exists())
            .map(|file| finding(format!("names {file}, which does not exist"))),
    );
    Ok(found)
}

fn finding(rule: String) -> Finding {
    Finding { place: PAGE.to_owned(), rule }
}

fn compare(unit: &str, drop_in: &str, page: &str) -> Vec<Finding> {
    let known: BTreeSet<&str> = DIRECTIVES.split_whitespace().collect();
    let set: BTreeSet<&str> = keys(unit).filter(|key| known.contains(key)).collect();
    let (applied, refused) = (table(page, "## Applied"), table(page, "## Not applied"));
    let mut found = Vec::new();
    for directive in &known {
        match (set.contains(directive), applied.contains(directive), refused.contains(directive)) {
            (true, true, false) | (false, false, true) => {}
            (true, ..) => {
                found.push(finding(format!("has {directive}, which the unit sets, not only below \"Applied\"")))
            }
            (false, ..) => {
                found.push(finding(format!(
                    "has {directive}, which the unit does not set, not only below \"Not applied\""
                )));
            }
        }
    }
    let unknown = applied.union(&refused).copied().chain(keys(drop_in)).filter(|name| !known.contains(name));
    found.extend(unknown.map(|name| finding(format!("or its drop-in has {name}, which is no sandboxing directive"))));
    found
}

/// Returns the names of the settings in a unit file.
fn keys(unit: &str) -> impl Iterator<Item = &str> {
    unit.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('=')).map(|(key, _)| key)
}

/// Returns the directives that the first cells of a section's table name.
fn table<'a>(page: &'a str, section: &str) -> BTreeSet<&'a str> {
    section_rows(page, section).flat_map(|row| spans(row.split('|').nth(1).unwrap_or_default())).collect()
}

fn section_rows<'a>(page: &'a str, section: &str) -> impl Iterator<Item = &'a str> + use<'a> {
    let rest = page.split_once(section).map(|(_, rest)| rest).unwrap_or_default();
    rest.split("\n## ").next().unwrap_or_default().lines().filter(|line| line.starts_with("| "))
}

/// Returns the code spans of a cell.
fn spans(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page that applies these directives and refuses all others, except for `missing`.
    fn page(applied: &str, missing: &str) -> String {
        let span = |name: &str| format!("`{name}` ");
        let others =
            DIRECTIVES.split_whitespace().filter(|name| *name != missing && !applied.split(' ').any(|a| a == *name));
        let others: String = others.map(span).collect();
        let applied: String = applied.split(' ').filter(|name| !name.is_empty()).map(span).collect();
        format!(
            "## Applied\n\n| d | e |\n|---|---|\n| {applied} | x |\n\n## Not applied\n\n| d | e | f |\n|---|---|---|\n| {others} | x | |\n"
        )
    }

    #[test]
    fn each_directive_is_in_the_unit_or_has_a_reason() {
        let unit = "[Service]\n#UMask=0077\nType=notify\nLockPersonality=yes\n";
        let broken = |unit: &str, page: &str| compare(unit, "", page).len();
        assert_eq!(broken(unit, &page("LockPersonality", "")), 0);
        // It is in neither table, in both, in the wrong one.
        assert_eq!(broken(unit, &page("LockPersonality", "UMask")), 1);
        let both =
            page("LockPersonality", "").replace("| `AmbientCapabilities`", "| `AmbientCapabilities` `LockPersonality`");
        assert_eq!(broken(unit, &both), 1);
        assert_eq!(broken("[Service]\n", &page("LockPersonality", "")), 1);
        assert_eq!(broken("UMask=0077\nLockPersonality=yes\n", &page("LockPersonality", "")), 1);
        // Names that do not exist.
        assert_eq!(broken(unit, &page("LockPersonality ProtectMoon", "")), 1);
        assert_eq!(compare(unit, "ProtectMoon=yes\n", &page("LockPersonality", "")).len(), 1);
    }
}
