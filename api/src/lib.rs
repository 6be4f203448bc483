//! The CUDA driver's interface: its types and constants, and every entry point.

#[macro_use]
mod plain;

pub mod cuda;
pub mod table;
