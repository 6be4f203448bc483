//! Direct mode: the gate in front of entry points that submit work. The stubs of [`crate::loader::exports`] check it;
//! [`crate::direct`] opens and closes it.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::loader::symbols::{COUNT, Target};

/// Not 0: the gates are open.
pub static GATE: AtomicU32 = AtomicU32::new(0);
/// About how often a gate was passed: threads that pass at the same time may count as one.
pub static SUBMISSIONS: AtomicU32 = AtomicU32::new(0);
/// The function behind the gate of each symbol that has a gate.
pub static BEHIND: [AtomicPtr<()>; COUNT] = [const { AtomicPtr::new(ptr::null_mut()) }; COUNT];

/// The function behind the gate of a symbol.
pub fn behind(index: usize) -> *const () {
    BEHIND[index].load(Ordering::Acquire)
}

/// Puts a function behind the gate of a symbol, before calls go through that.
pub fn put_behind(index: usize, target: Target) {
    BEHIND[index].store(target.address().cast_mut(), Ordering::Release);
}
