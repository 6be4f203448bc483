//! Whether the contexts are sound. A fault of one kernel (an illegal address, a failed assertion) ends all contexts of the
//! process for good.

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
    /// It is decided which sessions go on in the next server.
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

    /// Sets the function that decides, at the first sticky status, which sessions go on in the next server.
    pub fn on_loss(&self, decide: impl Fn(CUresult) + Send + Sync + 'static) {
        let _ = self.on_loss.set(Box::new(decide));
    }

    /// The driver has returned a sticky status. The first caller has the sessions' fate decided; the others go on at once.
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

    /// It is decided which sessions go on in the next server.
    pub fn set_decided(&self) {
        self.decided.store(true, Ordering::SeqCst);
    }

    /// Waits, after a context was lost, until it is decided which sessions go on in the next server.
    pub fn await_decision(&self) {
        while !self.decided.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }
}
