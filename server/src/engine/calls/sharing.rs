//! Memory shared between sessions, with other programs, with files, and between devices.

use super::reply::Reply;
use crate::engine::base::account::{Home, Memory};
use crate::engine::base::call::{Call, Incoming};
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side;
use crate::engine::calls::memory::{finish_releases, pin};
use crate::engine::calls::module::receive_descriptor;
use crate::engine::calls::pool;
use crate::engine::calls::virtual_memory::{may_be_exported_memory, send_descriptor};
use crate::engine::gpu::devices::Grant;
use crate::engine::lasting::files::{describe_file, describe_file_end};
use crate::engine::lasting::memory as lasting;
use crate::engine::lasting::shares::{Stays, describe_given, describe_opened, keep_in_place};
use crate::engine::lasting::{describe, describe_gone};
use crate::engine::objects::files::{Payment, bytes_mapped};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use crate::keeper::{self, Name};
use mpsshim_api::cuda::*;
use mpsshim_proto::arena;
use mpsshim_proto::message::memory::{
    FILE_PARTS_MAX, FilePart, FileRegister, IpcOpen, IpcOpened, Peers, PhysicalExport, PoolImport,
    PoolImportPointer, RangeHandle,
};
use mpsshim_proto::message::{Object, Range};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, atomic};
use zerocopy::{FromBytes, IntoBytes};

fn who(session: &Session) -> (u64, u32) {
    (session.shared.info.session, session.shared.info.uid)
}

/// `cuIpcGetMemHandle` of an allocation of the client, which lies in one grant.
pub fn ipc_share(session: &mut Session, shared: &Shared, body: Range) -> Reply {
    let who = who(session);
    let grant = match session.objects.grants.range(..=body.start).next_back() {
        Some((start, grant))
            if body.len > 0
                && body.start - start < grant.len
                && body.len <= grant.len - (body.start - start) =>
        {
            grant
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
    };
    keep_in_place(session, grant);
    let range = (body.start, body.len);
    let handle = session
        .objects
        .sharing
        .share(&shared.roster.shares, who, range, grant)?;
    describe_given(session, body.start);
    Ok(handle.to_vec())
}

/// Revokes the handle of an allocation that has been freed.
pub fn ipc_forget(session: &mut Session, shared: &Shared, body: Object) -> Result<(), CallError> {
    session
        .objects
        .sharing
        .forget(&shared.roster.shares, body.object);
    describe_given(session, body.object);
    Ok(())
}

/// `cuIpcOpenMemHandle`.
pub fn ipc_open(session: &mut Session, shared: &Shared, body: IpcOpen) -> Reply {
    let user = shared.gpu.device(body.device)?;
    user.make_current(&shared.gpu.driver)?;
    let mut handle = [0; 64];
    handle.copy_from_slice(body.handle.as_bytes());
    let who = who(session);
    let (start, len, grant) =
        session
            .objects
            .sharing
            .open(&shared.roster.shares, who, &session.account, &handle)?;
    if grant.device != user.ordinal
        && let Err(status) = user.may_use(&shared.gpu.driver, &grant)
    {
        if let Ok(Some(grant)) = session.objects.sharing.close(start) {
            grant.left_by(&session.account);
        }
        return Err(status.into());
    }
    session.objects.sharing.note_user(start, user.ordinal);
    describe_opened(session, start);
    Ok(IpcOpened {
        start,
        len,
        device: grant.device.into(),
        pad: 0,
    }
    .as_bytes()
    .to_vec())
}

/// `cuIpcCloseMemHandle`.
pub fn ipc_close(session: &mut Session, shared: &Shared, body: Object) -> Result<(), CallError> {
    let closed = session.objects.sharing.close(body.object)?;
    describe_opened(session, body.object);
    if let Some(grant) = closed {
        grant.left_by(&session.account);
        // If its owner has ended, the memory is freed here, after this session's work.
        session.objects.releasing.push(grant);
        finish_releases(session, shared);
    }
    Ok(())
}

/// `cuMemPoolExportToShareableHandle`: the driver's own descriptor.
pub fn pool_export(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, PhysicalExport>,
) -> Reply {
    let Call { body, message } = call;
    let pool = pool::pool(session, shared, body.handle)?;
    if body.kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    let mut raw = -1;
    let driver = &shared.gpu.driver.memory;
    driver.pool_export(&mut raw, pool, body.kind, body.flags)?;
    send_raw(session, message, raw)
}

/// Sends a descriptor that the driver opened.
fn send_raw(session: &Session, message: Incoming<'_>, raw: i32) -> Reply {
    if raw < 0 {
        return Err(CUDA_ERROR_OPERATING_SYSTEM.into());
    }
    // SAFETY: the driver opened it for us.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    send_descriptor(session, message.token, &fd, 0)?;
    Ok(Vec::new())
}

/// `cuMemPoolImportFromShareableHandle`.
pub fn pool_import(session: &mut Session, shared: &Shared, call: Call<'_, PoolImport>) -> Reply {
    let Call { body, message } = call;
    let fd = receive_descriptor(session, message.token)?;
    // Handles of other kinds are structs: the driver would take the descriptor's number for a pointer.
    if body.kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !may_be_exported_memory(&fd) {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    let device = shared.gpu.device(body.device)?;
    device.make_current(&shared.gpu.driver)?;
    let mut raw = CUmemoryPool::NULL;
    let driver = &shared.gpu.driver.memory;
    driver.pool_import(&mut raw, fd.as_raw_fd() as usize, body.kind, body.flags)?;
    if let Err(status) = session.objects.pools.add_imported(
        &shared.gpu,
        body.handle,
        &session.account,
        raw,
        device.ordinal,
    ) {
        let _ = driver.pool_destroy(raw);
        return Err(status.into());
    }
    Ok(Vec::new())
}

/// `cuMemPoolExportPointer` of an allocation of the session's.
pub fn pool_export_pointer(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let device = session.objects.pools.device_of(body.object);
    let device = device.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
    let mut data = CUmemPoolPtrExportData([0; 64]);
    let driver = &shared.gpu.driver.memory;
    driver.pool_export_pointer(&mut data, body.object)?;
    Ok(data.0.to_vec())
}

/// `cuMemPoolImportPointer`. The driver checks that the allocation is of the pool that was imported.
pub fn pool_import_pointer(
    session: &mut Session,
    shared: &Shared,
    body: PoolImportPointer,
) -> Reply {
    let raw = pool::pool(session, shared, body.pool)?;
    session.objects.pools.has_room()?;
    let device = session.objects.pools.pools.get(body.pool)?.device;
    let mut data = CUmemPoolPtrExportData([0; 64]);
    data.0.copy_from_slice(body.data.as_bytes());
    let mut start = 0;
    let driver = &shared.gpu.driver.memory;
    driver.pool_import_pointer(&mut start, raw, &mut data)?;
    let (mut base, mut len) = (0, 0);
    if let Err(status) = driver.mem_get_address_range(&mut base, &mut len, start) {
        let _ = driver.pool_free(start, CUstream::NULL);
        return Err(status.into());
    }
    let len = len as u64;
    // Charged to the importer too: the exporter may free it first or end, which the server cannot detect.
    let charge = session.account.take(Memory::Device(device), len);
    let charge = charge.inspect_err(|_| {
        let _ = driver.pool_free(start, CUstream::NULL);
    })?;
    session
        .objects
        .pools
        .note((start, len), Some(charge), body.pool, device);
    Ok(Range { start, len }.as_bytes().to_vec())
}

/// `cuMemHostRegister` of a file that the client maps.
pub fn file_register(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, FileRegister>,
) -> Reply {
    let Call { body, message } = call;
    let managed = arena::is_managed(body.address);
    // The descriptor can be received once only.
    if managed && session.has_work_in_flight(&shared.gpu) {
        return Err(CallError::Full);
    }
    let pin = match pin(session, shared, body.len) {
        Err(CallError::Full) => return Err(CallError::Full),
        pin => pin,
    };
    let fd = receive_descriptor(session, message.token)?;
    let behind = message.behind::<FileRegister>()?;
    let parts = parts(&body, &behind)?;
    let device = shared.gpu.device(body.device)?;
    if pin.is_err() {
        // An invalid file is reported as such, however long it is said to be.
        bytes_mapped(&fd, &parts, body.address)?;
    }
    let pin = pin?;
    let place = shared.gpu.place_to_register(&session.shared.held_files)?;
    let mut charge = session.account.take(Memory::Host, body.len)?;
    if managed {
        charge.set_managed(Some(Home::Host));
        vacate(session, shared, &body)?;
    }
    let writable = body.flags & CU_MEMHOSTREGISTER_READ_ONLY == 0;
    let driver = &shared.gpu.driver;
    let paid = Payment { charge, pin, place };
    let own = session.shared.clone();
    let has_ended = || own.hung_up.load(atomic::Ordering::Relaxed);
    let file = side::on_main(|| {
        device.make_current(driver)?;
        let arena = &shared.gpu.arena;
        let wish = (body.address, writable);
        arena.register_file(driver, &fd, &parts, wish, paid, &has_ended)
    });
    let file = file.map_err(|status| match managed {
        // Its memory is gone.
        true => CallError::Violation(format!(
            "managed memory did not become host memory: {status}"
        )),
        false => status.into(),
    })?;
    let (start, len) = (file.start(), body.len);
    session.objects.files.insert(start, file);
    let place = (start, device.ordinal.into());
    describe_file(session, &shared.images, place, &parts, fd.as_fd());
    Ok(Range { start, len }.as_bytes().to_vec())
}

/// Frees the managed memory at the addresses of a file, which becomes its host memory.
fn vacate(session: &mut Session, shared: &Shared, body: &FileRegister) -> Result<(), CallError> {
    let grant = session.objects.grants.get(&body.address);
    let grant = grant.filter(|grant| grant.len == body.len);
    let ordinal = grant.ok_or(CUDA_ERROR_INVALID_VALUE)?.device;
    let grant = session.objects.grants.remove(&body.address);
    let grant = grant.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    grant.left_by(&session.account);
    describe_gone::<lasting::Memory>(session, body.address);
    // Managed memory is not shared with other sessions.
    let grant = Arc::into_inner(grant).ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
    let name = Name::numbered(keeper::Kind::Memory, grant.start);
    shared.gpu.keeping.forget(name);
    let vacated = shared.gpu.devices[ordinal].vacate(&shared.gpu.driver, grant);
    vacated.map_err(|status| {
        shared.gpu.note_status(status);
        CallError::Violation(format!("managed memory was not freed: {status}"))
    })
}

/// `cuMemHostUnregister` of a registered file, at a quiescent point.
pub fn file_unregister(
    session: &mut Session,
    shared: &Shared,
    body: Object,
) -> Result<(), CallError> {
    let file = session
        .objects
        .files
        .remove(&body.object)
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    session.note_freed(&shared.images, body.object, file.len());
    // Before its addresses can become those of other memory.
    describe_file_end(session, &shared.images, body.object);
    shared.lanes.bury(Buried::File(file.leave()));
    Ok(())
}

/// `cuMemGetHandleForAddressRange`.
pub fn range_handle(session: &mut Session, shared: &Shared, call: Call<'_, RangeHandle>) -> Reply {
    let Call { body, message } = call;
    session.check_device(body.address, body.len)?;
    if body.kind != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    let end = body.address.saturating_add(body.len);
    let before = session.objects.grants.range(..end);
    let named = before.filter(|(_, grant)| grant.start + grant.len > body.address);
    let named: Vec<Arc<Grant>> = named.map(|(_, grant)| grant.clone()).collect();
    for grant in named {
        keep_in_place(session, &grant);
        describe::<Stays>(session, grant.start, &());
    }
    shared.gpu.use_any_device();
    let mut raw = -1;
    shared.gpu.driver.memory.mem_get_handle_for_range(
        &mut raw,
        body.address,
        body.len as usize,
        body.kind,
        body.flags,
    )?;
    send_raw(session, message, raw)
}

/// `cuCtxEnablePeerAccess`, `cuCtxDisablePeerAccess`: whether a device may use this session's memory on another.
pub fn peer_access(session: &mut Session, shared: &Shared, body: Peers) -> Reply {
    let (owner, user) = (
        shared.gpu.device(body.owner)?,
        shared.gpu.device(body.user)?,
    );
    owner.make_current(&shared.gpu.driver)?;
    user.make_current(&shared.gpu.driver)?;
    let context = owner.context();
    let (owner, user) = (owner.ordinal, user.ordinal);
    if owner == user {
        return Err(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED.into());
    }
    if body.enable == 0 {
        // Existing mappings stay: they do no harm, and removing them would wait for work.
        session.objects.peers.remove(&(owner, user));
        return Ok(Vec::new());
    }
    // For memory that the server does not map itself: variables of modules.
    if let Some(context) = context {
        match shared.gpu.driver.memory.ctx_enable_peer_access(context, 0) {
            Ok(()) | Err(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) => {}
            Err(status) => return Err(status.into()),
        }
    }
    session.objects.peers.insert((owner, user));
    let starts: Vec<u64> = session.objects.grants.keys().copied().collect();
    for start in starts {
        if let Err(status) = session.objects.share_with_peers(&shared.gpu, start) {
            // Mappings that have access already keep it: they do no harm.
            session.objects.peers.remove(&(owner, user));
            return Err(status.into());
        }
    }
    Ok(Vec::new())
}

/// The device whose memory lies at an address of the session's.
pub fn device_at(session: &Session, shared: &Shared, address: u64) -> Option<Ordinal> {
    if arena::is_device(address) {
        return shared.gpu.devices.of_address(address);
    }
    session
        .objects
        .virtual_memory
        .device_at(address)
        .or_else(|| session.objects.pools.device_at(address))
}

/// Copies between the memories of two devices with the driver's peer copy, which goes through host memory if the
/// devices cannot reach each other. `None` unless the addresses belong to two devices.
pub fn copy_between_devices(
    session: &Session,
    shared: &Shared,
    (to, from): (u64, u64),
    len: u64,
    stream: CUstream,
) -> Option<Result<(), CUresult>> {
    let (there, here) = (
        device_at(session, shared, to)?,
        device_at(session, shared, from)?,
    );
    if there == here {
        return None;
    }
    let contexts = (
        shared.gpu.devices[there].context()?,
        shared.gpu.devices[here].context()?,
    );
    let (driver, len) = (&shared.gpu.driver.memory, len as usize);
    Some(driver.memcpy_peer_async(to, contexts.0, from, contexts.1, len, stream))
}

/// Copies between host memory and a device, in the order of another device's stream. The driver refuses such a copy
/// if the stream's device has no access to the mapped memory, so a stream of the memory's own device executes it.
pub fn copy_elsewhere(
    session: &mut Session,
    shared: &Shared,
    (device, index): (Ordinal, usize),
    copy: impl FnOnce(CUstream) -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    let driver = &shared.gpu.driver;
    let (home, stream) = {
        let stream = session.objects.streams.at(index)?;
        (stream.device, stream.raw)
    };
    shared.gpu.devices[device].make_current(driver)?;
    let helper = helper(session, shared, device)?;
    let wait = |device: Ordinal, before: CUstream, after: CUstream| {
        shared.gpu.devices[device].make_current(driver)?;
        let mut event = CUevent::NULL;
        driver.event_create(&mut event, CU_EVENT_DISABLE_TIMING)?;
        let waits = driver
            .event_record(event, before, 0)
            .and_then(|()| driver.stream_wait_event(after, event, 0));
        // The stream still waits for the record after the event is destroyed.
        driver.event_destroy(event)?;
        waits
    };
    wait(home, stream, helper)?;
    shared.gpu.devices[device].make_current(driver)?;
    let copied = copy(helper);
    wait(device, helper, stream)?;
    shared.gpu.devices[home].make_current(driver)?;
    copied
}

/// The session's internal stream on a device, for copies that its other streams cannot execute. The device must be
/// current.
fn helper(session: &mut Session, shared: &Shared, device: Ordinal) -> Result<CUstream, CUresult> {
    if let Some((_, stream)) = session.objects.helpers.iter().find(|(of, _)| *of == device) {
        return Ok(*stream);
    }
    let mut stream = CUstream::NULL;
    shared
        .gpu
        .driver
        .stream_create(&mut stream, CU_STREAM_NON_BLOCKING, 0)?;
    session.objects.helpers.push((device, stream));
    Ok(stream)
}

/// Offset and bytes of each part of a file that is to be registered.
fn parts(body: &FileRegister, behind: &[u8]) -> Result<Vec<(u64, u64)>, CallError> {
    if behind.len() > FILE_PARTS_MAX * size_of::<FilePart>() {
        let what = format!("{} bytes of parts of a file", behind.len());
        return Err(CallError::Violation(what));
    }
    let further = behind.chunks_exact(size_of::<FilePart>());
    let further = further.flat_map(FilePart::read_from_bytes);
    let further: Vec<_> = further.map(|part| (part.offset, part.len)).collect();
    let first = further
        .iter()
        .try_fold(body.len, |left, (_, len)| left.checked_sub(*len));
    let first = first.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    Ok([vec![(body.offset, first)], further].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::base::account::Account;
    use crate::engine::base::kinds::Kind as RecordKind;
    use crate::engine::objects::shares::Sharing;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, obeys, obeys_with_handle, others, sealed,
    };
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::memory::Opaque;
    use mpsshim_proto::message::{Copy, CopyInline, MemGrant, Op, Side};
    use std::fs::File;
    use std::os::fd::IntoRawFd;
    use std::sync::Arc;

    const UNIT: u64 = 2 << 20;
    const FILE: u32 = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

    /// Memory that another session of this user shares, its handle, and that session's holdings.
    fn of_another(test: &Fixture, uid: u32) -> (IpcOpen, Arc<Grant>, Sharing) {
        let device = test.shared.gpu.device(0).expect("a device");
        let grant = device.grant(&test.shared.gpu.driver, &Account::default(), (UNIT, false));
        let grant = Arc::new(grant.expect("memory"));
        let mut sharing = Sharing::default();
        let (shares, range) = (&test.shared.roster.shares, (grant.start, UNIT));
        let handle = sharing.share(shares, (2, uid), range, &grant);
        let handle = handle.expect("a handle");
        let open = IpcOpen {
            handle: Opaque::read_from_bytes(&handle).expect("64 bytes"),
            ..IpcOpen::default()
        };
        (open, grant, sharing)
    }

    #[test]
    fn memory_is_shared_inside_one_grant_of_the_session() {
        let mut test = Fixture::new(&[]);
        let start = test.memory(UNIT);
        test.memory(UNIT);
        for (at, len) in [
            (start - 1, 8),
            (start, 0),
            (start, UNIT + 1),
            (start + 8, UNIT),
            (start + 2 * UNIT, 8),
            (start, u64::MAX),
        ] {
            let body = Range { start: at, len };
            let status = test.status(Op::IpcShare, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{at:#x} {len:#x}");
        }
        assert!(test.session.objects.sharing.is_untouched());
        let body = Range { start, len: UNIT };
        let handle: Opaque = test.reply(Op::IpcShare, &body, &[]).expect("a handle");
        let open = IpcOpen {
            handle,
            ..IpcOpen::default()
        };
        let status = test.status(Op::IpcOpen, &open, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_CONTEXT, "its own memory");
        let freed = Object { object: start };
        assert_eq!(test.status(Op::IpcForget, &freed, &[]), CUDA_SUCCESS);
        let status = test.status(Op::IpcOpen, &open, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "the handle is revoked");
    }

    #[test]
    fn memory_of_another_session_is_opened_by_its_handle_only() {
        let mut test = Fixture::new(&[]);
        let (open, grant, _holder) = of_another(&test, 0);
        let (foreign, _grant, _other) = of_another(&test, 1);
        let mut wrong = open;
        wrong.handle.words[3] ^= 1;
        let elsewhere = IpcOpen { device: 1, ..open };
        for (body, status) in [
            (wrong, CUDA_ERROR_INVALID_VALUE),
            (IpcOpen::default(), CUDA_ERROR_INVALID_VALUE),
            (foreign, CUDA_ERROR_INVALID_VALUE),
            (elsewhere, CUDA_ERROR_INVALID_DEVICE),
        ] {
            assert_eq!(test.status(Op::IpcOpen, &body, &[]), status);
        }
        assert!(!test.owns(grant.start));
        for _ in 0..2 {
            assert_eq!(test.status(Op::IpcOpen, &open, &[]), CUDA_SUCCESS);
        }
        let close = Object {
            object: grant.start,
        };
        for owned in [true, false] {
            assert_eq!(test.status(Op::IpcClose, &close, &[]), CUDA_SUCCESS);
            assert_eq!(test.owns(grant.start), owned);
        }
        let status = test.status(Op::IpcClose, &close, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE);
        let inside = Object {
            object: grant.start + 8,
        };
        let status = test.status(Op::IpcClose, &inside, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE);
    }

    #[test]
    fn memory_that_the_second_device_cannot_use_is_closed_again() {
        let mut test = Fixture::with_devices(2, &[("cuMemSetAccess", obeys as Function)]);
        let (open, grant, _holder) = of_another(&test, 0);
        let open = IpcOpen { device: 1, ..open };
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let status = test.status(Op::IpcOpen, &open, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        assert!(test.session.objects.sharing.is_untouched());
        assert_eq!(Arc::strong_count(&grant), 1);
        test.orders(CUDA_SUCCESS);
        assert_eq!(test.status(Op::IpcOpen, &open, &[]), CUDA_SUCCESS);
    }

    #[test]
    fn the_last_holder_returns_shared_memory() {
        let mut test = Fixture::new(&[("cuMemUnmap", counts as Function)]);
        let (open, grant, holder) = of_another(&test, 0);
        assert_eq!(test.status(Op::IpcOpen, &open, &[]), CUDA_SUCCESS);
        let close = Object {
            object: grant.start,
        };
        drop((grant, holder));
        assert_eq!(test.calls(), 0);
        assert_eq!(test.status(Op::IpcClose, &close, &[]), CUDA_SUCCESS);
        assert_eq!((test.calls(), test.held()), (1, 0));
    }

    /// Gives a descriptor of a memory file, unless ordered otherwise.
    extern "C" fn exports(descriptor: &mut i32) -> CUresult {
        match obeys() {
            CUDA_SUCCESS => *descriptor = sealed(&[0]).into_raw_fd(),
            status => return status,
        }
        counts()
    }

    #[test]
    fn a_pool_and_a_range_are_exported_as_descriptors_only() {
        let mut test = Fixture::new(&[
            ("cuMemPoolExportToShareableHandle", exports as Function),
            ("cuMemGetHandleForAddressRange", exports as Function),
        ]);
        let (pool, address) = (test.pool(0), test.memory(UNIT));
        let export = |handle, kind| PhysicalExport {
            handle,
            flags: 0,
            kind,
            pad: 0,
        };
        let range = |address, len, kind| RangeHandle {
            address,
            len,
            flags: 0,
            kind,
            pad: 0,
        };
        let dma = CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let mut wrong = others(pool).map(|pool| export(pool, FILE)).to_vec();
        wrong.push(export(pool, CU_MEM_HANDLE_TYPE_FABRIC));
        for body in wrong {
            let status = test.status(Op::PoolExport, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{:#x}", body.handle);
        }
        for body in [
            range(address + 8, UNIT, dma),
            range(address - 8, UNIT, dma),
            range(0, UNIT, dma),
            range(address, UNIT, dma + 1),
        ] {
            let status = test.status(Op::RangeHandle, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{:#x}", body.address);
        }
        assert_eq!(test.calls(), 0);
        for (ordered, status) in [
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED),
            (CUDA_SUCCESS, CUDA_SUCCESS),
        ] {
            test.orders(ordered);
            let exported = test.status(Op::PoolExport, &export(pool, FILE), &[]);
            assert_eq!(exported, status);
            let exported = test.status(Op::RangeHandle, &range(address, UNIT, dma), &[]);
            assert_eq!(exported, status);
        }
        test.hangs_up();
        let status = test.status(Op::PoolExport, &export(pool, FILE), &[]);
        assert_eq!(status, CUDA_ERROR_OUT_OF_MEMORY);
        let status = test.status(Op::RangeHandle, &range(address, UNIT, dma), &[]);
        assert_eq!(status, CUDA_ERROR_OUT_OF_MEMORY);
    }

    #[test]
    fn exported_ranges_are_described_as_memory_that_stays() {
        let mut test =
            Fixture::with_keeper(&[("cuMemGetHandleForAddressRange", exports as Function)]);
        let (first, second) = (test.memory(UNIT), test.memory(UNIT));
        let body = RangeHandle {
            address: second,
            len: UNIT,
            flags: 0,
            kind: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
            pad: 0,
        };
        assert_eq!(test.told(Op::RangeHandle, &body, &[]), CUDA_SUCCESS);
        let staying = |test: &Fixture| -> Vec<u64> {
            let records = test.session.shared.description.records();
            let of_kind = records.iter().filter(|one| one.kind == RecordKind::Stays);
            of_kind.map(|one| one.key).collect()
        };
        assert_eq!(staying(&test), [second]);
        let grants = &test.session.objects.grants;
        assert!(grants[&second].stays() && !grants[&first].stays());
        let range = Range {
            start: second,
            len: UNIT,
        };
        assert_eq!(test.told(Op::MemRelease, &range, &[]), CUDA_SUCCESS);
        assert!(staying(&test).is_empty());
    }

    const IMPORT: &str = "cuMemPoolImportFromShareableHandle";

    fn import(test: &mut Fixture) -> PoolImport {
        PoolImport {
            handle: test.new_handle(Kind::MemPool),
            kind: FILE,
            device: 0,
            flags: 0,
        }
    }

    #[test]
    fn a_pool_is_imported_from_a_descriptor_that_can_be_one() {
        let mut test = Fixture::new(&[(IMPORT, counts as Function)]);
        let good = import(&mut test);
        let fabric = PoolImport {
            kind: CU_MEM_HANDLE_TYPE_FABRIC,
            ..good
        };
        let elsewhere = PoolImport { device: 1, ..good };
        let memory = || sealed(&[0]);
        let null = || File::open("/dev/null").expect("a device").into();
        for (file, body, status) in [
            (null(), good, CUDA_ERROR_INVALID_VALUE),
            (memory(), fabric, CUDA_ERROR_INVALID_VALUE),
            (memory(), elsewhere, CUDA_ERROR_INVALID_DEVICE),
        ] {
            test.sends(file);
            assert_eq!(test.status(Op::PoolImport, &body, &[]), status);
        }
        test.claims_descriptor();
        assert!(test.is_violation(Op::PoolImport, &good, &[]));
        let pools = test.session.objects.pools.pools.len();
        assert_eq!((test.calls(), pools), (0, 0));
    }

    #[test]
    fn an_imported_pool_that_is_not_the_clients_is_destroyed_again() {
        let mut test = Fixture::new(&[
            (IMPORT, obeys_with_handle as Function),
            ("cuMemPoolDestroy", counts as Function),
        ]);
        let body = import(&mut test);
        for (ordered, status, destroyed) in [
            (CUDA_ERROR_UNKNOWN, CUDA_ERROR_UNKNOWN, 0),
            (CUDA_SUCCESS, CUDA_SUCCESS, 0),
            (CUDA_SUCCESS, CUDA_ERROR_INVALID_HANDLE, 1),
            (FAULT, FAULT, 0),
        ] {
            test.orders(ordered);
            test.sends(sealed(&[0]));
            assert_eq!(test.told(Op::PoolImport, &body, &[]), status);
            assert_eq!(test.calls(), destroyed, "{status}");
        }
        assert!(test.has_ended());
        assert_eq!(test.session.objects.pools.pools.len(), 1);
    }

    extern "C" fn block(start: &mut u64, len: &mut usize, address: u64) -> CUresult {
        (*start, *len) = (address, 4096);
        obeys()
    }

    #[test]
    fn an_imported_allocation_that_does_not_count_is_freed_again() {
        let mut test = Fixture::new(&[
            ("cuMemGetAddressRange_v2", block as Function),
            ("cuMemFreeAsync", counts as Function),
        ]);
        let body = PoolImportPointer {
            pool: test.pool(0),
            data: Opaque::default(),
        };
        for pool in others(body.pool) {
            let body = PoolImportPointer { pool, ..body };
            let status = test.status(Op::PoolImportPointer, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{pool:#x}");
        }
        test.limit(4096);
        for (ordered, status, freed, held) in [
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED, 1, 0),
            (CUDA_SUCCESS, CUDA_SUCCESS, 0, 4096),
            (CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY, 1, 4096),
        ] {
            test.orders(ordered);
            assert_eq!(test.told(Op::PoolImportPointer, &body, &[]), status);
            assert_eq!((test.calls(), test.held()), (freed, held), "{status}");
        }
    }

    #[test]
    fn a_pointer_is_exported_where_an_allocation_begins() {
        let mut test = Fixture::new(&[
            ("cuMemGetAddressRange_v2", block as Function),
            ("cuMemPoolExportPointer", obeys as Function),
        ]);
        let body = PoolImportPointer {
            pool: test.pool(0),
            data: Opaque::default(),
        };
        let start: u64 = test.reply(Op::PoolImportPointer, &body, &[]).expect("it");
        for (object, ordered, status) in [
            (0, CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE),
            (start + 8, CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE),
            (start, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED),
            (start, CUDA_SUCCESS, CUDA_SUCCESS),
        ] {
            test.orders(ordered);
            let told = test.status(Op::PoolExportPointer, &Object { object }, &[]);
            assert_eq!(told, status, "{object:#x}");
        }
    }

    fn page() -> FileRegister {
        FileRegister {
            len: 4096,
            ..FileRegister::default()
        }
    }

    #[test]
    fn a_file_that_cannot_be_registered_does_not_count() {
        let mut test = Fixture::new(&[("cuMemHostRegister_v2", counts as Function)]);
        let part = |offset, len| FilePart { offset, len }.as_bytes().to_vec();
        let whole = || sealed(&[0; 8192]);
        let null = || File::open("/dev/null").expect("a device").into();
        let file = |offset, len, address, device| FileRegister {
            offset,
            len,
            address,
            flags: 0,
            device,
        };
        for (fd, body, rest, status) in [
            (null(), page(), vec![], CUDA_ERROR_INVALID_VALUE),
            (whole(), file(0, 0, 0, 0), vec![], CUDA_ERROR_INVALID_VALUE),
            (whole(), file(0, 8, 0, 0), vec![], CUDA_ERROR_INVALID_VALUE),
            (
                whole(),
                file(8, 4096, 0, 0),
                vec![],
                CUDA_ERROR_INVALID_VALUE,
            ),
            (
                whole(),
                file(8192, 4096, 0, 0),
                vec![],
                CUDA_ERROR_INVALID_VALUE,
            ),
            (
                whole(),
                file(0, 4096, 8, 0),
                vec![],
                CUDA_ERROR_INVALID_VALUE,
            ),
            (
                whole(),
                file(0, 4096, 0, 1),
                vec![],
                CUDA_ERROR_INVALID_DEVICE,
            ),
            // The parts are more than all.
            (whole(), page(), part(0, 8192), CUDA_ERROR_INVALID_VALUE),
            (
                whole(),
                file(0, 8192, 0, 0),
                part(8192, 4096),
                CUDA_ERROR_INVALID_VALUE,
            ),
        ] {
            test.sends(fd);
            let told = test.status(Op::FileRegister, &body, &rest);
            assert_eq!(told, status, "{} {}", body.offset, body.len);
        }
        test.sends(whole());
        let parts = vec![0; (FILE_PARTS_MAX + 1) * size_of::<FilePart>()];
        assert!(test.is_violation(Op::FileRegister, &page(), &parts));
        test.claims_descriptor();
        assert!(test.is_violation(Op::FileRegister, &page(), &[]));
        assert_eq!((test.calls(), test.held_host()), (0, 0));
        assert_eq!(test.session.objects.files.len(), 0);
    }

    extern "C" fn other_address(device: &mut u64) -> CUresult {
        *device = 8;
        obeys()
    }

    #[test]
    fn a_file_that_the_driver_does_not_register_does_not_count() {
        let mut test = Fixture::new(&[("cuMemHostRegister_v2", obeys as Function)]);
        for (status, held) in [(CUDA_ERROR_NOT_SUPPORTED, 0), (CUDA_SUCCESS, 4096)] {
            test.orders(status);
            test.sends(sealed(&[0; 4096]));
            assert_eq!(test.told(Op::FileRegister, &page(), &[]), status);
            assert_eq!(test.held_host(), held);
        }
        test.orders(FAULT);
        test.sends(sealed(&[0; 4096]));
        assert_eq!(test.told(Op::FileRegister, &page(), &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn a_file_that_devices_would_see_elsewhere_is_unregistered() {
        let mut test = Fixture::new(&[
            ("cuMemHostUnregister", counts as Function),
            ("cuMemHostGetDevicePointer_v2", other_address as Function),
        ]);
        for (ordered, status) in [
            (CUDA_SUCCESS, CUDA_ERROR_NOT_SUPPORTED),
            (CUDA_ERROR_UNKNOWN, CUDA_ERROR_UNKNOWN),
        ] {
            test.orders(ordered);
            test.sends(sealed(&[0; 4096]));
            let told = test.status(Op::FileRegister, &page(), &[]);
            assert_eq!((told, test.calls(), test.held_host()), (status, 1, 0));
        }
        assert_eq!(test.session.objects.files.len(), 0);
    }

    #[test]
    fn files_count_for_the_user_until_they_are_unregistered() {
        let functions = [("cuMemHostRegister_v2", counts as Function)];
        let mut test = Fixture::with_host_memory(8192, &functions);
        let pages = FileRegister {
            len: 8192,
            ..page()
        };
        let register = |test: &mut Fixture, body: &FileRegister| {
            test.sends(sealed(&[0; 8192]));
            test.handle(Op::FileRegister, body, &[])
        };
        test.sends(sealed(&[0; 8192]));
        let object: u64 = test.reply(Op::FileRegister, &page(), &[]).expect("a file");
        let refused = register(&mut test, &pages);
        let full = CUDA_ERROR_OUT_OF_MEMORY;
        assert!(matches!(refused, Err(CallError::Status(status)) if status == full));
        assert_eq!((test.calls(), test.held_host()), (1, 4096));
        let file = Object { object };
        assert_eq!(test.status(Op::FileUnregister, &file, &[]), CUDA_SUCCESS);
        let waits = register(&mut test, &pages);
        assert!(matches!(waits, Err(CallError::Full)), "room will come");
        assert_eq!(test.buried(), 1);
        // The descriptor of the message that waited is still there.
        test.claims_descriptor();
        let status = test.status(Op::FileRegister, &pages, &[]);
        assert_eq!((status, test.calls()), (CUDA_SUCCESS, 1));
    }

    #[test]
    fn the_pages_of_a_file_are_not_populated_for_a_client_that_has_gone() {
        let functions = [("cuMemHostRegister_v2", counts as Function)];
        let mut test = Fixture::new(&functions);
        let own = test.session.shared.clone();
        own.hung_up.store(true, atomic::Ordering::Relaxed);
        test.sends(sealed(&[0; 4096]));
        let status = test.status(Op::FileRegister, &page(), &[]);
        assert_eq!((status, test.calls()), (CUDA_ERROR_OUT_OF_MEMORY, 0));
        assert_eq!((test.held_host(), test.session.objects.files.len()), (0, 0));
    }

    #[test]
    fn a_file_is_unregistered_once_and_named_no_more() {
        let mut test = Fixture::new(&[]);
        test.sends(sealed(&[0; 4096]));
        let object: u64 = test.reply(Op::FileRegister, &page(), &[]).expect("a file");
        assert!(test.owns(object + 4088) && !test.owns(object + 4089));
        for object in [0, object + 8] {
            let status = test.status(Op::FileUnregister, &Object { object }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{object:#x}");
        }
        let file = Object { object };
        assert_eq!(test.status(Op::FileUnregister, &file, &[]), CUDA_SUCCESS);
        assert!(!test.owns(object));
        let again = test.status(Op::FileUnregister, &file, &[]);
        assert_eq!(again, CUDA_ERROR_INVALID_VALUE);
        assert_eq!((test.held_host(), test.buried()), (4096, 1));
        assert_eq!(test.held_host(), 0);
    }

    #[test]
    fn peers_are_two_devices() {
        let mut test = Fixture::with_devices(2, &[("cuCtxEnablePeerAccess", obeys as Function)]);
        let peers = |owner, user, enable| Peers {
            owner,
            user,
            enable,
            pad: 0,
        };
        for (body, ordered, status) in [
            (peers(0, 2, 1), CUDA_SUCCESS, CUDA_ERROR_INVALID_DEVICE),
            (peers(2, 0, 1), CUDA_SUCCESS, CUDA_ERROR_INVALID_DEVICE),
            (
                peers(1, 1, 1),
                CUDA_SUCCESS,
                CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            ),
            (
                peers(0, 1, 1),
                CUDA_ERROR_NOT_SUPPORTED,
                CUDA_ERROR_NOT_SUPPORTED,
            ),
        ] {
            test.orders(ordered);
            assert_eq!(test.status(Op::PeerAccess, &body, &[]), status);
            assert!(test.session.objects.peers.is_empty(), "{status}");
        }
        for (ordered, enable, count) in [
            (CUDA_SUCCESS, 1, 1),
            (CUDA_SUCCESS, 0, 0),
            (CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 1, 1),
        ] {
            test.orders(ordered);
            let body = peers(0, 1, enable);
            assert_eq!(test.status(Op::PeerAccess, &body, &[]), CUDA_SUCCESS);
            assert_eq!(test.session.objects.peers.len(), count);
        }
    }

    #[test]
    fn a_peer_gets_access_to_what_is_granted_already() {
        let mut test = Fixture::with_devices(2, &[("cuMemSetAccess", counts as Function)]);
        test.memory_of(0, UNIT);
        test.memory_of(1, UNIT);
        test.calls();
        let body = Peers {
            owner: 0,
            user: 1,
            enable: 1,
            pad: 0,
        };
        assert_eq!(test.status(Op::PeerAccess, &body, &[]), CUDA_SUCCESS);
        assert_eq!(test.calls(), 1, "to the owner's memory");
        let grant = MemGrant {
            len: UNIT,
            device: 0,
            flags: 0,
        };
        assert_eq!(test.status(Op::MemGrant, &grant, &[]), CUDA_SUCCESS);
        assert_eq!(test.calls(), 2);
    }

    #[test]
    fn a_copy_beside_its_streams_device_returns_each_error_and_leaves_no_event() {
        for name in [
            "cuStreamCreateWithPriority",
            "cuEventRecordWithFlags",
            "cuStreamWaitEvent",
            "cuMemcpyHtoDAsync_v2",
        ] {
            let of_stream = name == "cuStreamCreateWithPriority";
            let function = match of_stream {
                true => obeys_with_handle as Function,
                false => obeys as Function,
            };
            let mut test = Fixture::with_devices(
                2,
                &[(name, function), ("cuEventDestroy_v2", counts as Function)],
            );
            let body = CopyInline {
                to: test.memory_of(1, UNIT),
                stream: test.stream(),
                len: 8,
            };
            test.orders(CUDA_ERROR_NOT_SUPPORTED);
            let status = test.status(Op::CopyInline, &body, &[0; 8]);
            assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED, "{name}");
            let events = match name {
                "cuStreamCreateWithPriority" => 0,
                // Of the wait before the copy and of the one behind it.
                "cuMemcpyHtoDAsync_v2" => 2,
                _ => 1,
            };
            assert_eq!(test.calls(), events, "{name}");
            test.orders(CUDA_SUCCESS);
            let status = test.status(Op::CopyInline, &body, &[0; 8]);
            assert_eq!((status, test.calls()), (CUDA_SUCCESS, 2), "{name}");
            assert_eq!(test.session.objects.helpers.len(), 1, "{name}");
        }
    }

    #[test]
    fn memory_is_of_the_device_that_gave_it() {
        let mut test = Fixture::with_devices(2, &[("cuMemcpyPeerAsync", counts as Function)]);
        let body = Copy {
            to: test.memory_of(1, UNIT),
            from: test.memory_of(1, UNIT),
            len: 8,
            stream: test.stream(),
            sides: Side::Device as u32,
            pad: 0,
        };
        assert_eq!(test.status(Op::Copy, &body, &[]), CUDA_SUCCESS);
        assert_eq!(test.calls(), 0, "both are of one device");
    }
}
