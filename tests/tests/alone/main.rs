//! What needs the machine: kernels that take whole processors, clients by the hundred, programs killed at random moments, the
//! fuzzer.

mod fuzz;
mod gate;
mod many_clients;
mod many_threads;
mod never_ending;
mod scripts;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// One test at a time, where they share a process; `.config/nextest.toml` says the same of tests that do not.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
