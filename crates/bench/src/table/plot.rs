//! The plot: bars with their figures, one panel per question.

use std::fmt::Write;

use super::lines::{
    MEMCACHED_1, MEMCACHED_32, NBDKIT_1, NBDKIT_32, NBDKIT_STREAM, REDIS_1, REDIS_32, SHM_READ, TCP_READ,
    TCP_READ_32, TCP_STREAM,
};
use super::results::{Figures, Results, Spread};

const WIDTH: f64 = 880.0;
/// Where bars begin: names stand to the left.
const LEFT: f64 = 250.0;
/// Where the longest bar ends: figures stand to the right.
const RIGHT: f64 = WIDTH - 130.0;
const ROW: f64 = 26.0;
const BAR: f64 = 16.0;
const TITLE: f64 = 44.0;

const OURS: &str = "#2563a8";
const FLOOR: &str = "#9aa5b1";
const PEER: &str = "#d08a2e";

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

/// An SVG of all panels; the lines on the bars reach from the smallest to the largest round.
pub fn draw(results: &Results) -> String {
    let height: f64 = PANELS.iter().map(|panel| TITLE + ROW * panel.bars.len() as f64).sum::<f64>() + 20.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut top = 0.0;
    for panel in PANELS {
        // Writing to a string does not fail.
        let _ =
            writeln!(svg, "<text x=\"16\" y=\"{}\" font-weight=\"bold\">{}</text>", top + 30.0, panel.title);
        top += TITLE;
        let bars = panel.bars.iter().map(|bar| (bar, results.spread(bar.1, bar.2)));
        let bars: Vec<_> = bars.collect();
        let largest = bars.iter().filter_map(|(_, spread)| spread.map(|it| it.most)).fold(0.0, f64::max);
        for (&(name, _, _, colour), spread) in bars {
            if let Some(spread) = spread {
                svg.push_str(&bar(top, name, colour, spread, largest, panel.digits));
            }
            top += ROW;
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn bar(top: f64, name: &str, colour: &str, spread: Spread, largest: f64, digits: usize) -> String {
    let place = |value: f64| LEFT + (RIGHT - LEFT) * value / largest;
    let (middle, least, most) = (place(spread.middle), place(spread.least), place(spread.most));
    let (baseline, centre) = (top + 13.0, top + BAR / 2.0);
    format!(
        "<text x=\"{}\" y=\"{baseline}\" text-anchor=\"end\">{name}</text>\n\
         <rect x=\"{LEFT}\" y=\"{top}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"{colour}\"/>\n\
         <path d=\"M{least:.1} {centre}H{most:.1}\" stroke=\"black\" stroke-width=\"1.5\"/>\n\
         <text x=\"{:.1}\" y=\"{baseline}\">{:.digits$}</text>\n",
        LEFT - 8.0,
        middle - LEFT,
        most.max(middle) + 8.0,
        spread.middle,
    )
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::figures;
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_figures_and_name_them() {
        let mut results = Results::default();
        results.add(TCP_STREAM, figures(128_000.0, 1.0, 1.0));
        results.add(NBDKIT_STREAM, figures(64_000.0, 1.0, 1.0));
        let svg = draw(&results);
        assert!(svg.contains(&format!("width=\"{:.1}\"", RIGHT - LEFT)), "{svg}");
        assert!(svg.contains(&format!("width=\"{:.1}\"", (RIGHT - LEFT) / 2.0)), "{svg}");
        assert!(svg.contains(">1000<") && svg.contains(">500<") && svg.ends_with("</svg>\n"), "{svg}");
    }
}
