//! Tests `nacelle admission` as a webhook of the API server, with the certificate of the recipe in docs/reference/vm-admission.md
//! and the manifests that the program prints. Its pods do not run, because there is no scheduler here: the program runs at the
//! Service's address instead.

use super::CaseResult;
use crate::cluster::TestCluster;
use crate::fixture::KubeletFixture;
use crate::pods::{ObservedPod, wait_for};
use nacelle_e2e::path_from_env;
use nacelle_e2e::run::{ProgramOutput, run, run_with_input};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const NAMESPACE: &str = "nacelle-system";
const INVALID_POD: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: wrong
  annotations:
    vm.nacelle.dev/kind: machine
    vm.nacelle.dev/spec: |
      domain:
        cpu: { cores: 0 }
        memory: { guest: 1Gi }
        devices: { disks: [ { name: root, disk: { bus: floppy } }, { name: root } ] }
      volumes: [ { name: root, containerDisk: { image: debian } } ]
spec:
  containers: [ { name: main, image: debian } ]
";
const EXPECTED_ERROR: &str = "The Pod \"wrong\" is invalid: \n\
    * spec.domain.devices.disks[0].disk.bus: Unsupported value: \"floppy\": supported values: \"virtio\", \"sata\", \"scsi\", \"usb\"\n\
    * spec.domain.cpu.cores: Invalid value: 0: must be at least 1\n\
    * spec.domain.devices.disks[1].name: Duplicate value: \"root\": spec.domain.devices.disks[0] has this name";
const CATALOGUE: &str =
    "kind: VirtualMachineInstancetype\nmetadata: {name: tiny}\nspec: {cpu: {guest: 2}, memory: {guest: 192Mi}}\n";
const CLASS: &str =
    "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: nacelle-shaped}\nhandler: disks\n";
const INSTANCETYPE_POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: sized, annotations: {vm.nacelle.dev/instancetype: tiny}}
spec:
  runtimeClassName: nacelle-shaped
  terminationGracePeriodSeconds: 5
  containers:
  - name: main
    image: busybox:1.36
    command: [sh, -c, \"trap 'exit 0' TERM; sleep 1000000 & wait\"]
";

/// The webhook server. The API server calls it until this is dropped.
struct WebhookServer<'w> {
    cluster: &'w TestCluster,
    process: Child,
}

impl Drop for WebhookServer<'_> {
    fn drop(&mut self) {
        // The webhooks are removed first, so that other cases are not affected.
        for kind in ["validating", "mutating"] {
            self.cluster.kubectl(&["delete", &format!("{kind}webhookconfiguration"), "nacelle-admission"]);
        }
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs the commands of docs/reference/vm-admission.md that create the certificate.
fn create_certificate(directory: &Path) {
    let script = format!(
        "ns={NAMESPACE}\nkey='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'\n\
         openssl req -x509 $key -days 3650 -subj /CN=nacelle-admission-ca -keyout ca.key -out ca.crt\n\
         openssl req $key -subj /CN=nacelle-admission -keyout tls.key -out tls.csr\n\
         printf 'subjectAltName=DNS:nacelle-admission.%s.svc' $ns >names\n\
         openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile names -out tls.crt\n"
    );
    run(Command::new("sh").args(["-ec", &script]).current_dir(directory)).ok();
}

fn start_webhook_server<'w>(
    fixture: &'w KubeletFixture,
    cluster: &'w TestCluster,
    directory: &Path,
) -> WebhookServer<'w> {
    create_certificate(directory);
    let netns = &fixture.node.netns;
    let program: PathBuf = path_from_env("NACELLE_BIN");
    let manifests =
        run(Command::new(&program).args(["admission", "manifests", "--ca-file"]).arg(directory.join("ca.crt"))).ok();
    let (webhooks, others): (Vec<_>, Vec<_>) =
        manifests.split("\n---\n").partition(|part| part.contains("WebhookConfiguration\n"));
    assert_eq!((webhooks.len(), others.len()), (2, 6), "{manifests}");
    cluster.apply(&others.join("\n---\n"));
    let service = ["-n", NAMESPACE, "get", "service", "nacelle-admission", "-o", "jsonpath={.spec.clusterIP}"];
    let address = cluster.kubectl(&service).ok();
    run(netns.command("ip").args(["address", "add", &format!("{address}/32"), "dev", "lo"])).ok();
    fs::write(directory.join("catalogue.yaml"), CATALOGUE).expect("the directory is writable");
    let log = File::create(directory.join("admission.log")).expect("the directory is writable");
    let mut server = netns.command(&program);
    server.args(["admission", "--listen", &format!("{address}:443"), "--tls-cert", "tls.crt", "--tls-key", "tls.key"]);
    server.args(["--catalogue", "catalogue.yaml"]).current_dir(directory).stdin(Stdio::null()).stderr(log);
    let process = server.spawn().expect("nsenter is installed");
    let server = WebhookServer { cluster, process };
    wait_for("the server answers", || {
        let url = format!("https://nacelle-admission.{NAMESPACE}.svc/readyz");
        let resolve = format!("nacelle-admission.{NAMESPACE}.svc:443:{address}");
        let mut curl = netns.command("curl");
        curl.args(["-sf", "--max-time", "20", "--resolve", &resolve, "--cacert"])
            .arg(directory.join("ca.crt"))
            .arg(&url);
        (run(&mut curl).stdout == "ok").then_some(())
    });
    cluster.apply(&webhooks.join("\n---\n"));
    server
}

pub fn admission_webhook(fixture: &KubeletFixture) -> CaseResult {
    let cluster = fixture.cluster.as_ref().expect("the node has joined");
    let directory = fixture.directory("admission");
    let server = start_webhook_server(fixture, cluster, &directory);
    let create = |manifest: &str, more: &[&str]| -> ProgramOutput {
        run_with_input(&mut cluster.command(&[&["create", "-f", "-"], more].concat()), manifest.as_bytes())
    };
    // The API server notices new webhooks with a delay.
    let error = wait_for("the API server calls the webhook", || {
        let output = create(INVALID_POD, &["--dry-run=server"]);
        (output.code != 0).then_some(output.stderr)
    });
    assert_eq!(error, EXPECTED_ERROR);
    assert_eq!(create(INVALID_POD, &[]).err(), EXPECTED_ERROR);
    assert!(cluster.object("/api/v1/namespaces/default/pods/wrong").is_none());
    let template = INVALID_POD.replace("\n", "\n    ").replace("kind: Pod", "").replace("apiVersion: v1", "");
    let many = format!(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: many}}\nspec:\n  selector: {{matchLabels: {{a: b}}}}\n  template:\n{}",
        template.replace("name: wrong", "labels: {a: b}")
    );
    assert_eq!(create(&many, &[]).err(), EXPECTED_ERROR.replace("The Pod \"wrong\"", "The Deployment \"many\""));
    let annotations =
        ["kernel-image=a:1", "kernel=/k", "initrd=/i"].map(|one| format!("--annotations=vm.nacelle.dev/{one}"));
    let [image, kernel, initrd] = &annotations;
    let warned = cluster.kubectl(&["run", "warned", "--image=debian", image, kernel, initrd]);
    let warning =
        "Warning: spec.domain.firmware.kernelBoot.container.initrdPath (from vm.nacelle.dev/initrd) is not run";
    assert!(warned.code == 0 && warned.stderr.starts_with(warning), "{warned:?}");
    cluster.kubectl(&["delete", "pod", "warned", "--force", "--grace-period=0"]).ok();

    // The server's catalogue affects the guest.
    cluster.apply(CLASS);
    let pod = cluster.create_pod("sized", INSTANCETYPE_POD);
    let object = pod.object().expect("it was created");
    let annotations = &object["metadata"]["annotations"];
    let spec = &annotations["vm.nacelle.dev/spec"];
    assert_eq!(spec, "{\"domain\":{\"cpu\":{\"sockets\":2},\"memory\":{\"guest\":\"192Mi\"}}}", "{annotations}");
    assert!(annotations["vm.nacelle.dev/instancetype"].is_null(), "{annotations}");
    if nacelle_e2e::node::engine() == "qemu" {
        pod.wait_until_ready();
        let memory: u64 = pod.shell("awk '/MemTotal/ {print $2}' /proc/meminfo").parse().expect("a number");
        assert!((128 << 10..192 << 10).contains(&memory), "{memory}");
        assert_eq!(pod.shell("nproc"), "2");
    }
    pod.delete();
    drop(server);
    let log = fs::read_to_string(directory.join("admission.log")).expect("it has one");
    assert!(log.contains("verdict=\"denied\"") && log.contains("verdict=\"patched\""), "{log}");
    CaseResult::Passed
}
