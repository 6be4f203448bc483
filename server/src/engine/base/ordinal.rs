//! Numbers of devices.

use mpsshim_proto::handshake::MAX_DEVICES;
use std::fmt;

/// Ordinal of an existing device; always a valid index into `Devices`. A client's number becomes one only in
/// `Devices::get`, which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ordinal(u8);

const _: () = assert!(MAX_DEVICES <= u8::MAX as usize);

impl Ordinal {
    /// The ordinal of a device that exists: for `Devices`, which counts them.
    pub fn of_device(number: u8) -> Ordinal {
        Ordinal(number)
    }

    /// The position in a table of [`MAX_DEVICES`].
    #[inline]
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// One that needs no device behind it.
    #[cfg(test)]
    pub fn of_test(ordinal: u8) -> Ordinal {
        Ordinal(ordinal)
    }
}

impl From<Ordinal> for u32 {
    fn from(ordinal: Ordinal) -> u32 {
        ordinal.0.into()
    }
}

impl fmt::Display for Ordinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
