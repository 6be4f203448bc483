//! The environment variables the shim reads. A program that runs with raised privileges
//! (set-user-id) has none of them, as the loader ignores its own variables there.

use std::ffi::OsString;
use std::path::PathBuf;

/// The genuine driver's file, `MPSSHIM_CUDA_LIBRARY`.
pub fn cuda_library() -> Option<PathBuf> {
    read("MPSSHIM_CUDA_LIBRARY").map(PathBuf::from)
}

/// Whether `MPSSHIM_DISABLE` asks to pass every call through: set, and neither empty nor "0".
pub fn disabled() -> bool {
    read("MPSSHIM_DISABLE").is_some_and(|value| value != "0")
}

/// Where to log and what, `MPSSHIM_LOG`; see [`crate::log`].
pub fn log() -> Option<String> {
    read("MPSSHIM_LOG").map(|value| value.to_string_lossy().into_owned())
}

/// The loader's `LD_LIBRARY_PATH`.
pub fn library_path() -> Option<OsString> {
    read("LD_LIBRARY_PATH")
}

/// A variable that is set to something.
fn read(name: &str) -> Option<OsString> {
    // SAFETY: reads the auxiliary vector, which does not change.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    std::env::var_os(name).filter(|value| !value.is_empty())
}
