//! Crowds: many sessions of one worker that commit at the same time, more than their slot may have commits in
//! flight. Those that find no room in the slot end without a commit.

use std::rc::Rc;

use farpool_txn::{MAX_COMMITS_IN_FLIGHT, SessionState, Worker};
use farpool_wire::Epoch;
use futures_util::future::join_all;

use super::Run;
use super::broken::Chosen;
use super::client::Client;

/// Crowds of a run, at most: the outcome of each of their commits is asked for again and again.
pub(super) const MOST: u32 = 2;
/// Sessions of a crowd.
const SESSIONS: usize = MAX_COMMITS_IN_FLIGHT + 12;
/// Bytes for the intents of a slot: room for those of a whole crowd, each of which writes one record.
pub(super) const LOG_BYTES: u64 = 8_192;
/// Bytes of buffers for all operations of a crowd.
pub(super) const ARENA_BYTES: usize = 16 * SESSIONS * 4_096;

/// Runs one transaction of each session of a crowd. Each writes one record.
pub(super) async fn commit_together(
    run: &Rc<Run>,
    (slot, grant): (u16, Epoch),
    worker: &Worker<Chosen>,
) -> Result<(), String> {
    run.crowds_left.set(run.crowds_left.get() - 1);
    let slab = run.slab(grant);
    let commits = (0..SESSIONS).map(|_| {
        let mut client = Client::new(run, slot, grant, slab.clone());
        client.be_frugal();
        async move {
            let record = client.draw_record();
            client.transact(worker, &mut SessionState::new(), &[(record, true)]).await.map(drop)
        }
    });
    join_all(commits.collect::<Vec<_>>()).await.into_iter().collect()
}
