//! Direct clients (called *guests* in the code): processes that work on files of a mount without the kernel,
//! beside processes that use the kernel.

mod support;

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use farpool_file::guest::{Given, GuestFile, GuestSession, Host, Room};
use farpool_wire::{REGISTER, Registered, UNREGISTER};
use support::{TestMount, eventually};

const MIB: u64 = 1 << 20;
const BLOCK: usize = 8192;
/// Set for a process that a test has started: the file to which it writes directly.
const WRITE_AT: &str = "FARPOOL_TEST_WRITE_AT";

/// A file that is open, registered and worked on directly.
struct Direct {
    file: File,
    _host: Arc<Host>,
    session: GuestSession,
    guest: GuestFile,
}

fn control(fd: RawFd, command: u32, answer: *mut u8) -> std::io::Result<()> {
    // SAFETY: the kernel writes at most as many bytes to `answer` as `command` encodes; each caller passes a
    // buffer of that size, or a command that writes nothing.
    let done = unsafe { libc::ioctl(fd, command.into(), answer) };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn register(file: &File) -> std::io::Result<Registered> {
    // SAFETY: a call that takes only numbers.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_DIRECT) }, 0);
    let mut answer = [0; Registered::BYTES];
    control(file.as_raw_fd(), REGISTER, answer.as_mut_ptr())?;
    Ok(Registered::decode(&answer).expect("an answer of this daemon"))
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

impl Direct {
    fn open(path: &Path) -> Self {
        let file = open(path);
        let registered = register(&file).unwrap();
        let host = Host::join(&registered.socket).unwrap();
        let (session, guest) = (host.session().unwrap(), host.open(&registered.ticket).unwrap());
        Direct { file, _host: host, session, guest }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<usize> {
        self.guest.write_at(&self.session, offset, &[data.into()])
    }

    fn read(&self, offset: u64, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0xEE; length];
        let read = self.guest.read_at(&self.session, offset, &[bytes[..].as_mut().into()])?;
        bytes.truncate(read);
        Some(bytes)
    }

    /// Waits until the file is open to direct clients: the daemon opens it soon after its last handle was
    /// registered.
    fn until_open(&self) {
        eventually("the file is open to guests", || self.read(0, 1).is_some());
    }
}

#[test]
fn what_is_written_directly_and_through_the_kernel_is_one_file() {
    let mount = TestMount::with_guests(64 * MIB);
    let path = mount.path().join("shared");
    let direct = Direct::open(&path);
    direct.until_open();
    assert_eq!(direct.write(0, &[1; BLOCK]), None, "only the daemon can take extents");
    direct.file.write_all_at(&[1; BLOCK], 0).unwrap();
    assert_eq!(direct.write(100, &[2; 3 * BLOCK]), Some(3 * BLOCK), "the file grows");
    assert_eq!(direct.file.metadata().unwrap().len(), 100 + 3 * BLOCK as u64);
    let mut through_the_kernel = vec![0; 4 * BLOCK];
    let read = direct.file.read_at(&mut through_the_kernel, 0).unwrap();
    assert_eq!(through_the_kernel[..read], direct.read(0, 4 * BLOCK).unwrap());
    assert_eq!((read, through_the_kernel[99], through_the_kernel[100]), (100 + 3 * BLOCK, 1, 2));
    direct.file.write_all_at(&[3; 10], 5).unwrap();
    assert_eq!(direct.read(4, 12).unwrap(), [1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 1]);
    direct.file.set_len(50).unwrap();
    assert_eq!(direct.read(0, BLOCK).unwrap().len(), 50);
}

/// A call that makes the kernel use the size that it knows, for a file with a single handle; returns the
/// size.
type Question = (&'static str, fn(&Direct, &Path) -> u64);

/// Where the growth of the file begins and ends, in the middle of a page.
const START: u64 = 3 * BLOCK as u64;
const END: u64 = START + 2 * BLOCK as u64 + 100;

const QUESTIONS: [Question; 8] = [
    ("seek", |direct, _| (&direct.file).seek(SeekFrom::End(0)).unwrap()),
    ("read", |direct, _| {
        let mut bytes = vec![0; 2 * BLOCK];
        START + direct.file.read_at(&mut bytes, START).unwrap() as u64 + 100
    }),
    ("read at the end", |direct, _| {
        END - 100 + direct.file.read_at(&mut [0; BLOCK], END - 100).unwrap() as u64
    }),
    ("stat", |_, path| path.metadata().unwrap().len()),
    ("fstat of a child's copy", |direct, _| direct.file.try_clone().unwrap().metadata().unwrap().len()),
    ("map", |direct, _| {
        control(direct.file.as_raw_fd(), UNREGISTER, std::ptr::null_mut()).unwrap();
        let mapped = support::mapped::Mapped::new(&direct.file, END as usize, rustix::mm::MapFlags::SHARED);
        assert_eq!(mapped.read(END as usize - 1, 1), [7]); // otherwise SIGBUS
        END
    }),
    ("another opening's map", |_, path| {
        let other = open(path);
        let mapped = support::mapped::Mapped::new(&other, END as usize, rustix::mm::MapFlags::SHARED);
        assert_eq!(mapped.read(END as usize - 1, 1), [7]);
        END
    }),
    ("appended to", |_, path| {
        let mut other = OpenOptions::new().append(true).open(path).unwrap();
        other.write_all(&[8; 100]).unwrap();
        let mut bytes = vec![0; 200];
        open(path).read_exact_at(&mut bytes, END - 100).unwrap();
        assert_eq!((bytes[99], bytes[100]), (7, 8));
        path.metadata().unwrap().len() - 100
    }),
];

#[test]
fn a_file_that_one_process_makes_longer_has_that_size_for_every_caller() {
    let mount = TestMount::with_guests(64 * MIB);
    for (name, ask) in QUESTIONS {
        let path = mount.path().join(name.replace(' ', "-"));
        let direct = Direct::open(&path);
        direct.file.write_all_at(&[1; START as usize], 0).unwrap();
        direct.until_open();
        for (at, bytes) in [(START, BLOCK), (START + BLOCK as u64, BLOCK + 100)] {
            assert_eq!(
                direct.write(at, &vec![7; bytes]),
                Some(bytes),
                "{name}: the file grows without the kernel"
            );
        }
        assert_eq!(ask(&direct, &path), END, "{name}");
        assert_eq!(path.metadata().unwrap().len() / 1000, END / 1000, "{name}");
    }
}

#[test]
fn after_the_kernel_has_used_its_size_the_file_grows_by_the_kernel() {
    let mount = TestMount::with_guests(64 * MIB);
    let path = mount.path().join("asked");
    let direct = Direct::open(&path);
    direct.file.write_all_at(&[1; BLOCK], 0).unwrap();
    direct.until_open();
    assert_eq!(path.metadata().unwrap().len(), BLOCK as u64);
    assert_eq!(
        direct.write(BLOCK as u64, &[2; BLOCK]),
        Some(BLOCK),
        "reading its attributes changes nothing"
    );
    assert_eq!((&direct.file).seek(SeekFrom::End(0)).unwrap(), 2 * BLOCK as u64);
    assert_eq!(direct.write(2 * BLOCK as u64, &[3; BLOCK]), None);
    assert_eq!(direct.write(BLOCK as u64, &[3; BLOCK]), Some(BLOCK), "overwriting is still done directly");
    drop(direct);
    let direct = Direct::open(&path);
    direct.until_open();
    assert_eq!(
        direct.write(2 * BLOCK as u64, &[4; BLOCK]),
        None,
        "the file does not grow directly when it is opened again, either"
    );
}

#[test]
fn files_with_several_openings_grow_by_the_kernel() {
    let mount = TestMount::with_guests(64 * MIB);
    let path = mount.path().join("several");
    let one = Direct::open(&path);
    one.file.write_all_at(&[1; BLOCK], 0).unwrap();
    one.until_open();
    assert_eq!(one.write(BLOCK as u64, &[2; 100]), Some(100));
    let other = Direct::open(&path);
    assert_eq!(
        (&other.file).seek(SeekFrom::End(0)).unwrap(),
        BLOCK as u64 + 100,
        "the kernel has learnt the size before `open` returns"
    );
    other.until_open();
    for direct in [&one, &other] {
        assert_eq!(direct.write(2 * BLOCK as u64, &[3; BLOCK]), None);
        assert_eq!(direct.write(0, &[3; BLOCK]), Some(BLOCK));
    }
}

#[test]
fn a_file_that_a_process_made_longer_before_its_end_has_that_size_when_it_is_opened_again() {
    let mount = TestMount::with_guests(64 * MIB);
    let path = mount.path().join("left");
    let direct = Direct::open(&path);
    direct.file.write_all_at(&[1; BLOCK], 0).unwrap();
    direct.until_open();
    assert_eq!(direct.write(BLOCK as u64, &[7; 5000]), Some(5000));
    drop(direct); // no call has made the kernel use its size
    let mut other = OpenOptions::new().append(true).read(true).open(&path).unwrap();
    other.write_all(&[8; 10]).unwrap();
    let mut bytes = [0; 20];
    other.read_exact_at(&mut bytes, BLOCK as u64 + 4990).unwrap();
    assert_eq!((bytes[9], bytes[10]), (7, 8));
}

#[test]
fn several_pieces_of_memory_are_read_and_written_in_order() {
    let mount = TestMount::with_guests(64 * MIB);
    let direct = Direct::open(&mount.path().join("pieces"));
    direct.file.write_all_at(&[0; 2 * BLOCK], 0).unwrap();
    direct.until_open();
    let pieces = [&b"one"[..], b"", b"two"].map(Given::from);
    assert_eq!(direct.guest.write_at(&direct.session, 8190, &pieces), Some(6));
    let (mut first, mut second) = ([0; 4], [0; 20_000]);
    let to = [first.as_mut_slice(), &mut second].map(Room::from);
    assert_eq!(direct.guest.read_at(&direct.session, 8190, &to), Some(2 * BLOCK - 8190));
    assert_eq!((&first, &second[..3]), (b"onet", &b"wo\0"[..]));
}

#[test]
fn an_opening_that_is_not_registered_ends_the_work_on_a_file_until_it_is_closed() {
    let mount = TestMount::with_guests(64 * MIB);
    let path = mount.path().join("revoked");
    let direct = Direct::open(&path);
    direct.file.write_all_at(&[1; BLOCK], 0).unwrap();
    direct.until_open();
    assert_eq!(direct.write(0, &[2; BLOCK]), Some(BLOCK));
    let plain = open(&path);
    assert_eq!((direct.read(0, 1), direct.write(0, &[3; BLOCK])), (None, None));
    let mut seen = [0; BLOCK];
    plain.read_exact_at(&mut seen, 0).unwrap();
    assert_eq!(seen, [2; BLOCK]);
    plain.write_all_at(&[4; BLOCK], 0).unwrap();
    drop(plain);
    direct.until_open();
    assert_eq!(direct.read(0, BLOCK).unwrap(), [4; BLOCK]);
    control(direct.file.as_raw_fd(), UNREGISTER, std::ptr::null_mut()).unwrap();
    assert_eq!(direct.read(0, 1), None);
    let again = register(&direct.file).unwrap_err();
    assert_eq!(again.raw_os_error(), Some(libc::EPERM), "for good");
}

/// An `open` waits for the operation of a direct client, which needs regions and connections from the thread
/// that redeems tickets.
#[test]
fn tickets_redeemed_during_an_open_cause_no_delay() {
    let mount = TestMount::with_guests(64 * MIB);
    let path = mount.path().join("redeemed");
    let kept = Direct::open(&path);
    kept.file.write_all_at(&vec![1; 8 * MIB as usize], 0).unwrap(); // on several regions
    let redeemer = Host::join(&register(&kept.file).unwrap().socket).unwrap();
    fn timed(work: impl FnOnce()) {
        let start = Instant::now();
        work();
        assert!(start.elapsed() < Duration::from_secs(1), "took {:?}", start.elapsed());
    }
    for _ in 0..100 {
        kept.until_open();
        let tickets: [_; 32] = std::array::from_fn(|_| register(&kept.file).unwrap().ticket);
        // This host knows no region and has no connection yet.
        let host = Host::join(&register(&kept.file).unwrap().socket).unwrap();
        let guest = host.open(&register(&kept.file).unwrap().ticket).unwrap();
        let start = Barrier::new(3);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let session = host.session().unwrap();
                let mut bytes = vec![0; BLOCK];
                start.wait();
                for at in 0..8 {
                    timed(|| {
                        let _unless_closed =
                            guest.read_at(&session, at * MIB, &[bytes.as_mut_slice().into()]);
                    });
                }
            });
            threads.spawn(|| {
                start.wait();
                for ticket in &tickets {
                    timed(|| drop(redeemer.open(ticket).unwrap()));
                }
            });
            start.wait();
            timed(|| drop(open(&path)));
        });
    }
}

#[test]
fn a_mapping_made_after_the_work_on_a_file_shows_what_was_written_directly() {
    let mount = TestMount::with_guests(64 * MIB);
    let path = mount.path().join("mapped");
    let direct = Direct::open(&path);
    direct.file.write_all_at(&[1; 4 * BLOCK], 0).unwrap();
    direct.until_open();
    assert_eq!(direct.write(BLOCK as u64, &[7; BLOCK]), Some(BLOCK));
    control(direct.file.as_raw_fd(), UNREGISTER, std::ptr::null_mut()).unwrap();
    let mapped = support::mapped::Mapped::new(&direct.file, 4 * BLOCK, rustix::mm::MapFlags::SHARED);
    assert_eq!(mapped.read(BLOCK - 1, 2), [1, 7]);
}

#[test]
fn times_change_with_direct_writes() {
    let mount = TestMount::with_guests(64 * MIB);
    let direct = Direct::open(&mount.path().join("times"));
    direct.file.write_all_at(&[1; BLOCK], 0).unwrap();
    direct.until_open();
    let before = direct.file.metadata().unwrap();
    eventually("the file's time has changed", || {
        assert_eq!(direct.write(0, &[2; BLOCK]), Some(BLOCK));
        let after = direct.file.metadata().unwrap();
        (after.mtime(), after.mtime_nsec()) > (before.mtime(), before.mtime_nsec())
    });
}

#[test]
fn mounts_without_acceleration_admit_no_process() {
    let mount = TestMount::start(64 * MIB);
    let file = open(&mount.path().join("plain"));
    assert_eq!(register(&file).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
}

/// Not a test of its own: writes the same blocks directly, again and again, until the process is killed.
#[test]
fn write_when_another_test_asks() {
    let Some(path) = std::env::var_os(WRITE_AT) else { return };
    let direct = Direct::open(Path::new(&path));
    direct.until_open();
    println!("\nwriting");
    for round in 0u64.. {
        let data = vec![1 + (round % 200) as u8; 8 * BLOCK];
        let _until_revoked = direct.write((round % 4) * 8 * BLOCK as u64, &data);
    }
}

fn start_writer(path: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["write_when_another_test_asks", "--exact", "--nocapture"]).env(WRITE_AT, path);
    let mut writer = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(writer.stdout.take().unwrap()));
    assert!(lines.any(|line| line.unwrap() == "writing"));
    writer
}

#[test]
fn writers_that_are_killed_leave_whole_files_that_others_read_and_write() {
    let mount = TestMount::with_guests(64 * MIB);
    let path = mount.path().join("killed");
    open(&path).write_all_at(&[1; 32 * BLOCK], 0).unwrap();
    for round in 0..20 {
        let mut writer = start_writer(&path);
        std::thread::sleep(Duration::from_millis(round)); // at any point of its work
        writer.kill().unwrap();
        writer.wait().unwrap();
        let plain = open(&path);
        let mut bytes = vec![0; 32 * BLOCK];
        plain.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|&byte| byte != 0), "round {round}: a block that was never written");
        plain.write_all_at(&bytes, 0).unwrap();
    }
}

#[test]
fn guests_of_a_daemon_that_is_killed_ask_the_kernel_at_once() {
    let mut mount = TestMount::with_guests(64 * MIB);
    let direct = Direct::open(&mount.path().join("orphan"));
    direct.file.write_all_at(&[1; BLOCK], 0).unwrap();
    direct.until_open();
    mount.kill();
    eventually("the guest has noticed", || direct.read(0, 1).is_none());
    let errno = direct.file.read_at(&mut [0; 1], 0).unwrap_err().raw_os_error();
    assert!(matches!(errno, Some(libc::ENOTCONN | libc::EIO | libc::ECONNABORTED)), "{errno:?}");
}

#[test]
fn a_write_that_fails_cuts_off_nothing_that_was_acknowledged() {
    let mount = TestMount::with_guests(8 * MIB);
    let path = mount.path().join("full");
    let direct = Direct::open(&path);
    direct.until_open();
    let mut written = 0;
    let failure = loop {
        let data = vec![1 + (written / BLOCK as u64 % 200) as u8; BLOCK];
        if direct.write(written, &data).is_none()
            && let Err(error) = direct.file.write_all_at(&data, written)
        {
            break error;
        }
        written += BLOCK as u64;
    };
    assert_eq!(failure.raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(direct.file.metadata().unwrap().len(), written);
    direct.file.set_len(written - 1).unwrap();
    assert_eq!(
        direct.file.metadata().unwrap().len(),
        written - 1,
        "a truncation that a program asks for is done"
    );
}
