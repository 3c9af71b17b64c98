//! Keys and rows as the cells of a table, such as a CSV file has.
//!
//! A key of several parts has a column for each of them, and so has a row that is a structure. A cell is
//! empty for `null`; it is text as it stands, or otherwise JSON. Text that could be mistaken for one of these
//! (it is empty, and the value is an option, or it begins with a quotation mark) is JSON, too.

use serde_json::Value;

use super::ShapeError;

/// How a value is read from a cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CellKind {
    /// As it stands, unless it begins with a quotation mark.
    pub is_text: bool,
    /// An empty cell is `null`.
    pub is_option: bool,
}

impl CellKind {
    pub(super) const JSON: CellKind = CellKind { is_text: false, is_option: false };
    pub(super) const TEXT: CellKind = CellKind { is_text: true, is_option: false };

    /// The cell for a value of this kind.
    pub(super) fn cell_of(self, value: &Value) -> String {
        match value {
            Value::Null => String::new(),
            Value::String(text)
                if self.is_text && !text.starts_with('"') && !(self.is_option && text.is_empty()) =>
            {
                text.clone()
            }
            other => other.to_string(),
        }
    }

    /// The value that a cell has.
    pub(super) fn value_of(self, cell: &str) -> Result<Value, ShapeError> {
        match cell {
            "" if self.is_option => Ok(Value::Null),
            _ if self.is_text && !cell.starts_with('"') => Ok(Value::String(cell.to_owned())),
            _ => serde_json::from_str(cell).map_err(|_| ShapeError::NoJson(cell.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::{KeyShape, RowShape};
    use super::*;

    #[test]
    fn a_structure_has_a_column_for_each_field() {
        let keys = KeyShape::named("(u16, string)").unwrap();
        let rows = RowShape::parse("{owner: string, limit: option<u8>, tags: [u8]}").unwrap();
        assert_eq!(keys.columns(), ["key.0", "key.1"]);
        assert_eq!(rows.columns(), ["owner", "limit", "tags"]);
        let row = json!({"owner": "\"Ada\", of course", "limit": null, "tags": [1, 2]});
        let cells = rows.to_cells(&row).unwrap();
        assert_eq!(cells, ["\"\\\"Ada\\\", of course\"", "", "[1,2]"]);
        assert_eq!(rows.from_cells(&cells), Ok(row));
        let key = json!([7, "12"]);
        let cells = ["7", "12"].map(str::to_owned);
        assert_eq!(keys.to_cells(&key).as_deref(), Some(&cells[..]));
        let again = keys.from_cells(&cells).and_then(|again| keys.encode(&again));
        assert_eq!(again.map(|again| keys.decode(&again)), Ok(Some(key)));
        assert!(matches!(rows.from_cells(&["a", "", "x"].map(str::to_owned)), Err(ShapeError::NoJson(_))));
        assert!(rows.from_cells(&["a".to_owned()]).is_err() && keys.from_cells(&[]).is_err());
    }

    proptest! {
        #[test]
        fn cells_have_the_value_that_they_were_made_of(
            text: String,
            option: Option<String>,
            number: i128,
            kind in "[A-Z][a-z]{0,3}",
        ) {
            let shape = format!("{{text: string, option: option<string>, number: i128, kind: enum{{{kind}}}}}");
            let shape = RowShape::parse(&shape).unwrap();
            let row = json!({"text": text, "option": option, "number": number.to_string(), "kind": kind});
            let cells = shape.to_cells(&row).unwrap();
            prop_assert_eq!(shape.from_cells(&cells), Ok(row.clone()));
            let all = RowShape::parse("string").unwrap();
            let cells = all.to_cells(&row["text"]).unwrap();
            prop_assert_eq!(all.from_cells(&cells), Ok(row["text"].clone()));
        }
    }
}
