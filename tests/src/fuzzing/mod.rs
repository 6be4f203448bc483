//! What the fuzzers share: random messages of every kind ([`message`]), sessions that send them ([`client`]), and images
//! ([`images`]).

pub mod client;
pub mod images;
pub mod message;
