use farpool_wire::{AccessKey, Epoch, GrantMode, MAX_GRANTS_PER_REGION, OwnerId, Refusal};

use crate::terms::{
    Grant, GrantRefusal, LeaseRefusal, Lending, RegionCounts, RegionStatus, Released, RevokeRefusal, Term,
};
use crate::{LeaseClass, Millis};

#[cfg(test)]
mod checker;
#[cfg(test)]
mod tests;

/// How long a lease lasts unless renewed. Long enough that an owner can miss two renewals and reconnect in
/// between, short enough that memory of a dead owner is back within seconds.
pub const DEFAULT_TTL: Millis = Millis(10_000);

/// Longest grace of a revocation: time to move a large cache elsewhere. A caller that wants memory back later
/// can ask later.
pub const MAX_GRACE: Millis = Millis(10 * 60 * 1_000);

struct Region {
    /// Epoch of the present lease, or of the last one. Before the first lease its counter is zero.
    epoch: Epoch,
    /// The greatest epoch that a grant of this region ever had.
    latest: Epoch,
    state: State,
}

enum State {
    Free,
    Held(Tenancy),
    Fenced,
    Scrubbing,
    Withdrawn,
}

/// What the table knows of a lease in force.
struct Tenancy {
    owner: OwnerId,
    class: LeaseClass,
    /// The last answer promised the lease until this time.
    until: Millis,
    /// The region is being taken back: the lease ends at this time at the latest.
    revoked: Option<Millis>,
    /// The first is the owner's own; never empty.
    grants: Vec<TableGrant>,
}

struct TableGrant {
    epoch: Epoch,
    key: AccessKey,
}

impl Tenancy {
    fn own_key(&self) -> &AccessKey {
        &self.grants[0].key
    }
}

/// The regions of one node and who holds them.
pub struct RegionTable {
    incarnation: u32,
    last_counter: u32,
    ttl: Millis,
    regions: Vec<Region>,
}

impl RegionTable {
    /// A table of `regions` free and scrubbed regions. `incarnation` must be greater than at every earlier
    /// start of this node, `ttl` is how long a lease lasts unless renewed.
    pub fn new(incarnation: u32, regions: u32, ttl: Millis) -> Self {
        let epoch = Epoch::new(incarnation, 0);
        let regions = (0..regions).map(|_| Region { epoch, latest: epoch, state: State::Free }).collect();
        RegionTable { incarnation, last_counter: 0, ttl, regions }
    }

    /// Lends up to `count` free regions, each under a new epoch and with a key of its own from `keys`. It
    /// lends fewer when fewer are free, and none when the incarnation has [no epochs
    /// left](Self::epochs_left).
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
            let epoch = Epoch::new(self.incarnation, self.last_counter);
            let key = keys();
            (region.epoch, region.latest) = (epoch, epoch);
            let own = vec![TableGrant { epoch, key }];
            region.state = State::Held(Tenancy { owner, class, until, revoked: None, grants: own });
            let lending = Lending { region: index, epoch };
            grants.push(Grant { lending, key, mode: GrantMode::ReadWrite, until });
        }
        grants
    }

    /// Adds a grant to a lease, under the fresh key `key`, for a client that the owner lets in.
    pub fn add_grant(
        &mut self,
        now: Millis,
        owner: OwnerId,
        lease: Lending,
        own_key: &AccessKey,
        mode: GrantMode,
        key: AccessKey,
    ) -> Result<Grant, GrantRefusal> {
        let (incarnation, epochs_left) = (self.incarnation, self.epochs_left());
        let tenancy = self.live(now, owner, lease, own_key)?;
        if tenancy.grants.len() == MAX_GRANTS_PER_REGION {
            return Err(GrantRefusal::Full);
        }
        if epochs_left == 0 {
            return Err(GrantRefusal::EpochsUsedUp);
        }
        let until = tenancy.until;
        let epoch = Epoch::new(incarnation, u32::MAX - epochs_left + 1);
        tenancy.grants.push(TableGrant { epoch, key });
        self.last_counter += 1;
        self.regions[lease.region as usize].latest = epoch;
        Ok(Grant { lending: Lending { region: lease.region, epoch }, key, mode, until })
    }

    /// Ends one grant of a lease at its owner's request; the caller fences it. Asking twice is no error: the
    /// caller fences again.
    pub fn fence_grant(
        &mut self,
        now: Millis,
        owner: OwnerId,
        lease: Lending,
        own_key: &AccessKey,
        grant: Epoch,
    ) -> Result<Lending, GrantRefusal> {
        if grant == lease.epoch {
            return Err(GrantRefusal::OwnersOwn);
        }
        let tenancy = self.live(now, owner, lease, own_key)?;
        tenancy.grants.retain(|held| held.epoch != grant);
        if grant > self.regions[lease.region as usize].latest {
            return Err(LeaseRefusal::Unknown.into());
        }
        Ok(Lending { region: lease.region, epoch: grant })
    }

    /// Extends a lease by the table's time to live, counted from `now`. A lease that is being taken back
    /// lasts to its announced end and no longer.
    pub fn renew(
        &mut self,
        now: Millis,
        owner: OwnerId,
        lease: Lending,
        key: &AccessKey,
    ) -> Result<Term, LeaseRefusal> {
        let ttl = self.ttl;
        let tenancy = self.live(now, owner, lease, key)?;
        tenancy.until = tenancy.until.max(tenancy.revoked.unwrap_or(now.plus(ttl)));
        Ok(Term { remaining: tenancy.until.since(now), revoked: tenancy.revoked.is_some() })
    }

    /// Takes a lease back: it ends after `grace`, at most [`MAX_GRACE`], but not before the end that was
    /// promised already. Returns that end, by the node's clock. A later revocation can bring the end nearer,
    /// but not postpone it.
    pub fn revoke(&mut self, now: Millis, lease: Lending, grace: Millis) -> Result<Millis, RevokeRefusal> {
        let tenancy = self.tenancy(lease).map_err(|refusal| match refusal {
            LeaseRefusal::Ended => RevokeRefusal::Ended,
            LeaseRefusal::WrongKey | LeaseRefusal::Unknown => RevokeRefusal::Unknown,
        })?;
        if now >= tenancy.until {
            return Err(RevokeRefusal::Ended);
        }
        if tenancy.class == LeaseClass::Pinned {
            return Err(RevokeRefusal::Pinned);
        }
        let end = now.plus(grace.min(MAX_GRACE)).max(tenancy.until);
        let end = tenancy.revoked.map_or(end, |before| before.min(end));
        tenancy.revoked = Some(end);
        Ok(end)
    }

    /// Ends a lease at its owner's request, with all its grants. Asking twice is no error.
    pub fn release(
        &mut self,
        owner: OwnerId,
        lease: Lending,
        key: &AccessKey,
    ) -> Result<Released, LeaseRefusal> {
        match self.tenancy(lease) {
            Ok(tenancy) if tenancy.owner == owner && tenancy.own_key() == key => {
                self.regions[lease.region as usize].state = State::Fenced;
                Ok(Released::Fence)
            }
            Ok(_) => Err(LeaseRefusal::WrongKey),
            Err(LeaseRefusal::Ended) => Ok(Released::Already),
            Err(refusal) => Err(refusal),
        }
    }

    /// Ends the leases whose time has passed; the caller fences each of them at once, with all its grants.
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

    /// Asks to scrub or replace the memory of a lease. The caller states that the lease is fenced, and that
    /// every client that had the memory has let go of it (L3). `false`: the region is not in the fenced state
    /// of this lease, and the caller leaves it alone.
    #[must_use]
    pub fn begin_scrub(&mut self, lease: Lending) -> bool {
        self.step(lease, |state| matches!(state, State::Fenced), State::Scrubbing)
    }

    /// The caller states that the region is all zeros: it is free again. `false`: it was not being scrubbed.
    #[must_use]
    pub fn scrubbed(&mut self, lease: Lending) -> bool {
        self.step(lease, |state| matches!(state, State::Scrubbing), State::Free)
    }

    /// Takes a free region, the one with the highest index, out of what is lent, as if it were scrubbed. The
    /// caller gives its memory back to the machine, and then calls [`withdrawn`](Self::withdrawn).
    pub fn begin_withdrawal(&mut self) -> Option<Lending> {
        let free = self.regions.iter().rposition(|region| matches!(region.state, State::Free))?;
        self.regions[free].state = State::Scrubbing;
        Some(Lending { region: free as u32, epoch: self.regions[free].epoch })
    }

    /// The caller states that it gave the region's memory back to the machine in place of scrubbing it.
    /// `false`: it was not being scrubbed.
    #[must_use]
    pub fn withdrawn(&mut self, lease: Lending) -> bool {
        self.step(lease, |state| matches!(state, State::Scrubbing), State::Withdrawn)
    }

    /// The caller states that a withdrawn region has memory again, all zeros: it is free. `false`: it was not
    /// withdrawn.
    #[must_use]
    pub fn restored(&mut self, region: u32) -> bool {
        let region = self.regions.get_mut(region as usize);
        let withdrawn = region.filter(|region| matches!(region.state, State::Withdrawn));
        withdrawn.map(|region| region.state = State::Free).is_some()
    }

    /// Whether a client with `key` may use the region now. The data plane asks this at each attachment.
    pub fn check(&self, now: Millis, lending: Lending, key: &AccessKey) -> Result<(), Refusal> {
        let region = self.regions.get(lending.region as usize).ok_or(Refusal::NotAttached)?;
        if lending.epoch > region.latest {
            return Err(Refusal::NotAttached);
        }
        let State::Held(tenancy) = &region.state else { return Err(Refusal::StaleEpoch) };
        let grant = tenancy.grants.iter().find(|grant| grant.epoch == lending.epoch);
        match grant {
            Some(grant) if grant.key != *key => Err(Refusal::WrongKey),
            Some(_) if now < tenancy.until => Ok(()),
            _ => Err(Refusal::StaleEpoch),
        }
    }

    /// The owner of the lease that a grant belongs to, if the grant is in force.
    pub fn owner(&self, grant: Lending) -> Option<OwnerId> {
        let State::Held(tenancy) = &self.regions.get(grant.region as usize)?.state else { return None };
        tenancy.grants.iter().any(|known| known.epoch == grant.epoch).then_some(tenancy.owner)
    }

    /// When [`expire`](Self::expire) has something to do next, unless a lease is renewed before.
    pub fn next_deadline(&self) -> Option<Millis> {
        let ends = self.regions.iter().filter_map(|region| match &region.state {
            State::Held(tenancy) => Some(tenancy.until),
            _ => None,
        });
        ends.min()
    }

    /// How many grants this incarnation can still make. At zero the node lends nothing more until it is
    /// restarted: a counter that wrapped would bring old epochs back.
    pub fn epochs_left(&self) -> u32 {
        u32::MAX - self.last_counter
    }

    /// How long a lease lasts unless renewed.
    pub fn ttl(&self) -> Millis {
        self.ttl
    }

    /// Number of regions in each state.
    pub fn counts(&self) -> RegionCounts {
        let mut counts = RegionCounts::default();
        for region in &self.regions {
            match region.state {
                State::Free => counts.free += 1,
                State::Held(_) => counts.held += 1,
                State::Fenced | State::Scrubbing => counts.returning += 1,
                State::Withdrawn => counts.withdrawn += 1,
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
                State::Held(tenancy) => RegionStatus::Held {
                    epoch,
                    owner: tenancy.owner,
                    class: tenancy.class,
                    until: tenancy.until,
                    grants: tenancy.grants.len() as u32,
                    revoked: tenancy.revoked.is_some(),
                },
                State::Fenced => RegionStatus::Fenced { epoch },
                State::Scrubbing => RegionStatus::Scrubbing { epoch },
                State::Withdrawn => RegionStatus::Withdrawn,
            }
        })
    }

    /// The lease in force, whether or not its time has passed.
    fn tenancy(&mut self, lease: Lending) -> Result<&mut Tenancy, LeaseRefusal> {
        let region = self.regions.get_mut(lease.region as usize).ok_or(LeaseRefusal::Unknown)?;
        if lease.epoch > region.latest {
            return Err(LeaseRefusal::Unknown);
        }
        let current = region.epoch == lease.epoch;
        let State::Held(tenancy) = &mut region.state else { return Err(LeaseRefusal::Ended) };
        if current {
            Ok(tenancy)
        } else if tenancy.grants.iter().any(|grant| grant.epoch == lease.epoch) {
            // A client's grant is no lease: only the owner's own key renews or releases.
            Err(LeaseRefusal::WrongKey)
        } else {
            Err(LeaseRefusal::Ended)
        }
    }

    /// The lease in force, if the caller is its owner and its time has not passed.
    fn live(
        &mut self,
        now: Millis,
        owner: OwnerId,
        lease: Lending,
        key: &AccessKey,
    ) -> Result<&mut Tenancy, LeaseRefusal> {
        let tenancy = self.tenancy(lease)?;
        if tenancy.owner != owner || tenancy.own_key() != key {
            return Err(LeaseRefusal::WrongKey);
        }
        if now >= tenancy.until {
            return Err(LeaseRefusal::Ended);
        }
        Ok(tenancy)
    }

    fn step(&mut self, lease: Lending, from: fn(&State) -> bool, to: State) -> bool {
        let region = self.regions.get_mut(lease.region as usize).filter(|region| region.epoch == lease.epoch);
        let due = region.filter(|region| from(&region.state));
        match due {
            Some(region) => {
                region.state = to;
                true
            }
            None => false,
        }
    }
}
