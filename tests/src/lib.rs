//! What the end-to-end tests share.

pub mod artifacts;
pub mod direct_peer;
pub mod driver;
pub mod peer;
