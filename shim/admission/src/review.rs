//! Reads the request and writes the response of an AdmissionReview of admission.k8s.io/v1, with the fields that the server needs.
//! Pure; requests are untrusted.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nacelle_base::{Classify, FailureKind, json};
use nacelle_vmi::{Cause, Causes};
use serde_json::{Value, json};

/// The supported API version.
const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";
/// The largest number of values and keys in a review. Realistic objects have a few thousand.
const MAX_VALUES: usize = 400_000;
/// The longest UID in bytes; those of Kubernetes have 36.
const MAX_UID: usize = 256;
/// The approximate size in bytes of the causes in the message; `details` has all of them.
const MAX_MESSAGE: usize = 4000;
/// The longest warning in bytes: Kubernetes truncates longer ones, and drops all beyond 4096 bytes in total.
const MAX_WARNING: usize = 256;
const MAX_WARNINGS: usize = 12;
/// The number of bytes of an untrusted word that an error shows.
const MAX_QUOTED: usize = 100;

/// A request of the API server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Review {
    /// The request's UID.
    pub uid: String,
    /// The object's API group; empty for the core group.
    pub group: String,
    /// The object's API version.
    pub version: String,
    /// The object's kind.
    pub kind: String,
    /// The object's name; empty if the API server generates it later.
    pub name: String,
    /// The object's namespace; empty if it has none.
    pub namespace: String,
    /// `CREATE`, `UPDATE`, `DELETE` or `CONNECT`.
    pub operation: String,
    /// The subresource that is written; empty for the object itself.
    pub subresource: String,
    /// The new object; null if there is none.
    pub object: Value,
    /// The old object; null if there is none.
    pub old: Value,
}

/// The response to a review.
#[derive(Clone, Debug, PartialEq)]
pub enum AdmissionResponse {
    /// The object is allowed.
    Allowed {
        /// Warnings for the user.
        warnings: Vec<String>,
    },
    /// The object is allowed with this JSON patch.
    Patched(Value),
    /// The object is rejected.
    Denied(Causes),
}

/// Why a text is not a review.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The text is not JSON.
    #[error("the body is not valid JSON, or has too many values")]
    Json {
        /// The cause.
        source: serde_json::Error,
    },
    /// The text is another kind of object.
    #[error("the body is {kind:?} of {api_version:?}; {KIND} of {API_VERSION} is expected")]
    WrongKind {
        /// The object's `apiVersion`.
        api_version: String,
        /// The object's `kind`.
        kind: String,
    },
    /// A field is missing or has an invalid value.
    #[error("{field} must be {wanted}")]
    Field {
        /// The field's path.
        field: &'static str,
        /// The expected value.
        wanted: &'static str,
    },
}

impl Classify for ReviewError {
    fn kind(&self) -> FailureKind {
        FailureKind::Invalid
    }
}

impl Review {
    /// Parses a request.
    pub fn read(bytes: &[u8]) -> Result<Review, ReviewError> {
        let mut body: Value = json::read_limited(bytes, MAX_VALUES).map_err(|source| ReviewError::Json { source })?;
        let word = |field: &str| body.get(field).and_then(Value::as_str).map_or_else(String::new, shorten_quoted);
        let (api_version, kind) = (word("apiVersion"), word("kind"));
        if api_version != API_VERSION || kind != KIND {
            return Err(ReviewError::WrongKind { api_version, kind });
        }
        let request = body.get_mut("request").filter(|request| request.is_object());
        let request = request.ok_or(ReviewError::Field { field: "request", wanted: "an object" })?;
        let mut take = |field: &str| request.get_mut(field).map(Value::take).unwrap_or_default();
        let (object, old) = (take("object"), take("oldObject"));
        for (field, value) in [("request.object", &object), ("request.oldObject", &old)] {
            if !value.is_object() && !value.is_null() {
                return Err(ReviewError::Field { field, wanted: "an object or null" });
            }
        }
        let text = |pointer: &str, field, wanted| match request.pointer(pointer) {
            Some(Value::String(text)) => Ok(text.clone()),
            None | Some(Value::Null) => Ok(String::new()),
            Some(_) => Err(ReviewError::Field { field, wanted }),
        };
        let uid = text("/uid", "request.uid", "a string")?;
        if uid.is_empty() || uid.len() > MAX_UID {
            return Err(ReviewError::Field { field: "request.uid", wanted: "a string of 1 to 256 bytes" });
        }
        let operation = text("/operation", "request.operation", "a string")?;
        if !["CREATE", "UPDATE", "DELETE", "CONNECT"].contains(&operation.as_str()) {
            let wanted = "CREATE, UPDATE, DELETE or CONNECT";
            return Err(ReviewError::Field { field: "request.operation", wanted });
        }
        let kind = text("/kind/kind", "request.kind.kind", "a string")?;
        if kind.is_empty() {
            return Err(ReviewError::Field { field: "request.kind.kind", wanted: "a string" });
        }
        Ok(Review {
            uid,
            group: text("/kind/group", "request.kind.group", "a string")?,
            version: text("/kind/version", "request.kind.version", "a string")?,
            kind,
            name: text("/name", "request.name", "a string")?,
            namespace: text("/namespace", "request.namespace", "a string")?,
            operation,
            subresource: text("/subResource", "request.subResource", "a string")?,
            object,
            old,
        })
    }

    /// Returns the `apiVersion` of the object.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// Returns the object's name, or the prefix of its name if that is generated.
    pub fn object_name(&self) -> &str {
        let from_object = |field| self.object.pointer(field).and_then(Value::as_str).filter(|name| !name.is_empty());
        let named = Some(self.name.as_str()).filter(|name| !name.is_empty());
        named
            .or_else(|| from_object("/metadata/name"))
            .or_else(|| from_object("/metadata/generateName"))
            .unwrap_or_default()
    }

    /// Returns the text of the response.
    pub fn encode_response(&self, decision: &AdmissionResponse) -> Vec<u8> {
        let mut response = json!({ "uid": self.uid, "allowed": !matches!(decision, AdmissionResponse::Denied(_)) });
        match decision {
            AdmissionResponse::Allowed { warnings } if warnings.is_empty() => {}
            AdmissionResponse::Allowed { warnings } => {
                let shown = warnings.iter().take(MAX_WARNINGS).map(|text| shorten(text, MAX_WARNING));
                response["warnings"] = shown.collect();
            }
            AdmissionResponse::Patched(patch) => {
                response["patchType"] = json!("JSONPatch");
                response["patch"] = json!(STANDARD.encode(patch.to_string()));
            }
            AdmissionResponse::Denied(causes) => response["status"] = self.status(causes),
        }
        json!({ "apiVersion": API_VERSION, "kind": KIND, "response": response }).to_string().into_bytes()
    }

    /// Returns the status that `kubectl` shows for an invalid object, in the form of the API server's own validation errors.
    fn status(&self, causes: &Causes) -> Value {
        let convert =
            |cause: &Cause| json!({ "reason": cause.reason, "message": cause.detail(), "field": cause.field });
        let (kind, name) = (&self.kind, self.object_name());
        json!({
            "status": "Failure",
            "code": 422,
            "reason": "Invalid",
            "message": format!("{kind} {name:?} is invalid: {}", causes.brief(MAX_MESSAGE)),
            "details": {
                "name": name,
                "group": self.group,
                "kind": kind,
                "causes": causes.list().iter().map(convert).collect::<Vec<_>>(),
            },
        })
    }
}

fn shorten_quoted(text: &str) -> String {
    shorten(text, MAX_QUOTED)
}

fn shorten(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let mut end = limit.saturating_sub(3);
    while !text.is_char_boundary(end) {
        end = end.saturating_sub(1);
    }
    format!("{}...", text.get(..end).unwrap_or_default())
}
