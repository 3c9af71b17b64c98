//! The thread that ends leases on time and makes fenced regions free again.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_fabric::Scrubbed;
use farpool_lease::Lending;

use crate::core::Core;

/// Longest sleep of the keeper, and how often it checks whether memory is still in use.
const TICK: Duration = Duration::from_millis(200);

/// Pause after the keeper failed to get the spare memory to which fences move regions. An attempt takes as
/// long as touching all pages of a region, and meanwhile this thread ends no lease.
const RESTORE_PAUSE: Duration = Duration::from_secs(5);

/// The keeper's thread; ends when dropped.
pub(crate) struct Keeper {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the keeper of a core. A message on `fenced` says that there is a region to make free.
    pub(crate) fn start(core: Arc<Core>, fenced: Receiver<()>) -> std::io::Result<Self> {
        let (stop, stopped) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("node-keeper".into())
            .spawn(move || keep(&core, &fenced, &stopped))?;
        Ok(Keeper { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the keeper panicked");
        }
    }
}

fn keep(core: &Core, fenced: &Receiver<()>, stopped: &Receiver<()>) {
    let mut more = false;
    let mut restore_at = Instant::now();
    loop {
        let due = core.leases.lock().next_deadline();
        let until_due = due.map_or(TICK, |due| Duration::from_millis(due.since(core.now()).0));
        let sleep = if more { Duration::ZERO } else { until_due.min(TICK) };
        if fenced.recv_timeout(sleep) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
        if !matches!(stopped.try_recv(), Err(TryRecvError::Empty)) {
            return;
        }
        let Ok(ended) = core.end(|leases| Ok::<_, Infallible>(leases.expire(core.now())));
        for lease in ended {
            tracing::info!(
                region = lease.region,
                epoch = %lease.epoch,
                "lease ended: not renewed, or taken back"
            );
        }
        // One region at a time, so that leases end on time meanwhile.
        let next = core.leases.lock().begin_scrub(|region| core.regions.is_held(region));
        more = next.is_some_and(|lease| make_free(core, lease));
        if Instant::now() >= restore_at
            && let Err(error) = core.regions.restore_spare()
        {
            tracing::error!(
                %error,
                "no spare memory for the next fence of a shared region; trying again in {RESTORE_PAUSE:?}"
            );
            restore_at = Instant::now() + RESTORE_PAUSE;
        }
    }
}

/// Scrubs a fenced region. `false`: it has to be tried again later.
fn make_free(core: &Core, lease: Lending) -> bool {
    match core.regions.scrub(lease.region) {
        Ok(Scrubbed::Clean) => {
            core.make_free(lease);
            return true;
        }
        Ok(Scrubbed::StillHeld) => {}
        Err(error) => {
            tracing::error!(region = lease.region, %error, "no memory to replace a region's; will try again");
        }
    }
    core.leases.lock().not_scrubbed(lease);
    false
}
