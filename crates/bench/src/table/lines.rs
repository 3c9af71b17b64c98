//! The lines of the table: the fabric's operations with the speeds promised, and the peers.

/// A line of the table: one invocation of `farpool bench io`.
pub struct Line {
    /// How other lines and the plot refer to it.
    pub id: &'static str,
    /// The name that readers see.
    pub name: &'static str,
    /// Its arguments, without the duration, the footprint and the output format.
    pub args: &'static str,
    /// What was promised of it.
    pub targets: &'static [Target],
}

/// A promise. Ratios of two lines are medians over the rounds; every round measures both lines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// The median latency is at most this many times the floor's.
    P50ByFloor(f64),
    /// The rate is at least this share of the floor's.
    RateByFloor(f64),
    /// The rate is at least this many times that of another line or peer.
    RateBy(&'static str, f64),
    /// The rate is at least so many operations per second.
    Rate(f64),
    /// The median latency is below that of each of these peers.
    AheadOf(&'static [&'static str]),
}

pub const SHM_READ: &str = "shm read 8 KiB";
pub const TCP_READ: &str = "tcp read 8 KiB";
pub const TCP_READ_32: &str = "tcp read 8 KiB x32";
pub const TCP_STREAM: &str = "tcp read 512 KiB x4";
const SHM_SMALL: &str = "shm read 64 B";
const PEERS_1: [&str; 3] = [NBDKIT_1, MEMCACHED_1, REDIS_1];

pub const NBDKIT_1: &str = "nbdkit 8 KiB";
pub const NBDKIT_32: &str = "nbdkit 8 KiB x32";
pub const NBDKIT_STREAM: &str = "nbdkit 512 KiB x4";
pub const MEMCACHED_1: &str = "memcached 8 KiB";
pub const MEMCACHED_32: &str = "memcached 8 KiB x32";
pub const REDIS_1: &str = "redis 8 KiB";
pub const REDIS_32: &str = "redis 8 KiB x32";

/// The lines, in the order in which they are measured and shown.
pub const LINES: &[Line] = &[
    Line {
        id: SHM_READ,
        name: "shm, 8 KiB random read",
        args: "--transport shm --op read --floor",
        targets: &[Target::P50ByFloor(1.25)],
    },
    Line {
        id: "shm write 8 KiB",
        name: "shm, 8 KiB random write",
        args: "--transport shm --op write --floor",
        targets: &[],
    },
    Line {
        id: SHM_SMALL,
        name: "shm, 64 B random read",
        args: "--transport shm --op read --block 64 --floor",
        targets: &[Target::P50ByFloor(1.4)],
    },
    Line {
        id: "shm read 64 B b16",
        name: "shm, batches of 16 random 64 B reads",
        args: "--transport shm --op read --block 64 --batch 16 --floor",
        targets: &[Target::RateBy(SHM_SMALL, 3.0)],
    },
    Line {
        id: "shm cas",
        name: "shm, compare-and-swap",
        args: "--transport shm --op cas --floor",
        targets: &[Target::P50ByFloor(1.4)],
    },
    Line {
        id: "shm faa",
        name: "shm, fetch-and-add",
        args: "--transport shm --op faa --floor",
        targets: &[],
    },
    Line {
        id: "shm call",
        name: "shm, call with 64 B both ways",
        args: "--transport shm --op call --floor",
        targets: &[Target::P50ByFloor(2.0)],
    },
    Line {
        id: TCP_READ,
        name: "tcp, 8 KiB random read",
        args: "--transport tcp --op read --floor",
        targets: &[Target::P50ByFloor(1.25), Target::AheadOf(&PEERS_1)],
    },
    Line {
        id: TCP_READ_32,
        name: "tcp, 8 KiB random read, depth 32",
        args: "--transport tcp --op read --depth 32 --floor",
        targets: &[Target::RateByFloor(0.9), Target::RateBy(NBDKIT_32, 1.2)],
    },
    Line {
        id: TCP_STREAM,
        name: "tcp, 512 KiB sequential read, depth 4",
        args: "--transport tcp --op read --pattern sequential --block 512KiB --depth 4 --floor",
        targets: &[Target::RateBy(NBDKIT_STREAM, 1.0)],
    },
    Line {
        id: "tcp read 64 B b16",
        name: "tcp, batches of 16 random 64 B reads",
        args: "--transport tcp --op read --block 64 --batch 16 --floor",
        targets: &[Target::Rate(1e6)],
    },
    Line {
        id: "tcp read 64 B b16 x4",
        name: "the same, four batches in flight",
        args: "--transport tcp --op read --block 64 --batch 16 --depth 4 --floor",
        targets: &[],
    },
    Line {
        id: "tcp write 8 KiB",
        name: "tcp, 8 KiB random write",
        args: "--transport tcp --op write --floor",
        targets: &[],
    },
    Line {
        id: "tcp cas",
        name: "tcp, compare-and-swap",
        args: "--transport tcp --op cas --floor",
        targets: &[],
    },
    Line {
        id: "tcp call",
        name: "tcp, call with 64 B both ways",
        args: "--transport tcp --op call --floor",
        targets: &[],
    },
];

/// The lines of the peers, by the ids that [`super::peers`] knows.
pub const PEER_LINES: &[(&str, &str)] = &[
    (NBDKIT_1, "nbdkit memory, fio's nbd engine: 8 KiB random read"),
    (NBDKIT_32, "the same, depth 32"),
    (NBDKIT_STREAM, "nbdkit memory, fio's nbd engine: 512 KiB sequential read, depth 4"),
    (MEMCACHED_1, "memcached: GET of 8 KiB, random keys"),
    (MEMCACHED_32, "the same, 32 in flight"),
    (REDIS_1, "redis: GET of 8 KiB, random keys"),
    (REDIS_32, "the same, 32 in flight"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_refer_to_lines_that_are_measured() {
        let known = |id: &str| {
            LINES.iter().any(|line| line.id == id) || PEER_LINES.iter().any(|&(peer, _)| peer == id)
        };
        for target in LINES.iter().flat_map(|line| line.targets) {
            match target {
                Target::RateBy(id, _) => assert!(known(id), "{id}"),
                Target::AheadOf(ids) => assert!(ids.iter().all(|id| known(id))),
                Target::P50ByFloor(_) | Target::RateByFloor(_) | Target::Rate(_) => {}
            }
        }
    }
}
