//! Checks whether the history of one word could be that of an atomic register.
//!
//! Every write stores a value that no other write stores. The *cluster* of a value is its write and all reads
//! of it. The method is that of Gibbons and Korach ("Testing shared memories", 1997). The zone of a cluster
//! reaches from the first end of one of its operations to the last start of one. A zone is *forward* if it
//! begins before it ends: the word certainly held the value all that time. Otherwise the zone is *backward*.
//! The history is atomic if and only if no two forward zones overlap, no backward zone lies within a forward
//! one, and no read ends before its write starts. Checking this takes sorting, not search.

use std::collections::BTreeMap;

/// A time that never comes.
pub(crate) const NEVER: u64 = u64::MAX;

/// One operation on the word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touch {
    /// The value written or read.
    pub value: u64,
    pub writes: bool,
    pub start: u64,
    /// The time by which it took effect, if it took effect at all; [`NEVER`] if nothing bounds that time. An
    /// end before `start` means that it cannot have taken effect.
    pub end: u64,
    /// Whether it certainly took effect. If not, it counts only if its value was seen.
    pub certain: bool,
}

#[derive(Clone, Copy)]
struct Cluster {
    written_at: Option<u64>,
    first_end: u64,
    last_start: u64,
    certain: bool,
}

/// Judges a history in which the word first holds `initial`.
pub(crate) fn check(initial: u64, touches: &[Touch]) -> Result<(), String> {
    let mut clusters: BTreeMap<u64, Cluster> = BTreeMap::new();
    let absent = Cluster { written_at: None, first_end: NEVER, last_start: 0, certain: false };
    clusters.insert(initial, Cluster { written_at: Some(0), first_end: 0, last_start: 0, certain: true });
    for touch in touches {
        let cluster = clusters.entry(touch.value).or_insert(absent);
        cluster.first_end = cluster.first_end.min(touch.end);
        cluster.last_start = cluster.last_start.max(touch.start);
        cluster.certain |= touch.certain;
        if touch.writes {
            cluster.written_at = Some(touch.start);
        }
    }
    for read in touches.iter().filter(|touch| !touch.writes) {
        match clusters[&read.value].written_at {
            None => return Err(format!("{:#x} was read, which was never written here", read.value)),
            Some(start) if read.end < start => {
                return Err(format!("{:#x} was read before it was written", read.value));
            }
            Some(_) => {}
        }
    }
    let too_late = |touch: &&Touch| touch.writes && touch.end < touch.start && clusters[&touch.value].certain;
    if let Some(write) = touches.iter().find(too_late) {
        return Err(format!(
            "{:#x} was written by an operation that could no longer take effect",
            write.value
        ));
    }
    let seen = || clusters.iter().filter(|(_, cluster)| cluster.certain);
    let mut forward: Vec<(u64, u64, u64)> = seen()
        .filter(|(_, cluster)| cluster.first_end < cluster.last_start)
        .map(|(&value, cluster)| (cluster.first_end, cluster.last_start, value))
        .collect();
    forward.sort_unstable();
    if let Some([one, other]) = forward.array_windows().find(|[one, other]| other.0 < one.1) {
        return Err(format!("{:#x} and {:#x} were both in the word at the same time", one.2, other.2));
    }
    for (&value, cluster) in seen().filter(|(_, cluster)| cluster.first_end >= cluster.last_start) {
        // Forward zones do not overlap, so only the last one that begins before this zone can contain it.
        let before = forward.partition_point(|&(begin, ..)| begin < cluster.last_start);
        if let Some(&(_, end, other)) = before.checked_sub(1).map(|place| &forward[place])
            && cluster.first_end < end
        {
            return Err(format!("{value:#x} was in the word while {other:#x} was there throughout"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(value: u64, start: u64, end: u64) -> Touch {
        Touch { value, writes: true, start, end, certain: true }
    }

    fn maybe(value: u64, start: u64, end: u64) -> Touch {
        Touch { certain: false, ..write(value, start, end) }
    }

    fn read(value: u64, start: u64, end: u64) -> Touch {
        Touch { writes: false, ..write(value, start, end) }
    }

    #[test]
    fn an_acknowledged_write_is_read_until_it_is_overwritten() {
        assert!(check(0, &[write(1, 1, 2), read(1, 3, 4), write(2, 5, 6), read(2, 7, 8)]).is_ok());
        assert!(check(0, &[write(1, 1, 2), read(0, 3, 4)]).is_err());
        assert!(check(0, &[write(1, 1, 2), write(2, 3, 4), read(1, 5, 6)]).is_err());
        assert!(check(0, &[write(1, 1, 2), write(2, 3, 4), read(2, 5, 6), read(1, 7, 8)]).is_err());
    }

    #[test]
    fn concurrent_operations_may_go_either_way_but_not_both() {
        assert!(check(0, &[write(1, 1, 10), read(0, 2, 3)]).is_ok());
        assert!(check(0, &[write(1, 1, 10), read(1, 2, 3)]).is_ok());
        assert!(check(0, &[write(1, 1, 10), read(1, 2, 3), read(0, 4, 5)]).is_err());
        assert!(check(0, &[write(1, 1, 10), write(2, 1, 10), read(1, 11, 12)]).is_ok());
        assert!(check(0, &[write(1, 1, 10), write(2, 1, 10), read(1, 11, 12), read(2, 13, 14)]).is_err());
    }

    #[test]
    fn an_unknown_write_may_take_effect_or_not_but_only_before_its_end() {
        assert!(check(0, &[maybe(1, 1, NEVER), read(0, 5, 6), read(1, 50, 51)]).is_ok());
        assert!(check(0, &[maybe(1, 1, NEVER), read(0, 5, 6)]).is_ok());
        assert!(check(0, &[maybe(1, 1, 4), read(0, 5, 6), read(1, 50, 51)]).is_err());
    }

    #[test]
    fn a_write_that_could_no_longer_take_effect_is_noticed_if_its_value_is_read() {
        assert!(check(0, &[maybe(1, 5, 4)]).is_ok());
        assert!(check(0, &[maybe(1, 5, 4), read(0, 6, 7)]).is_ok());
        assert!(check(0, &[maybe(1, 5, 4), read(1, 6, 7)]).is_err());
    }

    #[test]
    fn values_that_were_never_written_are_noticed() {
        assert!(check(0, &[read(7, 1, 2)]).is_err());
        assert!(check(0, &[read(7, 1, 2), write(7, 3, 4)]).is_err());
    }

    #[test]
    fn a_write_that_is_undone_by_an_older_value_is_noticed() {
        assert!(check(0, &[write(1, 1, 2), read(1, 3, 4), write(2, 5, 6), read(1, 7, 8)]).is_err());
    }
}
