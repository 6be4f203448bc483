//! Whether the server goes on: attempts to bring all sessions to rest for the next server, and the stop.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How far a hand-over of sessions to the next server is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum HandOver {
    /// There is none, or it has been called off.
    #[default]
    None,
    /// It has been asked for.
    Asked,
    /// Sessions at rest are leaving. It cannot be called off any more.
    Parts,
}

/// The server's fate.
#[derive(Debug, Default)]
pub struct Fate {
    /// Number of the present attempt to bring sessions to rest, all that are not excused from it; 0: there is none.
    pub resting: AtomicU64,
    /// Number of attempts so far.
    pub rests: AtomicU64,
    hand_over: Mutex<HandOver>,
    /// The daemon gives sessions servers of their own that need one.
    pub separates: AtomicBool,
    /// The server stops.
    pub stopping: AtomicBool,
    /// Number of the thread that reports to the daemon where clients have work in flight; 0: none does.
    pub reports_work: AtomicU64,
    /// Number of such threads so far.
    pub work_reports: AtomicU64,
}

impl Fate {
    /// A hand-over has been asked for.
    pub fn begin_hand_over(&self) {
        *self.hand_over.lock() = HandOver::Asked;
    }

    /// Begins the attempt with this number. Returns whether the hand-over has not been called off.
    pub fn ask_to_rest(&self, number: u64) -> bool {
        let hand_over = self.hand_over.lock();
        let is_asked = *hand_over == HandOver::Asked;
        if is_asked {
            self.resting.store(number, Ordering::SeqCst);
        }
        is_asked
    }

    /// Calls the hand-over off, and ends the present attempt, unless sessions are leaving. Returns whether it did.
    pub fn call_off(&self) -> bool {
        let mut hand_over = self.hand_over.lock();
        if *hand_over == HandOver::Parts {
            return false;
        }
        *hand_over = HandOver::None;
        self.resting.store(0, Ordering::SeqCst);
        true
    }

    /// The sessions at rest leave now. Returns whether the hand-over has not been called off.
    pub fn begin_parting(&self) -> bool {
        let mut hand_over = self.hand_over.lock();
        let is_asked = *hand_over == HandOver::Asked;
        if is_asked {
            *hand_over = HandOver::Parts;
        }
        is_asked
    }

    /// They have left: the other sessions go on, and the hand-over is done.
    pub fn end_parting(&self) {
        *self.hand_over.lock() = HandOver::None;
        self.resting.store(0, Ordering::SeqCst);
    }

    /// Number of the present attempt to bring sessions to rest; 0: there is none.
    #[inline]
    pub fn attempt(&self) -> u64 {
        self.resting.load(Ordering::Relaxed)
    }

    /// Whether some sessions are being brought to rest, or are at rest.
    #[inline]
    pub fn is_resting(&self) -> bool {
        self.resting.load(Ordering::Relaxed) != 0
    }
}
