//! The rules on which membership rests, apart from the code that follows them.
//!
//! They are a type parameter, as [`crate::Rules`] are of workers: a simulation puts a wrong one in the place
//! of a right one and sees that it notices. Production is compiled with [`Shipped`] alone.

use crate::rules::Shipped;

/// What decides who has a seat, and when it is another's.
pub trait SeatRules: 'static {
    /// Whether a member's list of grants is there before the seat is its own (M2).
    fn lists_grants_first() -> bool {
        true
    }

    /// Whether who finds another at work on a seat leaves it to that one (M3).
    fn leaves_it_to_carers() -> bool {
        true
    }

    /// Whether a carer that is silent himself is shut out before another takes his place (M3).
    fn shuts_carers_out() -> bool {
        true
    }

    /// Whether who has fenced a member looks once more whether the seat is still that one's (M4).
    fn looks_again_behind_fence() -> bool {
        true
    }

    /// Whether a seat is given back only once all duties of its member are over (M4, M5).
    fn waits_for_duties() -> bool {
        true
    }

    /// Whether what a member left is undone with both copies of its log, or not at all.
    fn needs_both_copies() -> bool {
        true
    }

    /// Whether a member is shut out before its roles are free (M5).
    fn fences_before_roles() -> bool {
        true
    }

    /// Whether what a member left is undone before its seat is free (M4).
    fn recovers_before_seat() -> bool {
        true
    }

    /// Whether a member stops its heartbeats while one of its duties makes no progress (M6).
    fn vouches_for_duties() -> bool {
        true
    }

    /// Whether a member stops its heartbeats while one of its commits makes no progress (M6).
    fn vouches_for_commits() -> bool {
        true
    }

    /// Whether what its workers announced is taken away before its seat is free (M4).
    fn forgets_before_seat() -> bool {
        true
    }
}

impl SeatRules for Shipped {}
