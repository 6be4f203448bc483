//! Predicts the loader: whether a library can be preloaded, and whether a program will preload it.

use mpsshim_proto::release::{self, Release, ServerRelease};
use object::elf::{EM_X86_64, ET_DYN, FileHeader64, PT_INTERP};
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{Endianness, FileKind, Object, ObjectSection, ReadCache};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bits of a mode that give a program another user or group (`inode(7)`).
const SET_USER: u32 = 0o4000;
const SET_GROUP: u32 = 0o2000;

struct Elf {
    is_library: bool,
    /// A dynamic loader loads it.
    is_dynamic: bool,
}

/// `Err`: not for x86-64, in words. `Ok(None)`: no ELF file.
fn read(path: &Path) -> Result<Option<Elf>, &'static str> {
    let Ok(file) = File::open(path) else {
        return Ok(None);
    };
    let cache = ReadCache::new(file);
    match FileKind::parse(&cache) {
        Ok(FileKind::Elf64) => {}
        Ok(FileKind::Elf32) => return Err("it is a 32-bit file"),
        _ => return Ok(None),
    }
    let Ok(header) = FileHeader64::<Endianness>::parse(&cache) else {
        return Ok(None);
    };
    let Ok(endian) = header.endian() else {
        return Ok(None);
    };
    if header.e_machine(endian) != EM_X86_64 {
        return Err("it is for another kind of processor");
    }
    let segments = header.program_headers(endian, &cache).unwrap_or_default();
    Ok(Some(Elf {
        is_library: header.e_type(endian) == ET_DYN,
        is_dynamic: segments.iter().any(|s| s.p_type(endian) == PT_INTERP),
    }))
}

/// The release that a library names in its note; `None`: it names none.
pub fn release(library: &Path) -> Option<Release> {
    read_note(&File::open(library).ok()?, Release::read)
}

/// The release that a server names in its note; `None`: it names none.
pub fn server_release(server: &File) -> Option<ServerRelease> {
    read_note(server, ServerRelease::read)
}

fn read_note<T>(file: &File, read: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
    let cache = ReadCache::new(file);
    let file = ElfFile64::<Endianness, _>::parse(&cache).ok()?;
    let section = file.section_by_name(release::SECTION)?;
    read(section.data().ok()?)
}

/// Why a file cannot be preloaded, in words; `None`: it can.
pub fn not_preloadable(library: &Path) -> Option<&'static str> {
    match read(library) {
        Err(why) => Some(why),
        Ok(Some(elf)) if elf.is_library => None,
        Ok(_) => Some("it is not a shared library"),
    }
}

/// Why the loader will not preload anything into a program, in words; `None`: it will, or there is no such program, or it
/// is a script.
pub fn not_preloading(program: &OsStr) -> Option<&'static str> {
    let path = find(program)?;
    let meta = path.metadata().ok()?;
    let becomes = |bit: u32, owner: u32, own: u32| meta.mode() & bit != 0 && owner != own;
    let (user, group) = (nix::unistd::getuid(), nix::unistd::getgid());
    if becomes(SET_USER, meta.uid(), user.as_raw())
        || becomes(SET_GROUP, meta.gid(), group.as_raw())
    {
        return Some("it is set-user-ID or set-group-ID, and the loader ignores LD_PRELOAD then");
    }
    match read(&path) {
        Err(why) => Some(why),
        Ok(Some(elf)) if !elf.is_dynamic => Some("it is statically linked"),
        Ok(_) => None,
    }
}

/// Finds a program as `execvp` does.
fn find(program: &OsStr) -> Option<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 || path.is_absolute() {
        return Some(path.to_owned());
    }
    let places = std::env::var_os("PATH")?;
    std::env::split_paths(&places)
        .map(|place| place.join(path))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_can_be_preloaded_and_what_preloads() {
        let here = std::env::current_exe().expect("this program");
        assert_eq!(not_preloading(here.as_os_str()), None);
        assert_eq!(not_preloading(OsStr::new("sh")), None);
        assert_eq!(not_preloading(OsStr::new("no-such-program-anywhere")), None);
        let place = tempfile::tempdir().expect("a folder");
        let script = place.path().join("script");
        fs::write(&script, "#!/bin/sh\n").expect("write");
        assert_eq!(not_preloading(script.as_os_str()), None);
        assert_eq!(not_preloadable(&script), Some("it is not a shared library"));
        // The same program, changed to another class or machine.
        let mut program = fs::read(&here).expect("read");
        for (at, byte, why) in [
            (18, 183, "it is for another kind of processor"),
            (4, 1, "it is a 32-bit file"),
        ] {
            program[at] = byte;
            let other = place.path().join("other");
            fs::write(&other, &program).expect("write");
            assert_eq!(not_preloading(other.as_os_str()), Some(why));
            assert_eq!(not_preloadable(&other), Some(why));
        }
    }

    #[test]
    fn who_becomes_another_user_preloads_nothing() {
        let place = tempfile::tempdir().expect("a folder");
        let program = place.path().join("program");
        fs::copy("/bin/sh", &program).expect("copy");
        let own = nix::unistd::getuid();
        let set = |mode| fs::set_permissions(&program, fs::Permissions::from_mode(mode));
        set(0o4755).expect("chmod");
        // It is our own: nothing changes when it starts.
        assert_eq!(not_preloading(program.as_os_str()), None);
        if own.is_root() {
            nix::unistd::chown(&program, Some(12345.into()), None).expect("chown");
            set(0o4755).expect("chmod");
            assert!(
                not_preloading(program.as_os_str()).is_some_and(|why| why.contains("set-user-ID"))
            );
        }
    }
}
