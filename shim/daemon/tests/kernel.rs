//! Tests kernels that pods bring for their VMs: their source, their presence in the pod's directory during the VM's start and not
//! afterwards, and the requests that are rejected before anything runs.

mod common;

use common::image::{self, KERNEL};
use common::{Daemon, SHAPE_HANDLER, World, pod_config};
use nacelle_proto::cri;
use std::net::TcpListener;
use tonic::{Code, Status};

async fn run(daemon: &mut Daemon, image: &str, annotations: &[(&str, &str)]) -> Result<String, Status> {
    let said = [("kernel-image", image)].into_iter().chain(annotations.iter().copied());
    let annotations = said.map(|(name, value)| (format!("vm.nacelle.dev/{name}"), value.to_owned())).collect();
    let config = cri::PodSandboxConfig { annotations, ..pod_config("a") };
    let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: SHAPE_HANDLER.into() };
    Ok(daemon.cri.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id)
}

#[test]
fn a_kernel_is_in_the_directory_of_its_pod_until_the_machine_has_it() {
    let world = World::new();
    let mut daemon = world.daemon();
    let pod = world.run(run(&mut daemon, image::NAME, &[("kernel", KERNEL)])).unwrap();
    let directory = world.pods.alive().pop().unwrap();
    let started = world.pods.kernels.lock().unwrap().clone();
    let kernel = nacelle_pod::jail_dir(&directory).join("kernel");
    assert_eq!(started, [(kernel.clone(), Some(image::kernel()))]);
    assert!(!kernel.exists(), "the directory is memory");
    let shown = |daemon: &mut Daemon| {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: true };
        let status = world.run(daemon.cri.pod_sandbox_status(request)).unwrap().into_inner();
        let info: serde_json::Value = serde_json::from_str(&status.info["info"]).unwrap();
        info["shape"]["kernel"].clone()
    };
    let expected = serde_json::json!({ "image": image::NAME, "path": KERNEL });
    assert_eq!(shown(&mut daemon), expected);
    // Neither the image nor the daemon is needed any more.
    let image = cri::ImageSpec { image: image::NAME.into(), ..Default::default() };
    world.run(daemon.images.remove_image(cri::RemoveImageRequest { image: Some(image) })).unwrap();
    daemon.kill();
    let mut daemon = world.daemon();
    assert_eq!(shown(&mut daemon), expected);
    world.run(daemon.remove_pod(&pod)).unwrap();
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn what_is_no_kernel_is_told_with_its_place_before_anything_runs() {
    let world = World::new();
    let mut daemon = world.daemon();
    // No process listens on this port.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nowhere = format!("{free}/none:1");
    let id = "0123456789abcdef".repeat(4);
    for (from, annotations, code, words) in [
        (
            image::NAME,
            &[("kernel", "/hello")][..],
            Code::InvalidArgument,
            &["\"/hello\" of image", "neither an ELF"][..],
        ),
        (image::NAME, &[("kernel", "/none")], Code::FailedPrecondition, &[image::NAME, "no file \"/none\""]),
        (image::NAME, &[("kernel", "/boot")], Code::FailedPrecondition, &["no file \"/boot\""]),
        (&nowhere, &[("kernel", KERNEL)], Code::Unavailable, &["crictl pull", &nowhere]),
        (&id, &[("kernel", KERNEL)], Code::FailedPrecondition, &["is not on this node", &id]),
        (image::NAME, &[("kernel", KERNEL), ("initrd", "/hello")], Code::Unimplemented, &["initrdPath", "agent"]),
        (image::NAME, &[("kernel", "/../boot/vmlinux")], Code::InvalidArgument, &["kernelPath"]),
        (
            image::NAME,
            &[("kernel", KERNEL), ("memory", "1Gi")],
            Code::InvalidArgument,
            &["vm.nacelle.dev/memory", "allows"],
        ),
    ] {
        let error = world.run(run(&mut daemon, from, annotations)).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(words.iter().all(|word| error.message().contains(word)), "{words:?} in {error}");
    }
    assert!(!world.script.seen("netns") && !world.script.seen("spawn"));
    assert_eq!(world.left(), Vec::<String>::new());
    assert!(world.run(daemon.pods()).is_empty());
}

#[test]
fn a_pod_that_is_stopped_does_not_wait_for_its_kernels_image() {
    let world = World::new();
    let mut daemon = world.daemon();
    // A registry that accepts connections and never responds.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("{}/silent:1", silent.local_addr().unwrap());
    let mut other = Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
    let asked = world.spawn(async move { run(&mut other, &name, &[("kernel", KERNEL)]).await });
    let asker = silent.accept().unwrap();
    let pods = world.config().paths.pods();
    let directory = std::fs::read_dir(pods).unwrap().next().unwrap().unwrap().file_name();
    world.run(daemon.stop_pod(directory.to_str().unwrap())).unwrap();
    let error = world.run(asked).unwrap().unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(error.message().contains("while it was booting"), "{error}");
    assert_eq!(world.left(), Vec::<String>::new());
    drop(asker);
}
