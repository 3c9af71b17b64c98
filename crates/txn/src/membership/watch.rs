//! Who does not live any more, by one member's clock. Pure: takes what the seats say, and the time.

use std::time::Duration;

use farpool_wire::{Epoch, Slot};

use super::layout::SeatWords;

/// A member that has not said for long that it lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Suspect {
    /// Its slot.
    pub slot: Slot,
    /// Its claim.
    pub claim: Epoch,
}

/// What one member has seen of the others. It goes by its own clock alone, from when *it* saw a beat last: no time of two machines is
/// compared.
#[derive(Debug)]
pub struct Watch {
    patience_ns: u64,
    seats: Vec<Seen>,
    looked_at_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    seat: SeatWords,
    since_ns: u64,
}

impl Watch {
    /// Takes for dead who has been silent for so long.
    pub fn new(patience: Duration) -> Watch {
        Watch { patience_ns: patience.as_nanos() as u64, seats: Vec::new(), looked_at_ns: 0 }
    }

    /// Looks at all seats, in the order of slots; says who is taken for dead.
    pub fn look(&mut self, now_ns: u64, seats: &[SeatWords]) -> Vec<Suspect> {
        if now_ns.saturating_sub(self.looked_at_ns) >= self.patience_ns / 2 {
            // The watcher has not looked for long: what was silent meanwhile may have stood still together with it, as processes of one
            // machine do.
            self.seats.clear();
        }
        self.looked_at_ns = now_ns;
        self.seats.truncate(seats.len());
        let new = seats[self.seats.len()..].iter().map(|&seat| Seen { seat, since_ns: now_ns });
        self.seats.extend(new);
        let mut suspects = Vec::new();
        for ((slot, seen), &seat) in (0..).zip(&mut self.seats).zip(seats) {
            if (seen.seat.claim, seen.seat.beat) != (seat.claim, seat.beat) {
                *seen = Seen { seat, since_ns: now_ns };
            }
            if let (Some(claim), Some(slot)) = (seat.claim, Slot::new(slot))
                && now_ns.saturating_sub(seen.since_ns) >= self.patience_ns
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
        SeatWords { claim: Some(Epoch(claim)).filter(|claim| claim.0 != 0), beat, carer: None }
    }

    fn suspects(watch: &mut Watch, now_ns: u64, seats: &[SeatWords]) -> Vec<(usize, u64)> {
        watch.look(now_ns, seats).iter().map(|suspect| (suspect.slot.index(), suspect.claim.0)).collect()
    }

    #[test]
    fn who_is_silent_for_as_long_as_patience_lasts_is_taken_for_dead() {
        let mut watch = Watch::new(Duration::from_nanos(10));
        for now_ns in [5, 8, 11, 14] {
            let beats = if now_ns < 14 { 1 } else { 2 };
            assert_eq!(suspects(&mut watch, now_ns, &[seat(7, 1), seat(0, 0), seat(8, beats)]), []);
        }
        assert_eq!(suspects(&mut watch, 15, &[seat(7, 1), seat(0, 0), seat(8, 2)]), [(0, 7)]);
        assert_eq!(suspects(&mut watch, 19, &[seat(7, 1), seat(0, 0), seat(8, 2)]), [(0, 7)]);
        assert_eq!(suspects(&mut watch, 23, &[seat(7, 1), seat(0, 0), seat(8, 2)]), [(0, 7)]);
        assert_eq!(suspects(&mut watch, 24, &[seat(7, 1), seat(0, 0), seat(8, 2)]), [(0, 7), (2, 8)]);
    }

    #[test]
    fn a_new_member_of_a_seat_is_given_time_of_its_own() {
        let mut watch = Watch::new(Duration::from_nanos(10));
        for now_ns in [0, 4, 8] {
            assert_eq!(suspects(&mut watch, now_ns, &[seat(7, 1)]), []);
        }
        for now_ns in [10, 14, 18] {
            assert_eq!(suspects(&mut watch, now_ns, &[seat(9, 1)]), [], "another has the seat");
        }
        assert_eq!(suspects(&mut watch, 20, &[seat(9, 1)]), [(0, 9)]);
    }

    #[test]
    fn who_has_stood_still_himself_gives_the_others_time() {
        let mut watch = Watch::new(Duration::from_nanos(10));
        assert_eq!(suspects(&mut watch, 0, &[seat(7, 1)]), []);
        for now_ns in [1_000, 1_004, 1_008] {
            assert_eq!(suspects(&mut watch, now_ns, &[seat(7, 1)]), []);
        }
        assert_eq!(suspects(&mut watch, 1_010, &[seat(7, 1)]), [(0, 7)]);
    }
}
