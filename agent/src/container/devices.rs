//! Builds the device rules of a container, as a BPF program for its cgroup, and the entries of a specification for a block device of
//! the node.
//!
//! Building both is pure; `attach_rules` loads and attaches the program.

use libcontainer::oci_spec::OciSpecError;
use libcontainer::oci_spec::runtime::{
    LinuxDeviceBuilder, LinuxDeviceCgroup, LinuxDeviceCgroupBuilder, LinuxDeviceType, Spec,
};
use nacelle_proto::agent::BlockDevice;
use std::io;
use std::path::Path;

/// Adds a block device with these numbers to a specification.
pub fn add_device(spec: &mut Spec, device: &BlockDevice, (major, minor): (i64, i64)) -> Result<(), OciSpecError> {
    let node = LinuxDeviceBuilder::default().path(&device.container_path).typ(LinuxDeviceType::B);
    let node = node.major(major).minor(minor).file_mode(device.mode & 0o777).uid(device.uid).gid(device.gid).build()?;
    let rule = LinuxDeviceCgroupBuilder::default().allow(true).typ(LinuxDeviceType::B).major(major).minor(minor);
    let rule = rule.access(&device.access).build()?;
    let mut linux = spec.linux().clone().unwrap_or_default();
    let mut nodes = linux.devices().clone().unwrap_or_default();
    nodes.push(node);
    let mut resources = linux.resources().clone().unwrap_or_default();
    let mut rules = resources.devices().clone().unwrap_or_default();
    rules.push(rule);
    resources.set_devices(Some(rules));
    linux.set_devices(Some(nodes)).set_resources(Some(resources));
    spec.set_linux(Some(linux));
    Ok(())
}

/// The character devices that every container may use (OCI runtime specification, "Default Devices"): major, minor.
const DEFAULT_DEVICES: [(i64, Option<i64>); 9] = [
    (1, Some(3)),
    (1, Some(5)),
    (1, Some(7)),
    (1, Some(8)),
    (1, Some(9)),
    (5, Some(0)),
    (5, Some(1)),
    (5, Some(2)),
    (136, None),
];

const ACCESS_MKNOD: u32 = 1;
const ACCESS_READ: u32 = 2;
const ACCESS_WRITE: u32 = 4;
const BLOCK: u32 = 1;
const CHARACTER: u32 = 2;

struct Rule {
    allow: bool,
    kind: Option<u32>,
    access: u32,
    major: Option<u32>,
    minor: Option<u32>,
}

fn instruction(code: u8, to: u8, from: u8, offset: i16, value: u32) -> [u8; 8] {
    let [a, b] = offset.to_le_bytes();
    let [c, d, e, f] = value.to_le_bytes();
    [code, to | (from << 4), a, b, c, d, e, f]
}

fn access(text: Option<&str>) -> u32 {
    let all = ACCESS_MKNOD | ACCESS_READ | ACCESS_WRITE;
    let Some(text) = text else { return all };
    text.chars().fold(0, |access, c| {
        access
            | match c {
                'r' => ACCESS_READ,
                'w' => ACCESS_WRITE,
                'm' => ACCESS_MKNOD,
                _ => 0,
            }
    })
}

fn number(number: Option<i64>) -> Option<u32> {
    number.and_then(|number| u32::try_from(number).ok())
}

fn rules(asked: &[LinuxDeviceCgroup]) -> Vec<Rule> {
    let mut rules: Vec<Rule> = asked
        .iter()
        .map(|rule| Rule {
            allow: rule.allow(),
            kind: match rule.typ() {
                Some(LinuxDeviceType::B) => Some(BLOCK),
                Some(LinuxDeviceType::C | LinuxDeviceType::U) => Some(CHARACTER),
                _ => None,
            },
            access: access(rule.access().as_deref()),
            major: number(rule.major()),
            minor: number(rule.minor()),
        })
        .collect();
    let mknod = [BLOCK, CHARACTER].map(|kind| (Some(kind), ACCESS_MKNOD, None, None));
    let default =
        DEFAULT_DEVICES.map(|(major, minor)| (Some(CHARACTER), access(None), number(Some(major)), number(minor)));
    let extra = mknod.into_iter().chain(default);
    rules.extend(extra.map(|(kind, access, major, minor)| Rule { allow: true, kind, access, major, minor }));
    rules
}

/// Builds the program. The last rule that covers an access decides; an access without a rule is denied.
pub fn build_program(asked: &[LinuxDeviceCgroup]) -> Vec<[u8; 8]> {
    const LOAD_WORD: u8 = 0x61;
    const AND: u8 = 0x54;
    const SHIFT_RIGHT: u8 = 0x74;
    const COPY: u8 = 0xbc;
    const SET: u8 = 0xb7;
    const EXIT: u8 = 0x95;
    const JUMP_NOT_EQUAL: u8 = 0x55;
    const JUMP_NOT_EQUAL_REGISTER: u8 = 0x5d;
    // r2: kind, r3: access, r4: major, r5: minor.
    let mut code = vec![
        instruction(LOAD_WORD, 2, 1, 0, 0),
        instruction(AND, 2, 0, 0, 0xffff),
        instruction(LOAD_WORD, 3, 1, 0, 0),
        instruction(SHIFT_RIGHT, 3, 0, 0, 16),
        instruction(LOAD_WORD, 4, 1, 4, 0),
        instruction(LOAD_WORD, 5, 1, 8, 0),
    ];
    for rule in rules(asked).iter().rev() {
        let mut tests: Vec<[u8; 8]> = Vec::new();
        let mut block = Vec::new();
        tests.extend(rule.kind.map(|kind| instruction(JUMP_NOT_EQUAL, 2, 0, 0, kind)));
        if rule.access != access(None) {
            // The rule covers an access only if it has all its operations.
            block.push(instruction(COPY, 1, 3, 0, 0));
            block.push(instruction(AND, 1, 0, 0, rule.access));
            tests.push(instruction(JUMP_NOT_EQUAL_REGISTER, 1, 3, 0, 0));
        }
        tests.extend(rule.major.map(|major| instruction(JUMP_NOT_EQUAL, 4, 0, 0, major)));
        tests.extend(rule.minor.map(|minor| instruction(JUMP_NOT_EQUAL, 5, 0, 0, minor)));
        let count = tests.len();
        for (at, mut test) in tests.into_iter().enumerate() {
            // Over the remaining tests and the two instructions of the verdict.
            let [low, high] = i16::try_from(count - at - 1 + 2).unwrap_or(2).to_le_bytes();
            test[2] = low;
            test[3] = high;
            block.push(test);
        }
        block.push(instruction(SET, 0, 0, 0, u32::from(rule.allow)));
        block.push(instruction(EXIT, 0, 0, 0, 0));
        let ends = count == 0;
        code.extend(block);
        if ends {
            // The kernel rejects programs with instructions that cannot be reached.
            return code;
        }
    }
    code.push(instruction(SET, 0, 0, 0, 0));
    code.push(instruction(EXIT, 0, 0, 0, 0));
    code
}

/// Attaches the rules to a cgroup.
pub fn attach_rules(cgroup: &Path, asked: &[LinuxDeviceCgroup]) -> io::Result<()> {
    crate::sys::attach_device_program(std::fs::File::open(cgroup)?, &build_program(asked))
}

#[cfg(test)]
mod tests {
    use super::*;
    use libcontainer::oci_spec::runtime::LinuxDeviceCgroupBuilder;

    /// Interprets a program, and returns whether it allows an access.
    fn allowed(program: &[[u8; 8]], kind: u32, access: u32, major: u32, minor: u32) -> bool {
        let mut registers = [0_u64; 16];
        let words = [access << 16 | kind, major, minor];
        let mut at = 0;
        loop {
            let [code, both, low, high, a, b, c, d] = program[at];
            let (to, from) = (usize::from(both & 15), usize::from(both >> 4));
            let offset = i16::from_le_bytes([low, high]);
            let value = u64::from(u32::from_le_bytes([a, b, c, d]));
            at += 1;
            match code {
                0x61 => registers[to] = u64::from(words[usize::try_from(offset).unwrap() / 4]),
                0x54 => registers[to] &= value,
                0x74 => registers[to] >>= value,
                0xbc => registers[to] = registers[from],
                0xb7 => registers[to] = value,
                0x95 => return registers[0] == 1,
                0x55 if registers[to] != value => at += usize::try_from(offset).unwrap(),
                0x5d if registers[to] != registers[from] => at += usize::try_from(offset).unwrap(),
                0x55 | 0x5d => {}
                other => panic!("unknown instruction {other:#x}"),
            }
        }
    }

    fn rule(allow: bool, kind: Option<LinuxDeviceType>, major: Option<i64>, access: &str) -> LinuxDeviceCgroup {
        let mut builder = LinuxDeviceCgroupBuilder::default().allow(allow).access(access);
        if let Some(kind) = kind {
            builder = builder.typ(kind);
        }
        if let Some(major) = major {
            builder = builder.major(major);
        }
        builder.build().unwrap()
    }

    #[test]
    fn only_the_usual_devices_are_open_by_default() {
        let program = build_program(&[rule(false, None, None, "rwm")]);
        assert!(allowed(&program, CHARACTER, ACCESS_READ | ACCESS_WRITE, 1, 3));
        assert!(allowed(&program, CHARACTER, ACCESS_READ, 136, 7));
        assert!(allowed(&program, BLOCK, ACCESS_MKNOD, 254, 0));
        assert!(!allowed(&program, BLOCK, ACCESS_READ, 254, 0));
        assert!(!allowed(&program, CHARACTER, ACCESS_READ, 1, 1));
        assert!(!allowed(&program, BLOCK, ACCESS_READ | ACCESS_MKNOD, 254, 0));
    }

    #[test]
    fn a_device_of_the_node_is_a_file_and_a_rule() {
        let mut spec = Spec::default();
        let device = BlockDevice {
            partition: 3,
            container_path: "/dev/data".into(),
            access: "r".into(),
            mode: 0o60660,
            uid: 1,
            gid: 6,
        };
        add_device(&mut spec, &device, (254, 35)).unwrap();
        let other = BlockDevice { container_path: "/dev/more".into(), access: "rwm".into(), ..device };
        add_device(&mut spec, &other, (259, 1)).unwrap();
        let linux = spec.linux().as_ref().unwrap();
        let nodes = linux.devices().as_ref().unwrap();
        let node = nodes.iter().find(|node| node.path() == Path::new("/dev/data")).unwrap();
        assert_eq!((node.typ(), node.major(), node.minor()), (LinuxDeviceType::B, 254, 35));
        assert_eq!((node.file_mode(), node.uid(), node.gid()), (Some(0o660), Some(1), Some(6)));
        let program = build_program(linux.resources().as_ref().unwrap().devices().as_ref().unwrap());
        assert!(allowed(&program, BLOCK, ACCESS_READ, 254, 35));
        assert!(!allowed(&program, BLOCK, ACCESS_WRITE, 254, 35));
        assert!(allowed(&program, BLOCK, ACCESS_READ | ACCESS_WRITE, 259, 1));
    }

    #[test]
    fn the_last_rule_decides() {
        let kind = Some(LinuxDeviceType::B);
        let open = build_program(&[rule(false, None, None, "rwm"), rule(true, kind, Some(8), "r")]);
        assert!(allowed(&open, BLOCK, ACCESS_READ, 8, 1));
        assert!(!allowed(&open, BLOCK, ACCESS_WRITE, 8, 1));
        assert!(!allowed(&open, BLOCK, ACCESS_READ, 9, 1));
        let privileged = build_program(&[rule(false, None, None, "rwm"), rule(true, None, None, "rwm")]);
        assert!(allowed(&privileged, BLOCK, ACCESS_WRITE, 254, 0));
        let none = build_program(&[]);
        assert!(!allowed(&none, BLOCK, ACCESS_WRITE, 254, 0));
    }
}
