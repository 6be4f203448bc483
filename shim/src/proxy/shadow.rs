//! Bounce buffers of graphs (shadows): pinned memory in place of memory that graphs copy from and to, but that cannot be
//! shared with the server, such as a stack or the pages of a file.
//!
//! At a launch the program's memory is copied into the shadow. If the graph writes to it, the shadow is copied back when a
//! wait or a query shows that the launch is complete. So a graph sees such memory as it was at the launch, not as it is
//! when the copy runs, and the program sees the result only after a wait or query.

use std::collections::HashMap;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use mpsshim_api::cuda::CUDA_ERROR_NOT_SUPPORTED;
use parking_lot::Mutex;

use crate::ffi::Status;
use crate::proxy::context::Context;
use crate::proxy::memory;
use crate::proxy::register;
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::Session;
use crate::proxy::waited::{self, Seen};

/// Memory of the program's and its bounce buffer.
#[derive(Clone, Copy, Debug)]
pub struct Shadow {
    /// The node that copies it, where it is known.
    pub node: u64,
    program: u64,
    block: u64,
    len: u64,
    /// The graph writes it.
    written: bool,
}

/// A launch whose results are to be copied back.
#[derive(Debug)]
struct Pending {
    stream: StreamRef,
    handle: u64,
    at: u64,
    written: Vec<Shadow>,
}

#[derive(Debug, Default)]
struct Shadows {
    /// By address and length; kept for the next graph that copies the same memory.
    blocks: HashMap<(u64, u64), u64>,
    /// By graph, instance or capture.
    of: HashMap<u64, Vec<Shadow>>,
    pending: Vec<Pending>,
}

static SHADOWS: Mutex<Option<Shadows>> = Mutex::new(None);
/// Launches whose results are to be copied back.
static PENDING: AtomicUsize = AtomicUsize::new(0);

/// Finds or allocates a bounce buffer for `[program, program + len)`.
fn make(
    session: &Session,
    context: &Context,
    program: u64,
    len: u64,
    written: bool,
) -> Status<Shadow> {
    let mut shadows = SHADOWS.lock();
    let blocks = &mut shadows.get_or_insert_default().blocks;
    let block = match blocks.get(&(program, len)) {
        Some(block) => *block,
        None => {
            let block = memory::host_alloc_unowned(session, context, len)?;
            blocks.insert((program, len), block);
            block
        }
    };
    Ok(Shadow {
        node: 0,
        program,
        block,
        len,
        written,
    })
}

/// The server's address of `[program, program + len)`, which a graph copies: registered, or else a shadow, which is
/// added to the list.
pub fn reach(
    session: &Session,
    context: &'static Context,
    (program, len): (u64, u64),
    written: bool,
    shadows: &mut Vec<Shadow>,
) -> Status<u64> {
    match register::adopt(session, context, program, len) {
        Err(CUDA_ERROR_NOT_SUPPORTED) => {
            let shadow = make(session, context, program, len, written)?;
            shadows.push(shadow);
            Ok(shadow.block)
        }
        adopted => adopted,
    }
}

/// A graph, an instance or a capture copies this memory from now on, in place of the memory that its node copied
/// before.
pub fn attach(owner: u64, node: u64, new: &[Shadow]) {
    let mut shadows = SHADOWS.lock();
    let Some(shadows) = shadows.as_mut() else {
        return;
    };
    let list = shadows.of.entry(owner).or_default();
    if node != 0 {
        list.retain(|shadow| shadow.node != node);
    }
    list.extend(new.iter().map(|shadow| Shadow { node, ..*shadow }));
}

/// `to`, a graph or an instance, copies the same memory as `from`.
pub fn share(from: u64, to: u64) {
    let mut shadows = SHADOWS.lock();
    if let Some(shadows) = shadows.as_mut()
        && let Some(list) = shadows.of.get(&from).cloned()
    {
        shadows.of.entry(to).or_default().extend(list);
    }
}

/// A graph, an instance or a capture is gone.
pub fn forget(owner: u64) {
    if let Some(shadows) = SHADOWS.lock().as_mut() {
        shadows.of.remove(&owner);
    }
}

/// The program's own address of memory in a shadow.
pub fn program_address(address: u64) -> u64 {
    let shadows = SHADOWS.lock();
    let mut blocks = shadows.iter().flat_map(|shadows| &shadows.blocks);
    let found = blocks.find(|((_, len), block)| address >= **block && address - **block < *len);
    found.map_or(address, |((program, _), block)| program + (address - block))
}

/// An instance is about to be launched: copies the program's present data into its shadows.
pub fn fill(exec: u64) {
    let shadows = SHADOWS.lock();
    for shadow in shadows
        .iter()
        .flat_map(|shadows| shadows.of.get(&exec))
        .flatten()
    {
        // SAFETY: the program vouches for the memory that its graph copies; the block has as many bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(
                shadow.program as *const u8,
                shadow.block as *mut u8,
                shadow.len as usize,
            );
        }
    }
}

/// An instance was launched, up to this position of a stream.
pub fn launched(exec: u64, stream: StreamRef) {
    let mut shadows = SHADOWS.lock();
    let Some(shadows) = shadows.as_mut() else {
        return;
    };
    let list = shadows.of.get(&exec).into_iter().flatten();
    let written: Vec<Shadow> = list.filter(|shadow| shadow.written).copied().collect();
    if written.is_empty() {
        return;
    }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| waited::add(collect));
    shadows.pending.push(Pending {
        stream,
        handle: stream.handle(),
        at: stream.position(),
        written,
    });
    PENDING.store(shadows.pending.len(), Ordering::Release);
}

/// Copies back the results of launches that are known to be complete; all results if all work is complete.
fn collect(session: &Session, seen: Seen) {
    if PENDING.load(Ordering::Acquire) != 0 {
        collect_now(|launch| {
            seen == Seen::All
                || launch.stream.handle() == launch.handle
                    && stream::has_reached(session, launch.stream, launch.at)
        });
    }
}

/// As [`collect`], for a stream that is known to have reached a position.
pub fn collect_until(stream: StreamRef, at: u64) {
    if PENDING.load(Ordering::Acquire) != 0 {
        collect_now(|launch| launch.handle == stream.handle() && launch.at <= at);
    }
}

#[cold]
fn collect_now(is_complete: impl Fn(&Pending) -> bool) {
    let mut shadows = SHADOWS.lock();
    let Some(shadows) = shadows.as_mut() else {
        return;
    };
    shadows.pending.retain(|launch| {
        let complete = is_complete(launch);
        if complete {
            for shadow in &launch.written {
                // SAFETY: as in `fill`.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        shadow.block as *const u8,
                        shadow.program as *mut u8,
                        shadow.len as usize,
                    );
                }
            }
        }
        !complete
    });
    PENDING.store(shadows.pending.len(), Ordering::Release);
}
