//! Times of recorded events.

use super::{Lasting, Lost, Making, failed};
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::objects::times::{Nanoseconds, PATIENCE_AGAIN};
use crate::engine::session::Session;
use mpsshim_api::cuda::CUresult;

/// Time of an event's last record.
pub struct Time;

impl Lasting for Time {
    const KIND: Kind = Kind::Time;
    /// `CLOCK_MONOTONIC` in ns; `None` if it was not recorded.
    type State = Option<Nanoseconds>;

    fn make(
        record: &Record,
        at: Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let Some(original) = at else { return Ok(()) };
        let mut again = || -> Result<(), CUresult> {
            let event = session.objects.events.get_mut(record.key)?;
            let gpu = &making.shared.gpu;
            let again = gpu.record_timed(event.device, event.raw, PATIENCE_AGAIN)?;
            event.recorded = true;
            event.time.record = Some(again);
            event.time.original = Some(original);
            Ok(())
        };
        again().map_err(failed("an event", record))
    }
}
