//! Requests, answers and fences, in one total order.
//!
//! The world has one thread, so a counter can order all events that its tasks observe. It is finer than
//! virtual time.

use std::collections::BTreeMap;

use farpool_wire::Epoch;

use crate::register::NEVER;

/// One lease of one region; unique over all nodes and restarts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct LeaseName(pub(super) u64);

/// The issuer of an operation: one incarnation of one queue, under one grant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Actor {
    pub(super) lease: LeaseName,
    pub(super) grant: Epoch,
    pub(super) session: u64,
    pub(super) incarnation: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    Read,
    Write(u64),
    Swap { expected: u64, new: u64 },
    Add,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// The client died before the operation returned.
    Open,
    Done,
    Refused,
    Unknown,
}

/// One operation on one word.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) actor: Actor,
    pub(super) word: u64,
    pub(super) what: What,
    pub(super) start: u64,
    pub(super) returned: u64,
    pub(super) end: End,
    /// The value that was read, or that was there before the operation.
    pub(super) found: u64,
}

#[derive(Default)]
pub(super) struct Lease {
    /// When each fenced grant was fenced.
    pub(super) fenced: BTreeMap<Epoch, u64>,
    /// When the whole lease was fenced, and what the region held then.
    pub(super) ended: Option<(u64, Vec<u64>)>,
    /// The node has died.
    pub(super) lost: bool,
}

#[derive(Default)]
pub(super) struct History {
    pub(super) accesses: Vec<Access>,
    pub(super) leases: BTreeMap<LeaseName, Lease>,
    /// For each session, the incarnations that a node has answered, and when.
    pub(super) answered: BTreeMap<u64, Vec<(u64, u64)>>,
    pub(super) complaints: Vec<String>,
    last: u64,
    values: u64,
}

impl History {
    pub(super) fn new(clients: usize) -> Self {
        History { values: clients as u64, ..History::default() }
    }

    fn tick(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// A value that has not been written before.
    pub(super) fn fresh_value(&mut self) -> u64 {
        self.values += 1;
        0xFA00_0000_0000_0000 | self.values
    }

    pub(super) fn operations(&self) -> u64 {
        self.accesses.len() as u64
    }

    /// Records the start of an operation on some words; returns the indices of its records.
    pub(super) fn begin(
        &mut self,
        actor: Actor,
        touches: impl IntoIterator<Item = (u64, What)>,
    ) -> Vec<usize> {
        let start = self.tick();
        let first = self.accesses.len();
        self.accesses.extend(touches.into_iter().map(|(word, what)| Access {
            actor,
            word,
            what,
            start,
            returned: NEVER,
            end: End::Open,
            found: 0,
        }));
        (first..self.accesses.len()).collect()
    }

    /// Records the end of an operation; `found` gives the values that were there.
    pub(super) fn end(&mut self, records: &[usize], end: End, found: &[u64]) {
        let returned = self.tick();
        for (place, &record) in records.iter().enumerate() {
            let access = &mut self.accesses[record];
            access.returned = returned;
            access.end = end;
            access.found = found.get(place).copied().unwrap_or(0);
        }
    }

    /// Records that the node has answered an incarnation: operations of older incarnations take no effect
    /// from now on.
    pub(super) fn answered(&mut self, session: u64, incarnation: u64) {
        let at = self.tick();
        self.answered.entry(session).or_default().push((incarnation, at));
    }

    pub(super) fn fenced(&mut self, lease: LeaseName, grant: Epoch) {
        let at = self.tick();
        self.leases.entry(lease).or_default().fenced.insert(grant, at);
    }

    pub(super) fn ended(&mut self, lease: LeaseName, words: Vec<u64>) {
        let at = self.tick();
        self.leases.entry(lease).or_default().ended = Some((at, words));
        self.tick();
    }

    /// Records that a lease's node has died: from now on any operation under the lease may be refused.
    pub(super) fn lost(&mut self, lease: LeaseName) {
        self.leases.entry(lease).or_default().lost = true;
    }

    /// Whether a node may refuse an operation under this grant.
    pub(super) fn has_ended(&self, lease: LeaseName, grant: Epoch) -> bool {
        let lease = self.leases.get(&lease);
        lease.is_some_and(|of| of.lost || of.ended.is_some() || of.fenced.contains_key(&grant))
    }

    /// The time that orders all observed events.
    pub(super) fn now(&self) -> u64 {
        self.last
    }

    /// Whether, after a time, the memory of a lease may have moved or the lease may have ended.
    pub(super) fn was_disturbed_after(&self, lease: LeaseName, time: u64) -> bool {
        self.leases.get(&lease).is_some_and(|of| {
            let ended = of.ended.as_ref().map(|&(at, _)| at);
            of.lost || of.fenced.values().copied().chain(ended).any(|at| at > time)
        })
    }

    pub(super) fn complain(&mut self, what: String) {
        self.complaints.push(what);
    }
}
