//! The rules that make a member's tables and clients correct, apart from the code that follows them.
//!
//! They are a type parameter, like the engine's [`Rules`]. A simulation replaces one rule by a wrong one, and
//! verifies that its checkers notice. Production is compiled with [`Shipped`] alone.

use farpool_txn::membership::SeatRules;
use farpool_txn::{Rules, Shipped};

/// Decides when memory is reused, which clients are idle, and when the catalog is read.
pub trait MemberRules: Rules + SeatRules {
    /// Whether a dropped table keeps its memory until the horizon has the drop (C4).
    fn keeps_memory_for_snapshots() -> bool {
        true
    }

    /// Whether memory is cleared before another table gets it (C4).
    fn clears_memory() -> bool {
        true
    }

    /// Whether only the words of idle clients are cleared (P1).
    fn spares_busy_clients() -> bool {
        true
    }

    /// Whether a transaction checks that a table still exists once the catalog has changed (C1).
    fn looks_at_the_catalog() -> bool {
        true
    }

    /// Whether a region goes back to the pool only once no seat has a grant there (L3).
    fn waits_for_leaving_members() -> bool {
        true
    }

    /// Whether a region goes back to the pool only once no table has anything there.
    fn keeps_regions_in_use() -> bool {
        true
    }

    /// Whether the pieces that a table gets when it grows are entered in the maps of their regions.
    fn enters_growth_in_maps() -> bool {
        true
    }

    /// Whether an index is filled only once all open transactions have it.
    fn waits_for_old_transactions() -> bool {
        true
    }

    /// Whether an index is searched only once all rows are entered.
    fn searches_ready_indexes_alone() -> bool {
        true
    }
}

impl MemberRules for Shipped {}
