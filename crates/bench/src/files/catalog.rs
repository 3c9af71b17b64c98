//! What the figures about one file and one client compare: volumes, operations and promises. Another
//! comparison is one more entry here.

use anyhow::{Result, bail};

use super::client::{Ask, FileOp, Opening};
use super::figure::Figure;
use super::rounds::Operation;
use super::volume::{Kind, Spec};
use crate::options::Pattern;

/// Volumes that are filled once and measured in turn, and the figures made of the results.
pub struct Stand {
    /// The volumes, in the order in which they are shown.
    pub volumes: &'static [Spec],
    /// The figures.
    pub plains: &'static [Plain],
}

/// A figure about one file and one client.
pub struct Plain {
    /// Its name.
    pub figure: Figure,
    /// What it shows of each operation.
    pub shows: Shows,
    /// The operations, by their ids.
    pub operations: &'static [&'static str],
    /// The question that it answers.
    pub question: &'static str,
    /// The floor, described in words.
    pub floor: &'static str,
    /// The volumes that others are divided by: the column's name, and the volume's id.
    pub beside: &'static [(&'static str, &'static str)],
    /// How volumes must compare.
    pub promises: &'static [Promise],
    /// What a reader must know about some of the rows.
    pub remark: Option<&'static str>,
}

/// What a figure shows of an operation.
#[derive(Clone, Copy, PartialEq)]
pub enum Shows {
    /// Bytes per second.
    Throughput,
    /// The latency.
    Latency,
}

/// How two volumes must compare, by the median of their ratios.
pub struct Promise {
    /// The operation's id.
    pub operation: &'static str,
    /// The id of the volume that makes the promise.
    pub volume: &'static str,
    /// The id of the volume that it is compared with.
    pub than: &'static str,
    /// The limit: at most this many times the median latency, or at least this many times the throughput,
    /// depending on what the figure shows.
    pub times: f64,
    /// A stricter limit, which is not promised.
    pub aim: Option<f64>,
}

const fn promise(operation: &'static str, volume: &'static str, than: &'static str, times: f64) -> Promise {
    Promise { operation, volume, than, times, aim: None }
}

const BARE: &str = "floor";
const STRIPE_SHM: &str = "stripe shm";
const PARITY_SHM: &str = "parity shm";
const ONE_NODE_TCP: &str = "one tcp";
const NBDFUSE: &str = "nbdfuse";
const NBDFUSE_TCP: &str = "nbdfuse tcp";
const TMPFS: &str = "tmpfs";
const PING_PONG: &str = "ping-pong";
const INTERPOSED_SHM: &str = "interposed shm";
const INTERPOSED_TCP: &str = "interposed tcp";
const CACHED_SHM: &str = "cached shm";

/// As many as parity with four data extents needs. Every kind of file gets as many, so that they compare.
const NODES: u32 = 5;

const fn spec(id: &'static str, name: &'static str, kind: Kind) -> Spec {
    Spec { id, name, kind, launcher: &[], opening: Opening::Direct }
}

const fn buffered(id: &'static str, name: &'static str, kind: Kind) -> Spec {
    Spec { opening: Opening::Buffered, ..spec(id, name, kind) }
}

const fn far(transport: &'static str, percent: u64, mount_args: &'static [&'static str]) -> Kind {
    Kind::Far { transport, nodes: NODES, percent, mount_args }
}

/// A single node, as the peers have a single server.
const fn one_node(transport: &'static str) -> Kind {
    Kind::Far { transport, nodes: 1, percent: 100, mount_args: NONE }
}

/// With direct clients. Usually one node, as a ping-pong has one other end; two show what the second one
/// costs.
const fn accelerated(transport: &'static str, nodes: u32) -> Kind {
    Kind::Far { transport, nodes, percent: 100, mount_args: &["--accelerate"] }
}

const NONE: &[&str] = &["--redundancy", "none"];
const STRIPE: &[&str] = &["--redundancy", "stripe"];
const PARITY: &[&str] = &["--redundancy", "parity:4"];
const MIRROR: &[&str] = &["--redundancy", "mirror"];
/// Far memory that a file takes, in per cent of its bytes.
const PARITY_PERCENT: u64 = 125;
const MIRROR_PERCENT: u64 = 200;

const VOLUMES: &[Spec] = &[
    spec(BARE, "bare FUSE file (the floor)", Kind::Floor),
    spec("none shm", "far memory, shm: none", far("shm", 100, NONE)),
    spec(STRIPE_SHM, "far memory, shm: stripe", far("shm", 100, STRIPE)),
    spec(PARITY_SHM, "far memory, shm: parity 4+1", far("shm", PARITY_PERCENT, PARITY)),
    spec("mirror shm", "far memory, shm: mirror", far("shm", MIRROR_PERCENT, MIRROR)),
    spec(ONE_NODE_TCP, "far memory, tcp: one node", one_node("tcp")),
    spec("none tcp", "far memory, tcp: none", far("tcp", 100, NONE)),
    spec("stripe tcp", "far memory, tcp: stripe", far("tcp", 100, STRIPE)),
    spec("parity tcp", "far memory, tcp: parity 4+1", far("tcp", PARITY_PERCENT, PARITY)),
    spec("mirror tcp", "far memory, tcp: mirror", far("tcp", MIRROR_PERCENT, MIRROR)),
    spec(NBDFUSE, "nbdfuse over nbdkit, Unix socket", Kind::NbdfuseUnix),
    spec(NBDFUSE_TCP, "nbdfuse over nbdkit, TCP", Kind::NbdfuseTcp),
    spec(TMPFS, "tmpfs", Kind::Tmpfs),
    spec("disk", "the machine's disk", Kind::Disk),
    spec("throttled", "throttled, 3,000 IOPS, 125 MiB/s", Kind::Throttled),
];

/// Programs run by `farpool run`, beside the same programs without it.
const INTERPOSED: &[Spec] = &[
    spec(PING_PONG, "polling ping-pong over TCP", Kind::PingPong),
    spec(TMPFS, "tmpfs", Kind::Tmpfs),
    Spec { launcher: RUN, ..spec(INTERPOSED_SHM, "interposer, shm", accelerated("shm", 1)) },
    Spec { launcher: RUN, ..spec(INTERPOSED_TCP, "interposer, tcp", accelerated("tcp", 1)) },
    Spec { launcher: RUN, ..spec("interposed tcp 2", "interposer, tcp, 2 nodes", accelerated("tcp", 2)) },
    spec("mount shm", "the mount alone, shm", accelerated("shm", 1)),
    spec("mount tcp", "the mount alone, tcp", accelerated("tcp", 1)),
];
const RUN: &[&str] = &["run", "--"];

/// A file on a local disk behind the page cache, beside the kernel's own caches.
const CACHED: &[Spec] = &[
    buffered(TMPFS, "tmpfs", Kind::Tmpfs),
    buffered(CACHED_SHM, "page cache, shm", Kind::Cached { transport: "shm" }),
    buffered("cached tcp", "page cache, tcp", Kind::Cached { transport: "tcp" }),
    buffered("kernel", "the machine's disk, in the kernel's page cache", Kind::KernelCached),
];

const SMALL_READ: &str = "8 KiB random read";
const SMALL_WRITE: &str = "8 KiB random write";
const LARGE_READ: &str = "512 KiB sequential read";
const LARGE_WRITE: &str = "512 KiB sequential write";
/// A row of parity 4+1: four extents of 256 KiB.
const ROW_WRITE: &str = "1 MiB sequential write";
const BUSY_SMALL_READ: &str = "8 KiB random read, 20 threads";
const BUSY_LARGE_READ: &str = "512 KiB sequential read, 5 threads";

/// The operation with this id, measured for `seconds` at a time.
///
/// # Errors
/// If there is no operation with this id.
pub fn operation(id: &'static str, seconds: f64) -> Result<Operation> {
    let (op, pattern, block_kib, threads) = match id {
        SMALL_READ => (FileOp::Read, Pattern::Random, 8, 1),
        SMALL_WRITE => (FileOp::Write, Pattern::Random, 8, 1),
        LARGE_READ => (FileOp::Read, Pattern::Sequential, 512, 1),
        LARGE_WRITE => (FileOp::Write, Pattern::Sequential, 512, 1),
        ROW_WRITE => (FileOp::Write, Pattern::Sequential, 1024, 1),
        BUSY_SMALL_READ => (FileOp::Read, Pattern::Random, 8, 20),
        BUSY_LARGE_READ => (FileOp::Read, Pattern::Sequential, 512, 5),
        unknown => bail!("there is no operation '{unknown}'"),
    };
    Ok(Operation { id, ask: Ask { op, pattern, block_bytes: block_kib << 10, threads, seconds } })
}

const BARE_FILE: &str = "a FUSE file system with one file, held in the daemon's own memory, with as many \
                         threads as the mount, a device each. The kernel asks it as it asks a mount, and it \
                         does nothing but copy.";
const FIVE_NODES: &str = "Far memory lies on five nodes, whatever the redundancy, unless a row says \
                          otherwise. They share the machine's processors with the mount, so over TCP a node \
                          must often be woken. Each peer is one server; compare it with the row with one \
                          node. A write of 1 MiB is a whole row of parity 4+1 and reads nothing; a smaller \
                          write reads what the new parity needs.";

/// All stands.
pub const STANDS: &[Stand] = &[
    Stand {
        volumes: VOLUMES,
        plains: &[
            Plain {
                figure: Figure::Damon2,
                shows: Shows::Throughput,
                operations: &[LARGE_WRITE, LARGE_READ, ROW_WRITE],
                question: "how many bytes a second can one thread write to, or read from, a large file?",
                floor: BARE_FILE,
                beside: &[("floor", BARE)],
                promises: &[
                    promise(LARGE_READ, STRIPE_SHM, BARE, 0.7),
                    promise(LARGE_WRITE, STRIPE_SHM, BARE, 0.7),
                    promise(LARGE_READ, STRIPE_SHM, NBDFUSE, 1.0),
                    promise(LARGE_WRITE, STRIPE_SHM, NBDFUSE, 1.0),
                    promise(LARGE_READ, ONE_NODE_TCP, NBDFUSE_TCP, 1.0),
                    promise(LARGE_WRITE, ONE_NODE_TCP, NBDFUSE_TCP, 1.0),
                    promise(ROW_WRITE, PARITY_SHM, STRIPE_SHM, 0.6),
                ],
                remark: Some(FIVE_NODES),
            },
            Plain {
                figure: Figure::Damon3,
                shows: Shows::Latency,
                operations: &[SMALL_READ, SMALL_WRITE],
                question: "how long does one thread wait for a database's page?",
                floor: BARE_FILE,
                beside: &[("floor", BARE)],
                promises: &[
                    promise(SMALL_READ, STRIPE_SHM, BARE, 1.5),
                    promise(SMALL_WRITE, STRIPE_SHM, BARE, 1.5),
                    promise(SMALL_READ, STRIPE_SHM, NBDFUSE, 0.4),
                    promise(SMALL_WRITE, STRIPE_SHM, NBDFUSE, 0.4),
                    promise(SMALL_READ, ONE_NODE_TCP, BARE, 1.5),
                    promise(SMALL_READ, ONE_NODE_TCP, NBDFUSE_TCP, 1.0),
                ],
                remark: Some(FIVE_NODES),
            },
            Plain {
                figure: Figure::Sigmod3,
                shows: Shows::Throughput,
                operations: &[BUSY_SMALL_READ, BUSY_LARGE_READ],
                question: "what throughput do 20 threads get that read pages, or 5 that read large blocks?",
                floor: BARE_FILE,
                beside: &[("floor", BARE)],
                promises: &[],
                remark: None,
            },
            Plain {
                figure: Figure::Sigmod4,
                shows: Shows::Latency,
                operations: &[BUSY_SMALL_READ, BUSY_LARGE_READ],
                question: "how long does an operation take if 20 threads read pages, or 5 read large blocks?",
                floor: BARE_FILE,
                beside: &[("floor", BARE)],
                promises: &[],
                remark: None,
            },
        ],
    },
    Stand {
        volumes: INTERPOSED,
        plains: &[Plain {
            figure: Figure::Interposer,
            shows: Shows::Latency,
            operations: &[SMALL_READ, SMALL_WRITE],
            question: "how long does a program wait for a page if it does not ask the kernel?",
            floor: "for shm, `pread` and `pwrite` of a file on tmpfs; for tcp, a bare request and answer \
                    over loopback between two polling processes that touch as much memory.",
            beside: &[("tmpfs", TMPFS), ("ping-pong", PING_PONG)],
            promises: &[
                promise(SMALL_READ, INTERPOSED_SHM, TMPFS, 1.3),
                promise(SMALL_READ, INTERPOSED_TCP, PING_PONG, 1.35),
            ],
            remark: Some(
                "Far memory lies on one node unless a row says otherwise: with two nodes, three processes \
                 (they and the program) poll on two processors. Every block that is read is verified by its \
                 checksum. Over tcp the interposer only reads. It leaves writes to the mount, where each one \
                 bypasses the kernel's cache, even if the program did not ask for that, and waits for its \
                 node. So programs that write much are faster there without the interposer.",
            ),
        }],
    },
    Stand {
        volumes: CACHED,
        plains: &[Plain {
            figure: Figure::CachedPage,
            shows: Shows::Latency,
            operations: &[SMALL_READ],
            question: "how long does a program wait for a page that is in the page cache?",
            floor: "`pread` of a file on tmpfs: a system call, and a copy.",
            beside: &[("tmpfs", TMPFS)],
            promises: &[Promise { aim: Some(1.0), ..promise(SMALL_READ, CACHED_SHM, TMPFS, 1.25) }],
            remark: Some(
                "The file behind the page cache lies on the machine's disk, and is pinned before anything is \
                 measured. The counters of the cache were compared with the number of reads: a figure in \
                 which too few are hits is refused. Each page is verified by its checksum. Far memory lies on \
                 one node; over tcp, the program and the node share the machine's processors.",
            ),
        }],
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_refer_to_what_is_measured_for_them() {
        for stand in STANDS {
            let is_there = |id: &str| stand.volumes.iter().any(|spec| spec.id == id);
            for plain in stand.plains {
                assert!(plain.operations.iter().all(|id| operation(id, 1.0).is_ok()), "{}", plain.figure);
                assert!(plain.beside.iter().all(|(_, id)| is_there(id)), "{}", plain.figure);
                for promise in plain.promises {
                    assert!(plain.operations.contains(&promise.operation), "{}", promise.operation);
                    assert!(is_there(promise.volume) && is_there(promise.than), "{}", promise.volume);
                }
            }
        }
    }

    #[test]
    fn unknown_operation_is_refused() {
        assert!(operation("8 KiB random raed", 1.0).is_err());
    }

    #[test]
    fn a_row_of_parity_is_written_whole() {
        let row = operation(ROW_WRITE, 1.0).unwrap().ask.block_bytes as u64;
        assert_eq!(row, 4 * farpool_pool::EXTENT_BYTES);
    }
}
