//! Reservations of addresses, physical memory, mappings.

use super::Reply;
use crate::engine::base::account::Memory;
use crate::engine::base::call::{Call, Incoming};
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::lasting::virtual_memory::{Mapping, Released, Reservation};
use crate::engine::objects::files::Looked;
use crate::engine::objects::virtual_memory::{Physical, VirtualMemory};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::memory::{
    ACCESSES_MAX, Access, AddressReserve, GetAccess, Granularity, Location, MapMemory,
    PhysicalCreate, PhysicalExport, PhysicalRetain, Properties, SetAccess,
};
use mpsshim_proto::message::{Object, Range};
use mpsshim_proto::shm;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// How long an unmapping blocks a slow-lane thread until the session's work completes; then it is retried.
const SETTLING: Duration = Duration::from_millis(2);
/// Major number of the NVIDIA driver's device files.
const NVIDIA_MAJOR: u32 = 195;

impl Session {
    /// Translates a location to the driver's ordinal. Host memory allocated by the driver is refused, because the
    /// client could not reach it.
    pub fn location(&self, shared: &Shared, location: Location) -> Result<CUmemLocation, CUresult> {
        match location.kind {
            CU_MEM_LOCATION_TYPE_DEVICE => Ok(CUmemLocation {
                kind: location.kind,
                id: shared.gpu.device(location.id as u32)?.raw,
            }),
            CU_MEM_LOCATION_TYPE_HOST
            | CU_MEM_LOCATION_TYPE_HOST_NUMA
            | CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    pub fn properties(
        &self,
        shared: &Shared,
        properties: &Properties,
    ) -> Result<CUmemAllocationProp, CUresult> {
        if properties.handle_types & CU_MEM_HANDLE_TYPE_FABRIC != 0 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        Ok(properties.at(self.location(shared, properties.location)?))
    }

    /// `cuMemAddressReserve`.
    pub fn address_reserve(&mut self, shared: &Shared, body: AddressReserve) -> Reply {
        shared.gpu.use_any_device();
        let start = self.objects.virtual_memory.reserve(
            &shared.gpu,
            body.len,
            body.alignment,
            body.flags,
        )?;
        let taken = self.objects.virtual_memory.taken_for(start);
        let taken = taken.unwrap_or((start, body.len));
        self.describe_reservation((start, body.len), taken);
        Ok(Range {
            start,
            len: body.len,
        }
        .as_bytes()
        .to_vec())
    }

    /// `cuMemAddressFree`.
    pub fn address_free(&mut self, shared: &Shared, body: Range) -> Result<(), CallError> {
        shared.gpu.use_any_device();
        self.objects
            .virtual_memory
            .free(&shared.gpu, body.start, body.len)?;
        self.describe_gone::<Reservation>(body.start);
        Ok(())
    }

    /// `cuMemGetAllocationGranularity`.
    pub fn granularity(&mut self, shared: &Shared, body: Granularity) -> Reply {
        let properties = self.properties(shared, &body.properties)?;
        let mut bytes = 0;
        shared
            .gpu
            .driver
            .mem_get_granularity(&mut bytes, &properties, body.option)?;
        Ok(super::value(bytes as u64))
    }

    /// `cuMemCreate`.
    pub fn physical_create(&mut self, shared: &Shared, body: PhysicalCreate) -> Reply {
        let properties = self.properties(shared, &body.properties)?;
        let device = shared.gpu.device(body.properties.location.id as u32)?;
        device.make_current(&shared.gpu.driver)?;
        let memory = Memory::Device(device.ordinal);
        let charge = self.with_room(shared, (memory, body.len), |session| {
            session.account.take(memory, body.len)
        })?;
        let mut raw = CUmemGenericAllocationHandle::NULL;
        // So that the keeper can hold a descriptor of the memory.
        let properties = CUmemAllocationProp {
            requested_handle_types: properties.requested_handle_types
                | CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            ..properties
        };
        shared
            .gpu
            .driver
            .mem_create(&mut raw, body.len as usize, &properties, body.flags)?;
        let exportable = body.properties.handle_types != 0;
        let physical = VirtualMemory::physical(body.handle, exportable, memory, charge);
        self.objects
            .virtual_memory
            .add(body.handle, raw, physical)
            .inspect_err(|_| {
                let _ = shared.gpu.driver.mem_release(raw);
            })?;
        let what = (body.len, device.ordinal, exportable);
        self.describe_physical(&shared.images, body.handle, raw, what);
        Ok(Vec::new())
    }

    /// `cuMemRelease` of the client's last reference to a handle.
    pub fn physical_release(&mut self, shared: &Shared, body: Object) -> Result<(), CallError> {
        shared.gpu.use_any_device();
        let gone = self
            .objects
            .virtual_memory
            .release(&shared.gpu, body.object)?;
        match gone {
            Some(key) => self.describe_physical_end(&shared.images, key),
            None => self.describe::<Released>(body.object, &()),
        }
        Ok(())
    }

    /// `cuMemMap`.
    pub fn map_memory(&mut self, shared: &Shared, body: MapMemory) -> Reply {
        shared.gpu.use_any_device();
        let range = (body.address, body.len);
        self.objects.virtual_memory.map(
            &shared.gpu,
            range,
            body.handle,
            body.offset,
            body.flags,
        )?;
        self.describe_mapping(&body);
        Ok(Vec::new())
    }

    /// `cuMemUnmap`, once the session has no work in flight: an access to the mapping afterwards would fault, and end
    /// every client's context.
    pub fn unmap_memory(&mut self, shared: &Shared, body: Range) -> Reply {
        let began = Instant::now();
        while self.has_work_in_flight(&shared.gpu) {
            if began.elapsed() > SETTLING {
                return Err(CallError::Full);
            }
            std::thread::yield_now();
        }
        shared.gpu.use_any_device();
        let gone = self
            .objects
            .virtual_memory
            .unmap(&shared.gpu, body.start, body.len)?;
        for start in gone.mappings {
            self.describe_gone::<Mapping>(start);
        }
        for key in gone.physical {
            self.describe_physical_end(&shared.images, key);
        }
        Ok(Vec::new())
    }

    /// The access descriptors that follow a message's body.
    pub fn accesses_behind<T>(
        &self,
        shared: &Shared,
        message: Incoming<'_>,
        count: u32,
    ) -> Result<Vec<CUmemAccessDesc>, CallError> {
        let behind = message.behind::<T>()?;
        let count = count as usize;
        if count > ACCESSES_MAX || behind.len() < count * size_of::<Access>() {
            return Err(CallError::Violation(format!("{count} accesses")));
        }
        let accesses = behind.chunks_exact(size_of::<Access>()).take(count);
        let accesses = accesses.flat_map(Access::read_from_bytes).map(|access| {
            Ok(CUmemAccessDesc {
                location: self.location(shared, access.location)?,
                flags: access.flags,
            })
        });
        Ok(accesses.collect::<Result<Vec<_>, CUresult>>()?)
    }

    /// `cuMemSetAccess`.
    pub fn set_access(&mut self, shared: &Shared, call: Call<'_, SetAccess>) -> Reply {
        let Call { body, message } = call;
        let accesses = self.accesses_behind::<SetAccess>(shared, message, body.count)?;
        shared.gpu.use_any_device();
        self.objects
            .virtual_memory
            .set_access(&shared.gpu, body.address, body.len, &accesses)?;
        self.describe_access(body.address, body.len, &accesses);
        Ok(Vec::new())
    }

    /// `cuMemGetAccess`.
    pub fn get_access(&mut self, shared: &Shared, body: GetAccess) -> Reply {
        let location = self.location(shared, body.location)?;
        self.objects
            .virtual_memory
            .mapped(body.address)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut flags = 0;
        shared
            .gpu
            .driver
            .memory
            .mem_get_access(&mut flags, &location, body.address)?;
        Ok(super::value(flags))
    }

    /// `cuMemExportToShareableHandle`: the driver's own descriptor, so that programs without the shim can use it too.
    pub fn physical_export(&mut self, shared: &Shared, call: Call<'_, PhysicalExport>) -> Reply {
        let Call { body, message } = call;
        let Ok(allocation) = self.objects.virtual_memory.allocations.get(body.handle) else {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        };
        // The driver's status for memory created without handle types.
        if !allocation.is_exportable() {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        // Handles of other kinds are not descriptors, and the driver would write more bytes than a descriptor has.
        if body.kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        let mut raw = -1;
        shared
            .gpu
            .driver
            .memory
            .mem_export(&mut raw, allocation.raw, body.kind, body.flags)?;
        if raw < 0 {
            return Err(CUDA_ERROR_OPERATING_SYSTEM.into());
        }
        // SAFETY: the driver opened it for us.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        allocation.is_exported();
        self.lasting.shares = true;
        self.send_descriptor(message.token, &fd, 0)?;
        Ok(Vec::new())
    }

    /// Sends a descriptor that belongs to an answer, before the answer.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the client does not accept it.
    pub fn send_descriptor(&self, token: u64, fd: &OwnedFd, len: u64) -> Result<(), CUresult> {
        let note = DescriptorNote { token, len };
        shm::send_packet(self.shared.socket(), note.as_bytes(), &[fd.as_fd()])
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// `cuMemImportFromShareableHandle`. The client may send any descriptor; it is passed to the driver only if the
    /// driver may have exported it.
    pub fn physical_import(&mut self, shared: &Shared, call: Call<'_, Object>) -> Reply {
        let Call { body, message } = call;
        self.lasting.shares = true;
        let fd = self.receive_descriptor(message.token)?;
        if !may_be_exported_memory(&fd) {
            return Err(CUDA_ERROR_UNKNOWN.into());
        }
        shared.gpu.use_any_device();
        let mut raw = CUmemGenericAllocationHandle::NULL;
        shared.gpu.driver.memory.mem_import(
            &mut raw,
            fd.as_raw_fd() as usize,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        )?;
        let account = self.account.clone();
        self.add_found(shared, body.object, raw, |device| {
            VirtualMemory::imported(&account, Memory::Device(device))
        })
    }

    /// Adds a driver's handle of existing memory. Returns the memory's properties for the client.
    fn add_found(
        &mut self,
        shared: &Shared,
        handle: u64,
        raw: CUmemGenericAllocationHandle,
        physical: impl FnOnce(Ordinal) -> Result<Arc<Physical>, CUresult>,
    ) -> Reply {
        let mut found = CUmemAllocationProp::default();
        let added = shared
            .gpu
            .driver
            .memory
            .mem_get_properties(&mut found, raw)
            .and_then(|()| {
                let device = shared
                    .gpu
                    .devices
                    .iter()
                    .find(|device| device.raw == found.location.id)
                    .filter(|_| found.location.kind == CU_MEM_LOCATION_TYPE_DEVICE)
                    .ok_or(CUDA_ERROR_NOT_SUPPORTED)?
                    .ordinal;
                self.objects
                    .virtual_memory
                    .add(handle, raw, physical(device)?)?;
                Ok(Location {
                    kind: found.location.kind,
                    id: u32::from(device) as i32,
                })
            });
        match added {
            Ok(location) => {
                let mut properties = Properties::of(&found, location);
                // Hidden from the client: the server requests exportable handles for all memory.
                let known = self.objects.virtual_memory.allocations.get(handle);
                if known.is_ok_and(|allocation| !allocation.is_exportable()) {
                    properties.handle_types = 0;
                }
                Ok(properties.as_bytes().to_vec())
            }
            Err(status) => {
                let _ = shared.gpu.driver.mem_release(raw);
                Err(status.into())
            }
        }
    }

    /// `cuMemRetainAllocationHandle` if the client has no handle of the memory any more.
    pub fn physical_retain(&mut self, shared: &Shared, body: PhysicalRetain) -> Reply {
        self.lasting.shares = true;
        let physical = self
            .objects
            .virtual_memory
            .mapped(body.address)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?
            .clone();
        let mut raw = CUmemGenericAllocationHandle::NULL;
        shared
            .gpu
            .driver
            .memory
            .mem_retain(&mut raw, body.address)?;
        self.add_found(shared, body.handle, raw, |_| Ok(physical))
    }
}

/// Whether a descriptor may have been exported by a driver: an NVIDIA device file, or a memory file (softgpu). No other
/// is passed to the driver: a file of the client's own file system could block the calling thread forever.
pub fn may_be_exported_memory(fd: &OwnedFd) -> bool {
    Looked::at(fd).is_some_and(|found| match found.kind {
        libc::S_IFCHR => found.device_major == NVIDIA_MAJOR,
        libc::S_IFREG => found.in_memory,
        _ => false,
    })
}
