//! `farpool run`: which library is loaded into which program, and what is said when that is impossible.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::support::{Output, assert_complaint, farpool, run, run_command};

/// A library that answers for itself when asked, in the place of the real one.
fn stand_in(dir: &Path) -> PathBuf {
    let library = dir.join("libstandin.so");
    compile(dir, "const char *stood_in(void) { return \"loaded\"; }", &["-shared", "-fPIC"], &library);
    library
}

/// A program that says whether the library was loaded, and then its arguments.
const WITNESS: &str = "
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stdio.h>
    #include <signal.h>
    int main(int count, char **arguments) {
        const char *(*stood_in)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, \"stood_in\");
        printf(\"%s\", stood_in ? stood_in() : \"alone\");
        printf(signal(SIGXFSZ, SIG_DFL) == SIG_DFL ? \" ends\" : \" ignores\");
        for (int i = 0; i < count; i++) printf(\" %s\", arguments[i]);
        return 7;
    }";

fn compile(dir: &Path, source: &str, options: &[&str], into: &Path) {
    let text = dir.join("source.c");
    fs::write(&text, source).unwrap();
    let output = Command::new("cc").args(options).arg("-o").arg(into).arg(text).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn run_with(library: &Path, args: &[&str]) -> Output {
    let mut command = farpool(["run"].iter().chain(args));
    command.env("FARPOOL_PRELOAD", library).env_remove("LD_PRELOAD");
    run_command(command)
}

#[test]
fn the_program_gets_the_library_its_arguments_and_its_own_exit_status() {
    let dir = TempDir::new().unwrap();
    let (library, witness) = (stand_in(dir.path()), dir.path().join("witness"));
    compile(dir.path(), WITNESS, &["-w"], &witness);
    let witness = witness.to_str().unwrap();
    for dashes in [&[][..], &["--"]] {
        let output = run_with(&library, &[dashes, &[witness, "-x", "--help", "--", "y"]].concat());
        assert_eq!(output.status.code(), Some(7));
        let expected = format!("loaded ends {witness} -x --help -- y");
        assert_eq!(output.stdout.trim_end(), expected);
        assert!(output.stderr.is_empty());
    }
}

#[test]
fn a_program_that_cannot_be_served_runs_and_its_user_is_told_why() {
    let dir = TempDir::new().unwrap();
    let (library, program) = (stand_in(dir.path()), dir.path().join("static"));
    compile(dir.path(), "int main(void) { return 0; }", &["-static"], &program);
    let output = run_with(&library, &[program.to_str().unwrap()]);
    assert!(output.status.success());
    assert!(output.stderr.contains("is not accelerated: it is statically linked"), "{output:?}");
}

#[test]
fn what_is_missing_is_named_with_the_fix() {
    let dir = TempDir::new().unwrap();
    let library = stand_in(dir.path());
    assert_complaint(&run_with(&library, &["no-such-program"]), 1, "in PATH");
    assert_complaint(&run_with(&library, &["/no/such/program"]), 1, "cannot run /no/such/program");
    let plain = dir.path().join("plain");
    fs::write(&plain, "text").unwrap();
    fs::set_permissions(&plain, fs::Permissions::from_mode(0o600)).unwrap();
    assert_complaint(&run_with(&library, &[plain.to_str().unwrap()]), 1, "cannot run");
    assert_complaint(&run_with(Path::new("/no/such/library.so"), &["true"]), 2, "FARPOOL_PRELOAD");
    let odd = dir.path().join("a b.so");
    fs::copy(&library, &odd).unwrap();
    assert_complaint(&run_with(&odd, &["true"]), 1, "cannot be preloaded");
    assert_complaint(&run(["run"]), 2, "<COMMAND>");
}
