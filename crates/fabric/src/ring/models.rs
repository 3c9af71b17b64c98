//! Models of the ring: the code of `ring.rs` itself, in every interleaving and with every outdated value that
//! the memory model allows a load to find (by `loom`). A client and a node make two calls through a ring of
//! one slot each way, so that slots are filled again, and sleep whenever they find nothing.
//!
//! A model holds if every call is answered once, with its own bytes, and no side sleeps for ever, which
//! `loom` reports as a deadlock. Each fault below breaks the protocol on purpose, and must be caught.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::model::Builder;
use loom::sync::Notify;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;

use super::*;

/// Calls in one model: the second meets whatever the first left behind.
const CALLS: u64 = 2;
/// Preemptions in one history: switches away from a thread that could go on. Known faults of such protocols
/// need two.
const PREEMPTIONS: usize = 3;
/// Words of a message: two, so that it can tear.
const MESSAGE_WORDS: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    /// No barrier when going to sleep, and none after filling a slot.
    NoBarrier,
    /// No second check when going to sleep.
    NoSecondLook,
    /// A slot's word may be seen before its bytes.
    WordBeforeBytes,
    /// The bytes may be read before the slot's word.
    BytesBeforeWord,
    /// The side that has filled a slot assumes that the other is awake.
    NeverWoken,
    /// No check after copying a message that it is still there.
    NoLookAfterCopy,
}

/// The words of a ring with one slot each way.
struct Memory {
    words: Vec<(usize, AtomicU64)>,
    fault: Fault,
}

impl Memory {
    fn new(fault: Fault) -> Arc<Self> {
        let slot = |at: usize| (0..=MESSAGE_WORDS).map(move |word| at + 8 * word);
        let places = [NODE_ASLEEP, CLIENT_ASLEEP].into_iter().chain(slot(REQUESTS)).chain(slot(ANSWERS));
        Arc::new(Memory { words: places.map(|at| (at, AtomicU64::new(0))).collect(), fault })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words.iter().find(|(known, _)| *known == at).expect("a word of the model").1
    }
}

/// One side's view.
struct View {
    memory: Arc<Memory>,
    /// Has just announced that it sleeps.
    about_to_sleep: Cell<bool>,
    /// Has just copied a message.
    has_copied: Cell<bool>,
    /// The slot's word when it was last loaded: each side reads one slot.
    seen: Cell<u64>,
}

impl View {
    fn of(memory: &Arc<Memory>) -> Self {
        View {
            memory: memory.clone(),
            about_to_sleep: Cell::new(false),
            has_copied: Cell::new(false),
            seen: Cell::new(0),
        }
    }
}

impl Words for View {
    const SLOTS: u64 = 1;

    fn load(&self, at: usize, order: Ordering) -> u64 {
        let is_slot = at == REQUESTS || at == ANSWERS;
        let value = match self.memory.fault {
            Fault::NoSecondLook if is_slot && self.about_to_sleep.take() => self.seen.get(),
            Fault::NoLookAfterCopy if is_slot && self.has_copied.take() => self.seen.get(),
            Fault::BytesBeforeWord if is_slot => self.memory.word(at).load(Ordering::Relaxed),
            Fault::NeverWoken if !is_slot => 0,
            _ => self.memory.word(at).load(order),
        };
        if is_slot {
            self.seen.set(value);
        }
        value
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.about_to_sleep.set(value == 1 && (at == NODE_ASLEEP || at == CLIENT_ASLEEP));
        let order = if self.memory.fault == Fault::WordBeforeBytes { Ordering::Relaxed } else { order };
        self.memory.word(at).store(value, order);
    }

    fn barrier(&self) {
        if self.memory.fault != Fault::NoBarrier {
            fence(Ordering::SeqCst);
        }
    }

    fn loads_in_order(&self) {
        fence(Ordering::Acquire);
    }

    fn prefetch(&self, _at: usize) {}

    fn copy_in(&self, at: usize, from: &[u8]) {
        for (place, word) in from.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            self.memory.word(at + 8 * place).store(word, Ordering::Relaxed);
        }
    }

    unsafe fn copy_out(&self, at: usize, to: *mut u8, bytes: usize) {
        for place in 0..bytes / 8 {
            let word = self.memory.word(at + 8 * place).load(Ordering::Relaxed);
            // SAFETY: within the caller's bounds; any alignment will do.
            unsafe { to.cast::<u64>().add(place).write_unaligned(word) };
        }
        self.has_copied.set(true);
    }
}

/// The socket, reduced to waking: a side that waits goes on once it is woken, even if the wake came before
/// the wait.
struct Socket(Notify);

impl Socket {
    fn new() -> Arc<Self> {
        Arc::new(Socket(Notify::new()))
    }

    fn wake(&self, peer: Peer) {
        if peer == Peer::Asleep {
            self.0.notify();
        }
    }

    fn sleep(&self) {
        self.0.wait();
    }
}

fn message(seed: u64) -> [u8; 8 * MESSAGE_WORDS] {
    let mut bytes = [0; 8 * MESSAGE_WORDS];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&seed.to_le_bytes()));
    bytes
}

fn serve(end: &mut NodeEnd<View>, to_node: &Socket, to_client: &Socket) {
    for number in 0..CALLS {
        let request = loop {
            match end.request().expect("the ring is intact") {
                Some(request) => break request,
                None if end.fall_asleep() => {
                    to_node.sleep();
                    end.wake_up();
                }
                None => {}
            }
        };
        let mut bytes = Vec::new();
        end.copy_request(request, &mut bytes);
        assert_eq!(bytes, message(100 + number), "the request of another call, or a torn one");
        to_client.wake(end.answer(Ok(&message(200 + number))));
    }
    assert_eq!(end.request(), Ok(None), "a request comes twice");
}

fn call(end: &mut ClientEnd<View>, to_node: &Socket, to_client: &Socket) {
    for number in 0..CALLS {
        to_node.wake(end.post(&message(100 + number)));
        let answer = loop {
            match end.answer().expect("the ring is intact") {
                Some(answer) => break answer,
                None if end.fall_asleep() => {
                    to_client.sleep();
                    end.wake_up();
                }
                None => {}
            }
        };
        let mut bytes = [0; 8 * MESSAGE_WORDS];
        // SAFETY: the array is as long as every answer of the model, and not shared.
        let taken = unsafe { end.take(answer, bytes.as_mut_ptr()) };
        assert_eq!(taken, Ok(true));
        assert_eq!(
            (answer.bytes, bytes),
            (bytes.len(), message(200 + number)),
            "another answer, or a torn one"
        );
    }
    assert_eq!(end.answer(), Ok(None), "an answer comes twice");
}

fn explore(fault: Fault) {
    let mut model = Builder::new();
    model.preemption_bound = Some(PREEMPTIONS);
    model.check(move || {
        let memory = Memory::new(fault);
        let (to_node, to_client) = (Socket::new(), Socket::new());
        let mut node = NodeEnd::new(View::of(&memory));
        let mut client = ClientEnd::new(View::of(&memory));
        let node_thread = {
            let (to_node, to_client) = (to_node.clone(), to_client.clone());
            thread::spawn(move || serve(&mut node, &to_node, &to_client))
        };
        call(&mut client, &to_node, &to_client);
        node_thread.join().expect("the node's side holds");
    });
}

/// One call, whose answer the node takes back at any moment after it was given, as happens when a connection
/// ends.
fn explore_end(fault: Fault) {
    let mut model = Builder::new();
    model.preemption_bound = Some(PREEMPTIONS);
    model.check(move || {
        let memory = Memory::new(fault);
        let (mut node, mut client) = (NodeEnd::new(View::of(&memory)), ClientEnd::new(View::of(&memory)));
        let _awake = client.post(&message(100));
        let node_thread = thread::spawn(move || {
            assert!(node.request().expect("the ring is intact").is_some(), "it was posted before");
            let _awake = node.answer(Ok(&message(200)));
            // No side sees an empty page before all other pages are gone as well.
            memory.word(ANSWERS).store(0, Ordering::Relaxed);
            fence(Ordering::Release);
            for place in 1..=MESSAGE_WORDS {
                memory.word(ANSWERS + 8 * place).store(0, Ordering::Relaxed);
            }
        });
        if let Some(answer) = client.answer().expect("the ring is intact") {
            let mut bytes = [0; 8 * MESSAGE_WORDS];
            // SAFETY: the array is as long as every answer of the model, and not shared.
            if unsafe { client.take(answer, bytes.as_mut_ptr()) } == Ok(true) {
                assert_eq!(
                    (answer.bytes, bytes),
                    (bytes.len(), message(200)),
                    "another answer, or a torn one"
                );
            }
        }
        node_thread.join().expect("the node's side holds");
    });
}

/// The message of `loom` when all threads sleep.
const DEADLOCK: &str = "deadlock";
const TORN: &str = "or a torn one";

#[track_caller]
fn is_caught(fault: Fault, as_what: &str) {
    let caught = std::panic::catch_unwind(|| explore(fault)).expect_err("the fault goes unnoticed");
    let said = caught.downcast_ref::<String>().expect("a message with arguments");
    assert!(said.contains(as_what), "{fault:?} was caught as: {said}");
}

#[test]
fn every_call_is_answered_once_with_its_own_bytes_and_no_side_sleeps_through_one() {
    explore(Fault::None);
}

#[test]
fn an_answer_that_is_taken_back_under_the_copy_is_not_taken_for_one() {
    explore_end(Fault::None);
    let caught = std::panic::catch_unwind(|| explore_end(Fault::NoLookAfterCopy));
    let caught = caught.expect_err("the fault goes unnoticed");
    assert!(caught.downcast_ref::<String>().is_some_and(|said| said.contains(TORN)));
}

#[test]
fn a_sleeper_that_passes_no_barrier_is_caught() {
    is_caught(Fault::NoBarrier, DEADLOCK);
}

#[test]
fn a_sleeper_that_does_not_look_once_more_is_caught() {
    is_caught(Fault::NoSecondLook, DEADLOCK);
}

#[test]
fn a_sleeper_that_is_never_woken_is_caught() {
    is_caught(Fault::NeverWoken, DEADLOCK);
}

#[test]
fn a_word_that_is_seen_before_its_bytes_is_caught() {
    is_caught(Fault::WordBeforeBytes, TORN);
}

#[test]
fn bytes_that_are_read_before_their_word_are_caught() {
    is_caught(Fault::BytesBeforeWord, TORN);
}
