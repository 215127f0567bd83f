//! Implements the commands of `nacelle vm` that call the daemon: lists machines and runs operations on them.

mod dump;
mod transfer;
mod ways;

use super::{connect, told};
use crate::config::Config;
use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use nacelle_proto::vm;
use nacelle_proto::vm::machines_client::MachinesClient;
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use tonic::transport::Channel;

/// One message: a picture.
const MESSAGE_LIMIT: usize = 80 << 20;

type Client = MachinesClient<Channel>;

#[derive(Subcommand)]
pub(super) enum Machines {
    /// Lists the machines of this node.
    List {
        /// The namespace; all without it.
        #[arg(long, short)]
        namespace: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Says what is known of a machine, as JSON.
    Describe(Name),
    /// Has one run that is off.
    Start(Name),
    /// Presses the power button; the machine stays off, and its pod runs on.
    Stop(Name),
    /// Presses the power button; the machine runs again.
    Restart(Name),
    /// Takes its power away.
    PowerOff(Name),
    /// Has its processors stand still.
    Pause(Name),
    /// Has them go on.
    Unpause(Name),
    /// Presses the reset button.
    Reset(Name),
    /// Asks the guest agent to restart the system.
    SoftReboot(Name),
    /// Connects this terminal with the serial console; Ctrl-] leaves it.
    Console(Name),
    /// Listens for VNC's clients, and passes them on to the screen, until it is interrupted.
    Vnc {
        #[command(flatten)]
        name: Name,
        /// Where; port 0: any free one, which is printed.
        #[arg(long, default_value = "127.0.0.1:0")]
        listen: SocketAddr,
    },
    /// Takes a picture of the screen, as PNG.
    Screenshot {
        #[command(flatten)]
        name: Name,
        /// Where to; the standard output without it.
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Writes all memory of the guest, for debuggers; meanwhile the machine stands still.
    MemoryDump {
        #[command(flatten)]
        name: Name,
        /// Where to; the standard output without it. The file is there when all of it is.
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
        /// How it is written.
        #[arg(long, value_enum, default_value = "elf")]
        format: DumpFormat,
    },
    /// Prints what the guest agent says of the system.
    GuestInfo(Name),
    /// Keeps disks, memory and devices as they are now; meanwhile the machine stands still.
    Snapshot(SnapshotName),
    /// Has all as it was when a snapshot was taken.
    Restore(SnapshotName),
    /// Lists the snapshots of a machine.
    Snapshots(Name),
    /// Forgets a snapshot.
    DeleteSnapshot(SnapshotName),
    /// Gives it an empty disk, also while it runs; the disk stays until it is removed, or the machine is.
    AddVolume {
        #[command(flatten)]
        name: Name,
        /// The disk: NAME=SIZE, as data=10Gi. NAME becomes its serial number.
        #[arg(value_parser = volume)]
        volume: (String, u64),
    },
    /// Takes away a disk that was added, with all that is on it; the guest of one that runs has to let go of it.
    RemoveVolume {
        #[command(flatten)]
        name: Name,
        /// The disk.
        volume: String,
    },
    /// Lists the disks that were added.
    Volumes(Name),
    /// Makes another machine, with a copy of what this one has kept; no pod may hold it.
    Clone {
        #[command(flatten)]
        name: Name,
        /// The other machine, in the same namespace.
        to: String,
    },
    /// Puts a machine that outlives its pods into a registry, as an OCI artifact; one that runs stands still while it is copied.
    Export(transfer::Export),
    /// Makes a machine of such an artifact, on this node or another.
    Import(transfer::Import),
    /// Forgets a machine that outlives its pods, with all that it has kept.
    Delete(Name),
    /// Prints each machine, and again when it has changed, as lines of JSON.
    Watch {
        /// The namespace; all without it.
        #[arg(long, short)]
        namespace: Option<String>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum DumpFormat {
    /// As core files of processes are: gdb, crash, drgn.
    Elf,
    /// Compressed, in the flattened form of makedumpfile: crash.
    KdumpZlib,
}

#[derive(clap::Args)]
pub(super) struct Name {
    /// The machine, or the pod that it goes with.
    name: String,
    /// Its namespace.
    #[arg(long, short, default_value = "default")]
    namespace: String,
}

#[derive(clap::Args)]
pub(super) struct SnapshotName {
    #[command(flatten)]
    machine: Name,
    /// The snapshot.
    snapshot: String,
}

impl SnapshotName {
    fn snapshot(self) -> vm::SnapshotRef {
        vm::SnapshotRef { machine: Some(self.machine.machine()), name: self.snapshot }
    }
}

impl Name {
    fn machine(self) -> vm::MachineRef {
        vm::MachineRef { namespace: self.namespace, name: self.name }
    }
}

/// NAME=SIZE, with a quantity as Kubernetes writes it.
fn volume(text: &str) -> Result<(String, u64), String> {
    let (name, size) = text.split_once('=').ok_or("NAME=SIZE is expected, as data=10Gi")?;
    let bytes = nacelle_vmi::Quantity::parse(size).ok().and_then(|size| size.bytes());
    let bytes = bytes.ok_or_else(|| format!("{size:?} is no size: 10Gi is one"))?;
    Ok((name.to_owned(), bytes))
}

pub(super) fn run(config: &Config, command: Machines) -> anyhow::Result<ExitCode> {
    super::runtime()?.block_on(async {
        let socket = &config.paths.socket;
        let channel = connect(socket).await;
        let channel = channel.with_context(|| format!("nobody serves {}: is the daemon running?", socket.display()))?;
        let client = MachinesClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT);
        ask(client, command).await
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn ask(mut client: Client, command: Machines) -> anyhow::Result<()> {
    match command {
        Machines::List { namespace, json } => {
            let request = vm::ListRequest { namespace: namespace.unwrap_or_default() };
            let machines = client.list(request).await.map_err(told)?.into_inner().machines;
            if json {
                println!("{:#}", Value::Array(machines.iter().map(shown).collect()));
            } else {
                print!("{}", table(&machines));
            }
        }
        Machines::Describe(name) => {
            let machine = client.describe(name.machine()).await.map_err(told)?.into_inner();
            println!("{:#}", shown(&machine));
        }
        Machines::Console(name) => ways::console(client, name.machine()).await?,
        Machines::Vnc { name, listen } => ways::vnc(client, name.machine(), listen).await?,
        Machines::Start(name) => drop(client.start(name.machine()).await.map_err(told)?),
        Machines::Stop(name) => drop(client.stop(name.machine()).await.map_err(told)?),
        Machines::Restart(name) => drop(client.restart(name.machine()).await.map_err(told)?),
        Machines::PowerOff(name) => drop(client.power_off(name.machine()).await.map_err(told)?),
        Machines::Pause(name) => drop(client.pause(name.machine()).await.map_err(told)?),
        Machines::Unpause(name) => drop(client.unpause(name.machine()).await.map_err(told)?),
        Machines::Reset(name) => drop(client.reset(name.machine()).await.map_err(told)?),
        Machines::SoftReboot(name) => drop(client.soft_reboot(name.machine()).await.map_err(told)?),
        Machines::Delete(name) => drop(client.delete(name.machine()).await.map_err(told)?),
        Machines::Snapshot(name) => drop(client.snapshot(name.snapshot()).await.map_err(told)?),
        Machines::Restore(name) => drop(client.restore(name.snapshot()).await.map_err(told)?),
        Machines::DeleteSnapshot(name) => drop(client.delete_snapshot(name.snapshot()).await.map_err(told)?),
        Machines::Clone { name, to } => {
            let to = vm::MachineRef { namespace: name.namespace.clone(), name: to };
            let request = vm::CopyRequest { from: Some(name.machine()), to: Some(to) };
            drop(client.copy(request).await.map_err(told)?);
        }
        Machines::Export(asked) => transfer::export(&mut client, asked).await?,
        Machines::Import(asked) => transfer::import(&mut client, asked).await?,
        Machines::Snapshots(name) => {
            let all = client.list_snapshots(name.machine()).await.map_err(told)?.into_inner().snapshots;
            let one = |snapshot: &vm::SnapshotInfo| json!({ "name": snapshot.name, "takenAt": snapshot.taken_at, "bytes": snapshot.bytes });
            println!("{:#}", Value::Array(all.iter().map(one).collect()));
        }
        Machines::AddVolume { name, volume: (volume, bytes) } => {
            let request = vm::AddVolumeRequest { machine: Some(name.machine()), name: volume, bytes };
            drop(client.add_volume(request).await.map_err(told)?);
        }
        Machines::RemoveVolume { name, volume } => {
            let request = vm::VolumeRef { machine: Some(name.machine()), name: volume };
            drop(client.remove_volume(request).await.map_err(told)?);
        }
        Machines::Volumes(name) => {
            let all = client.list_volumes(name.machine()).await.map_err(told)?.into_inner().volumes;
            let one = |volume: &vm::Volume| json!({ "name": volume.name, "bytes": volume.bytes });
            println!("{:#}", Value::Array(all.iter().map(one).collect()));
        }
        Machines::GuestInfo(name) => {
            print!("{}", client.guest_info(name.machine()).await.map_err(told)?.into_inner().text);
        }
        Machines::Screenshot { name, output } => {
            let png = client.screenshot(name.machine()).await.map_err(told)?.into_inner().png;
            match output {
                Some(path) => std::fs::write(&path, png).with_context(|| format!("cannot write {}", path.display()))?,
                None => {
                    anyhow::ensure!(!std::io::stdout().is_terminal(), "a picture is no text: say --output FILE");
                    std::io::stdout().write_all(&png)?;
                }
            }
        }
        Machines::MemoryDump { name, output, format } => {
            let format = match format {
                DumpFormat::Elf => "elf",
                DumpFormat::KdumpZlib => "kdump-zlib",
            };
            let request = vm::MemoryDumpRequest { machine: Some(name.machine()), format: format.to_owned() };
            dump::write(client.memory_dump(request).await.map_err(told)?.into_inner(), output).await?;
        }
        Machines::Watch { namespace } => {
            let request = vm::ListRequest { namespace: namespace.unwrap_or_default() };
            let mut machines = client.watch(request).await.map_err(told)?.into_inner();
            while let Some(machine) = machines.message().await.map_err(told)? {
                println!("{}", shown(&machine));
                std::io::stdout().flush()?;
            }
        }
    }
    Ok(())
}

fn shown(machine: &vm::Machine) -> Value {
    json!({
        "namespace": machine.namespace,
        "name": machine.name,
        "phase": machine.phase,
        "outlivesPods": machine.outlives_pods,
        "runStrategy": machine.run_strategy,
        "pod": { "id": machine.pod_id, "name": machine.pod_name, "container": machine.container_id },
        "addresses": machine.addresses,
        "uuid": machine.uuid,
        "mac": machine.mac,
        "vcpus": machine.vcpus,
        "memoryMiB": machine.memory_mib,
        "agentConnected": machine.agent_connected,
        "softwareEmulation": machine.software_emulation,
        "createdAt": machine.created_at,
    })
}

fn table(machines: &[vm::Machine]) -> String {
    let mut rows =
        vec![["NAMESPACE", "NAME", "PHASE", "STRATEGY", "POD", "ADDRESS", "CPUS", "MEMORY"].map(str::to_owned)];
    rows.extend(machines.iter().map(|machine| {
        let some = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
        let number = |number: u64, unit: &str| if number == 0 { "-".to_owned() } else { format!("{number}{unit}") };
        [
            machine.namespace.clone(),
            machine.name.clone(),
            machine.phase.clone(),
            some(&machine.run_strategy),
            some(&machine.pod_id.chars().take(13).collect::<String>()),
            some(machine.addresses.first().map_or("", String::as_str)),
            number(machine.vcpus.into(), ""),
            number(machine.memory_mib, "Mi"),
        ]
    }));
    let width = |column: usize| rows.iter().map(|row| row.get(column).map_or(0, String::len)).max().unwrap_or_default();
    let widths: Vec<usize> = (0..8).map(width).collect();
    let line = |row: &[String; 8]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_for_each_machine() {
        let machine = vm::Machine {
            namespace: "default".into(),
            name: "db".into(),
            phase: "Running".into(),
            memory_mib: 512,
            ..vm::Machine::default()
        };
        let table = table(&[machine]);
        let lines: Vec<_> = table.lines().collect();
        assert_eq!(lines[0].split_whitespace().count(), 8);
        assert_eq!(
            lines[1].split_whitespace().collect::<Vec<_>>(),
            ["default", "db", "Running", "-", "-", "-", "-", "512Mi"]
        );
    }
}
