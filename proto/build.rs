//! Owns: compiling the contracts to Rust, without a protoc on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files =
        ["cri/v1/api.proto", "agent/v1/agent.proto", "pod/v1/pod.proto", "node/v1/node.proto", "vm/v1/vm.proto"];
    for file in files {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
