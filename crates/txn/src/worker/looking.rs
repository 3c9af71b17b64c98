//! Waiting for a cut together: of a worker's sessions that wait for the next publication, one looks, and
//! tells the others.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};
use std::time::Duration;

use super::Worker;
use crate::cut::Cut;
use crate::error::BeginError;
use crate::rules::Rules;

/// Looks of one wait without a pause between them: in shared memory, all of them take a few microseconds, and
/// by then what was published has usually changed. To sleep takes the thread longer than that.
const LOOKS_WITHOUT_PAUSE: u32 = 16;
/// Between two later looks.
const PAUSE: Duration = Duration::from_micros(2);

/// The looks of a worker.
#[derive(Default)]
pub(super) struct Looks {
    is_looking: Cell<bool>,
    /// How many have ended.
    ended: Cell<u64>,
    /// The cut that was found by the last look that found one.
    found: RefCell<Option<Cut>>,
    /// The wakers of sessions that wait for the next look to end: at most one for each session.
    waiting: RefCell<Vec<Waker>>,
}

/// A look. It ends when this is dropped, whether it has found something or was given up.
struct Look<'a>(&'a Looks);

impl Drop for Look<'_> {
    fn drop(&mut self) {
        self.0.is_looking.set(false);
        self.0.ended.set(self.0.ended.get() + 1);
        self.0.waiting.take().into_iter().for_each(Waker::wake);
    }
}

impl Looks {
    fn begin(&self) -> Look<'_> {
        self.is_looking.set(true);
        Look(self)
    }

    async fn next_end(&self) {
        let ended = self.ended.get();
        poll_fn(|context| {
            if self.ended.get() != ended {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}

impl<R: Rules> Worker<R> {
    /// The cut that is found by a look that ends after this call; `None`: that look finds none. If another
    /// session is looking, this waits for that look, which began before this call and may be given up. Then
    /// the result is the cut found last; a session begins from it only if it can. `looks`: how often the
    /// session has looked during this wait.
    pub(super) async fn published_next(&self, looks: u32) -> Result<Option<Cut>, BeginError> {
        if self.looks.is_looking.get() {
            self.looks.next_end().await;
            return Ok(self.looks.found.borrow().clone());
        }
        let look = self.looks.begin();
        let endpoint = self.memory.endpoint();
        match looks < LOOKS_WITHOUT_PAUSE {
            true => endpoint.yield_now().await,
            false => endpoint.sleep(PAUSE).await,
        }
        let found = self.published().await?;
        if found.is_some() {
            self.looks.found.replace(found.clone());
        }
        drop(look);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    #[test]
    fn a_waiting_session_goes_on_when_a_look_ends_or_is_given_up() {
        let looks = Looks::default();
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..2 {
            let look = looks.begin();
            let mut waiting = pin!(looks.next_end());
            assert!(waiting.as_mut().poll(&mut context).is_pending() && looks.is_looking.get());
            drop(look);
            assert!(waiting.as_mut().poll(&mut context).is_ready() && !looks.is_looking.get());
        }
    }
}
