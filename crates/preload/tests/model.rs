//! Descriptors against a model of what each number names: opened, copied, replaced, closed with and without
//! the library's knowledge, read and written by a forked child.
//!
//! The hooks are linked into this test, so libc's names lead to them here; `double` stands in for the mount.

#[path = "../examples/double.rs"]
#[allow(dead_code)]
mod double;

use std::cell::{Cell, RefCell};
use std::fs::OpenOptions;
use std::os::fd::{IntoRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::rc::Rc;

use proptest::prelude::*;
use tempfile::TempDir;

const FILES: usize = 3;
/// Numbers that the sequences use. They are lower than those of guards and of the stand-in's own descriptors.
const FIRST: RawFd = 100;
const NUMBERS: usize = 8;
const FILE_BYTES: usize = 3000;
const OPEN_FILES: u64 = 1024;

#[derive(Clone, Copy, Debug)]
enum Seen {
    ByLibrary,
    Unseen,
}

#[derive(Clone, Debug)]
enum Step {
    Open { file: usize, number: usize, writable: bool },
    Close { number: usize, seen: Seen },
    Copy { from: usize, to: usize, seen: Seen },
    Read { number: usize, at: usize },
    Write { number: usize, at: usize, byte: u8 },
    GiveAway { number: usize },
    ReadInChild { number: usize, at: usize },
}

fn seen() -> impl Strategy<Value = Seen> {
    prop_oneof![3 => Just(Seen::ByLibrary), 1 => Just(Seen::Unseen)]
}

fn step() -> impl Strategy<Value = Step> {
    let (number, at) = (0..NUMBERS, 0..FILE_BYTES);
    prop_oneof![
        3 => (0..FILES, number.clone(), any::<bool>())
            .prop_map(|(file, number, writable)| Step::Open { file, number, writable }),
        2 => (number.clone(), seen()).prop_map(|(number, seen)| Step::Close { number, seen }),
        2 => (number.clone(), number.clone(), seen()).prop_map(|(from, to, seen)| Step::Copy { from, to, seen }),
        6 => (number.clone(), at.clone()).prop_map(|(number, at)| Step::Read { number, at }),
        3 => (number.clone(), at.clone(), any::<u8>())
            .prop_map(|(number, at, byte)| Step::Write { number, at, byte }),
        1 => number.clone().prop_map(|number| Step::GiveAway { number }),
        1 => (number, at).prop_map(|(number, at)| Step::ReadInChild { number, at }),
    ]
}

/// What a number names.
struct Meaning {
    file: usize,
    writable: bool,
}

struct World {
    folder: TempDir,
    contents: [RefCell<Vec<u8>>; FILES],
    numbers: [Option<Rc<Meaning>>; NUMBERS],
    all_was_seen: bool,
}

fn fd(number: usize) -> RawFd {
    FIRST + number as RawFd
}

impl World {
    fn new() -> Self {
        let folder = TempDir::new_in("/dev/shm").unwrap();
        let contents = std::array::from_fn(|file| RefCell::new(vec![file as u8 + 1; FILE_BYTES]));
        for (file, bytes) in contents.iter().enumerate() {
            std::fs::write(folder.path().join(file.to_string()), &*bytes.borrow()).unwrap();
        }
        World { folder, contents, numbers: Default::default(), all_was_seen: true }
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Open { file, number, writable } => self.open(file, number, writable),
            Step::Close { number, seen } => self.close(number, seen),
            Step::Copy { from, to, seen } => self.copy(from, to, seen),
            Step::Read { number, at } => self.read(number, at),
            Step::Write { number, at, byte } => self.write(number, at, byte),
            Step::GiveAway { number } => self.map(number),
            Step::ReadInChild { number, at } => self.read_in_child(number, at),
        }
    }

    fn open(&mut self, file: usize, number: usize, writable: bool) {
        let path = self.folder.path().join(file.to_string());
        let opened = OpenOptions::new().read(true).write(writable).custom_flags(libc::O_CLOEXEC).open(path);
        let low = opened.unwrap().into_raw_fd();
        // SAFETY: numbers from `FIRST` on belong to this test alone.
        unsafe {
            assert_eq!(libc::dup2(low, fd(number)), fd(number));
            libc::close(low);
        }
        self.numbers[number] = Some(Rc::new(Meaning { file, writable }));
    }

    fn close(&mut self, number: usize, seen: Seen) {
        // SAFETY: numbers from `FIRST` on belong to this test alone.
        let answer = unsafe {
            match seen {
                Seen::ByLibrary => libc::close(fd(number)),
                Seen::Unseen => libc::syscall(libc::SYS_close, fd(number)) as i32,
            }
        };
        assert_eq!(answer == 0, self.numbers[number].take().is_some());
        self.all_was_seen &= matches!(seen, Seen::ByLibrary);
    }

    fn copy(&mut self, from: usize, to: usize, seen: Seen) {
        // SAFETY: numbers from `FIRST` on belong to this test alone.
        let answer = unsafe {
            match seen {
                Seen::ByLibrary => libc::dup2(fd(from), fd(to)),
                Seen::Unseen => libc::syscall(libc::SYS_dup2, fd(from), fd(to)) as i32,
            }
        };
        let Some(meaning) = self.numbers[from].clone() else {
            assert_eq!(answer, -1);
            return;
        };
        assert_eq!(answer, fd(to));
        self.numbers[to] = Some(meaning);
        self.all_was_seen &= matches!(seen, Seen::ByLibrary);
    }

    /// What the kernel would read, by the model.
    fn expected(&self, number: usize, at: usize) -> Option<Vec<u8>> {
        let meaning = self.numbers[number].as_ref()?;
        let contents = self.contents[meaning.file].borrow();
        Some(contents[at..(at + 100).min(FILE_BYTES)].to_vec())
    }

    fn read(&self, number: usize, at: usize) {
        assert_eq!(read(fd(number), at), self.expected(number, at), "number {number}");
    }

    fn write(&self, number: usize, at: usize, byte: u8) {
        let bytes = [byte; 100];
        let end = (at + bytes.len()).min(FILE_BYTES);
        // SAFETY: the buffer has the length that is passed, and lives until the call returns.
        let moved = unsafe { libc::pwrite(fd(number), bytes.as_ptr().cast(), end - at, at as i64) };
        match &self.numbers[number] {
            Some(meaning) if meaning.writable => {
                assert_eq!(moved, (end - at) as isize);
                self.contents[meaning.file].borrow_mut()[at..end].fill(byte);
            }
            _ => assert_eq!(moved, -1),
        }
    }

    fn map(&self, number: usize) {
        // SAFETY: a new mapping at an address of the kernel's choice, which is unmapped again and never read.
        unsafe {
            let nowhere = std::ptr::null_mut();
            let at = libc::mmap(nowhere, 1, libc::PROT_READ, libc::MAP_SHARED, fd(number), 0);
            assert_eq!(at != libc::MAP_FAILED, self.numbers[number].is_some());
            if at != libc::MAP_FAILED {
                libc::munmap(at, 1);
            }
        }
    }

    /// Reads all numbers in the child of a fork, and in its child, where some of them are closed and
    /// replaced.
    fn read_in_child(&self, number: usize, at: usize) {
        in_child(|| {
            let fine = (0..NUMBERS).all(|number| read(fd(number), at) == self.expected(number, at));
            // SAFETY: numbers from `FIRST` on belong to this test alone, and the parent has descriptors of
            // its own.
            unsafe { libc::dup2(fd(number), fd(0)) };
            let expected = self.expected(if self.numbers[number].is_some() { number } else { 0 }, at);
            in_child(|| read(fd(0), at) == expected);
            fine && read(fd(0), at) == expected
        });
    }

    /// Closes everything; returns how many guards are left.
    fn end(mut self) -> usize {
        for number in 0..NUMBERS {
            self.close(number, Seen::ByLibrary);
        }
        // Without this, the stand-in has no free descriptor after `OPEN_FILES - OWN_DESCRIPTORS_FROM` files,
        // and serves nothing more.
        double::forget_files();
        guards()
    }
}

fn read(fd: RawFd, at: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 100];
    // SAFETY: the buffer has the length that is passed, and lives until the call returns.
    let moved = unsafe { libc::pread(fd, bytes.as_mut_ptr().cast(), bytes.len(), at as i64) };
    bytes.truncate(usize::try_from(moved).ok()?);
    Some(bytes)
}

fn in_child(claim: impl FnOnce() -> bool) {
    // SAFETY: the child reads files, compares, and exits by `_exit`; only this test runs in this process.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let fine = claim();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child made above; `status` lives until the call returns.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the child read other bytes than expected");
}

/// How many descriptors are open between half the limit, where guards begin, and the first of the stand-in's
/// own.
fn guards() -> usize {
    // SAFETY: takes numbers only.
    let is_open = |fd: &RawFd| unsafe { libc::syscall(libc::SYS_fcntl, *fd, libc::F_GETFD) >= 0 };
    (OPEN_FILES as RawFd / 2..double::OWN_DESCRIPTORS_FROM).filter(is_open).count()
}

fn limit_descriptors() {
    let limit = libc::rlimit { rlim_cur: OPEN_FILES, rlim_max: OPEN_FILES };
    // SAFETY: the buffer is one `rlimit`, and lives until the call returns.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

#[test]
fn every_number_reads_and_writes_the_file_that_it_means_however_it_came_to_mean_it() {
    limit_descriptors();
    // The library's hook hides panics, which a test must not.
    drop(std::panic::take_hook());
    let config = ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() };
    let guards_left = Cell::new(0);
    proptest!(config, |(steps in prop::collection::vec(step(), 1..60), open_at in 1..4_u32)| {
        double::farpool_double_open_at(open_at);
        let mut world = World::new();
        for step in &steps {
            world.run(step);
        }
        let all_was_seen = world.all_was_seen;
        let guards = world.end();
        prop_assert!(!all_was_seen || guards <= guards_left.get(), "{guards} guards");
        prop_assert!(guards <= guards_left.get() + NUMBERS);
        guards_left.set(guards);
    });
    let served = double::farpool_double_served();
    assert!(served > 300, "{served} served");
}
