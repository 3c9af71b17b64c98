//! Promises of figures, and whether they were kept.

use crate::spread::{Spread, ratio};

/// A promise of a figure, and what was reached.
#[derive(Clone, PartialEq, Debug)]
pub struct Verdict {
    what: String,
    side: Side,
    unit: Unit,
    /// What is promised.
    must: f64,
    /// What would be better still.
    aim: Option<f64>,
    reached: Spread,
}

/// On which side of its limit a value keeps a promise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    AtMost,
    AtLeast,
}

/// What a value is measured in.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Unit {
    /// Multiples of something with this name.
    Times(String),
    /// A share of a whole, in per cent.
    Percent,
    /// Points of a share beyond the share with this name.
    PointsFrom(String),
    /// This unit.
    Plain(&'static str),
}

impl Verdict {
    /// For a value that must be at most `limit` times another.
    pub fn at_most(what: &str, limit: f64, than: &str, reached: Spread) -> Self {
        Self::new(what, Side::AtMost, Unit::Times(than.into()), limit, reached)
    }

    /// For a value that must be at least `limit` times another.
    pub fn at_least(what: &str, limit: f64, than: &str, reached: Spread) -> Self {
        Self::new(what, Side::AtLeast, Unit::Times(than.into()), limit, reached)
    }

    /// For a share that must be at most `limit` of a whole.
    pub fn share(what: &str, limit: f64, reached: Spread) -> Self {
        Self::new(what, Side::AtMost, Unit::Percent, limit, reached)
    }

    /// For a share that must be at least `limit` of a whole.
    pub fn share_at_least(what: &str, limit: f64, reached: Spread) -> Self {
        Self::new(what, Side::AtLeast, Unit::Percent, limit, reached)
    }

    /// For a share that must not be further below another than so many points. `reached` has the differences.
    pub fn points_below(what: &str, points: f64, than: &str, reached: Spread) -> Self {
        Self::new(what, Side::AtLeast, Unit::PointsFrom(than.into()), -points, reached)
    }

    /// For a value in a unit that must be at most `limit`.
    pub fn at_most_in(what: &str, limit: f64, unit: &'static str, reached: Spread) -> Self {
        Self::new(what, Side::AtMost, Unit::Plain(unit), limit, reached)
    }

    fn new(what: &str, side: Side, unit: Unit, must: f64, reached: Spread) -> Self {
        Verdict { what: what.into(), side, unit, must, aim: None, reached }
    }

    /// The same with an aim: a stricter limit, which is not promised.
    pub fn aiming_at(self, aim: Option<f64>) -> Self {
        Verdict { aim, ..self }
    }

    /// Its row in a table without aims.
    pub fn row(&self) -> String {
        let Verdict { what, must, .. } = self;
        let met = if self.is_within(*must) { "yes" } else { "**no**" };
        format!("| {what} {} | {} | {met} |\n", self.bound(*must), self.reached())
    }

    /// Its row in a table with aims.
    pub fn row_with_aim(&self) -> String {
        let Verdict { what, must, aim, .. } = self;
        let met = match (self.is_within(*must), aim.map(|aim| self.is_within(aim))) {
            (false, _) => MISSED,
            (true, Some(true)) => "yes, the aim too",
            (true, Some(false)) => "yes, but not the aim",
            (true, None) => "yes",
        };
        let aim = match (aim, &self.unit) {
            (None, _) => "none".into(),
            // What it is compared with stands beside it.
            (Some(aim), Unit::Times(_)) => format!("{} {aim} ×", self.sign()),
            (Some(aim), _) => self.bound(*aim),
        };
        format!("| {what} | {} | {aim} | {} | {met} |\n", self.bound(*must), self.reached())
    }

    fn is_within(&self, limit: f64) -> bool {
        match self.side {
            Side::AtMost => self.reached.middle <= limit,
            Side::AtLeast => self.reached.middle >= limit,
        }
    }

    fn sign(&self) -> char {
        match self.side {
            Side::AtMost => '≤',
            Side::AtLeast => '≥',
        }
    }

    fn bound(&self, limit: f64) -> String {
        let sign = self.sign();
        match &self.unit {
            Unit::Times(than) => format!("{sign} {limit} × {than}"),
            Unit::Percent => format!("{sign} {:.0} %", 100.0 * limit),
            Unit::PointsFrom(than) => format!("{sign} {than} − {} points", -limit),
            Unit::Plain(unit) => format!("{sign} {limit} {unit}"),
        }
    }

    fn reached(&self) -> String {
        let Spread { middle, least, most } = self.reached;
        match self.unit {
            Unit::Times(_) => ratio(Some(self.reached)),
            Unit::Percent => {
                let percent = |share: f64| format!("{:.1} %", 100.0 * share);
                format!("{} ({}–{})", percent(middle), percent(least), percent(most))
            }
            Unit::PointsFrom(_) => {
                let points = |points: f64| format!("{points:+.2}").replace('-', "−");
                format!("{} points ({} to {})", points(middle), points(least), points(most))
            }
            Unit::Plain(unit) => format!("{middle:.2} {unit} ({least:.2}–{most:.2})"),
        }
    }
}

/// What a table with aims says of a promise that was not kept.
pub const MISSED: &str = "**missed**";

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(middle: f64) -> Spread {
        Spread { middle, least: middle / 2.0, most: 2.0 * middle }
    }

    #[test]
    fn a_row_says_whether_the_promise_and_the_aim_were_met() {
        let row =
            |reached| Verdict::at_least("ours", 20.0, "the disk", spread(reached)).aiming_at(Some(30.0));
        let rows = [19.0, 20.0, 30.0].map(|reached| row(reached).row_with_aim());
        for (row, met) in rows.iter().zip([MISSED, "yes, but not the aim", "yes, the aim too"]) {
            assert!(row.starts_with("| ours | ≥ 20 × the disk | ≥ 30 × | "), "{row}");
            assert!(row.ends_with(&format!(" | {met} |\n")), "{row}");
        }
        let without = Verdict::at_most("ours", 1.5, "the floor", spread(1.5));
        assert_eq!(without.row_with_aim(), "| ours | ≤ 1.5 × the floor | none | 1.50 (0.75–3.00) | yes |\n");
        assert_eq!(without.row(), "| ours ≤ 1.5 × the floor | 1.50 (0.75–3.00) | yes |\n");
    }

    #[test]
    fn shares_and_points_have_their_units() {
        let share = Verdict::share_at_least("hits", 0.6, spread(0.5));
        assert_eq!(share.row_with_aim(), "| hits | ≥ 60 % | none | 50.0 % (25.0 %–100.0 %) | **missed** |\n");
        let reached = Spread { middle: -0.4, least: -0.6, most: 0.1 };
        let points = Verdict::points_below("hits", 0.5, "LRU", reached);
        let row = "| hits | ≥ LRU − 0.5 points | none | −0.40 points (−0.60 to +0.10) | yes |\n";
        assert_eq!(points.row_with_aim(), row);
        let bytes = Verdict::at_most_in("a page", 64.0, "B", spread(50.0)).aiming_at(Some(48.0));
        let row = "| a page | ≤ 64 B | ≤ 48 B | 50.00 B (25.00–100.00) | yes, but not the aim |\n";
        assert_eq!(bytes.row_with_aim(), row);
    }
}
