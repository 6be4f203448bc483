//! The two modes in which clients are served, and the mode of clients that do not request one.

pub mod by_device;

use mpsshim_proto::direct;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How a client is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The server executes its calls, in contexts that all clients share
    #[default]
    Proxy,
    /// It has contexts of its own; the server says when it may submit and how much memory it may hold
    Direct,
}

/// A hello requests an unknown mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client requests mode {0}; the modes are 1 (proxy) and 2 (direct)")]
pub struct NoMode(u32);

impl Mode {
    /// Both.
    pub const ALL: [Mode; 2] = [Mode::Proxy, Mode::Direct];

    fn from_name(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Proxy => "proxy",
            Mode::Direct => "direct",
        }
    }

    /// Its number in hello and welcome.
    pub fn number(self) -> u32 {
        match self {
            Mode::Proxy => direct::PROXY,
            Mode::Direct => direct::DIRECT,
        }
    }

    /// The mode that a hello requests; `None`: no particular mode.
    ///
    /// # Errors
    /// The number is not a mode.
    pub fn asked(number: u32) -> Result<Option<Mode>, NoMode> {
        let asked = Mode::ALL.into_iter().find(|mode| mode.number() == number);
        match number {
            0 => Ok(None),
            _ => asked.map(Some).ok_or(NoMode(number)),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The modes of clients that request none, by the devices that they see: such as `direct` or `proxy,1=direct`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Modes {
    /// The mode of devices that are not named.
    pub usual: Mode,
    /// The modes of devices by ordinal or UUID.
    pub devices: Vec<(String, Mode)>,
}

/// Errors in a list of modes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoModes {
    /// An entry that is neither a mode nor a device with a mode.
    #[error("\"{0}\" is neither a mode (proxy, direct) nor DEVICE=MODE")]
    Part(String),
    /// Two modes for the same devices.
    #[error("two modes for {0}; give it one")]
    Twice(String),
    /// The list is empty.
    #[error("it names no mode (proxy, direct)")]
    Empty,
}

impl FromStr for Modes {
    type Err = NoModes;

    fn from_str(text: &str) -> Result<Modes, NoModes> {
        let (mut usual, mut devices) = (None, Vec::<(String, Mode)>::new());
        let parts = text.split(',').map(str::trim);
        for part in parts.filter(|part| !part.is_empty()) {
            let unknown = || NoModes::Part(part.to_owned());
            let Some((device, mode)) = part.split_once('=') else {
                let mode = Mode::from_name(part).ok_or_else(unknown)?;
                if usual.replace(mode).is_some() {
                    return Err(NoModes::Twice("all devices".into()));
                }
                continue;
            };
            let mode = Mode::from_name(mode.trim()).ok_or_else(unknown)?;
            let device = device.trim();
            if device.is_empty() {
                return Err(unknown());
            }
            if devices
                .iter()
                .any(|(named, _)| named.eq_ignore_ascii_case(device))
            {
                return Err(NoModes::Twice(format!("device {device}")));
            }
            devices.push((device.to_owned(), mode));
        }
        if usual.is_none() && devices.is_empty() {
            return Err(NoModes::Empty);
        }
        let usual = usual.unwrap_or_default();
        Ok(Modes { usual, devices })
    }
}

impl fmt::Display for Modes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.usual)?;
        self.devices
            .iter()
            .try_for_each(|(device, mode)| write!(f, ",{device}={mode}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_asks_for_a_mode_or_for_none() {
        assert_eq!(Mode::asked(0), Ok(None));
        for mode in Mode::ALL {
            assert_eq!(Mode::asked(mode.number()), Ok(Some(mode)));
        }
        assert_eq!(Mode::asked(3), Err(NoMode(3)));
    }

    #[test]
    fn modes_are_for_all_devices_or_single_ones() {
        for (text, whole) in [
            ("proxy", "proxy"),
            ("direct", "direct"),
            ("1=direct", "proxy,1=direct"),
            (" direct , GPU-ab = proxy,", "direct,GPU-ab=proxy"),
            ("1=direct,proxy,0=proxy", "proxy,1=direct,0=proxy"),
        ] {
            let modes: Modes = text.parse().expect(text);
            assert_eq!(modes.to_string(), whole);
            assert_eq!(whole.parse(), Ok(modes));
        }
        for (text, why) in [
            ("both", "\"both\" is neither a mode (proxy, direct)"),
            ("0=both", "\"0=both\" is neither a mode"),
            ("=direct", "\"=direct\" is neither a mode"),
            ("direct=0", "\"direct=0\" is neither a mode"),
            ("0=direct,0=proxy", "two modes for device 0"),
            ("GPU-ab=direct,gpu-AB=direct", "two modes for device gpu-AB"),
            ("proxy,direct", "two modes for all devices"),
            (" , ", "names no mode"),
        ] {
            let error = text.parse::<Modes>().expect_err(text).to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
