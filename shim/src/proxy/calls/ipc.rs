//! Device memory shared between processes, by handle or by descriptor.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};

use mpsshim_api::cuda::*;
use mpsshim_proto::message::memory::{IpcOpen, IpcOpened, Opaque, PhysicalExport, RangeHandle};
use mpsshim_proto::message::{Object, Op, Range};
use zerocopy::{FromBytes, IntoBytes};

use super::entries;
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::extents::{self, Extent, Source};
use crate::proxy::submit::session;
use crate::proxy::{context, memory, pools, stream};

entries! {
    cuIpcGetMemHandle(_, _) => get_handle,
    cuIpcOpenMemHandle(_, _, _) => open,
    cuIpcOpenMemHandle_v2(_, _, _) => open,
    cuIpcCloseMemHandle(_) => close,
    cuMemPoolExportToShareableHandle(_, _, _, _) => pool_export,
    cuMemPoolImportFromShareableHandle(_, _, _, _) => pool_import,
    cuMemPoolExportPointer(_, _) => pool_export_pointer,
    cuMemPoolImportPointer(_, _, _) => pool_import_pointer,
    cuMemGetHandleForAddressRange(_, _, _, _, _) => range_handle,
}

/// `cuIpcGetMemHandle`: the handle stands for the whole allocation.
pub unsafe extern "C" fn get_handle(out: Out<CUipcMemHandle>, address: CUdeviceptr) -> CUresult {
    guard(|| {
        out.required()?;
        if address == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        context::current()?;
        let (start, block, _) = memory::device_block(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let body = Range {
            start,
            len: block.len,
        };
        let answer: Opaque = session()?.request(Op::IpcShare, &body, &[])?.read()?;
        memory::note_shared(start);
        let mut handle = CUipcMemHandle([0; 64]);
        handle.0.copy_from_slice(answer.as_bytes());
        out.set(handle)
    })
}

/// `cuIpcOpenMemHandle`: all clients of a server have the memory at the same address.
pub unsafe extern "C" fn open(
    out: Out<CUdeviceptr>,
    handle: CUipcMemHandle,
    flags: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        if flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let context = context::current()?;
        let handle = Opaque::read_from_bytes(&handle.0).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let body = IpcOpen {
            handle,
            device: context.server_device,
            pad: 0,
        };
        let opened: IpcOpened = session()?.request(Op::IpcOpen, &body, &[])?.read()?;
        if memory::device_of(opened.start) != Some(opened.device) || opened.len == 0 {
            return Err(CUDA_ERROR_MPS_RPC_FAILURE);
        }
        let again = extents::change(opened.start, |extent| {
            if let Source::Opened { count } = &mut extent.source {
                *count += 1;
            }
        });
        if !again {
            extents::insert(
                opened.start,
                Extent {
                    len: opened.len,
                    device: opened.device,
                    context: Some(context),
                    id: extents::next_id(),
                    usable: true,
                    source: Source::Opened { count: 1 },
                },
            );
        }
        out.set(opened.start)
    })
}

/// `cuIpcCloseMemHandle`, after the work that may use the memory.
pub unsafe extern "C" fn close(address: CUdeviceptr) -> CUresult {
    guard(|| {
        context::current()?;
        let session = session()?;
        let opened = |extent: &Extent| matches!(extent.source, Source::Opened { .. });
        match extents::find(address) {
            Some((start, extent)) if start == address && opened(&extent) => {}
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        stream::quiesce(session, None)?;
        let mut left = 0;
        extents::change(address, |extent| {
            if let Source::Opened { count } = &mut extent.source {
                *count -= 1;
                left = *count;
            }
        });
        if left == 0 {
            extents::remove(address, opened);
        }
        session.submit(Op::IpcClose, &Object { object: address })
    })
}

/// `cuMemPoolExportToShareableHandle`: a descriptor that is the program's to close.
pub unsafe extern "C" fn pool_export(
    out: Out<c_int>,
    pool: u64,
    kind: u32,
    flags: u64,
) -> CUresult {
    guard(|| {
        out.required()?;
        if kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        pools::check(pool)?;
        let body = PhysicalExport {
            handle: pool,
            flags,
            kind,
            pad: 0,
        };
        let (_, descriptor) = session()?.request_receiving(Op::PoolExport, &body)?;
        out.set(descriptor.into_raw_fd())
    })
}

/// An open descriptor that is given in place of a pointer.
fn descriptor<'a>(given: *mut c_void) -> Status<BorrowedFd<'a>> {
    let raw = given as usize as c_int;
    // SAFETY: a plain system call: whether the program has a descriptor of this number.
    if raw < 0 || unsafe { libc::fcntl(raw, libc::F_GETFD) } < 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the program's open descriptor, which it keeps open for the call.
    Ok(unsafe { BorrowedFd::borrow_raw(raw) })
}

/// `cuMemPoolImportFromShareableHandle`.
pub unsafe extern "C" fn pool_import(
    out: Out<u64>,
    handle: *mut c_void,
    kind: u32,
    flags: u64,
) -> CUresult {
    guard(|| {
        out.required()?;
        if kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let device = context::current().map_or(0, |context| context.device);
        out.set(pools::import(
            session()?,
            descriptor(handle)?,
            device,
            flags,
        )?)
    })
}

/// `cuMemPoolExportPointer`.
pub unsafe extern "C" fn pool_export_pointer(
    out: Out<CUmemPoolPtrExportData>,
    address: CUdeviceptr,
) -> CUresult {
    guard(|| {
        out.required()?;
        let body = Object { object: address };
        let answer: Opaque = session()?
            .request(Op::PoolExportPointer, &body, &[])?
            .read()?;
        let mut data = CUmemPoolPtrExportData([0; 64]);
        data.0.copy_from_slice(answer.as_bytes());
        out.set(data)
    })
}

/// `cuMemPoolImportPointer`.
pub unsafe extern "C" fn pool_import_pointer(
    out: Out<CUdeviceptr>,
    pool: u64,
    data: In<CUmemPoolPtrExportData>,
) -> CUresult {
    guard(|| {
        out.required()?;
        let data = Opaque::read_from_bytes(&data.get()?.0).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        out.set(pools::import_pointer(session()?, pool, data)?)
    })
}

/// `cuMemGetHandleForAddressRange`: a DMA buffer of the driver's.
pub unsafe extern "C" fn range_handle(
    out: Out<c_int>,
    address: CUdeviceptr,
    len: usize,
    kind: u32,
    flags: u64,
) -> CUresult {
    guard(|| {
        out.required()?;
        let device = matches!(
            memory::place(address, len as u64),
            Ok(memory::Place::Device(_))
        );
        let whole = address.is_multiple_of(4096) && len.is_multiple_of(4096) && len > 0;
        if kind != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || !whole || !device {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let body = RangeHandle {
            address,
            len: len as u64,
            flags,
            kind,
            pad: 0,
        };
        let (_, descriptor) = session()?.request_receiving(Op::RangeHandle, &body)?;
        out.set(descriptor.into_raw_fd())
    })
}
