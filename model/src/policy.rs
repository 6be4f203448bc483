//! Choices of an operator.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// How completion markers are signalled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum MarkKind {
    /// By a kernel if several clients wait often and briefly and the device has room; otherwise as `written`.
    #[default]
    Auto,
    /// By an operation of the stream that writes the client's flag.
    Written,
    /// By a kernel wherever it can be put into one graph with the launches before it; otherwise as `written`.
    Kernel,
}

/// When clients in direct mode take turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum TurnPolicy {
    /// Where throughput is higher with turns than with the driver's time slices, and where clients' shares differ
    #[default]
    Auto,
    /// Always
    Always,
    /// Never: only the clients' memory is counted
    Never,
}

/// In which order the kernels of clients in proxy mode are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Scheduling {
    /// By levels: short work does not wait behind long work, and clients that have had more than their share come last
    #[default]
    Auto,
    /// In the order of submission, as under NVIDIA MPS
    Fifo,
}

impl fmt::Display for Scheduling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scheduling::Auto => "auto",
            Scheduling::Fifo => "fifo",
        })
    }
}

/// The scheduling of all users' clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulingPolicy {
    /// For users without one of their own.
    #[serde(default)]
    pub default: Scheduling,
    /// By user id.
    #[serde(default)]
    pub users: BTreeMap<u32, Scheduling>,
}

impl SchedulingPolicy {
    /// Maximum number of users with a scheduling of their own: messages between daemon and server must fit in a packet.
    pub const MOST_USERS: usize = 500;

    /// The scheduling in force for a user's clients.
    pub fn of(&self, uid: u32) -> Scheduling {
        self.users.get(&uid).copied().unwrap_or(self.default)
    }

    /// Sets a user's scheduling; `None`: the user has none of its own any more.
    ///
    /// # Errors
    /// [`SchedulingPolicy::MOST_USERS`] is reached; nothing is changed.
    pub fn set_user(
        &mut self,
        uid: u32,
        scheduling: Option<Scheduling>,
    ) -> Result<(), TooManyUsers> {
        let Some(scheduling) = scheduling else {
            self.users.remove(&uid);
            return Ok(());
        };
        if self.users.len() >= SchedulingPolicy::MOST_USERS && !self.users.contains_key(&uid) {
            return Err(TooManyUsers);
        }
        self.users.insert(uid, scheduling);
        Ok(())
    }
}

/// Too many users have a scheduling of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} users have a scheduling of their own already",
    SchedulingPolicy::MOST_USERS
)]
pub struct TooManyUsers;

/// Maximum number of kernels in a launch batch: longer batches gain little, and the GPU waits for the first kernel of
/// each.
pub const LAUNCH_RUN: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_its_own_scheduling_or_the_default() {
        let mut policy = SchedulingPolicy::default();
        assert_eq!(policy.of(7), Scheduling::Auto);
        policy.default = Scheduling::Fifo;
        assert_eq!(policy.set_user(7, Some(Scheduling::Auto)), Ok(()));
        assert_eq!(
            (policy.of(7), policy.of(8)),
            (Scheduling::Auto, Scheduling::Fifo)
        );
        for _ in 0..2 {
            assert_eq!(policy.set_user(7, None), Ok(()));
            assert_eq!(policy.of(7), Scheduling::Fifo);
        }
    }

    #[test]
    fn there_are_only_so_many_users() {
        let mut policy = SchedulingPolicy::default();
        for uid in 0..SchedulingPolicy::MOST_USERS as u32 {
            assert_eq!(policy.set_user(uid, Some(Scheduling::Fifo)), Ok(()));
        }
        let one_more = policy.set_user(1000, Some(Scheduling::Fifo));
        assert_eq!(one_more, Err(TooManyUsers));
        assert_eq!(policy.set_user(7, Some(Scheduling::Auto)), Ok(()));
        assert_eq!(policy.set_user(8, None), Ok(()));
        assert_eq!(policy.set_user(1000, Some(Scheduling::Fifo)), Ok(()));
    }
}
