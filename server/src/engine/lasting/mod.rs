//! State that outlives its server: what a session has, as records in its description, and how the next server makes it again
//! (docs/design/0017-portable-sessions.md).
//!
//! Each kind of record ([`crate::engine::base::kinds`]) has a type that implements [`Lasting`], beside the objects that it is
//! of.

pub mod memory;
pub mod messages;
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

/// Why a session could not be made again.
pub type Lost = String;

/// Descriptors that the keeper holds and no session has claimed yet.
pub type Left = BTreeMap<Name, OwnedFd>;

/// One kind of state.
pub trait Lasting {
    /// Its records.
    const KIND: Kind;
    /// Plain data. It comes from another process: everything in it is checked as a client's message is.
    type State: Serialize + DeserializeOwned;

    /// Makes the state of a record again.
    ///
    /// # Errors
    /// Why it cannot be made.
    fn make(
        record: &Record,
        state: Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost>;
}

/// What the making of one record may use.
pub struct Making<'a> {
    /// What the threads share.
    pub shared: &'a Shared,
    left: &'a mut Left,
    /// Names of descriptors that were taken from the keeper.
    taken: Vec<Name>,
}

impl Making<'_> {
    /// A descriptor of the keeper's. If its object cannot be made, the keeper forgets it.
    ///
    /// # Errors
    /// It was not kept.
    pub fn take(&mut self, name: Name) -> Result<OwnedFd, Lost> {
        self.taken.push(name);
        let found = self.left.remove(&name);
        found.ok_or_else(|| "its memory was not kept".to_owned())
    }

    /// The descriptor that the keeper has by the key of a record.
    ///
    /// # Errors
    /// It was not kept.
    pub fn take_of(&mut self, kind: keeper::Kind, record: &Record) -> Result<OwnedFd, Lost> {
        self.take(Name::numbered(kind, record.key))
    }
}

/// The failure of a driver call while an object was made.
pub fn failed(what: &str, record: &Record) -> impl Fn(CUresult) -> Lost {
    let what = format!("{what} at {:#x}", record.key);
    move |status| format!("{what}: {status}")
}

/// Makes the state of a record again, which is of `K`'s kind.
///
/// # Errors
/// Why it cannot be made; descriptors that were taken from the keeper are given up.
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
    if made.is_err() {
        let taken = making.taken.into_iter();
        taken.for_each(|name| shared.gpu.keeping.forget(name));
    }
    made
}

impl Session {
    /// Describes state of a kind: the next server makes it again.
    pub fn describe<K: Lasting>(&mut self, key: u64, state: &K::State) {
        if self.lasting.kept {
            self.write_down(Record::of(K::KIND, 0, key, state));
        }
    }

    /// State of a kind is gone, with what depends on it.
    pub fn describe_gone<K: Lasting>(&mut self, key: u64) {
        if self.lasting.kept {
            self.write_down(Record::ending(Kind::Gone, K::KIND as u16, key));
        }
    }
}
