//! Situations that a run does not get by chance, so that a run that is to have one is arranged for it. They
//! are drawn from a random stream of their own, so that the other runs are not changed by the draw.

use farpool_fabric::sim::Random;

/// Runs with each situation, in thousandths.
const CROWDS_PERMILLE: u32 = 60;
const LOSSES_PERMILLE: u32 = 150;
const DEATHS_PERMILLE: u32 = 200;

/// The situations of a run, in any combination.
#[derive(Clone, Copy)]
pub(super) struct Situations {
    /// Clients now and then begin more commits at a time than their slot may have in flight.
    pub(super) has_crowds: bool,
    /// Clients lose their connections at any time, and make them anew.
    pub(super) loses_connections: bool,
    /// Publishers die, also in the middle of an image.
    pub(super) publishers_die: bool,
}

impl Situations {
    /// No situation.
    pub(super) const NONE: Situations =
        Situations { has_crowds: false, loses_connections: false, publishers_die: false };

    pub(super) fn draw(seed: u64) -> Situations {
        let mut random = Random::new(seed, 12);
        Situations {
            has_crowds: random.chance(CROWDS_PERMILLE),
            loses_connections: random.chance(LOSSES_PERMILLE),
            publishers_die: random.chance(DEATHS_PERMILLE),
        }
    }
}
