//! The mappings of this process, by the text of `/proc/self/maps`.

use std::fs;

/// The text, empty where it cannot be read.
pub fn read() -> String {
    fs::read_to_string("/proc/self/maps").unwrap_or_default()
}

/// One line: a mapping.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    pub start: u64,
    pub end: u64,
    /// `rwxp`, `s` for a shared mapping.
    pub access: &'a str,
    pub offset: u64,
    /// `major:minor`.
    pub device: &'a str,
    pub inode: u64,
    pub path: &'a str,
}

impl Line<'_> {
    /// `PROT_*`.
    pub fn protection(&self) -> i32 {
        let flags = [libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC];
        let named = self.access.bytes().zip(flags);
        named
            .filter(|(letter, _)| *letter != b'-')
            .fold(0, |all, (_, flag)| all | flag)
    }
}

/// All mappings, by address.
pub fn lines(maps: &str) -> impl Iterator<Item = Line<'_>> {
    maps.lines().filter_map(|line| {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        Some(Line {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            access: words.next()?,
            offset: u64::from_str_radix(words.next()?, 16).ok()?,
            device: words.next()?,
            inode: words.next()?.parse().ok()?,
            path: words.next().unwrap_or("").trim_start(),
        })
    })
}

/// Device and inode of a file as lines have them.
pub fn identity(device: libc::dev_t, inode: libc::ino_t) -> (String, u64) {
    let (major, minor) = (libc::major(device), libc::minor(device));
    (format!("{major:02x}:{minor:02x}"), inode)
}

/// The mappings (start, end, `PROT_*`) of `[first, last)`, if all of it is private memory that can be read. The main
/// thread's stack is, for itself alone.
pub fn private(maps: &str, first: u64, last: u64, own_stack: bool) -> Option<Vec<(u64, u64, i32)>> {
    let mut found = Vec::new();
    let mut at = first;
    for line in lines(maps).filter(|line| line.end > first) {
        // The kernel's own pages, and device files.
        let special = line.path.starts_with('[')
            && !(line.path == "[heap]"
                || line.path.starts_with("[anon")
                || own_stack && line.path == "[stack]")
            || line.path.starts_with("/dev/")
                && !line.path.starts_with("/dev/shm/")
                && line.path != "/dev/zero";
        let readable = line.protection() & libc::PROT_READ != 0;
        if line.start > at || !line.access.ends_with('p') || special || !readable {
            return None;
        }
        let end = line.end.min(last);
        found.push((at, end, line.protection()));
        at = end;
        if at >= last {
            return Some(found);
        }
    }
    None
}

/// Whether all pages of `[first, last)` are mapped and can be read.
pub fn is_readable(maps: &str, first: u64, last: u64) -> bool {
    let mut at = first;
    for line in lines(maps).filter(|line| line.end > first) {
        if line.start > at || line.protection() & libc::PROT_READ == 0 {
            return false;
        }
        at = line.end;
        if at >= last {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0
3000-4000 rw-p 00000000 00:00 0                  [heap]
4000-5000 r--p 00000000 00:00 0
5000-6000 rw-p 00000000 08:01 77                 /usr/lib/libx.so
8000-9000 rw-p 00000000 00:00 0                  [stack]
9000-a000 ---p 00000000 00:00 0
a000-b000 rw-s 00000000 00:19 77                 /dev/shm/x
b000-c000 r-xp 00000000 00:00 0                  [vdso]
";

    #[test]
    fn private_memory_is_what_no_other_process_sees() {
        let of = |first, last| private(MAPS, first, last, false);
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        assert_eq!(of(0x1000, 0x2000), Some(vec![(0x1000, 0x2000, rw)]));
        let two = vec![(0x2000, 0x3000, rw), (0x3000, 0x4000, rw)];
        assert_eq!(of(0x2000, 0x4000), Some(two));
        let read_only = vec![(0x4000, 0x5000, libc::PROT_READ), (0x5000, 0x6000, rw)];
        assert_eq!(of(0x4000, 0x6000), Some(read_only));
        assert!(of(0x8000, 0x9000).is_none(), "a stack");
        assert!(private(MAPS, 0x8000, 0x9000, true).is_some(), "its own");
        assert!(of(0x9000, 0xa000).is_none(), "inaccessible");
        assert!(of(0xa000, 0xb000).is_none(), "shared");
        assert!(of(0xb000, 0xc000).is_none(), "the kernel's");
        assert!(of(0x5000, 0x7000).is_none(), "nothing");
        assert!(of(0x0, 0x2000).is_none(), "begins before");
    }

    #[test]
    fn all_pages_can_be_read_or_not() {
        assert!(is_readable(MAPS, 0x1000, 0x6000));
        assert!(!is_readable(MAPS, 0x5000, 0x8000));
        assert!(!is_readable(MAPS, 0x0, 0x2000));
        assert!(!is_readable(MAPS, 0x8000, 0xa000));
    }

    #[test]
    fn a_file_is_found_by_its_identity() {
        let file = tempfile::tempfile().expect("a file");
        let found = std::os::unix::fs::MetadataExt::ino(&file.metadata().expect("metadata"));
        let device = std::os::unix::fs::MetadataExt::dev(&file.metadata().expect("metadata"));
        file.set_len(4096).expect("a length");
        // SAFETY: new memory.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ,
                libc::MAP_SHARED,
                std::os::fd::AsRawFd::as_raw_fd(&file),
                0,
            )
        } as u64;
        let text = read();
        let line = lines(&text).find(|line| line.start == at).expect("a line");
        let (device, inode) = identity(device, found);
        assert_eq!((line.device, line.inode), (device.as_str(), inode));
    }
}
