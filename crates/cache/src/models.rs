//! Models of the protocol: `loom` runs its code in every interleaving with at most [`PREEMPTIONS`]
//! preemptions, and with every outdated value that the memory model allows a load to return. Processes read a
//! block, some of them twice, while another one writes it. Then all of them have ended, and it is read again.
//!
//! A model holds if every read after the write returns what was written, no second read returns what is older
//! than the first, and no read returns another block's page. Each fault below breaks the protocol on purpose,
//! and must be caught.

use std::io;
use std::sync::atomic::Ordering;

use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;

use crate::ground::PageSink;
use crate::words::{FileWord, Key};
use crate::{Caller, Door, FileId, Ground, KnownFile, Layout, Outcome, Shape, Shipped, at_once, layout};

/// Switches away from a process that could go on, in one history.
const PREEMPTIONS: usize = 3;
const PLACES: u32 = 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    /// No barrier between what is stored and what is loaded next.
    NoBarrier,
}

struct Machine {
    words: Vec<AtomicU64>,
    slots: Vec<AtomicU64>,
    /// The blocks of the file.
    disk: Vec<AtomicU64>,
    layout: Layout,
    fault: Fault,
}

#[derive(Clone)]
struct Access(Arc<Machine>);

const OLD: u64 = 1;
const NEW: u64 = 2;
const FILE: FileId = FileId { device: 1, inode: 2, generation: 3 };

/// An open cache with one file of three blocks and four free slots. Nothing is cached.
fn machine(fault: Fault) -> Access {
    let layout = Layout::new(Shape { places: PLACES, files: 1, slots: 4 });
    let mut words = vec![0; layout.words()];
    words[layout::DOOR] = Door::Open.next_word(0);
    words[layout.file(0)] = FileWord::open(1).0;
    words[layout.incarnation(0)] = 1;
    (1..).zip(layout.file_id(0)).for_each(|(part, at)| words[at] = part);
    (0..4).for_each(|slot| words[layout.hint(slot)] = u64::from(slot) + 1);
    // Entry 0 keeps the key of block 0: a stale key in an empty entry must do no harm.
    words[layout.key(0)] = Key::new(1, 0).0;
    let words = words.into_iter().map(AtomicU64::new).collect();
    let slots = (0..4).map(|_| AtomicU64::new(0)).collect();
    // A block that is not written holds its number.
    let disk = (0..3).map(|block| AtomicU64::new(if block == 0 { OLD } else { 10 * block })).collect();
    Access(Arc::new(Machine { words, slots, disk, layout, fault }))
}

impl Ground for Access {
    async fn load(&self, at: usize) -> u64 {
        self.0.words[at].load(Ordering::Acquire)
    }

    async fn store(&self, at: usize, value: u64) {
        self.0.words[at].store(value, Ordering::Release);
    }

    async fn replace(&self, at: usize, old: u64, new: u64) -> bool {
        self.0.words[at].compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    async fn add(&self, at: usize, addend: u64) -> u64 {
        self.0.words[at].fetch_add(addend, Ordering::AcqRel)
    }

    async fn layout(&self) -> Option<Layout> {
        Some(self.0.layout)
    }

    async fn barrier(&self) {
        if self.0.fault != Fault::NoBarrier {
            fence(Ordering::SeqCst);
        }
    }

    async fn read_slot(&self, slot: u32, sink: &mut PageSink<'_>) -> bool {
        let found = self.0.slots[slot as usize].load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        sink(0, &found.to_le_bytes());
        true
    }

    async fn write_slot(&self, slot: u32, page: &[u8]) -> bool {
        fence(Ordering::Release);
        let value = u64::from_le_bytes(page.try_into().expect("a page of the model"));
        self.0.slots[slot as usize].store(value, Ordering::Relaxed);
        true
    }
}

enum NoClaim {}

impl crate::Rules for NoClaim {
    fn claims_entries() -> bool {
        false
    }
}

enum NoInvalidation {}

impl crate::Rules for NoInvalidation {
    fn writers_invalidate() -> bool {
        false
    }
}

fn read<R: crate::Rules>(machine: &Access, caller: &mut Caller<Access, R>) -> (u64, Outcome<()>) {
    read_block(machine, caller, 0)
}

fn read_block<R: crate::Rules>(
    machine: &Access,
    caller: &mut Caller<Access, R>,
    block: u32,
) -> (u64, Outcome<()>) {
    let mut page = [0; 8];
    let pread = async |to: &mut [u8]| -> io::Result<usize> {
        to.copy_from_slice(&machine.0.disk[block as usize].load(Ordering::Acquire).to_le_bytes());
        Ok(to.len())
    };
    let found = at_once(caller.read(&mut KnownFile::new(FILE), block, &mut page, async || true, pread))
        .expect("the disk does not fail");
    let page = found.page_or(&page).try_into().expect("a page of the model");
    (u64::from_le_bytes(page), found.without_page())
}

fn write<R: crate::Rules>(machine: &Access, caller: &mut Caller<Access, R>) {
    let pwrite = async || {
        machine.0.disk[0].store(NEW, Ordering::Release);
        Ok(8)
    };
    at_once(caller.write(&mut KnownFile::new(FILE), (0, 1), None, pwrite)).expect("the disk does not fail");
}

/// `reads`: how often each of the reading processes reads.
fn check_reads_after_write<R: crate::Rules + 'static>(fault: Fault, reads: &'static [u32]) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(move || {
        let machine = machine(fault);
        let join = |holder| at_once(Caller::<_, R>::join(machine.clone(), PLACES, holder)).expect("a place");
        let mut writer = join(1);
        let reading: Vec<_> = (2..)
            .zip(reads)
            .map(|(holder, reads)| (join(holder), machine.clone(), *reads))
            .map(|(mut reader, machine, reads)| {
                thread::spawn(move || {
                    let found: Vec<u64> = (0..reads).map(|_| read(&machine, &mut reader).0).collect();
                    assert!(found.is_sorted(), "an old page is found");
                    reader
                })
            })
            .collect();
        write(&machine, &mut writer);
        for reader in reading {
            let mut reader = reader.join().expect("the reader ends");
            assert_eq!(read(&machine, &mut reader).0, NEW, "an old page is found");
        }
        assert_eq!(
            read(&machine, &mut writer),
            (NEW, Outcome::Hit(())),
            "a page that was just read is not found"
        );
    });
}

#[test]
fn no_read_after_a_write_returns_what_was_there_before() {
    check_reads_after_write::<Shipped>(Fault::None, &[2]);
    check_reads_after_write::<Shipped>(Fault::None, &[1, 1]);
}

#[test]
#[should_panic(expected = "an old page is found")]
fn without_barriers_an_old_page_is_found() {
    check_reads_after_write::<Shipped>(Fault::NoBarrier, &[1]);
}

#[test]
#[should_panic(expected = "an old page is found")]
fn without_invalidation_an_old_page_is_found() {
    check_reads_after_write::<NoInvalidation>(Fault::None, &[1]);
}

/// One process admits a block to an entry in which another block was. Another process writes that other
/// block, and then admits a third one to the same entry.
fn check_keys<R: crate::Rules + 'static>() {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(|| {
        let machine = machine(Fault::None);
        let join = |holder| at_once(Caller::<_, R>::join(machine.clone(), PLACES, holder)).expect("a place");
        let (mut one, mut other) = (join(1), join(2));
        let admitting = {
            let machine = machine.clone();
            thread::spawn(move || {
                read_block(&machine, &mut one, 1);
            })
        };
        write(&machine, &mut other);
        read_block(&machine, &mut other, 2);
        admitting.join().expect("the reader ends");
        for block in [1, 2] {
            let (found, _) = read_block(&machine, &mut other, block);
            assert_eq!(found, 10 * u64::from(block), "another block's page is found");
        }
    });
}

#[test]
fn an_entry_has_the_key_of_its_page() {
    check_keys::<Shipped>();
}

#[test]
#[should_panic(expected = "another block's page is found")]
fn without_claims_another_blocks_page_is_found() {
    check_keys::<NoClaim>();
}
