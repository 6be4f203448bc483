//! Clients, devices, limits and modes as plain data, without threads, sockets or a driver.

pub mod amount;
pub mod bonds;
pub mod client;
pub mod device;
pub mod driver;
pub mod host_memory;
pub mod limits;
pub mod mode;
pub mod named;
pub mod partitions;
pub mod policy;
pub mod suspension;
