//! A page cache in far memory for the files of a database, behind the database's own buffer pool. The files
//! stay where they are, on a local disk.
//!
//! The processes of the database look pages up in an *index* in shared memory and read them from *slots* in
//! far memory. They write to the disk first, and invalidate. One process, the *keeper*, gives slots, evicts,
//! and cleans up after processes that died. It takes part in no read and no write.
//!
//! Rules, for one block of a file:
//!
//! C1. A page counts as cached only while its entry is *valid*. A reader finds the entry, reads the slot, and
//!     finds the same entry again. Otherwise it reads the disk.
//! C2. A writer announces itself in the header of the block's bucket, empties the block's entries, writes to
//!     the disk, and withdraws. A page is *admitted* (its entry becomes valid) only if the header is the same
//!     before the page was read from the disk and after the entry was taken, and names no writer. Either the
//!     writer sees the entry, or the admitter sees the writer: each stores first, passes a barrier, then
//!     loads.
//! C3. What changes a file as a whole (truncating it) closes the file before the change, and gives it another
//!     id after. Entries have the id that the file had when they were admitted; those with an old id are never
//!     found. An id is used once.
//! C4. A process enters its *place* before it looks at anything here, and leaves it after. A slot or a file's
//!     number is given again, and the door changes, only after every place that was occupied has been left.
//!     The place of a process that died is cleared by the keeper, that of a stopped one is waited for.
//! C5. The *door* says what may be done: nothing (closed: writers write plainly), only invalidating, or
//!     everything (open). It goes from one state to the next one, never from closed to open.
//! C6. What a dead writer did to a header is not known: it may have died before or after it announced itself.
//!     The keeper clears the header only if no living writer has named its bucket, and only if the header is
//!     still the one that it saw before it looked.
//!
//! Not here: memory and slots themselves ([`Ground`]), which calls of a program mean which operation, when
//! files are known and what an unclean end means for them.

mod caller;
mod grace;
mod ground;
mod keeper;
mod layout;
#[cfg(test)]
mod models;
mod places;
pub mod policy;
mod rules;
mod shared;
mod words;

pub use caller::{Caller, FileRef, Outcome};
pub use ground::Ground;
pub use keeper::{Census, Keeper};
pub use layout::{Layout, Shape};
pub use rules::{Rules, Shipped};
pub use shared::{Shared, Slots};
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
