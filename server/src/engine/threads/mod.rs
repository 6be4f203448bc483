//! What the threads share: their queues, the clients, the server's fate.

pub mod fate;
pub mod gate;
pub mod lanes;
pub mod roster;
pub mod shared;
pub mod slow;
pub mod undertaker;
