//! The reaper: a thread that recovers the locks of dead direct clients (H4). A recovery reads the block words
//! of all files. Live clients wait for the server, so the server must not do that.
//!
//! The reaper recovers clients one after the other, in the order in which they were found dead. A client's
//! number is assigned again only once its locks have been taken over.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use farpool_file::guest::GuestId;
use farpool_wire::BlockWord;

/// There are no more direct clients than numbers, and a client that waits here keeps its number, so the queue
/// is never full.
const MAX_WAITING: usize = BlockWord::MAX_GUEST as usize;

/// The running thread. Dropping it waits for the recovery in progress and ends the thread. Clients that still
/// wait are dropped, since the files end as well.
pub(super) struct Reaper {
    queue: Option<SyncSender<GuestId>>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    pub(super) fn start(mut recover: impl FnMut(GuestId) + Send + 'static) -> io::Result<Self> {
        let (queue, dead) = sync_channel(MAX_WAITING);
        let stopped = Arc::new(AtomicBool::new(false));
        let is_stopped = stopped.clone();
        let run = move || {
            for guest in dead {
                // Relaxed: the flag guards nothing.
                if is_stopped.load(Ordering::Relaxed) {
                    return;
                }
                recover(guest);
            }
        };
        let thread = std::thread::Builder::new().name("guests-dead".into()).spawn(run)?;
        Ok(Reaper { queue: Some(queue), stopped, thread: Some(thread) })
    }

    /// Queues a direct client that is known to be dead.
    pub(super) fn takes(&self, guest: GuestId) {
        let taken = self.queue.as_ref().is_some_and(|queue| queue.try_send(guest).is_ok());
        if !taken {
            tracing::error!(guest = guest.number(), "the locks of a dead process are not recovered");
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed); // the end of the channel wakes the thread
        drop(self.queue.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that recovers the locks of dead processes panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn queueing_does_not_wait_for_a_recovery_and_guests_are_recovered_in_order() {
        let (recovered, was_recovered) = channel();
        let (go_on, may_go_on) = channel::<()>();
        let recover = move |guest: GuestId| {
            may_go_on.recv_timeout(SOON).unwrap();
            recovered.send(guest.number()).unwrap();
        };
        let reaper = Reaper::start(recover).unwrap();
        for number in 1..=BlockWord::MAX_GUEST {
            reaper.takes(GuestId::from_number(number).unwrap());
        }
        // All were queued before one was recovered.
        assert!(was_recovered.try_recv().is_err());
        for number in 1..=BlockWord::MAX_GUEST {
            go_on.send(()).unwrap();
            assert_eq!(was_recovered.recv_timeout(SOON), Ok(number));
        }
    }

    #[test]
    fn stopping_does_not_wait_for_guests_that_are_still_queued() {
        let (begun, has_begun) = channel();
        let (go_on, may_go_on) = channel::<()>();
        let recover = move |guest: GuestId| {
            begun.send(guest.number()).unwrap();
            may_go_on.recv_timeout(SOON).unwrap();
        };
        let reaper = Reaper::start(recover).unwrap();
        reaper.takes(GuestId::from_number(1).unwrap());
        reaper.takes(GuestId::from_number(2).unwrap());
        assert_eq!(has_begun.recv_timeout(SOON), Ok(1));
        reaper.stopped.store(true, Ordering::Relaxed);
        go_on.send(()).unwrap();
        drop(reaper);
        assert!(has_begun.recv_timeout(SOON).is_err(), "the second was not begun");
    }
}
