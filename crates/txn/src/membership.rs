//! Who works on a database: which compute server has which slot, whether it lives, and who looks after the
//! slot of one that does not (paper 3, section 6.2: compute servers monitor each other; `docs/src/txn.md`,
//! *members*).
//!
//! M1. A member has a grant of its own for every region, and a *seat*: the slot whose claim is the epoch of
//!     its grant of the root region, where the seats lie. An epoch is given once, so a claim names one member
//!     for ever.
//! M2. A member uses nothing but the root region before its list of grants is there. So whoever has fenced
//!     the grant that the claim names, and finds no list of that member, has fenced all that it has used.
//! M3. A seat is looked after by one at a time, who has written his own claim beside it, in the place of
//!     nobody's, or of one who has no seat any more, or whom he has fenced.
//! M4. A seat is free only when all grants of who had it are fenced and all that it left is undone; or when
//!     that one has given it back, who had nothing under way any more, for itself or for all.
//! M5. A *role* (publishing cuts, say) is taken by a claim as well, and free again only when its member has
//!     nothing of it under way, or was fenced.
//! M6. A member sends heartbeats only while each of its parts makes progress: a beat vouches for the member's
//!     work, not only for the thread that writes it.

mod caring;
mod duties;
mod layout;
mod roles;
mod rules;
mod vouching;
mod watch;

pub use caring::{CareError, Lookout, Premises};
pub use duties::{Duties, Duty};
pub use layout::{MembersAt, MembersLayout, Role, SeatWords};
pub use roles::{fill_role, give_up_role, role_of, take_role};
pub use rules::SeatRules;
pub use vouching::{Part, Sign, Vouching, signs_of};
pub use watch::{Suspect, Watch};

use std::time::Duration;

use farpool_wire::{Epoch, Slot};

use crate::memory::{Memory, MemoryError};

/// How long a seat is waited for, in times of the patience with those who are silent.
const SEAT_PATIENCES: u32 = 3;

/// A member's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seat {
    /// In which it commits.
    pub slot: Slot,
    /// The epoch of its grant of the root region.
    pub claim: Epoch,
}

/// Takes a seat that is free, for a member with these grants, in the order of the database's regions; that of
/// the root region is the first. `None`: all are taken.
///
/// # Errors
/// When far memory does not answer. A seat may have been taken all the same: fence the grants.
pub async fn take_seat<R: SeatRules>(
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
            let seat = Seat { slot, claim };
            if R::lists_grants_first() {
                list_grants(memory, at, &seat, grants).await?;
            }
            return Ok(Some(seat));
        }
    }
    Ok(None)
}

/// Takes a seat; where there is none, looks every `pause` whether one is free, until those of the dead would
/// have been looked after.
///
/// # Errors
/// As [`take_seat`].
pub async fn wait_for_seat<R: SeatRules>(
    memory: &Memory,
    at: &MembersAt,
    grants: &[Epoch],
    (patience, pause): (Duration, Duration),
) -> Result<Option<Seat>, MemoryError> {
    let endpoint = memory.endpoint();
    let give_up_at = endpoint.now_ns() + (patience * SEAT_PATIENCES).as_nanos() as u64;
    loop {
        let seat = take_seat::<R>(memory, at, grants).await?;
        if seat.is_some() || endpoint.now_ns() > give_up_at {
            return Ok(seat);
        }
        endpoint.sleep(pause).await;
    }
}

/// Says which grants a member has; [`take_seat`] does.
///
/// # Errors
/// When far memory does not answer, or the member was taken for dead.
pub async fn list_grants(
    memory: &Memory,
    at: &MembersAt,
    seat: &Seat,
    grants: &[Epoch],
) -> Result<(), MemoryError> {
    memory.write(&at.piece, at.layout.grants(seat.slot).start, &at.layout.encode_grants(grants)).await
}

/// Gives a seat back once all duties of its member are over, and looks every `pause` whether they are; says
/// whether it did. It does not where something of one may be under way still: then the others find that this
/// member does not live. Nothing else of the member is under way, and it will write nothing any more. While
/// it waits, `meanwhile` says each time that it lives: a duty may wait for a node.
///
/// # Errors
/// When far memory does not answer: the others find that, too.
pub async fn leave_seat<R: SeatRules, E: From<MemoryError>>(
    memory: &Memory,
    at: &MembersAt,
    seat: &Seat,
    duties: &Duties,
    pause: Duration,
    mut meanwhile: impl AsyncFnMut() -> Result<(), E>,
) -> Result<bool, E> {
    while R::waits_for_duties() && duties.are_under_way() {
        meanwhile().await?;
        memory.endpoint().sleep(pause).await;
    }
    if R::waits_for_duties() && duties.are_in_doubt() {
        return Ok(false);
    }
    let claim = at.layout.claim(seat.slot);
    memory.compare_and_swap(&at.piece, claim, seat.claim.0, 0).await?;
    Ok(true)
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
