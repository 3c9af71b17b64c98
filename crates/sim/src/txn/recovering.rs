//! Who looks after a slot whose client has died, or is taken for dead: fences it, undoes what it left, and gives the slot to the next.
//! It may die over it itself; then another does the same.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_txn::Oracle;
use farpool_txn::judge::Outcome;
use farpool_txn::recovery::{Fate, RecoveryError, fate, recover};
use farpool_wire::{Epoch, Slot, next_generation};

use super::{Access, Run, Staying, broken, client, place};

/// How often the work is begun anew, at most; the last time nobody dies over it.
const TRIES: u32 = 4;
/// Between two looks at whether it is done.
const PAUSE: Duration = Duration::from_micros(20);

/// The client of a slot that has that grant has to be looked after; if nobody does yet.
pub(super) fn look_after(run: &Rc<Run>, slot: u16, grant: Epoch) {
    {
        let mut lives = run.lives.borrow_mut();
        let life = lives.get_mut(&slot).expect("every slot has had a client");
        if life.grant != grant || life.is_dead {
            return;
        }
        life.is_dead = true;
    }
    let nowhere = run.world.add_process(run.world.add_host(1_000_000));
    let recovering =
        Recovering { run: run.clone(), slot, grant, random: run.random(), _staying: Staying::new(run) };
    run.tasks.spawn(nowhere, recovering.go_on());
}

struct Recovering {
    run: Rc<Run>,
    slot: u16,
    grant: Epoch,
    random: Random,
    _staying: Staying,
}

impl Recovering {
    async fn go_on(mut self) {
        let run = self.run.clone();
        if broken::is(broken::REUSED) {
            // As if all of it were over: with the numbers that it may have used.
            let next = next_generation(0).expect("the first generation is not the last");
            client::start(&run, self.slot, next + run.next_name(), &mut self.random);
        }
        if !broken::is(broken::UNFENCED) {
            run.fence(self.grant, &mut self.random).await;
        }
        let mut last = None;
        for attempt in 1..=TRIES {
            let dies = attempt < TRIES && self.random.chance(300);
            last = self.try_once(dies).await;
            if last.is_some() {
                break;
            }
        }
        let Some(last) = last else {
            return run.complain(format!("nobody could look after slot {}", self.slot));
        };
        if !broken::is(broken::REUSED) {
            client::start(&run, self.slot, last, &mut self.random);
        }
        if broken::is(broken::UNFENCED) {
            run.fence(self.grant, &mut self.random).await;
        }
    }

    /// One process tries it; `None`: it has died.
    async fn try_once(&mut self, dies: bool) -> Option<u64> {
        let run = self.run.clone();
        let place = place(&run, &mut self.random);
        let process = run.world.add_process(place.0);
        let grant = run.grant();
        let dies_after = dies.then(|| Duration::from_nanos(self.random.below(150_000)));
        let result: Rc<Cell<Option<u64>>> = Rc::default();
        let (here, slot, done) = (run.clone(), self.slot, result.clone());
        run.tasks.spawn(process, async move {
            let recovered = async {
                let access = here.access(process, place, grant).await?;
                recover_slot(&here, &access, slot).await
            };
            match recovered.await {
                Ok(last) => done.set(Some(last)),
                Err(error) => here.complain(format!("slot {slot} cannot be looked after: {error}")),
            }
        });
        match dies_after {
            Some(after) => {
                run.world.sleep(after).await;
                run.tasks.kill(process);
            }
            None => {
                while result.get().is_none() && run.complaints.borrow().is_empty() {
                    run.world.sleep(PAUSE).await;
                }
            }
        }
        run.fence(grant, &mut self.random).await;
        result.get()
    }
}

/// Undoes what a slot's client has left under way, and finds out what became of each of its commits.
async fn recover_slot(run: &Rc<Run>, access: &Access, slot: u16) -> Result<u64, RecoveryError> {
    let slot_of = Slot::new(slot).expect("a few slots");
    let oracle = run.oracle(access.grant);
    let recovered = recover(&access.memory, &oracle, &run.log(slot, access.grant), slot_of).await?;
    run.world.note("slot {} goes on behind {}", &[u64::from(slot), recovered.last]);
    learn_fates(run, access, &oracle, |of| of == slot).await?;
    Ok(recovered.last)
}

/// Asks what became of the commits of which their clients were told nothing.
pub(super) async fn learn_fates(
    run: &Rc<Run>,
    access: &Access,
    oracle: &Oracle,
    is_wanted: impl Fn(u16) -> bool,
) -> Result<(), RecoveryError> {
    let unknown: Vec<_> = {
        let history = run.history.borrow();
        let outcomes = history.iter().enumerate().map(|(place, transaction)| (place, transaction.outcome));
        let unknown = outcomes.filter_map(|(place, outcome)| match outcome {
            Outcome::Unknown(version) => Some((place, version)),
            _ => None,
        });
        unknown.filter(|(_, version)| is_wanted(version.slot().index() as u16)).collect()
    };
    for (place, version) in unknown {
        let log = run.log(version.slot().index() as u16, access.grant);
        let outcome = match fate(&access.memory, oracle, &log, version).await? {
            Fate::Committed => Outcome::Committed(version),
            Fate::RolledBack => Outcome::Aborted,
            Fate::Forgotten => continue,
            Fate::NotYetKnown => {
                run.complain(format!("nobody knows of commit {version} behind its slot's recovery"));
                continue;
            }
        };
        run.history.borrow_mut()[place].outcome = outcome;
    }
    Ok(())
}
