//! Runs the handler of a fault on a stack of its own: the stack that a program gives its signal handlers may be small.

use std::arch::asm;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a stack.
const LEN: usize = 128 << 10;
/// Faults that can be handled at a time; threads with more of them wait.
const COUNT: usize = 16;

static FIRST: AtomicU64 = AtomicU64::new(0);
static TAKEN: [AtomicBool; COUNT] = [const { AtomicBool::new(false) }; COUNT];

/// The handler of a fault: address, whether it is a store; returns whether the access is to be repeated.
type Handle = fn(u64, bool) -> bool;

struct Call {
    address: u64,
    write: bool,
    handle: Handle,
    again: bool,
}

/// Allocates the stacks. To be called once.
pub fn prepare() {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: new memory.
    let made = unsafe { libc::mmap(ptr::null_mut(), LEN * COUNT, access, flags, -1, 0) };
    if made != libc::MAP_FAILED {
        FIRST.store(made as u64, Ordering::Release);
    }
}

/// Calls `handle` on a stack of this module's, or on the present one if there is none.
pub fn call(address: u64, write: bool, handle: Handle) -> bool {
    let first = FIRST.load(Ordering::Acquire);
    if first == 0 {
        return handle(address, write);
    }
    let free = |taken: &AtomicBool| !taken.swap(true, Ordering::Acquire);
    let at = loop {
        if let Some(at) = TAKEN.iter().position(free) {
            break at;
        }
        // SAFETY: no arguments.
        unsafe { libc::sched_yield() };
    };
    let top = first + ((at + 1) * LEN) as u64;
    let mut call = Call {
        address,
        write,
        handle,
        again: false,
    };
    // SAFETY: the stack belongs to this thread until it is given back, and is aligned to 16 bytes as a call requires; the
    // function takes one pointer, to a value that outlives the call, and does not unwind.
    unsafe {
        asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            "call {body}",
            "mov rsp, r12",
            top = in(reg) top,
            body = sym body,
            in("rdi") &raw mut call,
            out("r12") _,
            clobber_abi("C"),
        );
    }
    TAKEN[at].store(false, Ordering::Release);
    call.again
}

unsafe extern "C" fn body(call: *mut Call) {
    // SAFETY: the caller's value, which nothing else uses meanwhile.
    let call = unsafe { &mut *call };
    call.again = (call.handle)(call.address, call.write);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_has_another_stack_and_returns() {
        static SEEN: AtomicU64 = AtomicU64::new(0);
        prepare();
        let here = 0u8;
        let threads: Vec<_> = (0..40u64)
            .map(|number| {
                std::thread::spawn(move || {
                    (0..100).all(|round| {
                        let write = (number + round) % 2 == 0;
                        let again = call(number, write, |address, write| {
                            let room = [address as u8; 4096];
                            SEEN.store(room.as_ptr() as u64, Ordering::Relaxed);
                            write && u64::from(room[17]) == address
                        });
                        again == write
                    })
                })
            })
            .collect();
        for thread in threads {
            assert!(thread.join().expect("a thread"));
        }
        let first = FIRST.load(Ordering::Relaxed);
        let stacks = first..first + (LEN * COUNT) as u64;
        assert!(stacks.contains(&SEEN.load(Ordering::Relaxed)));
        assert!(!stacks.contains(&(ptr::from_ref(&here) as u64)));
    }
}
