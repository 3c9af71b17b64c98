//! Drawings: bars with their figures, one chart per question, and lines over time. SVG, without a library.

use std::fmt::Write;

use crate::spread::Spread;

const WIDTH: f64 = 880.0;
/// Where bars begin: names stand to the left.
const LEFT: f64 = 250.0;
/// Where the longest bar ends: figures stand to the right.
const RIGHT: f64 = WIDTH - 130.0;
/// Length of the longest bar.
#[cfg(test)]
pub const LONGEST: f64 = RIGHT - LEFT;
const ROW: f64 = 26.0;
const BAR: f64 = 16.0;
const TITLE: f64 = 44.0;

/// Colour of what is ours.
pub const OURS: &str = "#2563a8";
/// Colour of what the machine can do at best.
pub const FLOOR: &str = "#9aa5b1";
/// Colour of what others do.
pub const PEER: &str = "#d08a2e";

/// Bars that are compared with each other.
pub struct Chart {
    /// What the lengths mean.
    pub title: String,
    /// Digits behind the point.
    pub digits: usize,
    /// From top to bottom.
    pub bars: Vec<Bar>,
}

/// A bar as long as the middle of a figure; a line on it reaches from the smallest to the largest round.
pub struct Bar {
    /// Stands to its left.
    pub name: String,
    /// [`OURS`], [`FLOOR`] or [`PEER`].
    pub colour: &'static str,
    /// The figure.
    pub spread: Spread,
}

/// An SVG of all charts, one below the other.
pub fn draw(charts: &[Chart]) -> String {
    let height: f64 = charts.iter().map(|chart| TITLE + ROW * chart.bars.len() as f64).sum::<f64>() + 20.0;
    let mut svg = open(height);
    let mut top = 0.0;
    for chart in charts {
        top += title(&mut svg, top, &chart.title);
        let largest = chart.bars.iter().map(|bar| bar.spread.most).fold(0.0, f64::max);
        for bar in &chart.bars {
            svg.push_str(&draw_bar(top, bar, largest, chart.digits));
            top += ROW;
        }
    }
    svg + "</svg>\n"
}

fn open(height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    )
}

/// Returns its height.
fn title(svg: &mut String, top: f64, text: &str) -> f64 {
    // Writing to a string does not fail.
    let _ = writeln!(svg, "<text x=\"16\" y=\"{}\" font-weight=\"bold\">{text}</text>", top + 30.0);
    TITLE
}

fn draw_bar(top: f64, bar: &Bar, largest: f64, digits: usize) -> String {
    let Bar { name, colour, spread } = bar;
    let place = |value: f64| LEFT + (RIGHT - LEFT) * value / largest.max(f64::MIN_POSITIVE);
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
