//! The consumer of a command ring whose producer may write anything, anywhere, at any time.
//!
//! The input is a list of steps: publish some head, write bytes into the ring, or take a message. Whatever they
//! are, the consumer must end in a violation or in a message that lies inside the ring, and never go beyond what was
//! published.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mpsshim_proto::message::Op;
use mpsshim_proto::ring::{Consumer, HEADER, Memory};
use std::cell::{Cell, RefCell};

const CAPACITY: u64 = 4096;

struct Ring {
    head: Cell<u64>,
    tail: Cell<u64>,
    bytes: RefCell<Vec<u8>>,
}

impl Memory for &Ring {
    fn capacity(&self) -> u64 {
        CAPACITY
    }
    fn head(&self) -> u64 {
        self.head.get()
    }
    fn publish_head(&self, head: u64) {
        self.head.set(head);
    }
    fn tail(&self) -> u64 {
        self.tail.get()
    }
    fn publish_tail(&self, tail: u64) {
        self.tail.set(tail);
    }
    fn write(&self, offset: u64, bytes: &[u8]) {
        let at = offset as usize;
        self.bytes.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }
    fn read(&self, offset: u64, bytes: &mut [u8]) {
        let at = offset as usize;
        bytes.copy_from_slice(&self.bytes.borrow()[at..at + bytes.len()]);
    }
}

/// Takes `N` bytes off the input, zeroes where it is too short.
fn take<const N: usize>(input: &mut &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    let len = N.min(input.len());
    bytes[..len].copy_from_slice(&input[..len]);
    *input = &input[len..];
    bytes
}

fuzz_target!(|input: &[u8]| {
    let ring = Ring {
        head: Cell::new(0),
        tail: Cell::new(0),
        bytes: RefCell::new(vec![0; CAPACITY as usize]),
    };
    let mut consumer = Consumer::new(&ring);
    let mut input = input;
    while !input.is_empty() {
        match take::<1>(&mut input)[0] % 5 {
            // Any head, and one a little ahead.
            0 => ring.head.set(u64::from_le_bytes(take(&mut input))),
            1 => {
                let ahead = u64::from(take::<1>(&mut input)[0]) * 16;
                ring.head.set(ring.head.get().wrapping_add(ahead));
            }
            2 => {
                let at = u64::from(u16::from_le_bytes(take(&mut input))) % (CAPACITY - 32);
                (&ring).write(at, &take::<32>(&mut input));
            }
            // What is behind the tail, up to there at once.
            3 => {
                let mut place = consumer.place();
                let most = take::<1>(&mut input)[0] % 8;
                for _ in 0..most {
                    match consumer.peek_at(&mut place) {
                        Ok(None) => break,
                        Ok(Some(message)) => {
                            assert!(message.offset >= u64::from(HEADER));
                            assert!(message.offset + u64::from(message.len) <= CAPACITY);
                            place = place.behind(&message);
                        }
                        Err(_) => return,
                    }
                }
                consumer.consume_to(place);
            }
            _ => match consumer.peek() {
                Ok(None) => {}
                Ok(Some(message)) => {
                    assert!(message.offset >= u64::from(HEADER));
                    assert!(message.offset + u64::from(message.len) <= CAPACITY);
                    let mut body = vec![0; message.len as usize];
                    assert!(consumer.copy_out(&message, 0, &mut body));
                    assert!(!consumer.copy_out(&message, 1, &mut body));
                    let _ = Op::from_u16(message.op);
                    let before = ring.tail.get();
                    consumer.consume(&message);
                    let taken = ring.tail.get().wrapping_sub(before);
                    assert_eq!(taken, u64::from(message.len + HEADER));
                }
                Err(_) => return,
            },
        }
    }
});
