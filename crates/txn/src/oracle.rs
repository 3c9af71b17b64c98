//! The timestamp oracle: how far each slot has come, and cuts of that, published one after another.
//!
//! O1. A slot's word is written by its client alone, and only grows.
//! O2. Only the publisher makes cuts. It reads each word once for a cut, and takes no less of any slot than
//!     in the cut before; so a cut with a higher number sees at least as much, and all cuts are totally
//!     ordered.
//! O3. A transaction begins from a published cut, whole or not at all: its image carries a checksum.
//!
//! O4. A cut of several parts is what all of them had published at one instant: two looks at all of them have
//!     found the same. So these cuts are totally ordered again, as instants are.
//!
//! Why a snapshot is one: if a cut sees a transaction *T*, it sees everything that *T* saw. *T*'s slot
//! reached *T* after *T* had begun, hence after the publication of the cut *C* from which it began; the
//! publisher read that word for its own cut, which is therefore later than *C* and sees at least as much as
//! *C* (O2). A vector that is read without a publisher has no such order: a READ is not atomic, and two of
//! them may cross (`docs/src/txn.md`).

mod board;
mod fetching;
mod images;
mod naive;
mod publisher;
mod publishing;
mod reading;
mod whole;

pub use board::Board;
pub(crate) use fetching::{Copied, Latest};
pub use fetching::{Fetched, fetch};
pub(crate) use images::{Images, words};
pub use naive::{NaiveAt, NaiveStamped};
pub use publisher::Publisher;
pub use publishing::publish;
pub use reading::{read_latest, read_published};
pub use whole::{LOOK, Oracle, OracleAt};
