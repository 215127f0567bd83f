//! Defines the outer part of a specification, around the domain. The doc comments of the fields are descriptions in the OpenAPI
//! schema.

use super::{Domain, Network, Volume, document, words};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

document! {
    /// One run of a machine.
    pub struct InstanceSpec {
        /// The machine: processors, memory, firmware, devices.
        pub domain: Domain,
        /// Where the data of disks and file systems is.
        pub volumes: Vec<Volume>,
        /// What the interfaces are connected to.
        pub networks: Vec<Network>,
        /// When the machine counts as broken.
        pub liveness_probe: Option<Probe>,
        /// When the machine counts as ready.
        pub readiness_probe: Option<Probe>,
        /// Keys and passwords that are put into the guest.
        pub access_credentials: Vec<AccessCredential>,
        /// What happens when the node is emptied.
        pub eviction_strategy: Option<EvictionStrategy>,
        /// Whether the machine starts running or paused.
        pub start_strategy: Option<StartStrategy>,
        /// How long the guest has after the power button, in seconds.
        pub termination_grace_period_seconds: Option<i64>,
        /// The processors' architecture.
        pub architecture: Option<Architecture>,
    }

    /// A question that is asked again and again.
    pub struct Probe {
        /// An HTTP request.
        pub http_get: Option<HttpGet>,
        /// A TCP connection.
        pub tcp_socket: Option<TcpSocket>,
        /// A command, run by the guest agent.
        pub exec: Option<Exec>,
        /// Whether the guest agent answers.
        pub guest_agent_ping: Option<Empty>,
        /// Seconds before the first.
        pub initial_delay_seconds: Option<i32>,
        /// Seconds that an answer may take.
        pub timeout_seconds: Option<i32>,
        /// Seconds between two.
        pub period_seconds: Option<i32>,
        /// How many must succeed.
        pub success_threshold: Option<i32>,
        /// How many must fail.
        pub failure_threshold: Option<i32>,
    }

    /// An HTTP request.
    pub struct HttpGet {
        /// The path.
        pub path: String,
        /// The port.
        pub port: Option<Port>,
        /// The host; the machine's address if it is missing.
        pub host: String,
        /// HTTP or HTTPS.
        pub scheme: Option<Scheme>,
        /// Headers.
        pub http_headers: Vec<HttpHeader>,
    }

    /// A header.
    pub struct HttpHeader {
        /// Its name.
        pub name: String,
        /// Its value.
        pub value: String,
    }

    /// A TCP connection.
    pub struct TcpSocket {
        /// The port.
        pub port: Option<Port>,
        /// The host; the machine's address if it is missing.
        pub host: String,
    }

    /// A command.
    pub struct Exec {
        /// Program and arguments.
        pub command: Vec<String>,
    }

    /// It is there, and there is no more to say.
    pub struct Empty {}

    /// One of a key and a password.
    pub struct AccessCredential {
        /// SSH keys.
        pub ssh_public_key: Option<SshPublicKey>,
        /// A password.
        pub user_password: Option<UserPassword>,
    }

    /// SSH keys and their way into the guest.
    pub struct SshPublicKey {
        /// Where they are.
        pub source: Option<CredentialSource>,
        /// How they get into the guest.
        pub propagation_method: Option<KeyWay>,
    }

    /// A password and its way into the guest.
    pub struct UserPassword {
        /// Where it is.
        pub source: Option<CredentialSource>,
        /// How it gets into the guest.
        pub propagation_method: Option<PasswordWay>,
    }

    /// Where a credential is.
    pub struct CredentialSource {
        /// A secret of the pod's namespace, which the pod must have as a volume.
        pub secret: Option<SecretName>,
    }

    /// A secret.
    pub struct SecretName {
        /// Its name.
        pub secret_name: String,
    }

    /// How keys get into the guest: one of these.
    pub struct KeyWay {
        /// With the config drive's meta data.
        pub config_drive: Option<Empty>,
        /// With NoCloud's meta data.
        pub no_cloud: Option<Empty>,
        /// By the guest agent while the machine runs.
        pub qemu_guest_agent: Option<AgentUsers>,
    }

    /// How a password gets into the guest.
    pub struct PasswordWay {
        /// By the guest agent while the machine runs.
        pub qemu_guest_agent: Option<Empty>,
    }

    /// Users of the guest.
    pub struct AgentUsers {
        /// Their names.
        pub users: Vec<String>,
    }
}

words! {
    /// What happens when the node is emptied.
    pub enum EvictionStrategy {
        None = "None",
        LiveMigrate = "LiveMigrate",
        LiveMigrateIfPossible = "LiveMigrateIfPossible",
        External = "External",
    }

    /// How a machine starts.
    pub enum StartStrategy {
        Paused = "Paused",
    }

    /// An architecture.
    pub enum Architecture {
        Amd64 = "amd64",
        Arm64 = "arm64",
        S390x = "s390x",
    }

    /// The scheme of an HTTP request.
    pub enum Scheme {
        Http = "HTTP",
        Https = "HTTPS",
    }
}

/// A port: its number, or the name that it has in the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Port {
    /// A number.
    Number(i64),
    /// A name.
    Name(String),
}

impl JsonSchema for Port {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Port".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "format": "int-or-string",
            "anyOf": [{ "type": "integer" }, { "type": "string" }],
            "x-kubernetes-int-or-string": true,
        })
    }
}
