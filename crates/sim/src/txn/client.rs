//! Sessions: they read and write records as the seed says, and record what they saw.

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_txn::recovery::Recovered;
use farpool_txn::slab::Slab;
use farpool_txn::{BeginError, ReadError, SessionState, SharedSlot, Worker};
use farpool_wire::{Epoch, Slot};
use futures_util::future::{Either, select};

use super::broken::{self, Chosen};
use super::oracle::Server;
use super::payloads::{is_short, payload_of};
use super::{Life, Run, crowd, place, recovering, wasting};
use crate::mutation;
use crate::staying::Staying;
use crate::transacting::{Stopped, Transactor};

/// Transactions of each session.
const ROUNDS: u64 = 12;
/// Records that a transaction touches at most.
const MOST_RECORDS: u64 = 5;
/// The share of rounds before which a session idles, in thousandths, and the longest idle time.
const IDLES_PERMILLE: u32 = 100;
const MOST_IDLE_NS: u64 = 100_000;

/// In runs in which sessions abandon transactions: the share of those, in thousandths, and the longest time
/// until a session abandons one.
const GIVEN_UP_PERMILLE: u32 = 60;
const MOST_PATIENCE_NS: u64 = 80_000;
/// In the same runs, the share of transactions, in thousandths, before which the session prepares and
/// abandons many others.
const WASTES_PERMILLE: u32 = 80;

/// Where crowds gather: the share of rounds with one, in thousandths.
const CROWD_PERMILLE: u32 = 150;

/// Where a client of a slot begins.
pub(super) enum After {
    /// After this count. Its log is used again once all snapshots see that count.
    Count(u64),
    /// Where a recovery says. Its log goes on where it ended.
    Recovery(Recovered),
}

impl After {
    fn slot(self, run: &Run, slot: u16, grant: Epoch) -> SharedSlot {
        let (slot, logs) = (Slot::new(slot).expect("a few slots"), run.logs(grant));
        let slot = match self {
            After::Count(last) => SharedSlot::after(slot, logs, last),
            After::Recovery(recovered) => SharedSlot::recovered(slot, logs, &recovered),
        };
        slot.expect("each slot has a log")
    }
}

/// Starts a client in a slot, with one to three sessions.
pub(super) fn start(run: &Rc<Run>, slot: u16, after: After, random: &mut Random) {
    let place = place(run, random);
    let process = run.world.add_process(place.0);
    let life = Life { process, grant: run.grant(), is_dead: false };
    run.lives.borrow_mut().insert(slot, life);
    run.seat(slot, Some(life.grant));
    let slab = run.slab(life.grant);
    let client = |_| Client::new(run, slot, life.grant, slab.clone());
    let sessions: Vec<_> = (0..1 + random.below(3)).map(client).collect();
    let server = Server::draw(random);
    let is_followed = random.chance(300);
    let here = run.clone();
    run.tasks.spawn(process, async move {
        let shared = after.slot(&here, slot, life.grant);
        let workers = match server.start(&here, process, place, life.grant, shared).await {
            Ok(workers) => workers,
            Err(error) => return gives_up(&here, slot, life.grant, &error.to_string()),
        };
        let server = Rc::new(ComputeServer {
            run: here.clone(),
            slot,
            grant: life.grant,
            is_followed,
            left: Cell::new(sessions.len() + 1),
            worker: RefCell::new(workers.first().cloned()),
            _staying: here.left.stay(),
        });
        for (client, worker) in sessions.into_iter().zip(workers.iter().cycle()) {
            let (worker, server) = (worker.clone(), server.clone());
            here.tasks.spawn(process, async move {
                client.live(worker).await;
                server.ended().await;
            });
        }
        // Workers without sessions leave at once.
        for worker in workers {
            leave(&here, (slot, life.grant), worker).await;
        }
        server.ended().await;
    });
}

/// A compute server, that is, the client of a slot: what its sessions share.
struct ComputeServer {
    run: Rc<Run>,
    slot: u16,
    grant: Epoch,
    /// When this client has left the slot, another client takes it.
    is_followed: bool,
    /// Sessions that have not ended; one more until workers without sessions have left.
    left: Cell<usize>,
    /// The worker with which the last session leaves the slot.
    worker: RefCell<Option<Rc<Worker<Chosen>>>>,
    _staying: Staying,
}

impl ComputeServer {
    /// Called when one of these has ended. After the last one, the client may leave its slot.
    async fn ended(&self) {
        self.left.set(self.left.get() - 1);
        if self.left.get() > 0 {
            return;
        }
        let worker = self.worker.borrow_mut().take().expect("the last one ends once");
        let mut last = None;
        if self.is_followed || self.run.faults.stop_clients() {
            last = self.leave_slot(&worker).await.filter(|_| self.is_followed);
        }
        leave(&self.run, (self.slot, self.grant), worker).await;
        // If the slot is being recovered, the recoverer starts the next client.
        if let Some(last) = last.filter(|_| !is_given_up(&self.run, self.slot, self.grant)) {
            start(&self.run, self.slot, After::Count(last), &mut self.run.ledger.notes.random());
        }
    }

    /// The client gives up its slot. Returns the count after which the next client begins.
    async fn leave_slot(&self, worker: &Worker<Chosen>) -> Option<u64> {
        let word = self.run.word(self.slot);
        let left = worker.leave_slot().await;
        if is_given_up(&self.run, self.slot, self.grant) {
            return None;
        }
        match left {
            Ok(last) => {
                if self.run.word(self.slot) != last {
                    self.run
                        .ledger
                        .notes
                        .complain(format!("slot {} was left, but its word is not its last count", self.slot));
                }
                self.run.seat(self.slot, None);
                Some(if mutation::is(broken::LEFT_BEHIND) { word } else { last })
            }
            Err(error) => {
                gives_up(&self.run, self.slot, self.grant, &error.to_string());
                None
            }
        }
    }
}

/// Lets a worker leave if this is its last user.
async fn leave(run: &Rc<Run>, (slot, grant): (u16, Epoch), worker: Rc<Worker<Chosen>>) {
    if let Ok(worker) = Rc::try_unwrap(worker)
        && let Err(error) = worker.leave().await
    {
        gives_up(run, slot, grant, &error.to_string());
    }
}

/// Whether the slot of a client is being recovered, or has been.
fn is_given_up(run: &Run, slot: u16, grant: Epoch) -> bool {
    run.lives.borrow().get(&slot).is_some_and(|life| life.grant != grant || life.is_dead)
}

/// A client cannot continue. If its slot is not being recovered, starts a recovery where faults may stop
/// clients, and complains elsewhere.
fn gives_up(run: &Rc<Run>, slot: u16, grant: Epoch, why: &str) {
    if is_given_up(run, slot, grant) {
        return;
    }
    if run.faults.stop_clients() {
        recovering::recover_seat(run, slot, grant);
    } else {
        run.ledger.notes.complain(format!("the client of slot {slot} cannot go on: {why}"));
    }
}

/// A session.
pub(super) struct Client {
    run: Rc<Run>,
    slot: u16,
    grant: Epoch,
    transactor: Transactor,
    _staying: Staying,
}

impl Client {
    pub(super) fn new(run: &Rc<Run>, slot: u16, grant: Epoch, slab: Option<Arc<Slab>>) -> Client {
        let table = match slab {
            Some(slab) => run.table(grant).with_slab(slab).expect("places have room for pointers"),
            None => run.table(grant),
        };
        let payloads = run.clone();
        let payload_of = Rc::new(move |value| payload_of(&payloads, value));
        let transactor = Transactor::new(&run.ledger, table).with_payloads(payload_of);
        Client { run: run.clone(), slot, grant, transactor, _staying: run.left.stay() }
    }

    async fn live(mut self, worker: Rc<Worker<Chosen>>) {
        let mut session = SessionState::new();
        for _ in 0..ROUNDS {
            if self.transactor.random.chance(IDLES_PERMILLE)
                && let Err(why) = self.idle(&worker).await
            {
                gives_up(&self.run, self.slot, self.grant, &why);
                break;
            }
            let wastes = self.run.faults.drops && self.transactor.random.chance(WASTES_PERMILLE);
            if wastes && let Err(why) = wasting::use_up_counts(&worker, &self.transactor.table).await {
                gives_up(&self.run, self.slot, self.grant, &why);
                break;
            }
            let gathers = self.run.crowds_left.get() > 0 && self.transactor.random.chance(CROWD_PERMILLE);
            if gathers
                && let Err(why) = crowd::commit_together(&self.run, (self.slot, self.grant), &worker).await
            {
                gives_up(&self.run, self.slot, self.grant, &why);
                break;
            }
            // After using up counts without a trace, the session writes, and abandons the write, perhaps in
            // the middle of the commit.
            let is_only_reading = !wastes && self.transactor.random.chance(400);
            let records: Vec<_> = (0..1 + self.transactor.random.below(MOST_RECORDS))
                .map(|_| {
                    let record = self.transactor.random.below(self.transactor.table.records());
                    (record, !is_only_reading && self.transactor.random.chance(600))
                })
                .collect();
            let is_impatient = wastes || self.transactor.random.chance(GIVEN_UP_PERMILLE);
            let gives_up_after = (self.run.faults.drops && is_impatient)
                .then(|| Duration::from_nanos(self.transactor.random.below(MOST_PATIENCE_NS)));
            let run = self.run.clone();
            let done = match gives_up_after {
                None => self.transact(&worker, &mut session, &records).await,
                Some(after) => {
                    let patience = pin!(run.world.sleep(after));
                    let transacting = self.transact(&worker, &mut session, &records);
                    let ended = match select(pin!(transacting), patience).await {
                        Either::Left((done, _)) => Some(done),
                        Either::Right(_) => None,
                    };
                    // The session does not learn of its own commit, if there was one.
                    self.transactor.name = if ended.is_some() {
                        self.transactor.name
                    } else {
                        run.ledger.notes.next_name() as u32
                    };
                    ended.unwrap_or(Ok(false))
                }
            };
            if let Err(why) = done {
                gives_up(&self.run, self.slot, self.grant, &why);
                break;
            }
        }
        leave(&self.run, (self.slot, self.grant), worker).await;
    }

    pub(super) fn draw_record(&mut self) -> u64 {
        self.transactor.random.below(self.transactor.table.records())
    }

    /// Makes the client write only short payloads from now on, because there may be no room for long ones.
    pub(super) fn be_frugal(&mut self) {
        self.transactor.may_write = is_short;
    }

    /// Idles for a while, then announces the worker's progress and frees blocks of the slab that are no
    /// longer needed.
    async fn idle(&mut self, worker: &Worker<Chosen>) -> Result<(), String> {
        self.run.world.sleep(Duration::from_nanos(self.transactor.random.below(MOST_IDLE_NS))).await;
        worker.keep_up().await.map_err(|error: BeginError| error.to_string())?;
        worker.tend(&self.transactor.table).await.map_err(|error| error.to_string())
    }

    /// Runs one transaction. Returns whether it committed, or why the client cannot continue.
    pub(super) async fn transact(
        &mut self,
        worker: &Worker<Chosen>,
        session: &mut SessionState,
        records: &[(u64, bool)],
    ) -> Result<bool, String> {
        match self.transactor.transact(worker, session, records).await {
            Ok(is_committed) => Ok(is_committed),
            // A client that was declared dead loses its announcements, so its snapshot may become too old.
            // Its earlier reads are judged all the same.
            Err(Stopped::Read(ReadError::SnapshotTooOld))
                if is_given_up(&self.run, self.slot, self.grant) =>
            {
                Ok(false)
            }
            Err(Stopped::Read(ReadError::Damaged)) if self.run.faults.damage => Ok(false),
            Err(stopped) => Err(stopped.to_string()),
        }
    }
}
