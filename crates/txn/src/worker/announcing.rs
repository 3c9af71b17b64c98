//! How a worker takes part in the horizon.

use std::time::Duration;

use super::{SessionState, Worker};
use crate::cut::Cut;
use crate::error::{BeginError, CommitError, LeaveError};
use crate::horizon::{Announcer, HorizonAt};
use crate::oracle::{read_ended, read_latest};
use crate::rules::Rules;

/// Between two looks at whether anything was published.
const JOIN_PAUSE: Duration = Duration::from_micros(5);

impl<R: Rules> Worker<R> {
    /// Announces this worker in a place of its own, before it begins anything: what its snapshots need is
    /// kept, and it overwrites nothing that the snapshots of others need. Either all workers of a database do
    /// so, or none does. `None`: there is no such place.
    ///
    /// # Errors
    /// When far memory does not answer, or nothing was published. Then the worker's word has to be taken
    /// [away](crate::horizon::forget).
    pub async fn announcing(mut self, at: HorizonAt, place: u16) -> Result<Option<Self>, BeginError> {
        let Some(announcer) = Announcer::new(at, place, self.oracle.slots()) else { return Ok(None) };
        self.announcer = Some(announcer);
        self.announce_again().await?;
        Ok(Some(self))
    }

    /// Announces this worker again, after its word was taken [away](crate::horizon::forget) while it had no
    /// transactions.
    ///
    /// # Errors
    /// As [`announcing`](Self::announcing).
    pub async fn announce_again(&self) -> Result<(), BeginError> {
        let Some(announcer) = &self.announcer else { return Ok(()) };
        announcer.join::<R>(&self.memory).await?;
        announcer.starts_at(self.latest().await?.sequence());
        Ok(())
    }

    /// Brings a session up to date: from now on it begins from no earlier cut than the last one published
    /// when this was called. So it sees every commit that was acknowledged to any client by then, even if
    /// this worker begins from what a fetch thread has read.
    ///
    /// # Errors
    /// When far memory does not answer, or nothing is published.
    pub async fn catch_up(&self, session: &mut SessionState) -> Result<(), BeginError> {
        let latest = self.latest().await?;
        session.begun_from = session.begun_from.max(latest.sequence());
        Ok(())
    }

    /// As [`catch_up`](Self::catch_up), but the session also sees all commits that have ended by now, and may
    /// not be published yet: waits until they are.
    ///
    /// # Errors
    /// As [`catch_up`](Self::catch_up); [`BeginError::OracleStopped`] if nothing is published for too long.
    pub async fn catch_up_with_ended(&self, session: &mut SessionState) -> Result<(), BeginError> {
        // The word of its slot has a commit before it ends.
        let ended = read_ended(&self.memory, &self.oracle).await?;
        let mut give_up_at = None;
        loop {
            let latest = self.latest().await?;
            if latest.reaches(&ended) {
                session.begun_from = session.begun_from.max(latest.sequence());
                return Ok(());
            }
            self.check_patience(&mut give_up_at)?;
            self.memory.endpoint().sleep(JOIN_PAUSE).await;
        }
    }

    /// The cut published last, read from far memory.
    async fn latest(&self) -> Result<Cut, BeginError> {
        let mut give_up_at = None;
        loop {
            if let Some(cut) = read_latest::<R>(&self.memory, &self.oracle).await? {
                return Ok(cut);
            }
            self.check_patience(&mut give_up_at)?;
            self.memory.endpoint().sleep(JOIN_PAUSE).await;
        }
    }

    /// Commits without having written anything, so that another cut is published and the horizon can move on.
    ///
    /// # Errors
    /// As [`Transaction::commit`](crate::Transaction::commit).
    pub async fn commit_nothing(&self) -> Result<(), CommitError> {
        let mut commit = self.begin_commit(0)?;
        match commit.finish().await {
            true => Ok(()),
            false => Err(CommitError::Unknown(commit.version())),
        }
    }

    /// The number of the cut that was published last.
    pub(crate) async fn latest_number(&self) -> Result<u64, BeginError> {
        Ok(self.latest().await?.sequence())
    }

    /// The horizon, read again. `None`: this worker does not announce itself, so there is none.
    pub(crate) async fn horizon(&self) -> Result<Option<Cut>, BeginError> {
        match &self.announcer {
            Some(announcer) => Ok(Some(announcer.refresh(&self.memory).await?)),
            None => Ok(None),
        }
    }

    /// To be called now and then while this worker begins nothing: reads the last published cut, and
    /// announces the lowest cut that the worker still needs. That is no later than the cut of an open
    /// transaction.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn keep_up(&self) -> Result<(), BeginError> {
        let Some(announcer) = &self.announcer else { return Ok(()) };
        if let Some(cut) = self.published().await? {
            announcer.note_read(cut.sequence());
        }
        Ok(announcer.announce::<R>(&self.memory).await?)
    }

    /// Whether this worker's word must not be taken [away](crate::horizon::forget) while its process has its
    /// grants: it has a transaction that is open or in doubt, or an in-flight write.
    pub fn is_needed(&self) -> bool {
        self.announcer
            .as_ref()
            .is_some_and(|announcer| announcer.has_open() || self.memory.has_writes_in_flight())
    }

    /// Takes this worker's word away: the worker needs nothing any more.
    ///
    /// # Errors
    /// When a commit is in doubt, or far memory does not answer. Then another worker has to [do
    /// that](crate::horizon::forget), after this one's grants are fenced.
    pub async fn leave(&self) -> Result<(), LeaveError> {
        match &self.announcer {
            Some(announcer) => announcer.leave(&self.memory).await,
            None => Ok(()),
        }
    }
}
