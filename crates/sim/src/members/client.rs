//! A member's clients, and what their sessions do. Some read and write records, whose history is judged
//! ([`Transactor`]); some use the accounts of a [bank](super::bank); others look at [tables](super::tables)
//! that are dropped and created again.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use farpool_namdb::{ClientCore, Ended, TxError};
use farpool_txn::{ReadError, SessionState};
use futures_util::future::{Either, join_all, select};

use super::bank::Banker;
use super::member::Member;
use super::surroundings::Surroundings;
use super::{Run, indexed, tables};
use crate::transacting::{Stopped, Transactor};

/// A client, as it ships.
pub(super) type Client = ClientCore<Surroundings>;

/// Transactions of each session.
const ROUNDS: u64 = 6;
/// Records that a transaction touches at most.
const MOST_RECORDS: u64 = 4;
/// The share of rounds before which a session idles, in thousandths, and the longest idle time.
const IDLES_PERMILLE: u32 = 200;
const MOST_IDLE_NS: u64 = 200_000;
/// The share of clients that use the table with an index, in thousandths.
const SEARCHES_PERMILLE: u32 = 500;
/// In runs in which sessions abandon transactions: the share of those, in thousandths, and the longest time
/// until a session abandons one.
const GIVEN_UP_PERMILLE: u32 = 40;
const MOST_WAIT_NS: u64 = 80_000;

/// Counts down a member's unfinished tasks when it is dropped.
pub(super) struct TaskGuard(pub(super) Rc<Member>);

impl Drop for TaskGuard {
    fn drop(&mut self) {
        self.0.busy.set(self.0.busy.get() - 1);
    }
}

/// Starts a client with a few sessions.
pub(super) fn start(member: &Rc<Member>) {
    let (here, busy, part) = (member.clone(), TaskGuard(member.clone()), member.add_client());
    member.run.tasks.spawn(part, async move {
        if let Err(why) = work(&here, part).await {
            here.run.cannot_go_on(&here, &why);
        }
        drop(busy);
    });
}

/// Joins a client to a member. The client runs in this process of the world.
pub(super) async fn join(
    member: &Rc<Member>,
    part: farpool_fabric::sim::ProcessId,
) -> Result<Client, TxError> {
    let endpoint = member.endpoint(part);
    member.keep_polling(part, &endpoint);
    Client::join(member.core.clone(), endpoint).await.map_err(|error| match error {
        farpool_namdb::DatabaseError::Ended(ended) => TxError::Ended(ended),
        error => TxError::roll_back(error),
    })
}

async fn work(member: &Rc<Member>, part: farpool_fabric::sim::ProcessId) -> Result<(), TxError> {
    let mut client = join(member, part).await?;
    let done = work_as(member, &client).await;
    client.leave().await;
    done
}

async fn work_as(member: &Member, client: &Client) -> Result<(), TxError> {
    let run = &member.run;
    let rows = tables::open_rows(run, client).await?;
    let (mut random, mut random_of_index) = (run.ledger.notes.random(), run.ledger.notes.random());
    let judged = (0..1 + random.below(2)).map(|_| {
        let transactor = Transactor::new(&run.ledger, rows.records());
        live(run, client, transactor)
    });
    let judged = join_all(judged.collect::<Vec<_>>());
    let banking = async {
        if random.chance(500) { Banker::open(run, client).await?.live(ROUNDS).await } else { Ok(()) }
    };
    let looking = tables::look_on(run, client, ROUNDS);
    let searching = async {
        if random_of_index.chance(SEARCHES_PERMILLE) {
            indexed::live(run, client, ROUNDS).await
        } else {
            Ok(())
        }
    };
    let (judged, banked, looked, searched) =
        futures_util::future::join4(judged, banking, looking, searching).await;
    judged.into_iter().collect::<Result<(), _>>().and(banked).and(looked).and(searched)
}

async fn live(run: &Run, client: &Client, mut transactor: Transactor) -> Result<(), TxError> {
    let mut session = SessionState::new();
    for _ in 0..ROUNDS {
        if client.member().has_ended() {
            break;
        }
        if transactor.random.chance(IDLES_PERMILLE) {
            run.world.sleep(Duration::from_nanos(transactor.random.below(MOST_IDLE_NS))).await;
        }
        let is_only_reading = transactor.random.chance(300);
        let records: Vec<_> = (0..1 + transactor.random.below(MOST_RECORDS))
            .map(|_| {
                let record = run.draw_record(&mut transactor.random, &transactor.table);
                (record, !is_only_reading && transactor.random.chance(600))
            })
            .collect();
        if !(run.faults.drops && transactor.random.chance(GIVEN_UP_PERMILLE)) {
            transact(client, &mut transactor, &mut session, &records).await?;
            continue;
        }
        let after = Duration::from_nanos(transactor.random.below(MOST_WAIT_NS));
        let wait = pin!(run.world.sleep(after));
        let is_given_up = {
            let transacting = pin!(transact(client, &mut transactor, &mut session, &records));
            match select(transacting, wait).await {
                Either::Left((done, _)) => {
                    done?;
                    false
                }
                Either::Right(_) => true,
            }
        };
        if is_given_up {
            // The session does not learn of its own commit, if there was one.
            transactor.name = run.ledger.notes.next_name() as u32;
        }
    }
    Ok(())
}

/// Runs a judged transaction of a client. Returns whether it committed.
pub(super) async fn transact(
    client: &Client,
    transactor: &mut Transactor,
    session: &mut SessionState,
    records: &[(u64, bool)],
) -> Result<bool, TxError> {
    let _busy = client.mark_busy().await?;
    client.member().check().map_err(TxError::Ended)?;
    let done = transactor.transact(client.worker(), session, records).await;
    done.map_err(|stopped| match stopped {
        // The snapshot of a client that runs a transaction is protected.
        Stopped::Read(ReadError::SnapshotTooOld) => TxError::SnapshotTooOld,
        Stopped::Read(error @ ReadError::Damaged) => TxError::Damaged(error.to_string()),
        // A client does the same on such an error: a member must not go on if it does not know what is in
        // flight.
        stopped => {
            client.member().end(Ended::Failed(stopped.to_string()));
            TxError::Ended(Ended::Failed(stopped.to_string()))
        }
    })
}
