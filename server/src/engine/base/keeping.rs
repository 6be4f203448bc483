//! Descriptors that another process holds for the next server ([`crate::keeper`]), and each session's share of its room.

use crate::engine::base::rations::{Holder, Part, Ration, Rations};
use crate::keeper::{self, Keeper, Kind, Name};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The keeper, if there is one.
#[derive(Clone, Debug)]
pub struct Keeping(Option<Arc<Room>>);

#[derive(Debug)]
struct Room {
    keeper: Arc<Keeper>,
    /// Shares of three quarters of the room. The last quarter is for the descriptors that every session has.
    rations: Arc<Rations>,
    /// Held descriptors that count for a session.
    paid: Mutex<BTreeMap<Name, Ration>>,
}

impl Room {
    fn new(keeper: Arc<Keeper>) -> Room {
        Room {
            rations: Rations::new(keeper.most() / 4 * 3),
            keeper,
            paid: Mutex::default(),
        }
    }

    fn keep(&self, name: Name, fd: BorrowedFd<'_>, holder: &Holder) -> bool {
        let mut paid = self.paid.lock();
        if paid.contains_key(&name) {
            return self.keeper.hold(name, fd);
        }
        let Ok(ration) = self.rations.take(holder, Part::NESTED) else {
            return false;
        };
        let holds = self.keeper.hold(name, fd);
        if holds {
            paid.insert(name, ration);
        }
        holds
    }
}

impl Keeping {
    /// Passes descriptors to this keeper; with `None`, nothing is kept.
    pub fn new(keeper: Option<Arc<Keeper>>) -> Keeping {
        Keeping(keeper.map(|keeper| Arc::new(Room::new(keeper))))
    }

    /// Whether there is a keeper.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The keeper.
    pub fn keeper(&self) -> Option<&Arc<Keeper>> {
        self.0.as_ref().map(|room| &room.keeper)
    }

    /// Makes the keeper hold a descriptor that every session has. Returns whether it does.
    pub fn keep_part(&self, name: Name, fd: BorrowedFd<'_>) -> bool {
        let keeper = self.keeper();
        keeper.is_some_and(|keeper| keeper.hold(name, fd))
    }

    /// Makes the keeper hold a descriptor for a session. Returns whether it does; not beyond the session's share.
    pub fn keep(&self, name: Name, fd: BorrowedFd<'_>, holder: &Holder) -> bool {
        let room = self.0.as_ref();
        room.is_some_and(|room| room.keep(name, fd, holder))
    }

    /// Whether the keeper would hold one more descriptor for a session.
    pub fn has_room(&self, holder: &Holder) -> bool {
        let room = self.0.as_ref();
        room.is_some_and(|room| room.rations.has_room(holder, Part::NESTED))
    }

    /// Counts a descriptor for a session that has been made again, if it counts for no other one.
    pub fn claim(&self, name: Name, holder: &Holder) {
        let Some(room) = &self.0 else {
            return;
        };
        let mut paid = room.paid.lock();
        if room.keeper.holds(&name) {
            let entry = paid.entry(name);
            entry.or_insert_with(|| room.rations.take_over(holder));
        }
    }

    /// Makes the keeper close a descriptor.
    pub fn forget(&self, name: Name) {
        if let Some(room) = &self.0 {
            let mut paid = room.paid.lock();
            if room.keeper.release(name) {
                paid.remove(&name);
            }
        }
    }

    /// Makes the keeper close the descriptors of a session.
    pub fn forget_session(&self, session: u64) {
        for kind in keeper::Kind::OF_SESSION {
            self.forget(Name::numbered(kind, session));
        }
    }

    /// Makes the keeper hold a descriptor for a session under a new name, which it returns.
    pub fn keep_new(&self, kind: Kind, fd: BorrowedFd<'_>, holder: &Holder) -> Option<Name> {
        let room = self.0.as_ref()?;
        // No other thread may take the name meanwhile.
        let mut paid = room.paid.lock();
        let ration = room.rations.take(holder, Part::NESTED).ok()?;
        let name = room.keeper.unused(kind);
        if !room.keeper.hold(name, fd) {
            return None;
        }
        paid.insert(name, ration);
        Some(name)
    }
}
