//! A device plugin for Kubernetes: it advertises parts of the GPUs that a node's control daemon serves, and gives a
//! container that is allocated some of them the environment and mounts that a client needs.

pub mod api;
pub mod cli;
pub mod fleet;
pub mod kubelet;
pub mod parts;
pub mod plugin;
pub mod rpc;
