//! Printed examples, run as a reader runs them: the program in README, copied into a project of its own
//! outside the workspace, and the commands that make certificates.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Output, Process, Up, farpool, run, tied};

/// Longest time for the build: minutes on a busy machine where nothing has been compiled before.
const BUILD_SECONDS: &str = "1200";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The first code block of this kind on a page.
fn block(page: &Path, kind: &str) -> String {
    let text = fs::read_to_string(page).unwrap();
    let block = text.split(&format!("```{kind}\n")).nth(1).and_then(|rest| rest.split("```").next());
    block.unwrap_or_else(|| panic!("{} has no block of {kind}", page.display())).to_owned()
}

/// Creates a project as `cargo new` does, with the dependencies that README names. Profiles and locked
/// versions are the workspace's, so that nothing is built twice, and no registry is needed.
fn project(dir: &Path, program: &str) {
    let repository = repository();
    let workspace = fs::read_to_string(repository.join("Cargo.toml")).unwrap();
    let profiles = &workspace[workspace.find("[profile.").unwrap()..];
    let manifest = format!(
        "[package]\nname = \"bank\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[dependencies]\n\
         farpool-namdb = {{ path = \"{}\" }}\nserde = {{ version = \"1\", features = [\"derive\"] }}\n\n\
         [workspace]\n\n{profiles}",
        repository.join("crates/namdb").display()
    );
    fs::create_dir(dir.join("src")).unwrap();
    fs::write(dir.join("Cargo.toml"), manifest).unwrap();
    fs::copy(repository.join("Cargo.lock"), dir.join("Cargo.lock")).unwrap();
    fs::write(dir.join("src/main.rs"), program).unwrap();
}

/// Builds the project, and returns its program.
fn built(dir: &Path) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut cargo = Command::new("timeout");
    cargo.args([BUILD_SECONDS, "cargo", "build", "--offline", "--quiet"]).current_dir(dir);
    // The variables that cargo sets for this test's own package: with them, build scripts that read them
    // would run again, here and at the next build of the workspace.
    for (name, _) in std::env::vars()
        .filter(|(name, _)| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"))
    {
        cargo.env_remove(name);
    }
    let output = cargo.env("CARGO_TARGET_DIR", target).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let program = dir.join("bank");
    fs::copy(target.join("debug/bank"), &program).unwrap();
    program
}

#[test]
fn the_bank_transfer_of_the_readme_finds_the_pool_and_moves_the_money() {
    let dir = tempfile::tempdir().unwrap();
    project(dir.path(), &block(&repository().join("README.md"), "rust"));
    let program = built(dir.path());

    let up = Up::with(&["--nodes", "2", "--memory", "256MiB", "--no-lock"]);
    let file = dir.path().join("bank.far");
    let mut database = up.farpool(&["db", "up"]);
    database.arg(&file);
    let (_database, ready) = Process::ready("farpool db up", database);
    assert!(ready.starts_with("ready"), "{ready}");
    let mut transfer = tied(&program, [&file]);
    transfer.env("XDG_RUNTIME_DIR", up.runtime_dir());
    let output = Process::start("the transfer", transfer).wait();
    assert_eq!(output.stdout, "Grace has 6200 cents", "{output:?}");
}

#[test]
fn certificates_made_as_printed_let_processes_into_a_pool() {
    let dir = tempfile::tempdir().unwrap();
    let commands = block(&repository().join("docs/src/how-to/certificates.md"), "sh");
    let made = Command::new("bash").args(["-ec", &commands]).current_dir(dir.path()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));

    let tls = dir.path().join("db-17");
    let mut broker = farpool(["broker", "--listen", "127.0.0.1:0", "--tls-dir"]);
    broker.arg(&tls).arg("--store").arg(dir.path().join("broker.redb"));
    let (_broker, ready) = Process::ready("farpool broker", broker);
    let address = ready.split_whitespace().find(|word| word.starts_with("127.0.0.1:")).expect("its address");
    let status = |tls: &str| run(["status", "--broker", address, "--tls-dir", tls]);
    assert!(status(tls.to_str().unwrap()).status.success());
    let up = Up::with(&["--nodes", "1", "--memory", "128MiB", "--no-lock"]);
    let other_pool = up.run_dir().join("tls");
    let refused = status(other_pool.to_str().unwrap());
    assert!(!refused.status.success());
    assert!(refused.stderr.contains("not of this pool's authority"), "{refused:?}");
}

/// Runs the first commands of a how-to page with a pool, in a folder on a disk.
fn commands_of(page: &str, up: &Up) -> Output {
    let commands = block(&repository().join("docs/src/how-to").join(page), "sh");
    let folder = Path::new(env!("CARGO_BIN_EXE_farpool")).parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut shell = tied("bash", ["-ec", &commands]);
    shell.env("XDG_RUNTIME_DIR", up.runtime_dir()).env("PATH", path).current_dir(dir.path());
    let output = Process::start("the commands", shell).wait();
    assert!(output.status.success(), "{output:?}");
    output
}

#[test]
fn a_full_pool_overflows_to_disk_as_printed() {
    let up = Up::with(&["--nodes", "1", "--memory", "512MiB", "--no-lock"]);
    let output = commands_of("overflow-to-disk.md", &up);
    assert!(output.stdout.contains("overflow    128 MiB in the directory"), "{output:?}");
}

#[test]
fn a_node_gives_memory_back_and_lends_it_again_as_printed() {
    let up = Up::with(&["--nodes", "1", "--memory", "512MiB", "--no-lock"]);
    let output = commands_of("give-memory-back.md", &up);
    assert!(output.stdout.contains("lends 256 MiB of the 512 MiB"), "{output:?}");
    assert!(output.stdout.contains("pool   256 MiB of 256 MiB free"), "{output:?}");
    assert!(output.stdout.contains("lends 512 MiB of the 512 MiB"), "{output:?}");
}
