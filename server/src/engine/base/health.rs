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
        match self.on_loss.get() {
            Some(decide) => decide(status),
            // No session exists yet.
            None => self.set_decided(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_api::cuda::{CUDA_ERROR_ASSERT, CUDA_ERROR_ILLEGAL_ADDRESS};
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn the_first_status_decides_and_is_kept() {
        let health = Arc::new(Health::default());
        let decided = Arc::new(AtomicU32::new(0));
        let (counted, deciding) = (decided.clone(), health.clone());
        health.on_loss(move |status| {
            assert_eq!(status, CUDA_ERROR_ASSERT);
            counted.fetch_add(1, Ordering::Relaxed);
            deciding.set_decided();
        });
        assert_eq!((health.is_lost(), health.lost()), (false, None));
        health.lose(CUDA_ERROR_ASSERT);
        health.lose(CUDA_ERROR_ILLEGAL_ADDRESS);
        health.await_decision();
        assert_eq!(decided.load(Ordering::Relaxed), 1);
        assert_eq!(health.lost(), Some(CUDA_ERROR_ASSERT));
    }

    #[test]
    fn a_loss_before_there_are_sessions_keeps_nobody_waiting() {
        let health = Health::default();
        health.lose(CUDA_ERROR_ASSERT);
        health.await_decision();
        assert!(health.is_lost());
    }
}
