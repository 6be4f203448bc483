//! The page that a client in direct mode shares with its server: whose turn it is, and how much memory is held.
//!
//! The client runs on the genuine driver with contexts of its own. The page records the turns and limits that both
//! sides agree on; it does not enforce them: a program can bypass it, just as it can use the device without the shim.
//!
//! A turn is for all devices that the client uses. The states of [`Turn::state`]:
//!
//! ```text
//!            client wants          server grants
//!     IDLE ---------------> WANTS ---------------> HELD
//!       ^                                           | others wait: the server sets `asked`
//!       |              client drains                v
//!       +---------------------------------------- GIVING
//! ```
//!
//! From any state the server may go to TERMINATED, which stays. A client whose connection has ended otherwise leaves the
//! page in GONE and asks the daemon for another session, with a page of its own.
//!
//! In HELD the client gives the turn up by itself when [`Turn::asked`] requests it: it stops submitting (GIVING), waits
//! for its work, and becomes IDLE, or WANTS if a thread waits at the gate. The side that changes a word on which the
//! other one waits also wakes it: the client rings the server's doorbell, the server wakes the futexes `state` and
//! `asked`.

use crate::handshake::MAX_DEVICES;
use crate::segment::Line;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Bytes of the page.
pub const PAGE_LEN: usize = 4096;
/// [`crate::handshake::Welcome::mode`]: calls are executed by the server.
pub const PROXY: u32 = 1;
/// [`crate::handshake::Welcome::mode`]: the client has its own contexts, the server says when and how much.
pub const DIRECT: u32 = 2;

/// [`Turn::state`]: has no turn and wants none.
pub const IDLE: u32 = 0;
/// [`Turn::state`]: waits for a turn.
pub const WANTS: u32 = 1;
/// [`Turn::state`]: may submit.
pub const HELD: u32 = 2;
/// [`Turn::state`]: submits nothing more and waits for its work to be done.
pub const GIVING: u32 = 3;

/// [`Turn::state`]: the server has ended the session; the client may submit nothing any more.
pub const TERMINATED: u32 = 4;
/// [`Turn::state`]: the server has ended. Set by the client for its own threads; the page is not written any more.
pub const GONE: u32 = 5;

/// [`Turn::asked`]: no other client wants a turn.
pub const NOT_ASKED: u32 = 0;
/// [`Turn::asked`]: others wait; give the turn up when idle.
pub const WHEN_IDLE: u32 = 1;
/// [`Turn::asked`]: give the turn up now.
pub const NOW: u32 = 2;
/// [`Turn::asked`]: others hold turns at the same time; keep it, and update [`Turn::submissions`] regularly.
pub const REPORT: u32 = 3;

/// One client's turns.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Turn {
    /// [`IDLE`] and the like. Both write it; see the module's documentation.
    pub state: Line<AtomicU32>,
    /// [`NOT_ASKED`] and the like; the server writes it.
    pub asked: Line<AtomicU32>,
    /// Devices that the client uses, a bit each by the server's ordinal; the client writes it before it wants a turn.
    pub devices: AtomicU32,
    /// 1: no turns are taken, everything may be submitted at any time. The server writes it before the welcome.
    pub free: AtomicU32,
    /// Number of turns granted.
    pub turns: AtomicU64,
    /// Nanoseconds that turns were held, drains included; the server writes it.
    pub held_ns: AtomicU64,
    /// Nanoseconds that a turn was waited for; the server writes it.
    pub waited_ns: AtomicU64,
    /// Approximate number of submissions. The client writes it before it gives a turn up, while [`REPORT`] is
    /// requested, and when `asked` is woken.
    pub submissions: AtomicU64,
}

/// Bytes of one device's memory.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Memory {
    /// Held by the client, which writes it.
    pub held: AtomicU64,
    /// Held by its process in addition: contexts and code. 0 until the server has measured it; the server writes it.
    pub overhead: AtomicU64,
    /// Limit; `u64::MAX`: none. The server writes it.
    pub limit: AtomicU64,
}

/// The whole page.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Page {
    /// Turns.
    pub turn: Turn,
    /// The client's place among its user's ([`crate::user_memory`]). The server writes it before the welcome.
    pub place: AtomicU32,
    /// Memory by the server's ordinal.
    pub memory: [Memory; MAX_DEVICES],
}

const _: () = assert!(size_of::<Page>() <= PAGE_LEN);
