//! Reading what was published: of one part as it is, of several at one instant.
//!
//! Of one part, a READ gets the last cut whose image it finds whole. If that is number *n*, then *n* was published, whole, before
//! the READ ended; and *n* + 1 was not before it began: else the READ would have found that, or, where that was being replaced already,
//! *n* + 2.
//!
//! Of several parts, all are read, and then all again. If each part has the same number both times, then at the instant between
//! the two, when no READ was under way, each part had published just that. Parts only grow; so of two such cuts that of the later
//! instant sees at least as much, whoever read them (paper 3 leaves this open in section 4.2).

use futures_util::future::try_join_all;

use super::whole::{Oracle, OracleAt};
use crate::cut::Cut;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;

/// Looks at all parts before the caller decides whether to go on: publishers leave time for some ([`Oracle::pace`]).
const LOOKS: u32 = 16;

/// The cut published last. `None`: nothing was published yet, or it was being replaced while it was read.
///
/// # Errors
/// When far memory does not answer.
pub async fn read_published<R: Rules>(memory: &Memory, oracle: &Oracle) -> Result<Option<Cut>, MemoryError> {
    if let [part] = oracle.parts() {
        return read_part::<R>(memory, part).await;
    }
    let mut before = look::<R>(memory, oracle).await?;
    if !R::looks_twice() {
        return Ok(before.map(|parts| oracle.join(&parts)));
    }
    for _ in 0..LOOKS {
        let again = look::<R>(memory, oracle).await?;
        if let (Some(before), Some(again)) = (&before, &again)
            && before.iter().map(Cut::sequence).eq(again.iter().map(Cut::sequence))
        {
            return Ok(Some(oracle.join(again)));
        }
        before = again;
    }
    Ok(None)
}

/// What each part has published last.
async fn look<R: Rules>(memory: &Memory, oracle: &Oracle) -> Result<Option<Vec<Cut>>, MemoryError> {
    let parts = try_join_all(oracle.parts().iter().map(|part| read_part::<R>(memory, part))).await?;
    Ok(parts.into_iter().collect())
}

async fn read_part<R: Rules>(memory: &Memory, part: &OracleAt) -> Result<Option<Cut>, MemoryError> {
    if R::begins_from_words() {
        let words = part.board.words();
        let bytes = memory.read(&part.piece, words.start as u64..words.end as u64).await?;
        let words = part.board.decode_words(&bytes);
        return Ok(words.map(|counts| Cut::new(counts.iter().sum(), counts.into())));
    }
    let images = part.board.images();
    let bytes = memory.read(&part.piece, images.start as u64..images.end as u64).await?;
    Ok(part.board.decode(&bytes))
}
