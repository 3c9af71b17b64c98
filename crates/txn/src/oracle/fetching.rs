//! The fetch thread of a compute server (paper 3, section 4.2). It reads published cuts, and the server's
//! workers begin from the last one that it has read, without an operation of their own.
//!
//! F1. Workers get published cuts, whole, in the order of their numbers. So cuts stay totally ordered among
//!     compute servers, however far their fetch threads are apart.
//! F2. Once the fetch thread has ended, for whatever reason, no worker begins a transaction any more.
//!     Otherwise its cuts would grow old unnoticed: they would be snapshots, but not recent ones.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix_futex_sync::Mutex;

use super::reading::read_published;
use super::whole::Oracle;
use crate::cut::Cut;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;

/// Not a cut's number: nothing was fetched yet.
const NOTHING: u64 = u64::MAX - 1;
/// Not a cut's number: nothing is fetched any more.
const ENDED: u64 = u64::MAX;

/// The cut that a fetch thread has read last.
///
/// It is a number and a lock, rather than a pointer that is swapped. Workers look only at the number until
/// there is a new cut. Then each worker makes its own copy, with a reference count that no other thread
/// touches.
#[derive(Debug)]
pub struct Fetched {
    /// The number of a cut: the one under the lock is this or a later one.
    number: AtomicU64,
    last: Mutex<Cut>,
}

impl Default for Fetched {
    fn default() -> Self {
        Fetched { number: AtomicU64::new(NOTHING), last: Mutex::new(Cut::first(0)) }
    }
}

impl Fetched {
    /// No cut yet.
    pub fn new() -> Fetched {
        Fetched::default()
    }

    /// Keeps a cut, unless it has a later one.
    fn keep(&self, cut: Cut) {
        let number = cut.sequence();
        let mut last = self.last.lock();
        // Relaxed: it is changed only under the lock.
        let before = self.number.load(Ordering::Relaxed);
        if before == NOTHING || before < number {
            *last = cut;
            self.number.store(number, Ordering::Relaxed); // relaxed: readers get the cut under the lock
        }
    }

    fn end(&self) {
        let _last = self.last.lock();
        self.number.store(ENDED, Ordering::Relaxed); // carries no data
    }
}

/// A worker's copy of the cut that its compute server has fetched.
#[derive(Debug)]
pub(crate) struct Copied {
    own: RefCell<Option<Cut>>,
}

/// The cut to begin from, if there is one.
pub(crate) enum Latest {
    /// The last one that was fetched.
    Cut(Cut),
    /// No cut was fetched yet.
    Nothing,
    /// The fetch thread has ended.
    Ended,
}

impl Copied {
    pub(crate) fn new() -> Copied {
        Copied { own: RefCell::new(None) }
    }

    /// The last cut that was fetched.
    pub(crate) fn latest(&self, fetched: &Fetched) -> Latest {
        // Relaxed: if the number is new, the cut is read under the lock.
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

/// Marks the fetched cut as ended when the thread ends, by a panic as well (F2).
struct Fetching<'a>(&'a Fetched);

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Fetches published cuts until `has_ended`, with `pause` between two looks. The cuts from which workers
/// begin are older by up to that pause and a READ.
///
/// # Errors
/// When far memory does not answer.
pub async fn fetch<R: Rules>(
    memory: &Memory,
    oracle: &Oracle,
    fetched: &Fetched,
    pause: Duration,
    has_ended: impl Fn() -> bool,
) -> Result<(), MemoryError> {
    let fetching = Fetching(fetched);
    while !has_ended() {
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
    fn no_worker_begins_once_the_fetch_thread_has_ended() {
        let (fetched, copied) = (Fetched::new(), Copied::new());
        fetched.keep(Cut::new(1, [1].into()));
        drop(Fetching(&fetched));
        assert!(matches!(copied.latest(&fetched), Latest::Ended));
        fetched.keep(Cut::new(2, [1].into()));
        assert!(matches!(copied.latest(&fetched), Latest::Ended), "it does not come back");
    }
}
