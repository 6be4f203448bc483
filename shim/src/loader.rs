//! What the program links to or looks up in place of the driver, and where the genuine driver is.

pub mod dlopen;
pub mod exports;
pub mod gate;
pub mod genuine;
pub mod ldcache;
pub mod procaddr;
pub mod symbols;
