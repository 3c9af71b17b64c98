//! What a compute server does beside its transactions: says that it lives, looks after those that do not, and
//! does for all what one has to.

mod caring;
mod threads;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use farpool_fabric::{Endpoint, block_on};
use farpool_txn::horizon::forget;
use farpool_txn::membership::{
    Duty, Part, Role, SeatWords, Vouching, beat, fill_role, leave_seat, read_seats, role_of, signs_of,
};
use farpool_txn::oracle::{LOOK, fetch, publish};
use farpool_txn::{Memory, Shipped};
use futures_util::future::{TryFutureExt, join, try_join_all};

use caring::look_after_others;

use crate::collecting::collect_if_nobody_does;
use crate::database::Shared;
use crate::error::{DatabaseError, Ended};
use crate::trouble::failed;

/// A member says that it lives so many times before it is taken for dead: some may be late.
pub(crate) const BEATS: u32 = 10;
/// How often roles are looked at that nobody may have.
pub(crate) const ROLE_PAUSE: Duration = Duration::from_millis(50);

/// A node that is silent for so long is lost, since leases end then. A part of a compute server that may be
/// waiting for a node is not taken for stuck earlier.
const NODE_SILENCE: Duration = Duration::from_secs(10);

/// Why a compute server ends that goes on otherwise.
pub(crate) const IN_DOUBT: &str = "a commit of this compute server is in doubt: open the database again";

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
    let fetches = shared.fetched.is_some().then_some(("fetcher", fetch_for_all as Work));
    let duties = [
        ("publisher", publish_if_nobody_does as Work),
        ("collector", collect_if_nobody_does),
        ("carer", look_after_others),
    ];
    // All duties begin before any thread can find that the process's part has ended.
    let duties: Vec<_> = duties
        .into_iter()
        .chain(fetches)
        .map(|(name, work)| (name, work, shared.duties.begin(name)))
        .collect();
    let mut started = vec![threads::start(shared, "members", take_part)?];
    for (name, work, duty) in duties {
        started.push(threads::start(shared, name, move |shared| {
            work(shared, &duty)?;
            duty.ends();
            Ok(())
        })?);
    }
    Ok(started)
}

/// The work of a duty, which shows its progress.
type Work = fn(&Shared, &Duty) -> Result<(), DatabaseError>;

/// The interval at which a duty shows its progress.
pub(crate) fn show_pause(shared: &Shared) -> Duration {
    shared.patience / BEATS
}

/// Says that this member lives; at the end gives the seat back.
fn take_part(shared: &Shared) -> Result<(), DatabaseError> {
    let memory = shared.memory()?;
    let endpoint = memory.endpoint().clone();
    block_on(&endpoint, async {
        let (beats, idle) =
            join(or_end(shared, say_alive(shared, &memory)), or_end(shared, forget_idle(shared, &memory)))
                .await;
        let mut alive = beats?;
        idle?;
        // Not while something is under way, or somebody may begin: then the others find that this member
        // lives no more.
        if shared.workers.is_empty() && shared.slot.retire() {
            let (at, duties) = (shared.at().members(), &shared.duties);
            // Of a member that has failed the others are to find that.
            let meanwhile = async || match shared.ended() {
                Ended::Closed => alive.say(shared, &memory).await,
                _ => Ok(()),
            };
            let pause = ROLE_PAUSE.min(shared.patience / BEATS);
            leave_seat::<Shipped, _>(&memory, &at, &shared.seat, duties, pause, meanwhile).await?;
            shared.mark_left();
        }
        Ok(())
    })
}

/// The others must shut a member out of which a part has failed, since what was sent may still land: so
/// nothing of it goes on.
async fn or_end<T>(
    shared: &Shared,
    part: impl Future<Output = Result<T, DatabaseError>>,
) -> Result<T, DatabaseError> {
    part.await.map_err(|error| failed(shared, error))
}

/// The heartbeats of a member.
struct Alive {
    vouching: Vouching<Shipped>,
    count: u64,
    /// The part of which the log says that it makes no progress.
    told: Option<Part>,
}

impl Alive {
    fn new(shared: &Shared) -> Alive {
        Alive { vouching: Vouching::new(shared.patience, NODE_SILENCE), count: 0, told: None }
    }

    /// Sends a heartbeat, unless a part of this process makes no progress.
    async fn say(&mut self, shared: &Shared, memory: &Memory) -> Result<(), DatabaseError> {
        let signs = signs_of(&shared.duties, &shared.slot);
        let stuck = self.vouching.look(memory.endpoint().now_ns(), &signs);
        if stuck.is_none() {
            self.count += 1;
            beat(memory, &shared.at().members(), &shared.seat, self.count).await?;
        }
        if self.told != stuck {
            match stuck {
                Some(part) => {
                    tracing::error!(%part, "no progress: the other compute servers will shut this one out")
                }
                None => tracing::warn!("all parts of this compute server make progress again"),
            }
            self.told = stuck;
        }
        Ok(())
    }
}

/// Until the end, or until it cannot be said any more.
async fn say_alive(shared: &Shared, memory: &Memory) -> Result<Alive, DatabaseError> {
    let mut alive = Alive::new(shared);
    while !shared.is_over() {
        alive.say(shared, memory).await?;
        if let Some(region) = shared.leases.lost().first() {
            shared.end(Ended::LeaseEnded(*region));
        }
        if shared.slot.is_in_doubt() {
            // What it has locked stays so until others have looked after its seat.
            shared.end(Ended::Failed(IN_DOUBT.to_owned()));
        }
        pause(memory.endpoint(), shared, shared.patience / BEATS).await;
    }
    Ok(alive)
}

/// Takes the words of clients away that have nothing to do: what their snapshots needed may go.
async fn forget_idle(shared: &Shared, memory: &Memory) -> Result<(), DatabaseError> {
    let (at, first) = (shared.at().horizon(), shared.plan.workers(shared.seat.slot).start);
    while !shared.is_over() {
        // What is in doubt may still be written: nobody may be given the memory, until this member was shut
        // out.
        let idle = if shared.slot.is_in_doubt() { Vec::new() } else { shared.workers.idle() };
        for idle in idle {
            let place = first + idle.place();
            forget(memory, &at, place..place + 1).await?;
            // Only after the answer: before it, the write may still land and clear the next word there, of
            // this client or another.
            idle.forgotten();
        }
        pause(memory.endpoint(), shared, ROLE_PAUSE).await;
    }
    Ok(())
}

/// Publishes cuts of all parts while nobody else does.
fn publish_if_nobody_does(shared: &Shared, duty: &Duty) -> Result<(), DatabaseError> {
    let memory = shared.memory()?;
    let (at, role) = (shared.at().members(), (Role::Publisher, shared.seat.claim));
    let oracle = shared.at().oracle();
    let pace = oracle.pace(LOOK);
    let work = || {
        let publish_part =
            |part: &_| publish::<Shipped>(&memory, *part, pace, duty.rounds(|| shared.is_over()));
        try_join_all(oracle.parts().iter().map(publish_part)).map_ok(drop)
    };
    let published = fill_role(&memory, &at, role, ROLE_PAUSE, || shared.is_over(), work);
    Ok(block_on(memory.endpoint(), duty.does(&memory, show_pause(shared), published))?)
}

/// Reads what is published, for all clients.
fn fetch_for_all(shared: &Shared, duty: &Duty) -> Result<(), DatabaseError> {
    let (memory, oracle) = (shared.memory()?, shared.at().oracle());
    let Some(fetched) = &shared.fetched else { return Ok(()) };
    let fetching =
        fetch::<Shipped>(&memory, &oracle, fetched, Duration::ZERO, duty.rounds(|| shared.is_over()));
    Ok(block_on(memory.endpoint(), duty.does(&memory, show_pause(shared), fetching))?)
}

/// Sleeps, but not beyond the end.
async fn pause(endpoint: &Endpoint, shared: &Shared, long: Duration) {
    let until = endpoint.now_ns() + long.as_nanos() as u64;
    while endpoint.now_ns() < until && !shared.is_over() {
        endpoint.sleep(long.min(ROLE_PAUSE)).await;
    }
}

/// The members, as the seats say.
pub(crate) fn members(shared: &Shared) -> Result<Vec<MemberInfo>, DatabaseError> {
    let looked = shared.memory().and_then(|memory| {
        let at = shared.at().members();
        block_on(memory.endpoint(), async {
            let seats = read_seats(&memory, &at).await?;
            Ok((seats, role_of(&memory, &at, Role::Publisher).await?))
        })
    });
    let (seats, publisher) = looked.map_err(|error| shared.explained_here(error))?;
    let info = |(slot, seat): (u16, &SeatWords)| {
        let claim = seat.claim?;
        Some(MemberInfo {
            slot,
            beats: seat.beat,
            is_self: claim == shared.seat.claim,
            publishes: publisher == Some(claim),
            // What a carer has left who died in the meantime means nothing.
            is_looked_after: seat.carer.is_some() && seats.iter().any(|other| other.claim == seat.carer),
        })
    };
    Ok((0..).zip(&seats).filter_map(info).collect())
}
