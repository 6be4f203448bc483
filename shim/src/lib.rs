//! The library that takes the place of the CUDA driver inside a program.
//!
//! Its SONAME is `libcuda.so.1`, so that under `LD_PRELOAD` the loader resolves every request for the driver
//! to it; [`loader::dlopen`] catches the requests that a SONAME does not: `libcuda.so` and absolute paths.
//!
//! The path of a call:
//!
//! 1. [`loader::exports`]: the program calls an exported symbol, or the pointer that [`loader::procaddr`] gave out, which is the
//!    same address. It jumps through the symbol's slot.
//! 2. Until `cuInit` has decided, the slot leads to the genuine driver ([`loader::genuine`]), except for the few calls
//!    that the shim always answers itself ([`mode::OWN`]).
//! 3. `cuInit` ([`mode`]) looks for a daemon ([`connect`]) and writes all slots: without one the genuine driver's
//!    own functions (pass-through), with one the handlers of [`proxy::calls`] and, for entry points without a
//!    handler, a function that answers `CUDA_ERROR_NOT_SUPPORTED`, or in direct mode the genuine functions and the
//!    wrappers of [`direct`].
//!
//! A few functions of the C library are interposed besides, for registered memory: [`loader::signals`],
//! [`loader::transfers`], [`loader::mappings`]. Functions of NVIDIA's management library list clients ([`nvml`]), which
//! [`loader::dlsym`] and exports give to programs.
//!
//! Nothing happens in a constructor, and nothing is printed unless `MPSSHIM_LOG` asks for it ([`log`]).

use mpsshim_proto::release::Note;

mod connect;
mod daemon;
mod direct;
mod fault_heap;
mod ffi;
mod loader;
mod log;
mod mode;
mod notices;
mod nvidia_mps;
mod nvml;
mod proxy;
mod refusal;
mod settings;
#[cfg(test)]
mod signature;
mod store_hold;
mod thread;

/// Tells one shim from a genuine driver: [`loader::genuine`] refuses a library that exports this. Returns the version,
/// NUL-terminated.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn mpsshim_version() -> *const std::ffi::c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Names the release in the file, for `mps-control doctor`.
#[used]
#[cfg_attr(not(test), unsafe(link_section = ".note.mpsshim"))]
static RELEASE: Note = Note::of(env!("CARGO_PKG_VERSION"));
