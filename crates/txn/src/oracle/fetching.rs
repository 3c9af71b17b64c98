//! The fetch thread of a compute server (paper 3, section 4.2): one thread reads what is published, and the
//! server's workers begin from the last that it has, without an operation of their own.
//!
//! F1. What workers get are published cuts, whole, in the order of their numbers. So cuts stay totally
//!     ordered between compute servers, however far their fetch threads are apart.
//! F2. Once the fetch thread has ended, for whatever reason, nobody begins any more: a cut that grows old
//!     unnoticed would be a snapshot, but not a recent one.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::reading::read_published;
use super::whole::Oracle;
use crate::cut::Cut;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;

/// Number of no cut: nothing was fetched yet.
const NOTHING: u64 = u64::MAX - 1;
/// Number of no cut: nothing is fetched any more.
const ENDED: u64 = u64::MAX;

/// What a fetch thread has read last.
///
/// A lock beside its number, rather than a pointer that is swapped: workers look at the number alone until
/// there is something new, and each then keeps a copy of its own, whose count of users no other thread
/// touches.
#[derive(Debug)]
pub struct Fetched {
    /// Of the cut under the lock, which is at least as late.
    number: AtomicU64,
    last: Mutex<Cut>,
}

impl Default for Fetched {
    fn default() -> Self {
        Fetched { number: AtomicU64::new(NOTHING), last: Mutex::new(Cut::first(0)) }
    }
}

impl Fetched {
    /// Nothing yet.
    pub fn new() -> Fetched {
        Fetched::default()
    }

    /// Keeps a cut, unless a later one is there.
    fn keep(&self, cut: Cut) {
        let number = cut.sequence();
        let mut last = self.last.lock();
        // Relaxed: changed under the lock alone.
        let before = self.number.load(Ordering::Relaxed);
        if before == NOTHING || before < number {
            *last = cut;
            self.number.store(number, Ordering::Relaxed); // the lock orders the cut for who takes it for that
        }
    }

    fn end(&self) {
        let _last = self.last.lock();
        self.number.store(ENDED, Ordering::Relaxed); // carries no data
    }
}

/// A worker's view of what its compute server has fetched.
#[derive(Debug)]
pub(crate) struct Copied {
    own: RefCell<Option<Cut>>,
}

/// What there is to begin from.
pub(crate) enum Latest {
    /// The last that was fetched.
    Cut(Cut),
    /// Nothing yet.
    Nothing,
    /// Nothing any more.
    Ended,
}

impl Copied {
    pub(crate) fn new() -> Copied {
        Copied { own: RefCell::new(None) }
    }

    /// The last cut that was fetched.
    pub(crate) fn latest(&self, fetched: &Fetched) -> Latest {
        // Relaxed: whatever is found newer is taken under the lock.
        let number = fetched.number.load(Ordering::Relaxed);
        match number {
            NOTHING => return Latest::Nothing,
            ENDED => return Latest::Ended,
            _ => {}
        }
        let mut own = self.own.borrow_mut();
        match &*own {
            Some(cut) if cut.sequence() == number => Latest::Cut(cut.clone()),
            _ => {
                let cut = fetched.last.lock().copied();
                *own = Some(cut.clone());
                Latest::Cut(cut)
            }
        }
    }
}

/// Ends what was fetched when the thread does, by a panic as well (F2).
struct Fetching<'a>(&'a Fetched);

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Fetches what is published, until `is_over`, with `pause` from one look to the next: so much older, and a
/// READ, is what workers begin from.
///
/// # Errors
/// When far memory does not answer.
pub async fn fetch<R: Rules>(
    memory: &Memory,
    oracle: &Oracle,
    fetched: &Fetched,
    pause: Duration,
    is_over: impl Fn() -> bool,
) -> Result<(), MemoryError> {
    let fetching = Fetching(fetched);
    while !is_over() {
        if let Some(cut) = read_published::<R>(memory, oracle).await? {
            fetching.0.keep(cut);
        }
        memory.endpoint().sleep(pause).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn assert_latest(copied: &Copied, fetched: &Fetched, wanted: &Cut) {
        let Latest::Cut(cut) = copied.latest(fetched) else { panic!("there is one") };
        assert_eq!(&cut, wanted);
    }

    #[test]
    fn workers_get_the_last_cut_that_was_fetched_and_never_an_earlier_one() {
        let (fetched, one, other) = (Fetched::new(), Copied::new(), Copied::new());
        assert!(matches!(one.latest(&fetched), Latest::Nothing));
        let cuts: Vec<Cut> = (0..4).map(|number| Cut::new(number, [number * 2].into())).collect();
        fetched.keep(cuts[0].clone());
        assert_latest(&one, &fetched, &cuts[0]);
        fetched.keep(cuts[2].clone());
        fetched.keep(cuts[1].clone());
        assert_latest(&one, &fetched, &cuts[2]);
        assert_latest(&other, &fetched, &cuts[2]);
        assert_latest(&other, &fetched, &cuts[2]);
    }

    #[test]
    fn nobody_begins_once_the_fetch_thread_has_ended() {
        let (fetched, copied) = (Fetched::new(), Copied::new());
        fetched.keep(Cut::new(1, [1].into()));
        drop(Fetching(&fetched));
        assert!(matches!(copied.latest(&fetched), Latest::Ended));
        fetched.keep(Cut::new(2, [1].into()));
        assert!(matches!(copied.latest(&fetched), Latest::Ended), "it does not come back");
    }
}
