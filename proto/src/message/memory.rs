//! Pools, virtual memory, managed, shared and registered memory.

use mpsshim_api::cuda::{CUmemAllocationProp, CUmemLocation};
use mpsshim_api::plain_structs;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

plain_structs! {
    /// `cuMemAddressReserve`.
    AddressReserve {
        /// Bytes.
        len: u64,
        /// 0, or a power of two.
        alignment: u64,
        /// Address that the program prefers.
        hint: u64,
        flags: u64,
    }
    /// A `CUmemLocation`; devices are server ordinals.
    Location { kind: u32, id: i32, }
    /// The fields of a `CUmemAllocationProp` that the server uses.
    Properties {
        kind: u32,
        handle_types: u32,
        location: Location,
        compression: u8,
        rdma: u8,
        usage: u16,
        pad: u32,
    }
    /// `cuMemCreate`.
    PhysicalCreate {
        /// Handle of kind allocation, chosen by the client.
        handle: u64,
        /// Bytes.
        len: u64,
        flags: u64,
        properties: Properties,
    }
    /// `cuMemMap`.
    MapMemory {
        handle: u64,
        address: u64,
        /// Bytes.
        len: u64,
        offset: u64,
        flags: u64,
    }
    /// `cuMemSetAccess`.
    SetAccess {
        address: u64,
        /// Bytes.
        len: u64,
        /// [`Access`]es behind this struct, at most [`ACCESSES_MAX`].
        count: u32,
        pad: u32,
    }
    /// `CUmemAccessDesc`.
    Access { location: Location, flags: u32, pad: u32, }
    /// `cuMemGetAccess`.
    GetAccess { address: u64, location: Location, }
    /// `cuMemExportToShareableHandle`.
    PhysicalExport { handle: u64, flags: u64, kind: u32, pad: u32, }
    /// `cuMemRetainAllocationHandle`.
    PhysicalRetain { handle: u64, address: u64, }
    /// `cuMemGetAllocationGranularity`.
    Granularity { properties: Properties, option: u32, pad: u32, }
    /// `cuMemPoolCreate`, and the session's own default pool of a device.
    PoolCreate {
        /// Handle of kind pool, chosen by the client.
        handle: u64,
        /// Bytes; 0 for no bound.
        max_size: u64,
        properties: Properties,
    }
    /// `cuMemAllocFromPoolAsync`.
    PoolAlloc {
        pool: u64,
        /// Bytes.
        len: u64,
        stream: u64,
    }
    /// `cuMemFreeAsync` of memory from a pool.
    PoolFree { address: u64, stream: u64, }
    /// `cuMemPoolGetAttribute`, `cuMemPoolSetAttribute`, `cuMemPoolTrimTo`.
    PoolAttribute { pool: u64, value: u64, attribute: u32, pad: u32, }
    /// `cuMemPoolSetAccess`, `cuMemPoolGetAccess`.
    PoolAccess {
        pool: u64,
        /// [`Access`]es behind this struct, at most [`ACCESSES_MAX`].
        count: u32,
        pad: u32,
    }
    /// `cuMemPoolImportFromShareableHandle`.
    PoolImport { handle: u64, kind: u32, device: u32, flags: u64, }
    /// Bytes that only the server or the driver understands: `CUipcMemHandle`, `CUmemPoolPtrExportData`.
    Opaque { words: [u64; 8], }
    /// `cuMemPoolImportPointer`.
    PoolImportPointer { pool: u64, data: Opaque, }
    /// `cuIpcOpenMemHandle` in a context on `device` (server's ordinal), which may be another than the memory's.
    IpcOpen { handle: Opaque, device: u32, pad: u32, }
    /// Memory that `cuIpcOpenMemHandle` has opened.
    IpcOpened {
        start: u64,
        /// Bytes.
        len: u64,
        /// Server's ordinal.
        device: u32,
        pad: u32,
    }
    /// `cuMemHostRegister` of whole pages of a file that the client has mapped. At most [`FILE_PARTS_MAX`]
    /// [`FilePart`]s behind this struct name the parts of the file that follow the first one.
    FileRegister {
        /// Where the first part begins in the file.
        offset: u64,
        /// Bytes of all parts.
        len: u64,
        /// Address of the client's mapping.
        address: u64,
        /// `CU_MEMHOSTREGISTER_*`; read-only, or the client may write too.
        flags: u32,
        device: u32,
    }
    /// A part of a file, in whole pages.
    FilePart {
        /// Where it begins in the file.
        offset: u64,
        /// Bytes.
        len: u64,
    }
    /// `cuCtxEnablePeerAccess`, `cuCtxDisablePeerAccess`.
    Peers {
        /// Server ordinal of the device that owns the memory.
        owner: u32,
        /// Server ordinal of the device that accesses it.
        user: u32,
        /// 1: enable, 0: disable.
        enable: u32,
        pad: u32,
    }
    /// `cuMemGetHandleForAddressRange`.
    RangeHandle {
        address: u64,
        /// Bytes.
        len: u64,
        flags: u64,
        kind: u32,
        pad: u32,
    }
}

/// Parts of a file that a [`FileRegister`] names besides the first one.
pub const FILE_PARTS_MAX: usize = 16;
/// Maximum number of locations in one call: the devices and the host's.
pub const ACCESSES_MAX: usize = 64;

impl From<Location> for CUmemLocation {
    fn from(location: Location) -> CUmemLocation {
        CUmemLocation {
            kind: location.kind,
            id: location.id,
        }
    }
}

impl Properties {
    /// The program's properties, with another location.
    pub fn of(properties: &CUmemAllocationProp, location: Location) -> Properties {
        Properties {
            kind: properties.kind,
            handle_types: properties.requested_handle_types,
            location,
            compression: properties.compression_type,
            rdma: properties.gpu_direct_rdma_capable,
            usage: properties.usage,
            pad: 0,
        }
    }

    /// The driver's form, with another location.
    pub fn at(&self, location: CUmemLocation) -> CUmemAllocationProp {
        CUmemAllocationProp {
            kind: self.kind,
            requested_handle_types: self.handle_types,
            location,
            compression_type: self.compression,
            gpu_direct_rdma_capable: self.rdma,
            usage: self.usage,
            ..CUmemAllocationProp::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_survive_but_for_the_place() {
        let device = |id| CUmemLocation { kind: 1, id };
        let of_program = CUmemAllocationProp {
            kind: 2,
            requested_handle_types: 3,
            location: device(4),
            compression_type: 5,
            gpu_direct_rdma_capable: 6,
            usage: 7,
            ..CUmemAllocationProp::default()
        };
        let properties = Properties::of(&of_program, Location { kind: 1, id: 8 });
        let place = CUmemLocation::from(properties.location);
        assert_eq!((place.kind, place.id), (1, 8));
        let of_driver = properties.at(device(9));
        assert_eq!((of_driver.location.kind, of_driver.location.id), (1, 9));
        assert_eq!(of_driver.kind, 2);
        assert_eq!(of_driver.requested_handle_types, 3);
        assert_eq!(of_driver.compression_type, 5);
        assert_eq!(of_driver.gpu_direct_rdma_capable, 6);
        assert_eq!(of_driver.usage, 7);
    }
}
