//! The version mover: copies versions that a snapshot may need from rings that are nearly full to the
//! overflow region, and gives up versions there that no snapshot needs any more (paper 3, sections 5.1 and
//! 5.3). It works in the collector, so there is one at a time.
//!
//! M1. A version is copied only if its data are proven to be its own, and only after the version before it,
//!     or if the horizon sees it, so that no snapshot needs those before: chains have no gaps (W1).
//! M2. A version is in the chain before its header in the ring says that it was moved. From then on its place
//!     in the ring may be written again.
//! M3. An entry is given up once the horizon sees a later version of the record: no present snapshot reads
//!     the entry any more. Until then it stays as it is.
//! M4. What a mover knows can be read from the chains: when it has died, the next one begins with that.

mod chains;
mod moving;

pub(crate) use moving::Mover;
