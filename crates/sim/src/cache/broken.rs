//! Rules of the cache that are wrong on purpose, one in each run.

use farpool_cache::{PageDigest, Rules, Shipped};

use crate::mutation::{get, is};

/// A page is admitted without another look at the header of its home bucket.
const HEADER_UNCHECKED: &str = "header-not-checked-before-admission";
/// A writer leaves the entries of its block as they are.
const NOT_INVALIDATED: &str = "no-invalidation";
/// A writer leaves the entries in its block's other bucket as they are.
const OTHER_BUCKET_LEFT: &str = "other-bucket-not-invalidated";
/// A page is admitted while another process writes the block.
const BESIDE_A_WRITER: &str = "admission-beside-a-writer";
/// A slot is reused at once.
const REUSED_EARLY: &str = "slot-reused-before-readers-have-left";
/// The header of a dead writer's home bucket loses one writer, whether or not the dead one had announced
/// itself.
const SUBTRACTED: &str = "dead-writer-subtracted";
/// Neither the door nor the files that are opened behind it wait for places that are occupied. (If the door
/// alone did not wait, the files' wait would hide it.)
const DOOR_HASTY: &str = "door-opened-over-an-occupied-place";
/// A keeper that finds the door half open trusts the entries.
const OLD_TRUSTED: &str = "old-entries-trusted";
/// A file that was changed as a whole keeps its id.
const SAME_ID: &str = "file-id-kept-after-truncation";
/// The pages of a file that was unlinked are found.
const NOT_RETIRED: &str = "retired-file-hits";
/// A process that cannot use the index changes files while the door is not closed.
const DOOR_LEFT: &str = "door-left-open-without-index";
/// The keeper trusts the entries after a caller has closed the door.
const CLOSING_UNNOTICED: &str = "closed-door-not-noticed";
/// The keeper turns the door although a caller has closed it meanwhile.
const DOOR_OVERWRITTEN: &str = "door-turned-without-comparing";
/// The keeper opens the door although it counts outsiders.
const OUTSIDERS_IGNORED: &str = "outsiders-not-counted";
/// The keeper opens and frees files while processes are in their places that do not know of it.
const FILES_HASTY: &str = "file-opened-over-an-occupied-place";
/// A file is opened under two numbers.
const TWICE: &str = "file-opened-twice";
/// A file that was not signed when the database ended keeps its pages.
const UNSIGNED_KEPT: &str = "file-kept-after-an-unclean-end";
/// A file that was changed while the database was not there keeps its pages.
const CHANGED_KEPT: &str = "signature-not-compared";
/// A file is signed although another change may give it the same signature.
const UNSETTLED_SIGNED: &str = "unsettled-file-signed";
/// A page that is newer than the new server's disk is taken over.
const LATER_LSN: &str = "handed-over-page-with-later-lsn";
/// A page is taken over although the new server has written its block or changed its file.
const WRITTEN_TAKEN: &str = "written-page-taken-over";
/// What is read from a slot is not compared with its checksum.
const UNVERIFIED: &str = "slot-not-verified";

pub(super) const MUTATIONS: &[&str] = &[
    HEADER_UNCHECKED,
    NOT_INVALIDATED,
    OTHER_BUCKET_LEFT,
    BESIDE_A_WRITER,
    REUSED_EARLY,
    SUBTRACTED,
    DOOR_HASTY,
    OLD_TRUSTED,
    SAME_ID,
    NOT_RETIRED,
    UNVERIFIED,
    DOOR_LEFT,
    CLOSING_UNNOTICED,
    DOOR_OVERWRITTEN,
    OUTSIDERS_IGNORED,
    FILES_HASTY,
    TWICE,
    UNSIGNED_KEPT,
    CHANGED_KEPT,
    UNSETTLED_SIGNED,
    LATER_LSN,
    WRITTEN_TAKEN,
];

/// Whether files are signed whose last change may be followed by another one with the same time (R2).
pub(super) fn signs_unsettled_files() -> bool {
    is(UNSETTLED_SIGNED)
}

/// The rules of a run: the shipped ones, except for the one that the mutation breaks.
pub(super) enum Broken {}

impl Rules for Broken {
    /// So few that generations repeat all the time: only the wait for places tells entries apart.
    const GENERATION_MASK: u64 = 1;
    /// Fewer than most runs have slots: a lap takes several sweeps.
    const SLOTS_PER_SWEEP: u32 = 3;

    const UNUSED_ROUNDS: u16 = 2;
    /// More than a bucket has: pages always go to the bucket that has more empty entries.
    const ENOUGH_EMPTY: usize = usize::MAX;

    fn may_admit(before: u64, now: u64, writers: u64) -> bool {
        match get() {
            Some(HEADER_UNCHECKED) => writers == 0,
            Some(BESIDE_A_WRITER) => before == now,
            _ => Shipped::may_admit(before, now, writers),
        }
    }

    fn finish(digest: &PageDigest) -> u64 {
        if is(UNVERIFIED) { 0 } else { Shipped::finish(digest) }
    }

    fn writers_invalidate() -> bool {
        !is(NOT_INVALIDATED) && Shipped::writers_invalidate()
    }

    fn writers_look_in_both_buckets() -> bool {
        !is(OTHER_BUCKET_LEFT) && Shipped::writers_look_in_both_buckets()
    }

    fn empties_old_entries() -> bool {
        !is(OLD_TRUSTED) && Shipped::empties_old_entries()
    }

    fn slot_reuse_waits() -> bool {
        !is(REUSED_EARLY) && Shipped::slot_reuse_waits()
    }

    fn door_waits() -> bool {
        !is(DOOR_HASTY) && Shipped::door_waits()
    }

    fn closes_door() -> bool {
        !is(DOOR_LEFT) && Shipped::closes_door()
    }

    fn notices_closed_door() -> bool {
        !is(CLOSING_UNNOTICED) && Shipped::notices_closed_door()
    }

    fn door_compares() -> bool {
        !is(DOOR_OVERWRITTEN) && Shipped::door_compares()
    }

    fn heeds_outsiders() -> bool {
        !is(OUTSIDERS_IGNORED) && Shipped::heeds_outsiders()
    }

    fn files_wait() -> bool {
        !is(FILES_HASTY) && !is(DOOR_HASTY) && Shipped::files_wait()
    }

    fn files_are_unique() -> bool {
        !is(TWICE) && Shipped::files_are_unique()
    }

    fn changes_ids() -> bool {
        !is(SAME_ID) && Shipped::changes_ids()
    }

    fn retires_files() -> bool {
        !is(NOT_RETIRED) && Shipped::retires_files()
    }

    fn keeps_pages(signed: u64, found: Option<u64>) -> bool {
        match get() {
            Some(UNSIGNED_KEPT) if signed == 0 => found.is_some(),
            Some(CHANGED_KEPT) => signed != 0 && found.is_some(),
            _ => Shipped::keeps_pages(signed, found),
        }
    }

    fn takes_over(lsn: u64, restartpoint: u64) -> bool {
        is(LATER_LSN) || Shipped::takes_over(lsn, restartpoint)
    }

    fn skips_written_pages() -> bool {
        !is(WRITTEN_TAKEN) && Shipped::skips_written_pages()
    }

    fn replaces_dead_headers() -> bool {
        !is(SUBTRACTED) && Shipped::replaces_dead_headers()
    }
}
