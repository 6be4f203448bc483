//! The symbols that the program links to or looks up in place of the driver's, and the location of the genuine driver.

pub mod dlopen;
pub mod dlsym;
pub mod exports;
pub mod gate;
pub mod genuine;
pub mod ldcache;
#[cfg_attr(test, allow(dead_code, reason = "unit tests have the C library's own"))]
pub mod mappings;
pub mod next;
pub mod procaddr;
#[cfg_attr(test, allow(dead_code, reason = "unit tests have the C library's own"))]
pub mod requests;
#[cfg_attr(test, allow(dead_code, reason = "unit tests have the C library's own"))]
pub mod signals;
pub mod symbols;
#[cfg_attr(test, allow(dead_code, reason = "unit tests have the C library's own"))]
pub mod transfers;
