//! The genuine driver: found as the loader would have found it, opened by its absolute path.
//!
//! The loader does not compare a path with the SONAMEs of loaded libraries, so this bypasses the shim. `RTLD_LOCAL` keeps the
//! driver's symbols out of the program's sight.

use std::ffi::{CStr, CString, OsStr, c_void};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use mpsshim_api::cuda::{CUDA_ERROR_NO_DEVICE, CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, CUresult};

use crate::settings;

use crate::loader::{dlopen, ldcache};

const LIBRARY: &str = "libcuda.so.1";

/// Folders searched after `LD_LIBRARY_PATH` and the loader's cache: the loader's own, then those of containers and WSL.
const FOLDERS: [&str; 8] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
];

/// Why there is no genuine driver.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The library that the user named is not usable. No other is tried in its place.
    #[error(
        "MPSSHIM_CUDA_LIBRARY names {path:?}, which cannot be used as the CUDA driver: {reason}"
    )]
    Configured { path: PathBuf, reason: String },
    /// None of the loader's folders contains one.
    #[error(
        "no CUDA driver ({LIBRARY}) in LD_LIBRARY_PATH, the loader's cache and its folders; set \
         MPSSHIM_CUDA_LIBRARY to its path"
    )]
    NotFound,
}

impl Error {
    /// The status of `cuInit`. A program on a machine without a driver would not have found a `libcuda.so.1` at all;
    /// the nearest status is that there is no device. A library that the user named but that does not open is an error
    /// of its own.
    pub fn status(&self) -> CUresult {
        match self {
            Self::Configured { .. } => CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
            Self::NotFound => CUDA_ERROR_NO_DEVICE,
        }
    }
}

/// The opened driver.
#[derive(Debug)]
pub struct Driver {
    handle: *mut c_void,
    path: PathBuf,
}

// SAFETY: the handle is only given to dlsym, which any thread may call; it is never closed.
unsafe impl Sync for Driver {}
// SAFETY: as above.
unsafe impl Send for Driver {}

impl Driver {
    /// The address of an exported function.
    pub fn symbol(&self, name: &str) -> Option<*const ()> {
        lookup(self.handle, &CString::new(name).ok()?)
    }
}

/// The genuine driver, opened by the first call; a failure is final.
pub fn driver() -> Result<&'static Driver, &'static Error> {
    static DRIVER: OnceLock<Result<Driver, Error>> = OnceLock::new();
    DRIVER.get_or_init(find).as_ref()
}

/// The address of one of the genuine driver's functions. `None` when it has no such function or when there is no
/// genuine driver.
pub fn symbol(name: &str) -> Option<*const ()> {
    driver().ok()?.symbol(name)
}

fn find() -> Result<Driver, Error> {
    let found = match settings::cuda_library() {
        Some(path) => open(&path).map_err(|reason| Error::Configured { path, reason }),
        None => candidates()
            .iter()
            .find_map(|path| open(path).ok())
            .ok_or(Error::NotFound),
    };
    match &found {
        Ok(driver) => tracing::debug!(path = %driver.path.display(), "genuine driver"),
        Err(error) => tracing::warn!("{error}"),
    }
    found
}

/// The files that may be the driver, in the loader's order. Only those that exist.
fn candidates() -> Vec<PathBuf> {
    let library_path = settings::library_path().unwrap_or_default().into_vec();
    let cache = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
    let mut files: Vec<PathBuf> = folders_of(&library_path)
        .map(|folder| folder.join(LIBRARY))
        .collect();
    files.extend(ldcache::files_of(&cache, LIBRARY));
    files.extend(FOLDERS.map(|folder| Path::new(folder).join(LIBRARY)));
    files.retain(|file| file.exists());
    files
}

/// The folders of an `LD_LIBRARY_PATH`; an empty one is the current folder.
fn folders_of(library_path: &[u8]) -> impl Iterator<Item = PathBuf> {
    let set = !library_path.is_empty();
    library_path
        .split(|&byte| byte == b':' || byte == b';')
        .filter(move |_| set)
        .map(|folder| {
            PathBuf::from(OsStr::from_bytes(if folder.is_empty() {
                b"."
            } else {
                folder
            }))
        })
}

/// Opens a driver; the error tells why the file is not one.
fn open(path: &Path) -> Result<Driver, String> {
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: the program requested the driver, its constructors included.
    let handle = unsafe { dlopen::open(&name, libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: dlerror returns null or a C string that lives until this thread's next call of its kind.
        let error = unsafe { libc::dlerror().as_ref().map(|error| CStr::from_ptr(error)) };
        return Err(error.map_or("dlopen failed".into(), |error| {
            error.to_string_lossy().into_owned()
        }));
    }
    // A link to this very file yields the loaded object itself, a copy another one: both carry the mark.
    if lookup(handle, c"mpsshim_version").is_some() {
        // SAFETY: the handle was just opened and nothing was taken from it.
        unsafe { libc::dlclose(handle) };
        return Err("it is mpsshim itself".into());
    }
    if lookup(handle, c"cuInit").is_none() {
        // SAFETY: as above.
        unsafe { libc::dlclose(handle) };
        return Err("it exports no cuInit".into());
    }
    Ok(Driver { handle, path })
}

fn lookup(handle: *mut c_void, name: &CStr) -> Option<*const ()> {
    // SAFETY: the handle is open and the name a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!address.is_null()).then_some(address.cast_const().cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_path_is_split_as_the_loader_does() {
        let folders: Vec<_> = folders_of(b"/a:/b;/c::rel").collect();
        assert_eq!(folders, ["/a", "/b", "/c", ".", "rel"].map(PathBuf::from));
        assert_eq!(folders_of(b"").count(), 0);
    }

    #[test]
    fn what_is_no_driver_is_refused_by_name() {
        let error = open(Path::new("/nonexistent/libcuda.so.1")).unwrap_err();
        assert!(error.contains("/nonexistent/libcuda.so.1"), "{error}");
        let other = open(Path::new("/lib/x86_64-linux-gnu/libm.so.6"));
        assert!(other.is_err(), "libm is no driver");
    }
}
