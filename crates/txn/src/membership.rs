//! The members of a database: which compute server has which slot, whether it is alive, and which member
//! recovers the slot of a dead one (paper 3, section 6.2: compute servers monitor each other;
//! `docs/src/txn.md`, *members*).
//!
//! M1. A member has a grant of its own for every region, and a *seat*: the slot whose claim is the epoch of
//!     the member's grant of the root region, where the seats lie. An epoch is given once, so a claim names
//!     one member for ever.
//! M2. A member uses nothing but the root region before its list of grants is there. So a member that has
//!     fenced the grant that the claim names, and then finds no list of that claim, has fenced everything
//!     that was used. A grant of a region that the database got later has a word of its own, which is written
//!     before the grant is used ([`crate::later`], L3).
//! M3. A seat has one recoverer at a time: the member whose claim is in the recoverer's place. A member puts
//!     its claim there only if the place is empty, or the earlier recoverer has no seat any more, or it has
//!     fenced the earlier recoverer.
//! M4. A seat becomes free in two ways only: all grants of its member are fenced and all that the member left
//!     is undone; or the member gives it back with nothing in flight any more, neither for itself nor for
//!     all.
//! M5. A *role* (publishing cuts, for example) is also taken by a claim. It becomes free only when its member
//!     has nothing of it in flight, or was fenced.
//! M6. A member sends heartbeats only while each of its parts makes progress: a heartbeat vouches for the
//!     member's work, not only for the thread that writes it.

mod duties;
mod layout;
mod recovering;
mod roles;
mod rules;
mod vouching;
mod watch;

pub use duties::{Duties, Duty};
pub use layout::{LaterGrant, MembersAt, MembersLayout, Role, SeatWords};
pub use recovering::{Recoverable, SeatRecoveryError, SeatWatch};
pub use roles::{fill_role, give_up_role, role_of, take_role};
pub use rules::SeatRules;
pub use vouching::{Part, Sign, Vouching, signs_of};
pub use watch::{Suspect, Watch};

use std::time::Duration;

use farpool_wire::{Epoch, Slot};

use crate::memory::{Memory, MemoryError};

/// How long a member waits for a seat, in multiples of the patience with silent members.
const SEAT_PATIENCES: u32 = 3;

/// A member's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seat {
    /// The slot in which it commits.
    pub slot: Slot,
    /// The epoch of its grant of the root region.
    pub claim: Epoch,
}

/// Takes a free seat, for a member with these grants, which are in the order of the database's regions, the
/// root region first. `None`: all seats are taken.
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

/// Takes a seat. If there is none, looks every `pause` whether one is free, for as long as it takes to
/// recover the seats of dead members.
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

/// Writes a member's list of grants, as [`take_seat`] does.
///
/// # Errors
/// When far memory does not answer, or the member was declared dead.
pub async fn list_grants(
    memory: &Memory,
    at: &MembersAt,
    seat: &Seat,
    grants: &[Epoch],
) -> Result<(), MemoryError> {
    // Before the list: a recoverer that finds this member's list also takes the words behind it for this
    // member's, and the previous member of the seat may have left some.
    let later = at.layout.later_grants(seat.slot);
    if !later.is_empty() {
        memory.write(&at.piece, later.start, &vec![0; (later.end - later.start) as usize]).await?;
    }
    memory.write(&at.piece, at.layout.grants(seat.slot).start, &at.layout.encode_grants(grants)).await
}

/// Lists a member's grant of the region at a place of the list of those that the database got later. The
/// member uses the grant only afterwards (M2), and with `None` no more.
///
/// # Errors
/// When far memory does not answer, or the member was declared dead.
pub async fn list_later_grant(
    memory: &Memory,
    at: &MembersAt,
    seat: &Seat,
    place: u16,
    grant: Option<LaterGrant>,
) -> Result<(), MemoryError> {
    memory.write(&at.piece, at.layout.later_grant(seat.slot, place), &LaterGrant::encode(grant)).await
}

/// For each place in the list of later regions, whether a member has a grant of its region listed.
///
/// # Errors
/// When far memory does not answer.
pub async fn listed_later_grants(memory: &Memory, at: &MembersAt) -> Result<Vec<bool>, MemoryError> {
    let seats = read_seats(memory, at).await?;
    let mut listed = vec![false; usize::from(at.layout.later())];
    for slot in
        (0..).zip(&seats).filter(|(_, seat)| seat.claim.is_some()).filter_map(|(slot, _)| Slot::new(slot))
    {
        let bytes = memory.read(&at.piece, at.layout.later_grants(slot)).await?;
        let none = LaterGrant::encode(None);
        for (listed, grant) in listed.iter_mut().zip(bytes.chunks_exact(none.len())) {
            *listed |= *grant != none;
        }
    }
    Ok(listed)
}

/// Waits until all duties of the member have finished, with a check every `pause`, and gives its seat back.
/// `false`: the seat was not given back, because an operation of a duty may still be in flight; the other
/// members then find that this member is dead. The caller ensures that nothing else of the member is in
/// flight, and writes nothing for it afterwards. Before each pause, `meanwhile` is called to send a
/// heartbeat, since a duty may be waiting for a node.
///
/// # Errors
/// When far memory does not answer. Then, too, the other members find that this member is dead.
pub async fn leave_seat<R: SeatRules, E: From<MemoryError>>(
    memory: &Memory,
    at: &MembersAt,
    seat: &Seat,
    duties: &Duties,
    pause: Duration,
    mut meanwhile: impl AsyncFnMut() -> Result<(), E>,
) -> Result<bool, E> {
    while R::waits_for_duties() && duties.are_in_flight() {
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

/// Writes a member's heartbeat, the `count`-th.
///
/// # Errors
/// When far memory does not answer, or the member was declared dead.
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
