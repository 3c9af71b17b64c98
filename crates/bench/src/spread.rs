//! A value over several rounds, and how it is written.

use crate::tally::median;

/// The median and the range of a value over the rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Median.
    pub middle: f64,
    /// Smallest.
    pub least: f64,
    /// Largest.
    pub most: f64,
}

impl Spread {
    /// The spread of some values; `None` if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().collect();
        let least = values.iter().copied().reduce(f64::min)?;
        let most = values.iter().copied().reduce(f64::max)?;
        Some(Spread { middle: median(values)?, least, most })
    }

    /// The spread in another unit, which is so many of this one.
    pub fn in_units_of(self, unit: f64) -> Self {
        Spread { middle: self.middle / unit, least: self.least / unit, most: self.most / unit }
    }
}

/// Formats the median alone; with the range a table would be hard to read.
pub fn middle(spread: Option<Spread>, digits: usize) -> String {
    spread.map_or("–".into(), |spread| grouped(spread.middle, digits))
}

/// Formats a ratio with its range.
pub fn ratio(spread: Option<Spread>) -> String {
    spread.map_or("–".into(), |it| format!("{:.2} ({:.2}–{:.2})", it.middle, it.least, it.most))
}

/// Formats a number with spaces between thousands; from 10 on it has one decimal digit at most.
pub fn grouped(value: f64, digits: usize) -> String {
    let digits = if value >= 10.0 { digits.min(1) } else { digits };
    let text = format!("{value:.digits$}");
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut grouped = String::new();
    for (place, digit) in whole.chars().enumerate() {
        if place > 0 && (whole.len() - place).is_multiple_of(3) {
            grouped.push('\u{202f}'); // a narrow space that does not break
        }
        grouped.push(digit);
    }
    grouped + rest
}

/// A number of things, whose name gets an `s` unless there is one.
pub fn many(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_shortened() {
        assert_eq!(grouped(1_234_567.8, 0), "1\u{202f}234\u{202f}568");
        assert_eq!(grouped(0.7312, 3), "0.731");
        assert_eq!(grouped(123.456, 3), "123.5");
    }
}
