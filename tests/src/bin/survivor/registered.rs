//! Memory of the program that is registered with the driver: private memory, and shared mappings that devices may write to or
//! only read.

use super::{Status, WORDS, launch, memory};
use mpsshim_api::cuda::*;
use mpsshim_proto::shm::sealed_memfd;
use mpsshim_tests::cu;
use std::ffi::{c_uint, c_void};
use std::os::fd::AsRawFd;

const BYTES: usize = WORDS * 4;
/// Rounds of the kernel's loop.
const STEPS: u32 = 3;

/// Registered memory, and the number from which its content follows.
struct Block {
    start: *mut u32,
    flags: u32,
    device: CUdeviceptr,
    seed: u32,
}

impl Block {
    fn new(start: *mut u32, flags: u32) -> Status<Block> {
        let mut block = Block {
            start,
            flags,
            device: 0,
            seed: 0,
        };
        block.words().fill(0);
        block.register()?;
        Ok(block)
    }

    fn words(&mut self) -> &mut [u32] {
        // SAFETY: the block has room for as many, and nothing is in flight.
        unsafe { std::slice::from_raw_parts_mut(self.start, WORDS) }
    }

    fn register(&mut self) -> Status {
        let flags: c_uint = self.flags;
        cu!(
            cuMemHostRegister_v2,
            self.start.cast::<c_void>(),
            BYTES,
            flags
        )
        .ok()?;
        self.device = self.device_pointer()?;
        Ok(())
    }

    fn unregister(&self) -> Status {
        cu!(cuMemHostUnregister, self.start.cast::<c_void>()).ok()
    }

    fn device_pointer(&self) -> Status<CUdeviceptr> {
        let (mut device, start): (CUdeviceptr, _) = (0, self.start.cast::<c_void>());
        cu!(
            cuMemHostGetDevicePointer_v2,
            &mut device,
            start,
            0 as c_uint
        )
        .ok()?;
        Ok(device)
    }

    fn is(&self, words: &[u32]) -> bool {
        let word = |at: usize| STEPS.wrapping_mul(at as u32).wrapping_mul(self.seed);
        words
            .iter()
            .enumerate()
            .all(|(at, found)| *found == word(at))
    }

    /// Whether the host and the device see the content at the addresses that they had.
    fn is_right(&mut self, stream: CUstream, scratch: CUdeviceptr) -> Status<bool> {
        let mut right = self.device_pointer()? == self.device;
        let words = self.words().to_vec();
        right &= self.is(&words);
        cu!(
            cuMemcpyHtoDAsync_v2,
            scratch,
            self.start.cast_const(),
            BYTES,
            stream
        )
        .ok()?;
        cu!(cuStreamSynchronize, stream).ok()?;
        let mut found = vec![0u32; WORDS];
        cu!(cuMemcpyDtoH_v2, found.as_mut_ptr(), scratch, BYTES).ok()?;
        Ok(right && self.is(&found))
    }

    fn change(&mut self, seed: u32, fill: CUfunction, stream: CUstream) -> Status {
        self.seed = seed;
        if self.flags & CU_MEMHOSTREGISTER_READ_ONLY == 0 {
            return launch(fill, stream, (self.device, seed, STEPS));
        }
        for (at, word) in (0u32..).zip(self.words()) {
            *word = STEPS.wrapping_mul(at).wrapping_mul(seed);
        }
        Ok(())
    }
}

/// A shared mapping with an address of the process's own, at which no server has mappings.
pub fn mapping(number: usize, bytes: usize) -> *mut u32 {
    let file = sealed_memfd(c"survivor", bytes as u64).expect("a file");
    let own = (std::process::id() as usize & 0xffff) << 24;
    let at = 0x7100_0000_0000 + own + (number << 20);
    // SAFETY: a new mapping, which replaces none.
    let start = unsafe {
        libc::mmap(
            at as *mut c_void,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE,
            file.as_raw_fd(),
            0,
        )
    };
    assert_eq!(start as usize, at, "{}", std::io::Error::last_os_error());
    start.cast()
}

/// Registered memory of each kind.
pub struct Registered {
    fill: CUfunction,
    stream: CUstream,
    blocks: Vec<Block>,
    scratch: CUdeviceptr,
    rounds: u32,
}

impl Registered {
    pub fn new(fill: CUfunction, stream: CUstream) -> Status<Registered> {
        let private = vec![0u32; WORDS].leak().as_mut_ptr();
        let read_only = CU_MEMHOSTREGISTER_READ_ONLY;
        let blocks = vec![
            Block::new(private, 0)?,
            Block::new(mapping(0, BYTES), CU_MEMHOSTREGISTER_DEVICEMAP)?,
            Block::new(mapping(1, BYTES), read_only)?,
        ];
        // Kernels may use the program's own addresses there.
        assert_eq!(blocks[1].device, blocks[1].start as u64);
        Ok(Registered {
            fill,
            stream,
            blocks,
            scratch: memory(BYTES)?,
            rounds: 0,
        })
    }

    fn is_right(&mut self) -> Status<bool> {
        let mut right = true;
        for (number, block) in self.blocks.iter_mut().enumerate() {
            if !block.is_right(self.stream, self.scratch)? {
                eprintln!("registered memory {number} is not as it was");
                right = false;
            }
        }
        Ok(right)
    }

    /// Looks whether everything is as it was after the last round, and changes it. Returns the number of rounds; `None`:
    /// something is not as it was.
    pub fn round(&mut self) -> Status<Option<u32>> {
        if !self.is_right()? {
            return Ok(None);
        }
        self.rounds += 1;
        let number = self.rounds as usize % 4;
        if let Some(block) = self.blocks.get_mut(number) {
            block.unregister()?;
            let words = block.words().to_vec();
            if !block.is(&words) || block.device_pointer().is_ok() {
                return Ok(None);
            }
            block.register()?;
        }
        for (number, block) in (1..).zip(&mut self.blocks) {
            block.change(self.rounds * 10 + number, self.fill, self.stream)?;
        }
        cu!(cuStreamSynchronize, self.stream).ok()?;
        Ok(self.is_right()?.then_some(self.rounds))
    }
}
