//! Export tables of our own: undocumented tables that speak of contexts, of which the genuine driver has none here.
//!
//! What their slots do was observed with cudart 13.0; slots never seen called answer `CUDA_ERROR_NOT_SUPPORTED`.

use std::ffi::c_void;

use mpsshim_proto::cuda::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUresult, CUuuid,
};

use crate::context::{self, Destructor};
use crate::ffi::{Out, guard};

/// First four bytes of the names of the tables.
const CONTEXT_STORAGE: [u8; 4] = [0xc6, 0x93, 0x33, 0x6e];
const CONTEXT_CHECKS: [u8; 4] = [0x26, 0x3e, 0x88, 0x60];

/// A table: what a slot holds is a size or a function.
#[repr(transparent)]
struct Table<const N: usize>([*const c_void; N]);

// SAFETY: addresses of code and a number; never written.
unsafe impl<const N: usize> Sync for Table<N> {}

/// No size word.
static STORAGE: Table<4> = Table([
    put as *const c_void,
    delete as *const c_void,
    get as *const c_void,
    std::ptr::null(),
]);

const CHECK_SLOTS: usize = 16;

static CHECKS: Table<CHECK_SLOTS> = Table({
    let mut slots = [unknown as *const c_void; CHECK_SLOTS];
    slots[0] = (CHECK_SLOTS * size_of::<*const c_void>()) as *const c_void;
    slots[2] = check as *const c_void;
    slots[3] = no_checks as *const c_void;
    slots
});

/// Our table of this name.
pub fn own(name: &CUuuid) -> Option<*const c_void> {
    let head = &name.0[..4];
    if head == CONTEXT_STORAGE {
        Some((&raw const STORAGE).cast())
    } else if head == CONTEXT_CHECKS {
        Some((&raw const CHECKS).cast())
    } else {
        None
    }
}

/// Stores a value under a key in a context (0: the current one).
unsafe extern "C" fn put(
    context: u64,
    key: usize,
    value: usize,
    destructor: Option<Destructor>,
) -> CUresult {
    guard(|| {
        let context = context::given_or_current(context)?;
        context.storage.lock().insert(key, (value, destructor));
        Ok(())
    })
}

/// Forgets a key; its destructor does not run.
unsafe extern "C" fn delete(context: u64, key: usize) -> CUresult {
    guard(|| {
        let context = context::given_or_current(context)?;
        let removed = context.storage.lock().remove(&key);
        removed.map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    })
}

/// The value under a key.
unsafe extern "C" fn get(out: Out<usize>, context: u64, key: usize) -> CUresult {
    guard(|| {
        let context = context::given_or_current(context)?;
        let found = context.storage.lock().get(&key).map(|(value, _)| *value);
        out.set(found.ok_or(CUDA_ERROR_INVALID_HANDLE)?)
    })
}

unsafe extern "C" fn check(_context: u64, out: Out<u32>, _more: Out<usize>) -> CUresult {
    out.set_if_wanted(0);
    CUDA_SUCCESS
}

extern "C" fn no_checks() -> u32 {
    0
}

extern "C" fn unknown() -> CUresult {
    tracing::warn!("an unknown slot of the table of context checks was called");
    CUDA_ERROR_NOT_SUPPORTED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_two_tables_are_ours() {
        let mut name = CUuuid([0; 16]);
        assert!(own(&name).is_none());
        name.0[..4].copy_from_slice(&CONTEXT_STORAGE);
        let storage = own(&name).unwrap();
        name.0[..4].copy_from_slice(&CONTEXT_CHECKS);
        assert_ne!(own(&name).unwrap(), storage);
    }
}
