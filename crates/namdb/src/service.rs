//! What a compute server does beside its transactions: says that it lives, looks after those that do not, and does for all what one has to.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use farpool_fabric::{Endpoint, OpError, block_on};
use farpool_txn::horizon::forget;
use farpool_txn::membership::{
    Care, CareError, Role, SeatWords, Watch, beat, give_up_role, leave_seat, look_after, read_seats, role_of,
    take_role,
};
use farpool_txn::oracle::{fetch, publish};
use farpool_txn::recovery::RecoveryError;
use farpool_txn::{Memory, MemoryError, Shipped};
use futures_util::future::join3;

use crate::collecting::collect_if_nobody_does;
use crate::database::Shared;
use crate::error::{DatabaseError, Ended};

/// A member says that it lives so many times before it is taken for dead: some may be late.
const BEATS: u32 = 10;
/// How often roles are looked at that nobody may have.
pub(crate) const ROLE_PAUSE: Duration = Duration::from_millis(50);

/// A compute server, as its database knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberInfo {
    /// Its slot.
    pub slot: u16,
    /// How often it has said that it lives.
    pub beats: u64,
    /// It is this process.
    pub is_self: bool,
    /// It publishes cuts.
    pub publishes: bool,
    /// Somebody looks after what it left.
    pub is_looked_after: bool,
}

/// Starts the threads; each ends when the process's part in the database does.
pub(crate) fn start(shared: &Arc<Shared>) -> Result<Vec<JoinHandle<()>>, DatabaseError> {
    let thread = |name: &str, run: fn(&Shared) -> Result<(), DatabaseError>| {
        let shared = shared.clone();
        let spawned = std::thread::Builder::new().name(name.into()).spawn(move || {
            if let Err(error) = run(&shared) {
                failed(&shared, error);
            }
        });
        spawned.map_err(DatabaseError::Thread)
    };
    let mut threads = vec![
        thread("db-members", take_part)?,
        thread("db-publisher", publish_if_nobody_does)?,
        thread("db-collector", collect_if_nobody_does)?,
    ];
    if shared.fetched.is_some() {
        threads.push(thread("db-fetcher", fetch_for_all)?);
    }
    Ok(threads)
}

/// Ends the process's part in the database: the service has failed. What it finds is seldom the reason itself.
fn failed(shared: &Shared, error: DatabaseError) -> DatabaseError {
    shared.end(match (shared.leases.lost().first(), &error) {
        (Some(region), _) => Ended::LeaseEnded(*region),
        (None, DatabaseError::Memory(MemoryError::Failed(OpError::Refused(_)))) => Ended::TakenForDead,
        (None, error) => Ended::Failed(error.to_string()),
    });
    error
}

/// Says that this member lives, and looks after others; at the end gives the seat back.
fn take_part(shared: &Shared) -> Result<(), DatabaseError> {
    let memory = shared.memory()?;
    let endpoint = memory.endpoint().clone();
    block_on(&endpoint, async {
        let (beats, care, idle) = join3(
            or_end(shared, say_alive(shared, &memory)),
            or_end(shared, look_after_others(shared, &memory)),
            or_end(shared, forget_idle(shared, &memory)),
        )
        .await;
        beats.and(care).and(idle)?;
        // Not while something is under way, or somebody may begin: then the others find that this member lives no more.
        if shared.workers.is_empty() && shared.slot.retire() {
            leave_seat(&memory, &shared.at().members(), &shared.seat).await?;
        }
        Ok(())
    })
}

/// The others must shut a member out of which a part has failed, since what was sent may still land: so nothing of it goes on.
async fn or_end(
    shared: &Shared,
    part: impl Future<Output = Result<(), DatabaseError>>,
) -> Result<(), DatabaseError> {
    part.await.map_err(|error| failed(shared, error))
}

/// Until the end, or until it cannot be said any more.
async fn say_alive(shared: &Shared, memory: &Memory) -> Result<(), DatabaseError> {
    let at = shared.at().members();
    let mut count = 0;
    while !shared.is_over() {
        count += 1;
        beat(memory, &at, &shared.seat, count).await?;
        if let Some(region) = shared.leases.lost().first() {
            shared.end(Ended::LeaseEnded(*region));
        }
        pause(memory.endpoint(), shared, shared.patience / BEATS).await;
    }
    Ok(())
}

/// Shuts out who does not live any more, and undoes what they left.
async fn look_after_others(shared: &Shared, memory: &Memory) -> Result<(), DatabaseError> {
    let (at, oracle, horizon) = (shared.at().members(), shared.at().oracle(), shared.at().horizon());
    let mut watch = Watch::new(shared.patience);
    while !shared.is_over() {
        let seats = read_seats(memory, &at).await?;
        let suspects = watch.look(memory.endpoint().now_ns(), &seats);
        for suspect in suspects.into_iter().filter(|suspect| suspect.claim != shared.seat.claim) {
            let log = shared.at().log(suspect.slot);
            let places = shared.plan.workers(suspect.slot);
            let (log, horizon) = (&log, (&horizon, places));
            let care = Care { memory, at: &at, oracle: &oracle, log, horizon, own: shared.seat };
            let fence = async |region: usize, grant| {
                shared.leases.fence_grant(shared.grants[region].region, grant).await
            };
            let slot = suspect.slot.index();
            match look_after(&care, suspect, fence).await {
                Ok(Some(recovered)) => {
                    let undone = recovered.rolled_back.len();
                    tracing::warn!(slot, undone, "a compute server was silent for too long and was shut out");
                }
                Ok(None) => {} // somebody else does it
                Err(CareError::Recovery(RecoveryError::Memory(error))) => return Err(error.into()),
                Err(error) => {
                    tracing::error!(slot, %error, "a compute server is to be shut out; trying again")
                }
            }
        }
        pause(memory.endpoint(), shared, shared.patience / BEATS).await;
    }
    Ok(())
}

/// Takes the words of clients away that have nothing to do: what their snapshots needed may go.
async fn forget_idle(shared: &Shared, memory: &Memory) -> Result<(), DatabaseError> {
    let (at, first) = (shared.at().horizon(), shared.plan.workers(shared.seat.slot).start);
    while !shared.is_over() {
        for idle in shared.workers.idle() {
            let place = first + idle.place();
            // The end comes before the client is told, whose next word might be taken away by what was sent.
            forget(memory, &at, place..place + 1).await.map_err(|error| failed(shared, error.into()))?;
        }
        pause(memory.endpoint(), shared, ROLE_PAUSE).await;
    }
    Ok(())
}

/// Publishes cuts while nobody else does.
fn publish_if_nobody_does(shared: &Shared) -> Result<(), DatabaseError> {
    let memory = shared.memory()?;
    let endpoint = memory.endpoint().clone();
    let (at, claim) = (shared.at().members(), shared.seat.claim);
    block_on(&endpoint, async {
        while !shared.is_over() {
            if take_role(&memory, &at, Role::Publisher, claim).await? {
                publish::<Shipped>(&memory, shared.at().board(), Duration::ZERO, || shared.is_over()).await?;
                give_up_role(&memory, &at, Role::Publisher, claim).await?;
            }
            pause(&endpoint, shared, ROLE_PAUSE).await;
        }
        Ok(())
    })
}

/// Reads what is published, for all clients.
fn fetch_for_all(shared: &Shared) -> Result<(), DatabaseError> {
    let (memory, oracle) = (shared.memory()?, shared.at().oracle());
    let Some(fetched) = &shared.fetched else { return Ok(()) };
    let fetching = fetch::<Shipped>(&memory, &oracle, fetched, Duration::ZERO, || shared.is_over());
    Ok(block_on(memory.endpoint(), fetching)?)
}

/// Sleeps, but not beyond the end.
pub(crate) async fn pause(endpoint: &Endpoint, shared: &Shared, long: Duration) {
    let until = endpoint.now_ns() + long.as_nanos() as u64;
    while endpoint.now_ns() < until && !shared.is_over() {
        endpoint.sleep(long.min(ROLE_PAUSE)).await;
    }
}

/// The members, as the seats say.
pub(crate) fn members(shared: &Shared) -> Result<Vec<MemberInfo>, DatabaseError> {
    let memory = shared.memory()?;
    let at = shared.at().members();
    let (seats, publisher) = block_on(memory.endpoint(), async {
        let seats = read_seats(&memory, &at).await?;
        let publisher = role_of(&memory, &at, Role::Publisher).await?;
        Ok::<_, MemoryError>((seats, publisher))
    })?;
    let info = |(slot, seat): (u16, &SeatWords)| {
        let claim = seat.claim?;
        Some(MemberInfo {
            slot,
            beats: seat.beat,
            is_self: claim == shared.seat.claim,
            publishes: publisher == Some(claim),
            is_looked_after: seat.carer.is_some(),
        })
    };
    Ok((0..).zip(&seats).filter_map(info).collect())
}
