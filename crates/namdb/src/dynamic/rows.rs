//! Rows, in the format of crate `postcard`, by a description of their type.
//!
//! ```text
//! type     u8 u16 u32 u64 u128 i8 i16 i32 i64 i128   bool   f32 f64   string   bytes
//!          [type]   [type; 4]   option<type>   (type, type)   {name: type, name: type}
//!          enum{Name, Name(type)}
//!          raw: any bytes; only a row as a whole
//! ```

use serde_json::{Map, Value};

use super::columns::CellKind;
use super::numbers::Number;
use super::words::Words;
use super::{ShapeError, bytes_of_hex, hex_of};

/// Most values of an array.
const MOST_LENGTH: usize = 1 << 16;

/// A type of rows.
#[derive(Clone, PartialEq, Debug)]
pub struct RowShape(Shape);

#[derive(Clone, PartialEq, Debug)]
enum Shape {
    Number(Number),
    Bool,
    Float32,
    Float64,
    Text,
    Bytes,
    Option(Box<Shape>),
    List(Box<Shape>),
    Array(Box<Shape>, usize),
    Tuple(Vec<Shape>),
    Struct(Vec<(String, Shape)>),
    Enum(Vec<(String, Option<Shape>)>),
    /// Whatever there is. Only a row as a whole can be this.
    Raw,
}

impl RowShape {
    /// The type that a text describes.
    ///
    /// # Errors
    /// [`ShapeError::BadType`].
    pub fn parse(text: &str) -> Result<RowShape, ShapeError> {
        if text.trim() == "raw" {
            return Ok(RowShape::raw());
        }
        let mut words = Words::new(text);
        let shape = Shape::parse(&mut words).and_then(|shape| match words.is_empty() {
            true => Ok(RowShape(shape)),
            false => Err("something follows it".to_owned()),
        });
        shape.map_err(|why| ShapeError::BadType(text.to_owned(), why))
    }

    /// Any bytes, as a string of hexadecimal digits.
    pub fn raw() -> RowShape {
        RowShape(Shape::Raw)
    }

    /// The bytes of a row.
    ///
    /// # Errors
    /// [`ShapeError::OtherValue`].
    pub fn encode(&self, row: &Value) -> Result<Vec<u8>, ShapeError> {
        let mut bytes = Vec::new();
        let other = || ShapeError::OtherValue { wanted: self.to_string(), found: row.to_string() };
        self.0.encode(row, &mut bytes).ok_or_else(other)?;
        Ok(bytes)
    }

    /// The row that these bytes begin with. `None`: there is none of this type.
    pub fn decode(&self, mut bytes: &[u8]) -> Option<Value> {
        self.0.decode(&mut bytes)
    }

    /// The names of its columns: those of the fields of a structure; otherwise there is one column.
    pub fn columns(&self) -> Vec<String> {
        match &self.0 {
            Shape::Struct(fields) => fields.iter().map(|(name, _)| name.clone()).collect(),
            _ => vec!["row".to_owned()],
        }
    }

    /// A cell for each column. `None`: the row is of another type.
    pub fn to_cells(&self, row: &Value) -> Option<Vec<String>> {
        match &self.0 {
            Shape::Struct(fields) => {
                fields.iter().map(|(name, field)| Some(field.cells().cell_of(row.get(name)?))).collect()
            }
            other => Some(vec![other.cells().cell_of(row)]),
        }
    }

    /// The row that these cells stand for.
    ///
    /// # Errors
    /// [`ShapeError::OtherValue`] or [`ShapeError::NoJson`].
    pub fn from_cells(&self, cells: &[String]) -> Result<Value, ShapeError> {
        let other = || ShapeError::OtherValue { wanted: self.to_string(), found: cells.join(",") };
        match &self.0 {
            Shape::Struct(fields) if fields.len() == cells.len() => {
                let pairs = fields.iter().zip(cells);
                let pairs =
                    pairs.map(|((name, field), cell)| Ok((name.clone(), field.cells().value_of(cell)?)));
                pairs.collect::<Result<Map<_, _>, _>>().map(Value::Object)
            }
            Shape::Struct(_) => Err(other()),
            shape => shape.cells().value_of(cells.first().ok_or_else(other)?),
        }
    }
}

impl std::fmt::Display for RowShape {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(to)
    }
}

impl Shape {
    fn parse(words: &mut Words<'_>) -> Result<Shape, String> {
        if words.take("(") {
            return Ok(Shape::Tuple(words.list(")", Shape::parse)?));
        }
        if words.take("{") {
            return Ok(Shape::Struct(words.list("}", |words| {
                let name = words.word()?.to_owned();
                words.expect(":")?;
                Ok((name, Shape::parse(words)?))
            })?));
        }
        if words.take("[") {
            // As a list of one, so that the depth is limited here, too.
            let mut length = None;
            let mut each = words.list("]", |words| {
                let each = Shape::parse(words)?;
                if words.take(";") {
                    let word = words.word()?;
                    let wrong = || format!("{word} is no length: at most {MOST_LENGTH} is possible");
                    length =
                        Some(word.parse().ok().filter(|length| *length <= MOST_LENGTH).ok_or_else(wrong)?);
                }
                Ok(each)
            })?;
            let each = each.pop().filter(|_| each.is_empty()).ok_or("a list has one type")?;
            return Ok(match length {
                Some(length) => Shape::Array(each.into(), length),
                None => Shape::List(each.into()),
            });
        }
        match words.word()? {
            "bool" => Ok(Shape::Bool),
            "f32" => Ok(Shape::Float32),
            "f64" => Ok(Shape::Float64),
            "string" => Ok(Shape::Text),
            "bytes" => Ok(Shape::Bytes),
            "option" => {
                words.expect("<")?;
                let mut each = words.list(">", Shape::parse)?;
                let each = each.pop().filter(|_| each.is_empty()).ok_or("an option has one type")?;
                Ok(Shape::Option(each.into()))
            }
            "enum" => {
                words.expect("{")?;
                Ok(Shape::Enum(words.list("}", |words| {
                    let name = words.word()?.to_owned();
                    if !words.take("(") {
                        return Ok((name, None));
                    }
                    let mut parts = words.list(")", Shape::parse)?;
                    let value = if parts.len() == 1 { parts.pop() } else { Some(Shape::Tuple(parts)) };
                    Ok((name, value))
                })?))
            }
            name => Number::named(name).map(Shape::Number).ok_or_else(|| format!("no type is called {name}")),
        }
    }

    fn cells(&self) -> CellKind {
        match self {
            Shape::Number(_) | Shape::Text | Shape::Bytes | Shape::Raw => CellKind::TEXT,
            Shape::Enum(variants) if variants.iter().all(|(_, value)| value.is_none()) => CellKind::TEXT,
            Shape::Option(each) => CellKind { is_option: true, ..each.cells() },
            _ => CellKind::JSON,
        }
    }

    fn encode(&self, value: &Value, to: &mut Vec<u8>) -> Option<()> {
        match self {
            Shape::Number(number) => {
                let word = number.word_of(value)?;
                match (number.bytes, number.is_signed) {
                    (1, _) => to.push(word as u8),
                    (_, false) => push_varint(word, to),
                    (bytes, true) => {
                        let unused = 128 - 8 * bytes as u32;
                        let signed = (word << unused) as i128 >> unused;
                        push_varint((signed << 1 ^ signed >> 127) as u128, to);
                    }
                }
            }
            Shape::Bool => to.push(value.as_bool()?.into()),
            Shape::Float32 => to.extend((value.as_f64()? as f32).to_le_bytes()),
            Shape::Float64 => to.extend(value.as_f64()?.to_le_bytes()),
            Shape::Text => push_bytes(value.as_str()?.as_bytes(), to),
            Shape::Bytes => push_bytes(&bytes_of_hex(value.as_str()?)?, to),
            Shape::Raw => to.extend(bytes_of_hex(value.as_str()?)?),
            Shape::Option(_) if value.is_null() => to.push(0),
            Shape::Option(each) => {
                to.push(1);
                each.encode(value, to)?;
            }
            Shape::List(each) => {
                let values = value.as_array()?;
                push_varint(values.len() as u128, to);
                values.iter().try_for_each(|value| each.encode(value, to))?;
            }
            Shape::Array(each, length) => {
                let values = value.as_array().filter(|values| values.len() == *length)?;
                values.iter().try_for_each(|value| each.encode(value, to))?;
            }
            Shape::Tuple(parts) => {
                let values = value.as_array().filter(|values| values.len() == parts.len())?;
                parts.iter().zip(values).try_for_each(|(part, value)| part.encode(value, to))?;
            }
            Shape::Struct(fields) => {
                let values = value.as_object().filter(|values| values.len() == fields.len())?;
                fields.iter().try_for_each(|(name, field)| field.encode(values.get(name)?, to))?;
            }
            Shape::Enum(variants) => {
                let (name, value) = match value {
                    Value::String(name) => (name, None),
                    Value::Object(values) if values.len() == 1 => {
                        values.iter().next().map(|(name, value)| (name, Some(value)))?
                    }
                    _ => return None,
                };
                let number = variants.iter().position(|(other, _)| other == name)?;
                push_varint(number as u128, to);
                match (&variants[number].1, value) {
                    (None, None) => {}
                    (Some(shape), Some(value)) => shape.encode(value, to)?,
                    _ => return None,
                }
            }
        }
        Some(())
    }

    fn decode(&self, from: &mut &[u8]) -> Option<Value> {
        Some(match self {
            Shape::Number(number) => {
                let word = match (number.bytes, number.is_signed) {
                    (1, _) => take(from, 1)?[0].into(),
                    (_, false) => take_varint(from)?,
                    (_, true) => {
                        let word = take_varint(from)?;
                        word >> 1 ^ (word & 1).wrapping_neg()
                    }
                };
                number.to_json(word)
            }
            Shape::Bool => match take(from, 1)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                _ => return None,
            },
            Shape::Float32 => f64::from(f32::from_le_bytes(*take(from, 4)?.first_chunk()?)).into(),
            Shape::Float64 => f64::from_le_bytes(*take(from, 8)?.first_chunk()?).into(),
            Shape::Text => Value::String(str::from_utf8(take_bytes(from)?).ok()?.to_owned()),
            Shape::Bytes => Value::String(hex_of(take_bytes(from)?)),
            Shape::Raw => Value::String(hex_of(std::mem::take(from))),
            Shape::Option(each) => match take(from, 1)?[0] {
                0 => Value::Null,
                1 => each.decode(from)?,
                _ => return None,
            },
            Shape::List(each) => {
                // Values without bytes could be as many as the length says.
                let length = take_varint(from)?;
                let length = usize::try_from(length).ok().filter(|length| *length <= from.len())?;
                Value::Array((0..length).map(|_| each.decode(from)).collect::<Option<_>>()?)
            }
            Shape::Array(each, length) => {
                Value::Array((0..*length).map(|_| each.decode(from)).collect::<Option<_>>()?)
            }
            Shape::Tuple(parts) => {
                Value::Array(parts.iter().map(|part| part.decode(from)).collect::<Option<_>>()?)
            }
            Shape::Struct(fields) => {
                let values = fields.iter().map(|(name, field)| Some((name.clone(), field.decode(from)?)));
                Value::Object(values.collect::<Option<Map<_, _>>>()?)
            }
            Shape::Enum(variants) => {
                let number = usize::try_from(take_varint(from)?).ok()?;
                let (name, shape) = variants.get(number)?;
                match shape {
                    None => Value::String(name.clone()),
                    Some(shape) => Value::Object([(name.clone(), shape.decode(from)?)].into_iter().collect()),
                }
            }
        })
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = |parts: Vec<String>| parts.join(", ");
        match self {
            Shape::Number(number) => number.fmt(to),
            Shape::Bool => to.write_str("bool"),
            Shape::Float32 => to.write_str("f32"),
            Shape::Float64 => to.write_str("f64"),
            Shape::Text => to.write_str("string"),
            Shape::Bytes => to.write_str("bytes"),
            Shape::Raw => to.write_str("raw"),
            Shape::Option(each) => write!(to, "option<{each}>"),
            Shape::List(each) => write!(to, "[{each}]"),
            Shape::Array(each, length) => write!(to, "[{each}; {length}]"),
            Shape::Tuple(parts) => write!(to, "({})", all(parts.iter().map(Shape::to_string).collect())),
            Shape::Struct(fields) => {
                write!(
                    to,
                    "{{{}}}",
                    all(fields.iter().map(|(name, field)| format!("{name}: {field}")).collect())
                )
            }
            Shape::Enum(variants) => {
                let variant = |(name, shape): &(String, Option<Shape>)| match shape {
                    None => name.clone(),
                    Some(tuple @ Shape::Tuple(_)) => format!("{name}{tuple}"),
                    Some(shape) => format!("{name}({shape})"),
                };
                write!(to, "enum{{{}}}", all(variants.iter().map(variant).collect()))
            }
        }
    }
}

fn push_varint(mut word: u128, to: &mut Vec<u8>) {
    while word > 0x7F {
        to.push(word as u8 | 0x80);
        word >>= 7;
    }
    to.push(word as u8);
}

fn push_bytes(bytes: &[u8], to: &mut Vec<u8>) {
    push_varint(bytes.len() as u128, to);
    to.extend(bytes);
}

fn take<'a>(from: &mut &'a [u8], bytes: usize) -> Option<&'a [u8]> {
    let (taken, rest) = from.split_at_checked(bytes)?;
    *from = rest;
    Some(taken)
}

fn take_varint(from: &mut &[u8]) -> Option<u128> {
    let mut word = 0_u128;
    for place in (0..128).step_by(7) {
        let byte = take(from, 1)?[0];
        word |= u128::from(byte & 0x7F) << place;
        if byte & 0x80 == 0 {
            return Some(word);
        }
    }
    None
}

fn take_bytes<'a>(from: &mut &'a [u8]) -> Option<&'a [u8]> {
    let bytes = usize::try_from(take_varint(from)?).ok()?;
    take(from, bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde::Serialize;
    use serde_json::json;

    use super::*;

    #[derive(Serialize)]
    enum Kind {
        Plain,
        Deep(u32),
        Both(u8, String),
    }

    #[derive(Serialize)]
    struct Row {
        owner: String,
        cents: i64,
        tags: Vec<u16>,
        limit: Option<u128>,
        kinds: [Kind; 3],
        at: (f64, bool),
    }

    const ROW: &str = "{owner: string, cents: i64, tags: [u16], limit: option<u128>, \
                       kinds: [enum{Plain, Deep(u32), Both(u8, string)}; 3], at: (f64, bool)}";

    fn row() -> (Row, Value) {
        let kinds = [Kind::Deep(300), Kind::Plain, Kind::Both(7, "x".to_owned())];
        let row = Row {
            owner: "Ada".to_owned(),
            cents: -5,
            tags: vec![1, 70],
            limit: None,
            kinds,
            at: (0.5, true),
        };
        let json = json!({
            "owner": "Ada", "cents": -5, "tags": [1, 70], "limit": null,
            "kinds": [{"Deep": 300}, "Plain", {"Both": [7, "x"]}], "at": [0.5, true],
        });
        (row, json)
    }

    #[test]
    fn rows_have_the_bytes_that_programs_give_them() {
        let shape = RowShape::parse(ROW).unwrap();
        assert_eq!(RowShape::parse(&shape.to_string()), Ok(shape.clone()));
        let (row, json) = row();
        let bytes = postcard::to_stdvec(&row).unwrap();
        assert_eq!(shape.encode(&json), Ok(bytes.clone()));
        assert_eq!(shape.decode(&[&bytes[..], &[0; 9]].concat()), Some(json));
        for end in 0..bytes.len() {
            assert_eq!(shape.decode(&bytes[..end]), None);
        }
    }

    #[test]
    fn what_is_no_row_or_no_type_is_refused() {
        let shape = RowShape::parse("{a: u8, b: [bool]}").unwrap();
        for wrong in
            [json!([1, []]), json!({"a": 1}), json!({"a": 256, "b": []}), json!({"a": 1, "b": [], "c": 1})]
        {
            assert!(matches!(shape.encode(&wrong), Err(ShapeError::OtherValue { .. })), "{wrong}");
        }
        for text in ["{a u8}", "[u8, u8]", "[]", "option<>", "enum{", "map", "u8 u8", ""] {
            assert!(matches!(RowShape::parse(text), Err(ShapeError::BadType(..))), "{text}");
        }
        assert!(
            RowShape::parse(&"[".repeat(10_000)).is_err() && RowShape::parse(&"option<".repeat(99)).is_err()
        );
        let raw = RowShape::parse("raw").unwrap();
        assert_eq!(
            (raw.encode(&json!("00ff")), raw.decode(&[0, 255])),
            (Ok(vec![0, 255]), Some(json!("00ff")))
        );
        assert!(RowShape::parse("[raw]").is_err());
        // Longer than any memory.
        assert_eq!(RowShape::parse("[()]").unwrap().decode(&[0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1, 0]), None);
    }

    proptest! {
        #[test]
        fn numbers_have_the_bytes_that_programs_give_them(numbers: (u8, i8, u16, i16, u32, i64, i128)) {
            let shape = RowShape::parse("(u8, i8, u16, i16, u32, i64, i128)").unwrap();
            let (a, b, c, d, e, f, g) = numbers;
            let json = json!([a, b, c, d, e, f, g.to_string()]);
            let bytes = postcard::to_stdvec(&numbers).unwrap();
            prop_assert_eq!(shape.encode(&json), Ok(bytes.clone()));
            let again = shape.decode(&bytes).and_then(|row| shape.encode(&row).ok());
            prop_assert_eq!(again, Some(bytes));
        }

        #[test]
        fn any_bytes_are_a_row_or_none(bytes: Vec<u8>) {
            let shapes = BTreeMap::from([("list", "[string]"), ("row", ROW), ("many", "[[option<i64>]]")]);
            for text in shapes.values() {
                let shape = RowShape::parse(text).unwrap();
                if let Some(row) = shape.decode(&bytes) {
                    prop_assert!(shape.encode(&row).is_ok() || row.to_string().contains("null"));
                }
            }
        }
    }
}
