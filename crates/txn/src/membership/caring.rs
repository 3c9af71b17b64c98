//! One member's eyes on the others, and its hands: it looks after the seats of those that do not live any
//! more (M3, M4).

use std::marker::PhantomData;
use std::time::Duration;

use farpool_wire::{Epoch, Slot};

use super::layout::Role;
use super::roles::give_up_role;
use super::rules::SeatRules;
use super::watch::{Suspect, Watch};
use super::{Seat, read_seats};
use crate::horizon::forget;
use crate::layout::DatabaseAt;
use crate::memory::{Memory, MemoryError};
use crate::recovery::{Recovered, RecoveryError, recover, recover_by};
use crate::rules::Shipped;

/// A database, as who looks after its seats has to know it.
pub trait Premises {
    /// Why a grant could not be fenced.
    type FenceError: std::error::Error;

    /// Its addresses, for this member.
    fn at(&self) -> DatabaseAt<'_>;

    /// Shuts a grant of a region out, known by its place among the database's regions.
    fn fence(&self, region: usize, grant: Epoch) -> impl Future<Output = Result<(), Self::FenceError>>;
}

/// Why a seat could not be looked after. Somebody will try again.
#[derive(Debug, thiserror::Error)]
pub enum CareError<E: std::error::Error> {
    /// A grant could not be fenced.
    #[error("a member that does not live any more could not be shut out: {0}")]
    Fence(E),
    /// What it left could not be undone.
    #[error(transparent)]
    Recovery(#[from] RecoveryError),
}

impl<E: std::error::Error> From<MemoryError> for CareError<E> {
    fn from(error: MemoryError) -> Self {
        CareError::Recovery(error.into())
    }
}

/// A member that looks at the others now and then.
pub struct Lookout<'a, P, R = Shipped> {
    /// Its way to all regions, where nothing else of it is under way.
    memory: &'a Memory,
    premises: &'a P,
    own: Seat,
    watch: Watch,
    rules: PhantomData<R>,
}

impl<'a, P: Premises, R: SeatRules> Lookout<'a, P, R> {
    /// Takes for dead who has been silent for so long.
    pub fn new(memory: &'a Memory, premises: &'a P, own: Seat, patience: Duration) -> Self {
        Lookout { memory, premises, own, watch: Watch::new(patience), rules: PhantomData }
    }

    /// Looks at all seats once, and after those of members that do not live any more; `told` hears what
    /// became of each.
    ///
    /// # Errors
    /// When far memory does not answer. What was sent may still land: the others have to shut this member out
    /// as well.
    pub async fn look(
        &mut self,
        mut told: impl FnMut(Slot, Result<Option<Recovered>, CareError<P::FenceError>>),
    ) -> Result<(), MemoryError> {
        let seats = read_seats(self.memory, &self.premises.at().members()).await?;
        let mut suspects = self.watch.look(self.memory.endpoint().now_ns(), &seats);
        suspects.retain(|suspect| suspect.claim != self.own.claim);
        for &suspect in &suspects {
            match self.look_after(suspect, &suspects).await {
                Err(CareError::Recovery(RecoveryError::Memory(error))) => return Err(error),
                cared => told(suspect.slot, cared),
            }
        }
        Ok(())
    }

    /// Shuts a member out, undoes what it left, and frees its roles and its seat; if it fails, the seat stays
    /// as it is, and can be looked after again. `None`: somebody else does it, or has.
    async fn look_after(
        &self,
        suspect: Suspect,
        suspects: &[Suspect],
    ) -> Result<Option<Recovered>, CareError<P::FenceError>> {
        let Lookout { memory, premises, .. } = *self;
        if !self.take_care(suspect, suspects).await? {
            return Ok(None);
        }
        if !R::fences_before_roles() {
            self.free_roles(suspect).await?;
        }
        if !self.shut_out(suspect).await? {
            self.end_care(suspect).await?;
            return Ok(None);
        }
        self.free_roles(suspect).await?;
        if !R::recovers_before_seat() {
            self.free_seat(suspect).await?;
        }
        let (log, oracle) = (premises.at().log(suspect.slot), premises.at().oracle());
        let recovered = match R::needs_both_copies() {
            true => recover(memory, &oracle, &log, suspect.slot).await?,
            false => recover_by::<Shipped>(memory, &oracle, &log, suspect.slot).await?,
        };
        if !R::forgets_before_seat() {
            self.free_seat(suspect).await?;
        }
        let at = premises.at();
        forget(memory, &at.horizon(), at.layout.client_words(suspect.slot)).await?;
        // The slot, its log and the places are the next member's from here on.
        self.free_seat(suspect).await?;
        self.end_care(suspect).await?;
        Ok(Some(recovered))
    }

    /// Fences all grants that a member has used; false: it has given its seat back meanwhile.
    async fn shut_out(&self, suspect: Suspect) -> Result<bool, CareError<P::FenceError>> {
        let at = self.premises.at().members();
        // First where its seat is: from then on it cannot say any more what else it has (M2)...
        self.premises.fence(0, suspect.claim).await.map_err(CareError::Fence)?;
        // ...nor give its seat back, which may be another's already.
        if R::looks_again_behind_fence() && !self.is_its_seat(suspect).await? {
            return Ok(false);
        }
        let listed = self.memory.read(&at.piece, at.layout.grants(suspect.slot)).await?;
        let listed = at.layout.decode_grants(&listed).filter(|grants| grants.first() == Some(&suspect.claim));
        for (region, grant) in listed.unwrap_or_default().into_iter().enumerate().skip(1) {
            self.premises.fence(region, grant).await.map_err(CareError::Fence)?;
        }
        Ok(true)
    }

    async fn is_its_seat(&self, suspect: Suspect) -> Result<bool, MemoryError> {
        let at = self.premises.at().members();
        let claim = self.memory.read_word(&at.piece, at.layout.claim(suspect.slot)).await?;
        Ok(claim == suspect.claim.0)
    }

    async fn end_care(&self, suspect: Suspect) -> Result<(), MemoryError> {
        let at = self.premises.at().members();
        let carer = at.layout.carer(suspect.slot);
        self.memory.compare_and_swap(&at.piece, carer, self.own.claim.0, 0).await.map(drop)
    }

    async fn free_roles(&self, suspect: Suspect) -> Result<(), MemoryError> {
        for role in Role::ALL {
            give_up_role(self.memory, &self.premises.at().members(), role, suspect.claim).await?;
        }
        Ok(())
    }

    async fn free_seat(&self, suspect: Suspect) -> Result<(), MemoryError> {
        let at = self.premises.at().members();
        let claim = at.layout.claim(suspect.slot);
        self.memory.compare_and_swap(&at.piece, claim, suspect.claim.0, 0).await.map(drop)
    }

    /// Whether the caller is the one who looks after a seat (M3).
    async fn take_care(
        &self,
        suspect: Suspect,
        suspects: &[Suspect],
    ) -> Result<bool, CareError<P::FenceError>> {
        let (memory, at, own) = (self.memory, self.premises.at().members(), self.own.claim.0);
        let place = at.layout.carer(suspect.slot);
        let before = memory.read_word(&at.piece, place).await?;
        // Behind that READ: a carer had a seat before he was one, and who is in none now has lost it, or
        // left.
        let seats = read_seats(memory, &at).await?;
        if seats.get(suspect.slot.index()).is_none_or(|seat| seat.claim != Some(suspect.claim)) {
            return Ok(false);
        }
        let is_seated = seats.iter().any(|seat| seat.claim == Some(Epoch(before)));
        if before != own && is_seated && R::leaves_it_to_carers() {
            // He may still be at it. Is he silent, too, he is shut out first: two may have been taken for
            // dead by each other.
            let Some(carer) = suspects.iter().find(|carer| carer.claim.0 == before) else {
                return Ok(false);
            };
            if R::shuts_carers_out() {
                self.shut_out(*carer).await?;
            }
        }
        if before != own && memory.compare_and_swap(&at.piece, place, before, own).await? != before {
            return Ok(false);
        }
        // Another may have done all of it between.
        let is_its_seat = self.is_its_seat(suspect).await?;
        if !is_its_seat {
            self.end_care(suspect).await?;
        }
        Ok(is_its_seat)
    }
}
