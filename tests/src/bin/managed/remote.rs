//! Another process copies managed memory with `process_vm_readv` and `process_vm_writev`, as MPI libraries do.

use super::*;
use std::ops::Range;

/// Prints the error of a call of the child, whose exit status cannot hold it.
fn failed(call: &str, got: isize) {
    let error = std::io::Error::last_os_error();
    eprintln!("{call} in the child: {got} ({error})");
}

/// The other process: reads a range, whose bytes must be these, and writes others there. Its exit status.
fn copies(parent: libc::pid_t, at: u64, expected: &[u8], next: &mut [u8]) -> c_int {
    let mut found = vec![0u8; expected.len()];
    let part = |at: *mut u8| libc::iovec {
        iov_base: at.cast(),
        iov_len: expected.len(),
    };
    let there = part(at as *mut u8);
    let (to, from) = (part(found.as_mut_ptr()), part(next.as_mut_ptr()));
    // SAFETY: buffers of that length, here and there.
    let read = unsafe { libc::process_vm_readv(parent, &to, 1, &there, 1, 0) };
    if read != expected.len() as isize {
        failed("process_vm_readv", read);
        return 1;
    }
    if found != expected {
        return 2;
    }
    // SAFETY: as above.
    let written = unsafe { libc::process_vm_writev(parent, &from, 1, &there, 1, 0) };
    if written != expected.len() as isize {
        failed("process_vm_writev", written);
        return 3;
    }
    0
}

pub fn remote(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let len = setup.most.min(1 << 20);
    let at = allocate(len)?;
    let mut model = random.bytes(len);
    setup.device_writes(at, &model)?;
    // SAFETY: only this process's children get the right, where the kernel restricts it.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) };
    loop {
        let range: Range<usize> = random.range(len);
        let mut next = random.bytes(range.len());
        // SAFETY: no arguments.
        let own = unsafe { libc::getpid() };
        let place = at + range.start as u64;
        // SAFETY: the child uses its copies of the variables above, and ends without the parent's exit handlers.
        let child = unsafe { libc::fork() };
        if child < 0 {
            let error = std::io::Error::last_os_error();
            return Err(format!("fork: {error}"));
        }
        if child == 0 {
            let status = copies(own, place, &model[range], &mut next);
            // SAFETY: as above.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: waits for a child of this process.
        let found = unsafe { libc::waitpid(child, &raw mut status, 0) };
        if found != child || status != 0 {
            return Err(format!("the child's wait status is {status:#x}"));
        }
        model[range].copy_from_slice(&next);
        let got = setup.device_reads(at, len)?;
        same("as the device reads it", at, &model, &got)?;
        if random.one_of(2) {
            compare("as the host reads it", at, &model)?;
        }
        // The device has all again.
        setup.device_writes(at, &model)?;
        if Instant::now() > until {
            return free(at);
        }
    }
}
