//! What the program links to or looks up in place of the driver, and where the genuine driver is.

pub mod dlopen;
pub mod exports;
pub mod gate;
pub mod genuine;
pub mod ldcache;
#[cfg_attr(test, allow(dead_code, reason = "unit tests have the C library's own"))]
pub mod mappings;
pub mod next;
pub mod procaddr;
#[cfg_attr(test, allow(dead_code, reason = "unit tests have the C library's own"))]
pub mod signals;
pub mod symbols;
#[cfg_attr(test, allow(dead_code, reason = "unit tests have the C library's own"))]
pub mod transfers;
