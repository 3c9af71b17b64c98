//! Processes of this machine read and write a file through the cache, are killed and replaced, while the
//! keeper evicts and cleans up. No read may return a page that is older than the last write that ended before
//! it. Three versions of the protocol that break C2 must be noticed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use farpool_cache::{
    Caller, Door, FileId, Index, Keeper, KnownFile, Layout, Outcome, PageSink, Rules, Shape, Shared, Shipped,
    Slots, at_once,
};
use farpool_fabric::{Mapping, SharedMemory};

const PAGE: usize = 8192;
const PROCESSES: u32 = 6;
const PLACES: u32 = PROCESSES + 2;
const BLOCKS: u32 = 768;
const SLOTS: u32 = 600;
/// How long processes run if nothing is wrong.
const RUN_FOR: Duration = Duration::from_secs(4);
/// How long a fault may go unnoticed.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(20);
/// The time between two deaths.
const DEATH_EVERY: Duration = Duration::from_millis(20);

/// Slots in shared memory.
#[derive(Clone)]
struct Pages(Arc<Mapping>);

impl Pages {
    fn place(slot: u32) -> u64 {
        u64::from(slot) * PAGE as u64
    }
}

impl Slots for Pages {
    fn read(&self, slot: u32, sink: &mut PageSink<'_>) -> bool {
        let mut page = vec![0; PAGE];
        self.0.read(Self::place(slot), &mut page).unwrap();
        // Pairs with the release of the slot's writer: what is loaded next is not older than the page.
        fence(Ordering::Acquire);
        sink(0, &page);
        true
    }

    fn write(&self, slot: u32, page: &[u8]) -> bool {
        self.0.write(Self::place(slot), page).unwrap();
        true
    }
}

type Ground = Shared<Pages>;

/// What the processes share besides the cache.
#[derive(Clone)]
struct Ledger(Arc<Mapping>);

/// Each block has three words: the process that may write it (its lock), the last version begun, and the last
/// version written. The sums follow.
const LOCK: u64 = 0;
const BEGUN: u64 = 1;
const WRITTEN: u64 = 2;
const BLOCK_WORDS: u64 = 3;
const READS: u64 = BLOCKS as u64 * BLOCK_WORDS;
const HITS: u64 = READS + 1;
const WRITES: u64 = READS + 2;
const STALE: u64 = READS + 3;
const LEDGER_WORDS: u64 = READS + 4;

impl Ledger {
    fn load(&self, word: u64) -> u64 {
        self.0.load(word * 8).unwrap()
    }

    fn add(&self, word: u64) -> u64 {
        self.0.fetch_and_add(word * 8, 1).unwrap() + 1
    }

    fn of(block: u32, word: u64) -> u64 {
        u64::from(block) * BLOCK_WORDS + word
    }
}

fn page_of(block: u32, version: u64) -> Vec<u8> {
    let word = (u64::from(block) << 48 | version).to_le_bytes();
    word.repeat(PAGE / 8)
}

/// A process: reads and writes until it is killed.
fn work<R: Rules>(ground: impl Fn() -> Ground, ledger: &Ledger, disk: &File) -> ! {
    let holder = u64::from(std::process::id());
    let mut caller = loop {
        match at_once(Caller::<_, R>::join(ground(), PLACES, holder)) {
            Some(caller) => break caller,
            None => std::thread::yield_now(),
        }
    };
    let mut file = KnownFile::new(FileId { device: 1, inode: 2, generation: 3 });
    let mut random = holder.wrapping_mul(0x5851_f42d_4c95_7f2d) | 1;
    let mut page = vec![0; PAGE];
    loop {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let block = (random >> 33) as u32 % BLOCKS;
        let at = u64::from(block) * PAGE as u64;
        if (random >> 20) % 100 < 15 {
            let lock = Ledger::of(block, LOCK) * 8;
            if ledger.0.compare_and_swap(lock, 0, holder).unwrap() != 0 {
                continue;
            }
            let version = ledger.add(Ledger::of(block, BEGUN));
            let new = page_of(block, version);
            let pwrite = async || disk.write_at(&new, at);
            at_once(caller.write(&mut file, (block, 1), Some(&new), pwrite)).unwrap();
            ledger.0.store(Ledger::of(block, WRITTEN) * 8, version).unwrap();
            ledger.0.store(lock, 0).unwrap();
            ledger.add(WRITES);
        } else {
            let least = ledger.load(Ledger::of(block, WRITTEN));
            let pread = async |to: &mut [u8]| disk.read_at(to, at);
            let found = at_once(caller.read(&mut file, block, &mut page, async || true, pread)).unwrap();
            let most = ledger.load(Ledger::of(block, BEGUN));
            let (page, is_hit) = (found.page_or(&page), matches!(found, Outcome::Hit(_)));
            let word = u64::from_le_bytes(page[..8].try_into().unwrap());
            let version = word & ((1 << 48) - 1);
            // The kernel may copy parts of two versions while a page is written; the cache may not.
            let is_whole = page == page_of(block, version) || !is_hit;
            if !is_whole || word >> 48 != u64::from(block) || version < least || version > most {
                ledger.add(STALE);
            }
            ledger.add(READS);
            if is_hit {
                ledger.add(HITS);
            }
        }
    }
}

/// Sums over all processes of a run.
#[derive(Debug)]
struct Counts {
    reads: u64,
    hits: u64,
    writes: u64,
    stale: u64,
}

/// Child processes, by id. Dropping kills them.
struct Children(Vec<i32>);

impl Children {
    fn kill(&mut self, number: usize) -> i32 {
        let pid = self.0.swap_remove(number);
        // SAFETY: the process is a child of this one that nobody has waited for, so the id still names it.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        // SAFETY: the process is a child of this one, and a null pointer asks for no status.
        unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
        pid
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        while !self.0.is_empty() {
            self.kill(0);
        }
    }
}

/// Runs processes for `at_most`, or until one has read an old page.
fn run<R: Rules>(at_most: Duration) -> Counts {
    let dir = tempfile::tempdir_in(Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
    let disk =
        File::options().read(true).write(true).create(true).truncate(true).open(dir.path().join("data"));
    let disk = disk.unwrap();
    (0..BLOCKS)
        .for_each(|block| disk.write_all_at(&page_of(block, 0), u64::from(block) * PAGE as u64).unwrap());
    let shape = Shape { places: PLACES, files: 1, slots: SLOTS };
    let layout = Layout::new(shape);
    let memory = |name, bytes| SharedMemory::create(name, bytes).unwrap().mapping().clone();
    let pages = Pages(memory("litmus-slots", Pages::place(SLOTS)));
    let (door, words) =
        (memory("litmus-door", Layout::door_bytes(PLACES)), memory("litmus-index", layout.index_bytes()));
    let index = move |_, _| Index::new(words.clone(), shape, pages.clone());
    let ground = || -> Ground { Shared::new(door.clone(), PLACES, Box::new(index.clone())).unwrap() };
    let ledger = Ledger(memory("litmus-ledger", LEDGER_WORDS * 8));
    let mut keeper =
        at_once(Keeper::<_, R>::start(ground().with_index(0, index(0, shape).unwrap()), layout, |_| true));
    assert!((0..2).any(|_| at_once(keeper.turn_door(Door::Open))), "two turns open the door");
    let start = || {
        // SAFETY: the child starts no thread, and leaves this closure only by abort. It takes no lock but the
        // allocator's, which glibc makes usable again in the child.
        match unsafe { libc::fork() } {
            0 => {
                let working = || work::<R>(&ground, &ledger, &disk);
                let _panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(working));
                std::process::abort()
            }
            pid => pid,
        }
    };
    let mut children = Children((0..PROCESSES).map(|_| start()).collect());
    let (started, mut last_death) = (Instant::now(), Instant::now());
    while started.elapsed() < at_most && ledger.load(STALE) == 0 {
        if last_death.elapsed() >= DEATH_EVERY {
            last_death = Instant::now();
            let dead = children.kill(ledger.load(READS) as usize % PROCESSES as usize);
            for block in 0..BLOCKS {
                ledger.0.compare_and_swap(Ledger::of(block, LOCK) * 8, dead as u64, 0).unwrap();
            }
            let pid = start();
            children.0.push(pid);
        }
        at_once(keeper.clear_dead(|holder| children.0.contains(&(holder as i32))));
        at_once(keeper.sweep());
        at_once(keeper.maintain_files());
    }
    let sum = |word| ledger.load(word);
    Counts { reads: sum(READS), hits: sum(HITS), writes: sum(WRITES), stale: sum(STALE) }
}

#[test]
fn no_process_reads_an_old_page() {
    let ran = run::<Shipped>(RUN_FOR);
    assert_eq!(ran.stale, 0, "{ran:?}");
    assert!(ran.reads > ran.hits && ran.hits > 10_000 && ran.writes > 10_000, "the cache is in use: {ran:?}");
}

macro_rules! fault {
    ($name:ident, $rules:ident, $($rule:tt)*) => {
        enum $rules {}

        impl Rules for $rules {
            $($rule)*
        }

        #[test]
        fn $name() {
            let ran = run::<$rules>(NOTICE_TIMEOUT);
            assert!(ran.stale > 0, "{ran:?}");
        }
    };
}

fault!(
    admission_without_a_second_look_at_the_header_is_noticed,
    Unchecked,
    fn may_admit(_: u64, _: u64, writers: u64) -> bool {
        writers == 0
    }
);
fault!(
    a_writer_that_does_not_invalidate_is_noticed,
    Uninvalidated,
    fn writers_invalidate() -> bool {
        false
    }
);
fault!(
    admission_beside_a_writer_is_noticed,
    BesideWriters,
    fn may_admit(before: u64, now: u64, _: u64) -> bool {
        before == now
    }
);
