//! Page-aligned memory, as direct I/O requires.

use std::ops::{Deref, DerefMut};

/// Enough for every file system and disk.
const ALIGNMENT: usize = 4096;

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; ALIGNMENT]);

/// Zeroed bytes that begin at a page boundary.
pub struct Aligned {
    pages: Vec<Page>,
    bytes: usize,
}

impl Aligned {
    /// Allocates this many bytes.
    pub fn new(bytes: usize) -> Self {
        Aligned { pages: vec![Page([0; ALIGNMENT]); bytes.div_ceil(ALIGNMENT)], bytes }
    }
}

impl Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: in bounds: the pages hold at least `self.bytes` bytes, without padding between them, all
        // initialised. The slice borrows `self`, so the pages live as long and are not written meanwhile.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().cast(), self.bytes) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: in bounds and initialised as above; the slice borrows `self` mutably, so it is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().cast(), self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_begin_at_a_page_and_are_as_many_as_wanted() {
        for bytes in [0, 1, 4096, 10_000] {
            let mut aligned = Aligned::new(bytes);
            assert!(aligned.as_ptr().addr().is_multiple_of(ALIGNMENT) && aligned.len() == bytes);
            aligned.fill(7);
            assert!(aligned.iter().all(|&byte| byte == 7));
        }
    }
}
