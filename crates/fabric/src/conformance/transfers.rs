//! What is written is read back, at every size, in any number, by everyone.

use farpool_wire::{MAX_TRANSFER_BYTES, Refusal};
use futures_util::future::join_all;

use super::Carrier;
use super::rig::{EPOCH, Rig, at, pattern, refused};
use crate::block_on;

pub fn bytes_written_are_read_back(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    for (bytes, offset) in [(1, 5), (8, 64), (100, 1001), (8192, 8192), (8193, 3), (300_000, 7)] {
        let data = pattern(bytes, offset as u8);
        let around = [[0xEE; 3].as_slice(), &data, &[0xEE; 3]].concat();
        rig.write(&queue, offset - 3, &vec![0xEE; bytes + 6]).unwrap();
        rig.write(&queue, offset, &data).unwrap();
        assert!(rig.read(&queue, offset, bytes).unwrap() == data, "{bytes} bytes at {offset}");
        assert!(
            rig.read(&queue, offset - 3, bytes + 6).unwrap() == around,
            "beside {bytes} bytes at {offset}"
        );
    }
}

pub fn a_completed_write_is_seen_by_every_queue(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let (one, other) = (rig.attached(), rig.attached());
    for round in 0..100 {
        let data = pattern(8192, round);
        rig.write(&one, 8192, &data).unwrap();
        assert!(rig.read(&other, 8192, 8192).unwrap() == data, "round {round}");
    }
}

pub fn the_largest_transfer_works_and_a_larger_one_is_refused(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let data = pattern(MAX_TRANSFER_BYTES, 3);
    rig.write(&queue, 0, &data).unwrap();
    assert!(rig.read(&queue, 0, MAX_TRANSFER_BYTES).unwrap() == data);
    assert_eq!(rig.read(&queue, 0, MAX_TRANSFER_BYTES + 1).unwrap_err(), refused(Refusal::TooLong));
    let data = pattern(MAX_TRANSFER_BYTES + 1, 4);
    assert_eq!(rig.write(&queue, 0, &data).unwrap_err(), refused(Refusal::TooLong));
}

pub fn more_operations_than_places_all_complete(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let count = 3 * crate::MAX_IN_FLIGHT as u64;
    let all = join_all((0..count).map(|place| {
        let buffer = rig.buffer(&pattern(64, place as u8));
        queue.write(at(place * 64), EPOCH, buffer)
    }));
    assert!(block_on(&rig.endpoint, all).into_iter().all(|(_, result)| result.is_ok()));
    let all = join_all((0..count).map(|place| {
        queue.read(at(place * 64), EPOCH, rig.endpoint.arena().take(64).expect("buffers came back"))
    }));
    for (place, (buffer, result)) in block_on(&rig.endpoint, all).into_iter().enumerate() {
        result.unwrap();
        assert_eq!(&buffer[..], pattern(64, place as u8), "place {place}");
    }
}

pub fn a_dropped_operation_does_not_free_its_buffer_early(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    rig.write(&queue, 0, &pattern(8192, 9)).unwrap();
    for _ in 0..50 {
        // Posted, then given up; whatever buffer is taken next must not be written by the late answer.
        let buffer = rig.endpoint.arena().take(8192).unwrap();
        block_on(&rig.endpoint, async {
            let given_up = queue.read(at(0), EPOCH, buffer);
            futures_util::pin_mut!(given_up);
            let once = futures_util::future::poll_fn(|context| {
                let _ = given_up.as_mut().poll(context);
                std::task::Poll::Ready(())
            });
            once.await;
        });
        let mine = rig.buffer(&[0x77; 8192]);
        rig.read(&queue, 8192, 8192).unwrap();
        assert!(mine.iter().all(|&byte| byte == 0x77));
    }
}

pub fn more_answers_than_a_connection_may_hold_back_all_come(carrier: &dyn Carrier) {
    const READS: u64 = 12;
    const BYTES: usize = 256 << 10;
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let blocks: Vec<_> = (0..READS).map(|place| pattern(BYTES, place as u8)).collect();
    for (place, block) in (0..).zip(&blocks) {
        rig.write(&queue, place * BYTES as u64, block).unwrap();
    }
    for round in 0..20 {
        let all = join_all((0..READS).map(|place| {
            let mut buffer = rig.endpoint.arena().take(BYTES).expect("buffers came back");
            buffer.fill(0);
            queue.read(at(place * BYTES as u64), EPOCH, buffer)
        }));
        for ((buffer, result), block) in block_on(&rig.endpoint, all).into_iter().zip(&blocks) {
            assert_eq!(result, Ok(()), "round {round}");
            assert!(buffer[..] == block[..], "wrong bytes in round {round}");
        }
    }
}

pub fn calls_are_answered_and_unknown_calls_refused(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.open();
    let call = |message: &[u8]| block_on(&rig.endpoint, queue.call(rig.buffer(message), message.len()));
    let answer = call(b"echo hello").unwrap();
    assert_eq!(&answer.buffer[..answer.bytes], b"hello");
    assert_eq!(call(b"sing").unwrap_err(), refused(Refusal::UnknownCall));
    assert_eq!(call(b"echo ").unwrap().bytes, 0);
}
