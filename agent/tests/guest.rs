//! Tests the agent in a VM, as a pod process sees it. The tests need a guest image (`NACELLE_KERNEL`, `NACELLE_INITRD`), and are skipped
//! without.

#[allow(dead_code, reason = "each test file uses a part of it")]
mod machine;

use machine::Guest;
use machine::{LIMIT, place};
use nacelle_engine::NicSpec;
use nacelle_proto::agent::{
    AttachImageRequest, BootConfig, CreateContainerRequest, DetachImageRequest, ExecRequest, PidMode, RenewRequest,
    SignalRequest, WaitRequest,
};
use nacelle_proto::common::{
    ContainerRef, Dns, Empty, Interface, Limit, ResizeRequest, Route, Stream, UpdateContainerRequest,
};
use serde_json::json;
use std::io::{Read, Write};
use tonic::Code;

fn exec(id: &str, exec_id: &str, script: &str) -> ExecRequest {
    let args = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    ExecRequest { id: id.into(), exec_id: exec_id.into(), args, ..ExecRequest::default() }
}

const SLEEP: &str = "trap 'exit 0' TERM; while true; do sleep 1; done";

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

#[test]
fn containers_run() {
    runtime().block_on(async {
        let Some(mut guest) = Guest::boot(|_| ()).await else { return };
        assert_eq!(guest.hello.protocol, 1);

        let (output, exit) =
            guest.run("c1", "echo out; echo err >&2; hostname; cat /etc/hostname; exit 7", |_, _| ()).await;
        assert_eq!(output, "out\npod\npod\n");
        assert_eq!(guest.output("c1", "", Stream::Stderr).await, "err\n");
        assert_eq!((exit.code, exit.oom_killed), (7, false));
        assert!(exit.finished_at_unix_nanos > 1_900_000_000_000_000_000);
        guest.start("c1").await;
        let states = guest.agent.list_containers(Empty {}).await.unwrap().into_inner().containers;
        assert_eq!(states.len(), 1);
        assert!(states[0].started && states[0].exit == Some(exit));

        let (output, exit) = guest.run("c2", "kill -TERM $$", |_, request| request.stdin = true).await;
        assert_eq!((output.as_str(), exit.code), ("", 0), "PID 1 of a namespace ignores what it does not handle");

        guest
            .create(
                "c3",
                "read line; echo got $line; trap 'exit 3' USR1; echo ready; while true; do sleep 1; done",
                |_, request| request.stdin = true,
            )
            .await;
        guest.start("c3").await;
        guest.input("c3", "", "hello\n");
        let mut stdout = guest.stream("c3", "", Stream::Stdout);
        assert_eq!(guest.read_until(&mut stdout, "ready\n"), "got hello\nready\n");
        let signal = |signal, all| SignalRequest { id: "c3".into(), exec_id: String::new(), signal, all };
        guest.agent.signal(signal(10, false)).await.unwrap();
        assert_eq!(guest.end("c3", "").await.code, 3);
        guest.agent.signal(signal(9, false)).await.unwrap();
        guest.agent.signal(signal(9, true)).await.unwrap();

        let renew = |seconds: i64| RenewRequest {
            generation: vec![1; 16],
            time_unix_nanos: seconds * 1_000_000_000,
            entropy: vec![9; 32],
        };
        for length in [0, 15, 17] {
            let refused = guest.agent.renew(RenewRequest { generation: vec![0; length], ..renew(2_100_000_000) }).await;
            assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument, "a generation of {length} bytes");
        }
        guest.agent.renew(renew(2_000_000_000)).await.unwrap();
        guest.agent.renew(renew(1_950_000_000)).await.unwrap();
        let (output, _) = guest.run("c4", "busybox date +%s", |_, _| ()).await;
        let seconds: i64 = output.trim().parse().unwrap();
        assert!(seconds >= 2_000_000_000, "{seconds}: a life is renewed once");

        for id in ["c1", "c2", "c3", "c3", "c4"] {
            guest.agent.remove_container(ContainerRef { id: id.into() }).await.unwrap();
        }
        let gone = guest.agent.wait(WaitRequest { id: "c1".into(), exec_id: String::new(), timeout_ms: 0 }).await;
        assert_eq!(gone.unwrap_err().code(), Code::NotFound);
        guest.agent.detach_image(DetachImageRequest { partition: 1 }).await.unwrap();
        guest.agent.detach_image(DetachImageRequest { partition: 1 }).await.unwrap();
        // The VM may end before the answer has arrived.
        let _ = guest.agent.shutdown(Empty {}).await;
        let exit = guest.machine.wait(LIMIT).expect("an end");
        assert_eq!(exit.how, nacelle_engine::ExitKind::Shutdown, "{exit:?}");
    });
}

#[test]
fn processes_join_a_container() {
    runtime().block_on(async {
        let Some(mut guest) = Guest::boot(|_| ()).await else { return };
        guest
            .create("c1", SLEEP, |spec, request| {
                request.user = "web".into();
                request.merge_image_groups = true;
                spec["process"]["cwd"] = json!("/made/by/the/agent");
                spec["process"]["noNewPrivileges"] = json!(true);
                spec["process"]["rlimits"] = json!([{ "type": "RLIMIT_NOFILE", "soft": 77, "hard": 88 }]);
                spec["linux"]["seccomp"] = json!({
                    "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
                    "syscalls": [{ "names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95 }]
                });
            })
            .await;
        let early = guest.agent.exec(exec("c1", "early", "true")).await.unwrap_err();
        assert_eq!(early.code(), Code::FailedPrecondition, "{early}");
        guest.start("c1").await;
        let script = "id; pwd; ulimit -n; echo $HOME; cat /proc/self/cgroup; \
            grep -E 'Seccomp:|NoNewPrivs|CapEff|CapBnd' /proc/self/status; mkdir /tmp/x; echo $?; ps -o args | grep -c '[t]rap'; cat; exit 5";
        let request = ExecRequest { stdin: true, ..exec("c1", "e1", script) };
        guest.agent.exec(request.clone()).await.unwrap();
        guest.agent.exec(request).await.unwrap();
        guest.input("c1", "e1", "typed\n");
        let output = guest.output("c1", "e1", Stream::Stdout).await;
        let expected = [
            "uid=101(web) gid=102(web) groups=4(log),102(web)",
            "/made/by/the/agent",
            "77",
            "/srv",
            "0::/",
            "CapEff:\t0000000000000000",
            "CapBnd:\t00000000080000eb",
            "NoNewPrivs:\t1",
            "Seccomp:\t2",
            "1",
            "1",
            "typed",
        ];
        assert_eq!(output.lines().collect::<Vec<_>>(), expected, "{}", guest.output("c1", "e1", Stream::Stderr).await);
        assert_eq!(guest.end("c1", "e1").await.code, 5);

        for (program, code) in
            [("/no/such", Code::NotFound), ("nothing", Code::NotFound), ("/bin/broken", Code::InvalidArgument), ("/etc", Code::InvalidArgument)]
        {
            let request = ExecRequest { args: vec![program.into()], ..exec("c1", "e2", "") };
            let error = guest.agent.exec(request).await.unwrap_err();
            assert_eq!(error.code(), code, "{program}: {error}");
        }
        let error = guest.agent.wait(WaitRequest { id: "c1".into(), exec_id: "e2".into(), timeout_ms: 0 }).await;
        assert_eq!(error.unwrap_err().code(), Code::NotFound);
        guest.agent.exec(exec("c1", "e3", "exec sleep 1000")).await.unwrap();
        let kill = SignalRequest { id: "c1".into(), exec_id: "e3".into(), signal: 9, all: false };
        guest.agent.signal(kill).await.unwrap();
        assert_eq!(guest.end("c1", "e3").await.code, 137);

        let request = ExecRequest { tty: true, stdin: true, columns: 91, rows: 33, ..exec("c1", "tty", "tty=$(stty size); echo =$tty=; read line; echo =$line=; stty size") };
        guest.agent.exec(request).await.unwrap();
        let mut stdout = guest.stream("c1", "tty", Stream::Stdout);
        guest.read_until(&mut stdout, "=33 91=");
        let size = ResizeRequest { id: "c1".into(), exec_id: "tty".into(), columns: 50, rows: 20 };
        guest.agent.resize(size).await.unwrap();
        let mut stdin = guest.stream("c1", "tty", Stream::Stdin);
        stdin.write_all(b"typed\r").unwrap();
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("=typed=") && rest.contains("20 50"), "{rest:?}");
        guest.agent.signal(SignalRequest { id: "c1".into(), signal: 15, ..SignalRequest::default() }).await.unwrap();
        assert_eq!(guest.end("c1", "").await.code, 0);
        let late = guest.agent.exec(exec("c1", "late", "true")).await.unwrap_err();
        assert_eq!(late.code(), Code::FailedPrecondition, "{late}");

        // A command in the guest has the image of the container that has exited, and its children end with it.
        let script = "readlink /guest; cat /proc/self/cgroup; cat /proc/1/comm; grep -c Groups: /proc/self/status; \
            sleep 1000 & exit 4";
        guest.agent.start_guest_shell(exec("c1", "shell", script)).await.unwrap();
        let output = guest.output("c1", "shell", Stream::Stdout).await;
        assert_eq!(output, "/proc/1/root\n0::/guest-shells/c1/shell\ninit\n1\n");
        assert_eq!(guest.end("c1", "shell").await.code, 4);
        let missing = ExecRequest { args: vec!["/no/such".into()], ..exec("c1", "none", "") };
        assert_eq!(guest.agent.start_guest_shell(missing).await.unwrap_err().code(), Code::NotFound);
        let elsewhere = guest.agent.start_guest_shell(exec("none", "shell", "true")).await.unwrap_err();
        assert_eq!(elsewhere.code(), Code::NotFound, "{elsewhere}");
        guest.agent.start_guest_shell(exec("c1", "held", "sleep 1000")).await.unwrap();
        guest.agent.remove_container(ContainerRef { id: "c1".into() }).await.unwrap();

        // A container that has made cgroups of its own, as one does in which another runtime runs.
        let nested = "mkdir /sys/fs/cgroup/init && echo 0 >/sys/fs/cgroup/init/cgroup.procs && \
            echo +pids >/sys/fs/cgroup/cgroup.subtree_control && echo made";
        guest
            .create("nested", &format!("{nested}; {SLEEP}"), |spec, _| {
                for mount in spec["mounts"].as_array_mut().unwrap() {
                    if mount["type"] == "cgroup" {
                        mount["options"] = json!(["nosuid", "noexec", "nodev", "rw"]);
                    }
                }
            })
            .await;
        guest.start("nested").await;
        let mut stdout = guest.stream("nested", "", Stream::Stdout);
        guest.read_until(&mut stdout, "made\n");
        guest.agent.exec(exec("nested", "e1", "cat /proc/self/cgroup")).await.unwrap();
        assert_eq!(guest.output("nested", "e1", Stream::Stdout).await, "0::/init\n");
        guest.agent.remove_container(ContainerRef { id: "nested".into() }).await.unwrap();

        // A filter without no_new_privs, for a user without privileges: for the first process as for an exec.
        let status = "grep -E 'Seccomp:|NoNewPrivs' /proc/self/status; mkdir /tmp/x; echo $?";
        let filtered = |spec: &mut serde_json::Value, request: &mut CreateContainerRequest| {
            request.user = "101:102".into();
            spec["process"]["noNewPrivileges"] = json!(false);
            spec["linux"]["seccomp"] = json!({
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [{ "names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO" }]
            });
        };
        guest.create("c2", &format!("{status}; {SLEEP}"), filtered).await;
        guest.start("c2").await;
        let mut stdout = guest.stream("c2", "", Stream::Stdout);
        let expected = "NoNewPrivs:\t0\nSeccomp:\t2\n1\n";
        assert_eq!(guest.read_until(&mut stdout, "\n1\n"), expected);
        guest.agent.exec(exec("c2", "e1", status)).await.unwrap();
        assert_eq!(guest.output("c2", "e1", Stream::Stdout).await, expected);
    });
}

#[test]
fn limits_hold_and_neighbours_live() {
    runtime().block_on(async {
        let Some(mut guest) = Guest::boot(|_| ()).await else { return };
        guest.create("neighbour", SLEEP, |_, _| ()).await;
        guest.start("neighbour").await;
        let (_, exit) = guest
            .run("hungry", "tail /dev/zero", |spec, _| {
                spec["linux"]["resources"]["memory"] = json!({ "limit": 16 << 20, "swap": 16 << 20 });
            })
            .await;
        assert_eq!((exit.code, exit.oom_killed, exit.guest_out_of_memory), (137, true, false));
        // Without a limit of its own: the guest runs out of memory, and the OOM killer does not kill the agent.
        let (_, exit) = guest.run("greedy", "tail /dev/zero", |_, _| ()).await;
        assert_eq!((exit.code, exit.oom_killed, exit.guest_out_of_memory), (137, true, true));
        let (output, exit) = guest
            .run("limited", "cd /sys/fs/cgroup; cat memory.max pids.max cpu.max cpu.weight memory.oom.group; kill -9 $$; echo alive", |spec, _| {
                spec["linux"]["resources"]["memory"] = json!({ "limit": 33_554_432 });
                spec["linux"]["resources"]["pids"] = json!({ "limit": 50 });
                spec["linux"]["resources"]["cpu"] = json!({ "shares": 1024, "quota": 50_000, "period": 100_000 });
                spec["linux"]["resources"]["unified"] = json!({ "memory.oom.group": "1" });
            })
            .await;
        let lines: Vec<&str> = output.lines().collect();
        assert_eq!(lines[..3], ["33554432", "50", "50000 100000"], "{output}");
        assert_eq!(lines[4..], ["1", "alive"], "{output}");
        assert_eq!((exit.code, exit.oom_killed), (0, false));

        // A CPU limit of one thousandth holds for the container, not for what creates it.
        guest
            .create("slow", "busybox grep nr_throttled /sys/fs/cgroup/cpu.stat", |spec, _| {
                spec["linux"]["resources"]["cpu"] = json!({ "quota": 1000, "period": 1_000_000 });
            })
            .await;
        let limits = vec![Limit { file: "cpu.max".into(), value: "max 100000".into() }];
        let update = UpdateContainerRequest { id: "slow".into(), limits, ..UpdateContainerRequest::default() };
        guest.agent.update_container(update).await.unwrap();
        guest.start("slow").await;
        assert_eq!(guest.output("slow", "", Stream::Stdout).await, "nr_throttled 0\n");
        guest.agent.remove_container(ContainerRef { id: "slow".into() }).await.unwrap();
        // Nor for what starts a command in it, in the time that a caller waits: 10m, with the filter of a restricted pod.
        let profile: Vec<serde_json::Value> =
            serde_json::from_str(include_str!("../../shim/daemon/src/oci/seccomp.json")).expect("the default profile");
        let calls = profile.iter().flat_map(|group| group["names"].as_array().cloned().unwrap_or_default());
        let calls: Vec<_> = calls.chain([json!("clone")]).collect();
        guest
            .create("tenth", SLEEP, |spec, _| {
                spec["linux"]["resources"]["cpu"] = json!({ "quota": 1000, "period": 100_000 });
                spec["process"]["noNewPrivileges"] = json!(true);
                spec["linux"]["seccomp"] = json!({
                    "defaultAction": "SCMP_ACT_ERRNO", "architectures": ["SCMP_ARCH_X86_64"],
                    "syscalls": [{ "names": calls, "action": "SCMP_ACT_ALLOW" }]
                });
            })
            .await;
        guest.start("tenth").await;
        guest.agent.exec(exec("tenth", "e1", "echo runs")).await.unwrap();
        let output = guest.output("tenth", "e1", Stream::Stdout).await;
        assert_eq!(output, "runs\n");
        guest.agent.remove_container(ContainerRef { id: "tenth".into() }).await.unwrap();
        let (mut spec, mut request) = machine::container("too-slow", "true");
        spec["linux"]["resources"]["cpu"] = json!({ "quota": 1 });
        request.oci_spec = spec.to_string().into_bytes();
        let error = guest.agent.create_container(request).await.unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains("cpu.max"), "{error}");

        let script = "mknod /tmp/vda b 254 0; cat /tmp/vda >/dev/null || echo denied; echo x >/dev/null && echo null; \
            ls /dev; cat /proc/keys | wc -c; echo 1 >/proc/sys/kernel/panic || echo read-only; touch /x && echo written";
        let (output, _) = guest.run("devices", script, |spec, _| spec["root"]["readonly"] = json!(true)).await;
        for word in ["denied\n", "null\n", "ptmx", "\n0\n", "read-only\n"] {
            assert!(output.contains(word), "{word:?} in {output}");
        }
        assert!(!output.contains("written"), "{output}");
        let (output, _) = guest.run("tty", "test -t 0 && echo terminal; stty size; echo $TERM; echo >/dev/console", |spec, _| {
            spec["process"]["terminal"] = json!(true);
            spec["process"]["consoleSize"] = json!({ "height": 11, "width": 22 });
        })
        .await;
        assert!(output.starts_with("terminal\r\n11 22\r\nxterm\r\n"), "{output:?}");

        let (_, mut request) = machine::container("missing", "");
        let mut spec = machine::container("missing", "").0;
        spec["process"]["args"] = json!(["no-such-program"]);
        request.oci_spec = spec.to_string().into_bytes();
        let error = guest.agent.create_container(request.clone()).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{error}");
        spec["process"]["args"] = json!(["/bin/broken"]);
        request.oci_spec = spec.to_string().into_bytes();
        request.user = "nobody-here".into();
        let error = guest.agent.create_container(request.clone()).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        request.user = "4294967295".into();
        let error = guest.agent.create_container(request.clone()).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        request.user = String::new();
        let (code, _) = match guest.agent.create_container(request).await {
            Err(error) => panic!("{error}"),
            Ok(_) => {
                guest.start("missing").await;
                (guest.end("missing", "").await.code, ())
            }
        };
        assert_eq!(code, 126);
        let neighbour = WaitRequest { id: "neighbour".into(), timeout_ms: 0, ..WaitRequest::default() };
        assert_eq!(guest.agent.wait(neighbour).await.unwrap().into_inner().exit, None, "the neighbour lives");
        for id in ["neighbour", "hungry", "greedy", "limited", "devices", "tty", "missing"] {
            guest.agent.remove_container(ContainerRef { id: id.into() }).await.unwrap();
        }
        let states = guest.agent.list_containers(Empty {}).await.unwrap().into_inner().containers;
        assert_eq!(states, []);
    });
}

#[test]
fn a_pod_shares_what_it_should() {
    runtime().block_on(async {
        let change = |config: &mut BootConfig| {
            config.shared_pid = true;
            config.sysctls.insert("kernel.shm_rmid_forced".into(), "1".into());
        };
        let Some(mut guest) = Guest::boot(change).await else { return };
        let one = "echo shared >/dev/shm/word; trap 'exit 0' TERM; while true; do sleep 1; done";
        guest.create("one", one, |_, _| ()).await;
        guest.start("one").await;
        let two = "while ! test -e /dev/shm/word; do sleep 0.1; done; cat /dev/shm/word; ps -o args | grep -c 's[h]ared >/dev/shm'; \
            cat /proc/sys/kernel/shm_rmid_forced; ls -l /proc/1/exe >/dev/null 2>&1 || echo not-mine; sleep 100 & exit 4";
        let (output, exit) = guest.run("two", two, |_, _| ()).await;
        assert!(output.starts_with("shared\n") && output.contains("\n1\n"), "{output}");
        assert_eq!(exit.code, 4, "and its background process was killed, or the output would not have ended");
        // A container that may trace finds nothing in the process that holds the namespace.
        let look = "ls -A /proc/1/root/ >/tmp/root && wc -l </tmp/root; grep CapPrm /proc/1/status";
        let (output, _) = guest
            .run("tracer", look, |spec, _| {
                for set in ["bounding", "effective", "permitted"] {
                    let capabilities = spec["process"]["capabilities"][set].as_array_mut().unwrap();
                    capabilities.push(json!("CAP_SYS_PTRACE"));
                }
            })
            .await;
        assert_eq!(output, "0\nCapPrm:\t0000000000000000\n");
        let (output, _) = guest.run("own", "echo $$; ps | wc -l", |_, request| request.pid_mode = PidMode::Container.into()).await;
        assert!(output.starts_with("1\n"), "{output}");
        guest.create("alone", SLEEP, |_, request| request.pid_mode = PidMode::Container.into()).await;
        guest.start("alone").await;
        let (output, _) = guest.run("debug", "cat /proc/1/cmdline", |_, request| request.pid_of = "alone".into()).await;
        assert!(output.contains("trap 'exit 0' TERM"), "{output:?}");

        // A second image, on a disk that grows; a stream that is taken up by a second reader.
        let image = guest.directory.path().join("image.erofs");
        let length = place(&*guest.machine, &image, 8 << 20);
        let request = AttachImageRequest { partition: 7, offset: 8 << 20, length, files: vec![] };
        guest.agent.attach_image(request.clone()).await.unwrap();
        guest.agent.attach_image(request).await.unwrap();
        guest.create("talker", "i=0; while test $i -lt 20000; do i=$((i+1)); echo line $i; done", |_, request| request.partition = 7).await;
        guest.start("talker").await;
        let mut first = guest.stream("talker", "", Stream::Stdout);
        guest.read_until(&mut first, "line 10\n");
        let mut second = guest.stream("talker", "", Stream::Stdout);
        let mut rest = String::new();
        first.read_to_string(&mut rest).unwrap();
        let mut more = String::new();
        second.read_to_string(&mut more).unwrap();
        let all = rest + &more;
        let numbers: Vec<u32> = all.lines().filter_map(|line| line.strip_prefix("line ")?.parse().ok()).collect();
        assert_eq!(numbers, (11..=20_000).collect::<Vec<_>>(), "nothing is lost between two readers");
        let busy = guest.agent.detach_image(DetachImageRequest { partition: 7 }).await.unwrap_err();
        assert_eq!(busy.code(), Code::FailedPrecondition, "{busy}");
        guest.agent.remove_container(ContainerRef { id: "talker".into() }).await.unwrap();
        guest.agent.detach_image(DetachImageRequest { partition: 7 }).await.unwrap();
    });
}

/// The name of a network namespace, removed at the end.
struct NetnsName(std::path::PathBuf);

impl Drop for NetnsName {
    fn drop(&mut self) {
        if let Err(error) = nacelle_net::netns::remove(&self.0) {
            println!("a namespace is leaked: {error}");
        }
    }
}

#[test]
fn the_network_is_as_configured() {
    let directory = tempfile::tempdir().expect("a directory");
    let name = NetnsName(directory.path().join("netns"));
    let taps = nacelle_net::netns::create(&name.0).and_then(|netns| {
        let taps = ["tap0", "tap1"].map(|name| nacelle_net::tap::create(&netns, name));
        taps.into_iter().collect::<Result<Vec<_>, _>>()
    });
    let taps = match taps {
        Ok(taps) => taps,
        Err(error) => return println!("skipped: no tap can be made here: {error}"),
    };
    let nic = |(number, tap): (u8, nacelle_net::Tap)| NicSpec {
        tap: tap.fd,
        more_queues: vec![],
        dhcp: None,
        mac: [2, 0, 0, 0, 0, number],
        mtu: 1500,
    };
    let nics = (1..).zip(taps).map(nic).collect();
    runtime().block_on(async {
        // The names are the other way round than the kernel's, and the first has another MAC than the device.
        let interface = |name: &str, mac: u8, addresses: &[&str]| Interface {
            name: name.into(),
            mac: vec![2, 0, 0, 0, 0, mac],
            mtu: 1400,
            addresses: addresses.iter().map(|address| (*address).to_owned()).collect(),
            ..Interface::default()
        };
        let route = |destination: &str, gateway: &str, interface: &str| Route {
            destination: destination.into(),
            gateway: gateway.into(),
            interface: interface.into(),
            ..Route::default()
        };
        let change = |config: &mut BootConfig| {
            config.interfaces = vec![interface("eth1", 9, &["10.1.0.2/24", "fd00::2/64"]), interface("eth0", 2, &["10.2.0.2/32"])];
            config.routes = vec![
                route("169.254.1.1/32", "", "eth0"),
                route("0.0.0.0/0", "169.254.1.1", "eth0"),
                route("10.9.0.0/16", "10.1.0.1", "eth1"),
                route("::/0", "fd00::1", "eth1"),
            ];
            config.dns = Some(Dns { servers: vec!["10.96.0.10".into()], ..Dns::default() });
            config.sysctls.insert("net.ipv4.ip_unprivileged_port_start".into(), "7".into());
        };
        let Some(mut guest) = Guest::boot_with(nics, change).await else { return };
        let script = "ip -o addr; ip route; ip -6 route; ip link; cat /etc/resolv.conf /etc/hosts /proc/sys/net/ipv4/ip_unprivileged_port_start";
        let (output, exit) = guest.run("c1", script, |_, _| ()).await;
        assert_eq!(exit.code, 0, "{output}");
        let words: String = output.split_whitespace().collect::<Vec<_>>().join(" ");
        for expected in [
            "eth1 inet 10.1.0.2/24 brd 10.1.0.255",
            "eth1 inet6 fd00::2/64",
            "eth0 inet 10.2.0.2/32",
            "lo inet 127.0.0.1/8",
            "default via 169.254.1.1 dev eth0",
            "10.9.0.0/16 via 10.1.0.1 dev eth1",
            "default via fd00::1 dev eth1",
            "link/ether 02:00:00:00:00:09",
            "mtu 1400",
            "nameserver 10.96.0.10",
            "10.1.0.2 pod",
            " 7",
        ] {
            assert!(words.contains(expected), "{expected:?} in {output}");
        }
    });
}

#[test]
fn a_guest_that_cannot_be_configured_says_why() {
    runtime().block_on(async {
        let Some((report, exit)) =
            Guest::fail(|config| drop(config.sysctls.insert("kernel.panic".into(), "1".into()))).await
        else {
            return;
        };
        assert!(report.error.contains("\"kernel.panic\" is no sysctl that a pod may set"), "{}", report.error);
        assert_eq!(exit.how, nacelle_engine::ExitKind::Shutdown, "{exit:?}");
    });
}
