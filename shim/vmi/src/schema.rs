//! Generates the schemas of the documents from the types: for `shape`, which checks trees by them, and for `nacelle vm schema`,
//! which prints them as OpenAPI v3.

use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

/// No list of a specification is longer; KubeVirt's are not.
pub const MAX_ITEMS: usize = 256;

/// Marks what is a number or a string.
pub const EITHER: &str = "x-kubernetes-int-or-string";

/// Returns the schema of a type without references.
pub fn of<T: JsonSchema>() -> Value {
    let mut settings = SchemaSettings::openapi3();
    settings.inline_subschemas = true;
    settings.meta_schema = None;
    settings.transforms.push(Box::new(Bounded));
    settings.into_generator().into_root_schema_for::<T>().to_value()
}

/// Bounds the length of lists, and removes the titles of the Rust types.
#[derive(Clone)]
struct Bounded;

impl Transform for Bounded {
    fn transform(&mut self, schema: &mut Schema) {
        if schema.get("type") == Some(&json!("array")) {
            schema.insert("maxItems".into(), json!(MAX_ITEMS));
        }
        schema.remove("title");
        // An optional word must not become the word null.
        if let Some(words) = schema.get_mut("enum").and_then(Value::as_array_mut) {
            words.retain(|word| !word.is_null());
        }
        // An optional quantity is an alternative in JSON schema, and a nullable type in OpenAPI.
        let either = schema.get("anyOf").and_then(Value::as_array).cloned().unwrap_or_default();
        if let Some(Value::Object(fields)) = either.into_iter().find(|one| one.get(EITHER).is_some()) {
            fields.into_iter().for_each(|(key, value)| drop(schema.insert(key, value)));
        }
        transform_subschemas(self, schema);
    }
}

/// Returns an OpenAPI document with these schemas.
pub fn openapi(version: &str, schemas: Vec<(&str, Value)>) -> Value {
    let schemas: Map<String, Value> = schemas.into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect();
    json!({
        "openapi": "3.0.3",
        "info": { "title": "vm.nacelle.dev", "version": version },
        "paths": {},
        "components": { "schemas": schemas },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::InstanceSpec;

    /// Checks that the schema has only keys that `shape` handles; others would have no effect.
    fn only_known(schema: &Value, at: &str) {
        let known = [
            "type",
            "properties",
            "additionalProperties",
            "items",
            "maxItems",
            "enum",
            "format",
            "minimum",
            "maximum",
            "nullable",
            "description",
            "anyOf",
            "x-kubernetes-int-or-string",
            "default",
        ];
        let Some(schema) = schema.as_object() else { return };
        for (key, value) in schema {
            assert!(known.contains(&key.as_str()), "{at}: {key}");
            match key.as_str() {
                "properties" => {
                    value.as_object().unwrap().iter().for_each(|(name, of)| only_known(of, &format!("{at}.{name}")))
                }
                "items" | "additionalProperties" => only_known(value, &format!("{at}[]")),
                _ => {}
            }
        }
    }

    #[test]
    fn the_schema_has_only_checked_keys() {
        only_known(&of::<InstanceSpec>(), "spec");
    }
}
