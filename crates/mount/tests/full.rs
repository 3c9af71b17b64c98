//! Errors when there is no room: only `ENOSPC` from `write`, `fsync` and `close` on a full pool; `EFBIG`
//! beyond the end of the largest file.
//!
//! `FARPOOL_TEST_FILLS=100 cargo test -p farpool-mount --test full` fills a pool a hundred times with writes
//! of each size.

mod support;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use farpool_file::MAX_FILE_BYTES;
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};

use crate::support::{TestMount, eventually};

const MEMORY_BYTES: u64 = 16 << 20;
/// Sizes of writes. Those that are not multiples of a block of 8 KiB leave blocks whose halves are written
/// separately.
const WRITES: [usize; 5] = [4096, 5024, 12 << 10, 65 * 4096, 257 * 4096];
/// Half a block, which is stored before every other fill. From then on the kernel's requests, of many pages
/// each, begin and end in the middle of blocks.
const FIRST_BYTES: usize = 4096;
/// Fills with writes of each size, unless `FARPOOL_TEST_FILLS` asks for more.
const FILLS: usize = 4;
const FILLS_WISHED: &str = "FARPOOL_TEST_FILLS";

fn fills() -> usize {
    std::env::var(FILLS_WISHED).map_or(FILLS, |count| count.parse().unwrap())
}

/// Closes a file and returns the error of `close`, which dropping a file would hide.
fn close(file: File) -> io::Result<()> {
    // SAFETY: `into_raw_fd` has passed the open descriptor to this function, which alone owns it and closes
    // it once.
    let closed = unsafe { libc::close(file.into_raw_fd()) };
    if closed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Writes `begun`, then twice as much as fits, or until a `write` fails. Returns all errors of these calls
/// and of those after them.
fn errors_of_filling(
    path: &Path,
    begun: &[u8],
    write_bytes: usize,
    synced: bool,
) -> Vec<(&'static str, i32)> {
    let mut file = File::create(path).unwrap();
    file.write_all(begun).and_then(|()| file.sync_all()).unwrap();
    let chunk = vec![7; write_bytes];
    let mut told = Vec::new();
    let mut note = |call, result: io::Result<()>| {
        if let Err(error) = result {
            told.push((call, error.raw_os_error().unwrap()));
        }
    };
    let mut written = 0;
    while written < 2 * MEMORY_BYTES {
        let result = file.write_all(&chunk);
        written += write_bytes as u64;
        if result.is_err() {
            note("write", result);
            break;
        }
    }
    if synced {
        note("fsync", file.sync_all());
        note("write after fsync", file.write_all(&chunk));
    }
    note("close", close(file));
    told
}

#[test]
fn a_full_pool_is_enospc_and_nothing_else_for_every_size_of_writes() {
    let mount = TestMount::start(MEMORY_BYTES);
    let path = mount.path().join("file");
    for fill in 0..fills() {
        for write_bytes in WRITES {
            let (begun, synced) = (&[7; FIRST_BYTES][..fill % 2 * FIRST_BYTES], fill / 2 % 2 == 0);
            let told = errors_of_filling(&path, begun, write_bytes, synced);
            let said = format!("fill {fill} by writes of {write_bytes} bytes: {told:?}");
            assert!(told.iter().all(|&(_, errno)| errno == libc::ENOSPC), "{said}");
            let needed = if synced { "fsync" } else { "close" };
            assert!(told.iter().any(|&(call, _)| call == needed || call == "write"), "{said}");
            fs::remove_file(&path).unwrap();
            eventually("there is room again", || {
                let written = fs::write(&path, vec![1; 1 << 20]).and_then(|()| File::open(&path)?.sync_all());
                fs::remove_file(&path).unwrap();
                written.is_ok()
            });
        }
    }
}

fn errno_of<T: std::fmt::Debug>(result: io::Result<T>) -> Option<i32> {
    result.expect_err("the file cannot reach that far").raw_os_error()
}

#[test]
fn calls_that_reach_the_daemon_refuse_at_once_to_make_a_file_too_large() {
    let mount = TestMount::start(MEMORY_BYTES);
    let path = mount.path().join("file");
    let direct = File::options().create(true).write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let mut room = vec![1; 2 * FIRST_BYTES];
    let skip = room.as_ptr().align_offset(FIRST_BYTES);
    let page = &mut room[skip..skip + FIRST_BYTES];
    assert_eq!(errno_of(direct.write_at(page, MAX_FILE_BYTES)), Some(libc::EFBIG));
    assert_eq!(errno_of(direct.set_len(MAX_FILE_BYTES + 1)), Some(libc::EFBIG));
    let allocated = fallocate(&direct, FallocateFlags::empty(), MAX_FILE_BYTES, 1);
    assert_eq!(errno_of(allocated.map_err(io::Error::from)), Some(libc::EFBIG));
    assert_eq!(direct.metadata().unwrap().len(), 0);
    direct.write_all_at(page, MAX_FILE_BYTES - page.len() as u64).unwrap();
    assert_eq!(direct.metadata().unwrap().len(), MAX_FILE_BYTES);
}

#[test]
fn writes_collected_behind_the_end_of_the_largest_file_are_errors_later_and_never_other_bytes() {
    let mount = TestMount::start(MEMORY_BYTES);
    for at in [MAX_FILE_BYTES - 10, MAX_FILE_BYTES, MAX_FILE_BYTES + 1000 * FIRST_BYTES as u64] {
        for synced in [true, false] {
            let path = mount.path().join(format!("file-{at}-{synced}"));
            let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
            // The kernel knows no largest size of a file, and does not ask for it.
            assert_eq!(file.write_at(&[7; 100], at).unwrap(), 100);
            if synced {
                assert_eq!(errno_of(file.sync_all()), Some(libc::EFBIG));
                for later in [at, 0] {
                    assert_eq!(errno_of(file.write_at(&[7], later)), Some(libc::EFBIG));
                }
            }
            let other = File::open(&path).unwrap();
            let closed = close(file);
            // `close` gives EIO: here the kernel turns every error but ENOSPC into it.
            assert!(synced || errno_of(closed) == Some(libc::EIO));
            fadvise(&other, 0, None, Advice::DontNeed).unwrap();
            assert_eq!(errno_of(other.read_at(&mut [0; 100], at)), Some(libc::EIO));
        }
    }
}
