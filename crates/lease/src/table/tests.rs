use super::*;

const OWNER: OwnerId = OwnerId(7);
const KEY: AccessKey = AccessKey::from_bytes([1; 16]);
const TTL: Millis = Millis(1_000);

fn term(remaining: u64) -> Term {
    Term { remaining: Millis(remaining), revoked: false }
}

fn table_with_one_lease() -> (RegionTable, Lending) {
    let mut table = RegionTable::new(3, 1, TTL);
    let grants = table.grant(Millis(0), OWNER, LeaseClass::Revocable, 1, &mut || KEY);
    (table, grants[0].lending)
}

#[test]
fn a_lease_ends_at_its_deadline_though_the_table_was_not_asked_meanwhile() {
    let (mut table, lending) = table_with_one_lease();
    assert_eq!(table.ttl(), TTL);
    assert_eq!(table.check(Millis(999), lending, &KEY), Ok(()));
    assert_eq!(table.check(Millis(1_000), lending, &KEY), Err(Refusal::StaleEpoch));
    assert_eq!(table.renew(Millis(1_000), OWNER, lending, &KEY), Err(LeaseRefusal::Ended));
}

#[test]
fn a_renewal_counts_from_when_it_is_made_and_never_shortens() {
    let (mut table, lending) = table_with_one_lease();
    assert_eq!(table.renew(Millis(600), OWNER, lending, &KEY), Ok(term(1_000)));
    assert_eq!(table.renew(Millis(500), OWNER, lending, &KEY), Ok(term(1_100)));
    assert_eq!(table.next_deadline(), Some(Millis(1_600)));
}

#[test]
fn a_region_is_lent_again_only_when_scrubbed() {
    let (mut table, lending) = table_with_one_lease();
    assert_eq!(table.release(OWNER, lending, &KEY), Ok(Released::Fence));
    assert!(!table.scrubbed(lending));
    assert!(table.grant(Millis(1), OWNER, LeaseClass::Pinned, 1, &mut || KEY).is_empty());
    assert!(table.begin_scrub(lending));
    assert!(!table.begin_scrub(lending));
    assert!(table.grant(Millis(2), OWNER, LeaseClass::Pinned, 1, &mut || KEY).is_empty());
    assert!(table.scrubbed(lending));
    let again = table.grant(Millis(3), OWNER, LeaseClass::Pinned, 1, &mut || KEY);
    assert!(again[0].lending.epoch > lending.epoch);
}

#[test]
fn releasing_twice_is_no_error_and_fences_once() {
    let (mut table, lending) = table_with_one_lease();
    assert_eq!(table.release(OWNER, lending, &KEY), Ok(Released::Fence));
    assert_eq!(table.release(OWNER, lending, &KEY), Ok(Released::Already));
    assert!(table.expire(Millis(5_000)).is_empty());
}

#[test]
fn neither_another_owner_nor_another_key_touches_a_lease() {
    let (mut table, lending) = table_with_one_lease();
    let other = AccessKey::from_bytes([2; 16]);
    assert_eq!(table.renew(Millis(1), OwnerId(8), lending, &KEY), Err(LeaseRefusal::WrongKey));
    assert_eq!(table.renew(Millis(1), OWNER, lending, &other), Err(LeaseRefusal::WrongKey));
    assert_eq!(table.release(OWNER, lending, &other), Err(LeaseRefusal::WrongKey));
    assert_eq!(table.check(Millis(1), lending, &other), Err(Refusal::WrongKey));
}

#[test]
fn leases_of_an_earlier_incarnation_have_ended_and_later_ones_are_unknown() {
    let (mut table, lending) = table_with_one_lease();
    let earlier = Lending { epoch: Epoch::new(2, u32::MAX), ..lending };
    let later = Lending { epoch: Epoch::new(3, 2), ..lending };
    assert_eq!(table.renew(Millis(1), OWNER, earlier, &KEY), Err(LeaseRefusal::Ended));
    assert_eq!(table.renew(Millis(1), OWNER, later, &KEY), Err(LeaseRefusal::Unknown));
    assert_eq!(table.check(Millis(1), Lending { region: 1, ..lending }, &KEY), Err(Refusal::NotAttached));
}

#[test]
fn a_used_up_incarnation_lends_nothing_rather_than_wrap() {
    let mut table = RegionTable::new(3, 3, TTL);
    table.last_counter = u32::MAX - 2;
    assert_eq!(table.grant(Millis(0), OWNER, LeaseClass::Revocable, 3, &mut || KEY).len(), 2);
    assert_eq!(table.epochs_left(), 0);
    assert!(table.grant(Millis(0), OWNER, LeaseClass::Revocable, 1, &mut || KEY).is_empty());
}

/// A key that is not [`KEY`].
const CLIENTS: AccessKey = AccessKey::from_bytes([3; 16]);

fn add(table: &mut RegionTable, now: u64, lease: Lending) -> Result<Grant, GrantRefusal> {
    table.add_grant(Millis(now), OWNER, lease, &KEY, GrantMode::ReadWrite, CLIENTS)
}

#[test]
fn grants_of_a_lease_have_epochs_and_keys_of_their_own_and_end_one_by_one() {
    let (mut table, lease) = table_with_one_lease();
    let (first, second) = (add(&mut table, 1, lease).unwrap(), add(&mut table, 1, lease).unwrap());
    assert!(lease.epoch < first.lending.epoch && first.lending.epoch < second.lending.epoch);
    assert_eq!(table.check(Millis(2), first.lending, &CLIENTS), Ok(()));
    assert_eq!(table.check(Millis(2), first.lending, &KEY), Err(Refusal::WrongKey));
    let fenced = table.fence_grant(Millis(2), OWNER, lease, &KEY, first.lending.epoch);
    assert_eq!(fenced, Ok(first.lending));
    assert_eq!(table.check(Millis(2), first.lending, &CLIENTS), Err(Refusal::StaleEpoch));
    assert_eq!(table.check(Millis(2), second.lending, &CLIENTS), Ok(()));
    assert_eq!(table.check(Millis(2), lease, &KEY), Ok(()));
    assert_eq!(table.fence_grant(Millis(2), OWNER, lease, &KEY, first.lending.epoch), fenced, "asked twice");
}

#[test]
fn all_grants_end_with_their_lease() {
    let (mut table, lease) = table_with_one_lease();
    let client = add(&mut table, 1, lease).unwrap().lending;
    assert_eq!(table.check(TTL, client, &CLIENTS), Err(Refusal::StaleEpoch));
    assert_eq!(table.release(OWNER, lease, &KEY), Ok(Released::Fence));
    assert_eq!(table.check(Millis(2), client, &CLIENTS), Err(Refusal::StaleEpoch));
    assert_eq!(add(&mut table, 2, lease), Err(GrantRefusal::Lease(LeaseRefusal::Ended)));
}

#[test]
fn a_client_s_grant_neither_renews_nor_releases_nor_grants() {
    let (mut table, lease) = table_with_one_lease();
    let client = add(&mut table, 1, lease).unwrap().lending;
    assert_eq!(table.renew(Millis(2), OWNER, client, &CLIENTS), Err(LeaseRefusal::WrongKey));
    assert_eq!(table.release(OWNER, client, &CLIENTS), Err(LeaseRefusal::WrongKey));
    let more = table.add_grant(Millis(2), OWNER, client, &CLIENTS, GrantMode::ReadOnly, CLIENTS);
    assert_eq!(more, Err(GrantRefusal::Lease(LeaseRefusal::WrongKey)));
    let own = table.fence_grant(Millis(2), OWNER, lease, &KEY, lease.epoch);
    assert_eq!(own, Err(GrantRefusal::OwnersOwn));
}

#[test]
fn a_lease_has_no_more_grants_than_its_limit_and_room_again_when_one_is_fenced() {
    let (mut table, lease) = table_with_one_lease();
    let grants: Vec<_> = (1..MAX_GRANTS_PER_REGION).map(|_| add(&mut table, 1, lease).unwrap()).collect();
    assert_eq!(add(&mut table, 1, lease), Err(GrantRefusal::Full));
    table.fence_grant(Millis(1), OWNER, lease, &KEY, grants[5].lending.epoch).unwrap();
    assert!(add(&mut table, 1, lease).unwrap().lending.epoch > grants.last().unwrap().lending.epoch);
}

#[test]
fn a_used_up_incarnation_adds_no_grant_rather_than_wrap() {
    let (mut table, lease) = table_with_one_lease();
    table.last_counter = u32::MAX - 1;
    assert_eq!(add(&mut table, 1, lease).unwrap().lending.epoch, Epoch::new(3, u32::MAX));
    assert_eq!(add(&mut table, 1, lease), Err(GrantRefusal::EpochsUsedUp));
}

#[test]
fn a_revoked_lease_lasts_its_grace_and_no_renewal_puts_the_end_off() {
    let (mut table, lease) = table_with_one_lease();
    assert_eq!(table.revoke(Millis(500), lease, Millis(3_000)), Ok(Millis(3_500)));
    let renewed = table.renew(Millis(600), OWNER, lease, &KEY);
    assert_eq!(renewed, Ok(Term { remaining: Millis(2_900), revoked: true }));
    let renewed = table.renew(Millis(3_400), OWNER, lease, &KEY);
    assert_eq!(renewed, Ok(Term { remaining: Millis(100), revoked: true }));
    assert_eq!(table.revoke(Millis(3_400), lease, Millis(9_000)), Ok(Millis(3_500)), "not put off");
    assert_eq!(table.renew(Millis(3_500), OWNER, lease, &KEY), Err(LeaseRefusal::Ended));
    assert_eq!(table.expire(Millis(3_500)), [lease]);
}

#[test]
fn a_revocation_takes_nothing_back_that_was_promised() {
    let (mut table, lease) = table_with_one_lease();
    assert_eq!(table.revoke(Millis(1), lease, Millis(0)), Ok(TTL));
    assert!(table.expire(Millis(999)).is_empty());
    assert_eq!(table.check(Millis(999), lease, &KEY), Ok(()));
}

#[test]
fn a_revoked_lease_that_is_not_renewed_ends_at_its_term() {
    let (mut table, lease) = table_with_one_lease();
    table.revoke(Millis(1), lease, MAX_GRACE).unwrap();
    assert_eq!(table.expire(TTL), [lease]);
}

#[test]
fn pinned_and_ended_leases_are_not_revoked() {
    let mut table = RegionTable::new(3, 1, TTL);
    let lease = table.grant(Millis(0), OWNER, LeaseClass::Pinned, 1, &mut || KEY)[0].lending;
    assert_eq!(table.revoke(Millis(1), lease, Millis(0)), Err(RevokeRefusal::Pinned));
    let unknown = Lending { region: 7, ..lease };
    assert_eq!(table.revoke(Millis(1), unknown, Millis(0)), Err(RevokeRefusal::Unknown));
    assert_eq!(table.revoke(TTL, lease, Millis(0)), Err(RevokeRefusal::Ended));
}

#[test]
fn all_grants_of_a_lease_are_of_its_owner_until_it_ends() {
    let (mut table, lease) = table_with_one_lease();
    let grant = add(&mut table, 1, lease).unwrap().lending;
    assert_eq!((table.owner(lease), table.owner(grant)), (Some(OWNER), Some(OWNER)));
    assert_eq!(table.owner(Lending { region: 9, ..lease }), None);
    assert_eq!(table.fence_grant(Millis(2), OWNER, lease, &KEY, grant.epoch).map(|_| ()), Ok(()));
    assert_eq!((table.owner(lease), table.owner(grant)), (Some(OWNER), None));
    assert_eq!(table.release(OWNER, lease, &KEY), Ok(Released::Fence));
    assert_eq!(table.owner(lease), None);
}
