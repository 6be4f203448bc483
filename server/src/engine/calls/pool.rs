//! Memory pools and stream-ordered allocation.

pub mod divided;

use super::reply::{Reply, number};
use crate::engine::base::account::Memory;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::graph_turns::session::may_use_graph_memory;
use crate::engine::base::journal::Refusal;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::capture::{captured_graph, is_capturing};
use crate::engine::calls::memory::with_room;
use crate::engine::calls::virtual_memory;
use crate::engine::calls::virtual_memory::accesses_behind;
use crate::engine::lasting::pools::{describe_chunk_end, describe_pool, describe_pool_end};
use crate::engine::objects::pools;
use crate::engine::objects::pools::Pool;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::memory::{PoolAccess, PoolAlloc, PoolAttribute, PoolCreate, PoolFree};
use mpsshim_proto::message::{Object, Range};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How long a trim waits until the session's work completes.
const SETTLING: Duration = Duration::from_micros(500);

/// First of the three attributes `CU_MEMPOOL_ATTR_REUSE_*`.
const FIRST_REUSE: u32 = CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES;

/// `cuMemPoolCreate`.
pub fn pool_create(session: &mut Session, shared: &Shared, body: PoolCreate) -> Reply {
    let properties = virtual_memory::properties(shared, &body.properties)?;
    let device = shared.gpu.device(body.properties.location.id as u32)?;
    let properties = CUmemPoolProps {
        kind: properties.kind,
        handle_types: properties.requested_handle_types,
        location: properties.location,
        max_size: body.max_size as usize,
        usage: properties.usage,
        ..CUmemPoolProps::default()
    };
    let pools = &mut session.objects.pools;
    pools.create(
        &shared.gpu,
        (body.handle, device.ordinal),
        &session.account,
        &properties,
    )?;
    pools.begin_marks(body.handle, &session.shared.description);
    describe_pool(session, body.handle);
    Ok(Vec::new())
}

/// `cuMemPoolDestroy`.
pub fn pool_destroy(session: &mut Session, shared: &Shared, body: Object) -> Result<(), CallError> {
    let pool = session.objects.pools.pools.get(body.object);
    let pool = pool.map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    shared.gpu.devices[pool.device].make_current(&shared.gpu.driver)?;
    shared.gpu.driver.memory.pool_destroy(pool.raw)?;
    let pool = session.objects.pools.pools.remove(body.object)?;
    session.objects.leaving.push(pool.into_kept());
    session.objects.pools.note_end(body.object);
    describe_pool_end(session, body.object);
    Ok(())
}

/// The driver's pool behind a handle; its device's context is made current.
pub fn pool(session: &Session, shared: &Shared, handle: u64) -> Result<CUmemoryPool, CUresult> {
    let Ok(pool) = session.objects.pools.pools.get(handle) else {
        return Err(CUDA_ERROR_INVALID_VALUE);
    };
    shared.gpu.devices[pool.device].make_current(&shared.gpu.driver)?;
    Ok(pool.raw)
}

/// `cuMemAllocFromPoolAsync`. In a stream that captures, the driver makes it a node of the graph.
pub fn pool_alloc(session: &mut Session, shared: &Shared, body: PoolAlloc) -> Reply {
    let Ok(pool) = session.objects.pools.pools.get(body.pool) else {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    };
    let (pool, device, is_divided) = (pool.raw, pool.device, pool.settings.is_some());
    session.objects.pools.has_room()?;
    let index = session.objects.streams.index(body.stream)?;
    if session.objects.streams.at(index)?.capturing {
        return pool_alloc_node(session, shared, &body, pool, device);
    }
    if is_divided {
        return divided::alloc(session, shared, &body, index);
    }
    let charge = with_room(
        session,
        shared,
        (Memory::Device(device), body.len),
        |session| session.objects.pools.take(body.pool, body.len),
    )?;
    let (index, stream) = match session.prepare(&shared.gpu, body.stream) {
        Ok(ready) => ready,
        Err(error) => {
            session.objects.pools.put_back(body.pool, charge);
            return Err(error);
        }
    };
    let mut start = 0;
    let made = shared
        .gpu
        .driver
        .memory
        .pool_alloc(&mut start, body.len as usize, pool, stream);
    if let Err(status) = made {
        session.objects.pools.put_back(body.pool, charge);
        return Err(status.into());
    }
    if let Err(status) = session.submitted(&shared.gpu, index, 1) {
        // The client never learns of this memory.
        let _ = shared.gpu.driver.memory.pool_free(start, stream);
        session.objects.pools.put_back(body.pool, charge);
        return Err(status);
    }
    session
        .objects
        .pools
        .note((start, body.len), Some(charge), body.pool, device);
    Ok(Range {
        start,
        len: body.len,
    }
    .as_bytes()
    .to_vec())
}

/// `cuMemAllocFromPoolAsync` in a capture: the memory belongs to the graph, and is charged with the graph's
/// instances.
fn pool_alloc_node(
    session: &mut Session,
    shared: &Shared,
    body: &PoolAlloc,
    pool: CUmemoryPool,
    device: Ordinal,
) -> Reply {
    let (index, stream) = session.prepare(&shared.gpu, body.stream)?;
    let (mut start, len) = (0, body.len);
    shared
        .gpu
        .driver
        .memory
        .pool_alloc(&mut start, len as usize, pool, stream)?;
    let graph = match captured_graph(session, shared, index, body.stream) {
        Ok(graph) => graph,
        Err(status) => {
            // The client never learns of this memory.
            let _ = shared.gpu.driver.memory.pool_free(start, stream);
            return Err(status.into());
        }
    };
    session.objects.graphs.given((start, len), graph, device);
    Ok(Range { start, len }.as_bytes().to_vec())
}

/// `cuMemFreeAsync` of memory from a pool. In a stream that captures, the driver makes it a node of the graph, and
/// the memory is freed when the graph is launched.
pub fn pool_free(session: &mut Session, shared: &Shared, body: PoolFree) -> Result<(), CallError> {
    let index = session.objects.streams.index(body.stream)?;
    let is_captured = session.objects.streams.at(index)?.capturing;
    if session.objects.pools.is_divided(body.address) {
        // In a capture, only memory of graphs can be freed.
        return match is_captured {
            true => Err(CUDA_ERROR_INVALID_VALUE.into()),
            false => divided::free(session, shared, &body, index),
        };
    }
    let pooled = session.objects.pools.device_of(body.address).is_some();
    if !pooled && !session.objects.graphs.memory.begins(body.address) {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    if !pooled && !is_capturing(session, body.stream) && !may_use_graph_memory(session, &shared.gpu)
    {
        return Err(CallError::Full);
    }
    let (index, stream) = session.prepare(&shared.gpu, body.stream)?;
    shared.gpu.driver.memory.pool_free(body.address, stream)?;
    if session.objects.streams.at(index)?.capturing {
        let graph = captured_graph(session, shared, index, body.stream)?;
        session.objects.graphs.memory.freed_by(body.address, graph);
    } else if pooled {
        let charge = session.objects.pools.note_free(body.address);
        session.objects.leaving.extend(charge);
    } else {
        session.objects.graphs.memory.freed(body.address);
        session.objects.graphs.discharge();
    }
    session.submitted(&shared.gpu, index, 1)
}

/// `cuMemPoolGetAttribute`.
pub fn pool_get_attribute(session: &mut Session, shared: &Shared, body: PoolAttribute) -> Reply {
    let pool = pool(session, shared, body.pool)?;
    if body.attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD {
        return Ok(number(
            session.objects.pools.pools.get(body.pool)?.threshold,
        ));
    }
    let mut value = 0;
    shared
        .gpu
        .driver
        .memory
        .pool_get_attribute(pool, body.attribute, &mut value)?;
    let divided = session.objects.pools.divided(body.pool);
    let own = divided.map_or(0, |memory| memory.attribute(body.attribute));
    Ok(number(value + own))
}

/// `cuMemPoolSetAttribute`.
pub fn pool_set_attribute(session: &mut Session, shared: &Shared, body: PoolAttribute) -> Reply {
    let pool = pool(session, shared, body.pool)?;
    let is_divided = session.objects.pools.divided(body.pool).is_some();
    if body.attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD {
        if !is_divided {
            pools::set_threshold(&shared.gpu, pool, body.value)?;
        }
        session.objects.pools.note_threshold(body.pool, body.value);
        describe_pool(session, body.pool);
        return Ok(Vec::new());
    }
    let mut value = body.value;
    shared
        .gpu
        .driver
        .memory
        .pool_set_attribute(pool, body.attribute, &mut value)?;
    let pools = &mut session.objects.pools;
    if let Some(at) = body.attribute.checked_sub(FIRST_REUSE).filter(|at| *at < 3) {
        if let Some(settings) = &mut pools.pools.get_mut(body.pool)?.settings {
            settings.reuse[at as usize] = body.value;
        }
        describe_pool(session, body.pool);
    } else {
        pools.reset_highest(body.pool, body.attribute, &session.shared.description);
    }
    Ok(Vec::new())
}

/// `cuMemPoolSetAccess`.
pub fn pool_set_access(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, PoolAccess>,
) -> Reply {
    let Call { body, message } = call;
    let accesses = accesses_behind::<PoolAccess>(shared, message, body.count)?;
    let pools = &mut session.objects.pools;
    pools.set_access(&shared.gpu, body.pool, &accesses)?;
    describe_pool(session, body.pool);
    Ok(Vec::new())
}

/// `cuMemPoolGetAccess`.
pub fn pool_get_access(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, PoolAccess>,
) -> Reply {
    let Call { body, message } = call;
    let accesses = accesses_behind::<PoolAccess>(shared, message, body.count)?;
    let access = accesses.first().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let pool = pool(session, shared, body.pool)?;
    let mut flags = 0;
    shared
        .gpu
        .driver
        .memory
        .pool_get_access(&mut flags, pool, &access.location)?;
    Ok(number(flags as u64))
}

/// Makes pools return memory beyond their release thresholds to the driver, if the session's work completes soon.
pub fn settle_pools(session: &mut Session, shared: &Shared) {
    if !session.objects.pools.keep_any() {
        return;
    }
    let began = Instant::now();
    while session.has_work_in_flight(&shared.gpu) {
        if began.elapsed() > SETTLING {
            return;
        }
        std::hint::spin_loop();
    }
    settle(session, shared, |pool| pool.threshold);
}

/// Returns memory of each pool to the driver until at most `keep` bytes are left. None of the session's work may be in flight.
pub fn settle(session: &mut Session, shared: &Shared, keep: impl Fn(&Pool) -> u64) {
    session.note_amid_work(Refusal::Memory);
    let pools = &mut session.objects.pools;
    pools.settle(&shared.gpu, &keep);
    for chunk in pools.take_surplus(&keep) {
        describe_chunk_end(session, &chunk);
        shared.gpu.free_chunk(chunk);
    }
}

/// Makes the pools of an idle session return memory beyond their release thresholds to the driver.
pub fn trim_pools(session: &mut Session, shared: &Shared) {
    let is_due = session.objects.pools.is_untrimmed() && !session.has_unawaited();
    if is_due && !session.has_work_in_flight(&shared.gpu) {
        session.objects.pools.take_untrimmed();
        if session.objects.pools.has_pools_of_driver() {
            session.synchronize_idle(&shared.gpu);
        }
        settle(session, shared, |pool| pool.threshold.max(pools::KEPT));
    }
}

/// `cuMemPoolTrimTo`.
pub fn pool_trim(session: &mut Session, shared: &Shared, body: PoolAttribute) -> Reply {
    // The driver notices freed memory only when it is synchronized with. The client may have waited for its work
    // before the server has learned of the completion.
    let began = Instant::now();
    while session.has_work_in_flight(&shared.gpu) && began.elapsed() < SETTLING {
        std::hint::spin_loop();
    }
    if session.objects.pools.has_pools_of_driver() {
        session.synchronize_idle(&shared.gpu);
    }
    let pool = pool(session, shared, body.pool)?;
    shared
        .gpu
        .driver
        .memory
        .pool_trim_to(pool, body.value as usize)?;
    if !session.has_work_in_flight(&shared.gpu) {
        let raw = session.objects.pools.pools.get(body.pool)?.raw;
        settle(session, shared, |pool| match pool.raw == raw {
            true if pool.settings.is_some() => body.value,
            _ => pool.threshold.max(pools::KEPT),
        });
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, obeys, obeys_with_handle, others, records,
    };
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::Op;
    use mpsshim_proto::message::memory::{ACCESSES_MAX, Access, Location, Properties};

    const LEN: u64 = 1 << 20;
    const DEVICE: Location = Location {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: 0,
    };

    fn create(test: &mut Fixture, location: Location) -> PoolCreate {
        PoolCreate {
            handle: test.new_handle(Kind::MemPool),
            max_size: 0,
            properties: Properties {
                location,
                // Otherwise the server divides its memory.
                handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                ..Properties::default()
            },
        }
    }

    fn pool(test: &mut Fixture) -> u64 {
        let body = create(test, DEVICE);
        assert_eq!(test.status(Op::PoolCreate, &body, &[]), CUDA_SUCCESS);
        body.handle
    }

    fn alloc(test: &mut Fixture) -> PoolAlloc {
        PoolAlloc {
            pool: pool(test),
            len: LEN,
            stream: test.stream(),
        }
    }

    fn attribute(pool: u64, attribute: u32, value: u64) -> PoolAttribute {
        PoolAttribute {
            pool,
            value,
            attribute,
            pad: 0,
        }
    }

    #[test]
    fn a_pool_of_no_device_is_refused() {
        let mut test = Fixture::new(&[("cuMemPoolCreate", counts as Function)]);
        for (kind, id, status) in [
            (CU_MEM_LOCATION_TYPE_DEVICE, 1, CUDA_ERROR_INVALID_DEVICE),
            (CU_MEM_LOCATION_TYPE_HOST, 0, CUDA_ERROR_NOT_SUPPORTED),
            (CU_MEM_LOCATION_TYPE_INVALID, 0, CUDA_ERROR_INVALID_VALUE),
        ] {
            let body = create(&mut test, Location { kind, id });
            assert_eq!(test.status(Op::PoolCreate, &body, &[]), status);
        }
        let pools = test.session.objects.pools.pools.len();
        assert_eq!((test.calls(), pools), (0, 0));
    }

    #[test]
    fn a_pool_that_is_not_the_clients_is_destroyed_again() {
        let mut test = Fixture::new(&[
            ("cuMemPoolCreate", obeys_with_handle as Function),
            ("cuMemPoolDestroy", counts as Function),
        ]);
        let known = pool(&mut test);
        let event = test.new_handle(Kind::Event);
        for handle in [known, event] {
            let body = PoolCreate {
                handle,
                ..create(&mut test, DEVICE)
            };
            let status = test.status(Op::PoolCreate, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{handle:#x}");
            assert_eq!(test.calls(), 1, "{handle:#x}");
        }
        for (status, pools) in [(CUDA_ERROR_NOT_SUPPORTED, 1), (CUDA_SUCCESS, 2), (FAULT, 2)] {
            let body = create(&mut test, DEVICE);
            test.orders(status);
            assert_eq!(test.told(Op::PoolCreate, &body, &[]), status);
            assert_eq!(test.session.objects.pools.pools.len(), pools);
        }
        assert!(test.has_ended());
    }

    #[test]
    fn a_pool_is_named_by_its_handle_only() {
        let mut test = Fixture::new(&[
            ("cuMemPoolDestroy", counts as Function),
            ("cuMemAllocFromPoolAsync", counts as Function),
            ("cuMemPoolGetAttribute", counts as Function),
            ("cuMemPoolSetAttribute", counts as Function),
            ("cuMemPoolSetAccess", counts as Function),
            ("cuMemPoolGetAccess", counts as Function),
            ("cuMemPoolTrimTo", counts as Function),
        ]);
        let good = alloc(&mut test);
        test.calls();
        let access = Access {
            location: DEVICE,
            ..Access::default()
        };
        for pool in others(good.pool) {
            let one = PoolAccess {
                pool,
                count: 1,
                pad: 0,
            };
            let reuse = attribute(pool, 1, 0);
            let all = [
                test.status(Op::PoolDestroy, &Object { object: pool }, &[]),
                test.status(Op::PoolAlloc, &PoolAlloc { pool, ..good }, &[]),
                test.status(Op::PoolGetAttribute, &reuse, &[]),
                test.status(Op::PoolSetAttribute, &reuse, &[]),
                test.status(Op::PoolTrim, &reuse, &[]),
                test.status(Op::PoolSetAccess, &one, access.as_bytes()),
                test.status(Op::PoolGetAccess, &one, access.as_bytes()),
            ];
            assert_eq!(all, [CUDA_ERROR_INVALID_VALUE; 7], "{pool:#x}");
        }
        for stream in others(good.stream) {
            let status = test.status(Op::PoolAlloc, &PoolAlloc { stream, ..good }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{stream:#x}");
        }
        assert_eq!((test.calls(), test.held()), (0, 0));
    }

    #[test]
    fn memory_of_a_pool_counts_from_its_allocation_on() {
        let mut test = Fixture::new(&[("cuMemAllocFromPoolAsync", obeys_with_handle as Function)]);
        let body = alloc(&mut test);
        test.limit(LEN);
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let status = test.status(Op::PoolAlloc, &body, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        // It counts as what the pool keeps, which the next allocation takes first.
        test.orders(CUDA_SUCCESS);
        let start: u64 = test.reply(Op::PoolAlloc, &body, &[]).expect("memory");
        assert_eq!(test.held(), LEN);
        assert!(test.owns(start + LEN - 8));
        assert!(!test.owns(start + LEN - 7));
        let more = PoolAlloc { len: 1, ..body };
        let status = test.status(Op::PoolAlloc, &more, &[]);
        assert_eq!((status, test.held()), (CUDA_ERROR_OUT_OF_MEMORY, LEN));
    }

    #[test]
    fn a_fault_in_an_allocation_or_a_free_ends_the_session() {
        for (op, name) in [
            (Op::PoolAlloc, "cuMemAllocFromPoolAsync"),
            (Op::PoolFree, "cuMemFreeAsync"),
        ] {
            let mut test = Fixture::new(&[(name, obeys_with_handle as Function)]);
            let body = alloc(&mut test);
            let address: u64 = test.reply(Op::PoolAlloc, &body, &[]).expect("memory");
            let free = PoolFree {
                address,
                stream: body.stream,
            };
            test.orders(FAULT);
            let told = match op {
                Op::PoolAlloc => test.told(op, &body, &[]),
                _ => test.told(op, &free, &[]),
            };
            assert_eq!(told, FAULT, "{op:?}");
            assert!(test.has_ended(), "{op:?}");
        }
    }

    #[test]
    fn memory_is_freed_once_and_where_it_begins() {
        let mut test = Fixture::new(&[("cuMemFreeAsync", records as Function)]);
        let body = alloc(&mut test);
        let address: u64 = test.reply(Op::PoolAlloc, &body, &[]).expect("memory");
        let stream = body.stream;
        for address in [0, address + 1, address + LEN] {
            let status = test.status(Op::PoolFree, &PoolFree { address, stream }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{address:#x}");
        }
        for stream in others(stream) {
            let status = test.status(Op::PoolFree, &PoolFree { address, stream }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{stream:#x}");
        }
        assert_eq!((test.calls(), test.held()), (0, LEN));
        let free = PoolFree { address, stream };
        assert_eq!(test.status(Op::PoolFree, &free, &[]), CUDA_SUCCESS);
        assert_eq!(test.recorded()[0][0], address);
        assert!(!test.owns(address));
        assert_eq!(test.held(), LEN, "the pool keeps it");
        let status = test.status(Op::PoolFree, &free, &[]);
        assert_eq!((status, test.calls()), (CUDA_ERROR_INVALID_VALUE, 1));
    }

    #[test]
    fn memory_that_the_driver_does_not_free_stays_the_clients() {
        let mut test = Fixture::new(&[("cuMemFreeAsync", obeys as Function)]);
        let body = alloc(&mut test);
        let address: u64 = test.reply(Op::PoolAlloc, &body, &[]).expect("memory");
        let free = PoolFree {
            address,
            stream: body.stream,
        };
        for (status, owned) in [(CUDA_ERROR_NOT_SUPPORTED, true), (CUDA_SUCCESS, false)] {
            test.orders(status);
            assert_eq!(test.status(Op::PoolFree, &free, &[]), status);
            assert_eq!(test.owns(address), owned, "{status}");
        }
    }

    #[test]
    fn memory_that_a_pool_keeps_is_used_first_and_not_counted_twice() {
        let mut test = Fixture::new(&[]);
        let body = alloc(&mut test);
        test.limit(LEN);
        for _ in 0..2 {
            let address: u64 = test.reply(Op::PoolAlloc, &body, &[]).expect("memory");
            assert_eq!(test.held(), LEN);
            let free = PoolFree {
                address,
                stream: body.stream,
            };
            assert_eq!(test.status(Op::PoolFree, &free, &[]), CUDA_SUCCESS);
        }
    }

    #[test]
    fn memory_that_a_pool_keeps_counts_after_an_allocation_that_failed() {
        let mut test = Fixture::new(&[("cuMemAllocFromPoolAsync", obeys_with_handle as Function)]);
        let body = alloc(&mut test);
        let address: u64 = test.reply(Op::PoolAlloc, &body, &[]).expect("memory");
        let free = PoolFree {
            address,
            stream: body.stream,
        };
        assert_eq!(test.status(Op::PoolFree, &free, &[]), CUDA_SUCCESS);
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let status = test.status(Op::PoolAlloc, &body, &[]);
        assert_eq!((status, test.held()), (CUDA_ERROR_NOT_SUPPORTED, LEN));
    }

    #[test]
    fn memory_of_a_destroyed_pool_stays_the_clients() {
        let mut test = Fixture::new(&[]);
        let body = alloc(&mut test);
        let address: u64 = test.reply(Op::PoolAlloc, &body, &[]).expect("memory");
        let object = Object { object: body.pool };
        assert_eq!(test.status(Op::PoolDestroy, &object, &[]), CUDA_SUCCESS);
        let again = test.status(Op::PoolDestroy, &object, &[]);
        assert_eq!(again, CUDA_ERROR_INVALID_VALUE);
        assert!(test.owns(address));
        let free = PoolFree {
            address,
            stream: body.stream,
        };
        assert_eq!(test.status(Op::PoolFree, &free, &[]), CUDA_SUCCESS);
        assert!(!test.owns(address));
        assert_eq!(test.held(), LEN, "until the session's work is done");
    }

    #[test]
    fn a_release_threshold_is_the_clients_and_the_driver_keeps_more() {
        let mut test = Fixture::new(&[("cuMemPoolSetAttribute", obeys as Function)]);
        let pool = pool(&mut test);
        let threshold = attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 5);
        for (status, now) in [(CUDA_ERROR_NOT_SUPPORTED, 0), (CUDA_SUCCESS, 5)] {
            test.orders(status);
            assert_eq!(test.status(Op::PoolSetAttribute, &threshold, &[]), status);
            let told = test.reply::<u64>(Op::PoolGetAttribute, &threshold, &[]);
            assert_eq!(told, Ok(now));
        }
    }

    #[test]
    fn calls_on_a_pool_return_the_error_of_the_driver() {
        let reuse = CU_MEMPOOL_ATTR_RELEASE_THRESHOLD - 1;
        let access = Access {
            location: DEVICE,
            ..Access::default()
        };
        for (op, name) in [
            (Op::PoolGetAttribute, "cuMemPoolGetAttribute"),
            (Op::PoolSetAttribute, "cuMemPoolSetAttribute"),
            (Op::PoolTrim, "cuMemPoolTrimTo"),
            (Op::PoolSetAccess, "cuMemPoolSetAccess"),
            (Op::PoolGetAccess, "cuMemPoolGetAccess"),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let pool = pool(&mut test);
            let one = PoolAccess {
                pool,
                count: 1,
                pad: 0,
            };
            for (status, ends) in [
                (CUDA_ERROR_NOT_SUPPORTED, false),
                (CUDA_SUCCESS, false),
                (FAULT, true),
            ] {
                test.orders(status);
                let told = match op {
                    Op::PoolSetAccess | Op::PoolGetAccess => test.told(op, &one, access.as_bytes()),
                    _ => test.told(op, &attribute(pool, reuse, 0), &[]),
                };
                assert_eq!(told, status, "{op:?}");
                assert_eq!(test.has_ended(), ends, "{op:?} {status}");
            }
        }
    }

    #[test]
    fn accesses_to_a_pool_fit_the_message_and_are_of_devices() {
        let mut test = Fixture::new(&[
            ("cuMemPoolSetAccess", counts as Function),
            ("cuMemPoolGetAccess", counts as Function),
        ]);
        let pool = pool(&mut test);
        let body = |count| PoolAccess {
            pool,
            count,
            pad: 0,
        };
        let second = Access {
            location: Location { id: 1, ..DEVICE },
            ..Access::default()
        };
        for op in [Op::PoolSetAccess, Op::PoolGetAccess] {
            for count in [1, ACCESSES_MAX as u32 + 1] {
                assert!(test.is_violation(op, &body(count), &[]), "{op:?} {count}");
            }
            let status = test.status(op, &body(1), second.as_bytes());
            assert_eq!(status, CUDA_ERROR_INVALID_DEVICE, "{op:?}");
        }
        let status = test.status(Op::PoolGetAccess, &body(0), &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "of no place");
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn a_captured_allocation_that_came_to_nothing_is_freed_again() {
        let mut test = Fixture::new(&[
            ("cuMemAllocFromPoolAsync", obeys_with_handle as Function),
            ("cuMemFreeAsync", counts as Function),
        ]);
        let body = alloc(&mut test);
        test.captures(body.stream);
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let status = test.status(Op::PoolAlloc, &body, &[]);
        assert_eq!((status, test.calls()), (CUDA_ERROR_NOT_SUPPORTED, 0));
        test.orders(CUDA_SUCCESS);
        // This driver does not say that the stream captures.
        let status = test.status(Op::PoolAlloc, &body, &[]);
        assert_eq!(status, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        assert_eq!((test.calls(), test.held()), (1, 0));
        assert!(test.session.objects.graphs.memory.is_empty());
    }
}
