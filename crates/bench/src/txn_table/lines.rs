//! The lines of the table of transactions, and what was promised of each.

/// The kind of a line's measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `farpool bench oracle`.
    Oracle,
    /// `farpool bench kv`.
    Kv,
    /// `farpool bench io`, for the sake of its floor.
    Floor,
}

impl Kind {
    /// The command's name behind `farpool bench`.
    pub fn command(self) -> &'static str {
        match self {
            Kind::Oracle => "oracle",
            Kind::Kv => "kv",
            Kind::Floor => "io",
        }
    }

    /// The field of its report that holds the rate per second.
    pub fn rate(self) -> &'static str {
        match self {
            Kind::Oracle => "t_trx_s",
            Kind::Kv => "trx_s",
            Kind::Floor => "iops",
        }
    }
}

/// A line of the table: one invocation of `farpool bench`.
pub struct Line {
    /// The name that readers see.
    pub name: &'static str,
    /// The command.
    pub kind: Kind,
    /// Its arguments, without the duration, the number of records and the output format.
    pub args: &'static str,
    /// Transactions per second: the least that was promised, and the aim.
    pub promised: Option<(f64, f64)>,
}

const fn line(name: &'static str, kind: Kind, args: &'static str) -> Line {
    Line { name, kind, args, promised: None }
}

const fn promised(name: &'static str, kind: Kind, args: &'static str, least: f64, aim: f64) -> Line {
    Line { name, kind, args, promised: Some((least, aim)) }
}

/// The lines, in the order in which they are measured and shown.
pub const LINES: &[Line] = &[
    line("naive: one counter for all", Kind::Oracle, "--clients 2 --oracle naive"),
    promised("a slot for each client", Kind::Oracle, "--clients 2", 10e6, 20e6),
    line("with a fetch thread", Kind::Oracle, "--clients 2 --fetch-thread"),
    promised("with a slot for both clients", Kind::Oracle, "--clients 2 --compress", 6e6, 10e6),
    line("with a fetch thread and a slot for both", Kind::Oracle, "--clients 2 --fetch-thread --compress"),
    promised(
        "with all of that, in two parts",
        Kind::Oracle,
        "--clients 2 --fetch-thread --compress --partitions 2",
        5e6,
        20e6,
    ),
    line("one client, with a fetch thread", Kind::Oracle, "--clients 1 --fetch-thread"),
    line("tcp, naive", Kind::Oracle, "--clients 2 --oracle naive --transport tcp"),
    line("tcp, a slot for each client", Kind::Oracle, "--clients 2 --transport tcp"),
    line("tcp, with a fetch thread", Kind::Oracle, "--clients 2 --fetch-thread --transport tcp"),
    promised("shm, reads of 4", Kind::Kv, "--announce --mix read", 800e3, 1.2e6),
    line("shm, reads of 4, 8 in flight", Kind::Kv, "--announce --mix read --in-flight 8"),
    promised("shm, reads and writes of 2", Kind::Kv, "--announce --mix rmw", 200e3, 250e3),
    promised(
        "shm, reads and writes of 2, 8 in flight",
        Kind::Kv,
        "--announce --mix rmw --in-flight 8",
        300e3,
        450e3,
    ),
    promised(
        "shm, reads and writes of 2, 2 threads with 8 in flight",
        Kind::Kv,
        "--announce --mix rmw --threads 2 --in-flight 8",
        450e3,
        650e3,
    ),
    line("shm, reads and writes of 2, not announced, as in no database", Kind::Kv, "--mix rmw"),
    line("shm, reads and writes of 2, skew 0.99", Kind::Kv, "--announce --mix rmw --skew 0.99"),
    line(
        "the same, 2 threads with 4 in flight",
        Kind::Kv,
        "--announce --mix rmw --skew 0.99 --threads 2 --in-flight 4",
    ),
    line("tcp, reads and writes of 2, 1 in flight", Kind::Kv, "--announce --mix rmw --transport tcp"),
    line(
        "tcp, reads and writes of 2, 4 in flight",
        Kind::Kv,
        "--announce --mix rmw --transport tcp --in-flight 4",
    ),
    line(
        "tcp, reads and writes of 2, 8 in flight",
        Kind::Kv,
        "--announce --mix rmw --transport tcp --in-flight 8",
    ),
    promised(
        "tcp, reads and writes of 2, 16 in flight",
        Kind::Kv,
        "--announce --mix rmw --transport tcp --in-flight 16",
        45e3,
        50e3,
    ),
    promised("by key: shm, reads of 4", Kind::Kv, "--index hash --mix read", 300e3, 700e3),
    line("by key: shm, reads and writes of 2", Kind::Kv, "--index hash --mix rmw"),
    line("by key: shm, new-orders of ten lines", Kind::Kv, "--index hash --mix new-order"),
    promised(
        "by key: tcp, new-orders of ten lines",
        Kind::Kv,
        "--index hash --mix new-order --transport tcp",
        1e3 / 0.6,
        1e3 / 0.35,
    ),
    line("tcp, the same, not announced", Kind::Kv, "--mix rmw --transport tcp --in-flight 16"),
    line("shm, 64 B random read", Kind::Floor, "--transport shm --op read --block 64 --floor"),
    line("shm, compare-and-swap", Kind::Floor, "--transport shm --op cas --floor"),
    line("shm, fetch-and-add", Kind::Floor, "--transport shm --op faa --floor"),
    line("shm, call", Kind::Floor, "--transport shm --op call --floor"),
    line("tcp, 64 B random read", Kind::Floor, "--transport tcp --op read --block 64 --floor"),
    line(
        "tcp, 64 B random read, depth 16",
        Kind::Floor,
        "--transport tcp --op read --block 64 --depth 16 --floor",
    ),
];
