//! Linkers of a session (`CUlinkState`).

use crate::engine::base::bounds::STACK;
use crate::engine::base::jit::JitOptions;
use mpsshim_api::cuda::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most linker threads in the server, for all sessions.
const THREADS: usize = 256;
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// A linker of a session (`CUlinkState`).
#[derive(Debug, Default)]
pub struct Link {
    /// `None` if an earlier server has completed it: the driver completes a linker once.
    pub linker: Option<Linker>,
    /// The linked cubin.
    pub cubin: Option<Vec<u8>>,
    /// Whether the client has the cubin, so that the linker is of no use any more.
    pub fetched: bool,
}

/// The driver's part of a linker.
#[derive(Debug)]
pub struct Linker {
    /// The driver's linker state.
    pub raw: CUlinkState,
    /// The only thread that may use it.
    pub thread: LinkThread,
    /// The options with which it was created, which the driver keeps and writes to.
    pub options: JitOptions,
}

impl Link {
    /// The driver's part.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` if an earlier server has completed it.
    pub fn linker(&mut self) -> Result<&mut Linker, CUresult> {
        self.linker.as_mut().ok_or(CUDA_ERROR_INVALID_HANDLE)
    }
}

/// A thread for one linker, from its creation to its destruction: libnvidia-ptxjitcompiler 580.159.04 keeps a linker's
/// memory with the thread, and corrupts the heap if other long-lived threads use the linker.
#[derive(Debug)]
pub struct LinkThread(rayon::ThreadPool);

impl LinkThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the limit is reached or no thread can be created.
    pub fn new() -> Result<LinkThread, CUresult> {
        let more = |running: usize| (running < THREADS).then_some(running + 1);
        RUNNING
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        rayon::ThreadPoolBuilder::new()
            .num_threads(1)
            .thread_name(|_| "link".into())
            .stack_size(STACK)
            .exit_handler(|_| {
                RUNNING.fetch_sub(1, Ordering::Relaxed);
            })
            .build()
            .map(LinkThread)
            .map_err(|_| {
                RUNNING.fetch_sub(1, Ordering::Relaxed);
                CUDA_ERROR_OUT_OF_MEMORY
            })
    }

    /// Runs work on the thread and waits for it.
    pub fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.0.install(work)
    }
}
