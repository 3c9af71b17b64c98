//! The figures about one file and one client on volumes of every kind: damon2, damon3, sigmod3, sigmod4.

use std::sync::atomic::AtomicBool;

use anyhow::Result;

use super::client::{Answer, Ask, FileOp};
use super::figure::Figure;
use super::rounds::{Measured, Operation, one_by_one};
use super::section::{Section, conditions};
use super::volume::{Kind, Spec, Surroundings, Volume};
use super::{Effort, document_rounds};
use crate::chart::{self, Bar, Chart, FLOOR, OURS, PEER};
use crate::options::Pattern;
use crate::progress::Progress;
use crate::spread::{middle, ratio};

const BARE: &str = "floor";
const FAR_SHM: &str = "shm";
const NBDFUSE: &str = "nbdfuse";

/// The volumes, in the order in which they are shown. What others want to compare is one more line.
pub const VOLUMES: &[Spec] = &[
    Spec { id: BARE, name: "bare FUSE file (the floor)", kind: Kind::Floor, launcher: &[] },
    Spec { id: FAR_SHM, name: "far memory, 2 nodes, shm", kind: far("shm"), launcher: &[] },
    Spec { id: "tcp", name: "far memory, 2 nodes, tcp", kind: far("tcp"), launcher: &[] },
    Spec { id: NBDFUSE, name: "nbdfuse over nbdkit, Unix socket", kind: Kind::NbdfuseUnix, launcher: &[] },
    Spec { id: "nbdfuse tcp", name: "nbdfuse over nbdkit, TCP", kind: Kind::NbdfuseTcp, launcher: &[] },
    Spec { id: "tmpfs", name: "tmpfs", kind: Kind::Tmpfs, launcher: &[] },
    Spec { id: "disk", name: "the machine's disk", kind: Kind::Disk, launcher: &[] },
    Spec { id: "throttled", name: "throttled, 3,000 IOPS, 125 MiB/s", kind: Kind::Throttled, launcher: &[] },
];

const fn far(transport: &'static str) -> Kind {
    Kind::Far { transport, nodes: 2, percent: 100, mount_args: &[] }
}

/// What a figure shows of an operation.
#[derive(Clone, Copy, PartialEq)]
enum Shows {
    Throughput,
    Latency,
}

/// How two volumes must compare, by the medians of ratios.
struct Promise {
    operation: &'static str,
    volume: &'static str,
    than: &'static str,
    /// At most so many times the median latency, or at least so many times the throughput, by what the figure shows.
    times: f64,
}

/// What a column is called, its digits behind the point, and what stands in it.
type Column = (&'static str, usize, fn(&Answer) -> f64);

struct Plain {
    figure: Figure,
    shows: Shows,
    operations: &'static [&'static str],
    question: &'static str,
    promises: &'static [Promise],
}

const SMALL_READ: &str = "8 KiB random read";
const SMALL_WRITE: &str = "8 KiB random write";
const LARGE_READ: &str = "512 KiB sequential read";
const LARGE_WRITE: &str = "512 KiB sequential write";
const BUSY_SMALL_READ: &str = "8 KiB random read, 20 threads";
const BUSY_LARGE_READ: &str = "512 KiB sequential read, 5 threads";

const PLAINS: &[Plain] = &[
    Plain {
        figure: Figure::Damon2,
        shows: Shows::Throughput,
        operations: &[LARGE_WRITE, LARGE_READ],
        question: "how many bytes a second does one thread move that writes or reads a large file?",
        promises: &[
            Promise { operation: LARGE_READ, volume: FAR_SHM, than: BARE, times: 0.7 },
            Promise { operation: LARGE_WRITE, volume: FAR_SHM, than: BARE, times: 0.7 },
            Promise { operation: LARGE_READ, volume: FAR_SHM, than: NBDFUSE, times: 1.0 },
            Promise { operation: LARGE_WRITE, volume: FAR_SHM, than: NBDFUSE, times: 1.0 },
        ],
    },
    Plain {
        figure: Figure::Damon3,
        shows: Shows::Latency,
        operations: &[SMALL_READ, SMALL_WRITE],
        question: "how long does one thread wait for a database's page?",
        promises: &[
            Promise { operation: SMALL_READ, volume: FAR_SHM, than: BARE, times: 1.5 },
            Promise { operation: SMALL_WRITE, volume: FAR_SHM, than: BARE, times: 1.5 },
            Promise { operation: SMALL_READ, volume: FAR_SHM, than: NBDFUSE, times: 0.4 },
            Promise { operation: SMALL_WRITE, volume: FAR_SHM, than: NBDFUSE, times: 0.4 },
        ],
    },
    Plain {
        figure: Figure::Sigmod3,
        shows: Shows::Throughput,
        operations: &[BUSY_SMALL_READ, BUSY_LARGE_READ],
        question: "how much is read when 20 threads read pages, or 5 read large blocks?",
        promises: &[],
    },
    Plain {
        figure: Figure::Sigmod4,
        shows: Shows::Latency,
        operations: &[BUSY_SMALL_READ, BUSY_LARGE_READ],
        question: "how long do they wait then?",
        promises: &[],
    },
];

fn operation(id: &'static str, seconds: f64) -> Operation {
    let ask = |op, pattern, block_kib: usize, threads| Ask {
        op,
        pattern,
        block_bytes: block_kib << 10,
        threads,
        seconds,
    };
    let ask = match id {
        SMALL_WRITE => ask(FileOp::Write, Pattern::Random, 8, 1),
        LARGE_READ => ask(FileOp::Read, Pattern::Sequential, 512, 1),
        LARGE_WRITE => ask(FileOp::Write, Pattern::Sequential, 512, 1),
        BUSY_SMALL_READ => ask(FileOp::Read, Pattern::Random, 8, 20),
        BUSY_LARGE_READ => ask(FileOp::Read, Pattern::Sequential, 512, 5),
        _ => ask(FileOp::Read, Pattern::Random, 8, 1),
    };
    Operation { id, ask }
}

/// Whether [`measure`] gives this figure.
pub fn has(figure: Figure) -> bool {
    PLAINS.iter().any(|plain| plain.figure == figure)
}

/// Measures what the figures need, once, and writes each down.
pub fn measure(
    figures: &[Figure],
    around: &Surroundings<'_>,
    effort: &Effort,
    stop: &AtomicBool,
) -> Result<Vec<Section>> {
    let wanted: Vec<&Plain> = PLAINS.iter().filter(|plain| figures.contains(&plain.figure)).collect();
    let mut ids: Vec<&str> = wanted.iter().flat_map(|plain| plain.operations).copied().collect();
    ids.sort_unstable();
    ids.dedup();
    let operations: Vec<Operation> = ids.into_iter().map(|id| operation(id, effort.seconds)).collect();
    let specs: Vec<&Spec> = VOLUMES.iter().filter(|spec| spec.is_wanted(around)).collect();
    let mut progress = Progress::start(specs.len() * (1 + effort.rounds * operations.len()));
    let mut volumes = Vec::new();
    for spec in specs {
        progress.step(&format!("starting and filling: {}", spec.name));
        volumes.push(spec.start(around)?);
        progress.done();
    }
    let measured = one_by_one(&mut volumes, &operations, effort.rounds, &mut progress, stop)?;
    Ok(wanted.into_iter().map(|plain| plain.section(&volumes, &measured, around, effort)).collect())
}

impl Plain {
    fn section(
        &self,
        volumes: &[Volume],
        measured: &Measured,
        around: &Surroundings<'_>,
        effort: &Effort,
    ) -> Section {
        let specs: Vec<&Spec> = volumes.iter().map(Volume::spec).collect();
        let notes = vec![
            ("Question", self.question.to_owned()),
            (
                "Floor",
                "a FUSE file system with one file, held in the daemon's own memory, as many threads, a device each: \
                 asked by the kernel like a mount, it only copies."
                    .to_owned(),
            ),
            ("Method", format!("files opened with O_DIRECT; {}", document_rounds(effort))),
            conditions(&format!("a filled file of {} MiB on each", around.bytes >> 20)),
        ];
        let mut body = self.table(&specs, measured);
        if !self.promises.is_empty() {
            body += &format!("\n{}", self.verdicts(measured));
        }
        for (is_there, remark) in [
            (around.throttled.is_some(), "There was no throttled disk: it takes root and control groups."),
            (around.peers, "The peers were left out."),
        ] {
            if !is_there {
                body += &format!("\n{remark}\n");
            }
        }
        Section { figure: self.figure, notes, body, drawing: Some(self.drawing(&specs, measured)) }
    }

    /// The figure that ratios are made of.
    fn decides(&self) -> fn(&Answer) -> f64 {
        match self.shows {
            Shows::Throughput => |it| it.mib_s,
            Shows::Latency => |it| it.p50_us,
        }
    }

    fn columns(&self) -> &'static [Column] {
        match self.shows {
            Shows::Throughput => &[("MiB/s", 0, |it| it.mib_s), ("op/s", 0, |it| it.per_second)],
            Shows::Latency => &[
                ("p50 µs", 1, |it| it.p50_us),
                ("p99 µs", 1, |it| it.p99_us),
                ("mean µs", 1, |it| it.mean_us),
            ],
        }
    }

    fn table(&self, specs: &[&Spec], measured: &Measured) -> String {
        let names: Vec<&str> = self.columns().iter().map(|(name, ..)| *name).collect();
        let heads = self.operations.iter().map(|id| format!(" {id}: {} | × floor |", names.join(" | ")));
        let lines = "--:|".repeat(self.operations.len() * (names.len() + 1));
        let mut text = format!("| |{}\n|---|{lines}\n", heads.collect::<String>());
        for spec in specs {
            text += &format!("| {} |", spec.name);
            for id in self.operations {
                for &(_, digits, figure) in self.columns() {
                    text += &format!(" {} |", middle(measured.spread(id, spec.id, figure), digits));
                }
                text += &format!(" {} |", ratio(measured.ratio(id, spec.id, BARE, self.decides())));
            }
            text.push('\n');
        }
        text
    }

    fn verdicts(&self, measured: &Measured) -> String {
        let mut text = String::from("| promised | reached | met |\n|---|---|---|\n");
        for Promise { operation, volume, than, times } in self.promises {
            let Some(reached) = measured.ratio(operation, volume, than, self.decides()) else { continue };
            let (what, sign, met) = match self.shows {
                Shows::Throughput => ("MiB/s", '≥', reached.middle >= *times),
                Shows::Latency => ("p50", '≤', reached.middle <= *times),
            };
            let met = if met { "yes" } else { "**no**" };
            let promised = format!("{operation}: {volume}'s {what} {sign} {times} × {than}'s");
            text += &format!("| {promised} | {} | {met} |\n", ratio(Some(reached)));
        }
        text
    }

    fn drawing(&self, specs: &[&Spec], measured: &Measured) -> String {
        let (what, digits) = match self.shows {
            Shows::Throughput => ("MiB/s (more is better)", 0),
            Shows::Latency => ("median latency in µs (less is better)", 1),
        };
        let chart = |id: &&'static str| {
            let bar = |spec: &&Spec| {
                let colour = match spec.kind {
                    Kind::Floor => FLOOR,
                    Kind::Far { .. } => OURS,
                    _ => PEER,
                };
                let spread = measured.spread(id, spec.id, self.decides())?;
                Some(Bar { name: spec.name.into(), colour, spread })
            };
            Chart { title: format!("{id}: {what}"), digits, bars: specs.iter().filter_map(bar).collect() }
        };
        chart::draw(&self.operations.iter().map(chart).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(times: f64) -> Measured {
        let mut measured = Measured::default();
        for round in 1..=3 {
            for (place, spec) in VOLUMES.iter().enumerate() {
                let p50_us = 10.0 * f64::from(round) * if place == 0 { 1.0 } else { times };
                let (per_second, mib_s) = (1e6 / p50_us, 1e4 / p50_us);
                let answer = Answer { per_second, mean_us: p50_us, p50_us, p99_us: 50.0, mib_s };
                for operation in PLAINS.iter().flat_map(|plain| plain.operations) {
                    measured.add(operation, spec.id, answer);
                }
            }
        }
        measured
    }

    #[test]
    fn every_volume_has_a_row_and_a_bar_and_rows_are_equally_long() {
        let specs: Vec<&Spec> = VOLUMES.iter().collect();
        let measured = measured(1.4);
        for plain in PLAINS {
            let table = plain.table(&specs, &measured);
            assert!(VOLUMES.iter().all(|spec| table.contains(&format!("| {} |", spec.name))), "{table}");
            let mut columns = table.lines().map(|line| line.matches('|').count());
            let first = columns.next().unwrap();
            assert!(columns.all(|count| count == first), "{table}");
            assert!(table.contains("1.40 (1.40–1.40)") || table.contains("0.71 (0.71–0.71)"), "{table}");
            assert!(plain.drawing(&specs, &measured).contains("nbdfuse over nbdkit"));
        }
    }

    #[test]
    fn promises_name_what_is_measured_and_losses_are_marked() {
        for plain in PLAINS {
            for promise in plain.promises {
                assert!(plain.operations.contains(&promise.operation));
                for id in [promise.volume, promise.than] {
                    assert!(VOLUMES.iter().any(|spec| spec.id == id), "{id}");
                }
            }
            let (kept, broken) = (plain.verdicts(&measured(1.4)), plain.verdicts(&measured(1.6)));
            let losses = |verdicts: &str| verdicts.matches("**no**").count();
            // Beside nbdfuse, which is as fast here, only the promise to be much faster is broken.
            let expected = match plain.figure {
                Figure::Damon2 => (0, 2),
                Figure::Damon3 => (2, 4),
                _ => (0, 0),
            };
            assert_eq!((losses(&kept), losses(&broken)), expected, "{kept}\n{broken}");
        }
    }
}
