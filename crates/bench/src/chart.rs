//! Charts as SVG, without a library: bars labelled with their values, and lines over time.

use std::fmt::Write;

use crate::machine::Machine;
use crate::spread::Spread;

const WIDTH: f64 = 920.0;
/// Where bars begin, unless a name to their left needs more room.
const LEFT: f64 = 290.0;
/// A letter of a name is not wider than this on average.
const LETTER: f64 = 7.5;
/// Between a name and its bar.
const GAP: f64 = 8.0;
/// Where the longest bar ends; values are to the right.
const RIGHT: f64 = WIDTH - 130.0;
/// Length of the longest bar if no name is long.
#[cfg(test)]
pub const LONGEST: f64 = RIGHT - LEFT;
const ROW: f64 = 26.0;
const BAR: f64 = 16.0;
const TITLE: f64 = 44.0;
/// Height of an axis: its ticks and their values.
const AXIS: f64 = 24.0;
const TICK: f64 = 4.0;
/// How many ticks an axis has at most, beside the one at zero.
const MOST_TICKS: f64 = 6.0;
const GRID: &str = "#e3e6ea";
const CAPTION: f64 = 52.0;

/// Colour of Farpool.
pub const OURS: &str = "#2563a8";
/// Colour of floors: the best that the machine can do.
pub const FLOOR: &str = "#9aa5b1";
/// Colour of peers.
pub const PEER: &str = "#d08a2e";

/// Bars that are compared with each other.
pub struct Chart {
    /// What the bars' lengths mean.
    pub title: String,
    /// Digits after the decimal point.
    pub digits: usize,
    /// Where to draw a dashed reference line, in the bars' unit: 1 for ratios.
    pub mark: Option<f64>,
    /// From top to bottom.
    pub bars: Vec<Bar>,
}

/// A bar as long as the median of a figure. A line on it reaches from the smallest round to the largest.
pub struct Bar {
    /// The label to its left.
    pub name: String,
    /// [`OURS`], [`FLOOR`] or [`PEER`].
    pub colour: &'static str,
    /// The value and its range.
    pub spread: Spread,
}

/// Figures over time.
pub struct Course {
    /// Title: what the lines show, with the unit.
    pub title: String,
    /// The lines; each gets a colour of its own, until the palette repeats.
    pub lines: Vec<Line>,
}

/// A figure over time.
pub struct Line {
    /// The label in the legend.
    pub name: String,
    /// Pairs of a time in seconds and the value then.
    pub points: Vec<(f64, f64)>,
}

/// Colours that colour-blind readers can tell apart as well (Okabe and Ito), and a brown.
const LINE_COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c564b"];
const COURSE: f64 = 180.0;
const LEGEND: f64 = 18.0;
/// Where courses begin; values are to the left.
const COURSE_LEFT: f64 = 80.0;

/// Draws the bars, then the courses, as one SVG.
pub fn draw_all(charts: &[Chart], courses: &[Course]) -> String {
    let bars: f64 = charts.iter().map(Chart::height).sum();
    let height = bars + courses.iter().map(Course::height).sum::<f64>() + CAPTION;
    let mut svg = open(height);
    let names = charts.iter().flat_map(|chart| &chart.bars).map(|bar| bar.name.chars().count());
    let left = names.map(|letters| letters as f64 * LETTER + GAP).fold(LEFT, f64::max);
    let mut top = 0.0;
    for chart in charts {
        chart.draw(&mut svg, top, left);
        top += chart.height();
    }
    for course in courses {
        course.draw(&mut svg, top);
        top += course.height();
    }
    if !charts.is_empty() {
        let legend = "Bar and figure: the median round. Thin line: from the smallest round to the largest.";
        small(&mut svg, top + 24.0, legend);
    }
    small(&mut svg, top + 40.0, &format!("Measured on: {}", Machine::this()));
    svg + "</svg>\n"
}

/// Draws all charts, one below the other, as one SVG.
pub fn draw(charts: &[Chart]) -> String {
    draw_all(charts, &[])
}

impl Chart {
    fn height(&self) -> f64 {
        TITLE + ROW * self.bars.len() as f64 + AXIS
    }

    /// Draws the bars from `left` on.
    fn draw(&self, svg: &mut String, top: f64, left: f64) {
        title(svg, top, &self.title);
        let largest = self.bars.iter().map(|bar| bar.spread.most).fold(f64::MIN_POSITIVE, f64::max);
        let (first, ground) = (top + TITLE - ROW + BAR, top + self.height() - AXIS - ROW + BAR + 6.0);
        let place = |value: f64| left + (RIGHT - left) * value / largest;
        // Writing to a string does not fail, here and below.
        for (value, label) in ticks(largest) {
            let x = place(value);
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {first:.1}V{ground:.1}\" stroke=\"{GRID}\"/>\n\
                 <path d=\"M{x:.1} {ground:.1}v{TICK}\" stroke=\"black\"/>\n\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"11\">{label}</text>",
                ground + TICK + 12.0
            );
        }
        let axes = format!("M{left} {first:.1}V{ground:.1}H{RIGHT}");
        let _ = writeln!(svg, "<path d=\"{axes}\" stroke=\"black\" fill=\"none\"/>");
        for (row, bar) in self.bars.iter().enumerate() {
            svg.push_str(&draw_bar(top + TITLE + ROW * row as f64, bar, left, place, self.digits));
        }
        if let Some(mark) = self.mark.filter(|mark| *mark <= largest) {
            let x = place(mark);
            let line = format!("M{x:.1} {first:.1}V{ground:.1}");
            let _ =
                writeln!(svg, "<path d=\"{line}\" stroke=\"black\" stroke-dasharray=\"4 3\" fill=\"none\"/>");
        }
    }
}

impl Course {
    fn height(&self) -> f64 {
        TITLE + COURSE + AXIS + LEGEND * (1.0 + self.lines.len() as f64)
    }

    /// Draws all lines on one scale, which ends at the largest value and the last second.
    fn draw(&self, svg: &mut String, top: f64) {
        title(svg, top, &self.title);
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let longest = points().map(|point| point.0).fold(f64::MIN_POSITIVE, f64::max);
        let largest = points().map(|point| point.1).fold(f64::MIN_POSITIVE, f64::max);
        let (left, right, ground) = (COURSE_LEFT, RIGHT, top + TITLE + COURSE);
        // Writing to a string does not fail, here and below.
        for (value, label) in ticks(largest) {
            let y = ground - COURSE * value / largest;
            let _ = writeln!(
                svg,
                "<path d=\"M{left} {y:.1}H{right}\" stroke=\"{GRID}\"/>\n\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" font-size=\"11\">{label}</text>",
                left - 6.0,
                y + 4.0
            );
        }
        for (value, label) in ticks(longest) {
            let x = left + (right - left) * value / longest;
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {ground:.1}v{TICK}\" stroke=\"black\"/>\n\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"11\">{label} s</text>",
                ground + TICK + 12.0
            );
        }
        let axes = format!("M{left} {:.1}V{ground:.1}H{right}", top + TITLE);
        let _ = writeln!(svg, "<path d=\"{axes}\" stroke=\"black\" fill=\"none\"/>");
        for (line, colour) in self.lines.iter().zip(LINE_COLOURS.into_iter().cycle()) {
            let place = |&(at, figure): &(f64, f64)| {
                let (x, y) = (left + (right - left) * at / longest, ground - COURSE * figure / largest);
                format!("{x:.1},{y:.1}")
            };
            let places: Vec<String> = line.points.iter().map(place).collect();
            let places = places.join(" ");
            let _ = writeln!(
                svg,
                "<polyline points=\"{places}\" stroke=\"{colour}\" stroke-width=\"1.5\" fill=\"none\"/>"
            );
        }
        for (row, (line, colour)) in self.lines.iter().zip(LINE_COLOURS.into_iter().cycle()).enumerate() {
            let y = ground + AXIS + LEGEND * (row as f64 + 1.0);
            let _ = writeln!(
                svg,
                "<path d=\"M{left} {:.1}h24\" stroke=\"{colour}\" stroke-width=\"3\"/>\n\
                 <text x=\"{}\" y=\"{y:.1}\">{}</text>",
                y - 4.0,
                left + 32.0,
                escaped(&line.name)
            );
        }
    }
}

fn open(height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    )
}

fn title(svg: &mut String, top: f64, text: &str) {
    // Writing to a string does not fail.
    let text = escaped(text);
    let _ = writeln!(svg, "<text x=\"16\" y=\"{}\" font-weight=\"bold\">{text}</text>", top + 30.0);
}

fn small(svg: &mut String, y: f64, text: &str) {
    let text = escaped(text);
    // Writing to a string does not fail.
    let _ = writeln!(svg, "<text x=\"16\" y=\"{y}\" font-size=\"11\" fill=\"#555\">{text}</text>");
}

/// Text as XML has it.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Where an axis from zero to `largest` has ticks, and their labels: multiples of 1, 2 or 5 times a power of
/// ten.
fn ticks(largest: f64) -> Vec<(f64, String)> {
    let power = 10f64.powf((largest / MOST_TICKS).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let step = steps.into_iter().find(|step| largest / step <= MOST_TICKS).unwrap_or(largest);
    let digits = (-step.log10().floor()).max(0.0) as usize;
    let label = |value: f64| (value, format!("{value:.digits$}"));
    (0..=(largest / step + 1e-9).floor() as usize).map(|tick| label(tick as f64 * step)).collect()
}

fn draw_bar(top: f64, bar: &Bar, left: f64, place: impl Fn(f64) -> f64, digits: usize) -> String {
    let Bar { name, colour, spread } = bar;
    let name = escaped(name);
    let (middle, least, most) = (place(spread.middle), place(spread.least), place(spread.most));
    let (baseline, centre) = (top + 13.0, top + BAR / 2.0);
    format!(
        "<text x=\"{}\" y=\"{baseline}\" text-anchor=\"end\">{name}</text>\n\
         <rect x=\"{left}\" y=\"{top}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"{colour}\"/>\n\
         <path d=\"M{least:.1} {centre}H{most:.1}\" stroke=\"black\" stroke-width=\"1.5\"/>\n\
         <text x=\"{:.1}\" y=\"{baseline}\">{:.digits$}</text>\n",
        left - GAP,
        middle - left,
        most.max(middle) + 8.0,
        spread.middle,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_up_to_the_largest_value() {
        let labels = |largest| ticks(largest).into_iter().map(|tick| tick.1).collect::<Vec<_>>().join(" ");
        assert_eq!(labels(1.0), "0.0 0.2 0.4 0.6 0.8 1.0");
        assert_eq!(labels(5_177.4), "0 1000 2000 3000 4000 5000");
        assert_eq!(labels(0.031), "0.00 0.01 0.02 0.03");
        assert_eq!(labels(600.0), "0 100 200 300 400 500 600");
    }

    #[test]
    fn a_mark_is_drawn_at_its_value_and_omitted_beyond_the_longest_bar() {
        let spread = |middle| Spread { middle, least: middle, most: middle };
        let bar = |middle| Bar { name: "q".into(), colour: PEER, spread: spread(middle) };
        let chart = |mark| Chart { title: "ratios".into(), digits: 2, mark, bars: vec![bar(0.5), bar(2.0)] };
        let half = LEFT + LONGEST / 2.0;
        assert!(draw(&[chart(Some(1.0))]).contains(&format!("M{half:.1} ")));
        assert!([None, Some(3.0)].iter().all(|mark| !draw(&[chart(*mark)]).contains("dasharray")));
    }

    #[test]
    fn bars_begin_further_right_if_a_name_needs_the_room() {
        let spread = Spread { middle: 1.0, least: 1.0, most: 1.0 };
        let bar = |letters: usize| Bar { name: "n".repeat(letters), colour: OURS, spread };
        let left = |letters| {
            let chart = Chart { title: "t".into(), digits: 0, mark: None, bars: vec![bar(1), bar(letters)] };
            let svg = draw(&[chart]);
            let after = svg.split("<rect x=\"").nth(1).expect("a bar");
            after.split('"').next().and_then(|x| x.parse::<f64>().ok()).expect("a number")
        };
        assert_eq!(left(10), LEFT);
        assert_eq!(left(60), 60.0 * LETTER + GAP);
    }

    #[test]
    fn courses_share_a_scale_and_are_named_below() {
        let line = |name: &str, points| Line { name: name.into(), points };
        let lines =
            vec![line("fast", vec![(0.0, 0.0), (1.0, 100.0)]), line("slow", vec![(0.0, 50.0), (4.0, 0.0)])];
        let svg = draw_all(&[], &[Course { title: "MB/s".into(), lines }]);
        assert!(svg.contains(">100<") && svg.contains(">4 s<") && svg.contains(">slow<"), "{svg}");
        assert!(svg.contains(&format!("{RIGHT:.1},")) && svg.ends_with("</svg>\n"), "{svg}");
        assert_eq!(svg.matches("<polyline").count(), 2);
    }
}
