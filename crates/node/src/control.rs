//! The node's side of the control plane: what the broker and owners may ask, over gRPC.

use std::sync::Arc;
use std::time::Duration;

use farpool_control::limits::{MAX_LEASES_PER_REQUEST, MAX_REGIONS_PER_ACQUIRE};
use farpool_lease::{LeaseClass, Millis};
use farpool_wire::control::node_server::{Node, NodeServer};
use farpool_wire::control::{
    self as messages, AddGrantRequest, AddGrantResponse, AwaitRevocationRequest, AwaitRevocationResponse,
    FenceGrantRequest, FenceGrantResponse, GrantRequest, GrantResponse, LeaseRef, RegionsRequest,
    RegionsResponse, ReleaseRequest, ReleaseResponse, RenewRequest, RenewResponse, ResizeRequest,
    ResizeResponse, RevokeRequest, RevokeResponse,
};
use farpool_wire::{Epoch, GrantMode, OwnerId};
use tonic::{Request, Response, Status};

use crate::answers::renew_outcome;
use crate::lender::{FenceError, Lender};

/// How long an owner's request to be told of a revocation waits: less than the deadline of any request.
const REVOCATION_WAIT: Duration = Duration::from_secs(5);

/// The gRPC service over a node's core, ready for [`farpool_control::Listener::serve`].
pub fn control_service<L: Lender>(lender: Arc<L>) -> NodeServer<ControlService<L>> {
    NodeServer::new(ControlService { lender })
}

/// Checks requests and passes them to the [`Lender`].
pub struct ControlService<L> {
    lender: Arc<L>,
}

#[tonic::async_trait]
impl<L: Lender> Node for ControlService<L> {
    async fn grant(&self, request: Request<GrantRequest>) -> Result<Response<GrantResponse>, Status> {
        let GrantRequest { owner, count, class } = request.into_inner();
        let Some(class) = LeaseClass::from_wire(class) else {
            return Err(Status::invalid_argument("the class of the lease is missing"));
        };
        if count == 0 || count > MAX_REGIONS_PER_ACQUIRE {
            let text = format!("a grant is of 1 to {MAX_REGIONS_PER_ACQUIRE} regions, not {count}");
            return Err(Status::invalid_argument(text));
        }
        let leases = self.lender.grant(OwnerId(owner), class, count);
        tracing::debug!(owner = %OwnerId(owner), asked = count, granted = leases.len(), "regions lent");
        Ok(Response::new(GrantResponse { leases }))
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Result<Response<RenewResponse>, Status> {
        let RenewRequest { owner, leases } = request.into_inner();
        check_number(&leases)?;
        let outcomes = leases.iter().map(|lease| renew_outcome(self.lender.renew(OwnerId(owner), lease)));
        Ok(Response::new(RenewResponse { outcomes: outcomes.collect() }))
    }

    async fn add_grant(
        &self,
        request: Request<AddGrantRequest>,
    ) -> Result<Response<AddGrantResponse>, Status> {
        let AddGrantRequest { owner, lease, mode } = request.into_inner();
        let lease = lease.ok_or_else(no_lease)?;
        let mode: GrantMode = messages::GrantMode::from_wire(mode)
            .ok_or_else(|| Status::invalid_argument("the mode of the grant is missing"))?;
        let grant = self.lender.add_grant(OwnerId(owner), &lease, mode);
        let grant = grant.map_err(|refusal| Status::failed_precondition(refusal.to_string()))?;
        tracing::debug!(owner = %OwnerId(owner), region = lease.region, epoch = %grant.lending.epoch, "grant added");
        let key = grant.key.as_bytes().to_vec();
        Ok(Response::new(AddGrantResponse { epoch: grant.lending.epoch.0, key }))
    }

    async fn fence_grant(
        &self,
        request: Request<FenceGrantRequest>,
    ) -> Result<Response<FenceGrantResponse>, Status> {
        let FenceGrantRequest { owner, lease, grant } = request.into_inner();
        let lease = lease.ok_or_else(no_lease)?;
        let lender = self.lender.clone();
        // The fence may copy a region, so it does not run on a thread that answers other requests.
        let fence = move || lender.fence_grant(OwnerId(owner), &lease, Epoch(grant));
        let fenced = tokio::task::spawn_blocking(fence).await;
        match fenced.map_err(|error| Status::internal(error.to_string()))? {
            Ok(()) => Ok(Response::new(FenceGrantResponse {})),
            Err(error @ FenceError::Refused(_)) => Err(Status::failed_precondition(error.to_string())),
            Err(error @ FenceError::NoMemory(_)) => Err(Status::resource_exhausted(error.to_string())),
        }
    }

    async fn revoke(&self, request: Request<RevokeRequest>) -> Result<Response<RevokeResponse>, Status> {
        let RevokeRequest { owner, count, grace_ms } = request.into_inner();
        let answer = self.lender.revoke(OwnerId(owner), count, Millis(grace_ms));
        tracing::info!(owner = %OwnerId(owner), asked = count, revoked = answer.revoked, "leases taken back");
        Ok(Response::new(answer))
    }

    async fn await_revocation(
        &self,
        request: Request<AwaitRevocationRequest>,
    ) -> Result<Response<AwaitRevocationResponse>, Status> {
        let AwaitRevocationRequest { owner, seen } = request.into_inner();
        let mut changes = self.lender.revocations();
        let revoked = async {
            loop {
                let is_ending = *changes.borrow_and_update();
                let last = self.lender.last_revocation(OwnerId(owner));
                if last > seen {
                    return Some(last);
                }
                if is_ending || changes.changed().await.is_err() {
                    return None;
                }
            }
        };
        let answer = match tokio::time::timeout(REVOCATION_WAIT, revoked).await {
            Ok(Some(last)) => AwaitRevocationResponse { seen: last, revoked: true },
            Ok(None) | Err(_) => AwaitRevocationResponse { seen, revoked: false },
        };
        Ok(Response::new(answer))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        let ReleaseRequest { owner, leases } = request.into_inner();
        check_number(&leases)?;
        let lender = self.lender.clone();
        // A fence may have to wait until a network card is cut off, so it does not run on a thread that
        // answers other requests.
        let release = move || {
            let released = leases.iter().filter(|lease| lender.release(OwnerId(owner), lease).is_ok());
            released.count() as u32
        };
        let released = tokio::task::spawn_blocking(release).await;
        let released = released.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(ReleaseResponse { released }))
    }

    async fn resize(&self, request: Request<ResizeRequest>) -> Result<Response<ResizeResponse>, Status> {
        let ResizeRequest { memory_bytes, grace_ms } = request.into_inner();
        let regions = u32::try_from(memory_bytes / self.lender.region_bytes()).unwrap_or(u32::MAX);
        let answer = self.lender.resize(regions, Millis(grace_ms));
        tracing::info!(
            regions = answer.regions_target,
            of = self.lender.regions_total(),
            revoked = answer.revoked,
            "the node was resized"
        );
        Ok(Response::new(answer))
    }

    async fn regions(&self, _: Request<RegionsRequest>) -> Result<Response<RegionsResponse>, Status> {
        Ok(Response::new(RegionsResponse {
            address: Some(self.lender.address()),
            region_bytes: self.lender.region_bytes(),
            regions_total: self.lender.regions_total(),
            lent: self.lender.states(),
            regions_target: self.lender.regions_target(),
            expired_revocations: self.lender.expired_revocations(),
        }))
    }
}

fn no_lease() -> Status {
    Status::invalid_argument("the lease is missing")
}

fn check_number(leases: &[LeaseRef]) -> Result<(), Status> {
    if leases.len() > MAX_LEASES_PER_REQUEST {
        let text = format!(
            "{} leases in one request; the limit is {MAX_LEASES_PER_REQUEST}: split the request",
            leases.len()
        );
        return Err(Status::invalid_argument(text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use farpool_control::{Listener, dial};
    use farpool_wire::control::node_client::NodeClient;
    use farpool_wire::{AccessKey, Epoch};
    use tonic::Code;
    use tonic::transport::Channel;

    use super::*;
    use crate::lender::fake::{FakeLender, TTL_MS};

    async fn a_node(regions: u32) -> (Arc<FakeLender>, NodeClient<Channel>) {
        let lender = Arc::new(FakeLender::new(regions));
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
        let address = listener.address().to_string();
        tokio::spawn(listener.serve(control_service(lender.clone()), std::future::pending()));
        (lender, NodeClient::new(dial(&address, None).unwrap()))
    }

    fn grant(count: u32) -> GrantRequest {
        GrantRequest { owner: 7, count, class: LeaseClass::Revocable.to_wire() }
    }

    #[tokio::test]
    async fn leases_are_granted_renewed_and_released_by_their_owner_only() {
        let (lender, mut node) = a_node(3).await;
        let leases = node.grant(grant(9)).await.unwrap().into_inner().leases;
        assert_eq!(leases.len(), 3);
        let named: Vec<_> = leases
            .iter()
            .map(|lease| LeaseRef::new(lease.region, Epoch(lease.epoch), &lease.access_key().unwrap()))
            .collect();
        let forged = LeaseRef::new(0, Epoch(named[0].epoch), &AccessKey::from_bytes([0xEE; 16]));

        let request = RenewRequest { owner: 7, leases: vec![named[0].clone(), forged.clone()] };
        let answer = node.renew(request).await.unwrap().into_inner();
        assert_eq!(answer.outcomes[0].remaining_ms, TTL_MS);
        assert_eq!(answer.outcomes.iter().map(|outcome| outcome.renewed).collect::<Vec<_>>(), [true, false]);
        assert!(!answer.outcomes[1].refusal.is_empty());

        let stranger = ReleaseRequest { owner: 8, leases: named.clone() };
        assert_eq!(node.release(stranger).await.unwrap().into_inner().released, 0);
        let owner = ReleaseRequest { owner: 7, leases: named[1..].iter().cloned().chain([forged]).collect() };
        assert_eq!(node.release(owner).await.unwrap().into_inner().released, 2);
        assert_eq!(lender.counts().0.held, 1);
    }

    #[tokio::test]
    async fn only_the_owner_adds_grants_and_fences_them() {
        let (lender, mut node) = a_node(1).await;
        let lease = node.grant(grant(1)).await.unwrap().into_inner().leases.remove(0);
        let named = LeaseRef::new(lease.region, Epoch(lease.epoch), &lease.access_key().unwrap());
        let mode = messages::GrantMode::ReadOnly as i32;
        let add = |owner| AddGrantRequest { owner, lease: Some(named.clone()), mode };
        assert_eq!(node.add_grant(add(8)).await.unwrap_err().code(), Code::FailedPrecondition);
        let modeless = AddGrantRequest { mode: 0, ..add(7) };
        assert_eq!(node.add_grant(modeless).await.unwrap_err().code(), Code::InvalidArgument);
        let client = node.add_grant(add(7)).await.unwrap().into_inner();
        assert!(client.epoch > lease.epoch && client.access_key().is_some());
        assert_eq!(lender.states()[0].grants, 2);
        let fence = |owner| FenceGrantRequest { owner, lease: Some(named.clone()), grant: client.epoch };
        assert_eq!(node.fence_grant(fence(8)).await.unwrap_err().code(), Code::FailedPrecondition);
        for _ in 0..2 {
            node.fence_grant(fence(7)).await.unwrap();
            assert_eq!(lender.states()[0].grants, 1);
        }
        let own = FenceGrantRequest { grant: lease.epoch, ..fence(7) };
        assert_eq!(node.fence_grant(own).await.unwrap_err().code(), Code::FailedPrecondition);
    }

    #[tokio::test]
    async fn a_lease_taken_back_tells_its_owner_at_the_next_renewal() {
        let (_lender, mut node) = a_node(1).await;
        let lease = node.grant(grant(1)).await.unwrap().into_inner().leases.remove(0);
        let named = LeaseRef::new(lease.region, Epoch(lease.epoch), &lease.access_key().unwrap());
        let revoke = RevokeRequest { owner: 7, count: 5, grace_ms: 3 * TTL_MS };
        let answer = node.revoke(revoke).await.unwrap().into_inner();
        assert_eq!((answer.revoked, answer.remaining_ms), (1, 3 * TTL_MS));
        let request = RenewRequest { owner: 7, leases: vec![named] };
        let outcome = node.renew(request).await.unwrap().into_inner().outcomes.remove(0);
        assert_eq!((outcome.renewed, outcome.revoked, outcome.remaining_ms), (true, true, 3 * TTL_MS));
    }

    #[tokio::test]
    async fn impossible_requests_are_refused() {
        let (_lender, mut node) = a_node(3).await;
        for bad in [grant(0), grant(u32::MAX), GrantRequest { class: 0, ..grant(1) }] {
            assert_eq!(node.grant(bad).await.unwrap_err().code(), Code::InvalidArgument);
        }
        let add = AddGrantRequest { lease: None, ..AddGrantRequest::default() };
        assert_eq!(node.add_grant(add).await.unwrap_err().code(), Code::InvalidArgument);
        let fence = FenceGrantRequest { lease: None, ..FenceGrantRequest::default() };
        assert_eq!(node.fence_grant(fence).await.unwrap_err().code(), Code::InvalidArgument);
        let keyless = RenewRequest { owner: 7, leases: vec![LeaseRef::default()] };
        assert!(!node.renew(keyless).await.unwrap().into_inner().outcomes[0].renewed);
    }

    #[tokio::test]
    async fn a_request_of_just_the_permitted_size_is_answered_and_one_more_is_refused() {
        let (_lender, mut node) = a_node(3).await;
        let granted = node.grant(grant(MAX_REGIONS_PER_ACQUIRE)).await.unwrap().into_inner();
        assert_eq!(granted.leases.len(), 3);
        let refused = node.grant(grant(MAX_REGIONS_PER_ACQUIRE + 1)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);

        let mut leases = vec![LeaseRef::default(); MAX_LEASES_PER_REQUEST];
        let renew = |leases: &Vec<_>| RenewRequest { owner: 7, leases: leases.clone() };
        let release = |leases: &Vec<_>| ReleaseRequest { owner: 7, leases: leases.clone() };
        let outcomes = node.renew(renew(&leases)).await.unwrap().into_inner().outcomes;
        assert_eq!(outcomes.len(), MAX_LEASES_PER_REQUEST);
        assert_eq!(node.release(release(&leases)).await.unwrap().into_inner().released, 0);
        leases.push(LeaseRef::default());
        assert_eq!(node.renew(renew(&leases)).await.unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(node.release(release(&leases)).await.unwrap_err().code(), Code::InvalidArgument);
    }

    #[tokio::test]
    async fn the_table_shows_what_is_lent() {
        let (lender, mut node) = a_node(3).await;
        node.grant(grant(2)).await.unwrap();
        let table = node.regions(RegionsRequest {}).await.unwrap().into_inner();
        assert_eq!((table.regions_total, table.lent.len()), (3, 2));
        assert_eq!((table.address, table.region_bytes), (Some(lender.address()), lender.region_bytes()));
        assert!(table.lent.iter().all(|region| region.held && region.owner == 7));
    }

    #[tokio::test]
    async fn an_owner_that_waits_is_told_of_a_revocation_of_its_leases_and_of_no_other_s() {
        let (_, mut node) = a_node(3).await;
        node.grant(grant(2)).await.unwrap();
        let wait = |owner, seen| {
            let mut node = node.clone();
            async move {
                let request = AwaitRevocationRequest { owner, seen };
                node.await_revocation(request).await.unwrap().into_inner()
            }
        };
        let (waits, stranger) = (tokio::spawn(wait(7, 0)), tokio::spawn(wait(8, 0)));
        let mut operator = node.clone();
        operator.revoke(RevokeRequest { owner: 7, count: 1, grace_ms: 60_000 }).await.unwrap();
        let answer = waits.await.unwrap();
        assert!(answer.revoked);
        assert_eq!(wait(7, 0).await, answer, "one that comes late is told at once");
        let waits = tokio::spawn(wait(7, answer.seen));
        tokio::task::yield_now().await;
        assert!(!waits.is_finished() && !stranger.is_finished());
        operator.revoke(RevokeRequest { owner: 7, count: 1, grace_ms: 60_000 }).await.unwrap();
        assert!(waits.await.unwrap().seen > answer.seen);
        assert!(!stranger.is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn an_owner_that_waits_in_vain_is_answered_in_time_for_its_deadline() {
        let service = ControlService { lender: Arc::new(FakeLender::new(1)) };
        let request = Request::new(AwaitRevocationRequest { owner: 7, seen: 3 });
        let started = tokio::time::Instant::now();
        let answer = service.await_revocation(request).await.unwrap().into_inner();
        assert_eq!((answer.seen, answer.revoked), (3, false));
        assert!(started.elapsed() < farpool_control::REQUEST_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_ends_lets_no_owner_wait() {
        let lender = Arc::new(FakeLender::new(1));
        let service = ControlService { lender: lender.clone() };
        let started = tokio::time::Instant::now();
        let ask = || service.await_revocation(Request::new(AwaitRevocationRequest { owner: 7, seen: 0 }));
        let end = async {
            tokio::task::yield_now().await;
            lender.revocations.send_replace(true);
        };
        let (answer, ()) = tokio::join!(ask(), end);
        assert!(!answer.unwrap().into_inner().revoked);
        assert!(!ask().await.unwrap().into_inner().revoked);
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test]
    async fn a_node_is_resized_to_whole_regions_and_its_table_shows_it() {
        let (lender, mut node) = a_node(4).await;
        let region_bytes = lender.region_bytes();
        for (memory_bytes, target) in [(2 * region_bytes - 1, 1), (0, 0), (u64::MAX, 4)] {
            let request = ResizeRequest { memory_bytes, grace_ms: 0 };
            let answer = node.resize(request).await.unwrap().into_inner();
            let table = node.regions(RegionsRequest {}).await.unwrap().into_inner();
            assert_eq!((answer.regions_target, table.regions_target), (target, target));
            if target == 1 {
                assert_eq!(table.lent.iter().filter(|region| region.withdrawn).count(), 3);
            }
        }
    }
}
