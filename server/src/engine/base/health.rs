//! Whether the contexts are sound. A fault of one kernel (an illegal address, a failed assertion) permanently breaks
//! all contexts of the process.

use mpsshim_api::cuda::CUresult;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

type OnLoss = Box<dyn Fn(CUresult) + Send + Sync>;

/// The state of the contexts.
#[derive(Default)]
pub struct Health {
    /// The sticky status of a lost context, 0 while all contexts are sound.
    lost: AtomicU32,
    /// The sessions that continue in the next server have been chosen.
    decided: AtomicBool,
    on_loss: OnceLock<OnLoss>,
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lost().fmt(f)
    }
}

impl Health {
    /// Whether a context is lost.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed) != 0
    }

    /// The status of a lost context.
    pub fn lost(&self) -> Option<CUresult> {
        match self.lost.load(Ordering::Relaxed) {
            0 => None,
            status => Some(CUresult(status)),
        }
    }

    /// Sets the function that chooses, at the first sticky status, which sessions continue in the next server.
    pub fn on_loss(&self, decide: impl Fn(CUresult) + Send + Sync + 'static) {
        let _ = self.on_loss.set(Box::new(decide));
    }

    /// Notes that the driver has returned a sticky status. The first caller runs the function that decides the
    /// sessions' fate; the others return at once.
    pub fn lose(&self, status: CUresult) {
        let first = self
            .lost
            .compare_exchange(0, status.0, Ordering::SeqCst, Ordering::Relaxed);
        if first.is_err() {
            return;
        }
        if let Some(decide) = self.on_loss.get() {
            decide(status);
        }
    }

    /// Notes that the sessions that continue in the next server have been chosen.
    pub fn set_decided(&self) {
        self.decided.store(true, Ordering::SeqCst);
    }

    /// After a context was lost, waits until the sessions that continue in the next server have been chosen.
    pub fn await_decision(&self) {
        while !self.decided.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }
}
