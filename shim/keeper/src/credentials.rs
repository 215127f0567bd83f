//! Installs SSH keys and passwords of the guest's users by the guest agent. The daemon reads the secrets and sends the list; the
//! guest receives each change once per run, because this module remembers what it has. The commands are those of QEMU's
//! docs/interop/qemu-ga-ref.

use crate::error::KeeperError;
use crate::guest_agent::{CommandResult, GuestAgent};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nacelle_base::Chain;
use nacelle_model::machine::Credentials;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::{Mutex as StdMutex, PoisonError};
use tokio::sync::Mutex;

/// The exit code of the verb while no guest agent answers: the daemon retries later.
pub const NO_GUEST_AGENT: u32 = 75;
/// The maximum size of the list in bytes of JSON.
pub const MAX_LIST_BYTES: usize = 1 << 20;

/// The credentials that the guest has received since QEMU was started.
#[derive(Default)]
pub struct InstalledCredentials {
    installed: Mutex<Credentials>,
    /// The result of the last attempt.
    last_result: StdMutex<Option<String>>,
}

impl InstalledCredentials {
    /// Forgets what the guest has received, because the guest was set back to an earlier state: everything is sent again.
    pub async fn forget(&self) {
        *self.installed.lock().await = Credentials::default();
    }

    /// Returns the result of the last attempt; `None` if there were never any credentials.
    pub fn last_result(&self) -> Option<String> {
        self.last_result.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Installs the credentials by the guest agent. Continues after the failure of a user and returns the first error.
    pub async fn install(&self, agent: &GuestAgent, text: &str) -> Result<CommandResult, KeeperError> {
        let result = self.apply_changes(agent, text).await;
        let last_result = match &result {
            Ok(CommandResult { code: 0, .. }) => "given".to_owned(),
            Ok(_) => "waiting for the guest agent".to_owned(),
            Err(error) => Chain(error).to_string(),
        };
        *self.last_result.lock().unwrap_or_else(PoisonError::into_inner) = Some(last_result);
        result
    }

    async fn apply_changes(&self, agent: &GuestAgent, text: &str) -> Result<CommandResult, KeeperError> {
        let invalid =
            |rule| KeeperError::InvalidField { field: "credentials", value: format!("{} bytes", text.len()), rule };
        if text.len() > MAX_LIST_BYTES {
            return Err(invalid("at most 1 MiB is expected"));
        }
        let wanted: Credentials = nacelle_base::json::read(text.as_bytes())
            .map_err(|_wrong| invalid("an object with keys and passwords by user is expected"))?;
        let mut installed_now = self.installed.lock().await;
        if *installed_now == wanted {
            return Ok(CommandResult::default());
        }
        if let Err(error) = agent.ping().await {
            let stderr = format!("{}\n", Chain(&error)).into_bytes();
            return Ok(CommandResult { code: NO_GUEST_AGENT, stderr, ..CommandResult::default() });
        }
        let mut first = Ok(());
        let users = wanted.keys.keys().chain(installed_now.keys.keys()).cloned().collect::<BTreeSet<_>>();
        for user in users {
            let none = Vec::new();
            let (had, installed) =
                (installed_now.keys.get(&user).unwrap_or(&none), wanted.keys.get(&user).unwrap_or(&none));
            let result = replace_keys(agent, &user, had, installed).await;
            match (&result, installed.is_empty()) {
                (Ok(()), true) => drop(installed_now.keys.remove(&user)),
                (Ok(()), false) => drop(installed_now.keys.insert(user, installed.clone())),
                (Err(_), _) => {}
            }
            first = first.and(result);
        }
        // A password that is no longer in the list stays in the guest, because there is no other to replace it.
        installed_now.passwords.retain(|user, _| wanted.passwords.contains_key(user));
        for (user, password) in &wanted.passwords {
            if installed_now.passwords.get(user) == Some(password) {
                continue;
            }
            let arguments = json!({ "username": user, "password": STANDARD.encode(password), "crypted": false });
            let result = agent.command("guest-set-user-password", arguments).await;
            if result.is_ok() {
                installed_now.passwords.insert(user.clone(), password.clone());
            }
            first = first.and(result.map(drop));
        }
        first.map(|()| CommandResult::default())
    }
}

/// Replaces a user's keys `had` by `installed`. Other keys in the guest stay.
async fn replace_keys(agent: &GuestAgent, user: &str, had: &[String], installed: &[String]) -> Result<(), KeeperError> {
    let others = |these: &[String], those: &[String]| -> Vec<String> {
        these.iter().filter(|key| !those.contains(key)).cloned().collect()
    };
    for (command, keys) in [
        ("guest-ssh-remove-authorized-keys", others(had, installed)),
        ("guest-ssh-add-authorized-keys", others(installed, had)),
    ] {
        if !keys.is_empty() {
            let arguments: Value = json!({ "username": user, "keys": keys });
            agent.command(command, arguments).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixStream;

    /// Returns an agent of a guest whose only user is `root`, and the list of its requests.
    fn agent() -> (GuestAgent, Arc<StdMutex<Vec<String>>>) {
        let (near, far) = UnixStream::pair().unwrap();
        let requests = Arc::new(StdMutex::new(Vec::new()));
        let received = Arc::clone(&requests);
        tokio::spawn(async move {
            let (reader, mut writer) = far.into_split();
            let mut lines = BufReader::new(reader).lines();
            while let Some(line) = lines.next_line().await.unwrap() {
                let requests: Value = serde_json::from_str(&line).unwrap();
                let (command, arguments) = (requests["execute"].as_str().unwrap(), &requests["arguments"]);
                let answer = match (command, arguments["username"].as_str()) {
                    ("guest-sync", _) => json!({ "return": arguments["id"] }),
                    (_, Some("root")) => {
                        let what =
                            if arguments["keys"].is_null() { &arguments["password"] } else { &arguments["keys"] };
                        received.lock().unwrap().push(format!("{command} {what}"));
                        json!({ "return": {} })
                    }
                    (_, user) => json!({ "error": { "class": "GenericError", "desc": format!("no user {user:?}") } }),
                };
                writer.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            }
        });
        (GuestAgent::new(near), requests)
    }

    #[test]
    fn only_changed_credentials_are_sent_and_users_fail_separately() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (agent, requests) = agent();
            let installed_now = InstalledCredentials::default();
            let received = || std::mem::take(&mut *requests.lock().unwrap());
            let first = r#"{"keys": {"root": ["a", "b"]}, "passwords": {"root": "secret"}}"#;
            assert_eq!(installed_now.install(&agent, first).await.unwrap().code, 0);
            let password = format!("guest-set-user-password {:?}", STANDARD.encode("secret"));
            assert_eq!(received(), [r#"guest-ssh-add-authorized-keys ["a","b"]"#, password.as_str()]);
            assert_eq!(installed_now.install(&agent, first).await.unwrap().code, 0);
            assert_eq!(received(), [""; 0]);
            // A user that the guest does not know does not prevent the others.
            let second = r#"{"keys": {"nobody": ["a"], "root": ["b", "c"]}}"#;
            let refused = installed_now.install(&agent, second).await.unwrap_err().to_string();
            assert!(refused.contains("nobody") && installed_now.last_result().unwrap().contains("nobody"), "{refused}");
            let changed = [r#"guest-ssh-remove-authorized-keys ["a"]"#, r#"guest-ssh-add-authorized-keys ["c"]"#];
            assert_eq!(received(), changed);
            assert_eq!(installed_now.install(&agent, "{}").await.unwrap().code, 0);
            assert_eq!(received(), [r#"guest-ssh-remove-authorized-keys ["b","c"]"#]);
            installed_now.install(&agent, first).await.unwrap();
            installed_now.forget().await;
            installed_now.install(&agent, first).await.unwrap();
            assert_eq!(received().len(), 4);
            for invalid in ["", "7", r#"{"keys": {"root": "a"}}"#, r#"{"other": 1}"#] {
                assert!(installed_now.install(&agent, invalid).await.is_err(), "{invalid}");
            }
        });
    }

    #[test]
    fn without_an_agent_the_verb_asks_for_a_retry_and_passwords_stay_hidden() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (near, far) = UnixStream::pair().unwrap();
            drop(far);
            let text = r#"{"passwords": {"root": "secret"}}"#;
            let result = InstalledCredentials::default().install(&GuestAgent::new(near), text).await.unwrap();
            assert_eq!(result.code, NO_GUEST_AGENT);
            let credentials: Credentials = serde_json::from_str(text).unwrap();
            let debug = format!("{credentials:?}");
            assert!(debug.contains("root") && !debug.contains("secret"), "{debug}");
        });
    }
}
