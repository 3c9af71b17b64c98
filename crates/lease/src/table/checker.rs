//! Checks the table against a model, under random interleavings. The model remembers every grant ever made
//! and what lies in each region. The table is also broken on purpose, to see that the model notices.

use farpool_wire::{AccessKey, Epoch, GrantMode, OwnerId, Refusal};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::{GrantRefusal, LeaseRefusal, Lending, RegionTable, Released, RevokeRefusal, State, TableGrant};
use crate::{LeaseClass, Millis};

const REGIONS: u32 = 3;
const TTL: Millis = Millis(100);
const MAX_STEPS: usize = 60;
/// The model must notice a broken table within this many histories.
const MUTANT_HISTORIES: usize = 1_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Credentials {
    Right,
    WrongKey,
    WrongOwner,
}

/// One thing that happens to a table. `pick` chooses among all grants so far, ended ones too.
#[derive(Clone, Debug)]
enum Step {
    Advance(u64),
    Grant { owner: OwnerId, class: LeaseClass, count: u32 },
    AddGrant { pick: prop::sample::Index, credentials: Credentials },
    FenceGrant { pick: prop::sample::Index, grant: prop::sample::Index, credentials: Credentials },
    Revoke { pick: prop::sample::Index, grace: u64 },
    Renew { pick: prop::sample::Index, credentials: Credentials },
    Release { pick: prop::sample::Index, credentials: Credentials },
    Check { pick: prop::sample::Index, credentials: Credentials },
    Expire,
    BeginScrub { pick: prop::sample::Index },
    Scrubbed { pick: prop::sample::Index },
    WithdrawFree,
    Withdrawn { pick: prop::sample::Index },
    Restored { region: u32 },
    Restart,
}

/// A fault that is put into the table at the right moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mutation {
    None,
    EpochReused,
    EpochReusedAfterRestart,
    LentBeforeScrubEnds,
    LentWhileHeld,
    LentWhileWithdrawn,
    HeldRegionWithdrawn,
    ExpiredLeaseRenewed,
    ExpiryForgotten,
    ReleaseUndone,
    KeyIgnored,
    GrantEpochReused,
    GrantSurvivesItsFence,
    GrantSurvivesItsLease,
    RevocationForgotten,
    RevocationBreaksPromise,
    PinnedRevoked,
}

/// A grant as the model remembers it. The owner's own stands for its lease.
struct Past {
    lending: Lending,
    /// Index of the lease that it belongs to; its own index, for the owner's own.
    lease: usize,
    owner: OwnerId,
    class: LeaseClass,
    key: AccessKey,
    /// Until when the lease was promised; used for the owner's own only.
    until: Millis,
    /// The latest end that an answer may promise; used for the owner's own only.
    end: Option<Millis>,
    fenced: bool,
}

struct Model {
    table: RegionTable,
    mutation: Mutation,
    now: Millis,
    incarnation: u32,
    keys_made: u64,
    history: Vec<Past>,
    /// Per region: the epoch under which it was written last; `None` when all zeros.
    written_by: [Option<Epoch>; REGIONS as usize],
    /// Per region: the epoch whose bytes are being overwritten.
    scrubbing: [Option<Epoch>; REGIONS as usize],
    /// Per region: its memory went back to the machine.
    withdrawn: [bool; REGIONS as usize],
}

fn violated(claim: &str, lending: Lending) -> Result<(), String> {
    Err(format!("{claim}: region {} under {}", lending.region, lending.epoch))
}

impl Model {
    fn new(mutation: Mutation) -> Self {
        Model {
            table: RegionTable::new(1, REGIONS, TTL),
            mutation,
            now: Millis(0),
            incarnation: 1,
            keys_made: 0,
            history: Vec::new(),
            written_by: [None; REGIONS as usize],
            scrubbing: [None; REGIONS as usize],
            withdrawn: [false; REGIONS as usize],
        }
    }

    fn apply(&mut self, step: &Step) -> Result<(), String> {
        let pick =
            |pick: &prop::sample::Index| (!self.history.is_empty()).then(|| pick.index(self.history.len()));
        match step {
            Step::Advance(span) => self.now = self.now.plus(Millis(*span)),
            Step::Grant { owner, class, count } => self.grant(*owner, *class, *count)?,
            Step::AddGrant { pick: at, credentials } => {
                pick(at).map_or(Ok(()), |at| self.add_grant(at, *credentials))?
            }
            Step::FenceGrant { pick: at, grant, credentials } => {
                let grant = pick(grant);
                let both = pick(at).zip(grant);
                both.map_or(Ok(()), |(at, grant)| self.fence_grant(at, grant, *credentials))?
            }
            Step::Revoke { pick: at, grace } => {
                pick(at).map_or(Ok(()), |at| self.revoke(at, Millis(*grace)))?
            }
            Step::Expire => self.expire()?,
            Step::Restart => self.restart(),
            Step::Renew { pick: at, credentials } => {
                pick(at).map_or(Ok(()), |at| self.renew(at, *credentials))?
            }
            Step::Release { pick: at, credentials } => {
                pick(at).map_or(Ok(()), |at| self.release(at, *credentials))?
            }
            Step::Check { pick: at, credentials } => {
                pick(at).map_or(Ok(()), |at| self.check(at, *credentials))?
            }
            Step::BeginScrub { pick: at } => pick(at).map_or(Ok(()), |at| self.begin_scrub(at))?,
            Step::Scrubbed { pick: at } => pick(at).map_or(Ok(()), |at| self.scrubbed(at))?,
            Step::WithdrawFree => self.withdraw_free()?,
            Step::Withdrawn { pick: at } => pick(at).map_or(Ok(()), |at| self.withdrawn(at))?,
            Step::Restored { region } => self.restored(*region)?,
        }
        self.counts_and_deadline_agree()
    }

    fn grant(&mut self, owner: OwnerId, class: LeaseClass, count: u32) -> Result<(), String> {
        let regions = self.table.regions.iter_mut();
        match self.mutation {
            Mutation::EpochReused => self.table.last_counter = self.table.last_counter.saturating_sub(1),
            Mutation::LentBeforeScrubEnds => regions
                .filter(|region| matches!(region.state, State::Scrubbing | State::Fenced))
                .for_each(|region| region.state = State::Free),
            Mutation::LentWhileHeld => regions
                .filter(|region| matches!(region.state, State::Held(_)))
                .for_each(|region| region.state = State::Free),
            Mutation::LentWhileWithdrawn => regions
                .filter(|region| matches!(region.state, State::Withdrawn))
                .for_each(|region| region.state = State::Free),
            _ => {}
        }
        let keys_made = &mut self.keys_made;
        let mut keys = || {
            *keys_made += 1;
            AccessKey::from_bytes(u128::from(*keys_made).to_le_bytes())
        };
        let grants = self.table.grant(self.now, owner, class, count, &mut keys);
        let clean = self.clean().count() as u32;
        for grant in &grants {
            let lending = grant.lending;
            if self.withdrawn[lending.region as usize] {
                violated("L9: lent without memory", lending)?;
            }
            if self.history.iter().any(|past| past.lending.region == lending.region && !past.fenced) {
                violated("L1: lent while another lending of it is not fenced", lending)?;
            }
            if self.history.iter().any(|past| past.lending.epoch >= lending.epoch) {
                violated("L2: an epoch that is not above all earlier ones", lending)?;
            }
            if self.written_by[lending.region as usize].is_some() {
                violated("L3: lent with the bytes of an earlier lending", lending)?;
            }
            self.written_by[lending.region as usize] = Some(lending.epoch);
            let Millis(until) = grant.until;
            if until != self.now.0 + TTL.0 {
                violated("a grant that does not last its time", lending)?;
            }
            let lease = self.history.len();
            let (key, until) = (grant.key, grant.until);
            self.history.push(Past { lending, lease, owner, class, key, until, end: None, fenced: false });
        }
        if grants.len() as u32 != count.min(clean) {
            return Err(format!("{} regions lent; {count} asked for, {clean} clean", grants.len()));
        }
        Ok(())
    }

    /// The grant's owner and key, or wrong ones.
    fn present(&mut self, at: usize, credentials: Credentials) -> (OwnerId, AccessKey) {
        let past = &self.history[at];
        let wrong_key = AccessKey::from_bytes([0xFF; 16]);
        if self.mutation == Mutation::KeyIgnored
            && credentials == Credentials::WrongKey
            && let State::Held(tenancy) = &mut self.table.regions[past.lending.region as usize].state
        {
            tenancy.grants.iter_mut().for_each(|grant| grant.key = wrong_key);
        }
        match credentials {
            Credentials::Right => (past.owner, past.key),
            Credentials::WrongKey => (past.owner, wrong_key),
            Credentials::WrongOwner => (OwnerId(u64::MAX), past.key),
        }
    }

    fn is_live(&self, at: usize) -> bool {
        !self.history[at].fenced && self.now < self.history[self.history[at].lease].until
    }

    fn is_own(&self, at: usize) -> bool {
        self.history[at].lease == at
    }

    fn add_grant(&mut self, at: usize, credentials: Credentials) -> Result<(), String> {
        let (owner, key) = self.present(at, credentials);
        let lease = self.history[at].lending;
        if self.mutation == Mutation::GrantEpochReused {
            self.table.last_counter = self.table.last_counter.saturating_sub(1);
        }
        self.keys_made += 1;
        let new_key = AccessKey::from_bytes(u128::from(self.keys_made).to_le_bytes());
        let expected = self.is_own(at) && self.is_live(at) && credentials == Credentials::Right;
        match self.table.add_grant(self.now, owner, lease, &key, GrantMode::ReadWrite, new_key) {
            Ok(grant) if expected => {
                if self.history.iter().any(|past| past.lending.epoch >= grant.lending.epoch) {
                    violated("L2: an epoch that is not above all earlier ones", grant.lending)?;
                }
                let (class, until) = (self.history[at].class, grant.until);
                let lending = grant.lending;
                let past =
                    Past { lending, lease: at, owner, class, key: new_key, until, end: None, fenced: false };
                self.history.push(past);
                Ok(())
            }
            Ok(_) => violated("L4: a grant added to a lease that is over, or for a stranger", lease),
            Err(GrantRefusal::Full | GrantRefusal::EpochsUsedUp) => {
                violated("histories are too short for that", lease)
            }
            Err(_) if expected => violated("its owner could not add a grant", lease),
            Err(_) => Ok(()),
        }
    }

    fn fence_grant(&mut self, at: usize, grant: usize, credentials: Credentials) -> Result<(), String> {
        let (owner, key) = self.present(at, credentials);
        let lease = self.history[at].lending;
        let epoch = self.history[grant].lending.epoch;
        let may = self.is_own(at) && self.is_live(at) && credentials == Credentials::Right && grant != at;
        let answer = self.table.fence_grant(self.now, owner, lease, &key, epoch);
        match answer {
            Ok(_) if !may => violated("a grant fenced by a stranger, or a lease by a fence", lease),
            Ok(_) => {
                if self.history[grant].lease != at {
                    return Ok(()); // a grant of another lease, or one that ended long ago: nothing to end
                }
                if self.mutation == Mutation::GrantSurvivesItsFence
                    && let State::Held(tenancy) = &mut self.table.regions[lease.region as usize].state
                {
                    tenancy.grants.push(TableGrant { epoch, key: self.history[grant].key });
                }
                self.history[grant].fenced = true;
                Ok(())
            }
            Err(_) if may && self.history[grant].lease == at => {
                violated("its owner could not fence a grant", lease)
            }
            Err(_) => Ok(()),
        }
    }

    fn revoke(&mut self, at: usize, grace: Millis) -> Result<(), String> {
        let lease = self.history[at].lending;
        if let State::Held(tenancy) = &mut self.table.regions[lease.region as usize].state
            && self.mutation == Mutation::PinnedRevoked
        {
            tenancy.class = LeaseClass::Revocable;
        }
        let live = self.is_own(at) && self.is_live(at);
        let answer = self.table.revoke(self.now, lease, grace);
        match (self.mutation, &mut self.table.regions[lease.region as usize].state) {
            (Mutation::RevocationForgotten, State::Held(tenancy)) => tenancy.revoked = None,
            (Mutation::RevocationBreaksPromise, State::Held(tenancy)) if answer.is_ok() => {
                tenancy.until = self.now.plus(grace);
            }
            _ => {}
        }
        let past = &mut self.history[at];
        match answer {
            Ok(_) if past.class == LeaseClass::Pinned => violated("L8: a pinned lease was revoked", lease),
            Ok(_) if !live => violated("L4: a lease that ended was revoked", lease),
            Ok(end) => {
                let wanted = self.now.plus(grace).max(past.until);
                let wanted = past.end.map_or(wanted, |before| before.min(wanted));
                past.end = Some(wanted);
                if end == wanted { Ok(()) } else { violated("L8: an end that is not the grace's", lease) }
            }
            Err(RevokeRefusal::Pinned) if past.class == LeaseClass::Pinned => Ok(()),
            Err(_) if live => violated("a lease that could be revoked was not", lease),
            Err(_) => Ok(()),
        }
    }

    /// All grants of a lease end with it.
    fn end(&mut self, lease: usize) {
        self.history.iter_mut().filter(|past| past.lease == lease).for_each(|past| past.fenced = true);
        if self.mutation == Mutation::GrantSurvivesItsLease {
            let place = self.history[lease].lending.region as usize;
            let clients = self.history.iter().filter(|past| past.lease == lease);
            let grants: Vec<_> =
                clients.map(|past| TableGrant { epoch: past.lending.epoch, key: past.key }).collect();
            if grants.len() > 1 {
                let Past { owner, class, .. } = self.history[lease];
                let until = Millis(u64::MAX);
                let tenancy = super::Tenancy { owner, class, until, revoked: None, grants };
                self.table.regions[place].state = State::Held(tenancy);
            }
        }
    }

    fn renew(&mut self, at: usize, credentials: Credentials) -> Result<(), String> {
        let (owner, key) = self.present(at, credentials);
        let lending = self.history[at].lending;
        if self.mutation == Mutation::ExpiredLeaseRenewed
            && let State::Held(tenancy) = &mut self.table.regions[lending.region as usize].state
        {
            tenancy.until = tenancy.until.max(self.now.plus(Millis(1)));
        }
        let own = self.is_own(at);
        let live = own && self.is_live(at);
        match (self.table.renew(self.now, owner, lending, &key), credentials) {
            (Ok(_), _) if !own => violated("a client's grant renewed its lease", lending),
            (Ok(_), _) if !live => violated("L4: a lease that ended was renewed", lending),
            (Ok(term), Credentials::Right) => {
                let past = &mut self.history[at];
                let until = self.now.plus(term.remaining);
                if until < past.until {
                    return violated("L5: a renewal shortened its lease", lending);
                }
                if past.end.is_some_and(|end| until > end) || term.revoked != past.end.is_some() {
                    return violated("L8: a renewal put the end off, or kept quiet about it", lending);
                }
                past.until = until;
                Ok(())
            }
            (Ok(_), _) => violated("renewed for a stranger", lending),
            (Err(LeaseRefusal::WrongKey), Credentials::Right) if own => {
                violated("its own key refused", lending)
            }
            (Err(_), Credentials::Right) if live => violated("a live lease was not renewed", lending),
            (Err(_), _) => Ok(()),
        }
    }

    fn release(&mut self, at: usize, credentials: Credentials) -> Result<(), String> {
        let (owner, key) = self.present(at, credentials);
        let lending = self.history[at].lending;
        let fenced = self.history[at].fenced;
        let own = self.is_own(at);
        match (self.table.release(owner, lending, &key), credentials) {
            (Ok(Released::Already), _) if fenced => Ok(()),
            (Ok(Released::Already), _) => violated("a lease in force was said to be over", lending),
            (Ok(Released::Fence), Credentials::Right) if !fenced && own => {
                self.end(at);
                if self.mutation == Mutation::ReleaseUndone {
                    self.table.regions[lending.region as usize].state = State::Free;
                }
                Ok(())
            }
            (Ok(Released::Fence), _) => violated("released for a stranger, or twice", lending),
            (Err(_), Credentials::Right) if own => violated("its owner could not release it", lending),
            (Err(_), _) => Ok(()),
        }
    }

    fn check(&mut self, at: usize, credentials: Credentials) -> Result<(), String> {
        let (_, key) = self.present(at, credentials);
        let lending = self.history[at].lending;
        let wanted = match credentials {
            _ if self.history[at].fenced => Err(Refusal::StaleEpoch),
            Credentials::WrongKey => Err(Refusal::WrongKey),
            _ if self.is_live(at) => Ok(()),
            _ => Err(Refusal::StaleEpoch),
        };
        match self.table.check(self.now, lending, &key) {
            answer if answer == wanted => Ok(()),
            Ok(()) => violated("L4: attached under a grant that is over, or with a wrong key", lending),
            answer => violated(&format!("attachment: {answer:?} instead of {wanted:?}"), lending),
        }
    }

    fn expire(&mut self) -> Result<(), String> {
        let mut ended = self.table.expire(self.now);
        if self.mutation == Mutation::ExpiryForgotten {
            ended.pop();
        }
        for at in 0..self.history.len() {
            let past = &self.history[at];
            if past.lease != at {
                continue;
            }
            let due = !past.fenced && self.now >= past.until;
            if due != ended.contains(&past.lending) {
                violated("expiry named too much or too little", past.lending)?;
            }
            if due {
                self.end(at);
            }
        }
        Ok(())
    }

    fn begin_scrub(&mut self, at: usize) -> Result<(), String> {
        let Past { lending, fenced, .. } = self.history[at];
        let place = lending.region as usize;
        let due = fenced
            && self.is_own(at)
            && self.written_by[place] == Some(lending.epoch)
            && self.scrubbing[place].is_none();
        if self.table.begin_scrub(lending) != due {
            violated("L7: scrub begun out of turn, or not in turn", lending)?;
        }
        if due {
            self.scrubbing[place] = Some(lending.epoch);
        }
        Ok(())
    }

    fn scrubbed(&mut self, at: usize) -> Result<(), String> {
        let lending = self.history[at].lending;
        let place = lending.region as usize;
        let due = self.scrubbing[place] == Some(lending.epoch);
        if self.table.scrubbed(lending) != due {
            violated("L7: scrub ended out of turn, or not in turn", lending)?;
        }
        if due {
            (self.scrubbing[place], self.written_by[place]) = (None, None);
        }
        Ok(())
    }

    /// The regions that may be lent.
    fn clean(&self) -> impl Iterator<Item = usize> {
        (0..REGIONS as usize).filter(|&region| self.written_by[region].is_none() && !self.withdrawn[region])
    }

    fn withdraw_free(&mut self) -> Result<(), String> {
        let held = self.table.regions.iter_mut().find(|region| matches!(region.state, State::Held(_)));
        if let (Mutation::HeldRegionWithdrawn, Some(held)) = (self.mutation, held) {
            held.state = State::Free;
        }
        let (found, last) = (self.table.begin_withdrawal(), self.clean().last());
        if found.map(|lease| lease.region as usize) != last {
            return Err(format!("L9: {found:?} withdrawn; region {last:?} is the last free one"));
        }
        let Some(lease) = found else { return Ok(()) };
        if !self.table.withdrawn(lease) || self.table.withdrawn(lease) {
            violated("L7: withdrawn out of turn, or not in turn", lease)?;
        }
        self.withdrawn[lease.region as usize] = true;
        Ok(())
    }

    fn withdrawn(&mut self, at: usize) -> Result<(), String> {
        let lending = self.history[at].lending;
        let place = lending.region as usize;
        let due = self.scrubbing[place] == Some(lending.epoch);
        if self.table.withdrawn(lending) != due {
            violated("L7: withdrawn out of turn, or not in turn", lending)?;
        }
        if due {
            (self.scrubbing[place], self.written_by[place], self.withdrawn[place]) = (None, None, true);
        }
        Ok(())
    }

    fn restored(&mut self, region: u32) -> Result<(), String> {
        let was_withdrawn = self.withdrawn.get_mut(region as usize).is_some_and(std::mem::take);
        match self.table.restored(region) == was_withdrawn {
            true => Ok(()),
            false => Err(format!("L7: region {region} restored out of turn, or not in turn")),
        }
    }

    /// The node restarts with fresh memory; no lease survives that.
    fn restart(&mut self) {
        if self.mutation != Mutation::EpochReusedAfterRestart {
            self.incarnation += 1;
        }
        self.table = RegionTable::new(self.incarnation, REGIONS, TTL);
        self.written_by = [None; REGIONS as usize];
        self.scrubbing = [None; REGIONS as usize];
        self.withdrawn = [false; REGIONS as usize];
        self.history.iter_mut().for_each(|past| past.fenced = true);
    }

    fn counts_and_deadline_agree(&self) -> Result<(), String> {
        let leases = self.history.iter().enumerate();
        let held = leases.filter(|(at, past)| past.lease == *at && !past.fenced);
        let held: Vec<Millis> = held.map(|(_, past)| past.until).collect();
        let next = held.iter().min().copied();
        let counts = self.table.counts();
        let withdrawn = self.withdrawn.iter().filter(|&&withdrawn| withdrawn).count();
        let counted = [counts.held, counts.free, counts.withdrawn].map(|count| count as usize);
        let agree = (counted, self.table.next_deadline())
            == ([held.len(), self.clean().count(), withdrawn], next)
            && counts.held + counts.free + counts.returning + counts.withdrawn == REGIONS
            && self.table.statuses().count() == REGIONS as usize;
        if agree { Ok(()) } else { Err(format!("counts or deadline are off: {counts:?}, {next:?}")) }
    }
}

fn run(steps: &[Step], mutation: Mutation) -> Result<(), String> {
    let mut model = Model::new(mutation);
    steps.iter().try_for_each(|step| model.apply(step))
}

fn histories() -> impl Strategy<Value = Vec<Step>> {
    let credentials = prop_oneof![
        6 => Just(Credentials::Right),
        1 => Just(Credentials::WrongKey),
        1 => Just(Credentials::WrongOwner),
    ];
    let lease = (any::<prop::sample::Index>(), credentials);
    let class = prop_oneof![3 => Just(LeaseClass::Revocable), 1 => Just(LeaseClass::Pinned)];
    let step = prop_oneof![
        4 => (0..TTL.0).prop_map(Step::Advance),
        5 => (1u64..4, class, 0..REGIONS + 1)
            .prop_map(|(owner, class, count)| Step::Grant { owner: OwnerId(owner), class, count }),
        3 => lease.clone().prop_map(|(pick, credentials)| Step::AddGrant { pick, credentials }),
        3 => (lease.clone(), any::<prop::sample::Index>())
            .prop_map(|((pick, credentials), grant)| Step::FenceGrant { pick, grant, credentials }),
        2 => (any::<prop::sample::Index>(), 0..3 * TTL.0)
            .prop_map(|(pick, grace)| Step::Revoke { pick, grace }),
        4 => lease.clone().prop_map(|(pick, credentials)| Step::Renew { pick, credentials }),
        3 => lease.clone().prop_map(|(pick, credentials)| Step::Release { pick, credentials }),
        3 => lease.prop_map(|(pick, credentials)| Step::Check { pick, credentials }),
        3 => Just(Step::Expire),
        4 => any::<prop::sample::Index>().prop_map(|pick| Step::BeginScrub { pick }),
        4 => any::<prop::sample::Index>().prop_map(|pick| Step::Scrubbed { pick }),
        1 => Just(Step::WithdrawFree),
        2 => any::<prop::sample::Index>().prop_map(|pick| Step::Withdrawn { pick }),
        3 => (0..REGIONS + 1).prop_map(|region| Step::Restored { region }),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 0..MAX_STEPS)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn every_interleaving_keeps_the_invariants(steps in histories()) {
        prop_assert_eq!(run(&steps, Mutation::None), Ok(()));
    }
}

/// Whether some history makes the model report `claim` about the broken table.
fn caught(mutation: Mutation, claim: &str) -> bool {
    let mut runner = TestRunner::deterministic();
    (0..MUTANT_HISTORIES).any(|_| {
        let steps = histories().new_tree(&mut runner).expect("the strategy rejects nothing").current();
        run(&steps, mutation).is_err_and(|violation| violation.starts_with(claim))
    })
}

#[test]
fn each_broken_table_is_caught_by_the_claim_it_breaks_and_the_sound_one_by_none() {
    assert!(!caught(Mutation::None, ""));
    for (mutation, claim) in [
        (Mutation::EpochReused, "L2"),
        (Mutation::EpochReusedAfterRestart, "L2"),
        (Mutation::LentBeforeScrubEnds, "L3"),
        (Mutation::LentWhileHeld, "L1"),
        (Mutation::LentWhileWithdrawn, "L9"),
        (Mutation::HeldRegionWithdrawn, "L9"),
        (Mutation::ExpiredLeaseRenewed, "L4"),
        (Mutation::ExpiryForgotten, "expiry"),
        (Mutation::ReleaseUndone, "counts"),
        (Mutation::KeyIgnored, "renewed for a stranger"),
        (Mutation::GrantEpochReused, "L2"),
        (Mutation::GrantSurvivesItsFence, "L4: attached"),
        (Mutation::GrantSurvivesItsLease, "counts"),
        (Mutation::RevocationForgotten, "L8: a renewal"),
        (Mutation::RevocationBreaksPromise, "expiry"),
        (Mutation::PinnedRevoked, "L8: a pinned"),
    ] {
        assert!(caught(mutation, claim), "{mutation:?} went unnoticed in {MUTANT_HISTORIES} histories");
    }
}
