//! The lock of a context that its calls take, and the calls that hold it until all work in flight has ended.
//!
//! Some calls of the genuine driver wait until all work in flight in their context has ended, and most of these block
//! every other call that submits work to a stream meanwhile: a kernel that runs for seconds then stops all streams of the
//! context, and a kernel that waits for another stream's work stops them forever. With SOFTGPU_DRIVER_LOCKS=1 the calls
//! here do the same, so that such standstills can be reproduced without a GPU. The calls were determined on driver 580 (an H200; one process, a long kernel in one stream, small ones in another).
//!
//! | call | [`Wait`] |
//! |---|---|
//! | `cuModuleLoad` and its kind | `Holds` |
//! | a library becomes a module of the context: `cuLibraryGetModule`, `cuLibraryGetGlobal`, `cuLibraryGetManaged`, `cuKernelGetParamInfo`, the first `cuKernelGetFunction`, the first launch by `CUkernel` | `Holds` |
//! | the next launch in the context after another function of a loaded library was requested | `Holds` |
//! | a launch with more local memory than any before and than the limit of the stack | `Holds` |
//! | `cuCtxSetLimit` of the stack; the context then has so much local memory, be it less than before | `Holds` |
//! | `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister` | `Holds` |
//! | `cuGreenCtxCreate`, `cuGreenCtxStreamCreate`, `cuGraphInstantiate` of a graph with kernels | `Holds` |
//! | `cuModuleUnload`, `cuLibraryUnload`, `cuArrayDestroy`, `cuMipmappedArrayDestroy` | `Only` |
//!
//! Blocked are submissions of work to a stream, by any call (`Stream::put`), and other calls that take the lock briefly
//! ([`Context::waits_its_turn`]): creation and destruction of streams and events, `cuMemHostRegister`, stream-ordered memory. Queries,
//! captured work and other contexts never wait for it; synchronization does for the legacy stream only, into which it
//! puts work here.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::context::Context;

static ON: AtomicBool = AtomicBool::new(false);
/// Calls, of all contexts, that wait for work in flight; calls that wait for the lock of their context.
static WAITING: AtomicUsize = AtomicUsize::new(0);
static KEPT_OUT: AtomicUsize = AtomicUsize::new(0);

/// Does as `SOFTGPU_DRIVER_LOCKS` says.
pub fn read_environment() {
    ON.store(
        says_on(std::env::var_os("SOFTGPU_DRIVER_LOCKS")),
        Ordering::Relaxed,
    );
}

fn says_on(value: Option<OsString>) -> bool {
    value.is_some_and(|value| !value.is_empty() && value != "0")
}

pub fn on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// How many calls stand now, and why.
pub fn counts() -> [(&'static str, usize); 2] {
    [
        ("calls-waiting", WAITING.load(Ordering::Acquire)),
        ("calls-kept-out", KEPT_OUT.load(Ordering::Acquire)),
    ]
}

struct Counted(&'static AtomicUsize);

impl Counted {
    fn new(count: &'static AtomicUsize) -> Counted {
        count.fetch_add(1, Ordering::AcqRel);
        Counted(count)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// How a call waits for everything in flight.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// With the context's lock held: no work can be added meanwhile.
    Holds,
    /// Without it.
    Only,
}

/// A context's lock, and what makes its next launch wait.
pub struct DriverLocks {
    /// Held while work is put into a stream: it makes "earlier" the same for the legacy stream and others.
    streams: Mutex<()>,
    /// A loaded library was asked for another function.
    has_new_function: AtomicBool,
    /// Local memory that each thread has, bytes.
    local_bytes: AtomicU32,
}

impl DriverLocks {
    /// Of a context whose threads have so many bytes of local memory.
    pub fn new(local_bytes: u32) -> DriverLocks {
        DriverLocks {
            streams: Mutex::default(),
            has_new_function: AtomicBool::new(false),
            local_bytes: AtomicU32::new(local_bytes),
        }
    }
}

impl Context {
    /// The lock for a call that puts work into a stream.
    pub fn submits(&self) -> MutexGuard<'_, ()> {
        self.locks.streams.try_lock().unwrap_or_else(|| {
            let _counted = Counted::new(&KEPT_OUT);
            self.locks.streams.lock()
        })
    }

    /// For a call that takes the lock and puts no work into a stream here.
    pub fn waits_its_turn(&self) {
        if on() {
            drop(self.submits());
        }
    }

    /// Waits, as the genuine driver does, until everything in flight has ended; others are kept out until the result is
    /// dropped. Nothing where `SOFTGPU_DRIVER_LOCKS` is off.
    #[must_use]
    pub fn waits_for_all(&self, wait: Wait) -> Option<MutexGuard<'_, ()>> {
        if !on() {
            return None;
        }
        let held = (wait == Wait::Holds).then(|| self.submits());
        let _counted = Counted::new(&WAITING);
        self.wait_idle();
        held
    }

    /// As [`Context::waits_for_all`], for a call that waits with the variable off too.
    #[must_use]
    pub fn drains(&self, wait: Wait) -> Option<MutexGuard<'_, ()>> {
        if !on() {
            self.wait_idle();
        }
        self.waits_for_all(wait)
    }

    /// A function of a library that is loaded here was requested for the first time.
    pub fn has_new_function(&self) {
        if on() {
            self.locks.has_new_function.store(true, Ordering::Release);
        }
    }

    /// What a launch waits for; `local_bytes` of its kernel's threads each.
    pub fn before_launch(&self, local_bytes: u32) {
        if !on() {
            return;
        }
        let grows = self.grow_local_memory(local_bytes);
        if self.locks.has_new_function.swap(false, Ordering::AcqRel) || grows {
            drop(self.waits_for_all(Wait::Holds));
        }
    }

    /// What an instance of a graph waits for whose kernels are of this context and need so much local memory at the most.
    pub fn before_instantiation(&self, local_bytes: u32) {
        drop(self.waits_for_all(Wait::Holds));
        self.grow_local_memory(local_bytes);
    }

    /// The limit of the stack was set to so many bytes.
    pub fn set_local_memory(&self, bytes: usize) {
        drop(self.waits_for_all(Wait::Holds));
        let bytes = bytes.try_into().unwrap_or(u32::MAX);
        self.locks.local_bytes.store(bytes, Ordering::Release);
    }

    fn grow_local_memory(&self, bytes: u32) -> bool {
        self.locks.local_bytes.fetch_max(bytes, Ordering::AcqRel) < bytes
    }
}

#[cfg(test)]
mod tests;
