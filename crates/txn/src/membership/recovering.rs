//! One member watches the others, and recovers the seats of dead ones (M3, M4).

use std::marker::PhantomData;
use std::time::Duration;

use farpool_wire::{Epoch, Slot};

use super::layout::{LaterGrant, Role};
use super::roles::give_up_role;
use super::rules::SeatRules;
use super::watch::{Suspect, Watch};
use super::{Seat, read_seats};
use crate::horizon::forget;
use crate::layout::DatabaseAt;
use crate::memory::{Memory, MemoryError};
use crate::recovery::{Recovered, RecoveryError, recover, recover_by};
use crate::rules::Shipped;

/// A database of which a member can recover seats.
pub trait Recoverable {
    /// Why a grant could not be fenced.
    type FenceError: std::error::Error;

    /// Its addresses, for this member.
    fn at(&self) -> DatabaseAt<'_>;

    /// Fences a grant of a region with which the database was created.
    fn fence(&self, region: usize, grant: Epoch) -> impl Future<Output = Result<(), Self::FenceError>>;

    /// Fences a grant of the region at this place of the list of [later regions](crate::later), unless the
    /// place is not in the grant's round any more: then nobody uses that region.
    fn fence_later(
        &self,
        place: u16,
        grant: LaterGrant,
    ) -> impl Future<Output = Result<(), Self::FenceError>>;

    /// Opens the regions that the database has got later, up to now ([L3](crate::later)).
    fn open_later_regions(
        &self,
        memory: &Memory,
    ) -> impl Future<Output = Result<(), SeatRecoveryError<Self::FenceError>>>;
}

/// Why a seat was not recovered. A member will try again.
#[derive(Debug, thiserror::Error)]
pub enum SeatRecoveryError<E: std::error::Error> {
    /// A grant could not be fenced.
    #[error("a dead member could not be evicted: {0}")]
    Fence(E),
    /// The regions that the database got later cannot be opened.
    #[error("cannot open the regions of the database: {0}")]
    Regions(String),
    /// Its commits could not be rolled back.
    #[error(transparent)]
    Recovery(#[from] RecoveryError),
}

impl<E: std::error::Error> From<MemoryError> for SeatRecoveryError<E> {
    fn from(error: MemoryError) -> Self {
        SeatRecoveryError::Recovery(error.into())
    }
}

/// One member's watch over the seats of the others.
pub struct SeatWatch<'a, D, R = Shipped> {
    /// Access to all regions, with nothing else of the member in flight.
    memory: &'a Memory,
    database: &'a D,
    own: Seat,
    watch: Watch,
    rules: PhantomData<R>,
}

impl<'a, D: Recoverable, R: SeatRules> SeatWatch<'a, D, R> {
    /// The watch of the member with the seat `own`. It declares a member dead once that has been silent for
    /// `patience`.
    pub fn new(memory: &'a Memory, database: &'a D, own: Seat, patience: Duration) -> Self {
        SeatWatch { memory, database, own, watch: Watch::new(patience), rules: PhantomData }
    }

    /// Looks at all seats once, and recovers those of dead members; `report` gets the result for each.
    ///
    /// # Errors
    /// When far memory does not answer. What was sent may still land: the others have to evict this member as
    /// well.
    pub async fn look(
        &mut self,
        mut report: impl FnMut(Slot, Result<Option<Recovered>, SeatRecoveryError<D::FenceError>>),
    ) -> Result<(), MemoryError> {
        let seats = read_seats(self.memory, &self.database.at().members()).await?;
        let mut suspects = self.watch.look(self.memory.endpoint().now_ns(), &seats);
        suspects.retain(|suspect| suspect.claim != self.own.claim);
        for &suspect in &suspects {
            match self.recover_seat(suspect, &suspects).await {
                Err(SeatRecoveryError::Recovery(RecoveryError::Memory(error))) => return Err(error),
                result => report(suspect.slot, result),
            }
        }
        Ok(())
    }

    /// Evicts a member, rolls back its commits, and frees its roles and its seat. If that fails, the seat
    /// stays as it is, and can be recovered again. `None`: another member does it or has done it, or there is
    /// nothing to do.
    async fn recover_seat(
        &self,
        suspect: Suspect,
        suspects: &[Suspect],
    ) -> Result<Option<Recovered>, SeatRecoveryError<D::FenceError>> {
        let SeatWatch { memory, database, .. } = *self;
        if !self.become_recoverer(suspect, suspects).await? {
            return Ok(None);
        }
        if !R::fences_before_roles() {
            self.free_roles(suspect).await?;
        }
        if !self.evict(suspect).await? {
            self.stop_recovering(suspect).await?;
            return Ok(None);
        }
        self.free_roles(suspect).await?;
        if !R::recovers_before_seat() {
            self.free_seat(suspect).await?;
        }
        let (log, oracle) = (database.at().log(suspect.slot), database.at().oracle());
        let recovered = match R::needs_both_copies() {
            true => recover(memory, &oracle, &log, suspect.slot).await?,
            false => recover_by::<Shipped>(memory, &oracle, &log, suspect.slot).await?,
        };
        if !R::forgets_before_seat() {
            self.free_seat(suspect).await?;
        }
        let at = database.at();
        forget(memory, &at.horizon(), at.layout.client_words(suspect.slot)).await?;
        // From here on the slot, its log and its workers' places belong to the next member.
        self.free_seat(suspect).await?;
        self.stop_recovering(suspect).await?;
        Ok(Some(recovered))
    }

    /// Fences all grants that a member has used; false: the member has given its seat back meanwhile.
    async fn evict(&self, suspect: Suspect) -> Result<bool, SeatRecoveryError<D::FenceError>> {
        let at = self.database.at().members();
        // First the region with the seats: from then on the member cannot list its other grants (M2)...
        self.database.fence(0, suspect.claim).await.map_err(SeatRecoveryError::Fence)?;
        // ...nor give its seat back. It may have done so before, and the seat may be another member's.
        if R::looks_again_behind_fence() && !self.is_its_seat(suspect).await? {
            return Ok(false);
        }
        let listed = self.memory.read(&at.piece, at.layout.grants(suspect.slot)).await?;
        let listed = at.layout.decode_grants(&listed).filter(|grants| grants.first() == Some(&suspect.claim));
        let Some(listed) = listed else { return Ok(true) };
        // Behind the fence: this member uses no further ones.
        if R::opens_later_regions() {
            self.database.open_later_regions(self.memory).await?;
        }
        for (region, grant) in listed.into_iter().enumerate().skip(1) {
            self.database.fence(region, grant).await.map_err(SeatRecoveryError::Fence)?;
        }
        let later = self.memory.read(&at.piece, at.layout.later_grants(suspect.slot)).await?;
        for (place, grant) in (0..).zip(LaterGrant::decode_all(&later)) {
            if let Some(grant) = grant {
                self.database.fence_later(place, grant).await.map_err(SeatRecoveryError::Fence)?;
            }
        }
        Ok(true)
    }

    async fn is_its_seat(&self, suspect: Suspect) -> Result<bool, MemoryError> {
        let at = self.database.at().members();
        let claim = self.memory.read_word(&at.piece, at.layout.claim(suspect.slot)).await?;
        Ok(claim == suspect.claim.0)
    }

    async fn stop_recovering(&self, suspect: Suspect) -> Result<(), MemoryError> {
        let at = self.database.at().members();
        let recoverer = at.layout.recoverer(suspect.slot);
        self.memory.compare_and_swap(&at.piece, recoverer, self.own.claim.0, 0).await.map(drop)
    }

    async fn free_roles(&self, suspect: Suspect) -> Result<(), MemoryError> {
        for role in Role::ALL {
            give_up_role(self.memory, &self.database.at().members(), role, suspect.claim).await?;
        }
        Ok(())
    }

    async fn free_seat(&self, suspect: Suspect) -> Result<(), MemoryError> {
        let at = self.database.at().members();
        let claim = at.layout.claim(suspect.slot);
        self.memory.compare_and_swap(&at.piece, claim, suspect.claim.0, 0).await.map(drop)
    }

    /// Makes this member the recoverer of a seat, if it may be (M3); returns whether it is.
    async fn become_recoverer(
        &self,
        suspect: Suspect,
        suspects: &[Suspect],
    ) -> Result<bool, SeatRecoveryError<D::FenceError>> {
        let (memory, at, own) = (self.memory, self.database.at().members(), self.own.claim.0);
        let place = at.layout.recoverer(suspect.slot);
        let before = memory.read_word(&at.piece, place).await?;
        // After that READ: a recoverer had a seat before it became one. So a recoverer that has none now has
        // lost its seat, or left.
        let seats = read_seats(memory, &at).await?;
        if seats.get(suspect.slot.index()).is_none_or(|seat| seat.claim != Some(suspect.claim)) {
            return Ok(false);
        }
        let is_seated = seats.iter().any(|seat| seat.claim == Some(Epoch(before)));
        if before != own && is_seated && R::leaves_it_to_recoverers() {
            // It may still be at work. If it is silent, too, it is evicted first: two members may have
            // declared each other dead.
            let Some(recoverer) = suspects.iter().find(|recoverer| recoverer.claim.0 == before) else {
                return Ok(false);
            };
            if R::evicts_recoverers() {
                self.evict(*recoverer).await?;
            }
        }
        if before != own && memory.compare_and_swap(&at.piece, place, before, own).await? != before {
            return Ok(false);
        }
        // Another member may have done all of it meanwhile.
        let is_its_seat = self.is_its_seat(suspect).await?;
        if !is_its_seat {
            self.stop_recovering(suspect).await?;
        }
        Ok(is_its_seat)
    }
}
