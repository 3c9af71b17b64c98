//! The rules on which membership rests, apart from the code that follows them.
//!
//! They are a type parameter, as [`crate::Rules`] are of workers: a simulation puts a wrong rule in the place
//! of a right one, and checks that the mistake is noticed. Production is compiled with [`Shipped`] alone.

use crate::rules::Shipped;

/// The rules that decide which member has a seat, and when another member may have it.
pub trait SeatRules: 'static {
    /// Whether a member's list of grants is there before the member uses its seat (M2).
    fn lists_grants_first() -> bool {
        true
    }

    /// Whether a member's grants of later regions are listed before it uses them (M2).
    fn lists_later_grants() -> bool {
        true
    }

    /// Whether a member that finds another one recovering a seat leaves the seat to it (M3).
    fn leaves_it_to_recoverers() -> bool {
        true
    }

    /// Whether a recoverer that is silent itself is evicted before another takes its place (M3).
    fn evicts_recoverers() -> bool {
        true
    }

    /// Whether a member that has fenced another one looks again whether the seat is still that one's (M4).
    fn looks_again_behind_fence() -> bool {
        true
    }

    /// Whether a seat is given back only once all duties of its member have finished (M4, M5).
    fn waits_for_duties() -> bool {
        true
    }

    /// Whether a member's commits are rolled back only with both copies of its log.
    fn needs_both_copies() -> bool {
        true
    }

    /// Whether a member is evicted before its roles are free (M5).
    fn fences_before_roles() -> bool {
        true
    }

    /// Whether a member's commits are rolled back before its seat is free (M4).
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

    /// Whether the announcements of a member's workers are taken away before its seat is free (M4).
    fn forgets_before_seat() -> bool {
        true
    }

    /// Whether a recoverer opens the regions that the database has got by the time of the fence.
    fn opens_later_regions() -> bool {
        true
    }
}

impl SeatRules for Shipped {}
