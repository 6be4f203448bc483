//! The slow lane: calls that take long or wait inside the driver, and the setting up of sessions.

pub mod run;

use crate::engine::base::moment::Moment;
use crate::engine::base::side::Side;
use crate::engine::session::Session;
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use mpsshim_control::closers::Stranger;
use mpsshim_model::client::Credentials;
use mpsshim_proto::handshake::ClientHello;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Work for the slow lane.
pub enum SlowTask {
    /// Execute the next message of a session, and what follows it, then send the session home.
    Serve(Box<Session>),
    /// Execute the next message of a session in the moment that it has waited for, then send the session home.
    Pass(Box<Session>, Arc<Moment>),
    /// Have a session that waits at a gate go to another side, then wait there.
    Move(Box<Session>, Side),
    /// Set up a session for a new client.
    Setup(Stranger, Box<ClientHello>, Credentials),
}

/// How long a thread that was started beyond [`THREADS`] stays without work.
const IDLE: Duration = Duration::from_secs(5);

/// The slow lane: tasks that wait for a thread, and how its threads get on.
///
/// A load of a large text takes the driver's compiler seconds, and a client decides how large: three of them must not keep
/// everybody else waiting. So where no task has been taken up for [`STALL`], another thread takes over.
pub struct SlowLane {
    sender: Sender<SlowTask>,
    tasks: Receiver<SlowTask>,
    /// Rung when a task comes while others may be in its way.
    alarm: (Sender<()>, Receiver<()>),
    threads: AtomicUsize,
    idle: AtomicUsize,
    /// Tasks that were taken up.
    taken: AtomicU64,
}

impl SlowLane {
    /// Without threads as yet.
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

    /// Gives a task to the next thread that is free.
    pub fn send(&self, task: SlowTask) {
        let _ = self.sender.send(task);
        if self.idle.load(Ordering::SeqCst) < self.tasks.len() {
            // One ring is as good as many.
            let _ = self.alarm.0.try_send(());
        }
    }

    /// Something waits that is not a task yet, and no thread is free.
    pub fn ring(&self) {
        let _ = self.alarm.0.try_send(());
    }

    /// How many tasks would be taken up at once.
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
