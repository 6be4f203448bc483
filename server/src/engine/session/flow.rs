//! Progress of a session: its thread, its turns, and the quiescent points that it needs.

use crate::engine::base::moment::{Moment, Want};
use crate::engine::base::printing::Printed;
use crate::engine::base::rations::Holder;
use crate::engine::base::side::Side;
use crate::engine::images::contents::Sent;
use crate::engine::images::instances::Instance;
use crate::engine::images::prepared::Prepared;
use crate::engine::objects::activity::{Counts, Quiet};
use crate::engine::objects::marks::Marks;
use crate::engine::objects::runs::Planned;
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whether a session has a context of its own, for the heap of its kernels ([`crate::engine::base::owners`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OwnContext {
    /// It has not needed one.
    #[default]
    Unneeded,
    /// It waits for an annex to be closed.
    Awaited {
        /// Since when.
        since: Instant,
        /// When it last asked.
        asked: Instant,
    },
    /// It is to move to this side, which it owns.
    Granted(Side),
    /// It works on the side that it owns.
    Owned,
    /// It needs one, but other sessions had all annexes.
    Taken,
    /// It needs one, but cannot leave the context that it shares with others.
    Bound,
}

impl OwnContext {
    /// The side to which it is to move.
    pub fn granted(self) -> Option<Side> {
        match self {
            OwnContext::Granted(side) => Some(side),
            _ => None,
        }
    }
}

/// A session's turn with graphs that have conditional nodes ([`crate::engine::base::loops`]).
#[derive(Debug, Default)]
pub struct LoopTurn {
    /// It has the turn, or continues beside the session that has it.
    pub has: bool,
    /// It holds back the others.
    pub hold: Option<LoopHold>,
    /// Handle of the stream of its last such graph, if that may be in flight.
    pub stream: Option<u64>,
    /// Since when it has waited for that graph, to launch one in another stream.
    pub waits: Option<Instant>,
}

/// Since when a session has held back the others, and whether it has launched its graph.
#[derive(Clone, Copy, Debug)]
pub struct LoopHold {
    /// The start.
    pub began: Instant,
    /// The launch, or the start before it.
    pub since: Instant,
    /// Longest time from `since` until the launch or the end.
    pub most: Duration,
    /// Its graph is launched.
    pub launched: bool,
}

/// Progress of a session.
#[derive(Debug)]
pub struct Flow {
    /// Index of its dispatch thread.
    pub home: usize,
    /// Messages that dispatch threads have executed.
    pub dispatched: u64,
    /// How long it has been idle.
    pub quiet: Quiet,
    /// Activity counters, for monitoring.
    pub counts: Counts,
    /// Why the server ended the session, if it did.
    pub fault: Option<String>,
    /// Buffer for the launches of the next launch batch.
    pub planned: Vec<Planned>,
    /// Statistics of its completion markers.
    pub marks: Marks,
    /// Text that its kernels printed, and whether it has the turn to print.
    pub printed: Printed,
    /// It has the turn of graphs that allocate memory, or continues beside the session that has it.
    pub has_graph_turn: bool,
    /// Its turn with graphs that have conditional nodes.
    pub loops: LoopTurn,
    /// Since when a message has been waiting for memory that the client has freed.
    pub short_since: Option<Instant>,
    /// Since when a message has been waiting until pinned memory of the user's is unregistered.
    pub short_of_pinned_since: Option<Instant>,
    /// When a long-running kernel of the session was last seen in flight.
    pub had_kernel: Option<Instant>,
    /// While it submits nothing new, in order to move to another side: number of operations that have ended, and when
    /// that last changed.
    pub leaves: Option<(u64, Instant)>,
    /// When it last could not move to another side as ordered.
    pub stayed: Option<Instant>,
    /// It stays on its side, because it could not be moved to another one.
    pub stays: bool,
    /// Whether it has a context of its own.
    pub own: OwnContext,
    /// The client's kernels may run again in another server, for which commands are noted.
    pub repeats: bool,
    /// Position in the ring behind its last command that changes anything, if it repeats.
    pub last_command: Cell<u64>,
    /// The quiescent point at which it makes its call; other sessions submit nothing meanwhile.
    pub moment: Option<Arc<Moment>>,
    /// The side whose images it still uses after a move; they are loaded again at its next quiescent point.
    pub images_of: Option<Side>,
    /// When it asks again for device memory that it lacks.
    pub room_at: Option<Instant>,
    /// Instances of its first images that are already loaded on its new side.
    pub brought: Vec<Arc<Instance>>,
    /// It has unloaded an image whose kernels may have stored addresses.
    pub left_images: bool,
    /// Loaded instance of the image that its next message loads, reserved for it.
    pub offered: Option<Arc<Instance>>,
    /// Bytes of the images sent by the client that are still in use.
    pub sent: Sent,
    /// Image that was received ahead of its load.
    pub prepared: Option<Prepared>,
    /// A deferred message needs a quiescent point.
    pub wants_moment: bool,
    /// Prerequisite of its next launch.
    pub wants: Option<Want>,
}

impl Flow {
    /// A session that has sent nothing yet; `home` is the index of its dispatch thread, `kept` counts its
    /// descriptors in the keeper.
    pub fn new(home: usize, kept: &Holder) -> Flow {
        Flow {
            home,
            dispatched: 0,
            quiet: Quiet::default(),
            counts: Counts::default(),
            fault: None,
            planned: Vec::new(),
            marks: Marks::default(),
            printed: Printed::default(),
            has_graph_turn: false,
            loops: LoopTurn::default(),
            short_since: None,
            short_of_pinned_since: None,
            had_kernel: None,
            leaves: None,
            stayed: None,
            stays: false,
            own: OwnContext::default(),
            repeats: false,
            last_command: Cell::new(0),
            moment: None,
            images_of: None,
            room_at: None,
            brought: Vec::new(),
            left_images: false,
            offered: None,
            sent: Sent::of(kept),
            prepared: None,
            wants_moment: false,
            wants: None,
        }
    }
}
