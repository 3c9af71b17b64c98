//! Roles: what one member does for all (M5).

use std::time::Duration;

use farpool_wire::Epoch;

use super::layout::{MembersAt, Role};
use crate::memory::{Memory, MemoryError};

/// The claim of the member that has a role.
///
/// # Errors
/// When far memory does not answer.
pub async fn role_of(memory: &Memory, at: &MembersAt, role: Role) -> Result<Option<Epoch>, MemoryError> {
    let claim = memory.read_word(&at.piece, at.layout.role(role)).await?;
    Ok(Some(Epoch(claim)).filter(|claim| claim.0 != 0))
}

/// Takes a role, if no member has it; returns whether the caller has it now.
///
/// # Errors
/// When far memory does not answer: the caller may have the role all the same.
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

/// Frees a role, if the member with this claim has it.
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

/// Does the work of a role whenever no other member does, until `has_ended`; looks every `pause` whether the
/// role is free. `work` returns once it has finished, with nothing of it in flight.
///
/// # Errors
/// The error of `work`, or when far memory does not answer. Something may be in flight then: the member has
/// to be evicted before another member gets the role.
pub async fn fill_role<E: From<MemoryError>>(
    memory: &Memory,
    at: &MembersAt,
    (role, claim): (Role, Epoch),
    pause: Duration,
    has_ended: impl Fn() -> bool,
    work: impl AsyncFn() -> Result<(), E>,
) -> Result<(), E> {
    while !has_ended() {
        if take_role(memory, at, role, claim).await? {
            work().await?;
            give_up_role(memory, at, role, claim).await?;
        }
        memory.endpoint().sleep(pause).await;
    }
    Ok(())
}
