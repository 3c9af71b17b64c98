//! The history: always as a hash, on demand as lines.

/// The world's log of events.
#[derive(Debug)]
pub(super) struct Trace {
    hash: u64,
    events: u64,
    lines: Option<Vec<String>>,
}

/// FNV-1a, over bytes and numbers: small, and fixed for ever.
const OFFSET: u64 = 0xCBF2_9CE4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01B3;

impl Trace {
    pub(super) fn new(readable: bool) -> Self {
        Trace { hash: OFFSET, events: 0, lines: readable.then(Vec::new) }
    }

    /// Enters an event: each `{}` of `what` stands for one of `numbers`.
    pub(super) fn note(&mut self, now_ns: u64, what: &str, numbers: &[u64]) {
        self.events += 1;
        for &byte in what.as_bytes() {
            self.mix(u64::from(byte));
        }
        self.mix(now_ns);
        for &number in numbers {
            self.mix(number);
        }
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{:>12.3} us  {}", now_ns as f64 / 1e3, filled(what, numbers)));
        }
    }

    fn mix(&mut self, number: u64) {
        self.hash = (self.hash ^ number).wrapping_mul(PRIME);
        // Multiplication only carries upwards; bring the upper half down again.
        self.hash ^= self.hash >> 32;
    }

    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    pub(super) fn events(&self) -> u64 {
        self.events
    }

    pub(super) fn lines(&self) -> &[String] {
        self.lines.as_deref().unwrap_or_default()
    }
}

/// The number that stands for bytes in a note.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(OFFSET, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
}

fn filled(what: &str, numbers: &[u64]) -> String {
    let mut numbers = numbers.iter();
    let mut parts = what.split("{}");
    let mut line = parts.next().unwrap_or_default().to_string();
    for part in parts {
        // Short numbers read better in decimal; ids and unique values in hexadecimal.
        match numbers.next() {
            Some(&number) if number < 1 << 24 => line.push_str(&number.to_string()),
            Some(number) => line.push_str(&format!("{number:#x}")),
            None => line.push('?'),
        }
        line.push_str(part);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_difference_changes_the_hash() {
        let hash = |now, what: &str, number| {
            let mut trace = Trace::new(false);
            trace.note(now, what, &[number]);
            trace.hash()
        };
        let base = hash(1, "read {}", 2);
        assert_ne!(base, hash(2, "read {}", 2));
        assert_ne!(base, hash(1, "reap {}", 2));
        assert_ne!(base, hash(1, "read {}", 3));
        assert_eq!(base, hash(1, "read {}", 2));
    }

    #[test]
    fn lines_are_readable() {
        let mut trace = Trace::new(true);
        trace.note(1_500, "slot {} gives {}", &[3, 1 << 40]);
        assert_eq!(trace.lines(), ["       1.500 us  slot 3 gives 0x10000000000"]);
    }
}
