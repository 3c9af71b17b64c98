//! What a member does besides its clients' transactions: it sends heartbeats, clears the words of idle
//! clients, learns of new regions, frees memory, takes roles that one member has for all, and gives its seat
//! back at the end.

use std::time::Duration;

use farpool_fabric::Endpoint;
use farpool_txn::Memory;
use farpool_txn::horizon::forget;
use farpool_txn::membership::{
    Duty, Part, Role, SeatWords, Vouching, beat, fill_role, leave_seat, read_seats, role_of, signs_of,
};
use farpool_txn::oracle::{fetch, publish};
use farpool_wire::Epoch;
use futures_util::future::{TryFutureExt, join4, try_join_all};

use super::{BEATS, MemberCore};
use crate::environment::{Environment, News};
use crate::error::{DatabaseError, Ended};
use crate::rules::MemberRules;

/// Why a member with a commit in doubt ends.
pub(crate) const IN_DOUBT: &str = "a commit of this compute server is in doubt: open the database again";

/// A compute server, as its seat describes it.
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
    pub is_being_recovered: bool,
}

/// The heartbeats of a member.
struct Heartbeats<R> {
    vouching: Vouching<R>,
    count: u64,
    /// The stuck part that was reported last.
    stuck: Option<Part>,
}

impl<E: Environment> MemberCore<E> {
    /// Takes part in the database until the member has ended: sends heartbeats, and at the end gives the seat
    /// back.
    pub async fn run_main_part(&self, endpoint: Endpoint) {
        let done = async {
            let memory = self.memory(endpoint).await?;
            let heartbeats = self.or_end(self.send_heartbeats(&memory));
            let cleared = self.or_end(self.clear_idle_words(&memory));
            let followed = self.or_end(self.follow_regions(&memory));
            let freed = self.or_end(self.free_memory(&memory));
            let (heartbeats, cleared, followed, freed) = join4(heartbeats, cleared, followed, freed).await;
            let mut heartbeats = heartbeats?;
            cleared?;
            followed?;
            freed?;
            // With a client or something in flight, the seat is not given back: the others recover it.
            if self.places.is_empty() && self.slot.retire() {
                self.leave(&memory, &mut heartbeats).await?;
            }
            Ok(())
        };
        let _ = self.or_end(done).await; // the member has ended, and knows why
    }

    /// The result of a part of the member. A part that fails ends the whole member: what it has sent may
    /// still land, so the member stops its heartbeats, and another member evicts it.
    pub(super) async fn or_end<T>(
        &self,
        part: impl Future<Output = Result<T, DatabaseError>>,
    ) -> Result<T, DatabaseError> {
        part.await.map_err(|error| self.end_after(error))
    }

    async fn leave(
        &self,
        memory: &Memory,
        heartbeats: &mut Heartbeats<E::Rules>,
    ) -> Result<(), DatabaseError> {
        // A member that has failed sends no heartbeats while it leaves, so that the others notice.
        let meanwhile = async || match self.end_reason() {
            Ended::Closed => self.send_heartbeat(heartbeats, memory).await,
            _ => Ok(()),
        };
        let pause = self.timing().role_pause.min(self.patience / BEATS);
        let members = self.at().members();
        if leave_seat::<E::Rules, _>(memory, &members, &self.seat, &self.duties, pause, meanwhile).await? {
            self.mark_left();
        }
        Ok(())
    }

    /// Sends heartbeats until the member has ended.
    async fn send_heartbeats(&self, memory: &Memory) -> Result<Heartbeats<E::Rules>, DatabaseError> {
        let vouching = Vouching::new(self.patience, self.timing().node_silence);
        let mut heartbeats = Heartbeats { vouching, count: 0, stuck: None };
        while !self.has_ended() {
            self.send_heartbeat(&mut heartbeats, memory).await?;
            if let Some(region) = self.lost_region() {
                self.end(Ended::LeaseEnded(region));
            }
            if self.slot.is_in_doubt() {
                // The records that the commit has locked stay locked until others have recovered the seat.
                self.end(Ended::Failed(IN_DOUBT.to_owned()));
            }
            self.pause(memory.endpoint(), self.patience / BEATS).await;
        }
        Ok(heartbeats)
    }

    /// Sends a heartbeat, unless a part of this member makes no progress.
    async fn send_heartbeat(
        &self,
        heartbeats: &mut Heartbeats<E::Rules>,
        memory: &Memory,
    ) -> Result<(), DatabaseError> {
        let signs = signs_of(&self.duties, &self.slot);
        let stuck = heartbeats.vouching.look(memory.endpoint().now_ns(), &signs);
        if stuck.is_none() {
            heartbeats.count += 1;
            beat(memory, &self.at().members(), &self.seat, heartbeats.count).await?;
        }
        if heartbeats.stuck != stuck {
            self.environment.report(stuck.map_or(News::Progressing, News::Stuck));
            heartbeats.stuck = stuck;
        }
        Ok(())
    }

    /// Clears the words of idle clients, so that versions that only their last snapshots needed can be
    /// reused.
    async fn clear_idle_words(&self, memory: &Memory) -> Result<(), DatabaseError> {
        let (at, first) = (self.at().horizon(), self.layout.client_words(self.seat.slot).start);
        while !self.has_ended() {
            // A write of a commit in doubt may still land: the versions that its snapshot needs stay until
            // this member is evicted.
            let idle = if self.slot.is_in_doubt() { Vec::new() } else { self.places.idle() };
            if !E::Rules::spares_busy_clients() {
                forget(memory, &at, first..first + 1).await?;
            }
            for idle in idle {
                let place = first + idle.place();
                forget(memory, &at, place..place + 1).await?;
                // Only after the answer. Before it, the write may still land, and would clear the next word
                // there, of this client or another.
                idle.word_cleared();
            }
            self.pause(memory.endpoint(), self.timing().role_pause).await;
        }
        Ok(())
    }

    /// Publishes cuts of all parts of the oracle, while no other member does.
    pub(super) async fn publish_if_role_is_free(
        &self,
        memory: &Memory,
        duty: &Duty,
    ) -> Result<(), DatabaseError> {
        let oracle = self.at().oracle();
        let pace = oracle.pace(self.timing().oracle_look);
        let work = || {
            let publish_part = |part: &_| {
                let has_ended = duty.rounds(|| self.has_ended_publishing());
                publish::<E::Rules>(memory, *part, pace, Some(&self.slot), has_ended)
            };
            try_join_all(oracle.parts().iter().map(publish_part)).map_ok(drop)
        };
        let (at, role) = (self.at().members(), (Role::Publisher, self.seat.claim));
        let (pause, has_ended) = (self.timing().role_pause, || self.has_ended_publishing());
        let published = fill_role(memory, &at, role, pause, has_ended, work);
        Ok(duty.run(memory, self.patience / BEATS, published).await?)
    }

    /// Reads cuts for all clients of this member.
    pub(super) async fn fetch_for_all(&self, memory: &Memory, duty: &Duty) -> Result<(), DatabaseError> {
        let (oracle, no_pause) = (self.at().oracle(), Duration::ZERO);
        let Some(fetched) = &self.fetched else { return Ok(()) };
        let fetching =
            fetch::<E::Rules>(memory, &oracle, fetched, no_pause, duty.rounds(|| self.has_ended()));
        Ok(duty.run(memory, self.patience / BEATS, fetching).await?)
    }

    /// All members, according to the seats.
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
            Err(error) => Err(self.find_cause(&endpoint, error).await),
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
            is_being_recovered: seat.recoverer.is_some()
                && seats.iter().any(|other| other.claim == seat.recoverer),
        })
    }
}
