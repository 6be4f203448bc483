//! Device memory that another process opens (`cuIpcGetMemHandle`, `cuIpcOpenMemHandle`).

use super::{Status, from_digits, memory, to_digits};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::ffi::c_uint;

const WORDS: usize = 300_000;

/// Memory of this process, or of another one.
#[derive(Clone, Copy)]
pub struct Lent(CUdeviceptr);

impl Lent {
    /// New memory, and its handle in hexadecimal digits.
    ///
    /// # Errors
    /// A call's status.
    pub fn new() -> Status<(Lent, String)> {
        let lent = Lent(memory(4 * WORDS)?);
        let mut handle = CUipcMemHandle([0; 64]);
        cu!(cuIpcGetMemHandle, &mut handle, lent.0).ok()?;
        Ok((lent, to_digits(&handle.0)))
    }

    /// Memory of another process, by its handle.
    ///
    /// # Errors
    /// A call's status.
    pub fn open(digits: &str) -> Status<Lent> {
        let handle = CUipcMemHandle(from_digits(digits));
        let mut start: CUdeviceptr = 0;
        cu!(cuIpcOpenMemHandle_v2, &mut start, handle, 1 as c_uint).ok()?;
        Ok(Lent(start))
    }

    /// # Errors
    /// A call's status.
    pub fn close(self) -> Status {
        cu!(cuIpcCloseMemHandle, self.0).ok()
    }

    /// Writes a value everywhere.
    ///
    /// # Errors
    /// A call's status.
    pub fn write(self, value: u32) -> Status {
        cu!(cuMemsetD32_v2, self.0, value, WORDS).ok()?;
        cu!(cuCtxSynchronize).ok()
    }

    /// The value that is everywhere; `None` if there are several.
    ///
    /// # Errors
    /// A call's status.
    pub fn read(self) -> Status<Option<u32>> {
        let mut found = vec![0u32; WORDS];
        cu!(cuMemcpyDtoH_v2, found.as_mut_ptr(), self.0, 4 * WORDS).ok()?;
        let first = found[0];
        Ok(found.iter().all(|word| *word == first).then_some(first))
    }
}
