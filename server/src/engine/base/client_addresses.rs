//! The addresses at which clients' mappings usually lie. The process holds them, so that its own libraries, heaps and
//! the driver lie elsewhere, and registered memory has the program's addresses here and in the next server.

use super::ranges::RangeAllocator;
use mpsshim_proto::shm::PAGE;
use parking_lot::Mutex;
use std::fs;
use std::ops::Range;

/// Where Linux puts the mappings of a process (`mmap_base` on x86-64), without the stack.
const CLIENT_MAPPINGS: Range<u64> = 0x7000_0000_0000..0x7fe0_0000_0000;

/// The held addresses at which no file is mapped.
static HELD: Mutex<Option<RangeAllocator>> = Mutex::new(None);

/// Reserves all of the addresses that are free. To be called before the driver is loaded: its own mappings lie elsewhere
/// then. Where the kernel refuses it, files get the addresses that are free when they are registered.
pub fn hold() {
    let mut held = HELD.lock();
    if held.is_some() {
        return;
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut all = unmapped(&maps);
    let gaps: Vec<(u64, u64)> = all.free_ranges().collect();
    for (start, len) in gaps {
        if !reserve(start, len) {
            all.take_at(start, len);
        }
    }
    *held = Some(all);
}

/// Takes `[at, at + len)`, which may be mapped over then, if nothing is there.
pub fn take(at: u64, len: u64) -> bool {
    let among = CLIENT_MAPPINGS.contains(&at) && len <= CLIENT_MAPPINGS.end - at;
    let mut held = HELD.lock();
    let is_held = held
        .as_mut()
        .is_some_and(|held| held.take_at(at, len).is_some());
    among && (is_held || reserve(at, len))
}

/// Removes the mappings at `[at, at + len)`, a range that was taken.
pub fn give_back(at: u64, len: u64) {
    let mut held = HELD.lock();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    if let Some(held) = held.as_mut()
        && map_none(at, len, flags) == Some(at)
    {
        return held.give_back(at, len);
    }
    unmap(at, len);
}

/// Reserves `[at, at + len)` if nothing is mapped there.
fn reserve(at: u64, len: u64) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    match map_none(at, len, flags | libc::MAP_FIXED_NOREPLACE) {
        Some(got) if got == at => true,
        Some(got) => {
            unmap(got, len);
            false
        }
        None => false,
    }
}

/// Maps pages that cannot be accessed and take no memory.
fn map_none(at: u64, len: u64, flags: i32) -> Option<u64> {
    // SAFETY: only free addresses and ranges of this module are used.
    let got = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            len as usize,
            libc::PROT_NONE,
            flags,
            -1,
            0,
        )
    };
    (got != libc::MAP_FAILED).then_some(got as u64)
}

/// Removes a mapping to which no references remain.
pub fn unmap(start: u64, len: u64) {
    // SAFETY: callers pass mappings of their own.
    unsafe { libc::munmap(start as *mut libc::c_void, len as usize) };
}

/// The addresses of [`CLIENT_MAPPINGS`] at which nothing is mapped, by the text of `/proc/self/maps`.
fn unmapped(maps: &str) -> RangeAllocator {
    let Range { start, end } = CLIENT_MAPPINGS;
    let mut all = RangeAllocator::new(start, end - start, PAGE);
    let mapped = |line: &str| {
        let (first, rest) = line.split_once('-')?;
        let (last, _) = rest.split_once(' ')?;
        let first = u64::from_str_radix(first, 16).ok()?.max(start);
        let last = u64::from_str_radix(last, 16).ok()?.min(end);
        last.checked_sub(first).map(|len| (first, len))
    };
    for (first, len) in maps.lines().filter_map(mapped) {
        all.take_at(first, len);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_lie_between_the_mappings_of_the_range() {
        let maps = "\
555555554000-555555556000 r--p 00000000 08:01 1 /usr/bin/mps-server
6fffffff0000-700000010000 rw-p 00000000 00:00 0
7f0000000000-7f0000200000 r-xp 00000000 08:01 2 /usr/lib/libc.so.6
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
7ffffffde000-7ffffffff000 rw-p 00000000 00:00 0 [stack]
";
        let gaps = |maps: &str| -> Vec<Range<u64>> {
            let all = unmapped(maps);
            let free = all.free_ranges();
            free.map(|(start, len)| start..start + len).collect()
        };
        let expected = [
            0x7000_0001_0000..0x7f00_0000_0000,
            0x7f00_0030_0000..0x7fe0_0000_0000,
        ];
        assert_eq!(gaps(maps), expected);
        assert_eq!(gaps(""), [CLIENT_MAPPINGS]);
    }

    #[test]
    fn what_is_held_is_taken_once_and_nothing_else_lies_there() {
        hold();
        let heap = vec![0u8; 64 << 20];
        assert!(!CLIENT_MAPPINGS.contains(&(heap.as_ptr() as u64)));
        let (at, len) = (0x7234_0000_0000, 16 * PAGE);
        assert!(take(at, len));
        assert!(!take(at, len));
        assert!(!take(at + len - PAGE, 2 * PAGE));
        assert!(take(at + len, PAGE));
        give_back(at, len);
        give_back(at + len, PAGE);
        assert!(take(at, len + PAGE));
        give_back(at, len + PAGE);
        assert!(!take(at + 1, PAGE));
        assert!(!take(CLIENT_MAPPINGS.end - PAGE, 2 * PAGE));
        assert!(!take(0x5555_0000_0000, PAGE));
    }
}
