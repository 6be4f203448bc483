//! The host and a kernel with accesses of system scope exchange values while the kernel runs.

use super::*;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Words of a mailbox: the host's turn, the device's turn, a counter of both sides, and the letter from byte 64 on.
const TURN: u64 = 0;
const ANSWER: u64 = 4;
const COUNTER: u64 = 8;
const LETTER: u64 = 64;

fn word(at: u64) -> &'static AtomicU32 {
    // SAFETY: an aligned word of managed memory that the device accesses with system scope.
    unsafe { &*(at as *const AtomicU32) }
}

/// Rounds of one kernel, and words of a letter.
fn round(random: &mut Random) -> (u32, u32) {
    (random.below(40) as u32 + 1, random.below(2000) as u32 + 1)
}

/// One kernel, or the node of a graph, that answers each letter: every word plus one.
fn once(setup: &Setup, random: &mut Random, in_graph: bool) -> Outcome {
    let stream = stream()?;
    let (rounds, words) = round(random);
    let len = LETTER as usize + words as usize * 4;
    // Other memory, which the device had last.
    let other = allocate(10_000)?;
    let before = random.bytes(10_000);
    host(other, before.len()).copy_from_slice(&before);
    let at = allocate(len)?;
    host(at, len).fill(0);
    let mut work = Work {
        to: other,
        count: before.len(),
        value: 3,
        ..Work::default()
    };
    setup
        .kernels
        .launch(setup.kernels.add_bytes, stream, &work)?;
    work = Work {
        to: at,
        count: 1,
        value: rounds,
        step: words,
        ..Work::default()
    };
    if in_graph {
        let (mut graph, mut exec) = (CUgraph::NULL, CUgraphExec::NULL);
        let mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        must!(cuStreamBeginCapture_v2, stream, mode);
        setup.kernels.launch(setup.kernels.answer, stream, &work)?;
        must!(cuStreamEndCapture, stream, &mut graph);
        must!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64);
        must!(cuGraphLaunch, exec, stream);
        must!(cuGraphExecDestroy, exec);
        must!(cuGraphDestroy, graph);
    } else {
        setup.kernels.launch(setup.kernels.answer, stream, &work)?;
    }
    for turn in 1..=rounds {
        let letter = random.bytes(words as usize * 4);
        host(at + LETTER, letter.len()).copy_from_slice(&letter);
        word(at + COUNTER).fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        word(at + TURN).store(turn, Ordering::Release);
        let began = Instant::now();
        while word(at + ANSWER).load(Ordering::Acquire) != turn {
            if began.elapsed() > Duration::from_secs(20) {
                return Err(format!("no answer to letter {turn} of {rounds}"));
            }
            std::hint::spin_loop();
        }
        let expected: Vec<u8> = letter
            .chunks(4)
            .flat_map(|word| {
                let word = u32::from_le_bytes(word.try_into().expect("4 bytes"));
                word.wrapping_add(1).to_le_bytes()
            })
            .collect();
        compare("an answer", at + LETTER, &expected)?;
        if random.one_of(4) {
            let expected: Vec<u8> = before.iter().map(|byte| byte.wrapping_add(3)).collect();
            compare("other memory, beside the kernel", other, &expected)?;
        }
    }
    must!(cuStreamSynchronize, stream);
    let counted = (2 * rounds).to_le_bytes();
    compare("a counter of both sides", at + COUNTER, &counted)?;
    must!(cuStreamDestroy_v2, stream);
    free(at)?;
    free(other)
}

pub fn exchange(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    for in_graph in [false, true, false, true] {
        once(setup, random, in_graph)?;
    }
    while Instant::now() < until {
        let in_graph = random.one_of(3);
        once(setup, random, in_graph)?;
    }
    Ok(())
}
