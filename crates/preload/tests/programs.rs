//! The library in C programs that do not know of it: they must see what they would see without it.
//!
//! Each program runs without the library, with it (no file is on a mount, so every call goes to the kernel),
//! and with the stand-in of `examples/double.rs`, which accelerates the files of a tmpfs.

mod building;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use building::{built, compile, library};
use tempfile::TempDir;

const TMPFS: &str = "/dev/shm";
const SEQUENCE_STEPS: &str = "3000";
const SEQUENCES: u64 = 8;

fn double() -> PathBuf {
    built("examples/libdouble.so")
}

fn run(program: &Path, arguments: &[&str], preloaded: Option<&Path>) -> Output {
    let mut command = Command::new(program);
    command.args(arguments).env_remove("LD_PRELOAD");
    if let Some(library) = preloaded {
        command.env("LD_PRELOAD", library);
    }
    let output = command.output().unwrap();
    let (status, stderr) = (output.status, String::from_utf8_lossy(&output.stderr));
    assert!(
        status.success() && stderr.is_empty(),
        "{program:?} {arguments:?} with {preloaded:?}: {status}, signal {:?}, {stderr}",
        status.signal()
    );
    output
}

/// Builds a program and passes it to `check`, with a function that makes a directory for the files of each
/// run.
fn in_folders(name: &str, parent: &Path, check: impl Fn(&Path, &dyn Fn() -> TempDir)) {
    let build = tempfile::tempdir().unwrap();
    let program = compile(name, build.path());
    check(&program, &|| TempDir::new_in(parent).unwrap());
}

fn same_in_all_worlds(name: &str, parent: &Path, extra: &[&str]) {
    in_folders(name, parent, |program, folder| {
        let seen = |library: Option<&Path>| {
            let folder = folder();
            let arguments = [&[folder.path().to_str().unwrap()], extra].concat();
            String::from_utf8(run(program, &arguments, library).stdout).unwrap()
        };
        let plain = seen(None);
        let mut worlds = vec![library()];
        if parent == Path::new(TMPFS) {
            worlds.push(double());
        }
        for world in worlds {
            let with = seen(Some(&world));
            let differs = plain.lines().zip(with.lines()).find(|(plain, with)| plain != with);
            assert!(differs.is_none(), "{name} {extra:?} with {world:?}: {differs:?}");
            assert_eq!(plain.len(), with.len());
        }
    });
}

#[test]
fn random_calls_answer_the_same_with_the_library_as_without() {
    for seed in 1..=SEQUENCES {
        same_in_all_worlds("sequence", Path::new(TMPFS), &[&seed.to_string(), SEQUENCE_STEPS]);
    }
    same_in_all_worlds("sequence", Path::new(env!("CARGO_TARGET_TMPDIR")), &["77", SEQUENCE_STEPS]);
}

#[test]
fn threads_and_signal_handlers_read_what_was_written_while_descriptors_are_closed() {
    same_in_all_worlds("threads", Path::new(TMPFS), &[]);
}

#[test]
fn forked_and_spawned_programs_get_their_files_and_acceleration_ends_where_it_must() {
    same_in_all_worlds("children", Path::new(TMPFS), &[]);
}

#[test]
fn the_library_exports_the_hooks_and_nothing_else() {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output().unwrap();
    let symbols = String::from_utf8(output.stdout).unwrap();
    let mut exported: Vec<&str> = symbols.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    exported.sort_unstable();
    let mut expected: Vec<&str> = include_str!("../src/hooks/names.txt").split_whitespace().collect();
    expected.sort_unstable();
    assert_eq!(exported, expected);
}
