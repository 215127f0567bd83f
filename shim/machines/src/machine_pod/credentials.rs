//! Handles SSH keys and passwords that the guest agent sets in a running machine: which secrets contain them, and the secrets'
//! present contents. Blocks on files.

use super::files::{parse_public_keys, read_volume};
use super::volume_error::{VolumeError, invalid_field, secret_path};
use nacelle_model::container::ContainerConfig;
use nacelle_model::machine::Credential;
use nacelle_model::machine::Credentials;
use nacelle_model::machine_pod::MachinePod;
use nacelle_model::mount::NodeVolume;
use nacelle_vmi::spec::InstanceSpec;
use std::path::{Path, PathBuf};

/// The object's name in errors.
const WHAT: &str = "of accessCredentials";
/// The largest number of keys of one user, and of passwords of one machine.
const MAX_CREDENTIALS: usize = 256;

/// Returns the credentials of a valid specification.
pub(super) fn access_credentials(spec: &InstanceSpec) -> Vec<Credential> {
    let all = spec.access_credentials.iter().filter_map(|credential| {
        let secret =
            |source: Option<&nacelle_vmi::spec::CredentialSource>| Some(source?.secret.as_ref()?.secret_name.clone());
        if let Some(key) = &credential.ssh_public_key {
            let users = key.propagation_method.as_ref()?.qemu_guest_agent.as_ref()?.users.clone();
            return Some(Credential::Keys { secret: secret(key.source.as_ref())?, users });
        }
        let password = credential.user_password.as_ref()?;
        Some(Credential::Passwords { secret: secret(password.source.as_ref())? })
    });
    all.collect()
}

/// Checks that the container has a mount for each secret.
pub(super) fn check_mounts(machine: &MachinePod, config: &ContainerConfig) -> Result<(), VolumeError> {
    machine.credentials.iter().try_for_each(|credential| secret_mount(credential.secret(), config).map(drop))
}

fn secret_mount<'a>(secret: &str, config: &'a ContainerConfig) -> Result<&'a NodeVolume, VolumeError> {
    let at = secret_path(secret);
    let found = config.node_volumes.iter().find(|mount| Path::new(&mount.container_path) == at);
    match found {
        Some(mount) => Ok(mount),
        None => {
            let rule = format!("secret {secret} {WHAT} is expected there");
            invalid_field("config.mounts.container_path", &at.display().to_string(), rule)
        }
    }
}

/// Returns the directories on the node with the files of the secrets; those without a mount are left out.
pub fn credential_directories(machine: &MachinePod, config: &ContainerConfig) -> Vec<PathBuf> {
    let mounts = machine.credentials.iter().filter_map(|credential| secret_mount(credential.secret(), config).ok());
    mounts.map(|mount| PathBuf::from(&mount.host_path)).collect()
}

/// Returns the present contents of the secrets.
pub fn read_credentials(machine: &MachinePod, config: &ContainerConfig) -> Result<Credentials, VolumeError> {
    let mut all = Credentials::default();
    for credential in &machine.credentials {
        let secret = credential.secret();
        let mount = secret_mount(secret, config)?;
        let invalid = |rule: String| invalid_field("config.mounts.host_path", &mount.host_path, rule);
        for (name, bytes) in read_volume(WHAT, mount)? {
            match credential {
                Credential::Keys { users, .. } => {
                    let Some(keys) = parse_public_keys(&bytes) else {
                        return invalid(format!("{name} of secret {secret} contains a line that is not a public key"));
                    };
                    for user in users {
                        let known = all.keys.entry(user.clone()).or_default();
                        for key in &keys {
                            if !known.contains(key) {
                                known.push(key.clone());
                            }
                        }
                    }
                }
                // The keys of the secret are user names.
                Credential::Passwords { .. } => match String::from_utf8(bytes) {
                    Ok(text) if !text.trim_end_matches(['\r', '\n']).contains(char::is_control) => {
                        all.passwords.insert(name, text.trim_end_matches(['\r', '\n']).to_owned());
                    }
                    _ => {
                        return invalid(format!(
                            "{name} of secret {secret} is not a password: one line of text is expected"
                        ));
                    }
                },
            }
        }
        if all.keys.values().any(|keys| keys.len() > MAX_CREDENTIALS) || all.passwords.len() > MAX_CREDENTIALS {
            return invalid(format!(
                "secret {secret}: at most {MAX_CREDENTIALS} keys of a user and {MAX_CREDENTIALS} passwords are allowed"
            ));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MachineSettings;
    use nacelle_model::mount::Propagation;
    use nacelle_model::testing;
    use nacelle_vmi::admit;
    use nacelle_vmi::preset::Catalogue;
    use serde_json::json;
    use std::fs;

    fn machine() -> MachinePod {
        let agent = |users: &[&str]| json!({ "qemuGuestAgent": if users.is_empty() { json!({}) } else { json!({ "users": users }) } });
        let source = |name: &str| json!({ "secret": { "secretName": name } });
        let spec = json!({
            "domain": { "memory": { "guest": "64Mi" }, "devices": { "disks": [{ "name": "a" }] } },
            "volumes": [{ "name": "a", "emptyDisk": { "capacity": "1Mi" } }],
            "accessCredentials": [
                { "sshPublicKey": { "source": source("keys"), "propagationMethod": agent(&["root", "me"]) } },
                { "userPassword": { "source": source("words"), "propagationMethod": agent(&[]) } },
            ],
        });
        let annotations = [("vm.nacelle.dev/kind", "machine".to_owned()), ("vm.nacelle.dev/spec", spec.to_string())];
        let annotations = annotations.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let admitted = admit::pod(&annotations, &Catalogue::default()).unwrap().unwrap();
        super::super::build(&admitted, &testing::pod(1).config, &MachineSettings::default()).unwrap()
    }

    fn with(directory: &Path, secrets: &[&str]) -> ContainerConfig {
        let mount = |secret: &&str| NodeVolume {
            host_path: directory.join(secret).display().to_string(),
            container_path: format!("/run/nacelle/vm/secret-{secret}"),
            readonly: true,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: [].into(),
        };
        ContainerConfig {
            node_volumes: secrets.iter().map(mount).collect(),
            ..(*testing::container(1, 1).config).clone()
        }
    }
    #[test]
    fn users_get_the_keys_and_passwords_of_their_secrets() {
        let directory = tempfile::tempdir().unwrap();
        let file = |secret: &str, name: &str, text: &str| {
            fs::create_dir_all(directory.path().join(secret)).unwrap();
            fs::write(directory.path().join(secret).join(name), text).unwrap();
        };
        file("keys", "one", "# mine\nssh-ed25519 AAAA a\n\n");
        file("keys", "two", "ssh-ed25519 AAAA a\nssh-rsa BBBB b");
        file("words", "root", "a word\n");
        let (machine, config) = (machine(), with(directory.path(), &["keys", "words"]));
        check_mounts(&machine, &config).unwrap();
        let found = read_credentials(&machine, &config).unwrap();
        let keys = ["ssh-ed25519 AAAA a", "ssh-rsa BBBB b"].map(str::to_owned).to_vec();
        assert_eq!(found.keys, [("me".to_owned(), keys.clone()), ("root".to_owned(), keys)].into());
        assert_eq!(found.passwords, [("root".to_owned(), "a word".to_owned())].into());

        let error = check_mounts(&machine, &with(directory.path(), &["keys"])).unwrap_err().to_string();
        assert!(error.contains("secret-words"), "{error}");
        file("words", "me", "two\nlines");
        let error = read_credentials(&machine, &config).unwrap_err().to_string();
        assert!(error.contains("me of secret words is not a password") && !error.contains("lines"), "{error}");
        file("keys", "two", "no-key");
        assert!(read_credentials(&machine, &config).unwrap_err().to_string().contains("not a public key"));
    }
}
