//! Tests machine pods with more than one image: disks and kernels in image volumes of the container, the overlays that are kept,
//! and what happens when an image changes.

use nacelle_e2e::machine::{Debian, annotated_pod, boot_disk, machine_container, machine_node, push_boot_image};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::{Value, json};

fn container_with_image_volume(image: &str, name: &str, of: &str) -> ContainerRequest {
    let mount = json!({"container_path": format!("/run/nacelle/vm/{name}"), "image": {"image": of}, "readonly": true});
    machine_container(image, 0).set("mounts", json!([mount]))
}

/// Returns an image without a disk.
fn push_plain_image(node: &TestNode) -> String {
    node.push_and_pull(&TestImage::busybox(), "plain:1")
}

fn machine_pod(node: &TestNode, disks: &str) -> PodRequest {
    annotated_pod(node, "second", &[("kind", "machine"), ("memory", "64Mi"), ("name", "second"), ("disks", disks)])
}

#[test]
fn a_disk_from_an_image_volume_is_kept_until_the_image_changes() {
    let mut node = machine_node();
    let (image, plain) = (push_boot_image(&node), push_plain_image(&node));
    let disks = format!("root=image:{image},boot=1;drivers=image:{plain},cdrom,bus=sata");
    let pod = node.crictl.run_pod_with_handler("vm", machine_pod(&node, &disks.replace(";", ";more=empty:1Mi;")));
    let mut sub_path = container_with_image_volume(&plain, "root", &image);
    sub_path.0["mounts"][0]["image_sub_path"] = json!("disk");
    for (container, words) in [
        (machine_container(&plain, 0), "give the container an image volume of it at /run/nacelle/vm/root"),
        (container_with_image_volume(&image, "root", &plain), "that of its image volume is another one"),
        (container_with_image_volume(&image, "else", &plain), "no disk in this image volume"),
        (container_with_image_volume(&image, "more", &plain), "no disk in this image volume"),
        (sub_path, "image_sub_path"),
        // This image has no disk.
        (container_with_image_volume(&plain, "root", &image), "disk drivers: the image has no"),
    ] {
        let error = pod.try_create(container).err();
        assert!(error.contains(words), "{words:?} in {error}");
    }
    pod.remove();

    let disks = format!("root=image:{image},boot=1");
    let run = |node: &TestNode, disks: &str, of: &str, says: &str| {
        let pod = node.crictl.run_pod_with_handler("vm", machine_pod(node, disks));
        pod.start(container_with_image_volume(&plain, "root", of)).wait_for_output(says);
        pod.remove();
    };
    run(&node, &disks, &image, "boot 1\n");
    run(&node, &disks, &image, "boot 2\n");
    // Also by the next daemon.
    node.kill();
    node.start();
    run(&node, &disks, &image, "boot 3\n");
    let disk = boot_disk();
    let other = TestImage::busybox()
        .with_layer(|layer| layer.add_file("disk/boot.img", &disk, 0o440))
        .with_config("Env", json!(["A=b"]));
    let other = node.push_and_pull(&other, "boot:2");
    run(&node, &disks.replace(&image, &other), &other, "boot 1\n");
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
}

#[test]
fn a_kernel_is_booted_from_an_image_volume() {
    let Some(debian) = Debian::from_env() else {
        println!("skipped: NACELLE_DISK_IMAGE is not set: ci/disk-image makes the disk of Debian");
        return;
    };
    let node = machine_node();
    let (kernel, plain) = (debian.push_image(&node), push_plain_image(&node));
    let machine = [
        ("kind", "machine"),
        ("memory", "256Mi"),
        ("disks", "data=empty:1Mi"),
        ("kernel-image", &kernel),
        ("kernel", "/boot/vmlinuz"),
        ("kernel-args", "console=ttyS0"),
    ];
    let pod = node.crictl.run_pod_with_handler("vm", annotated_pod(&node, "kernel", &machine));
    let error = pod.try_create(machine_container(&plain, 0)).err();
    assert!(error.contains("/run/nacelle/vm/kernel-boot"), "{error}");
    let running = pod.start(container_with_image_volume(&plain, "kernel-boot", &kernel));
    running.wait_for_output("Linux version ");
    let state: Value = running.status();
    assert_eq!(state["state"], "CONTAINER_RUNNING");
    pod.remove();
}
