//! Device ordinals.

use mpsshim_proto::handshake::MAX_DEVICES;
use std::fmt;

/// Ordinal of an existing device; always a valid index into `Devices`. A client's number becomes one only in
/// `Devices::get`, which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ordinal(u8);

const _: () = assert!(MAX_DEVICES <= u8::MAX as usize);

impl Ordinal {
    /// The ordinal of an existing device, for `Devices`, which counts them.
    pub fn of_device(number: u8) -> Ordinal {
        Ordinal(number)
    }

    /// Index into a table of [`MAX_DEVICES`] entries.
    #[inline]
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// An ordinal for tests, which need no device.
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
