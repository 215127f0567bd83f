//! Tests container pods whose VM is configured by annotations, as containers see it: vCPUs, memory, the kernel and its
//! parameters; and requests that are rejected without side effects.

use nacelle_e2e::node::{NodeOptions, SMALL_VM, engine, handler_config};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

fn annotation_key(name: &str) -> String {
    format!("vm.nacelle.dev/{name}")
}

fn node_with_annotations() -> TestNode {
    let allowed = ["cpus", "cpu-model", "cpu-pinning", "memory", "kernel-image", "kernel", "kernel-args", "spec"]
        .map(annotation_key);
    let extra = handler_config("shaped", &format!("{SMALL_VM}allowed_annotations = {allowed:?}\n"));
    TestNode::with_options(NodeOptions { extra, ..NodeOptions::default() })
}

fn annotated_test_pod(node: &TestNode, annotations: &[(&str, &str)]) -> PodRequest {
    let all: Map<String, Value> =
        annotations.iter().map(|(name, value)| (annotation_key(name), json!(value))).collect();
    PodRequest::new("shaped", &node.directory().join("logs")).set("annotations", Value::Object(all))
}

#[test]
fn a_vm_has_the_resources_that_its_pod_requests() {
    let mut node = node_with_annotations();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let requested =
        annotated_test_pod(&node, &[("cpus", "2"), ("memory", "256Mi"), ("kernel-args", "nacelle.e2e=here")]);
    let again = PodRequest(requested.0.clone());
    let seen = "nproc; grep MemTotal /proc/meminfo; cat /proc/cmdline";
    let check = |output: &str| {
        let mut lines = output.lines();
        assert_eq!(lines.next(), Some("2"), "{output}");
        let kib = lines.next().and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).expect("a number");
        assert!(kib > 180 << 10 && kib <= 256 << 10, "{output}");
        assert!(lines.next().is_some_and(|words| words.split(' ').any(|word| word == "nacelle.e2e=here")), "{output}");
    };
    let id = {
        let pod = node.crictl.run_pod_with_handler("shaped", requested);
        let container = pod.start(ContainerRequest::sh("main", &image, "sleep 1000"));
        check(&container.exec(seen).ok());
        let info = pod.inspect()["info"].to_string();
        assert!(info.contains("shape"), "{info}");
        pod.id.clone()
    };
    // A restarted daemon shows the same.
    node.kill();
    node.start();
    let pod = node.crictl.pod_handle(&id, again);
    nacelle_e2e::eventually("the pod is found", || (pod.inspect()["status"]["state"] == "SANDBOX_READY").then_some(()));
    assert!(pod.inspect()["info"].to_string().contains("shape"));
    pod.remove();
}

/// Returns the node's guest kernel with another release: the last digit is changed in all of its occurrences.
fn kernel_with_other_name() -> (Vec<u8>, String) {
    let mut kernel = std::fs::read(nacelle_e2e::path_from_env("NACELLE_KERNEL")).expect("the kernel is there");
    let banner = b"Linux version ";
    let at =
        kernel.windows(banner.len()).position(|bytes| bytes == banner).expect("a kernel has a banner") + banner.len();
    let release: Vec<u8> = kernel[at..].iter().copied().take_while(|byte| *byte != b' ').collect();
    let digit = release.iter().rposition(u8::is_ascii_digit).expect("a release has numbers");
    let mut other = release.clone();
    other[digit] = b'0' + (release[digit] - b'0' + 1) % 10;
    for at in 0..=kernel.len() - release.len() {
        if kernel[at..].starts_with(&release) {
            kernel[at..at + other.len()].copy_from_slice(&other);
        }
    }
    (kernel, String::from_utf8(other).expect("a release is a text"))
}

#[test]
fn a_vm_boots_the_kernel_of_its_pods_image() {
    let mut node = node_with_annotations();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let (kernel, release) = kernel_with_other_name();
    let with_kernel = TestImage::busybox().with_layer(|layer| {
        layer.add_directory("boot", 0o755);
        layer.add_file("boot/vmlinux", &kernel, 0o600);
        layer.add_file("boot/readme", b"this is no kernel\n", 0o644);
        layer.add_symlink("boot/passwd", "/etc/passwd");
    });
    // The image is not pulled before the pod is created.
    let from = node.registry.push(&with_kernel, "kernels:1");
    let refused = |annotations: &[(&str, &str)]| {
        let file = node.crictl.write_input("pod", &annotated_test_pod(&node, annotations).0);
        node.crictl.try_call(["runp", "--runtime", "shaped", &file]).err()
    };
    let missing = from.replace("kernels:1", "none:1");
    let spec = format!(
        "{{domain: {{firmware: {{kernelBoot: {{container: {{image: '{from}', kernelPath: /boot/vmlinux, initrdPath: /i}}}}}}}}}}"
    );
    for (error, code, words) in [
        (refused(&[("kernel-image", &missing), ("kernel", "/boot/vmlinux")]), "NotFound", "crictl pull"),
        (refused(&[("kernel-image", &from), ("kernel", "/boot/none")]), "FailedPrecondition", "/boot/none"),
        (refused(&[("kernel-image", &from), ("kernel", "/boot/passwd")]), "FailedPrecondition", "/boot/passwd"),
        (refused(&[("kernel-image", &from), ("kernel", "/boot/readme")]), "InvalidArgument", "neither an ELF"),
        (refused(&[("kernel-image", &from), ("kernel", "boot/../x")]), "InvalidArgument", "kernelPath"),
        (refused(&[("spec", &spec)]), "Unimplemented", "initrdPath"),
        (
            refused(&[("kernel-image", &from), ("kernel", "/k"), ("initrd", "/i")]),
            "InvalidArgument",
            "handler shaped allows",
        ),
    ] {
        assert!(error.contains(code) && error.contains(words), "{code}, {words:?} in {error}");
    }
    assert!(node.leaked().is_empty(), "nothing was made: {:?}", node.leaked());

    let requested = annotated_test_pod(
        &node,
        &[("kernel-image", &from), ("kernel", "/boot/vmlinux"), ("kernel-args", "nacelle.e2e=here")],
    );
    let again = PodRequest(requested.0.clone());
    let check = |pod: &nacelle_e2e::crictl::RunningPod<'_>, name: &str| {
        let container = pod.start(ContainerRequest::sh(name, &image, "sleep 1000"));
        assert_eq!(container.exec("uname -r").ok().trim(), release);
        assert!(container.exec("cat /proc/cmdline").ok().contains("nacelle.e2e=here"));
        let info = pod.inspect()["info"].to_string();
        assert!(info.contains("/boot/vmlinux") && info.contains(&format!("\"kernelRelease\":\"{release}\"")), "{info}");
    };
    let id = {
        let pod = node.crictl.run_pod_with_handler("shaped", requested);
        // The VM has loaded its kernel: the image may be removed.
        node.crictl.call(["rmi", &from]);
        check(&pod, "one");
        pod.id.clone()
    };
    node.kill();
    node.start();
    let found = node.crictl.pod_handle(&id, again);
    nacelle_e2e::eventually("the pod is found", || {
        (found.inspect()["status"]["state"] == "SANDBOX_READY").then_some(())
    });
    check(&found, "two");
    found.remove();
    // Other pods have the node's kernel.
    let plain = node.crictl.run_pod_with_handler("shaped", annotated_test_pod(&node, &[("cpus", "1")]));
    let container = plain.start(ContainerRequest::sh("main", &image, "sleep 1000"));
    assert_ne!(container.exec("uname -r").ok().trim(), release);
    plain.remove();
}

/// Returns the affinities of the vCPU threads, and those of all other threads.
fn thread_affinities(node: &TestNode) -> (BTreeMap<String, String>, BTreeSet<String>) {
    let (mut vcpus, mut others) = (BTreeMap::new(), BTreeSet::new());
    for process in node.vm_pids() {
        for task in std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
            let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
            let status = read("status");
            let Some(list) = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")) else { continue };
            let (name, list) = (read("comm").trim().to_owned(), list.trim().to_owned());
            if name.starts_with("vcpu") || name.starts_with("CPU ") || name == "ALL CPUs/TCG" {
                vcpus.insert(name, list);
            } else {
                others.insert(list);
            }
        }
    }
    (vcpus, others)
}

#[test]
fn vcpus_run_on_the_dedicated_cpus_of_their_containers() {
    let mut node = node_with_annotations();
    if std::fs::read_to_string("/sys/devices/system/cpu/online").expect("the node says it").trim() != "0-1" {
        println!("skipped: this test is for a node with two processors");
        return;
    }
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let on = |name: &str, processors: &str| {
        let limits = json!({"resources": {"cpuset_cpus": processors}});
        ContainerRequest::sh(name, &image, "sleep 1000").set("linux", limits)
    };
    let requested = annotated_test_pod(&node, &[("cpus", "2"), ("cpu-pinning", "true")]);
    let again = PodRequest(requested.0.clone());
    // Emulated vCPUs share one thread, which runs on both.
    let check = |node: &TestNode, when: &str| {
        nacelle_e2e::eventually(when, || {
            let (vcpus, others) = thread_affinities(node);
            let own = match vcpus.get("ALL CPUs/TCG") {
                Some(list) => list == "0-1" && vcpus.len() == 1,
                None => vcpus.values().map(String::as_str).eq(["0", "1"]),
            };
            (own && others.iter().eq(["0-1"])).then_some(())
        });
    };
    let (id, both) = {
        let pod = node.crictl.run_pod_with_handler("shaped", requested);
        let few = |error: String| {
            let words = ["cpuset_cpus is", "1 CPUs of the node", "its VM has 2 vCPUs"];
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        };
        few(pod.try_create(on("few", "1")).err());
        let both = pod.start(on("both", "0-1"));
        check(&node, "each has one");
        few(node.crictl.try_call(["update", "--cpuset-cpus", "1", &both.id]).err());
        check(&node, "nothing has changed");
        (pod.id.clone(), both.id.clone())
    };
    node.kill();
    node.start();
    let pod = node.crictl.pod_handle(&id, again);
    nacelle_e2e::eventually("the pod is found", || (pod.inspect()["status"]["state"] == "SANDBOX_READY").then_some(()));
    check(&node, "with the next daemon");
    pod.start(on("one", "1"));
    node.crictl.call(["rm", "--force", &both]);
    nacelle_e2e::eventually("the machine runs where the container may that is left", || {
        let (vcpus, others) = thread_affinities(&node);
        vcpus.values().chain(&others).all(|list| list == "1").then_some(())
    });
    pod.start(on("more", "0-1"));
    check(&node, "there are enough again");
    pod.remove();
}

#[test]
fn vcpus_have_the_requested_cpu_model() {
    let node = node_with_annotations();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let requested = annotated_test_pod(
        &node,
        &[("cpu-model", "Haswell-v4"), ("spec", "{domain: {cpu: {features: [{name: avx2, policy: disable}]}}}")],
    );
    if engine() == "kvm" {
        let file = node.crictl.write_input("pod", &requested.0);
        let refused = node.crictl.try_call(["runp", "--runtime", "shaped", &file]).err();
        assert!(refused.contains("Unimplemented") && refused.contains("cpu.model is Haswell-v4"), "{refused}");
        assert!(node.leaked().is_empty(), "nothing was made: {:?}", node.leaked());
        return;
    }
    let pod = node.crictl.run_pod_with_handler("shaped", requested);
    let container = pod.start(ContainerRequest::sh("main", &image, "sleep 1000"));
    let processor = container.exec("cat /proc/cpuinfo").ok();
    let value = |key: &str| {
        let line = processor.lines().find(|line| line.starts_with(key));
        line.and_then(|line| line.split_once(": ")).map(|(_, value)| value.to_owned()).unwrap_or_default()
    };
    assert!(value("model name").contains("Haswell"), "{processor}");
    let flags = value("flags");
    let has = |flag: &str| flags.split(' ').any(|other| other == flag);
    assert!(has("aes") && !has("avx2"), "{flags}");
    pod.remove();
}

#[test]
fn unsupported_fields_of_container_pods_are_refused_by_name() {
    let node = node_with_annotations();
    let refused = |annotations: &[(&str, &str)]| {
        let file = node.crictl.write_input("pod", &annotated_test_pod(&node, annotations).0);
        node.crictl.try_call(["runp", "--runtime", "shaped", &file]).err()
    };
    let spec = |document: &'static str| refused(&[("spec", document)]);
    for (error, code, words) in [
        (refused(&[("cpus", "0")]), "InvalidArgument", "spec.domain.cpu"),
        (refused(&[("memory", "16Mi")]), "InvalidArgument", "spec.domain.memory.guest"),
        (refused(&[("hugepages", "2Mi")]), "InvalidArgument", "hugepages"),
        (spec("{domain: {cpu: {features: [{name: avx, policy: forbid}]}}}"), "Unimplemented", "features[0].policy"),
        (spec("{domain: {cpu: {features: [{name: 'a,b'}]}}}"), "InvalidArgument", "features"),
        (spec("{domain: {memory: {hugepages: {pageSize: 1Gi}}}}"), "Unimplemented", "pageSize"),
        (spec("{domain: {cpu: {maxSockets: 2}}}"), "Unimplemented", "maxSockets"),
    ] {
        assert!(error.contains(code) && error.contains(words), "{code}, {words:?} in {error}");
    }
    assert!(node.leaked().is_empty(), "nothing was made: {:?}", node.leaked());
}
