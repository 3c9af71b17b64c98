//! Compiles the control plane's messages and service stubs from `proto/`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/farpool.proto");
    let descriptors = protox::compile(["proto/farpool.proto"], ["proto"])?;
    tonic_prost_build::configure()
        // They carry keys; see `src/control.rs`.
        .skip_debug([
            "farpool.v1.Lease",
            "farpool.v1.LeaseRef",
            "farpool.v1.AddGrantResponse",
            "farpool.v1.GuestRegion",
        ])
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
