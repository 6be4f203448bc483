//! Memory for code that handles faults of managed memory.
//!
//! The handler of a fault may have interrupted any code of its thread: a signal handler of the program that touches managed
//! memory may itself have interrupted `malloc`. So a thread that is [`Inside`] allocates from a heap of this module, whose
//! lock is held with signals blocked only, and frees nothing of the C library's: such blocks are freed later, by a thread
//! outside. Blocks are told apart by their addresses.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dlmalloc::{Allocator, Dlmalloc};

#[global_allocator]
static ALLOCATOR: Choice = Choice;

/// Addresses that the heap reserves. Pages that it does not use take no memory.
const LEN: usize = 64 << 30;
/// Bytes that become accessible at a time.
const STEP: usize = 256 << 10;
/// No address of a program, so that nothing lies in a heap that does not begin anywhere yet.
const NOWHERE: usize = 1 << 63;

/// First address of the heap.
static START: AtomicUsize = AtomicUsize::new(NOWHERE);
static HEAP: Mutex<Dlmalloc<Reserve>> =
    Mutex::new(Dlmalloc::new_with_allocator(Reserve { used: Cell::new(0) }));
/// This process was forked by the user of the heap: another thread may have held its lock then.
static LEFT: AtomicBool = AtomicBool::new(false);
/// Blocks of the C library's that are to be freed, each with the next one's address in its first word.
static LATER: AtomicPtr<Block> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// Blocks signals of the calling thread until it is dropped, except for faults, and lets it allocate from the heap of
/// this module.
#[derive(Debug)]
pub struct Inside {
    mask: u64,
    /// Belongs to its thread.
    _thread: PhantomData<*const ()>,
}

/// Calls the kernel's `rt_sigprocmask`.
fn change_mask(how: c_int, set: u64) -> u64 {
    let mut before = 0u64;
    // SAFETY: both sets are there and have 8 bytes.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            how,
            &raw const set,
            &raw mut before,
            8,
        )
    };
    before
}

/// Blocks all signals of the calling thread except for faults; returns the mask before.
fn block() -> u64 {
    let bit = |signal: c_int| 1u64 << (signal - 1);
    let faults = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
    ];
    let faults = faults.into_iter().map(bit).fold(0, |all, one| all | one);
    change_mask(libc::SIG_BLOCK, !faults)
}

impl Inside {
    pub fn new() -> Inside {
        let mask = block();
        INSIDE.set(INSIDE.get() + 1);
        Inside {
            mask,
            _thread: PhantomData,
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(INSIDE.get() - 1);
        change_mask(libc::SIG_SETMASK, self.mask);
    }
}

/// In a forked child, which allocates and frees nothing in the heap.
pub fn leave() {
    LEFT.store(true, Ordering::Relaxed);
}

/// The addresses of the heap, of which the first part is accessible.
struct Reserve {
    /// Bytes of that part.
    used: Cell<usize>,
}

impl Reserve {
    /// First address, once the addresses are reserved.
    fn start(&self) -> Option<usize> {
        let start = START.load(Ordering::Relaxed);
        if start != NOWHERE {
            return Some(start);
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: new addresses.
        let made = unsafe { libc::mmap(ptr::null_mut(), LEN, libc::PROT_NONE, flags, -1, 0) };
        if made == libc::MAP_FAILED {
            return None;
        }
        START.store(made as usize, Ordering::Relaxed);
        Some(made as usize)
    }
}

// SAFETY: memory that is given out is accessible, and no other part of it is given out.
unsafe impl Allocator for Reserve {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let (used, size) = (self.used.get(), size.next_multiple_of(STEP));
        let none = (ptr::null_mut(), 0, 0);
        let Some(start) = self.start().filter(|_| size <= LEN - used) else {
            return none;
        };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let at = start + used;
        // SAFETY: unused addresses of the reservation.
        if unsafe { libc::mprotect(at as *mut c_void, size, access) } != 0 {
            return none;
        }
        self.used.set(used + size);
        (at as *mut u8, size, 0)
    }

    fn remap(&self, _at: *mut u8, _len: usize, _new: usize, _may_move: bool) -> *mut u8 {
        ptr::null_mut()
    }

    fn free_part(&self, at: *mut u8, len: usize, left: usize) -> bool {
        let (Some(start), end) = (self.start(), at as usize + len) else {
            return false;
        };
        if end != start + self.used.get() {
            return false;
        }
        // SAFETY: the last part of the accessible one, which the heap does not use.
        unsafe {
            let unused = at.add(left).cast::<c_void>();
            libc::madvise(unused, len - left, libc::MADV_DONTNEED);
            libc::mprotect(unused, len - left, libc::PROT_NONE);
        }
        self.used.set(self.used.get() - (len - left));
        true
    }

    fn free(&self, at: *mut u8, len: usize) -> bool {
        self.free_part(at, len, 0)
    }

    fn can_release_part(&self, _flags: u32) -> bool {
        true
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        4096
    }
}

/// The heap. The calling thread has its signals blocked.
fn heap() -> MutexGuard<'static, Dlmalloc<Reserve>> {
    HEAP.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a block is the heap's.
fn is_ours(block: *mut u8) -> bool {
    (block as usize).wrapping_sub(START.load(Ordering::Relaxed)) < LEN
}

/// Whether the calling thread is [`Inside`].
fn is_inside() -> bool {
    INSIDE.get() != 0
}

/// A block of the C library's that is to be freed.
struct Block {
    next: *mut Block,
    layout: Layout,
}

/// Frees a block of the C library's later. A block too small to be remembered is lost.
fn free_later(block: *mut u8, layout: Layout) {
    let block = block.cast::<Block>();
    if layout.size() < size_of::<Block>() || !block.is_aligned() {
        return;
    }
    let mut next = LATER.load(Ordering::Relaxed);
    loop {
        // SAFETY: nothing uses the block any more, and it has room for the struct.
        unsafe { block.write(Block { next, layout }) };
        match LATER.compare_exchange_weak(next, block, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(other) => next = other,
        }
    }
}

/// Frees the blocks that were not freed when they were given back.
#[cold]
fn free_remembered() {
    let mut next = LATER.swap(ptr::null_mut(), Ordering::Acquire);
    while let Some(block) = NonNull::new(next) {
        // SAFETY: written by `free_later`, and taken out of the list by this thread.
        let Block {
            next: other,
            layout,
        } = unsafe { block.read() };
        // SAFETY: a block of this allocator with this layout.
        unsafe { System.dealloc(block.as_ptr().cast(), layout) };
        next = other;
    }
}

/// The C library's allocator, or the heap of this module.
struct Choice;

// SAFETY: both allocators keep the contract, and each frees its own blocks.
unsafe impl GlobalAlloc for Choice {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_inside() {
            // SAFETY: the caller's promise.
            return unsafe { heap().malloc(layout.size(), layout.align()) };
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_inside() {
            // SAFETY: the caller's promise.
            return unsafe { heap().calloc(layout.size(), layout.align()) };
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if is_ours(block) {
            if LEFT.load(Ordering::Relaxed) {
                return;
            }
            let _inside = Inside::new();
            // SAFETY: the caller's promise; a block of the heap.
            return unsafe { heap().free(block, layout.size(), layout.align()) };
        }
        if is_inside() {
            return free_later(block, layout);
        }
        if !LATER.load(Ordering::Relaxed).is_null() {
            free_remembered();
        }
        // SAFETY: the caller's promise; a block of the C library's.
        unsafe { System.dealloc(block, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_ours(block) && !is_inside() {
            // SAFETY: the caller's promise; a block of the C library's.
            return unsafe { System.realloc(block, layout, size) };
        }
        // SAFETY: the caller's promise: the size, rounded up to the alignment, is no more than `isize::MAX`.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: the caller's promise; the new block does not overlap the old one, which nothing uses afterwards.
        unsafe {
            let made = self.alloc(new);
            if !made.is_null() {
                ptr::copy_nonoverlapping(block, made, layout.size().min(size));
                self.dealloc(block, layout);
            }
            made
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Held by a test that frees later.
    static ALONE: Mutex<()> = Mutex::new(());

    fn ours<T>(values: &[T]) -> bool {
        is_ours(values.as_ptr().cast_mut().cast())
    }

    #[test]
    fn blocks_go_back_to_where_they_came_from() {
        let _alone = ALONE.lock().unwrap();
        let outside = vec![1u8; 100];
        let mut grown = vec![2u64; 10];
        assert!(!ours(&outside) && !ours(&grown));
        let inside = {
            let _inside = Inside::new();
            let inside = vec![3u8; 1 << 20];
            grown.extend(0..1000);
            assert!(ours(&inside) && ours(&grown));
            assert!(ours(&vec![0u8; 5 << 20]));
            // Not by the C library, while this thread is inside.
            let address = outside.as_ptr() as usize;
            drop(outside);
            let mut remembered = LATER.load(Ordering::Acquire);
            let mut found = false;
            while !remembered.is_null() && !found {
                found = remembered as usize == address;
                // SAFETY: no other test frees later meanwhile.
                remembered = unsafe { (*remembered).next };
            }
            assert!(found);
            inside
        };
        assert_eq!(grown[..12], [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 1]);
        assert!(inside.iter().all(|byte| *byte == 3));
        drop(inside);
        drop(grown);
        drop(vec![0u8; 10]);
        assert!(LATER.load(Ordering::Acquire).is_null());
    }

    #[test]
    fn threads_inside_and_outside_share_the_heap() {
        let _alone = ALONE.lock().unwrap();
        let threads: Vec<_> = (0..4u8)
            .map(|number| {
                std::thread::spawn(move || {
                    let mut kept: Vec<Vec<u8>> = Vec::new();
                    for round in 0..2000usize {
                        let inside = (round % 2 == 0).then(Inside::new);
                        kept.push(vec![number; (round * 37) % 9000 + 1]);
                        if round % 3 == 0 {
                            let at = (round * 7) % kept.len();
                            let gone = kept.swap_remove(at);
                            assert!(gone.iter().all(|byte| *byte == number));
                        }
                        drop(inside);
                    }
                    kept.iter().flatten().all(|byte| *byte == number)
                })
            })
            .collect();
        for thread in threads {
            assert!(thread.join().expect("a thread"));
        }
    }
}
