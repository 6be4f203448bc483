//! Descriptors that another process holds for the next server ([`crate::keeper`]).

use crate::keeper::{self, Keeper, Name};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The keeper, if there is one.
pub struct Keeping(Option<Arc<Keeper>>);

impl Keeping {
    /// Passes descriptors to this keeper; with `None`, nothing is kept.
    pub fn new(keeper: Option<Arc<Keeper>>) -> Keeping {
        Keeping(keeper)
    }

    /// Whether there is a keeper.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The keeper.
    pub fn keeper(&self) -> Option<&Arc<Keeper>> {
        self.0.as_ref()
    }

    /// Makes the keeper hold a descriptor. Returns whether it does.
    pub fn keep(&self, name: Name, fd: BorrowedFd<'_>) -> bool {
        let keeper = self.keeper();
        keeper.is_some_and(|keeper| keeper.hold(name, fd))
    }

    /// Makes the keeper close a descriptor.
    pub fn forget(&self, name: Name) {
        if let Some(keeper) = self.keeper() {
            keeper.release(name);
        }
    }

    /// Makes the keeper close the descriptors of a session.
    pub fn forget_session(&self, session: u64) {
        for kind in keeper::Kind::OF_SESSION {
            self.forget(Name::numbered(kind, session));
        }
    }
}
