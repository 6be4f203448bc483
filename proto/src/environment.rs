//! Environment variables of the product: their names, and warnings about mistakes in an environment.
//!
//! The daemon's programs and the client's library read the same environment and give the same warnings.

use crate::handshake::{ACTIVE_THREAD_PERCENTAGE, CLIENT_PRIORITY, PINNED_DEVICE_MEM_LIMIT};
use crate::{limits, nearest};
use std::ffi::OsString;

/// Declares each name once, as a constant and as an element of [`NAMES`].
macro_rules! names {
    ($($(#[$description:meta])* $constant:ident = $name:literal;)*) => {
        $($(#[$description])* pub const $constant: &str = $name;)*

        /// The names of all settings that begin with [`PREFIX`].
        pub const NAMES: &[&str] = &[$($constant),*];
    };
}

/// Beginning of the names.
pub const PREFIX: &str = "MPSSHIM_";

names! {
    /// The configuration file.
    CONFIG = "MPSSHIM_CONFIG";
    /// Pipe directory of the daemon and its clients.
    PIPE_DIRECTORY = "MPSSHIM_PIPE_DIRECTORY";
    /// Where the logs are.
    LOG_DIRECTORY = "MPSSHIM_LOG_DIRECTORY";
    /// The genuine driver.
    CUDA_LIBRARY = "MPSSHIM_CUDA_LIBRARY";
    /// NVIDIA's management library.
    NVML_LIBRARY = "MPSSHIM_NVML_LIBRARY";
    /// Log filter.
    LOG = "MPSSHIM_LOG";
    /// Pass every call through.
    DISABLE = "MPSSHIM_DISABLE";
    /// Refuse to run programs without a session.
    REQUIRED = "MPSSHIM_REQUIRED";
    /// Threads that help a program copy.
    COPY_THREADS = "MPSSHIM_COPY_THREADS";
    /// How programs learn that their host code uses managed memory.
    MANAGED_FAULTS = "MPSSHIM_MANAGED_FAULTS";
    /// The server's executable.
    SERVER = "MPSSHIM_SERVER";
    /// The shim.
    LIBRARY = "MPSSHIM_LIBRARY";
    /// Maximum number of clients of a server.
    MAX_CLIENTS = "MPSSHIM_MAX_CLIENTS";
    /// How long idle threads of the server poll before they sleep.
    MAX_SPIN = "MPSSHIM_MAX_SPIN_US";
    /// Pinned host memory of the clients of a user.
    HOST_MEMORY = "MPSSHIM_HOST_MEMORY";
    /// Directory for device memory that finds no room in pinned host memory.
    MOVED_MEMORY_DIRECTORY = "MPSSHIM_MOVED_MEMORY_DIRECTORY";
    /// How completion markers are signalled.
    MARKS = "MPSSHIM_MARKS";
    /// Proxy or direct.
    MODE = "MPSSHIM_MODE";
    /// How the clients of several users are served.
    USERS = "MPSSHIM_USERS";
    /// When clients in direct mode take turns.
    TURNS = "MPSSHIM_TURNS";
    /// Whether clients in proxy mode may have more device memory together than the device has.
    OVERSUBSCRIPTION = "MPSSHIM_OVERSUBSCRIPTION";
    /// Device memory of each client that is never moved to host memory for other clients.
    DEVICE_MEM_GUARANTEE = "MPSSHIM_DEVICE_MEM_GUARANTEE";
    /// In which order the kernels of clients in proxy mode are served.
    SCHEDULING = "MPSSHIM_SCHEDULING";
    /// Whether programs that may have caused a fault are quarantined.
    QUARANTINE = "MPSSHIM_QUARANTINE";
    /// Where the library reports refusals and long waits.
    NOTICES = "MPSSHIM_NOTICES";
    /// Whether a program's kernels may run again in the next server.
    REPLAY = "MPSSHIM_REPLAY";
    /// Whether servers have standbys.
    STANDBY = "MPSSHIM_STANDBY";
    /// When the daemon asks a server that a restart left with clients whether these can move by now.
    MOVE_LATER = "MPSSHIM_MOVE_LATER";
    /// Most servers for single clients.
    OWN_SERVERS = "MPSSHIM_OWN_SERVERS";
    /// Whether multiprocessors can be reserved for clients.
    STATIC_PARTITIONING = "MPSSHIM_STATIC_PARTITIONING";
    /// Address of the metrics endpoint.
    METRICS = "MPSSHIM_METRICS";
}

/// Default pipe directory of NVIDIA's daemon.
pub const NVIDIA_PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";
/// Folder of the sockets in NVIDIA's pipe directory, if the daemon was started by the name of NVIDIA's tool. The genuine
/// driver takes a socket in that directory itself for that of NVIDIA's daemon.
pub const FOLDER_IN_NVIDIAS: &str = "mpsshim";

/// Variables of the project's tests and images, which no program of the product reads.
const OF_TESTS: [&str; 3] = ["MPSSHIM_BUILT", "MPSSHIM_SHIM", "MPSSHIM_TAG"];
/// Beginning of further such names.
const TEST_PREFIX: &str = "MPSSHIM_TEST_";

/// Most threads of [`COPY_THREADS`].
pub const MOST_COPY_THREADS: usize = 15;

/// The value of [`REPLAY`] by which a program promises that its kernels may run again from the point where it last waited.
pub const REPLAY_KERNELS: &str = "kernels";

/// Checks a value; the error completes the sentence that the setting begins.
type Check = fn(&str) -> Result<(), String>;

/// Settings whose invalid values are no errors of the programs that read them.
const CHECKS: [(&str, Check); 12] = [
    (ACTIVE_THREAD_PERCENTAGE, percentage),
    (CLIENT_PRIORITY, priority),
    (PINNED_DEVICE_MEM_LIMIT, memory_limits),
    (DEVICE_MEM_GUARANTEE, memory_guarantees),
    (COPY_THREADS, copy_threads),
    (MANAGED_FAULTS, managed_faults),
    (NOTICES, notices),
    (REPLAY, replay),
    (DISABLE, flag),
    (REQUIRED, flag),
    (STANDBY, flag),
    (STATIC_PARTITIONING, flag),
];

/// Warnings about an environment, sorted: names that begin with [`PREFIX`] and are no setting, and invalid values. An
/// empty variable counts as not set.
pub fn warnings(environment: impl Iterator<Item = (OsString, OsString)>) -> Vec<String> {
    let mut warnings: Vec<String> = environment
        .filter(|(_, value)| !value.is_empty())
        .filter_map(|(name, value)| {
            let name = name.to_string_lossy();
            warning(&name, &value.to_string_lossy())
        })
        .collect();
    warnings.sort_unstable();
    warnings
}

fn warning(name: &str, value: &str) -> Option<String> {
    if let Some((_, check)) = CHECKS.iter().find(|(checked, _)| *checked == name) {
        let why = check(value.trim()).err()?;
        return Some(printable(&format!("{name}={value} {why}")));
    }
    let is_known = NAMES.contains(&name) || OF_TESTS.contains(&name);
    if is_known || name.starts_with(TEST_PREFIX) || !name.starts_with(PREFIX) {
        return None;
    }
    let near = nearest_name(name);
    let near = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
    Some(printable(&format!("{name} is not a setting{near}")))
}

/// The setting nearest to an unknown name, or the shortest setting that begins with it.
fn nearest_name(name: &str) -> Option<&'static str> {
    let rest = name.strip_prefix(PREFIX)?;
    let rests = || {
        let names = NAMES.iter();
        names.filter_map(|name| name.strip_prefix(PREFIX))
    };
    let continues = |candidate: &&str| rest.len() > 2 && candidate.starts_with(rest);
    let found = nearest::of(rest, rests())
        .or_else(|| rests().filter(continues).min_by_key(|name| name.len()))?;
    NAMES
        .iter()
        .find(|name| name.strip_prefix(PREFIX) == Some(found))
        .copied()
}

/// A text without characters that would garble a terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// A percentage in hundredths of a percent; `None` unless it is above 0 and at most 100.
pub fn centipercent(text: &str) -> Option<u32> {
    let percent: f64 = text.trim().parse().ok()?;
    // 33.3 is 3,330, though binary fractions only come near to it; a trace is not nothing.
    let hundredths = || ((percent * 100.0 + 1e-6) as u32).max(1);
    (percent > 0.0 && percent <= 100.0).then(hundredths)
}

fn percentage(value: &str) -> Result<(), String> {
    let is_valid = centipercent(value).is_some();
    let why = "is ignored: a percentage is a number above 0 and at most 100";
    is_valid.then_some(()).ok_or_else(|| why.to_owned())
}

fn priority(value: &str) -> Result<(), String> {
    match value.parse::<i32>() {
        Ok(0 | 1) => Ok(()),
        Ok(number) => Err(format!(
            "counts as {} in a program and is ignored by the daemon: it must be 0 or 1",
            number.clamp(0, 1)
        )),
        Err(_) => Err("is ignored: it must be 0 or 1".to_owned()),
    }
}

fn memory_limits(value: &str) -> Result<(), String> {
    match limits::of_devices(value).find_map(Result::err) {
        None => Ok(()),
        Some(part) => Err(format!(
            "is ignored by the daemon, and programs do not run with it: \"{part}\" is not DEVICE=AMOUNT"
        )),
    }
}

fn memory_guarantees(value: &str) -> Result<(), String> {
    match limits::of_devices(value).find_map(Result::err) {
        None => Ok(()),
        Some(part) => Err(format!("is ignored: \"{part}\" is not DEVICE=AMOUNT")),
    }
}

fn copy_threads(value: &str) -> Result<(), String> {
    let is_valid = value
        .parse()
        .is_ok_and(|threads: usize| threads <= MOST_COPY_THREADS);
    let why = || format!("is ignored: it is not a number from 0 to {MOST_COPY_THREADS}");
    is_valid.then_some(()).ok_or_else(why)
}

fn managed_faults(value: &str) -> Result<(), String> {
    match value {
        "auto" | "userfaultfd" | "signal" => Ok(()),
        _ => Err("is ignored: it is not auto, userfaultfd or signal".to_owned()),
    }
}

fn notices(value: &str) -> Result<(), String> {
    match value {
        "stderr" | "off" => Ok(()),
        _ => Err("is ignored: it is not stderr or off".to_owned()),
    }
}

fn replay(value: &str) -> Result<(), String> {
    match value {
        REPLAY_KERNELS | "off" => Ok(()),
        _ => Err("is ignored: it is not kernels or off".to_owned()),
    }
}

fn flag(value: &str) -> Result<(), String> {
    match value {
        "0" | "1" | "true" => Ok(()),
        _ => Err("counts as 1: it is neither 0 nor 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(environment: &[(&str, &str)]) -> Vec<String> {
        let pairs = environment.iter();
        warnings(pairs.map(|(name, value)| (name.into(), value.into())))
    }

    #[test]
    fn unknown_names_have_the_nearest_known_one() {
        for (name, expected) in [
            ("MPSSHIM_PIPE_DIR", "MPSSHIM_PIPE_DIRECTORY"),
            ("MPSSHIM_PIPE_DIRECTROY", "MPSSHIM_PIPE_DIRECTORY"),
            ("MPSSHIM_DISABEL", "MPSSHIM_DISABLE"),
            ("MPSSHIM_LOGS", "MPSSHIM_LOG"),
            ("MPSSHIM_MAX_SPIN", "MPSSHIM_MAX_SPIN_US"),
        ] {
            let said = format!("{name} is not a setting; did you mean {expected}?");
            assert_eq!(of(&[(name, "1")]), [said]);
        }
        let said = ["MPSSHIM_FROBNICATE is not a setting"];
        assert_eq!(of(&[("MPSSHIM_FROBNICATE", "1")]), said);
        assert_eq!(
            of(&[("MPSSHIM_A\u{1b}[2J", "1")]).concat().find('\u{1b}'),
            None
        );
    }

    #[test]
    fn known_and_foreign_names_are_silent() {
        for name in NAMES.iter().chain(&OF_TESTS) {
            assert_eq!(of(&[(name, "")]), [""; 0]);
        }
        let silent = [
            ("MPSSHIM_MODE", "proxy,1=direct"),
            ("MPSSHIM_TEST_DRIVER", "/a"),
            ("MPSSHIM_BUILT", "1"),
            ("MPSSHIM_UNKNOWN", ""),
            ("MPSSHIMX", "1"),
            ("PATH", "/bin"),
        ];
        assert_eq!(of(&silent), [""; 0]);
    }

    #[test]
    fn invalid_values_are_named_with_their_effect() {
        for (setting, why) in [
            (
                ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "abc"),
                "is ignored: a percentage is a number above 0 and at most 100",
            ),
            (
                ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "250"),
                "is ignored: a percentage is a number above 0 and at most 100",
            ),
            (
                ("CUDA_MPS_CLIENT_PRIORITY", "7"),
                "counts as 1 in a program and is ignored by the daemon: it must be 0 or 1",
            ),
            (
                ("CUDA_MPS_CLIENT_PRIORITY", "urgent"),
                "is ignored: it must be 0 or 1",
            ),
            (
                ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G,1"),
                "is ignored by the daemon, and programs do not run with it: \"1\" is not DEVICE=AMOUNT",
            ),
            (
                ("MPSSHIM_COPY_THREADS", "16"),
                "is ignored: it is not a number from 0 to 15",
            ),
            (
                ("MPSSHIM_MANAGED_FAULTS", "telepathy"),
                "is ignored: it is not auto, userfaultfd or signal",
            ),
            (
                ("MPSSHIM_REPLAY", "1"),
                "is ignored: it is not kernels or off",
            ),
            (
                ("MPSSHIM_DISABLE", "no"),
                "counts as 1: it is neither 0 nor 1",
            ),
        ] {
            let (name, value) = setting;
            assert_eq!(of(&[setting]), [format!("{name}={value} {why}")]);
        }
        let valid = [
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", " 33.3 "),
            ("CUDA_MPS_CLIENT_PRIORITY", "1"),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G"),
            ("MPSSHIM_COPY_THREADS", "15"),
            ("MPSSHIM_MANAGED_FAULTS", "signal"),
            ("MPSSHIM_REPLAY", "kernels"),
            ("MPSSHIM_DISABLE", "0"),
        ];
        assert_eq!(of(&valid), [""; 0]);
    }
}
