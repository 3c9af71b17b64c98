//! The memory of the machine, slots in far memory, and the disk.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use farpool_cache::{Fetch, Ground, Layout, PageSink};
use farpool_fabric::sim::{Random, World};

use super::{Block, FileNumber};

/// Bytes of a page.
pub(super) const PAGE: usize = 8;
/// The share of accesses between which other processes run, and of those that take time, in thousandths. In
/// some worlds memory is as slow as the disk, so that many processes are half-way through their accesses.
const YIELD_PERMILLE: u32 = 500;
const SLOW_PERMILLE: [u32; 3] = [20, 60, 400];
const SLOW_NS: u64 = 3_000;
const DISK_NS: u64 = 8_000;
/// The share of accesses to the disk that take far longer, in thousandths, and how long.
const LONG_PERMILLE: [u32; 3] = [0, 0, 50];
const LONG_NS: u64 = 200_000;
/// How long a tick of the file system's clock is.
const TICK_NS: u64 = 100_000;
/// The share of writes to slots that are given up, in thousandths, and how much later they may take effect.
const GIVEN_UP_PERMILLE: [u32; 2] = [0, 50];
const LATE_NS: u64 = 40_000;
/// The share of calls that cannot use the index, in thousandths.
const NO_INDEX_PERMILLE: [u32; 3] = [0, 3, 30];

/// Words and slots.
pub(super) struct Memory {
    world: World,
    random: RefCell<Random>,
    slow_permille: u32,
    words: RefCell<Vec<u64>>,
    slots: RefCell<Vec<[u8; PAGE]>>,
    /// Writes that were given up, or whose process has died, and when they take effect.
    late: RefCell<Vec<LateWrite>>,
    layout: Layout,
    /// How likely a process is to find that it cannot use the index, in thousandths.
    no_index_permille: Cell<u32>,
    /// How likely a write is to be given up, in thousandths.
    given_up_permille: Cell<u32>,
    /// Of each slot, whether it has memory.
    has_memory: RefCell<Vec<bool>>,
}

struct LateWrite {
    slot: u32,
    page: [u8; PAGE],
    at_ns: u64,
}

/// A write that has begun. If it is dropped, it takes effect later.
struct Landing<'a> {
    memory: &'a Memory,
    slot: u32,
    page: [u8; PAGE],
    has_landed: bool,
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        if !self.has_landed {
            let at_ns = self.memory.world.now_ns() + self.memory.random.borrow_mut().below(LATE_NS);
            self.memory.late.borrow_mut().push(LateWrite { slot: self.slot, page: self.page, at_ns });
        }
    }
}

/// The memory as a process sees it.
#[derive(Clone)]
pub(super) struct Access {
    memory: Rc<Memory>,
    /// What this process has fetched and not read yet.
    fetched: Rc<RefCell<BTreeMap<Fetch, [u8; PAGE]>>>,
}

impl Access {
    /// With nothing fetched.
    pub(super) fn new(memory: Rc<Memory>) -> Access {
        Access { memory, fetched: Rc::default() }
    }
}

impl Memory {
    pub(super) fn new(world: &World, layout: &Layout, mut random: Random) -> Memory {
        let slow_permille = SLOW_PERMILLE[random.index(SLOW_PERMILLE.len())];
        let given_up_permille = GIVEN_UP_PERMILLE[random.index(GIVEN_UP_PERMILLE.len())];
        let no_index_permille = NO_INDEX_PERMILLE[random.index(NO_INDEX_PERMILLE.len())];
        let slots = vec![[0; PAGE]; layout.shape().slots as usize];
        let has_memory = RefCell::new(vec![true; slots.len()]);
        let words = RefCell::new(vec![0; layout.words()]);
        Memory {
            world: world.clone(),
            random: random.into(),
            slow_permille,
            words,
            slots: slots.into(),
            late: RefCell::default(),
            layout: *layout,
            no_index_permille: Cell::new(no_index_permille),
            given_up_permille: Cell::new(given_up_permille),
            has_memory,
        }
    }

    /// The memory of another server, which has the same slots and a new index. Late writes go to it, too.
    pub(super) fn successor(&self) -> Memory {
        Memory {
            world: self.world.clone(),
            random: self.random.borrow().clone().into(),
            slow_permille: self.slow_permille,
            words: vec![0; self.layout.words()].into(),
            slots: self.slots.clone(),
            late: self.late.take().into(),
            layout: self.layout,
            no_index_permille: self.no_index_permille.clone(),
            given_up_permille: self.given_up_permille.clone(),
            has_memory: self.has_memory.clone(),
        }
    }

    /// Gives a slot memory, or takes it away.
    pub(super) fn set_memory(&self, slot: u32, has_memory: bool) {
        self.has_memory.borrow_mut()[slot as usize] = has_memory;
        self.break_slot(slot);
    }

    pub(super) fn has_memory(&self, slot: u32) -> bool {
        self.has_memory.borrow()[slot as usize]
    }

    /// Puts garbage into a slot.
    pub(super) fn break_slot(&self, slot: u32) {
        let garbage = self.random.borrow_mut().below(u64::MAX);
        self.slots.borrow_mut()[slot as usize] = garbage.to_le_bytes();
    }

    /// From now on no write is given up, none takes effect late, and every process can use the index.
    pub(super) fn calm(&self) {
        self.no_index_permille.set(0);
        self.given_up_permille.set(0);
        self.late.borrow_mut().clear();
    }

    fn land_late_writes(&self) {
        let now_ns = self.world.now_ns();
        let due: Vec<LateWrite> =
            self.late.borrow_mut().extract_if(.., |write| write.at_ns <= now_ns).collect();
        for LateWrite { slot, page, .. } in due {
            self.world
                .note("a late write to slot {} takes effect: {}", &[slot.into(), u64::from_le_bytes(page)]);
            self.slots.borrow_mut()[slot as usize] = page;
        }
    }

    /// Lets other processes run, perhaps.
    async fn step(&self) {
        let (yields, slow_ns) = {
            let mut random = self.random.borrow_mut();
            let slow = random.chance(self.slow_permille).then(|| random.below(SLOW_NS));
            (random.chance(YIELD_PERMILLE), slow)
        };
        if let Some(ns) = slow_ns {
            self.world.sleep(Duration::from_nanos(ns)).await;
        } else if yields {
            let yielded = Cell::new(false);
            poll_fn(|context| {
                if yielded.replace(true) {
                    return Poll::Ready(());
                }
                context.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
        }
    }
}

impl Ground for Access {
    async fn load(&self, at: usize) -> u64 {
        self.memory.step().await;
        self.memory.words.borrow()[at]
    }

    async fn store(&self, at: usize, value: u64) {
        self.memory.step().await;
        self.memory.words.borrow_mut()[at] = value;
    }

    async fn replace(&self, at: usize, old: u64, new: u64) -> bool {
        self.memory.step().await;
        let word = &mut self.memory.words.borrow_mut()[at];
        let is_old = *word == old;
        if is_old {
            *word = new;
        }
        is_old
    }

    async fn add(&self, at: usize, addend: u64) -> u64 {
        self.memory.step().await;
        let word = &mut self.memory.words.borrow_mut()[at];
        std::mem::replace(word, word.wrapping_add(addend))
    }

    async fn layout(&self) -> Option<Layout> {
        self.memory.step().await;
        let has_none = self.memory.random.borrow_mut().chance(self.memory.no_index_permille.get());
        (!has_none).then_some(self.memory.layout)
    }

    /// Nothing to do: this memory is sequentially consistent. Weaker orders are the subject of the models.
    async fn barrier(&self) {}

    async fn read_slot(&self, slot: u32, sink: &mut PageSink<'_>) -> bool {
        self.memory.step().await;
        self.memory.land_late_writes();
        let half = self.memory.slots.borrow()[slot as usize].len() / 2;
        sink(0, &[0xEE; 1]); // as if a first try had failed half-way
        for at in [0, half] {
            let found = self.memory.slots.borrow()[slot as usize];
            sink(at, &found[at..at + half]);
            self.memory.step().await;
        }
        self.memory.has_memory(slot)
    }

    fn gains_by_fetching(&self) -> bool {
        true
    }

    async fn fetch_slots(&self, fetches: &[Fetch]) {
        self.fetched.borrow_mut().clear();
        for &fetch in fetches {
            self.memory.step().await;
            self.memory.land_late_writes();
            if self.memory.has_memory(fetch.slot) {
                let found = self.memory.slots.borrow()[fetch.slot as usize];
                self.fetched.borrow_mut().insert(fetch, found);
            }
        }
    }

    fn read_fetched(&self, fetch: Fetch, sink: &mut PageSink<'_>) -> bool {
        let fetched = self.fetched.borrow_mut().remove(&fetch);
        fetched.map(|page| sink(0, &page)).is_some()
    }

    async fn write_slot(&self, slot: u32, page: &[u8]) -> bool {
        let page = page.try_into().expect("a whole page");
        let mut landing = Landing { memory: &self.memory, slot, page, has_landed: false };
        self.memory.step().await;
        if self.memory.random.borrow_mut().chance(self.memory.given_up_permille.get()) {
            return false;
        }
        self.memory.land_late_writes();
        self.memory.slots.borrow_mut()[slot as usize] = page;
        landing.has_landed = true;
        self.memory.step().await;
        self.memory.has_memory(slot)
    }
}

/// Files on the disk. A block that was never written holds 0.
pub(super) struct Disk {
    world: World,
    random: RefCell<Random>,
    long_permille: u32,
    blocks: RefCell<BTreeMap<Block, u64>>,
    /// All writes in their order, as the database's log has them.
    log: RefCell<Vec<(Block, u64)>>,
    /// The tick of the clock in which each file was changed last.
    changed: RefCell<BTreeMap<FileNumber, u64>>,
}

impl Disk {
    pub(super) fn new(world: &World, mut random: Random) -> Disk {
        let long_permille = LONG_PERMILLE[random.index(LONG_PERMILLE.len())];
        Disk {
            world: world.clone(),
            random: random.into(),
            long_permille,
            blocks: RefCell::default(),
            log: RefCell::default(),
            changed: RefCell::default(),
        }
    }

    async fn take_time(&self) {
        let ns = {
            let mut random = self.random.borrow_mut();
            let longest_ns = if random.chance(self.long_permille) { LONG_NS } else { DISK_NS };
            random.below(longest_ns)
        };
        self.world.sleep(Duration::from_nanos(ns)).await;
    }

    /// The end of the log.
    pub(super) fn log_end(&self) -> u64 {
        self.log.borrow().len() as u64
    }

    /// The position of a value in the log: just behind its write. A block that was never written
    /// has 0, and a value that is not in the log `u64::MAX`.
    pub(super) fn position(&self, value: u64) -> u64 {
        let written = self.log.borrow().iter().position(|(_, written)| *written == value);
        written.map_or(if value == 0 { 0 } else { u64::MAX }, |at| at as u64 + 1)
    }

    /// The disk becomes that of a server that has replayed the log up to a position. Returns its blocks.
    pub(super) fn replay_until(&self, position: u64) -> BTreeMap<Block, u64> {
        self.log.borrow_mut().truncate(position as usize);
        let blocks: BTreeMap<Block, u64> = self.log.borrow().iter().copied().collect();
        self.blocks.borrow_mut().clone_from(&blocks);
        blocks
    }

    /// The time of a file's last change, as the file system has it.
    pub(super) fn changed_at(&self, file: FileNumber) -> u64 {
        self.changed.borrow().get(&file).copied().unwrap_or(0)
    }

    /// Whether a change from now on has another time.
    pub(super) fn is_settled(&self, file: FileNumber) -> bool {
        self.changed_at(file) < self.world.now_ns() / TICK_NS
    }

    pub(super) async fn read(&self, block: Block, to: &mut [u8]) -> usize {
        self.take_time().await;
        let value = self.blocks.borrow().get(&block).copied().unwrap_or(0);
        self.take_time().await;
        to.copy_from_slice(&value.to_le_bytes());
        PAGE
    }

    pub(super) async fn write(&self, blocks: &[(Block, u64)]) -> usize {
        for (block, value) in blocks {
            self.take_time().await;
            self.blocks.borrow_mut().insert(*block, *value);
            self.log.borrow_mut().push((*block, *value));
            self.changed.borrow_mut().insert(block.0, self.world.now_ns() / TICK_NS);
        }
        self.take_time().await;
        PAGE * blocks.len()
    }
}
