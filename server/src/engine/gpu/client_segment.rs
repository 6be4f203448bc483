//! The segment that a client and the server share: header, ring, answers, staging memory, flags.

use crate::engine::base::call_error::CallError;
use crate::engine::base::memory_file::MemoryFile;
use crate::engine::base::pinned::Pin;
use crate::engine::gpu::host::Registration;
use mpsshim_api::cuda::CUdeviceptr;
use mpsshim_proto::segment::{self, Header, RingMemory};
use std::sync::atomic::{AtomicU32, Ordering};

/// A session's segment.
#[derive(Debug)]
pub struct Segment {
    /// The mapping, registered from [`mpsshim_proto::segment::REGISTERED`] on.
    pub registration: Registration,
    /// The memory file.
    pub file: MemoryFile,
    /// Counts it for its user until it is unregistered. The number of clients bounds the segments, so that a client
    /// can connect while its user has all the pinned memory that it may have.
    pub pin: Pin,
}

impl Segment {
    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.registration.mapping().base()
    }
    /// The segment's header.
    pub fn header(&self) -> &Header {
        // SAFETY: the mapping has SEGMENT_LEN bytes and lives as long as self; Header is all atomics.
        unsafe { &*self.base().cast::<Header>() }
    }
    /// The ring's memory.
    pub fn ring(&self) -> RingMemory {
        // SAFETY: the mapping has SEGMENT_LEN bytes; a session keeps its segment as long as its consumer.
        unsafe { RingMemory::new(self.base()) }
    }
    /// The express ring's memory.
    pub fn express(&self) -> RingMemory {
        // SAFETY: as above.
        unsafe { RingMemory::express(self.base()) }
    }
    /// Value of a flag, as last written by the GPU (or by the client, which then deceives only itself); 0 for a slot
    /// outside the table.
    #[inline]
    pub fn flag(&self, slot: u32) -> u32 {
        self.flag_word(slot)
            .map_or(0, |word| word.load(Ordering::Acquire))
    }
    fn flag_word(&self, slot: u32) -> Option<&AtomicU32> {
        let offset = segment::flag_offset(slot)?;
        // SAFETY: inside the mapping, aligned to a word.
        Some(unsafe { &*self.base().add(offset).cast::<AtomicU32>() })
    }
    /// Writes a flag from the CPU, for a completion marker that the GPU will not write.
    pub fn set_flag(&self, slot: u32, value: u32) {
        if let Some(word) = self.flag_word(slot) {
            word.store(value, Ordering::Release);
        }
    }
    /// Checks that a slot exists.
    ///
    /// # Errors
    /// A violation if it does not.
    pub fn check_slot(&self, slot: u32) -> Result<(), CallError> {
        if slot as usize >= segment::FLAGS {
            return Err(CallError::Violation(format!(
                "flag slot {slot} is out of range"
            )));
        }
        Ok(())
    }
    /// Device address of a flag.
    ///
    /// # Errors
    /// A violation for a slot outside the table.
    pub fn flag_address(&self, slot: u32) -> Result<CUdeviceptr, CallError> {
        let offset = segment::flag_offset(slot)
            .ok_or_else(|| CallError::Violation(format!("flag slot {slot} is out of range")))?;
        Ok(self.registration.device_address() + (offset - segment::REGISTERED) as u64)
    }
    /// Host address of staging memory.
    ///
    /// # Errors
    /// A violation for a range outside the staging area.
    pub fn staging_address(&self, offset: u64, len: u64) -> Result<u64, CallError> {
        let area = segment::STAGING_LEN as u64;
        if offset > area || len > area - offset {
            return Err(CallError::Violation(format!(
                "staging range {offset}+{len} is out of range"
            )));
        }
        Ok(self.base() as u64 + segment::STAGING as u64 + offset)
    }
}
