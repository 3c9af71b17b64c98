//! Messages that tell what came of a request.

use farpool_lease::{Grant, LeaseClass, LeaseRefusal, Millis, Term};
use farpool_wire::control::{Lease, NodeAddress, RenewOutcome, ResizeResponse, RevokeResponse};

use crate::lending::NodeCore;

/// The message that tells an owner of a new lease.
pub fn lease_message(grant: &Grant, class: LeaseClass, ttl: Millis, address: NodeAddress) -> Lease {
    Lease {
        address: Some(address),
        region: grant.lending.region,
        epoch: grant.lending.epoch.0,
        key: grant.key.as_bytes().to_vec(),
        ttl_ms: ttl.0,
        class: class.to_wire(),
    }
}

/// Resizes a node for its operator. Returns the message that says what came of it.
pub fn resize(core: &mut NodeCore, now: Millis, regions: u32, grace: Millis) -> ResizeResponse {
    let RevokeResponse { revoked, pinned, remaining_ms, .. } = core.resize(now, regions, grace);
    ResizeResponse { regions_target: core.target(), revoked, pinned, remaining_ms }
}

/// The message that tells an owner the outcome of one lease's renewal.
pub fn renew_outcome(renewed: Result<Term, LeaseRefusal>) -> RenewOutcome {
    match renewed {
        Ok(term) => RenewOutcome {
            renewed: true,
            remaining_ms: term.remaining.0,
            revoked: term.revoked,
            ..RenewOutcome::default()
        },
        Err(refusal) => RenewOutcome { refusal: refusal.to_string(), ..RenewOutcome::default() },
    }
}
