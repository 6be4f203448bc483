//! Memory shared between sessions, with other programs, with files, and between devices.

use super::Reply;
use crate::engine::base::account::Memory;
use crate::engine::base::call::{Call, Incoming};
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side;
use crate::engine::calls::virtual_memory::may_be_exported_memory;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use mpsshim_api::cuda::*;
use mpsshim_proto::arena;
use mpsshim_proto::message::memory::{
    FILE_PARTS_MAX, FilePart, FileRegister, IpcOpen, IpcOpened, Peers, PhysicalExport, PoolImport,
    PoolImportPointer, RangeHandle,
};
use mpsshim_proto::message::{Object, Range};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use zerocopy::{FromBytes, IntoBytes};

impl Session {
    fn who(&self) -> (u64, u32) {
        (self.shared.info.session, self.shared.info.uid)
    }

    /// `cuIpcGetMemHandle` of an allocation of the client, which lies in one grant.
    pub fn ipc_share(&mut self, shared: &Shared, body: Range) -> Reply {
        let who = self.who();
        let grant = match self.objects.grants.range(..=body.start).next_back() {
            Some((start, grant))
                if body.len > 0
                    && body.start - start < grant.len
                    && body.len <= grant.len - (body.start - start) =>
            {
                grant
            }
            _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
        };
        let range = (body.start, body.len);
        let handle = self
            .objects
            .sharing
            .share(&shared.roster.shares, who, range, grant)?;
        Ok(handle.to_vec())
    }

    /// Revokes the handle of an allocation that has been freed.
    pub fn ipc_forget(&mut self, shared: &Shared, body: Object) -> Result<(), CallError> {
        self.objects
            .sharing
            .forget(&shared.roster.shares, body.object);
        Ok(())
    }

    /// `cuIpcOpenMemHandle`.
    pub fn ipc_open(&mut self, shared: &Shared, body: IpcOpen) -> Reply {
        let user = shared.gpu.device(body.device)?;
        user.make_current(&shared.gpu.driver)?;
        let mut handle = [0; 64];
        handle.copy_from_slice(body.handle.as_bytes());
        let who = self.who();
        let (start, len, grant) =
            self.objects
                .sharing
                .open(&shared.roster.shares, who, &self.account, &handle)?;
        if grant.device != user.ordinal
            && let Err(status) = user.may_use(&shared.gpu.driver, &grant)
        {
            if let Ok(Some(grant)) = self.objects.sharing.close(start) {
                grant.left_by(&self.account);
            }
            return Err(status.into());
        }
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
    pub fn ipc_close(&mut self, shared: &Shared, body: Object) -> Result<(), CallError> {
        if let Some(grant) = self.objects.sharing.close(body.object)? {
            grant.left_by(&self.account);
            // If its owner has ended, the memory is freed here, after this session's work.
            self.objects.releasing.push(grant);
            self.finish_releases(shared);
        }
        Ok(())
    }

    /// `cuMemPoolExportToShareableHandle`: the driver's own descriptor.
    pub fn pool_export(&mut self, shared: &Shared, call: Call<'_, PhysicalExport>) -> Reply {
        let Call { body, message } = call;
        let pool = self.pool(shared, body.handle)?;
        if body.kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        let mut raw = -1;
        let driver = &shared.gpu.driver.memory;
        driver.pool_export(&mut raw, pool, body.kind, body.flags)?;
        self.send_raw(message, raw)
    }

    /// Sends a descriptor that the driver opened.
    fn send_raw(&self, message: Incoming<'_>, raw: i32) -> Reply {
        if raw < 0 {
            return Err(CUDA_ERROR_OPERATING_SYSTEM.into());
        }
        // SAFETY: the driver opened it for us.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        self.send_descriptor(message.token, &fd, 0)?;
        Ok(Vec::new())
    }

    /// `cuMemPoolImportFromShareableHandle`.
    pub fn pool_import(&mut self, shared: &Shared, call: Call<'_, PoolImport>) -> Reply {
        let Call { body, message } = call;
        let fd = self.receive_descriptor(message.token)?;
        // Handles of other kinds are structs: the driver would take the descriptor's number for a pointer.
        if body.kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !may_be_exported_memory(&fd) {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        let device = shared.gpu.device(body.device)?;
        device.make_current(&shared.gpu.driver)?;
        let mut raw = CUmemoryPool::NULL;
        let driver = &shared.gpu.driver.memory;
        driver.pool_import(&mut raw, fd.as_raw_fd() as usize, body.kind, body.flags)?;
        if let Err(status) = self.objects.pools.add_imported(
            &shared.gpu,
            body.handle,
            &self.account,
            raw,
            device.ordinal,
        ) {
            let _ = driver.pool_destroy(raw);
            return Err(status.into());
        }
        Ok(Vec::new())
    }

    /// `cuMemPoolExportPointer` of an allocation of the session's.
    pub fn pool_export_pointer(&mut self, shared: &Shared, body: Object) -> Reply {
        let device = self.objects.pools.device_of(body.object);
        let device = device.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
        let mut data = CUmemPoolPtrExportData([0; 64]);
        let driver = &shared.gpu.driver.memory;
        driver.pool_export_pointer(&mut data, body.object)?;
        Ok(data.0.to_vec())
    }

    /// `cuMemPoolImportPointer`. The driver checks that the allocation is of the pool that was imported.
    pub fn pool_import_pointer(&mut self, shared: &Shared, body: PoolImportPointer) -> Reply {
        let raw = self.pool(shared, body.pool)?;
        self.objects.pools.has_room()?;
        let device = self.objects.pools.pools.get(body.pool)?.device;
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
        let charge = self.account.take(Memory::Device(device), len);
        let charge = charge.inspect_err(|_| {
            let _ = driver.pool_free(start, CUstream::NULL);
        })?;
        self.objects
            .pools
            .note((start, len), Some(charge), body.pool, device);
        Ok(Range { start, len }.as_bytes().to_vec())
    }

    /// `cuMemHostRegister` of a file that the client maps.
    pub fn file_register(&mut self, shared: &Shared, call: Call<'_, FileRegister>) -> Reply {
        let Call { body, message } = call;
        let fd = self.receive_descriptor(message.token)?;
        let behind = message.behind::<FileRegister>()?;
        let parts = parts(&body, &behind)?;
        let device = shared.gpu.device(body.device)?;
        let place = shared.gpu.place_to_register(&self.shared.held_files)?;
        let charge = self.account.take(Memory::Host, body.len)?;
        let writable = body.flags & CU_MEMHOSTREGISTER_READ_ONLY == 0;
        let (driver, paid) = (&shared.gpu.driver, (charge, place));
        let file = side::on_main(|| {
            device.make_current(driver)?;
            let arena = &shared.gpu.arena;
            arena.register_file(driver, &fd, &parts, body.address, writable, paid)
        })?;
        let (start, len) = (file.start(), body.len);
        self.objects.files.insert(start, file);
        Ok(Range { start, len }.as_bytes().to_vec())
    }

    /// `cuMemHostUnregister` of a registered file, at a quiescent point.
    pub fn file_unregister(&mut self, shared: &Shared, body: Object) -> Result<(), CallError> {
        let file = self
            .objects
            .files
            .remove(&body.object)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        shared.lanes.bury(Buried::File(file));
        Ok(())
    }

    /// `cuMemGetHandleForAddressRange`.
    pub fn range_handle(&mut self, shared: &Shared, call: Call<'_, RangeHandle>) -> Reply {
        let Call { body, message } = call;
        self.check_device(body.address, body.len)?;
        if body.kind != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
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
        self.send_raw(message, raw)
    }

    /// `cuCtxEnablePeerAccess`, `cuCtxDisablePeerAccess`: whether a device may use this session's memory on another.
    pub fn peer_access(&mut self, shared: &Shared, body: Peers) -> Reply {
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
            self.objects.peers.remove(&(owner, user));
            return Ok(Vec::new());
        }
        // For memory that the server does not map itself: variables of modules.
        if let Some(context) = context {
            match shared.gpu.driver.memory.ctx_enable_peer_access(context, 0) {
                Ok(()) | Err(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) => {}
                Err(status) => return Err(status.into()),
            }
        }
        self.objects.peers.insert((owner, user));
        let starts: Vec<u64> = self.objects.grants.keys().copied().collect();
        for start in starts {
            self.share_with_peers(shared, start)?;
        }
        Ok(Vec::new())
    }

    /// Makes a grant accessible to the devices that have access to its device's memory.
    pub fn share_with_peers(&self, shared: &Shared, start: u64) -> Result<(), CUresult> {
        let Some(grant) = self.objects.grants.get(&start) else {
            return Ok(());
        };
        for (_, user) in self
            .objects
            .peers
            .iter()
            .filter(|(owner, _)| *owner == grant.device)
        {
            shared.gpu.devices[*user].may_use(&shared.gpu.driver, grant)?;
        }
        Ok(())
    }

    /// The device whose memory lies at an address of the session's.
    pub fn device_at(&self, shared: &Shared, address: u64) -> Option<Ordinal> {
        if arena::is_device(address) {
            return shared.gpu.devices.of_address(address);
        }
        self.objects
            .virtual_memory
            .device_at(address)
            .or_else(|| self.objects.pools.device_at(address))
    }

    /// Copies between the memories of two devices with the driver's peer copy, which goes through host memory if the
    /// devices cannot reach each other. `None` unless the addresses belong to two devices.
    pub fn copy_between_devices(
        &self,
        shared: &Shared,
        (to, from): (u64, u64),
        len: u64,
        stream: CUstream,
    ) -> Option<Result<(), CUresult>> {
        let (there, here) = (self.device_at(shared, to)?, self.device_at(shared, from)?);
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
        &mut self,
        shared: &Shared,
        (device, index): (Ordinal, usize),
        copy: impl FnOnce(CUstream) -> Result<(), CUresult>,
    ) -> Result<(), CUresult> {
        let driver = &shared.gpu.driver;
        let (home, stream) = {
            let stream = self.objects.streams.at(index)?;
            (stream.device, stream.raw)
        };
        shared.gpu.devices[device].make_current(driver)?;
        let helper = self.helper(shared, device)?;
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
    fn helper(&mut self, shared: &Shared, device: Ordinal) -> Result<CUstream, CUresult> {
        if let Some((_, stream)) = self.objects.helpers.iter().find(|(of, _)| *of == device) {
            return Ok(*stream);
        }
        let mut stream = CUstream::NULL;
        shared
            .gpu
            .driver
            .stream_create(&mut stream, CU_STREAM_NON_BLOCKING, 0)?;
        self.objects.helpers.push((device, stream));
        Ok(stream)
    }
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
