//! Reservations of addresses, physical memory, mappings.

use super::reply::{Reply, number};
use crate::engine::base::account::Memory;
use crate::engine::base::call::{Call, Incoming};
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::memory::with_room;
use crate::engine::calls::module::receive_descriptor;
use crate::engine::gpu::devices;
use crate::engine::lasting::virtual_memory::{
    Exported, Mapping, Released, Reservation, Retained, describe_access, describe_imported,
    describe_mapping, describe_physical, describe_physical_end, describe_reservation,
};
use crate::engine::lasting::{describe, describe_gone};
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
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// How long an unmapping blocks a slow-lane thread until the session's work completes; then it is retried.
const SETTLING: Duration = Duration::from_millis(2);
/// Major number of the NVIDIA driver's device files.
const NVIDIA_MAJOR: u32 = 195;

/// Translates a location to the driver's ordinal. Host memory allocated by the driver is refused, because the
/// client could not reach it.
pub fn location(shared: &Shared, location: Location) -> Result<CUmemLocation, CUresult> {
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
    shared: &Shared,
    properties: &Properties,
) -> Result<CUmemAllocationProp, CUresult> {
    if properties.handle_types & CU_MEM_HANDLE_TYPE_FABRIC != 0 {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    Ok(properties.at(location(shared, properties.location)?))
}

/// `cuMemAddressReserve`.
pub fn address_reserve(session: &mut Session, shared: &Shared, body: AddressReserve) -> Reply {
    shared.gpu.use_any_device();
    let start = session.objects.virtual_memory.reserve(
        &shared.gpu,
        body.len,
        body.alignment,
        body.flags,
    )?;
    let taken = session.objects.virtual_memory.taken_for(start);
    let taken = taken.unwrap_or((start, body.len));
    describe_reservation(session, (start, body.len), taken);
    Ok(Range {
        start,
        len: body.len,
    }
    .as_bytes()
    .to_vec())
}

/// `cuMemAddressFree`.
pub fn address_free(session: &mut Session, shared: &Shared, body: Range) -> Result<(), CallError> {
    shared.gpu.use_any_device();
    session
        .objects
        .virtual_memory
        .free(&shared.gpu, body.start, body.len)?;
    describe_gone::<Reservation>(session, body.start);
    Ok(())
}

/// `cuMemGetAllocationGranularity`.
pub fn granularity(_: &mut Session, shared: &Shared, body: Granularity) -> Reply {
    let properties = properties(shared, &body.properties)?;
    let mut bytes = 0;
    shared
        .gpu
        .driver
        .mem_get_granularity(&mut bytes, &properties, body.option)?;
    Ok(number(bytes as u64))
}

/// `cuMemCreate`.
pub fn physical_create(session: &mut Session, shared: &Shared, body: PhysicalCreate) -> Reply {
    let properties = properties(shared, &body.properties)?;
    let device = shared.gpu.device(body.properties.location.id as u32)?;
    device.make_current(&shared.gpu.driver)?;
    let memory = Memory::Device(device.ordinal);
    let charge = with_room(session, shared, (memory, body.len), |session| {
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
    session
        .objects
        .virtual_memory
        .add(body.handle, raw, physical)
        .inspect_err(|_| {
            let _ = shared.gpu.driver.mem_release(raw);
        })?;
    let what = (body.len, device.ordinal, exportable);
    describe_physical(session, &shared.images, body.handle, raw, what);
    Ok(Vec::new())
}

/// `cuMemRelease` of the client's last reference to a handle.
pub fn physical_release(
    session: &mut Session,
    shared: &Shared,
    body: Object,
) -> Result<(), CallError> {
    shared.gpu.use_any_device();
    let memory = &mut session.objects.virtual_memory;
    let retained = memory.allocations.get(body.object);
    let retained = retained.is_ok_and(|allocation| allocation.retained);
    let gone = memory.release(&shared.gpu, body.object)?;
    let is_gone = gone.is_some();
    if let Some(key) = gone {
        describe_physical_end(session, &shared.images, key);
    }
    if retained {
        describe_gone::<Retained>(session, body.object);
    } else if !is_gone {
        describe::<Released>(session, body.object, &());
    }
    Ok(())
}

/// `cuMemMap`.
pub fn map_memory(session: &mut Session, shared: &Shared, body: MapMemory) -> Reply {
    shared.gpu.use_any_device();
    let range = (body.address, body.len);
    session
        .objects
        .virtual_memory
        .map(&shared.gpu, range, body.handle, body.offset, body.flags)?;
    describe_mapping(session, &body);
    Ok(Vec::new())
}

/// `cuMemUnmap`, once the session has no work in flight: an access to the mapping afterwards would fault, and end
/// every client's context.
pub fn unmap_memory(session: &mut Session, shared: &Shared, body: Range) -> Reply {
    let began = Instant::now();
    while session.has_work_in_flight(&shared.gpu) {
        if began.elapsed() > SETTLING {
            return Err(CallError::Full);
        }
        std::thread::yield_now();
    }
    shared.gpu.use_any_device();
    let gone = session
        .objects
        .virtual_memory
        .unmap(&shared.gpu, body.start, body.len)?;
    session.note_freed(&shared.images, body.start, body.len);
    for start in gone.mappings {
        describe_gone::<Mapping>(session, start);
    }
    for key in gone.physical {
        describe_physical_end(session, &shared.images, key);
    }
    Ok(Vec::new())
}

/// The access descriptors that follow a message's body.
pub fn accesses_behind<T>(
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
            location: location(shared, access.location)?,
            flags: access.flags,
        })
    });
    Ok(accesses.collect::<Result<Vec<_>, CUresult>>()?)
}

/// `cuMemSetAccess`.
pub fn set_access(session: &mut Session, shared: &Shared, call: Call<'_, SetAccess>) -> Reply {
    let Call { body, message } = call;
    let accesses = accesses_behind::<SetAccess>(shared, message, body.count)?;
    shared.gpu.use_any_device();
    session
        .objects
        .virtual_memory
        .set_access(&shared.gpu, body.address, body.len, &accesses)?;
    describe_access(session, body.address, body.len, &accesses);
    Ok(Vec::new())
}

/// `cuMemGetAccess`.
pub fn get_access(session: &mut Session, shared: &Shared, body: GetAccess) -> Reply {
    let location = location(shared, body.location)?;
    session
        .objects
        .virtual_memory
        .mapped(body.address)
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let mut flags = 0;
    shared
        .gpu
        .driver
        .memory
        .mem_get_access(&mut flags, &location, body.address)?;
    Ok(number(flags))
}

/// `cuMemExportToShareableHandle`: the driver's own descriptor, so that programs without the shim can use it too.
pub fn physical_export(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, PhysicalExport>,
) -> Reply {
    let Call { body, message } = call;
    let Ok(allocation) = session.objects.virtual_memory.allocations.get(body.handle) else {
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
    let fd = match allocation.kept_descriptor() {
        Some(_) if body.flags != 0 => return Err(CUDA_ERROR_INVALID_VALUE.into()),
        Some(kept) => {
            let copied = kept.try_clone_to_owned();
            copied.map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?
        }
        None => devices::export_with(&shared.gpu.driver, allocation.raw, body.flags)?,
    };
    let is_first = allocation.note_exported();
    let key = session.objects.virtual_memory.key_of(body.handle);
    if let Some(key) = key.filter(|_| is_first) {
        describe::<Exported>(session, key, &());
    }
    send_descriptor(session, message.token, &fd, 0)?;
    Ok(Vec::new())
}

/// Sends a descriptor that belongs to an answer, before the answer.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY` if the client does not accept it.
pub fn send_descriptor(
    session: &Session,
    token: u64,
    fd: &OwnedFd,
    len: u64,
) -> Result<(), CUresult> {
    let note = DescriptorNote { token, len };
    shm::send_packet(session.shared.socket(), note.as_bytes(), &[fd.as_fd()])
        .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
}

/// `cuMemImportFromShareableHandle`. The client may send any descriptor; it is passed to the driver only if the
/// driver may have exported it.
pub fn physical_import(session: &mut Session, shared: &Shared, call: Call<'_, Object>) -> Reply {
    let Call { body, message } = call;
    let fd = receive_descriptor(session, message.token)?;
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
    let account = session.account.clone();
    let found = add_found(session, shared, body.object, raw, |device| {
        VirtualMemory::imported(body.object, &account, Memory::Device(device))
    })?;
    let device = found.location.id as u32;
    describe_imported(session, &shared.images, body.object, fd.as_fd(), device);
    Ok(found.as_bytes().to_vec())
}

/// Adds a driver's handle of existing memory. Returns the memory's properties for the client.
fn add_found(
    session: &mut Session,
    shared: &Shared,
    handle: u64,
    raw: CUmemGenericAllocationHandle,
    physical: impl FnOnce(Ordinal) -> Result<Arc<Physical>, CUresult>,
) -> Result<Properties, CallError> {
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
            session
                .objects
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
            let known = session.objects.virtual_memory.allocations.get(handle);
            if known.is_ok_and(|allocation| !allocation.is_exportable()) {
                properties.handle_types = 0;
            }
            Ok(properties)
        }
        Err(status) => {
            let _ = shared.gpu.driver.mem_release(raw);
            Err(status.into())
        }
    }
}

/// `cuMemRetainAllocationHandle` if the client has no handle of the memory any more.
pub fn physical_retain(session: &mut Session, shared: &Shared, body: PhysicalRetain) -> Reply {
    let physical = session
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
    let key = physical.key();
    let found = add_found(session, shared, body.handle, raw, |_| Ok(physical))?;
    describe::<Retained>(session, body.handle, &key);
    Ok(found.as_bytes().to_vec())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::base::bounds;
    use crate::engine::base::kinds::Kind as RecordKind;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, obeys, obeys_with_handle, others, records, sealed,
    };
    use mpsshim_proto::arena::VIRTUAL_ARENA_LEN;
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::Op;
    use std::fs::File;
    use std::os::fd::IntoRawFd;

    const UNIT: u64 = 2 << 20;
    const DEVICE: Location = Location {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: 0,
    };
    const PROPERTIES: Properties = Properties {
        kind: 1,
        handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: DEVICE,
        compression: 0,
        rdma: 0,
        usage: 0,
        pad: 0,
    };

    /// Properties that no memory can have, and what a client is told of them.
    fn impossible() -> Vec<(Properties, CUresult)> {
        let place = |kind, id| Properties {
            location: Location { kind, id },
            ..PROPERTIES
        };
        vec![
            (
                place(CU_MEM_LOCATION_TYPE_DEVICE, 1),
                CUDA_ERROR_INVALID_DEVICE,
            ),
            (
                place(CU_MEM_LOCATION_TYPE_DEVICE, -1),
                CUDA_ERROR_INVALID_DEVICE,
            ),
            (
                place(CU_MEM_LOCATION_TYPE_HOST, 0),
                CUDA_ERROR_NOT_SUPPORTED,
            ),
            (
                place(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0),
                CUDA_ERROR_NOT_SUPPORTED,
            ),
            (
                place(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0),
                CUDA_ERROR_NOT_SUPPORTED,
            ),
            (
                place(CU_MEM_LOCATION_TYPE_INVALID, 0),
                CUDA_ERROR_INVALID_VALUE,
            ),
            (place(99, 0), CUDA_ERROR_INVALID_VALUE),
            (
                Properties {
                    handle_types: CU_MEM_HANDLE_TYPE_FABRIC,
                    ..PROPERTIES
                },
                CUDA_ERROR_NOT_SUPPORTED,
            ),
        ]
    }

    fn creates(test: &mut Fixture, properties: Properties) -> PhysicalCreate {
        PhysicalCreate {
            handle: test.new_handle(Kind::Allocation),
            len: UNIT,
            flags: 0,
            properties,
        }
    }

    /// Memory of one unit that may be exported.
    fn physical(test: &mut Fixture) -> u64 {
        let body = creates(test, PROPERTIES);
        assert_eq!(test.status(Op::PhysicalCreate, &body, &[]), CUDA_SUCCESS);
        body.handle
    }

    fn reserved(test: &mut Fixture, len: u64) -> u64 {
        let body = AddressReserve {
            len,
            ..AddressReserve::default()
        };
        let start = test.reply::<u64>(Op::AddressReserve, &body, &[]);
        start.expect("addresses")
    }

    fn mapping(handle: u64, address: u64) -> MapMemory {
        MapMemory {
            handle,
            address,
            len: UNIT,
            offset: 0,
            flags: 0,
        }
    }

    /// The memory of a new handle mapped at new addresses.
    fn mapped(test: &mut Fixture) -> MapMemory {
        let body = mapping(physical(test), reserved(test, UNIT));
        assert_eq!(test.status(Op::MapMemory, &body, &[]), CUDA_SUCCESS);
        body
    }

    fn access(address: u64) -> (SetAccess, Vec<u8>) {
        let body = SetAccess {
            address,
            len: UNIT,
            count: 1,
            pad: 0,
        };
        let of_device = Access {
            location: DEVICE,
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            pad: 0,
        };
        (body, of_device.as_bytes().to_vec())
    }

    #[test]
    fn addresses_that_cannot_be_are_not_reserved() {
        let mut test = Fixture::new(&[]);
        for (len, alignment, flags, status) in [
            (0, 0, 0, CUDA_ERROR_INVALID_VALUE),
            (UNIT + 1, 0, 0, CUDA_ERROR_INVALID_VALUE),
            (UNIT, 3, 0, CUDA_ERROR_INVALID_VALUE),
            (UNIT, UNIT + 1, 0, CUDA_ERROR_INVALID_VALUE),
            (UNIT, 0, 1, CUDA_ERROR_INVALID_VALUE),
            (bounds::RESERVED + UNIT, 0, 0, CUDA_ERROR_OUT_OF_MEMORY),
            (bounds::RESERVED, 2 * UNIT, 0, CUDA_ERROR_OUT_OF_MEMORY),
            (VIRTUAL_ARENA_LEN, 0, 0, CUDA_ERROR_OUT_OF_MEMORY),
            (
                0u64.wrapping_sub(UNIT),
                1 << 63,
                0,
                CUDA_ERROR_OUT_OF_MEMORY,
            ),
        ] {
            let body = AddressReserve {
                len,
                alignment,
                hint: 0,
                flags,
            };
            let refused = test.status(Op::AddressReserve, &body, &[]);
            assert_eq!(refused, status, "{len:#x} {alignment:#x}");
        }
        // Nothing of the session's share is taken.
        assert_ne!(reserved(&mut test, bounds::RESERVED), 0);
    }

    #[test]
    fn a_reservation_is_freed_whole_and_without_mappings() {
        let mut test = Fixture::new(&[]);
        let MapMemory { address, .. } = mapped(&mut test);
        let range = |start, len| Range { start, len };
        for wrong in [
            range(0, UNIT),
            range(address + UNIT, UNIT),
            range(address, 2 * UNIT),
            range(address, UNIT),
        ] {
            let status = test.status(Op::AddressFree, &wrong, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{:#x}", wrong.start);
        }
        let whole = range(address, UNIT);
        assert_eq!(test.status(Op::UnmapMemory, &whole, &[]), CUDA_SUCCESS);
        assert_eq!(test.status(Op::AddressFree, &whole, &[]), CUDA_SUCCESS);
        let again = test.status(Op::AddressFree, &whole, &[]);
        assert_eq!(again, CUDA_ERROR_INVALID_VALUE);
        assert_eq!(reserved(&mut test, UNIT), address, "they are free again");
    }

    #[test]
    fn impossible_properties_are_refused_before_the_driver_sees_them() {
        let mut test = Fixture::new(&[("cuMemCreate", counts as Function)]);
        for (properties, status) in impossible() {
            let body = creates(&mut test, properties);
            assert_eq!(test.status(Op::PhysicalCreate, &body, &[]), status);
            let body = Granularity {
                properties,
                option: 0,
                pad: 0,
            };
            assert_eq!(test.status(Op::Granularity, &body, &[]), status);
        }
        let allocations = test.session.objects.virtual_memory.allocations.len();
        assert_eq!((test.calls(), test.held(), allocations), (0, 0, 0));
    }

    #[test]
    fn a_granularity_that_the_driver_does_not_tell_is_its_error() {
        let mut test = Fixture::new(&[]);
        let body = Granularity {
            properties: PROPERTIES,
            option: 0,
            pad: 0,
        };
        let granularity = test.reply::<u64>(Op::Granularity, &body, &[]);
        assert_eq!(granularity, Ok(UNIT));
        drop(test);
        let mut test = Fixture::new(&[("cuMemGetAllocationGranularity", obeys as Function)]);
        for (status, ends) in [(CUDA_ERROR_NOT_SUPPORTED, false), (FAULT, true)] {
            test.orders(status);
            assert_eq!(test.told(Op::Granularity, &body, &[]), status);
            assert_eq!(test.has_ended(), ends, "{status}");
        }
    }

    #[test]
    fn physical_memory_that_the_driver_does_not_give_is_not_counted() {
        let mut test = Fixture::new(&[("cuMemCreate", obeys_with_handle as Function)]);
        let body = creates(&mut test, PROPERTIES);
        for (status, held) in [(CUDA_ERROR_NOT_SUPPORTED, 0), (CUDA_SUCCESS, UNIT)] {
            test.orders(status);
            assert_eq!(test.told(Op::PhysicalCreate, &body, &[]), status);
            assert_eq!(test.held(), held);
        }
        test.limit(2 * UNIT - 1);
        let more = creates(&mut test, PROPERTIES);
        let status = test.status(Op::PhysicalCreate, &more, &[]);
        assert_eq!((status, test.held()), (CUDA_ERROR_OUT_OF_MEMORY, UNIT));
        test.orders(FAULT);
        let small = PhysicalCreate { len: 1, ..more };
        assert_eq!(test.told(Op::PhysicalCreate, &small, &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn physical_memory_whose_handle_cannot_be_is_released_again() {
        let mut test = Fixture::new(&[("cuMemRelease", counts as Function)]);
        let known = physical(&mut test);
        let event = test.new_handle(Kind::Event);
        for handle in [known, event] {
            let body = PhysicalCreate {
                handle,
                ..creates(&mut test, PROPERTIES)
            };
            let status = test.status(Op::PhysicalCreate, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{handle:#x}");
            assert_eq!((test.calls(), test.held()), (1, UNIT));
        }
    }

    #[test]
    fn a_handle_is_released_once_and_a_mapping_keeps_its_memory() {
        let mut test = Fixture::new(&[("cuMemRelease", counts as Function)]);
        let MapMemory {
            handle, address, ..
        } = mapped(&mut test);
        for object in others(handle) {
            let status = test.status(Op::PhysicalRelease, &Object { object }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{object:#x}");
        }
        assert_eq!(test.calls(), 0);
        let body = Object { object: handle };
        assert_eq!(test.status(Op::PhysicalRelease, &body, &[]), CUDA_SUCCESS);
        let again = test.status(Op::PhysicalRelease, &body, &[]);
        assert_eq!((again, test.calls()), (CUDA_ERROR_INVALID_VALUE, 1));
        assert_eq!(test.held(), UNIT, "it is mapped");
        let range = Range {
            start: address,
            len: UNIT,
        };
        assert_eq!(test.status(Op::UnmapMemory, &range, &[]), CUDA_SUCCESS);
        assert_eq!(test.held(), 0);
    }

    #[test]
    fn memory_is_mapped_in_reservations_of_the_session_only() {
        let mut test = Fixture::new(&[("cuMemMap", records as Function)]);
        let (handle, address) = (physical(&mut test), reserved(&mut test, UNIT));
        for handle in others(handle) {
            let body = mapping(handle, address);
            let status = test.status(Op::MapMemory, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{handle:#x}");
        }
        for address in [0, address - UNIT, address + 1, address + UNIT] {
            let body = mapping(handle, address);
            let status = test.status(Op::MapMemory, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{address:#x}");
        }
        assert_eq!(test.calls(), 0);
        let body = mapping(handle, address);
        assert_eq!(test.status(Op::MapMemory, &body, &[]), CUDA_SUCCESS);
        assert_eq!(test.recorded()[0][..3], [address, UNIT, 0]);
    }

    #[test]
    fn a_mapping_that_the_driver_does_not_make_keeps_nothing() {
        let mut test = Fixture::new(&[("cuMemMap", obeys as Function)]);
        let (handle, address) = (physical(&mut test), reserved(&mut test, UNIT));
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let body = mapping(handle, address);
        let status = test.status(Op::MapMemory, &body, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        assert!(
            test.session
                .objects
                .virtual_memory
                .mapped(address)
                .is_none()
        );
        test.orders(CUDA_SUCCESS);
        assert_eq!(test.status(Op::MapMemory, &body, &[]), CUDA_SUCCESS);
        test.orders(FAULT);
        assert_eq!(test.told(Op::MapMemory, &body, &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn memory_is_unmapped_in_reservations_of_the_session_and_without_work_in_flight() {
        let mut test = Fixture::new(&[("cuMemUnmap", counts as Function)]);
        let MapMemory { address, .. } = mapped(&mut test);
        let range = |start| Range { start, len: UNIT };
        for start in [0, address - UNIT, address + 1] {
            let status = test.status(Op::UnmapMemory, &range(start), &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{start:#x}");
        }
        let (body, rest) = access(address);
        assert_eq!(test.status(Op::SetAccess, &body, &rest), CUDA_SUCCESS);
        assert!(test.owns(address), "which is work in flight");
        let waits = test.handle(Op::UnmapMemory, &range(address), &[]);
        assert!(matches!(waits, Err(CallError::Full)));
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn memory_that_the_driver_does_not_unmap_stays_mapped() {
        let mut test = Fixture::new(&[("cuMemUnmap", obeys as Function)]);
        let MapMemory { address, .. } = mapped(&mut test);
        let range = Range {
            start: address,
            len: UNIT,
        };
        for (status, is_mapped) in [(CUDA_ERROR_NOT_SUPPORTED, true), (CUDA_SUCCESS, false)] {
            test.orders(status);
            assert_eq!(test.told(Op::UnmapMemory, &range, &[]), status);
            let found = test.session.objects.virtual_memory.mapped(address);
            assert_eq!(found.is_some(), is_mapped);
        }
        test.orders(FAULT);
        assert_eq!(test.told(Op::UnmapMemory, &range, &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn accesses_are_of_devices_fit_the_message_and_concern_reservations() {
        let mut test = Fixture::new(&[("cuMemSetAccess", counts as Function)]);
        let MapMemory { address, .. } = mapped(&mut test);
        let (body, rest) = access(address);
        for count in [2, ACCESSES_MAX as u32 + 1, u32::MAX] {
            let body = SetAccess { count, ..body };
            assert!(test.is_violation(Op::SetAccess, &body, &rest), "{count}");
        }
        let many = vec![0; (ACCESSES_MAX + 1) * size_of::<Access>()];
        let count = ACCESSES_MAX as u32 + 1;
        let more = SetAccess { count, ..body };
        assert!(test.is_violation(Op::SetAccess, &more, &many));
        for (properties, status) in impossible() {
            let other = Access {
                location: properties.location,
                ..Access::default()
            };
            if properties.location.kind != DEVICE.kind || properties.location.id != 0 {
                let refused = test.status(Op::SetAccess, &body, other.as_bytes());
                assert_eq!(refused, status);
            }
        }
        for address in [0, address + 1, address - UNIT] {
            let (body, rest) = access(address);
            let status = test.status(Op::SetAccess, &body, &rest);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{address:#x}");
        }
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn mapped_memory_is_usable_once_the_driver_gives_access() {
        let mut test = Fixture::new(&[("cuMemSetAccess", obeys as Function)]);
        let MapMemory { address, .. } = mapped(&mut test);
        let (body, rest) = access(address);
        for (status, usable) in [(CUDA_ERROR_NOT_SUPPORTED, false), (CUDA_SUCCESS, true)] {
            test.orders(status);
            assert_eq!(test.told(Op::SetAccess, &body, &rest), status);
            assert_eq!(test.owns(address), usable, "{status}");
        }
        test.orders(FAULT);
        assert_eq!(test.told(Op::SetAccess, &body, &rest), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn the_access_to_mapped_memory_is_told() {
        let mut test = Fixture::new(&[("cuMemGetAccess", obeys as Function)]);
        let MapMemory { address, .. } = mapped(&mut test);
        let ask = |address, location| GetAccess { address, location };
        let second = Location { id: 1, ..DEVICE };
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        for (body, status) in [
            (ask(address - 1, DEVICE), CUDA_ERROR_INVALID_VALUE),
            (ask(address + UNIT, DEVICE), CUDA_ERROR_INVALID_VALUE),
            (ask(address, second), CUDA_ERROR_INVALID_DEVICE),
            (ask(address, DEVICE), CUDA_ERROR_NOT_SUPPORTED),
        ] {
            assert_eq!(test.status(Op::GetAccess, &body, &[]), status);
        }
        test.orders(FAULT);
        assert_eq!(test.told(Op::GetAccess, &ask(address, DEVICE), &[]), FAULT);
        assert!(test.has_ended());
    }

    /// Gives a descriptor of a memory file, unless ordered otherwise.
    extern "C" fn exports(descriptor: &mut i32) -> CUresult {
        match obeys() {
            CUDA_SUCCESS => *descriptor = sealed(&[0]).into_raw_fd(),
            status => return status,
        }
        counts()
    }

    fn export(handle: u64) -> PhysicalExport {
        PhysicalExport {
            handle,
            flags: 0,
            kind: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            pad: 0,
        }
    }

    #[test]
    fn only_exportable_memory_of_the_session_is_exported_and_as_a_descriptor() {
        let export_as = ("cuMemExportToShareableHandle", exports as Function);
        let mut test = Fixture::new(&[export_as]);
        let handle = physical(&mut test);
        let private = creates(
            &mut test,
            Properties {
                handle_types: 0,
                ..PROPERTIES
            },
        );
        assert_eq!(test.status(Op::PhysicalCreate, &private, &[]), CUDA_SUCCESS);
        let good = export(handle);
        let fabric = PhysicalExport {
            kind: CU_MEM_HANDLE_TYPE_FABRIC,
            ..good
        };
        let wrong = others(handle).map(export);
        for body in wrong.into_iter().chain([export(private.handle), fabric]) {
            let status = test.status(Op::PhysicalExport, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{:#x}", body.handle);
        }
        assert_eq!(test.calls(), 0);
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let status = test.status(Op::PhysicalExport, &good, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        test.orders(CUDA_SUCCESS);
        assert_eq!(test.status(Op::PhysicalExport, &good, &[]), CUDA_SUCCESS);
        test.hangs_up();
        let status = test.status(Op::PhysicalExport, &good, &[]);
        assert_eq!(status, CUDA_ERROR_OUT_OF_MEMORY);
    }

    #[test]
    fn exported_memory_counts_after_its_release() {
        let export_as = ("cuMemExportToShareableHandle", exports as Function);
        let mut test = Fixture::new(&[export_as]);
        for (exported, held) in [(false, 0), (true, UNIT)] {
            let object = physical(&mut test);
            if exported {
                let done = test.status(Op::PhysicalExport, &export(object), &[]);
                assert_eq!(done, CUDA_SUCCESS);
            }
            let released = test.status(Op::PhysicalRelease, &Object { object }, &[]);
            assert_eq!((released, test.held()), (CUDA_SUCCESS, held));
        }
    }

    /// Records of handles and exports, without those of the memory, which the keeper does not hold here.
    fn described(test: &Fixture) -> Vec<(RecordKind, u64)> {
        let records = test.session.shared.description.records();
        let kinds = [RecordKind::Exported, RecordKind::Retained];
        let of_kinds = records.iter().filter(|one| kinds.contains(&one.kind));
        of_kinds.map(|one| (one.kind, one.key)).collect()
    }

    #[test]
    fn exports_and_retained_handles_are_described() {
        let mut test = Fixture::with_keeper(&[
            ("cuMemExportToShareableHandle", exports as Function),
            ("cuMemRetainAllocationHandle", obeys_with_handle as Function),
            (
                "cuMemGetAllocationPropertiesFromHandle",
                is_of_first_device as Function,
            ),
        ]);
        let MapMemory {
            handle, address, ..
        } = mapped(&mut test);
        for _ in 0..2 {
            let told = test.told(Op::PhysicalExport, &export(handle), &[]);
            assert_eq!(told, CUDA_SUCCESS);
        }
        let exported = (RecordKind::Exported, handle);
        assert_eq!(described(&test), [exported]);
        let object = test.new_handle(Kind::Allocation);
        let retain = PhysicalRetain {
            handle: object,
            address,
        };
        assert_eq!(test.told(Op::PhysicalRetain, &retain, &[]), CUDA_SUCCESS);
        assert_eq!(described(&test), [exported, (RecordKind::Retained, object)]);
        // Mappings by the further handle are of the same memory.
        let memory = &test.session.objects.virtual_memory;
        assert_eq!(memory.key_of(object), Some(handle));
        for object in [handle, object] {
            let told = test.told(Op::PhysicalRelease, &Object { object }, &[]);
            assert_eq!(told, CUDA_SUCCESS);
        }
        assert_eq!(described(&test), [exported]);
        let range = Range {
            start: address,
            len: UNIT,
        };
        assert_eq!(test.told(Op::UnmapMemory, &range, &[]), CUDA_SUCCESS);
        assert!(described(&test).is_empty());
    }

    #[test]
    fn memory_is_mapped_again_and_handles_are_retained_again_by_the_first_handle() {
        let mut test = Fixture::new(&[
            ("cuMemRetainAllocationHandle", obeys_with_handle as Function),
            ("cuMemExportToShareableHandle", exports as Function),
            ("cuMemRelease", counts as Function),
        ]);
        let MapMemory {
            handle, address, ..
        } = mapped(&mut test);
        let object = Object { object: handle };
        assert_eq!(test.status(Op::PhysicalRelease, &object, &[]), CUDA_SUCCESS);
        let (shared, place) = (test.shared.clone(), reserved(&mut test, UNIT));
        let [again, unknown] = [(); 2].map(|()| test.new_handle(Kind::Allocation));
        let memory = &mut test.session.objects.virtual_memory;
        let mut map = |key| memory.map_again(&shared.gpu, (place, UNIT), key, 0, 0);
        assert_eq!(map(unknown), Err(CUDA_ERROR_INVALID_HANDLE));
        assert_eq!(map(handle), Ok(()));
        let mut retain = |key| memory.retain_again(&shared.gpu, again, key);
        assert_eq!(retain(unknown), Err(CUDA_ERROR_INVALID_HANDLE));
        assert_eq!(retain(handle), Ok(()));
        assert_eq!(retain(handle), Err(CUDA_ERROR_INVALID_HANDLE));
        assert_eq!(memory.key_of(again), Some(handle));
        assert!(memory.mapped(place).is_some() && memory.mapped(address).is_some());
        // The client's release, the handle for the mapping, and the second retained handle, whose place was taken.
        assert_eq!(test.calls(), 3);
    }

    #[test]
    fn an_export_without_a_descriptor_is_an_error() {
        let export_as = ("cuMemExportToShareableHandle", obeys as Function);
        let mut test = Fixture::new(&[export_as]);
        let body = export(physical(&mut test));
        let status = test.status(Op::PhysicalExport, &body, &[]);
        assert_eq!(status, CUDA_ERROR_OPERATING_SYSTEM);
    }

    /// Says that memory is of the first device, and [`obeys`].
    extern "C" fn is_of_first_device(properties: &mut CUmemAllocationProp) -> CUresult {
        properties.location = DEVICE.into();
        obeys()
    }

    extern "C" fn is_of_another_device(properties: &mut CUmemAllocationProp) -> CUresult {
        properties.location = CUmemLocation {
            id: 9,
            ..DEVICE.into()
        };
        CUDA_SUCCESS
    }

    #[test]
    fn a_descriptor_that_cannot_be_memory_is_not_given_to_the_driver() {
        let import = ("cuMemImportFromShareableHandle", counts as Function);
        let mut test = Fixture::new(&[import]);
        let body = Object {
            object: test.new_handle(Kind::Allocation),
        };
        for path in ["/dev/null", "/proc/self/exe"] {
            test.sends(File::open(path).expect(path));
            let status = test.status(Op::PhysicalImport, &body, &[]);
            assert_eq!(status, CUDA_ERROR_UNKNOWN, "{path}");
        }
        test.claims_descriptor();
        assert!(test.is_violation(Op::PhysicalImport, &body, &[]));
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn memory_that_is_not_imported_is_released_again() {
        let properties = "cuMemGetAllocationPropertiesFromHandle";
        let import = (
            "cuMemImportFromShareableHandle",
            obeys_with_handle as Function,
        );
        let release = ("cuMemRelease", counts as Function);
        for (functions, ordered, told, released) in [
            (
                vec![import, (properties, is_of_first_device as Function)],
                CUDA_ERROR_NOT_SUPPORTED,
                CUDA_ERROR_NOT_SUPPORTED,
                0,
            ),
            (
                vec![(properties, is_of_first_device as Function)],
                CUDA_ERROR_UNKNOWN,
                CUDA_ERROR_UNKNOWN,
                1,
            ),
            (
                vec![(properties, is_of_another_device as Function)],
                CUDA_SUCCESS,
                CUDA_ERROR_NOT_SUPPORTED,
                1,
            ),
        ] {
            let mut test = Fixture::new(&[functions, vec![release]].concat());
            let object = test.new_handle(Kind::Allocation);
            test.orders(ordered);
            test.sends(sealed(&[0]));
            let status = test.status(Op::PhysicalImport, &Object { object }, &[]);
            assert_eq!((status, test.calls()), (told, released));
            let allocations = &test.session.objects.virtual_memory.allocations;
            assert_eq!(allocations.len(), 0);
        }
    }

    #[test]
    fn imported_memory_gets_a_new_handle_and_counts_as_far_as_it_is_mapped() {
        let properties = "cuMemGetAllocationPropertiesFromHandle";
        let mut test = Fixture::new(&[
            (properties, is_of_first_device as Function),
            ("cuMemRelease", counts as Function),
            ("cuMemMap", obeys as Function),
        ]);
        let object = test.new_handle(Kind::Allocation);
        for (status, released) in [(CUDA_SUCCESS, 0), (CUDA_ERROR_INVALID_HANDLE, 1)] {
            test.sends(sealed(&[0]));
            let refused = test.status(Op::PhysicalImport, &Object { object }, &[]);
            assert_eq!((refused, test.calls()), (status, released));
        }
        assert_eq!(test.held(), 0);
        let body = mapping(object, reserved(&mut test, UNIT));
        for (status, held) in [(CUDA_ERROR_NOT_SUPPORTED, 0), (CUDA_SUCCESS, UNIT)] {
            test.orders(status);
            assert_eq!(test.status(Op::MapMemory, &body, &[]), status);
            assert_eq!(test.held(), held, "{status}");
        }
    }

    #[test]
    fn a_handle_of_mapped_memory_only_is_retained() {
        let properties = "cuMemGetAllocationPropertiesFromHandle";
        let mut test = Fixture::new(&[
            (properties, is_of_first_device as Function),
            ("cuMemRetainAllocationHandle", obeys_with_handle as Function),
            ("cuMemRelease", counts as Function),
        ]);
        let MapMemory {
            handle, address, ..
        } = mapped(&mut test);
        let new = test.new_handle(Kind::Allocation);
        let retain = |handle, address| PhysicalRetain { handle, address };
        for (ordered, body, status, released) in [
            (CUDA_SUCCESS, retain(new, 0), CUDA_ERROR_INVALID_VALUE, 0),
            (
                CUDA_SUCCESS,
                retain(new, address + UNIT),
                CUDA_ERROR_INVALID_VALUE,
                0,
            ),
            (
                CUDA_ERROR_UNKNOWN,
                retain(new, address),
                CUDA_ERROR_UNKNOWN,
                0,
            ),
            (
                CUDA_SUCCESS,
                retain(handle, address),
                CUDA_ERROR_INVALID_HANDLE,
                1,
            ),
            (CUDA_SUCCESS, retain(new, address), CUDA_SUCCESS, 0),
            (FAULT, retain(new, address), FAULT, 0),
        ] {
            test.orders(ordered);
            assert_eq!(test.told(Op::PhysicalRetain, &body, &[]), status);
            assert_eq!((test.calls(), test.held()), (released, UNIT), "{status}");
        }
        assert!(test.has_ended());
        assert_eq!(test.session.objects.virtual_memory.allocations.len(), 2);
    }
}
