//! The version mover: copies what somebody may need out of rings that are nearly full, to the overflow
//! region, and gives up there what nobody needs any more (paper 3, sections 5.1 and 5.3). It works where the
//! collector does, so there is one at a time.
//!
//! M1. A version is copied only if its data are proven to be its own, and only behind the version before it,
//!     or where the horizon sees it, so that nobody needs those before: chains have no gaps (W1).
//! M2. It is in the chain before its header in the ring says that it was moved. From then on its place may be
//!     written again.
//! M3. An entry is given up once the horizon sees a later version of the record: nobody who is there reads it
//!     any more. Until then it stays as it is.
//! M4. What a mover knows can be read from the chains: where it has died, the next begins with that.

mod chains;
mod moving;

pub(crate) use moving::Mover;
