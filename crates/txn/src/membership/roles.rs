//! What one member does for all (M5).

use std::time::Duration;

use farpool_wire::Epoch;

use super::layout::{MembersAt, Role};
use crate::memory::{Memory, MemoryError};

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

/// Does what a role is for whenever nobody else does, until `is_over`; looks every `pause` whether somebody
/// does. `work` returns once it is over and nothing of it is under way.
///
/// # Errors
/// What `work` returns, or when far memory does not answer. Something may be under way then: the member has
/// to be shut out before the role is another's.
pub async fn fill_role<E: From<MemoryError>>(
    memory: &Memory,
    at: &MembersAt,
    (role, claim): (Role, Epoch),
    pause: Duration,
    is_over: impl Fn() -> bool,
    work: impl AsyncFn() -> Result<(), E>,
) -> Result<(), E> {
    while !is_over() {
        if take_role(memory, at, role, claim).await? {
            work().await?;
            give_up_role(memory, at, role, claim).await?;
        }
        memory.endpoint().sleep(pause).await;
    }
    Ok(())
}
