//! Rings when the process that maintains the leases begins to move an extent, so that mishaps can happen
//! while it does.

use std::cell::{Cell, RefCell};
use std::task::{Poll, Waker};

/// Wakes all tasks that wait for the next move of an extent.
#[derive(Default)]
pub(super) struct Bell {
    rings: Cell<u64>,
    waiting: RefCell<Vec<Waker>>,
}

impl Bell {
    pub(super) fn ring(&self) {
        self.rings.set(self.rings.get() + 1);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    pub(super) async fn next(&self) {
        let before = self.rings.get();
        std::future::poll_fn(|context| {
            if self.rings.get() > before {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
