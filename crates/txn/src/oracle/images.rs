//! Images of cuts in far memory. Two images take turns, so that one is whole while the other is being
//! written.

use std::ops::Range;
use std::sync::Arc;

use crate::checksum::checksum;

use crate::cut::Cut;

const WORD_BYTES: usize = 8;
/// Words of an image around its counts: the sequence number before them, the checksum after them.
const WORDS_AROUND: usize = 2;

/// The place of two images, of cuts with this many slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Images {
    start: usize,
    slots: usize,
}

impl Images {
    pub(crate) fn new(start: usize, slots: usize) -> Images {
        Images { start, slots }
    }

    /// Both of them.
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + 2 * self.image_bytes()
    }

    /// The place of the first or second image.
    pub(crate) fn image(&self, which: usize) -> Range<usize> {
        let start = self.start + which * self.image_bytes();
        start..start + self.image_bytes()
    }

    fn image_bytes(&self) -> usize {
        (self.slots + WORDS_AROUND) * WORD_BYTES
    }

    pub(crate) fn encode(&self, cut: &Cut) -> Vec<u8> {
        debug_assert_eq!(cut.counts().len(), self.slots);
        let mut image = Vec::with_capacity(self.image_bytes());
        image.extend(cut.sequence().to_le_bytes());
        image.extend(cut.counts().iter().flat_map(|count| count.to_le_bytes()));
        image.extend(checksum(&[], &image).to_le_bytes());
        image
    }

    /// The later of the cuts in bytes that were read from [`range`](Self::range).
    pub(crate) fn decode(&self, bytes: &[u8]) -> Option<Image> {
        if bytes.len() != self.range().len() {
            return None;
        }
        let (first, second) = bytes.split_at(self.image_bytes());
        let (which, cut, other, other_bytes) = match (decode_image(first), decode_image(second)) {
            (Some(cut), Some(other)) if other.sequence() > cut.sequence() => (1, other, Some(cut), first),
            (Some(cut), other) => (0, cut, other, second),
            (None, Some(cut)) => (1, cut, None, first),
            (None, None) => return None,
        };
        let is_latest = match other {
            Some(other) => other.sequence() + 1 == cut.sequence(),
            None => words(other_bytes).all(|word| word == 0),
        };
        Some(Image { which, cut, is_latest })
    }
}

/// An image that was found whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Image {
    /// Which image it is: 0 or 1.
    pub(crate) which: usize,
    /// The cut.
    pub(crate) cut: Cut,
    /// Whether the next cut was not published yet when the READ began: the image for that one still had the
    /// cut before this, whole, or nothing. If the next cut had been written by then, none of the earlier
    /// words would be left there.
    pub(crate) is_latest: bool,
}

/// The words in some bytes.
pub(crate) fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let (words, _) = bytes.as_chunks::<WORD_BYTES>();
    words.iter().map(|word| u64::from_le_bytes(*word))
}

/// The cut in an image. If the checksum is right, one write has left all of it.
fn decode_image(bytes: &[u8]) -> Option<Cut> {
    let (body, sum) = bytes.split_last_chunk::<WORD_BYTES>()?;
    if u64::from_le_bytes(*sum) != checksum(&[], body) {
        return None;
    }
    let mut words = words(body);
    let sequence = words.next()?;
    let counts: Arc<[u64]> = words.collect();
    Some(Cut::new(sequence, counts))
}
