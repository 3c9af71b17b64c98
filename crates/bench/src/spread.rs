//! A figure over several rounds, and how it is written down.

use crate::tally::median;

/// The middle and the range of a figure over the rounds.
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
    /// Of some values; `None` of none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().collect();
        let least = values.iter().copied().reduce(f64::min)?;
        let most = values.iter().copied().reduce(f64::max)?;
        Some(Spread { middle: median(values)?, least, most })
    }
}

/// A figure's middle alone: its range would drown the table.
pub fn middle(spread: Option<Spread>, digits: usize) -> String {
    spread.map_or("–".into(), |spread| grouped(spread.middle, digits))
}

/// A ratio with its range.
pub fn ratio(spread: Option<Spread>) -> String {
    spread.map_or("–".into(), |it| format!("{:.2} ({:.2}–{:.2})", it.middle, it.least, it.most))
}

/// A number with spaces between thousands, and fewer digits the larger it is.
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
