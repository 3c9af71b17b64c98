//! The collector's operations.

use std::time::Duration;

use super::collector::Collector;
use super::{HorizonAt, read_horizon};
use crate::cut::Cut;
use crate::memory::{Memory, MemoryError};
use crate::mover::Mover;
use crate::oracle::{Oracle, read_published};
use crate::rules::Rules;
use crate::table::Table;

/// While nothing is published, the pause between two looks doubles, up to this many times: an idle collector
/// leaves the processor to others.
const IDLE_DOUBLINGS: u32 = 8;
/// The same while a snapshot keeps the horizon behind the last cut: once that snapshot has ended, a writer
/// may be waiting for the room.
const BEHIND_DOUBLINGS: u32 = 2;

/// Publishes horizons of an oracle's cuts until `has_ended`, with `pause` between two looks, or longer while
/// nothing is published. It also moves versions out of rings that are nearly full, in tables that have an
/// overflow region. There is one collector at a time: if it has died, the next one begins after its grants
/// were fenced. Once this has returned without an error, nothing of it is in flight.
///
/// `tables` returns, for a published cut, the tables of that cut or a later one. `None`: the same as the last
/// time. Before a horizon with that cut is published, the mover stops touching tables that the cut does not
/// have. So the memory of a dropped table may be given to another once the horizon has the drop.
///
/// # Errors
/// When far memory does not answer, or `tables` fails.
pub async fn collect<R: Rules, E: From<MemoryError>>(
    memory: &Memory,
    oracle: &Oracle,
    at: &HorizonAt,
    mut tables: impl AsyncFnMut(&Cut) -> Result<Option<Vec<Table>>, E>,
    pause: Duration,
    has_ended: impl Fn() -> bool,
) -> Result<(), E> {
    let (mut last, horizon) = match read_horizon(memory, at).await? {
        Some((last, cut)) => (last, Some(cut)),
        None => (0, None),
    };
    let mut mover = Mover::default();
    let mut collector = Collector::<R>::after(horizon);
    let mut looks_in_vain = 0;
    while !has_ended() {
        looks_in_vain += 1;
        // First the cut is read, then the words of the workers (Z3).
        if let Some(cut) = read_published::<R>(memory, oracle).await? {
            if let Some(tables) = tables(&cut).await? {
                mover.turn_to(memory, &tables, collector.horizon()).await?;
            }
            if collector.add(cut) {
                looks_in_vain = 0;
            }
        }
        if let Some(cut) = collector.next(least(memory, at).await?) {
            looks_in_vain = 0;
            last = 1 - last; // the image before stays whole
            let image = at.layout.images().encode(cut);
            memory.write(&at.piece, at.layout.images().image(last).start as u64, &image).await?;
        }
        // Entries are given up only by a published horizon: the next mover must not start from an earlier one
        // (M4).
        if let (Some(horizon), Some(last)) = (collector.horizon(), collector.last_known())
            && (collector.is_held_back() || mover.has_any())
        {
            mover.step::<R>(memory, R::gives_up_behind(horizon, last)).await?;
        }
        let most = if collector.is_behind() { BEHIND_DOUBLINGS } else { IDLE_DOUBLINGS };
        memory.endpoint().sleep(pause * (1 << most.min(looks_in_vain))).await;
    }
    Ok(())
}

/// The lowest number of a cut that any worker may have.
async fn least(memory: &Memory, at: &HorizonAt) -> Result<Option<u64>, MemoryError> {
    let words = at.layout.words();
    let bytes = memory.read(&at.piece, words.start as u64..words.end as u64).await?;
    Ok(at.layout.least(&bytes))
}
