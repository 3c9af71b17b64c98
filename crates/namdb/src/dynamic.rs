//! Keys and rows whose types are known at run time alone, as JSON: for programs that look into any database.
//!
//! | type | JSON |
//! |---|---|
//! | numbers | numbers; strings, if they have more than 64 bits |
//! | text | strings |
//! | bytes and arrays of bytes | strings of hexadecimal digits |
//! | options | `null`, or the value |
//! | lists, tuples | arrays |
//! | structures | objects |
//! | choices | the name of the variant; or an object with it and its value |

mod columns;
mod keys;
mod numbers;
mod rows;
mod table;
mod words;

pub use keys::KeyShape;
pub use rows::RowShape;
pub use table::{AnyScan, AnyTable, KeyRange, SomeRows};

/// Why JSON is not a value of a type, or text does not describe a type.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ShapeError {
    /// Correct the description.
    #[error("{0:?} does not describe a type: {1}")]
    BadType(String, String),
    /// Give a value of this type.
    #[error("{found} is not a value of type {wanted}")]
    OtherValue {
        /// The type.
        wanted: String,
        /// The value.
        found: String,
    },
    /// Give JSON, or text between quotation marks.
    #[error("{0} is no JSON")]
    NoJson(String),
    /// Give a shorter key.
    #[error("the key takes more than {0} bytes")]
    TooLong(usize),
}

/// The bytes that a string of hexadecimal digits stands for.
fn bytes_of_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|digit| Some(digit.to_digit(16)? as u8)).collect();
    let (pairs, []) = digits.as_deref()?.as_chunks::<2>() else { return None };
    Some(pairs.iter().map(|[high, low]| high << 4 | low).collect())
}

/// A string of hexadecimal digits for some bytes.
fn hex_of(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // a string has room
        text
    })
}
