//! Waits and writes of words in stream order. A batch travels as one message for each operation.

use mpsshim_api::cuda::{
    CU_STREAM_MEM_OP_BARRIER, CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES, CU_STREAM_MEM_OP_WAIT_VALUE_32,
    CU_STREAM_MEM_OP_WAIT_VALUE_64, CU_STREAM_MEM_OP_WRITE_VALUE_32,
    CU_STREAM_MEM_OP_WRITE_VALUE_64, CU_STREAM_WAIT_VALUE_FLUSH, CU_STREAM_WAIT_VALUE_NOR,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdeviceptr, CUresult,
    CUstreamBatchMemOpParams,
};
use mpsshim_proto::message::Op;
use mpsshim_proto::message::stream::MemOp;

use super::entries;
use crate::ffi::{In, Status, guard};
use crate::proxy::context;
use crate::proxy::default_stream;
use crate::proxy::memory::{self, Place};
use crate::proxy::pages;
use crate::proxy::submit::session;

entries! {
    cuStreamWaitValue32(_, _, _, _) => first_version::<u32>,
    cuStreamWaitValue32_ptsz(_, _, _, _) => first_version::<u32>,
    cuStreamWaitValue32_v2(_, _, _, _) => wait_32::<false>,
    cuStreamWaitValue32_v2_ptsz(_, _, _, _) => wait_32::<true>,
    cuStreamWaitValue64(_, _, _, _) => first_version::<u64>,
    cuStreamWaitValue64_ptsz(_, _, _, _) => first_version::<u64>,
    cuStreamWaitValue64_v2(_, _, _, _) => wait_64::<false>,
    cuStreamWaitValue64_v2_ptsz(_, _, _, _) => wait_64::<true>,
    cuStreamWriteValue32(_, _, _, _) => first_version::<u32>,
    cuStreamWriteValue32_ptsz(_, _, _, _) => first_version::<u32>,
    cuStreamWriteValue32_v2(_, _, _, _) => write_32::<false>,
    cuStreamWriteValue32_v2_ptsz(_, _, _, _) => write_32::<true>,
    cuStreamWriteValue64(_, _, _, _) => first_version::<u64>,
    cuStreamWriteValue64_ptsz(_, _, _, _) => first_version::<u64>,
    cuStreamWriteValue64_v2(_, _, _, _) => write_64::<false>,
    cuStreamWriteValue64_v2_ptsz(_, _, _, _) => write_64::<true>,
    cuStreamBatchMemOp(_, _, _, _) => first_batch,
    cuStreamBatchMemOp_ptsz(_, _, _, _) => first_batch,
    cuStreamBatchMemOp_v2(_, _, _, _) => batch::<false>,
    cuStreamBatchMemOp_v2_ptsz(_, _, _, _) => batch::<true>,
}

/// Operations that one batch may have.
const MOST: u32 = 255;
/// `CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES`.
const CAN_FLUSH: u32 = 98;

fn can_flush() -> Status {
    let device = context::current()?.device;
    match context::device_attribute(device, CAN_FLUSH) {
        Some(1..) => Ok(()),
        _ => Err(CUDA_ERROR_NOT_SUPPORTED),
    }
}

/// Checks an operation and puts the address the server knows into it.
fn check(stream: u64, operation: &CUstreamBatchMemOpParams) -> Status<MemOp> {
    let (len, flags) = match operation.operation {
        CU_STREAM_MEM_OP_WAIT_VALUE_32 | CU_STREAM_MEM_OP_WRITE_VALUE_32 => {
            (4, operation.value_flags)
        }
        CU_STREAM_MEM_OP_WAIT_VALUE_64 | CU_STREAM_MEM_OP_WRITE_VALUE_64 => {
            (8, operation.value_flags)
        }
        CU_STREAM_MEM_OP_BARRIER if operation.flags <= 1 => (0, operation.flags),
        CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES if operation.flags == 0 => {
            can_flush()?;
            (0, 0)
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    match operation.operation {
        CU_STREAM_MEM_OP_WAIT_VALUE_32 | CU_STREAM_MEM_OP_WAIT_VALUE_64 => {
            if flags & !CU_STREAM_WAIT_VALUE_FLUSH > CU_STREAM_WAIT_VALUE_NOR {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            if flags & CU_STREAM_WAIT_VALUE_FLUSH != 0 {
                can_flush()?;
            }
        }
        // CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER is refused too.
        CU_STREAM_MEM_OP_WRITE_VALUE_32 | CU_STREAM_MEM_OP_WRITE_VALUE_64 if flags != 0 => {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        _ => {}
    }
    let mut address = 0;
    if len > 0 {
        if !operation.address.is_multiple_of(len) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        address = match memory::device_place(operation.address, len)? {
            Place::Device(address) | Place::Pinned(address) | Place::Pageable(address) => address,
        };
    }
    Ok(MemOp {
        stream,
        address,
        value: operation.value,
        operation: operation.operation,
        flags,
    })
}

/// Submits operations to a stream, in order: all of them, or none if one is invalid.
fn submit(
    (stream, per_thread): (u64, bool),
    count: u32,
    operation: impl Fn(usize) -> Status<CUstreamBatchMemOpParams>,
) -> Status {
    let session = session()?;
    let stream = default_stream::resolve(stream, per_thread)?;
    if stream.is_capturing() {
        tracing::warn!("capturing a wait or write of a word is not supported");
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let messages: Vec<MemOp> = (0..count as usize)
        .map(|index| check(stream.handle(), &operation(index)?))
        .collect::<Status<_>>()?;
    let _work = pages::before_work(session)?;
    let mut ring = session.ring()?;
    for message in &messages {
        ring.put(Op::MemOp, 0, message, &[])?;
        stream.count(&ring);
    }
    Ok(())
}

fn one(
    stream: (u64, bool),
    operation: u32,
    address: CUdeviceptr,
    value: u64,
    value_flags: u32,
) -> CUresult {
    guard(|| {
        submit(stream, 1, |_| {
            Ok(CUstreamBatchMemOpParams {
                operation,
                address,
                value,
                value_flags,
                ..Default::default()
            })
        })
    })
}

/// The first versions of the calls with one value: off in current drivers.
pub unsafe extern "C" fn first_version<V>(_: u64, _: CUdeviceptr, _: V, _: u32) -> CUresult {
    guard(|| Err(CUDA_ERROR_NOT_SUPPORTED))
}

/// The first version of the batch: off as well.
pub unsafe extern "C" fn first_batch(
    _: u64,
    _: u32,
    _: In<CUstreamBatchMemOpParams>,
    _: u32,
) -> CUresult {
    guard(|| Err(CUDA_ERROR_NOT_SUPPORTED))
}

/// `cuStreamWaitValue32`.
pub unsafe extern "C" fn wait_32<const P: bool>(
    stream: u64,
    address: CUdeviceptr,
    value: u32,
    flags: u32,
) -> CUresult {
    one(
        (stream, P),
        CU_STREAM_MEM_OP_WAIT_VALUE_32,
        address,
        value.into(),
        flags,
    )
}

/// `cuStreamWaitValue64`.
pub unsafe extern "C" fn wait_64<const P: bool>(
    stream: u64,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
) -> CUresult {
    one(
        (stream, P),
        CU_STREAM_MEM_OP_WAIT_VALUE_64,
        address,
        value,
        flags,
    )
}

/// `cuStreamWriteValue32`.
pub unsafe extern "C" fn write_32<const P: bool>(
    stream: u64,
    address: CUdeviceptr,
    value: u32,
    flags: u32,
) -> CUresult {
    one(
        (stream, P),
        CU_STREAM_MEM_OP_WRITE_VALUE_32,
        address,
        value.into(),
        flags,
    )
}

/// `cuStreamWriteValue64`.
pub unsafe extern "C" fn write_64<const P: bool>(
    stream: u64,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
) -> CUresult {
    one(
        (stream, P),
        CU_STREAM_MEM_OP_WRITE_VALUE_64,
        address,
        value,
        flags,
    )
}

/// `cuStreamBatchMemOp`.
pub unsafe extern "C" fn batch<const P: bool>(
    stream: u64,
    count: u32,
    operations: In<CUstreamBatchMemOpParams>,
    flags: u32,
) -> CUresult {
    guard(|| {
        if flags != 0 || count > MOST {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        submit((stream, P), count, |index| operations.at(index))
    })
}
