//! What MonetDB does with its intermediate results: files that are mapped, grown while mapped, unlinked and
//! mapped again, together larger than the memory that the process may use.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::mm::MapFlags;

use crate::support::Scratch;
use crate::support::mapped::Mapped;

/// Set for the process that works: in which directory, and what it does there.
const WORK_IN: &str = "FARPOOL_TEST_WORK_IN";
const WORK: &str = "FARPOOL_TEST_WORK";
const FILES: usize = 4;
const COLUMN_BYTES: usize = 8 << 20;
const PAGE: usize = 4096;
/// Half of what all columns take.
const MEMORY_BYTES: usize = FILES * COLUMN_BYTES / 2;
/// The root of the control groups, and the file that limits a group's memory: in version 2 and version 1.
const CGROUPS: [(&str, &str); 2] =
    [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];

fn new_file(path: &Path) -> File {
    File::options().read(true).write(true).create_new(true).open(path).unwrap()
}

fn map(file: &File, length: usize) -> Mapped {
    Mapped::new(file, length, MapFlags::SHARED)
}

/// The contents of page `page` of column `column`.
fn contents(column: usize, page: usize) -> [u8; PAGE] {
    let mut bytes = [(column * 31 + page) as u8; PAGE];
    bytes[..8].copy_from_slice(&(((column as u64) << 32) | page as u64).to_ne_bytes());
    bytes
}

fn check(column: usize, mapped: &Mapped) {
    for page in 0..COLUMN_BYTES / PAGE {
        assert!(mapped.read(page * PAGE, PAGE) == contents(column, page), "column {column}, page {page}");
    }
}

/// Writes columns through mappings that grow, reads them through others, and unlinks half of them while
/// mapped.
fn work_on_columns(directory: &Path) {
    let path = |column: usize| directory.join(format!("column{column}"));
    for column in 0..FILES {
        let file = new_file(&path(column));
        for half in 1..=2 {
            let length = half * COLUMN_BYTES / 2;
            file.set_len(length as u64).unwrap();
            let mapped = map(&file, length);
            for page in (half - 1) * COLUMN_BYTES / 2 / PAGE..length / PAGE {
                mapped.write(page * PAGE, &contents(column, page));
            }
        }
    }
    let kept: Vec<_> = (0..FILES)
        .map(|column| {
            let file = File::options().read(true).write(true).open(path(column)).unwrap();
            let mapped = map(&file, COLUMN_BYTES);
            if column % 2 == 0 {
                fs::remove_file(path(column)).unwrap();
            }
            (file, mapped)
        })
        .collect();
    for (column, (file, mapped)) in kept.iter().enumerate() {
        check(column, mapped);
        mapped.sync();
        check(column, &map(file, COLUMN_BYTES));
    }
}

/// Touches a mapped page beyond the end of the file.
fn touch_past_the_end(directory: &Path) {
    let file = new_file(&directory.join("short"));
    file.set_len(PAGE as u64 + 10).unwrap();
    let mapped = map(&file, 3 * PAGE);
    assert_eq!(mapped.read(2 * PAGE - 1, 1), [0], "the rest of the last page is zeros");
    let _never = mapped.read(2 * PAGE, 1);
}

/// Does nothing, unless another test has started it to work on mapped files.
#[test]
fn work_when_another_test_asks() {
    let (Some(directory), Ok(work)) = (std::env::var_os(WORK_IN), std::env::var(WORK)) else { return };
    match work.as_str() {
        "columns" => work_on_columns(Path::new(&directory)),
        _ => touch_past_the_end(Path::new(&directory)),
    }
}

/// A control group with little memory; removed when dropped.
struct Group(PathBuf);

impl Group {
    /// `None`: this user may not make one, or the machine has none.
    fn new() -> Option<Self> {
        CGROUPS.into_iter().find_map(|(root, limit)| {
            let path = Path::new(root).join(format!("farpool-test-{}", std::process::id()));
            fs::create_dir(&path).ok()?;
            let group = Group(path);
            // Opened without creating it: otherwise a missing file would be made in a directory that is not a
            // control group.
            let limited = File::options().write(true).open(group.0.join(limit));
            limited.and_then(|mut limited| limited.write_all(MEMORY_BYTES.to_string().as_bytes())).ok()?;
            Some(group)
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _left_behind = fs::remove_dir(&self.0);
    }
}

fn start(work: &str, directory: &Path, group: Option<&Group>) -> Child {
    let program = std::env::current_exe().unwrap();
    // A shell joins the group first, so that all memory of the program is charged to the group.
    let script = match group {
        Some(group) => format!("echo $$ > {}/cgroup.procs; exec \"$0\" \"$@\"", group.0.display()),
        None => "exec \"$0\" \"$@\"".to_owned(),
    };
    let mut command = Command::new("sh");
    command.arg("-ec").arg(script).arg(program);
    command.args(["intermediates::work_when_another_test_asks", "--exact", "--nocapture"]);
    command.env(WORK_IN, directory).env(WORK, work).stdout(Stdio::null()).spawn().unwrap()
}

#[test]
fn mapped_intermediates_larger_than_memory_come_back_as_written() {
    let dir = Scratch::new();
    let group = Group::new();
    let status = start("columns", dir.path(), group.as_ref()).wait().unwrap();
    assert!(status.success(), "{status}, limited: {}", group.is_some());
}

#[test]
fn a_mapped_page_past_the_end_is_a_bus_error() {
    let dir = Scratch::new();
    let status = start("past-the-end", dir.path(), None).wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn a_file_that_grows_while_mapped_shows_what_is_written_behind_its_old_end() {
    let dir = Scratch::new();
    let file = new_file(&dir.join("file"));
    file.set_len(PAGE as u64 / 2).unwrap();
    let mapped = map(&file, 4 * PAGE);
    mapped.write(0, &[1; PAGE / 2]);
    file.set_len(4 * PAGE as u64).unwrap();
    assert!(mapped.read(0, PAGE / 2) == [1; PAGE / 2]);
    assert!(mapped.read(PAGE / 2, PAGE) == [0; PAGE]);
    mapped.write(2 * PAGE, &[2; PAGE]);
    mapped.sync();
    let bytes = fs::read(dir.join("file")).unwrap();
    assert!(bytes[2 * PAGE..] == [[2; PAGE], [0; PAGE]].concat());
    file.set_len(2 * PAGE as u64).unwrap();
    file.set_len(3 * PAGE as u64).unwrap();
    assert!(mapped.read(2 * PAGE, PAGE) == [0; PAGE], "a page cut off comes back as zeros");
}
