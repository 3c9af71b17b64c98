//! `farpool mount --keep`: files that survive a restart of the daemon.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::fs::XattrFlags;
use tempfile::TempDir;

use crate::support::{
    Mount, Output, Pool, PoolOptions, assert_complaint, eventually, farpool, is_mounted, pattern,
    run_command, write_new,
};

const MIB: usize = 1 << 20;
const BLOCK: usize = 8 << 10;

/// The directories of a mount and its state, which several daemons use in turn.
struct Place {
    parent: TempDir,
}

impl Place {
    fn new() -> Place {
        let parent = tempfile::tempdir().unwrap();
        fs::create_dir(parent.path().join("far")).unwrap();
        Place { parent }
    }

    fn dir(&self) -> PathBuf {
        self.parent.path().join("far")
    }

    fn keep(&self) -> PathBuf {
        self.parent.path().join("keep")
    }

    fn command(&self, pool: &Pool, options: &[&str]) -> std::process::Command {
        let mut command = farpool(["mount"]);
        command.arg(self.dir()).args(["--broker", &pool.address, "--keep"]).arg(self.keep()).args(options);
        command
    }

    #[track_caller]
    fn mount(&self, pool: &Pool, options: &[&str]) -> Mount {
        Mount::with(self.command(pool, options), self.dir())
    }

    /// Kills the daemon, and starts another one as soon as the mount is gone.
    #[track_caller]
    fn again(&self, pool: &Pool, mut mount: Mount, options: &[&str]) -> Mount {
        mount.process.kill();
        self.wait_until_unmounted(mount);
        self.mount(pool, options)
    }

    /// Waits until the watcher has unmounted the mount of a killed daemon.
    #[track_caller]
    fn wait_until_unmounted(&self, mount: Mount) {
        eventually("the watcher has unmounted it", || !is_mounted(&self.dir()));
        drop(mount); // its guard would unmount the next one
    }

    /// A mount that is refused.
    fn refused(&self, pool: &Pool) -> Output {
        run_command(self.command(pool, &[]))
    }
}

fn choose(path: &Path, redundancy: &str) {
    let name = "user.farpool.redundancy";
    rustix::fs::setxattr(path, name, redundancy.as_bytes(), XattrFlags::empty()).unwrap();
}

fn xattr(path: &Path, name: &str) -> Vec<u8> {
    let mut value = [0; 64];
    let bytes = rustix::fs::getxattr(path, name, &mut value[..]).unwrap();
    value[..bytes].to_vec()
}

/// Attributes and contents of everything below a directory.
fn seen(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut seen = BTreeMap::new();
    let mut open = vec![root.to_owned()];
    while let Some(path) = open.pop() {
        let about = fs::symlink_metadata(&path).unwrap();
        let what = if about.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            "directory".to_owned()
        } else if about.is_symlink() {
            format!("to {}", fs::read_link(&path).unwrap().display())
        } else {
            let data = fs::read(&path).unwrap();
            format!("{} bytes, {:016x}", data.len(), checksum(&data))
        };
        let times = (about.modified().unwrap(), about.ino(), about.nlink());
        seen.insert(path, format!("{what} {:o} {}:{} {times:?}", about.mode(), about.uid(), about.gid()));
    }
    seen
}

fn checksum(data: &[u8]) -> u64 {
    data.iter()
        .fold(0xCBF2_9CE4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3))
}

#[test]
fn a_restarted_mount_has_everything_that_has_a_name() {
    let pool = Pool::start(PoolOptions { nodes: 3, ..PoolOptions::default() });
    let place = Place::new();
    let mount = place.mount(&pool, &[]);
    for (number, kind) in ["none", "stripe", "mirror", "parity:2"].iter().enumerate() {
        let directory = mount.file(kind);
        fs::create_dir(&directory).unwrap();
        choose(&directory, kind);
        write_new(&directory.join("data"), &pattern(2 * MIB + 4_321, number as u64)).unwrap();
        let sparse = File::create(directory.join("sparse")).unwrap();
        sparse.write_all_at(&pattern(MIB, 9), 3 * MIB as u64).unwrap();
        sparse.set_len(3 * MIB as u64 + 100).unwrap();
        sparse.sync_all().unwrap();
    }
    let data = mount.file("none").join("data");
    fs::set_permissions(&data, Permissions::from_mode(0o640)).unwrap();
    rustix::fs::setxattr(&data, "user.note", b"kept", XattrFlags::empty()).unwrap();
    File::options()
        .write(true)
        .open(&data)
        .unwrap()
        .set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(77))
        .unwrap();
    fs::hard_link(&data, mount.file("second name")).unwrap();
    symlink("none/data", mount.file("link")).unwrap();
    write_new(&mount.file("unlinked"), b"gone").unwrap();
    let unlinked = File::open(mount.file("unlinked")).unwrap();
    fs::remove_file(mount.file("unlinked")).unwrap();
    write_new(&mount.file("moved"), &pattern(MIB, 5)).unwrap();
    fs::rename(mount.file("moved"), mount.file("stripe").join("here")).unwrap();
    fs::create_dir(mount.file("empty")).unwrap();
    fs::remove_dir(mount.file("empty")).unwrap();
    let before = seen(mount.path());
    drop(unlinked);

    let mut mount = mount;
    for round in 0..2 {
        mount = place.again(&pool, mount, &[]);
        let said = mount.process.await_line("found");
        assert!(said.starts_with("found  9 files with "), "{said}");
        assert!(seen(mount.path()) == before, "round {round}: {:#?}\n{before:#?}", seen(mount.path()));
        assert_eq!(xattr(&mount.file("second name"), "user.note"), b"kept");
        assert_eq!(xattr(&mount.file("parity:2").join("data"), "user.farpool.redundancy"), b"parity:2");
        // A file that is created and removed now must not use their extents.
        write_new(&mount.file("fresh"), &pattern(8 * MIB, 6)).unwrap();
        fs::remove_file(mount.file("fresh")).unwrap();
        let root = File::open(mount.path()).unwrap();
        drop(root);
        let now = seen(mount.path());
        let but_root = |seen: &BTreeMap<PathBuf, String>| {
            seen.iter().skip(1).map(|(path, what)| (path.clone(), what.clone())).collect::<Vec<_>>()
        };
        assert!(but_root(&now) == but_root(&before));
        let time = fs::FileTimes::new().set_modified(modified(&before, mount.path()));
        File::open(mount.path()).unwrap().set_times(time).unwrap();
    }
    let output = mount.unmount();
    assert!(output.stdout.contains("kept   for about"), "{}", output.stdout);
    let mount = place.mount(&pool, &[]);
    assert!(seen(mount.path()) == before, "the files are found after a clean end, too");
}

/// The modification time of the root in `before`: the test restores it after it has changed the root.
fn modified(before: &BTreeMap<PathBuf, String>, root: &Path) -> SystemTime {
    let text = &before[root];
    let number = |name: &str| -> u64 {
        let from = text.find(name).unwrap() + name.len();
        let digits: String = text[from..].chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap()
    };
    SystemTime::UNIX_EPOCH + Duration::new(number("tv_sec: "), number("tv_nsec: ") as u32)
}

/// Blocks of one round: each begins with its number and the round.
fn block_of(number: u64, round: u64) -> Vec<u8> {
    pattern(BLOCK, number << 32 | round)
}

/// Writes blocks of a file over and over until the daemon is killed. Afterwards each word of a block must be
/// the one that was last acknowledged, or the one that was being written.
fn killed_while_writing(transport: &str, redundancy: &str) {
    const BLOCKS: u64 = 96;
    const WRITERS: u64 = 3;
    /// A copy that is killed half-way leaves each word of this size old or new.
    const WORD: usize = 8;
    let pool = Pool::start(PoolOptions { nodes: 3, ..PoolOptions::default() });
    let place = Place::new();
    let options = ["--transport", transport, "--redundancy", redundancy];
    let mut mount = place.mount(&pool, &options);
    let path = mount.file("busy");
    write_new(&path, &(0..BLOCKS).flat_map(|number| block_of(number, 0)).collect::<Vec<_>>()).unwrap();
    let acknowledged: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
    for _ in 0..3 {
        let begun: u64 = acknowledged.iter().map(|round| round.load(Ordering::Relaxed)).sum();
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let (path, acknowledged) = (&path, &acknowledged);
                scope.spawn(move || {
                    // With O_DIRECT, data are stored when the write returns; through the kernel's cache, when
                    // they are synced.
                    let direct = if writer % 2 == 0 { rustix::fs::OFlags::DIRECT.bits() as i32 } else { 0 };
                    let file = File::options().write(true).custom_flags(direct).open(path).unwrap();
                    for number in (writer..BLOCKS).step_by(WRITERS as usize).cycle() {
                        let round = acknowledged[number as usize].load(Ordering::Relaxed) + 1;
                        let written = file.write_all_at(&block_of(number, round), number * BLOCK as u64);
                        if written.and_then(|()| file.sync_data()).is_err() {
                            return;
                        }
                        acknowledged[number as usize].store(round, Ordering::Relaxed);
                    }
                });
            }
            eventually("the writers are at work", || {
                acknowledged.iter().map(|round| round.load(Ordering::Relaxed)).sum::<u64>()
                    > begun + 4 * BLOCKS
            });
            mount.process.kill();
        });
        place.wait_until_unmounted(mount);
        mount = place.mount(&pool, &options);
        let found = fs::read(&path).unwrap();
        assert_eq!(found.len(), BLOCKS as usize * BLOCK);
        for (number, block) in (0..BLOCKS).zip(found.chunks(BLOCK)) {
            let round = acknowledged[number as usize].load(Ordering::Relaxed);
            let (done, begun) = (block_of(number, round), block_of(number, round + 1));
            let of_round = (0..round + 9).find(|round| block == block_of(number, *round));
            let words = block.chunks(WORD).zip(done.chunks(WORD).zip(begun.chunks(WORD)));
            for (word, (found, (done, begun))) in words.enumerate() {
                assert!(
                    found == done || found == begun,
                    "block {number}, word {word}: round {round}, found {of_round:?}, {} zeros",
                    block.iter().filter(|byte| **byte == 0).count()
                );
            }
            if block == begun {
                acknowledged[number as usize].store(round + 1, Ordering::Relaxed);
            } else if block != done {
                // Partly the new block: written again, so that its contents are known at the next kill.
                let file = File::options().write(true).open(&path).unwrap();
                file.write_all_at(&done, number * BLOCK as u64).unwrap();
                file.sync_data().unwrap();
            }
        }
    }
    mount.unmount();
}

#[test]
fn acknowledged_data_are_found_again_after_a_kill_over_shared_memory() {
    killed_while_writing("shm", "stripe");
}

#[test]
fn acknowledged_data_are_found_again_after_a_kill_over_tcp() {
    killed_while_writing("tcp", "stripe");
}

#[test]
fn acknowledged_data_in_rows_are_found_again_after_a_kill() {
    killed_while_writing("tcp", "parity:2");
}

#[test]
fn a_second_mount_with_the_same_state_is_refused() {
    let pool = Pool::start(PoolOptions::default());
    let place = Place::new();
    let _mount = place.mount(&pool, &[]);
    let other = tempfile::tempdir().unwrap();
    let mut command = farpool(["mount"]);
    command.arg(other.path()).args(["--broker", &pool.address, "--keep"]).arg(place.keep());
    assert_complaint(&run_command(command), 1, "in use by another farpool mount");
    let about = fs::metadata(place.keep()).unwrap();
    assert_eq!(about.mode() & 0o777, 0o700, "only its user may read the keys in it");
}

#[test]
fn damaged_state_is_refused_and_not_changed() {
    let pool = Pool::start(PoolOptions::default());
    let place = Place::new();
    let mut mount = place.mount(&pool, &[]);
    write_new(&mount.file("data"), &pattern(MIB, 1)).unwrap();
    mount.unmount();
    let log = place.keep().join("log");
    let right = fs::read(&log).unwrap();
    fs::write(&log, &right[..right.len() - 1]).unwrap();
    assert_complaint(&place.refused(&pool), 1, "delete the directory");
    fs::write(&log, "garbage").unwrap();
    assert_complaint(&place.refused(&pool), 1, "delete the directory");
    assert_eq!(fs::read_to_string(&log).unwrap(), "garbage");
    fs::remove_dir_all(place.keep()).unwrap();
    let mut mount = place.mount(&pool, &[]);
    assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 0);
    mount.unmount();
}

#[test]
fn files_whose_leases_have_ended_still_exist_and_reading_them_is_an_error() {
    let pool = Pool::start(PoolOptions::default());
    let place = Place::new();
    let mut mount = place.mount(&pool, &[]);
    write_new(&mount.file("data"), &pattern(MIB, 1)).unwrap();
    File::create(mount.file("empty")).unwrap();
    mount.process.kill();
    eventually("the leases have ended", || pool.regions_free() == pool.regions_total());
    place.wait_until_unmounted(mount);
    let mut mount = place.mount(&pool, &[]);
    assert_eq!(mount.process.await_line("found"), "found  2 files with 1 MiB");
    assert!(mount.process.await_line("lost").starts_with("lost   1 MiB in 1 file: "));
    assert_eq!(fs::metadata(mount.file("data")).unwrap().len(), MIB as u64);
    let error = fs::read(mount.file("data")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    assert_eq!(fs::read(mount.file("empty")).unwrap(), b"");
    fs::remove_file(mount.file("data")).unwrap();
    write_new(&mount.file("data"), &pattern(MIB, 2)).unwrap();
    let mount = place.again(&pool, mount, &[]);
    assert!(fs::read(mount.file("data")).unwrap() == pattern(MIB, 2));
}

#[test]
fn data_on_a_node_that_died_with_the_mount_are_reconstructed_from_their_rows() {
    let mut pool = Pool::start(PoolOptions { nodes: 4, ..PoolOptions::default() });
    let place = Place::new();
    let mut mount = place.mount(&pool, &["--redundancy", "parity:2"]);
    write_new(&mount.file("data"), &pattern(4 * MIB, 1)).unwrap();
    mount.process.kill();
    pool.nodes[0].kill();
    place.wait_until_unmounted(mount);
    let mut mount = place.mount(&pool, &["--redundancy", "parity:2", "--rebuild-rate", "1GiB"]);
    assert!(fs::read(mount.file("data")).unwrap() == pattern(4 * MIB, 1));
    let output = mount.unmount();
    assert!(!output.stdout.contains("lost"), "{}", output.stdout);
}

#[test]
fn keeping_and_accelerating_do_not_go_together() {
    let pool = Pool::start(PoolOptions::default());
    let place = Place::new();
    let output = run_command(place.command(&pool, &["--accelerate"]));
    assert_complaint(&output, 2, "--accelerate");
}

#[test]
fn what_lies_in_the_overflow_directory_is_found_again_and_nothing_stays_there_that_is_not_needed() {
    let pool = Pool::start(PoolOptions { nodes: 1, memory: "16MiB", ..PoolOptions::default() });
    let place = Place::new();
    let overflow = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options = ["--overflow", overflow.path().to_str().unwrap()];
    let folders =
        || fs::read_dir(overflow.path()).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let mount = place.mount(&pool, &options);
    write_new(&mount.file("big"), &pattern(40 * MIB, 1)).unwrap();
    let folder = folders().pop().unwrap();
    let count = || fs::read_dir(&folder).unwrap().count();
    assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    assert!(count() > 2, "regions and what they belong to");

    let mount = place.again(&pool, mount, &options);
    assert!(fs::read(mount.file("big")).unwrap() == pattern(40 * MIB, 1));
    write_new(&mount.file("more"), &pattern(4 * MIB, 2)).unwrap();
    let mut killed = mount;
    killed.process.kill();
    place.wait_until_unmounted(killed);
    assert_complaint(&place.refused(&pool), 1, "--overflow of before");
    let mut mount = place.mount(&pool, &options);
    assert!(fs::read(mount.file("big")).unwrap() == pattern(40 * MIB, 1));
    assert!(fs::read(mount.file("more")).unwrap() == pattern(4 * MIB, 2));

    fs::remove_file(mount.file("big")).unwrap();
    fs::remove_file(mount.file("more")).unwrap();
    eventually("empty regions have gone from the directory", || count() == 1);
    let output = mount.unmount();
    assert!(output.status.success(), "{output:?}");
    drop(mount);
    fs::remove_dir_all(place.keep()).unwrap();
    let next = place.mount(&pool, &options);
    assert_eq!(folders().len(), 1, "the folder of the state that was deleted is gone");
    assert!(!folders().contains(&folder));
    drop(next);
}
