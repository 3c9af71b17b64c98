//! Rules of membership that are wrong on purpose, one in each run. What is wrong is the thread's, as in `sim txn`, whose engine this is.

use farpool_txn::Shipped;
use farpool_txn::membership::SeatRules;

pub(super) use crate::txn::broken::{Chosen as Engine, is, set};

/// A member uses other regions before it has said which grants it has.
pub(super) const LISTED_LATE: &str = "list-after-other-grants";
/// A seat is looked after though another, who lives, is at it.
pub(super) const CARER_IGNORED: &str = "carer-not-checked";
/// Who takes the place of a silent carer does not shut him out before.
pub(super) const CARER_NOT_OUT: &str = "silent-carer-not-shut-out";
/// Who has fenced a member does not look whether the seat is still that one's.
pub(super) const BLIND_BEHIND_FENCE: &str = "seat-not-looked-at-behind-the-fence";
/// A seat is given back while its member still acts for all.
pub(super) const LEFT_AT_WORK: &str = "seat-left-while-on-duty";
/// What a member left is undone with one copy of its log, and the other is used again.
pub(super) const ONE_COPY: &str = "log-copy-without-verdicts";
/// A member's roles are free before it is shut out.
pub(super) const ROLES_FIRST: &str = "roles-freed-before-fence";
/// A seat is free before what its member left is undone.
pub(super) const SEAT_BEFORE_RECOVERY: &str = "seat-freed-before-recovery";
/// A seat is free before what its workers announced is taken away.
pub(super) const SEAT_BEFORE_FORGETTING: &str = "seat-freed-before-words-forgotten";

/// A member sends heartbeats while its publisher or its collector stands still.
pub(super) const BEATS_WITHOUT_DUTIES: &str = "beats-while-a-duty-stands-still";
/// A member sends heartbeats while one of its threads stands still in the middle of a commit.
pub(super) const BEATS_WITHOUT_COMMITS: &str = "beats-while-a-commit-stands-still";

pub(super) const MUTATIONS: &[&str] = &[
    LISTED_LATE,
    CARER_IGNORED,
    CARER_NOT_OUT,
    BLIND_BEHIND_FENCE,
    LEFT_AT_WORK,
    ONE_COPY,
    ROLES_FIRST,
    SEAT_BEFORE_RECOVERY,
    SEAT_BEFORE_FORGETTING,
    BEATS_WITHOUT_DUTIES,
    BEATS_WITHOUT_COMMITS,
];

/// The rules of a run: as they ship, but for the one that is wrong.
pub(super) enum Chosen {}

impl SeatRules for Chosen {
    fn lists_grants_first() -> bool {
        !is(LISTED_LATE) && Shipped::lists_grants_first()
    }

    fn leaves_it_to_carers() -> bool {
        !is(CARER_IGNORED) && Shipped::leaves_it_to_carers()
    }

    fn shuts_carers_out() -> bool {
        !is(CARER_NOT_OUT) && Shipped::shuts_carers_out()
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
