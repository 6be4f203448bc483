//! The files that make programs in a container clients: the library and the daemon's sockets. And a specification for
//! the Container Device Interface (CDI), by which container engines provide them:
//! <https://github.com/cncf-tags/container-device-interface>.

use crate::library::{self, LibraryError};
use crate::settings::{self, Settings};
use mpsshim_proto::directory;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The oldest version of the specification with the features used here. An engine that supports only older versions
/// silently ignores the file: Podman 4.3, as in Debian 12, supports up to 0.5.
const VERSION: &str = "0.3.0";
/// Vendor and class.
pub const KIND: &str = "mpsshim.io/gpu";
/// Name of the only device, as engines know it.
pub const DEVICE: &str = "mpsshim.io/gpu=all";
/// Path of the library in containers.
pub const LIBRARY: &str = "/usr/lib/mpsshim/libmpsshim.so";
/// The variable that makes the loader load it.
pub const PRELOAD: &str = "LD_PRELOAD";

/// Why nothing can be provided to containers.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    /// No library.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A path that JSON cannot represent.
    #[error("{0} is not UTF-8")]
    Path(PathBuf),
}

/// The environment and the mounts of a container.
#[derive(Debug)]
pub struct Injection {
    /// Names and values.
    pub env: [(&'static str, &'static str); 2],
    /// The library, and the folder of the sockets.
    pub mounts: [Mounted; 2],
}

/// A file or folder of this machine, for reading.
#[derive(Debug)]
pub struct Mounted {
    /// Path on this machine.
    pub host_path: String,
    /// Path in the container.
    pub container_path: &'static str,
    /// Whether the loader must be able to map it.
    pub is_code: bool,
}

impl Injection {
    /// For the library and the pipe directory of this machine.
    ///
    /// # Errors
    /// There is no library, or a path is not UTF-8.
    pub fn new(settings: &Settings) -> Result<Injection, CdiError> {
        let library = library::find(settings.library.as_deref())?;
        let mounted = |path: &Path, container_path, is_code| {
            let path = path.to_owned().into_os_string().into_string();
            let host_path = path.map_err(|path| CdiError::Path(path.into()))?;
            Ok::<_, CdiError>(Mounted {
                host_path,
                container_path,
                is_code,
            })
        };
        let sockets = directory::SYSTEM;
        Ok(Injection {
            env: [(PRELOAD, LIBRARY), (settings::PIPE_DIRECTORY, sockets)],
            mounts: [
                mounted(&library, LIBRARY, true)?,
                mounted(&settings.pipe_directory, sockets, false)?,
            ],
        })
    }
}

/// The content of a specification file.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    cdi_version: &'static str,
    kind: &'static str,
    devices: [Device; 1],
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: &'static str,
    container_edits: Edits,
}

#[derive(Debug, Serialize)]
struct Edits {
    env: [String; 2],
    mounts: [Mount; 2],
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: &'static str,
    options: &'static [&'static str],
}

impl Spec {
    /// For the library and the pipe directory of this machine.
    ///
    /// # Errors
    /// Those of [`Injection::new`].
    pub fn new(settings: &Settings) -> Result<Spec, CdiError> {
        let Injection { env, mounts } = Injection::new(settings)?;
        let edits = Edits {
            env: env.map(|(name, value)| format!("{name}={value}")),
            mounts: mounts.map(|mounted| Mount {
                host_path: mounted.host_path,
                container_path: mounted.container_path,
                options: if mounted.is_code {
                    &["ro", "nosuid", "nodev", "bind"]
                } else {
                    // Clients can connect to sockets in a read-only mount, and no container can replace them.
                    &["ro", "nosuid", "nodev", "noexec", "bind"]
                },
            }),
        };
        Ok(Spec {
            cdi_version: VERSION,
            kind: KIND,
            devices: [Device {
                name: "all",
                container_edits: edits,
            }],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_of_the_kind() {
        assert_eq!(DEVICE, format!("{KIND}=all"));
    }
}
