//! Shared memory: a client's own processor copies, part by part, and may stop anywhere in between.
//!
//! C1. Operations are carried out one after the other, in the order posted.
//! C2. The node cannot stop a copy. So the client checks the grant's word before the first part and after the
//!     last. If the word has changed before the first part, the operation is refused; if it has changed in
//!     between, the outcome is *unknown*. Either way the client unmaps the memory.
//! C3. A copy continues in the memory in which it began, even if its link attaches the region again.
//! C4. A paused process copies nothing until it runs again, and then continues where it stopped.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use farpool_wire::{Epoch, GrantMode, Refusal};

use crate::host::access_refusal;
use crate::memory::{Mapping, Protection};
use crate::op::Uncertain;
use crate::seam::{Op, Outcome, Posted};
use crate::sim::events::Event;
use crate::sim::order::{Handed, Order, Reply, Request};
use crate::sim::settings::Mutation;
use crate::sim::state::State;

/// The longest gap between two parts of an operation that is carried out at once.
const LONGEST_GAP_NS: u64 = 1_000;

/// A link's own mappings, and the operations it has yet to carry out.
#[derive(Default)]
pub(super) struct Copier {
    attached: BTreeMap<u32, Arc<Mapped>>,
    queue: VecDeque<Copying>,
}

struct Mapped {
    epoch: Epoch,
    memory: Mapping,
    words: Mapping,
    word_offset: u64,
    stamp: u64,
}

struct Copying {
    id: u64,
    order: Order,
    /// The memory that it copies to or from, once it has begun.
    begun: Option<Arc<Mapped>>,
    parts: Vec<Range<usize>>,
    gathered: Vec<u8>,
    value: u64,
}

enum Progress {
    Goes(u64),
    Ends(Outcome),
    /// The memory is no longer the grant's.
    Moved(Outcome),
}

impl Copier {
    /// Whether operations on a region can be carried out, or wait for earlier ones that decide it.
    pub(super) fn can_try(&self, region: u32) -> bool {
        self.attached.contains_key(&region) || !self.queue.is_empty()
    }

    /// Whether a detach is queued here that was not sent to the node yet.
    pub(super) fn lets_go(&self) -> bool {
        self.queue.iter().any(|copying| matches!(copying.order.op, Op::Detach))
    }

    pub(super) fn map(&mut self, handed: &Handed) -> io::Result<()> {
        let layout = &handed.layout;
        let protection = match layout.mode {
            GrantMode::ReadOnly => Protection::ReadOnly,
            GrantMode::ReadWrite => Protection::ReadWrite,
        };
        let memory = Mapping::new(handed.memory.as_fd(), layout.region_bytes, protection)?;
        let words = Mapping::new(handed.words.as_fd(), layout.word_offset + 8, Protection::ReadOnly)?;
        let (word_offset, stamp) = (layout.word_offset, layout.stamp);
        let mapped = Mapped { epoch: handed.epoch, memory, words, word_offset, stamp };
        self.attached.insert(handed.region, Arc::new(mapped));
        Ok(())
    }
}

impl Mapped {
    fn is_valid(&self) -> bool {
        self.words.load(self.word_offset) == Ok(self.stamp)
    }
}

impl Copying {
    /// Goes one step further on memory that this process maps.
    fn go_on(&mut self, attached: Option<&Arc<Mapped>>, looks_again: bool) -> Progress {
        let begins = self.begun.is_none();
        let Some(mapped) = self.begun.as_ref().or(attached).cloned() else {
            return Progress::Ends(Outcome::Refused(Refusal::NotAttached));
        };
        self.begun = Some(mapped.clone());
        if begins {
            if self.order.epoch != mapped.epoch {
                return Progress::Ends(Outcome::Refused(Refusal::StaleEpoch));
            }
            if !mapped.is_valid() {
                return Progress::Moved(Outcome::Refused(Refusal::NotAttached));
            }
            if let Err(error) = self.order.check_bounds(&mapped.memory) {
                return Progress::Ends(Outcome::Refused(access_refusal(error)));
            }
        }
        let Some(part) = self.parts.pop() else {
            if looks_again && !mapped.is_valid() {
                return Progress::Moved(Outcome::Unknown(Uncertain::EpochMoved));
            }
            return Progress::Ends(Outcome::Done(self.value));
        };
        match self.order.touch(&mapped.memory, part, &mut self.gathered) {
            Ok(value) => {
                self.value = value;
                Progress::Goes(self.parts.len() as u64)
            }
            Err(error) => Progress::Ends(Outcome::Refused(access_refusal(error))),
        }
    }
}

impl State {
    /// Queues an operation behind those that this client has yet to carry out.
    pub(super) fn begin_copy(&mut self, connection: u64, order: Order) {
        let copying = self.copying(order);
        let id = copying.id;
        let Some(copier) = self.copier(connection) else { return };
        copier.queue.push_back(copying);
        if copier.queue.len() == 1 {
            self.schedule_copy(connection, id);
        }
    }

    /// Carries out an operation at once, if the settings and the seed say so, and nothing that this client
    /// has posted is left to do. What others do meanwhile takes effect before it, between its parts, and
    /// after it. Returns its outcome, and what a READ has found.
    pub(super) fn run_now(&mut self, connection: u64, posted: &Posted) -> Option<(Outcome, Vec<u8>)> {
        let (at_once, looks_again) = (self.config.at_once_permille, self.looks_again());
        let link = self.links.get(&connection)?;
        let is_idle = link.closed.is_none() && link.copier.as_ref()?.queue.is_empty();
        if posted.op.is_for_node() || !is_idle || !self.random.chance(at_once) {
            return None;
        }
        let order = Order::of(posted);
        let (region, slot, at) = (order.region, u64::from(order.slot), order.offset);
        self.note("connection {} carries out at once: slot {}, at {}", &[connection, slot, at]);
        let mut copying = self.copying(order);
        loop {
            let attached = self.copier(connection)?.attached.get(&region).cloned();
            match copying.go_on(attached.as_ref(), looks_again) {
                Progress::Goes(_) => self.pass_time(),
                Progress::Ends(outcome) => return Some((outcome, copying.gathered)),
                Progress::Moved(outcome) => {
                    self.copier(connection)?.attached.remove(&region);
                    return Some((outcome, copying.gathered));
                }
            }
        }
    }

    /// Lets the time between two parts of a copy pass. No task runs meanwhile, so it is short: a preempted
    /// thread is what copies that are not carried out at once are for.
    fn pass_time(&mut self) {
        let gap_ns = self.config.network.gap.draw(&mut self.random);
        let until_ns = self.now_ns + gap_ns.min(LONGEST_GAP_NS);
        while self.events.next_at().is_some_and(|at_ns| at_ns <= until_ns) && self.step() {}
        self.advance_to(until_ns);
    }

    fn looks_again(&self) -> bool {
        self.config.mutation != Some(Mutation::EpochWordNotCheckedAfterCopy)
    }

    fn copying(&mut self, order: Order) -> Copying {
        let id = self.next_id();
        let parts = order.parts(self.config.network.parts, &mut self.random);
        let gathered = vec![0; if let Op::Read = order.op { order.length } else { 0 }];
        Copying { id, order, begun: None, parts, gathered, value: 0 }
    }

    fn copier(&mut self, connection: u64) -> Option<&mut Copier> {
        self.links.get_mut(&connection)?.copier.as_mut()
    }

    fn schedule_copy(&mut self, connection: u64, operation: u64) {
        let at_ns = self.now_ns + self.gap_ns();
        self.events.at(at_ns, Event::Copy { connection, operation });
    }

    pub(super) fn copy_part(&mut self, connection: u64, operation: u64) {
        let Some(process) = self.links.get(&connection).map(|link| link.process) else { return };
        let running_ns = self.when_running(process, self.now_ns);
        if running_ns > self.now_ns {
            self.events.at(running_ns, Event::Copy { connection, operation });
            return;
        }
        let looks_again = self.looks_again();
        let Some(copier) = self.copier(connection) else { return };
        let Some(copying) = copier.queue.front_mut().filter(|copying| copying.id == operation) else {
            return;
        };
        if let Op::Detach | Op::Attach(_) | Op::Call { .. } = copying.order.op {
            let order = copier.queue.pop_front().expect("it is in front").order;
            if let Op::Detach = order.op {
                copier.attached.remove(&order.region);
            }
            self.send_request(connection, Request::Operation(Box::new(order)));
            self.copy_next(connection);
            return;
        }
        let attached = copier.attached.get(&copying.order.region);
        let progress = copying.go_on(attached, looks_again);
        if let Progress::Moved(_) = progress
            && attached.zip(copying.begun.as_ref()).is_some_and(|(now, begun)| Arc::ptr_eq(now, begun))
        {
            let region = copying.order.region;
            copier.attached.remove(&region);
        }
        let copying = copier.queue.front_mut().expect("it is in front");
        match progress {
            Progress::Goes(left) => {
                let slot = u64::from(copying.order.slot);
                self.note("connection {} slot {} copied a part, {} to go", &[connection, slot, left]);
                self.schedule_copy(connection, operation);
            }
            Progress::Ends(outcome) | Progress::Moved(outcome) => {
                let Copying { order, gathered, .. } = copier.queue.pop_front().expect("it is in front");
                let reply = Reply::Outcome { slot: order.slot, outcome, data: gathered, shared: None };
                self.reach_client(connection, reply);
                self.copy_next(connection);
            }
        }
    }

    fn copy_next(&mut self, connection: u64) {
        let next = self.copier(connection).and_then(|copier| copier.queue.front()).map(|copying| copying.id);
        if let Some(next) = next {
            self.schedule_copy(connection, next);
        }
    }
}
