//! Copies between private memory and memory that other processes may change at any moment.
//!
//! C1. Far memory is accessed only as aligned 8-byte atomics, or by machine instructions in `asm!` that the
//!     compiler treats as black boxes. So a peer's concurrent stores are no data race of the language.
//! C2. An aligned far word is moved by one 8-byte access, whatever the alignment of the private side. The
//!     string instruction is used only where the private side is aligned as well: how it splits its accesses
//!     otherwise is not specified.
//! C3. The order of words is not specified: anything longer than a word may tear.
//! C4. The language does not define concurrent atomics of different sizes on the same bytes, so no single
//!     byte is accessed by an atomic of its size. What an `asm!` block does to memory must be what some Rust
//!     code could do. For `rep movsq` and `rep stosq` that code is a loop of atomic words. For a byte it is a
//!     load of the word around it, or a compare-and-swap of that word until one succeeds; where there is no
//!     instruction for it here, [`byte`] does just that. The word around a byte is in bounds, since mappings
//!     begin and end at pages. (The processor keeps accesses of different sizes coherent.)

use std::sync::atomic::{AtomicU64, Ordering};

const WORD: usize = 8;

/// From this length on, the string instruction saves more than its start-up costs.
#[cfg(target_arch = "x86_64")]
const STRING_COPY_WORDS: usize = 32;

/// Copies `length` bytes out of shared memory.
///
/// # Safety
/// `from` is a live mapping of `length` bytes; `to` is valid for writes of `length` bytes and exclusive.
pub(crate) unsafe fn from_shared(mut to: *mut u8, mut from: *mut u8, length: usize) {
    let (head, words, tail) = split(from, length);
    // SAFETY: the three parts add up to `length`; each pointer is advanced past what was copied.
    unsafe {
        to = bytes_from_shared(to, from, head);
        from = from.add(head);
        words_from_shared(to, from, words);
        bytes_from_shared(to.add(words * WORD), from.add(words * WORD), tail);
    }
}

/// Copies `length` bytes into shared memory.
///
/// # Safety
/// `to` is a live writable mapping of `length` bytes; `from` is valid for reads of `length` bytes.
pub(crate) unsafe fn to_shared(mut to: *mut u8, mut from: *const u8, length: usize) {
    let (head, words, tail) = split(to, length);
    // SAFETY: the three parts add up to `length`; each pointer is advanced past what was copied.
    unsafe {
        from = bytes_to_shared(to, from, head);
        to = to.add(head);
        words_to_shared(to, from, words);
        bytes_to_shared(to.add(words * WORD), from.add(words * WORD), tail);
    }
}

const LINE_BYTES: usize = 64;
/// Cache lines prefetched for one operation: enough for the processor's own prefetcher to go on.
const PREFETCHED_LINES: usize = 4;

/// Prefetches the beginning of far memory into the cache. Accesses nothing: any address is allowed.
pub(crate) fn prefetch(from: *const u8, length: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let in_line = from.addr() % LINE_BYTES;
        let lines = length.saturating_add(in_line).div_ceil(LINE_BYTES).clamp(1, PREFETCHED_LINES);
        for line in 0..lines {
            let at = from.wrapping_sub(in_line).wrapping_add(line * LINE_BYTES);
            // SAFETY: a prefetch accesses no memory as far as the language is concerned, and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, length);
}

/// Copies `length` bytes from shared memory to shared memory.
///
/// # Safety
/// Both are live mappings of `length` bytes, 8-byte aligned, `to` writable; they do not overlap.
pub(crate) unsafe fn between_shared(to: *mut u8, from: *mut u8, length: usize) {
    let (head, words, tail) = split(from, length);
    assert_eq!(head, 0);
    // SAFETY: both mappings are alive and long enough by the caller's promise, and `words` and `tail` add up
    // to `length` since `head` is 0. Others may access them meanwhile: all accesses are those of far memory
    // (C1).
    unsafe {
        #[cfg(target_arch = "x86_64")]
        string_copy(to, from, words);
        #[cfg(not(target_arch = "x86_64"))]
        for place in 0..words {
            let word = AtomicU64::from_ptr(from.cast::<u64>().add(place)).load(Ordering::Relaxed);
            AtomicU64::from_ptr(to.cast::<u64>().add(place)).store(word, Ordering::Relaxed);
        }
        for place in length - tail..length {
            byte::store(to.add(place), byte::load(from.add(place)));
        }
    }
}

/// Fills shared memory with zeros.
///
/// # Safety
/// `to` is a live writable mapping of `length` bytes, 8-byte aligned.
pub(crate) unsafe fn zero_shared(to: *mut u8, length: usize) {
    let (head, words, tail) = split(to, length);
    assert_eq!(head, 0);
    // SAFETY: alive and long enough by the caller's promise, and `words` and `tail` add up to `length` since
    // `head` is 0. Others may access it meanwhile: all accesses are those of far memory (C1).
    unsafe {
        zero_words(to, words);
        for place in length - tail..length {
            byte::store(to.add(place), 0);
        }
    }
}

/// How many bytes come before the first aligned far word, how many whole words follow, and how many bytes
/// come after them.
fn split(far: *mut u8, length: usize) -> (usize, usize, usize) {
    let head = far.align_offset(WORD).min(length);
    let words = (length - head) / WORD;
    (head, words, length - head - words * WORD)
}

/// Single bytes of far memory (C4), by an instruction that moves one.
#[cfg(target_arch = "x86_64")]
mod byte {
    /// # Safety
    /// `at` lies in a live mapping.
    #[inline]
    pub(super) unsafe fn load(at: *mut u8) -> u8 {
        let byte: u8;
        // SAFETY: the caller's byte; the instruction reads it and changes no memory.
        unsafe {
            std::arch::asm!("mov {}, byte ptr [{}]", out(reg_byte) byte, in(reg) at,
                options(nostack, preserves_flags, readonly));
        }
        byte
    }

    /// # Safety
    /// `at` lies in a live writable mapping.
    #[inline]
    pub(super) unsafe fn store(at: *mut u8, byte: u8) {
        // SAFETY: the caller's byte; the instruction writes it and changes no other memory.
        unsafe {
            std::arch::asm!("mov byte ptr [{}], {}", in(reg) at, in(reg_byte) byte,
                options(nostack, preserves_flags));
        }
    }
}

/// Single bytes of far memory (C4), by atomics of the words around them.
#[cfg(any(test, not(target_arch = "x86_64")))]
mod word_around {
    use super::{AtomicU64, Ordering, WORD};

    /// The word around a byte, and the byte's place in it.
    ///
    /// # Safety
    /// `at` lies in a live mapping, which has whole words, for as long as the word is used.
    unsafe fn around<'a>(at: *mut u8) -> (&'a AtomicU64, usize) {
        let place = at.addr() % WORD;
        // SAFETY: aligned by the subtraction, and in the mapping, which begins and ends at whole words.
        (unsafe { AtomicU64::from_ptr(at.sub(place).cast()) }, place)
    }

    /// # Safety
    /// `at` lies in a live mapping, which has whole words.
    pub(super) unsafe fn load(at: *mut u8) -> u8 {
        // SAFETY: in a live mapping of whole words by the caller's promise; used only in this call.
        let (word, place) = unsafe { around(at) };
        word.load(Ordering::Relaxed).to_ne_bytes()[place]
    }

    /// # Safety
    /// `at` lies in a live writable mapping, which has whole words.
    pub(super) unsafe fn store(at: *mut u8, byte: u8) {
        // SAFETY: in a live mapping of whole words by the caller's promise; used only in this call.
        let (word, place) = unsafe { around(at) };
        let with_byte = |before: u64| {
            let mut bytes = before.to_ne_bytes();
            bytes[place] = byte;
            Some(u64::from_ne_bytes(bytes))
        };
        let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with_byte); // never `None`
    }
}
#[cfg(not(target_arch = "x86_64"))]
use word_around as byte;

// The bytes and words below are relaxed: ordering comes from the fences of the queue's completion.

unsafe fn bytes_from_shared(to: *mut u8, from: *mut u8, count: usize) -> *mut u8 {
    for place in 0..count {
        // SAFETY: within the caller's bounds.
        unsafe { to.add(place).write(byte::load(from.add(place))) };
    }
    // SAFETY: at most one past the end.
    unsafe { to.add(count) }
}

unsafe fn bytes_to_shared(to: *mut u8, from: *const u8, count: usize) -> *const u8 {
    for place in 0..count {
        // SAFETY: within the caller's bounds.
        unsafe { byte::store(to.add(place), from.add(place).read()) };
    }
    // SAFETY: at most one past the end.
    unsafe { from.add(count) }
}

unsafe fn words_from_shared(to: *mut u8, from: *mut u8, words: usize) {
    #[cfg(target_arch = "x86_64")]
    if words >= STRING_COPY_WORDS && to.cast::<u64>().is_aligned() {
        // SAFETY: both ranges hold `words` words; the direction flag is clear by the calling convention.
        unsafe { string_copy(to, from, words) };
        return;
    }
    for place in 0..words {
        // SAFETY: `from` is word-aligned by `split`; `to` may not be.
        unsafe {
            let word = AtomicU64::from_ptr(from.cast::<u64>().add(place)).load(Ordering::Relaxed);
            to.cast::<u64>().add(place).write_unaligned(word);
        }
    }
}

unsafe fn words_to_shared(to: *mut u8, from: *const u8, words: usize) {
    #[cfg(target_arch = "x86_64")]
    if words >= STRING_COPY_WORDS && from.cast::<u64>().is_aligned() {
        // SAFETY: both ranges hold `words` words; the direction flag is clear by the calling convention.
        unsafe { string_copy(to, from, words) };
        return;
    }
    for place in 0..words {
        // SAFETY: `to` is word-aligned by `split`; `from` may not be.
        unsafe {
            let word = from.cast::<u64>().add(place).read_unaligned();
            AtomicU64::from_ptr(to.cast::<u64>().add(place)).store(word, Ordering::Relaxed);
        }
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn string_copy(to: *mut u8, from: *const u8, words: usize) {
    // SAFETY: the caller's ranges; the instruction reads `from`, writes `to` and changes no other memory.
    unsafe {
        std::arch::asm!("rep movsq", inout("rcx") words => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
}

unsafe fn zero_words(to: *mut u8, words: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's range; the instruction writes `to` and changes no other memory.
    unsafe {
        std::arch::asm!("rep stosq", inout("rcx") words => _, inout("rdi") to => _, in("rax") 0u64,
            options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    for place in 0..words {
        // SAFETY: within the caller's bounds, word-aligned.
        unsafe { AtomicU64::from_ptr(to.cast::<u64>().add(place)).store(0, Ordering::Relaxed) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: usize = 512;
    const ROUNDS: usize = 2_000_000;

    /// A word whose bytes are all alike, as long as it is not torn.
    fn alike(byte: usize) -> u64 {
        u64::from_ne_bytes([byte as u8; 8])
    }

    fn assert_untorn(bytes: &[u8], shift: usize) {
        for word in bytes.chunks_exact(WORD) {
            assert!(
                word.iter().all(|byte| *byte == word[0]),
                "torn with the private side at {shift}: {word:?}"
            );
        }
    }

    #[test]
    fn aligned_far_words_are_moved_whole_whatever_the_alignment_of_the_private_side() {
        let far: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let far = &far;
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for round in 0..ROUNDS {
                    far.iter().for_each(|word| word.store(alike(round), Ordering::Relaxed));
                }
            });
            let mut private = vec![0u8; (WORDS + 1) * WORD];
            while !writer.is_finished() {
                for shift in 0..WORD {
                    let far_bytes = far.as_ptr().cast::<u8>().cast_mut();
                    // SAFETY: the far words are live and shared as atomics; the private bytes are ours.
                    unsafe { from_shared(private.as_mut_ptr().add(shift), far_bytes, WORDS * WORD) };
                    assert_untorn(&private[shift..shift + WORDS * WORD], shift);
                }
            }
        });
    }

    type LoadByte = unsafe fn(*mut u8) -> u8;
    type StoreByte = unsafe fn(*mut u8, u8);

    /// Both ways to access a byte (C4).
    const WAYS: [(LoadByte, StoreByte); 2] =
        [(byte::load, byte::store), (word_around::load, word_around::store)];

    #[test]
    fn bytes_of_one_word_are_stored_by_threads_at_once_and_none_is_lost_either_way() {
        const STORES: u64 = 200_000;
        for (load, store) in WAYS {
            let word = AtomicU64::new(0);
            std::thread::scope(|scope| {
                for place in 0..WORD {
                    let word = &word;
                    scope.spawn(move || {
                        let at = word.as_ptr().cast::<u8>().wrapping_add(place);
                        for round in 0..STORES / WORD as u64 {
                            let value = (round as u8) ^ place as u8;
                            // SAFETY: a byte of a live word that all threads access as far memory.
                            unsafe { store(at, value) };
                            // SAFETY: the same byte of the live word; no other thread stores it.
                            assert_eq!(unsafe { load(at) }, value);
                        }
                    });
                }
            });
            let last = (STORES / WORD as u64 - 1) as u8;
            let expected: [u8; WORD] = std::array::from_fn(|place| last ^ place as u8);
            assert_eq!(word.load(Ordering::Relaxed).to_ne_bytes(), expected);
        }
    }

    #[test]
    fn far_words_are_stored_whole_whatever_the_alignment_of_the_private_side() {
        let far: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let far = &far;
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut private = vec![0u8; (WORDS + 1) * WORD];
                for round in 0..ROUNDS {
                    private.fill(round as u8);
                    let far_bytes = far.as_ptr().cast::<u8>().cast_mut();
                    // SAFETY: the far words are live and shared as atomics; the private bytes are this
                    // thread's.
                    unsafe { to_shared(far_bytes, private.as_ptr().add(round % WORD), WORDS * WORD) };
                }
            });
            while !writer.is_finished() {
                for word in far {
                    assert_untorn(&word.load(Ordering::Relaxed).to_ne_bytes(), 0);
                }
            }
        });
    }
}
