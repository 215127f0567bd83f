//! Saves a pod on a simulated node, for tests of pods that continue from it.

use super::{Daemon, World, container_config};
use nacelle_base::machine::EngineKind;
use nacelle_proto::{cri, pod as proto};
use nix::mount::{MsFlags, mount, umount};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A checkpoint of a pod with the containers `a` and `b`, which has ended since.
pub struct Saved {
    pub world: World,
    directory: tempfile::TempDir,
    /// The ids that the containers had.
    pub ids: [String; 2],
    mounts: Mutex<Vec<PathBuf>>,
}

impl Drop for Saved {
    fn drop(&mut self) {
        for path in self.mounts.lock().unwrap().drain(..) {
            // One test has done so already.
            let _ = umount(&path);
        }
    }
}

impl Saved {
    pub fn new() -> (Saved, Daemon) {
        let mut world = World::new();
        world.fitting = EngineKind::Kvm;
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let mut saved = Saved { world, directory, ids: Default::default(), mounts: Mutex::default() };
        let mut daemon = saved.world.daemon();
        saved.ids = saved.world.run(saved.save(&mut daemon));
        (saved, daemon)
    }

    async fn save(&self, daemon: &mut Daemon) -> [String; 2] {
        let pod = daemon.run_pod("saved").await.unwrap();
        let volume = self.volume("saved");
        let a = daemon.create_from(&pod, with_volume("a", &volume)).await.unwrap();
        let b = daemon.create(&pod, "b").await.unwrap();
        for id in [&a, &b] {
            daemon.start(id).await.unwrap();
        }
        let fake = self.world.pods.of(&pod);
        let image = fake.made.lock().unwrap()[0].image_key.clone();
        let name = "memory.cache.0000000000000001".to_owned();
        {
            let mut reply = fake.checkpoints.reply.lock().unwrap();
            let placed = |image_key, partition| proto::PlacedImage {
                image_key,
                partition,
                offset: u64::from(partition) << 20,
                length: 4096,
            };
            reply.images = vec![placed(image, 1), placed(format!("sha256:{}", "5".repeat(64)), 2)];
            reply.volumes =
                vec![proto::VolumeInGuest { container_id: a.clone(), container_path: "/cache".into(), name }];
        }
        fs::create_dir_all(self.path()).unwrap();
        let request = cri::CheckpointPodRequest {
            pod_sandbox_id: pod.clone(),
            output_path: self.path().display().to_string(),
            container_ids: vec![a.clone(), b.clone()],
            options: [].into(),
        };
        daemon.cri.checkpoint_pod(request).await.unwrap();
        daemon.stop_pod(&pod).await.unwrap();
        daemon.remove_pod(&pod).await.unwrap();
        [a, b]
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("checkpoint")
    }

    /// Returns an emptyDir in memory as kubelet makes it, for the pod of this uid.
    pub fn volume(&self, uid: &str) -> PathBuf {
        let volume = self.directory.path().join(format!("pods/{uid}/volumes/kubernetes.io~empty-dir/cache"));
        if !volume.exists() {
            fs::create_dir_all(&volume).unwrap();
            mount(Some("none"), &volume, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("the tests run as root");
            self.mounts.lock().unwrap().push(volume.clone());
        }
        volume
    }

    pub fn nothing_left(&self) {
        assert_eq!(self.world.left(), Vec::<String>::new());
        assert!(self.world.pods.alive().is_empty());
    }
}

/// Returns a container with this volume at `/cache`.
pub fn with_volume(name: &str, volume: &Path) -> cri::ContainerConfig {
    let mount =
        cri::Mount { container_path: "/cache".into(), host_path: volume.display().to_string(), ..Default::default() };
    cri::ContainerConfig { mounts: vec![mount], ..container_config(name) }
}
