//! Host pages that the server does not know, for faults that cannot ask it for pinned memory: the code that they have
//! interrupted holds locks that a request takes. Copies pass a pinned buffer, so that they are slower.

use std::ffi::c_void;
use std::ptr;

use mpsshim_api::cuda::CUDA_ERROR_OUT_OF_MEMORY;
use mpsshim_proto::arena;

use super::Direction::{self, ToDevice, ToHost};
use super::{Part, State};
use crate::ffi::Status;
use crate::proxy::submit::Session;

/// Bytes of the pinned buffer.
pub const BUFFER: u64 = 64 << 10;

/// Pages of a file in memory, mapped anywhere. System calls only.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`
pub fn alloc(len: u64) -> Status<u64> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new file and a new mapping.
    let made = unsafe {
        let name = c"mpsshim-pages".as_ptr();
        let file = libc::syscall(libc::SYS_memfd_create, name, libc::MFD_CLOEXEC) as i32;
        if file < 0 {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let made = match libc::syscall(libc::SYS_ftruncate, file, len) {
            0 => {
                let flags = libc::MAP_SHARED;
                libc::mmap(ptr::null_mut(), len as usize, access, flags, file, 0)
            }
            _ => libc::MAP_FAILED,
        };
        libc::syscall(libc::SYS_close, file);
        if made != libc::MAP_FAILED {
            libc::madvise(made, len as usize, libc::MADV_DONTFORK);
        }
        made
    };
    match made == libc::MAP_FAILED {
        true => Err(CUDA_ERROR_OUT_OF_MEMORY),
        false => Ok(made as u64),
    }
}

/// Whether host pages at an address are of this kind.
pub fn is_apart(host: u64) -> bool {
    !arena::is_host(host)
}

/// Frees pages of [`alloc`].
pub fn free(host: u64, len: u64) {
    // SAFETY: pages of `alloc`, which nothing uses any more.
    unsafe { libc::munmap(host as *mut c_void, len as usize) };
}

impl State {
    /// Copies a part whose host pages are of this kind, and waits for that.
    pub fn copy_apart(
        &mut self,
        session: &Session,
        (device, host, len): Part,
        direction: Direction,
    ) -> Status {
        let buffer = self.buffer.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let pinned = buffer as *mut u8;
        for at in (0..len).step_by(BUFFER as usize) {
            let bytes = BUFFER.min(len - at);
            let pages = (host + at) as *mut u8;
            let part = [(device + at, buffer, bytes)];
            // SAFETY: pages of the region and the buffer, both of at least as many bytes, which this thread alone uses.
            unsafe {
                if direction == ToDevice {
                    ptr::copy_nonoverlapping(pages, pinned, bytes as usize);
                }
                self.copy(session, &part, direction)?;
                if direction == ToHost {
                    ptr::copy_nonoverlapping(pinned, pages, bytes as usize);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use mpsshim_proto::arena::HOST_ARENA;

    use super::*;
    use crate::proxy::context::Context;
    use crate::proxy::fake::Fake;
    use crate::proxy::stream;
    use crate::thread::Requesting;

    const LEN: u64 = 3 * BUFFER + 100;

    /// A buffer at an address of the host arena.
    fn buffer() -> u64 {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let at = HOST_ARENA as *mut c_void;
        // SAFETY: new memory, where nothing is mapped.
        let made = unsafe { libc::mmap(at, BUFFER as usize, access, flags, -1, 0) };
        assert_eq!(made, at);
        made as u64
    }

    #[test]
    fn copies_pass_the_buffer_in_order() {
        let server = Fake::new();
        let context = Context::for_test();
        let stream = server.during(|| stream::create(server.session, context, 1, 0, false));
        let mut state = State::new();
        state.stream = Some(stream.unwrap());
        state.buffer = Some(buffer());
        let pages = alloc(LEN).unwrap();
        assert!(is_apart(pages) && !is_apart(state.buffer.unwrap()));
        let mut device: Vec<u8> = (0..LEN).map(|byte| (byte * 7 % 251) as u8).collect();
        let pinned: Vec<u8> = vec![9; 64];
        let first = device.as_mut_ptr() as u64;
        // SAFETY: pages of this test.
        let host = unsafe { std::slice::from_raw_parts_mut(pages as *mut u8, LEN as usize) };

        let part = (first, pages, LEN);
        let copied = server.during(|| state.copy(server.session, &[part], Direction::ToHost));
        assert_eq!(copied, Ok(()));
        assert_eq!(host, device);

        host.iter_mut().for_each(|byte| *byte ^= 0x55);
        // With a part whose pages are the server's, which has been copied when the others have.
        let buffer = state.buffer.unwrap();
        let mut word = [0u8; 64];
        let known = (word.as_mut_ptr() as u64, buffer, 64);
        // SAFETY: the buffer of this test.
        unsafe { ptr::copy_nonoverlapping(pinned.as_ptr(), buffer as *mut u8, 64) };
        let parts = [known, part];
        let copied = server.during(|| state.copy(server.session, &parts, Direction::ToDevice));
        assert_eq!(copied, Ok(()));
        assert_eq!(host, device);
        free(pages, LEN);
    }

    #[test]
    fn a_thread_with_the_locks_of_a_request_makes_none() {
        let server = Fake::new();
        assert!(server.session.may_request());
        let requesting = Requesting::new();
        assert!(!server.session.may_request());
        drop(requesting);
        let ring = server.session.ring().unwrap();
        assert!(!server.session.may_request());
        drop(ring);
        assert!(server.session.may_request());
    }
}
