//! Host nodes of graphs: functions of the program that run in the middle of a graph.
//!
//! The server knows a function by a number. Each instance has a slot for each of its host nodes; the GPU writes
//! the number into the slot's flag [`ARRIVED`] when it gets there, a thread of this process that belongs to the
//! instance takes it, runs the function and writes 1 into the flag [`RETURNED`], which the GPU waits for. Each
//! flag is cleared by its reader, so that the instance can be launched again unchanged.

use crate::proxy::hostfn::LINGER;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY};
use mpsshim_proto::message::Op;
use mpsshim_proto::message::graph::CaptureHost;
use mpsshim_proto::segment::{ARRIVED, RETURNED};
use parking_lot::{Condvar, Mutex};

use crate::ffi::Status;
use crate::proxy::hostfn::{self, Function};
use crate::proxy::pages;
use crate::proxy::replay;
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::Session;

/// How long a thread polls without pauses, and the longest pause afterwards.
const SPIN: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(1);

/// The program's functions with their data, by number less one.
static FUNCTIONS: Mutex<Vec<(Function, usize)>> = Mutex::new(Vec::new());
static RUNNERS: Mutex<Option<HashMap<u64, Arc<Runner>>>> = Mutex::new(None);

/// The thread and slots for the functions of an instance.
#[derive(Debug)]
struct Runner {
    slots: Vec<u32>,
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Functions that launches so far have still to run.
    outstanding: u64,
    has_thread: bool,
}

/// The number of a function with its data.
pub fn token(function: Function, data: usize) -> u32 {
    let mut functions = FUNCTIONS.lock();
    let is = |known: &(Function, usize)| std::ptr::fn_addr_eq(known.0, function) && known.1 == data;
    let at = functions.iter().position(is).unwrap_or_else(|| {
        functions.push((function, data));
        functions.len() - 1
    });
    at as u32 + 1
}

/// The function of a number, and its data.
pub fn function(token: u32) -> Status<(Function, usize)> {
    let at = (token as usize).wrapping_sub(1);
    let functions = FUNCTIONS.lock();
    functions.get(at).copied().ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Captures a function.
pub fn capture(session: &Session, stream: StreamRef, function: Function, data: usize) -> Status {
    let body = CaptureHost {
        stream: stream.handle(),
        token: token(function, data),
        pad: 0,
    };
    stream::submit(session, stream, Op::CaptureHost, &body, &[])
}

/// Takes slots for `count` host nodes, their flags cleared.
pub fn take_slots(session: &Session, count: usize) -> Status<Vec<u32>> {
    let mut slots = Vec::with_capacity(count);
    for _ in 0..count {
        let Some((slot, _)) = session.take_slot() else {
            give_back(session, slots);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        };
        session.flag(slot + ARRIVED).store(0, Ordering::Relaxed);
        session.flag(slot + RETURNED).store(0, Ordering::Release);
        slots.push(slot);
    }
    Ok(slots)
}

/// Returns slots that the GPU does not use.
pub fn give_back(session: &Session, slots: Vec<u32>) {
    for slot in slots {
        session.put_back_slot(slot);
    }
}

/// An instance was made with these slots.
pub fn instantiated(exec: u64, slots: Vec<u32>) {
    let runner = Runner {
        slots,
        state: Mutex::default(),
        more: Condvar::new(),
    };
    RUNNERS
        .lock()
        .get_or_insert_default()
        .insert(exec, Arc::new(runner));
}

/// An instance is about to be launched: its thread waits for its functions.
pub fn launched(session: &'static Session, exec: u64) -> Status {
    let runner = RUNNERS
        .lock()
        .as_ref()
        .and_then(|all| all.get(&exec).cloned());
    let Some(runner) = runner else {
        return Ok(());
    };
    let mut state = runner.state.lock();
    state.outstanding += runner.slots.len() as u64;
    if state.has_thread {
        runner.more.notify_one();
        return Ok(());
    }
    let of_thread = runner.clone();
    hostfn::spawn(move || run(session, &of_thread))?;
    state.has_thread = true;
    Ok(())
}

/// An instance was destroyed. Its slots can be reused if its functions have all run.
pub fn destroyed(session: &Session, exec: u64) {
    let runner = RUNNERS.lock().as_mut().and_then(|all| all.remove(&exec));
    if let Some(runner) = runner
        && runner.state.lock().outstanding == 0
    {
        // The GPU may have a word left to clear.
        if stream::quiesce(session, None).is_ok() {
            give_back(session, runner.slots.clone());
        }
    }
}

fn run(session: &Session, runner: &Runner) {
    let mut seen = Instant::now();
    loop {
        {
            let mut state = runner.state.lock();
            if state.outstanding == 0 {
                let late = runner.more.wait_for(&mut state, LINGER).timed_out();
                if late && state.outstanding == 0 {
                    state.has_thread = false;
                    return;
                }
                seen = Instant::now();
                continue;
            }
        }
        for slot in &runner.slots {
            let arrived = session.flag(slot + ARRIVED);
            let token = arrived.load(Ordering::Acquire);
            if token == 0 {
                continue;
            }
            arrived.store(0, Ordering::Relaxed);
            pages::observe(session);
            if let Ok((function, data)) = function(token) {
                // SAFETY: the program's function with the program's data, when its turn has come.
                replay::run_function(session, || unsafe { function(data as *mut _) });
            }
            pages::observe(session);
            session.flag(slot + RETURNED).store(1, Ordering::Release);
            let mut state = runner.state.lock();
            state.outstanding = state.outstanding.saturating_sub(1);
            seen = Instant::now();
        }
        let waited = seen.elapsed();
        if waited < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::sleep((waited / 16).min(LONGEST));
            if session.check().is_err() {
                // The server has let the GPU go on; functions whose turn has not come do not run.
                runner.state.lock().has_thread = false;
                return;
            }
        }
    }
}
