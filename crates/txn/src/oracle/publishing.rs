//! The publisher at work: reads the slots' words, writes images.

use std::time::Duration;

use super::publisher::Publisher;
use super::whole::OracleAt;
use crate::cut::Cut;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;

/// Between two looks where nothing was committed: publication is late by so much at most, and a scan.
const PAUSE: Duration = Duration::from_micros(2);

/// Publishes cuts of an oracle that is whole, or of a part, where nobody has published before, until `is_over`; with `pace` after
/// each cut, which for parts is [`Oracle::pace`](super::Oracle::pace).
///
/// # Errors
/// When far memory does not answer: nobody knows then which cut is the last.
pub async fn publish<R: Rules>(
    memory: &Memory,
    oracle: OracleAt,
    pace: Duration,
    is_over: impl Fn() -> bool,
) -> Result<(), MemoryError> {
    let mut publisher = Publisher::<R>::after(Cut::first(oracle.board.slots()));
    show(memory, &oracle, publisher.last()).await?;
    while !is_over() {
        let words = oracle.board.words();
        let bytes = memory.read(&oracle.piece, words.start as u64..words.end as u64).await?;
        let words = oracle.board.decode_words(&bytes).expect("as many bytes as were asked for");
        match publisher.next(&words) {
            Some(cut) => {
                show(memory, &oracle, cut).await?;
                memory.endpoint().sleep(pace).await;
            }
            None => memory.endpoint().sleep(PAUSE).await,
        }
    }
    Ok(())
}

async fn show(memory: &Memory, oracle: &OracleAt, cut: &Cut) -> Result<(), MemoryError> {
    let image = oracle.board.encode(cut);
    memory.write(&oracle.piece, oracle.board.image(cut.sequence()).start as u64, &image).await
}
