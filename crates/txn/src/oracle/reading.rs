//! Reading what was published.

use crate::cut::Cut;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;
use crate::worker::OracleAt;

/// The cut published last. `None`: nothing was published yet, or it was being replaced while it was read.
///
/// # Errors
/// When far memory does not answer.
pub async fn read_published<R: Rules>(
    memory: &Memory,
    oracle: &OracleAt,
) -> Result<Option<Cut>, MemoryError> {
    if R::begins_from_words() {
        let words = oracle.board.words();
        let bytes = memory.read(&oracle.piece, words.start as u64..words.end as u64).await?;
        let words = oracle.board.decode_words(&bytes);
        return Ok(words.map(|counts| Cut::new(counts.iter().sum(), counts.into())));
    }
    let images = oracle.board.images();
    let bytes = memory.read(&oracle.piece, images.start as u64..images.end as u64).await?;
    Ok(oracle.board.decode(&bytes))
}
