//! Checks the rules of the fields around the domain: probes, credentials, strategies.

use crate::cause::{Causes, Rule};
use crate::names::{SUBDOMAIN_RULE, is_dns_subdomain};
use crate::spec::{
    AccessCredential, Architecture, CredentialSource, EvictionStrategy, InstanceSpec, Port, Probe, SshPublicKey,
    UserPassword,
};

/// The maximum grace period in seconds: a day.
const MAX_GRACE: i64 = 24 * 3600;

/// Checks probes, access credentials, grace period and strategies.
pub fn check_instance_fields(spec: &InstanceSpec, causes: &mut Causes) {
    if let Some(probe) = &spec.liveness_probe {
        check_probe(probe, "spec.livenessProbe", true, causes);
    }
    if let Some(probe) = &spec.readiness_probe {
        check_probe(probe, "spec.readinessProbe", false, causes);
    }
    for (index, credential) in spec.access_credentials.iter().enumerate() {
        check_credential(spec, credential, &format!("spec.accessCredentials[{index}]"), causes);
    }
    if let Some(seconds) = spec.termination_grace_period_seconds
        && !(0..=MAX_GRACE).contains(&seconds)
    {
        let message = format!("must be between 0 and {MAX_GRACE}");
        causes.invalid(Rule("grace-period"), "spec.terminationGracePeriodSeconds", seconds, message);
    }
    if let Some(EvictionStrategy::LiveMigrate | EvictionStrategy::External) = spec.eviction_strategy {
        let message = "VMs are not live-migrated: use None or LiveMigrateIfPossible";
        causes.invalid(Rule("eviction"), "spec.evictionStrategy", spec.eviction_strategy, message);
    }
    if let Some(other @ (Architecture::Arm64 | Architecture::S390x)) = spec.architecture {
        causes.unsupported(Rule("architecture"), "spec.architecture", other, &["amd64"]);
    }
}

fn check_probe(probe: &Probe, at: &str, liveness: bool, causes: &mut Causes) {
    let ways = [
        ("httpGet", probe.http_get.is_some()),
        ("tcpSocket", probe.tcp_socket.is_some()),
        ("exec", probe.exec.is_some()),
        ("guestAgentPing", probe.guest_agent_ping.is_some()),
    ];
    let said: Vec<&str> = ways.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
    match said.as_slice() {
        [] => causes.required(Rule("probe-none"), at, "must be one of httpGet, tcpSocket, exec and guestAgentPing"),
        [_] => {}
        several => {
            causes.forbidden(Rule("probe-several"), at, format!("must be one, and is {}", several.join(" and ")));
        }
    }
    if let Some(http) = &probe.http_get {
        check_port(http.port.as_ref(), &format!("{at}.httpGet.port"), causes);
        for (index, header) in http.http_headers.iter().enumerate() {
            let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
            if header.name.is_empty() || !header.name.bytes().all(token) {
                let at = format!("{at}.httpGet.httpHeaders[{index}].name");
                causes.invalid(Rule("probe-header"), at, &header.name, "must be the name of an HTTP header");
            }
        }
    }
    if let Some(tcp) = &probe.tcp_socket {
        check_port(tcp.port.as_ref(), &format!("{at}.tcpSocket.port"), causes);
    }
    if probe.exec.as_ref().is_some_and(|exec| exec.command.is_empty()) {
        causes.required(Rule("probe-command"), format!("{at}.exec.command"), "must say the program");
    }
    for (name, number, least) in [
        ("initialDelaySeconds", probe.initial_delay_seconds, 0),
        ("timeoutSeconds", probe.timeout_seconds, 1),
        ("periodSeconds", probe.period_seconds, 1),
        ("successThreshold", probe.success_threshold, 1),
        ("failureThreshold", probe.failure_threshold, 1),
    ] {
        if number.is_some_and(|number| number < least) {
            causes.invalid(Rule("probe-number"), format!("{at}.{name}"), number, format!("must be at least {least}"));
        }
    }
    if liveness && probe.success_threshold.is_some_and(|threshold| threshold > 1) {
        let at = format!("{at}.successThreshold");
        causes.invalid(Rule("probe-liveness"), at, probe.success_threshold, "must be 1 for a liveness probe");
    }
}

fn check_port(port: Option<&Port>, at: &str, causes: &mut Causes) {
    match port {
        None => causes.required(Rule("probe-port-missing"), at, "must be a port"),
        Some(Port::Number(1..=65535)) => {}
        Some(Port::Number(other)) => {
            causes.invalid(Rule("probe-port"), at, other, "must be between 1 and 65535");
        }
        Some(Port::Name(name)) => {
            let right = crate::names::is_dns_label(name) && name.len() <= 15;
            if !right {
                let message = "must be a number or at most 15 lower case letters, digits and '-'";
                causes.invalid(Rule("probe-port-name"), at, name, message);
            }
        }
    }
}

fn check_credential(spec: &InstanceSpec, credential: &AccessCredential, at: &str, causes: &mut Causes) {
    match (&credential.ssh_public_key, &credential.user_password) {
        (Some(_), Some(_)) => {
            causes.forbidden(Rule("credential-both"), at, "must be one of sshPublicKey and userPassword");
        }
        (None, None) => causes.required(Rule("credential-none"), at, "must be one of sshPublicKey and userPassword"),
        (Some(key), None) => check_key(spec, key, &format!("{at}.sshPublicKey"), causes),
        (None, Some(password)) => check_password(password, &format!("{at}.userPassword"), causes),
    }
}

fn check_source(source: Option<&CredentialSource>, at: &str, causes: &mut Causes) {
    let name = source.and_then(|source| source.secret.as_ref()).map_or("", |secret| secret.secret_name.as_str());
    let at = format!("{at}.source.secret.secretName");
    if name.is_empty() {
        causes.required(Rule("credential-secret-missing"), at, "must name the secret");
    } else if !is_dns_subdomain(name) {
        causes.invalid(Rule("credential-secret"), at, name, SUBDOMAIN_RULE);
    }
}

fn check_key(spec: &InstanceSpec, key: &SshPublicKey, at: &str, causes: &mut Causes) {
    check_source(key.source.as_ref(), at, causes);
    let at = format!("{at}.propagationMethod");
    let Some(way) = &key.propagation_method else {
        return causes.required(Rule("key-way"), at, "must be one of configDrive, noCloud and qemuGuestAgent");
    };
    let ways = [way.config_drive.is_some(), way.no_cloud.is_some(), way.qemu_guest_agent.is_some()];
    if ways.iter().filter(|there| **there).count() != 1 {
        causes.forbidden(Rule("key-ways"), &at, "must be one of configDrive, noCloud and qemuGuestAgent");
    }
    let volumes = &spec.volumes;
    if way.config_drive.is_some() && !volumes.iter().any(|volume| volume.cloud_init_config_drive.is_some()) {
        let message = "spec.volumes has no volume of the kind cloudInitConfigDrive";
        causes.forbidden(Rule("key-config-drive"), format!("{at}.configDrive"), message);
    }
    if way.no_cloud.is_some() && !volumes.iter().any(|volume| volume.cloud_init_no_cloud.is_some()) {
        let message = "spec.volumes has no volume of the kind cloudInitNoCloud";
        causes.forbidden(Rule("key-no-cloud"), format!("{at}.noCloud"), message);
    }
    if way.qemu_guest_agent.as_ref().is_some_and(|agent| agent.users.is_empty()) {
        causes.required(Rule("key-users"), format!("{at}.qemuGuestAgent.users"), "must name at least one user");
    }
}

fn check_password(password: &UserPassword, at: &str, causes: &mut Causes) {
    check_source(password.source.as_ref(), at, causes);
    if password.propagation_method.as_ref().is_none_or(|way| way.qemu_guest_agent.is_none()) {
        let message = "is the only supported method for a password";
        causes.required(Rule("password-way"), format!("{at}.propagationMethod.qemuGuestAgent"), message);
    }
}
