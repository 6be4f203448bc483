//! The environment variables that the shim reads. In a program with raised privileges (set-user-id) they are ignored, as
//! the loader ignores its own variables there.

use mpsshim_proto::direct::{DIRECT, PROXY};
use mpsshim_proto::environment;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

pub use mpsshim_proto::handshake::{
    ACTIVE_THREAD_PERCENTAGE, CLIENT_PRIORITY, PINNED_DEVICE_MEM_LIMIT, SM_PARTITION,
};

/// The genuine driver's file, `MPSSHIM_CUDA_LIBRARY`.
pub fn cuda_library() -> Option<PathBuf> {
    read(environment::CUDA_LIBRARY).map(PathBuf::from)
}

/// Whether `MPSSHIM_DISABLE` asks to pass every call through: set, and neither empty nor "0".
pub fn disabled() -> bool {
    read(environment::DISABLE).is_some_and(|value| value != "0")
}

/// The folder of the daemon's socket, `MPSSHIM_PIPE_DIRECTORY`.
pub fn pipe_directory() -> Option<PathBuf> {
    read(environment::PIPE_DIRECTORY).map(PathBuf::from)
}

/// Where a session's sockets and the like are, `XDG_RUNTIME_DIR`.
pub fn runtime_directory() -> Option<OsString> {
    read("XDG_RUNTIME_DIR")
}

/// Whether the program must not run without a session that has its limits, `MPSSHIM_REQUIRED`: set, and neither empty nor
/// "0".
pub fn required() -> bool {
    read(environment::REQUIRED).is_some_and(|value| value != "0")
}

/// The mode that the program asks for, `MPSSHIM_MODE`, as in [`mpsshim_proto::handshake::ClientHello::mode`]. Where it
/// is not set and a tool [injects itself](injected), direct mode.
///
/// # Errors
/// The value, if it is no mode.
pub fn mode() -> Result<u32, String> {
    let value = read(environment::MODE).map(|value| value.to_string_lossy().into_owned());
    mode_of(value.as_deref(), injected().is_some())
}

fn mode_of(asked: Option<&str>, is_injected: bool) -> Result<u32, String> {
    match asked {
        // In proxy mode the tool would see none of the program's work.
        None if is_injected => Ok(DIRECT),
        None => Ok(0),
        Some("proxy") => Ok(PROXY),
        Some("direct") => Ok(DIRECT),
        Some(other) => Err(other.to_owned()),
    }
}

/// The library of a profiler or debugger that the driver loads into the program in `cuInit`, `CUDA_INJECTION64_PATH`.
pub fn injected() -> Option<OsString> {
    read("CUDA_INJECTION64_PATH")
}

/// Whether direct mode was chosen for the sake of a tool.
pub fn is_direct_for_a_tool() -> bool {
    read(environment::MODE).is_none() && injected().is_some()
}

/// `CUDA_VISIBLE_DEVICES`, also if it is empty: then there are none.
pub fn visible_devices() -> Option<Vec<u8>> {
    // SAFETY: reads the auxiliary vector, which does not change.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    std::env::var_os("CUDA_VISIBLE_DEVICES").map(OsString::into_vec)
}

/// Whether each context gets the percentage that is set when it is created, and the process as such none:
/// `CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING`.
pub fn percentage_per_context() -> bool {
    read("CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING")
        .is_some_and(|value| value != "0")
}

/// The folder of the socket of NVIDIA's control daemon, `CUDA_MPS_PIPE_DIRECTORY`.
pub fn nvidia_pipe_directory() -> Option<OsString> {
    read("CUDA_MPS_PIPE_DIRECTORY")
}

/// The static partition that the program names, [`SM_PARTITION`].
pub fn sm_partition() -> Option<Vec<u8>> {
    read(SM_PARTITION).map(OsString::into_vec)
}

/// [`PINNED_DEVICE_MEM_LIMIT`].
pub fn memory_limits() -> Option<String> {
    read(PINNED_DEVICE_MEM_LIMIT).map(|value| value.to_string_lossy().into_owned())
}

/// A limit whose setting is invalid, with its value.
pub fn nonsense_limit() -> Option<String> {
    let is_nonsense = |name: &str| match name {
        ACTIVE_THREAD_PERCENTAGE => active_thread_centipercent() == 0,
        _ => !matches!(client_priority(), 0 | 1),
    };
    [ACTIVE_THREAD_PERCENTAGE, CLIENT_PRIORITY]
        .into_iter()
        .find_map(|name| Some((name, read(name)?)).filter(|_| is_nonsense(name)))
        .map(|(name, value)| format!("{name}={}", value.to_string_lossy()))
}

/// [`ACTIVE_THREAD_PERCENTAGE`] in hundredths of a percent; 0 when not set or no percentage.
pub fn active_thread_centipercent() -> u32 {
    let percent = read(ACTIVE_THREAD_PERCENTAGE);
    let percent = percent.and_then(|value| environment::centipercent(value.to_str()?));
    percent.unwrap_or(0)
}

/// [`CLIENT_PRIORITY`]; -1 when not set or no number.
pub fn client_priority() -> i32 {
    read(CLIENT_PRIORITY)
        .and_then(|value| value.to_str()?.trim().parse().ok())
        .unwrap_or(-1)
}

/// Threads that help with copies, `MPSSHIM_COPY_THREADS`; `None` when not set or no number up to 15.
pub fn copy_threads() -> Option<usize> {
    let value = read(environment::COPY_THREADS)?;
    let threads = value.to_str().and_then(|value| value.trim().parse().ok());
    threads.filter(|threads| *threads <= environment::MOST_COPY_THREADS)
}

/// How the program learns that the host uses managed memory that is on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ManagedFaults {
    /// By userfaultfd if the kernel allows it.
    Auto,
    Userfaultfd,
    Signal,
}

/// `MPSSHIM_MANAGED_FAULTS`.
pub fn managed_faults() -> ManagedFaults {
    let Some(value) = read(environment::MANAGED_FAULTS) else {
        return ManagedFaults::Auto;
    };
    match value.to_str().map(str::trim) {
        Some("userfaultfd") => ManagedFaults::Userfaultfd,
        Some("signal") => ManagedFaults::Signal,
        _ => ManagedFaults::Auto,
    }
}

/// Whether launches return when their kernels have ended, `CUDA_LAUNCH_BLOCKING`: a number other than 0.
pub fn launch_blocking() -> bool {
    read("CUDA_LAUNCH_BLOCKING")
        .and_then(|value| value.to_str()?.trim().parse::<i64>().ok())
        .is_some_and(|value| value != 0)
}

/// Log filter and file, `MPSSHIM_LOG`; see [`crate::log`].
pub fn log() -> Option<String> {
    read(environment::LOG).map(|value| value.to_string_lossy().into_owned())
}

/// Whether refusals and long waits are reported on standard error, `MPSSHIM_NOTICES`.
pub fn notices() -> bool {
    read(environment::NOTICES).is_some_and(|value| value == "stderr")
}

/// Whether the program's kernels may run again from the point where it last waited: `MPSSHIM_REPLAY` is `kernels`.
pub fn replays_kernels() -> bool {
    read(environment::REPLAY).is_some_and(|value| {
        let value = value.to_str().map(str::trim);
        value == Some(environment::REPLAY_KERNELS)
    })
}

/// Warnings about unknown names and invalid values in the program's environment.
pub fn warnings() -> Vec<String> {
    environment::warnings(std::env::vars_os())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_that_injects_itself_gets_direct_mode_unless_another_is_asked_for() {
        let none = Ok(0);
        assert_eq!(
            [mode_of(None, false), mode_of(None, true)],
            [none, Ok(DIRECT)]
        );
        for is_injected in [false, true] {
            assert_eq!(mode_of(Some("proxy"), is_injected), Ok(PROXY));
            assert_eq!(mode_of(Some("direct"), is_injected), Ok(DIRECT));
            assert_eq!(mode_of(Some("shared"), is_injected), Err("shared".into()));
        }
    }
}
