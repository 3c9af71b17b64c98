//! Reading the published cut: of an oracle in one part as it is, of several parts at one instant.
//!
//! One part: a READ gets the later cut whose image it finds whole. If that is number *n*, then *n* was
//! published, whole, before the READ ended. If the other image has *n* - 1, whole, then *n* + 1 was not
//! published before the READ began: *n* is the *latest*. Otherwise *n* + 1 may have been published, and *n* +
//! 3 may be being written over it.
//!
//! Several parts: all are read, and then all again. Say that each part has the same number both times, and
//! the second time as the latest. No READ was in flight at the instant between the two looks, and at that
//! instant each part had published just these cuts. Parts only grow. So of two such cuts, the one of the
//! later instant sees at least as much, whichever clients read them (paper 3 leaves this open in section
//! 4.2).

use futures_util::future::try_join_all;

use super::images::Image;
use super::whole::{Oracle, OracleAt};
use crate::cut::Cut;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;

/// Looks at all parts before the caller decides whether to go on. Publishers leave time for some of them
/// ([`Oracle::pace`]).
const LOOKS: u32 = 16;

/// A published cut: the last one or, for an oracle in one part, rarely an earlier one. `None`: nothing was
/// published yet, or cuts were being replaced while they were read.
///
/// # Errors
/// When far memory does not answer.
pub async fn read_published<R: Rules>(memory: &Memory, oracle: &Oracle) -> Result<Option<Cut>, MemoryError> {
    match oracle.parts() {
        [part] => Ok(read_part::<R>(memory, part).await?.map(|found| found.cut)),
        _ => read_latest::<R>(memory, oracle).await,
    }
}

/// A cut that was the last published one at some instant between the call and the return. `None`: as above,
/// or the READs do not tell which cut that is.
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

/// The published cut of each part.
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
