//! The messages of a session: the ring, and those that are deferred.

use crate::engine::objects::held::Held;
use mpsshim_proto::ring::Consumer;
use mpsshim_proto::segment::RingMemory;

/// Messages of a session.
#[derive(Debug)]
pub struct Inbox {
    /// Our end of the ring.
    pub consumer: Consumer<RingMemory>,
    /// What waits for the client, and the messages behind it.
    pub held: Held,
}

impl Inbox {
    /// An empty inbox in front of a ring.
    pub fn new(ring: RingMemory) -> Inbox {
        Inbox {
            consumer: Consumer::new(ring),
            held: Held::default(),
        }
    }
}
