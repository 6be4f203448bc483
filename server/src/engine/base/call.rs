//! Messages as the engine reads them: from the ring, from a copy, or from a session's description.

use crate::engine::base::call_error::CallError;
use mpsshim_proto::message::Op;
use mpsshim_proto::ring::{Memory, Message};
use mpsshim_proto::segment::RingMemory;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Location of a message's bytes.
#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    /// In the ring, from this offset on. The client may change them at any time.
    Ring(RingMemory, u64),
    /// In memory of the server.
    Copy(&'a [u8]),
}

/// A message: its operation, its token, and a bounded reader of the bytes behind its header.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a> {
    /// The requested operation.
    pub op: Op,
    /// The token of its header; its meaning depends on the operation.
    pub token: u64,
    len: u32,
    source: Source<'a>,
}

/// A message with its body decoded: a copy that the client cannot change any more.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a, B> {
    /// The struct that the message begins with.
    pub body: B,
    /// The whole message.
    pub message: Incoming<'a>,
}

impl<'a> Incoming<'a> {
    /// A message in the ring. Valid until the message is consumed; the session keeps the ring's memory for that long.
    #[inline]
    pub fn in_ring(op: Op, memory: RingMemory, message: &Message) -> Incoming<'a> {
        Incoming {
            op,
            token: message.token,
            len: message.len,
            source: Source::Ring(memory, message.offset),
        }
    }

    /// A message with these bytes behind its header.
    #[inline]
    pub fn copied(op: Op, token: u64, bytes: &'a [u8]) -> Incoming<'a> {
        Incoming {
            op,
            token,
            len: bytes.len() as u32,
            source: Source::Copy(bytes),
        }
    }

    /// Bytes behind the header.
    #[inline]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Copies bytes of the message, from `at` bytes behind its header on; false when they are not all inside it.
    #[inline]
    #[must_use]
    pub fn copy_out(&self, at: usize, bytes: &mut [u8]) -> bool {
        let inside = at
            .checked_add(bytes.len())
            .is_some_and(|end| end <= self.len as usize);
        if inside {
            match self.source {
                Source::Ring(memory, offset) => memory.read(offset + at as u64, bytes),
                Source::Copy(all) => bytes.copy_from_slice(&all[at..at + bytes.len()]),
            }
        }
        inside
    }

    /// Copies the struct at the beginning of the message.
    ///
    /// # Errors
    /// A violation when the message is shorter.
    #[inline]
    pub fn body<T: FromBytes + IntoBytes + Immutable>(&self) -> Result<T, CallError> {
        let mut body = T::new_zeroed();
        if !self.copy_out(0, body.as_mut_bytes()) {
            return Err(CallError::Violation(format!(
                "message {:?} has {} bytes, too short",
                self.op, self.len
            )));
        }
        Ok(body)
    }

    /// Decodes the body.
    ///
    /// # Errors
    /// A violation when the message is shorter.
    #[inline]
    pub fn decode<B: FromBytes + IntoBytes + Immutable>(self) -> Result<Call<'a, B>, CallError> {
        let body = self.body()?;
        Ok(Call {
            body,
            message: self,
        })
    }

    /// The 64-bit word `at` bytes behind the header; 0 if the message is shorter, which is a protocol violation when it
    /// is executed.
    pub fn word(&self, at: usize) -> u64 {
        let mut word = [0; 8];
        let _ = self.copy_out(at, &mut word);
        u64::from_le_bytes(word)
    }

    /// Copies the bytes that follow a `T` at the beginning.
    ///
    /// # Errors
    /// A violation when the message is shorter than a `T`.
    pub fn behind<T>(&self) -> Result<Vec<u8>, CallError> {
        let skip = size_of::<T>();
        let len = (self.len as usize)
            .checked_sub(skip)
            .ok_or_else(|| CallError::Violation("message too short".into()))?;
        let mut bytes = vec![0; len];
        let _ = self.copy_out(skip, &mut bytes);
        Ok(bytes)
    }

    /// Copies the NUL-ended name that follows a `T` at the beginning.
    ///
    /// # Errors
    /// A violation when the message is shorter than a `T`, or there is no NUL behind it.
    pub fn name<T>(&self) -> Result<Vec<u8>, CallError> {
        let mut name = self.behind::<T>()?;
        let end = name.iter().position(|byte| *byte == 0);
        let end = end.ok_or_else(|| CallError::Violation("a name without its end".into()))?;
        name.truncate(end + 1);
        Ok(name)
    }

    /// Copies all bytes behind the header.
    pub fn whole(&self) -> Vec<u8> {
        self.behind::<()>().unwrap_or_default()
    }

    /// Address of `len` bytes from `at` bytes behind the header on, for the driver to read in place.
    ///
    /// # Errors
    /// A violation when they are not all inside the message.
    #[inline]
    pub fn in_place(&self, at: usize, len: usize) -> Result<*mut u8, CallError> {
        if at
            .checked_add(len)
            .is_none_or(|end| end > self.len as usize)
        {
            return Err(CallError::Violation(format!(
                "{len} bytes at {at} do not fit a message of {}",
                self.len
            )));
        }
        Ok(match self.source {
            Source::Ring(memory, offset) => memory.address(offset + at as u64),
            Source::Copy(all) => all[at..].as_ptr().cast_mut(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_proto::message::Object;

    fn copied(bytes: &[u8]) -> Incoming<'_> {
        Incoming::copied(Op::StreamDestroy, 7, bytes)
    }

    #[test]
    fn a_message_is_read_within_its_bounds() {
        let bytes: Vec<u8> = (1..=24).collect();
        let message = copied(&bytes);
        assert_eq!((message.len(), message.token), (24, 7));
        let mut some = [0; 8];
        assert!(message.copy_out(16, &mut some));
        assert_eq!(some, [17, 18, 19, 20, 21, 22, 23, 24]);
        assert!(!message.copy_out(17, &mut some));
        assert!(!message.copy_out(usize::MAX, &mut some));
        assert!(message.in_place(16, 8).is_ok());
        assert!(message.in_place(17, 8).is_err());
        assert!(message.in_place(usize::MAX, 8).is_err());
        assert_eq!(message.whole(), bytes);
        assert_eq!(
            message.behind::<[u8; 20]>().expect("four"),
            [21, 22, 23, 24]
        );
        assert!(message.behind::<[u8; 25]>().is_err());
    }

    #[test]
    fn a_word_outside_the_message_is_0() {
        assert_eq!(copied(&[1, 0, 0, 0, 0, 0, 0, 0]).word(0), 1);
        assert_eq!(copied(&[1, 0, 0, 0, 0, 0, 0, 0]).word(8), 0);
    }

    #[test]
    fn a_body_needs_all_its_bytes() {
        let object = 9u64.to_le_bytes();
        let call: Call<'_, Object> = copied(&object).decode().expect("a body");
        assert_eq!(call.body.object, 9);
        let short = copied(&object[..7]).decode::<Object>();
        assert!(matches!(short, Err(CallError::Violation(_))));
    }

    #[test]
    fn a_name_ends_with_its_nul() {
        let message = [&[0; 8][..], b"fill\0\0\0\0"].concat();
        assert_eq!(
            copied(&message).name::<Object>().expect("a name"),
            b"fill\0"
        );
        let message = [&[0; 8][..], b"fillfill"].concat();
        assert!(copied(&message).name::<Object>().is_err());
        assert!(copied(&[0; 4]).name::<Object>().is_err());
    }
}
