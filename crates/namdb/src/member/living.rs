//! What a member does beside its clients' transactions: it sends heartbeats, clears the words of idle
//! clients, fills roles that one member has for all, and gives its seat back at the end.

use std::time::Duration;

use farpool_fabric::Endpoint;
use farpool_txn::Memory;
use farpool_txn::horizon::forget;
use farpool_txn::membership::{
    Duty, Part, Role, SeatWords, Vouching, beat, fill_role, leave_seat, read_seats, role_of, signs_of,
};
use farpool_txn::oracle::{fetch, publish};
use farpool_wire::Epoch;
use futures_util::future::{TryFutureExt, join, try_join_all};

use super::{BEATS, MemberCore};
use crate::environment::{Environment, News};
use crate::error::{DatabaseError, Ended};
use crate::rules::MemberRules;

/// Why a member ends that could go on otherwise.
pub(crate) const IN_DOUBT: &str = "a commit of this compute server is in doubt: open the database again";

/// A compute server, as its database knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberInfo {
    /// Its slot.
    pub slot: u16,
    /// How many heartbeats it has sent.
    pub beats: u64,
    /// It is this process.
    pub is_self: bool,
    /// It publishes cuts.
    pub publishes: bool,
    /// Another member recovers its seat.
    pub is_looked_after: bool,
}

/// The heartbeats of a member.
struct Alive<R> {
    vouching: Vouching<R>,
    count: u64,
    /// The part of which it was told that it makes no progress.
    stuck: Option<Part>,
}

impl<E: Environment> MemberCore<E> {
    /// Takes part in the database until the member has ended: sends heartbeats, and at the end gives the seat
    /// back.
    pub async fn take_part(&self, endpoint: Endpoint) {
        let done = async {
            let memory = self.memory(endpoint).await?;
            let alive = self.or_end(self.say_alive(&memory));
            let (alive, forgotten) = join(alive, self.or_end(self.forget_idle(&memory))).await;
            let mut alive = alive?;
            forgotten?;
            // Not while a client is there, or something is in flight: then the others recover the seat.
            if self.workers.is_empty() && self.slot.retire() {
                self.leave(&memory, &mut alive).await?;
            }
            Ok(())
        };
        let _ = self.or_end(done).await; // the member has ended, and knows why
    }

    /// The result of a part of the member. If the part has failed, all of the member ends: what the part has
    /// sent may still land, so the others must shut this member out, and that takes until its heartbeats
    /// stop.
    pub(super) async fn or_end<T>(
        &self,
        part: impl Future<Output = Result<T, DatabaseError>>,
    ) -> Result<T, DatabaseError> {
        part.await.map_err(|error| self.fails(error))
    }

    async fn leave(&self, memory: &Memory, alive: &mut Alive<E::Rules>) -> Result<(), DatabaseError> {
        // The others are to notice that a member has failed: so it sends no more heartbeats.
        let meanwhile = async || match self.ended() {
            Ended::Closed => self.say(alive, memory).await,
            _ => Ok(()),
        };
        let pause = self.timing().role_pause.min(self.patience / BEATS);
        let members = self.at().members();
        leave_seat::<E::Rules, _>(memory, &members, &self.seat, &self.duties, pause, meanwhile).await?;
        self.mark_left();
        Ok(())
    }

    /// Sends heartbeats until the member has ended.
    async fn say_alive(&self, memory: &Memory) -> Result<Alive<E::Rules>, DatabaseError> {
        let vouching = Vouching::new(self.patience, self.timing().node_silence);
        let mut alive = Alive { vouching, count: 0, stuck: None };
        while !self.is_over() {
            self.say(&mut alive, memory).await?;
            if let Some(region) = self.environment.lost_region() {
                self.end(Ended::LeaseEnded(region));
            }
            if self.slot.is_in_doubt() {
                // The records that it locks stay locked until others have recovered the seat.
                self.end(Ended::Failed(IN_DOUBT.to_owned()));
            }
            self.pause(memory.endpoint(), self.patience / BEATS).await;
        }
        Ok(alive)
    }

    /// Sends a heartbeat, unless a part of this member makes no progress.
    async fn say(&self, alive: &mut Alive<E::Rules>, memory: &Memory) -> Result<(), DatabaseError> {
        let signs = signs_of(&self.duties, &self.slot);
        let stuck = alive.vouching.look(memory.endpoint().now_ns(), &signs);
        if stuck.is_none() {
            alive.count += 1;
            beat(memory, &self.at().members(), &self.seat, alive.count).await?;
        }
        if alive.stuck != stuck {
            self.environment.tell(stuck.map_or(News::Moving, News::Stuck));
            alive.stuck = stuck;
        }
        Ok(())
    }

    /// Clears the words of idle clients, so that the versions that their snapshots needed may go.
    async fn forget_idle(&self, memory: &Memory) -> Result<(), DatabaseError> {
        let (at, first) = (self.at().horizon(), self.layout.clients(self.seat.slot).start);
        while !self.is_over() {
            // A commit that is in doubt may still be written: what its snapshot needs stays until this member
            // was shut out.
            let idle = if self.slot.is_in_doubt() { Vec::new() } else { self.workers.idle() };
            if !E::Rules::spares_busy_clients() {
                forget(memory, &at, first..first + 1).await?;
            }
            for idle in idle {
                let place = first + idle.place();
                forget(memory, &at, place..place + 1).await?;
                // Only after the answer: before it, the write may still land, and clear the next word there,
                // of this client or another.
                idle.forgotten();
            }
            self.pause(memory.endpoint(), self.timing().role_pause).await;
        }
        Ok(())
    }

    /// Publishes cuts of all parts of the oracle while no other member does.
    pub(super) async fn publish_if_nobody_does(
        &self,
        memory: &Memory,
        duty: &Duty,
    ) -> Result<(), DatabaseError> {
        let oracle = self.at().oracle();
        let pace = oracle.pace(self.timing().oracle_look);
        let work = || {
            let publish_part =
                |part: &_| publish::<E::Rules>(memory, *part, pace, duty.rounds(|| self.is_over()));
            try_join_all(oracle.parts().iter().map(publish_part)).map_ok(drop)
        };
        let (at, role) = (self.at().members(), (Role::Publisher, self.seat.claim));
        let published = fill_role(memory, &at, role, self.timing().role_pause, || self.is_over(), work);
        Ok(duty.does(memory, self.patience / BEATS, published).await?)
    }

    /// Reads cuts for all clients of this member.
    pub(super) async fn fetch_for_all(&self, memory: &Memory, duty: &Duty) -> Result<(), DatabaseError> {
        let (oracle, no_pause) = (self.at().oracle(), Duration::ZERO);
        let Some(fetched) = &self.fetched else { return Ok(()) };
        let fetching = fetch::<E::Rules>(memory, &oracle, fetched, no_pause, duty.rounds(|| self.is_over()));
        Ok(duty.does(memory, self.patience / BEATS, fetching).await?)
    }

    /// All members, as the seats say.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn members(&self, endpoint: Endpoint) -> Result<Vec<MemberInfo>, DatabaseError> {
        let looked = async {
            let (memory, at) = (self.memory(endpoint.clone()).await?, self.at().members());
            let seats = read_seats(&memory, &at).await?;
            Ok((seats, role_of(&memory, &at, Role::Publisher).await?))
        };
        match looked.await {
            Ok((seats, publisher)) => {
                let info = |(slot, seat)| self.info(slot, seat, publisher, &seats);
                Ok((0..).zip(&seats).filter_map(info).collect())
            }
            Err(error) => Err(self.explained(&endpoint, error).await),
        }
    }

    fn info(
        &self,
        slot: u16,
        seat: &SeatWords,
        publisher: Option<Epoch>,
        seats: &[SeatWords],
    ) -> Option<MemberInfo> {
        let claim = seat.claim?;
        Some(MemberInfo {
            slot,
            beats: seat.beat,
            is_self: claim == self.seat.claim,
            publishes: publisher == Some(claim),
            // The word of a recoverer that has died in the meantime means nothing.
            is_looked_after: seat.carer.is_some() && seats.iter().any(|other| other.claim == seat.carer),
        })
    }
}
