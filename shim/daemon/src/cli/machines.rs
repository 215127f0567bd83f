//! Implements the commands of `nacelle vm` that call the daemon: lists VMs and runs operations on them.

mod console;
mod dump;
mod transfer;
pub(super) mod views;

use super::ExitStatus;
use super::daemon::{connect, status_error};
use super::exit::CommandError;
use super::output::{OutputArgument, output_error, print, print_bytes};
use crate::config::Config;
use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use nacelle_proto::vm;
use nacelle_proto::vm::machines_client::MachinesClient;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use tonic::transport::Channel;
pub(super) use views::VmView;
use views::{SnapshotView, VolumeView};

/// The largest message in bytes: a screenshot.
const MESSAGE_LIMIT: usize = 80 << 20;

type VmClient = MachinesClient<Channel>;

#[derive(Subcommand)]
pub(super) enum VmOperation {
    /// Lists the VMs of this node.
    #[command(alias = "list")]
    Ls {
        /// Lists only the VMs of this namespace.
        #[arg(long, short)]
        namespace: Option<String>,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Prints the configuration and state of a VM.
    Describe {
        #[command(flatten)]
        name: VmName,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Starts a stopped VM.
    Start(VmName),
    /// Shuts a VM down with the power button; it stays stopped, and its pod continues to run.
    Stop(VmName),
    /// Shuts a VM down with the power button and starts it again.
    Restart(VmName),
    /// Powers a VM off at once, without a shutdown of the guest.
    PowerOff(VmName),
    /// Pauses the vCPUs of a VM.
    Pause(VmName),
    /// Resumes the vCPUs of a paused VM.
    Unpause(VmName),
    /// Resets a VM as its reset button does.
    Reset(VmName),
    /// Reboots the operating system through the guest agent.
    SoftReboot(VmName),
    /// Connects this terminal to the serial console; press Ctrl-] to leave it.
    Console(VmName),
    /// Listens for VNC clients and connects them to the VM's screen, until it is interrupted.
    Vnc {
        #[command(flatten)]
        name: VmName,
        /// The address to listen on; port 0 selects a free port. The address is printed.
        #[arg(long, default_value = "127.0.0.1:0")]
        listen: SocketAddr,
    },
    /// Takes a screenshot as PNG.
    Screenshot {
        #[command(flatten)]
        name: VmName,
        /// The output file; without it, standard output.
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Writes the guest's memory for debuggers; the VM is paused meanwhile.
    MemoryDump {
        #[command(flatten)]
        name: VmName,
        /// The output file, which appears when the dump is complete; without it, standard output.
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
        /// The format of the dump.
        #[arg(long, value_enum, default_value = "elf")]
        format: DumpFormat,
    },
    /// Prints what the guest agent reports about the operating system.
    GuestInfo(VmName),
    /// Takes a snapshot of disks, memory and devices; the VM is paused meanwhile.
    Snapshot(SnapshotName),
    /// Restores disks, memory and devices from a snapshot.
    Restore(SnapshotName),
    /// Lists the snapshots of a VM.
    Snapshots {
        #[command(flatten)]
        name: VmName,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Deletes a snapshot.
    #[command(aliases = ["delete-snapshot", "remove-snapshot"])]
    RmSnapshot(SnapshotName),
    /// Attaches a new empty disk, also to a running VM; the disk exists until it or the VM is removed.
    AddVolume {
        #[command(flatten)]
        name: VmName,
        /// The disk as NAME=SIZE, for example data=10Gi. NAME becomes its serial number.
        #[arg(value_parser = parse_volume)]
        volume: (String, u64),
    },
    /// Detaches a disk that was added and deletes its contents; the guest of a running VM must release it first.
    #[command(aliases = ["delete-volume", "remove-volume"])]
    RmVolume {
        #[command(flatten)]
        name: VmName,
        /// The name of the disk.
        volume: String,
    },
    /// Lists the disks that were added to a VM.
    Volumes {
        #[command(flatten)]
        name: VmName,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Copies a persistent VM to a new one; no pod may run it meanwhile.
    Clone {
        #[command(flatten)]
        name: VmName,
        /// The name of the new VM, in the same namespace.
        to: String,
    },
    /// Exports a persistent VM to a registry as an OCI artifact; a running VM is paused while it is copied.
    Export(transfer::ExportArguments),
    /// Imports a persistent VM from an OCI artifact, on this node or another.
    Import(transfer::ImportArguments),
    /// Deletes a persistent VM with its disks and snapshots.
    #[command(aliases = ["delete", "remove"])]
    Rm(VmName),
    /// Prints a line of JSON for each VM, and another whenever a VM changes.
    Watch {
        /// Prints only the VMs of this namespace.
        #[arg(long, short)]
        namespace: Option<String>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum DumpFormat {
    /// An ELF core file, for gdb, crash and drgn.
    Elf,
    /// Compressed, in the flattened format of makedumpfile, for crash.
    KdumpZlib,
}

#[derive(Clone, clap::Args)]
pub(super) struct VmName {
    /// The name of the VM, or of the pod that runs it.
    name: String,
    /// The namespace of the VM.
    #[arg(long, short, default_value = "default")]
    namespace: String,
}

#[derive(clap::Args)]
pub(super) struct SnapshotName {
    #[command(flatten)]
    machine: VmName,
    /// The name of the snapshot.
    snapshot: String,
}

impl SnapshotName {
    fn into_ref(self) -> vm::SnapshotRef {
        vm::SnapshotRef { machine: Some(self.machine.into_ref()), name: self.snapshot }
    }
}

impl VmName {
    fn into_ref(self) -> vm::MachineRef {
        vm::MachineRef { namespace: self.namespace, name: self.name }
    }
}

/// Parses NAME=SIZE; the size is a Kubernetes quantity.
fn parse_volume(text: &str) -> Result<(String, u64), String> {
    let (name, size) = text.split_once('=').ok_or("NAME=SIZE is expected, for example data=10Gi")?;
    let bytes = nacelle_vmi::Quantity::parse(size).ok().and_then(|size| size.bytes());
    let bytes = bytes.ok_or_else(|| format!("invalid size {size:?}: a quantity is expected, for example 10Gi"))?;
    Ok((name.to_owned(), bytes))
}

pub(super) fn run(config: &Config, operation: VmOperation) -> anyhow::Result<ExitStatus> {
    super::runtime()?.block_on(async {
        let channel = connect(&config.paths.socket).await?;
        let client = MachinesClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT);
        execute(client, operation).await
    })?;
    Ok(ExitStatus::Success)
}

async fn execute(mut client: VmClient, operation: VmOperation) -> anyhow::Result<()> {
    match operation {
        VmOperation::Ls { namespace, output } => {
            output.print(&list_in(&mut client, namespace.unwrap_or_default()).await?)?;
        }
        VmOperation::Describe { name, output } => {
            let machine = client.describe(name.into_ref()).await.map_err(status_error)?.into_inner();
            output.print(&VmView::from(machine))?;
        }
        VmOperation::Watch { namespace } => watch(&mut client, namespace).await?,
        VmOperation::Console(name) => console::attach_terminal(client, name.into_ref()).await?,
        VmOperation::Vnc { name, listen } => console::serve_vnc(client, name.into_ref(), listen).await?,
        VmOperation::Start(name) => drop(client.start(name.into_ref()).await.map_err(status_error)?),
        VmOperation::Stop(name) => drop(client.stop(name.into_ref()).await.map_err(status_error)?),
        VmOperation::Restart(name) => drop(client.restart(name.into_ref()).await.map_err(status_error)?),
        VmOperation::PowerOff(name) => drop(client.power_off(name.into_ref()).await.map_err(status_error)?),
        VmOperation::Pause(name) => drop(client.pause(name.into_ref()).await.map_err(status_error)?),
        VmOperation::Unpause(name) => drop(client.unpause(name.into_ref()).await.map_err(status_error)?),
        VmOperation::Reset(name) => drop(client.reset(name.into_ref()).await.map_err(status_error)?),
        VmOperation::SoftReboot(name) => drop(client.soft_reboot(name.into_ref()).await.map_err(status_error)?),
        VmOperation::Rm(name) => delete(&mut client, name).await?,
        VmOperation::Snapshot(name) => drop(client.snapshot(name.into_ref()).await.map_err(status_error)?),
        VmOperation::Restore(name) => drop(client.restore(name.into_ref()).await.map_err(status_error)?),
        VmOperation::RmSnapshot(name) => drop(client.delete_snapshot(name.into_ref()).await.map_err(status_error)?),
        VmOperation::Snapshots { name, output } => list_snapshots(&mut client, name, output).await?,
        VmOperation::AddVolume { name, volume } => add_volume(&mut client, name, volume).await?,
        VmOperation::RmVolume { name, volume } => remove_volume(&mut client, name, volume).await?,
        VmOperation::Volumes { name, output } => list_volumes(&mut client, name, output).await?,
        VmOperation::Clone { name, to } => clone_vm(&mut client, name, to).await?,
        VmOperation::Export(arguments) => transfer::export(&mut client, arguments).await?,
        VmOperation::Import(arguments) => transfer::import(&mut client, arguments).await?,
        VmOperation::GuestInfo(name) => {
            print(&client.guest_info(name.into_ref()).await.map_err(status_error)?.into_inner().text)?;
        }
        VmOperation::Screenshot { name, output } => write_screenshot(&mut client, name, output).await?,
        VmOperation::MemoryDump { name, output, format } => {
            write_memory_dump(&mut client, name, output, format).await?;
        }
    }
    Ok(())
}

/// Lists the VMs of all namespaces.
pub(super) async fn list(channel: Channel) -> anyhow::Result<Vec<VmView>> {
    list_in(&mut MachinesClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT), String::new()).await
}

async fn list_in(client: &mut VmClient, namespace: String) -> anyhow::Result<Vec<VmView>> {
    let request = vm::ListRequest { namespace };
    let machines = client.list(request).await.map_err(status_error)?.into_inner().machines;
    Ok(machines.into_iter().map(VmView::from).collect())
}

/// Deletes a persistent VM. The daemon's Delete succeeds if there is none, so that clients can repeat it.
async fn delete(client: &mut VmClient, name: VmName) -> anyhow::Result<()> {
    let machine = client.describe(name.clone().into_ref()).await.map_err(status_error)?.into_inner();
    anyhow::ensure!(
        machine.outlives_pods,
        "cannot delete VM {}/{}: it is not persistent and ends with its pod; delete the pod",
        machine.namespace,
        machine.name
    );
    client.delete(name.into_ref()).await.map_err(status_error)?;
    Ok(())
}

async fn watch(client: &mut VmClient, namespace: Option<String>) -> anyhow::Result<()> {
    let request = vm::ListRequest { namespace: namespace.unwrap_or_default() };
    let mut machines = client.watch(request).await.map_err(status_error)?.into_inner();
    while let Some(machine) = machines.message().await.map_err(status_error)? {
        let line = serde_json::to_string(&VmView::from(machine)).context("cannot format the VM as JSON")?;
        print(&(line + "\n"))?;
    }
    // Only the daemon's shutdown ends the list of changes.
    Err(CommandError::ConnectionLost.into())
}

async fn list_snapshots(client: &mut VmClient, name: VmName, output: OutputArgument) -> anyhow::Result<()> {
    let snapshots = client.list_snapshots(name.into_ref()).await.map_err(status_error)?.into_inner().snapshots;
    output.print(&snapshots.into_iter().map(SnapshotView::from).collect::<Vec<_>>())
}

async fn add_volume(client: &mut VmClient, name: VmName, (volume, bytes): (String, u64)) -> anyhow::Result<()> {
    let request = vm::AddVolumeRequest { machine: Some(name.into_ref()), name: volume, bytes };
    client.add_volume(request).await.map_err(status_error)?;
    Ok(())
}

async fn remove_volume(client: &mut VmClient, name: VmName, volume: String) -> anyhow::Result<()> {
    let request = vm::VolumeRef { machine: Some(name.into_ref()), name: volume };
    client.remove_volume(request).await.map_err(status_error)?;
    Ok(())
}

async fn list_volumes(client: &mut VmClient, name: VmName, output: OutputArgument) -> anyhow::Result<()> {
    let volumes = client.list_volumes(name.into_ref()).await.map_err(status_error)?.into_inner().volumes;
    output.print(&volumes.into_iter().map(VolumeView::from).collect::<Vec<_>>())
}

async fn clone_vm(client: &mut VmClient, name: VmName, to: String) -> anyhow::Result<()> {
    let to = vm::MachineRef { namespace: name.namespace.clone(), name: to };
    client.copy(vm::CopyRequest { from: Some(name.into_ref()), to: Some(to) }).await.map_err(status_error)?;
    Ok(())
}

async fn write_screenshot(client: &mut VmClient, name: VmName, output: Option<PathBuf>) -> anyhow::Result<()> {
    let png = client.screenshot(name.into_ref()).await.map_err(status_error)?.into_inner().png;
    match output {
        Some(path) => std::fs::write(&path, png).with_context(|| format!("cannot write {}", path.display())),
        None => {
            anyhow::ensure!(
                !std::io::stdout().is_terminal(),
                "cannot write a screenshot to a terminal: use --output FILE"
            );
            print_bytes(&png)
        }
    }
}

async fn write_memory_dump(
    client: &mut VmClient,
    name: VmName,
    output: Option<PathBuf>,
    format: DumpFormat,
) -> anyhow::Result<()> {
    let format = match format {
        DumpFormat::Elf => "elf",
        DumpFormat::KdumpZlib => "kdump-zlib",
    };
    let request = vm::MemoryDumpRequest { machine: Some(name.into_ref()), format: format.to_owned() };
    dump::write(client.memory_dump(request).await.map_err(status_error)?.into_inner(), output).await
}
