//! Random operations on one file through all interfaces at once, against a vector of bytes.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use proptest::prelude::*;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::MapFlags;

use crate::support::Scratch;
use crate::support::mapped::Mapped;

/// Several stripes, and not a multiple of any unit.
const MOST_BYTES: usize = 1_300_000;
const PAGE: usize = 4096;

#[derive(Clone, Debug)]
enum Step {
    Write(Range<usize>, u8),
    Append(usize, u8),
    WriteDirect(Range<usize>, u8),
    WriteMapped(Range<usize>, u8),
    Truncate(usize),
    Punch(Range<usize>),
    Zero(Range<usize>),
    Allocate(Range<usize>),
    Read(Range<usize>),
    ReadDirect(Range<usize>),
}

fn range() -> impl Strategy<Value = Range<usize>> {
    let length = prop_oneof![3 => 1..20_000usize, 1 => 1..400_000usize];
    (0..MOST_BYTES - 400_000, length).prop_map(|(start, length)| start..start + length)
}

fn pages() -> impl Strategy<Value = Range<usize>> {
    range().prop_map(|range| range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE))
}

fn step() -> impl Strategy<Value = Step> {
    let fill = 1..=255u8;
    prop_oneof![
        3 => (range(), fill.clone()).prop_map(|(range, fill)| Step::Write(range, fill)),
        1 => (1..50_000usize, fill.clone()).prop_map(|(length, fill)| Step::Append(length, fill)),
        2 => (pages(), fill.clone()).prop_map(|(range, fill)| Step::WriteDirect(range, fill)),
        2 => (range(), fill).prop_map(|(range, fill)| Step::WriteMapped(range, fill)),
        1 => (0..MOST_BYTES).prop_map(Step::Truncate),
        1 => range().prop_map(Step::Punch),
        1 => range().prop_map(Step::Zero),
        1 => range().prop_map(Step::Allocate),
        2 => range().prop_map(Step::Read),
        2 => pages().prop_map(Step::ReadDirect),
    ]
}

struct Doors {
    plain: File,
    direct: File,
    append: File,
    expected: Vec<u8>,
}

impl Doors {
    fn store(&mut self, range: Range<usize>, fill: u8) {
        self.grow(range.end);
        self.expected[range].fill(fill);
    }

    fn grow(&mut self, length: usize) {
        self.expected.resize(self.expected.len().max(length), 0);
    }

    /// The part of a range that lies in the file.
    fn within(&self, range: &Range<usize>) -> Range<usize> {
        let end = self.expected.len();
        range.start.min(end)..range.end.min(end)
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Write(range, fill) => {
                self.plain.write_all_at(&vec![fill; range.len()], range.start as u64).unwrap();
                self.store(range, fill);
            }
            Step::Append(length, fill) => {
                if self.expected.len() + length <= MOST_BYTES {
                    std::io::Write::write_all(&mut self.append, &vec![fill; length]).unwrap();
                    self.store(self.expected.len()..self.expected.len() + length, fill);
                }
            }
            Step::WriteDirect(range, fill) => {
                let mut room = vec![fill; range.len() + PAGE];
                let data = aligned(&mut room, range.len());
                self.direct.write_all_at(data, range.start as u64).unwrap();
                self.store(range, fill);
            }
            Step::WriteMapped(range, fill) => {
                let range = self.within(&range);
                if !range.is_empty() {
                    let mapped = Mapped::new(&self.plain, self.expected.len(), MapFlags::SHARED);
                    mapped.write(range.start, &vec![fill; range.len()]);
                    self.store(range, fill);
                }
            }
            Step::Truncate(length) => {
                self.plain.set_len(length as u64).unwrap();
                self.expected.resize(length, 0);
            }
            Step::Punch(range) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&self.plain, flags, range.start as u64, range.len() as u64).unwrap();
                let range = self.within(&range);
                self.expected[range].fill(0);
            }
            Step::Zero(range) => {
                fallocate(&self.plain, FallocateFlags::ZERO_RANGE, range.start as u64, range.len() as u64)
                    .unwrap();
                self.store(range, 0);
            }
            Step::Allocate(range) => {
                let flags = FallocateFlags::empty();
                fallocate(&self.plain, flags, range.start as u64, range.len() as u64).unwrap();
                self.grow(range.end);
            }
            Step::Read(range) => self.compare(&self.plain, range, 0),
            Step::ReadDirect(range) => self.compare(&self.direct, range, PAGE),
        }
        assert_eq!(self.plain.metadata().unwrap().len(), self.expected.len() as u64);
    }

    fn compare(&self, file: &File, range: Range<usize>, slack: usize) {
        let mut room = vec![1; range.len() + slack];
        let back = if slack > 0 { aligned(&mut room, range.len()) } else { &mut room };
        let within = self.within(&range);
        let mut got = 0;
        while got < within.len() {
            match file.read_at(&mut back[got..], (range.start + got) as u64).unwrap() {
                0 => break,
                more => got += more,
            }
        }
        assert_eq!(got, within.len());
        assert!(back[..got] == self.expected[within]);
    }
}

fn aligned(buffer: &mut [u8], length: usize) -> &mut [u8] {
    let skip = buffer.as_ptr().align_offset(PAGE);
    &mut buffer[skip..skip + length]
}

#[test]
fn random_operations_through_all_interfaces_agree_with_a_vector() {
    let dir = Scratch::new();
    let config = ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(steps in prop::collection::vec(step(), 1..60))| {
        let path = dir.join("file");
        let mut options = File::options();
        let plain = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        let direct = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
        let append = File::options().append(true).open(&path).unwrap();
        let mut doors = Doors { plain, direct, append, expected: Vec::new() };
        for step in steps {
            doors.take(step);
        }
        let everything = 0..doors.expected.len();
        doors.compare(&doors.plain, everything, 0);
    });
}
