//! The publisher at work: reads the slots' words, writes images.

use std::time::Duration;

use super::images::Image;
use super::publisher::Publisher;
use super::whole::OracleAt;
use crate::cut::Cut;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;

/// Between two looks while commits come: publication is late by so much at most, and a scan.
const PAUSE: Duration = Duration::from_micros(2);
/// Between two looks where nothing has been committed for [`IDLE_AFTER`]: the first commit after a while
/// waits so long at most, and an idle publisher leaves the processor to others.
const IDLE_PAUSE: Duration = Duration::from_micros(128);
/// Longer than a session of one client takes from one commit to the next.
const IDLE_AFTER: Duration = Duration::from_millis(1);

/// Publishes cuts of an oracle that is whole, or of a part, until `is_over`; with `pace` after each cut,
/// which for parts is [`Oracle::pace`](super::Oracle::pace). Goes on behind what was published last. Who
/// published that has ended, or his grant was fenced: then the later image that is whole is the last that
/// anybody has seen or will see.
///
/// # Errors
/// When far memory does not answer: nobody knows then which cut is the last.
pub async fn publish<R: Rules>(
    memory: &Memory,
    oracle: OracleAt,
    pace: Duration,
    is_over: impl Fn() -> bool,
) -> Result<(), MemoryError> {
    let images = oracle.board.images();
    let bytes = memory.read(&oracle.piece, images.start as u64..images.end as u64).await?;
    let mut publisher = match oracle.board.find(&bytes) {
        Some(Image { cut, is_latest: true, .. }) => Publisher::<R>::after(cut),
        Some(Image { cut, .. }) => {
            // Until both images are whole, readers cannot tell which cut is the latest.
            let mut publisher = Publisher::after(cut);
            for cut in publisher.after_torn(&read_words(memory, &oracle).await?) {
                show(memory, &oracle, &cut).await?;
            }
            publisher
        }
        None => {
            let first = Cut::first(oracle.board.slots());
            show(memory, &oracle, &first).await?;
            Publisher::after(first)
        }
    };
    let endpoint = memory.endpoint();
    let mut last_ns = endpoint.now_ns();
    while !is_over() {
        let words = read_words(memory, &oracle).await?;
        match publisher.next(&words) {
            Some(cut) => {
                show(memory, &oracle, cut).await?;
                last_ns = endpoint.now_ns();
                endpoint.sleep(pace).await;
            }
            None => {
                let is_idle = endpoint.now_ns() - last_ns > IDLE_AFTER.as_nanos() as u64;
                endpoint.sleep(if is_idle { IDLE_PAUSE } else { PAUSE }).await;
            }
        }
    }
    Ok(())
}

/// How far the slots have come.
async fn read_words(memory: &Memory, oracle: &OracleAt) -> Result<Vec<u64>, MemoryError> {
    let words = oracle.board.words();
    let bytes = memory.read(&oracle.piece, words.start as u64..words.end as u64).await?;
    Ok(oracle.board.decode_words(&bytes).expect("as many bytes as were asked for"))
}

async fn show(memory: &Memory, oracle: &OracleAt, cut: &Cut) -> Result<(), MemoryError> {
    let image = oracle.board.encode(cut);
    memory.write(&oracle.piece, oracle.board.image(cut.sequence()).start as u64, &image).await
}
