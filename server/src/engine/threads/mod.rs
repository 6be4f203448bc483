//! State shared by the threads: their queues, the clients, and whether the server is ending.

pub mod fate;
pub mod gate;
pub mod lanes;
pub mod room;
pub mod roster;
pub mod shared;
pub mod slow;
pub mod undertaker;
pub mod work_reports;
