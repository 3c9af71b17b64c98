//! What a member of a database needs from its surroundings. A process provides threads, leases and a network;
//! a simulation provides simulated ones. So the code that is simulated is the code that ships.

use std::time::Duration;

use farpool_fabric::Peer;
use farpool_pool::{ClientGrant, FENCE_DEADLINE, GrantError, JointError};
use farpool_txn::horizon::CollectPauses;
use farpool_txn::membership::{Part, SeatRecoveryError};
use farpool_txn::oracle::LOOK;
use farpool_wire::control::Lease;
use farpool_wire::{Epoch, RegionId, Slot};

use crate::rules::MemberRules;

/// The surroundings of a member.
pub trait Environment {
    /// The rules that it follows: [`Shipped`](farpool_txn::Shipped), or wrong ones for tests.
    type Rules: MemberRules;

    /// How the node of a region is reached. `None`: the region's lease has ended.
    fn peer(&self, region: RegionId) -> Option<Peer>;

    /// Adds a grant of a region.
    fn add_grant(&self, region: RegionId) -> impl Future<Output = Result<ClientGrant, GrantError>>;

    /// Fences a grant of a region, of this member or another: once this has returned without an error, no
    /// operation under the grant takes effect.
    fn fence_grant(&self, region: RegionId, grant: Epoch) -> impl Future<Output = Result<(), GrantError>>;

    /// Leases up to this many more regions for the database. This process renews the leases, until it [gives
    /// them back](Self::give_back_regions) or ends.
    fn acquire_regions(&self, regions: u32) -> impl Future<Output = Result<Vec<Lease>, JointError>>;

    /// Renews leases that another member has acquired, too.
    fn adopt_regions(&self, leases: Vec<Lease>) -> impl Future<Output = Result<(), JointError>>;

    /// Stops renewing these leases. Other members may go on.
    fn forget_regions(&self, leases: &[Lease]);

    /// Gives back leases that no member uses.
    fn give_back_regions(&self, leases: Vec<Lease>) -> impl Future<Output = ()>;

    /// The regions whose leases have ended.
    fn lost_regions(&self) -> Vec<RegionId>;

    /// Whether all nodes answer at present, as far as this member knows.
    fn nodes_answer(&self) -> bool;

    /// A random word. It need not be secret.
    fn random(&self) -> u64;

    /// The times that the member waits.
    fn timing(&self) -> &Timing;

    /// Reports an event that an operator should know of.
    fn report(&self, news: News<'_>);
}

/// An event that an operator should know of.
#[derive(Debug)]
pub enum News<'a> {
    /// A part of this member makes no progress, so the member stops its heartbeats.
    Stuck(Part),
    /// All parts of this member make progress again.
    Progressing,
    /// This member has recovered the seat of a silent one, and has rolled back this many of its commits.
    Recovered(Slot, usize),
    /// The pool lends no more memory, for this reason.
    NotLent(&'a str),
    /// This member could not recover the seat of a silent one, and tries again.
    RecoveryFailed(Slot, &'a SeatRecoveryError<GrantError>),
}

/// The times that a member waits. Simulations have short ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// A node that is silent for this long is lost, since its leases have ended. Until then a part that waits
    /// for a node does not count as stuck.
    pub node_silence: Duration,
    /// Between two checks whether a role is free or a client is idle.
    pub role_pause: Duration,
    /// Pauses of the collector between two rounds. A compute server whose log is full waits for the next
    /// round: for the busy pause, or for up to the idle one if nothing was published before. A round costs a
    /// few READs of all words. The idle pause must be well below the time after which the collector counts as
    /// stuck: `node_silence` and some patiences.
    pub collect_pauses: CollectPauses,
    /// Reading all parts of the oracle once usually takes no longer.
    pub oracle_look: Duration,
    /// How long a client waits for another member's change of the catalog: longer than it usually takes to
    /// recover a member that has died during one.
    pub catalog_timeout: Duration,
    /// Between two attempts to get the turn or the role to change the catalog, or to change it.
    pub catalog_pause: Duration,
    /// After the pool has refused more memory: the time until it is asked again.
    pub lease_pause: Duration,
    /// Between two looks whether dropped tables have memory that can be freed.
    pub tidy_pause: Duration,
    /// Least time between two times that a client removes entries of secondary indexes.
    pub remove_pause: Duration,
    /// Between two searches for a free seat.
    pub seat_pause: Duration,
    /// How long to wait for a region whose memory moves while it is attached.
    pub attach_timeout: Duration,
    /// Between two attempts to attach such a region.
    pub attach_pause: Duration,
    /// After a failure: between two checks whether the member has ended.
    pub explain_pause: Duration,
    /// Between two checks whether a client's word is cleared.
    pub wake_pause: Duration,
    /// A request for a fence is answered within this time.
    pub fence_deadline: Duration,
    /// A transaction is tried at least this often before its caller is told of the conflict.
    pub tries: u32,
    /// The longest pause before the second try. It doubles with each try,
    pub first_pause: Duration,
    /// up to this one. Pauses are drawn at random below it, so that two transactions do not conflict again
    /// and again.
    pub longest_pause: Duration,
}

impl Timing {
    /// Outside simulations. With the pauses, all tries of a transaction take some seconds.
    pub const SHIPPED: Timing = Timing {
        node_silence: Duration::from_secs(10),
        role_pause: Duration::from_millis(100),
        collect_pauses: CollectPauses::SHIPPED,
        oracle_look: LOOK,
        catalog_timeout: Duration::from_secs(20),
        catalog_pause: Duration::from_millis(2),
        lease_pause: Duration::from_secs(5),
        tidy_pause: Duration::from_secs(1),
        remove_pause: Duration::from_millis(1),
        seat_pause: Duration::from_millis(20),
        attach_timeout: Duration::from_secs(20),
        attach_pause: Duration::from_millis(1),
        explain_pause: Duration::from_millis(5),
        wake_pause: Duration::from_micros(50),
        fence_deadline: FENCE_DEADLINE,
        tries: 1_000,
        first_pause: Duration::from_micros(4),
        longest_pause: Duration::from_millis(8),
    };
}
