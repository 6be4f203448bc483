//! The slow lane: calls that take long or block in the driver, and the setup of sessions.

pub mod run;

use crate::engine::base::moment::Moment;
use crate::engine::base::side::Side;
use crate::engine::session::Session;
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use mpsshim_control::closers::Stranger;
use mpsshim_model::client::Newcomer;
use mpsshim_proto::handshake::ClientHello;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Work for the slow lane.
pub enum SlowTask {
    /// Execute the next message of a session and those after it, then return the session to its dispatch thread.
    Serve(Box<Session>),
    /// Execute the next message of a session at the quiescent point for which it has waited, then return the session to
    /// its dispatch thread.
    Pass(Box<Session>, Arc<Moment>),
    /// Move a session that waits at a gate to another side, and queue it at the gate there.
    Move(Box<Session>, Side),
    /// Move the device memory of an idle session to host memory, then return the session to its dispatch thread.
    Evict(Box<Session>),
    /// Move the device memory of a session back, then return the session to its dispatch thread.
    Refill(Box<Session>),
    /// Set up a session for a new client.
    Setup(Stranger, Box<ClientHello>, Newcomer),
}

/// How long a thread started beyond [`THREADS`] stays without work.
const IDLE: Duration = Duration::from_secs(5);

/// The slow lane: its task queue and the state of its threads.
///
/// The driver's compiler takes seconds to load a large text, and clients determine the size: three of them must not
/// block all others. If no task has been started for [`STALL`], another thread is therefore started.
pub struct SlowLane {
    sender: Sender<SlowTask>,
    tasks: Receiver<SlowTask>,
    /// Rung when a task arrives and there may be no free thread for it.
    alarm: (Sender<()>, Receiver<()>),
    threads: AtomicUsize,
    idle: AtomicUsize,
    /// Number of tasks started.
    taken: AtomicU64,
}

impl SlowLane {
    /// Creates a slow lane without threads.
    pub fn new() -> SlowLane {
        let (sender, tasks) = unbounded();
        SlowLane {
            sender,
            tasks,
            alarm: bounded(1),
            threads: AtomicUsize::new(0),
            idle: AtomicUsize::new(0),
            taken: AtomicU64::new(0),
        }
    }

    /// Queues a task for the next free thread.
    pub fn send(&self, task: SlowTask) {
        let _ = self.sender.send(task);
        if self.idle.load(Ordering::SeqCst) < self.tasks.len() {
            // One pending ring is enough.
            let _ = self.alarm.0.try_send(());
        }
    }

    /// Requests a thread for sessions at the gate, which are not tasks yet.
    pub fn ring(&self) {
        let _ = self.alarm.0.try_send(());
    }

    /// Whether a task waits for a thread.
    pub fn is_wanted(&self) -> bool {
        !self.tasks.is_empty()
    }

    /// Number of tasks that could be started at once.
    pub fn free(&self) -> usize {
        let idle = self.idle.load(Ordering::SeqCst);
        idle.saturating_sub(self.tasks.len())
    }

    fn next(&self, spare: bool) -> Option<SlowTask> {
        self.idle.fetch_add(1, Ordering::SeqCst);
        let task = match spare {
            true => self.tasks.recv_timeout(IDLE).ok(),
            false => self.tasks.recv().ok(),
        };
        self.idle.fetch_sub(1, Ordering::SeqCst);
        self.taken.fetch_add(1, Ordering::Relaxed);
        task
    }
}
