//! Private memory that is registered (`cuMemHostRegister`) stays the program's own: pages that several registrations share,
//! stores of other threads meanwhile, forked children, memory that is unmapped, moved or protected.

use super::*;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const PAGE: usize = 4096;

/// Private pages, which are unmapped if they are still there.
struct Private {
    base: *mut u8,
    len: usize,
}

// SAFETY: an address and a length.
unsafe impl Sync for Private {}

impl Private {
    fn new(pages: usize) -> Private {
        Private::of_file(pages, None)
    }

    fn of_file(pages: usize, file: Option<&File>) -> Private {
        let len = pages * PAGE;
        let (flags, fd) = file.map_or((libc::MAP_ANONYMOUS, -1), |file| (0, file.as_raw_fd()));
        // SAFETY: a mapping wherever the kernel likes.
        let base = unsafe {
            let rw = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(null_mut(), len, rw, flags | libc::MAP_PRIVATE, fd, 0)
        };
        assert_ne!(base, libc::MAP_FAILED);
        Private {
            base: base.cast(),
            len,
        }
    }

    /// At this address, which nothing else of the process has.
    fn fixed(address: usize, pages: usize) -> Private {
        let len = pages * PAGE;
        // SAFETY: only free addresses are used.
        let base = unsafe {
            let rw = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            libc::mmap(address as *mut libc::c_void, len, rw, flags, -1, 0)
        };
        assert_eq!(base as usize, address);
        Private {
            base: base.cast(),
            len,
        }
    }

    fn at(&self, offset: usize) -> u64 {
        self.base as u64 + offset as u64
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // SAFETY: pages of this program.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

fn register(address: u64, len: usize) -> CUresult {
    cu!(
        cuMemHostRegister_v2,
        address,
        len,
        CU_MEMHOSTREGISTER_DEVICEMAP
    )
}

fn unregister(address: u64) -> CUresult {
    cu!(cuMemHostUnregister, address)
}

/// The device's address of registered memory.
fn device_pointer(address: u64) -> u64 {
    let mut device = 0u64;
    must!(cuMemHostGetDevicePointer_v2, &mut device, address, 0u32);
    device
}

fn word(address: u64) -> i32 {
    // SAFETY: memory of this program.
    unsafe { (address as *const i32).read_volatile() }
}

fn set_word(address: u64, value: i32) {
    // SAFETY: as above.
    unsafe { (address as *mut i32).write_volatile(value) };
}

/// Has a kernel store `i * factor` in each word of registered memory; how many words are not so.
fn wrong_after_kernel(setup: &Setup, address: u64, len: usize, factor: i32) -> usize {
    let count = (len / 4) as i32;
    let status = setup.store_index(device_pointer(address), count, factor, CUstream::NULL);
    assert!(status.is_ok(), "{status}");
    must!(cuCtxSynchronize);
    (0..count)
        .filter(|i| word(address + 4 * *i as u64) != i * factor)
        .count()
}

pub fn registered_pages(setup: &Setup) {
    println!("-- buffers of one page");
    let memory = Private::new(2);
    let buffers = [(64, 80), (144, 20), (176, 1024), (4000, 300)];
    for (offset, len) in buffers {
        say!("register", "{}", register(memory.at(offset), len));
    }
    let wrong =
        |(offset, len): (usize, usize)| wrong_after_kernel(setup, memory.at(offset), len, 3);
    say!("wrong words", "{:?}", buffers.map(wrong));
    say!("unregister", "{}", unregister(memory.at(144)));
    set_word(memory.at(144), 77);
    say!("wrong words", "{:?}", [buffers[0], buffers[2]].map(wrong));
    say!("what the host wrote", "{}", word(memory.at(144)));
    say!("register it again", "{}", register(memory.at(144), 20));
    say!("wrong words", "{}", wrong((144, 20)));
    for (offset, _) in buffers {
        say!("unregister", "{}", unregister(memory.at(offset)));
    }
    say!("content", "{}", word(memory.at(64 + 4 * 19)));

    println!("-- buffers that meet in a page, the middle one last");
    let memory = Private::new(8);
    let buffers = [(100, 5000), (12000, 9000), (5100, 6900)];
    for (offset, len) in buffers {
        say!("register", "{}", register(memory.at(offset), len));
    }
    for buffer in buffers {
        say!(
            "wrong words",
            "{}",
            wrong_after_kernel(setup, memory.at(buffer.0), buffer.1, 5)
        );
    }
    let block = alloc(6900);
    must!(
        cuMemcpyHtoD_v2,
        block,
        memory.at(5100) as *const i32,
        6900usize
    );
    say!("copied to the device", "{}", read_i32(block, 1725)[1724]);
    must!(cuMemsetD8_v2, block, 1u8, 6900usize);
    must!(
        cuMemcpyDtoH_v2,
        memory.at(5100) as *mut i32,
        block,
        6900usize
    );
    say!("copied back", "{}", word(memory.at(5100 + 6896)));
    say!(
        "beside it",
        "{} {}",
        word(memory.at(5096)),
        word(memory.at(12000))
    );
    free(block);
    for (offset, _) in buffers {
        say!("unregister", "{}", unregister(memory.at(offset)));
    }
    say!(
        "content",
        "{} {}",
        word(memory.at(5096)),
        word(memory.at(12004))
    );

    println!("-- overlap");
    let at = |offset| memory.at(offset);
    say!("register", "{}", register(at(100), 1000));
    say!("the same", "{}", register(at(100), 1000));
    say!("its first byte", "{}", register(at(50), 51));
    say!("up to it", "{}", register(at(50), 50));
    say!("its last byte", "{}", register(at(1099), 10));
    say!("behind it", "{}", register(at(1100), 10));
    say!("around it", "{}", register(at(0), 8000));
    say!("unregister inside", "{}", unregister(at(104)));
    let mut device = 0u64;
    let beside = cu!(cuMemHostGetDevicePointer_v2, &mut device, at(2000), 0u32);
    say!("device pointer of the page's rest", "{beside}");
    for offset in [100, 50, 1100] {
        say!("unregister", "{}", unregister(at(offset)));
    }

    println!("-- memory of the driver's");
    let mut pinned = 0u64;
    must!(cuMemHostAlloc, &mut pinned, 65536usize, 0u32);
    say!("register pinned memory", "{}", register(pinned, 4096));
    say!("unregister pinned memory", "{}", unregister(pinned));
    must!(cuMemFreeHost, pinned);
    let block = alloc(4096);
    say!("register device memory", "{}", register(block, 4096));
    free(block);

    println!("-- private pages of a file");
    let mut file = tempfile();
    file.write_all(&[1; 4 * PAGE]).expect("written");
    let memory = Private::of_file(4, Some(&file));
    say!("register", "{}", register(memory.at(10), 2 * PAGE));
    let wrong = wrong_after_kernel(setup, memory.at(12), 2 * PAGE - 8, 9);
    say!("wrong words", "{wrong}");
    say!("unregister", "{}", unregister(memory.at(10)));
    say!("content", "{}", word(memory.at(12 + 40)));
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).expect("a file");
    file.read_to_end(&mut bytes).expect("read");
    say!("the file is as it was", "{}", bytes == [1; 4 * PAGE]);

    println!("-- memory that is only read");
    let memory = Private::new(4);
    set_word(memory.at(0), 5);
    protect(&memory, libc::PROT_READ);
    say!("register", "{}", register(memory.at(0), memory.len));
    let flags = CU_MEMHOSTREGISTER_READ_ONLY;
    let status = cu!(cuMemHostRegister_v2, memory.at(0), memory.len, flags);
    say!("register read-only", "{status}");
    let block = alloc(4);
    must!(cuMemcpyHtoD_v2, block, memory.base.cast_const(), 4usize);
    say!("copied", "{}", read_i32(block, 1)[0]);
    free(block);
    say!("unregister", "{}", unregister(memory.at(0)));
    protect(&memory, libc::PROT_NONE);
    say!("inaccessible", "{}", register(memory.at(0), memory.len));
}

fn protect(memory: &Private, protection: i32) {
    // SAFETY: pages of this program.
    let done = unsafe { libc::mprotect(memory.base.cast(), memory.len, protection) };
    assert_eq!(done, 0);
}

fn tempfile() -> File {
    let path = std::env::temp_dir().join(format!("conformance-{}", std::process::id()));
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true).open(&path);
    std::fs::remove_file(path).expect("a name");
    file.expect("a file")
}

static OWN_FAULTS: AtomicU64 = AtomicU64::new(0);

/// A handler of the program's own: makes the page that was stored to writable.
extern "C" fn on_own_fault(_: i32, info: *mut libc::siginfo_t, _: *mut c_void) {
    OWN_FAULTS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: what the kernel gives a handler; a page of the program's.
    unsafe {
        let page = (*info).si_addr() as usize / PAGE * PAGE;
        libc::mprotect(
            page as *mut c_void,
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
        );
    }
}

/// Other threads store to a page, and have the kernel store to it, while it is registered and unregistered.
pub fn registered_writers(setup: &Setup) {
    // SAFETY: the handler is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_own_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSEGV, &action, null_mut());
    }
    let memory = Private::new(4);
    let stop = AtomicBool::new(false);
    let lost = AtomicU64::new(0);
    let failed = AtomicU64::new(0);
    let (mut file, rounds) = (tempfile(), 200);
    file.write_all(&[9; 3 * PAGE]).expect("written");
    // Counts in a word as long as the others work; stores that are not there any more are lost.
    let count = |offset: usize| {
        let mut mine = word(memory.at(offset));
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..200 {
                mine = mine.wrapping_add(1);
                set_word(memory.at(offset), word(memory.at(offset)).wrapping_add(1));
            }
            if word(memory.at(offset)) != mine {
                lost.fetch_add(1, Ordering::Relaxed);
                mine = word(memory.at(offset));
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| count(2048));
        scope.spawn(|| {
            // SAFETY: a set of this frame; the thread ends with its mask.
            unsafe {
                let mut all = std::mem::zeroed();
                libc::sigfillset(&mut all);
                libc::pthread_sigmask(libc::SIG_BLOCK, &all, null_mut());
            }
            count(PAGE + 2048);
        });
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // Behind the words of the others and before the buffer of the next page.
                for (at, len) in [(2100, 1900), (PAGE + 2100, 3000)] {
                    // SAFETY: a buffer of this program.
                    let got = unsafe {
                        libc::pread(file.as_raw_fd(), memory.at(at) as *mut c_void, len, 0)
                    };
                    failed.fetch_add(u64::from(got != len as isize), Ordering::Relaxed);
                }
            }
        });
        let mut wrong = 0;
        for round in 0..rounds {
            // Two registrations: they share the second page.
            must!(cuMemHostRegister_v2, memory.at(64), 512usize, 2u32);
            must!(cuMemHostRegister_v2, memory.at(600), PAGE, 2u32);
            wrong += wrong_after_kernel(setup, memory.at(64), 512, round);
            must!(cuMemHostUnregister, memory.at(64));
            must!(cuMemHostUnregister, memory.at(600));
        }
        stop.store(true, Ordering::Relaxed);
        say!("wrong words", "{wrong}");
    });
    say!("threads that lost a store", "{}", lost.into_inner());
    say!("reads that failed", "{}", failed.into_inner());
    say!(
        "faults of the program's so far",
        "{}",
        OWN_FAULTS.load(Ordering::Relaxed)
    );
    let own = Private::new(1);
    protect(&own, libc::PROT_READ);
    set_word(own.at(8), 4);
    say!(
        "a fault of the program's",
        "{} {}",
        OWN_FAULTS.load(Ordering::Relaxed),
        word(own.at(8))
    );
    // SAFETY: the default action.
    unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
}

/// Runs `what` in a forked child; its exit status, or the negative number of the signal that ended it.
fn in_child(what: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls what is given and ends.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0, "fork");
        if child == 0 {
            libc::_exit(what());
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        if libc::WIFSIGNALED(status) {
            -libc::WTERMSIG(status)
        } else {
            libc::WEXITSTATUS(status)
        }
    }
}

pub fn registered_fork(setup: &Setup) {
    const LEN: usize = 64 * PAGE;
    let memory = Private::new(66);
    let base = memory.at(100);
    must!(cuMemHostRegister_v2, base, LEN, 2u32);
    let mut pinned = 0u64;
    must!(cuMemHostAlloc, &mut pinned, 4096usize, 0u32);
    set_word(pinned, 42);
    let sum =
        |from: u64| (0..LEN / 4).fold(0i32, |sum, i| sum.wrapping_add(word(from + 4 * i as u64)));
    let wrong = wrong_after_kernel(setup, base, LEN, 2);
    say!("wrong words", "{wrong}");
    let before = sum(base);

    println!("-- a child that writes");
    let status = in_child(|| {
        let same = sum(base) == before;
        (0..LEN / 4).for_each(|i| set_word(base + 4 * i as u64, -1));
        i32::from(!same || word(base + 8) != -1)
    });
    say!("child", "{status}");
    say!(
        "the parent's memory is as it was",
        "{}",
        sum(base) == before
    );

    println!("-- a parent and a device that write while a child looks");
    let (to_child, to_parent) = (Pipe::new(), Pipe::new());
    // SAFETY: the child only reads and writes memory and pipes, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        to_parent.tell();
        to_child.hear();
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(sum(base) != before)) };
    }
    to_parent.hear();
    set_word(base, 12345);
    say!("wrong words", "{}", wrong_after_kernel(setup, base, LEN, 7));
    to_child.tell();
    let mut status = 0;
    // SAFETY: waits for the child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    say!("child", "{status}");

    println!("-- from another thread, beside a thread that writes");
    let counter = base + 4096;
    let stop = AtomicBool::new(false);
    let changed = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                set_word(counter, word(counter).wrapping_add(1));
            }
        });
        let other = scope.spawn(|| {
            let child = || {
                let before = word(counter);
                (0..1000).for_each(|_| std::thread::yield_now());
                i32::from(word(counter) != before)
            };
            (0..20).filter(|_| in_child(child) != 0).count()
        });
        let changed = other.join().expect("a thread");
        stop.store(true, Ordering::Relaxed);
        changed
    });
    say!("children that saw it change", "{changed}");

    println!("-- a child of a child");
    let status = in_child(|| {
        set_word(base, 1);
        let inner = in_child(|| {
            let seen = word(base);
            set_word(base, 2);
            i32::from(seen != 1)
        });
        i32::from(inner != 0 || word(base) != 1)
    });
    say!("child", "{status}");

    println!("-- pinned memory");
    let status = in_child(|| i32::from(word(pinned) != 42));
    say!("child", "{status}");
    must!(cuMemFreeHost, pinned);

    println!("-- afterwards");
    say!("wrong words", "{}", wrong_after_kernel(setup, base, LEN, 4));
    say!("unregister", "{}", unregister(base));
    let before = sum(base);
    let status = in_child(|| {
        set_word(base, 1);
        0
    });
    say!("child", "{status}");
    say!(
        "the parent's memory is as it was",
        "{}",
        sum(base) == before
    );
}

/// Where two processes have registered memory at the same time.
const BOTH: usize = 0x7100_0000_0000;
const BOTH_PAGES: usize = 16;

/// `conformance --hold`: registers memory at [`BOTH`] until standard input ends.
pub fn hold() {
    let setup = Setup::new();
    let memory = Private::fixed(BOTH, BOTH_PAGES);
    must!(cuMemHostRegister_v2, memory.at(0), memory.len, 2u32);
    println!("held");
    let _ = std::io::stdin().read(&mut [0]);
    let wrong = wrong_after_kernel(&setup, memory.at(0), memory.len, 11);
    println!("wrong words of the other process: {wrong}");
    must!(cuMemHostUnregister, memory.at(0));
}

/// Registered memory at addresses at which another process has some: copies, memsets and queries by either pointer.
pub fn registered_elsewhere(setup: &Setup) {
    let program = std::env::current_exe().expect("a path");
    let mut other = Command::new(program)
        .arg("--hold")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("another process");
    let mut said = other.stdout.take().expect("its output");
    said.read_exact(&mut [0; 5]).expect("that it holds");

    let memory = Private::fixed(BOTH, BOTH_PAGES);
    let second = Private::new(BOTH_PAGES);
    let base = memory.at(0);
    for one in [&memory, &second] {
        must!(cuMemHostRegister_v2, one.at(0), one.len, 2u32);
    }
    let count = memory.len / 4;
    let device = device_pointer(base);
    let (to_second, block) = (device_pointer(second.at(0)), alloc(memory.len));
    let holds = |from: u64, what: &dyn Fn(usize) -> i32| {
        (0..count).all(|i| word(from + 4 * i as u64) == what(i))
    };
    say!(
        "wrong words",
        "{}",
        wrong_after_kernel(setup, base, memory.len, 3)
    );

    println!("-- copies by the device pointer");
    let mut words = vec![0i32; count];
    let status = cu!(cuMemcpyDtoH_v2, words.as_mut_ptr(), device, memory.len);
    let same = (0..count).all(|i| words[i] == 3 * i as i32);
    say!("to pageable memory", "{status} {same}");
    let status = cu!(
        cuMemcpyDtoH_v2,
        second.at(0) as *mut i32,
        device,
        memory.len
    );
    let same = holds(second.at(0), &|i| 3 * i as i32);
    say!("to registered memory", "{status} {same}");
    words.iter_mut().for_each(|word| *word += 1);
    let status = cu!(cuMemcpyHtoD_v2, device, words.as_ptr(), memory.len);
    let same = holds(base, &|i| 3 * i as i32 + 1);
    say!("from pageable memory", "{status} {same}");
    let status = cu!(cuMemcpyDtoD_v2, block, device, memory.len);
    say!(
        "to the device",
        "{status} {:?}",
        &read_i32(block, count)[count - 2..]
    );
    let status = cu!(cuMemcpy, to_second, device, memory.len);
    must!(cuCtxSynchronize);
    let same = holds(second.at(0), &|i| 3 * i as i32 + 1);
    say!("between two", "{status} {same}");
    let status = cu!(cuMemcpyDtoH_v2, words.as_mut_ptr(), device + 4000, 8usize);
    say!("from the interior", "{status} {:?}", &words[..2]);

    println!("-- copies by the program's own pointers");
    (0..count).for_each(|i| set_word(base + 4 * i as u64, i as i32 ^ 5));
    let status = cu!(cuMemcpy, second.at(0), base, memory.len);
    must!(cuCtxSynchronize);
    let same = holds(second.at(0), &|i| i as i32 ^ 5);
    say!("between two", "{status} {same}");
    let status = cu!(cuMemcpy, words.as_mut_ptr() as u64, base, memory.len);
    must!(cuCtxSynchronize);
    let same = (0..count).all(|i| words[i] == i as i32 ^ 5);
    say!("to pageable memory", "{status} {same}");

    println!("-- a rectangle");
    for (name, from) in [("own pointer", base), ("device pointer", device)] {
        let copy = CUDA_MEMCPY2D {
            src_type: CU_MEMORYTYPE_UNIFIED,
            src_device: from,
            src_pitch: 4096,
            dst_type: CU_MEMORYTYPE_HOST,
            dst_host: words.as_mut_ptr() as u64,
            dst_pitch: 64,
            width: 64,
            height: 16,
            ..CUDA_MEMCPY2D::default()
        };
        words.fill(0);
        let status = cu!(cuMemcpy2D_v2, &copy);
        let same = (0..256).all(|i| words[i] == (i / 16 * 1024 + i % 16) as i32 ^ 5);
        say!(name, "{status} {same}");
    }

    println!("-- queries of the device pointer");
    for (name, which) in [
        ("memory type", CU_POINTER_ATTRIBUTE_MEMORY_TYPE),
        ("mapped", CU_POINTER_ATTRIBUTE_MAPPED),
    ] {
        let mut value = 0u64;
        let status = cu!(cuPointerGetAttribute, &mut value, which, device + 64);
        say!(name, "{status} {}", value as u32);
    }
    let mut host = 0u64;
    let status = cu!(
        cuPointerGetAttribute,
        &mut host,
        CU_POINTER_ATTRIBUTE_HOST_POINTER,
        device + 64
    );
    say!("host pointer", "{status} {}", host.wrapping_sub(base));
    let mut flags = 0u32;
    let status = cu!(cuMemHostGetFlags, &mut flags, device + 64);
    say!("flags", "{status} {flags}");

    println!("-- a memset");
    let status = cu!(cuMemsetD32_v2, device, 9u32, count);
    must!(cuCtxSynchronize);
    say!("by the device pointer", "{status} {}", holds(base, &|_| 9));

    drop(other.stdin.take());
    let mut rest = String::new();
    said.read_to_string(&mut rest).expect("its lines");
    say!("the other process", "{}", rest.trim());
    say!("its end", "{}", other.wait().expect("its status"));
    say!("unchanged", "{}", holds(base, &|_| 9));
    for one in [&memory, &second] {
        must!(cuMemHostUnregister, one.at(0));
    }
}

struct Pipe([i32; 2]);

impl Pipe {
    fn new() -> Pipe {
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        Pipe(ends)
    }
    fn tell(&self) {
        // SAFETY: one byte.
        unsafe { libc::write(self.0[1], [1u8].as_ptr().cast(), 1) };
    }
    fn hear(&self) {
        // SAFETY: room for one byte.
        unsafe { libc::read(self.0[0], [0u8].as_mut_ptr().cast(), 1) };
    }
}

/// What becomes of registered memory that the program unmaps, replaces, moves, drops or protects.
pub fn registered_remapped(setup: &Setup) {
    println!("-- unmapped, and other memory in its place");
    let memory = Private::new(16);
    set_word(memory.at(0), 5);
    must!(cuMemHostRegister_v2, memory.at(0), memory.len, 2u32);
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: pages of this program.
    unsafe {
        libc::munmap(memory.base.cast(), memory.len);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        libc::mmap(memory.base.cast(), memory.len, rw, flags, -1, 0);
    }
    set_word(memory.at(0), 9);
    say!(
        "register the same",
        "{}",
        register(memory.at(0), memory.len)
    );
    say!("unregister", "{}", unregister(memory.at(0)));
    say!("content", "{} {}", word(memory.at(0)), word(memory.at(4)));
    say!("register", "{}", register(memory.at(0), memory.len));
    say!(
        "wrong words",
        "{}",
        wrong_after_kernel(setup, memory.at(0), memory.len, 3)
    );
    say!("unregister", "{}", unregister(memory.at(0)));

    println!("-- dropped");
    set_word(memory.at(0), 77);
    must!(cuMemHostRegister_v2, memory.at(0), memory.len, 2u32);
    // SAFETY: pages of this program, whose content it gives up.
    unsafe { libc::madvise(memory.base.cast(), memory.len, libc::MADV_DONTNEED) };
    say!("content", "{}", word(memory.at(0)));
    set_word(memory.at(0), 6);
    say!("unregister", "{}", unregister(memory.at(0)));
    say!("content", "{}", word(memory.at(0)));

    println!("-- moved and grown");
    let neighbour = Private::new(32);
    let [a, b] = [neighbour.at(0), neighbour.at(16 * PAGE)];
    must!(cuMemHostRegister_v2, a, 16 * PAGE, 2u32);
    must!(cuMemHostRegister_v2, b, 16 * PAGE, 2u32);
    set_word(a, 1);
    set_word(b, 2);
    let device = device_pointer(a);
    // SAFETY: pages of this program.
    let moved =
        unsafe { libc::mremap(a as *mut c_void, 16 * PAGE, 32 * PAGE, libc::MREMAP_MAYMOVE) }
            as u64;
    say!("elsewhere", "{}", moved != a);
    say!(
        "content",
        "{} {}",
        word(moved),
        word(moved + 16 * PAGE as u64)
    );
    set_word(moved + 16 * PAGE as u64, 3);
    say!("the neighbour's", "{}", word(b));
    let status = setup.store_index(device, 100, 11, CUstream::NULL);
    say!("kernel", "{status}");
    must!(cuCtxSynchronize);
    say!("what it wrote", "{}", word(moved + 396));
    say!("unregister", "{}", unregister(a));
    say!(
        "register at the new address",
        "{}",
        register(moved, 32 * PAGE)
    );
    say!(
        "wrong words",
        "{}",
        wrong_after_kernel(setup, moved, 32 * PAGE, 2)
    );
    say!("unregister", "{}", unregister(moved));
    say!("unregister", "{}", unregister(b));
    // SAFETY: pages of this program.
    unsafe { libc::munmap(moved as *mut c_void, 32 * PAGE) };

    println!("-- registered once more where it was moved to");
    let memory = Private::new(8);
    must!(cuMemHostRegister_v2, memory.at(0), 8 * PAGE, 2u32);
    set_word(memory.at(0), 4);
    let free = Private::new(8);
    // SAFETY: pages of this program.
    unsafe {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        libc::mremap(memory.base.cast(), 8 * PAGE, 8 * PAGE, flags, free.base);
    }
    say!("content", "{}", word(free.at(0)));
    say!("register", "{}", register(free.at(0), 8 * PAGE));
    say!(
        "wrong words",
        "{}",
        wrong_after_kernel(setup, free.at(0), 8 * PAGE, 6)
    );
    say!("unregister", "{}", unregister(memory.at(0)));
    say!(
        "wrong words",
        "{}",
        wrong_after_kernel(setup, free.at(0), 8 * PAGE, 8)
    );
    say!("unregister", "{}", unregister(free.at(0)));
    say!("content", "{}", word(free.at(8)));

    println!("-- protected");
    let memory = Private::new(4);
    set_word(memory.at(0), 8);
    must!(cuMemHostRegister_v2, memory.at(0), 4 * PAGE, 2u32);
    protect(&memory, libc::PROT_READ);
    say!("unregister", "{}", unregister(memory.at(0)));
    say!("content", "{}", word(memory.at(0)));
    let stored = in_child(|| {
        set_word(memory.at(0), 1);
        0
    });
    say!("a store", "{stored}");
    protect(&memory, libc::PROT_NONE);
    protect(&memory, rw);
    must!(cuMemHostRegister_v2, memory.at(0), 4 * PAGE, 2u32);
    protect(&memory, libc::PROT_NONE);
    say!("unregister", "{}", unregister(memory.at(0)));
    protect(&memory, rw);
    say!("content", "{}", word(memory.at(0)));
}
