//! Scheduling of sessions: serving, waiting, moving, resting and ending.

pub mod adopt;
pub mod dispatch;
pub mod express;
pub mod moving;
pub mod own_context;
pub mod parking;
pub mod patience;
pub mod reaper;
mod repeating;
pub mod resting;
pub mod suspending;
pub mod transfers;
pub mod visit;
pub mod watcher;
