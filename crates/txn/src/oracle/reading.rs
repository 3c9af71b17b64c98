//! Reading what was published: of one part as it is, of several at one instant.
//!
//! Of one part, a READ gets the last cut whose image it finds whole. If that is number *n*, then *n* was
//! published, whole, before the READ ended. Where the other image has *n* - 1, whole, *n* + 1 was not
//! published before the READ began: it is the *latest*. Else it may have been, if *n* + 3 is being written
//! over it.
//!
//! Of several parts, all are read, and then all again. If each part has the same number both times, the
//! second time as the latest, then at the instant between the two, when no READ was under way, each part had
//! published just that. Parts only grow; so of two such cuts that of the later instant sees at least as much,
//! whoever read them (paper 3 leaves this open in section 4.2).

use futures_util::future::try_join_all;

use super::images::Image;
use super::whole::{Oracle, OracleAt};
use crate::cut::Cut;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;

/// Looks at all parts before the caller decides whether to go on: publishers leave time for some
/// ([`Oracle::pace`]).
const LOOKS: u32 = 16;

/// A cut that was published: the last, or in rare cases an earlier one, but for oracles of several parts.
/// `None`: nothing was published yet, or it was being replaced while it was read.
///
/// # Errors
/// When far memory does not answer.
pub async fn read_published<R: Rules>(memory: &Memory, oracle: &Oracle) -> Result<Option<Cut>, MemoryError> {
    match oracle.parts() {
        [part] => Ok(read_part::<R>(memory, part).await?.map(|found| found.cut)),
        _ => read_latest::<R>(memory, oracle).await,
    }
}

/// The cut published last, before this returns and not before it began. `None`: as above, or that cannot be
/// told.
///
/// # Errors
/// When far memory does not answer.
pub async fn read_latest<R: Rules>(memory: &Memory, oracle: &Oracle) -> Result<Option<Cut>, MemoryError> {
    if let [part] = oracle.parts() {
        let found = read_part::<R>(memory, part).await?;
        return Ok(found.filter(|found| found.is_latest).map(|found| found.cut));
    }
    let mut before = look::<R>(memory, oracle).await?;
    if !R::looks_twice() {
        return Ok(before.map(|parts| join(oracle, parts)));
    }
    for _ in 0..LOOKS {
        let again = look::<R>(memory, oracle).await?;
        if let (Some(before), Some(again)) = (&before, &again)
            && again.iter().all(|part| part.is_latest)
            && numbers(before).eq(numbers(again))
        {
            return Ok(Some(join(oracle, again.clone())));
        }
        before = again;
    }
    Ok(None)
}

fn numbers(parts: &[Image]) -> impl Iterator<Item = u64> {
    parts.iter().map(|part| part.cut.sequence())
}

fn join(oracle: &Oracle, parts: Vec<Image>) -> Cut {
    oracle.join(&parts.into_iter().map(|part| part.cut).collect::<Vec<_>>())
}

/// What each part has published.
async fn look<R: Rules>(memory: &Memory, oracle: &Oracle) -> Result<Option<Vec<Image>>, MemoryError> {
    let parts = try_join_all(oracle.parts().iter().map(|part| read_part::<R>(memory, part))).await?;
    Ok(parts.into_iter().collect())
}

async fn read_part<R: Rules>(memory: &Memory, part: &OracleAt) -> Result<Option<Image>, MemoryError> {
    if R::begins_from_words() {
        let words = part.board.words();
        let bytes = memory.read(&part.piece, words.start as u64..words.end as u64).await?;
        let words = part.board.decode_words(&bytes);
        let cut = words.map(|counts| Cut::new(counts.iter().sum(), counts.into()));
        return Ok(cut.map(|cut| Image { which: 0, cut, is_latest: true }));
    }
    let images = part.board.images();
    let bytes = memory.read(&part.piece, images.start as u64..images.end as u64).await?;
    Ok(part.board.find(&bytes))
}
