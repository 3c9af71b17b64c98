//! The ring over real memory: its layout, its room, and the effect of a peer that writes at random.

use std::os::fd::AsFd;

use farpool_wire::{MAX_CALL_BYTES, Refusal};

use super::*;

fn ring() -> (ClientEnd<RingMemory>, NodeEnd<RingMemory>, RingMemory) {
    let (node, fd) = RingMemory::create().unwrap();
    let map = || RingMemory::map(fd.as_fd()).unwrap();
    (ClientEnd::new(map()), NodeEnd::new(node), map())
}

fn taken(node: &NodeEnd<RingMemory>) -> Vec<u8> {
    let mut request = Vec::new();
    node.copy_request(node.request().unwrap().expect("a request is there"), &mut request);
    request
}

fn answered(client: &mut ClientEnd<RingMemory>) -> Result<Vec<u8>, Refusal> {
    let answer = client.answer().unwrap().expect("an answer is there");
    let mut bytes = vec![0; answer.bytes];
    // SAFETY: the vector is as long as the answer, and not shared.
    let taken = unsafe { client.take(answer, bytes.as_mut_ptr()) };
    assert_eq!(taken, Ok(true));
    answer.outcome.map(|()| bytes)
}

#[test]
fn the_layout_is_that_of_the_wire_format() {
    assert_eq!((NODE_ASLEEP, CLIENT_ASLEEP, REQUESTS, ANSWERS), (0, 128, 256, 525_568));
    assert_eq!((SLOTS, SLOT_BYTES, RING_BYTES), (8, 65_664, 1_052_672));
    let (mut client, mut node, raw) = ring();
    let _ = client.post(b"abc");
    assert_eq!(raw.load(256, Ordering::Relaxed), 3 << 32 | 1);
    let _ = node.answer(Err(Refusal::UnknownCall));
    assert_eq!(raw.load(525_568, Ordering::Relaxed), 8 << 56 | 1);
    let _ = answered(&mut client);
    for _ in 0..SLOTS {
        let _ = client.post(b"again");
        let _ = node.answer(Ok(b""));
        assert_eq!(answered(&mut client), Ok(vec![]));
    }
    assert_eq!(raw.load(256, Ordering::Relaxed), 5 << 32 | 2, "the second lap");
}

#[test]
fn messages_of_every_length_come_through_lap_after_lap() {
    let (mut client, mut node, _) = ring();
    for length in (0..100).chain([1000, 4095, MAX_CALL_BYTES - 1, MAX_CALL_BYTES]) {
        let message: Vec<u8> = (0..length).map(|place| (place * 31 + length) as u8).collect();
        assert_eq!(client.answer(), Ok(None));
        let _ = client.post(&message);
        assert_eq!(taken(&node), message);
        let _ = node.answer(Ok(&message));
        assert_eq!(node.request(), Ok(None));
        assert_eq!(answered(&mut client), Ok(message));
    }
}

#[test]
fn there_is_room_for_so_many_calls_and_a_slot_is_free_once_its_answer_was_taken() {
    let (mut client, mut node, _) = ring();
    for number in 0..SLOTS {
        assert!(client.has_room());
        let _ = client.post(&[number as u8]);
    }
    assert!(!client.has_room());
    for number in 0..SLOTS {
        assert_eq!(taken(&node), [number as u8]);
        let _ = node.answer(Ok(&[number as u8; 3]));
    }
    assert!(!client.has_room(), "answers that were not taken occupy their slots");
    assert_eq!(answered(&mut client), Ok(vec![0; 3]));
    assert!(client.has_room());
}

#[test]
fn refusals_come_through() {
    let (mut client, mut node, _) = ring();
    let _ = client.post(b"sing");
    let _ = node.answer(Err(Refusal::UnknownCall));
    assert_eq!(answered(&mut client), Err(Refusal::UnknownCall));
}

#[test]
fn a_new_ring_asks_for_a_kick_and_an_awake_one_does_not() {
    let (mut client, mut node, _) = ring();
    assert_eq!(client.post(b"a"), Peer::Asleep);
    node.wake_up();
    assert_eq!(client.post(b"b"), Peer::Awake);
    assert!(!node.fall_asleep(), "there is something to do");
    assert_eq!(node.answer(Ok(b"")), Peer::Awake);
    assert_eq!(node.answer(Ok(b"")), Peer::Awake);
    assert!(node.fall_asleep());
    assert!(!client.fall_asleep(), "there is an answer");
    assert_eq!((answered(&mut client), answered(&mut client)), (Ok(vec![]), Ok(vec![])));
    assert_eq!(client.post(b"c"), Peer::Asleep);
    assert!(client.fall_asleep());
    assert_eq!(node.answer(Ok(b"")), Peer::Asleep);
}

#[test]
fn scribbled_bytes_are_either_no_message_or_break_the_ring() {
    let (mut client, node, raw) = ring();
    let write = |at, header| raw.store(at, header, Ordering::Relaxed);
    write(REQUESTS, 5 << 32);
    assert_eq!(node.request(), Ok(None), "of the lap before");
    let lengths = [1 | (MAX_CALL_BYTES as u64 + 1) << 32, 1 | 0xFF_FFFF << 32];
    let (laps, statuses) = ([2, 5 << 32 | 3, u64::from(u32::MAX)], [1 | 0xFE << 56, 1 | 1 << 56]);
    for header in [&lengths[..], &laps, &statuses].concat() {
        write(REQUESTS, header);
        assert_eq!(node.request(), Err(Broken));
        assert!(!node.fall_asleep(), "a broken ring does not let its node sleep");
    }
    let _ = client.post(b"x");
    write(ANSWERS, 1 | 0xFF_FFFF << 32);
    assert_eq!(client.answer(), Err(Broken));
}

#[test]
fn memory_that_could_shrink_is_no_ring() {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, RING_BYTES as u64).unwrap();
    assert!(RingMemory::map(fd.as_fd()).is_err());
}
