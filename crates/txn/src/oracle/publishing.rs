//! The publisher's operations: it reads the slots' words, and writes images.

use std::pin::pin;
use std::time::Duration;

use farpool_fabric::Endpoint;
use futures_util::future::select;

use super::images::Image;
use super::publisher::Publisher;
use super::whole::{Oracle, OracleAt};
use crate::cut::Cut;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;
use crate::slot::SharedSlot;

/// Between two looks while there are commits: this, and the time of one scan, is the longest delay of
/// publication.
const PAUSE: Duration = Duration::from_nanos(500);
/// Pairs of times. Once nothing has been committed for the first time of a pair, the pause between two looks
/// is the second one: an idle publisher leaves the processor to others. That pause is the longest delay with
/// which the next commit of another process is published. The shortest idle time is longer than a session of
/// one client takes from one commit to the next, and the longest one is longer than the pauses of a program
/// in use.
const RESTS: [(Duration, Duration); 4] = [
    (Duration::from_secs(10), Duration::from_millis(50)),
    (Duration::from_secs(5), Duration::from_millis(20)),
    (Duration::from_millis(100), Duration::from_millis(1)),
    (Duration::from_millis(1), Duration::from_micros(128)),
];

/// Publishes cuts of an oracle in one part, or of one part of an oracle, until `has_ended`. After each cut it
/// pauses for `pace`, which for parts is [`Oracle::pace`](super::Oracle::pace). If nothing has been committed
/// for a while, it looks less often; but it notices commits in `own`, the slot of this process, at once. It
/// goes on after the last published cut. The member that published it has ended, or its grant was fenced. So
/// the later image that is whole is the last one that any client has seen or will see.
///
/// # Errors
/// When far memory does not answer: then it is in doubt which cut is the last one.
pub async fn publish<R: Rules>(
    memory: &Memory,
    oracle: OracleAt,
    pace: Duration,
    own: Option<&SharedSlot>,
    has_ended: impl Fn() -> bool,
) -> Result<(), MemoryError> {
    let images = oracle.board.images();
    let bytes = memory.read(&oracle.piece, images.start as u64..images.end as u64).await?;
    let mut publisher = match oracle.board.find(&bytes) {
        Some(Image { cut, is_latest: true, .. }) => Publisher::<R>::after(cut),
        Some(Image { cut, .. }) => {
            // Until both images are whole, readers cannot tell which cut is the latest.
            let mut publisher = Publisher::after(cut);
            for cut in publisher.after_torn(&read_words(memory, &oracle).await?) {
                write_image(memory, &oracle, &cut).await?;
            }
            publisher
        }
        None => {
            let first = Cut::first(oracle.board.slots());
            write_image(memory, &oracle, &first).await?;
            Publisher::after(first)
        }
    };
    let endpoint = memory.endpoint();
    let mut last_ns = endpoint.now_ns();
    while !has_ended() {
        let words = read_words(memory, &oracle).await?;
        match publisher.next(&words) {
            Some(cut) => {
                write_image(memory, &oracle, cut).await?;
                last_ns = endpoint.now_ns();
                endpoint.sleep(pace).await;
            }
            None => {
                let idle = Duration::from_nanos(endpoint.now_ns() - last_ns);
                match RESTS.iter().find(|(after, _)| idle > *after) {
                    Some(&(_, long)) => rest(endpoint, long, own).await,
                    None => endpoint.sleep(PAUSE).await,
                }
            }
        }
    }
    Ok(())
}

/// Waits for this time, or until something is committed in this slot.
async fn rest(endpoint: &Endpoint, long: Duration, slot: Option<&SharedSlot>) {
    match slot {
        Some(slot) => {
            select(pin!(endpoint.sleep(long)), pin!(slot.wait_for_watermark())).await;
        }
        None => endpoint.sleep(long).await,
    }
}

/// The watermarks of the slots.
async fn read_words(memory: &Memory, oracle: &OracleAt) -> Result<Vec<u64>, MemoryError> {
    let words = oracle.board.words();
    let bytes = memory.read(&oracle.piece, words.start as u64..words.end as u64).await?;
    Ok(oracle.board.decode_words(&bytes).expect("as many bytes as were asked for"))
}

/// What the words of all slots say, as a cut without a number: it sees all commits that have ended.
pub(crate) async fn read_ended(memory: &Memory, oracle: &Oracle) -> Result<Cut, MemoryError> {
    let mut parts = Vec::with_capacity(oracle.parts().len());
    for part in oracle.parts() {
        parts.push(Cut::new(0, read_words(memory, part).await?.into()));
    }
    Ok(oracle.join(&parts))
}

async fn write_image(memory: &Memory, oracle: &OracleAt, cut: &Cut) -> Result<(), MemoryError> {
    let image = oracle.board.encode(cut);
    memory.write(&oracle.piece, oracle.board.image(cut.sequence()).start as u64, &image).await
}
