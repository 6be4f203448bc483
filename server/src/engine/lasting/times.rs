//! Records of events.

use super::{Lasting, Lost, Making, failed};
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::objects::times::Nanoseconds;
use crate::engine::objects::times::session::{capture_again, record_again};
use crate::engine::session::Session;

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
        let again = record_again(session, &making.shared.gpu, record.key, original);
        again.map_err(failed("an event", record))
    }
}

/// Whether an event's last record was in a capture.
pub struct Captured;

impl Lasting for Captured {
    const KIND: Kind = Kind::Captured;
    type State = bool;

    fn make(
        record: &Record,
        captured: bool,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        if !captured {
            return Ok(());
        }
        let again = capture_again(session, &making.shared.gpu, record.key);
        again.map_err(failed("an event", record))
    }
}
