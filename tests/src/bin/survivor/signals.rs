//! Events that another process opens (`cuIpcGetEventHandle`, `cuIpcOpenEventHandle`).

use super::{State, Status, WORDS, from_digits, launch, memory, to_digits};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::ffi::c_uint;

/// An event of this process, or of another one.
#[derive(Clone, Copy)]
pub struct Signal {
    event: CUevent,
    /// Kernels in front of its records write it.
    written: CUdeviceptr,
}

impl Signal {
    /// A new event, and its handle in hexadecimal digits.
    ///
    /// # Errors
    /// A call's status.
    pub fn new() -> Status<(Signal, String)> {
        let mut event = CUevent::NULL;
        let flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
        cu!(cuEventCreate, &mut event, flags).ok()?;
        let mut handle = CUipcEventHandle([0; 64]);
        cu!(cuIpcGetEventHandle, &mut handle, event).ok()?;
        let written = memory(4 * WORDS)?;
        Ok((Signal { event, written }, to_digits(&handle.0)))
    }

    /// An event of another process, by its handle.
    ///
    /// # Errors
    /// A call's status.
    pub fn open(digits: &str) -> Status<Signal> {
        let (mut event, handle) = (CUevent::NULL, CUipcEventHandle(from_digits(digits)));
        cu!(cuIpcOpenEventHandle, &mut event, handle).ok()?;
        let written = memory(4 * WORDS)?;
        Ok(Signal { event, written })
    }

    /// Records it behind a kernel of this many rounds.
    ///
    /// # Errors
    /// A call's status.
    pub fn raise(self, state: &State, rounds: u32) -> Status {
        launch(state.fill, state.streams[0], (self.written, 1, rounds))?;
        cu!(cuEventRecord, self.event, state.streams[0]).ok()
    }

    /// Whether its last record is complete.
    ///
    /// # Errors
    /// A call's status.
    pub fn is_complete(self) -> Status<bool> {
        match cu!(cuEventQuery, self.event) {
            CUDA_ERROR_NOT_READY => Ok(false),
            status => status.ok().map(|()| true),
        }
    }

    /// Waits for its last record on a stream.
    ///
    /// # Errors
    /// A call's status.
    pub fn wait(self, state: &State) -> Status {
        cu!(cuStreamWaitEvent, state.streams[1], self.event, 0 as c_uint).ok()?;
        cu!(cuStreamSynchronize, state.streams[1]).ok()
    }
}
