//! Shared events in the descriptions of sessions.

use super::Token;
use crate::engine::base::description::{Description, Record};
use crate::engine::base::kinds::Kind;
use crate::engine::objects::events::Event;
use crate::engine::session::{Session, SessionShared};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Why a session is lost with another one.
pub const TORN: &str = "it shares an event that a lost client with work in flight has recorded";

/// How often a description is read again that its server compacts meanwhile.
const MOST_READINGS: usize = 1000;

/// State of a record of a shared event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventState {
    /// The token in its handle.
    pub token: Token,
    /// The server's ordinal of the device.
    pub device: u32,
    /// Whether the session has recorded it.
    pub recorded: bool,
}

/// Describes an event that the session has exported, opened, or recorded for the first time since then.
pub fn describe_shared_event(session: &mut Session, handle: u64, recorded: bool) {
    let Ok(event) = session.objects.events.get(handle) else {
        return;
    };
    if let Some(token) = event.shared.as_ref().map(|shared| shared.token()) {
        let device = event.device.into();
        session.shared.connected.store(true, Ordering::Relaxed);
        let state = EventState {
            token,
            device,
            recorded,
        };
        if session.lasting.kept {
            session.write_down(Record::of(Kind::SharedEvent, 0, handle, &state));
        }
    }
}

/// Describes that the session records a shared event for the first time, before others can wait for the record.
pub fn describe_first_record(session: &mut Session, handle: u64) {
    let is_first = |event: &Event| event.shared.is_some() && !event.recorded;
    if session.objects.events.get(handle).is_ok_and(is_first) {
        describe_shared_event(session, handle, true);
    }
}

/// The shared events in a description, which its server may be writing; each with whether the session has recorded it.
fn events_in(description: &Description) -> impl Iterator<Item = (Token, bool)> {
    // There are none only while the server compacts them.
    let read = || description.records_beside_writer();
    let mut records = read();
    for _ in 0..MOST_READINGS {
        if !records.is_empty() {
            break;
        }
        std::thread::yield_now();
        records = read();
    }
    let of_kind = records
        .into_iter()
        .filter(|one| one.kind == Kind::SharedEvent);
    let states = of_kind.filter_map(|record| record.state::<EventState>());
    states.map(|state| (state.token, state.recorded))
}

/// The shared events that a session has recorded.
pub fn recorded_in(description: &Description) -> BTreeSet<Token> {
    let recorded = events_in(description).filter(|(_, recorded)| *recorded);
    recorded.map(|(token, _)| token).collect()
}

/// Removes from `sessions` and returns all that share an event recorded by one of the lost sessions, which have work in flight.
pub fn take_torn(
    sessions: &mut Vec<Arc<SessionShared>>,
    lost: &[Arc<SessionShared>],
) -> Vec<Arc<SessionShared>> {
    let is_connected = |session: &&Arc<SessionShared>| session.connected.load(Ordering::Relaxed);
    let lost = lost.iter().filter(is_connected);
    let torn: BTreeSet<Token> = lost
        .flat_map(|session| recorded_in(&session.description))
        .collect();
    if torn.is_empty() {
        return Vec::new();
    }
    let shares = |session: &mut Arc<SessionShared>| {
        events_in(&session.description).any(|(token, _)| torn.contains(&token))
    };
    let taken: Vec<_> = sessions.extract_if(.., shares).collect();
    for session in &taken {
        tracing::warn!("Client {} is lost: {TORN}", session.info);
    }
    taken
}
