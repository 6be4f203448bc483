//! The loader's cache of libraries, `/etc/ld.so.cache`, in the format glibc has written since 2.2.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// Precedes [`MAGIC`] in a cache that old loaders can read too.
const OLD_MAGIC: &[u8] = b"ld.so-1.7.0\0";
const OLD_HEADER: usize = 16;
const OLD_ENTRY: usize = 12;
const HEADER: usize = 48;
const ENTRY: usize = 24;
/// An entry's flags for a 64-bit x86 library of glibc.
const X86_64: u32 = 0x0303;

/// The files that the cache names for `library`, those of this processor first. A truncated or damaged cache yields its
/// readable entries.
pub fn files_of(cache: &[u8], library: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    collect(cache, library.as_bytes(), &mut found);
    found.sort_by_key(|&(flags, _)| flags != X86_64);
    found
        .into_iter()
        .map(|(_, file)| PathBuf::from(OsStr::from_bytes(file)))
        .collect()
}

fn collect<'a>(cache: &'a [u8], library: &[u8], found: &mut Vec<(u32, &'a [u8])>) -> Option<()> {
    let cache = cache.get(start(cache)?..)?;
    let count = number(cache, MAGIC.len())?;
    for index in 0..count as usize {
        let entry = HEADER.checked_add(index.checked_mul(ENTRY)?)?;
        let flags = number(cache, entry)?;
        let name = string(cache, number(cache, entry + 4)?)?;
        let file = string(cache, number(cache, entry + 8)?)?;
        if name == library {
            found.push((flags, file));
        }
    }
    Some(())
}

/// Where the present format begins: at once, or aligned behind the old one.
fn start(cache: &[u8]) -> Option<usize> {
    let start = if cache.starts_with(OLD_MAGIC) {
        let entries = number(cache, OLD_MAGIC.len())? as usize;
        OLD_HEADER
            .checked_add(entries.checked_mul(OLD_ENTRY)?)?
            .checked_next_multiple_of(8)?
    } else {
        0
    };
    cache.get(start..)?.starts_with(MAGIC).then_some(start)
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn string(bytes: &[u8], at: u32) -> Option<&[u8]> {
    bytes.get(at as usize..)?.split(|&byte| byte == 0).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache with the given (flags, name, file) entries.
    fn cache(entries: &[(u32, &str, &str)]) -> Vec<u8> {
        let mut strings = Vec::new();
        let mut table = Vec::new();
        let base = HEADER + entries.len() * ENTRY;
        for (flags, name, file) in entries {
            table.extend(flags.to_le_bytes());
            for text in [name, file] {
                table.extend(((base + strings.len()) as u32).to_le_bytes());
                strings.extend(text.as_bytes());
                strings.push(0);
            }
            table.extend([0; 12]);
        }
        let mut cache = MAGIC.to_vec();
        cache.extend((entries.len() as u32).to_le_bytes());
        cache.extend((strings.len() as u32).to_le_bytes());
        cache.resize(HEADER, 0);
        cache.extend(table);
        cache.extend(strings);
        cache
    }

    const ENTRIES: &[(u32, &str, &str)] = &[
        (0x0003, "libcuda.so.1", "/lib32/libcuda.so.1"),
        (0x0303, "libc.so.6", "/lib64/libc.so.6"),
        (0x0303, "libcuda.so.1", "/lib64/libcuda.so.1"),
    ];

    #[test]
    fn this_processors_library_comes_first() {
        let found = files_of(&cache(ENTRIES), "libcuda.so.1");
        assert_eq!(
            found,
            ["/lib64/libcuda.so.1", "/lib32/libcuda.so.1"].map(PathBuf::from)
        );
        assert!(files_of(&cache(ENTRIES), "libcuda.so").is_empty());
    }

    #[test]
    fn the_old_format_may_precede() {
        let mut both = OLD_MAGIC.to_vec();
        both.extend(1_u32.to_le_bytes());
        both.extend([0; OLD_ENTRY]);
        both.resize(both.len().next_multiple_of(8), 0);
        both.extend(cache(ENTRIES));
        assert_eq!(files_of(&both, "libcuda.so.1").len(), 2);
    }

    #[test]
    fn a_damaged_cache_is_no_reason_to_fail() {
        let whole = cache(ENTRIES);
        for len in 0..whole.len() {
            assert!(files_of(&whole[..len], "libcuda.so.1").len() <= 2);
        }
        let mut wild = whole;
        wild[MAGIC.len()..MAGIC.len() + 4].fill(0xff);
        let _ = files_of(&wild, "libcuda.so.1");
        assert!(files_of(b"something else", "libcuda.so.1").is_empty());
    }

    #[test]
    fn the_cache_of_this_machine_is_understood() {
        let Ok(bytes) = std::fs::read("/etc/ld.so.cache") else {
            return;
        };
        let files = files_of(&bytes, "libc.so.6");
        assert!(files.iter().any(|file| file.exists()), "{files:?}");
    }
}
