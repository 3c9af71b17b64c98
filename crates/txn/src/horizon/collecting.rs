//! The collector's operations.

use std::time::Duration;

use super::collector::Collector;
use super::{HorizonAt, read_horizon};
use crate::memory::{Memory, MemoryError};
use crate::oracle::{Oracle, read_published};
use crate::rules::Rules;

/// How often the pause doubles at most while a snapshot keeps the horizon behind the last cut: once that
/// snapshot has ended, a writer may be waiting for the room.
const BEHIND_DOUBLINGS: u32 = 2;

/// The pauses of a collector between two looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CollectPauses {
    /// While cuts are published.
    pub busy: Duration,
    /// While nothing is published, the pause doubles up to this one: an idle collector leaves the processor
    /// to others. A writer that needs room waits this long at most until the collector has noticed that
    /// cuts are published again.
    pub idle: Duration,
}

/// Publishes horizons of an oracle's cuts until `has_ended`, with `pauses` between two looks. There is one
/// collector at a time: if it has died, the next one begins after its grants were fenced. Once this has
/// returned without an error, nothing of it is in flight.
///
/// # Errors
/// When far memory does not answer.
pub async fn collect<R: Rules>(
    memory: &Memory,
    oracle: &Oracle,
    at: &HorizonAt,
    pauses: CollectPauses,
    has_ended: impl Fn() -> bool,
) -> Result<(), MemoryError> {
    let (mut last, horizon) = match read_horizon(memory, at).await? {
        Some((last, cut)) => (last, Some(cut)),
        None => (0, None),
    };
    let mut collector = Collector::<R>::after(horizon);
    let mut looks_in_vain = 0_u32;
    while !has_ended() {
        looks_in_vain = looks_in_vain.saturating_add(1);
        // First the cut is read, then the words of the workers (Z3).
        if let Some(cut) = read_published::<R>(memory, oracle).await?
            && collector.add(cut)
        {
            looks_in_vain = 0;
        }
        if let Some(cut) = collector.next(least(memory, at).await?) {
            looks_in_vain = 0;
            last = 1 - last; // the image before stays whole
            let image = at.layout.images().encode(cut);
            memory.write(&at.piece, at.layout.images().image(last).start as u64, &image).await?;
        }
        memory.endpoint().sleep(pauses.after(looks_in_vain, collector.is_behind())).await;
    }
    Ok(())
}

impl CollectPauses {
    /// Outside simulations.
    pub const SHIPPED: CollectPauses =
        CollectPauses { busy: Duration::from_micros(300), idle: Duration::from_millis(77) };

    /// The pause after so many looks that found nothing new, while a snapshot does or does not keep the
    /// horizon behind.
    fn after(&self, looks_in_vain: u32, is_behind: bool) -> Duration {
        let doubled = |times| self.busy.saturating_mul(2_u32.saturating_pow(times));
        match is_behind {
            true => doubled(looks_in_vain.min(BEHIND_DOUBLINGS)),
            false => doubled(looks_in_vain).min(self.idle.max(self.busy)),
        }
    }
}

/// The lowest number of a cut that any worker may have.
async fn least(memory: &Memory, at: &HorizonAt) -> Result<Option<u64>, MemoryError> {
    let words = at.layout.words();
    let bytes = memory.read(&at.piece, words.start as u64..words.end as u64).await?;
    Ok(at.layout.least(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_the_idle_one_and_less_while_a_snapshot_keeps_the_horizon_behind() {
        let pauses = CollectPauses { busy: Duration::from_micros(3), idle: Duration::from_micros(40) };
        let after = |looks, is_behind| pauses.after(looks, is_behind).as_micros();
        assert_eq!([0, 1, 2, 3, 4, 5, u32::MAX].map(|looks| after(looks, false)), [3, 6, 12, 24, 40, 40, 40]);
        assert_eq!([0, 1, 2, 3, u32::MAX].map(|looks| after(looks, true)), [3, 6, 12, 12, 12]);
        let short = CollectPauses { idle: Duration::ZERO, ..pauses };
        assert_eq!(short.after(9, false), pauses.busy);
    }
}
