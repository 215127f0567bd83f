//! Parses the short form of disks: `NAME=KIND:WHAT[,OPTION...]`, one a line or separated by semicolons.

use crate::Quantity;
use crate::cause::{Causes, Rule};
use crate::spec::{Bus, Cache};
use serde_json::{Value, json};

/// The maximum number of disks.
const MAX_DISKS: usize = 32;
/// The kinds of disks in the short form.
const KINDS: &[&str] = &["image", "claim", "empty", "host"];
/// The options of a disk.
const OPTIONS: &[&str] = &["bus", "boot", "cache", "serial", "readonly", "cdrom"];

/// Parses all disks; each results in a disk and its volume. `at` is the path of the annotation.
pub(super) fn read(text: &str, at: &str, causes: &mut Causes) -> Vec<(Value, Value)> {
    let entries: Vec<&str> = text.split(['\n', ';']).map(str::trim).filter(|entry| !entry.is_empty()).collect();
    if entries.len() > MAX_DISKS {
        let message = format!("must have at most {MAX_DISKS} disks, and has {}", entries.len());
        causes.too_long(Rule("disks-number"), at, message);
        return Vec::new();
    }
    let numbered = entries.iter().enumerate();
    numbered.filter_map(|(index, entry)| one(entry, &format!("{at}[{index}]"), causes)).collect()
}

fn one(entry: &str, at: &str, causes: &mut Causes) -> Option<(Value, Value)> {
    let mut parts = entry.split(',').map(str::trim);
    let head = parts.next().unwrap_or_default();
    let Some((name, (kind, what))) = head.split_once('=').and_then(|(name, rest)| Some((name, rest.split_once(':')?)))
    else {
        causes.invalid(
            Rule("disk-form"),
            at,
            entry,
            "must be NAME=KIND:WHAT[,OPTION...], as root=image:debian:12,boot=1",
        );
        return None;
    };
    let source = match kind {
        _ if what.is_empty() => {
            causes.required(Rule("disk-what"), at, format!("{name}={kind}: must say which"));
            return None;
        }
        "image" => json!({ "containerDisk": { "image": what } }),
        "claim" => json!({ "persistentVolumeClaim": { "claimName": what } }),
        "empty" => match Quantity::parse(what) {
            Ok(_) => json!({ "emptyDisk": { "capacity": what } }),
            Err(error) => {
                causes.invalid(Rule("quantity"), at, what, error.to_string());
                return None;
            }
        },
        "host" => json!({ "hostDisk": { "path": what, "type": "Disk" } }),
        _ => {
            causes.unsupported(Rule("disk-kind"), at, kind, KINDS);
            return None;
        }
    };
    let mut volume = source;
    volume["name"] = json!(name);
    Some((disk(name, parts, at, causes), volume))
}

fn disk<'a>(name: &str, options: impl Iterator<Item = &'a str>, at: &str, causes: &mut Causes) -> Value {
    let mut disk = json!({ "name": name });
    let mut target = json!({});
    let mut cdrom = false;
    let mut seen: Vec<&str> = Vec::new();
    for option in options {
        let (key, value) = option.split_once('=').map_or((option, None), |(key, value)| (key, Some(value)));
        if seen.contains(&key) {
            causes.duplicate(Rule("disk-option-twice"), at, key, "must occur only once");
        }
        seen.push(key);
        match (key, value) {
            ("bus", Some(word)) if Bus::of(word).is_some() => target["bus"] = json!(word),
            ("bus", Some(word)) => causes.unsupported(Rule("value-unknown"), at, word, Bus::WORDS),
            ("cache", Some(word)) if Cache::of(word).is_some() => disk["cache"] = json!(word),
            ("cache", Some(word)) => causes.unsupported(Rule("value-unknown"), at, word, Cache::WORDS),
            ("serial", Some(serial)) => disk["serial"] = json!(serial),
            ("boot", Some(order)) => match order.parse::<u32>() {
                Ok(order) => disk["bootOrder"] = json!(order),
                Err(_) => {
                    causes.invalid(Rule("annotation-number"), at, order, "must be a number of at most 4294967295")
                }
            },
            ("readonly", None) => target["readonly"] = json!(true),
            ("cdrom", None) => cdrom = true,
            _ if OPTIONS.contains(&key) => {
                let form = if ["readonly", "cdrom"].contains(&key) { "takes no value" } else { "needs a value" };
                causes.invalid(Rule("disk-option-form"), at, option, form);
            }
            _ => causes.unsupported(Rule("disk-option"), at, key, OPTIONS),
        }
    }
    disk[if cdrom { "cdrom" } else { "disk" }] = target;
    disk
}
