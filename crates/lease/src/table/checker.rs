//! The table against a model that remembers every lending ever made and what lies in each region, under random
//! interleavings; and the table broken on purpose, to see that the model notices.

use farpool_wire::{AccessKey, Epoch, OwnerId, Refusal};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::{LeaseRefusal, Lending, RegionTable, Released, State};
use crate::{LeaseClass, Millis};

const REGIONS: u32 = 3;
const TTL: Millis = Millis(100);
const MAX_STEPS: usize = 60;
/// A broken table must be noticed within so many histories.
const MUTANT_HISTORIES: usize = 1_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Credentials {
    Right,
    WrongKey,
    WrongOwner,
}

/// One thing that happens to a table. `pick` chooses among all lendings so far, ended ones too.
#[derive(Clone, Debug)]
enum Step {
    Advance(u64),
    Grant { owner: OwnerId, count: u32 },
    Renew { pick: prop::sample::Index, credentials: Credentials },
    Release { pick: prop::sample::Index, credentials: Credentials },
    Check { pick: prop::sample::Index, credentials: Credentials },
    Expire,
    BeginScrub { pick: prop::sample::Index },
    Scrubbed { pick: prop::sample::Index },
    Restart,
}

/// A fault in the table, made by reaching into it at the right moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mutation {
    None,
    EpochReused,
    EpochReusedAfterRestart,
    LentBeforeScrubEnds,
    LentWhileHeld,
    ExpiredLeaseRenewed,
    ExpiryForgotten,
    ReleaseUndone,
    KeyIgnored,
}

/// A lending as the model remembers it.
struct Past {
    lending: Lending,
    owner: OwnerId,
    key: AccessKey,
    until: Millis,
    fenced: bool,
}

struct Model {
    table: RegionTable,
    mutation: Mutation,
    now: Millis,
    incarnation: u32,
    keys_made: u64,
    history: Vec<Past>,
    /// Per region: which lending wrote there last; `None` when all zeros.
    written_by: [Option<Epoch>; REGIONS as usize],
    /// Per region: the lending whose bytes are being overwritten.
    scrubbing: [Option<Epoch>; REGIONS as usize],
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
        }
    }

    fn apply(&mut self, step: &Step) -> Result<(), String> {
        let pick =
            |pick: &prop::sample::Index| (!self.history.is_empty()).then(|| pick.index(self.history.len()));
        match step {
            Step::Advance(span) => self.now = self.now.plus(Millis(*span)),
            Step::Grant { owner, count } => self.grant(*owner, *count)?,
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
        }
        self.counts_and_deadline_agree()
    }

    fn grant(&mut self, owner: OwnerId, count: u32) -> Result<(), String> {
        let regions = self.table.regions.iter_mut();
        match self.mutation {
            Mutation::EpochReused => self.table.last_counter = self.table.last_counter.saturating_sub(1),
            Mutation::LentBeforeScrubEnds => regions
                .filter(|region| matches!(region.state, State::Scrubbing | State::Fenced))
                .for_each(|region| region.state = State::Free),
            Mutation::LentWhileHeld => regions
                .filter(|region| matches!(region.state, State::Held(_)))
                .for_each(|region| region.state = State::Free),
            _ => {}
        }
        let keys_made = &mut self.keys_made;
        let mut keys = || {
            *keys_made += 1;
            AccessKey::from_bytes(u128::from(*keys_made).to_le_bytes())
        };
        let grants = self.table.grant(self.now, owner, LeaseClass::Revocable, count, &mut keys);
        let clean = self.written_by.iter().filter(|writer| writer.is_none()).count() as u32;
        for grant in &grants {
            let lending = grant.lending;
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
            self.history.push(Past { lending, owner, key: grant.key, until: grant.until, fenced: false });
        }
        if grants.len() as u32 != count.min(clean) {
            return Err(format!("{} regions lent; {count} asked for, {clean} clean", grants.len()));
        }
        Ok(())
    }

    /// The lending's owner and key, or wrong ones.
    fn present(&mut self, at: usize, credentials: Credentials) -> (OwnerId, AccessKey) {
        let past = &self.history[at];
        let wrong_key = AccessKey::from_bytes([0xFF; 16]);
        if self.mutation == Mutation::KeyIgnored
            && credentials == Credentials::WrongKey
            && let State::Held(tenancy) = &mut self.table.regions[past.lending.region as usize].state
        {
            tenancy.key = wrong_key;
        }
        match credentials {
            Credentials::Right => (past.owner, past.key),
            Credentials::WrongKey => (past.owner, wrong_key),
            Credentials::WrongOwner => (OwnerId(u64::MAX), past.key),
        }
    }

    fn is_live(&self, at: usize) -> bool {
        !self.history[at].fenced && self.now < self.history[at].until
    }

    fn renew(&mut self, at: usize, credentials: Credentials) -> Result<(), String> {
        let (owner, key) = self.present(at, credentials);
        let lending = self.history[at].lending;
        if self.mutation == Mutation::ExpiredLeaseRenewed
            && let State::Held(tenancy) = &mut self.table.regions[lending.region as usize].state
        {
            tenancy.until = tenancy.until.max(self.now.plus(Millis(1)));
        }
        let live = self.is_live(at);
        match (self.table.renew(self.now, owner, lending, &key), credentials) {
            (Ok(_), _) if !live => violated("L4: a lease that ended was renewed", lending),
            (Ok(until), Credentials::Right) if until < self.history[at].until => {
                violated("L5: a renewal shortened its lease", lending)
            }
            (Ok(until), Credentials::Right) => {
                self.history[at].until = until;
                Ok(())
            }
            (Ok(_), _) => violated("renewed for a stranger", lending),
            (Err(LeaseRefusal::WrongKey), Credentials::Right) => violated("its own key refused", lending),
            (Err(_), Credentials::Right) if live => violated("a live lease was not renewed", lending),
            (Err(_), _) => Ok(()),
        }
    }

    fn release(&mut self, at: usize, credentials: Credentials) -> Result<(), String> {
        let (owner, key) = self.present(at, credentials);
        let lending = self.history[at].lending;
        let fenced = self.history[at].fenced;
        match (self.table.release(owner, lending, &key), credentials) {
            (Ok(Released::Already), _) if fenced => Ok(()),
            (Ok(Released::Already), _) => violated("a lease in force was said to be over", lending),
            (Ok(Released::Fence), Credentials::Right) if !fenced => {
                self.history[at].fenced = true;
                if self.mutation == Mutation::ReleaseUndone {
                    self.table.regions[lending.region as usize].state = State::Free;
                }
                Ok(())
            }
            (Ok(Released::Fence), _) => violated("released for a stranger, or twice", lending),
            (Err(_), Credentials::Right) => violated("its owner could not release it", lending),
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
            answer => violated(&format!("attachment: {answer:?} instead of {wanted:?}"), lending),
        }
    }

    fn expire(&mut self) -> Result<(), String> {
        let mut ended = self.table.expire(self.now);
        if self.mutation == Mutation::ExpiryForgotten {
            ended.pop();
        }
        for past in &mut self.history {
            let due = !past.fenced && self.now >= past.until;
            if due != ended.contains(&past.lending) {
                violated("expiry named too much or too little", past.lending)?;
            }
            past.fenced |= due;
        }
        Ok(())
    }

    fn begin_scrub(&mut self, at: usize) -> Result<(), String> {
        let Past { lending, fenced, .. } = self.history[at];
        let place = lending.region as usize;
        let due = fenced && self.written_by[place] == Some(lending.epoch) && self.scrubbing[place].is_none();
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

    /// The node comes back with fresh memory; no lease outlives it.
    fn restart(&mut self) {
        if self.mutation != Mutation::EpochReusedAfterRestart {
            self.incarnation += 1;
        }
        self.table = RegionTable::new(self.incarnation, REGIONS, TTL);
        self.written_by = [None; REGIONS as usize];
        self.scrubbing = [None; REGIONS as usize];
        self.history.iter_mut().for_each(|past| past.fenced = true);
    }

    fn counts_and_deadline_agree(&self) -> Result<(), String> {
        let held = self.history.iter().filter(|past| !past.fenced);
        let next = held.clone().map(|past| past.until).min();
        let counts = self.table.counts();
        let clean = self.written_by.iter().filter(|writer| writer.is_none()).count();
        let agree = (counts.held as usize, counts.free as usize, self.table.next_deadline())
            == (held.count(), clean, next)
            && counts.held + counts.free + counts.returning == REGIONS
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
    let step = prop_oneof![
        4 => (0..TTL.0).prop_map(Step::Advance),
        5 => (1u64..4, 0..REGIONS + 1).prop_map(|(owner, count)| Step::Grant { owner: OwnerId(owner), count }),
        4 => lease.clone().prop_map(|(pick, credentials)| Step::Renew { pick, credentials }),
        3 => lease.clone().prop_map(|(pick, credentials)| Step::Release { pick, credentials }),
        3 => lease.prop_map(|(pick, credentials)| Step::Check { pick, credentials }),
        3 => Just(Step::Expire),
        4 => any::<prop::sample::Index>().prop_map(|pick| Step::BeginScrub { pick }),
        4 => any::<prop::sample::Index>().prop_map(|pick| Step::Scrubbed { pick }),
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

/// Whether some history makes the model say `claim` of the broken table.
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
        (Mutation::ExpiredLeaseRenewed, "L4"),
        (Mutation::ExpiryForgotten, "expiry"),
        (Mutation::ReleaseUndone, "counts"),
        (Mutation::KeyIgnored, "renewed for a stranger"),
    ] {
        assert!(caught(mutation, claim), "{mutation:?} went unnoticed in {MUTANT_HISTORIES} histories");
    }
}
