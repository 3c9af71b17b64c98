//! What `make install` puts below a prefix. It is complete: nothing there refers to the build folder.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::support::{built, run, run_command, tied};

/// A folder like cargo's target folder after `make build`.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libfarpool_preload.so", "libfarpool.so"] {
        symlink(built(name), folder.path().join(name)).unwrap();
    }
    symlink(env!("CARGO_BIN_EXE_farpool"), folder.path().join("farpool")).unwrap();
    let output = run([Path::new("generate"), &folder.path().join("generated")]);
    assert!(output.status.success(), "{output:?}");
    folder
}

fn install(what: &Path, root: &Path) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install");
    let mut command = tied(script, [what, Path::new("/usr")]);
    command.env("DESTDIR", root);
    let output = run_command(command);
    assert!(output.status.success(), "{output:?}");
}

fn files_below(root: &Path) -> BTreeSet<String> {
    let found =
        Command::new("find").arg(root).args(["-not", "-type", "d", "-printf", "%P\n"]).output().unwrap();
    String::from_utf8(found.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn installed_binary_finds_its_interposer_pages_and_completions_and_all_can_be_removed() {
    let (folder, root) = (folder(), tempfile::tempdir().unwrap());
    install(folder.path(), root.path());
    let files = files_below(root.path());
    for expected in [
        "usr/bin/farpool",
        "usr/lib/farpool/libfarpool_preload.so",
        "usr/lib/libfarpool.so",
        "usr/include/farpool.h",
        "usr/share/man/man1/farpool.1",
        "usr/share/man/man1/farpool-mount.1",
        "usr/share/man/man1/farpool-db-up.1",
        "usr/share/bash-completion/completions/farpool",
        "usr/share/zsh/site-functions/_farpool",
        "usr/share/fish/vendor_completions.d/farpool.fish",
    ] {
        assert!(files.contains(expected), "{expected} is not among {files:?}");
    }
    let binary = root.path().join("usr/bin/farpool");
    let built_bytes = fs::metadata(env!("CARGO_BIN_EXE_farpool")).unwrap().len();
    assert!(fs::metadata(&binary).unwrap().len() < built_bytes / 2, "it is not stripped");

    let output = run_command(tied(&binary, ["run", "cat", "/proc/self/maps"]));
    let library = root.path().join("usr/lib/farpool/libfarpool_preload.so");
    assert!(output.stdout.contains(library.to_str().unwrap()), "{output:?}");

    install(Path::new("--remove"), root.path());
    assert_eq!(files_below(root.path()), BTreeSet::new());
}
