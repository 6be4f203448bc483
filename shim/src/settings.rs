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

/// The folder of the daemon's socket, `MPSSHIM_PIPE_DIRECTORY`.
pub fn pipe_directory() -> PathBuf {
    read("MPSSHIM_PIPE_DIRECTORY").map_or("/tmp/mpsshim".into(), PathBuf::from)
}

/// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` in hundredths of a percent; 0 when not set or no percentage.
pub fn active_thread_centipercent() -> u32 {
    let percent = read("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        .and_then(|value| value.to_str()?.trim().parse::<f64>().ok())
        .filter(|percent| *percent > 0.0 && *percent <= 100.0);
    percent.map_or(0, |percent| (percent * 100.0).round() as u32)
}

/// `CUDA_MPS_CLIENT_PRIORITY`; -1 when not set or no number.
pub fn client_priority() -> i32 {
    read("CUDA_MPS_CLIENT_PRIORITY")
        .and_then(|value| value.to_str()?.trim().parse().ok())
        .unwrap_or(-1)
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
