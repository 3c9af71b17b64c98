//! `farpool run`: which library is loaded into which program, and the errors when that is impossible.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::support::{
    Mount, Output, Pool, PoolOptions, Process, Up, assert_complaint, built, eventually, farpool, root, run,
    run_command, tied,
};

/// A library that takes the place of the real one and shows that it was loaded.
fn stand_in(dir: &Path) -> PathBuf {
    let library = dir.join("libstandin.so");
    compile(dir, "const char *stood_in(void) { return \"loaded\"; }", &["-shared", "-fPIC"], &library);
    library
}

/// A program that prints whether the library was loaded, and then its arguments.
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

pub(crate) fn compile(dir: &Path, source: &str, options: &[&str], into: &Path) {
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
fn a_program_that_cannot_be_accelerated_runs_with_a_warning() {
    let dir = TempDir::new().unwrap();
    let (library, program) = (stand_in(dir.path()), dir.path().join("static"));
    compile(dir.path(), "int main(void) { return 0; }", &["-static"], &program);
    let output = run_with(&library, &[program.to_str().unwrap()]);
    assert!(output.status.success());
    assert!(output.stderr.contains("is not accelerated: it is statically linked"), "{output:?}");
}

#[test]
fn a_missing_program_or_library_is_an_error_with_the_fix() {
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

/// The interposer as cargo built it.
pub fn interposer() -> PathBuf {
    built("libfarpool_preload.so")
}

/// Builds one of the C programs that test the interposer.
fn test_program(name: &str, dir: &Path) -> PathBuf {
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../preload/tests/programs");
    let (source, program) = (programs.join(format!("{name}.c")), dir.join(name));
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-w", "-o"]).arg(&program).arg(source).args(["-lpthread", "-ldl"]);
    assert!(cc.output().unwrap().status.success());
    program
}

/// Runs a program in a new folder of `parent`, and returns what it prints.
fn seen_in(parent: &Path, program: &Path, args: &[&str], interposer: Option<&Path>) -> String {
    let folder = TempDir::new_in(parent).unwrap();
    let mut all = vec![program.to_str().unwrap(), folder.path().to_str().unwrap()];
    all.extend(args);
    let output = match interposer {
        Some(library) => run_with(library, &all),
        None => {
            let mut command = Command::new(all[0]);
            command.args(&all[1..]).env_remove("LD_PRELOAD");
            run_command(command)
        }
    };
    assert!(output.status.success() && output.stderr.is_empty(), "{program:?} {args:?}: {output:?}");
    output.stdout
}

#[test]
fn random_calls_on_a_mount_answer_the_same_with_the_interposer_as_without() {
    let dir = TempDir::new().unwrap();
    let (library, program) = (interposer(), test_program("sequence", dir.path()));
    let pool = Pool::start(PoolOptions::default());
    let mount = Mount::of(&pool, &["--accelerate"]);
    for seed in ["1", "2", "3"] {
        let args = [seed, "1500"];
        let plain = seen_in(mount.path(), &program, &args, None);
        let with = seen_in(mount.path(), &program, &args, Some(&library));
        let differs = plain.lines().zip(with.lines()).find(|(plain, with)| plain != with);
        assert_eq!((differs, plain.len()), (None, with.len()), "seed {seed}");
    }
}

#[test]
fn threads_handlers_and_children_of_an_interposed_program_find_their_files_on_a_mount() {
    let dir = TempDir::new().unwrap();
    let library = interposer();
    let pool = Pool::start(PoolOptions::default());
    let mount = Mount::of(&pool, &["--accelerate"]);
    for name in ["threads", "children"] {
        let program = test_program(name, dir.path());
        seen_in(mount.path(), &program, &[], None);
        seen_in(mount.path(), &program, &[], Some(&library));
    }
}

#[test]
fn positional_calls_on_a_mount_need_no_kernel() {
    let dir = TempDir::new().unwrap();
    let (library, program) = (interposer(), test_program("unaided", dir.path()));
    let pool = Pool::start(PoolOptions::default());
    let mount = Mount::of(&pool, &["--accelerate"]);
    seen_in(mount.path(), &program, &[], Some(&library));
    let output = run(["volume", "status", "--json", mount.path().to_str().unwrap()]);
    let state: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
    for counted in ["direct_read_bytes", "direct_written_bytes"] {
        assert!(state[counted].as_u64().unwrap() > 1 << 20, "{state}");
    }
}

#[test]
fn the_kernels_readahead_returns_nothing_older_than_direct_writes() {
    let dir = TempDir::new().unwrap();
    let (library, program) = (interposer(), test_program("prefetch", dir.path()));
    let pool = Pool::start(PoolOptions::default());
    let mount = Mount::of(&pool, &["--accelerate"]);
    seen_in(mount.path(), &program, &[], Some(&library));
}

/// How many questions `sizes.c` asks in each mode, unless `FARPOOL_TEST_SIZES` is set: ten million take a
/// quarter of an hour.
const SIZES_ASKED: &str = "40000";
const ASK_SIZES: &str = "FARPOOL_TEST_SIZES";

#[test]
fn no_answer_about_a_growing_file_is_older_than_what_was_acknowledged() {
    let dir = TempDir::new().unwrap();
    let (library, program) = (interposer(), test_program("sizes", dir.path()));
    let pool = Pool::start(PoolOptions::default());
    let mount = Mount::of(&pool, &["--accelerate"]);
    let asked = std::env::var(ASK_SIZES).unwrap_or(SIZES_ASKED.to_owned());
    for way in ["apart", "together"] {
        let said = seen_in(mount.path(), &program, &[&asked, way], Some(&library));
        assert!(said.trim_end().ends_with("asked, 0 wrong"), "{said}");
    }
}

/// Uses more files at a time than a mount with few descriptors can open to direct clients.
const MANY: &str = "
    #define _GNU_SOURCE
    #include <fcntl.h>
    #include <stdio.h>
    #include <unistd.h>
    int main(int count, char **arguments) {
        int fds[100];
        for (int i = 0; i < 100; i++) {
            char name[4096];
            snprintf(name, sizeof name, \"%s/%d\", arguments[1], i);
            fds[i] = open(name, O_RDWR | O_CREAT, 0600);
            if (fds[i] < 0 || pwrite(fds[i], &i, sizeof i, 0) != sizeof i) return 1;
        }
        for (int round = 0; round < 20; round++)
            for (int i = 0; i < 100; i++) {
                int found;
                if (pread(fds[i], &found, sizeof found, 0) != sizeof found || found != i) return 2;
            }
        return 0;
    }";

#[test]
fn a_mount_that_runs_out_of_descriptors_for_files_keeps_enough_for_its_nodes() {
    let dir = TempDir::new().unwrap();
    let program = dir.path().join("many");
    compile(dir.path(), MANY, &["-w"], &program);
    let pool = Pool::start(PoolOptions::default());
    let mut mount = Mount::of(&pool, &["--accelerate"]);
    let few = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
    let process = rustix::process::Pid::from_raw(mount.process.id() as i32);
    rustix::process::prlimit(process, rustix::process::Resource::Nofile, few).unwrap();
    seen_in(mount.path(), &program, &[], Some(&interposer()));
    let said = mount.unmount().stderr;
    assert!(said.contains("cannot be worked on directly") && !said.contains("is lost"), "{said}");
}

/// The number of `nobody` on most systems; any user but root would do.
const STRANGER: &str = "65534";

#[test]
fn positional_calls_need_no_kernel_where_the_pool_and_the_mount_are_root_s_and_the_program_is_not() {
    if !root() {
        return; // only root can become another user
    }
    let up = Up::start();
    let nodes = up.status()["nodes"].clone();
    let sockets = nodes.as_array().unwrap().iter().map(|node| node["shm_socket"].as_str().unwrap());
    assert_eq!(sockets.len(), 2);
    let dir = TempDir::new().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let far = dir.path().join("far");
    fs::create_dir(&far).unwrap();
    let options = ["mount", far.to_str().unwrap(), "--allow-other", "--accelerate-for", STRANGER];
    let mount = Mount::with(up.farpool(&options), far.clone());
    // The program runs as another user, which must be able to read the library.
    let (library, program) = (dir.path().join("library.so"), test_program("unaided", dir.path()));
    fs::copy(interposer(), &library).unwrap();
    let folder = mount.file("folder");
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::chown(&folder, STRANGER.parse().ok(), None).unwrap();
    let as_stranger = |program: &str, args: &[&str]| {
        let ids = ["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups", "--", program];
        let mut command = tied("setpriv", ids.iter().chain(args));
        command.env("LD_PRELOAD", &library);
        run_command(command)
    };
    for socket in sockets {
        assert!(!as_stranger("test", &["-e", socket]).status.success(), "{socket} is root's alone");
    }
    let output = as_stranger(program.to_str().unwrap(), &[folder.to_str().unwrap()]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// The file that the processes of `stress.c` share; that program describes its contents.
struct Control {
    file: File,
    path: PathBuf,
}

const ROLES: [&str; 6] = ["keeping", "keeping", "keeping", "reopening", "keeping", "mapping"];
/// This process keeps the file open without the interposer: while it lives, no process is accelerated.
const BYSTANDER: usize = 4;
/// These run without the interposer.
const PLAIN: [usize; 2] = [3, BYSTANDER];
const SHARED_BYTES: u64 = 24 * 8192;
const CONTROL_BYTES: u64 = 8 * (1 + 6 + 6 + 24);
/// Rounds that a process lives for before it is killed.
const ROUNDS: u64 = 60;

impl Control {
    fn new(dir: &Path) -> Self {
        let path = dir.join("control");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_len(CONTROL_BYTES).unwrap();
        Control { file, path }
    }

    fn progress(&self, process: usize) -> u64 {
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, 8 * (1 + process as u64)).unwrap();
        u64::from_ne_bytes(word)
    }

    /// Waits until a process has done some more rounds; panics with its output if it ends before.
    #[track_caller]
    fn await_rounds(&self, number: usize, process: &mut Process) {
        let from = self.progress(number);
        eventually("the process works", || {
            if !process.is_running() {
                panic!("process {number} ({}) found a fault: {:?}", ROLES[number], process.wait());
            }
            self.progress(number) >= from + ROUNDS
        });
    }

    fn end(&self) {
        self.file.write_all_at(&1_u64.to_ne_bytes(), 0).unwrap();
    }
}

#[test]
fn accelerated_plain_and_mapping_processes_agree_on_one_file_while_they_are_killed() {
    let dir = TempDir::new().unwrap();
    let (library, program) = (interposer(), test_program("stress", dir.path()));
    let control = Control::new(dir.path());
    let pool = Pool::start(PoolOptions::default());
    let mount = Mount::of(&pool, &["--accelerate"]);
    fs::write(mount.file("shared"), vec![0; SHARED_BYTES as usize]).unwrap();
    let start = |process: usize| {
        let folder = mount.path().to_str().unwrap();
        let number = process.to_string();
        let mut command = tied(&program, [folder, ROLES[process], &number, control.path.to_str().unwrap()]);
        if !PLAIN.contains(&process) {
            command.env("LD_PRELOAD", &library);
        }
        Process::start(format!("stress {process}"), command)
    };
    let mut processes: Vec<Process> = (0..ROLES.len()).map(start).collect();
    for _ in 0..3 {
        for number in 0..ROLES.len() {
            control.await_rounds(number, &mut processes[number]);
            processes[number].kill();
            if number == BYSTANDER {
                // While this process is gone, and the one that reopens the file has it closed, the others
                // are accelerated.
                (0..BYSTANDER).for_each(|other| control.await_rounds(other, &mut processes[other]));
            }
            processes[number] = start(number);
        }
    }
    control.end();
    for mut process in processes {
        let output = process.wait();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}
