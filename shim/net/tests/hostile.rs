//! Tests the chain with plugins that misbehave.

mod common;

use cni_plugin::config::NetworkConfig;
use common::{LIMIT, World, eventually, in_a_world, pod};
use nacelle_base::{Classify, FailureKind};
use nacelle_model::network::{Bandwidth, DnsConfig, PortMapping, Protocol};
use nacelle_net::{CniError, NetError, PodRef};
use std::path::Path;
use std::time::Duration;

/// Writes a chain of fake plugins: for each its tag and additional configuration.
fn chain(world: &World, version: &str, fakes: &[(&str, &str)]) {
    let plugin = |(tag, more): &(&str, &str)| {
        format!(
            r#"{{ "type": "nacelle-fake", "dir": "DIR", "tag": "{tag}",
                 "capabilities": {{ "portMappings": true, "bandwidth": true, "dns": true, "ipRanges": true }} {more} }}"#
        )
    };
    let plugins = fakes.iter().map(plugin).collect::<Vec<_>>().join(",");
    world.conf(
        "10-fake.conflist",
        &format!(r#"{{ "cniVersion": "{version}", "name": "fakes", "plugins": [{plugins}] }}"#),
    );
}

fn calls(world: &World) -> Vec<String> {
    let text = std::fs::read_to_string(world.dir("calls")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn fed(world: &World, call: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(world.dir(&format!("{call}.json"))).unwrap()).unwrap()
}

/// Returns the error of setup when the second of two plugins does this at ADD.
async fn second_does(world: &World, mode: &str) -> CniError {
    let _ = std::fs::remove_file(world.dir("calls"));
    chain(world, "1.0.0", &[("one", ""), ("two", &format!(r#", "mode": "{mode}""#))]);
    let pod = pod(1);
    let error = world.network.setup(&pod).await.unwrap_err();
    assert_eq!(calls(world), ["ADD one", "ADD two", "DEL two", "DEL one"], "{mode}");
    assert!(world.files("cache").is_empty(), "{mode}");
    match error {
        NetError::Cni(error) => error,
        other => panic!("{mode}: {other}"),
    }
}

#[test]
fn whatever_the_second_plugin_does_the_first_is_taken_back() {
    in_a_world(&[], |world| async move {
        world.network.create_netns(&pod(1).id).await.unwrap();
        let error = second_does(&world, "endless").await;
        assert!(matches!(error, CniError::TooMuchOutput { .. }), "{error}");
        for mode in ["garbage", "array"] {
            let error = second_does(&world, mode).await;
            assert!(matches!(error, CniError::Json { .. }), "{mode}: {error}");
        }
        for mode in ["version", "dns"] {
            let error = second_does(&world, mode).await;
            assert!(matches!(error, CniError::Field { .. }), "{mode}: {error}");
        }
        match second_does(&world, "json").await {
            CniError::Plugin { code: 11, message, .. } => assert_eq!(message, "refused; line one"),
            other => panic!("{other}"),
        }
        for (mode, status, said) in [
            ("plain", "exit status: 3", "no such luck"),
            ("silent", "exit status: 4", "it printed nothing"),
            ("suicide", "signal: 9", "it printed nothing"),
        ] {
            match second_does(&world, mode).await {
                CniError::Failed { status: how, output, .. } => {
                    assert!(how.starts_with(status), "{mode}: {how}");
                    assert_eq!(output, said, "{mode}");
                }
                other => panic!("{mode}: {other}"),
            }
        }
    });
}

#[test]
fn a_plugin_that_takes_too_long_is_killed_with_its_children() {
    in_a_world(&[], |world| async move {
        // "orphan" exits at once, but leaves a child that holds its output.
        for mode in ["hang", "orphan"] {
            let pod = pod(1);
            chain(&world, "1.0.0", &[("one", &format!(r#", "mode": "{mode}""#))]);
            world.network.create_netns(&pod.id).await.unwrap();
            let error = world.again(Duration::from_secs(3)).setup(&pod).await.unwrap_err();
            assert_eq!(error.kind(), FailureKind::Timeout, "{mode}: {error}");
            // On a very slow machine the plugin may not have started its children yet.
            if let Ok(pids) = std::fs::read_to_string(world.dir("pids")) {
                all_gone(&pids).await;
                std::fs::remove_file(world.dir("pids")).unwrap();
            }
            world.network.teardown(&pod.id).await.unwrap();
            assert!(world.files("cache").is_empty());
        }
    });
}

async fn all_gone(pids: &str) {
    for pid in pids.split_whitespace() {
        // A zombie counts as gone: its new parent has yet to reap it.
        let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let gone = || state().rsplit(')').next().is_none_or(|rest| rest.trim().is_empty() || rest.starts_with(" Z"));
        eventually("the plugin and its child are gone", gone).await;
    }
}

#[test]
fn a_setup_that_is_given_up_kills_the_plugin_and_teardown_cleans_up() {
    in_a_world(&[], |world| async move {
        let pod = pod(1);
        chain(&world, "1.0.0", &[("one", ""), ("two", r#", "mode": "hang""#)]);
        world.network.create_netns(&pod.id).await.unwrap();
        let there = || world.dir("pids").exists();
        tokio::select! {
            _ = world.network.setup(&pod) => panic!("it hangs"),
            () = eventually("the plugin runs", there) => (),
        }
        all_gone(&std::fs::read_to_string(world.dir("pids")).unwrap()).await;
        // A new daemon finds the pod and can clean up, whatever the configuration is now.
        std::fs::remove_file(world.dir("conf").join("10-fake.conflist")).unwrap();
        let network = world.again(LIMIT);
        assert!(network.pods().await.unwrap().contains(&pod.id));
        network.teardown(&pod.id).await.unwrap();
        assert_eq!(calls(&world), ["ADD one", "ADD two", "DEL two", "DEL one"]);
        assert!(network.pods().await.unwrap().is_empty());
        network.teardown(&pod.id).await.unwrap();
        assert_eq!(calls(&world).len(), 4);
    });
}

#[test]
fn a_plugin_of_a_daemon_that_was_killed_is_waited_for() {
    in_a_world(&[], |world| async move {
        let pod = pod(1);
        chain(&world, "1.0.0", &[("one", r#", "mode": "plain", "del": "json""#)]);
        world.network.create_netns(&pod.id).await.unwrap();
        world.network.setup(&pod).await.unwrap_err();
        std::fs::remove_file(world.dir("calls")).unwrap();
        // A plugin of the former daemon is a process that has the pod's locked file as its input.
        let input = std::fs::File::open(world.dir("cache").join(format!("{}.input", pod.id))).unwrap();
        input.lock().unwrap();
        let script = "echo >started; while [ ! -e go ]; do sleep 0.01; done; echo late >>calls";
        let mut plugin = {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", script]).current_dir(world.dir("")).stdin(input).spawn().unwrap()
        };
        let started = world.dir("started");
        eventually("the plugin runs", || started.exists()).await;
        let error = world.again(Duration::ZERO).teardown(&pod.id).await.unwrap_err();
        assert!(matches!(error, NetError::Cni(CniError::Busy { .. })), "{error}");
        std::fs::write(world.dir("go"), "").unwrap();
        // DEL fails as configured, but the plugin was called.
        world.again(LIMIT).teardown(&pod.id).await.unwrap_err();
        assert_eq!(calls(&world), ["late", "DEL one"]);
        plugin.wait().unwrap();
    });
}

#[test]
fn a_pod_without_an_address_is_taken_back() {
    in_a_world(&[], |world| async move {
        let pod = pod(1);
        chain(&world, "1.0.0", &[("one", "")]);
        world.network.create_netns(&pod.id).await.unwrap();
        let error = world.network.setup(&pod).await.unwrap_err();
        assert!(matches!(error, NetError::NoInterface { .. }), "{error}");
        assert_eq!(calls(&world), ["ADD one", "DEL one"]);
    });
}

#[test]
fn a_failed_del_is_remembered_and_the_others_are_done() {
    in_a_world(&[], |world| async move {
        let pod = pod(1);
        chain(&world, "1.0.0", &[("one", ""), ("two", r#", "mode": "plain", "del": "json""#)]);
        world.network.create_netns(&pod.id).await.unwrap();
        world.network.setup(&pod).await.unwrap_err();
        assert!(world.network.pods().await.unwrap().contains(&pod.id));
        world.network.teardown(&pod.id).await.unwrap_err();
        assert!(world.network.netns_path(&pod.id).exists());
        assert_eq!(calls(&world)[2..], ["DEL two", "DEL one", "DEL two", "DEL one"]);
        // DEL receives the recorded configuration of ADD and fails again, until the test edits the record.
        let text = std::fs::read_to_string(world.dir("cache").join(format!("{}.json", pod.id))).unwrap();
        std::fs::write(world.dir("cache").join(format!("{}.json", pod.id)), text.replace("\"json\"", "\"\"")).unwrap();
        world.network.teardown(&pod.id).await.unwrap();
        assert!(world.network.pods().await.unwrap().is_empty());
    });
}

#[test]
fn a_pod_goes_without_its_plugins_and_they_are_asked_again() {
    in_a_world(&[], |world| async move {
        let pod = pod(1);
        std::fs::write(world.dir("broken"), "").unwrap();
        chain(&world, "1.0.0", &[("one", ""), ("two", r#", "del": "broken""#)]);
        world.network.create_netns(&pod.id).await.unwrap();
        world.network.setup(&pod).await.unwrap_err();
        std::fs::remove_file(world.dir("calls")).unwrap();
        let error = world.network.release(&pod.id, LIMIT).await.unwrap();
        assert!(matches!(error, Some(CniError::Plugin { code: 11, .. })), "{error:?}");
        assert!(!world.network.netns_path(&pod.id).exists());
        assert_eq!(calls(&world), ["DEL two", "DEL one"].repeat(3));
        let owed = world.network.owed_deletes().await.unwrap();
        assert_eq!((owed.len(), &owed[0].pod, owed[0].network.as_str(), owed[0].attempts), (1, &pod.id, "fakes", 1));
        assert!(owed[0].error.contains("refused DEL with code 11") && owed[0].since > 0, "{owed:?}");

        // A later daemon, for which the pod is gone, finds the pending DEL.
        let network = world.again(LIMIT);
        std::fs::remove_file(world.dir("calls")).unwrap();
        network.gc(&|| [].into(), LIMIT).await.unwrap();
        assert!(!world.dir("calls").exists(), "the start of a daemon waits for no plugin that has failed before");
        network.retry_owed_deletes(LIMIT).await;
        assert_eq!(network.owed_deletes().await.unwrap()[0].attempts, 2);
        std::fs::remove_file(world.dir("broken")).unwrap();
        std::fs::remove_file(world.dir("calls")).unwrap();
        // The DEL is not due yet.
        network.retry_owed_deletes(LIMIT).await;
        assert!(!world.dir("calls").exists());
        // But a configuration has changed.
        world.conf("20-other.conf", "");
        network.retry_owed_deletes(LIMIT).await;
        assert_eq!(calls(&world), ["DEL two", "DEL one"]);
        assert!(network.owed_deletes().await.unwrap().is_empty() && world.files("cache").is_empty());
        // The namespace was gone: CNI expects an empty path then.
        let environment = std::fs::read_to_string(world.dir("two.DEL.env")).unwrap();
        assert_eq!(environment.lines().nth(1), Some(""));
        assert_eq!(network.release(&pod.id, LIMIT).await.unwrap().map(|error| error.to_string()), None);
    });
}

#[test]
fn a_pod_goes_without_a_plugin_that_hangs_or_is_not_installed_any_more() {
    in_a_world(&[], |world| async move {
        let pod = pod(1);
        std::fs::write(world.dir("broken"), "").unwrap();
        chain(&world, "1.0.0", &[("one", r#", "del": "broken""#)]);
        world.network.create_netns(&pod.id).await.unwrap();
        world.network.setup(&pod).await.unwrap_err();
        let path = world.dir("cache").join(format!("{}.json", pod.id));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"broken\"", "\"hang\"")).unwrap();
        let error = world.network.release(&pod.id, Duration::from_secs(5)).await.unwrap();
        assert!(matches!(error, Some(CniError::TooSlow { command: "DEL", seconds: 5 })), "{error:?}");
        if let Ok(pids) = std::fs::read_to_string(world.dir("pids")) {
            all_gone(&pids).await;
        }
        assert!(!world.network.netns_path(&pod.id).exists());
        assert_eq!(world.network.owed_deletes().await.unwrap().len(), 1);

        std::fs::write(&path, text.replace("nacelle-fake", "nacelle-gone")).unwrap();
        let began = std::time::Instant::now();
        let network = world.again(LIMIT);
        let error = network.release(&pod.id, LIMIT).await.unwrap();
        assert!(matches!(error, Some(CniError::NoPlugin { .. })), "{error:?}");
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        // A daemon that still knows the pod also takes over the pending DEL.
        let network = world.again(LIMIT);
        network.gc(&|| [pod.id.clone()].into(), LIMIT).await.unwrap();
        std::fs::write(&path, text.replace("\"broken\"", "\"\"")).unwrap();
        network.retry_owed_deletes(LIMIT).await;
        assert!(network.owed_deletes().await.unwrap().is_empty());
    });
}

#[test]
fn plugins_are_fed_what_the_conventions_say() {
    in_a_world(&[], |world| async move {
        let port = |host_port| PortMapping { host_port, container_port: 80, protocol: Protocol::Tcp, host_ip: None };
        let pod = PodRef {
            port_mappings: vec![port(8080), port(0)],
            bandwidth: Bandwidth { ingress_bps: Some(1_000_000), egress_bps: None },
            dns: Some(DnsConfig { servers: vec!["10.0.0.10".into()], ..DnsConfig::default() }),
            pod_cidrs: vec!["10.1.0.0/16".parse().unwrap()],
            ..pod(1)
        };
        chain(&world, "1.0.0", &[("one", ""), ("two", "")]);
        world.network.create_netns(&pod.id).await.unwrap();
        world.network.setup(&pod).await.unwrap_err();

        // What a plugin written with the cni-plugin crate reads.
        let two: NetworkConfig = serde_json::from_value(fed(&world, "two.ADD")).unwrap();
        assert_eq!((two.name.as_str(), two.plugin.as_str()), ("fakes", "nacelle-fake"));
        assert_eq!(two.cni_version.to_string(), "1.0.0");
        assert_eq!(two.prev_result.as_ref().unwrap()["own"], "one");
        let runtime = two.runtime.unwrap();
        assert_eq!(runtime.port_mappings.len(), 1);
        assert_eq!((runtime.port_mappings[0].host_port, runtime.port_mappings[0].container_port), (8080, 80));
        let bandwidth = runtime.bandwidth.unwrap();
        assert_eq!((bandwidth.ingress_rate, bandwidth.egress_rate), (Some(1_000_000), None));
        let runtime = &fed(&world, "one.ADD")["runtimeConfig"];
        assert_eq!(runtime["portMappings"][0]["protocol"], "tcp");
        assert_eq!(runtime["dns"]["servers"][0], "10.0.0.10");
        assert_eq!(runtime["ipRanges"][0][0]["subnet"], "10.1.0.0/16");
        assert!(fed(&world, "one.ADD").get("prevResult").is_none());
        // DEL receives the last result, even the first plugin.
        assert_eq!(fed(&world, "one.DEL")["prevResult"]["own"], "two");

        let environment = std::fs::read_to_string(world.dir("one.ADD.env")).unwrap();
        let netns = world.network.netns_path(&pod.id);
        let expected = [
            pod.id.to_string(),
            netns.display().to_string(),
            "eth0".to_owned(),
            format!(
                "IgnoreUnknown=1;K8S_POD_NAMESPACE=tests;K8S_POD_NAME=pod-1;K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID=uid-1",
                pod.id
            ),
        ];
        assert_eq!(environment.lines().collect::<Vec<_>>(), expected);
    });
}

#[test]
fn a_plugin_that_reads_nothing_is_no_failure() {
    in_a_world(&[], |world| async move {
        // Longer than the capacity of a pipe.
        let long = "x".repeat(300_000);
        let conf = format!(r#"{{ "cniVersion": "1.0.0", "name": "deaf", "type": "nacelle-deaf", "long": "{long}" }}"#);
        world.conf("10-deaf.conf", &conf);
        world.network.create_netns(&pod(1).id).await.unwrap();
        let error = world.network.setup(&pod(1)).await.unwrap_err();
        assert!(matches!(error, NetError::NoInterface { .. }), "{error}");
    });
}

#[test]
fn status_and_gc_speak_to_plugins_from_1_1_0_on() {
    in_a_world(&[], |world| async move {
        let status = async || {
            world.network.status().await.map_err(|error| match error {
                NetError::Cni(error) => error,
                other => panic!("{other}"),
            })
        };
        assert!(matches!(status().await, Err(CniError::NoConfig { .. })));
        world.network.gc(&|| [].into(), LIMIT).await.unwrap();
        chain(&world, "1.0.0", &[("one", "")]);
        status().await.unwrap();
        world.network.gc(&|| [].into(), LIMIT).await.unwrap();
        assert_eq!(calls(&world), [""; 0]);
        chain(&world, "1.1.0", &[("one", ""), ("two", r#", "status": "missing""#)]);
        assert!(matches!(status().await, Err(CniError::Plugin { code: 50, .. })));
        assert_eq!(calls(&world), ["STATUS one", "STATUS two"]);
        chain(&world, "0.3.1", &[("one", "")]);
        assert!(matches!(status().await, Err(CniError::Version { .. })));
        world.conf("05-none.conf", r#"{ "cniVersion": "1.0.0", "name": "n", "type": "nacelle-nowhere" }"#);
        assert!(matches!(status().await, Err(CniError::NoPlugin { .. })));
        world.conf("05-none.conf", "{");
        assert!(matches!(status().await, Err(CniError::Json { .. })));
        std::fs::remove_file(world.dir("conf").join("05-none.conf")).unwrap();

        // Two pods whose DEL failed; one of them is kept.
        chain(&world, "1.1.0", &[("one", r#", "mode": "json", "del": "json""#)]);
        for number in [1, 2] {
            world.network.create_netns(&pod(number).id).await.unwrap();
            world.network.setup(&pod(number)).await.unwrap_err();
        }
        world.network.gc(&|| [pod(1).id].into(), LIMIT).await.unwrap();
        // The other one is gone all the same, and its DEL is pending.
        assert!(!world.network.netns_path(&pod(2).id).exists());
        let owed: Vec<_> = world.network.owed_deletes().await.unwrap().into_iter().map(|owed| owed.pod).collect();
        assert_eq!(owed, [pod(2).id]);
        let valid = serde_json::json!([{ "containerID": pod(1).id, "ifname": "eth0" }]);
        assert_eq!(fed(&world, "one.GC")["cni.dev/valid-attachments"], valid);
        assert_eq!(calls(&world).last().unwrap(), "GC one");
    });
}

#[test]
fn gc_spares_a_pod_that_is_attached_while_it_runs() {
    in_a_world(&[], |world| async move {
        // Records of attachments stay, because DEL fails too.
        chain(&world, "1.1.0", &[("one", r#", "mode": "json", "del": "json""#)]);
        for number in [1, 3] {
            world.network.create_netns(&pod(number).id).await.unwrap();
            world.network.setup(&pod(number)).await.unwrap_err();
        }
        let asked = std::sync::atomic::AtomicBool::new(false);
        let known = || {
            let is_first = !asked.swap(true, std::sync::atomic::Ordering::Relaxed);
            if is_first {
                // After the pods of the node were listed, another one comes.
                let attach = || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(async {
                        world.network.create_netns(&pod(2).id).await.unwrap();
                        world.network.setup(&pod(2)).await.unwrap_err();
                    });
                };
                std::thread::scope(|scope| scope.spawn(attach).join().unwrap());
            }
            let ids = [pod(1).id, pod(2).id];
            ids.into_iter().take(if is_first { 1 } else { 2 }).collect()
        };
        world.network.gc(&known, LIMIT).await.unwrap();
        assert!(world.network.netns_path(&pod(2).id).exists() && !world.network.netns_path(&pod(3).id).exists());
        let attachment = |number| serde_json::json!({ "containerID": pod(number).id, "ifname": "eth0" });
        let valid = fed(&world, "one.GC")["cni.dev/valid-attachments"].clone();
        let mut valid: Vec<_> = valid.as_array().unwrap().iter().map(ToString::to_string).collect();
        valid.sort();
        let mut expected = [1, 2].map(|number| attachment(number).to_string());
        expected.sort();
        assert_eq!(valid, expected);
        // Again, and nothing changes.
        let before = calls(&world).len();
        world.network.gc(&known, LIMIT).await.unwrap();
        assert_eq!(calls(&world)[before..], ["GC one"]);
    });
}

#[test]
fn what_cannot_be_said_in_cni_args_is_refused_and_changes_nothing() {
    in_a_world(&[], |world| async move {
        chain(&world, "1.0.0", &[("one", "")]);
        world.network.create_netns(&pod(1).id).await.unwrap();
        let error = world.network.setup(&PodRef { name: "a;K8S_POD_UID=x".to_owned(), ..pod(1) }).await.unwrap_err();
        assert_eq!(error.kind(), FailureKind::Invalid, "{error}");
        assert_eq!(calls(&world), [""; 0]);
        assert!(!Path::new(&world.dir("cache")).exists());
    });
}
