//! Events that sessions share (`cuIpcGetEventHandle`, `cuIpcOpenEventHandle`).
//!
//! Records of such an event by sessions at rest are complete, so the next server makes an event without a record. A session
//! that is lost with work in flight may have recorded an event that others share. In the next server their waits would return
//! although that work never completes, so they are lost with it.

use super::{Lasting, Lost, Making, failed};
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::objects::events::Event;
use crate::engine::objects::shared_events::session::{EventState, TORN};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use std::sync::atomic::Ordering;

/// An event that the session has exported or opened.
pub struct SharedEvent;

impl Lasting for SharedEvent {
    const KIND: Kind = Kind::SharedEvent;
    type State = EventState;

    fn make(
        record: &Record,
        state: EventState,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        if making.shared.roster.shared_events.is_torn(&state.token) {
            return Err(TORN.to_owned());
        }
        let adopted = adopt(making.shared, session, record.key, &state);
        adopted.map_err(failed("a shared event", record))
    }
}

/// Restores an event. An exported one has been made by the message that created it.
fn adopt(
    shared: &Shared,
    session: &mut Session,
    handle: u64,
    state: &EventState,
) -> Result<(), CUresult> {
    let driver = &shared.gpu.driver;
    if session.objects.events.get(handle).is_err() {
        let device = shared.gpu.device(state.device)?;
        device.make_current(driver)?;
        let mut raw = CUevent::NULL;
        driver.event_create(&mut raw, CU_EVENT_DISABLE_TIMING)?;
        let event = Event::opened(raw, device.ordinal);
        if let Err((status, event)) = session.objects.events.insert(handle, event) {
            let _ = driver.event_destroy(event.raw);
            return Err(status);
        }
    }
    let uid = session.shared.info.uid;
    let event = session.objects.events.get_mut(handle)?;
    shared.gpu.devices[event.device].make_current(driver)?;
    let surplus = shared
        .roster
        .shared_events
        .adopt(&state.token, uid, event)?;
    event.recorded = state.recorded;
    session.shared.connected.store(true, Ordering::Relaxed);
    surplus.map_or(Ok(()), |raw| driver.event_destroy(raw))
}
