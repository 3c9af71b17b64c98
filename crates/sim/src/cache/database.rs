//! The processes of a run: those of the database, the keeper, and their mishaps.

use std::rc::Rc;
use std::time::Duration;

use farpool_cache::{Caller, Census, Door, Keeper, KnownFile, Outcome, Rules, change_outside};
use farpool_fabric::sim::Random;

use super::memory::{Access, PAGE};
use super::restart::restart;
use super::switch_over::{TakingOver, switch_over};
use super::{BLOCKS, BUSY, Block, DOORS, FileNumber, OpenFile, Run, id_of};
use crate::register::Touch;

/// How long the keeper rests between two rounds.
const KEEPER_RESTS_NS: u64 = 12_000;
/// The time between two mishaps. In some worlds processes stop so often that most are stopped.
const MISHAP_NS: [u64; 2] = [4_000, 40_000];
/// How often keepers die in a world where they do.
const KEEPER_DEATHS: u32 = 12;
/// The share of a keeper's rounds in which it wants another state of the door, in thousandths.
const TURNS_PERMILLE: [u32; 3] = [0, 150, 600];
/// How likely a mishap of a slot is that its memory goes or comes, in thousandths.
const MEMORY_PERMILLE: u32 = 300;
/// How likely a process is to fetch all blocks of the file before a read, in thousandths.
const FETCHES_PERMILLE: u32 = 200;
/// How likely the keeper is to learn in a round that a slot's memory has come or gone, in thousandths.
const LEARNS_PERMILLE: u32 = 300;
const PAUSE_NS: u64 = 60_000;
/// The share of worlds in which the database is restarted, and that of mishaps which are restarts, in
/// thousandths.
const RESTARTING_PERMILLE: u32 = 300;
const RESTART_PERMILLE: u32 = 100;
/// The share of restarts at which another server takes the pages over, in thousandths.
const SWITCH_PERMILLE: u32 = 400;
/// The share of operations that are changes by a process without its place, in worlds that have them, in
/// thousandths. Each of them costs all pages.
const OUTSIDE_PERMILLE: u32 = 50;
/// The longest time that such a process waits before it writes.
const OUTSIDE_NS: u64 = 150_000;

/// What processes do, in percent. The rest unlinks files.
#[derive(Clone, Copy)]
pub(super) struct Mix {
    reads: u64,
    writes: u64,
    /// Of whole files.
    changes: u64,
}

/// The mixes that worlds have. In the last one no file is changed as a whole or unlinked, so pages stay for
/// long.
pub(super) const MIXES: [Mix; 4] = [
    Mix { reads: 65, writes: 17, changes: 2 },
    Mix { reads: 65, writes: 27, changes: 6 },
    Mix { reads: 75, writes: 20, changes: 3 },
    Mix { reads: 90, writes: 10, changes: 0 },
];
/// Rounds within which the keeper has settled every slot once nobody uses the cache.
const LAST_ROUNDS: u32 = 40;
/// Rounds within which the keeper opens a file that is asked for, when nobody is in the way.
const FILE_ROUNDS: u32 = 24;

/// What a process does next.
enum Operation {
    Read,
    Write,
    /// Of a whole file.
    Change,
    Unlink,
}

impl Mix {
    fn pick(self, random: &mut Random) -> Operation {
        let roll = random.below(100);
        if roll < self.reads {
            Operation::Read
        } else if roll < self.reads + self.writes {
            Operation::Write
        } else if roll < self.reads + self.writes + self.changes {
            Operation::Change
        } else {
            Operation::Unlink
        }
    }
}

/// Starts all processes of a run.
pub(super) fn start<R: Rules + 'static>(run: &Rc<Run>, processes: u32, random: &mut Random) {
    let mishaps = (random.chance(600), random.chance(600), random.chance(300));
    let restarted = random.chance(RESTARTING_PERMILLE).then_some(processes);
    let turns = TURNS_PERMILLE[random.index(TURNS_PERMILLE.len())];
    // Where the door turns, keepers die more often, so that some die between two turns.
    let deaths = if random.chance(if turns > 0 { 500 } else { 100 }) { KEEPER_DEATHS } else { 0 };
    let (starting, staying) = (run.clone(), run.left.stay());
    run.tasks.spawn(run.world.add_process(run.host), async move {
        start_keeper::<R>(&starting, turns, deaths);
        (0..processes).for_each(|_| start_process::<R>(&starting));
        start_mishaps::<R>(&starting, mishaps, restarted, turns);
        drop(staying);
    });
}

impl Run {
    /// A file that a process uses: now and then one that was unlinked.
    fn pick_file<'a>(&self, random: &mut Random, open: &'a mut Vec<OpenFile>) -> &'a mut OpenFile {
        let files = self.files.borrow();
        let number = files[random.index(files.len())];
        let mut place = open.iter().position(|(known, _)| *known == number).unwrap_or(open.len());
        if place == open.len() {
            open.push((number, KnownFile::new(id_of(number))));
        }
        if random.chance(100) {
            place = random.index(open.len());
        }
        &mut open[place]
    }
}

/// Starts a process of the database.
pub(super) fn start_process<R: Rules + 'static>(run: &Rc<Run>) {
    let (process, holder) = (run.world.add_process(run.host), run.notes.next_name());
    run.living.borrow_mut().insert(holder, process);
    let (run, staying) = (run.clone(), run.left.stay());
    let tasks = run.tasks.clone();
    tasks.spawn(process, async move {
        let _staying = staying;
        let mut random = run.notes.random();
        let mut caller = loop {
            if run.is_stopping.get() {
                run.living.borrow_mut().remove(&holder);
                return;
            }
            if let Some(caller) = Caller::<_, R>::join(run.access(), run.places(), holder).await {
                break caller;
            }
            run.world.sleep(Duration::from_nanos(KEEPER_RESTS_NS)).await;
        };
        let mut open = Vec::new();
        while run.is_busy.get() && !run.is_stopping.get() {
            let file = run.pick_file(&mut random, &mut open);
            act(&run, &mut caller, holder, file, &mut random).await;
        }
        caller.leave().await;
        run.living.borrow_mut().remove(&holder);
    });
}

/// Runs one random operation on a file.
async fn act<R: Rules>(
    run: &Run,
    caller: &mut Caller<Access, R>,
    holder: u64,
    open: &mut OpenFile,
    random: &mut Random,
) {
    let block = random.below(BLOCKS.into()) as u32;
    let number = open.0;
    if run.has_outsiders && random.chance(OUTSIDE_PERMILLE) {
        return change_outside_of_places(run, holder, (number, block), random).await;
    }
    match run.mix.pick(random) {
        Operation::Read => {
            if random.chance(FETCHES_PERMILLE) {
                caller.fetch(&mut open.1, 0..BLOCKS, BLOCKS).await;
            }
            read(run, caller, open, block).await;
        }
        Operation::Write => {
            let blocks = if random.chance(200) { 2 } else { 1 };
            let writes = run.fresh_values(number, block..block + blocks);
            run.begin_write(holder, &writes);
            let page = writes[0].1.to_le_bytes();
            let page = (blocks == 1).then_some(&page[..]);
            let written =
                caller.write(&mut open.1, (block, blocks), page, async || Ok(run.disk.write(&writes).await));
            written.await.expect("the disk does not fail");
            run.end_write(holder, true);
        }
        Operation::Change => {
            let writes = run.fresh_values(number, 0..BLOCKS);
            run.begin_write(holder, &writes);
            let changed = caller.change(&mut open.1, async || Ok(run.disk.write(&writes).await));
            changed.await.expect("the disk does not fail");
            run.end_write(holder, true);
        }
        Operation::Unlink => unlink(run, caller, open).await,
    }
}

/// Writes a block without using a place.
async fn change_outside_of_places(run: &Run, holder: u64, (number, block): Block, random: &mut Random) {
    let waits = Duration::from_nanos(random.below(OUTSIDE_NS));
    let writes = run.fresh_values(number, block..block + 1);
    run.begin_write(holder, &writes);
    run.outsiders.borrow_mut().insert(holder);
    let ground = run.access();
    let change = async || {
        run.world.sleep(waits).await;
        run.disk.write(&writes).await
    };
    change_outside(&ground, change).await;
    run.outsiders.borrow_mut().remove(&holder);
    run.end_write(holder, true);
}

/// Reads a block, and records what was found.
async fn read<R: Rules>(
    run: &Run,
    caller: &mut Caller<Access, R>,
    (number, file): &mut OpenFile,
    block: u32,
) -> Outcome<()> {
    let number = *number;
    let (mut page, start) = ([0; PAGE], run.moment());
    let pread = async |to: &mut [u8]| Ok(run.disk.read((number, block), to).await);
    let exists = async || !run.unlinked.borrow().contains(&number);
    let found = caller.read(file, block, &mut page, exists, pread).await.expect("the disk does not fail");
    let value = found.page_or(&page).try_into().expect("a whole page");
    let found = found.without_page();
    let touch =
        Touch { value: u64::from_le_bytes(value), writes: false, start, end: run.moment(), certain: true };
    let what = if found == Outcome::Hit(()) {
        "file {}.{}: block {} holds {}, cached"
    } else {
        "file {}.{}: block {} holds {}"
    };
    run.world.note(what, &[number.0.into(), number.1, block.into(), touch.value]);
    run.history.borrow_mut().touches.entry((number, block)).or_default().push(touch);
    let was_retired = run.retired.borrow().get(&number).is_some_and(|at| *at < start);
    if found == Outcome::Hit(()) && was_retired {
        run.notes.complain(format!("block {block} of file {number:?} was found, which was unlinked before"));
    }
    found
}

/// Unlinks a file. A new one has its name and its inode at once.
async fn unlink<R: Rules>(run: &Run, caller: &mut Caller<Access, R>, (number, file): &mut OpenFile) {
    let number = *number;
    if !run.files.borrow().contains(&number) || !run.unlinked.borrow_mut().insert(number) {
        return;
    }
    run.files.borrow_mut()[number.0 as usize].1 += 1;
    caller.retire(file).await;
    let now = run.moment();
    run.retired.borrow_mut().entry(number).or_insert(now);
}

impl Run {
    /// Values that no other write has, for blocks of a file.
    pub(super) fn fresh_values(&self, number: FileNumber, blocks: std::ops::Range<u32>) -> Vec<(Block, u64)> {
        blocks.map(|block| ((number, block), self.notes.next_name())).collect()
    }

    pub(super) fn places(&self) -> u32 {
        self.layout.shape().places
    }

    fn is_alive(&self, holder: u64) -> bool {
        self.living.borrow().contains_key(&holder)
    }
}

/// Starts a keeper, and after its death another one, `deaths` times.
pub(super) fn start_keeper<R: Rules + 'static>(run: &Rc<Run>, turns_permille: u32, deaths: u32) {
    let process = run.world.add_process(run.host);
    let (run, staying) = (run.clone(), run.left.stay());
    let tasks = run.tasks.clone();
    run.keeper.set(Some(process).filter(|_| deaths == 0));
    if deaths > 0 {
        let (run, staying) = (run.clone(), run.left.stay());
        tasks.spawn(run.world.add_process(run.host), async move {
            let _staying = staying;
            let longest_ns = BUSY.as_nanos() as u64 / u64::from(KEEPER_DEATHS);
            let lives = Duration::from_nanos(run.notes.random().below(longest_ns));
            run.world.sleep(lives).await;
            run.world.note("the keeper dies", &[]);
            run.tasks.kill(process);
            run.world.sleep(lives / 4).await;
            start_keeper::<R>(&run, turns_permille, deaths - 1);
        });
    }
    tasks.spawn(process, async move {
        let _staying = staying;
        let mut random = run.notes.random();
        let mut told: Vec<bool> =
            (0..run.layout.shape().slots).map(|slot| run.memory.borrow().has_memory(slot)).collect();
        let mut taking = TakingOver::new(&run);
        let has_memory = |slot: u32| told[slot as usize] && !taking.withholds(slot);
        let mut keeper = Keeper::<_, R>::start(run.access(), run.layout, has_memory).await;
        let mut wanted = Door::Open;
        while run.is_busy.get() || !run.living.borrow().is_empty() {
            run.world.sleep(Duration::from_nanos(random.below(KEEPER_RESTS_NS))).await;
            keeper.clear_dead(|holder| run.is_alive(holder)).await;
            if random.chance(turns_permille) {
                wanted = DOORS[random.index(DOORS.len())];
            }
            step_door(&run, &mut keeper, wanted).await;
            tell_of_memory(&run, &mut keeper, &mut told, || random.chance(LEARNS_PERMILLE)).await;
            taking.step(&run, &mut keeper, &told, &mut random).await;
            if keeper.has_work() {
                keeper.sweep().await
            } else {
                keeper.sweep_idly().await
            };
            keeper.maintain_files().await;
        }
        taking.end(&mut keeper, &told);
        if deaths == 0 {
            judge_end::<R>(&run, &mut keeper, told).await;
        }
    });
}

/// Turns the door one step towards a state, if it can be turned.
async fn step_door<R: Rules>(run: &Run, keeper: &mut Keeper<Access, R>, wanted: Door) {
    let before = keeper.door().await;
    keeper.turn_door(wanted).await;
    let door = keeper.door().await;
    if door != before {
        run.world.note("the door turns to {}", &[door as u64]);
    }
}

/// Tells the keeper of slots whose memory has gone or is there again, if it `learns` of them now.
async fn tell_of_memory<R: Rules>(
    run: &Run,
    keeper: &mut Keeper<Access, R>,
    told: &mut [bool],
    mut learns: impl FnMut() -> bool,
) {
    for (slot, told) in (0..).zip(told) {
        let has_memory = run.memory.borrow().has_memory(slot);
        if has_memory == *told || !learns() {
            continue;
        }
        run.world.note("the keeper learns that slot {} has memory: {}", &[slot.into(), has_memory.into()]);
        if has_memory {
            keeper.restore_slots(slot..slot + 1);
        } else {
            keeper.withdraw_slots(slot..slot + 1);
        }
        *told = has_memory;
    }
}

/// Checks that everything recovers once nobody dies any more: a slot whose memory has gone is left alone, no
/// slot is lost, and pages are found again.
async fn judge_end<R: Rules>(run: &Rc<Run>, keeper: &mut Keeper<Access, R>, mut told: Vec<bool>) {
    run.memory.borrow().calm();
    // First without the memory of slot 0, then with all memory.
    for absent in [1, 0] {
        (0..run.layout.shape().slots).for_each(|slot| run.memory.borrow().set_memory(slot, slot >= absent));
        tell_of_memory(run, keeper, &mut told, || true).await;
        if let Err(why) = settle(run, keeper, absent).await {
            return run.notes.complain(why);
        }
    }
    check_blocks_are_found(run, keeper).await;
}

/// Runs the keeper until the door is open and every slot is settled.
async fn settle<R: Rules>(run: &Run, keeper: &mut Keeper<Access, R>, absent: u32) -> Result<(), String> {
    let slots = run.layout.shape().slots;
    let is_complete = |census: Census| {
        census.free > 0 && census.absent == absent && census.free + census.pages + absent == slots
    };
    let mut census = keeper.sweep().await;
    for _ in 0..LAST_ROUNDS {
        keeper.clear_dead(|holder| run.is_alive(holder)).await;
        keeper.maintain_files().await;
        step_door(run, keeper, Door::Open).await;
        census = keeper.sweep().await;
        if keeper.door().await == Door::Open && is_complete(census) {
            return Ok(());
        }
    }
    let door = keeper.door().await;
    Err(format!(
        "not settled after {LAST_ROUNDS} rounds: {census:?} of {slots} slots, {absent} without memory; door {door:?}"
    ))
}

/// Checks that each block is found after it was read from the disk.
async fn check_blocks_are_found<R: Rules>(run: &Rc<Run>, keeper: &mut Keeper<Access, R>) {
    let Some(mut caller) = Caller::<_, R>::join(run.access(), run.places(), run.notes.next_name()).await
    else {
        return run.notes.complain("all places are taken, and nobody is there".to_owned());
    };
    let files = run.files.borrow().clone();
    for number in files {
        let mut file = (number, KnownFile::new(id_of(number)));
        // The first read asks for the file, once entries of unlinked files have been freed.
        for _ in 0..FILE_ROUNDS {
            read(run, &mut caller, &mut file, 0).await;
            keeper.maintain_files().await;
        }
        for block in 0..BLOCKS {
            read(run, &mut caller, &mut file, block).await;
            if read(run, &mut caller, &mut file, block).await != Outcome::Hit(()) {
                run.notes
                    .complain(format!("block {block} of file {number:?} is not found after it was read"));
            }
            // The first sweep evicts, the second one frees the slot.
            for _ in 0..2 {
                keeper.sweep().await;
            }
        }
    }
    caller.leave().await;
}

/// Lets processes die and stop, and slots break, and ends the busy time. `restarted`: how many processes end
/// and start together now and then. `turns`: as for the keeper.
fn start_mishaps<R: Rules + 'static>(
    run: &Rc<Run>,
    (dies, pauses, breaks): (bool, bool, bool),
    restarted: Option<u32>,
    turns: u32,
) {
    let (run, staying) = (run.clone(), run.left.stay());
    let tasks = run.tasks.clone();
    let own = run.world.add_process(run.host);
    tasks.spawn(own, async move {
        let _staying = staying;
        let mut random = run.notes.random();
        let mishap_ns = MISHAP_NS[random.index(MISHAP_NS.len())];
        let end_ns = run.world.now_ns() + BUSY.as_nanos() as u64;
        while run.world.now_ns() < end_ns {
            run.world.sleep(Duration::from_nanos(random.below(mishap_ns))).await;
            if breaks && random.chance(300) {
                let slot = random.below(run.layout.shape().slots.into()) as u32;
                if random.chance(MEMORY_PERMILLE) {
                    run.memory.borrow().set_memory(slot, !run.memory.borrow().has_memory(slot));
                } else {
                    run.memory.borrow().break_slot(slot);
                }
                continue;
            }
            if let Some(processes) = restarted.filter(|_| random.chance(RESTART_PERMILLE)) {
                match run.keeper.get().filter(|_| random.chance(SWITCH_PERMILLE)) {
                    Some(keeper) => {
                        switch_over::<R>(&run, (own, keeper), processes, turns, &mut random).await
                    }
                    None => restart::<R>(&run, own, processes, &mut random).await,
                }
                continue;
            }
            let living: Vec<u64> = run.living.borrow().keys().copied().collect();
            let Some(holder) = living.get(random.index(living.len().max(1))).copied() else { continue };
            if pauses && random.chance(500) {
                let process = run.living.borrow()[&holder];
                run.world.pause(process, Duration::from_nanos(random.below(PAUSE_NS)));
            } else if dies && !run.outsiders.borrow().contains(&holder) {
                run.kill(holder);
                start_process::<R>(&run);
            }
        }
        run.is_busy.set(false);
    });
}
