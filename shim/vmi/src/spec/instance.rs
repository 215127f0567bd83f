//! Defines the outer part of a specification, around the domain. The doc comments of the fields are descriptions in the OpenAPI
//! schema.

use super::{Domain, Network, Volume, document, words};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

document! {
    /// One run of a VM.
    pub struct InstanceSpec {
        /// The VM: CPUs, memory, firmware and devices.
        pub domain: Domain,
        /// The volumes of the disks and file systems.
        pub volumes: Vec<Volume>,
        /// The networks of the interfaces.
        pub networks: Vec<Network>,
        /// The liveness probe.
        pub liveness_probe: Option<Probe>,
        /// The readiness probe.
        pub readiness_probe: Option<Probe>,
        /// SSH keys and passwords that are set in the guest.
        pub access_credentials: Vec<AccessCredential>,
        /// The strategy when the node is drained.
        pub eviction_strategy: Option<EvictionStrategy>,
        /// The state in which the VM starts: running or paused.
        pub start_strategy: Option<StartStrategy>,
        /// The grace period of the guest for its shutdown, in seconds.
        pub termination_grace_period_seconds: Option<i64>,
        /// The CPU architecture.
        pub architecture: Option<Architecture>,
    }

    /// A probe that is repeated.
    pub struct Probe {
        /// An HTTP request.
        pub http_get: Option<HttpGet>,
        /// A TCP connection.
        pub tcp_socket: Option<TcpSocket>,
        /// A command that the guest agent runs.
        pub exec: Option<Exec>,
        /// The guest agent must reply.
        pub guest_agent_ping: Option<Empty>,
        /// The delay before the first probe in seconds.
        pub initial_delay_seconds: Option<i32>,
        /// The timeout of a probe in seconds.
        pub timeout_seconds: Option<i32>,
        /// The interval between probes in seconds.
        pub period_seconds: Option<i32>,
        /// The number of consecutive successes that count as success.
        pub success_threshold: Option<i32>,
        /// The number of consecutive failures that count as failure.
        pub failure_threshold: Option<i32>,
    }

    /// An HTTP request.
    pub struct HttpGet {
        /// The path.
        pub path: String,
        /// The port.
        pub port: Option<Port>,
        /// The host; by default the address of the VM.
        pub host: String,
        /// HTTP or HTTPS.
        pub scheme: Option<Scheme>,
        /// Headers.
        pub http_headers: Vec<HttpHeader>,
    }

    /// A header.
    pub struct HttpHeader {
        /// The name.
        pub name: String,
        /// The value.
        pub value: String,
    }

    /// A TCP connection.
    pub struct TcpSocket {
        /// The port.
        pub port: Option<Port>,
        /// The host; by default the address of the VM.
        pub host: String,
    }

    /// A command.
    pub struct Exec {
        /// The program and its arguments.
        pub command: Vec<String>,
    }

    /// An object without fields, which is set or not.
    pub struct Empty {}

    /// An access credential: SSH keys or a password.
    pub struct AccessCredential {
        /// SSH keys.
        pub ssh_public_key: Option<SshPublicKey>,
        /// A password.
        pub user_password: Option<UserPassword>,
    }

    /// SSH keys and the method by which they are set in the guest.
    pub struct SshPublicKey {
        /// The source of the keys.
        pub source: Option<CredentialSource>,
        /// The propagation method.
        pub propagation_method: Option<KeyPropagation>,
    }

    /// A password and the method by which it is set in the guest.
    pub struct UserPassword {
        /// The source of the password.
        pub source: Option<CredentialSource>,
        /// The propagation method.
        pub propagation_method: Option<PasswordPropagation>,
    }

    /// The source of a credential.
    pub struct CredentialSource {
        /// A Secret, which the pod must also have as a volume.
        pub secret: Option<SecretName>,
    }

    /// A Secret.
    pub struct SecretName {
        /// The name.
        pub secret_name: String,
    }

    /// The propagation method of SSH keys: one of these.
    pub struct KeyPropagation {
        /// In the metadata of the config drive.
        pub config_drive: Option<Empty>,
        /// In the metadata of NoCloud.
        pub no_cloud: Option<Empty>,
        /// Through the guest agent of the running VM.
        pub qemu_guest_agent: Option<AgentUsers>,
    }

    /// The propagation method of a password.
    pub struct PasswordPropagation {
        /// Through the guest agent of the running VM.
        pub qemu_guest_agent: Option<Empty>,
    }

    /// Users of the guest.
    pub struct AgentUsers {
        /// The user names.
        pub users: Vec<String>,
    }
}

words! {
    /// The strategy when the node is drained.
    pub enum EvictionStrategy {
        None = "None",
        LiveMigrate = "LiveMigrate",
        LiveMigrateIfPossible = "LiveMigrateIfPossible",
        External = "External",
    }

    /// The state in which a VM starts.
    pub enum StartStrategy {
        Paused = "Paused",
    }

    /// A CPU architecture.
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

/// A port: its number, or its name in the pod.
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
