//! Memory of graphs: allocations in captures. The address is known at once; the memory exists from a launch of the graph
//! until it is freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mpsshim_api::cuda::*;

use crate::api::R;
use crate::driver::{device, driver};
use crate::graph::{self, Does};
use crate::memory::{self, Kind};
use crate::pool::Pool;
use crate::stream::Stream;

const PAGE: u64 = 4096;

/// What the nodes that allocate it, in a graph and in its instances, have of it.
pub struct NodeMemory {
    start: u64,
    bytes: u64,
    pool: Arc<Pool>,
    live: AtomicBool,
    /// A launch has made it memory at some time.
    was_live: AtomicBool,
}

impl NodeMemory {
    fn reserve(pool: &Arc<Pool>, bytes: u64) -> R<Arc<NodeMemory>> {
        let room = bytes
            .checked_next_multiple_of(PAGE)
            .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let node = Arc::new(NodeMemory {
            start: memory::reserve_pages(room)?,
            bytes,
            pool: pool.clone(),
            live: AtomicBool::new(false),
            was_live: AtomicBool::new(false),
        });
        let kind = Kind::Node(Arc::downgrade(&node));
        memory::name(pool.device(), node.start, bytes, kind)?;
        Ok(node)
    }

    fn room(&self) -> u64 {
        self.bytes.next_multiple_of(PAGE)
    }

    /// A launch makes it memory.
    pub fn allocate(&self) -> R<()> {
        if self.live.swap(true, Ordering::AcqRel) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let taken = device(self.pool.device()).and_then(|device| device.take(self.room()));
        if taken.is_err() {
            self.live.store(false, Ordering::Release);
            return taken;
        }
        self.was_live.store(true, Ordering::Release);
        self.pool.count_node(self.bytes as i64, self.room() as i64);
        Ok(())
    }

    /// It is no memory any more; a launch may make it memory again.
    pub fn free(&self) -> R<()> {
        if !self.live.swap(false, Ordering::AcqRel) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        device(self.pool.device())?.give(self.room());
        self.pool
            .count_node(-(self.bytes as i64), -(self.room() as i64));
        Ok(())
    }
}

impl Drop for NodeMemory {
    fn drop(&mut self) {
        if *self.live.get_mut() {
            // As any other of the pool's now.
            memory::turn(self.start, Kind::Pooled(self.pool.clone()));
            return;
        }
        let room = self.room();
        // Work queued before may use it still: the pool keeps it until it is trimmed.
        if !*self.was_live.get_mut() {
            memory::turn(self.start, Kind::Freed);
            self.pool.keep_addresses(self.start, room);
            return;
        }
        match device(self.pool.device()).and_then(|device| device.take(room)) {
            Ok(()) => {
                self.pool.count_node(0, room as i64);
                memory::turn(self.start, Kind::Freed);
                self.pool.keep(self.start, room, 0);
            }
            Err(_) => memory::forget(self.start, room),
        }
    }
}

/// The memory of a node that begins at an address.
pub fn find(address: u64) -> R<Option<Arc<NodeMemory>>> {
    let found = driver()?.ranges.find(address);
    Ok(found.and_then(|range| match range.kind {
        Kind::Node(node) if range.start == address => node.upgrade(),
        _ => None,
    }))
}

/// Makes an allocation a node if the stream captures; its address.
pub fn capture_allocation(stream: &Stream, pool: &Arc<Pool>, bytes: u64) -> R<Option<u64>> {
    if !graph::captures(stream) {
        return Ok(None);
    }
    let node = NodeMemory::reserve(pool, bytes)?;
    let captured = graph::captured(stream, || Does::Allocate(node.clone()))?;
    Ok(captured.then_some(node.start))
}

/// Makes a release a node if the stream captures.
pub fn capture_free(stream: &Stream, address: u64) -> R<bool> {
    let known = driver()?.ranges.find(address).is_some_and(|range| {
        range.start == address && matches!(range.kind, Kind::Pooled(_) | Kind::Node(_))
    });
    if graph::captures(stream) && !known {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    graph::captured(stream, || Does::Free(address))
}
