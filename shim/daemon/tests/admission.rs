//! Tests the binary `nacelle admission` as an API server uses it: over TLS, with a certificate that openssl creates and curl
//! verifies.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Time limit for everything that takes a moment, generous for busy machines.
const LIMIT: Duration = Duration::from_secs(60);

/// The running server.
struct Serving {
    child: Child,
    address: String,
    log: Arc<Mutex<Vec<String>>>,
    directory: tempfile::TempDir,
}

impl Drop for Serving {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn openssl(directory: &Path, arguments: &[&str]) {
    let made = Command::new("openssl").args(arguments).current_dir(directory).output().unwrap();
    assert!(made.status.success(), "{arguments:?}: {made:?}");
}

/// Creates a CA, unless it exists, and a certificate of it for 127.0.0.1.
fn certificate(directory: &Path, serial: &str) {
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    if !directory.join("ca.crt").exists() {
        let authority = ["-subj", "/CN=authority", "-days", "2", "-keyout", "ca.key", "-out", "ca.crt"];
        openssl(directory, &[&["req", "-x509"], &key[..], &authority].concat());
    }
    std::fs::write(directory.join("names"), "subjectAltName=IP:127.0.0.1").unwrap();
    openssl(
        directory,
        &[&["req", "-subj", "/CN=admission", "-keyout", "new.key", "-out", "new.csr"], &key[..]].concat(),
    );
    let sign =
        ["x509", "-req", "-in", "new.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-days", "2", "-extfile", "names"];
    openssl(directory, &[&sign[..], &["-set_serial", serial, "-out", "new.crt"]].concat());
    for file in ["key", "crt"] {
        std::fs::rename(directory.join(format!("new.{file}")), directory.join(format!("tls.{file}"))).unwrap();
    }
}

/// Starts the server; `None` if openssl or curl is missing.
fn serve(more: &[&str]) -> Option<Serving> {
    for tool in ["openssl", "curl"] {
        if Command::new(tool).arg("--version").output().is_err() {
            println!("skipped: {tool} is not installed");
            return None;
        }
    }
    let directory = tempfile::tempdir().unwrap();
    certificate(directory.path(), "1001");
    let mut child = Command::new(env!("CARGO_BIN_EXE_nacelle"))
        .args(["admission", "--listen", "127.0.0.1:0", "--tls-cert", "tls.crt", "--tls-key", "tls.key"])
        .args(more)
        .current_dir(directory.path())
        .env_remove("NACELLE_LOG")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let log: Arc<Mutex<Vec<String>>> = Arc::default();
    let (lines, stderr) = (Arc::clone(&log), BufReader::new(child.stderr.take().unwrap()));
    std::thread::spawn(move || stderr.lines().map_while(Result::ok).for_each(|line| lines.lock().unwrap().push(line)));
    let mut serving = Serving { child, address: String::new(), log, directory };
    serving.address =
        serving.logged("address=", 1).split("address=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    Some(serving)
}

impl Serving {
    /// Waits until this number of log lines contain the text, and returns the last one.
    fn logged(&self, text: &str, times: usize) -> String {
        let begun = Instant::now();
        loop {
            let log = self.log.lock().unwrap().clone();
            let mut with = log.iter().filter(|line| line.contains(text));
            if let Some(line) = with.nth(times - 1) {
                return line.clone();
            }
            assert!(begun.elapsed() < LIMIT, "no {text:?} in {log:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Sends a request with curl, which trusts only the CA; returns status and body.
    fn ask(&self, scheme: &str, path: &str, arguments: &[&str], body: Option<&[u8]>) -> (u16, String) {
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "--show-error",
            "--max-time",
            "60",
            "--cacert",
            "ca.crt",
            "--write-out",
            "\n%{http_code}",
        ])
        .args(arguments)
        .arg(format!("{scheme}://{}{path}", self.address))
        .current_dir(self.directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
        if body.is_some() {
            curl.args(["--data-binary", "@-", "--header", "Expect:"]);
        }
        let mut curl = curl.spawn().unwrap();
        // A server may reject a request before it has read all of it.
        let _ = curl.stdin.take().unwrap().write_all(body.unwrap_or_default());
        let output = curl.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (text, status) = text.rsplit_once('\n').unwrap();
        (status.parse().unwrap_or_else(|_| panic!("{:?}", output.stderr)), text.to_owned())
    }

    /// Sends a body as the API server does.
    fn post(&self, path: &str, body: &[u8]) -> (u16, String) {
        self.ask("https", path, &["--header", "Content-Type: application/json"], Some(body))
    }

    /// Sends a review of an object, and returns the response.
    fn review(&self, path: &str, operation: &str, object: &Value, old: &Value) -> Value {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let api_version = text(&object["apiVersion"]);
        let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
        let review = json!({
            "kind": "AdmissionReview",
            "apiVersion": "admission.k8s.io/v1",
            "request": {
                "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
                "kind": { "group": group, "version": version, "kind": object["kind"] },
                "resource": { "group": group, "version": version, "resource": "some" },
                "name": object["metadata"]["name"],
                "namespace": "default",
                "operation": operation,
                "userInfo": { "username": "admin", "groups": ["system:authenticated"] },
                "object": object,
                "oldObject": old,
                "dryRun": false,
                "options": { "apiVersion": "meta.k8s.io/v1", "kind": "CreateOptions" },
            },
        });
        let (status, text) = self.post(&format!("{path}?timeout=5s"), review.to_string().as_bytes());
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&answer["kind"], &answer["apiVersion"]),
            (&json!("AdmissionReview"), &json!("admission.k8s.io/v1"))
        );
        assert_eq!(answer["response"]["uid"], "705ab4f5-6393-11e8-b7cc-42010a800002");
        answer["response"].clone()
    }

    fn end(mut self) -> ExitStatus {
        let pid = nix::unistd::Pid::from_raw(self.child.id().try_into().unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < LIMIT, "it does not end");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn pod(name: &str, annotations: Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "default", "annotations": annotations },
        "spec": { "runtimeClassName": "nacelle", "containers": [ { "name": "main", "image": "debian" } ] } })
}

/// Returns the pod of docs/reference/vm-commands.md.
fn wrong() -> Value {
    let spec = "domain:\n  cpu: { cores: 0 }\n  memory: { guest: 1Gi }\n  devices: { disks: [ { name: root, disk: { bus: floppy } }, { name: root } ] }\n\
                volumes: [ { name: root, containerDisk: { image: debian } } ]\n";
    pod("wrong", json!({ "vm.nacelle.dev/kind": "machine", "vm.nacelle.dev/spec": spec }))
}

#[test]
fn objects_are_allowed_and_denied() {
    let Some(server) = serve(&[]) else { return };
    let allowed = json!({ "uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": true });
    let validate = |object: &Value| server.review("/validate", "CREATE", object, &Value::Null);
    assert_eq!(validate(&pod("plain", Value::Null)), allowed);
    let good = pod("good", json!({ "vm.nacelle.dev/cpus": "2", "vm.nacelle.dev/memory": "1Gi" }));
    assert_eq!(validate(&good), allowed);
    let denied = |name: &str, kind: &str, group: &str| {
        let causes = [
            (
                "spec.domain.devices.disks[0].disk.bus",
                "FieldValueNotSupported",
                "Unsupported value: \"floppy\": supported values: \"virtio\", \"sata\", \"scsi\", \"usb\"",
            ),
            ("spec.domain.cpu.cores", "FieldValueInvalid", "Invalid value: 0: must be at least 1"),
            (
                "spec.domain.devices.disks[1].name",
                "FieldValueDuplicate",
                "Duplicate value: \"root\": spec.domain.devices.disks[0] has this name",
            ),
        ];
        let message: Vec<String> = causes.iter().map(|(field, _, message)| format!("{field}: {message}")).collect();
        let causes =
            causes.map(|(field, reason, message)| json!({ "field": field, "reason": reason, "message": message }));
        json!({
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "allowed": false,
            "status": {
                "status": "Failure",
                "code": 422,
                "reason": "Invalid",
                "message": format!("{kind} {name:?} is invalid: {}", message.join("; ")),
                "details": { "name": name, "group": group, "kind": kind, "causes": causes },
            },
        })
    };
    assert_eq!(validate(&wrong()), denied("wrong", "Pod", ""));
    let line = server.logged("name=\"wrong\"", 1);
    for part in [
        "path=\"/validate\"",
        "uid=\"705ab4f5-",
        "namespace=\"default\"",
        "verdict=\"denied\"",
        "spec.domain.cpu.cores",
    ] {
        assert!(line.contains(part), "{line}");
    }
    // A valid object may not become invalid; an invalid one may get labels.
    assert_eq!(server.review("/validate", "UPDATE", &wrong(), &good), denied("wrong", "Pod", ""));
    let warned = server.review("/validate", "UPDATE", &wrong(), &wrong());
    assert_eq!((&warned["allowed"], warned["warnings"].as_array().map(Vec::len)), (&json!(true), Some(1)));
    let deployment = json!({ "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "many", "namespace": "default" },
        "spec": { "template": { "metadata": wrong()["metadata"], "spec": {} } } });
    assert_eq!(validate(&deployment), denied("many", "Deployment", "apps"));
    assert_eq!(server.review("/mutate", "CREATE", &wrong(), &Value::Null), allowed);
    assert!(server.end().success());
}

#[test]
fn pods_get_what_they_name() {
    let Some(server) = serve(&["--runtime-class", "nacelle"]) else { return };
    let object = pod("sized", json!({ "vm.nacelle.dev/instancetype": "u1.large" }));
    let answer = server.review("/mutate", "CREATE", &object, &Value::Null);
    assert_eq!((&answer["allowed"], &answer["patchType"]), (&json!(true), &json!("JSONPatch")));
    use base64::Engine as _;
    let patch = base64::engine::general_purpose::STANDARD.decode(answer["patch"].as_str().unwrap()).unwrap();
    let patch: Value = serde_json::from_slice(&patch).unwrap();
    let steps: Vec<String> = patch
        .as_array()
        .unwrap()
        .iter()
        .map(|step| format!("{} {}", step["op"].as_str().unwrap(), step["path"].as_str().unwrap()))
        .collect();
    assert_eq!(
        steps,
        [
            "remove /metadata/annotations/vm.nacelle.dev~1instancetype",
            "add /metadata/annotations/vm.nacelle.dev~1applied",
            "add /metadata/annotations/vm.nacelle.dev~1spec"
        ]
    );
    let annotation = |step: usize| patch[step]["value"].clone();
    let made = pod("sized", json!({ "vm.nacelle.dev/applied": annotation(1), "vm.nacelle.dev/spec": annotation(2) }));
    let allowed = json!({ "uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": true });
    for path in ["/mutate", "/validate"] {
        assert_eq!(server.review(path, "CREATE", &made, &Value::Null), allowed);
    }
    // A pod of another RuntimeClass is not checked.
    let mut other = wrong();
    assert_eq!(server.review("/validate", "CREATE", &other, &Value::Null)["allowed"], false);
    other["spec"]["runtimeClassName"] = json!("gvisor");
    assert_eq!(server.review("/validate", "CREATE", &other, &Value::Null), allowed);
}

#[test]
fn what_is_no_review_is_refused() {
    let Some(server) = serve(&[]) else { return };
    let get = |path: &str| server.ask("https", path, &[], None);
    assert_eq!(get("/healthz"), (200, "ok\n".to_owned()));
    assert_eq!(get("/readyz?verbose"), (200, "ok\n".to_owned()));
    assert_eq!(get("/validate"), (405, "POST is expected\n".to_owned()));
    assert_eq!(get("/"), (404, "no such path; the server has /validate, /mutate, /healthz and /readyz\n".to_owned()));
    let (status, text) =
        server.ask("https", "/validate", &["--header", "Content-Type: application/yaml"], Some(b"a: b"));
    assert_eq!(
        (status, text.as_str()),
        (415, "the content type is \"application/yaml\"; application/json is expected\n")
    );
    assert_eq!(server.post("/other", b"{}").0, 404);
    assert_eq!(server.ask("https", "/healthz", &["--request", "DELETE"], None).0, 405);
    for body in [&b""[..], b"\xff\xfe\x00", b"{\"apiVersion\":", &b"[".repeat(10_000), &b"{\"a\":".repeat(10_000)] {
        let (status, text) = server.post("/validate", body);
        assert!(
            status == 400 && text.starts_with("the body is not valid JSON, or has too many values: "),
            "{status} {text}"
        );
    }
    let (status, text) =
        server.post("/mutate", br#"{"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview"}"#);
    let message = "the body is \"AdmissionReview\" of \"admission.k8s.io/v1beta1\"; AdmissionReview of admission.k8s.io/v1 is expected\n";
    assert_eq!((status, text.as_str()), (400, message));
    // A body of the largest size, and one byte more; with and without a content length.
    let mut large = br#"{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}"#.to_vec();
    large.resize(3 << 20, b' ');
    assert_eq!(server.post("/validate", &large), (400, "request must be an object\n".to_owned()));
    large.push(b' ');
    let too_large = (413, "the body has more than 3145728 bytes\n".to_owned());
    assert_eq!(server.post("/validate", &large), too_large);
    let chunked = ["--header", "Content-Type: application/json", "--header", "Transfer-Encoding: chunked"];
    assert_eq!(server.ask("https", "/validate", &chunked, Some(&large)), too_large);
    // Plain HTTP, and bytes that are neither.
    assert_eq!(server.ask("http", "/healthz", &[], None), (400, "this server speaks https.\n".to_owned()));
    let mut garbage = TcpStream::connect(&server.address).unwrap();
    garbage.write_all(&[0x16, 0xff, 0xff, 0, 0, 0]).unwrap();
    garbage.shutdown(std::net::Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    // The connection may also be reset.
    let _ = garbage.read_to_end(&mut rest);
    drop(TcpStream::connect(&server.address).unwrap());
    // Clients that only connect block neither other clients nor the shutdown.
    let _silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(&server.address).unwrap()).collect();
    assert_eq!(server.review("/validate", "CREATE", &wrong(), &Value::Null)["allowed"], false);
    assert!(server.end().success());
}

#[test]
fn a_new_certificate_needs_no_restart() {
    let Some(server) = serve(&[]) else { return };
    let serial = || {
        let script = format!(
            "openssl s_client -connect {} </dev/null 2>/dev/null | openssl x509 -noout -serial",
            server.address
        );
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(serial(), "serial=03E9");
    // A half-finished change: the key does not match the certificate.
    let key = server.directory.path().join("tls.key");
    let right = std::fs::read(&key).unwrap();
    std::fs::copy(server.directory.path().join("ca.key"), &key).unwrap();
    server.logged("the previous certificate stays in use", 1);
    assert_eq!(serial(), "serial=03E9");
    std::fs::write(&key, right).unwrap();
    certificate(server.directory.path(), "1002");
    server.logged("a new TLS certificate", 1);
    assert_eq!(serial(), "serial=03EA");
    assert_eq!(server.ask("https", "/healthz", &[], None).0, 200);
}

#[test]
fn a_changed_catalogue_needs_no_restart() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("catalogue.yaml");
    let write = |name: &str| {
        let text = format!(
            "apiVersion: vm.nacelle.dev/v1\nkind: VirtualMachineInstancetype\nmetadata: {{name: {name}}}\n\
             spec: {{cpu: {{guest: 1}}, memory: {{guest: 1Gi}}}}\n"
        );
        std::fs::write(&file, text).unwrap();
    };
    write("first");
    let Some(server) = serve(&["--catalogue", file.to_str().unwrap()]) else { return };
    let knows = |name: &str| {
        let object = pod("sized", json!({ "vm.nacelle.dev/instancetype": name }));
        server.review("/validate", "CREATE", &object, &Value::Null)["allowed"] == true
    };
    assert!(knows("first") && !knows("second"));
    let hang_up = || kill(Pid::from_raw(server.child.id().cast_signed()), Signal::SIGHUP).unwrap();
    write("second");
    hang_up();
    server.logged("the catalogue was read again", 1);
    assert!(knows("second") && !knows("first"));
    // What is wrong changes nothing.
    std::fs::write(&file, "kind: Nothing\n").unwrap();
    hang_up();
    assert!(server.logged("the changed catalogue is not used", 1).contains("catalogue.yaml"));
    assert!(knows("second"));
    // Without a signal, as kubelet updates a ConfigMap.
    write("third");
    let begun = Instant::now();
    while !knows("third") {
        assert!(begun.elapsed() < LIMIT, "{:?}", server.log.lock().unwrap());
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn only_clients_of_the_authority_send_reviews() {
    // The authority of the server's certificate also signs those of the clients here.
    let Some(server) = serve(&["--client-ca", "ca.crt"]) else { return };
    let foreign = tempfile::tempdir().unwrap();
    certificate(foreign.path(), "1");
    let foreign = |file: &str| foreign.path().join(file).to_str().unwrap().to_owned();
    let review = |arguments: &[&str]| {
        let arguments = [&["--header", "Content-Type: application/json"], arguments].concat();
        let body = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "u", "operation": "CREATE", "kind": { "group": "", "version": "v1", "kind": "Pod" }, "object": wrong() } });
        server.ask("https", "/validate", &arguments, Some(body.to_string().as_bytes()))
    };
    let (status, text) = review(&[]);
    assert!(status == 403 && text.contains("client certificate"), "{status} {text}");
    assert_eq!(review(&["--cert", "tls.crt", "--key", "tls.key"]).0, 200);
    // Another certificate ends the connection.
    assert_eq!(review(&["--cert", &foreign("tls.crt"), "--key", &foreign("tls.key")]).0, 0);
    // Kubelet's probes have no certificate.
    assert_eq!(server.ask("https", "/readyz", &[], None).0, 200);
    assert!(server.end().success());
}

#[test]
fn a_file_without_an_authority_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    if Command::new("openssl").arg("--version").output().is_err() {
        return println!("skipped: openssl is not installed");
    }
    certificate(directory.path(), "1");
    std::fs::write(directory.path().join("empty.crt"), "").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_nacelle"))
        .args(["admission", "--listen", "127.0.0.1:0", "--tls-cert", "tls.crt", "--tls-key", "tls.key"])
        .args(["--client-ca", "empty.crt"])
        .current_dir(directory.path())
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && error.contains("cannot verify clients with the certificates in empty.crt"),
        "{error}"
    );
}

#[test]
fn a_review_that_is_under_way_is_answered_at_the_end() {
    let Some(server) = serve(&[]) else { return };
    let Serving { address, directory, .. } = &server;
    // The second half of the body follows after the signal.
    let body = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "late", "operation": "CREATE", "kind": { "group": "", "version": "v1", "kind": "Pod" }, "object": wrong() } });
    let body = body.to_string();
    let (first, second) = body.split_at(body.len() / 2);
    let mut client = Command::new("timeout")
        .args(["60", "openssl", "s_client", "-quiet", "-verify_return_error", "-CAfile", "ca.crt", "-connect", address])
        .current_dir(directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = client.stdin.take().unwrap();
    let head = format!(
        "POST /validate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{first}",
        body.len()
    );
    stdin.write_all(head.as_bytes()).unwrap();
    stdin.flush().unwrap();
    // When a later request has been answered, the server has received the first one.
    assert_eq!(server.ask("https", "/healthz", &[], None).0, 200);
    std::thread::sleep(Duration::from_millis(500));
    let pid = nix::unistd::Pid::from_raw(server.child.id().try_into().unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    server.logged("stopping", 1);
    std::thread::sleep(Duration::from_millis(200));
    assert!(TcpStream::connect(address).is_err());
    stdin.write_all(second.as_bytes()).unwrap();
    let mut answer = String::new();
    client.stdout.take().unwrap().read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("\"uid\":\"late\""), "{answer}");
    drop(stdin);
    client.wait().unwrap();
    assert!(server.end().success());
}

/// Starts a request whose body never ends. When this returns, the server reads the body: it has sent the interim response 100.
fn spawn_slow_client(server: &Serving) -> Child {
    let mut client = Command::new("openssl")
        .args(["s_client", "-quiet", "-verify_return_error", "-CAfile", "ca.crt", "-connect", &server.address])
        .current_dir(server.directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let head = "POST /validate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n{";
    client.stdin.as_mut().unwrap().write_all(head.as_bytes()).unwrap();
    let mut interim = [0; 12];
    client.stdout.as_mut().unwrap().read_exact(&mut interim).unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100");
    client
}

#[test]
fn slow_clients_do_not_delay_others() {
    let Some(server) = serve(&[]) else { return };
    let mut slow: Vec<Child> = (0..24).map(|_| spawn_slow_client(&server)).collect();
    assert_eq!(server.review("/validate", "CREATE", &wrong(), &Value::Null)["allowed"], false);
    let waiting = slow.iter_mut().filter_map(|client| client.try_wait().unwrap().is_none().then_some(())).count();
    assert!(waiting > 16, "the review did not wait until the slow clients were disconnected: {waiting} are left");
    for client in &mut slow {
        client.kill().unwrap();
        client.wait().unwrap();
    }
    // One address cannot take all connections.
    let _many: Vec<TcpStream> = (0..200).filter_map(|_| TcpStream::connect(&server.address).ok()).collect();
    assert_eq!(server.ask("https", "/healthz", &["--interface", "127.0.0.2"], None).0, 200);
    assert!(server.end().success());
}

#[test]
fn what_cannot_be_served_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_nacelle"))
            .arg("admission")
            .args(arguments)
            .current_dir(&directory)
            .output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, message, _) = run(&["--tls-cert", "none.crt", "--tls-key", "none.key"]);
    assert!(code == Some(1) && message.contains("none.crt"), "{message}");
    let (code, message, _) = run(&["--tls-cert", "none.crt", "--tls-key", "none.key", "--catalogue", "-"]);
    assert!(code == Some(1) && message.contains("--catalogue needs a file"), "{message}");
    let (code, message, _) = run(&["--tls-cert", "none.crt"]);
    assert!(code == Some(2) && message.contains("--tls-key"), "{message}");
    std::fs::write(directory.path().join("both.pem"), "-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\n")
        .unwrap();
    let (code, message, _) = run(&["manifests", "--ca-file", "both.pem"]);
    assert!(code == Some(1) && message.contains("contains a private key"), "{message}");
    std::fs::write(directory.path().join("ca.crt"), "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n")
        .unwrap();
    let (code, _, text) = run(&["manifests", "--ca-file", "ca.crt", "--namespace", "other"]);
    assert_eq!(code, Some(0));
    assert!(text.contains("kind: ValidatingWebhookConfiguration") && text.contains("namespace: other"), "{text}");
    assert!(text.contains("caBundle: LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0t"), "{text}");
    let (code, _, text) =
        run(&["manifests", "--ca-file", "ca.crt", "--client", "192.0.2.1/32", "--client", "fd00::/8"]);
    assert!(code == Some(0) && text.contains("cidr: 192.0.2.1/32") && text.contains("cidr: fd00::/8"), "{text}");
    let (code, message, _) = run(&["manifests", "--ca-file", "ca.crt", "--client", "somewhere"]);
    assert!(code == Some(2) && message.contains("--client"), "{message}");
}
