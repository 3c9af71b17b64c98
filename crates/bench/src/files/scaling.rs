//! The figures about more nodes and more clients: sigmod5 and sigmod6.

use std::sync::atomic::AtomicBool;

use anyhow::Result;

use super::client::{Answer, Ask, FileOp, Opening};
use super::figure::Figure;
use super::rounds::{Measured, Operation, one_by_one, together};
use super::section::{Section, conditions};
use super::volume::{Kind, MountablePool, Spec, Surroundings, Volume};
use super::{Effort, document_rounds};
use crate::chart::{self, Bar, Chart, FLOOR, OURS};
use crate::options::Pattern;
use crate::progress::Tasks;
use crate::spread::{Spread, middle, ratio};
use crate::stop::check_stop;

/// Rows are identified by their names.
const BARE: Spec = named("bare FUSE file (the floor)", Kind::Floor);

const fn over(transport: &'static str, nodes: u32, name: &'static str) -> Spec {
    named(name, Kind::Far { transport, nodes, percent: 100, mount_args: &[] })
}

const fn named(name: &'static str, kind: Kind) -> Spec {
    Spec { id: name, name, kind, launcher: &[], opening: Opening::Direct }
}

/// One client with 1, 2, 4 and 8 nodes.
const NODES: [Spec; 9] = [
    BARE,
    over("shm", 1, "shm, 1 node"),
    over("shm", 2, "shm, 2 nodes"),
    over("shm", 4, "shm, 4 nodes"),
    over("shm", 8, "shm, 8 nodes"),
    over("tcp", 1, "tcp, 1 node"),
    over("tcp", 2, "tcp, 2 nodes"),
    over("tcp", 4, "tcp, 4 nodes"),
    over("tcp", 8, "tcp, 8 nodes"),
];

const CLIENTS_MAX: usize = 8;
/// 1, 2, 4 and 8 clients of one node: the row's name, the number of clients, and the transport.
const CLIENTS: [(&str, usize, &str); 8] = [
    ("shm, 1 client", 1, "shm"),
    ("shm, 2 clients", 2, "shm"),
    ("shm, 4 clients", 4, "shm"),
    ("shm, 8 clients", 8, "shm"),
    ("tcp, 1 client", 1, "tcp"),
    ("tcp, 2 clients", 2, "tcp"),
    ("tcp, 4 clients", 4, "tcp"),
    ("tcp, 8 clients", 8, "tcp"),
];

/// As for sigmod3: pages by 20 threads, large blocks by 5.
fn operations(seconds: f64) -> [Operation; 2] {
    let ask = |pattern, block_kib: usize, threads| Ask {
        op: FileOp::Read,
        pattern,
        block_bytes: block_kib << 10,
        threads,
        seconds,
    };
    [
        Operation { id: "8 KiB random read, 20 threads", ask: ask(Pattern::Random, 8, 20) },
        Operation { id: "512 KiB sequential read, 5 threads", ask: ask(Pattern::Sequential, 512, 5) },
    ]
}

/// One client over one to eight nodes.
pub fn nodes(around: &Surroundings<'_>, effort: &Effort, stop: &AtomicBool) -> Result<Section> {
    let operations = operations(effort.seconds);
    let mut progress = Tasks::start(NODES.len() * (1 + effort.rounds * operations.len()));
    let mut volumes = Vec::new();
    for spec in &NODES {
        progress.step(&format!("starting and filling: {}", spec.name));
        volumes.push(spec.start(around)?);
        progress.done();
    }
    let measured = one_by_one(&mut volumes, &operations, effort.rounds, &mut progress, stop)?;
    let names = NODES.map(|spec| spec.name);
    let notes = vec![
        ("Question", "does it cost anything to spread the same memory over more nodes?".to_owned()),
        (
            "Floor",
            "a bare FUSE file; and the first row of each transport, which the others should not fall behind."
                .into(),
        ),
        ("Method", document_rounds(effort)),
        conditions(&format!(
            "a file of {} MiB in all; nodes are processes of one machine, so more of them bring no more network",
            around.bytes >> 20
        )),
    ];
    let base = |name: &'static str| match name {
        _ if name.starts_with("shm") => "shm, 1 node",
        _ if name.starts_with("tcp") => "tcp, 1 node",
        _ => name,
    };
    Ok(section(Figure::Sigmod5, notes, &names, base, &measured, &operations))
}

/// One to eight clients of one node, at the same time.
pub fn clients(around: &Surroundings<'_>, effort: &Effort, stop: &AtomicBool) -> Result<Section> {
    let operations = operations(effort.seconds);
    let mut progress = Tasks::start(CLIENTS.len() * effort.rounds * operations.len());
    // All clients' files together are as large as the file of a single client, so the memory is the same.
    let around = &Surroundings { bytes: around.bytes / CLIENTS_MAX as u64, ..*around };
    progress.step("starting and filling");
    let mut pools = Vec::new();
    let mut transports: Vec<(&str, Vec<Volume>)> = Vec::new();
    for transport in ["shm", "tcp"] {
        let pool = MountablePool::start(around.farpool, 1, around.bytes, CLIENTS_MAX as u64)?;
        let spec = over(transport, 1, "a client");
        let volumes = (0..CLIENTS_MAX).map(|_| spec.start_on(&pool, transport, around));
        transports.push((transport, volumes.collect::<Result<_>>()?));
        pools.push(pool);
    }
    let mut measured = Measured::default();
    for round in 0..effort.rounds {
        for Operation { id, ask } in &operations {
            progress.step(&format!("round {}: {id}", round + 1));
            for turn in 0..CLIENTS.len() {
                check_stop(stop)?;
                let (name, count, transport) = CLIENTS[(turn + round) % CLIENTS.len()];
                for (_, volumes) in transports.iter_mut().filter(|(by, _)| *by == transport) {
                    measured.add(id, name, together(&mut volumes[..count], ask, stop)?);
                }
                progress.done();
            }
        }
    }
    drop(transports);
    drop(pools);
    let notes = vec![
        (
            "Question",
            "how does one node's memory scale with its clients, each with a mount and threads of its own?"
                .into(),
        ),
        (
            "Floor",
            "the first row of each transport, times the number of processors that clients and node share."
                .into(),
        ),
        (
            "Method",
            format!(
                "rates are added up over the clients, latencies are their mean; {}",
                document_rounds(effort)
            ),
        ),
        conditions(&format!(
            "a file of {} MiB for each client; all of them, and the node, are processes of one machine",
            around.bytes >> 20
        )),
    ];
    let names = CLIENTS.map(|(name, ..)| name);
    let base = |name: &'static str| if name.starts_with("shm") { CLIENTS[0].0 } else { CLIENTS[4].0 };
    Ok(section(Figure::Sigmod6, notes, &names, base, &measured, &operations))
}

fn section(
    figure: Figure,
    notes: Vec<(&'static str, String)>,
    names: &[&'static str],
    base: impl Fn(&'static str) -> &'static str,
    measured: &Measured,
    operations: &[Operation],
) -> Section {
    let mut body = String::from("| |");
    for Operation { id, .. } in operations {
        body += &format!(" {id}: MiB/s | p50 µs | p99 µs | MiB/s × first |");
    }
    body += &format!("\n|---|{}\n", "--:|--:|--:|--:|".repeat(operations.len()));
    for &name in names {
        let cells = operations.iter().map(|Operation { id, .. }| {
            let spread = |figure: fn(&Answer) -> f64| measured.spread(id, name, figure);
            format!(
                " {} | {} | {} | {} |",
                middle(spread(|it| it.mib_s), 0),
                middle(spread(|it| it.p50_us), 1),
                middle(spread(|it| it.p99_us), 1),
                ratio(measured.ratio(id, name, base(name), |it| it.mib_s)),
            )
        });
        body += &format!("| {name} |{}\n", cells.collect::<String>());
    }
    let chart = |id, what: &str, figure: fn(&Answer) -> f64| {
        let bar = |&name: &&'static str| {
            let colour = if name == BARE.name { FLOOR } else { OURS };
            let spread: Spread = measured.spread(id, name, figure)?;
            Some(Bar { name: name.into(), colour, spread })
        };
        Chart {
            title: format!("{id}: {what}"),
            digits: 0,
            mark: None,
            bars: names.iter().filter_map(bar).collect(),
        }
    };
    let charts = operations.iter().flat_map(|Operation { id, .. }| {
        [
            chart(id, "MiB/s (more is better)", |it| it.mib_s),
            chart(id, "median latency in µs (less is better)", |it| it.p50_us),
        ]
    });
    let drawing = chart::draw(&charts.collect::<Vec<_>>());
    Section { figure, notes, body, verdicts: Vec::new(), drawing: Some(drawing) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_there_and_compared_with_the_first_of_its_transport() {
        let mut measured = Measured::default();
        for (name, count, _) in CLIENTS {
            let mib_s = 100.0 * count as f64;
            let answer = Answer { per_second: 1.0, mean_us: 1.0, p50_us: 1.0, p99_us: 2.0, mib_s };
            operations(1.0).iter().for_each(|operation| measured.add(operation.id, name, answer));
        }
        let names = CLIENTS.map(|(name, ..)| name);
        let first = |name: &'static str| if name.starts_with("shm") { CLIENTS[0].0 } else { CLIENTS[4].0 };
        let section = section(Figure::Sigmod6, Vec::new(), &names, first, &measured, &operations(1.0));
        for (name, count, _) in CLIENTS {
            let row = section.body.lines().find(|line| line.starts_with(&format!("| {name} |"))).unwrap();
            assert_eq!(row.matches(&format!("{count}.00 (")).count(), 2, "{row}");
        }
    }
}
