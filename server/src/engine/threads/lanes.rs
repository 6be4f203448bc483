//! Ways between the server's threads: each thread that has sessions or objects takes them from a queue.

use crate::engine::base::side::{SIDES, Side};
use crate::engine::session::Session;
use crate::engine::threads::gate::Gate;
use crate::engine::threads::slow::{SlowLane, SlowTask};
use crate::engine::threads::undertaker::{Buried, Graves};
use crossbeam_channel::Sender;
use mpsshim_proto::shm::Doorbell;
use parking_lot::RwLock;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;

/// A dispatch thread as others see it.
pub struct Dispatcher {
    /// Takes sessions.
    pub inbox: Sender<Box<Session>>,
    /// Rung for a session in the inbox, and when the server stops.
    pub bell: Doorbell,
    /// Sessions that call it home.
    pub load: AtomicUsize,
    /// How many of them have synchronized lately.
    pub active: AtomicUsize,
}

/// The thread that saves variables, one session's at a time: a message that comes meanwhile waits for that one at most.
pub struct Snapshots {
    sender: Sender<Box<Session>>,
    busy: AtomicBool,
}

impl Snapshots {
    /// With a thread behind `sender` that saves variables.
    pub fn new(sender: Sender<Box<Session>>) -> Snapshots {
        Snapshots {
            sender,
            busy: AtomicBool::new(false),
        }
    }

    /// Reserves the thread, if it has nothing to do.
    pub fn reserve(&self) -> bool {
        !self.busy.swap(true, Ordering::AcqRel)
    }

    /// The thread has nothing to do any more.
    pub fn release(&self) {
        self.busy.store(false, Ordering::Release);
    }

    /// Has a session's variables saved. The thread is reserved.
    pub fn send(&self, session: Box<Session>) {
        let _ = self.sender.send(session);
    }
}

/// The queues, by their threads.
pub struct Lanes {
    /// The dispatch threads.
    pub dispatchers: Vec<Dispatcher>,
    /// Calls that take long.
    pub slow: SlowLane,
    /// Sessions whose variables are to be saved.
    pub snapshots: Snapshots,
    /// Takes sessions that are over.
    pub reaper: Sender<Box<Session>>,
    /// Takes objects that are to be destroyed at a quiescent point.
    pub undertaker: Sender<(Side, Buried)>,
    /// Sessions that wait for a quiescent point, by side.
    pub gates: [Gate; SIDES],
    /// Objects that wait for one, by side.
    pub graves: [Graves; SIDES],
    /// Read-locked while a session moves or is freed, write-locked while an annex closes.
    pub moving: RwLock<()>,
    /// The thread that wakes clients, which parks while none sleeps.
    pub watcher: OnceLock<Thread>,
    /// It is parked.
    pub watcher_idle: AtomicBool,
}

impl Lanes {
    /// The gate of a side.
    pub fn gate(&self, side: Side) -> &Gate {
        &self.gates[side.index()]
    }

    /// Objects of a side that wait to be destroyed.
    pub fn graves(&self, side: Side) -> &Graves {
        &self.graves[side.index()]
    }

    /// Gives a task to the slow lane.
    pub fn send_slow(&self, task: SlowTask) {
        self.slow.send(task);
    }

    /// Has a session freed that is over.
    pub fn send_reaper(&self, session: Box<Session>) {
        let _ = self.reaper.send(session);
    }

    /// Has an object destroyed at a quiescent point.
    pub fn bury(&self, object: Buried) {
        let _ = self.undertaker.send((object.side(), object));
    }

    /// Gives a session (back) to its dispatch thread.
    pub fn send_home(&self, session: Box<Session>) {
        let dispatcher = &self.dispatchers[session.flow.home];
        let _ = dispatcher.inbox.send(session);
        dispatcher.bell.ring();
    }

    /// The dispatch thread with the fewest sessions, which gets one more.
    pub fn least_loaded(&self) -> usize {
        let load = |at: &usize| self.dispatchers[*at].load.load(Ordering::Relaxed);
        let home = (0..self.dispatchers.len()).min_by_key(load).unwrap_or(0);
        self.dispatchers[home].load.fetch_add(1, Ordering::Relaxed);
        home
    }

    /// Wakes the thread that wakes clients.
    pub fn wake_watcher(&self) {
        if self.watcher_idle.load(Ordering::SeqCst)
            && let Some(thread) = self.watcher.get()
        {
            thread.unpark();
        }
    }

    /// Rings for all dispatch threads.
    pub fn wake_dispatchers(&self) {
        self.dispatchers
            .iter()
            .for_each(|thread| thread.bell.ring());
    }
}
