use farpool_wire::{AccessKey, Epoch, OwnerId, Refusal};

use crate::{LeaseClass, Millis};

#[cfg(test)]
mod checker;

/// How long a lease lasts unless renewed. Long enough that an owner can miss two renewals and reconnect in
/// between, short enough that memory of a dead owner is back within seconds.
pub const DEFAULT_TTL: Millis = Millis(10_000);

/// One lending of one region: what a fence names, and what a stale message betrays itself by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Lending {
    /// Counts the node's regions from zero.
    pub region: u32,
    /// The lending's number.
    pub epoch: Epoch,
}

/// A lending just made. Whoever has `key` may use the region until `until`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The region and its new epoch.
    pub lending: Lending,
    /// Opens the region; goes to the owner and nobody else.
    pub key: AccessKey,
    /// When the lease ends unless renewed, by the node's clock.
    pub until: Millis,
}

/// Why a lease was not renewed or released. The holder drops it in each case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LeaseRefusal {
    /// Acquire another one: what was stored there is gone.
    #[error("the lease has ended: acquire a new one")]
    Ended,
    /// Somebody else's lease, or a damaged message.
    #[error("owner or key are not those of the lease")]
    WrongKey,
    /// The holder asks the wrong node, or made the lease up.
    #[error("this node never granted that lease")]
    Unknown,
}

/// What a release did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Released {
    /// The lease was in force: fence it now.
    Fence,
    /// It had ended before; nothing to do.
    Already,
}

/// Where a region stands. Holds no key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionStatus {
    /// Scrubbed, nobody's.
    Free,
    /// Lent. A lease past `until` is over even while the table still says so.
    Held {
        /// The lending's number.
        epoch: Epoch,
        /// Whose it is.
        owner: OwnerId,
        /// Whether it may be taken back.
        class: LeaseClass,
        /// When it ends unless renewed.
        until: Millis,
    },
    /// Nothing of this epoch takes effect any more; holders may still have to let go of the memory.
    Fenced {
        /// The epoch that ended.
        epoch: Epoch,
    },
    /// Being overwritten with zeros.
    Scrubbing {
        /// The epoch that ended.
        epoch: Epoch,
    },
}

/// How many regions are where.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegionCounts {
    /// Ready to be lent.
    pub free: u32,
    /// Lent.
    pub held: u32,
    /// Fenced or being scrubbed: soon free.
    pub returning: u32,
}

struct Region {
    /// Of the present lending, else of the last one; the counter is zero before the first.
    epoch: Epoch,
    state: State,
}

enum State {
    Free,
    Held(Tenancy),
    Fenced,
    Scrubbing,
}

/// What the table knows of a lending in force.
struct Tenancy {
    owner: OwnerId,
    class: LeaseClass,
    key: AccessKey,
    until: Millis,
}

/// The regions of one node and who holds them.
pub struct RegionTable {
    incarnation: u32,
    last_counter: u32,
    ttl: Millis,
    regions: Vec<Region>,
}

impl RegionTable {
    /// A table of `regions` free and scrubbed regions. `incarnation` must be greater than at every earlier start
    /// of this node, `ttl` is how long a lease lasts unless renewed.
    pub fn new(incarnation: u32, regions: u32, ttl: Millis) -> Self {
        let epoch = Epoch::new(incarnation, 0);
        let regions = (0..regions).map(|_| Region { epoch, state: State::Free }).collect();
        RegionTable { incarnation, last_counter: 0, ttl, regions }
    }

    /// Lends up to `count` free regions, each under a new epoch and a key of its own from `keys`; fewer when there
    /// are fewer, none when the incarnation has [no epochs left](Self::epochs_left).
    pub fn grant(
        &mut self,
        now: Millis,
        owner: OwnerId,
        class: LeaseClass,
        count: u32,
        keys: &mut dyn FnMut() -> AccessKey,
    ) -> Vec<Grant> {
        let until = now.plus(self.ttl);
        let count = count.min(self.epochs_left()) as usize;
        let free = (0u32..).zip(&mut self.regions).filter(|(_, region)| matches!(region.state, State::Free));
        let mut grants = Vec::new();
        for (index, region) in free.take(count) {
            self.last_counter += 1;
            region.epoch = Epoch::new(self.incarnation, self.last_counter);
            let key = keys();
            region.state = State::Held(Tenancy { owner, class, key, until });
            grants.push(Grant { lending: Lending { region: index, epoch: region.epoch }, key, until });
        }
        grants
    }

    /// Extends a lease by the table's time to live, counted from `now`; says when it ends now.
    pub fn renew(
        &mut self,
        now: Millis,
        owner: OwnerId,
        lending: Lending,
        key: &AccessKey,
    ) -> Result<Millis, LeaseRefusal> {
        let until = now.plus(self.ttl);
        let tenancy = self.tenancy(lending)?;
        if tenancy.owner != owner || tenancy.key != *key {
            return Err(LeaseRefusal::WrongKey);
        }
        if now >= tenancy.until {
            return Err(LeaseRefusal::Ended);
        }
        tenancy.until = tenancy.until.max(until);
        Ok(tenancy.until)
    }

    /// Ends a lease at its owner's wish. Asking twice is no error.
    pub fn release(
        &mut self,
        owner: OwnerId,
        lending: Lending,
        key: &AccessKey,
    ) -> Result<Released, LeaseRefusal> {
        match self.tenancy(lending) {
            Ok(tenancy) if tenancy.owner == owner && tenancy.key == *key => {
                self.regions[lending.region as usize].state = State::Fenced;
                Ok(Released::Fence)
            }
            Ok(_) => Err(LeaseRefusal::WrongKey),
            Err(LeaseRefusal::Ended) => Ok(Released::Already),
            Err(refusal) => Err(refusal),
        }
    }

    /// Ends the leases whose time is over; the caller fences each of them at once.
    #[must_use]
    pub fn expire(&mut self, now: Millis) -> Vec<Lending> {
        let mut ended = Vec::new();
        for (index, region) in (0u32..).zip(&mut self.regions) {
            if matches!(&region.state, State::Held(tenancy) if now >= tenancy.until) {
                region.state = State::Fenced;
                ended.push(Lending { region: index, epoch: region.epoch });
            }
        }
        ended
    }

    /// The caller says that the lending is fenced and that all who had its memory have let go (L3), and asks to
    /// scrub it. `false`: not this region's turn, leave it alone.
    #[must_use]
    pub fn begin_scrub(&mut self, lending: Lending) -> bool {
        self.step(lending, |state| matches!(state, State::Fenced), State::Scrubbing)
    }

    /// The caller says that the region is all zeros: it is free again. `false`: it was not being scrubbed.
    #[must_use]
    pub fn scrubbed(&mut self, lending: Lending) -> bool {
        self.step(lending, |state| matches!(state, State::Scrubbing), State::Free)
    }

    /// Whether whoever has `key` may use the region now: what the data plane asks at each attachment.
    pub fn check(&self, now: Millis, lending: Lending, key: &AccessKey) -> Result<(), Refusal> {
        let region = self.region(lending).map_err(|refusal| match refusal {
            LeaseRefusal::Ended => Refusal::StaleEpoch,
            LeaseRefusal::WrongKey => Refusal::WrongKey,
            LeaseRefusal::Unknown => Refusal::NotAttached,
        })?;
        match &region.state {
            State::Held(tenancy) if tenancy.key != *key => Err(Refusal::WrongKey),
            State::Held(tenancy) if now < tenancy.until => Ok(()),
            _ => Err(Refusal::StaleEpoch),
        }
    }

    /// When [`expire`](Self::expire) has something to do next, if nothing is renewed before.
    pub fn next_deadline(&self) -> Option<Millis> {
        let ends = self.regions.iter().filter_map(|region| match &region.state {
            State::Held(tenancy) => Some(tenancy.until),
            _ => None,
        });
        ends.min()
    }

    /// How many grants this incarnation can still make. At zero the node lends nothing more until it is restarted:
    /// a counter that wrapped would bring old epochs back.
    pub fn epochs_left(&self) -> u32 {
        u32::MAX - self.last_counter
    }

    /// How long a lease lasts unless renewed.
    pub fn ttl(&self) -> Millis {
        self.ttl
    }

    /// How many regions are where.
    pub fn counts(&self) -> RegionCounts {
        let mut counts = RegionCounts::default();
        for region in &self.regions {
            match region.state {
                State::Free => counts.free += 1,
                State::Held(_) => counts.held += 1,
                State::Fenced | State::Scrubbing => counts.returning += 1,
            }
        }
        counts
    }

    /// Every region, in order of index.
    pub fn statuses(&self) -> impl Iterator<Item = RegionStatus> {
        self.regions.iter().map(|region| {
            let epoch = region.epoch;
            match &region.state {
                State::Free => RegionStatus::Free,
                &State::Held(Tenancy { owner, class, until, .. }) => {
                    RegionStatus::Held { epoch, owner, class, until }
                }
                State::Fenced => RegionStatus::Fenced { epoch },
                State::Scrubbing => RegionStatus::Scrubbing { epoch },
            }
        })
    }

    /// The region, if `lending` is its present or last one.
    fn region(&self, lending: Lending) -> Result<&Region, LeaseRefusal> {
        let region = self.regions.get(lending.region as usize).ok_or(LeaseRefusal::Unknown)?;
        match lending.epoch.cmp(&region.epoch) {
            std::cmp::Ordering::Less => Err(LeaseRefusal::Ended),
            std::cmp::Ordering::Equal => Ok(region),
            std::cmp::Ordering::Greater => Err(LeaseRefusal::Unknown),
        }
    }

    /// The lending in force, whether or not its time is over.
    fn tenancy(&mut self, lending: Lending) -> Result<&mut Tenancy, LeaseRefusal> {
        self.region(lending)?;
        match &mut self.regions[lending.region as usize].state {
            State::Held(tenancy) => Ok(tenancy),
            _ => Err(LeaseRefusal::Ended),
        }
    }

    fn step(&mut self, lending: Lending, from: fn(&State) -> bool, to: State) -> bool {
        let due = self.region(lending).is_ok_and(|region| from(&region.state));
        if due {
            self.regions[lending.region as usize].state = to;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: OwnerId = OwnerId(7);
    const KEY: AccessKey = AccessKey::from_bytes([1; 16]);
    const TTL: Millis = Millis(1_000);

    fn table_with_one_lease() -> (RegionTable, Lending) {
        let mut table = RegionTable::new(3, 1, TTL);
        let grants = table.grant(Millis(0), OWNER, LeaseClass::Revocable, 1, &mut || KEY);
        (table, grants[0].lending)
    }

    #[test]
    fn a_lease_ends_at_its_deadline_even_when_nobody_looked() {
        let (mut table, lending) = table_with_one_lease();
        assert_eq!(table.check(Millis(999), lending, &KEY), Ok(()));
        assert_eq!(table.check(Millis(1_000), lending, &KEY), Err(Refusal::StaleEpoch));
        assert_eq!(table.renew(Millis(1_000), OWNER, lending, &KEY), Err(LeaseRefusal::Ended));
    }

    #[test]
    fn a_renewal_counts_from_when_it_is_made_and_never_shortens() {
        let (mut table, lending) = table_with_one_lease();
        assert_eq!(table.renew(Millis(600), OWNER, lending, &KEY), Ok(Millis(1_600)));
        assert_eq!(table.renew(Millis(500), OWNER, lending, &KEY), Ok(Millis(1_600)));
        assert_eq!(table.next_deadline(), Some(Millis(1_600)));
    }

    #[test]
    fn a_region_is_lent_again_only_when_scrubbed() {
        let (mut table, lending) = table_with_one_lease();
        assert_eq!(table.release(OWNER, lending, &KEY), Ok(Released::Fence));
        assert!(!table.scrubbed(lending));
        assert!(table.grant(Millis(1), OWNER, LeaseClass::Pinned, 1, &mut || KEY).is_empty());
        assert!(table.begin_scrub(lending));
        assert!(!table.begin_scrub(lending));
        assert!(table.grant(Millis(2), OWNER, LeaseClass::Pinned, 1, &mut || KEY).is_empty());
        assert!(table.scrubbed(lending));
        let again = table.grant(Millis(3), OWNER, LeaseClass::Pinned, 1, &mut || KEY);
        assert!(again[0].lending.epoch > lending.epoch);
    }

    #[test]
    fn releasing_twice_is_no_error_and_fences_once() {
        let (mut table, lending) = table_with_one_lease();
        assert_eq!(table.release(OWNER, lending, &KEY), Ok(Released::Fence));
        assert_eq!(table.release(OWNER, lending, &KEY), Ok(Released::Already));
        assert!(table.expire(Millis(5_000)).is_empty());
    }

    #[test]
    fn neither_another_owner_nor_another_key_touches_a_lease() {
        let (mut table, lending) = table_with_one_lease();
        let other = AccessKey::from_bytes([2; 16]);
        assert_eq!(table.renew(Millis(1), OwnerId(8), lending, &KEY), Err(LeaseRefusal::WrongKey));
        assert_eq!(table.renew(Millis(1), OWNER, lending, &other), Err(LeaseRefusal::WrongKey));
        assert_eq!(table.release(OWNER, lending, &other), Err(LeaseRefusal::WrongKey));
        assert_eq!(table.check(Millis(1), lending, &other), Err(Refusal::WrongKey));
    }

    #[test]
    fn leases_of_an_earlier_incarnation_have_ended_and_later_ones_are_unknown() {
        let (mut table, lending) = table_with_one_lease();
        let earlier = Lending { epoch: Epoch::new(2, u32::MAX), ..lending };
        let later = Lending { epoch: Epoch::new(3, 2), ..lending };
        assert_eq!(table.renew(Millis(1), OWNER, earlier, &KEY), Err(LeaseRefusal::Ended));
        assert_eq!(table.renew(Millis(1), OWNER, later, &KEY), Err(LeaseRefusal::Unknown));
        assert_eq!(table.check(Millis(1), Lending { region: 1, ..lending }, &KEY), Err(Refusal::NotAttached));
    }

    #[test]
    fn a_used_up_incarnation_lends_nothing_rather_than_wrap() {
        let mut table = RegionTable::new(3, 3, TTL);
        table.last_counter = u32::MAX - 2;
        assert_eq!(table.grant(Millis(0), OWNER, LeaseClass::Revocable, 3, &mut || KEY).len(), 2);
        assert_eq!(table.epochs_left(), 0);
        assert!(table.grant(Millis(0), OWNER, LeaseClass::Revocable, 1, &mut || KEY).is_empty());
    }
}
