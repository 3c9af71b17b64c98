//! The ordered index over one-sided operations: which records have which keys, in the order of the keys
//! (`docs/src/txn.md`, *keys in order*). The paper's (section 5.2) asks memory servers; this one does not.
//!
//! T1. Ranks, keys with records' numbers, are divided among *leaves*. A leaf is for the ranks between its
//!     fences, which never change.
//! T2. An entry of a leaf is empty first, then reserved by one client, then live. Only the client that has
//!     reserved it writes its key there, and makes it live afterwards. So a live entry has its whole key.
//! T3. A full leaf is *frozen*, entry by entry: an entry that is not live never becomes so, and a live one
//!     stays. A frozen leaf does not change any more. It is replaced by copying its live entries to new
//!     leaves that no other client knows of, and naming these by one compare-and-swap. Any client may do each
//!     of these steps, so no client waits for another, and one that dies leaves nothing to be finished.
//! T4. An entry is removed only where it was seen, by a compare-and-swap from the word that its remover has
//!     seen before it decided that no snapshot needs the entry. A client that relies on an existing entry
//!     changes its word. The place is empty again only when all operations have ended that had begun when the
//!     entry was removed, and its word counts on: no word comes twice, until the count wraps.
//! T5. A leaf names the leaf that began at its high fence when it was made. What a client remembers says
//!     where to look first. The fences of what it reads there say whether that is right. Leaves that were
//!     replaced are never used for anything else: they lead to those that have replaced them.
//! T6. A client that has not read an index begins with *hints*: each leaf that was divided from another one
//!     is entered, by its low fence, in another index of this kind, a *level* above. A hint is never wrong,
//!     and none is needed.
//!
//! Not here: versions of records, transactions, which entries are removed, leasing memory.

mod entry;
mod index;
mod known;
mod layout;
mod leaf;
mod level;
mod rules;
mod spares;

pub use entry::{EntryKind, EntryWord};
pub use index::Tree;
pub use layout::TreeLayout;
pub use leaf::{LeafLayout, Rank};
pub use level::{Looked, Purpose, RemovedEntry, Run, SeenEntry, TreeError};
pub use rules::TreeRules;
pub use spares::TreeSpares;
