//! What a member of a database needs of its surroundings. In a process these are threads, leases and a
//! network; in a simulation, a world. So what is simulated is what ships.

use std::time::Duration;

use farpool_fabric::Peer;
use farpool_pool::{ClientGrant, FENCE_DEADLINE, GrantError};
use farpool_txn::ReadError;
use farpool_txn::membership::{CareError, Part};
use farpool_txn::oracle::LOOK;
use farpool_wire::{Epoch, RegionId, Slot};

use crate::rules::MemberRules;

/// The surroundings of a member.
pub trait Environment {
    /// The rules that it follows: [`Shipped`](farpool_txn::Shipped), or wrong ones.
    type Rules: MemberRules;

    /// How the node of a region is reached. `None`: the region's lease has ended.
    fn peer(&self, region: RegionId) -> Option<&Peer>;

    /// Adds a grant of a region.
    fn add_grant(&self, region: RegionId) -> impl Future<Output = Result<ClientGrant, GrantError>>;

    /// Fences a grant of a region, of this member or another: once this has returned without an error, no
    /// operation under the grant takes effect.
    fn fence_grant(&self, region: RegionId, grant: Epoch) -> impl Future<Output = Result<(), GrantError>>;

    /// A region whose lease has ended, if there is one.
    fn lost_region(&self) -> Option<RegionId>;

    /// Whether all nodes answer at present, as far as this member knows.
    fn nodes_answer(&self) -> bool;

    /// A random word. It need not be secret.
    fn random(&self) -> u64;

    /// How long the member waits for what.
    fn timing(&self) -> &Timing;

    /// Is told what an operator should know.
    fn tell(&self, news: News<'_>);
}

/// What an operator should know.
#[derive(Debug)]
pub enum News<'a> {
    /// A part of this member makes no progress, so the member stops its heartbeats.
    Stuck(Part),
    /// All parts of this member make progress again.
    Moving,
    /// This member has recovered the seat of another one, which was silent, and has rolled back so many of
    /// its commits.
    Recovered(Slot, usize),
    /// This member could not recover the seat of a silent one, and tries again.
    NotRecovered(Slot, &'a CareError<GrantError>),
    /// The collector cannot read the catalog.
    CatalogUnreadable(&'a ReadError),
}

/// How long a member waits for what. Simulations have short times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// A node that is silent for so long is lost, since leases end then. A part that may be waiting for a
    /// node is not taken for stuck earlier.
    pub node_silence: Duration,
    /// From one look whether a role is free, or a client idle, to the next.
    pub role_pause: Duration,
    /// From one look of the collector to the next: a row whose ring is full waits so long, and a few READs of
    /// all words are cheap.
    pub collect_pause: Duration,
    /// The time that one look at all parts of the oracle takes at most, usually.
    pub oracle_look: Duration,
    /// How long another member's change of the catalog is waited for: longer than it usually takes to
    /// recover a member that has died over it.
    pub catalog_patience: Duration,
    /// From one look whether the catalog's role is free to the next.
    pub catalog_pause: Duration,
    /// From one look whether a seat is free to the next.
    pub seat_pause: Duration,
    /// How long a region is waited for whose memory moves while it is attached.
    pub attach_patience: Duration,
    /// From one try to attach such a region to the next.
    pub attach_pause: Duration,
    /// From one look whether this member was shut out to the next, after a failure.
    pub explain_pause: Duration,
    /// From one look whether a client's word is cleared to the next.
    pub wake_pause: Duration,
    /// Whoever asks for a fence has an answer within so long.
    pub fence_deadline: Duration,
    /// Tries of a transaction before its caller is told of the conflict.
    pub tries: u32,
    /// The longest pause before the second try. It doubles with each try...
    pub first_pause: Duration,
    /// ...up to this. Pauses are drawn at random below it, so that two transactions do not meet again and
    /// again.
    pub longest_pause: Duration,
}

impl Timing {
    /// Outside simulations. With the pauses, all tries of a transaction take some seconds.
    pub const SHIPPED: Timing = Timing {
        node_silence: Duration::from_secs(10),
        role_pause: Duration::from_millis(50),
        collect_pause: Duration::from_micros(300),
        oracle_look: LOOK,
        catalog_patience: Duration::from_secs(20),
        catalog_pause: Duration::from_millis(2),
        seat_pause: Duration::from_millis(20),
        attach_patience: Duration::from_secs(20),
        attach_pause: Duration::from_millis(1),
        explain_pause: Duration::from_millis(5),
        wake_pause: Duration::from_micros(50),
        fence_deadline: FENCE_DEADLINE,
        tries: 1_000,
        first_pause: Duration::from_micros(4),
        longest_pause: Duration::from_millis(8),
    };
}
