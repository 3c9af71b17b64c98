//! Transaction rules that are wrong on purpose, one in each run.

use farpool_txn::{Cut, MAX_COMMITS_IN_FLIGHT, Rules, Shipped};
use farpool_wire::{RecordHeader, Version, next_generation};

use super::{MOST_TO_THE_EDGE, TIMESTAMP_BITS};
use crate::mutation::is;

/// A session patches its own last commit into a published cut, instead of waiting for one that has it.
pub(super) const OWN_SLOT: &str = "own-slot-patched-into-the-cut";
/// A transaction begins from the slots' words, which it reads itself, instead of from a published cut.
pub(super) const UNPUBLISHED: &str = "begin-from-unpublished-scan";
/// A transaction counts a record as locked whatever header its compare-and-swap found.
pub(super) const VALIDATION: &str = "validation-skipped";
/// A reader accepts data whose checksum is wrong.
pub(super) const CHECKSUM: &str = "checksum-off";
/// The slot's watermark reaches a commit before the commit is installed.
pub(super) const WATERMARK_FIRST: &str = "visibility-before-install";
/// A transaction locks a record that another one has locked.
pub(super) const LOCK_IGNORED: &str = "lock-bit-ignored";
/// Records are locked before the log has their intents.
pub(super) const LOCKED_FIRST: &str = "lock-before-intent";
/// A client's commits are rolled back before its grants are fenced.
pub(super) const UNFENCED: &str = "locks-released-before-fence";
/// A slot gets its next client before what the last client left is rolled back.
pub(super) const REUSED: &str = "slot-reused-before-rollback";

/// The parts of a split oracle are read only once, although they may be published in between.
pub(super) const PARTS_ONCE: &str = "partitions-read-one-after-another";
/// A publisher's next cut has lower counts than the one before for slots that have made no commit.
pub(super) const OUT_OF_ORDER: &str = "publish-out-of-order";

/// A client writes its intents to only one copy of its log.
pub(super) const ONE_COPY: &str = "one-log-copy-only";
/// A slot's next client begins after the slot's watermark, not after the last count that its predecessor
/// used.
pub(super) const LEFT_BEHIND: &str = "counts-of-vanished-commits-used-again";
/// A slot whose timestamps are used up begins again in the same generation.
pub(super) const WRAPPED: &str = "slot-wrapped";
/// The log space of a commit is freed when the commit finishes, rather than when the slot's watermark reaches
/// it.
pub(super) const FREED_EARLY: &str = "log-freed-before-watermark";
/// A recoverer writes its verdicts without the heads of the commits that they are about.
pub(super) const BARE_VERDICT: &str = "verdict-without-head";
/// A rollback unlocks a record before its data are restored.
pub(super) const HEADER_FIRST: &str = "undone-header-before-data";
/// A recovered slot continues right after its watermark, with counts that may have been used.
pub(super) const SAME_GENERATION: &str = "generation-not-skipped";

/// A recovered slot continues as if no more counts had been given out than commits can be in flight.
pub(super) const COUNTS_AHEAD_FORGOTTEN: &str = "counts-ahead-of-watermark-reused";

/// The horizon is the newest cut, whatever snapshots are open.
pub(super) const AHEAD: &str = "gc-ahead-of-the-horizon";
/// The log's room for a commit is used again although a snapshot may need the versions that it has replaced.
pub(super) const LOG_REUSED: &str = "log-reused-before-horizon";
/// The next client of a recovered slot uses all of its log at once.
pub(super) const LOG_FORGOTTEN: &str = "log-of-predecessor-overwritten";
/// A worker takes its first snapshots before it announces itself.
pub(super) const ANNOUNCED_LATE: &str = "snapshot-announced-after-it-is-taken";
/// A worker announces its progress while a write that it has abandoned half-way may still land. This mutation
/// has a test of its own, because no run of the scenario reuses the memory of one table for another.
pub(super) const IN_FLIGHT_FORGOTTEN: &str = "in-flight-writes-forgotten";
/// A worker announces its latest cut while older snapshots of it are open.
pub(super) const OPEN_FORGOTTEN: &str = "open-snapshots-not-announced";

/// A block is overwritten although a snapshot may need the version that points to it.
pub(super) const BLOCK_REUSED: &str = "block-reused-before-horizon";
/// A payload is written to its block only after the slot's watermark has reached the commit that points to
/// it.
pub(super) const PAYLOAD_LATE: &str = "payload-after-intent";
/// A reader accepts a payload whose checksum is wrong.
pub(super) const PAYLOAD_CHECKSUM: &str = "pointer-checksum-off";
/// A member takes over a chunk whose owner still has a seat.
pub(super) const CHUNK_TAKEN: &str = "chunk-taken-from-the-living";

pub(super) const MUTATIONS: &[&str] = &[
    OWN_SLOT,
    UNPUBLISHED,
    VALIDATION,
    CHECKSUM,
    WATERMARK_FIRST,
    LOCK_IGNORED,
    LOCKED_FIRST,
    UNFENCED,
    REUSED,
    PARTS_ONCE,
    OUT_OF_ORDER,
    ONE_COPY,
    LEFT_BEHIND,
    WRAPPED,
    FREED_EARLY,
    BARE_VERDICT,
    HEADER_FIRST,
    SAME_GENERATION,
    COUNTS_AHEAD_FORGOTTEN,
    AHEAD,
    LOG_REUSED,
    LOG_FORGOTTEN,
    ANNOUNCED_LATE,
    OPEN_FORGOTTEN,
    BLOCK_REUSED,
    PAYLOAD_LATE,
    PAYLOAD_CHECKSUM,
    CHUNK_TAKEN,
];

/// The rules of a run: the shipped ones, except for the selected mutation.
pub(crate) enum Chosen {}

impl Rules for Chosen {
    fn begin(published: Cut, own: Option<Version>) -> Option<Cut> {
        let unseen = own.filter(|own| is(OWN_SLOT) && !published.sees(*own));
        let Some(unseen) = unseen else { return Shipped::begin(published, own) };
        let mut counts = published.counts().to_vec();
        if let Some(count) = counts.get_mut(unseen.slot().index()) {
            *count = unseen.count();
        }
        Some(Cut::new(published.sequence(), counts.into()))
    }

    fn begins_from_words() -> bool {
        is(UNPUBLISHED) || Shipped::begins_from_words()
    }

    fn looks_twice() -> bool {
        !is(PARTS_ONCE) && Shipped::looks_twice()
    }

    fn next_counts(last: &[u64], words: &[u64]) -> Vec<u64> {
        if !is(OUT_OF_ORDER) {
            return Shipped::next_counts(last, words);
        }
        let next = |(&last, &word): (&u64, &u64)| if word > last { word } else { last.saturating_sub(1) };
        last.iter().zip(words).map(next).collect()
    }

    fn announces_first() -> bool {
        !is(ANNOUNCED_LATE) && Shipped::announces_first()
    }

    fn least_needed(oldest: Option<u64>, latest: u64) -> u64 {
        if is(OPEN_FORGOTTEN) { latest } else { Shipped::least_needed(oldest, latest) }
    }

    fn settles_first() -> bool {
        !is(IN_FLIGHT_FORGOTTEN) && Shipped::settles_first()
    }

    fn horizon_up_to(least: u64) -> u64 {
        if is(AHEAD) { u64::MAX } else { Shipped::horizon_up_to(least) }
    }

    fn intents_unneeded_up_to(seen_by_all: Option<u64>) -> u64 {
        if is(LOG_REUSED) || is(FREED_EARLY) {
            u64::MAX
        } else {
            Shipped::intents_unneeded_up_to(seen_by_all)
        }
    }

    fn keeps_log_of_predecessor() -> bool {
        !is(LOG_FORGOTTEN) && Shipped::keeps_log_of_predecessor()
    }

    fn frees_block(is_behind_the_horizon: bool) -> bool {
        is(BLOCK_REUSED) || Shipped::frees_block(is_behind_the_horizon)
    }

    fn writes_payloads_first() -> bool {
        !is(PAYLOAD_LATE) && Shipped::writes_payloads_first()
    }

    fn takes_payload(checksum_is_right: bool) -> bool {
        is(PAYLOAD_CHECKSUM) || Shipped::takes_payload(checksum_is_right)
    }

    fn takes_over(owner_is_gone: bool) -> bool {
        is(CHUNK_TAKEN) || Shipped::takes_over(owner_is_gone)
    }

    fn has_locked(seen: RecordHeader, found: RecordHeader) -> bool {
        is(VALIDATION) || Shipped::has_locked(seen, found)
    }

    fn takes(checksum_is_right: bool) -> bool {
        is(CHECKSUM) || Shipped::takes(checksum_is_right)
    }

    fn may_be_locked(seen: RecordHeader, data: RecordHeader) -> bool {
        (is(LOCK_IGNORED) && seen.is_locked()) || Shipped::may_be_locked(seen, data)
    }

    fn logs_first() -> bool {
        !is(LOCKED_FIRST) && Shipped::logs_first()
    }

    fn installs_first() -> bool {
        !is(WATERMARK_FIRST) && Shipped::installs_first()
    }

    fn copies_logged() -> usize {
        if is(ONE_COPY) { 1 } else { Shipped::copies_logged() }
    }

    fn numbered(version: Version) -> Version {
        let generation = version.count() >> TIMESTAMP_BITS;
        let timestamp = version.count() & ((1 << TIMESTAMP_BITS) - 1);
        // A slot that begins a generation has small timestamps. The mutation leaves such a version in the
        // generation before.
        let before = generation.checked_sub(1).filter(|_| is(WRAPPED) && timestamp < MOST_TO_THE_EDGE);
        let wrapped =
            before.and_then(|before| Version::new(version.slot(), before << TIMESTAMP_BITS | timestamp));
        wrapped.unwrap_or(Shipped::numbered(version))
    }

    fn frees_log_when_finished() -> bool {
        is(FREED_EARLY) || Shipped::frees_log_when_finished()
    }

    fn verdicts_have_heads() -> bool {
        !is(BARE_VERDICT) && Shipped::verdicts_have_heads()
    }

    fn data_first() -> bool {
        !is(HEADER_FIRST) && Shipped::data_first()
    }

    fn start_after_recovery(word: u64) -> Option<u64> {
        match () {
            () if is(SAME_GENERATION) => Some(word),
            () if is(COUNTS_AHEAD_FORGOTTEN) => next_generation(word + MAX_COMMITS_IN_FLIGHT as u64),
            () => Shipped::start_after_recovery(word),
        }
    }
}
