//! Calls of the driver, and the ways in which a program may fail.

use mpsshim_api::cuda::*;
use std::ffi::{c_int, c_uint};

pub enum Trouble {
    /// A call and the status that it has returned.
    Call(&'static str, CUresult),
    /// Memory, an attribute or a status differs from the model.
    Wrong(String),
}

pub type Status<T = ()> = Result<T, Trouble>;

/// A call that has to succeed.
#[macro_export]
macro_rules! call {
    ($name:ident $(, $arg:expr)* $(,)?) => {{
        let status = mpsshim_tests::cu!($name $(, $arg)*);
        match status.is_ok() {
            true => Ok(()),
            false => Err($crate::calls::Trouble::Call(stringify!($name), status)),
        }
    }};
}

/// An error unless both are the same.
pub fn same<T: PartialEq + std::fmt::Debug>(
    what: impl Fn() -> String,
    found: T,
    expected: T,
) -> Status {
    match found == expected {
        true => Ok(()),
        false => Err(Trouble::Wrong(format!(
            "{}: {found:?}, not {expected:?}",
            what()
        ))),
    }
}

/// An error unless both hold the same bytes; says where the first difference is.
pub fn same_bytes(what: impl Fn() -> String, found: &[u8], expected: &[u8]) -> Status {
    if found == expected {
        return Ok(());
    }
    let differ = |at: &usize| found[*at] != expected[*at];
    let all: Vec<usize> = (0..found.len()).filter(differ).collect();
    let first = all[0];
    let end = (first + 8).min(found.len());
    Err(Trouble::Wrong(format!(
        "{}: {} of {} bytes differ, from {first} to {}: {:02x?}, not {:02x?}",
        what(),
        all.len(),
        found.len(),
        all[all.len() - 1],
        &found[first..end],
        &expected[first..end]
    )))
}

/// Initializes the driver and makes the primary context of the first device current.
pub fn context() -> Status<CUcontext> {
    call!(cuInit, 0 as c_uint)?;
    let mut device: CUdevice = 0;
    call!(cuDeviceGet, &mut device, 0 as c_int)?;
    let mut context = CUcontext::NULL;
    call!(cuDevicePrimaryCtxRetain, &mut context, device)?;
    call!(cuCtxSetCurrent, context)?;
    Ok(context)
}
