//! Keys by the names of their types ([encoding](crate::Key)).

use farpool_txn::hash::MOST_KEY_BYTES;
use serde_json::Value;

use super::columns::CellKind;
use super::numbers::Number;
use super::words::Words;
use super::{ShapeError, bytes_of_hex, hex_of};
use crate::key::{Key, KeyBytes, OwnedKey};

/// A type of keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyShape(Shape);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Shape {
    Number(Number),
    Array(usize),
    Text,
    Bytes,
    Parts(Vec<Shape>),
}

impl KeyShape {
    /// The type with this [name](Key::type_name).
    ///
    /// # Errors
    /// [`ShapeError::BadType`]: it is a program's own type.
    pub fn named(name: &str) -> Result<KeyShape, ShapeError> {
        let mut words = Words::new(name);
        let shape = Shape::parse(&mut words);
        let all = shape.and_then(|shape| match words.is_empty() {
            true => Ok(KeyShape(shape)),
            false => Err("something follows it".to_owned()),
        });
        all.map_err(|why| ShapeError::BadType(name.to_owned(), why))
    }

    /// The bytes of a key.
    ///
    /// # Errors
    /// [`ShapeError::OtherValue`] or [`ShapeError::TooLong`].
    pub fn encode(&self, key: &Value) -> Result<KeyBytes, ShapeError> {
        let mut bytes = KeyBytes::empty();
        let other = || ShapeError::OtherValue { wanted: self.to_string(), found: key.to_string() };
        self.0.encode(key, &mut bytes).ok_or_else(other)?;
        bytes.is_whole().then_some(bytes).ok_or(ShapeError::TooLong(MOST_KEY_BYTES))
    }

    /// The key that these bytes begin with. `None`: there is none.
    pub fn decode(&self, mut bytes: &[u8]) -> Option<Value> {
        self.0.decode(&mut bytes)
    }

    /// The names of its columns: one for each part.
    pub fn columns(&self) -> Vec<String> {
        match &self.0 {
            Shape::Parts(parts) => (0..parts.len()).map(|part| format!("key.{part}")).collect(),
            _ => vec!["key".to_owned()],
        }
    }

    /// A cell for each column. `None`: the key is of another type.
    pub fn to_cells(&self, key: &Value) -> Option<Vec<String>> {
        match &self.0 {
            Shape::Parts(parts) => {
                let values = key.as_array().filter(|values| values.len() == parts.len())?;
                Some(parts.iter().zip(values).map(|(part, value)| part.cells().cell_of(value)).collect())
            }
            other => Some(vec![other.cells().cell_of(key)]),
        }
    }

    /// The key that these cells stand for.
    ///
    /// # Errors
    /// [`ShapeError::OtherValue`] or [`ShapeError::NoJson`].
    pub fn from_cells(&self, cells: &[String]) -> Result<Value, ShapeError> {
        let other = || ShapeError::OtherValue { wanted: self.to_string(), found: cells.join(",") };
        match &self.0 {
            Shape::Parts(parts) if parts.len() == cells.len() => {
                let values = parts.iter().zip(cells).map(|(part, cell)| part.cells().value_of(cell));
                values.collect::<Result<_, _>>().map(Value::Array)
            }
            Shape::Parts(_) => Err(other()),
            shape => shape.cells().value_of(cells.first().ok_or_else(other)?),
        }
    }
}

impl std::fmt::Display for KeyShape {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(to)
    }
}

impl Shape {
    fn parse(words: &mut Words<'_>) -> Result<Shape, String> {
        if words.take("(") {
            return Ok(Shape::Parts(words.list(")", Shape::parse)?));
        }
        if words.take("[") {
            words.expect("u8")?;
            words.expect(";")?;
            let bytes = words.word()?;
            words.expect("]")?;
            return bytes.parse().map(Shape::Array).map_err(|_| format!("{bytes} is no length"));
        }
        match words.word()? {
            "string" => Ok(Shape::Text),
            "bytes" => Ok(Shape::Bytes),
            name => Number::named(name).map(Shape::Number).ok_or_else(|| format!("no type is called {name}")),
        }
    }

    fn cells(&self) -> CellKind {
        match self {
            Shape::Parts(_) => CellKind::JSON,
            _ => CellKind::TEXT,
        }
    }

    fn encode(&self, key: &Value, to: &mut KeyBytes) -> Option<()> {
        match self {
            Shape::Number(number) => {
                let word = number.word_of(key)?;
                let bits = 8 * number.bytes as u32;
                let word = if number.is_signed { word ^ 1 << (bits - 1) } else { word };
                to.push(&word.to_be_bytes()[16 - number.bytes..]);
            }
            Shape::Array(bytes) => {
                let found = bytes_of_hex(key.as_str()?).filter(|found| found.len() == *bytes)?;
                to.push(&found);
            }
            Shape::Text => key.as_str()?.encode(to),
            Shape::Bytes => bytes_of_hex(key.as_str()?)?.encode(to),
            Shape::Parts(parts) => {
                let values = key.as_array().filter(|values| values.len() == parts.len())?;
                parts.iter().zip(values).try_for_each(|(part, value)| part.encode(value, to))?;
            }
        }
        Some(())
    }

    fn decode(&self, from: &mut &[u8]) -> Option<Value> {
        Some(match self {
            Shape::Number(number) => {
                let mut word = [0; 16];
                word[16 - number.bytes..].copy_from_slice(take(from, number.bytes)?);
                let word = u128::from_be_bytes(word);
                let bits = 8 * number.bytes as u32;
                number.to_json(if number.is_signed { word ^ 1 << (bits - 1) } else { word })
            }
            Shape::Array(bytes) => Value::String(hex_of(take(from, *bytes)?)),
            Shape::Text => Value::String(String::decode(from)?),
            Shape::Bytes => Value::String(hex_of(&Vec::decode(from)?)),
            Shape::Parts(parts) => {
                Value::Array(parts.iter().map(|part| part.decode(from)).collect::<Option<_>>()?)
            }
        })
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Shape::Number(number) => number.fmt(to),
            Shape::Array(bytes) => write!(to, "[u8; {bytes}]"),
            Shape::Text => to.write_str("string"),
            Shape::Bytes => to.write_str("bytes"),
            Shape::Parts(parts) => {
                let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
                write!(to, "({})", parts.join(", "))
            }
        }
    }
}

fn take<'a>(from: &mut &'a [u8], bytes: usize) -> Option<&'a [u8]> {
    let (taken, rest) = from.split_at_checked(bytes)?;
    *from = rest;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn bytes<K: Key>(key: &K, value: Value) {
        let shape = KeyShape::named(&K::type_name()).unwrap();
        assert_eq!(shape.to_string(), K::type_name());
        let found = shape.encode(&value).unwrap();
        assert_eq!(found[..], KeyBytes::of(key)[..], "{value}");
        assert_eq!(shape.decode(&found), Some(value));
    }

    #[test]
    fn keys_have_the_bytes_that_programs_give_them() {
        bytes(&7_u64, json!(7));
        bytes(&-7_i32, json!(-7));
        bytes(&i128::MIN, json!(i128::MIN.to_string()));
        bytes(&[1_u8, 0xAB], json!("01ab"));
        bytes(&("a\0b".to_owned(), 3_u8), json!(["a\0b", 3]));
        bytes(&(vec![0_u8, 1, 2], -1_i64, "é".to_owned()), json!(["000102", -1, "é"]));
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let shape = KeyShape::named("(u8, string)").unwrap();
        for wrong in [json!(1), json!([1]), json!([256, "x"]), json!([1, 2]), json!([1, "x", 2]), json!(null)]
        {
            assert!(matches!(shape.encode(&wrong), Err(ShapeError::OtherValue { .. })), "{wrong}");
        }
        let long = json!([1, "x".repeat(MOST_KEY_BYTES)]);
        assert_eq!(shape.encode(&long).err(), Some(ShapeError::TooLong(MOST_KEY_BYTES)));
        assert_eq!((shape.decode(&[1, b'x']), shape.decode(&[])), (None, None));
        for name in ["day", "(u8", "u8)", "[u16; 2]", "[u8; x]", ""] {
            assert!(matches!(KeyShape::named(name), Err(ShapeError::BadType(..))), "{name}");
        }
        assert!(KeyShape::named(&"(".repeat(1_000)).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_key_or_none(bytes: Vec<u8>) {
            for name in ["i16", "(string, u8)", "(bytes, [u8; 3])", "((u8, string), i128)"] {
                let shape = KeyShape::named(name).unwrap();
                if let Some(key) = shape.decode(&bytes) {
                    let again = shape.encode(&key);
                    prop_assert!(again.is_err() || bytes.starts_with(&again.unwrap()));
                }
            }
        }
    }
}
