//! Digests of results, short enough to be compared and printed.

use crc_fast::{CrcAlgorithm, Digest as Crc};

/// The digest of a result: the number of its rows, and a checksum of their text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    /// Number of lines.
    pub rows: u64,
    /// CRC-64/NVME of the lines.
    pub crc: u64,
}

impl Digest {
    /// The digest of lines whose order is part of the result.
    pub fn ordered(text: &[u8]) -> Self {
        Self::of(text.split_inclusive(|&byte| byte == b'\n'))
    }

    /// The digest of lines that may come in any order.
    pub fn unordered(text: &[u8]) -> Self {
        let mut lines: Vec<&[u8]> = text.split_inclusive(|&byte| byte == b'\n').collect();
        lines.sort_unstable();
        Self::of(lines)
    }

    fn of<'a>(lines: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut crc = Crc::new(CrcAlgorithm::Crc64Nvme);
        let mut rows = 0;
        for line in lines {
            crc.update(line);
            rows += 1;
        }
        Self { rows, crc: crc.finalize() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_counts_only_where_it_is_part_of_the_result() {
        let (one, other) = (b"a\nb\nb\n", b"b\na\nb\n");
        assert_ne!(Digest::ordered(one), Digest::ordered(other));
        assert_eq!(Digest::unordered(one), Digest::unordered(other));
        assert_eq!(Digest::ordered(one).rows, 3);
    }

    #[test]
    fn changed_lost_and_doubled_rows_are_detected() {
        let result = Digest::unordered(b"a\nb\n");
        for other in [&b"a\nc\n"[..], b"a\n", b"a\nb\nb\n", b""] {
            assert_ne!(result, Digest::unordered(other));
        }
    }
}
