//! `sim cache`: processes of a database read and write files through the page cache, truncate and unlink
//! them, stop and die, and are all started again, or on another server that takes the pages over, while the
//! keeper evicts, turns the door and dies, too (`docs/src/cache.md`).
//!
//! Any process may run between two accesses to shared memory. The judge demands of each block what the disk
//! alone would give: an atomic register.

mod broken;
mod database;
mod memory;
mod restart;
mod switch_over;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use farpool_cache::{Door, FileId, KnownFile, Layout, Shape};
use farpool_fabric::sim::{Executor, HostId, ProcessId, Random, Tasks, World, WorldConfig};

use crate::mutation;
use crate::notebook::Notebook;
use crate::register::{Touch, check};
use crate::runner::{RunReport, Scenario, run_to_end};
use crate::staying::Left;
use broken::Broken;
use database::{MIXES, Mix};
use memory::{Access, Disk, Memory};
use switch_over::Handover;

/// The scenario of the page cache.
pub const CACHE: Scenario = Scenario { name: "cache", mutations: broken::MUTATIONS, run };

/// Far longer than any run takes: a task that has not ended by then hangs.
const RUN_NS: u64 = 60_000_000_000;
/// How long mishaps occur.
const BUSY: Duration = Duration::from_millis(3);
/// The share of worlds in which processes change files without their places, in thousandths.
const OUTSIDERS_PERMILLE: u32 = 500;
/// Most files that have names at a time.
const FILES: u64 = 2;
const BLOCKS: u32 = 3;

/// What all parts of one run share.
struct Run {
    world: World,
    tasks: Tasks,
    host: HostId,
    notes: Notebook,
    layout: Layout,
    /// That of the server that is the primary now.
    memory: RefCell<Rc<Memory>>,
    disk: Rc<Disk>,
    /// The files that have names.
    files: RefCell<Vec<FileNumber>>,
    /// Files that some process has begun to unlink.
    unlinked: RefCell<BTreeSet<FileNumber>>,
    /// When each file that was unlinked had been retired.
    retired: RefCell<BTreeMap<FileNumber, u64>>,
    history: RefCell<History>,
    /// What happened on the servers that were primaries before.
    past: RefCell<Vec<History>>,
    /// The keeper, once it does not die any more.
    keeper: Cell<Option<ProcessId>>,
    /// The pages that are being taken over.
    handover: RefCell<Option<Handover>>,
    /// The living processes of the database, with their holder numbers.
    living: RefCell<BTreeMap<u64, ProcessId>>,
    /// Those that are changing a file without a place. If one of them died, the door would stay closed.
    outsiders: RefCell<BTreeSet<u64>>,
    has_outsiders: bool,
    mix: Mix,
    is_busy: Cell<bool>,
    /// Whether the database ends, so that its processes leave.
    is_stopping: Cell<bool>,
    left: Left,
}

/// A file's index in `Run::files`, and how many files had that index before.
type FileNumber = (u32, u64);

/// A file that a process has open.
type OpenFile = (FileNumber, KnownFile);

fn id_of((file, birth): FileNumber) -> FileId {
    FileId { device: 1, inode: file.into(), generation: birth }
}

/// A write that has begun.
#[derive(Clone, Copy)]
struct Begun {
    block: Block,
    value: u64,
    start: u64,
}

/// A block of a file.
type Block = (FileNumber, u32);

/// What was read from, and written to, each block of each file.
#[derive(Default)]
struct History {
    /// What the blocks held at the beginning; 0 if nothing is said.
    initial: BTreeMap<Block, u64>,
    touches: BTreeMap<Block, Vec<Touch>>,
    /// Writes that have not ended, by the process that carries them out.
    open: BTreeMap<u64, Vec<Begun>>,
}

impl Run {
    /// A moment of its own, later than all before.
    fn moment(&self) -> u64 {
        self.notes.next_name()
    }

    /// A process begins to write values to blocks.
    fn begin_write(&self, holder: u64, blocks: &[(Block, u64)]) {
        let start = self.moment();
        let open = blocks.iter().map(|&(block, value)| Begun { block, value, start }).collect();
        self.history.borrow_mut().open.insert(holder, open);
    }

    /// The writes of a process have returned (`certain`), or it has died: then they may or may not have
    /// happened.
    fn end_write(&self, holder: u64, certain: bool) {
        let end = self.moment();
        let mut history = self.history.borrow_mut();
        for Begun { block, value, start } in history.open.remove(&holder).unwrap_or_default() {
            let what = if certain {
                "file {}.{}: block {} was written: {}"
            } else {
                "file {}.{}: block {}: a dead writer of {}"
            };
            self.world.note(what, &[block.0.0.into(), block.0.1, block.1.into(), value]);
            let touch = Touch { value, writes: true, start, end, certain };
            history.touches.entry(block).or_default().push(touch);
        }
    }

    fn kill(&self, holder: u64) {
        let Some(process) = self.living.borrow_mut().remove(&holder) else { return };
        self.world.note("process {} of the database dies", &[holder]);
        self.tasks.kill(process);
        self.end_write(holder, false);
    }

    fn judge(&self) -> u64 {
        let mut operations = 0;
        let (past, last) = (self.past.borrow(), self.history.borrow());
        for history in past.iter().chain([&*last]) {
            for (place, touches) in &history.touches {
                operations += touches.len() as u64;
                let initial = history.initial.get(place).copied().unwrap_or(0);
                if let Err(what) = check(initial, touches) {
                    let ((file, birth), block) = place;
                    self.notes.complain(format!("file {file}.{birth}, block {block}: {what}"));
                }
            }
        }
        operations
    }

    /// The memory as a process sees it.
    fn access(&self) -> Access {
        Access::new(self.memory.borrow().clone())
    }
}

fn run(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    mutation::set(mutation);
    let mut random = Random::new(seed, 50);
    let world = World::new(WorldConfig { trace, ..WorldConfig::new(seed) });
    let executor = Executor::new(world.clone());
    let processes = 2 + random.below(3) as u32;
    let named_files = 1 + random.below(FILES) as u32;
    let files = named_files + 1 + random.below(3) as u32;
    let shape = Shape { places: processes + 2, files, slots: 2 + random.below(8) as u32 };
    let layout = Layout::new(shape);
    let host = world.add_host(1_000_000);
    let run = Rc::new(Run {
        memory: Rc::new(Memory::new(&world, &layout, Random::new(seed, 51))).into(),
        disk: Rc::new(Disk::new(&world, Random::new(seed, 52))),
        world: world.clone(),
        tasks: executor.tasks(),
        host,
        notes: Notebook::new(world.clone(), seed),
        layout,
        files: (0..named_files).map(|file| (file, 0)).collect::<Vec<_>>().into(),
        unlinked: RefCell::default(),
        retired: RefCell::default(),
        history: RefCell::default(),
        past: RefCell::default(),
        keeper: Cell::default(),
        handover: RefCell::default(),
        living: RefCell::default(),
        outsiders: RefCell::default(),
        has_outsiders: Random::new(seed, 53).chance(OUTSIDERS_PERMILLE),
        mix: MIXES[random.index(MIXES.len())],
        is_busy: Cell::new(true),
        is_stopping: Cell::new(false),
        left: Left::default(),
    });
    database::start::<Broken>(&run, processes, &mut random);
    let (panicked, failure) = run_to_end(executor, RUN_NS, || run.left.get());
    failure.into_iter().for_each(|what| run.notes.complain(what));
    let operations = run.judge();
    let violations = run.notes.complaints.take();
    RunReport { seed, panicked, violations, operations, ..RunReport::of_world(&world) }
}

/// The states of the door from closed to open.
const DOORS: [Door; 3] = [Door::Closed, Door::Invalidating, Door::Open];
