//! Sets the soname of the shared library, so that programs load the version of the interface that they were
//! built with.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfarpool.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
