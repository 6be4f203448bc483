//! The interface to the program: types for the arguments of handlers, and the return of their results.
//!
//! A handler is called only by the program, with the arguments of the CUDA function it stands for. These types
//! have the layout of the pointers in its signature and carry the guarantees that CUDA documents for them, so that a
//! handler reads and writes through them without unsafe code of its own. They cannot be constructed in safe code.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_UNKNOWN, CUDA_SUCCESS, CUresult};

/// Status of a step of a call.
pub type Status<T = ()> = Result<T, CUresult>;

/// Runs the body of a handler. A panic, which would be a defect of the shim, does not reach the program.
#[inline]
#[track_caller]
pub fn guard(body: impl FnOnce() -> Status) -> CUresult {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => {
            if tracing::enabled!(tracing::Level::TRACE) {
                succeeded(Location::caller());
            }
            CUDA_SUCCESS
        }
        Ok(Err(status)) => failed(Location::caller(), status),
        Err(_) => failed(Location::caller(), CUDA_ERROR_UNKNOWN),
    }
}

/// Whether this thread can still write to the log. The log keeps thread-local state, which panics when it is used
/// after the thread's exit has begun to take such state down; handlers run even then (exit handlers, destructors).
fn can_log() -> bool {
    struct Alive;
    impl Drop for Alive {
        fn drop(&mut self) {}
    }
    thread_local! { static ALIVE: Alive = const { Alive }; }
    ALIVE.try_with(|_| ()).is_ok()
}

/// Logs a call, if all calls are to be logged.
#[cold]
fn succeeded(at: &Location<'_>) {
    if can_log() {
        tracing::trace!("{}:{}: success", at.file(), at.line());
    }
}

/// Logs a call that fails. The handler's location names the entry point.
#[cold]
fn failed(at: &Location<'_>, status: CUresult) -> CUresult {
    if tracing::enabled!(tracing::Level::DEBUG) && can_log() {
        tracing::debug!("{}:{}: {status}", at.file(), at.line());
    }
    status
}

/// Destination of a result: null or writable.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// A null pointer, for a result that the program omits.
    pub const fn none() -> Out<T> {
        Out(std::ptr::null_mut())
    }

    /// Whether it is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Its address as a number.
    pub fn address(self) -> usize {
        self.0.addr()
    }

    /// `CUDA_ERROR_INVALID_VALUE` for a null pointer.
    pub fn required(self) -> Status {
        if self.0.is_null() {
            Err(CUDA_ERROR_INVALID_VALUE)
        } else {
            Ok(())
        }
    }

    /// Stores the result; the pointer must not be null.
    pub fn set(self, value: T) -> Status {
        self.required()?;
        self.set_if_wanted(value);
        Ok(())
    }

    /// Stores the result unless the pointer is null.
    pub fn set_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so writable by the promise of the type.
            unsafe { self.0.write(value) };
        }
    }

    /// Reads the variable.
    pub fn get(self) -> Status<T>
    where
        T: Copy,
    {
        self.required()?;
        // SAFETY: not null, so the program's own variable; CUDA reads such arguments too.
        Ok(unsafe { self.0.read() })
    }

    /// Element `index` of an array that is read and written; the caller bounds `index` by the count given with it.
    pub fn get_at(self, index: usize) -> Status<T>
    where
        T: Copy,
    {
        self.required()?;
        // SAFETY: not null; the caller bounds `index`.
        Ok(unsafe { self.0.add(index).read() })
    }

    /// Stores element `index` of an array result.
    pub fn set_at(self, index: usize, value: T) -> Status {
        self.required()?;
        // SAFETY: not null; the caller bounds `index` by the count that the program gave with the array.
        unsafe { self.0.add(index).write(value) };
        Ok(())
    }
}

/// An argument behind a pointer, or an array of them: null or readable.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for In<T> {}

impl<T> In<T> {
    /// A null pointer, for an argument that the program omits.
    pub const fn none() -> In<T> {
        In(std::ptr::null())
    }
}

impl<T> In<T> {
    /// An argument whose address the program gave inside a struct.
    ///
    /// # Safety
    /// The address is null, or points to the value that CUDA documents for that field.
    pub const unsafe fn inside(address: u64) -> In<T> {
        In(address as *const T)
    }
}

impl<T: Copy> In<T> {
    /// Whether it is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The argument, which must be there.
    pub fn get(self) -> Status<T> {
        self.at(0)
    }

    /// Element `index` of an array that must be there; the caller bounds `index` by the count given with it.
    pub fn at(self, index: usize) -> Status<T> {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so readable by the promise of the type.
        Ok(unsafe { self.0.add(index).read() })
    }

    /// The address.
    pub fn address(self) -> *const T {
        self.0
    }
}

/// A C string: null or NUL-ended.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Text(*const c_char);

impl Text {
    /// The string at an address inside the program's arguments.
    ///
    /// # Safety
    /// Null or NUL-ended, for the time of the call.
    pub unsafe fn from_address(address: *const c_char) -> Text {
        Text(address)
    }

    /// The string, which must be there.
    pub fn get<'a>(self) -> Status<&'a CStr> {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so NUL-ended and the program's for the time of the call, which `'a` does not outlive in
        // any handler.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}
