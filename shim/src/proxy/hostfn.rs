//! Host functions: `cuLaunchHostFunc`, `cuStreamAddCallback`.
//!
//! A function travels as a message that names a slot and a value. The GPU writes the value into the slot's flag
//! [`ARRIVED`] when the stream gets there, a thread of this process runs the function and writes the same value into
//! the slot's flag [`RETURNED`], and the server submits the stream's later work, which it has deferred. Each stream
//! with functions has a thread, so a function that blocks stops only its own stream. The threads end when they have
//! been idle for a while; the end of the process does not wait for them, and functions whose turn has not come never
//! run.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::time::Duration;

use mpsshim_api::cuda::{CUDA_ERROR_OPERATING_SYSTEM, CUDA_SUCCESS, CUresult};
use mpsshim_proto::message::Op;
use mpsshim_proto::message::stream::HostFunction;
use mpsshim_proto::segment::{ARRIVED, FLAGS};
use parking_lot::{Condvar, Mutex};

use crate::ffi::Status;
use crate::proxy::pages;
use crate::proxy::replay;
use crate::proxy::stream::StreamRef;
use crate::proxy::submit::Session;
use crate::proxy::wait::{self, Policy};
use crate::thread;

/// How long a thread without work stays for the next function.
pub const LINGER: Duration = Duration::from_secs(2);
/// Bytes of a thread's stack: the default of the program's threads.
const STACK: usize = 8 << 20;

/// `CUhostFn`.
pub type Function = unsafe extern "C" fn(*mut c_void);
/// `CUstreamCallback`.
pub type Callback = unsafe extern "C" fn(u64, CUresult, *mut c_void);

/// A function to run, with the program's data.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    Function(Function, usize),
    /// With the stream as the program named it.
    Callback(Callback, u64, usize),
}

impl Work {
    /// Runs it. After an error callbacks are still called, functions are not.
    fn run(self, status: CUresult) {
        // SAFETY: the program's functions with the program's arguments, once each, as CUDA promises it.
        unsafe {
            match self {
                Work::Function(function, data) if status.is_ok() => function(data as *mut c_void),
                Work::Function(..) => {}
                Work::Callback(callback, stream, data) => {
                    callback(stream, status, data as *mut c_void)
                }
            }
        }
    }
}

/// The functions of a slot's stream, in order.
#[derive(Debug, Default)]
struct Queue {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Value of the last function. It goes on rising when the slot gets another stream.
    last: u32,
    pending: VecDeque<(u32, Work)>,
    has_thread: bool,
}

static QUEUES: [OnceLock<Queue>; FLAGS] = [const { OnceLock::new() }; FLAGS];

/// Runs `work` when everything that the stream was given so far is complete; later work waits for its return. The
/// stream must not capture.
pub fn enqueue(session: &'static Session, stream: StreamRef, work: Work) -> Status {
    let slot = stream.slot();
    let queue = QUEUES[slot as usize].get_or_init(Queue::default);
    let mut ring = session.ring()?;
    let mut state = queue.state.lock();
    if !state.has_thread {
        start(session, slot, queue)?;
        state.has_thread = true;
    }
    let value = state.last.wrapping_add(1);
    let body = HostFunction {
        stream: stream.handle(),
        slot,
        value,
    };
    ring.put(Op::HostFunction, 0, &body, &[])?;
    stream.count(&ring);
    state.last = value;
    state.pending.push_back((value, work));
    queue.more.notify_one();
    Ok(())
}

/// Starts a slot's thread.
fn start(session: &'static Session, slot: u32, queue: &'static Queue) -> Status {
    spawn(move || run(session, slot, queue))
}

/// Starts a thread that runs host functions. The program's signals are for the program's threads.
pub fn spawn(body: impl FnOnce() + Send + 'static) -> Status {
    thread::spawn_for_host_functions(STACK, body).map_err(|error| {
        tracing::error!(%error, "no thread for host functions");
        CUDA_ERROR_OPERATING_SYSTEM
    })
}

fn run(session: &Session, slot: u32, queue: &Queue) {
    let mut state = queue.state.lock();
    loop {
        let Some((value, work)) = state.pending.pop_front() else {
            if queue.more.wait_for(&mut state, LINGER).timed_out() && state.pending.is_empty() {
                state.has_thread = false;
                return;
            }
            continue;
        };
        drop(state);
        let arrived = wait::wait(session, slot + ARRIVED, value, Policy::HostFunction);
        pages::observe(session);
        replay::run_function(session, || {
            work.run(arrived.err().unwrap_or(CUDA_SUCCESS));
        });
        // The next work of the stream sees its changes.
        pages::observe(session);
        session.host_function_returned(slot, value);
        state = queue.state.lock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::context::Context;
    use crate::proxy::fake::Fake;
    use crate::proxy::stream;
    use mpsshim_api::cuda::CUDA_ERROR_MPS_RPC_FAILURE;
    use mpsshim_proto::segment::RETURNED;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    unsafe extern "C" fn count(data: *mut c_void) {
        // SAFETY: the tests below give the address of a counter that outlives them.
        unsafe { (*data.cast::<AtomicUsize>()).fetch_add(1, Ordering::SeqCst) };
    }

    unsafe extern "C" fn tell(stream: u64, status: CUresult, data: *mut c_void) {
        assert!(thread::runs_host_functions());
        // SAFETY: as above, of a sender.
        let sender = unsafe { &*data.cast::<Sender<(u64, CUresult)>>() };
        sender.send((stream, status)).unwrap();
    }

    fn callback(stream: u64) -> (Work, Receiver<(u64, CUresult)>) {
        let (sender, receiver) = channel();
        let data: &'static mut Sender<_> = Box::leak(Box::new(sender));
        (
            Work::Callback(tell, stream, &raw mut *data as usize),
            receiver,
        )
    }

    #[test]
    fn they_run_once_in_order_when_the_stream_gets_there() {
        static RAN: AtomicUsize = AtomicUsize::new(0);
        let server = Fake::new();
        let context = Context::for_test();
        let stream = server.during(|| stream::create(server.session, context, 1, 0, false));
        let stream = stream.unwrap();
        server.hold();
        let function = Work::Function(count, &raw const RAN as usize);
        enqueue(server.session, stream, function).unwrap();
        enqueue(server.session, stream, function).unwrap();
        let (last, told) = callback(7);
        enqueue(server.session, stream, last).unwrap();
        server.serve();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(RAN.load(Ordering::SeqCst), 0, "the stream is not there yet");
        server.let_go();
        assert_eq!(told.recv(), Ok((7, CUDA_SUCCESS)));
        assert_eq!(RAN.load(Ordering::SeqCst), 2);
        let returned = server.session.flag(stream.slot() + RETURNED);
        while returned.load(Ordering::Acquire) != 3 {
            std::thread::yield_now();
        }
        assert!(!thread::runs_host_functions());
    }

    #[test]
    fn without_a_server_callbacks_are_told_and_functions_are_not() {
        static RAN: AtomicUsize = AtomicUsize::new(0);
        let server = Fake::new();
        let context = Context::for_test();
        let make = || server.during(|| stream::create(server.session, context, 1, 0, false));
        // Queues belong to slots, of which a process has one set and the tests a session each: not the other test's.
        let (_first, stream) = (make().unwrap(), make().unwrap());
        let function = Work::Function(count, &raw const RAN as usize);
        enqueue(server.session, stream, function).unwrap();
        let (last, told) = callback(0);
        enqueue(server.session, stream, last).unwrap();
        server.hang_up();
        assert_eq!(told.recv(), Ok((0, CUDA_ERROR_MPS_RPC_FAILURE)));
        assert_eq!(RAN.load(Ordering::SeqCst), 0);
    }
}
