//! Simulates the part of pod processes that saves VMs: receives the files of checkpoints and writes them. A checkpoint is the step
//! "checkpoint" of the script; one that stops is the step "checkpoint stopped".

use super::pods::FakePod;
use nacelle_pod::spec::PodSpec;
use nacelle_proto::pod as proto;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::oneshot;
use tonic::Status;

/// Files that the daemon has offered. The channel closes when the offer ends.
struct Offer {
    files: Vec<File>,
    withdrawn: oneshot::Receiver<()>,
}

/// The checkpoints of one pod process.
pub struct FakeCheckpoints {
    offers: Mutex<BTreeMap<String, Offer>>,
    /// The requests that it got.
    pub requests: Mutex<Vec<proto::CheckpointRequest>>,
    /// It keeps the files open after its reply.
    pub keeps_files: AtomicBool,
    kept: Mutex<Vec<File>>,
    /// It does not stop when the offer ends.
    pub ignores_stop: AtomicBool,
    /// Its reply to the next requests.
    pub reply: Mutex<proto::CheckpointResponse>,
    /// The length of its memory in bytes.
    pub memory: Mutex<u64>,
    scratch: u64,
}

impl FakeCheckpoints {
    pub fn new(spec: &PodSpec) -> FakeCheckpoints {
        FakeCheckpoints {
            offers: Mutex::default(),
            requests: Mutex::default(),
            keeps_files: AtomicBool::default(),
            kept: Mutex::default(),
            ignores_stop: AtomicBool::default(),
            reply: Mutex::new(proto::CheckpointResponse { booted_mib: spec.memory_mib, ..Default::default() }),
            memory: Mutex::new(u64::from(spec.memory_mib + spec.reserved_memory_mib.unwrap_or(0)) << 20),
            scratch: spec.scratch.size_mib << 20,
        }
    }

    /// Receives an offer, which is withdrawn when the result is dropped.
    pub fn offer(&self, name: String, files: Vec<File>) -> oneshot::Sender<()> {
        let (sender, withdrawn) = oneshot::channel();
        self.offers.lock().unwrap().insert(name, Offer { files, withdrawn });
        sender
    }

    /// Closes the files that it has kept.
    pub fn close_files(&self) {
        self.kept.lock().unwrap().clear();
    }

    pub async fn save(
        &self,
        pod: &FakePod,
        request: proto::CheckpointRequest,
    ) -> Result<proto::CheckpointResponse, Status> {
        self.requests.lock().unwrap().push(request.clone());
        let Offer { mut files, withdrawn } = self.offers.lock().unwrap().remove(&request.name).unwrap();
        let stopped = async {
            let _ = withdrawn.await;
            if self.ignores_stop.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            step = pod.step("checkpoint") => step?,
            () = stopped => {
                drop(files);
                pod.step("checkpoint stopped").await?;
                return Err(Status::failed_precondition("cannot save the pod: the checkpoint was stopped"));
            }
        }
        let [state, memory, scratch] = files.as_mut_slice() else { panic!("a checkpoint has three files") };
        state.write_all(b"state").unwrap();
        memory.set_len(*self.memory.lock().unwrap()).unwrap();
        scratch.set_len(self.scratch).unwrap();
        if self.keeps_files.load(Ordering::SeqCst) {
            self.kept.lock().unwrap().append(&mut files);
        }
        Ok(self.reply.lock().unwrap().clone())
    }
}
