//! The command ring: one producer (the client), one consumer (the server), bytes in shared memory.
//!
//! A message never wraps: where one would cross the end, the producer fills the rest with a [`WRAP`] message.
//! Each side keeps its authoritative cursor private; the shared words only tell the peer how far it may go.
//! The consumer trusts nothing: a head that runs away, a length that does not fit, is a [`Violation`].
//!
//! The code is generic over [`Memory`] so that the very same producer and consumer run over a shared mapping
//! and under a model checker (`tests/loom.rs`).

use thiserror::Error;

/// Messages begin at multiples of this many bytes.
pub const ALIGN: u32 = 16;
/// Bytes of a message's header: `len: u32, op: u16, flags: u16, token: u64`.
pub const HEADER: u32 = 16;
/// Opcode of the filler before the end of the ring.
pub const WRAP: u16 = 1;
/// The longest message, header included, bytes.
pub const MAX_MESSAGE: u32 = 128 << 10;

/// Where a ring lives: two published cursors and `capacity` bytes.
pub trait Memory {
    /// Bytes, a power of two, at least twice [`MAX_MESSAGE`] in a real ring.
    fn capacity(&self) -> u64;
    /// Bytes ever produced, as last published. Pairs with [`Memory::publish_head`].
    fn head(&self) -> u64;
    /// Makes all bytes written so far visible to a consumer that reads this head. Release, and ordered before a
    /// later read of the peer's sleeping mark (sequentially consistent).
    fn publish_head(&self, head: u64);
    /// Bytes ever consumed, as last published. Pairs with [`Memory::publish_tail`].
    fn tail(&self) -> u64;
    /// Gives the bytes before `tail` back to the producer. Release.
    fn publish_tail(&self, tail: u64);
    /// Copies `bytes` into the ring at `offset` (< capacity; never crosses the end).
    fn write(&self, offset: u64, bytes: &[u8]);
    /// Copies from the ring at `offset` into `bytes`.
    fn read(&self, offset: u64, bytes: &mut [u8]);
}

/// How a peer broke the ring's rules. Ends its session.
#[derive(Debug, Error, PartialEq, Eq, Clone, Copy)]
pub enum Violation {
    /// More bytes published than the ring holds, or the head went backwards.
    #[error("head {head} is impossible: consumed {tail}, capacity {capacity}")]
    Head { head: u64, tail: u64, capacity: u64 },
    /// A message length that is too short, unaligned, too long, unpublished or crosses the ring's end.
    #[error("message length {len} is impossible at {tail} with {available} bytes published")]
    Length { len: u32, tail: u64, available: u64 },
}

/// Bytes that a message with `payload` bytes behind the header takes in the ring.
pub const fn message_len(payload: usize) -> usize {
    (HEADER as usize + payload + (ALIGN as usize - 1)) & !(ALIGN as usize - 1)
}

/// A place in the ring where a message begins, or will.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place(u64);

impl Place {
    /// Bytes of the ring before it, since the session began.
    pub fn position(self) -> u64 {
        self.0
    }
    /// Behind the message that is here.
    #[inline]
    #[must_use]
    pub fn behind(self, message: &Message) -> Place {
        self.after(message.len)
    }
    /// Behind a message with so many bytes behind its header.
    #[inline]
    #[must_use]
    pub fn after(self, len: u32) -> Place {
        Place(self.0.wrapping_add((len + HEADER) as u64))
    }
}

/// The client's end.
#[derive(Debug)]
pub struct Producer<M> {
    memory: M,
    head: u64,
    known_tail: u64,
}

/// Room in the ring that the producer may fill before it publishes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reservation {
    offset: u64,
    len: u32,
}

impl<M: Memory> Producer<M> {
    /// A producer on a fresh ring.
    pub fn new(memory: M) -> Self {
        Producer {
            memory,
            head: 0,
            known_tail: 0,
        }
    }
    /// The ring's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }
    /// Bytes produced so far.
    pub fn position(&self) -> u64 {
        self.head
    }
    /// True when the server has taken every message.
    pub fn is_drained(&mut self) -> bool {
        self.known_tail = self.memory.tail();
        self.known_tail == self.head
    }

    fn has_room(&mut self, len: u64) -> bool {
        let capacity = self.memory.capacity();
        if self.head.wrapping_sub(self.known_tail) + len <= capacity {
            return true;
        }
        let tail = self.memory.tail();
        // The server is trusted, yet a nonsensical tail must not make us overwrite unread messages.
        if self.head.wrapping_sub(tail) <= capacity {
            self.known_tail = tail;
        }
        self.head.wrapping_sub(self.known_tail) + len <= capacity
    }

    /// Room for a message with `payload` bytes behind the header; `None` while the ring is full.
    ///
    /// # Panics
    /// When the message is longer than [`MAX_MESSAGE`]: the caller must split.
    #[inline]
    pub fn reserve(&mut self, payload: usize) -> Option<Reservation> {
        let len = message_len(payload) as u64;
        assert!(len <= MAX_MESSAGE as u64, "message of {len} bytes");
        let capacity = self.memory.capacity();
        let offset = self.head & (capacity - 1);
        let rest = capacity - offset;
        if rest < len {
            if !self.has_room(rest) {
                return None;
            }
            self.write_header(offset, rest as u32, WRAP, 0, 0);
            self.head = self.head.wrapping_add(rest);
            self.memory.publish_head(self.head);
        }
        if !self.has_room(len) {
            return None;
        }
        Some(Reservation {
            offset: self.head & (capacity - 1),
            len: len as u32,
        })
    }

    #[inline]
    fn write_header(&self, offset: u64, len: u32, op: u16, flags: u16, token: u64) {
        let mut header = [0u8; HEADER as usize];
        header[0..4].copy_from_slice(&len.to_le_bytes());
        header[4..6].copy_from_slice(&op.to_le_bytes());
        header[6..8].copy_from_slice(&flags.to_le_bytes());
        header[8..16].copy_from_slice(&token.to_le_bytes());
        self.memory.write(offset, &header);
    }

    /// Fills part of a reservation, `at` bytes behind the header.
    #[inline]
    pub fn fill(&self, room: Reservation, at: usize, bytes: &[u8]) {
        assert!(HEADER as usize + at + bytes.len() <= room.len as usize);
        self.memory
            .write(room.offset + HEADER as u64 + at as u64, bytes);
    }

    /// Publishes a filled reservation.
    #[inline]
    pub fn publish(&mut self, room: Reservation, op: u16, flags: u16, token: u64) {
        self.write_header(room.offset, room.len, op, flags, token);
        self.head = self.head.wrapping_add(room.len as u64);
        self.memory.publish_head(self.head);
    }
}

/// One message as the consumer found it: a validated copy of its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Opcode.
    pub op: u16,
    /// Flags, by opcode.
    pub flags: u16,
    /// The token of the header; its meaning depends on the opcode.
    pub token: u64,
    /// Where the bytes behind the header begin in the ring.
    pub offset: u64,
    /// How many bytes are behind the header (padding included).
    pub len: u32,
}

/// The server's end.
#[derive(Debug)]
pub struct Consumer<M> {
    memory: M,
    tail: u64,
    head: u64,
}

impl<M: Memory> Consumer<M> {
    /// A consumer on a fresh ring.
    pub fn new(memory: M) -> Self {
        Consumer {
            memory,
            tail: 0,
            head: 0,
        }
    }
    /// A consumer that continues where that of an ended process has stopped.
    ///
    /// # Errors
    /// A [`Violation`] when no message can begin there.
    pub fn resume(memory: M) -> Result<Self, Violation> {
        let (tail, head) = (memory.tail(), memory.head());
        let capacity = memory.capacity();
        if !tail.is_multiple_of(ALIGN as u64) || head.wrapping_sub(tail) > capacity {
            return Err(Violation::Head {
                head,
                tail,
                capacity,
            });
        }
        Ok(Consumer {
            memory,
            tail,
            head: tail,
        })
    }
    /// The ring's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// True when a message is there. Reads shared memory.
    #[inline]
    pub fn has_message(&self) -> bool {
        self.head != self.tail || self.memory.head() != self.tail
    }

    /// The message at the tail, fillers skipped; it stays there until [`Consumer::consume`].
    ///
    /// # Errors
    /// A [`Violation`] when the producer broke the rules.
    #[inline]
    pub fn peek(&mut self) -> Result<Option<Message>, Violation> {
        let mut place = self.place();
        let message = self.peek_at(&mut place);
        if place.0 != self.tail {
            self.consume_to(place);
        }
        message
    }

    /// The operation of the message last found at the tail, as the producer wrote it; `None` if there was none.
    pub fn next_op(&self) -> Option<u16> {
        if self.head == self.tail {
            return None;
        }
        let mut header = [0u8; HEADER as usize];
        let offset = self.tail & (self.memory.capacity() - 1);
        self.memory.read(offset, &mut header);
        Some(u16::from_le_bytes([header[4], header[5]]))
    }

    /// Where [`Consumer::peek`] looks.
    #[inline]
    pub fn place(&self) -> Place {
        Place(self.tail)
    }

    /// The message at a place at or behind the tail. Fillers before it are skipped: the place is then behind them.
    ///
    /// # Errors
    /// A [`Violation`] when the producer broke the rules.
    #[inline]
    pub fn peek_at(&mut self, place: &mut Place) -> Result<Option<Message>, Violation> {
        loop {
            let at = place.0;
            if self.head == at {
                let head = self.memory.head();
                let capacity = self.memory.capacity();
                if head == at {
                    return Ok(None);
                }
                let room = capacity.wrapping_sub(at.wrapping_sub(self.tail));
                if head.wrapping_sub(at) > room || !head.is_multiple_of(ALIGN as u64) {
                    return Err(Violation::Head {
                        head,
                        tail: self.tail,
                        capacity,
                    });
                }
                self.head = head;
            }
            let capacity = self.memory.capacity();
            let offset = at & (capacity - 1);
            let mut header = [0u8; HEADER as usize];
            self.memory.read(offset, &mut header);
            let len = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
            let op = u16::from_le_bytes([header[4], header[5]]);
            let flags = u16::from_le_bytes([header[6], header[7]]);
            let mut token = [0u8; 8];
            token.copy_from_slice(&header[8..16]);
            let available = self.head.wrapping_sub(at);
            let to_end = capacity - offset;
            let sound = len >= HEADER
                && len.is_multiple_of(ALIGN)
                && len as u64 <= available
                && len as u64 <= to_end
                && (op == WRAP || len <= MAX_MESSAGE);
            if !sound || (op == WRAP && len as u64 != to_end) {
                return Err(Violation::Length {
                    len,
                    tail: at,
                    available,
                });
            }
            if op == WRAP {
                place.0 = at.wrapping_add(len as u64);
                continue;
            }
            return Ok(Some(Message {
                op,
                flags,
                token: u64::from_le_bytes(token),
                offset: offset + HEADER as u64,
                len: len - HEADER,
            }));
        }
    }

    /// Consumes the message returned by [`Consumer::peek`]; its bytes may be overwritten from now on.
    #[inline]
    pub fn consume(&mut self, message: &Message) {
        self.tail = self.tail.wrapping_add((message.len + HEADER) as u64);
        self.memory.publish_tail(self.tail);
    }

    /// Consumes everything before a place.
    #[inline]
    pub fn consume_to(&mut self, place: Place) {
        self.tail = place.0;
        self.memory.publish_tail(self.tail);
    }

    /// Copies bytes of a message out, `at` bytes behind its header; false when they are not all inside it.
    #[inline]
    pub fn copy_out(&self, message: &Message, at: usize, bytes: &mut [u8]) -> bool {
        if at + bytes.len() > message.len as usize {
            return false;
        }
        self.memory.read(message.offset + at as u64, bytes);
        true
    }
}

#[cfg(test)]
mod tests;
