//! A device plugin for Kubernetes: it tells kubelet of parts of the GPUs that a node's control daemon serves, and
//! kubelet has it say what a container with some of them needs to be a client.

pub mod api;
pub mod cli;
pub mod fleet;
pub mod kubelet;
pub mod parts;
pub mod plugin;
pub mod rpc;
