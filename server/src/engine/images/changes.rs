//! Tells the daemon when the images of the sessions have changed, for the images that a standby has loaded, and when those
//! images take memory that a client needs.

use crossbeam_channel::Sender;
use mpsshim_model::client::EngineEvent;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long an allocation waits for the memory of a standby's images.
const GIVES: Duration = Duration::from_millis(500);

/// Changes of the sessions' images.
#[derive(Debug)]
pub struct Changes {
    events: Sender<EngineEvent>,
    /// The next change is told.
    watched: AtomicBool,
    /// A standby may have loaded images.
    lent: AtomicBool,
    /// Until when the standby may be unloading them.
    gives_until: Mutex<Option<Instant>>,
}

impl Changes {
    /// Not watched.
    pub fn new(events: Sender<EngineEvent>) -> Changes {
        Changes {
            events,
            watched: AtomicBool::new(false),
            lent: AtomicBool::new(false),
            gives_until: Mutex::default(),
        }
    }

    /// A standby gets the images as they are from now on; the next change is told.
    pub fn watch(&self) {
        self.lent.store(true, Ordering::Release);
        self.watched.store(true, Ordering::Release);
    }

    /// A session has loaded or unloaded an image, or uses a library on another device.
    pub fn note(&self) {
        if self.watched.load(Ordering::Acquire) && self.watched.swap(false, Ordering::AcqRel) {
            // Sending fails only if the engine is ending.
            let _ = self.events.send(EngineEvent::ImagesChanged);
        }
    }

    /// A device is short of memory: asks for that of the standby's images, once. Returns whether it may still come.
    pub fn ask_for_memory(&self) -> bool {
        let now = Instant::now();
        let mut until = self.gives_until.lock();
        if self.lent.load(Ordering::Acquire) && self.lent.swap(false, Ordering::AcqRel) {
            *until = Some(now + GIVES);
            let _ = self.events.send(EngineEvent::MemoryShort);
        }
        until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::unbounded;

    #[test]
    fn the_first_change_behind_each_request_is_told() {
        let (events, receiver) = unbounded();
        let changes = Changes::new(events);
        changes.note();
        assert!(receiver.is_empty(), "no standby has asked");
        for _ in 0..2 {
            changes.watch();
            changes.note();
            changes.note();
            let told: Vec<_> = receiver.try_iter().collect();
            assert!(matches!(told[..], [EngineEvent::ImagesChanged]), "{told:?}");
        }
    }

    #[test]
    fn memory_of_a_standby_is_asked_for_once_and_awaited_for_a_moment() {
        let (events, receiver) = unbounded();
        let changes = Changes::new(events);
        assert!(!changes.ask_for_memory(), "a standby has loaded nothing");
        changes.watch();
        assert!(changes.ask_for_memory() && changes.ask_for_memory());
        let told: Vec<_> = receiver.try_iter().collect();
        assert!(matches!(told[..], [EngineEvent::MemoryShort]), "{told:?}");
        *changes.gives_until.lock() = Some(Instant::now());
        assert!(!changes.ask_for_memory());
    }
}
