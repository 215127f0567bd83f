//! Owns: pods of containers whose machine is shaped by annotations, as containers see it: processors, memory, the kernel's words;
//! and what is refused before anything exists.

use nacelle_e2e::node::{Options, engine};
use nacelle_e2e::{Container, Image, Node, Pod};
use serde_json::{Map, Value, json};

fn key(name: &str) -> String {
    format!("vm.nacelle.dev/{name}")
}

fn node() -> Node {
    let [kernel, initrd] = ["NACELLE_KERNEL", "NACELLE_INITRD"].map(nacelle_e2e::part);
    let allowed = ["cpus", "cpu-model", "memory", "kernel-args", "spec"].map(key);
    let extra = format!(
        "[handlers.shaped]\nengine = {:?}\nkernel = {kernel:?}\ninitrd = {initrd:?}\nmemory_mib = 128\nscratch_mib = 512\n\
         allowed_annotations = {allowed:?}\n",
        engine()
    );
    Node::with(Options { extra, ..Options::default() })
}

fn pod(node: &Node, annotations: &[(&str, &str)]) -> Pod {
    let all: Map<String, Value> = annotations.iter().map(|(name, value)| (key(name), json!(value))).collect();
    Pod::new("shaped", &node.folder().join("logs")).set("annotations", Value::Object(all))
}

#[test]
fn a_machine_has_the_shape_that_its_pod_asks_for() {
    let mut node = node();
    let image = node.image(&Image::busybox(), "busybox:1");
    let asked = pod(&node, &[("cpus", "2"), ("memory", "256Mi"), ("kernel-args", "nacelle.e2e=here")]);
    let again = Pod(asked.0.clone());
    let seen = "nproc; grep MemTotal /proc/meminfo; cat /proc/cmdline";
    let check = |output: &str| {
        let mut lines = output.lines();
        assert_eq!(lines.next(), Some("2"), "{output}");
        let kib = lines.next().and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).expect("a number");
        assert!(kib > 180 << 10 && kib <= 256 << 10, "{output}");
        assert!(lines.next().is_some_and(|words| words.split(' ').any(|word| word == "nacelle.e2e=here")), "{output}");
    };
    let id = {
        let pod = node.crictl.run_pod_of("shaped", asked);
        let container = pod.start(Container::sh("main", &image, "sleep 1000"));
        check(&container.exec(seen).ok());
        let info = pod.inspect()["info"].to_string();
        assert!(info.contains("shape"), "{info}");
        pod.id.clone()
    };
    // A daemon that finds the pod shows the same.
    node.kill();
    node.start();
    let pod = node.crictl.pod(&id, again);
    nacelle_e2e::eventually("the pod is found", || (pod.inspect()["status"]["state"] == "SANDBOX_READY").then_some(()));
    assert!(pod.inspect()["info"].to_string().contains("shape"));
    pod.remove();
}

#[test]
fn processors_are_of_the_model_that_is_named() {
    let node = node();
    let image = node.image(&Image::busybox(), "busybox:1");
    let said = pod(
        &node,
        &[("cpu-model", "Haswell-v4"), ("spec", "{domain: {cpu: {features: [{name: avx2, policy: disable}]}}}")],
    );
    if engine() == "kvm" {
        let file = node.crictl.file("pod", &said.0);
        let refused = node.crictl.try_call(["runp", "--runtime", "shaped", &file]).err();
        assert!(refused.contains("Unimplemented") && refused.contains("cpu.model is Haswell-v4"), "{refused}");
        assert!(node.left().is_empty(), "nothing was made: {:?}", node.left());
        return;
    }
    let pod = node.crictl.run_pod_of("shaped", said);
    let container = pod.start(Container::sh("main", &image, "sleep 1000"));
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
fn what_no_machine_of_containers_has_is_refused_by_its_field() {
    let node = node();
    let refused = |annotations: &[(&str, &str)]| {
        let file = node.crictl.file("pod", &pod(&node, annotations).0);
        node.crictl.try_call(["runp", "--runtime", "shaped", &file]).err()
    };
    let spec = |document: &'static str| refused(&[("spec", document)]);
    for (told, code, words) in [
        (refused(&[("cpus", "0")]), "InvalidArgument", "spec.domain.cpu"),
        (refused(&[("memory", "16Mi")]), "InvalidArgument", "spec.domain.memory.guest"),
        (refused(&[("hugepages", "2Mi")]), "InvalidArgument", "hugepages"),
        (spec("{domain: {cpu: {features: [{name: avx, policy: forbid}]}}}"), "Unimplemented", "features[0].policy"),
        (spec("{domain: {cpu: {features: [{name: 'a,b'}]}}}"), "InvalidArgument", "features"),
        (spec("{domain: {memory: {hugepages: {pageSize: 1Gi}}}}"), "Unimplemented", "pageSize"),
        (spec("{domain: {cpu: {dedicatedCpuPlacement: true}}}"), "Unimplemented", "dedicatedCpuPlacement"),
    ] {
        assert!(told.contains(code) && told.contains(words), "{code}, {words:?} in {told}");
    }
    assert!(node.left().is_empty(), "nothing was made: {:?}", node.left());
}
