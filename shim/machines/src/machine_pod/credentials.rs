//! Handles SSH keys and passwords that the guest agent sets in a running machine: which secrets contain them, and the secrets'
//! present contents. Blocks on files.

use super::files::{lines_of_keys, read};
use super::volumes::{VolumeError, at_secret, field};
use nacelle_model::container::ContainerConfig;
use nacelle_model::machine::Credential;
use nacelle_model::machine::Credentials;
use nacelle_model::machine_pod::MachinePod;
use nacelle_model::mount::NodeVolume;
use nacelle_vmi::spec::InstanceSpec;
use std::path::{Path, PathBuf};

/// The object's name in errors.
const WHAT: &str = "of accessCredentials";
/// The largest number of keys, and of passwords, of one machine.
const MOST: usize = 256;

/// Returns the credentials of a valid specification.
pub(super) fn of(spec: &InstanceSpec) -> Vec<Credential> {
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
pub(super) fn check(machine: &MachinePod, config: &ContainerConfig) -> Result<(), VolumeError> {
    machine.credentials.iter().try_for_each(|credential| mount(credential.secret(), config).map(drop))
}

fn mount<'a>(secret: &str, config: &'a ContainerConfig) -> Result<&'a NodeVolume, VolumeError> {
    let at = at_secret(secret);
    let found = config.node_volumes.iter().find(|mount| Path::new(&mount.container_path) == at);
    match found {
        Some(mount) => Ok(mount),
        None => {
            let rule = format!("secret {secret} {WHAT} is expected there");
            field("config.mounts.container_path", &at.display().to_string(), rule)
        }
    }
}

/// Returns the directories on the node with the files of the secrets; those without a mount are left out.
pub fn credential_directories(machine: &MachinePod, config: &ContainerConfig) -> Vec<PathBuf> {
    let mounts = machine.credentials.iter().filter_map(|credential| mount(credential.secret(), config).ok());
    mounts.map(|mount| PathBuf::from(&mount.host_path)).collect()
}

/// Returns the present contents of the secrets.
pub fn credentials(machine: &MachinePod, config: &ContainerConfig) -> Result<Credentials, VolumeError> {
    let mut all = Credentials::default();
    for credential in &machine.credentials {
        let secret = credential.secret();
        let mount = mount(secret, config)?;
        let wrong = |rule: String| field("config.mounts.host_path", &mount.host_path, rule);
        for (name, bytes) in read(WHAT, mount)? {
            match credential {
                Credential::Keys { users, .. } => {
                    let Some(keys) = lines_of_keys(&bytes) else {
                        return wrong(format!("{name} of secret {secret} has something that is no public key"));
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
                        return wrong(format!(
                            "{name} of secret {secret} is no password: one line of text is expected"
                        ));
                    }
                },
            }
        }
        if all.keys.values().any(|keys| keys.len() > MOST) || all.passwords.len() > MOST {
            return wrong(format!("secret {secret}: at most {MOST} keys of a user and {MOST} passwords are possible"));
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
        let said = [("vm.nacelle.dev/kind", "machine".to_owned()), ("vm.nacelle.dev/spec", spec.to_string())];
        let said = said.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let admitted = admit::pod(&said, &Catalogue::default()).unwrap().unwrap();
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
    fn users_have_what_their_secrets_have() {
        let directory = tempfile::tempdir().unwrap();
        let file = |secret: &str, name: &str, text: &str| {
            fs::create_dir_all(directory.path().join(secret)).unwrap();
            fs::write(directory.path().join(secret).join(name), text).unwrap();
        };
        file("keys", "one", "# mine\nssh-ed25519 AAAA a\n\n");
        file("keys", "two", "ssh-ed25519 AAAA a\nssh-rsa BBBB b");
        file("words", "root", "a word\n");
        let (machine, config) = (machine(), with(directory.path(), &["keys", "words"]));
        check(&machine, &config).unwrap();
        let found = credentials(&machine, &config).unwrap();
        let keys = ["ssh-ed25519 AAAA a", "ssh-rsa BBBB b"].map(str::to_owned).to_vec();
        assert_eq!(found.keys, [("me".to_owned(), keys.clone()), ("root".to_owned(), keys)].into());
        assert_eq!(found.passwords, [("root".to_owned(), "a word".to_owned())].into());

        let refused = check(&machine, &with(directory.path(), &["keys"])).unwrap_err().to_string();
        assert!(refused.contains("secret-words"), "{refused}");
        file("words", "me", "two\nlines");
        let refused = credentials(&machine, &config).unwrap_err().to_string();
        assert!(refused.contains("me of secret words is no password") && !refused.contains("lines"), "{refused}");
        file("keys", "two", "no-key");
        assert!(credentials(&machine, &config).unwrap_err().to_string().contains("no public key"));
    }
}
