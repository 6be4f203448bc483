//! The library that takes the place of the CUDA driver inside a program.
//!
//! Its SONAME is `libcuda.so.1`, so that under `LD_PRELOAD` the loader resolves every request for the driver
//! to it; [`dlopen`] catches the requests that a SONAME does not: `libcuda.so` and absolute paths.
//!
//! The path of a call:
//!
//! 1. [`exports`]: the program calls an exported symbol, or the pointer that [`procaddr`] gave out, which is the
//!    same address. It jumps through the symbol's slot.
//! 2. Until `cuInit` has decided, the slot leads to the genuine driver ([`genuine`]), except for the few calls
//!    that the shim always answers itself ([`mode::OWN`]).
//! 3. `cuInit` ([`mode`]) looks for a daemon ([`connect`]) and writes all slots: without one the genuine driver's
//!    own functions (pass-through), with one the handlers of [`calls`] (proxy) and, for what those do not serve, a
//!    function that answers `CUDA_ERROR_NOT_SUPPORTED`.
//!
//! Nothing happens in a constructor, and nothing is printed unless `MPSSHIM_LOG` asks for it ([`log`]).

mod array;
mod calls;
mod capture;
mod connect;
mod context;
mod copying;
mod daemon;
mod default_stream;
mod direct;
mod dlopen;
mod event;
mod exports;
mod extents;
#[cfg(test)]
mod fake;
mod ffi;
mod gate;
mod genuine;
mod graph;
mod graph_host;
mod hostfn;
mod image;
mod jit;
mod known;
mod ldcache;
mod library;
mod log;
mod managed;
#[cfg(test)]
mod marks_tests;
mod memory;
mod mode;
mod module;
mod nvidia_mps;
mod objects;
mod own_stack;
mod pool;
mod pools;
mod printing;
mod procaddr;
mod refusal;
mod register;
mod settings;
mod shadow;
#[cfg(test)]
mod signature;
mod slots;
mod staging;
mod stream;
mod submit;
mod symbols;
mod tables;
mod teardown;
mod thread;
mod user_object;
mod virtual_memory;
mod wait;
mod waited;

/// Tells one shim from a genuine driver: [`genuine`] refuses a library that exports this. Returns the version,
/// NUL-terminated.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn mpsshim_version() -> *const std::ffi::c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
