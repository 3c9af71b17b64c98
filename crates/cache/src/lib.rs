//! A page cache in far memory for the files of a database, behind the database's own buffer pool. The files
//! stay where they are, on a local disk.
//!
//! The processes of the database look pages up in an *index* in shared memory and read them from *slots* in
//! far memory. A write empties the entries of its blocks, and then goes to the disk. One thread of a daemon,
//! the *keeper*, hands out slots, evicts pages, and cleans up after processes that died. No read and no write
//! waits for it.
//!
//! The index is an array of *buckets*. A bucket has some *entries*, each for one page in one slot, and a
//! *header*, which has a version and counts writers. Each block of a file has two buckets, and its entry may
//! lie in either. The first one is its *home bucket*: the header there counts the writers of the block. The
//! header of the other one has nothing to do with it.
//!
//! Rules, for one block of a file:
//!
//! C1. A page is cached only while its entry is *valid*. A reader loads the entry, reads the slot, and loads
//!     the entry again. If the entry has changed, the read is a miss.
//! C2. A writer adds itself to the header of the block's home bucket, empties the block's entries in both
//!     buckets, writes to the disk, and subtracts itself. To *admit* a page, a process loads the same header,
//!     reads the page from the disk, takes an entry in one of the buckets, and loads the header again. The
//!     entry becomes valid only if the header has not changed and counts no other writer. Writer and admitter
//!     each store first, pass a barrier, and then load. So the writer sees the entry, or the admitter sees
//!     the writer. Until its key is stored, an entry is *claimed*: no other process empties it.
//! C3. While an operation changes a whole file (such as truncating it), no page of the file is found.
//!     Afterwards the file has a new *content id*. Pages are found under the file's current content id only.
//!     None is used twice.
//! C4. A process enters its *place* before it uses the index, and leaves it afterwards. The keeper reuses a
//!     slot or a file's number, and changes the door (C5), only after every place that was occupied has been
//!     left. It clears the place of a dead process, and waits for a stopped one.
//! C5. The *door* says which operations use the index: none (closed: writers go straight to the disk), only
//!     invalidation, or all (open). The keeper moves it one state at a time; any process may close it (C8).
//!     Writers do not invalidate while it is closed, so the keeper empties all entries before it opens again.
//! C6. A writer may have died before or after it added itself to a header. The keeper cannot tell, so it
//!     never subtracts. It replaces the header with one of the next version that counts no writers. It does
//!     so only if no living process names a block with this home bucket in its place (`places`), and by a
//!     compare-and-swap, which fails if the header has changed since the keeper loaded it.
//! C7. A slot may hold something other than what was last written there: a node may be faulty, and a write
//!     that was given up may land late, when the slot has another page. So the index has a checksum for each
//!     slot. The process that fills a slot stores the checksum before the entry becomes valid. A page that
//!     does not match is a miss.
//! C8. A process that has to change a file and cannot use the index closes the door first, whatever its
//!     state. The keeper changes the door by compare-and-swap, and treats a door that it finds closed like
//!     one that it has closed.
//! C9. A process may have to change a file without a place: all places are taken, or its own is in use by a
//!     call that a signal handler has interrupted. It counts itself as an *outsider*, then closes the door if
//!     it is not closed, and leaves the count after its change. The keeper loads the door's word, opens the
//!     door only if it counts no outsiders after that, and does so by compare-and-swap.
//!
//! Where slots lie in far memory is the subject of `far`. Rules N1 to N3 (`files`) say which files are
//! known, rules A1 to A3 (`attached`) how a daemon comes and goes, rules R1 and R2 (`resuming`) which pages
//! outlast a restart of the database, rules H1 to H3 (`handover`) which pages another server takes over. Not
//! here: which calls of a program mean which operation.

mod admission;
mod advice;
mod ahead;
mod attached;
mod caller;
mod client;
mod contents;
mod curve;
mod door;
mod far;
mod files;
mod grace;
mod ground;
mod handover;
mod identity;
mod keeper;
mod layout;
mod living;
#[cfg(test)]
mod models;
mod outside;
mod overlap;
mod owner;
mod places;
mod policy;
mod postgres;
mod resuming;
mod rules;
mod session;
mod shared;
mod signatures;
mod slot_set;
mod state;
mod vacating;
mod walk;
mod words;

pub use advice::Advice;
pub use attached::{AttachError, AttachedCache, CacheConfig};
pub use caller::{Caller, Outcome};
pub use client::{CacheClient, daemon_process};
pub use contents::{Contents, FilePages};
/// The running checksum of a page (CRC-64/NVME), see [`Rules`].
pub use crc_fast::Digest as PageDigest;
pub use door::{DoorError, DoorFile, DoorStatus};
pub use far::{FarMemory, FarSlots, FarTable, NodePauses, PAGE_BYTES, SLOTS_PER_EXTENT};
pub use files::{FileId, KnownFile};
pub use ground::{Fetch, Ground, PageSink, collect_into};
pub use handover::{
    HandedPage, HandedPages, HandoverList, Leases, ListError, ListedFile, ListedPage, ServerEnd,
    TakeOverResult, TakeOverState, WatchedFiles, ask_for_handover, close_and_list,
};
pub use keeper::{Census, Keeper};
pub use layout::{Layout, MAX_PLACES, MAX_SLOTS, Shape};
pub use living::{Living, give_up_places, this_process};
pub use outside::{change_outside, close_for_good, keep_closed};
pub use postgres::{Checkpoint, ControlFile, RelationFile, ServerState, is_visibility_map, position_of_page};
pub use resuming::Signature;
pub use rules::{Rules, Shipped};
pub use session::{CacheSession, Replacements, may_be_cached};
pub use shared::{FindIndex, Index, Shared, Slots};
pub use state::{look_at, state};
pub use vacating::Vacating;
pub use walk::entries_below;
pub use words::Door;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Runs an operation over a [`Ground`] that is ready at once, as in production.
///
/// # Panics
/// If it is not.
pub fn at_once<F: Future>(operation: F) -> F::Output {
    match pin!(operation).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("memory is ready at once"),
    }
}
