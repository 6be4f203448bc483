//! Contexts: attaching to a device, limits.

use super::reply::{Reply, number};
use crate::engine::base::call::Incoming;
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::gpu::context_limits::ContextLimit;
use crate::engine::gpu::devices::Device;
use crate::engine::lasting::resources::part_of;
use crate::engine::lasting::{Lasting, Lost, Making, describe, failed};
use crate::engine::session::Session;
use crate::engine::session::flow::OwnContext;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::{Attach, Limit, REPLAYS};

/// Bytes (`CU_LIMIT_MAX_L2_FETCH_GRANULARITY`).
const L2_FETCH_MAX: u64 = 128;

/// The limit that a message sets, if it takes memory and is within its bounds, and its device, whose context is then
/// current.
fn wanted_limit<'a>(
    shared: &'a Shared,
    message: Incoming<'_>,
) -> Option<(&'a Device, ContextLimit)> {
    let body = message.body::<Limit>().ok()?;
    let device = shared.gpu.device(body.device).ok()?;
    let wanted = ContextLimit::new(body.limit, body.value)?;
    let is_current =
        wanted.is_within_bounds(device) && device.make_current(&shared.gpu.driver).is_ok();
    is_current.then_some((device, wanted))
}

/// Ensures that the device has a context.
pub fn attach(session: &mut Session, shared: &Shared, body: Attach) -> Reply {
    let device = shared.gpu.device(body.device)?;
    device.attach(&shared.gpu.driver)?;
    // May partition the device: done here, where it may take time, rather than with the first stream.
    part_of(session, shared, device)?;
    if body.flags & REPLAYS != 0 && shared.gpu.keeping.is_on() {
        session.keep_journal();
    }
    Ok(Vec::new())
}

/// `cuCtxGetLimit`.
pub fn get_limit(_: &mut Session, shared: &Shared, body: Limit) -> Reply {
    let device = shared.gpu.device(body.device)?;
    device.make_current(&shared.gpu.driver)?;
    let mut value = 0;
    shared.gpu.driver.ctx_get_limit(&mut value, body.limit)?;
    // The context's initial limit, because another client may have raised the present one.
    Ok(number(
        device.first_limit(body.limit).unwrap_or(value as u64),
    ))
}

/// Whether `cuCtxSetLimit` has to raise the limit of the driver's context.
pub fn raises_limit(shared: &Shared, message: Incoming<'_>) -> bool {
    let Some((_, wanted)) = wanted_limit(shared, message) else {
        return false;
    };
    let mut value = 0;
    let known = shared.gpu.driver.ctx_get_limit(&mut value, wanted.limit);
    known.is_ok() && wanted.value > value as u64
}

/// Whether `cuCtxSetLimit` raises a limit that belongs to one program above its initial value.
pub fn raises_limit_of_program(shared: &Shared, message: Incoming<'_>) -> bool {
    let wanted = wanted_limit(shared, message);
    wanted.is_some_and(|(device, wanted)| {
        let first = device.first_limit(wanted.limit);
        wanted.is_of_program() && first.is_some_and(|first| wanted.value > first)
    })
}

/// `cuCtxSetLimit`. In a context that clients share, a limit is only ever raised, within bounds. Returns the limit that
/// the client would have in a context of its own.
pub fn set_limit(session: &mut Session, shared: &Shared, body: Limit) -> Reply {
    let device = shared.gpu.device(body.device)?;
    device.make_current(&shared.gpu.driver)?;
    if let Some(wanted) = ContextLimit::new(body.limit, body.value) {
        let value = raise(session, shared, device, wanted)?;
        let key = u64::from(body.device) | u64::from(body.limit) << 32;
        describe::<ClientLimit>(session, key, &body.value);
        return Ok(number(value));
    }
    shared.gpu.driver.ctx_get_limit(&mut 0, body.limit)?;
    match body.limit {
        // Hints for the use of the L2 cache, which all clients share: accepted without effect.
        CU_LIMIT_MAX_L2_FETCH_GRANULARITY if body.value > L2_FETCH_MAX => {
            Err(CUDA_ERROR_INVALID_VALUE.into())
        }
        CU_LIMIT_MAX_L2_FETCH_GRANULARITY | CU_LIMIT_PERSISTING_L2_CACHE_SIZE => {
            Ok(number(body.value))
        }
        // The driver does not permit setting other limits in a context like the server's.
        _ => Err(CUDA_ERROR_NOT_PERMITTED.into()),
    }
}

/// Raises the context's limit to at least this value, or sets the limit of the session's own context. Returns the
/// session's limit.
fn raise(
    session: &mut Session,
    shared: &Shared,
    device: &Device,
    wanted: ContextLimit,
) -> Result<u64, CUresult> {
    let ContextLimit { limit, value } = wanted;
    let mut present = 0;
    shared.gpu.driver.ctx_get_limit(&mut present, limit)?;
    if !wanted.is_within_bounds(device) {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let first = device.first_limit(limit).unwrap_or(present as u64);
    if session.flow.own == OwnContext::Taken && wanted.is_of_program() && value > first {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let limits = &mut session.objects.limits;
    let bytes = wanted.taken(first, device);
    let before = limits.set(&session.account, device.ordinal, wanted, bytes)?;
    let is_own = session.flow.own == OwnContext::Owned && wanted.is_of_program();
    if value <= present as u64 && !is_own {
        return Ok(value);
    }
    let set = shared.gpu.driver.ctx_set_limit(limit, value as usize);
    if let Err(status) = set.and_then(|()| shared.gpu.driver.ctx_get_limit(&mut present, limit)) {
        limits.undo(device.ordinal, limit, before);
        return Err(status);
    }
    if limit == CU_LIMIT_STACK_SIZE {
        device.has_grown(present as u64);
    }
    Ok(present as u64)
}

/// State of a limit that the session has set.
pub struct ClientLimit;

impl Lasting for ClientLimit {
    const KIND: Kind = Kind::Limit;
    type State = u64;

    fn make(
        record: &Record,
        value: u64,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let shared = making.shared;
        let mut raise = || -> Result<u64, CUresult> {
            let wanted = ContextLimit::new((record.key >> 32) as u32, value);
            let device = shared.gpu.device(record.key as u32)?;
            device.make_current(&shared.gpu.driver)?;
            raise(
                session,
                shared,
                device,
                wanted.ok_or(CUDA_ERROR_INVALID_VALUE)?,
            )
        };
        raise().map(drop).map_err(failed("a limit", record))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{FAULT, Fixture, Function, counts, fails, obeys};
    use mpsshim_proto::message::Op;
    use std::cell::Cell;

    const HEAP: u32 = CU_LIMIT_MALLOC_HEAP_SIZE;
    const MIB: u64 = 1 << 20;
    /// The heap that a context begins with.
    const FIRST: usize = 8 << 20;

    thread_local! {
        /// The heap that the context has.
        static HAS: Cell<usize> = const { Cell::new(FIRST) };
    }

    extern "C" fn get(value: &mut usize) -> CUresult {
        *value = HAS.get();
        CUDA_SUCCESS
    }

    extern "C" fn set(_: u32, value: usize) -> CUresult {
        if obeys() == CUDA_SUCCESS {
            HAS.set(value);
        }
        obeys()
    }

    fn limit(limit: u32, value: u64) -> Limit {
        Limit {
            value,
            limit,
            device: 0,
        }
    }

    /// A session in a context whose heap is as at first.
    fn fixture(functions: &[(&'static str, Function)]) -> Fixture {
        let first = [
            ("cuCtxGetLimit", get as Function),
            ("cuCtxSetLimit", set as Function),
        ];
        let test = Fixture::new(&[functions, &first].concat());
        HAS.set(FIRST);
        test
    }

    #[test]
    fn limits_and_contexts_are_of_devices_that_exist() {
        let mut test = Fixture::new(&[
            ("cuCtxGetLimit", counts as Function),
            ("cuCtxSetLimit", counts as Function),
            ("cuDevicePrimaryCtxRetain", counts as Function),
        ]);
        let body = Limit {
            device: 1,
            ..limit(HEAP, MIB)
        };
        for op in [Op::GetLimit, Op::SetLimit] {
            let status = test.status(op, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_DEVICE, "{op:?}");
        }
        let second = Attach {
            device: 1,
            flags: 0,
        };
        let status = test.status(Op::Attach, &second, &[]);
        assert_eq!((status, test.calls()), (CUDA_ERROR_INVALID_DEVICE, 0));
    }

    #[test]
    fn a_limit_that_the_driver_does_not_know_is_its_error() {
        let name = "cuCtxGetLimit";
        let refuses = fails::<{ CUDA_ERROR_UNSUPPORTED_LIMIT.0 }>;
        let mut test = Fixture::new(&[(name, refuses as Function)]);
        for op in [Op::GetLimit, Op::SetLimit] {
            for which in [HEAP, CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 99] {
                let status = test.status(op, &limit(which, 1), &[]);
                assert_eq!(status, CUDA_ERROR_UNSUPPORTED_LIMIT, "{op:?} {which}");
            }
        }
        assert!(!test.session.objects.limits.any());
        drop(test);
        let mut test = Fixture::new(&[(name, obeys as Function)]);
        test.orders(FAULT);
        assert_eq!(test.told(Op::GetLimit, &limit(HEAP, 0), &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn a_raised_limit_counts_beyond_what_a_context_begins_with() {
        let mut test = fixture(&[]);
        let status = test.status(Op::SetLimit, &limit(HEAP, u64::MAX), &[]);
        assert_eq!(status, CUDA_ERROR_OUT_OF_MEMORY, "beyond all bounds");
        test.limit(20 * MIB);
        let status = test.status(Op::SetLimit, &limit(HEAP, 30 * MIB), &[]);
        assert_eq!(status, CUDA_ERROR_OUT_OF_MEMORY, "beyond the client's");
        assert_eq!(test.held(), 0);
        let lower = test.reply::<u64>(Op::SetLimit, &limit(HEAP, 5 * MIB), &[]);
        assert_eq!((lower, test.held()), (Ok(5 * MIB), 0));
        assert_eq!(HAS.get(), FIRST, "it is everyone's");
        let higher = test.reply::<u64>(Op::SetLimit, &limit(HEAP, 12 * MIB), &[]);
        assert_eq!((higher, test.held()), (Ok(12 * MIB), 4 * MIB));
        let first = test.reply::<u64>(Op::GetLimit, &limit(HEAP, 0), &[]);
        assert_eq!(first, Ok(8 * MIB), "what others raise is not told");
    }

    #[test]
    fn a_limit_that_the_driver_does_not_raise_counts_as_before() {
        let mut test = fixture(&[]);
        for held in [0, MIB] {
            let body = limit(HEAP, 20 * MIB);
            test.orders(CUDA_ERROR_NOT_SUPPORTED);
            let status = test.status(Op::SetLimit, &body, &[]);
            assert_eq!((status, test.held()), (CUDA_ERROR_NOT_SUPPORTED, held));
            test.orders(CUDA_SUCCESS);
            let body = limit(HEAP, 9 * MIB);
            assert_eq!(test.status(Op::SetLimit, &body, &[]), CUDA_SUCCESS);
            assert_eq!(test.held(), MIB);
        }
        test.orders(FAULT);
        assert_eq!(test.told(Op::SetLimit, &limit(HEAP, 20 * MIB), &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn limits_of_what_all_share_are_not_set() {
        let mut test = fixture(&[("cuCtxSetLimit", counts as Function)]);
        // The heap of all is set when a context is made.
        test.calls();
        for (body, status) in [
            (
                limit(CU_LIMIT_MAX_L2_FETCH_GRANULARITY, L2_FETCH_MAX + 1),
                CUDA_ERROR_INVALID_VALUE,
            ),
            (
                limit(CU_LIMIT_MAX_L2_FETCH_GRANULARITY, L2_FETCH_MAX),
                CUDA_SUCCESS,
            ),
            (
                limit(CU_LIMIT_PERSISTING_L2_CACHE_SIZE, u64::MAX),
                CUDA_SUCCESS,
            ),
            (limit(99, 1), CUDA_ERROR_NOT_PERMITTED),
        ] {
            assert_eq!(test.status(Op::SetLimit, &body, &[]), status);
        }
        assert_eq!((test.calls(), test.held()), (0, 0));
    }
}
