//! Gives the shared library its name for the dynamic linker: programs ask for the interface they were built
//! with.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfarpool.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
