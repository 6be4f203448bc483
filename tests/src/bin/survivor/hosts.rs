//! Functions of the program that graphs and streams call and wait for, which go on after their server has been replaced.

use crate::graphs::{create, instantiate};
use crate::{Status, memory};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::ffi::{c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a function takes: work that does not wait for it is done long before.
const TAKES: Duration = Duration::from_millis(2);

/// Counts in a word of pinned memory.
extern "C" fn count(word: *mut c_void) {
    std::thread::sleep(TAKES);
    let word = word.cast::<u32>();
    // SAFETY: a word of pinned memory, which lives as long as the program; one call at a time, and nothing else writes it.
    unsafe { word.write(word.read() + 1) };
}

const COUNT: extern "C" fn(*mut c_void) = count;

/// Waits for the work of a stream by a host function behind it, and by nothing else.
pub fn await_function(stream: CUstream) -> Status {
    extern "C" fn note(done: *mut c_void) {
        // SAFETY: the flag below is never freed.
        unsafe { &*done.cast::<AtomicBool>() }.store(true, Ordering::Release);
    }
    let note: extern "C" fn(*mut c_void) = note;
    // If the session is lost, the function may run late.
    let done: &'static AtomicBool = Box::leak(Box::default());
    let data = (&raw const *done).cast_mut().cast::<c_void>();
    cu!(cuLaunchHostFunc, stream, note, data).ok()?;
    let (mut looked, mut free, mut total) = (Instant::now(), 0usize, 0usize);
    while !done.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_micros(50));
        // Whether the session is lost.
        if looked.elapsed() > Duration::from_millis(5) {
            cu!(cuMemGetInfo_v2, &mut free, &mut total).ok()?;
            looked = Instant::now();
        }
    }
    Ok(())
}

/// An instance whose host node counts in a word, which a node behind it copies to the device.
struct Counting {
    word: *mut u32,
    copy: CUdeviceptr,
    exec: CUgraphExec,
    counted: u32,
}

/// Two such instances. The second one is destroyed and made again in each round, and a new stream calls the function meanwhile.
pub struct Hosts {
    stream: CUstream,
    kept: Counting,
    other: Counting,
    round: u32,
}

impl Counting {
    fn new() -> Status<Counting> {
        let mut word = null_mut::<c_void>();
        cu!(cuMemHostAlloc, &mut word, 4usize, 0 as c_uint).ok()?;
        let word = word.cast::<u32>();
        // SAFETY: pinned memory that nothing uses yet.
        unsafe { word.write(0) };
        let mut counting = Counting {
            word,
            copy: memory(4)?,
            exec: CUgraphExec::NULL,
            counted: 0,
        };
        counting.exec = counting.instance()?;
        Ok(counting)
    }

    fn instance(&self) -> Status<CUgraphExec> {
        let (graph, none) = (create()?, null::<CUgraphNode>());
        let mut context = CUcontext::NULL;
        cu!(cuCtxGetCurrent, &mut context).ok()?;
        let host = CUDA_HOST_NODE_PARAMS {
            function: COUNT as usize as u64,
            data: self.word as u64,
        };
        let (host, mut behind, mut node) = (&raw const host, CUgraphNode::NULL, CUgraphNode::NULL);
        cu!(cuGraphAddHostNode, &mut behind, graph, none, 0usize, host).ok()?;
        let copy = CUDA_MEMCPY3D::from(CUDA_MEMCPY2D {
            src_type: CU_MEMORYTYPE_UNIFIED,
            src_device: self.word as u64,
            dst_type: CU_MEMORYTYPE_DEVICE,
            dst_device: self.copy,
            width: 4,
            height: 1,
            ..CUDA_MEMCPY2D::default()
        });
        let (copy, behind) = (&raw const copy, &raw const behind);
        cu!(
            cuGraphAddMemcpyNode,
            &mut node,
            graph,
            behind,
            1usize,
            copy,
            context
        )
        .ok()?;
        let exec = instantiate(graph)?;
        cu!(cuGraphDestroy, graph).ok()?;
        Ok(exec)
    }

    /// Launches it. Returns whether the copy has waited for the function.
    fn waits(&mut self, stream: CUstream) -> Status<bool> {
        cu!(cuGraphLaunch, self.exec, stream).ok()?;
        cu!(cuStreamSynchronize, stream).ok()?;
        let mut found = 0u32;
        cu!(cuMemcpyDtoH_v2, &raw mut found, self.copy, 4usize).ok()?;
        self.counted += 1;
        Ok(found == self.counted)
    }

    /// Whether a wait for a new stream waits for a function that the stream calls.
    fn waits_in_new_stream(&mut self) -> Status<bool> {
        let mut stream = CUstream::NULL;
        cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok()?;
        let word = self.word.cast::<c_void>();
        cu!(cuLaunchHostFunc, stream, COUNT, word).ok()?;
        cu!(cuStreamSynchronize, stream).ok()?;
        self.counted += 1;
        // SAFETY: the word of pinned memory; volatile, since the function may still run if the wait was too short.
        let found = unsafe { self.word.read_volatile() };
        cu!(cuStreamDestroy_v2, stream).ok()?;
        Ok(found == self.counted)
    }
}

impl Hosts {
    pub fn new(stream: CUstream) -> Status<Hosts> {
        let mut hosts = Hosts {
            stream,
            kept: Counting::new()?,
            other: Counting::new()?,
            round: 0,
        };
        hosts.kept.waits(stream)?;
        hosts.other.waits(stream)?;
        Ok(hosts)
    }

    /// Looks whether the instances and a new stream wait for their functions.
    pub fn round(&mut self) -> Status<Option<u32>> {
        self.round += 1;
        let kept = self.kept.waits(self.stream)?;
        cu!(cuGraphExecDestroy, self.other.exec).ok()?;
        let in_stream = self.other.waits_in_new_stream()?;
        self.other.exec = self.other.instance()?;
        let other = self.other.waits(self.stream)?;
        Ok((kept && in_stream && other).then_some(self.round))
    }
}
