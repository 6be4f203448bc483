//! Events of a session.

use crate::engine::base::ordinal::Ordinal;
use crate::engine::objects::shared_events::SharedEvent;
use crate::engine::objects::times::Time;
use mpsshim_api::cuda::*;
use std::sync::Arc;

/// An event of a session.
#[derive(Debug)]
pub struct Event {
    /// The driver's event.
    pub raw: CUevent,
    /// Server's ordinal.
    pub device: Ordinal,
    /// `CU_EVENT_*` as the client gave them.
    pub flags: u32,
    /// Recorded at least once, by this session.
    pub recorded: bool,
    /// When it was recorded, as another server may need it.
    pub time: Time,
    /// Its last record, by this session, is of a stream that captured: whoever waits for it joins the capture.
    pub captured: bool,
    /// What other sessions may have of it.
    pub shared: Option<Arc<SharedEvent>>,
}

impl Event {
    /// Whether it may be recorded in a stream that captures, or does not.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` for an event that other sessions have, in a capture: their streams would join
    /// it.
    pub fn may_be_recorded(&self, captured: bool) -> Result<(), CUresult> {
        if captured && self.shared.is_some() {
            return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    /// It was recorded.
    pub fn note_recorded(&mut self, captured: bool) {
        (self.recorded, self.captured) = (true, captured);
    }

    /// Whether there is a record to wait for.
    pub fn is_recorded(&self) -> bool {
        match &self.shared {
            None => self.recorded,
            Some(shared) => shared.is_recorded(),
        }
    }
}
