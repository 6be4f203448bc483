//! Device memory and pinned host memory.

use super::reply::{Reply, number};
use crate::engine::base::account::Memory;
use crate::engine::base::bounds;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::pinned::Pin;
use crate::engine::base::side;
use crate::engine::calls::pool::{settle, settle_pools};
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::host::HostBlock;
use crate::engine::lasting::describe_gone;
use crate::engine::lasting::memory as lasting;
use crate::engine::lasting::memory::{Place, describe_host, describe_host_end, describe_memory};
use crate::engine::session::Session;
use crate::engine::threads::room::{self, Making};
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::context::LimitMemory;
use mpsshim_proto::message::{Attach, HostAlloc, MANAGED, MemGrant, MemInfo, PointerQuery, Range};
use mpsshim_proto::shm;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How long freeing memory may block a slow-lane thread until the session's work completes, and how long a message that
/// waits for pinned memory does each time.
const SETTLING: Duration = Duration::from_micros(100);
/// How long `cuMemGetInfo` waits for memory that the client has freed.
const MOMENT: Duration = Duration::from_millis(50);
/// How long an allocation waits for memory that its session has freed. Memory of images that the reaper unloads is free
/// within five seconds.
const PATIENCE: Duration = Duration::from_secs(6);

/// Grants a mapping of device memory, from which the client serves its allocations.
pub fn mem_grant(session: &mut Session, shared: &Shared, body: MemGrant) -> Reply {
    let device = shared.gpu.device(body.device)?;
    let memory = Memory::Device(device.ordinal);
    let managed = body.flags & MANAGED != 0;
    let grant = with_room(session, shared, (memory, body.len), |session| {
        device.grant(&shared.gpu.driver, &session.account, (body.len, managed))
    })?;
    let range = Range {
        start: grant.start,
        len: grant.len,
    };
    let grant = Arc::new(grant);
    session.objects.grants.insert(range.start, grant.clone());
    if let Err(status) = session.objects.share_with_peers(&shared.gpu, range.start) {
        // The client never learns the address, so nothing can be in flight there.
        session.objects.grants.remove(&range.start);
        if let Err(status) = shared.gpu.revoke(grant) {
            tracing::error!("device memory that was not granted was not freed: {status}");
            shared.gpu.note_status(status);
        }
        return Err(status.into());
    }
    if !grant.stays() {
        let suspension = &session.shared.suspension;
        suspension.add_movable(grant.device, grant.len);
    }
    describe_memory(session, &shared.images, &grant);
    Ok(range.as_bytes().to_vec())
}

/// Takes device memory back. The client has waited for its work, and the server usually learns of the completion
/// within microseconds; otherwise the memory is freed once the session has nothing in flight.
pub fn mem_release(session: &mut Session, shared: &Shared, body: Range) -> Result<(), CallError> {
    let grant = session
        .objects
        .grants
        .remove(&body.start)
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    grant.left_by(&session.account);
    if !grant.stays() {
        let suspension = &session.shared.suspension;
        suspension.take_movable(grant.device, grant.len);
    }
    session.note_freed(&shared.images, grant.start, grant.len);
    describe_gone::<lasting::Memory>(session, body.start);
    session.objects.releasing.push(grant);
    let began = Instant::now();
    while !finish_releases(session, shared) && began.elapsed() < SETTLING {
        std::hint::spin_loop();
    }
    Ok(())
}

/// Calls `attempt` to allocate `bytes` of memory. If there is no room, but memory that the client has freed is not
/// back at the driver yet, the message waits for it, like `cuMemFree` waits for work natively, but not forever. A
/// request that exceeds the session's maximum does not wait.
///
/// # Errors
/// [`CallError::Full`] while the message waits; errors of `attempt`.
pub fn with_room<T>(
    session: &mut Session,
    shared: &Shared,
    (memory, bytes): (Memory, u64),
    attempt: impl Fn(&mut Session) -> Result<T, CUresult>,
) -> Result<T, CallError> {
    let mut first = attempt(session);
    // The keeper may still hold descriptors of freed memory.
    if matches!(first, Err(CUDA_ERROR_OUT_OF_MEMORY))
        && let Some(keeper) = shared.gpu.keeping.keeper()
    {
        keeper.settle();
        first = attempt(session);
    }
    if matches!(first, Err(CUDA_ERROR_OUT_OF_MEMORY)) && shared.gpu.is_short() {
        shared.images.give_up_residents();
    }
    let is_full = matches!(first, Err(CUDA_ERROR_OUT_OF_MEMORY));
    // Before other clients' memory.
    let standby_gives = is_full
        && is_device_short(session, shared, (memory, bytes))
        && shared.images.changes.ask_for_memory();
    if is_full && !standby_gives && waits_for_room(session, shared, memory, bytes) {
        return Err(CallError::Full);
    }
    if session.flow.room_at.take().is_some() {
        shared.has_room(&session.shared);
    }
    let may_wait = || {
        let comes = standby_gives || gives_back(session);
        comes && bytes <= most(session, shared, memory)
    };
    if !is_full || !may_wait() {
        session.flow.short_since = None;
        return Ok(first?);
    }
    if finish_releases(session, shared) && !session.has_work_in_flight(&shared.gpu) {
        settle(session, shared, |_| 0);
        let again = attempt(session);
        if again.is_ok() || !session.account.is_leaving() && !standby_gives {
            session.flow.short_since = None;
            return Ok(again?);
        }
    }
    let since = *session.flow.short_since.get_or_insert_with(Instant::now);
    if since.elapsed() < PATIENCE {
        // Nothing was submitted. Freeing the memory may need a quiescent point, so the session must not seem at
        // work.
        session.say_whether_at_work(&shared.gpu);
        return Err(CallError::Full);
    }
    session.flow.short_since = None;
    Err(CUDA_ERROR_OUT_OF_MEMORY.into())
}

/// Whether other sessions' memory goes to host memory for an allocation, which then waits.
fn waits_for_room(session: &mut Session, shared: &Shared, memory: Memory, bytes: u64) -> bool {
    let Memory::Device(device) = memory else {
        return false;
    };
    if bytes > session.account.left(memory) || bytes > shared.gpu.devices[device].memory {
        return false;
    }
    if shared.make_room(&session.shared, device, bytes) == Making::Nothing {
        return false;
    }
    let now = Instant::now();
    session.shared.suspension.begin_wait(now);
    session.flow.room_at = Some(now + room::ASKS);
    session.say_whether_at_work(&shared.gpu);
    true
}

/// Whether the device, and not the session's limit, lacks the memory for an allocation.
fn is_device_short(session: &Session, shared: &Shared, (memory, bytes): (Memory, u64)) -> bool {
    match memory {
        Memory::Device(device) => {
            bytes <= session.account.left(memory) && bytes <= shared.gpu.devices[device].memory
        }
        Memory::Host => false,
    }
}

/// Most bytes that the session could have if everything else were freed.
fn most(session: &Session, shared: &Shared, memory: Memory) -> u64 {
    let installed = match memory {
        Memory::Device(device) => shared.gpu.devices[device].memory,
        Memory::Host => u64::MAX,
    };
    installed.min(session.account.most(memory).unwrap_or(u64::MAX))
}

/// Whether memory that the client has freed is still charged.
fn gives_back(session: &Session) -> bool {
    !session.objects.releasing.is_empty()
        || !session.objects.leaving.is_empty()
        || !session.objects.graphs.leaving.is_empty()
        || session.objects.pools.keep_any()
        || session.account.is_leaving()
}

/// Frees memory that the client gave back, if nothing is in flight that may touch it. Returns whether none is left.
pub fn finish_releases(session: &mut Session, shared: &Shared) -> bool {
    session
        .objects
        .leaving
        .append(&mut session.objects.graphs.leaving);
    if session.objects.releasing.is_empty() && session.objects.leaving.is_empty() {
        return true;
    }
    if session.has_work_in_flight(&shared.gpu) {
        return false;
    }
    session.objects.leaving.clear();
    for grant in std::mem::take(&mut session.objects.releasing) {
        if let Err(status) = shared.gpu.revoke(grant) {
            tracing::error!("device memory given back was not freed: {status}");
            shared.gpu.note_status(status);
        }
    }
    true
}

/// `cuMemGetInfo`, bytes.
pub fn mem_info(session: &mut Session, shared: &Shared, body: Attach) -> Reply {
    let device = shared.gpu.device(body.device)?;
    device.make_current(&shared.gpu.driver)?;
    if session.account.left(Memory::Device(device.ordinal)) != u64::MAX {
        // Memory that the client has freed is back at the driver shortly, unless another client's work keeps it
        // longer.
        if session.account.is_leaving() {
            let since = *session.flow.short_since.get_or_insert_with(Instant::now);
            if since.elapsed() < MOMENT {
                return Err(CallError::Full);
            }
        }
        session.flow.short_since = None;
        // Memory that pools retain for reuse counts as free.
        settle_pools(session, shared);
        device.make_current(&shared.gpu.driver)?;
    }
    if let Some(keeper) = shared.gpu.keeping.keeper() {
        keeper.settle();
    }
    let (mut free, mut total) = (0, 0);
    shared.gpu.driver.mem_get_info(&mut free, &mut total)?;
    // Memory of others that would go to host memory counts as free, up to their guarantees.
    let movable = shared.movable_for(&session.shared, device.ordinal);
    let mut info = MemInfo {
        free: (free as u64).saturating_add(movable).min(total as u64),
        total: total as u64,
    };
    let memory = Memory::Device(device.ordinal);
    if let Some(limit) = session.account.most(memory) {
        info.total = info.total.min(limit);
    }
    info.free = info.free.min(session.account.left(memory)).min(info.total);
    Ok(info.as_bytes().to_vec())
}

/// Lowers the client's own limit of device memory, in bytes.
pub fn limit_memory(
    session: &mut Session,
    shared: &Shared,
    body: LimitMemory,
) -> Result<(), CallError> {
    let memory = Memory::Device(shared.gpu.device(body.device)?.ordinal);
    session.account.lower_limit(memory, body.bytes);
    shared.share_guarantees();
    Ok(())
}

/// Allocates pinned memory: a memory file, mapped at the same address in the server and in the client. The
/// descriptor is sent over the socket, before the answer, under the message's token.
pub fn host_alloc(session: &mut Session, shared: &Shared, call: Call<'_, HostAlloc>) -> Reply {
    let Call { body, message } = call;
    let device = shared.gpu.device(body.device)?;
    let len = body
        .len
        .max(1)
        .checked_next_multiple_of(4096)
        .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let spare = &session.objects.host_spare;
    let mut block = match spare.iter().position(|block| block.len() == len) {
        Some(at) => session.objects.host_spare.swap_remove(at),
        None => new_block(session, shared, device, len)?,
    };
    block.pin.set_idle(false);
    let note = DescriptorNote {
        token: message.token,
        len,
    };
    let sent = block
        .file
        .description()
        .and_then(|fd| shm::send_packet(session.shared.socket(), note.as_bytes(), &[fd.as_fd()]));
    let range = Range {
        start: block.start(),
        len,
    };
    if sent.is_err() {
        block.pin.set_idle(true);
        session.objects.host_spare.push(block);
        return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
    }
    block.set_managed(body.flags & MANAGED != 0);
    session.objects.host.insert(range.start, block);
    let place = Place {
        len,
        device: device.ordinal.into(),
        managed: body.flags & MANAGED != 0,
    };
    describe_host(session, &shared.images, range.start, place);
    Ok(range.as_bytes().to_vec())
}

/// Frees pinned memory. It stays registered, because unregistering would wait for other clients' work.
pub fn host_free(session: &mut Session, shared: &Shared, body: Range) -> Result<(), CallError> {
    let mut block = session
        .objects
        .host
        .remove(&body.start)
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    session.note_freed(&shared.images, block.start(), block.len());
    describe_host_end(session, &shared.images, body.start);
    block.set_managed(false);
    block.pin.set_idle(true);
    session.objects.host_spare.push(block);
    Ok(())
}

/// Pinned memory that is not the session's spare. Its pages are populated a few at a time. While other sessions
/// wait for the slow lane the message waits behind them, and when the session has ended it is not executed again.
fn new_block(
    session: &mut Session,
    shared: &Shared,
    device: &Device,
    len: u64,
) -> Result<HostBlock, CallError> {
    let (gpu, own) = (&shared.gpu, session.shared.clone());
    let begun = session.objects.host_begun.take();
    let mut begun = match begun {
        Some(begun) if begun.len() == len => begun,
        other => {
            // The client has changed its message.
            if let Some(other) = other {
                gpu.arena.abandon(other);
            }
            let payers = (&session.account, &own.held_files, own.info.uid);
            if let Some(block) = gpu.take_spare_block(payers, len)? {
                return Ok(block);
            }
            let since = session.flow.short_of_pinned_since;
            let pin = pin(session, shared, len)?;
            let begun = gpu.begin_block((&session.account, &own.held_files), pin, len);
            if begun.is_err() {
                // The machine may be short of memory that is kept for moves.
                session.flow.short_of_pinned_since = since;
                let is_kept = shared.release_all_move_pools();
                if (is_kept || since.is_some()) && waits_for_pinned(session, shared) {
                    return Err(CallError::Full);
                }
            }
            begun?
        }
    };
    let is_populated = begun.populate(|| {
        own.hung_up.load(Ordering::Relaxed)
            || gpu.is_lost()
            || shared.lanes.slow.is_wanted()
            || own.is_to_rest(shared.fate.attempt())
            || shared.fate.stopping.load(Ordering::Relaxed)
    });
    if !is_populated {
        session.objects.host_begun = Some(begun);
        session.say_whether_at_work(gpu);
        return Err(CallError::Full);
    }
    let block = side::on_main(|| gpu.arena.complete(&gpu.driver, device, begun));
    Ok(block?)
}

/// Counts memory that is about to be pinned for the session's user. If memory that no session uses takes the room,
/// the message waits until it is unregistered, but not forever.
///
/// # Errors
/// [`CallError::Full`] while the message waits; `CUDA_ERROR_OUT_OF_MEMORY` beyond the user's bound.
pub fn pin(session: &mut Session, shared: &Shared, bytes: u64) -> Result<Pin, CallError> {
    let beyond = match shared.gpu.pinned.take(session.shared.info.uid, bytes) {
        Ok(pin) => {
            session.flow.short_of_pinned_since = None;
            return Ok(pin);
        }
        Err(beyond) => beyond,
    };
    if beyond.is_temporary {
        shared.release_move_pool(session.shared.info.uid, 0);
    }
    if beyond.is_temporary && waits_for_pinned(session, shared) {
        return Err(CallError::Full);
    }
    session.flow.short_of_pinned_since = None;
    tracing::warn!("Client {}: {beyond}", session.shared.info);
    Err(CUDA_ERROR_OUT_OF_MEMORY.into())
}

/// Lets a message wait a moment for pinned memory to be unregistered. Returns `false` once it has waited for long enough.
fn waits_for_pinned(session: &mut Session, shared: &Shared) -> bool {
    let since = *session
        .flow
        .short_of_pinned_since
        .get_or_insert_with(Instant::now);
    if since.elapsed() >= PATIENCE {
        session.flow.short_of_pinned_since = None;
        return false;
    }
    // Unregistering needs a quiescent point, so the session must not seem at work.
    session.say_whether_at_work(&shared.gpu);
    std::thread::sleep(SETTLING);
    true
}

/// Removes spare pinned memory beyond the limit for reuse, oldest first.
pub fn take_surplus_host(session: &mut Session, shared: &Shared) -> Vec<HostBlock> {
    let most = match session.flow.short_of_pinned_since {
        None => bounds::HOST_SPARE.min(shared.gpu.pinned.most_kept(session.shared.info.uid)),
        Some(_) => 0,
    };
    let mut kept: u64 = session
        .objects
        .host_spare
        .iter()
        .map(|block| block.len())
        .sum();
    let mut surplus = Vec::new();
    while kept > most && !session.objects.host_spare.is_empty() {
        let block = session.objects.host_spare.remove(0);
        kept -= block.len();
        surplus.push(block);
    }
    surplus
}

/// `cuPointerGetAttribute` for numeric attributes of pointers that the client does not know itself.
pub fn pointer_attribute(session: &mut Session, shared: &Shared, body: PointerQuery) -> Reply {
    let pointer = session.lasting.place_of(body.pointer);
    session.check_device(pointer, 1)?;
    shared
        .gpu
        .any_device()
        .ok_or(CUDA_ERROR_INVALID_VALUE)?
        .make_current(&shared.gpu.driver)?;
    // The longest attribute is two words (CU_POINTER_ATTRIBUTE_P2P_TOKENS).
    let mut value = [0u64; 2];
    match body.attribute {
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        | CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
        | CU_POINTER_ATTRIBUTE_RANGE_SIZE
        | CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {}
        _ => return Err(CUDA_ERROR_NOT_SUPPORTED.into()),
    }
    shared
        .gpu
        .driver
        .pointer_get_attribute(value.as_mut_ptr().cast(), body.attribute, pointer)?;
    // The client knows a variable that has moved by its first address.
    if body.attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR {
        value[0] = value[0].wrapping_add(body.pointer.wrapping_sub(pointer));
    }
    Ok(number(value[0]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, fails, obeys, obeys_with_handle, records,
    };
    use crate::engine::threads::slow::SlowTask;
    use mpsshim_control::closers::Stranger;
    use mpsshim_model::bonds::Bonds;
    use mpsshim_model::client::Credentials;
    use mpsshim_proto::arena::DEVICE_ARENA;
    use mpsshim_proto::handshake::ClientHello;
    use mpsshim_proto::message::Op;
    use mpsshim_proto::segment::SEGMENT_LEN;
    use std::os::unix::net::UnixStream;
    use zerocopy::FromZeros;

    const UNIT: u64 = 2 << 20;
    const SOME: MemGrant = MemGrant {
        len: UNIT,
        device: 0,
        flags: 0,
    };
    #[test]
    fn memory_of_no_device_and_beyond_the_limit_is_refused() {
        let mut test = Fixture::new(&[("cuMemCreate", counts as Function)]);
        test.limit(UNIT);
        for (len, device, status) in [
            (UNIT, 1, CUDA_ERROR_INVALID_DEVICE),
            (UNIT + 1, 0, CUDA_ERROR_OUT_OF_MEMORY),
            (u64::MAX, 0, CUDA_ERROR_OUT_OF_MEMORY),
        ] {
            let body = MemGrant {
                len,
                device,
                flags: 0,
            };
            assert_eq!(test.status(Op::MemGrant, &body, &[]), status, "{len}");
        }
        assert_eq!(test.calls(), 0);
        assert_eq!((test.held(), test.session.objects.grants.len()), (0, 0));
    }

    /// The server may end right behind the message.
    #[test]
    fn memory_that_a_graph_names_binds_as_soon_as_it_is_freed() {
        let mut test = Fixture::with_keeper(&[]);
        let (device, pinned, other) = (test.memory(UNIT), test.pinned(4096), test.memory(UNIT));
        test.graph();
        let binds = |test: &Fixture| {
            let bonds = test.session.shared.description.bonds();
            bonds.0 & Bonds::CHANGED_GRAPHS.0 != 0
        };
        let frees = [(Op::MemRelease, device, UNIT), (Op::HostFree, pinned, 4096)];
        for (op, start, len) in frees {
            test.session.objects.graphs.name_memory(start);
            test.session.note_bonds(&test.shared.images);
            assert!(!binds(&test));
            assert_eq!(test.told(op, &Range { start, len }, &[]), CUDA_SUCCESS);
            assert!(binds(&test), "{op:?}");
        }
        test.session.objects.graphs.name_memory(device);
        test.session.note_bonds(&test.shared.images);
        let body = Range {
            start: other,
            len: UNIT,
        };
        assert_eq!(test.told(Op::MemRelease, &body, &[]), CUDA_SUCCESS);
        assert!(!binds(&test));
    }

    #[test]
    fn memory_is_rounded_up_and_counted_while_it_is_the_clients() {
        let mut test = Fixture::new(&[("cuMemRelease", counts as Function)]);
        let body = MemGrant { len: 1, ..SOME };
        let range: Range = test.reply(Op::MemGrant, &body, &[]).expect("memory");
        assert_eq!((range.start, range.len), (DEVICE_ARENA, UNIT));
        assert_eq!(test.held(), UNIT);
        assert_eq!(test.status(Op::MemRelease, &range, &[]), CUDA_SUCCESS);
        assert_eq!((test.held(), test.calls()), (0, 1));
        assert_eq!(test.memory(1), DEVICE_ARENA, "the addresses are free again");
    }

    #[test]
    fn memory_that_the_driver_does_not_give_leaves_nothing_behind() {
        for (name, function, released) in [
            ("cuMemCreate", obeys_with_handle as Function, 0),
            ("cuMemMap", obeys as Function, 1),
            ("cuMemSetAccess", obeys as Function, 1),
        ] {
            let mut test = Fixture::new(&[(name, function), ("cuMemRelease", counts as Function)]);
            test.orders(CUDA_ERROR_NOT_SUPPORTED);
            let status = test.status(Op::MemGrant, &SOME, &[]);
            assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED, "{name}");
            assert_eq!(test.calls(), released, "{name}");
            assert_eq!((test.held(), test.session.objects.grants.len()), (0, 0));
            test.orders(CUDA_SUCCESS);
            assert_eq!(test.memory(UNIT), DEVICE_ARENA, "{name}: its addresses");
        }
    }

    /// Refuses access of the second device.
    extern "C" fn denies_second(_: u64, _: usize, access: &CUmemAccessDesc) -> CUresult {
        match access.location.id {
            1 => CUDA_ERROR_NOT_SUPPORTED,
            _ => CUDA_SUCCESS,
        }
    }

    #[test]
    fn memory_that_a_peer_cannot_use_is_not_granted() {
        let functions = [
            ("cuMemSetAccess", denies_second as Function),
            ("cuMemUnmap", counts as Function),
        ];
        let mut test = Fixture::with_devices(2, &functions);
        let both = [0, 1].map(|at| test.shared.gpu.device(at).expect("a device").ordinal);
        test.session.objects.peers.insert((both[0], both[1]));
        let status = test.status(Op::MemGrant, &SOME, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!((test.calls(), test.held()), (1, 0));
        assert_eq!(test.session.objects.grants.len(), 0);
        test.session.objects.peers.clear();
        assert_eq!(test.memory(UNIT), DEVICE_ARENA);
    }

    #[test]
    fn a_fault_in_an_allocation_ends_the_session() {
        let mut test = Fixture::new(&[("cuMemCreate", fails::<{ FAULT.0 }> as Function)]);
        assert_eq!(test.told(Op::MemGrant, &SOME, &[]), FAULT);
        assert!(test.has_ended());
        assert_eq!(test.held(), 0);
    }

    #[test]
    fn only_memory_that_was_granted_is_released() {
        let mut test = Fixture::new(&[("cuMemUnmap", counts as Function)]);
        let start = test.memory(UNIT);
        for start in [0, start + 1, start + UNIT, DEVICE_ARENA - UNIT] {
            let body = Range { start, len: UNIT };
            let status = test.status(Op::MemRelease, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{start:#x}");
        }
        assert_eq!((test.calls(), test.held()), (0, UNIT));
        let body = Range { start, len: UNIT };
        assert_eq!(test.status(Op::MemRelease, &body, &[]), CUDA_SUCCESS);
        let again = test.status(Op::MemRelease, &body, &[]);
        assert_eq!((again, test.calls()), (CUDA_ERROR_INVALID_VALUE, 1));
    }

    #[test]
    fn memory_that_the_driver_does_not_take_back_keeps_its_addresses() {
        for name in ["cuMemUnmap", "cuMemRelease"] {
            let refuses = fails::<{ CUDA_ERROR_NOT_SUPPORTED.0 }>;
            let mut test = Fixture::new(&[(name, refuses as Function)]);
            let start = test.memory(UNIT);
            let body = Range { start, len: UNIT };
            assert_eq!(test.status(Op::MemRelease, &body, &[]), CUDA_SUCCESS);
            assert!(test.session.objects.releasing.is_empty(), "{name}");
            assert_ne!(test.memory(UNIT), start, "{name}");
        }
    }

    #[test]
    fn a_fault_in_a_release_ends_the_session() {
        let mut test = Fixture::new(&[("cuMemUnmap", fails::<{ FAULT.0 }> as Function)]);
        let start = test.memory(UNIT);
        let body = Range { start, len: UNIT };
        assert_eq!(test.told(Op::MemRelease, &body, &[]), CUDA_SUCCESS);
        assert!(test.has_ended());
    }

    #[test]
    fn memory_given_back_counts_and_stays_while_work_is_in_flight() {
        let mut test = Fixture::new(&[("cuMemUnmap", counts as Function)]);
        let start = test.memory(UNIT);
        assert!(test.owns(start), "which is work in flight");
        let body = Range { start, len: UNIT };
        assert_eq!(test.status(Op::MemRelease, &body, &[]), CUDA_SUCCESS);
        assert_eq!((test.held(), test.calls()), (UNIT, 0));
        assert!(!test.owns(start), "it is not named any more");
    }

    #[test]
    fn an_allocation_waits_only_for_memory_that_leaves_and_suffices() {
        let mut test = Fixture::new(&[]);
        test.limit(UNIT);
        let start = test.memory(UNIT);
        let status = test.status(Op::MemGrant, &SOME, &[]);
        assert_eq!(status, CUDA_ERROR_OUT_OF_MEMORY, "nothing leaves");
        assert!(test.owns(start), "which is work in flight");
        let body = Range { start, len: UNIT };
        assert_eq!(test.status(Op::MemRelease, &body, &[]), CUDA_SUCCESS);
        let waits = test.handle(Op::MemGrant, &SOME, &[]);
        assert!(matches!(waits, Err(CallError::Full)));
        let more = MemGrant {
            len: 2 * UNIT,
            ..SOME
        };
        let status = test.status(Op::MemGrant, &more, &[]);
        assert_eq!(status, CUDA_ERROR_OUT_OF_MEMORY, "it never fits");
    }

    extern "C" fn half_is_free(free: &mut usize, total: &mut usize) -> CUresult {
        (*free, *total) = (500, 1000);
        CUDA_SUCCESS
    }

    #[test]
    fn a_client_is_told_of_memory_within_its_limit() {
        let mut test = Fixture::new(&[("cuMemGetInfo_v2", half_is_free as Function)]);
        let first = Attach {
            device: 0,
            flags: 0,
        };
        let info: MemInfo = test.reply(Op::MemInfo, &first, &[]).expect("numbers");
        assert_eq!((info.free, info.total), (500, 1000));
        let limit = |device, bytes| LimitMemory {
            device,
            pad: 0,
            bytes,
        };
        let status = test.status(Op::LimitMemory, &limit(1, 1), &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_DEVICE);
        for bytes in [300, 900] {
            let status = test.status(Op::LimitMemory, &limit(0, bytes), &[]);
            assert_eq!(status, CUDA_SUCCESS);
            let info: MemInfo = test.reply(Op::MemInfo, &first, &[]).expect("numbers");
            assert_eq!((info.free, info.total), (300, 300), "after {bytes}");
        }
    }

    #[test]
    fn memory_of_no_device_is_not_asked_for() {
        let mut test = Fixture::new(&[("cuMemGetInfo_v2", counts as Function)]);
        let second = Attach {
            device: 1,
            flags: 0,
        };
        let status = test.status(Op::MemInfo, &second, &[]);
        assert_eq!((status, test.calls()), (CUDA_ERROR_INVALID_DEVICE, 0));
        let refuses = fails::<{ CUDA_ERROR_NOT_SUPPORTED.0 }>;
        drop(test);
        let mut test = Fixture::new(&[("cuMemGetInfo_v2", refuses as Function)]);
        let first = Attach {
            device: 0,
            flags: 0,
        };
        let status = test.told(Op::MemInfo, &first, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        assert!(!test.has_ended());
    }

    const PINNED: HostAlloc = HostAlloc {
        len: 4097,
        flags: 0,
        device: 0,
    };

    #[test]
    fn pinned_memory_that_cannot_be_is_refused_before_it_is_registered() {
        let mut test = Fixture::new(&[("cuMemHostRegister_v2", counts as Function)]);
        test.limit(4096);
        for (body, status) in [
            (
                HostAlloc {
                    device: 1,
                    ..PINNED
                },
                CUDA_ERROR_INVALID_DEVICE,
            ),
            (
                HostAlloc {
                    len: u64::MAX,
                    ..PINNED
                },
                CUDA_ERROR_OUT_OF_MEMORY,
            ),
        ] {
            assert_eq!(test.status(Op::HostAlloc, &body, &[]), status);
        }
        assert_eq!((test.calls(), test.held(), test.held_host()), (0, 0, 0));
        assert_eq!(test.session.objects.host.len(), 0);
    }

    #[test]
    fn pinned_memory_that_is_not_registered_is_not_counted() {
        let mut test = Fixture::new(&[("cuMemHostRegister_v2", obeys as Function)]);
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let body = HostAlloc {
            flags: MANAGED,
            ..PINNED
        };
        let status = test.status(Op::HostAlloc, &body, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!((test.held(), test.held_host()), (0, 0));
        test.orders(CUDA_SUCCESS);
        assert_eq!(test.status(Op::HostAlloc, &body, &[]), CUDA_SUCCESS);
        assert_eq!((test.held(), test.held_host()), (0, 8192));
    }

    const MIB: u64 = 1 << 20;

    fn pinned(len: u64) -> HostAlloc {
        HostAlloc { len, ..PINNED }
    }

    /// Bytes that the session's user has in pinned memory, beside the session's segment.
    fn pinned_of_user(test: &Fixture) -> u64 {
        test.shared.gpu.pinned.held(0) - SEGMENT_LEN as u64
    }

    #[test]
    fn a_user_has_no_more_pinned_memory_than_its_bound() {
        let functions = [("cuMemHostRegister_v2", counts as Function)];
        let mut test = Fixture::with_host_memory(16 * MIB, &functions);
        let first = test.pinned(8 * MIB);
        let beyond = test.status(Op::HostAlloc, &pinned(8 * MIB + 1), &[]);
        assert_eq!((beyond, test.calls()), (CUDA_ERROR_OUT_OF_MEMORY, 1));
        assert_eq!(test.held_host(), 8 * MIB, "a refusal counts nothing");
        test.pinned(8 * MIB);
        assert_eq!(pinned_of_user(&test), 16 * MIB);
        let managed = HostAlloc {
            flags: MANAGED,
            ..pinned(1)
        };
        let beyond = test.status(Op::HostAlloc, &managed, &[]);
        assert_eq!(beyond, CUDA_ERROR_OUT_OF_MEMORY);
        // Freed memory is reused at once if the size is the same, and after it was unregistered otherwise.
        let range = Range {
            start: first,
            len: 8 * MIB,
        };
        assert_eq!(test.status(Op::HostFree, &range, &[]), CUDA_SUCCESS);
        assert_eq!(test.pinned(8 * MIB), first);
        assert_eq!(test.status(Op::HostFree, &range, &[]), CUDA_SUCCESS);
        let waits = test.handle(Op::HostAlloc, &pinned(4 * MIB), &[]);
        assert!(matches!(waits, Err(CallError::Full)));
        let shared = test.shared.clone();
        for block in take_surplus_host(&mut test.session, &shared) {
            shared.gpu.arena.free(&shared.gpu.driver, block);
        }
        assert_eq!(pinned_of_user(&test), 8 * MIB);
        test.pinned(4 * MIB);
        assert_eq!(pinned_of_user(&test), 12 * MIB);
    }

    #[test]
    fn unused_memory_of_a_session_that_has_ended_is_reused_within_the_bound() {
        let mut test = Fixture::with_host_memory(16 * MIB, &[]);
        let start = test.pinned(16 * MIB);
        let block = test.session.objects.host.remove(&start).expect("a block");
        test.shared.gpu.spare.put_block(0, block);
        let other = test.handle(Op::HostAlloc, &pinned(MIB), &[]);
        assert!(matches!(other, Err(CallError::Full)), "room will come");
        // The client that this file was sent to still has it open, so another one does not get it.
        let same = test.handle(Op::HostAlloc, &pinned(16 * MIB), &[]);
        assert!(matches!(same, Err(CallError::Full)));
        assert_eq!(pinned_of_user(&test), 16 * MIB);
        drop(test.shared.gpu.spare.take_all());
        assert_eq!(pinned_of_user(&test), 0);
    }

    #[test]
    fn pinned_memory_that_is_not_made_counts_nothing() {
        let functions = [("cuMemHostRegister_v2", obeys as Function)];
        let mut test = Fixture::with_host_memory(16 * MIB, &functions);
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let status = test.status(Op::HostAlloc, &pinned(16 * MIB), &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!((pinned_of_user(&test), test.held_host()), (0, 0));
        test.orders(CUDA_SUCCESS);
        test.pinned(16 * MIB);
    }

    #[test]
    fn population_stops_when_the_client_has_gone() {
        let mut test = Fixture::new(&[("cuMemHostRegister_v2", counts as Function)]);
        test.session.shared.hung_up.store(true, Ordering::Relaxed);
        let stopped = test.handle(Op::HostAlloc, &pinned(64 * MIB), &[]);
        assert!(matches!(stopped, Err(CallError::Full)));
        assert_eq!(test.calls(), 0, "nothing is registered");
        let begun = test.session.objects.host_begun.take().expect("a block");
        assert_eq!((begun.len(), pinned_of_user(&test)), (64 * MIB, 64 * MIB));
        test.shared.gpu.arena.abandon(begun);
        assert_eq!((pinned_of_user(&test), test.held_host()), (0, 0));
    }

    #[test]
    fn population_gives_way_to_others_on_the_slow_lane() {
        let mut test = Fixture::new(&[("cuMemHostRegister_v2", counts as Function)]);
        let (socket, _peer) = UnixStream::pair().expect("sockets");
        let who = Credentials {
            pid: 1,
            uid: 0,
            gid: 0,
        };
        let hello = Box::new(ClientHello::new_zeroed());
        let task = SlowTask::Setup(Stranger::new(socket.into(), 0), hello, who.into());
        test.shared.lanes.slow.send(task);
        let mut waited = 0;
        while let Err(CallError::Full) = test.handle(Op::HostAlloc, &pinned(16 * MIB), &[]) {
            waited += 1;
            assert!(waited < 1000 && test.calls() == 0);
        }
        assert!(waited > 1);
        assert_eq!((test.session.objects.host.len(), test.calls()), (1, 1));
        assert_eq!(pinned_of_user(&test), 16 * MIB);
        // A client that changes its message while it waits gets memory of the new size, and the old one is gone.
        let waits = test.handle(Op::HostAlloc, &pinned(32 * MIB), &[]);
        assert!(matches!(waits, Err(CallError::Full)));
        let changed = test.status(Op::HostAlloc, &pinned(4 * MIB), &[]);
        assert_eq!(changed, CUDA_SUCCESS);
        assert_eq!(pinned_of_user(&test), 20 * MIB);
    }

    #[test]
    fn managed_memory_is_counted_where_it_has_its_home() {
        let mut test = Fixture::new(&[]);
        let homes = |test: &Fixture| {
            let managed = test.session.shared.managed_usage();
            (managed.device, managed.host)
        };
        test.memory(UNIT);
        test.pinned(4096);
        assert_eq!(homes(&test), (0, 0));
        let body = MemGrant {
            flags: MANAGED,
            ..SOME
        };
        let on_device: Range = test.reply(Op::MemGrant, &body, &[]).expect("memory");
        let body = HostAlloc {
            flags: MANAGED,
            ..PINNED
        };
        let on_host: Range = test.reply(Op::HostAlloc, &body, &[]).expect("memory");
        assert_eq!(homes(&test), (UNIT, 8192));
        assert_eq!(test.status(Op::HostFree, &on_host, &[]), CUDA_SUCCESS);
        assert_eq!(test.status(Op::MemRelease, &on_device, &[]), CUDA_SUCCESS);
        assert_eq!(homes(&test), (0, 0));
    }

    #[test]
    fn pinned_memory_that_the_client_does_not_take_is_kept_for_its_next_request() {
        let mut test = Fixture::new(&[("cuMemHostRegister_v2", counts as Function)]);
        test.hangs_up();
        let body = HostAlloc {
            flags: MANAGED,
            ..PINNED
        };
        for _ in 0..2 {
            let status = test.status(Op::HostAlloc, &body, &[]);
            assert_eq!(status, CUDA_ERROR_OUT_OF_MEMORY);
            assert_eq!((test.held(), test.session.objects.host.len()), (0, 0));
        }
        assert_eq!(
            (test.calls(), test.session.objects.host_spare.len()),
            (1, 1)
        );
    }

    #[test]
    fn only_pinned_memory_of_the_session_is_freed_and_only_once() {
        let mut test = Fixture::new(&[("cuMemHostRegister_v2", counts as Function)]);
        let body = HostAlloc {
            flags: MANAGED,
            ..PINNED
        };
        let range: Range = test.reply(Op::HostAlloc, &body, &[]).expect("memory");
        let wrong = Range {
            start: range.start + 4096,
            len: 4096,
        };
        let status = test.status(Op::HostFree, &wrong, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE);
        assert_eq!(test.status(Op::HostFree, &range, &[]), CUDA_SUCCESS);
        let status = test.status(Op::HostFree, &range, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE);
        assert_eq!(test.pinned(8192), range.start, "it is used again");
        assert_eq!(test.calls(), 1, "and stays registered");
    }

    #[test]
    fn the_driver_is_asked_of_pointers_of_the_session_only() {
        let mut test = Fixture::new(&[("cuPointerGetAttribute", records as Function)]);
        let start = test.memory(UNIT);
        let query = |pointer, attribute| PointerQuery {
            pointer,
            attribute,
            pad: 0,
        };
        let known = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        for (body, status) in [
            (query(start + UNIT, known), CUDA_ERROR_INVALID_VALUE),
            (query(0x7000, known), CUDA_ERROR_INVALID_VALUE),
            (query(start, 1), CUDA_ERROR_NOT_SUPPORTED),
            (query(start, u32::MAX), CUDA_ERROR_NOT_SUPPORTED),
        ] {
            assert_eq!(test.status(Op::PointerAttribute, &body, &[]), status);
        }
        assert_eq!(test.calls(), 0);
        let last = query(start + UNIT - 1, known);
        assert_eq!(test.status(Op::PointerAttribute, &last, &[]), CUDA_SUCCESS);
        assert_eq!(test.recorded()[0][2], start + UNIT - 1);
    }

    #[test]
    fn a_pointer_that_the_driver_does_not_know_is_the_clients_error_and_a_fault_its_end() {
        let mut test = Fixture::new(&[("cuPointerGetAttribute", obeys as Function)]);
        let body = PointerQuery {
            pointer: test.memory(UNIT),
            attribute: CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            pad: 0,
        };
        for (status, ends) in [(CUDA_ERROR_NOT_FOUND, false), (FAULT, true)] {
            test.orders(status);
            assert_eq!(test.told(Op::PointerAttribute, &body, &[]), status);
            assert_eq!(test.has_ended(), ends, "{status}");
        }
    }
}
