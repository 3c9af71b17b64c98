//! The rules on which the cache's promises rest, apart from the code that applies them: a simulation replaces
//! a right one by a wrong one, and must notice. Production is compiled with [`Shipped`] alone.

use crc_fast::{CrcAlgorithm, Digest};

/// When a page is admitted, when it stops being valid, and what is waited for.
pub trait Rules {
    /// Bits of an entry's generation that are counted. A simulation counts few, so that they repeat.
    const GENERATION_MASK: u64 = (1 << 29) - 1;

    /// Most slots that one sweep of a lap (see `keeper/sweep.rs`) looks at, besides those that callers have
    /// taken. Large enough that a lap over 128 GiB takes about a thousand sweeps. A simulation uses fewer, so
    /// that its laps take several sweeps, too.
    const SLOTS_PER_SWEEP: u32 = 1 << 14;

    /// Most pages that one sweep considers for eviction: tens of milliseconds if all of them were visited.
    const CONSIDERED_PER_SWEEP: u32 = 1 << 18;

    /// For how many rounds over the table of files nobody has read a file that loses its entry to another
    /// one. About ten seconds for the table's usual size, longer while the cache is idle. A simulation uses
    /// fewer.
    const UNUSED_ROUNDS: u16 = 250;

    /// With so many empty entries in its home bucket, a page goes there, so that most hits need to look at
    /// one bucket only. With fewer, it goes to the bucket that has more. A simulation demands more, so that
    /// the pages of its small caches go to both.
    const ENOUGH_EMPTY: usize = 3;

    /// Whether a page may be admitted. `before`: the home bucket's header when the page was read or written.
    /// `now`: the header after the entry was taken. `writers`: how many other processes `before` counts
    /// (C2).
    fn may_admit(before: u64, now: u64, writers: u64) -> bool {
        before == now && writers == 0
    }

    /// Begins the checksum of a page.
    fn digest() -> Digest {
        Digest::new(CrcAlgorithm::Crc64Nvme)
    }

    /// The checksum of the bytes that `digest` has seen, with which a page that is read from a slot is
    /// compared (C7).
    fn finish(digest: &Digest) -> u64 {
        digest.finalize()
    }

    /// Whether a writer empties the entries of the block that it writes (C2).
    fn writers_invalidate() -> bool {
        true
    }

    /// Whether a writer empties the block's entries in both of its buckets, not in the home bucket only (C2).
    fn writers_look_in_both_buckets() -> bool {
        true
    }

    /// Whether an entry stays claimed until its key is stored (C2).
    fn claims_entries() -> bool {
        true
    }

    /// Whether a new keeper empties all entries unless it finds the door open (C5).
    fn empties_old_entries() -> bool {
        true
    }

    /// Whether a slot is reused only after every place that was occupied has been left (C4).
    fn slot_reuse_waits() -> bool {
        true
    }

    /// Whether the door changes only after every place that was occupied has been left (C4).
    fn door_waits() -> bool {
        true
    }

    /// Whether a process that cannot use the index closes the door before it changes anything (C8).
    fn closes_door() -> bool {
        true
    }

    /// Whether the keeper leaves the door as it is while it counts outsiders (C9).
    fn heeds_outsiders() -> bool {
        true
    }

    /// Whether the keeper trusts no entry after it has found the door closed (C8).
    fn notices_closed_door() -> bool {
        true
    }

    /// Whether the keeper turns the door only if no caller has closed it meanwhile (C8).
    fn door_compares() -> bool {
        true
    }

    /// Whether a file gets a new id after it was changed as a whole (C3).
    fn changes_ids() -> bool {
        true
    }

    /// Whether the keeper opens and frees files only after every place that was occupied has been left (N2,
    /// N3).
    fn files_wait() -> bool {
        true
    }

    /// Whether a file is opened only if it is known under no other number (N1).
    fn files_are_unique() -> bool {
        true
    }

    /// Whether unlinking a file makes its pages unreachable at once (C3).
    fn retires_files() -> bool {
        true
    }

    /// Whether a file keeps its pages when the database starts. `signed`: its signature when the database
    /// ended, or 0. `found`: that of the file now, if it is still there (R1).
    fn keeps_pages(signed: u64, found: Option<u64>) -> bool {
        signed != 0 && found == Some(signed)
    }

    /// Whether a page of another server's cache is taken over. `lsn`: its position in the log.
    /// `restartpoint`: up to which position the new server has everything on its disk (H2).
    fn takes_over(lsn: u64, restartpoint: u64) -> bool {
        lsn <= restartpoint
    }

    /// Whether pages and files that were written since the new server was looked at stay out (H3).
    fn skips_written_pages() -> bool {
        true
    }

    /// Whether the header of a dead writer's home bucket is replaced, rather than reduced by one (C6).
    fn replaces_dead_headers() -> bool {
        true
    }
}

/// The rules that are shipped.
#[derive(Clone, Copy, Debug)]
pub enum Shipped {}

impl Rules for Shipped {}

/// The checksum of these bytes.
pub(crate) fn checksum<R: Rules>(bytes: &[u8]) -> u64 {
    let mut digest = R::digest();
    digest.update(bytes);
    R::finish(&digest)
}
