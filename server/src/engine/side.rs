//! The contexts of a device.
//!
//! All sessions share the main context of each device. Beside a kernel that does not end, nothing can be loaded there any
//! more: a session that wants to has to go into another context of the same process, the annex. Memory is the process's:
//! both sides see it at the same addresses. Streams, modules and the like belong to one of them. The device gives its time
//! to the two in turn.
//!
//! Whose work a thread does decides which context it uses: [`enter`] says so, once per session and not with each call.

use super::session::Session;
use std::cell::Cell;

/// Sides there are.
pub const SIDES: usize = 2;

/// One of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Side {
    /// Where sessions usually are.
    #[default]
    Main,
    /// Where they are while the main side is blocked.
    Annex,
}

impl Side {
    /// Both.
    pub const ALL: [Side; SIDES] = [Side::Main, Side::Annex];

    /// Position in a table of [`SIDES`].
    #[inline]
    pub fn index(self) -> usize {
        self as usize
    }
}

thread_local! {
    static ENTERED: Cell<Side> = const { Cell::new(Side::Main) };
}

/// From now on the calling thread works on this side.
#[inline]
pub fn enter(side: Side) {
    ENTERED.set(side);
}

/// Does something on a side; the calling thread then works where it did before.
pub fn on<R>(side: Side, does: impl FnOnce() -> R) -> R {
    let before = entered();
    enter(side);
    let done = does();
    enter(before);
    done
}

/// Does something on the main side: what is registered there is there for both, and lives as long as the server.
pub fn on_main<R>(does: impl FnOnce() -> R) -> R {
    on(Side::Main, does)
}

/// The side that the calling thread works on.
#[inline]
pub fn entered() -> Side {
    ENTERED.get()
}

impl Session {
    /// From now on the calling thread works for this session.
    #[inline]
    pub fn enter(&self) {
        enter(self.side);
    }
}
