//! The messages of the control plane (*letters*): questions, answers, and what happens to them in transit.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use farpool_fabric::sim::ProcessId;
use farpool_lease::Millis;
use farpool_wire::control::{
    AcquireRequest, AcquireResponse, AddGrantRequest, AddGrantResponse, AwaitRevocationRequest,
    AwaitRevocationResponse, FenceGrantRequest, GrantRequest, GrantResponse, HeartbeatRequest,
    HeartbeatResponse, RegionsResponse, RegisterRequest, RegisterResponse, ReleaseRequest, RenewRequest,
    RenewResponse, ResizeRequest, RevokeRequest, RevokeResponse,
};
use farpool_wire::{AccessKey, Epoch, RegionId};
use futures_util::future::{Either, select};

use super::Plane;
use super::oracle::LeaseNo;

/// A question: one of the messages that production sends, or a message between clients of one owner.
#[derive(Clone, Debug)]
pub(crate) enum Question {
    Register(RegisterRequest),
    Heartbeat(HeartbeatRequest),
    Acquire(AcquireRequest),
    RevokeFrom(RevokeRequest),
    Grant(GrantRequest),
    Renew(RenewRequest),
    AddGrant(AddGrantRequest),
    FenceGrant(FenceGrantRequest),
    Revoke(RevokeRequest),
    AwaitRevocation(AwaitRevocationRequest),
    Resize(ResizeRequest),
    Release(ReleaseRequest),
    Regions,
    LetIn(Invitation),
    /// From a client that was let in: for how long may it use the region?
    HowLong {
        region: RegionId,
        grant: Epoch,
    },
}

/// A message from an owner to another of its clients: use this grant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Invitation {
    /// The process that lets the client in.
    pub(crate) owner: ProcessId,
    pub(crate) region: RegionId,
    pub(crate) lease: LeaseNo,
    pub(crate) grant: Epoch,
    pub(crate) key: AccessKey,
}

#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Registered(RegisterResponse),
    Beat(HeartbeatResponse),
    Acquired(AcquireResponse),
    Granted(GrantResponse),
    Renewed(RenewResponse),
    GrantAdded(AddGrantResponse),
    Revoked(RevokeResponse),
    Revocation(AwaitRevocationResponse),
    Table(RegionsResponse),
    /// A client may use a region for this long from when it asked.
    UsableFor(Millis),
    /// The request was carried out. The answer has no contents.
    Done,
    Refused,
}

enum Envelope {
    Question { number: u64, question: Question },
    Answer { number: u64, answer: Answer },
}

impl Question {
    /// The line for the trace.
    fn name(&self) -> &'static str {
        match self {
            Question::Register(_) => "process {} asks {}: register",
            Question::Heartbeat(_) => "process {} asks {}: heartbeat",
            Question::Acquire(_) => "process {} asks {}: acquire",
            Question::RevokeFrom(_) => "process {} asks {}: take back from an owner",
            Question::Grant(_) => "process {} asks {}: grant",
            Question::Renew(_) => "process {} asks {}: renew",
            Question::AddGrant(_) => "process {} asks {}: add a grant",
            Question::FenceGrant(_) => "process {} asks {}: fence a grant",
            Question::Revoke(_) => "process {} asks {}: take back",
            Question::AwaitRevocation(_) => "process {} asks {}: tell me when you take leases back",
            Question::Resize(_) => "process {} asks {}: resize",
            Question::Release(_) => "process {} asks {}: release",
            Question::Regions => "process {} asks {}: show your table",
            Question::LetIn(_) => "process {} asks {}: use this grant",
            Question::HowLong { .. } => "process {} asks {}: for how long may I use the region",
        }
    }
}

/// How often control messages are lost, duplicated or late.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Delivery {
    pub(crate) lost_permille: u32,
    pub(crate) doubled_permille: u32,
    pub(crate) late_permille: u32,
    /// The longest delay.
    pub(crate) late_ms: u64,
}

/// A process that dies when it sends one of its next letters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Doom {
    pub(crate) letters_left: u64,
    /// The process still sends its last letter before it dies.
    pub(crate) says_it: bool,
}

#[derive(Default)]
struct Slot {
    answer: Option<Answer>,
    waker: Option<Waker>,
}

pub(crate) type Answering = Pin<Box<dyn Future<Output = Option<Answer>>>>;

/// A process's end of the control plane: it sends letters and receives them.
pub(crate) struct Post {
    plane: Rc<Plane>,
    pub(crate) me: ProcessId,
    waiting: RefCell<BTreeMap<u64, Slot>>,
}

impl Post {
    /// Starts to read a process's letters. `answer` returns the answer to a question, or `None` for no
    /// answer.
    pub(crate) fn open(
        plane: &Rc<Plane>,
        me: ProcessId,
        answer: impl Fn(Question) -> Answering + 'static,
    ) -> Rc<Self> {
        let post = Rc::new(Post { plane: plane.clone(), me, waiting: RefCell::default() });
        plane.tasks.spawn(me, read_letters(post.clone(), answer));
        post
    }

    /// Asks, and waits for the answer for at most `patience` by the asker's clock.
    pub(crate) async fn ask(&self, to: ProcessId, question: Question, patience: Duration) -> Option<Answer> {
        let number = self.plane.next_name();
        self.waiting.borrow_mut().insert(number, Slot::default());
        self.plane.world.note(question.name(), &[self.me.number(), to.number()]);
        self.plane.carry(self.me, to, Arc::new(Envelope::Question { number, question }));
        let answered = std::future::poll_fn(|context| {
            let mut waiting = self.waiting.borrow_mut();
            let slot = waiting.get_mut(&number).expect("removed below");
            slot.waker = Some(context.waker().clone());
            slot.answer.take().map_or(Poll::Pending, Poll::Ready)
        });
        let late = self.plane.world.sleep_by(self.plane.world.host_of(self.me), patience);
        let answer = match select(pin!(answered), pin!(late)).await {
            Either::Left((answer, _)) => Some(answer),
            Either::Right(_) => None,
        };
        self.waiting.borrow_mut().remove(&number);
        answer
    }

    fn answered(&self, number: u64, answer: Answer) {
        // An answer for which no process waits any more, or a duplicate, has no effect.
        if let Some(slot) = self.waiting.borrow_mut().get_mut(&number) {
            slot.answer = Some(answer);
            if let Some(waker) = slot.waker.take() {
                waker.wake();
            }
        }
    }
}

async fn read_letters(post: Rc<Post>, answer: impl Fn(Question) -> Answering) {
    loop {
        let letter = post.plane.world.receive(post.me).await;
        let envelope = letter.content.downcast::<Envelope>().expect("nothing else is sent");
        match &*envelope {
            Envelope::Answer { number, answer } => post.answered(*number, answer.clone()),
            Envelope::Question { number, question } => {
                let (number, answering, post, to) =
                    (*number, answer(question.clone()), post.clone(), letter.from);
                post.plane.clone().tasks.spawn(post.me, async move {
                    if let Some(answer) = answering.await {
                        post.plane.carry(post.me, to, Arc::new(Envelope::Answer { number, answer }));
                    }
                });
            }
        }
    }
}

impl Plane {
    /// Sends a letter, unless its sender dies while sending it.
    fn carry(self: &Rc<Self>, from: ProcessId, to: ProcessId, envelope: Arc<Envelope>) {
        if !self.world.is_alive(from) {
            return;
        }
        let doom = self.doomed.borrow_mut().get_mut(&from).map(|doom| {
            doom.letters_left = doom.letters_left.saturating_sub(1);
            *doom
        });
        if let Some(Doom { letters_left: 0, says_it }) = doom {
            self.meet_doom(from);
            if !says_it {
                return;
            }
        }
        let copies = if self.draw(self.delivery.get().doubled_permille) { 2 } else { 1 };
        for _ in 0..copies {
            self.send_one(from, to, envelope.clone());
        }
    }

    fn send_one(self: &Rc<Self>, from: ProcessId, to: ProcessId, envelope: Arc<Envelope>) {
        let hosts = [self.world.host_of(from), self.world.host_of(to)];
        let now_ns = self.world.now_ns();
        if self.draw(self.delivery.get().lost_permille) {
            self.oracle.borrow_mut().letter(hosts, now_ns);
            return self.world.note("a letter from process {} to {} is lost", &[from.number(), to.number()]);
        }
        if !self.draw(self.delivery.get().late_permille) {
            return self.world.send(from, to, envelope);
        }
        self.oracle.borrow_mut().letter(hosts, now_ns);
        let late =
            Duration::from_millis(1 + self.faults_random.borrow_mut().below(self.delivery.get().late_ms));
        self.late_letters.set(self.late_letters.get() + 1);
        let (plane, later) = (self.clone(), self.world.sleep(late));
        // Spawned outside the sender: the letter arrives even if its sender has died by then.
        self.tasks.spawn(self.nowhere, async move {
            later.await;
            plane.world.send(from, to, envelope);
            plane.late_letters.set(plane.late_letters.get() - 1);
        });
    }
}
