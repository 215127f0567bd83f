//! Adds examples and exit codes to the help of the commands.

use super::Cli;
use super::exit::ExitStatus;
use clap::{Command, CommandFactory};

/// The examples of each command, by its words.
const EXAMPLES: &[(&str, &[&str])] = &[
    ("", &["nacelle check", "nacelle pods", "nacelle image ls -o json"]),
    ("serve", &["nacelle serve --config /etc/nacelle/config.toml"]),
    (
        "check",
        &["nacelle check", "nacelle check -o json", "nacelle check --jail 3f2a91c0d4e5", "nacelle check --overhead"],
    ),
    ("checkpoint", &["nacelle checkpoint create 3f2a91c0d4e5 warm", "nacelle checkpoint ls"]),
    (
        "checkpoint create",
        &["nacelle checkpoint create 3f2a91c0d4e5 warm", "nacelle checkpoint create 3f2a91c0d4e5 warm --limit 60"],
    ),
    ("checkpoint ls", &["nacelle checkpoint ls", "nacelle checkpoint ls --namespace default -o json"]),
    ("checkpoint rm", &["nacelle checkpoint rm warm", "nacelle checkpoint rm warm cold --namespace shop"]),
    ("config", &["nacelle config default", "nacelle config check"]),
    ("config default", &["nacelle config default"]),
    ("config check", &["nacelle config check", "nacelle config check /tmp/config.toml -o json"]),
    ("debug", &["nacelle debug bundle"]),
    ("debug bundle", &["nacelle debug bundle", "nacelle debug bundle -o /tmp/report.tar.gz"]),
    ("image", &["nacelle image load busybox.tar", "nacelle image ls"]),
    ("image load", &["nacelle image load busybox.tar", "nacelle image load layout --name registry.example/app:1"]),
    ("image pull", &["nacelle image pull registry.example/app:1"]),
    ("image ls", &["nacelle image ls", "nacelle image ls -o json"]),
    ("image rm", &["nacelle image rm registry.example/app:1"]),
    ("image verify", &["nacelle image verify", "nacelle image verify --repair registry.example/app:1"]),
    ("pods", &["nacelle pods", "nacelle pods -o yaml", "nacelle pods --timeline 3f2a91c0d4e5"]),
    (
        "shell",
        &[
            "nacelle shell 3f2a91c0d4e5",
            "nacelle shell 3f2a91c0d4e5 --container debugger -- ip addr",
            "nacelle shell 3f2a91c0d4e5 -- cat /proc/1/mounts",
        ],
    ),
    ("top", &["nacelle top", "nacelle top --interval 5s", "nacelle top --once -o json"]),
    ("templates", &["nacelle templates ls", "nacelle templates build"]),
    ("templates ls", &["nacelle templates ls"]),
    ("templates build", &["nacelle templates build", "nacelle templates build large"]),
    ("templates rm", &["nacelle templates rm", "nacelle templates rm 0123456789abcdef"]),
    ("vm", &["nacelle vm ls", "nacelle vm validate db.yaml"]),
    ("vm validate", &["nacelle vm validate db.yaml", "nacelle vm validate - -o json"]),
    ("vm convert", &["nacelle vm convert kubevirt.yaml --runtime-class nacelle-machines"]),
    ("vm schema", &["nacelle vm schema"]),
    ("vm ls", &["nacelle vm ls", "nacelle vm ls --namespace default -o json"]),
    ("vm describe", &["nacelle vm describe db", "nacelle vm describe db -o yaml"]),
    ("vm start", &["nacelle vm start db"]),
    ("vm stop", &["nacelle vm stop db"]),
    ("vm restart", &["nacelle vm restart db"]),
    ("vm power-off", &["nacelle vm power-off db"]),
    ("vm pause", &["nacelle vm pause db"]),
    ("vm unpause", &["nacelle vm unpause db"]),
    ("vm reset", &["nacelle vm reset db"]),
    ("vm soft-reboot", &["nacelle vm soft-reboot db"]),
    ("vm console", &["nacelle vm console db --namespace default"]),
    ("vm vnc", &["nacelle vm vnc db --listen 127.0.0.1:5900"]),
    ("vm screenshot", &["nacelle vm screenshot db --output screen.png"]),
    ("vm memory-dump", &["nacelle vm memory-dump db --output db.elf"]),
    ("vm guest-info", &["nacelle vm guest-info db"]),
    ("vm snapshot", &["nacelle vm snapshot db before-upgrade"]),
    ("vm restore", &["nacelle vm restore db before-upgrade"]),
    ("vm snapshots", &["nacelle vm snapshots db"]),
    ("vm rm-snapshot", &["nacelle vm rm-snapshot db before-upgrade"]),
    ("vm add-volume", &["nacelle vm add-volume db data=10Gi"]),
    ("vm rm-volume", &["nacelle vm rm-volume db data"]),
    ("vm volumes", &["nacelle vm volumes db"]),
    ("vm clone", &["nacelle vm clone db db2"]),
    ("vm export", &["nacelle vm export db registry.example/machines/db:1"]),
    ("vm import", &["nacelle vm import registry.example/machines/db:1 db"]),
    ("vm rm", &["nacelle vm rm db"]),
    ("vm watch", &["nacelle vm watch --namespace default"]),
    ("log", &["nacelle log", "nacelle log warn,nacelle_image=trace"]),
    ("store", &["nacelle store export node.state", "nacelle store import --replace node.state"]),
    ("store export", &["nacelle store export node.state"]),
    ("store import", &["nacelle store import node.state", "nacelle store import --replace node.state"]),
    ("admission", &["nacelle admission --tls-cert /tls/tls.crt --tls-key /tls/tls.key"]),
    ("admission manifests", &["nacelle admission manifests --ca-file ca.crt"]),
    ("completion", &["nacelle completion bash"]),
    ("version", &["nacelle version", "nacelle version -o json"]),
];

/// Returns the definition of the command line with examples and exit codes.
pub(super) fn command() -> Command {
    add_examples(Cli::command(), "")
}

fn add_examples(command: Command, words: &str) -> Command {
    let command = match EXAMPLES.iter().find(|(of, _)| *of == words) {
        Some((_, examples)) => command.after_help(after_help(words, examples)),
        None => command,
    };
    command.mut_subcommands(|command| {
        let words = format!("{words} {}", command.get_name());
        add_examples(command, words.trim_start())
    })
}

fn after_help(words: &str, examples: &[&str]) -> String {
    let mut text = "Examples:\n".to_owned();
    for example in examples {
        text += &format!("  {example}\n");
    }
    if words.is_empty() {
        text += "\nExit codes:\n";
        for (status, meaning) in ExitStatus::ALL {
            text += &format!("  {:<5}{meaning}\n", status.code());
        }
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::BTreeSet;

    pub(in crate::cli) fn walk(command: &Command, words: &str, visit: &mut impl FnMut(&str, &Command)) {
        visit(words, command);
        for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            walk(command, format!("{words} {}", command.get_name()).trim_start(), visit);
        }
    }

    #[test]
    fn every_command_has_examples_that_are_valid() {
        let mut missing: BTreeSet<&str> = EXAMPLES.iter().map(|(words, _)| *words).collect();
        walk(&command(), "", &mut |words, command| {
            assert!(missing.remove(words), "{words}: it has no examples");
            let help = command.get_after_help().expect("it has examples").to_string();
            assert!(help.starts_with("Examples:\n  nacelle"), "{help}");
        });
        assert_eq!(missing, BTreeSet::new(), "there are no such commands");
        for example in EXAMPLES.iter().flat_map(|(_, examples)| *examples) {
            command().try_get_matches_from(example.split(' ')).unwrap_or_else(|error| panic!("{example}: {error}"));
        }
    }

    #[test]
    fn lists_and_removals_have_the_same_names_everywhere() {
        walk(&command(), "", &mut |words, command| {
            let name = command.get_name();
            let aliases: Vec<&str> = command.get_all_aliases().collect();
            match name.split_once('-').map_or((name, ""), |(verb, object)| (verb, object)) {
                ("ls", "") => assert!(aliases.contains(&"list"), "{words}"),
                ("rm", object) => {
                    for verb in ["delete", "remove"] {
                        let alias = format!("{verb}-{object}");
                        assert!(aliases.contains(&alias.trim_end_matches('-')), "{words} lacks {alias}");
                    }
                }
                (verb, _) => {
                    assert!(!["list", "delete", "remove", "drop"].contains(&verb), "{words}: name it ls or rm")
                }
            }
        });
    }

    /// The commands that print no data: they act, run until they are interrupted, or write a document or a stream.
    const WITHOUT_FORMAT: &[&str] = &[
        "serve",
        "checkpoint rm",
        "config default",
        "debug bundle",
        "image rm",
        "shell",
        "vm convert",
        "vm schema",
        "vm start",
        "vm stop",
        "vm restart",
        "vm power-off",
        "vm pause",
        "vm unpause",
        "vm reset",
        "vm soft-reboot",
        "vm console",
        "vm vnc",
        "vm screenshot",
        "vm memory-dump",
        "vm guest-info",
        "vm snapshot",
        "vm restore",
        "vm rm-snapshot",
        "vm add-volume",
        "vm rm-volume",
        "vm clone",
        "vm rm",
        "vm watch",
        "admission",
        "admission manifests",
        "completion",
    ];

    /// Returns whether a command is no group of commands, and prints data.
    pub(in crate::cli) fn prints_data(words: &str, command: &Command) -> bool {
        let is_group = command.has_subcommands() && words != "admission";
        !is_group && !WITHOUT_FORMAT.contains(&words)
    }

    #[test]
    fn commands_that_print_data_have_all_formats() {
        walk(&command(), "", &mut |words, command| {
            let formats = command.get_arguments().find(|argument| argument.get_id() == "output").map(|argument| {
                argument.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect::<Vec<_>>()
            });
            if prints_data(words, command) {
                assert_eq!(formats.unwrap_or_default(), ["table", "json", "yaml"], "{words}");
            } else {
                assert!(formats.is_none_or(|formats| formats.is_empty()), "{words}");
            }
        });
    }
}
