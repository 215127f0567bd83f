//! Installs SSH keys and passwords of the guest's users by the guest agent. The daemon reads the secrets and sends the list; the
//! guest receives each change once per run, because this module remembers what it has. The commands are those of QEMU's
//! docs/interop/qemu-ga-ref.

use crate::error::KeeperError;
use crate::guest_agent::{GuestAgent, Outcome};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nacelle_base::Chain;
use nacelle_model::machine::Credentials;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::{Mutex as StdMutex, PoisonError};
use tokio::sync::Mutex;

/// The exit code of the verb while no guest agent answers: the daemon retries later.
pub const NOBODY: u32 = 75;
/// The maximum size of the list in bytes of JSON.
pub const LONGEST: usize = 1 << 20;

/// The credentials that the guest has received since QEMU was started.
#[derive(Default)]
pub struct Given {
    has: Mutex<Credentials>,
    /// The result of the last attempt.
    said: StdMutex<Option<String>>,
}

impl Given {
    /// Forgets what the guest has received, because the guest was set back to an earlier state: everything is sent again.
    pub async fn forget(&self) {
        *self.has.lock().await = Credentials::default();
    }

    /// Returns the result of the last attempt; `None` if there were never any credentials.
    pub fn said(&self) -> Option<String> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Installs the credentials by the guest agent. Continues after the failure of a user and returns the first error.
    pub async fn give(&self, agent: &GuestAgent, text: &str) -> Result<Outcome, KeeperError> {
        let done = self.made_so(agent, text).await;
        let said = match &done {
            Ok(Outcome { code: 0, .. }) => "given".to_owned(),
            Ok(_) => "waiting for the guest agent".to_owned(),
            Err(error) => Chain(error).to_string(),
        };
        *self.said.lock().unwrap_or_else(PoisonError::into_inner) = Some(said);
        done
    }

    async fn made_so(&self, agent: &GuestAgent, text: &str) -> Result<Outcome, KeeperError> {
        let wrong = |rule| KeeperError::Field { field: "credentials", value: format!("{} bytes", text.len()), rule };
        if text.len() > LONGEST {
            return Err(wrong("at most 1 MiB is expected"));
        }
        let wanted: Credentials = nacelle_base::json::read(text.as_bytes())
            .map_err(|_wrong| wrong("keys and passwords by their users are expected"))?;
        let mut given = self.has.lock().await;
        if *given == wanted {
            return Ok(Outcome::default());
        }
        if let Err(error) = agent.ping().await {
            let stderr = format!("{}\n", Chain(&error)).into_bytes();
            return Ok(Outcome { code: NOBODY, stderr, ..Outcome::default() });
        }
        let mut first = Ok(());
        let users = wanted.keys.keys().chain(given.keys.keys()).cloned().collect::<BTreeSet<_>>();
        for user in users {
            let none = Vec::new();
            let (had, has) = (given.keys.get(&user).unwrap_or(&none), wanted.keys.get(&user).unwrap_or(&none));
            let done = keys(agent, &user, had, has).await;
            match (&done, has.is_empty()) {
                (Ok(()), true) => drop(given.keys.remove(&user)),
                (Ok(()), false) => drop(given.keys.insert(user, has.clone())),
                (Err(_), _) => {}
            }
            first = first.and(done);
        }
        // A password that is no longer in the list stays in the guest, because there is no other to replace it.
        given.passwords.retain(|user, _| wanted.passwords.contains_key(user));
        for (user, password) in &wanted.passwords {
            if given.passwords.get(user) == Some(password) {
                continue;
            }
            let arguments = json!({ "username": user, "password": STANDARD.encode(password), "crypted": false });
            let done = agent.command("guest-set-user-password", arguments).await;
            if done.is_ok() {
                given.passwords.insert(user.clone(), password.clone());
            }
            first = first.and(done.map(drop));
        }
        first.map(|()| Outcome::default())
    }
}

/// Replaces a user's keys `had` by `has`. Other keys in the guest stay.
async fn keys(agent: &GuestAgent, user: &str, had: &[String], has: &[String]) -> Result<(), KeeperError> {
    let others = |these: &[String], those: &[String]| -> Vec<String> {
        these.iter().filter(|key| !those.contains(key)).cloned().collect()
    };
    for (command, keys) in
        [("guest-ssh-remove-authorized-keys", others(had, has)), ("guest-ssh-add-authorized-keys", others(has, had))]
    {
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
        let asked = Arc::new(StdMutex::new(Vec::new()));
        let heard = Arc::clone(&asked);
        tokio::spawn(async move {
            let (reader, mut writer) = far.into_split();
            let mut lines = BufReader::new(reader).lines();
            while let Some(line) = lines.next_line().await.unwrap() {
                let asked: Value = serde_json::from_str(&line).unwrap();
                let (command, arguments) = (asked["execute"].as_str().unwrap(), &asked["arguments"]);
                let answer = match (command, arguments["username"].as_str()) {
                    ("guest-sync", _) => json!({ "return": arguments["id"] }),
                    (_, Some("root")) => {
                        let what =
                            if arguments["keys"].is_null() { &arguments["password"] } else { &arguments["keys"] };
                        heard.lock().unwrap().push(format!("{command} {what}"));
                        json!({ "return": {} })
                    }
                    (_, user) => json!({ "error": { "class": "GenericError", "desc": format!("no user {user:?}") } }),
                };
                writer.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            }
        });
        (GuestAgent::new(near), asked)
    }

    #[test]
    fn what_has_changed_is_said_once_and_each_user_counts_for_himself() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (agent, asked) = agent();
            let given = Given::default();
            let heard = || std::mem::take(&mut *asked.lock().unwrap());
            let first = r#"{"keys": {"root": ["a", "b"]}, "passwords": {"root": "secret"}}"#;
            assert_eq!(given.give(&agent, first).await.unwrap().code, 0);
            let password = format!("guest-set-user-password {:?}", STANDARD.encode("secret"));
            assert_eq!(heard(), [r#"guest-ssh-add-authorized-keys ["a","b"]"#, password.as_str()]);
            assert_eq!(given.give(&agent, first).await.unwrap().code, 0);
            assert_eq!(heard(), [""; 0]);
            // A user that the guest does not know does not prevent the others.
            let second = r#"{"keys": {"nobody": ["a"], "root": ["b", "c"]}}"#;
            let refused = given.give(&agent, second).await.unwrap_err().to_string();
            assert!(refused.contains("nobody") && given.said().unwrap().contains("nobody"), "{refused}");
            let changed = [r#"guest-ssh-remove-authorized-keys ["a"]"#, r#"guest-ssh-add-authorized-keys ["c"]"#];
            assert_eq!(heard(), changed);
            assert_eq!(given.give(&agent, "{}").await.unwrap().code, 0);
            assert_eq!(heard(), [r#"guest-ssh-remove-authorized-keys ["b","c"]"#]);
            given.give(&agent, first).await.unwrap();
            given.forget().await;
            given.give(&agent, first).await.unwrap();
            assert_eq!(heard().len(), 4);
            for wrong in ["", "7", r#"{"keys": {"root": "a"}}"#, r#"{"other": 1}"#] {
                assert!(given.give(&agent, wrong).await.is_err(), "{wrong}");
            }
        });
    }

    #[test]
    fn where_nobody_answers_it_is_told_later_and_no_password_is_shown() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (near, far) = UnixStream::pair().unwrap();
            drop(far);
            let text = r#"{"passwords": {"root": "secret"}}"#;
            let told = Given::default().give(&GuestAgent::new(near), text).await.unwrap();
            assert_eq!(told.code, NOBODY);
            let credentials: Credentials = serde_json::from_str(text).unwrap();
            let shown = format!("{credentials:?}");
            assert!(shown.contains("root") && !shown.contains("secret"), "{shown}");
        });
    }
}
