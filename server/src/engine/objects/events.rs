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
    /// Whether this session has recorded it at least once.
    pub recorded: bool,
    /// Its recording time, saved for the next server.
    pub time: Time,
    /// Whether its last record by this session was in a capturing stream: a stream that waits for it joins the capture.
    pub captured: bool,
    /// The state shared with other sessions, if it was exported or imported.
    pub shared: Option<Arc<SharedEvent>>,
}

impl Event {
    /// An event of another session, which the client has opened.
    pub fn opened(raw: CUevent, device: Ordinal) -> Event {
        Event {
            raw,
            device,
            flags: CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS,
            recorded: false,
            time: Time::default(),
            captured: false,
            shared: None,
        }
    }

    /// Checks whether it may be recorded; `captured`: in a stream that is capturing.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` for a shared event in a capture: streams of other sessions would join
    /// the capture.
    pub fn may_be_recorded(&self, captured: bool) -> Result<(), CUresult> {
        if captured && self.shared.is_some() {
            return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    /// Notes that it was recorded.
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
