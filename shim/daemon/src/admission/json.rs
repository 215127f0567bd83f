//! Owns: the way from JSON of strangers to a tree of values, bounded in their number: two bytes of text can be a value of many.

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::cell::Cell;
use std::fmt;

/// How many values a text may have. What people write and clusters add to it has a few thousand.
pub const MAX_VALUES: usize = 200_000;

/// The value of a text.
pub fn read(text: &[u8]) -> Result<Value, serde_json::Error> {
    let left = Cell::new(MAX_VALUES);
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = Counted(&left).deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Reads one value, of so many that there may be.
#[derive(Clone, Copy)]
struct Counted<'c>(&'c Cell<usize>);

impl<'de> DeserializeSeed<'de> for Counted<'_> {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, reader: D) -> Result<Value, D::Error> {
        let Some(left) = self.0.get().checked_sub(1) else {
            return Err(D::Error::custom(format_args!("there are more than {MAX_VALUES} values")));
        };
        self.0.set(left);
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Counted<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            fields.insert(key, entries.next_value_seed(self)?);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn there_is_an_end_to_everything() {
        let many = format!("[{}0]", "0,".repeat(MAX_VALUES));
        let told = read(many.as_bytes()).unwrap_err().to_string();
        assert!(told.contains("there are more than 200000 values"), "{told}");
        let few = format!("[{}0]", "0,".repeat(MAX_VALUES - 2));
        assert_eq!(read(few.as_bytes()).unwrap().as_array().map(Vec::len), Some(MAX_VALUES - 1));
        for text in ["[".repeat(100_000), "{} {}".to_owned(), String::new(), "1e999".to_owned(), "\u{0}".to_owned()] {
            assert!(read(text.as_bytes()).is_err());
        }
    }

    proptest! {
        #[test]
        fn what_it_reads_is_what_it_says(text in "[\\[\\]{}:,\"a0-9.e -]{0,40}|\\{\"[a-c]\":[0-9]{1,25}(\\.[0-9])?\\}") {
            let plain = serde_json::from_str::<Value>(&text).ok();
            prop_assert_eq!(read(text.as_bytes()).ok(), plain);
        }
    }
}
