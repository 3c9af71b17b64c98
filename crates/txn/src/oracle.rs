//! The timestamp oracle: the watermark of each slot, and cuts of all watermarks, published one after another.
//!
//! O1. Only the slot's client writes the slot's word, and it only grows.
//! O2. Only the publisher makes cuts. It reads each word once for a cut, and takes no lower count for any
//!     slot than in the cut before. So a cut with a higher number sees at least as much, and all cuts are
//!     totally ordered.
//! O3. A transaction begins from a published cut that it has read whole: the cut's image has a checksum.
//!
//! O4. A cut of several parts is what all parts had published at one instant: two looks at all of them have
//!     found the same. So these cuts are totally ordered, too, as instants are.
//!
//! Why a cut is a consistent snapshot: if a cut sees a transaction *T*, it sees everything that *T* saw. Say
//! that *T* began from cut *C*. *C* was published before *T* began, and *T*'s slot reached *T* after that.
//! The publisher read the slot's word for its own cut later still. So that cut is later than *C*, and sees at
//! least as much (O2). A vector that is read without a publisher has no such order: a READ is not atomic, and
//! two READs may cross (`docs/src/txn.md`).

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
pub(crate) use publishing::read_ended;
pub use reading::{read_latest, read_published};
pub use whole::{LOOK, Oracle, OracleAt};
