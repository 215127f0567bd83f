//! Converts the kernel boot section of a specification: the kernel of a machine without firmware, and its image.

use super::rejection::{SpecRejection, reject_value};
use super::volumes::KERNEL_BOOT;
use nacelle_model::machine::Kernel;
use nacelle_model::machine_pod::RequestedDiskSource;
use nacelle_vmi::spec::InstanceSpec;

/// Returns the kernel, which lies in an image like a disk. A volume with the same image name must refer to the same image.
pub(super) fn convert_kernel(spec: &InstanceSpec) -> Result<Option<Kernel<RequestedDiskSource>>, SpecRejection> {
    let boot = spec.domain.firmware.as_ref().and_then(|firmware| firmware.kernel_boot.as_ref());
    let Some((boot, container)) = boot.and_then(|boot| Some((boot, boot.container.as_ref()?))) else { return Ok(None) };
    let conflict = spec.volumes.iter().position(|volume| {
        let image = volume.container_disk.as_ref().map(|disk| &disk.image);
        volume.name == KERNEL_BOOT && image != Some(&container.image)
    });
    if let Some(n) = conflict {
        let instead =
            "this name is reserved for the image volume of the kernel, which is in another image: rename the volume";
        return reject_value(format!("spec.volumes[{n}].name"), KERNEL_BOOT, instead);
    }
    let in_image = |path: &str| RequestedDiskSource::Image { image: container.image.clone(), path: path.to_owned() };
    Ok(Some(Kernel {
        kernel: in_image(&container.kernel_path),
        initrd: Some(container.initrd_path.as_str()).filter(|path| !path.is_empty()).map(in_image),
        arguments: boot.kernel_args.clone(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_disk_cannot_use_the_name_of_the_kernels_image_volume() {
        let of = |name: &str, image: &str| {
            let spec = json!({
                "domain": { "firmware": { "kernelBoot": { "container": { "image": "kernels:1", "kernelPath": "/vmlinuz" } } } },
                "volumes": [{ "name": name, "containerDisk": { "image": image } }],
            });
            let converted = convert_kernel(&serde_json::from_value(spec).unwrap());
            converted.map(|kernel| kernel.is_some()).map_err(|error| error.to_string())
        };
        assert_eq!(of("root", "disks:1"), Ok(true));
        assert_eq!(of("kernel-boot", "kernels:1"), Ok(true));
        assert!(of("kernel-boot", "disks:1").unwrap_err().contains("spec.volumes[0].name is \"kernel-boot\""));
        assert_eq!(convert_kernel(&InstanceSpec::default()), Ok(None));
    }
}
