//! How much pinned host memory the clients of a user may have: `75%` of the machine's memory, or an amount, also by
//! user as in `75%,1000=64G`.

use crate::amount;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// One bound of pinned host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Percent of the machine's memory: 1 to 100.
    Percent(u8),
    /// Bytes.
    Bytes(u64),
}

impl Share {
    /// Bytes on a machine with this much memory. An amount may exceed it.
    pub fn of(self, memory: u64) -> u64 {
        match self {
            Share::Percent(percent) => (u128::from(memory) * u128::from(percent) / 100) as u64,
            Share::Bytes(bytes) => bytes,
        }
    }

    fn parse(text: &str) -> Option<Share> {
        match text.strip_suffix('%') {
            Some(percent) => {
                let percent = percent.trim_end().parse().ok();
                percent
                    .filter(|percent| (1..=100).contains(percent))
                    .map(Share::Percent)
            }
            None => amount::parse(text).ok().map(Share::Bytes),
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Share::Percent(percent) => write!(f, "{percent}%"),
            Share::Bytes(bytes) => f.write_str(&amount::print(*bytes)),
        }
    }
}

/// The bounds of all users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Bound of each user that is not named.
    pub usual: Share,
    /// Bounds of users, by number.
    pub users: BTreeMap<u32, Share>,
}

impl HostMemory {
    /// The bound without a setting: a program that pins most of the machine's memory works as natively, and the rest is
    /// left to the system.
    pub const USUAL: Share = Share::Percent(75);

    /// The bound of a user.
    pub fn of(&self, uid: u32) -> Share {
        self.users.get(&uid).copied().unwrap_or(self.usual)
    }
}

impl Default for HostMemory {
    fn default() -> HostMemory {
        HostMemory {
            usual: HostMemory::USUAL,
            users: BTreeMap::new(),
        }
    }
}

/// Errors in a list of bounds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoHostMemory {
    /// An entry that is neither a bound nor a user with a bound.
    #[error(
        "\"{0}\" is neither an amount (such as 64G, or 50% of the machine's memory) nor UID=AMOUNT"
    )]
    Part(String),
    /// Two bounds for the same users.
    #[error("two amounts for {0}; give it one")]
    Twice(String),
    /// The list is empty.
    #[error("it names no amount")]
    Empty,
}

impl FromStr for HostMemory {
    type Err = NoHostMemory;

    fn from_str(text: &str) -> Result<HostMemory, NoHostMemory> {
        let (mut usual, mut users) = (None, BTreeMap::new());
        let parts = text.split(',').map(str::trim);
        for part in parts.filter(|part| !part.is_empty()) {
            let unknown = || NoHostMemory::Part(part.to_owned());
            let Some((uid, share)) = part.split_once('=') else {
                let share = Share::parse(part).ok_or_else(unknown)?;
                if usual.replace(share).is_some() {
                    return Err(NoHostMemory::Twice("all users".into()));
                }
                continue;
            };
            let uid: u32 = uid.trim().parse().map_err(|_| unknown())?;
            let share = Share::parse(share.trim()).ok_or_else(unknown)?;
            if users.insert(uid, share).is_some() {
                return Err(NoHostMemory::Twice(format!("user {uid}")));
            }
        }
        if usual.is_none() && users.is_empty() {
            return Err(NoHostMemory::Empty);
        }
        let usual = usual.unwrap_or(HostMemory::USUAL);
        Ok(HostMemory { usual, users })
    }
}

impl fmt::Display for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.usual)?;
        self.users
            .iter()
            .try_for_each(|(uid, share)| write!(f, ",{uid}={share}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_read_and_printed() {
        for (text, printed) in [
            ("75%", "75%"),
            (" 64g ", "64G"),
            ("100 %,", "100%"),
            ("1000=1%", "75%,1000=1%"),
            ("50%, 7=3G, 0=512M", "50%,0=512M,7=3G"),
        ] {
            let read: HostMemory = text.parse().expect(text);
            assert_eq!(read.to_string(), printed);
            assert_eq!(printed.parse(), Ok(read));
        }
        assert_eq!(HostMemory::default().to_string(), "75%");
    }

    #[test]
    fn a_user_has_its_own_bound_or_the_usual_one() {
        let read: HostMemory = "50%,7=3G".parse().expect("bounds");
        assert_eq!(read.of(7).of(100), 3 << 30);
        assert_eq!(read.of(8).of(1001), 500);
        let all: HostMemory = "100%".parse().expect("a bound");
        assert_eq!(all.of(8).of(u64::MAX), u64::MAX);
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "0%", "101%", "-1%", "%", "much", "0", "x=1G", "7=", "=1G", "-1=1G",
        ] {
            let refused = Err(NoHostMemory::Part(text.into()));
            assert_eq!(text.parse::<HostMemory>(), refused);
        }
        let twice = |whom: &str| Err(NoHostMemory::Twice(whom.into()));
        assert_eq!("1G,2G".parse::<HostMemory>(), twice("all users"));
        assert_eq!("7=1G,7=2G".parse::<HostMemory>(), twice("user 7"));
        assert_eq!(" , ".parse::<HostMemory>(), Err(NoHostMemory::Empty));
    }
}
