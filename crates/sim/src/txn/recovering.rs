//! The recoverer of a slot whose client has died or was declared dead. It fences the client, rolls back what
//! the client left, and gives the slot to the next client. If the recoverer dies, another one starts again.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_txn::Oracle;
use farpool_txn::horizon::forget;
use farpool_txn::log::{LogAt, LogRoom};
use farpool_txn::recovery::{Recovered, RecoveryError, recover_by, replace_copy};
use farpool_wire::{Epoch, Slot, next_generation};

use super::broken::Chosen;
use super::client::{self, After};
use super::oracle::{MOST_WORKERS, first_place};
use super::{Access, LOGS, Run, SPARE_LOGS, broken, place};
use crate::mutation;
use crate::staying::Staying;
use crate::transacting::fates::{Asked, Asking};

/// Attempts at a recovery, at most. In the last one the recoverer does not die.
const TRIES: u32 = 4;
/// Pause between two checks whether the recovery has finished.
const PAUSE: Duration = Duration::from_micros(20);

/// Starts the recovery of a slot whose client has that grant, unless it has already started.
pub(super) fn recover_seat(run: &Rc<Run>, slot: u16, grant: Epoch) {
    {
        let mut lives = run.lives.borrow_mut();
        let life = lives.get_mut(&slot).expect("every slot has had a client");
        if life.grant != grant || life.is_dead {
            return;
        }
        life.is_dead = true;
    }
    let nowhere = run.world.add_process(run.world.add_host(1_000_000));
    let mut random = run.ledger.notes.random();
    let lost_copy = lost_copy(run, slot, &mut random);
    let recovering =
        Recovering { run: run.clone(), slot, grant, lost_copy, random, _staying: run.left.stay() };
    run.tasks.spawn(nowhere, recovering.go_on());
}

/// Draws the copy of the log that the recoverer cannot reach, if any. This needs two nodes, and happens to a
/// slot only once: other clients know where its copies lay before, and read the one that is left.
fn lost_copy(run: &Run, slot: u16, random: &mut Random) -> Option<usize> {
    let copy = random.index(2);
    let is_first = run.replaced.borrow().iter().all(|(of, _)| *of != slot);
    let may_be_lost = run.nodes.len() > 1 && is_first;
    (random.chance(300) && may_be_lost).then_some(copy)
}

struct Recovering {
    run: Rc<Run>,
    slot: u16,
    grant: Epoch,
    /// The copy of the log that no recoverer of the slot can reach.
    lost_copy: Option<usize>,
    random: Random,
    _staying: Staying,
}

impl Recovering {
    async fn go_on(mut self) {
        let run = self.run.clone();
        if mutation::is(broken::REUSED) {
            // Continues as if the recovery had finished, with numbers that the last client may have used.
            let first = run.firsts[usize::from(self.slot)];
            let next = next_generation(first).expect("the first generation is not the last");
            let last = next + run.ledger.notes.next_name();
            let room = LogRoom::new(run.log.area_bytes());
            let next = After::Recovery(Recovered { last, room, rolled_back: Vec::new(), lost_copy: None });
            client::start(&run, self.slot, next, &mut self.random);
        }
        if !mutation::is(broken::UNFENCED) {
            run.fence(self.grant, &mut self.random).await;
        }
        let mut recovered = None;
        for attempt in 1..=TRIES {
            let dies = attempt < TRIES && self.random.chance(300);
            recovered = self.try_once(dies).await;
            if recovered.is_some() {
                break;
            }
        }
        let Some(recovered) = recovered else {
            return run.ledger.notes.complain(format!("every recoverer of slot {} failed", self.slot));
        };
        if !mutation::is(broken::REUSED) {
            run.seat(self.slot, None);
            client::start(&run, self.slot, After::Recovery(recovered), &mut self.random);
        }
        if mutation::is(broken::UNFENCED) {
            run.fence(self.grant, &mut self.random).await;
        }
    }

    /// One process tries to recover the slot. Returns `None` if the process has died.
    async fn try_once(&mut self, dies: bool) -> Option<Recovered> {
        let run = self.run.clone();
        let place = place(&run, &mut self.random);
        let process = run.world.add_process(place.0);
        let grant = run.grant();
        let dies_after = dies.then(|| Duration::from_nanos(self.random.below(150_000)));
        let result: Rc<RefCell<Option<Recovered>>> = Rc::default();
        let (here, slot, lost, done) = (run.clone(), self.slot, self.lost_copy, result.clone());
        run.tasks.spawn(process, async move {
            let recovered = async {
                let access = here.access(process, place, grant).await?;
                if let Some(copy) = lost {
                    let region = here.log_copy(slot, copy, LOGS, grant).region;
                    let regions = &here.node(region.node).memory.regions;
                    regions.fence_grant(region.index, grant).expect("a few pages of memory");
                }
                recover_slot(&here, &access, slot).await
            };
            match recovered.await {
                Ok(recovered) => done.replace(Some(recovered)).map_or((), drop),
                Err(error) => here.ledger.notes.complain(format!("slot {slot} cannot be recovered: {error}")),
            }
        });
        match dies_after {
            Some(after) => {
                run.world.sleep(after).await;
                run.tasks.kill(process);
            }
            None => {
                while result.borrow().is_none() && run.ledger.notes.complaints.borrow().is_empty() {
                    run.world.sleep(PAUSE).await;
                }
            }
        }
        run.fence(grant, &mut self.random).await;
        result.take()
    }
}

/// Rolls back the commits that a slot's client has left in flight, and finds out the outcome of each commit.
async fn recover_slot(run: &Rc<Run>, access: &Access, slot: u16) -> Result<Recovered, RecoveryError> {
    let slot_of = Slot::new(slot).expect("a few slots");
    let oracle = run.oracle(access.grant);
    let log = run.log(slot, access.grant);
    let recovered = recover_by::<Chosen>(&access.memory, &oracle, &log, slot_of).await?;
    if let Some(lost) = recovered.lost_copy {
        let copy = usize::from(log.copies[1] == lost);
        let by = run.log_copy(slot, copy, SPARE_LOGS, access.grant);
        replace_copy(&access.memory, &log, lost, by).await?;
        run.replaced.borrow_mut().insert((slot, copy));
        run.world.note("slot {} has lost copy {} of its log", &[slot.into(), copy as u64]);
    }
    for number in 0..MOST_WORKERS {
        let place = first_place(slot) + number;
        forget(&access.memory, &run.horizon(access.grant), place..place + 1).await?;
    }
    run.world.note("slot {} goes on behind {}", &[u64::from(slot), recovered.last]);
    let asking = asking(run, access, &oracle);
    asking.learn_fates(|of| of == slot).await?;
    asking.ask_again(Asked::Each, |of| of == slot).await?;
    Ok(recovered)
}

/// Asks for the outcomes of commits, through the given access to far memory.
pub(super) fn asking<'a>(
    run: &'a Run,
    access: &'a Access,
    oracle: &'a Oracle,
) -> Asking<'a, impl Fn(u16) -> LogAt + 'a> {
    Asking { ledger: &run.ledger, memory: &access.memory, oracle, log_of: |slot| run.log(slot, access.grant) }
}
