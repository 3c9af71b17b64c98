use std::fmt;

/// Milliseconds of a monotonic clock, or between two of its readings. Never compared between machines.
///
/// ```
/// use farpool_lease::Millis;
/// assert_eq!(Millis(7).since(Millis(4)).to_string(), "3 ms");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Millis(pub u64);

impl Millis {
    /// The time `span` later. Saturates instead of wrapping.
    pub const fn plus(self, span: Millis) -> Millis {
        Millis(self.0.saturating_add(span.0))
    }

    /// The time since `earlier`; zero if `earlier` lies ahead.
    pub const fn since(self, earlier: Millis) -> Millis {
        Millis(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_read_with_its_unit() {
        assert_eq!(Millis(1_500).to_string(), "1500 ms");
    }
}
