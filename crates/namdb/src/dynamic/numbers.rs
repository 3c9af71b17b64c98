//! Whole numbers of any width, as JSON.

use serde_json::Value;

/// A type of whole numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Number {
    /// How many bytes it has: 1, 2, 4, 8 or 16.
    pub bytes: usize,
    pub is_signed: bool,
}

impl Number {
    /// The type with this name: `u64`, for example.
    pub fn named(name: &str) -> Option<Number> {
        let is_signed = match name.as_bytes().first()? {
            b'u' => false,
            b'i' => true,
            _ => return None,
        };
        let bits: usize = name[1..].parse().ok()?;
        let number = Number { bytes: bits / 8, is_signed };
        // Only as it is printed.
        (matches!(bits, 8 | 16 | 32 | 64 | 128) && number.to_string() == name).then_some(number)
    }

    /// A number of this type, as the low bits of a word. `None`: it is none.
    pub fn word_of(self, value: &Value) -> Option<u128> {
        let text = match value {
            Value::Number(number) => number.to_string(),
            Value::String(text) => text.clone(),
            _ => return None,
        };
        let unused = 128 - 8 * self.bytes as u32;
        if self.is_signed {
            let number: i128 = text.parse().ok()?;
            (number << unused >> unused == number).then_some(number as u128 & u128::MAX >> unused)
        } else {
            let number: u128 = text.parse().ok()?;
            (number << unused >> unused == number).then_some(number)
        }
    }

    /// The number that the low bits of a word are.
    pub fn to_json(self, word: u128) -> Value {
        let unused = 128 - 8 * self.bytes as u32;
        if self.is_signed {
            let number = (word << unused) as i128 >> unused;
            i64::try_from(number).map_or_else(|_| Value::String(number.to_string()), Value::from)
        } else {
            let number = word << unused >> unused;
            u64::try_from(number).map_or_else(|_| Value::String(number.to_string()), Value::from)
        }
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{}{}", if self.is_signed { 'i' } else { 'u' }, 8 * self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_of_their_type_or_are_refused() {
        let [byte, signed, long] = ["u8", "i16", "i128"].map(|name| Number::named(name).unwrap());
        assert_eq!((byte.word_of(&json!(255)), byte.word_of(&json!(256))), (Some(255), None));
        assert_eq!((byte.word_of(&json!(-1)), byte.word_of(&json!(1.5))), (None, None));
        assert_eq!(signed.word_of(&json!(-2)), Some(0xFFFE));
        assert_eq!((signed.to_json(0xFFFE), signed.word_of(&json!(40_000))), (json!(-2), None));
        assert_eq!(long.to_json(u128::MAX - 1), json!(-2));
        let far = json!(i128::MIN.to_string());
        assert_eq!(long.word_of(&far).map(|word| long.to_json(word)), Some(far));
        assert!(["u", "u7", "u08", "i+8", "f32", "", "é8"].iter().all(|name| Number::named(name).is_none()));
    }
}
