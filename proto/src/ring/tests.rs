use super::*;
use proptest::prelude::*;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

#[derive(Debug, Default)]
struct Shared {
    head: Cell<u64>,
    tail: Cell<u64>,
    bytes: RefCell<Vec<u8>>,
}

impl Memory for Rc<Shared> {
    fn capacity(&self) -> u64 {
        self.bytes.borrow().len() as u64
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
        let o = offset as usize;
        self.bytes.borrow_mut()[o..o + bytes.len()].copy_from_slice(bytes);
    }
    fn read(&self, offset: u64, bytes: &mut [u8]) {
        let o = offset as usize;
        bytes.copy_from_slice(&self.bytes.borrow()[o..o + bytes.len()]);
    }
}

fn shared(capacity: usize) -> Rc<Shared> {
    Rc::new(Shared {
        bytes: RefCell::new(vec![0; capacity]),
        ..Shared::default()
    })
}

proptest! {
    /// For all sizes and turns of the two sides, messages arrive whole, once and in order. A turn longer than the ring
    /// has room for finds it full, one longer than it has messages finds it empty.
    #[test]
    fn delivers_in_order(sizes in prop::collection::vec(0usize..700, 1..200), turns in prop::collection::vec((1usize..12, 1usize..12), 1..64)) {
        let memory = shared(4096);
        let mut producer = Producer::new(memory.clone());
        let mut consumer = Consumer::new(memory);
        let body = |number: usize| (0..sizes[number]).map(|i| (i + number) as u8).collect::<Vec<_>>();
        let op = |number: usize| 2 + (number % 7) as u16;
        let (mut sent, mut received) = (0, 0);
        for &(pushes, pulls) in turns.iter().cycle() {
            for _ in 0..pushes {
                if sent == sizes.len() {
                    break;
                }
                let Some(room) = producer.reserve(sizes[sent]) else { break };
                producer.fill(room, 0, &body(sent));
                producer.publish(room, op(sent), sent as u16, sent as u64);
                sent += 1;
            }
            for _ in 0..pulls {
                let Some(message) = consumer.peek().unwrap() else { break };
                prop_assert_eq!((message.token, message.op, message.flags), (received as u64, op(received), received as u16));
                let mut copy = vec![0; sizes[received]];
                prop_assert!(consumer.copy_out(&message, 0, &mut copy));
                prop_assert_eq!(copy, body(received));
                consumer.consume(&message);
                received += 1;
            }
            if received == sizes.len() {
                break;
            }
        }
        prop_assert!(producer.is_drained());
    }

    /// A hostile producer may write anything anywhere: the consumer ends in an error or in a message inside the
    /// ring, never outside it and never in a panic.
    #[test]
    fn survives_a_hostile_producer(head in any::<u64>(), bytes in prop::collection::vec(any::<u8>(), 4096), rounds in 1usize..50) {
        let memory = shared(4096);
        memory.bytes.borrow_mut().copy_from_slice(&bytes);
        memory.head.set(head);
        let mut consumer = Consumer::new(memory);
        let mut place = consumer.place();
        for round in 0..rounds {
            // Ahead of the tail for a while, then up to there at once.
            match consumer.peek_at(&mut place) {
                Ok(Some(message)) => {
                    prop_assert!(message.offset + message.len as u64 <= 4096);
                    let mut body = vec![0; message.len as usize];
                    prop_assert!(consumer.copy_out(&message, 0, &mut body));
                    prop_assert!(!consumer.copy_out(&message, 1, &mut body));
                    place = place.behind(&message);
                    if round % 3 == 0 {
                        consumer.consume_to(place);
                    }
                }
                Ok(None) | Err(_) => break,
            }
        }
    }
}

#[test]
fn what_is_behind_the_tail_is_seen_and_stays() {
    let memory = shared(1024);
    let mut producer = Producer::new(memory.clone());
    let mut consumer = Consumer::new(memory.clone());
    // Twice around, so that a filler is among them.
    for round in 0..20u64 {
        for token in [2 * round, 2 * round + 1] {
            let room = producer.reserve(80).expect("room");
            producer.publish(room, 2, 0, token);
        }
        let mut place = consumer.place();
        let mut tokens = Vec::new();
        while let Some(message) = consumer.peek_at(&mut place).expect("a sound ring") {
            tokens.push(message.token);
            place = place.behind(&message);
        }
        assert_eq!(tokens, [2 * round, 2 * round + 1]);
        assert!(!producer.is_drained(), "nothing was consumed");
        let first = consumer.peek().expect("a sound ring");
        assert_eq!(first.map(|message| message.token), Some(2 * round));
        consumer.consume_to(place);
        assert!(producer.is_drained());
    }
    // A head that moves back below one already seen.
    let room = producer.reserve(80).expect("room");
    producer.publish(room, 2, 0, 0);
    let mut place = consumer.place();
    let message = consumer.peek_at(&mut place).expect("a sound ring");
    place = place.behind(&message.expect("a message"));
    memory.head.set(memory.head.get() - 16);
    assert!(matches!(
        consumer.peek_at(&mut place),
        Err(Violation::Head { .. })
    ));
}

#[test]
fn a_full_ring_gives_no_room_and_then_room_again() {
    let memory = shared(1024);
    let mut producer = Producer::new(memory.clone());
    let mut consumer = Consumer::new(memory);
    let mut count = 0;
    while let Some(room) = producer.reserve(48) {
        producer.publish(room, 2, 0, count);
        count += 1;
    }
    assert_eq!(count, 16);
    let message = consumer.peek().unwrap().unwrap();
    consumer.consume(&message);
    assert!(producer.reserve(48).is_some());
}

/// A consumer that looks ahead of the tail has less than the whole ring before it, because unconsumed messages occupy a
/// part.
#[test]
fn a_head_over_what_is_not_consumed_is_a_violation() {
    for seen in [1, 7, 16] {
        let memory = shared(1024);
        let mut producer = Producer::new(memory.clone());
        let mut consumer = Consumer::new(memory.clone());
        let send = |producer: &mut Producer<Rc<Shared>>, count| {
            for token in 0..count {
                let room = producer.reserve(48).expect("room");
                producer.publish(room, 2, 0, token);
            }
        };
        send(&mut producer, seen);
        let mut place = consumer.place();
        for _ in 0..seen {
            let message = consumer.peek_at(&mut place).expect("a sound ring");
            place = place.behind(&message.expect("a message"));
        }
        // Over the first message, which is still at the tail.
        let full = memory.capacity();
        memory.head.set(full + 64);
        let violation = Violation::Head {
            head: full + 64,
            tail: 0,
            capacity: full,
        };
        assert_eq!(consumer.peek_at(&mut place), Err(violation), "{seen}");
        // Full is not too full.
        memory.head.set(64 * seen);
        send(&mut producer, 16 - seen);
        assert_eq!(memory.head.get(), full);
        for _ in seen..16 {
            let message = consumer.peek_at(&mut place).expect("a sound ring");
            place = place.behind(&message.expect("a message"));
        }
        assert_eq!(consumer.peek_at(&mut place), Ok(None));
        // And once there is room again, as much may come.
        consumer.consume_to(place);
        assert!(producer.is_drained());
    }
}

#[test]
fn a_runaway_head_is_a_violation() {
    let memory = shared(1024);
    memory.head.set(4096);
    assert!(matches!(
        Consumer::new(memory).peek(),
        Err(Violation::Head { .. })
    ));
}

fn write_header(memory: &Rc<Shared>, offset: u64, len: u32, op: u16) {
    let mut header = [0; HEADER as usize];
    header[..4].copy_from_slice(&len.to_le_bytes());
    header[4..6].copy_from_slice(&op.to_le_bytes());
    memory.write(offset, &header);
}

/// The result of `peek` for a consumer that has consumed everything before `tail`.
fn found(memory: &Rc<Shared>, tail: u64, head: u64) -> Result<Option<Message>, Violation> {
    memory.head.set(head);
    let mut consumer = Consumer::new(memory.clone());
    (consumer.tail, consumer.head) = (tail, tail);
    consumer.peek()
}

const CAPACITY: u64 = 512 << 10;

#[test]
fn a_length_that_a_message_cannot_have_is_a_violation() {
    let memory = shared(CAPACITY as usize);
    let end = CAPACITY - 32;
    let longest = MAX_MESSAGE;
    for (tail, len, op, available) in [
        // Less than a header.
        (0, 0, 2, 64),
        (0, 0, WRAP, 64),
        // Not a multiple of 16 bytes.
        (0, 24, 2, 64),
        (0, 65, 2, 128),
        // Not published as a whole.
        (0, 80, 2, 64),
        (0, !15, 2, 64),
        // Across the ring's end.
        (end, 64, 2, 128),
        (end, 64, WRAP, 128),
        // Too long.
        (0, longest + 16, 2, 200 << 10),
        // A filler that ends before the ring does.
        (0, 64, WRAP, 128),
        (end, 16, WRAP, 128),
    ] {
        write_header(&memory, tail, len, op);
        // On the second time around, too.
        for tail in [tail, CAPACITY + tail] {
            let violation = Violation::Length {
                len,
                tail,
                available,
            };
            assert_eq!(
                found(&memory, tail, tail + available),
                Err(violation),
                "{len} bytes at {tail}"
            );
        }
    }
}

#[test]
fn the_shortest_and_the_longest_message_are_found() {
    let memory = shared(CAPACITY as usize);
    let end = CAPACITY - 32;
    for (tail, len) in [(0, HEADER), (0, 64), (0, MAX_MESSAGE), (end, 32), (end, 16)] {
        write_header(&memory, tail, len, 2);
        let message = Message {
            op: 2,
            flags: 0,
            token: 0,
            offset: tail + 16,
            len: len - 16,
        };
        let published = tail + u64::from(len);
        assert_eq!(found(&memory, tail, published), Ok(Some(message)));
    }
}

#[test]
fn a_filler_may_be_longer_than_a_message() {
    let memory = shared(CAPACITY as usize);
    let half = CAPACITY / 2;
    write_header(&memory, half, half as u32, WRAP);
    assert_eq!(found(&memory, half, CAPACITY), Ok(None));
    assert_eq!(memory.tail.get(), CAPACITY, "it is consumed");
    write_header(&memory, 0, 32, 5);
    let message = found(&memory, half, CAPACITY + 32);
    let message = message.expect("a sound ring").expect("a message");
    assert_eq!((message.op, message.offset, message.len), (5, 16, 16));
}

#[test]
fn a_head_between_messages_is_a_violation() {
    let memory = shared(1024);
    for head in [8, 15, 63, 1032, 1040, u64::MAX - 15] {
        write_header(&memory, 0, 16, 2);
        let violation = Violation::Head {
            head,
            tail: 0,
            capacity: 1024,
        };
        assert_eq!(found(&memory, 0, head), Err(violation));
    }
}

#[test]
fn a_message_takes_its_header_and_whole_units() {
    for (payload, len) in [(0, 16), (1, 32), (15, 32), (16, 32), (17, 48), (700, 720)] {
        assert_eq!(message_len(payload), len, "{payload}");
    }
    assert_eq!(MAX_MESSAGE, 131_072);
}

#[test]
fn a_consumer_knows_of_a_message_before_and_after_it_has_looked() {
    let memory = shared(256);
    let mut producer = Producer::new(memory.clone());
    let mut consumer = Consumer::new(memory);
    // Several times around.
    for op in 2..20 {
        assert!(!consumer.has_message());
        assert_eq!(consumer.next_op(), None);
        let room = producer.reserve(40).expect("room");
        producer.publish(room, op, 0, 0);
        assert!(consumer.has_message());
        assert_eq!(consumer.next_op(), None, "nobody has looked");
        let message = consumer.peek().expect("a sound ring").expect("a message");
        assert!(consumer.has_message());
        assert_eq!(consumer.next_op(), Some(op));
        consumer.consume(&message);
    }
    assert!(producer.is_drained());
}

#[test]
fn a_message_is_filled_and_copied_in_parts() {
    let memory = shared(1024);
    let mut producer = Producer::new(memory.clone());
    let mut consumer = Consumer::new(memory);
    for _ in 0..3 {
        let room = producer.reserve(24).expect("room");
        producer.fill(room, 0, b"first...");
        producer.fill(room, 8, b"second..");
        producer.fill(room, 24, b"padding.");
        producer.publish(room, 2, 0, 0);
        let message = consumer.peek().expect("a sound ring").expect("a message");
        assert_eq!(message.len, 32);
        let mut bytes = [0; 16];
        assert!(consumer.copy_out(&message, 0, &mut bytes));
        assert_eq!(&bytes, b"first...second..");
        assert!(consumer.copy_out(&message, 24, &mut bytes[..8]));
        assert_eq!(&bytes[..8], b"padding.");
        assert!(consumer.copy_out(&message, 32, &mut []));
        for at in [17, 24, 32, 33] {
            assert!(!consumer.copy_out(&message, at, &mut bytes), "{at}");
        }
        consumer.consume(&message);
    }
    assert_eq!(producer.position(), 144);
}

#[test]
#[should_panic(expected = "assertion failed")]
fn a_reservation_is_not_overfilled() {
    let mut producer = Producer::new(shared(1024));
    let room = producer.reserve(16).expect("room");
    producer.fill(room, 8, &[0; 9]);
}

#[test]
#[should_panic(expected = "message of 131088 bytes")]
fn no_message_is_longer_than_the_longest() {
    let mut producer = Producer::new(shared(CAPACITY as usize));
    assert!(producer.reserve(MAX_MESSAGE as usize - 16).is_some());
    producer.reserve(MAX_MESSAGE as usize - 15);
}

/// The server is trusted, but unread messages are not overwritten even if it publishes nonsense.
#[test]
fn a_tail_that_cannot_be_makes_no_room() {
    let memory = shared(1024);
    let mut producer = Producer::new(memory.clone());
    for token in 0..16 {
        let room = producer.reserve(48).expect("room");
        producer.publish(room, 2, 0, token);
    }
    assert_eq!(producer.position(), 1024);
    for tail in [1040, 4096, u64::MAX, 0] {
        memory.tail.set(tail);
        assert_eq!(producer.reserve(48), None, "{tail}");
    }
    // Room for a message, but not for two.
    memory.tail.set(64);
    let room = producer.reserve(48).expect("room");
    producer.publish(room, 2, 0, 16);
    assert_eq!(producer.reserve(0), None);
    assert!(!producer.is_drained());
}
