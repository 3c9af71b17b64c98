//! The settings of a world: how fast it is, how faulty, and what is broken on purpose.

use crate::sim::Random;

/// The stream of a seed's random numbers that only [`WorldConfig::with_operations_at_once`] uses.
const AT_ONCE_STREAM: u64 = 77;

/// A range of durations from which one is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// The shortest, in nanoseconds.
    pub least_ns: u64,
    /// The longest, in nanoseconds.
    pub most_ns: u64,
}

impl Span {
    /// From `least_ns` to `most_ns`, both included.
    pub const fn new(least_ns: u64, most_ns: u64) -> Self {
        Span { least_ns, most_ns }
    }

    /// Draws a duration: mostly near the least, with a long tail, as latencies are.
    pub fn draw(self, random: &mut Random) -> u64 {
        let width = self.most_ns.saturating_sub(self.least_ns) + 1;
        let tail = random.below(width);
        // The square of a uniform number: the median lies at a quarter of the width.
        self.least_ns + (u128::from(tail) * u128::from(tail) / u128::from(width)) as u64
    }
}

/// The simulated network: its speeds, and into how many parts it splits a transfer.
#[derive(Clone, Debug)]
pub struct Network {
    /// One way between two hosts, without the time on the wire.
    pub latency: Span,
    /// One way between two processes of a host.
    pub local: Span,
    /// What each NIC carries each way.
    pub bytes_per_us: u64,
    /// Between two parts of a transfer.
    pub gap: Span,
    /// Most parts in which a transfer takes effect.
    pub parts: usize,
}

impl Default for Network {
    /// A 25 Gbit/s network of one rack.
    fn default() -> Self {
        Network {
            latency: Span::new(1_000, 8_000),
            local: Span::new(300, 3_000),
            bytes_per_us: 3_000,
            gap: Span::new(20, 400),
            parts: 6,
        }
    }
}

/// How often things go wrong, in thousandths.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Packets that are held back, with all that follows them on their connection.
    pub late_permille: u32,
    /// How long they are held back.
    pub late: Option<Span>,
    /// Parts of a transfer before which the thread or card that carries it out is preempted.
    pub stall_permille: u32,
    /// How long those pauses are.
    pub stall: Option<Span>,
    /// Control messages that are lost.
    pub lost_permille: u32,
    /// Control messages that are delivered twice.
    pub duplicated_permille: u32,
    /// Dying nodes and links whose end the other side is not told.
    pub silent_permille: u32,
}

/// How a node carries out the transfers that it checks itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Service {
    /// One after the other, each as a whole, as a thread that serves all connections does.
    Whole,
    /// Word by word, several at a time, as a network card does; a refusal in the middle closes the queue.
    Torn,
}

/// A way to break the transport on purpose, to see that the checkers notice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutation {
    /// Shared memory: an operation is done when its copy is, even if the epoch has changed meanwhile.
    EpochWordNotCheckedAfterCopy,
    /// A node goes on serving an older incarnation after it has answered a newer one.
    OldIncarnationStillApplied,
    /// A completion is delivered twice; the second may meet another operation in its place.
    DuplicateCompletion,
    /// A node lets fenced operations pass READs and atomics.
    FenceFlagIgnored,
    /// A node carries out accesses that follow one that it has refused because the memory was being moved.
    BusyForgotten,
}

/// The configuration of a world.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// Determines everything else that happens.
    pub seed: u64,
    /// Speeds.
    pub network: Network,
    /// What goes wrong.
    pub faults: Faults,
    /// What is broken.
    pub mutation: Option<Mutation>,
    /// How often an operation on shared memory is carried out before the call that posts it returns, in
    /// thousandths. What other processes do meanwhile takes effect between its parts.
    pub at_once_permille: u32,
    /// Keep a readable trace.
    pub trace: bool,
    /// Polling a link advances time when nothing else is due: for callers with threads of their own instead
    /// of an [`Executor`](crate::sim::Executor). Their histories are not reproducible.
    pub self_driven: bool,
}

impl WorldConfig {
    /// A world of a seed in which nothing goes wrong.
    pub fn new(seed: u64) -> Self {
        WorldConfig {
            seed,
            network: Network::default(),
            faults: Faults::default(),
            mutation: None,
            at_once_permille: 0,
            trace: false,
            self_driven: false,
        }
    }

    /// Lets the seed determine how often operations on shared memory are carried out at once: never, every
    /// other time, or nearly always.
    pub fn with_operations_at_once(self) -> Self {
        let permille = [0, 500, 970][Random::new(self.seed, AT_ONCE_STREAM).index(3)];
        WorldConfig { at_once_permille: permille, ..self }
    }
}
