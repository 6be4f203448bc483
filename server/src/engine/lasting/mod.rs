//! State that outlives its server: the records in a session's description, from which the next server restores the
//! session (docs/design/0017-portable-sessions.md).
//!
//! Each kind of record ([`crate::engine::base::kinds`]) has a type that implements [`Lasting`], next to the objects
//! that it describes.

pub mod arrays;
pub mod contents;
pub mod files;
pub mod memory;
pub mod messages;
pub mod pools;
pub mod resources;
pub mod shared_events;
pub mod shares;
pub mod times;
pub mod virtual_memory;

use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::keeper::{self, Name};
use mpsshim_api::cuda::CUresult;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

/// Why a session could not be restored.
pub type Lost = String;

/// Descriptors held by the keeper that no session has claimed yet.
pub type Left = BTreeMap<Name, OwnedFd>;

/// One kind of state.
pub trait Lasting {
    /// The kind of its records.
    const KIND: Kind;
    /// Plain data. It comes from another process: everything in it is checked like a client's message.
    type State: Serialize + DeserializeOwned;

    /// Restores the state of a record.
    ///
    /// # Errors
    /// The reason why it cannot be restored.
    fn make(
        record: &Record,
        state: Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost>;
}

/// Context in which a record is restored.
pub struct Making<'a> {
    /// State shared by all threads.
    pub shared: &'a Shared,
    left: &'a mut Left,
    /// Names of descriptors taken from the keeper.
    taken: Vec<Name>,
}

impl Making<'_> {
    /// Takes a descriptor from the keeper. The keeper drops it if its object cannot be made.
    ///
    /// # Errors
    /// If the keeper does not hold it.
    pub fn take(&mut self, name: Name) -> Result<OwnedFd, Lost> {
        self.taken.push(name);
        let found = self.left.remove(&name);
        found.ok_or_else(|| "its memory was not kept".to_owned())
    }

    /// Takes the descriptor that the keeper holds under the key of a record.
    ///
    /// # Errors
    /// If the keeper does not hold it.
    pub fn take_of(&mut self, kind: keeper::Kind, record: &Record) -> Result<OwnedFd, Lost> {
        self.take(Name::numbered(kind, record.key))
    }
}

/// Describes a driver call that failed while a record was restored.
pub fn failed(what: &str, record: &Record) -> impl Fn(CUresult) -> Lost {
    let what = format!("{what} at {:#x}", record.key);
    move |status| format!("{what}: {status}")
}

/// Restores the state of a record of `K`'s kind.
///
/// # Errors
/// The reason why it cannot be restored; the keeper then drops the descriptors taken from it.
pub fn make<K: Lasting>(
    record: &Record,
    session: &mut Session,
    (shared, left): (&Shared, &mut Left),
) -> Result<(), Lost> {
    debug_assert_eq!(record.kind, K::KIND);
    let state = record.state::<K::State>();
    let state = state.ok_or("its description cannot be read")?;
    let mut making = Making {
        shared,
        left,
        taken: Vec::new(),
    };
    let made = K::make(record, state, session, &mut making);
    for name in making.taken {
        match made {
            Ok(()) => shared.gpu.keeping.claim(name, &session.shared.kept),
            Err(_) => shared.gpu.keeping.forget(name),
        }
    }
    made
}

/// Appends a record of state that the next server restores.
pub fn describe<K: Lasting>(session: &mut Session, key: u64, state: &K::State) {
    if session.lasting.kept {
        session.write_down(Record::of(K::KIND, 0, key, state));
    }
}

/// Invalidates the record of destroyed state, and the records that depend on it.
pub fn describe_gone<K: Lasting>(session: &mut Session, key: u64) {
    if session.lasting.kept {
        session.write_down(Record::ending(Kind::Gone, K::KIND as u16, key));
    }
}
