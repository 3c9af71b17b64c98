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
    /// A length that all are compared with, as 1 of ratios.
    pub mark: Option<f64>,
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

/// Figures over time.
pub struct Course {
    /// What is shown, with its unit.
    pub title: String,
    /// Each with a colour of its own.
    pub lines: Vec<Line>,
}

/// A figure over time.
pub struct Line {
    /// Stands in the legend.
    pub name: String,
    /// Seconds, and the figure then.
    pub points: Vec<(f64, f64)>,
}

/// Told apart by people who see few colours as well (Okabe and Ito).
const LINE_COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const COURSE: f64 = 180.0;
const LEGEND: f64 = 18.0;
/// Where courses begin: figures stand to the left.
const COURSE_LEFT: f64 = 80.0;

/// An SVG of bars, then of courses.
pub fn draw_all(charts: &[Chart], courses: &[Course]) -> String {
    let bars: f64 = charts.iter().map(Chart::height).sum();
    let height = bars + courses.iter().map(Course::height).sum::<f64>() + 20.0;
    let mut svg = open(height);
    let mut top = 0.0;
    for chart in charts {
        chart.draw(&mut svg, top);
        top += chart.height();
    }
    for course in courses {
        course.draw(&mut svg, top);
        top += course.height();
    }
    svg + "</svg>\n"
}

/// An SVG of all charts, one below the other.
pub fn draw(charts: &[Chart]) -> String {
    draw_all(charts, &[])
}

impl Chart {
    fn height(&self) -> f64 {
        TITLE + ROW * self.bars.len() as f64
    }

    fn draw(&self, svg: &mut String, top: f64) {
        title(svg, top, &self.title);
        let largest = self.bars.iter().map(|bar| bar.spread.most).fold(0.0, f64::max);
        for (row, bar) in self.bars.iter().enumerate() {
            svg.push_str(&draw_bar(top + TITLE + ROW * row as f64, bar, largest, self.digits));
        }
        if let Some(mark) = self.mark.filter(|mark| *mark <= largest) {
            let (x, from) = (LEFT + (RIGHT - LEFT) * mark / largest, top + TITLE - ROW + BAR);
            let to = top + self.height() - ROW + BAR;
            // Writing to a string does not fail.
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {from:.1}V{to:.1}\" stroke=\"black\" stroke-dasharray=\"4 3\" fill=\"none\"/>"
            );
        }
    }
}

impl Course {
    fn height(&self) -> f64 {
        TITLE + COURSE + LEGEND * (1.0 + self.lines.len() as f64)
    }

    /// All lines on one scale, which ends at the largest figure and the last second.
    fn draw(&self, svg: &mut String, top: f64) {
        title(svg, top, &self.title);
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let longest = points().map(|point| point.0).fold(f64::MIN_POSITIVE, f64::max);
        let largest = points().map(|point| point.1).fold(f64::MIN_POSITIVE, f64::max);
        let (left, right, ground) = (COURSE_LEFT, RIGHT, top + TITLE + COURSE);
        // Writing to a string does not fail, here and below.
        let _ = writeln!(
            svg,
            "<path d=\"M{left} {:.1}V{ground:.1}H{right}\" stroke=\"black\" fill=\"none\"/>\n\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{largest:.0}</text>\n\
             <text x=\"{}\" y=\"{:.1}\">{longest:.0} s</text>",
            top + TITLE,
            left - 6.0,
            top + TITLE + 10.0,
            right + 6.0,
            ground
        );
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
            let y = ground + LEGEND * (row as f64 + 1.0);
            let _ = writeln!(
                svg,
                "<path d=\"M{left} {:.1}h24\" stroke=\"{colour}\" stroke-width=\"3\"/>\n\
                 <text x=\"{}\" y=\"{y:.1}\">{}</text>",
                y - 4.0,
                left + 32.0,
                line.name
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
    let _ = writeln!(svg, "<text x=\"16\" y=\"{}\" font-weight=\"bold\">{text}</text>", top + 30.0);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_stands_at_its_length_among_the_bars_and_one_beyond_them_nowhere() {
        let spread = |middle| Spread { middle, least: middle, most: middle };
        let bar = |middle| Bar { name: "q".into(), colour: PEER, spread: spread(middle) };
        let chart = |mark| Chart { title: "ratios".into(), digits: 2, mark, bars: vec![bar(0.5), bar(2.0)] };
        let half = LEFT + LONGEST / 2.0;
        assert!(draw(&[chart(Some(1.0))]).contains(&format!("M{half:.1} ")));
        assert!([None, Some(3.0)].iter().all(|mark| !draw(&[chart(*mark)]).contains("dasharray")));
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
