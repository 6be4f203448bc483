//! The mappings of this process, as the kernel knows them.
//!
//! `PROCMAP_QUERY` (Linux 6.11) asks for those at some addresses; an older kernel has only the text of `/proc/self/maps`, which
//! takes a program with a thousand mappings a tenth of a millisecond.

use std::fs::{self, File};
use std::os::fd::AsRawFd;

/// A mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    /// `PROT_*`.
    pub protection: i32,
    /// Stores may be visible to other processes.
    pub shared: bool,
    pub offset: u64,
    /// Major and minor number.
    pub device: (u32, u32),
    pub inode: u64,
    /// The file's path, or a name such as `[heap]`.
    pub path: String,
}

/// All mappings, by address.
pub fn all() -> Vec<Mapping> {
    let text = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    parse(&text).collect()
}

/// The mappings that have addresses of `[first, last)`, by address.
pub fn of(first: u64, last: u64) -> Vec<Mapping> {
    query(first, last).unwrap_or_else(|| {
        let mut found = all();
        found.retain(|one| one.start < last && one.end > first);
        found
    })
}

/// The mappings in a text like that of `/proc/self/maps`.
pub fn parse(text: &str) -> impl Iterator<Item = Mapping> + '_ {
    text.lines().filter_map(|line| {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let access = words.next()?;
        let offset = words.next()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let flags = [libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC];
        let named = access.bytes().zip(flags);
        let protection = named
            .filter(|(letter, _)| *letter != b'-')
            .fold(0, |all, (_, flag)| all | flag);
        Some(Mapping {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            protection,
            shared: access.ends_with('s'),
            offset: u64::from_str_radix(offset, 16).ok()?,
            device: (
                u32::from_str_radix(major, 16).ok()?,
                u32::from_str_radix(minor, 16).ok()?,
            ),
            inode: words.next()?.parse().ok()?,
            path: words.next().unwrap_or("").trim_start().to_owned(),
        })
    })
}

/// `struct procmap_query` of linux/fs.h.
#[repr(C)]
#[derive(Debug, Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    vma_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    major: u32,
    minor: u32,
    name_size: u32,
    build_id_size: u32,
    name_address: u64,
    build_id_address: u64,
}

/// `PROCMAP_QUERY`: `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong =
    3 << 30 | (size_of::<Query>() as libc::c_ulong) << 16 | (b'f' as libc::c_ulong) << 8 | 17;
/// The mapping at the address, or the next one.
const COVERING_OR_NEXT: u64 = 0x10;
const READABLE: u64 = 0x01;
const WRITABLE: u64 = 0x02;
const EXECUTABLE: u64 = 0x04;
const SHARED: u64 = 0x08;

fn query(first: u64, last: u64) -> Option<Vec<Mapping>> {
    // Opened each time: a descriptor is of the process that opened it, also in a forked child.
    let file = File::open("/proc/self/maps").ok()?;
    let mut name = vec![0u8; libc::PATH_MAX as usize];
    let mut found = Vec::new();
    let mut at = first;
    while at < last {
        let mut query = Query {
            size: size_of::<Query>() as u64,
            flags: COVERING_OR_NEXT,
            address: at,
            name_size: name.len() as u32,
            name_address: name.as_mut_ptr() as u64,
            ..Query::default()
        };
        // SAFETY: the struct is the call's, and its buffer as long as it says.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
        if done < 0 {
            // Nothing is mapped from there on, or the kernel does not know the call.
            let nothing = std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOENT);
            return nothing.then_some(found);
        }
        if query.start >= last {
            break;
        }
        // With the NUL; 0 without a name.
        let len = (query.name_size as usize).saturating_sub(1).min(name.len());
        let flag = |bit: u64, protection| {
            if query.vma_flags & bit != 0 {
                protection
            } else {
                0
            }
        };
        found.push(Mapping {
            start: query.start,
            end: query.end,
            protection: flag(READABLE, libc::PROT_READ)
                | flag(WRITABLE, libc::PROT_WRITE)
                | flag(EXECUTABLE, libc::PROT_EXEC),
            shared: query.vma_flags & SHARED != 0,
            offset: query.offset,
            device: (query.major, query.minor),
            inode: query.inode,
            path: String::from_utf8_lossy(&name[..len]).into_owned(),
        });
        at = query.end;
    }
    Some(found)
}

impl Mapping {
    /// Whether it is readable private memory of the program. The main thread's stack counts with `own_stack` only: for
    /// that thread itself.
    pub fn is_private(&self, own_stack: bool) -> bool {
        // The kernel's own pages, and device files.
        let path = self.path.as_str();
        let named = path.starts_with('[')
            && !(path == "[heap]" || path.starts_with("[anon") || own_stack && path == "[stack]");
        let device =
            path.starts_with("/dev/") && !path.starts_with("/dev/shm/") && path != "/dev/zero";
        !self.shared && self.is_readable() && !named && !device
    }

    /// Whether it is a shared mapping of a file (device, inode).
    pub fn is_of(&self, (device, inode): ((u32, u32), u64)) -> bool {
        self.shared && (self.device, self.inode) == (device, inode)
    }

    /// Whether it can be read.
    pub fn is_readable(&self) -> bool {
        self.protection & libc::PROT_READ != 0
    }
}

/// Whether mappings, in the order of their addresses, cover all of `[first, last)`.
pub fn cover(mappings: &[Mapping], first: u64, last: u64) -> bool {
    let mut at = first;
    let within = |one: &&Mapping| one.end > first && one.start < last;
    for one in mappings.iter().filter(within) {
        if one.start > at {
            return false;
        }
        at = one.end;
    }
    at >= last
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0
3000-4000 rw-p 00000000 00:00 0                  [heap]
4000-5000 r--p 00000000 00:00 0
5000-6000 rw-p 00002000 08:01 77                 /usr/lib/lib x.so
8000-9000 rw-p 00000000 00:00 0                  [stack]
9000-a000 ---p 00000000 00:00 0
a000-b000 rw-s 00000000 00:19 77                 /dev/shm/x
b000-c000 r-xp 00000000 00:00 0                  [vdso]
c000-d000 rw-p 00000000 00:06 3                  /dev/nvidia0
";

    #[test]
    fn private_memory_is_what_no_other_process_sees() {
        let all: Vec<_> = parse(MAPS).collect();
        let private = |own| -> Vec<u64> {
            let found = all.iter().filter(|one| one.is_private(own));
            found.map(|one| one.start >> 12).collect()
        };
        assert_eq!(private(false), [1, 3, 4, 5]);
        assert_eq!(private(true), [1, 3, 4, 5, 8]);
        assert_eq!(all[3].path, "/usr/lib/lib x.so");
        assert_eq!(
            (all[3].offset, all[3].device, all[3].inode),
            (0x2000, (8, 1), 77)
        );
    }

    #[test]
    fn mappings_cover_addresses_or_not() {
        let all: Vec<_> = parse(MAPS).collect();
        assert!(cover(&all, 0x1000, 0x6000));
        assert!(cover(&all, 0x2000, 0x2800));
        assert!(!cover(&all, 0x5000, 0x8000));
        assert!(!cover(&all, 0x0, 0x2000));
        assert!(!cover(&all, 0xc000, 0xe000));
    }

    #[test]
    fn the_kernel_answers_as_its_text_says() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(4 * 4096).expect("a length");
        // SAFETY: new memory.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                2 * 4096,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_file().as_raw_fd(),
                4096,
            )
        } as u64;
        let text = all();
        let found = of(at, at + 4096);
        assert_eq!(found.len(), 1);
        assert_eq!(text.iter().find(|one| one.start == at), found.first());
        assert!(found[0].shared && found[0].offset == 4096);
        let stack = std::ptr::from_ref(&at) as u64;
        assert!(cover(&of(stack, stack + 1), stack, stack + 1));
        assert_eq!(of(4096, 8192), []);
        if let Some(found) = query(0, u64::MAX) {
            assert!(found.len() + 20 > text.len());
        }
    }
}
