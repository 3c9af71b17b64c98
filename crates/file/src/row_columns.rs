//! Which columns of a row a set of pieces touches. The parity blocks of these columns change with them. Pure.

use std::ops::Range;

use crate::split::Piece;

/// The columns that pieces of one row touch, ascending.
pub(crate) fn columns(pieces: &[Piece]) -> Vec<u64> {
    let mut columns: Vec<u64> =
        pieces.iter().flat_map(|piece| piece.first_block()..piece.end_block()).collect();
    columns.sort_unstable();
    columns.dedup();
    columns
}

/// Splits ascending columns into runs without a gap.
pub(crate) fn runs(columns: &[u64]) -> impl Iterator<Item = Range<u64>> {
    columns.chunk_by(|one, other| one + 1 == *other).map(|run| run[0]..run[run.len() - 1] + 1)
}

#[cfg(test)]
mod tests {
    use farpool_pool::EXTENT_BYTES;
    use farpool_wire::BLOCK_BYTES;

    use super::*;

    #[test]
    fn ends_of_neighbours_are_two_runs_and_a_whole_extent_joins_them() {
        let block = BLOCK_BYTES as u64;
        let last = EXTENT_BYTES / block;
        let tail = Piece { stripe: 0, start: EXTENT_BYTES - block - 1, end: EXTENT_BYTES };
        let head = Piece { stripe: 1, start: 0, end: block + 1 };
        let found: Vec<_> = runs(&columns(&[tail, head])).collect();
        assert_eq!(found, [0..2, last - 2..last]);
        let whole = Piece { stripe: 1, start: 0, end: EXTENT_BYTES };
        let joined = columns(&[tail, whole]);
        let mut one = runs(&joined);
        assert_eq!((one.next(), one.next()), (Some(0..last), None));
    }
}
