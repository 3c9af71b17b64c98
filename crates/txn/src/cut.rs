//! Read timestamps (paper 3, section 4.1: the timestamp vector).

use std::sync::Arc;

use farpool_wire::Version;

/// What a transaction sees: of each slot, all commits up to a count. Cheap to clone, since many transactions
/// share one cut.
///
/// Cuts of one oracle with a higher sequence number see at least as much ([`oracle`](crate::oracle), P2).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cut {
    sequence: u64,
    counts: Arc<[u64]>,
}

impl Cut {
    /// The cut that sees only the initial versions, those before the first transaction.
    pub fn first(slots: usize) -> Cut {
        Cut { sequence: 0, counts: vec![0; slots].into() }
    }

    /// The cut with this number that sees, of each slot, all commits up to its count.
    pub fn new(sequence: u64, counts: Arc<[u64]>) -> Cut {
        Cut { sequence, counts }
    }

    /// The same cut with a reference count of its own, which no other thread touches.
    pub(crate) fn copied(&self) -> Cut {
        Cut { sequence: self.sequence, counts: Arc::from(&*self.counts) }
    }

    /// Its number among the cuts of its oracle.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// For each slot, the count of the last commit that it sees.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Whether it sees a version. A slot that the oracle does not have has committed nothing.
    pub fn sees(&self, version: Version) -> bool {
        version.count() <= self.counts.get(version.slot().index()).copied().unwrap_or(0)
    }

    /// Whether it sees all that `other` sees.
    pub fn reaches(&self, other: &Cut) -> bool {
        let here = self.counts.iter().copied().chain(std::iter::repeat(0));
        other.counts.iter().zip(here).all(|(&theirs, ours)| theirs <= ours)
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::Slot;

    use super::*;

    fn version(slot: u16, count: u64) -> Version {
        Version::new(Slot::new(slot).unwrap(), count).unwrap()
    }

    #[test]
    fn a_cut_sees_each_slot_s_commits_up_to_its_count() {
        let cut = Cut::new(1, [0, 5].into());
        for (seen, slot, count) in
            [(true, 0, 0), (false, 0, 1), (true, 1, 5), (false, 1, 6), (true, 9, 0), (false, 9, 1)]
        {
            assert_eq!(cut.sees(version(slot, count)), seen, "{slot}.{count}");
        }
        assert!(Cut::first(0).sees(Version::INITIAL));
    }

    #[test]
    fn the_commits_of_a_slot_s_earlier_generations_are_seen_with_those_of_its_later_ones() {
        let cut = Cut::new(1, [(2 << 32) + 1].into());
        assert!(cut.sees(version(0, u64::from(u32::MAX))) && cut.sees(version(0, (1 << 32) + 77)));
        assert!(!cut.sees(version(0, (2 << 32) + 2)) && !cut.sees(version(0, 3 << 32)));
    }

    #[test]
    fn a_cut_reaches_another_if_it_sees_no_less_of_any_slot() {
        let (one, other) = (Cut::new(1, [1, 2].into()), Cut::new(2, [2, 1].into()));
        assert!(!one.reaches(&other) && !other.reaches(&one) && one.reaches(&one));
        assert!(one.reaches(&Cut::first(7)) && !Cut::first(1).reaches(&one));
    }
}
