//! A session's request for a server of its own: graphs with conditional nodes may end a context in which other sessions work
//! ([`crate::engine::base::loops`]).

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// How long the session waits for the daemon to move it, or to say that it stays.
const PATIENCE: Duration = Duration::from_secs(20);
/// When a session that stays asks again.
const AGAIN: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Unasked,
    Asked(Instant),
    Stays(Instant),
}

/// Whether a session has asked for a server of its own.
#[derive(Debug, Default)]
pub struct OwnServer(Mutex<State>);

impl OwnServer {
    /// Whether the session waits for its own server. Calls `ask` when it is time to ask; that returns whether it has asked.
    pub fn waits(&self, ask: impl FnOnce() -> bool) -> bool {
        let mut state = self.0.lock();
        match *state {
            State::Asked(since) if since.elapsed() < PATIENCE => return true,
            State::Asked(_) => *state = State::Stays(Instant::now()),
            State::Stays(since) if since.elapsed() < AGAIN => {}
            State::Unasked | State::Stays(_) => {
                if ask() {
                    *state = State::Asked(Instant::now());
                    return true;
                }
            }
        }
        false
    }

    /// It stays with the others.
    pub fn stays(&self) {
        *self.0.lock() = State::Stays(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_waits_until_it_is_told_to_stay() {
        let own = OwnServer::default();
        assert!(!own.waits(|| false));
        assert!(own.waits(|| true));
        assert!(own.waits(|| panic!("it has asked")));
        own.stays();
        assert!(!own.waits(|| panic!("it asks again later")));
    }
}
