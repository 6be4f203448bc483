//! The queues by which the server's threads pass sessions and objects to each other.

use crate::engine::base::owners::Owners;
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
    /// Number of sessions assigned to it.
    pub load: AtomicUsize,
    /// Number of its sessions that have synchronized recently.
    pub active: AtomicUsize,
}

/// The thread that saves variables, of one session at a time, so that a message that arrives meanwhile waits for one
/// save at most.
pub struct Snapshots {
    sender: Sender<Box<Session>>,
    busy: AtomicBool,
}

impl Snapshots {
    /// Creates the queue; the thread receives the sessions sent to `sender`.
    pub fn new(sender: Sender<Box<Session>>) -> Snapshots {
        Snapshots {
            sender,
            busy: AtomicBool::new(false),
        }
    }

    /// Reserves the thread if it is idle. Returns whether it was.
    pub fn reserve(&self) -> bool {
        !self.busy.swap(true, Ordering::AcqRel)
    }

    /// Releases the thread after a save.
    pub fn release(&self) {
        self.busy.store(false, Ordering::Release);
    }

    /// Queues a session to have its variables saved. The thread must have been reserved.
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
    /// Sessions to which annexes belong.
    pub owners: Owners,
    /// Read-locked while a session moves or is freed, write-locked while an annex closes.
    pub moving: RwLock<()>,
    /// The thread that wakes clients, which parks while none sleeps.
    pub watcher: OnceLock<Thread>,
    /// Whether the watcher is parked.
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

    /// Hands an ended session over to the reaper.
    pub fn send_reaper(&self, session: Box<Session>) {
        let _ = self.reaper.send(session);
    }

    /// Queues an object for destruction at a quiescent point.
    pub fn bury(&self, object: Buried) {
        let _ = self.undertaker.send((object.side(), object));
    }

    /// Hands a session over to its dispatch thread.
    pub fn send_home(&self, session: Box<Session>) {
        let dispatcher = &self.dispatchers[session.flow.home];
        let _ = dispatcher.inbox.send(session);
        dispatcher.bell.ring();
    }

    /// Assigns a session to the dispatch thread with the fewest sessions and returns that thread's index.
    pub fn least_loaded(&self) -> usize {
        let load = |at: &usize| self.dispatchers[*at].load.load(Ordering::Relaxed);
        let home = (0..self.dispatchers.len()).min_by_key(load).unwrap_or(0);
        self.dispatchers[home].load.fetch_add(1, Ordering::Relaxed);
        home
    }

    /// Wakes the watcher thread if it is parked.
    pub fn wake_watcher(&self) {
        if self.watcher_idle.load(Ordering::SeqCst)
            && let Some(thread) = self.watcher.get()
        {
            thread.unpark();
        }
    }

    /// Rings the doorbells of all dispatch threads.
    pub fn wake_dispatchers(&self) {
        self.dispatchers
            .iter()
            .for_each(|thread| thread.bell.ring());
    }
}
