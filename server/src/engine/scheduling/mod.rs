//! The threads: which session is served, waits, moves, rests or ends.

pub mod adopt;
pub mod dispatch;
pub mod moving;
pub mod parking;
pub mod patience;
pub mod reaper;
pub mod resting;
pub mod watcher;
