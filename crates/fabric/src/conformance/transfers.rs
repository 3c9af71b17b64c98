//! Data that was written is read back, at every size, in any number, by every client.

use std::time::{Duration, Instant};

use farpool_wire::{AccessKey, Epoch, MAX_CALL_BYTES, MAX_TRANSFER_BYTES, Refusal};
use futures_util::future::{join, join_all, join3};

use super::Carrier;
use super::rig::{ECHO, EPOCH, KEY, REGION_BYTES, Rig, TWICE, at, pattern, refused, region};
use crate::{CallAnswer, block_on};

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

pub fn a_read_without_waiting_reads_as_others_do_or_says_that_it_cannot(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.open();
    let read_now = |offset, epoch, bytes| {
        let mut to = vec![0xEE; bytes];
        let read = queue.read_now(at(offset), epoch, &mut to)?;
        Some(read.map(|()| to))
    };
    let now = |outcome| carrier.reads_now().then_some(outcome);
    let refused_now = |refusal| now(Err(refused(refusal)));
    assert_eq!(read_now(0, EPOCH, 8), refused_now(Refusal::NotAttached));
    block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY)).unwrap();
    let data = pattern(8192, 5);
    rig.write(&queue, 8190, &data).unwrap();
    assert!(read_now(8190, EPOCH, 8192) == now(Ok(data)));
    assert_eq!(read_now(8189, EPOCH, 1), now(Ok(vec![0])));
    assert_eq!(read_now(REGION_BYTES - 7, EPOCH, 8), refused_now(Refusal::OutOfBounds));
    assert_eq!(read_now(0, Epoch(EPOCH.0 + 1), 8), refused_now(Refusal::StaleEpoch));
    let too_long = Some(Err(refused(Refusal::TooLong))); // whatever the transport
    assert_eq!(read_now(0, EPOCH, MAX_TRANSFER_BYTES + 1), too_long);
    rig.host.regions.fence(0);
    let is_refused = read_now(8190, EPOCH, 8).map(|read| read.is_err());
    assert_eq!(is_refused, carrier.reads_now().then_some(true), "the grant has ended");
    queue.close();
    assert_eq!(read_now(0, EPOCH, 8), None);
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
        // Posted, then dropped: the late answer must not write into the buffer that is taken next.
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

pub fn calls_are_answered_at_every_pace(carrier: &dyn Carrier) {
    const CALLS: u64 = 3000;
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let mut buffer = Some(rig.endpoint.arena().take(64).unwrap());
    for number in 0..CALLS {
        // The pauses range from none to long after a server has gone to sleep, so that some calls come just
        // as it does.
        let pause = Duration::from_nanos(number * 7919 % 200_000);
        let started = Instant::now();
        while started.elapsed() < pause {
            std::hint::spin_loop();
        }
        let mut request = buffer.take().expect("it came back");
        request[..6].copy_from_slice(b"echo x");
        let answer = block_on(&rig.endpoint, queue.call(request, 6)).expect("the node is there");
        assert_eq!((answer.bytes, answer.buffer[0]), (1, b'x'), "call {number}");
        buffer = Some(answer.buffer);
    }
}

pub fn an_answer_longer_than_its_room_is_refused_and_the_queue_goes_on(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    for length in [100, 5000] {
        let content = pattern(length, 1);
        let (message, twice) = ([ECHO, &content].concat(), [TWICE, &content].concat());
        let refusal = block_on(&rig.endpoint, queue.call(rig.buffer(&twice), twice.len()));
        assert_eq!(refusal.unwrap_err(), refused(Refusal::TooLong), "{length} bytes");
        assert!(rig.write(&queue, 0, &[1; 64]).is_ok(), "the queue is as it was");
        let answer = block_on(&rig.endpoint, queue.call(rig.buffer(&message), message.len())).unwrap();
        assert_eq!(answer.buffer[..answer.bytes], content);
    }
}

pub fn calls_are_answered_and_unknown_calls_refused(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let call = |message: &[u8]| block_on(&rig.endpoint, queue.call(rig.buffer(message), message.len()));
    let answer = call(b"echo hello").unwrap();
    assert_eq!(&answer.buffer[..answer.bytes], b"hello");
    assert_eq!(call(b"sing").unwrap_err(), refused(Refusal::UnknownCall));
    assert_eq!(call(b"echo ").unwrap().bytes, 0);
}

/// Sizes of messages that take every way of carrying one: only the first word, within a line, across lines,
/// across pages, and the longest.
const MESSAGES: [usize; 8] = [0, 1, 59, 64, 1000, 4096, 20_000, MAX_CALL_BYTES - ECHO.len()];

pub fn more_calls_than_the_node_takes_at_once_each_get_their_own_answer(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    for round in 0..5 {
        let all = join_all((0..40).map(|number| {
            let message = pattern(MESSAGES[(number + round) % MESSAGES.len()], number as u8);
            let request = [ECHO, &message].concat();
            let call = queue.call(rig.buffer(&request), request.len());
            async move { (message, call.await.expect("the node echoes")) }
        }));
        for (message, answer) in block_on(&rig.endpoint, all) {
            assert_eq!(answer.buffer[..answer.bytes], message, "round {round}");
        }
    }
}

pub fn calls_and_attachments_by_turns_all_end(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let echo = |byte: u8| queue.call(rig.buffer(&[ECHO, &[byte]].concat()), ECHO.len() + 1);
    let first = |answer: CallAnswer| answer.buffer[0];
    for _ in 0..20 {
        let attach = queue.attach(region(0), EPOCH, KEY);
        let (early, attached, late) = block_on(&rig.endpoint, join3(echo(b'a'), attach, echo(b'b')));
        assert_eq!((early.map(first), attached, late.map(first)), (Ok(b'a'), Ok(()), Ok(b'b')));
    }
    block_on(&rig.endpoint, queue.detach(region(0), EPOCH)).unwrap();
    assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::NotAttached));
}

pub fn calls_are_refused_while_nothing_is_attached(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.open();
    let echo = |byte: u8| queue.call(rig.buffer(&[ECHO, &[byte]].concat()), ECHO.len() + 1);
    let first = |answer: CallAnswer| answer.buffer[0];
    let not_attached = Err(refused(Refusal::NotAttached));
    for _ in 0..20 {
        let attach = queue.attach(region(0), EPOCH, KEY);
        let (early, attached, late) = block_on(&rig.endpoint, join3(echo(b'a'), attach, echo(b'b')));
        assert_eq!((early.map(first), attached, late.map(first)), (not_attached, Ok(()), Ok(b'b')));
        let detach = queue.detach(region(0), EPOCH);
        let (early, detached, late) = block_on(&rig.endpoint, join3(echo(b'c'), detach, echo(b'd')));
        assert_eq!((early.map(first), detached, late.map(first)), (Ok(b'c'), Ok(()), not_attached));
    }
    let wrong = AccessKey::from_bytes([1; AccessKey::BYTES]);
    let attach = queue.attach(region(0), EPOCH, wrong);
    let (attached, call) = block_on(&rig.endpoint, join(attach, echo(b'e')));
    assert_eq!((attached, call.map(first)), (Err(refused(Refusal::WrongKey)), not_attached));
}
