//! Finds the library, and compiles the test programs.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file that cargo has built beside these tests.
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let found = test.ancestors().skip(1).map(|folder| folder.join(name)).find(|path| path.exists());
    found.unwrap_or_else(|| {
        panic!("{name} is built by `cargo test -p farpool-preload`, without choosing a test")
    })
}

pub fn library() -> PathBuf {
    built("libfarpool_preload.so")
}

pub fn compile(name: &str, into: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/programs/{name}.c"));
    let program = into.join(name);
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-o"]);
    let output = cc.arg(&program).arg(source).args(["-lpthread", "-ldl"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}
