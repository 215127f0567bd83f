//! Tests machine pods with more than one image: disks and kernels in image volumes of the container, the overlays that are kept,
//! and what happens when an image changes.

use nacelle_e2e::machine::{Debian, annotated, boot_disk, boot_image, container, node};
use nacelle_e2e::{Container, Image, Node, Pod, eventually};
use serde_json::{Value, json};

fn with_volume(image: &str, name: &str, of: &str) -> Container {
    let mount = json!({"container_path": format!("/run/nacelle/vm/{name}"), "image": {"image": of}, "readonly": true});
    container(image, 0).set("mounts", json!([mount]))
}

/// Returns an image without a disk.
fn plain(node: &Node) -> String {
    node.image(&Image::busybox(), "plain:1")
}

fn machine(node: &Node, disks: &str) -> Pod {
    annotated(node, "second", &[("kind", "machine"), ("memory", "64Mi"), ("name", "second"), ("disks", disks)])
}

#[test]
fn a_disk_lies_in_an_image_volume_and_is_kept_until_that_is_another() {
    let mut node = node();
    let (image, plain) = (boot_image(&node), plain(&node));
    let disks = format!("root=image:{image},boot=1;drivers=image:{plain},cdrom,bus=sata");
    let pod = node.crictl.run_pod_of("vm", machine(&node, &disks.replace(";", ";more=empty:1Mi;")));
    let mut sub_path = with_volume(&plain, "root", &image);
    sub_path.0["mounts"][0]["image_sub_path"] = json!("disk");
    for (container, words) in [
        (container(&plain, 0), "give the container an image volume of it at /run/nacelle/vm/root"),
        (with_volume(&image, "root", &plain), "that of its image volume is another one"),
        (with_volume(&image, "else", &plain), "no disk in this image volume"),
        (with_volume(&image, "more", &plain), "no disk in this image volume"),
        (sub_path, "image_sub_path"),
        // This image has no disk.
        (with_volume(&plain, "root", &image), "disk drivers: the image has no"),
    ] {
        let told = pod.try_create(container).err();
        assert!(told.contains(words), "{words:?} in {told}");
    }
    pod.remove();

    let disks = format!("root=image:{image},boot=1");
    let run = |node: &Node, disks: &str, of: &str, says: &str| {
        let pod = node.crictl.run_pod_of("vm", machine(node, disks));
        pod.start(with_volume(&plain, "root", of)).says(says);
        pod.remove();
    };
    run(&node, &disks, &image, "boot 1\n");
    run(&node, &disks, &image, "boot 2\n");
    // Also by the next daemon.
    node.kill();
    node.start();
    run(&node, &disks, &image, "boot 3\n");
    let disk = boot_disk();
    let other = Image::busybox().layer(|layer| layer.file("disk/boot.img", &disk, 0o440)).config("Env", json!(["A=b"]));
    let other = node.image(&other, "boot:2");
    run(&node, &disks.replace(&image, &other), &other, "boot 1\n");
    eventually("nothing is left", || node.left().is_empty().then_some(()));
}

#[test]
fn a_kernel_lies_in_an_image_volume() {
    let Some(debian) = Debian::found() else {
        println!("skipped: NACELLE_DISK_IMAGE is not set: ci/disk-image makes the disk of Debian");
        return;
    };
    let node = node();
    let (kernel, plain) = (debian.image(&node), plain(&node));
    let machine = [
        ("kind", "machine"),
        ("memory", "256Mi"),
        ("disks", "data=empty:1Mi"),
        ("kernel-image", &kernel),
        ("kernel", "/boot/vmlinuz"),
        ("kernel-args", "console=ttyS0"),
    ];
    let pod = node.crictl.run_pod_of("vm", annotated(&node, "kernel", &machine));
    let told = pod.try_create(container(&plain, 0)).err();
    assert!(told.contains("/run/nacelle/vm/kernel-boot"), "{told}");
    let running = pod.start(with_volume(&plain, "kernel-boot", &kernel));
    running.says("Linux version ");
    let state: Value = running.status();
    assert_eq!(state["state"], "CONTAINER_RUNNING");
    pod.remove();
}
