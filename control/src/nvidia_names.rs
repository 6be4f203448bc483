//! mps-control under the name of NVIDIA's tool, for scripts and guides that call it.
//!
//! The directories are then below those of NVIDIA's variables. The sockets are in a folder of their own there: the genuine
//! driver takes a socket `control` in the directory itself for that of NVIDIA's daemon.

use crate::settings::{LOG_DIRECTORY, PIPE_DIRECTORY};
use mpsshim_proto::environment;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Name of NVIDIA's tool.
pub const CONTROL: &str = "nvidia-cuda-mps-control";
/// Directory of NVIDIA's daemon.
pub const NVIDIA_PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// Its log directory.
const NVIDIA_LOG_DIRECTORY: &str = "CUDA_MPS_LOG_DIRECTORY";

/// Whether a program was called by NVIDIA's name; `called` is its first argument.
pub fn is_called(called: Option<&OsStr>) -> bool {
    let file = called.and_then(|path| Path::new(path).file_name());
    file.is_some_and(|name| name == CONTROL)
}

/// NVIDIA's directory by its variable, or its default.
pub fn nvidia_pipe_directory(lookup: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    let set = lookup(NVIDIA_PIPE_DIRECTORY).filter(|value| !value.is_empty());
    set.map_or_else(|| environment::NVIDIA_PIPE_DIRECTORY.into(), PathBuf::from)
}

/// The value of a setting that is not set, when the program is called by NVIDIA's name. A user's logs are in the pipe
/// directory by default, since users cannot write /var/log.
pub fn default_of(
    setting: &str,
    lookup: impl Fn(&str) -> Option<OsString>,
    is_root: bool,
) -> Option<OsString> {
    match setting {
        PIPE_DIRECTORY => Some(
            nvidia_pipe_directory(lookup)
                .join(environment::FOLDER_IN_NVIDIAS)
                .into(),
        ),
        LOG_DIRECTORY => {
            let set = lookup(NVIDIA_LOG_DIRECTORY).filter(|value| !value.is_empty());
            set.or_else(|| is_root.then(|| "/var/log/nvidia-mps".into()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_file_s() {
        let called = |name: &str| is_called(Some(OsStr::new(name)));
        assert!(called("nvidia-cuda-mps-control") && called("/usr/bin/nvidia-cuda-mps-control"));
        assert!(!called("mps-control") && !called("nvidia-cuda-mps-control/x") && !is_called(None));
    }

    #[test]
    fn directories_are_below_nvidia_s() {
        let unset = |setting: &str, is_root| default_of(setting, |_| None, is_root);
        assert_eq!(
            unset(PIPE_DIRECTORY, false),
            Some("/tmp/nvidia-mps/mpsshim".into())
        );
        assert_eq!(
            unset(LOG_DIRECTORY, true),
            Some("/var/log/nvidia-mps".into())
        );
        assert_eq!(unset(LOG_DIRECTORY, false), None);
        let set = |name: &str| Some(OsString::from(format!("/x/{name}")));
        assert_eq!(
            default_of(PIPE_DIRECTORY, set, false),
            Some("/x/CUDA_MPS_PIPE_DIRECTORY/mpsshim".into())
        );
        assert_eq!(
            default_of(LOG_DIRECTORY, set, false),
            Some("/x/CUDA_MPS_LOG_DIRECTORY".into())
        );
        assert_eq!(default_of("MPSSHIM_LOG", set, true), None);
    }
}
