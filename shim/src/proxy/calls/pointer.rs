//! Attributes of pointers.

use std::collections::BTreeSet;
use std::ffi::c_void;

use mpsshim_api::cuda::*;
use mpsshim_proto::message::{Op, PointerQuery, Value};

use parking_lot::Mutex;

use super::entries;
use crate::ffi::{In, Status, guard};
use crate::proxy::context::{self, Context};
use crate::proxy::extents::{Extent, Source};
use crate::proxy::managed::MANAGED;
use crate::proxy::submit::session;
use crate::proxy::{extents, memory, pools, virtual_memory};

entries! {
    cuPointerGetAttribute(_, _, _) => get_attribute,
    cuPointerGetAttributes(_, _, _, _) => get_attributes,
    cuPointerSetAttribute(_, _, _) => set_attribute,
}

/// Numbers of allocations whose `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` is set.
static SYNCED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Client-side facts about the memory at an address.
struct Known {
    kind: u32,
    start: u64,
    len: u64,
    id: u64,
    context: Option<&'static Context>,
    ordinal: i32,
    /// The mapping that contains it, if that is not the whole range.
    mapping: Option<(u64, u64)>,
    /// `CUmemAllocationHandleType`s it can be exported as.
    handle_types: u32,
    /// Handle of the pool it is from.
    pool: u64,
    /// It can have an IPC handle.
    ipc: bool,
    usable: bool,
    managed: bool,
    /// The CPU's address.
    host: Option<u64>,
    device: u64,
}

impl Known {
    fn new(kind: u32, start: u64, len: u64, device: u64) -> Known {
        Known {
            kind,
            start,
            len,
            id: 0,
            context: None,
            ordinal: 0,
            mapping: None,
            handle_types: CU_MEM_HANDLE_TYPE_NONE,
            pool: 0,
            ipc: false,
            usable: true,
            managed: false,
            host: None,
            device,
        }
    }

    /// Adds the facts that follow from a context.
    fn of(self, context: Option<&'static Context>) -> Known {
        Known {
            context,
            ordinal: context.map_or(0, |context| context.device),
            ..self
        }
    }
}

fn find(address: u64) -> Option<Known> {
    if let Some((start, block, device)) = memory::device_block(address) {
        return Some(Known {
            id: block.id << 1,
            context: memory::owner_of(&block),
            ordinal: context::ordinal_of(device).unwrap_or(0),
            ipc: true,
            ..Known::new(CU_MEMORYTYPE_DEVICE, start, block.len, address)
        });
    }
    if let Some((start, block)) = memory::host_block(address) {
        let managed = block.flags & MANAGED != 0;
        let kind = if managed {
            CU_MEMORYTYPE_DEVICE
        } else {
            CU_MEMORYTYPE_HOST
        };
        let known = Known {
            id: block.id << 1 | 1,
            managed,
            host: Some(address),
            ..Known::new(kind, start, block.len, address)
        };
        return Some(known.of(memory::owner_of(&block)));
    }
    // A device pointer has the attributes of the program's own address.
    let address = memory::program_address(address);
    if let Some((start, registered)) = memory::registered(address) {
        let device = registered.arena + (address - start);
        let known = Known {
            id: registered.id,
            host: Some(address),
            ..Known::new(CU_MEMORYTYPE_HOST, start, registered.len, device)
        };
        return Some(known.of(Some(registered.context)));
    }
    if let Some((start, extent)) = extents::find(address) {
        return Some(of_extent(address, start, &extent));
    }
    let (start, global) = memory::global(address)?;
    let known = Known {
        id: start,
        ..Known::new(CU_MEMORYTYPE_DEVICE, start, global.len, address)
    };
    Some(known.of(Some(global.context)))
}

fn of_extent(address: u64, start: u64, extent: &Extent) -> Known {
    let known = Known {
        id: extent.id,
        context: extent.context,
        ordinal: context::ordinal_of(extent.device).unwrap_or(0),
        usable: extent.usable,
        ..Known::new(CU_MEMORYTYPE_DEVICE, start, extent.len, address)
    };
    match extent.source {
        Source::Mapped { handle_types, .. } => {
            // The range is the reservation.
            let range = virtual_memory::reservation(address).unwrap_or((start, extent.len));
            Known {
                start: range.0,
                len: range.1,
                mapping: Some((start, extent.len)),
                handle_types,
                ..known
            }
        }
        Source::Opened { .. } => known,
        Source::Pooled { pool } => Known {
            handle_types: pools::handle_types(pool),
            pool,
            ..known
        },
    }
}

/// The value of an attribute and its length in bytes.
fn value_of(known: &Known, attribute: CUpointer_attribute) -> Status<(u64, usize)> {
    Ok(match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT => (known.context.map_or(0, |context| context.handle), 8),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => (known.kind as u64, 4),
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER => (known.device, 8),
        CU_POINTER_ATTRIBUTE_HOST_POINTER => (known.host.ok_or(CUDA_ERROR_INVALID_VALUE)?, 8),
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => (SYNCED.lock().contains(&known.id) as u64, 4),
        CU_POINTER_ATTRIBUTE_BUFFER_ID => (known.id, 8),
        CU_POINTER_ATTRIBUTE_IS_MANAGED => (known.managed as u64, 4),
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => (known.ordinal as u32 as u64, 4),
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => (known.ipc as u64, 4),
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => (known.start, 8),
        CU_POINTER_ATTRIBUTE_RANGE_SIZE => (known.len, 8),
        CU_POINTER_ATTRIBUTE_MAPPED => (1, 4),
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => (known.handle_types as u64, 8),
        CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => (0, 4),
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS if known.usable => {
            (CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u64, 4)
        }
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => (CU_MEM_ACCESS_FLAGS_PROT_NONE as u64, 4),
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => (known.pool, 8),
        CU_POINTER_ATTRIBUTE_MAPPING_SIZE => (known.mapping.map_or(known.len, |m| m.1), 8),
        CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => (known.mapping.map_or(known.start, |m| m.0), 8),
        CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => (known.id, 8),
        CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => (0, 4),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    })
}

/// The value for an unknown pointer, zero or the ordinal `CU_DEVICE_INVALID`, and the length of the attribute in bytes.
fn unknown(attribute: CUpointer_attribute) -> Status<(u64, usize)> {
    match attribute {
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => Ok((-2i32 as u32 as u64, 4)),
        CU_POINTER_ATTRIBUTE_CONTEXT
        | CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        | CU_POINTER_ATTRIBUTE_HOST_POINTER
        | CU_POINTER_ATTRIBUTE_BUFFER_ID
        | CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
        | CU_POINTER_ATTRIBUTE_RANGE_SIZE
        | CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
        | CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
        | CU_POINTER_ATTRIBUTE_MAPPING_SIZE
        | CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR
        | CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => Ok((0, 8)),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE..=CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => {
            Ok((0, 4))
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn store(out: *mut c_void, (value, len): (u64, usize)) -> Status {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the program gave room for the attribute's value, of this length; little-endian as the device is.
    unsafe { std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), out.cast(), len) };
    Ok(())
}

/// `cuPointerGetAttribute`.
pub unsafe extern "C" fn get_attribute(
    out: *mut c_void,
    attribute: CUpointer_attribute,
    address: CUdeviceptr,
) -> CUresult {
    guard(|| {
        context::permitted()?;
        let session = session()?;
        session.check()?;
        let (_, len) = unknown(attribute)?;
        if let Some(known) = find(address) {
            return store(out, value_of(&known, attribute)?);
        }
        // Memory of a module is known to the server. An address of the arena that is in no block was freed: the server, which has
        // granted it, would take it for memory still.
        if address < 1 << 47 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let ask = |attribute| {
            let body = PointerQuery {
                pointer: address,
                attribute,
                pad: 0,
            };
            let value: Value = session.request(Op::PointerAttribute, &body, &[])?.read()?;
            Ok(value.value)
        };
        if attribute == CU_POINTER_ATTRIBUTE_CONTEXT {
            // The server has no context to return, but must refuse addresses that are not memory.
            ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE)?;
        }
        store(out, (ask(attribute)?, len))
    })
}

/// `cuPointerGetAttributes`: attributes that do not apply are zero.
pub unsafe extern "C" fn get_attributes(
    count: u32,
    attributes: In<CUpointer_attribute>,
    out: In<*mut c_void>,
    address: CUdeviceptr,
) -> CUresult {
    guard(|| {
        context::permitted()?;
        session()?.check()?;
        let known = find(address);
        for index in 0..count as usize {
            let attribute = attributes.at(index)?;
            let none = unknown(attribute)?;
            let value = match &known {
                Some(known) => value_of(known, attribute).unwrap_or(none),
                None => none,
            };
            store(out.at(index)?, value)?;
        }
        Ok(())
    })
}

/// `cuPointerSetAttribute`: `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` is remembered and changes nothing.
pub unsafe extern "C" fn set_attribute(
    value: In<u32>,
    attribute: CUpointer_attribute,
    address: CUdeviceptr,
) -> CUresult {
    guard(|| {
        let value = value.get()?;
        let known = find(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut synced = SYNCED.lock();
        if value == 0 {
            synced.remove(&known.id);
        } else {
            synced.insert(known.id);
        }
        Ok(())
    })
}
