//! The two modes in which a client may be served.

use mpsshim_proto::direct;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How a client is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The server executes its calls, in contexts that all clients share
    #[default]
    Proxy,
    /// It has contexts of its own; the server says when it may submit and how much memory it may hold
    Direct,
}

/// A hello asks for a mode that there is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client asks for mode {0}, and there are 1 (proxy) and 2 (direct)")]
pub struct NoMode(u32);

impl Mode {
    /// Both.
    pub const ALL: [Mode; 2] = [Mode::Proxy, Mode::Direct];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Proxy => "proxy",
            Mode::Direct => "direct",
        }
    }

    /// As hello and welcome have it.
    pub fn number(self) -> u32 {
        match self {
            Mode::Proxy => direct::PROXY,
            Mode::Direct => direct::DIRECT,
        }
    }

    /// What a hello asks for, or `default` when it asks for nothing.
    ///
    /// # Errors
    /// A number that is no mode.
    pub fn asked(number: u32, default: Mode) -> Result<Mode, NoMode> {
        let asked = Mode::ALL.into_iter().find(|mode| mode.number() == number);
        match number {
            0 => Ok(default),
            _ => asked.ok_or(NoMode(number)),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_asks_for_a_mode_or_for_none() {
        for default in Mode::ALL {
            assert_eq!(Mode::asked(0, default), Ok(default));
            for mode in Mode::ALL {
                assert_eq!(Mode::asked(mode.number(), default), Ok(mode));
            }
            assert_eq!(Mode::asked(3, default), Err(NoMode(3)));
        }
    }
}
