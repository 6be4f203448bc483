//! Export tables of our own: undocumented tables that refer to contexts and modules, of which the genuine driver has none
//! in this process.
//!
//! The behaviour of their slots was observed with cudart 13.0, cuBLASLt 13.1 and cuFFT 12.0. In tables that are ours
//! alone, slots that were never seen called return `CUDA_ERROR_NOT_SUPPORTED`; the others are the genuine driver's
//! tables with a few slots replaced.

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use mpsshim_api::cuda::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUresult, CUuuid,
};

use crate::ffi::{Out, Status, guard};
use crate::proxy::context::{self, Context, Destructor};
use crate::proxy::default_stream;
use crate::proxy::module;
use crate::proxy::submit::session;

/// First four bytes of the names of the tables.
const CONTEXT_STORAGE: [u8; 4] = [0xc6, 0x93, 0x33, 0x6e];
const CONTEXT_CHECKS: [u8; 4] = [0x26, 0x3e, 0x88, 0x60];

/// First bytes of a table's name, and slots of it.
type Patch = ([u8; 4], &'static [(usize, Slot)]);

/// Tables of which some slots are ours: the first bytes of the name, and the slots.
const PATCHED: &[Patch] = &[
    // The calling thread's current context.
    (
        [0x42, 0xd8, 0x5a, 0x81],
        &[(2, Slot(current_context as *const c_void))],
    ),
    // Hooks of tools into the runtime.
    (
        [0xa0, 0x94, 0x79, 0x8c],
        &[(3, Slot(stream_number as *const c_void))],
    ),
    // Contexts.
    (
        [0x21, 0x31, 0x8c, 0x60],
        &[
            (3, Slot(context_device as *const c_void)),
            (4, Slot(context_number as *const c_void)),
            (39, Slot(stream_number as *const c_void)),
            (51, Slot(stream_behind as *const c_void)),
        ],
    ),
    // Modules.
    (
        [0x6e, 0x16, 0x3f, 0xbe],
        &[(7, Slot(each_function as *const c_void))],
    ),
];

/// A function of ours, or a word of a table.
#[derive(Clone, Copy)]
#[allow(dead_code, reason = "read by whoever holds the table")]
struct Slot(*const c_void);

// SAFETY: an address of code.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

/// More slots than any table has.
const SLOTS_MAX: usize = 4096;

/// A table: each slot holds a size or a function.
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

/// The genuine table with our slots in it, if it is one of [`PATCHED`].
///
/// # Safety
/// `genuine` is the driver's table of this name: its size in bytes, then functions.
pub unsafe fn patched(name: &CUuuid, genuine: *const c_void) -> Option<*const c_void> {
    static COPIES: [OnceLock<Box<[Slot]>>; PATCHED.len()] =
        [const { OnceLock::new() }; PATCHED.len()];
    let at = PATCHED.iter().position(|(head, _)| name.0[..4] == *head)?;
    let copy = COPIES[at].get_or_init(|| {
        let words = genuine.cast::<*const c_void>();
        // SAFETY: the first word is the size.
        let len = (unsafe { words.read() } as usize / size_of::<Slot>()).clamp(1, SLOTS_MAX);
        // SAFETY: the table has that many words.
        let mut slots: Box<[Slot]> = (0..len)
            .map(|i| Slot(unsafe { words.add(i).read() }))
            .collect();
        for (slot, ours) in PATCHED[at].1 {
            if let Some(place) = slots.get_mut(*slot) {
                *place = *ours;
            }
        }
        slots
    });
    Some(copy.as_ptr().cast())
}

/// The calling thread's current context.
unsafe extern "C" fn current_context(out: Out<u64>) -> CUresult {
    guard(|| out.set(context::current().map_or(0, |context| context.handle)))
}

/// A context's device.
unsafe extern "C" fn context_device(context: u64, out: Out<i32>) -> CUresult {
    guard(|| out.set(context::given_or_current(context)?.device))
}

/// As `cuCtxGetId`.
unsafe extern "C" fn context_number(context: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        let context = storing(context)?;
        out.set(context.id.load(Ordering::Relaxed))
    })
}

/// The stream of a handle of the API, which may name a default stream. `per_thread`: the meaning of NULL.
unsafe extern "C" fn stream_behind(
    _context: u64,
    stream: u64,
    out: Out<u64>,
    per_thread: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(default_stream::resolve(stream, per_thread != 0)?.handle())
    })
}

/// The number of a stream: cuBLASLt keeps something for each pair of a context's number and a stream's.
unsafe extern "C" fn stream_number(_context: u64, stream: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(default_stream::resolve(stream, false)?.id())
    })
}

/// Callback of [`each_function`]: the caller's data, a function, its name.
type Visit = unsafe extern "C" fn(*mut c_void, u64, *const c_char);

/// Calls `visit` for each function of a module; returns 1 on success.
unsafe extern "C" fn each_function(
    _context: u64,
    module: u64,
    visit: Option<Visit>,
    with: *mut c_void,
) -> u32 {
    let status = guard(|| {
        let session = session()?;
        for name in module::names(session, module)? {
            let handle = module::get_function(session, module, &name)?;
            let function = module::function(handle)?;
            if let Some(visit) = visit {
                // SAFETY: the program's function, called as the driver calls it; the name lives as long as the function.
                unsafe { visit(with, handle, function.layout().name.as_ptr()) };
            }
        }
        Ok(())
    });
    status.is_ok() as u32
}

/// The context (0: the current one) whose storage is used. A primary one has storage before it is retained.
fn storing(context: u64) -> Status<&'static Context> {
    let context = context::given_or_current(context)?;
    if !context.primary {
        context.usable()?;
    }
    Ok(context)
}

/// Stores a value under a key in a context (0: the current one).
unsafe extern "C" fn put(
    context: u64,
    key: usize,
    value: usize,
    destructor: Option<Destructor>,
) -> CUresult {
    guard(|| {
        let context = storing(context)?;
        context.storage.lock().insert(key, (value, destructor));
        Ok(())
    })
}

/// Forgets a key; its destructor does not run.
unsafe extern "C" fn delete(context: u64, key: usize) -> CUresult {
    guard(|| {
        let context = storing(context)?;
        let removed = context.storage.lock().remove(&key);
        removed.map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    })
}

/// The value under a key.
unsafe extern "C" fn get(out: Out<usize>, context: u64, key: usize) -> CUresult {
    guard(|| {
        let context = storing(context)?;
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
    tracing::warn!("an unknown slot of an export table was called");
    CUDA_ERROR_NOT_SUPPORTED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patched_table_keeps_its_other_slots() {
        let mut name = CUuuid([0; 16]);
        let mut words: Vec<usize> = (0..8).map(|i| i * 100).collect();
        words[0] = size_of_val(&words[..]);
        let genuine = words.as_ptr().cast();
        // SAFETY: a table as the driver has them.
        unsafe {
            assert!(patched(&name, genuine).is_none());
            name.0[..4].copy_from_slice(&[0x6e, 0x16, 0x3f, 0xbe]);
            let copy = patched(&name, genuine).unwrap().cast::<usize>();
            assert_eq!(copy.read(), 64);
            assert_eq!(copy.add(6).read(), 600);
            assert_eq!(copy.add(7).read(), each_function as *const () as usize);
        }
    }

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
