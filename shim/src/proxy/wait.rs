//! Waiting for a completion flag: spin, then yield, then sleep; beyond as many threads as there are processors, sleep at
//! once.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mpsshim_api::cuda::{CU_CTX_SCHED_BLOCKING_SYNC, CU_CTX_SCHED_SPIN, CU_CTX_SCHED_YIELD};
use mpsshim_proto::segment::reached;

use crate::ffi::Status;
use crate::proxy::sleepers::sleep;
use crate::proxy::submit::Session;

/// How a thread waits, according to the context's scheduling flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// `CU_CTX_SCHED_AUTO`.
    Auto,
    /// `CU_CTX_SCHED_SPIN`.
    Spin,
    /// `CU_CTX_SCHED_YIELD`.
    Yield,
    /// `CU_CTX_SCHED_BLOCKING_SYNC`, `CU_EVENT_BLOCKING_SYNC`.
    Block,
    /// For a thread that runs host functions: it is unknown how long the stream takes to reach the next one.
    HostFunction,
}

impl Policy {
    /// Of a context's flags.
    pub fn of(flags: u32) -> Policy {
        if flags & CU_CTX_SCHED_BLOCKING_SYNC != 0 {
            Policy::Block
        } else if flags & CU_CTX_SCHED_YIELD != 0 {
            Policy::Yield
        } else if flags & CU_CTX_SCHED_SPIN != 0 {
            Policy::Spin
        } else {
            Policy::Auto
        }
    }

    /// How long to spin, and until when to yield, from the beginning of the wait.
    fn times(self, crowded: bool) -> (Duration, Duration) {
        let (spin, awake) = match self {
            Policy::Auto if crowded => (2, 1_000),
            // The driver's own waits spin for ever; a copy of 256 MiB takes 5 ms.
            Policy::Auto => (20, 20_000),
            Policy::Spin if crowded => (100, 100_000),
            Policy::Spin => (100_000, 200_000),
            Policy::Yield => (0, 100_000),
            Policy::Block => (5, 5),
            Policy::HostFunction if crowded => (2, 50),
            Policy::HostFunction => (10, 200),
        };
        (Duration::from_micros(spin), Duration::from_micros(awake))
    }
}

/// How long a sleeper relies on being woken: a server that has died is noticed within 100 ms.
pub const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Waits until the flag of `slot` has reached `value`.
///
/// # Errors
/// The session's, when it ends meanwhile.
pub fn wait(session: &Session, slot: u32, value: u32, policy: Policy) -> Status {
    let flag = session.flag(slot);
    // Acquire: the GPU's writes before the flag are visible.
    let done = || reached(flag.load(Ordering::Acquire), value);
    if done() {
        return session.check();
    }
    if let Some(_awake) = session.sleepers.stay_awake()
        && poll(session, policy, &done)?
    {
        return session.check();
    }
    sleep(session, slot, value, &done)
}

/// Spins, then yields, for as long as the policy says. Returns whether the flag has been written.
#[inline]
fn poll(session: &Session, policy: Policy, done: &impl Fn() -> bool) -> Status<bool> {
    let crowded = session.header().crowded.load(Ordering::Relaxed) != 0;
    let (spin, awake) = policy.times(crowded);
    let began = Instant::now();
    let mut round = 0u32;
    loop {
        for _ in 0..32 {
            if done() {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        let waited = began.elapsed();
        if waited >= awake {
            return Ok(false);
        }
        session.check()?;
        if waited >= spin {
            round += 1;
            if round.is_multiple_of(4096) {
                session.look()?;
            }
            std::thread::yield_now();
        }
    }
}
