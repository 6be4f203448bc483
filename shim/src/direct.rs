//! Direct mode: the program runs on the genuine driver with contexts of its own. The server grants turns to submit
//! work ([`turn`]) and limits memory ([`memory`]). If the server ends, the program goes on ([`session`]).
//!
//! Every slot leads to the genuine function, except for the entry points that these modules wrap and those that submit
//! work, which have a gate in front ([`crate::loader::exports`]). docs/design/0012-direct-mode.md has the reasons.

mod contexts;
mod drain;
mod memory;
mod session;
mod state;
mod turn;
mod wrap;

use std::os::fd::AsRawFd;

use crate::loader::symbols::Target;

use state::direct;

pub use memory::lower_limit;
pub use mpsshim_api::table::submits;
pub use session::begin;
pub use turn::pass;

/// The wrapped entry points and their wrappers.
pub fn wrapped() -> Vec<(&'static str, Target)> {
    [contexts::WRAPPED, memory::WRAPPED].concat()
}

/// The symbols that are wrapped, and those that this mode calls, with their signatures here.
#[cfg(test)]
pub fn signatures() -> Vec<crate::signature::Named> {
    [
        contexts::signatures(),
        memory::signatures(),
        memory::driver_signatures(),
    ]
    .concat()
}

/// Starts the threads that give up turns and that notice the server's end. `renew` opens the next session.
pub fn start(renew: fn() -> Result<(), String>) {
    if let Some(direct) = direct() {
        turn::start(direct);
        session::watch(direct, renew);
    }
}

/// In a forked child: the session is the parent's, and no server grants turns to this process.
pub fn leave() {
    memory::leave();
    if let Some(direct) = direct() {
        // An open copy in the child would hide the parent's end from the server.
        // SAFETY: closes a descriptor of this process's; the child does not use the session.
        unsafe { libc::close(direct.socket.as_raw_fd()) };
    }
    turn::open_for_good();
}
