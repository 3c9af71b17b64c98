//! Who works on a database: which compute server has which slot, whether it lives, and who looks after the slot of one that does not
//! (paper 3, section 6.2: compute servers monitor each other; `docs/src/txn.md`, *members*).
//!
//! M1. A member has a grant of its own for every region, and a *seat*: the slot whose claim is the epoch of its grant of the root region,
//!     where the seats lie. An epoch is given once, so a claim names one member for ever.
//! M2. A member uses nothing but the root region before its list of grants is there. So whoever has fenced the grant that the claim
//!     names, and finds no list of that member, has fenced all that it has used.
//! M3. A seat is looked after by one at a time, who has written his own claim beside it; whose claim nobody has any more has been fenced
//!     himself.
//! M4. A seat is free only when all grants of who had it are fenced and all that it left is undone, or it has left nothing.
//! M5. A *role* (publishing cuts, say) is taken by a claim as well, and free again only when its member was fenced.

mod layout;
mod watch;

pub use layout::{MembersAt, MembersLayout, Role, SeatWords};
pub use watch::{Suspect, Watch};

use std::ops::Range;

use farpool_wire::{Epoch, Slot};

use crate::horizon::{HorizonAt, forget};
use crate::log::LogAt;
use crate::memory::{Memory, MemoryError};
use crate::oracle::Oracle;
use crate::recovery::{Recovered, RecoveryError, recover};

/// A member's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seat {
    /// In which it commits.
    pub slot: Slot,
    /// The epoch of its grant of the root region.
    pub claim: Epoch,
}

/// Takes a seat that is free, for a member with these grants, in the order of the database's regions; that of the root region is the
/// first. `None`: all are taken.
///
/// # Errors
/// When far memory does not answer. A seat may have been taken all the same: fence the grants.
pub async fn take_seat(
    memory: &Memory,
    at: &MembersAt,
    grants: &[Epoch],
) -> Result<Option<Seat>, MemoryError> {
    let Some(&claim) = grants.first() else { return Ok(None) };
    let seats = read_seats(memory, at).await?;
    for (slot, _) in (0..).zip(&seats).filter(|(_, seat)| seat.claim.is_none()) {
        let Some(slot) = Slot::new(slot) else { break };
        let place = at.layout.claim(slot);
        if memory.compare_and_swap(&at.piece, place, 0, claim.0).await? == 0 {
            memory.write(&at.piece, at.layout.grants(slot).start, &at.layout.encode_grants(grants)).await?;
            return Ok(Some(Seat { slot, claim }));
        }
    }
    Ok(None)
}

/// Gives a seat back, whose member has nothing under way and will write nothing any more.
///
/// # Errors
/// When far memory does not answer: the others will find that it does not live.
pub async fn leave_seat(memory: &Memory, at: &MembersAt, seat: &Seat) -> Result<(), MemoryError> {
    for role in Role::ALL {
        give_up_role(memory, at, role, seat.claim).await?;
    }
    let claim = at.layout.claim(seat.slot);
    memory.compare_and_swap(&at.piece, claim, seat.claim.0, 0).await.map(drop)
}

/// Says that a member lives, for the `count`-th time.
///
/// # Errors
/// When far memory does not answer, or the member was taken for dead.
pub async fn beat(memory: &Memory, at: &MembersAt, seat: &Seat, count: u64) -> Result<(), MemoryError> {
    memory.write_word(&at.piece, at.layout.beat(seat.slot), count).await
}

/// All seats, in the order of slots.
///
/// # Errors
/// When far memory does not answer.
pub async fn read_seats(memory: &Memory, at: &MembersAt) -> Result<Vec<SeatWords>, MemoryError> {
    let bytes = memory.read(&at.piece, at.layout.seats()).await?;
    Ok(at.layout.decode_seats(&bytes))
}

/// Who has a role.
///
/// # Errors
/// When far memory does not answer.
pub async fn role_of(memory: &Memory, at: &MembersAt, role: Role) -> Result<Option<Epoch>, MemoryError> {
    let claim = memory.read_word(&at.piece, at.layout.role(role)).await?;
    Ok(Some(Epoch(claim)).filter(|claim| claim.0 != 0))
}

/// Takes a role, if nobody has it; says whether it is the caller's now.
///
/// # Errors
/// When far memory does not answer: it may be.
pub async fn take_role(
    memory: &Memory,
    at: &MembersAt,
    role: Role,
    claim: Epoch,
) -> Result<bool, MemoryError> {
    if let Some(found) = role_of(memory, at, role).await? {
        return Ok(found == claim);
    }
    Ok(memory.compare_and_swap(&at.piece, at.layout.role(role), 0, claim.0).await? == 0)
}

/// Frees a role, if it is of that claim.
///
/// # Errors
/// When far memory does not answer.
pub async fn give_up_role(
    memory: &Memory,
    at: &MembersAt,
    role: Role,
    claim: Epoch,
) -> Result<(), MemoryError> {
    memory.compare_and_swap(&at.piece, at.layout.role(role), claim.0, 0).await.map(drop)
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

/// What there is to look after.
pub struct Care<'a> {
    /// The caller's way to all regions, where nothing else is under way.
    pub memory: &'a Memory,
    /// The seats.
    pub at: &'a MembersAt,
    /// The oracle.
    pub oracle: &'a Oracle,
    /// The log of the slot.
    pub log: &'a LogAt,
    /// Where its workers announce their snapshots, and in which places.
    pub horizon: (&'a HorizonAt, Range<u16>),
    /// The caller.
    pub own: Seat,
}

/// Looks after the seat of a member that does not live any more: shuts it out, undoes what it left, and frees its roles and its seat.
/// `fence` shuts a grant of a region out, known by its place among the database's regions. `None`: somebody else does it, or has.
///
/// # Errors
/// The seat stays as it is, and can be looked after again.
pub async fn look_after<E: std::error::Error>(
    care: &Care<'_>,
    suspect: Suspect,
    fence: impl AsyncFn(usize, Epoch) -> Result<(), E>,
) -> Result<Option<Recovered>, CareError<E>> {
    let Care { memory, at, oracle, log, horizon, own } = care;
    if !take_care(memory, at, suspect, own.claim).await? {
        return Ok(None);
    }
    // First where its seat is: from then on it cannot say any more what else it has (M2).
    fence(0, suspect.claim).await.map_err(CareError::Fence)?;
    let listed = memory.read(&at.piece, at.layout.grants(suspect.slot)).await?;
    let listed = at.layout.decode_grants(&listed).filter(|grants| grants.first() == Some(&suspect.claim));
    for (region, grant) in listed.unwrap_or_default().into_iter().enumerate().skip(1) {
        fence(region, grant).await.map_err(CareError::Fence)?;
    }
    for role in Role::ALL {
        give_up_role(memory, at, role, suspect.claim).await?;
    }
    let recovered = recover(memory, oracle, log, suspect.slot).await?;
    // Before the seat is free: the places are the next member's then.
    forget(memory, horizon.0, horizon.1.clone()).await?;
    memory.compare_and_swap(&at.piece, at.layout.claim(suspect.slot), suspect.claim.0, 0).await?;
    memory.compare_and_swap(&at.piece, at.layout.carer(suspect.slot), own.claim.0, 0).await?;
    Ok(Some(recovered))
}

/// Whether the caller is the one who looks after a seat (M3).
async fn take_care(
    memory: &Memory,
    at: &MembersAt,
    suspect: Suspect,
    own: Epoch,
) -> Result<bool, MemoryError> {
    let seats = read_seats(memory, at).await?;
    let Some(seat) = seats.get(suspect.slot.index()) else { return Ok(false) };
    let before = seat.carer;
    // Whose claim is still somewhere may still be at it; if he does not live, his own seat is looked after first.
    let is_busy =
        before.is_some_and(|carer| carer != own && seats.iter().any(|seat| seat.claim == Some(carer)));
    if seat.claim != Some(suspect.claim) || is_busy {
        return Ok(false);
    }
    if before != Some(own) {
        let place = at.layout.carer(suspect.slot);
        let before = before.map_or(0, |carer| carer.0);
        if memory.compare_and_swap(&at.piece, place, before, own.0).await? != before {
            return Ok(false);
        }
    }
    // Another may have done all of it between.
    let claim = memory.read_word(&at.piece, at.layout.claim(suspect.slot)).await?;
    if claim != suspect.claim.0 {
        memory.compare_and_swap(&at.piece, at.layout.carer(suspect.slot), own.0, 0).await?;
        return Ok(false);
    }
    Ok(true)
}
