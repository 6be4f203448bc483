//! Stream-ordered allocation of memory that the server divides itself.

use crate::engine::base::account::Memory;
use crate::engine::base::call_error::CallError;
use crate::engine::base::journal::Refusal;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::memory::with_room;
use crate::engine::calls::reply::Reply;
use crate::engine::gpu::Gpu;
use crate::engine::lasting::pools::describe_chunk;
use crate::engine::objects::pools::divided::{Divided, Point};
use crate::engine::session::Session;
use crate::engine::session::objects::Objects;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::Range;
use mpsshim_proto::message::memory::{PoolAlloc, PoolFree};
use zerocopy::IntoBytes;

/// `cuMemAllocFromPoolAsync` of memory that the server divides. Nothing is submitted.
pub fn alloc(session: &mut Session, shared: &Shared, body: &PoolAlloc, index: usize) -> Reply {
    let device = session.objects.pools.pools.get(body.pool)?.device;
    let stream = session.objects.streams.at(index)?.number;
    let wanted = (Memory::Device(device), body.len);
    release_withheld(session, shared, body.pool);
    let start = with_room(session, shared, wanted, |session| {
        match take(session, &shared.gpu, body, stream)? {
            Some(start) => Ok(start),
            None => {
                grow(session, shared, (body.pool, device), body.len)?;
                let start = take(session, &shared.gpu, body, stream)?;
                start.ok_or(CUDA_ERROR_OUT_OF_MEMORY)
            }
        }
    })?;
    let description = &session.shared.description;
    let description = session.lasting.kept.then_some(&**description);
    let range = Range {
        start,
        len: body.len,
    };
    let pools = &mut session.objects.pools;
    pools.note_divided((range.start, range.len), body.pool, description);
    Ok(range.as_bytes().to_vec())
}

/// Takes memory of a pool for the next work of the stream with this number; `None` if the pool has to grow.
fn take(
    session: &mut Session,
    gpu: &Gpu,
    body: &PoolAlloc,
    number: u32,
) -> Result<Option<u64>, CUresult> {
    let segment = &session.shared.segment;
    let Objects {
        streams,
        retired,
        pools,
        ..
    } = &mut session.objects;
    let is_done = |(number, ops): Point| {
        let mut all = streams.iter_mut().chain(retired.iter_mut());
        let Some(stream) = all.find(|stream| stream.number == number) else {
            // It is gone, and had no work left.
            return true;
        };
        let is_done = stream.ops() - stream.in_flight(gpu, segment) >= ops;
        if !is_done {
            // Its progress is known at the next attempt. An error shows there too.
            let device = &gpu.devices[stream.device];
            let current = device.make_current(&gpu.driver);
            let _ = current.and_then(|()| stream.checkpoint(gpu));
        }
        is_done
    };
    let memory = pools.divided_mut(body.pool);
    let memory = memory.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let before = memory.collected();
    let found = memory.take(body.len, number, is_done);
    if memory.collected() != before {
        // Work that used it would run again beside the next work that does.
        session.note_amid_work(Refusal::Memory);
    }
    Ok(found)
}

/// Makes memory of a pool available that work of an earlier server may have used, once the client has waited for that work.
fn release_withheld(session: &mut Session, shared: &Shared, pool: u64) {
    let withholds = |session: &Session| {
        let memory = session.objects.pools.divided(pool);
        memory.is_some_and(Divided::withholds)
    };
    if !withholds(session)
        || session.has_unawaited()
        || session.inbox.held.any()
        || session.has_work_in_flight(&shared.gpu)
    {
        return;
    }
    if let Some(memory) = session.objects.pools.divided_mut(pool) {
        memory.release();
    }
}

/// Adds memory to a pool, enough for an allocation.
fn grow(
    session: &mut Session,
    shared: &Shared,
    (pool, device): (u64, Ordinal),
    len: u64,
) -> Result<(), CUresult> {
    let memory = session.objects.pools.divided(pool);
    let memory = memory.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let mut chunk = Err(CUDA_ERROR_OUT_OF_MEMORY);
    for step in memory.steps(len) {
        chunk = shared.gpu.make_chunk(&session.account, device, step);
        if !matches!(chunk, Err(CUDA_ERROR_OUT_OF_MEMORY)) {
            break;
        }
    }
    let chunk = chunk?;
    if let Err(status) = shared.gpu.set_chunk_access(&chunk, &memory.accesses) {
        shared.gpu.free_chunk(chunk);
        return Err(status);
    }
    describe_chunk(session, &shared.images, &chunk, pool);
    if let Some(memory) = session.objects.pools.divided_mut(pool) {
        memory.add(chunk);
    }
    Ok(())
}

/// `cuMemFreeAsync` of such memory: it takes effect behind the work submitted to the stream.
pub fn free(
    session: &mut Session,
    shared: &Shared,
    body: &PoolFree,
    index: usize,
) -> Result<(), CallError> {
    // Where no other stream has work in front of it, nothing is submitted, and the session stays at rest.
    if session.waits_for_others(&shared.gpu, index)? {
        session.prepare(&shared.gpu, body.stream)?;
        session.submitted(&shared.gpu, index, 1)?;
    }
    let len = session.objects.pools.len_of(body.address);
    session.note_freed(&shared.images, body.address, len.unwrap_or_default());
    let stream = session.objects.streams.at(index)?;
    let point = (stream.number, stream.ops());
    let description = &session.shared.description;
    let description = session.lasting.kept.then_some(&**description);
    let pools = &mut session.objects.pools;
    pools.note_divided_free(body.address, point, description);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::calls::pool::trim_pools;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, obeys_with_handle, others, small_memset, writes,
    };
    use mpsshim_proto::arena::{VIRTUAL_ARENA, VIRTUAL_UNIT as UNIT};
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::memory::PoolAttribute;
    use mpsshim_proto::message::{Mark, Object, Op, StreamCreate};
    use zerocopy::FromZeros;

    fn get(test: &mut Fixture, pool: u64, len: u64, stream: u64) -> Result<u64, CUresult> {
        let body = PoolAlloc { pool, len, stream };
        test.reply::<u64>(Op::PoolAlloc, &body, &[])
    }

    fn give(test: &mut Fixture, address: u64, stream: u64) -> CUresult {
        test.status(Op::PoolFree, &PoolFree { address, stream }, &[])
    }

    fn reserved(test: &mut Fixture, pool: u64) -> u64 {
        test.pool_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    }

    fn trim(test: &mut Fixture, pool: u64, bytes: u64) {
        let body = PoolAttribute {
            pool,
            value: bytes,
            ..PoolAttribute::default()
        };
        assert_eq!(test.status(Op::PoolTrim, &body, &[]), CUDA_SUCCESS);
    }

    /// Submits work that writes to an address.
    fn work(test: &mut Fixture, address: u64, stream: u64) {
        let body = small_memset(address, stream);
        assert_eq!(test.status(Op::Memset, &body, &[]), CUDA_SUCCESS);
    }

    /// Work is in flight for as long as the test orders an error.
    const DRIVER: [(&str, Function); 4] = [
        ("cuMemAllocFromPoolAsync", counts as Function),
        ("cuMemFreeAsync", counts as Function),
        ("cuMemCreate", obeys_with_handle as Function),
        ("cuStreamWriteValue32_v2", writes as Function),
    ];
    const BUSY: CUresult = CUDA_ERROR_NOT_READY;

    #[test]
    fn the_driver_is_asked_for_memory_only_when_a_pool_grows() {
        let mut test = Fixture::new(&[
            ("cuMemAllocFromPoolAsync", counts as Function),
            ("cuMemFreeAsync", counts as Function),
            ("cuMemSetAccess", counts as Function),
            ("cuStreamWriteValue32_v2", counts as Function),
        ]);
        let (pool, stream) = (test.pool(0), test.stream());
        test.calls();
        let first = get(&mut test, pool, 1000, stream).expect("memory");
        assert_eq!((first, test.calls()), (VIRTUAL_ARENA, 1));
        for _ in 0..100 {
            let next = get(&mut test, pool, 1 << 20, stream).expect("memory");
            assert_eq!(next, first + 1024, "behind the free in the same stream");
            assert_eq!(give(&mut test, next, stream), CUDA_SUCCESS);
        }
        assert_eq!(test.calls(), 0);
        assert_eq!(
            test.pool_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT),
            1000
        );
        let highest = test.pool_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH);
        assert_eq!(
            (highest, reserved(&mut test, pool)),
            (1000 + (1 << 20), UNIT)
        );
        assert!(
            test.owns(first + 992) && !test.owns(first + 993),
            "its 1000 bytes"
        );
    }

    #[test]
    fn another_stream_gets_memory_when_the_work_before_its_free_is_complete() {
        let mut test = Fixture::new(&DRIVER);
        let pool = test.pool(0);
        let [one, other] = [(); 2].map(|()| test.stream());
        let address = get(&mut test, pool, UNIT, one).expect("memory");
        // More, which a busy driver does not give.
        let third = get(&mut test, pool, UNIT, one).expect("memory");
        assert_eq!(give(&mut test, third, other), CUDA_SUCCESS);
        test.orders(BUSY);
        work(&mut test, address, one);
        assert_eq!(give(&mut test, address, one), CUDA_SUCCESS);
        let second = get(&mut test, pool, UNIT, other).expect("memory");
        assert_ne!(second, address, "the first stream's work may be in flight");
        let again = get(&mut test, pool, UNIT, one);
        assert_eq!(again, Ok(address), "in the order of the stream");
        assert_eq!(give(&mut test, address, one), CUDA_SUCCESS);
        let mark = Mark {
            stream: one,
            slot: 0,
            value: 1,
        };
        assert_eq!(test.status(Op::Mark, &mark, &[]), CUDA_SUCCESS);
        let none = get(&mut test, pool, UNIT, other);
        assert_eq!(none, Err(BUSY), "the pool would have to grow");
        test.session.shared.segment.set_flag(0, 1);
        assert_eq!(get(&mut test, pool, UNIT, other), Ok(address), "reached");
        assert_eq!(test.calls(), 0, "of the driver's pools");
    }

    #[test]
    fn a_free_in_the_legacy_stream_is_work_only_behind_other_streams() {
        let mut test = Fixture::new(&DRIVER);
        let pool = test.pool(0);
        let of = |test: &mut Fixture, legacy: Option<u64>| {
            let stream = test.new_handle(Kind::Stream);
            let body = StreamCreate {
                stream,
                legacy: legacy.unwrap_or(stream),
                ..StreamCreate::new_zeroed()
            };
            assert_eq!(test.status(Op::StreamCreate, &body, &[]), CUDA_SUCCESS);
            stream
        };
        let legacy = of(&mut test, None);
        let blocking = of(&mut test, Some(legacy));
        let mark = |test: &mut Fixture, stream, value| {
            let (slot, body) = (
                0,
                Mark {
                    stream,
                    slot: 0,
                    value,
                },
            );
            assert_eq!(test.status(Op::Mark, &body, &[]), CUDA_SUCCESS);
            test.session.shared.segment.set_flag(slot, value);
        };
        let [first, second, third] =
            [(); 3].map(|()| get(&mut test, pool, UNIT, legacy).expect("memory"));
        for (stream, address, value) in [(legacy, first, 1), (blocking, second, 2)] {
            work(&mut test, address, stream);
            mark(&mut test, stream, value);
            assert_eq!(give(&mut test, address, stream), CUDA_SUCCESS);
            assert!(test.session.shared.is_at_rest(), "nothing was submitted");
        }
        test.orders(BUSY);
        work(&mut test, third, blocking);
        assert_eq!(give(&mut test, third, legacy), CUDA_SUCCESS);
        assert!(!test.session.shared.is_at_rest());
        let index = test
            .session
            .objects
            .streams
            .index(legacy)
            .expect("a stream");
        let ops = test.session.objects.streams.at(index).expect("it").ops();
        assert_eq!(
            ops, 3,
            "the work, the mark, and the wait for the other stream"
        );
    }

    #[test]
    fn a_pool_grows_by_small_steps_at_first_and_not_beyond_its_limits() {
        let mut test = Fixture::new(&DRIVER);
        let (pool, stream) = (test.pool(0), test.stream());
        let mut steps = Vec::new();
        for _ in 0..130 {
            get(&mut test, pool, UNIT / 2 + 1, stream).expect("memory");
            steps.push(reserved(&mut test, pool) / UNIT);
        }
        steps.dedup();
        assert_eq!(steps[..7], [1, 2, 4, 8, 16, 32, 48]);
        let limited = test.pool(3 * UNIT);
        for _ in 0..3 {
            get(&mut test, limited, UNIT, stream).expect("within its limit");
        }
        let beyond = get(&mut test, limited, 1, stream);
        assert_eq!(beyond, Err(CUDA_ERROR_OUT_OF_MEMORY));
        for len in [1 << 46, u64::MAX] {
            let beyond = get(&mut test, pool, len, stream);
            assert_eq!(beyond, Err(CUDA_ERROR_OUT_OF_MEMORY));
        }
        let held = test.held();
        test.limit(held + UNIT);
        let used_up = (0..).map_while(|_| get(&mut test, pool, UNIT, stream).ok());
        assert!(used_up.count() > 1, "what is reserved, and the last unit");
        assert_eq!(test.held(), held + UNIT);
    }

    #[test]
    fn memory_that_the_driver_refuses_is_not_counted() {
        let mut test = Fixture::new(&DRIVER);
        let (pool, stream) = (test.pool(0), test.stream());
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let refused = get(&mut test, pool, 1, stream);
        assert_eq!((refused, test.held()), (Err(CUDA_ERROR_NOT_SUPPORTED), 0));
        test.orders(CUDA_SUCCESS);
        let first = get(&mut test, pool, 1, stream);
        assert_eq!(first, Ok(VIRTUAL_ARENA), "the addresses are free again");
        test.orders(FAULT);
        assert_eq!(get(&mut test, pool, UNIT, stream), Err(FAULT));
        assert!(test.has_ended());
    }

    #[test]
    fn free_memory_goes_back_when_it_is_trimmed_and_nothing_is_in_flight() {
        let mut test = Fixture::new(&[
            ("cuMemRelease", counts as Function),
            ("cuStreamWriteValue32_v2", writes as Function),
        ]);
        let (pool, stream) = (test.pool(0), test.stream());
        let blocks = [(); 3].map(|()| get(&mut test, pool, 4 * UNIT, stream).expect("memory"));
        for address in [blocks[0], blocks[2]] {
            assert_eq!(give(&mut test, address, stream), CUDA_SUCCESS);
        }
        test.calls();
        trim(&mut test, pool, 9 * UNIT);
        assert_eq!((reserved(&mut test, pool), test.calls()), (8 * UNIT, 1));
        trim(&mut test, pool, 0);
        assert_eq!((reserved(&mut test, pool), test.calls()), (4 * UNIT, 1));
        assert_eq!(test.held(), 4 * UNIT);
        test.orders(BUSY);
        work(&mut test, blocks[1], stream);
        assert_eq!(give(&mut test, blocks[1], stream), CUDA_SUCCESS);
        trim(&mut test, pool, 0);
        assert_eq!(reserved(&mut test, pool), 4 * UNIT, "work is in flight");
        test.orders(CUDA_SUCCESS);
        trim(&mut test, pool, 0);
        assert_eq!((reserved(&mut test, pool), test.held()), (0, 0));
    }

    #[test]
    fn a_free_in_the_default_stream_is_behind_the_work_of_all_blocking_streams() {
        let mut test = Fixture::new(&DRIVER);
        let pool = test.pool(0);
        let legacy = test.new_handle(Kind::Stream);
        let blocking = test.new_handle(Kind::Stream);
        for stream in [legacy, blocking] {
            let body = StreamCreate {
                stream,
                legacy,
                ..StreamCreate::default()
            };
            assert_eq!(test.status(Op::StreamCreate, &body, &[]), CUDA_SUCCESS);
        }
        let other = test.stream();
        let address = get(&mut test, pool, UNIT, blocking).expect("memory");
        test.orders(BUSY);
        work(&mut test, address, blocking);
        assert_eq!(give(&mut test, address, legacy), CUDA_SUCCESS);
        assert_eq!(get(&mut test, pool, UNIT, other), Err(BUSY));
        test.orders(CUDA_SUCCESS);
        assert_eq!(get(&mut test, pool, UNIT, other), Ok(address));
    }

    #[test]
    fn memory_of_a_destroyed_pool_is_freed_after_its_last_allocation() {
        let mut test = Fixture::new(&[("cuStreamWriteValue32_v2", writes as Function)]);
        let (pool, stream) = (test.pool(0), test.stream());
        let address = get(&mut test, pool, 5000, stream).expect("memory");
        let object = Object { object: pool };
        assert_eq!(test.status(Op::PoolDestroy, &object, &[]), CUDA_SUCCESS);
        let idle = |test: &mut Fixture| {
            let shared = test.shared.clone();
            // The first look has the device write completion markers.
            test.session.has_work_in_flight(&shared.gpu);
            trim_pools(&mut test.session, &shared);
        };
        idle(&mut test);
        assert_eq!((test.owns(address), test.held()), (true, UNIT));
        assert_eq!(give(&mut test, address, stream), CUDA_SUCCESS);
        assert!(!test.owns(address));
        idle(&mut test);
        assert_eq!(test.held(), 0);
    }

    #[test]
    fn memory_is_freed_once_where_it_begins_and_in_no_capture() {
        let mut test = Fixture::new(&DRIVER);
        let (pool, stream) = (test.pool(0), test.stream());
        let address = get(&mut test, pool, 5000, stream).expect("memory");
        for wrong in [0, address + 512, address + 5000] {
            let status = give(&mut test, wrong, stream);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{wrong:#x}");
        }
        for stream in others(stream) {
            let status = give(&mut test, address, stream);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{stream:#x}");
        }
        let capturing = test.stream();
        test.captures(capturing);
        let status = give(&mut test, address, capturing);
        assert_eq!(
            (status, test.owns(address)),
            (CUDA_ERROR_INVALID_VALUE, true)
        );
        assert_eq!(give(&mut test, address, stream), CUDA_SUCCESS);
        let status = give(&mut test, address, stream);
        assert_eq!((status, test.calls()), (CUDA_ERROR_INVALID_VALUE, 0));
    }
}
