//! Which members are dead, by one member's clock. Pure: takes the words of the seats, and the time.

use std::time::Duration;

use farpool_wire::{Epoch, Slot};

use super::layout::SeatWords;

/// A member that has sent no heartbeat for too long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Suspect {
    /// Its slot.
    pub slot: Slot,
    /// Its claim.
    pub claim: Epoch,
}

/// From one look to the next, at most this part of the patience counts as silence of the others. A watcher
/// that does not look, because the memory with the seats does not answer or its own thread waits for a
/// processor, cannot tell whether they are silent; and mostly they cannot send heartbeats then either. A
/// fifth is twice the interval of heartbeats.
const PART_OF_PATIENCE: u64 = 5;

/// What one member has seen of the others. It goes by its own clock alone, and counts from when *it* last saw
/// a new heartbeat: times of two machines are never compared.
#[derive(Debug)]
pub struct Watch {
    patience_ns: u64,
    seats: Vec<Seen>,
    looked_at_ns: u64,
    /// How much of the time of watching counts, so far.
    counted_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    seat: SeatWords,
    /// The counted time when the seat was first seen with this heartbeat.
    since_ns: u64,
}

impl Watch {
    /// Declares a member dead once it has been silent for `patience`.
    pub fn new(patience: Duration) -> Watch {
        Watch { patience_ns: patience.as_nanos() as u64, seats: Vec::new(), looked_at_ns: 0, counted_ns: 0 }
    }

    /// Looks at all seats, in the order of slots; returns the members that are declared dead.
    pub fn look(&mut self, now_ns: u64, seats: &[SeatWords]) -> Vec<Suspect> {
        let gap_ns = now_ns.saturating_sub(self.looked_at_ns);
        if gap_ns >= self.patience_ns / 2 {
            // The watcher itself has not looked for long. Members that were silent meanwhile may have stood
            // still together with it, as processes of one machine do.
            self.seats.clear();
        }
        self.looked_at_ns = now_ns;
        self.counted_ns += gap_ns.min(self.patience_ns / PART_OF_PATIENCE);
        let counted_ns = self.counted_ns;
        self.seats.truncate(seats.len());
        let new = seats[self.seats.len()..].iter().map(|&seat| Seen { seat, since_ns: counted_ns });
        self.seats.extend(new);
        let mut suspects = Vec::new();
        for ((slot, seen), &seat) in (0..).zip(&mut self.seats).zip(seats) {
            if (seen.seat.claim, seen.seat.beat) != (seat.claim, seat.beat) {
                *seen = Seen { seat, since_ns: counted_ns };
            }
            if let (Some(claim), Some(slot)) = (seat.claim, Slot::new(slot))
                && counted_ns - seen.since_ns >= self.patience_ns
            {
                suspects.push(Suspect { slot, claim });
            }
        }
        suspects
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(claim: u64, beat: u64) -> SeatWords {
        SeatWords { claim: Some(Epoch(claim)).filter(|claim| claim.0 != 0), beat, recoverer: None }
    }

    fn suspects(watch: &mut Watch, now_ns: u64, seats: &[SeatWords]) -> Vec<(usize, u64)> {
        watch.look(now_ns, seats).iter().map(|suspect| (suspect.slot.index(), suspect.claim.0)).collect()
    }

    /// Most tests look once in each fifth of it.
    const PATIENCE: Duration = Duration::from_nanos(50);

    #[test]
    fn a_member_that_is_silent_for_the_patience_is_declared_dead() {
        let mut watch = Watch::new(PATIENCE);
        for now_ns in [5, 15, 25, 35, 45] {
            let beats = if now_ns < 45 { 1 } else { 2 };
            assert_eq!(suspects(&mut watch, now_ns, &[seat(7, 1), seat(0, 0), seat(8, beats)]), []);
        }
        for now_ns in [55, 65, 75, 85] {
            assert_eq!(suspects(&mut watch, now_ns, &[seat(7, 1), seat(0, 0), seat(8, 2)]), [(0, 7)]);
        }
        assert_eq!(suspects(&mut watch, 95, &[seat(7, 1), seat(0, 0), seat(8, 2)]), [(0, 7), (2, 8)]);
    }

    #[test]
    fn a_new_member_of_a_seat_is_given_time_of_its_own() {
        let mut watch = Watch::new(PATIENCE);
        for now_ns in [0, 10, 20, 30, 40] {
            assert_eq!(suspects(&mut watch, now_ns, &[seat(7, 1)]), []);
        }
        for now_ns in [50, 60, 70, 80, 90] {
            assert_eq!(suspects(&mut watch, now_ns, &[seat(9, 1)]), [], "another has the seat");
        }
        assert_eq!(suspects(&mut watch, 100, &[seat(9, 1)]), [(0, 9)]);
    }

    #[test]
    fn a_watcher_that_has_stood_still_gives_the_others_time() {
        let mut watch = Watch::new(PATIENCE);
        assert_eq!(suspects(&mut watch, 0, &[seat(7, 1)]), []);
        for now_ns in [1_000, 1_010, 1_020, 1_030, 1_040] {
            assert_eq!(suspects(&mut watch, now_ns, &[seat(7, 1)]), []);
        }
        assert_eq!(suspects(&mut watch, 1_050, &[seat(7, 1)]), [(0, 7)]);
    }

    #[test]
    fn time_in_which_the_seats_could_not_be_read_hardly_counts_as_silence() {
        let mut watch = Watch::new(PATIENCE);
        for now_ns in [0, 24, 48, 72, 96] {
            assert_eq!(
                suspects(&mut watch, now_ns, &[seat(7, 1)]),
                [],
                "a fifth of the patience counts each time"
            );
        }
        assert_eq!(suspects(&mut watch, 120, &[seat(7, 1)]), [(0, 7)]);
    }
}
