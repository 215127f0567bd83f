//! Finds the user of a container in the /etc/passwd and /etc/group of its image, which are untrusted text.

/// A user or a group that the image does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    /// The user is neither a known name nor a number.
    #[error("the image has no user {name:?}")]
    NoUser {
        /// The requested user.
        name: String,
    },
    /// The group is neither a known name nor a number.
    #[error("the image has no group {name:?}")]
    NoGroup {
        /// The requested group.
        name: String,
    },
}

/// An id of a user or group is too large. 4294967295 even means "unchanged" to the kernel, which would be root.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid user or group ID {number}: 0 to {max} are allowed")]
pub struct UserIdError {
    /// The id.
    pub number: u32,
    /// The largest allowed id.
    pub max: u32,
}

/// The largest id of a user or group.
pub const MAX_ID: u32 = i32::MAX.cast_unsigned();

/// Rejects ids that no process may get: those above `MAX_ID`, and in a user namespace those above its `last`.
pub fn check_ids(numbers: impl IntoIterator<Item = u32>, last: Option<u32>) -> Result<(), UserIdError> {
    let max = last.unwrap_or(MAX_ID).min(MAX_ID);
    match numbers.into_iter().find(|number| *number > max) {
        Some(number) => Err(UserIdError { number, max }),
        None => Ok(()),
    }
}

/// A user that a process can run as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserAccount {
    /// The user id.
    pub uid: u32,
    /// The primary group id.
    pub gid: u32,
    /// The name, if /etc/passwd has one.
    pub name: Option<String>,
    /// The home directory, if /etc/passwd has an absolute one.
    pub home: Option<String>,
}

/// Longer lines are ignored, in bytes.
const MAX_LINE: usize = 64 << 10;

struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn significant_lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#') && line.len() <= MAX_LINE)
}

fn parse_accounts(passwd: &str) -> impl Iterator<Item = Account<'_>> {
    significant_lines(passwd).filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some(Account { name, uid, gid, home: fields.nth(1).unwrap_or_default() })
    })
}

fn parse_groups(group: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    significant_lines(group).filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let gid = fields.nth(1)?.parse().ok()?;
        Some((name, gid, fields.next().unwrap_or_default()))
    })
}

/// Finds a user given as `name`, `uid`, `name:group`, `uid:gid` or mixed. A name takes precedence over a number. A number that the
/// image does not have is taken as it is, with group 0.
pub fn find_user(requested: &str, passwd: &str, group: &str) -> Result<UserAccount, UserError> {
    let (user, requested_group) = match requested.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (requested, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let number: Option<u32> = user.parse().ok();
    let account = parse_accounts(passwd)
        .find(|account| account.name == user)
        .or_else(|| parse_accounts(passwd).find(|account| Some(account.uid) == number));
    let mut user_account = match (account, number) {
        (Some(account), _) => to_user(&account),
        (None, Some(uid)) => UserAccount { uid, gid: 0, name: None, home: None },
        (None, None) => return Err(UserError::NoUser { name: user.to_owned() }),
    };
    if let Some(requested) = requested_group {
        let named = parse_groups(group).find(|(name, ..)| *name == requested).map(|(_, gid, _)| gid);
        let gid = named.or_else(|| requested.parse().ok());
        user_account.gid = gid.ok_or_else(|| UserError::NoGroup { name: requested.to_owned() })?;
    }
    Ok(user_account)
}

fn to_user(account: &Account) -> UserAccount {
    UserAccount {
        uid: account.uid,
        gid: account.gid,
        name: Some(account.name.to_owned()),
        home: Some(account.home.to_owned()).filter(|home| home.starts_with('/')),
    }
}

/// Returns the user with these ids, with name and home of the first account that has the user id.
pub fn user_with_ids(uid: u32, gid: u32, passwd: &str) -> UserAccount {
    let account = parse_accounts(passwd).find(|account| account.uid == uid);
    match account {
        Some(account) => UserAccount { uid, gid, ..to_user(&account) },
        None => UserAccount { uid, gid, name: None, home: None },
    }
}

/// Returns the groups that list this user as a member in /etc/group, at most 65,536.
pub fn list_memberships(name: &str, group: &str) -> Vec<u32> {
    let member = |members: &str| members.split(',').any(|member| member.trim() == name);
    parse_groups(group).filter(|(_, _, members)| member(members)).map(|(_, gid, _)| gid).take(65_536).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PASSWD: &str = "# comment\nroot:x:0:0:root:/root:/bin/sh\nweb:x:101:102:Web,,:/srv/web:/bin/false\n1000:x:7:8::/odd:\nbad:x:z:1::/:\nshort:x:5\n";
    const GROUP: &str = "root:x:0:\nweb:x:102:\nlog:x:4:web,root\n44:x:9:\nvideo:x:45:web";

    fn numbers(requested: &str) -> Result<(u32, u32), UserError> {
        find_user(requested, PASSWD, GROUP).map(|user_account| (user_account.uid, user_account.gid))
    }

    #[test]
    fn every_form_is_found() {
        for (requested, expected) in [
            ("", (0, 0)),
            ("root", (0, 0)),
            ("web", (101, 102)),
            ("101", (101, 102)),
            ("1000", (7, 8)),
            ("4711", (4711, 0)),
            ("web:log", (101, 4)),
            ("web:44", (101, 9)),
            ("web:50", (101, 50)),
            ("4711:4712", (4711, 4712)),
            ("4711:video", (4711, 45)),
            ("web:", (101, 102)),
        ] {
            assert_eq!(numbers(requested), Ok(expected), "{requested:?}");
        }
        assert_eq!(numbers("nobody"), Err(UserError::NoUser { name: "nobody".into() }));
        assert_eq!(numbers("bad"), Err(UserError::NoUser { name: "bad".into() }));
        assert_eq!(numbers("web:none"), Err(UserError::NoGroup { name: "none".into() }));
        assert_eq!(numbers("-1"), Err(UserError::NoUser { name: "-1".into() }));
    }

    #[test]
    fn home_and_groups_come_from_the_image() {
        let web = find_user("101", PASSWD, GROUP).unwrap();
        assert_eq!((web.name.as_deref(), web.home.as_deref()), (Some("web"), Some("/srv/web")));
        assert_eq!(list_memberships("web", GROUP), [4, 45]);
        assert_eq!(user_with_ids(101, 5, PASSWD), UserAccount { gid: 5, ..web });
        assert_eq!(user_with_ids(9, 9, PASSWD).home, None);
    }

    #[test]
    fn reserved_ids_are_rejected() {
        assert_eq!(check_ids([0, 1000, MAX_ID], None), Ok(()));
        assert_eq!(check_ids([0, 65_535], Some(65_535)), Ok(()));
        for (number, last, max) in
            [(MAX_ID + 1, None, MAX_ID), (u32::MAX, Some(u32::MAX), MAX_ID), (65_536, Some(65_535), 65_535)]
        {
            assert_eq!(check_ids([0, number], last), Err(UserIdError { number, max }));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn any_files_are_read_without_panic(requested in "[a-z0-9:]{0,8}", passwd in "[a-z0-9:,#\n ]{0,80}", group in "\\PC{0,80}") {
            let _ = find_user(&requested, &passwd, &group);
            let _ = list_memberships(&requested, &group);
        }

        #[test]
        fn a_number_is_always_a_user(uid: u32, gid: u32) {
            let user_account = find_user(&format!("{uid}:{gid}"), "", "").unwrap();
            prop_assert_eq!((user_account.uid, user_account.gid), (uid, gid));
        }
    }
}
