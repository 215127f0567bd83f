//! Tests the traces of a real daemon against a collector in the node's network namespace, with the test in place of kubelet: it sends
//! the header `traceparent` with its requests.

use nacelle_e2e::collector::{PARENT_SPAN, TraceCollector, traced, tracing_config};
use nacelle_e2e::cri::{container_config, pod_config};
use nacelle_e2e::node::engine;
use nacelle_e2e::{NodeOptions, TestImage, TestNode};
use nacelle_proto::cri;
use nacelle_proto::cri::image_service_client::ImageServiceClient;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use tonic::Code;

fn attribute<'s>(span: &'s Span, key: &str) -> Option<&'s Value> {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    found.and_then(|attribute| attribute.value.as_ref()?.value.as_ref())
}

/// Checks the frame of a request's span.
#[track_caller]
fn check_request(span: &Span, code: Code) {
    assert_eq!(span.parent_span_id, PARENT_SPAN.to_be_bytes(), "{span:?}");
    assert_eq!(attribute(span, "rpc.grpc.status_code"), Some(&Value::IntValue(i32::from(code).into())), "{span:?}");
    assert_eq!(attribute(span, "rpc.system"), Some(&Value::StringValue("grpc".to_owned())));
    let is_error = span.status.as_ref().is_some_and(|status| status.code() == StatusCode::Error);
    // The client's own mistakes are no errors of the server.
    assert_eq!(is_error, !matches!(code, Code::Ok | Code::InvalidArgument | Code::NotFound), "{span:?}");
    assert!(span.start_time_unix_nano < span.end_time_unix_nano);
}

#[track_caller]
fn check_names(span: &Span, expected: &[(&str, &str)]) {
    for (key, value) in expected {
        assert_eq!(attribute(span, key), Some(&Value::StringValue((*value).to_owned())), "{span:?}");
    }
}

#[test]
fn the_trace_of_kubelet_goes_on_to_the_steps_of_a_pod() {
    let mut node =
        TestNode::with_options(NodeOptions { extra: tracing_config(), ipv6: false, ..NodeOptions::default() });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut client = runtime.block_on(async { RuntimeServiceClient::new(node.channel()) });
    let mut images = runtime.block_on(async { ImageServiceClient::new(node.channel()) });
    let config = pod_config("e2e", "traced", &node.directory().join("logs"));
    let run =
        |handler: &str| cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: handler.to_owned() };

    // There is no collector yet: the request is answered all the same, and its spans wait.
    let id = runtime.block_on(client.run_pod_sandbox(traced(run(""), 1, 1))).unwrap().into_inner().pod_sandbox_id;
    let collector = TraceCollector::start(&node, &runtime);

    let create = cri::CreateContainerRequest {
        pod_sandbox_id: id.clone(),
        config: Some(container_config("c", &image, &["sleep", "600"])),
        sandbox_config: Some(config.clone()),
    };
    let created = runtime.block_on(client.create_container(traced(create, 2, 1))).unwrap();
    let container_id = created.into_inner().container_id;
    let start = cri::StartContainerRequest { container_id: container_id.clone() };
    runtime.block_on(client.start_container(traced(start, 3, 1))).unwrap();
    let other = TestImage::busybox().with_layer(|layer| layer.add_file("other", b"image", 0o644));
    let other = node.registry.push(&other, "other:1");
    let spec = cri::ImageSpec { image: other.clone(), ..Default::default() };
    let pull = cri::PullImageRequest { image: Some(spec), ..Default::default() };
    runtime.block_on(images.pull_image(traced(pull, 4, 1))).unwrap();
    let failure = runtime.block_on(client.run_pod_sandbox(traced(run("absent"), 5, 1))).unwrap_err();
    let exec = |trace, flags| {
        let cmd = vec!["echo".to_owned(), "secret-argument".to_owned()];
        traced(cri::ExecSyncRequest { container_id: container_id.clone(), cmd, timeout: 0 }, trace, flags)
    };
    runtime.block_on(client.exec_sync(exec(6, 1))).unwrap();
    runtime.block_on(client.exec_sync(exec(7, 0))).unwrap();
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: id.clone() };
    runtime.block_on(client.stop_pod_sandbox(traced(stop, 8, 1))).unwrap();
    let remove = cri::RemovePodSandboxRequest { pod_sandbox_id: id.clone() };
    runtime.block_on(client.remove_pod_sandbox(traced(remove, 9, 0))).unwrap();
    // The daemon sends what it has when it stops.
    assert!(node.terminate());

    let (span, steps) = collector.wait_for(1, "RunPodSandbox");
    check_request(&span, Code::Ok);
    check_names(&span, &[("k8s.pod.name", "traced"), ("k8s.namespace.name", "e2e"), ("nacelle.pod.id", &id)]);
    let mut expected = vec!["network_namespace", "cni_add", "pod_process", "guest_ready"];
    if engine() != "host" {
        expected.push(if steps.contains_key("vm_from_template") { "vm_from_template" } else { "vm" });
        expected.push("configure_guest");
    }
    for name in expected {
        let step = steps.get(name).unwrap_or_else(|| panic!("no span {name} below RunPodSandbox: {steps:?}"));
        assert!(span.start_time_unix_nano <= step.start_time_unix_nano, "{step:?}");
        assert!(step.start_time_unix_nano <= step.end_time_unix_nano, "{step:?}");
        // Both clocks run differently by at most what the node's clock is adjusted.
        assert!(step.end_time_unix_nano <= span.end_time_unix_nano + 10_000_000, "{step:?} {span:?}");
    }
    for (trace, rpc, step) in [(2, "CreateContainer", "prepare_container"), (3, "StartContainer", "start_in_guest")] {
        let (span, steps) = collector.wait_for(trace, rpc);
        check_request(&span, Code::Ok);
        check_names(&span, &[("container.id", &container_id), ("container.name", "c"), ("k8s.pod.name", "traced")]);
        assert!(steps.contains_key(step), "{steps:?}");
    }
    let (span, steps) = collector.wait_for(4, "PullImage");
    assert_eq!(span.name, "runtime.v1.ImageService/PullImage");
    for step in ["fetch_manifest", "fetch_configuration", "fetch_layer", "build_tree"] {
        assert!(steps.contains_key(step), "{steps:?}");
    }
    check_names(&span, &[("container.image.name", &other)]);
    let (span, steps) = collector.wait_for(5, "RunPodSandbox");
    check_request(&span, failure.code());
    assert_eq!((failure.code(), span.status), (Code::InvalidArgument, None));
    assert!(steps.is_empty(), "{steps:?}");
    check_request(&collector.wait_for(6, "ExecSync").0, Code::Ok);
    let (span, steps) = collector.wait_for(8, "StopPodSandbox");
    check_request(&span, Code::Ok);
    assert!(steps.contains_key("end_pod_process") && steps.contains_key("end_network"), "{steps:?}");
    // The client of traces 7 and 9 does not record them. crictl's requests have no trace, and none begins at the default rate.
    let all = collector.spans();
    let unknown: Vec<_> = all.iter().filter(|span| !matches!(span.trace_id.last(), Some(1..=6 | 8))).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    assert!(!format!("{all:?}").contains("secret-argument"));
    assert!(!node.log().contains("spans of traces are lost"), "{}", node.log());
}
