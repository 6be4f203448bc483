//! The objects of a session on the devices, by kind.

pub mod activity;
pub mod arrays;
pub mod awaited;
pub mod events;
pub mod fairness;
pub mod files;
pub mod functions;
pub mod graphs;
pub mod held;
pub mod levels;
pub mod links;
pub mod marks;
pub mod moves;
pub mod pace;
pub mod pools;
pub mod runs;
pub mod shared_events;
pub mod shares;
pub mod snapshot;
pub mod streams;
pub mod suspects;
pub mod times;
pub mod trace;
pub mod virtual_memory;
