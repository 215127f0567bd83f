//! Issues the tokens in the URLs: each opens one stream, once, for a short time.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a token is valid.
const TOKEN_LIFETIME: Duration = Duration::from_secs(60);
/// The maximum number of unused tokens.
const MAX_TOKENS: usize = 1000;

/// Too many streams were requested and not opened.
#[derive(Debug, thiserror::Error)]
#[error("{MAX_TOKENS} streams were requested within a minute and not opened: try again later")]
pub struct TooManyTokens;

struct Waiting<T> {
    by_token: HashMap<String, T>,
    /// The tokens in the order of their expiry; some may be used already.
    ends: VecDeque<(Instant, String)>,
}

/// The tokens that were issued and not used.
pub(crate) struct Tokens<T>(Mutex<Waiting<T>>);

impl<T> Tokens<T> {
    pub fn new() -> Tokens<T> {
        Tokens(Mutex::new(Waiting { by_token: HashMap::new(), ends: VecDeque::new() }))
    }

    /// Issues a token for `what`, valid from `now` on.
    pub fn issue(&self, what: T, now: Instant) -> Result<String, TooManyTokens> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while waiting.ends.front().is_some_and(|(end, _)| *end <= now) {
            if let Some((_, token)) = waiting.ends.pop_front() {
                waiting.by_token.remove(&token);
            }
        }
        if waiting.ends.len() >= MAX_TOKENS {
            return Err(TooManyTokens);
        }
        let mut random = [0; 16];
        // Linux provides random bytes to every process once it has booted; without them there is no secret.
        nacelle_base::random::fill(&mut random).expect("the kernel provides random bytes");
        let token = hex::encode(random);
        waiting.ends.push_back((now + TOKEN_LIFETIME, token.clone()));
        waiting.by_token.insert(token.clone(), what);
        Ok(token)
    }

    /// Returns whether this token can be taken.
    pub fn is_valid(&self, token: &str, now: Instant) -> bool {
        let waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.ends.iter().any(|(end, known)| known == token && now < *end)
    }

    /// Returns what this token stands for if it is valid, and invalidates it.
    pub fn take(&self, token: &str, now: Instant) -> Option<T> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let position = waiting.ends.iter().position(|(_, known)| known == token)?;
        let (end, token) = waiting.ends.remove(position)?;
        waiting.by_token.remove(&token).filter(|_| now < end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_opens_once_and_not_too_late() {
        let (tokens, now) = (Tokens::new(), Instant::now());
        let (first, second) = (tokens.issue(1, now).unwrap(), tokens.issue(2, now).unwrap());
        assert!(first.len() == 32 && first != second);
        assert!(tokens.is_valid(&first, now) && !tokens.is_valid("", now));
        assert!(!tokens.is_valid(&second, now + TOKEN_LIFETIME));
        assert_eq!(tokens.take(&first, now), Some(1));
        assert!(!tokens.is_valid(&first, now));
        assert_eq!(tokens.take(&first, now), None);
        assert_eq!(tokens.take(&second, now + TOKEN_LIFETIME), None);
        assert_eq!(tokens.take("", now), None);
    }

    #[test]
    fn there_are_not_too_many_and_old_ones_make_room() {
        let (tokens, now) = (Tokens::new(), Instant::now());
        let all: Vec<String> = (0..MAX_TOKENS).map(|number| tokens.issue(number, now).unwrap()).collect();
        assert!(tokens.issue(0, now).is_err());
        assert_eq!(tokens.take(&all[7], now), Some(7));
        assert!(tokens.issue(0, now).is_ok());
        assert!(tokens.issue(0, now + TOKEN_LIFETIME).is_ok());
        assert_eq!(tokens.0.lock().unwrap().by_token.len(), 1);
    }
}
