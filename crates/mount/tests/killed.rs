//! The daemon is killed while other processes are in the middle of an operation.

mod support;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags, SeekFrom, flock, openat, seek, unlinkat};
use rustix::io::Errno;
use rustix::mm::MapFlags;

use crate::support::mapped::Mapped;
use crate::support::{TestMount, eventually, is_mounted};

const MEMORY_BYTES: u64 = 64 << 20;
const FILE_BYTES: usize = 4 << 20;
const UNIT: usize = 64 << 10;
/// Set for a process that uses a mount: what it does, and in which directory.
const USE: &str = "FARPOOL_TEST_USE";
const USE_AT: &str = "FARPOOL_TEST_USE_AT";
const READY: &str = "at work";
/// What a process does, without end.
const USES: [&str; 8] = ["read", "write", "write-direct", "map", "seek", "names", "lock", "lock"];

type Outcome = rustix::io::Result<()>;

/// Call it once the file is open: from then on the process uses the mount, and never the directory beneath
/// it.
fn ready() {
    println!("\n{READY}");
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap()
}

fn file(directory: &Path, name: &str, flags: i32) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).custom_flags(flags).open(directory.join(name)).unwrap()
}

/// A buffer for direct I/O.
fn with_aligned<R>(work: impl FnOnce(&mut [u8]) -> R) -> R {
    let mut room = vec![7; UNIT + 4096];
    let skip = room.as_ptr().align_offset(4096);
    work(&mut room[skip..skip + UNIT])
}

fn offsets() -> impl Iterator<Item = u64> {
    (0..(FILE_BYTES / UNIT) as u64).cycle().map(|at| at * UNIT as u64)
}

fn read_on(file: &File) -> Outcome {
    with_aligned(|buffer| {
        file.write_all_at(buffer, 0).map_err(errno)?;
        loop {
            file.read_exact_at(buffer, 0).map_err(errno)?;
        }
    })
}

fn read(directory: &Path) -> Outcome {
    let file = file(directory, "read", libc::O_DIRECT);
    ready();
    read_on(&file)
}

fn write(directory: &Path) -> Outcome {
    let file = file(directory, "write", 0);
    ready();
    offsets().try_for_each(|at| file.write_all_at(&[7; UNIT], at).map_err(errno))
}

fn write_direct(directory: &Path) -> Outcome {
    let file = file(directory, "write-direct", libc::O_DIRECT);
    ready();
    with_aligned(|buffer| offsets().try_for_each(|at| file.write_all_at(buffer, at).map_err(errno)))
}

fn map(directory: &Path) -> Outcome {
    let file = file(directory, "map", 0);
    ready();
    file.set_len(FILE_BYTES as u64).map_err(errno)?;
    let mapped = Mapped::new(&file, FILE_BYTES, MapFlags::SHARED);
    offsets().try_for_each(|at| {
        mapped.write(at as usize, &[7; UNIT]);
        mapped.try_sync()
    })
}

fn seek_data(directory: &Path) -> Outcome {
    let file = file(directory, "seek", 0);
    ready();
    offsets().try_for_each(|at| {
        file.write_all_at(&[7; UNIT], at).map_err(errno)?;
        seek(&file, SeekFrom::Data(at)).map(drop)
    })
}

fn names(directory: &Path) -> Outcome {
    let directory = File::open(directory).unwrap();
    ready();
    loop {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        openat(&directory, "name", flags, Mode::from_raw_mode(0o600))?;
        Dir::read_from(&directory)?.try_for_each(|entry| entry.map(drop))?;
        unlinkat(&directory, "name", AtFlags::empty())?;
    }
}

/// One of several processes gets the lock. The others wait for it until the mount fails.
fn lock(directory: &Path) -> Outcome {
    let file = file(directory, "lock", libc::O_DIRECT);
    ready();
    flock(&file, FlockOperation::LockExclusive)?;
    read_on(&file)
}

/// Does nothing, unless another test has started this process to use a mount until the mount fails.
#[test]
fn use_a_mount_when_another_test_asks() {
    let (Ok(wish), Some(directory)) = (std::env::var(USE), std::env::var_os(USE_AT)) else { return };
    let directory = Path::new(&directory);
    let ended = match wish.as_str() {
        "read" => read(directory),
        "write" => write(directory),
        "write-direct" => write_direct(directory),
        "map" => map(directory),
        "seek" => seek_data(directory),
        "names" => names(directory),
        "lock" => lock(directory),
        _ => panic!("{wish}: unknown use"),
    };
    let error = ended.expect_err("only the end of the mount ends this");
    assert!([Errno::NOTCONN, Errno::CONNABORTED, Errno::IO].contains(&error), "{wish}: {error}");
}

fn start_using(wish: &str, directory: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["use_a_mount_when_another_test_asks", "--exact", "--nocapture"]);
    let mut child = command.env(USE, wish).env(USE_AT, directory).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == READY), "{wish} starts");
    std::thread::spawn(move || lines.for_each(drop));
    child
}

#[test]
fn processes_on_a_mount_whose_daemon_is_killed_get_errors_and_the_next_mount_serves() {
    let mut mount = TestMount::start(MEMORY_BYTES);
    for _ in 0..3 {
        let users = USES.map(|wish| (wish, start_using(wish, mount.path())));
        mount.kill();
        for (wish, mut user) in users {
            eventually(&format!("'{wish}' ends"), || user.try_wait().unwrap().is_some());
            let status = user.wait().unwrap();
            // A page of a mapping that cannot be read raises a signal, as with any file.
            let told = status.success() || (wish == "map" && status.signal() == Some(libc::SIGBUS));
            assert!(told, "{wish}: {status}");
        }
        mount.wait();
        eventually("the watcher has removed the mount", || !is_mounted(mount.path()));
        mount = mount.again(MEMORY_BYTES);
        assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 0);
        fs::write(mount.path().join("file"), "anew").unwrap();
        assert_eq!(fs::read_to_string(mount.path().join("file")).unwrap(), "anew");
    }
}

#[test]
fn a_mount_that_daemon_and_watcher_left_behind_is_replaced_by_the_next() {
    let mut mount = TestMount::start(MEMORY_BYTES);
    let open = File::create(mount.path().join("file")).unwrap();
    mount.kill_with_watcher();
    mount.wait();
    assert!(is_mounted(mount.path()));
    let mount = mount.again(MEMORY_BYTES);
    fs::write(mount.path().join("file"), "anew").unwrap();
    assert!(open.sync_all().is_err());
}
