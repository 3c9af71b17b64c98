//! Compiles the control plane's messages and service stubs from `proto/`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/farpool.proto");
    let descriptors = protox::compile(["proto/farpool.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .skip_debug(["farpool.v1.Lease", "farpool.v1.LeaseRef"]) // they carry keys; see `redacted.rs`
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
