//! Keys of tables: their types, and their bytes, which sort as the keys do.
//!
//! | type | bytes |
//! |---|---|
//! | numbers without sign | big-endian |
//! | numbers with sign | big-endian, with the sign bit flipped |
//! | arrays of bytes | as they are |
//! | strings, bytes of any length | 1 1 for each byte 0, 1 2 for each byte 1, other bytes as they are; a zero byte at the end |
//! | pairs, triples | their parts, one after the other |
//!
//! Within a string no byte is zero, so no encoding is the beginning of another, whatever follows the string.
//! Keys of any length are padded with zeros to the key length of their table: that keeps their order.

use farpool_txn::hash::MOST_KEY_BYTES;

/// A type of keys.
///
/// ```
/// use farpool_namdb::{Key, KeyBytes};
///
/// /// A day, as the catalog knows it.
/// struct Day(u32);
///
/// impl Key for Day {
///     const BYTES: Option<usize> = u32::BYTES;
///
///     fn type_name() -> String {
///         "day".to_owned()
///     }
///
///     fn encode(&self, to: &mut KeyBytes) {
///         self.0.encode(to);
///     }
/// }
///
/// assert!(KeyBytes::of(&Day(255)).padded(4) < KeyBytes::of(&Day(256)).padded(4));
/// ```
pub trait Key {
    /// Bytes of each key. `None`: keys are of any length, up to what their
    /// [table](crate::TableOptions::key_bytes) was created for.
    const BYTES: Option<usize>;

    /// The name of the type. A table can only be opened with the type with which it was created.
    fn type_name() -> String;

    /// Appends the bytes of the key, which sort as the keys do. Different keys have different bytes, and
    /// none are the beginning of another's.
    fn encode(&self, to: &mut KeyBytes);
}

/// A type of keys that can be made from their bytes again, as [scans](crate::Tx::scan) need it.
///
/// ```
/// use farpool_namdb::{KeyBytes, OwnedKey};
///
/// let bytes = KeyBytes::of(&(7_u16, "x".to_owned()));
/// assert_eq!(OwnedKey::decode(&mut &bytes[..]), Some((7_u16, "x".to_owned())));
/// ```
pub trait OwnedKey: Key + Sized {
    /// Takes a key from the beginning of these bytes. `None`: they do not begin with one.
    fn decode(from: &mut &[u8]) -> Option<Self>;
}

/// Before the bytes 0 and 1 of a string, which are one more then.
const ESCAPE: u8 = 1;

/// The bytes of a key.
#[derive(Clone)]
pub struct KeyBytes {
    bytes: [u8; MOST_KEY_BYTES],
    length: usize,
}

impl KeyBytes {
    /// The bytes of this key.
    pub fn of<K: Key + ?Sized>(key: &K) -> KeyBytes {
        let mut bytes = KeyBytes::empty();
        key.encode(&mut bytes);
        bytes
    }

    pub(crate) fn empty() -> KeyBytes {
        KeyBytes { bytes: [0; MOST_KEY_BYTES], length: 0 }
    }

    /// Whether it has all bytes that were appended.
    pub(crate) fn is_whole(&self) -> bool {
        self.length <= MOST_KEY_BYTES
    }

    /// Appends bytes. Bytes that no table has room for are counted, but not kept.
    pub fn push(&mut self, more: &[u8]) {
        if let Some(room) = self.bytes.get_mut(self.length..self.length + more.len()) {
            room.copy_from_slice(more);
        }
        self.length += more.len();
    }

    /// The key, padded with zeros to this many bytes. `None`: it has more.
    pub fn padded(&self, bytes: usize) -> Option<&[u8]> {
        if self.length <= bytes { self.bytes.get(..bytes) } else { None }
    }

    /// The same, by value.
    pub(crate) fn into_padded(self, bytes: usize) -> Option<KeyBytes> {
        self.padded(bytes)?;
        Some(KeyBytes { length: bytes, ..self })
    }

    fn push_escaped(&mut self, more: &[u8]) {
        for &byte in more {
            match byte {
                0 | 1 => self.push(&[ESCAPE, byte + 1]),
                byte => self.push(&[byte]),
            }
        }
        self.push(&[0]);
    }
}

impl std::ops::Deref for KeyBytes {
    type Target = [u8];

    /// The bytes, up to the longest that any table has room for.
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length.min(MOST_KEY_BYTES)]
    }
}

macro_rules! numbers_are_keys {
    ($($number:ty, $sign:expr;)*) => {$(
        impl Key for $number {
            const BYTES: Option<usize> = Some(size_of::<$number>());

            fn type_name() -> String {
                stringify!($number).to_owned()
            }

            fn encode(&self, to: &mut KeyBytes) {
                to.push(&(self ^ $sign).to_be_bytes());
            }
        }

        impl OwnedKey for $number {
            fn decode(from: &mut &[u8]) -> Option<Self> {
                let (bytes, rest) = from.split_first_chunk()?;
                *from = rest;
                Some(<$number>::from_be_bytes(*bytes) ^ $sign)
            }
        }
    )*};
}

numbers_are_keys! {
    u8, 0; u16, 0; u32, 0; u64, 0; u128, 0;
    i8, i8::MIN; i16, i16::MIN; i32, i32::MIN; i64, i64::MIN; i128, i128::MIN;
}

impl<const BYTES: usize> Key for [u8; BYTES] {
    const BYTES: Option<usize> = Some(BYTES);

    fn type_name() -> String {
        format!("[u8; {BYTES}]")
    }

    fn encode(&self, to: &mut KeyBytes) {
        to.push(self);
    }
}

impl<const BYTES: usize> OwnedKey for [u8; BYTES] {
    fn decode(from: &mut &[u8]) -> Option<Self> {
        let (bytes, rest) = from.split_first_chunk()?;
        *from = rest;
        Some(*bytes)
    }
}

impl OwnedKey for Vec<u8> {
    fn decode(from: &mut &[u8]) -> Option<Self> {
        let mut bytes = Vec::new();
        loop {
            let (byte, rest) = match *from {
                [0, rest @ ..] => {
                    *from = rest;
                    return Some(bytes);
                }
                [ESCAPE, escaped @ 1..=2, rest @ ..] => (escaped - 1, rest),
                [ESCAPE, ..] => return None,
                [byte, rest @ ..] => (*byte, rest),
                [] => return None,
            };
            bytes.push(byte);
            *from = rest;
        }
    }
}

impl OwnedKey for String {
    fn decode(from: &mut &[u8]) -> Option<Self> {
        String::from_utf8(Vec::decode(from)?).ok()
    }
}

macro_rules! any_length {
    ($($key:ty, $name:literal;)*) => {$(
        impl Key for $key {
            const BYTES: Option<usize> = None;

            fn type_name() -> String {
                $name.to_owned()
            }

            fn encode(&self, to: &mut KeyBytes) {
                to.push_escaped(self.as_ref());
            }
        }
    )*};
}

any_length! { str, "string"; String, "string"; [u8], "bytes"; Vec<u8>, "bytes"; }

/// The bytes of a key of two parts.
const fn sum(one: Option<usize>, other: Option<usize>) -> Option<usize> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one + other),
        _ => None,
    }
}

impl<A: Key, B: Key> Key for (A, B) {
    const BYTES: Option<usize> = sum(A::BYTES, B::BYTES);

    fn type_name() -> String {
        format!("({}, {})", A::type_name(), B::type_name())
    }

    fn encode(&self, to: &mut KeyBytes) {
        self.0.encode(to);
        self.1.encode(to);
    }
}

impl<A: OwnedKey, B: OwnedKey> OwnedKey for (A, B) {
    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some((A::decode(from)?, B::decode(from)?))
    }
}

impl<A: OwnedKey, B: OwnedKey, C: OwnedKey> OwnedKey for (A, B, C) {
    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some((A::decode(from)?, B::decode(from)?, C::decode(from)?))
    }
}

impl<A: Key, B: Key, C: Key> Key for (A, B, C) {
    const BYTES: Option<usize> = sum(A::BYTES, sum(B::BYTES, C::BYTES));

    fn type_name() -> String {
        format!("({}, {}, {})", A::type_name(), B::type_name(), C::type_name())
    }

    fn encode(&self, to: &mut KeyBytes) {
        self.0.encode(to);
        self.1.encode(to);
        self.2.encode(to);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes<K: Key + ?Sized>(key: &K) -> Vec<u8> {
        KeyBytes::of(key).padded(MOST_KEY_BYTES).expect("a short key").to_vec()
    }

    #[test]
    fn keys_have_the_bytes_that_the_table_above_says() {
        assert_eq!(KeyBytes::of(&0x0102_u16).padded(2), Some(&[1, 2][..]));
        assert_eq!(KeyBytes::of(&-1_i16).padded(2), Some(&[0x7F, 0xFF][..]));
        assert_eq!(KeyBytes::of("a\0b\x01").padded(8), Some(&[b'a', 1, 1, b'b', 1, 2, 0, 0][..]));
        assert_eq!(KeyBytes::of("abc").padded(3), None, "the end has no room");
        let key = (1_u8, "x".to_owned(), *b"yz");
        assert_eq!(KeyBytes::of(&key).padded(5), Some(&[1, b'x', 0, b'y', b'z'][..]));
        assert_eq!(<(u16, u32, [u8; 3])>::BYTES, Some(9));
        assert_eq!((<(u16, String)>::BYTES, <(u16, String)>::type_name()), (None, "(u16, string)".into()));
        assert_eq!(KeyBytes::of(&"x".repeat(1_000)).padded(MOST_KEY_BYTES), None);
    }

    #[test]
    fn what_follows_a_string_is_not_taken_for_a_part_of_it() {
        let keys =
            [("", 0_u8), ("", 1), ("", 255), ("\0", 0), ("\0", 255), ("\0\0", 0), ("\x01", 0), ("\x02", 0)];
        let bytes: Vec<_> = keys.iter().map(|(text, number)| bytes(&((*text).to_owned(), *number))).collect();
        assert!(bytes.is_sorted_by(|one, other| one < other), "{bytes:?}");
    }

    proptest! {
        #[test]
        fn bytes_sort_as_keys_do(one: (i64, Vec<u8>, u16), other: (i64, Vec<u8>, u16)) {
            prop_assert_eq!(bytes(&one).cmp(&bytes(&other)), one.cmp(&other));
        }

        #[test]
        fn keys_are_made_from_their_bytes_again(key: (i64, Vec<u8>, String), number: (u16, [u8; 3])) {
            let bytes = bytes(&key);
            prop_assert_eq!(OwnedKey::decode(&mut &bytes[..]), Some(key));
            let bytes = KeyBytes::of(&number);
            prop_assert_eq!(OwnedKey::decode(&mut &bytes[..]), Some(number));
            prop_assert_eq!(<(u16, [u8; 3])>::decode(&mut &bytes[..4]), None);
        }

        #[test]
        fn bytes_of_strings_sort_as_these_do(one in "[a\0b]{0,6}", other in "[a\0b]{0,6}") {
            prop_assert_eq!(bytes(&one).cmp(&bytes(&other)), one.cmp(&other));
        }

        #[test]
        fn any_string_is_a_key_or_is_refused(key: String, room in 0..MOST_KEY_BYTES) {
            let bytes = KeyBytes::of(&key);
            let padded = bytes.padded(room);
            prop_assert!(padded.is_none_or(|padded| padded.len() == room && room > key.len()));
        }
    }
}
