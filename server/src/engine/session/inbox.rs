//! Messages of a session: the ring and the deferred messages.

use crate::engine::objects::held::Held;
use mpsshim_proto::ring::Consumer;
use mpsshim_proto::segment::RingMemory;

/// Messages of a session.
#[derive(Debug)]
pub struct Inbox {
    /// The server's end of the ring.
    pub consumer: Consumer<RingMemory>,
    /// The server's end of the express ring.
    pub express: Consumer<RingMemory>,
    /// Streams that are held, and the messages deferred behind them.
    pub held: Held,
}

impl Inbox {
    /// An empty inbox in front of the two rings.
    pub fn new(ring: RingMemory, express: RingMemory) -> Inbox {
        Inbox {
            consumer: Consumer::new(ring),
            express: Consumer::new(express),
            held: Held::default(),
        }
    }
}
