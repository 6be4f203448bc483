//! Suspended clients: their device memory is in host memory until their next call.

use crate::engine::base::ordinal::Ordinal;
use mpsshim_model::suspension::{Placement, Unmoved};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// For how long a session is not asked again to make room after its work has not ended.
const RESISTS: Duration = Duration::from_secs(10);

/// Where a session's device memory is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In host memory, as far as possible, once the session is idle: an operator wants it.
    Out,
    /// On the devices: an operator wants it.
    In,
    /// This many bytes of this device in host memory, once its work in flight is done: another session needs the device.
    MakeRoom(Ordinal, u64),
}

/// Order to move a session's device memory, and its outcome. At most one order at a time.
#[derive(Debug)]
pub struct Suspension {
    /// Whether there is an order.
    is_ordered: AtomicBool,
    /// The memory is being copied.
    moving: AtomicBool,
    /// Bytes of device memory that are in host memory.
    moved: AtomicU64,
    /// When it last worked, in milliseconds since `began`.
    active: AtomicU64,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    order: Option<(Order, Instant)>,
    outcome: Option<Result<Placement, Unmoved>>,
    /// Bytes on each device that can be moved.
    movable: BTreeMap<Ordinal, u64>,
    /// Until when it keeps its memory, although it is busy.
    keeps: Instant,
    /// Until when it is not asked to make room.
    resists: Option<Instant>,
}

impl Default for Suspension {
    fn default() -> Suspension {
        let began = Instant::now();
        Suspension {
            is_ordered: AtomicBool::new(false),
            moving: AtomicBool::new(false),
            moved: AtomicU64::new(0),
            active: AtomicU64::new(0),
            began,
            state: Mutex::new(State {
                order: None,
                outcome: None,
                movable: BTreeMap::new(),
                keeps: began,
                resists: None,
            }),
        }
    }
}

impl Suspension {
    /// Gives an order. `false`: another one is being carried out.
    pub fn give(&self, order: Order) -> bool {
        let mut state = self.state.lock();
        if state.order.is_some() {
            return false;
        }
        state.order = Some((order, Instant::now()));
        state.outcome = None;
        self.is_ordered.store(true, Ordering::SeqCst);
        true
    }

    /// Whether there is an order that is being carried out.
    #[inline]
    pub fn is_ordered(&self) -> bool {
        self.is_ordered.load(Ordering::Relaxed)
    }

    /// The order that is being carried out.
    #[inline]
    pub fn order(&self) -> Option<Order> {
        if !self.is_ordered() {
            return None;
        }
        self.state.lock().order.map(|(order, _)| order)
    }

    /// Whether there is an order to move memory to host memory.
    pub fn wants_host_memory(&self) -> bool {
        matches!(self.order(), Some(Order::Out | Order::MakeRoom(..)))
    }

    /// When an order to make room was given that is being carried out.
    pub fn ordered_since(&self) -> Option<Instant> {
        self.state.lock().order.map(|(_, since)| since)
    }

    /// Counts bytes of an order to make room that are in host memory now. Returns whether they are enough.
    pub fn has_made_room(&self, bytes: u64) -> bool {
        match &mut self.state.lock().order {
            Some((Order::MakeRoom(_, left), _)) => {
                *left = left.saturating_sub(bytes);
                *left == 0
            }
            _ => false,
        }
    }

    /// The order has been carried out, or cannot be.
    pub fn settle(&self, outcome: Result<Placement, Unmoved>) {
        let mut state = self.state.lock();
        if state.order.take().is_some() {
            state.outcome = Some(outcome);
        }
        self.is_ordered.store(false, Ordering::SeqCst);
    }

    /// Takes an order back, unless it has been carried out meanwhile. Returns the outcome then.
    pub fn withdraw(&self) -> Option<Result<Placement, Unmoved>> {
        let mut state = self.state.lock();
        let outcome = state.outcome.take();
        if outcome.is_none() {
            state.order = None;
            self.is_ordered.store(false, Ordering::SeqCst);
        }
        outcome
    }

    /// The outcome of the order, once.
    pub fn take_outcome(&self) -> Option<Result<Placement, Unmoved>> {
        self.state.lock().outcome.take()
    }

    /// Its work does not end: an order to make room is taken back, and it gets no other one for [`RESISTS`].
    pub fn resist(&self, now: Instant) {
        let mut state = self.state.lock();
        if matches!(state.order, Some((Order::MakeRoom(..), _))) {
            state.order = None;
            self.is_ordered.store(false, Ordering::SeqCst);
            state.resists = Some(now + RESISTS);
        }
    }

    /// Whether it is not asked to make room now.
    pub fn resists(&self, now: Instant) -> bool {
        self.state.lock().resists.is_some_and(|until| now < until)
    }

    /// Keeps its memory until then, although others wait for room and it is busy.
    pub fn keep_until(&self, until: Instant) {
        self.state.lock().keeps = until;
    }

    /// Until when it keeps its memory.
    pub fn keeps_until(&self) -> Instant {
        self.state.lock().keeps
    }

    /// Notes whether its memory is being copied.
    pub fn set_moving(&self, moving: bool) {
        self.moving.store(moving, Ordering::Relaxed);
    }

    /// Whether its memory is being copied.
    pub fn is_moving(&self) -> bool {
        self.moving.load(Ordering::Relaxed)
    }

    /// Bytes on a device that can be moved to host memory.
    pub fn movable(&self, device: Ordinal) -> u64 {
        let state = self.state.lock();
        state.movable.get(&device).copied().unwrap_or_default()
    }

    /// Bytes on all devices that can be moved to host memory.
    pub fn movable_in_all(&self) -> u64 {
        self.state.lock().movable.values().sum()
    }

    /// Counts bytes on a device that can be moved to host memory.
    pub fn add_movable(&self, device: Ordinal, bytes: u64) {
        *self.state.lock().movable.entry(device).or_default() += bytes;
    }

    /// Uncounts bytes that are freed, moved, or cannot be moved any more.
    pub fn take_movable(&self, device: Ordinal, bytes: u64) {
        if let Some(movable) = self.state.lock().movable.get_mut(&device) {
            *movable = movable.saturating_sub(bytes);
        }
    }

    /// Bytes of device memory that are in host memory.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Publishes the number of bytes that are in host memory.
    pub fn note_moved(&self, bytes: u64) {
        self.moved.store(bytes, Ordering::Relaxed);
    }

    /// Notes that the session works now.
    pub fn note_active(&self, now: Instant) {
        let since = now.saturating_duration_since(self.began).as_millis() as u64;
        self.active.store(since, Ordering::Relaxed);
    }

    /// When it last worked.
    pub fn idle_since(&self) -> Instant {
        self.began + Duration::from_millis(self.active.load(Ordering::Relaxed))
    }
}
