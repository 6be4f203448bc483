//! Choices of an operator.

use crate::limits::DEFAULT_WEIGHT;
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

/// How the clients of several users are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Users {
    /// One user at a time, as under NVIDIA MPS; the clients of other users wait
    #[default]
    Serial,
    /// All users at the same time, each with a server of its own
    Apart,
    /// All users at the same time, with one server that runs as root
    Together,
}

impl fmt::Display for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Users::Serial => "serial",
            Users::Apart => "apart",
            Users::Together => "together",
        })
    }
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

/// Whether clients in proxy mode may have more device memory together than the device has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Oversubscription {
    /// An allocation for which the device has no room fails, as natively
    #[default]
    Off,
    /// Memory of clients that do not use it goes to host memory and comes back; busy clients take turns
    On,
}

impl fmt::Display for Oversubscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Oversubscription::Off => "off",
            Oversubscription::On => "on",
        })
    }
}

/// A choice for all users, and choices for some.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByUser<T> {
    /// For users without one of their own.
    #[serde(default)]
    pub default: T,
    /// By user id.
    #[serde(default = "BTreeMap::new")]
    pub users: BTreeMap<u32, T>,
}

/// The scheduling of all users' clients.
pub type SchedulingPolicy = ByUser<Scheduling>;

/// Which users' clients may have more device memory than the device has.
pub type OversubscriptionPolicy = ByUser<Oversubscription>;

/// The weight of a client among those of its server, or of a user among users with servers of their own: their shares are in
/// this relation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Weight(u32);

impl Weight {
    /// The greatest weight.
    pub const MOST: u32 = 10_000;
}

impl Default for Weight {
    fn default() -> Weight {
        Weight(DEFAULT_WEIGHT)
    }
}

impl TryFrom<u32> for Weight {
    type Error = String;

    fn try_from(weight: u32) -> Result<Weight, String> {
        match (1..=Weight::MOST).contains(&weight) {
            true => Ok(Weight(weight)),
            false => Err(format!("a weight is 1 to {}", Weight::MOST)),
        }
    }
}

impl From<Weight> for u32 {
    fn from(weight: Weight) -> u32 {
        weight.0
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The weights of all users.
pub type UserWeights = ByUser<Weight>;

/// Maximum number of users with a choice of their own: messages between daemon and server must fit in a packet.
pub const MOST_USERS: usize = 500;

impl<T: Copy> ByUser<T> {
    /// The choice in force for a user's clients.
    pub fn of(&self, uid: u32) -> T {
        self.users.get(&uid).copied().unwrap_or(self.default)
    }

    /// Sets a user's choice; `None`: the user has none of its own any more.
    ///
    /// # Errors
    /// [`MOST_USERS`] is reached; nothing is changed.
    pub fn set_user(&mut self, uid: u32, choice: Option<T>) -> Result<(), TooManyUsers> {
        let Some(choice) = choice else {
            self.users.remove(&uid);
            return Ok(());
        };
        if self.users.len() >= MOST_USERS && !self.users.contains_key(&uid) {
            return Err(TooManyUsers);
        }
        self.users.insert(uid, choice);
        Ok(())
    }

    /// The part of this user, with the default.
    pub fn of_user(&self, uid: u32) -> ByUser<T> {
        let own = self.users.get(&uid).map(|choice| (uid, *choice));
        ByUser {
            default: self.default,
            users: own.into_iter().collect(),
        }
    }
}

/// Too many users have a choice of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{MOST_USERS} users have one of their own already")]
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
        for uid in 0..MOST_USERS as u32 {
            assert_eq!(policy.set_user(uid, Some(Scheduling::Fifo)), Ok(()));
        }
        let one_more = policy.set_user(1000, Some(Scheduling::Fifo));
        assert_eq!(one_more, Err(TooManyUsers));
        assert_eq!(policy.set_user(7, Some(Scheduling::Auto)), Ok(()));
        assert_eq!(policy.set_user(8, None), Ok(()));
        assert_eq!(policy.set_user(1000, Some(Scheduling::Fifo)), Ok(()));
    }
}
