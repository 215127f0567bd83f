//! Returns files to the node that were copied into the guest: kubelet reads a container's termination log when it has exited.

use crate::agent::Agent;
use crate::error::PodError;
use nacelle_base::Chain;
use nacelle_base::files::at;
use nacelle_base::task::run_blocking;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

/// An empty file of the node that gets the end of a copied-in file.
#[derive(Debug)]
pub struct ReturnedFile {
    /// The name of the copied-in volume.
    pub volume: String,
    /// The file, open for writing.
    pub file: File,
    /// The path on the node, for messages.
    pub path: PathBuf,
}

impl ReturnedFile {
    async fn write(self, agent: &Agent) -> Result<(), PodError> {
        let ReturnedFile { volume, mut file, path } = self;
        let end = agent.read_volume(&volume).await?.into_inner();
        let write = move || file.write_all(&end).map_err(at("write", &path));
        Ok(run_blocking("write a file of a container", write).await??)
    }
}

/// Writes the end of each copy to its file. A failure is logged: the container has exited all the same.
pub async fn write_back(agent: &Agent, container: &str, files: Vec<ReturnedFile>) {
    for file in files {
        let path = file.path.display().to_string();
        if let Err(error) = file.write(agent).await {
            tracing::warn!(container, path, "cannot return a file of a container to the node: {}", Chain(&error));
        }
    }
}
