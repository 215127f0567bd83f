//! Parses the short annotations, and sets the fields of the specification that they stand for.

use super::machine_id::{self, ExpectedMachineId};
use super::{PREFIX, PodSettings, disks, field};
use crate::Quantity;
use crate::cause::{Causes, Rule};
use crate::spec::{Power, RunStrategy, SpecKind};
use crate::tree::Tree;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Two sources set a field to different values.
const CONFLICT: Rule = Rule("annotation-conflict");
/// The maximum number of presets, and of SSH keys, of a pod.
const MAX_NAMES: usize = 16;
const MAX_KEYS: usize = 64;

/// Parses all short annotations.
pub(super) fn short_annotations(
    annotations: &BTreeMap<&str, &str>,
    tree: &mut Tree,
    causes: &mut Causes,
) -> PodSettings {
    let mut reader = Reader { annotations, tree, causes };
    let settings = reader.settings();
    reader.processors();
    reader.memory();
    reader.firmware();
    reader.devices();
    settings
}

struct Reader<'a> {
    annotations: &'a BTreeMap<&'a str, &'a str>,
    tree: &'a mut Tree,
    causes: &'a mut Causes,
}

impl<'a> Reader<'a> {
    fn text(&mut self, name: &str) -> Option<&'a str> {
        let text = self.annotations.get(name).copied()?;
        if text.trim().is_empty() {
            self.causes.required(Rule("annotation-empty"), field(name), "must not be empty");
            return None;
        }
        Some(text)
    }

    fn keyword<T>(&mut self, name: &str, words: &[&str], of: impl Fn(&str) -> Option<T>) -> Option<T> {
        let text = self.text(name)?;
        let found = of(text);
        if found.is_none() {
            match crate::refused::word(if name == "run-strategy" { ".runStrategy" } else { name }, text) {
                Some(reason) => {
                    self.causes.forbidden(Rule("value-refused"), field(name), format!("{text:?}: {reason}"));
                }
                None => self.causes.unsupported(Rule("annotation-word"), field(name), text, words),
            }
        }
        found
    }

    fn boolean(&mut self, name: &str) -> Option<bool> {
        self.keyword(name, &["true", "false"], |text| match text {
            "true" => Some(true),
            "false" => Some(false),
            _ => None,
        })
    }

    fn number(&mut self, name: &str) -> Option<u32> {
        let text = self.text(name)?;
        // `parse` also accepts a sign, which is not allowed here.
        let number =
            Some(text).filter(|text| text.bytes().all(|b| b.is_ascii_digit())).and_then(|text| text.parse().ok());
        if number.is_none() {
            self.causes.invalid(Rule("annotation-number"), field(name), text, "must be a number of at most 4294967295");
        }
        number
    }

    fn set(&mut self, name: &str, path: &[&str], value: Value) {
        self.tree.set(path, value, &format!("{PREFIX}{name}"), CONFLICT, self.causes);
    }

    fn copy_text(&mut self, name: &str, path: &[&str]) {
        if let Some(text) = self.text(name) {
            self.set(name, path, json!(text));
        }
    }

    fn settings(&mut self) -> PodSettings {
        let presets: Vec<String> = self
            .text("presets")
            .map_or_else(Vec::new, |text| text.split(',').map(|name| name.trim().to_owned()).collect());
        if presets.len() > MAX_NAMES {
            let message = format!("must name at most {MAX_NAMES}, and names {}", presets.len());
            self.causes.too_long(Rule("presets-number"), field("presets"), message);
        }
        PodSettings {
            kind: self.keyword("kind", SpecKind::WORDS, SpecKind::of),
            name: self.text("name").map(str::to_owned),
            machine_id: self.machine_id(),
            run_strategy: self.keyword("run-strategy", RunStrategy::WORDS, RunStrategy::of),
            power: self.keyword("power", Power::WORDS, Power::of),
            instancetype: self.text("instancetype").map(str::to_owned),
            preference: self.text("preference").map(str::to_owned),
            presets: presets.into_iter().take(MAX_NAMES).collect(),
            ssh_keys: self.ssh_keys(),
        }
    }

    fn machine_id(&mut self) -> Option<ExpectedMachineId> {
        let text = self.text("machine-id")?;
        let parsed = machine_id::parse(text);
        if parsed.is_none() {
            self.causes.invalid(Rule("machine-id"), field("machine-id"), text, machine_id::RULE);
        }
        parsed
    }

    fn ssh_keys(&mut self) -> Vec<String> {
        let Some(text) = self.text("ssh-keys") else { return Vec::new() };
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if lines.len() > MAX_KEYS {
            let message = format!("must have at most {MAX_KEYS} keys, and has {}", lines.len());
            self.causes.too_long(Rule("ssh-keys-number"), field("ssh-keys"), message);
            return Vec::new();
        }
        for line in &lines {
            let mut parts = line.split_whitespace();
            let kind = parts.next().unwrap_or_default();
            let known = ["ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-"].iter().any(|start| kind.starts_with(start));
            let key = parts.next().unwrap_or_default();
            let base64 = |c: char| c.is_ascii_alphanumeric() || "+/=".contains(c);
            if !known || key.len() < 16 || !key.chars().all(base64) {
                let message = "must be a public key as in an authorized_keys file: KIND BASE64 [COMMENT]";
                self.causes.invalid(Rule("ssh-key"), field("ssh-keys"), line, message);
            }
        }
        lines.into_iter().map(str::to_owned).collect()
    }

    fn processors(&mut self) {
        if let Some(cpus) = self.number("cpus") {
            self.set_cpu_count(cpus);
        }
        self.copy_text("cpu-model", &["domain", "cpu", "model"]);
        if let Some(pinned) = self.boolean("cpu-pinning") {
            self.set("cpu-pinning", &["domain", "cpu", "dedicatedCpuPlacement"], json!(pinned));
        }
    }

    /// Sets the number of cores if the document has no CPU topology; otherwise the number must be that of the topology.
    fn set_cpu_count(&mut self, cpus: u32) {
        let parts = ["cores", "sockets", "threads"];
        let part = |key: &&str| self.tree.get(&["domain", "cpu", key]).and_then(Value::as_u64);
        if parts.iter().all(|key| part(key).is_none()) {
            return self.set("cpus", &["domain", "cpu", "cores"], json!(cpus));
        }
        let current = parts.iter().try_fold(1_u64, |product, key| product.checked_mul(part(key).unwrap_or(1)));
        if current != Some(u64::from(cpus)) {
            let current = current.map_or_else(|| "too many".to_owned(), |current| current.to_string());
            let message = format!(
                "the specification's cores, sockets and threads make {current}, and {PREFIX}cpus sets another number"
            );
            self.causes.conflict(CONFLICT, "spec.domain.cpu", cpus, message);
        }
    }

    fn memory(&mut self) {
        if let Some(text) = self.text("memory") {
            match Quantity::parse(text) {
                Ok(_) => self.set("memory", &["domain", "memory", "guest"], json!(text)),
                Err(error) => self.causes.invalid(Rule("quantity"), field("memory"), text, error.to_string()),
            }
        }
        self.copy_text("hugepages", &["domain", "memory", "hugepages", "pageSize"]);
    }

    fn firmware(&mut self) {
        self.copy_text("machine", &["domain", "machine", "type"]);
        let loader = self.keyword("firmware", &["bios", "efi", "efi-secure"], |text| match text {
            "bios" => Some(json!({ "bios": {} })),
            "efi" => Some(json!({ "efi": { "secureBoot": false } })),
            "efi-secure" => Some(json!({ "efi": { "secureBoot": true } })),
            _ => None,
        });
        if let Some(loader) = loader {
            let secure = loader["efi"]["secureBoot"] == true;
            self.set("firmware", &["domain", "firmware", "bootloader"], loader);
            if secure {
                // Without SMM the guest could change the variables that secure boot relies on.
                self.set("firmware", &["domain", "features", "smm"], json!({ "enabled": true }));
            }
        }
        self.copy_text("uuid", &["domain", "firmware", "uuid"]);
        self.copy_text("serial", &["domain", "firmware", "serial"]);
        let boot = ["domain", "firmware", "kernelBoot"];
        let image = |key| [boot[0], boot[1], boot[2], "container", key];
        self.copy_text("kernel-image", &image("image"));
        self.copy_text("kernel", &image("kernelPath"));
        self.copy_text("initrd", &image("initrdPath"));
        self.copy_text("kernel-args", &[boot[0], boot[1], boot[2], "kernelArgs"]);
    }

    fn devices(&mut self) {
        if let Some(text) = self.text("disks") {
            for (disk, volume) in disks::read(text, &field("disks"), self.causes) {
                let from = format!("{PREFIX}disks");
                self.tree.push(&["volumes"], volume, &from, CONFLICT, self.causes);
                self.tree.push(&["domain", "devices", "disks"], disk, &from, CONFLICT, self.causes);
            }
        }
        self.cloud_init();
        if let Some(shown) = self.boolean("graphics") {
            self.set("graphics", &["domain", "devices", "autoattachGraphicsDevice"], json!(shown));
        }
        if let Some(seconds) = self.number("grace-period") {
            self.set("grace-period", &["terminationGracePeriodSeconds"], json!(seconds));
        }
        if let Some(mac) = self.text("mac") {
            self.set_first_interface_mac(mac);
        }
    }

    fn cloud_init(&mut self) {
        let (user, network) = (self.text("cloud-init"), self.text("cloud-init-network"));
        if user.is_none() && network.is_none() {
            return;
        }
        let mut data = json!({});
        for (key, name, text) in [("userData", "cloud-init", user), ("networkData", "cloud-init-network", network)] {
            match text {
                Some(text) if text.len() > crate::shape::MAX_STRING => {
                    let message =
                        format!("must have at most {} bytes, and has {}", crate::shape::MAX_STRING, text.len());
                    self.causes.too_long(Rule("string-length"), field(name), message);
                    return;
                }
                Some(text) => data[key] = json!(text),
                None => {}
            }
        }
        let from = format!("{PREFIX}{}", if user.is_some() { "cloud-init" } else { "cloud-init-network" });
        let volume = json!({ "name": "cloud-init", "cloudInitNoCloud": data });
        self.tree.push(&["volumes"], volume, &from, CONFLICT, self.causes);
        let disk = json!({ "name": "cloud-init", "disk": { "bus": "virtio", "readonly": true } });
        self.tree.push(&["domain", "devices", "disks"], disk, &from, CONFLICT, self.causes);
    }

    fn set_first_interface_mac(&mut self, mac: &str) {
        let from = format!("{PREFIX}mac");
        let path = ["domain", "devices", "interfaces"];
        let current = self.tree.get(&path).and_then(Value::as_array).and_then(|list| list.first());
        match current.map(|first| first.get("macAddress").cloned()) {
            None => {
                self.tree.push(&path, json!({ "name": "default", "macAddress": mac }), &from, CONFLICT, self.causes);
                if self.tree.get(&["networks"]).is_none() {
                    self.tree.push(
                        &["networks"],
                        json!({ "name": "default", "pod": {} }),
                        &from,
                        CONFLICT,
                        self.causes,
                    );
                }
            }
            Some(None) => self.tree.name_mac(mac, &from),
            Some(Some(current)) if current == mac => {}
            Some(Some(current)) => {
                let message = format!("the specification sets {current}, and {from} sets another value");
                self.causes.conflict(CONFLICT, "spec.domain.devices.interfaces[0].macAddress", mac, message);
            }
        }
    }
}

impl Tree {
    fn name_mac(&mut self, mac: &str, from: &str) {
        let first = self.value.get_mut("domain").and_then(|domain| domain.pointer_mut("/devices/interfaces/0"));
        if let Some(Value::Object(first)) = first {
            first.insert("macAddress".to_owned(), json!(mac));
            self.from.insert("spec.domain.devices.interfaces[0].macAddress".to_owned(), from.to_owned());
        }
    }
}
