//! Instructions per message on either side of the ring. They do not depend on what else the machine does.

use crate::segment::Segment;
use mpsshim_proto::ring::{Consumer, Producer};
use mpsshim_proto::segment::RingMemory;
use perf_event::events::Hardware;
use perf_event::{Builder, Counter};
use std::io;

/// Messages of a batch: what fits into the ring with room to spare.
const BATCH: usize = 1024;
/// Bytes of a launch's message behind the header, with a few parameters.
const PAYLOAD: usize = 48;

/// The client's side of a batch. A function of its own so that `callgrind` can tell it apart.
#[inline(never)]
fn produce_batch(producer: &mut Producer<RingMemory>, payload: &[u8; PAYLOAD]) {
    for token in 0..BATCH as u64 {
        let room = producer
            .reserve(payload.len())
            .expect("a batch fits the ring");
        producer.fill(room, 0, payload);
        producer.publish(room, 16, 0, token);
    }
}

/// The server's side of a batch.
#[inline(never)]
fn consume_batch(consumer: &mut Consumer<RingMemory>, payload: &mut [u8; PAYLOAD]) {
    for _ in 0..BATCH {
        let message = consumer
            .peek()
            .expect("our own producer keeps the rules")
            .expect("a batch was produced");
        consumer.copy_out(&message, 0, payload);
        consumer.consume(&message);
    }
}

/// Counts what `work` executes, in user space; without a counter just does it.
fn counted(counter: &mut Option<Counter>, work: impl FnOnce()) -> io::Result<()> {
    if let Some(counter) = counter {
        counter.enable()?;
    }
    work();
    if let Some(counter) = counter {
        counter.disable()?;
    }
    Ok(())
}

/// Measures `rounds` batches.
pub fn measure(segment: &Segment, rounds: usize) {
    let mut producer = Producer::new(segment.ring());
    let mut consumer = Consumer::new(segment.ring());
    let mut payload = [1; PAYLOAD];
    let build = || Builder::new().kind(Hardware::INSTRUCTIONS).build();
    let (mut produced, mut consumed, unavailable) = match (build(), build()) {
        (Ok(produced), Ok(consumed)) => (Some(produced), Some(consumed), None),
        (Err(error), _) | (_, Err(error)) => (None, None, Some(error)),
    };
    let messages = rounds * BATCH;
    println!("instructions_messages={messages}");
    let mut counting = || -> io::Result<()> {
        for _ in 0..rounds {
            counted(&mut produced, || produce_batch(&mut producer, &payload))?;
            counted(&mut consumed, || consume_batch(&mut consumer, &mut payload))?;
        }
        for (name, counter) in [("produce", &mut produced), ("consume", &mut consumed)] {
            if let Some(counter) = counter {
                let each = counter.read()? as f64 / messages as f64;
                println!("{name}_instructions={each:.1}");
            }
        }
        Ok(())
    };
    if let Some(error) = counting().err().or(unavailable) {
        println!("no instruction counts here: perf_event_open: {error}");
    }
}
