//! The contexts of a device.
//!
//! All sessions share the main context of each device. While a kernel that never completes runs there, nothing can be
//! loaded; a session that needs to load must move to another context of the same process, an annex. Memory belongs to
//! the process: all sides see it at the same addresses. Streams, modules and the like belong to one side. The device
//! time-slices between the contexts.
//!
//! A thread uses the context of the session it works for: [`enter`] selects it, once per session and not with each
//! call.

use std::cell::Cell;

/// Number of sides. A kernel that never completes may run in an annex too, and sessions with a heap for kernels own one
/// each ([`crate::engine::base::owners`]), so there are several annexes. Each annex takes half a GiB of the device while
/// sessions use it.
pub const SIDES: usize = 16;

/// A side; the main side by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Side(u8);

impl Side {
    /// The side on which sessions start.
    pub const MAIN: Side = Side(0);
    /// All sides.
    pub const ALL: [Side; SIDES] = {
        let mut all = [Side::MAIN; SIDES];
        let mut at = 1;
        while at < SIDES {
            all[at] = Side(at as u8);
            at += 1;
        }
        all
    };

    /// The side at a position; any number is accepted.
    pub fn at(index: usize) -> Side {
        Side::ALL[index % SIDES]
    }

    /// Index into a table of [`SIDES`] entries.
    #[inline]
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// Number shown to users; 1 is the main side.
    pub fn number(self) -> u32 {
        u32::from(self.0) + 1
    }

    /// Index into a table of the annexes, with [`SIDES`] less one entries; `None` for the main side.
    #[inline]
    pub fn annex(self) -> Option<usize> {
        self.index().checked_sub(1)
    }
}

thread_local! {
    static ENTERED: Cell<Side> = const { Cell::new(Side::MAIN) };
}

/// Selects the side that the calling thread works on.
#[inline]
pub fn enter(side: Side) {
    ENTERED.set(side);
}

/// Runs a function on a side; the calling thread then returns to its previous side.
pub fn on<R>(side: Side, does: impl FnOnce() -> R) -> R {
    let before = entered();
    enter(side);
    let done = does();
    enter(before);
    done
}

/// Runs a function on the main side: memory registered there is available to all sides and lives as long as the server.
pub fn on_main<R>(does: impl FnOnce() -> R) -> R {
    on(Side::MAIN, does)
}

/// The side that the calling thread works on.
#[inline]
pub fn entered() -> Side {
    ENTERED.get()
}
