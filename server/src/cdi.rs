//! A specification of the Container Device Interface (CDI) by which a container engine gives any container the library
//! and the daemon's sockets: <https://github.com/cncf-tags/container-device-interface>.

use crate::library::{self, LibraryError};
use crate::settings::{self, Settings};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The version of the specification that has what is used here.
const VERSION: &str = "0.6.0";
/// Vendor and class: engines know the one device as `mpsshim.io/gpu=all`.
const KIND: &str = "mpsshim.io/gpu";
/// The library in containers.
const LIBRARY: &str = "/usr/lib/mpsshim/libmpsshim.so";

/// Why there is no specification.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    /// No library.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A path that JSON cannot say.
    #[error("{0} is not UTF-8")]
    Path(PathBuf),
}

/// A whole file.
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
    /// There is no library, or a path is not UTF-8.
    pub fn new(settings: &Settings) -> Result<Spec, CdiError> {
        let library = library::find(settings.library.as_deref())?;
        let mount = |path: &Path, container_path, options| {
            let path = path.to_owned().into_os_string().into_string();
            let host_path = path.map_err(|path| CdiError::Path(path.into()))?;
            Ok::<_, CdiError>(Mount {
                host_path,
                container_path,
                options,
            })
        };
        let sockets = settings::DEFAULT_PIPE_DIRECTORY;
        let edits = Edits {
            env: [
                format!("LD_PRELOAD={LIBRARY}"),
                format!("{}={sockets}", settings::PIPE_DIRECTORY),
            ],
            mounts: [
                mount(&library, LIBRARY, &["ro", "nosuid", "nodev", "bind"])?,
                // Sockets in it can be connected to all the same, and no container puts others in their place.
                mount(
                    &settings.pipe_directory,
                    sockets,
                    &["ro", "nosuid", "nodev", "noexec", "bind"],
                )?,
            ],
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
