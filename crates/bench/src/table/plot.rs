//! The plot: one chart per question, whose bars are labelled with their values.

use super::lines::{
    MEMCACHED_1, MEMCACHED_32, NBDKIT_1, NBDKIT_32, NBDKIT_STREAM, REDIS_1, REDIS_32, SHM_READ, TCP_READ,
    TCP_READ_32, TCP_STREAM,
};
use super::results::{Figures, Results};
use crate::chart::{self, Bar, Chart, FLOOR, OURS, PEER};

type Figure = fn(&Figures) -> Option<f64>;

struct Panel {
    title: &'static str,
    digits: usize,
    bars: &'static [(&'static str, &'static str, Figure, &'static str)],
}

const P50: Figure = |figures| Some(figures.p50_us);
const FLOOR_P50: Figure = |figures| Some(figures.floor.as_ref()?.p50_us);
const RATE: Figure = |figures| Some(figures.iops / 1e3);
const FLOOR_RATE: Figure = |figures| Some(figures.floor.as_ref()?.iops / 1e3);
const MIB: Figure = |figures| Some(figures.mib_s);

const PANELS: &[Panel] = &[
    Panel {
        title: "8 KiB random read, one in flight: median latency in µs (less is better)",
        digits: 2,
        bars: &[
            ("memcpy (floor of shm)", SHM_READ, FLOOR_P50, FLOOR),
            ("Farpool shm", SHM_READ, P50, OURS),
            ("bare TCP (floor of tcp)", TCP_READ, FLOOR_P50, FLOOR),
            ("Farpool tcp", TCP_READ, P50, OURS),
            ("memcached", MEMCACHED_1, P50, PEER),
            ("redis", REDIS_1, P50, PEER),
            ("nbdkit memory", NBDKIT_1, P50, PEER),
        ],
    },
    Panel {
        title: "8 KiB random read, 32 in flight: thousands per second (more is better)",
        digits: 0,
        bars: &[
            ("bare TCP (floor)", TCP_READ_32, FLOOR_RATE, FLOOR),
            ("Farpool tcp", TCP_READ_32, RATE, OURS),
            ("memcached", MEMCACHED_32, RATE, PEER),
            ("redis", REDIS_32, RATE, PEER),
            ("nbdkit memory", NBDKIT_32, RATE, PEER),
        ],
    },
    Panel {
        title: "512 KiB sequential read, 4 in flight: MiB/s (more is better)",
        digits: 0,
        bars: &[("Farpool tcp", TCP_STREAM, MIB, OURS), ("nbdkit memory", NBDKIT_STREAM, MIB, PEER)],
    },
];

/// Draws all panels as one SVG.
pub fn draw(results: &Results) -> String {
    let bar = |&(name, id, figure, colour): &(&'static str, &str, Figure, &'static str)| {
        Some(Bar { name: name.into(), colour, spread: results.spread(id, figure)? })
    };
    let charts = PANELS.iter().map(|panel| Chart {
        title: panel.title.into(),
        digits: panel.digits,
        mark: None,
        bars: panel.bars.iter().filter_map(bar).collect(),
    });
    chart::draw(&charts.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::figures;
    use super::*;
    use crate::chart::LONGEST;

    #[test]
    fn bars_are_as_long_as_their_figures_and_name_them() {
        let mut results = Results::default();
        results.add(TCP_STREAM, figures(128_000.0, 1.0, 1.0));
        results.add(NBDKIT_STREAM, figures(64_000.0, 1.0, 1.0));
        let svg = draw(&results);
        assert!(svg.contains(&format!("width=\"{:.1}\"", LONGEST)), "{svg}");
        assert!(svg.contains(&format!("width=\"{:.1}\"", LONGEST / 2.0)), "{svg}");
        assert!(svg.contains(">1000<") && svg.contains(">500<") && svg.ends_with("</svg>\n"), "{svg}");
    }
}
