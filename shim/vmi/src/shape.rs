//! Checks a tree against the schema of a type, and reports every unknown, rejected and wrongly typed field with its path. Wrong fields
//! are removed from the tree, so that the rest can be deserialized and checked further.

use crate::cause::{Causes, Rule};
use crate::quantity::Quantity;
use crate::refused;
use serde_json::{Map, Value};

/// The maximum length of a string in a document; the longest is the user data of cloud-init.
pub const MAX_STRING: usize = 64 * 1024;

/// Removes everything from `value` that does not match `schema`. `at` is the path of the value.
pub fn prune_to_schema(value: &mut Value, schema: &Value, at: &str) -> Causes {
    let mut causes = Causes::default();
    if !check_value(value, schema, at, &mut causes) {
        *value = empty_value(schema);
    }
    causes
}

/// Returns the path of a field.
pub fn field(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}

/// Returns the empty value of a type.
fn empty_value(schema: &Value) -> Value {
    match schema["type"].as_str() {
        Some("array") => Value::Array(Vec::new()),
        Some("object") => Value::Object(Map::new()),
        Some("string") => Value::String(String::new()),
        _ => Value::Null,
    }
}

/// Checks a value against its schema and removes its invalid parts. Returns false if the value itself is invalid: the caller then
/// removes it.
fn check_value(value: &mut Value, schema: &Value, at: &str, causes: &mut Causes) -> bool {
    if schema[crate::schema::EITHER] == true {
        return check_int_or_string(value, schema, at, causes);
    }
    match schema["type"].as_str() {
        Some("object") => match value.as_object_mut() {
            Some(fields) if schema["additionalProperties"] == false => check_fields(fields, schema, at, causes),
            Some(fields) => entries(fields, &schema["additionalProperties"], at, causes),
            None => return add_wrong_type(value, at, "an object", causes),
        },
        Some("array") => match value.as_array_mut() {
            Some(items) => check_list(items, schema, at, causes),
            None => return add_wrong_type(value, at, "a list", causes),
        },
        Some("string") => return check_string(value, schema, at, causes),
        Some("boolean") if !value.is_boolean() => return add_wrong_type(value, at, "true or false", causes),
        Some("integer") => return check_integer(value, schema, at, causes),
        _ => {}
    }
    true
}

fn add_wrong_type(value: &Value, at: &str, wanted: &str, causes: &mut Causes) -> bool {
    causes.wrong_type(Rule("field-type"), at, value, wanted);
    false
}

fn check_fields(fields: &mut Map<String, Value>, schema: &Value, at: &str, causes: &mut Causes) {
    let known = &schema["properties"];
    fields.retain(|key, value| {
        let at = field(at, key);
        match known.get(key) {
            // Like Kubernetes: null means that the field is not set.
            _ if value.is_null() && known.get(key).is_some() => false,
            Some(schema) => check_value(value, schema, &at, causes),
            None => {
                match refused::reason(&at) {
                    Some(reason) => causes.forbidden(Rule("field-refused"), at, reason),
                    None => causes.unknown(Rule("field-unknown"), shortened(&at), ""),
                }
                false
            }
        }
    });
}

fn entries(fields: &mut Map<String, Value>, schema: &Value, at: &str, causes: &mut Causes) {
    if fields.len() > crate::schema::MAX_ITEMS {
        causes.too_long(Rule("list-length"), at, format!("must have at most {} entries", crate::schema::MAX_ITEMS));
        fields.clear();
    }
    fields.retain(|key, value| check_value(value, schema, &shortened(&format!("{at}[{key}]")), causes));
}

fn check_list(items: &mut Vec<Value>, schema: &Value, at: &str, causes: &mut Causes) {
    let maximum = schema["maxItems"].as_u64().and_then(|maximum| usize::try_from(maximum).ok()).unwrap_or(usize::MAX);
    if items.len() > maximum {
        causes.too_long(
            Rule("list-length"),
            at,
            format!("must have at most {maximum} entries, and has {}", items.len()),
        );
        items.truncate(maximum);
    }
    for (index, item) in items.iter_mut().enumerate() {
        if !check_value(item, &schema["items"], &format!("{at}[{index}]"), causes) {
            // The other items keep their indexes, and with them their paths.
            *item = empty_value(&schema["items"]);
        }
    }
}

fn check_string(value: &Value, schema: &Value, at: &str, causes: &mut Causes) -> bool {
    let Some(text) = value.as_str() else {
        let wanted = if value.is_number() || value.is_boolean() { "a string (in quotes)" } else { "a string" };
        return add_wrong_type(value, at, wanted, causes);
    };
    if text.len() > MAX_STRING {
        causes.too_long(
            Rule("string-length"),
            at,
            format!("must have at most {MAX_STRING} bytes, and has {}", text.len()),
        );
        return false;
    }
    let Some(words) = schema["enum"].as_array() else { return true };
    let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
    if words.contains(&text) {
        return true;
    }
    match refused::word(at, text) {
        Some(reason) => causes.forbidden(Rule("value-refused"), at, format!("{text:?}: {reason}")),
        None => causes.unsupported(Rule("value-unknown"), at, text, &words),
    }
    false
}

fn check_integer(value: &Value, schema: &Value, at: &str, causes: &mut Causes) -> bool {
    let (minimum, maximum) = match schema["format"].as_str() {
        Some("uint32") => (0, i128::from(u32::MAX)),
        Some("int32") => (i128::from(i32::MIN), i128::from(i32::MAX)),
        _ => (i128::from(i64::MIN), i128::from(i64::MAX)),
    };
    let number = value.as_i64().map(i128::from).or(value.as_u64().map(i128::from));
    match number {
        None => add_wrong_type(value, at, "an integer", causes),
        Some(number) if number < minimum || number > maximum => {
            causes.invalid(Rule("integer-range"), at, value, format!("must be between {minimum} and {maximum}"));
            false
        }
        Some(_) => true,
    }
}

/// Checks a quantity, or the number or name of a port.
fn check_int_or_string(value: &mut Value, schema: &Value, at: &str, causes: &mut Causes) -> bool {
    let quantity = schema["format"] == "quantity";
    if value.as_i64().is_none() && !value.is_string() {
        return add_wrong_type(value, at, "an integer or a string", causes);
    }
    if !quantity {
        return true;
    }
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match Quantity::parse(&text) {
        Ok(_) => {
            // From here on there is one form.
            *value = Value::String(text);
            true
        }
        Err(error) => {
            causes.invalid(Rule("quantity"), at, &*value, error.to_string());
            false
        }
    }
}

/// Shortens a path with client-chosen names for a message.
fn shortened(at: &str) -> String {
    const MOST: usize = 200;
    match at.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", at.get(..end).unwrap_or_default()),
        None => at.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema;
    use crate::spec::InstanceSpec;
    use serde_json::json;

    fn check_spec(mut value: Value) -> (Vec<String>, InstanceSpec) {
        let causes = prune_to_schema(&mut value, &schema::of::<InstanceSpec>(), "spec");
        (causes.list().iter().map(ToString::to_string).collect(), serde_json::from_value(value).unwrap())
    }

    #[test]
    fn every_wrong_field_is_reported_and_the_rest_is_read() {
        let (texts, spec) = check_spec(json!({
            "domain": {
                "cpu": { "cores": "two", "sockets": 5_000_000_000u64, "model": 1, "threads": null },
                "memory": { "guest": "1Gx" },
                "devices": {
                    "disks": [ { "name": "a", "disk": { "bus": "ide" } }, 7, { "name": "c", "dsk": {} } ],
                    "gpus": [],
                    "rng": [],
                },
            },
            "volumes": {},
            "colour": "red",
        }));
        assert_eq!(
            texts,
            [
                r#"spec.colour: Unknown field"#,
                r#"spec.domain.cpu.cores: Wrong type: "two": must be an integer"#,
                r#"spec.domain.cpu.model: Wrong type: 1: must be a string (in quotes)"#,
                r#"spec.domain.cpu.sockets: Invalid value: 5000000000: must be between 0 and 4294967295"#,
                r#"spec.domain.devices.disks[0].disk.bus: Unsupported value: "ide": supported values: "virtio", "sata", "scsi", "usb""#,
                r#"spec.domain.devices.disks[1]: Wrong type: 7: must be an object"#,
                r#"spec.domain.devices.disks[2].dsk: Unknown field"#,
                r#"spec.domain.devices.gpus: Forbidden: a VM has the PCI devices (VFIO) of its container: request them as resources of the container"#,
                r#"spec.domain.devices.rng: Wrong type: []: must be an object"#,
                r#"spec.domain.memory.guest: Invalid value: "1Gx": must be a quantity: a number with one of the suffixes n, u, m, k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi, Ei or an exponent"#,
                r#"spec.volumes: Wrong type: {}: must be a list"#,
            ]
        );
        assert_eq!(spec.domain.devices.disks.len(), 3);
        assert_eq!(spec.domain.devices.disks[2].name, "c");
    }

    #[test]
    fn a_valid_tree_is_not_changed() {
        let tree = json!({ "domain": { "cpu": { "cores": 2 }, "memory": { "guest": 1024 }, "devices": { "rng": {} } },
            "readinessProbe": { "tcpSocket": { "port": "ssh" } } });
        let (texts, spec) = check_spec(tree);
        assert!(texts.is_empty(), "{texts:?}");
        assert_eq!(spec.domain.memory.unwrap().guest.unwrap().text(), "1024");
        assert!(spec.domain.devices.rng.is_some());
    }
}
