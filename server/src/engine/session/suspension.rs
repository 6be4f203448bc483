//! Suspended clients: their device memory is in host memory until their next call.

use mpsshim_model::suspension::{Placement, Unmoved};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Where an operator wants a session's device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Order {
    /// Nowhere in particular.
    None = 0,
    /// In host memory, as far as possible.
    Out = 1,
    /// On the devices.
    In = 2,
}

/// Order to move a session's device memory, and its outcome. At most one order at a time.
#[derive(Debug, Default)]
pub struct Suspension {
    order: AtomicU8,
    /// Bytes of device memory that are in host memory.
    moved: AtomicU64,
    outcome: Mutex<Option<Result<Placement, Unmoved>>>,
}

impl Suspension {
    /// Gives an order. `false`: another one is being carried out.
    pub fn give(&self, order: Order) -> bool {
        let given = self.order.compare_exchange(
            Order::None as u8,
            order as u8,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
        if given.is_ok() {
            *self.outcome.lock() = None;
        }
        given.is_ok()
    }

    /// The order that is being carried out.
    #[inline]
    pub fn order(&self) -> Order {
        match self.order.load(Ordering::Relaxed) {
            1 => Order::Out,
            2 => Order::In,
            _ => Order::None,
        }
    }

    /// The order has been carried out, or cannot be.
    pub fn settle(&self, outcome: Result<Placement, Unmoved>) {
        let mut settled = self.outcome.lock();
        if self.order.swap(Order::None as u8, Ordering::SeqCst) != Order::None as u8 {
            *settled = Some(outcome);
        }
    }

    /// Takes an order back, unless it has been carried out meanwhile. Returns the outcome then.
    pub fn withdraw(&self) -> Option<Result<Placement, Unmoved>> {
        let mut settled = self.outcome.lock();
        let outcome = settled.take();
        if outcome.is_none() {
            self.order.store(Order::None as u8, Ordering::SeqCst);
        }
        outcome
    }

    /// The outcome of the order, once.
    pub fn take_outcome(&self) -> Option<Result<Placement, Unmoved>> {
        self.outcome.lock().take()
    }

    /// Bytes of device memory that are in host memory.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Publishes the number of bytes that are in host memory.
    pub fn note_moved(&self, bytes: u64) {
        self.moved.store(bytes, Ordering::Relaxed);
    }
}
