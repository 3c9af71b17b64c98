//! What a node does with clients that break the rules: that are late, or use an old or a wrong key.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use farpool_fabric::{OpError, Queue, TransportChoice, Uncertain};
use farpool_wire::control::Lease;
use farpool_wire::{AccessKey, GrantMode, Refusal};

use crate::support::{Client, Pool, PoolOptions, assert_complaint, eventually, run, within};

const OWNER: u64 = 1;
const OTHER_OWNER: u64 = 2;
const SECRET: &[u8] = b"what the first holder wrote";

/// One region, so that the next owner gets the same memory as the first one.
fn pool_of_one_region() -> Pool {
    Pool::start(PoolOptions { nodes: 1, memory: "1MiB", region_size: "1MiB" })
}

/// Lets a lease expire: it is not renewed, so the node takes the region back.
fn let_expire(pool: &Pool) {
    eventually("the region is free again", || pool.regions_free() == pool.regions_total());
}

#[test]
fn client_with_an_expired_lease_is_refused_by_the_node_over_tcp() {
    let pool = pool_of_one_region();
    let client = Client::new(&pool.address, OWNER, TransportChoice::Tcp);
    let lease = client.acquire(1).remove(0);
    let queue = client.open(&lease);
    client.write(&queue, &lease, SECRET).unwrap();
    assert_eq!(client.read(&queue, &lease, SECRET.len()).unwrap(), SECRET);
    let_expire(&pool);
    let stale = OpError::Refused(Refusal::StaleEpoch);
    assert_eq!(client.read(&queue, &lease, SECRET.len()).unwrap_err(), stale);
    assert_eq!(client.write(&queue, &lease, b"late").unwrap_err(), stale);
    let renewal = client.renew(&lease);
    assert!(!renewal.renewed && !renewal.refusal.is_empty(), "{renewal:?}");
}

#[test]
fn client_with_an_expired_lease_is_refused_over_shared_memory() {
    let pool = pool_of_one_region();
    let client = Client::new(&pool.address, OWNER, TransportChoice::Shm);
    let lease = client.acquire(1).remove(0);
    let queue = client.open(&lease);
    client.write(&queue, &lease, SECRET).unwrap();
    eventually("the epoch has moved", || client.read(&queue, &lease, SECRET.len()).is_err());
    let error = client.read(&queue, &lease, SECRET.len()).unwrap_err();
    assert_eq!(error, OpError::Refused(Refusal::NotAttached), "the client has unmapped the memory");
    let error = client.attach(&queue, &lease, lease.access_key().unwrap()).unwrap_err();
    assert_eq!(error, OpError::Refused(Refusal::StaleEpoch));
    let_expire(&pool); // even while a process still maps the old memory
    drop(queue);
    let error = client.attach(&client.connect(&lease), &lease, lease.access_key().unwrap()).unwrap_err();
    assert_eq!(error, OpError::Refused(Refusal::StaleEpoch));
}

#[test]
fn lease_that_is_renewed_outlives_its_first_term() {
    let pool = pool_of_one_region();
    let client = Client::new(&pool.address, OWNER, TransportChoice::Tcp);
    let lease = client.acquire(1).remove(0);
    let queue = client.open(&lease);
    client.write(&queue, &lease, SECRET).unwrap();
    let first_term = std::time::Instant::now();
    eventually("its first term has passed", || {
        assert!(client.renew(&lease).renewed);
        assert_eq!(client.read(&queue, &lease, SECRET.len()).unwrap(), SECRET);
        first_term.elapsed().as_millis() as u64 > lease.ttl_ms * 3 / 2
    });
}

#[test]
fn stale_key_reads_nothing_and_the_next_owner_finds_zeros() {
    for transport in [TransportChoice::Tcp, TransportChoice::Shm] {
        let pool = pool_of_one_region();
        let first = Client::new(&pool.address, OWNER, transport);
        let old = first.acquire(1).remove(0);
        let queue = first.open(&old);
        first.write(&queue, &old, SECRET).unwrap();
        drop(queue);
        first.release(&old);
        eventually("the region is scrubbed", || pool.regions_free() == 1);

        let next = Client::new(&pool.address, OTHER_OWNER, transport);
        let new = next.acquire(1).remove(0);
        assert_eq!(new.region, old.region);
        let queue = next.open(&new);
        assert_eq!(next.read(&queue, &new, SECRET.len()).unwrap(), vec![0; SECRET.len()]);
        next.write(&queue, &new, b"of the second holder").unwrap();

        let stale = first.connect(&old);
        let old_key = old.access_key().unwrap();
        assert_eq!(first.attach(&stale, &old, old_key).unwrap_err(), OpError::Refused(Refusal::StaleEpoch));
        assert_eq!(first.attach(&stale, &new, old_key).unwrap_err(), OpError::Refused(Refusal::WrongKey));
        let guess = AccessKey::from_bytes([0; AccessKey::BYTES]);
        assert_eq!(first.attach(&stale, &new, guess).unwrap_err(), OpError::Refused(Refusal::WrongKey));
        let unread = OpError::Refused(Refusal::NotAttached);
        assert_eq!(first.read(&stale, &new, SECRET.len()).unwrap_err(), unread);
        assert_eq!(first.read(&stale, &old, SECRET.len()).unwrap_err(), unread);
        assert_eq!(next.read(&queue, &new, 20).unwrap(), b"of the second holder", "the data are unchanged");
    }
}

/// Reads as a client does that was not fenced: it attaches a region that has moved again.
fn read_on(client: &Client, queue: &Queue, grant: &Lease) -> Vec<u8> {
    match client.read(queue, grant, SECRET.len()) {
        Ok(bytes) => bytes,
        Err(
            OpError::Unknown { cause: Uncertain::EpochMoved, .. } | OpError::Refused(Refusal::NotAttached),
        ) => {
            client.attach(queue, grant, grant.access_key().unwrap()).unwrap();
            client.read(queue, grant, SECRET.len()).unwrap()
        }
        Err(error) => panic!("{error}"),
    }
}

fn fenced_grant_is_refused_while_others_go_on_over(transport: TransportChoice) {
    let pool = pool_of_one_region();
    let owner = Client::new(&pool.address, OWNER, transport);
    let (writer, reader) = (
        Client::new(&pool.address, OTHER_OWNER, transport),
        Client::new(&pool.address, OTHER_OWNER, transport),
    );
    let lease = owner.acquire(1).remove(0);
    let own = owner.open(&lease);
    let (write, read) =
        (owner.let_in(&lease, GrantMode::ReadWrite), owner.let_in(&lease, GrantMode::ReadOnly));
    let (writing, reading) = (writer.open(&write), reader.open(&read));
    writer.write(&writing, &write, SECRET).unwrap();
    let read_only = OpError::Refused(Refusal::ReadOnly);
    assert_eq!(reader.write(&reading, &read, b"not allowed").unwrap_err(), read_only);

    owner.fence(&lease, &write);
    assert!(writer.write(&writing, &write, b"after its fence").is_err());
    assert!(writer.read(&writing, &write, SECRET.len()).is_err());
    let again = writer.attach(&writer.connect(&write), &write, write.access_key().unwrap());
    assert_eq!(again.unwrap_err(), OpError::Refused(Refusal::StaleEpoch));
    assert_eq!(
        read_on(&owner, &own, &lease),
        SECRET,
        "what was acknowledged stays, and nothing came after it"
    );
    assert_eq!(read_on(&reader, &reading, &read), SECRET);
    owner.write(&own, &lease, b"of the owner").unwrap();
    assert_eq!(&reader.read(&reading, &read, 12).unwrap(), b"of the owner");
    assert!(owner.renew(&lease).renewed);
    assert!(!writer.renew(&write).renewed, "a client's grant is no lease");

    owner.release(&lease);
    assert!(reader.read(&reading, &read, SECRET.len()).is_err(), "all grants end with the lease");
}

#[test]
fn fenced_grant_is_refused_while_others_go_on_over_tcp() {
    fenced_grant_is_refused_while_others_go_on_over(TransportChoice::Tcp);
}

#[test]
fn fenced_grant_is_refused_while_others_go_on_over_shared_memory() {
    fenced_grant_is_refused_while_others_go_on_over(TransportChoice::Shm);
}

#[test]
fn lease_that_is_revoked_stays_valid_for_its_grace_period_and_ends_with_it() {
    // Longer than a lease's term: all earlier renewals have expired by then.
    const GRACE: Duration = Duration::from_secs(12);
    // The node checks its leases several times a second; the rest is for a busy machine.
    const LATENESS: Duration = Duration::from_secs(10);
    let pool = Pool::start(PoolOptions { nodes: 1, memory: "2MiB", region_size: "1MiB" });
    let clients = [(OWNER, TransportChoice::Tcp), (OTHER_OWNER, TransportChoice::Shm)]
        .map(|(owner, transport)| Client::new(&pool.address, owner, transport));
    let held = clients.each_ref().map(|client| {
        let lease = client.acquire(1).remove(0);
        let queue = client.open(&lease);
        client.write(&queue, &lease, SECRET).unwrap();
        (client, lease, queue)
    });
    let started = Instant::now();
    for client in &clients {
        let answer = client.take_back(1, GRACE.as_millis() as u64);
        assert_eq!((answer.revoked, answer.short_reason.as_str()), (1, ""));
    }
    within(GRACE + LATENESS, "the renewal of both leases is refused", || {
        let mut refused = 0;
        for (client, lease, queue) in &held {
            let before = client.read(queue, lease, SECRET.len());
            let renewal = client.renew(lease);
            if renewal.renewed {
                assert_eq!(before.unwrap(), SECRET, "the lease is valid until it ends");
                assert!(renewal.revoked && renewal.remaining_ms <= GRACE.as_millis() as u64, "{renewal:?}");
            } else {
                assert!(started.elapsed() >= GRACE, "the lease lasts for its grace period");
                refused += 1;
            }
        }
        refused == 2
    });
    for (client, lease, queue) in &held {
        eventually("the data plane refuses it", || client.read(queue, lease, SECRET.len()).is_err());
    }
    drop(held);
    let_expire(&pool);
}

#[test]
fn leases_are_listed_by_owner_and_taken_back_from_the_one_that_is_named() {
    let pool = Pool::start(PoolOptions { nodes: 2, memory: "4MiB", region_size: "1MiB" });
    let [client, other] =
        [OWNER, OTHER_OWNER].map(|owner| Client::new(&pool.address, owner, TransportChoice::Tcp));
    let (leases, _pinned, _) = (client.acquire(2), client.acquire_pinned(), other.acquire(1));
    let list = || run(["leases", "list", "--broker", &pool.address]).stdout;
    let lines = |text: &str| list().lines().filter(|line| line.contains(text)).count();
    assert_eq!((lines("0000000000000002"), lines("pinned")), (1, 1), "{}", list());

    let owner = format!("{OWNER:016x}");
    let revoke = |size: &str| run(["leases", "revoke", &owner, size, "--broker", &pool.address]);
    let revoked = revoke("1MiB");
    assert!(revoked.stdout.starts_with("1 MiB are being taken back"), "{revoked:?}");
    assert_eq!(leases.iter().filter(|lease| client.renew(lease).revoked).count(), 1);
    let json: serde_json::Value =
        serde_json::from_str(&run(["leases", "list", "--json", "--broker", &pool.address]).stdout).unwrap();
    let listed = json["leases"].as_array().unwrap();
    let taken_back = |lease: &&serde_json::Value| lease["revoked"] == true;
    assert!(
        listed
            .iter()
            .filter(taken_back)
            .all(|lease| lease["owner"] == *owner && lease["class"] == "revocable")
    );
    assert_eq!((listed.len(), listed.iter().filter(taken_back).count()), (4, 1));
}

#[test]
fn leases_are_taken_back_on_one_node_at_a_time_while_the_owner_gives_them_back() {
    let pool = Pool::start(PoolOptions { nodes: 2, memory: "4MiB", region_size: "1MiB" });
    let client = Client::new(&pool.address, OWNER, TransportChoice::Tcp);
    let (leases, _pinned) = (client.acquire(4), client.acquire_pinned());
    let owner = format!("{OWNER:016x}");
    let revoke =
        |size: &str| run(["leases", "revoke", &owner, size, "--broker", &pool.address, "--grace", "60"]);
    let revoked = std::thread::scope(|scope| {
        let revoking = scope.spawn(|| revoke("4MiB"));
        let mut left: Vec<&Lease> = leases.iter().collect();
        eventually("all leases were taken back", || {
            let leaving: Vec<&Lease> = left.extract_if(.., |lease| client.renew(lease).revoked).collect();
            let nodes: BTreeSet<u64> =
                leaving.iter().map(|lease| lease.address.as_ref().unwrap().node).collect();
            assert!(nodes.len() <= 1, "two nodes take leases back at a time");
            leaving.into_iter().for_each(|lease| client.release(lease));
            left.is_empty()
        });
        revoking.join().unwrap()
    });
    assert_eq!(revoked.stdout.matches("2 MiB are being taken back").count(), 2, "{revoked:?}");
    assert_complaint(&revoke("1MiB"), 1, "pinned");
}

#[test]
fn no_more_leases_are_taken_back_from_an_owner_that_did_not_give_the_first_ones_back() {
    let pool = Pool::start(PoolOptions { nodes: 2, memory: "4MiB", region_size: "1MiB" });
    let client = Client::new(&pool.address, OWNER, TransportChoice::Tcp);
    let leases = client.acquire(2);
    let owner = format!("{OWNER:016x}");
    let revoked = std::thread::scope(|scope| {
        let args = ["leases", "revoke", &owner, "2MiB", "--broker", &pool.address, "--grace", "0"];
        let revoking = scope.spawn(move || run(args));
        eventually("the command has ended", || {
            let renewed = leases.iter().filter(|lease| client.renew(lease).renewed).count();
            assert!(renewed > 0, "leases on both nodes have ended");
            revoking.is_finished()
        });
        revoking.join().unwrap()
    });
    assert!(!revoked.status.success() && revoked.stderr.contains("make room first"), "{revoked:?}");
}
