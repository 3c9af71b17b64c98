//! Rules of members that are wrong on purpose, one in each run.

use farpool_namdb::MemberRules;
use farpool_txn::Shipped;
use farpool_txn::membership::SeatRules;

use crate::mutation::is;
pub(super) use crate::txn::broken::Chosen as Engine;

/// A member uses other regions before it has listed its grants.
pub(super) const LISTED_LATE: &str = "list-after-other-grants";
/// A member recovers a seat although another live member is already recovering it.
pub(super) const RECOVERER_IGNORED: &str = "recoverer-not-checked";
/// A member that takes over from an unresponsive recoverer does not evict it first.
pub(super) const RECOVERER_NOT_EVICTED: &str = "silent-recoverer-not-evicted";
/// After fencing a member, the recoverer does not check that the seat is still that member's.
pub(super) const BLIND_BEHIND_FENCE: &str = "seat-not-looked-at-behind-the-fence";
/// A member gives its seat back while it still performs a duty for all members.
pub(super) const LEFT_AT_WORK: &str = "seat-left-while-on-duty";
/// A member's commits are rolled back with one copy of its log, and the other copy is reused.
pub(super) const ONE_COPY: &str = "log-copy-without-verdicts";
/// A member's roles are freed before the member is evicted.
pub(super) const ROLES_FIRST: &str = "roles-freed-before-fence";
/// A seat is freed before what its member left is rolled back.
pub(super) const SEAT_BEFORE_RECOVERY: &str = "seat-freed-before-recovery";
/// A seat is freed before the announcements of its workers are removed.
pub(super) const SEAT_BEFORE_FORGETTING: &str = "seat-freed-before-words-forgotten";

/// A member sends heartbeats while its publisher, its collector or its recoverer stands still.
pub(super) const BEATS_WITHOUT_DUTIES: &str = "beats-while-a-duty-stands-still";
/// A member sends heartbeats while one of its threads stands still in the middle of a commit.
pub(super) const BEATS_WITHOUT_COMMITS: &str = "beats-while-a-commit-stands-still";

/// The memory of a dropped table is reused while snapshots may have the table.
pub(super) const TOMBSTONE_EARLY: &str = "tombstone-freed-early";
/// The memory of a dropped table is reused without being cleared.
pub(super) const NOT_CLEARED: &str = "memory-reused-uncleared";
/// The word of a client is cleared while the client runs a transaction.
pub(super) const BUSY_FORGOTTEN: &str = "busy-client-forgotten";
/// A transaction uses a table without checking that it still exists, although the catalog has changed.
pub(super) const CATALOG_BLIND: &str = "catalog-version-not-looked-at";
/// A member uses grants of regions that the database got later without having listed them.
pub(super) const LATER_UNLISTED: &str = "grown-region-not-listed";
/// A recoverer does not open the regions that the database has got by the time of the fence.
pub(super) const LATER_UNOPENED: &str = "later-regions-not-opened-by-recoverers";
/// A region goes back to the pool while members use it.
pub(super) const GIVEN_BACK_EARLY: &str = "region-given-back-under-members";
/// A region goes back to the pool although a table has something there.
pub(super) const GIVEN_BACK_FULL: &str = "region-given-back-with-tables";
/// The pieces that a table gets when it grows are not entered in the maps of their regions.
pub(super) const GROWN_UNMAPPED: &str = "grown-pieces-not-in-the-maps";

/// An index is filled while transactions are open that do not know it.
pub(super) const FILLED_EARLY: &str = "index-filled-before-all-know-it";
/// An index is searched before all rows are entered.
pub(super) const SEARCHED_EARLY: &str = "index-searched-before-it-is-ready";

pub(super) const MUTATIONS: &[&str] = &[
    LISTED_LATE,
    RECOVERER_IGNORED,
    RECOVERER_NOT_EVICTED,
    BLIND_BEHIND_FENCE,
    LEFT_AT_WORK,
    ONE_COPY,
    ROLES_FIRST,
    SEAT_BEFORE_RECOVERY,
    SEAT_BEFORE_FORGETTING,
    BEATS_WITHOUT_DUTIES,
    BEATS_WITHOUT_COMMITS,
    TOMBSTONE_EARLY,
    NOT_CLEARED,
    BUSY_FORGOTTEN,
    CATALOG_BLIND,
    GROWN_UNMAPPED,
    LATER_UNLISTED,
    LATER_UNOPENED,
    GIVEN_BACK_EARLY,
    GIVEN_BACK_FULL,
    FILLED_EARLY,
    SEARCHED_EARLY,
];

impl MemberRules for Engine {
    fn waits_for_old_transactions() -> bool {
        !is(FILLED_EARLY) && Shipped::waits_for_old_transactions()
    }

    fn searches_ready_indexes_alone() -> bool {
        !is(SEARCHED_EARLY) && Shipped::searches_ready_indexes_alone()
    }

    fn keeps_memory_for_snapshots() -> bool {
        !is(TOMBSTONE_EARLY) && Shipped::keeps_memory_for_snapshots()
    }

    fn clears_memory() -> bool {
        !is(NOT_CLEARED) && Shipped::clears_memory()
    }

    fn spares_busy_clients() -> bool {
        !is(BUSY_FORGOTTEN) && Shipped::spares_busy_clients()
    }

    fn looks_at_the_catalog() -> bool {
        !is(CATALOG_BLIND) && Shipped::looks_at_the_catalog()
    }

    fn waits_for_leaving_members() -> bool {
        !is(GIVEN_BACK_EARLY) && Shipped::waits_for_leaving_members()
    }

    fn keeps_regions_in_use() -> bool {
        !is(GIVEN_BACK_FULL) && Shipped::keeps_regions_in_use()
    }

    fn enters_growth_in_maps() -> bool {
        !is(GROWN_UNMAPPED) && Shipped::enters_growth_in_maps()
    }
}

impl SeatRules for Engine {
    fn lists_grants_first() -> bool {
        !is(LISTED_LATE) && Shipped::lists_grants_first()
    }

    fn lists_later_grants() -> bool {
        !is(LATER_UNLISTED) && Shipped::lists_later_grants()
    }

    fn opens_later_regions() -> bool {
        !is(LATER_UNOPENED) && Shipped::opens_later_regions()
    }

    fn leaves_it_to_recoverers() -> bool {
        !is(RECOVERER_IGNORED) && Shipped::leaves_it_to_recoverers()
    }

    fn evicts_recoverers() -> bool {
        !is(RECOVERER_NOT_EVICTED) && Shipped::evicts_recoverers()
    }

    fn looks_again_behind_fence() -> bool {
        !is(BLIND_BEHIND_FENCE) && Shipped::looks_again_behind_fence()
    }

    fn waits_for_duties() -> bool {
        !is(LEFT_AT_WORK) && Shipped::waits_for_duties()
    }

    fn needs_both_copies() -> bool {
        !is(ONE_COPY) && Shipped::needs_both_copies()
    }

    fn fences_before_roles() -> bool {
        !is(ROLES_FIRST) && Shipped::fences_before_roles()
    }

    fn recovers_before_seat() -> bool {
        !is(SEAT_BEFORE_RECOVERY) && Shipped::recovers_before_seat()
    }

    fn vouches_for_duties() -> bool {
        !is(BEATS_WITHOUT_DUTIES) && Shipped::vouches_for_duties()
    }

    fn vouches_for_commits() -> bool {
        !is(BEATS_WITHOUT_COMMITS) && Shipped::vouches_for_commits()
    }

    fn forgets_before_seat() -> bool {
        !is(SEAT_BEFORE_FORGETTING) && Shipped::forgets_before_seat()
    }
}
