//! Where the library to preload is.

use crate::elf;
use crate::settings;
use crate::spawn::beside_this_executable;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Its file name.
const NAME: &str = "libmpsshim.so";

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// It is at none of these places.
    #[error("cannot find the library {0}; name it with {name} or `mps-run --shim`", name = settings::LIBRARY)]
    Missing(String),
    /// The path leads nowhere.
    #[error("cannot resolve {path}: {source}")]
    Unresolved {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The loader would print an error in each program and continue without the library.
    #[error("{0} cannot be preloaded: {1}")]
    NotLoadable(PathBuf, &'static str),
    /// Not a path for `LD_PRELOAD`.
    #[error("{0} cannot be preloaded: the loader treats a space or a colon as the end of the path")]
    Separator(PathBuf),
}

/// The library at the path that was given, or the one installed with this program; with links in the path resolved.
pub fn find(named: Option<&Path>) -> Result<PathBuf, LibraryError> {
    let candidates = match named {
        Some(path) => vec![path.to_owned()],
        None => ["", "../lib/mpsshim", "../lib"]
            .iter()
            .map(|place| beside_this_executable(&Path::new(place).join(NAME).to_string_lossy()))
            .collect(),
    };
    let Some(library) = candidates.iter().find(|path| path.is_file()) else {
        let looked: Vec<String> = candidates
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        return Err(LibraryError::Missing(looked.join(" or ")));
    };
    let path = library
        .canonicalize()
        .map_err(|source| LibraryError::Unresolved {
            path: library.clone(),
            source,
        })?;
    let separates = |byte: &u8| b" :".contains(byte);
    if path.as_os_str().as_bytes().iter().any(separates) {
        return Err(LibraryError::Separator(path));
    }
    if let Some(why) = elf::not_preloadable(&path) {
        return Err(LibraryError::NotLoadable(path, why));
    }
    Ok(path)
}
