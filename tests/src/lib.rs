//! What the end-to-end tests share.

pub mod artifacts;
pub mod driver;
pub mod peer;
