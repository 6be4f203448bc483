//! The contexts of a device.
//!
//! All sessions share the main context of each device. Beside a kernel that does not end, nothing can be loaded there any
//! more: a session that wants to has to go into another context of the same process, an annex. Memory is the process's:
//! all sides see it at the same addresses. Streams, modules and the like belong to one of them. The device gives its time
//! to the contexts in turn.
//!
//! Whose work a thread does decides which context it uses: [`enter`] says so, once per session and not with each call.

use std::cell::Cell;

/// Sides there are. Each annex has its own kernels, and one beside them is of use only as long as those end: so there is
/// more than one. Each takes half a GiB of the device while there is anybody.
pub const SIDES: usize = 4;

/// One of them; the main side by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Side(u8);

impl Side {
    /// Where sessions usually are.
    pub const MAIN: Side = Side(0);
    /// All of them.
    pub const ALL: [Side; SIDES] = [Side(0), Side(1), Side(2), Side(3)];

    /// The side of a position; any number will do.
    pub fn at(index: usize) -> Side {
        Side::ALL[index % SIDES]
    }

    /// Position in a table of [`SIDES`].
    #[inline]
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// What users call it: 1 is the main one.
    pub fn number(self) -> u32 {
        u32::from(self.0) + 1
    }

    /// Position in a table of the annexes, [`SIDES`] less one; none for the main side.
    #[inline]
    pub fn annex(self) -> Option<usize> {
        self.index().checked_sub(1)
    }
}

thread_local! {
    static ENTERED: Cell<Side> = const { Cell::new(Side::MAIN) };
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
    on(Side::MAIN, does)
}

/// The side that the calling thread works on.
#[inline]
pub fn entered() -> Side {
    ENTERED.get()
}
