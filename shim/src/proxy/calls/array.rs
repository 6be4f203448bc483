//! Arrays and mipmapped arrays, and one-dimensional copies to and from them.

use mpsshim_api::cuda::{
    CU_MEMORYTYPE_ARRAY, CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST, CUDA_ARRAY_DESCRIPTOR,
    CUDA_ARRAY_MEMORY_REQUIREMENTS, CUDA_ARRAY_SPARSE_PROPERTIES, CUDA_ARRAY3D_DESCRIPTOR,
    CUDA_ERROR_INVALID_VALUE, CUDA_MEMCPY3D, CUdevice, CUdeviceptr, CUresult,
};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::Op;
use mpsshim_proto::message::array::ArrayQuery;
use zerocopy::FromBytes;

use super::entries;
use super::rectangle::{When, submit};
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::array::{self, ArrayRef};
use crate::proxy::context;
use crate::proxy::submit::session;

entries! {
    cuArrayCreate_v2(_, _) => create,
    cuArray3DCreate_v2(_, _) => create_3d,
    cuArrayDestroy(_) => destroy,
    cuArrayGetDescriptor_v2(_, _) => get_descriptor,
    cuArray3DGetDescriptor_v2(_, _) => get_descriptor_3d,
    cuArrayGetPlane(_, _, _) => get_plane,
    cuArrayGetMemoryRequirements(_, _, _) => get_memory_requirements,
    cuArrayGetSparseProperties(_, _) => get_sparse_properties,
    cuMipmappedArrayCreate(_, _, _) => create_mipmapped,
    cuMipmappedArrayDestroy(_) => destroy_mipmapped,
    cuMipmappedArrayGetLevel(_, _, _) => get_level,
    cuMipmappedArrayGetMemoryRequirements(_, _, _) => get_mipmapped_memory_requirements,
    cuMipmappedArrayGetSparseProperties(_, _) => get_mipmapped_sparse_properties,
    cuMemcpyAtoA_v2(_, _, _, _, _) => array_to_array::<false>,
    cuMemcpyAtoA_v2_ptds(_, _, _, _, _) => array_to_array::<true>,
    cuMemcpyAtoD_v2(_, _, _, _) => array_to_device::<false>,
    cuMemcpyAtoD_v2_ptds(_, _, _, _) => array_to_device::<true>,
    cuMemcpyDtoA_v2(_, _, _, _) => device_to_array::<false>,
    cuMemcpyDtoA_v2_ptds(_, _, _, _) => device_to_array::<true>,
    cuMemcpyAtoH_v2(_, _, _, _) => array_to_host::<false>,
    cuMemcpyAtoH_v2_ptds(_, _, _, _) => array_to_host::<true>,
    cuMemcpyAtoHAsync_v2(_, _, _, _, _) => array_to_host_async::<false>,
    cuMemcpyAtoHAsync_v2_ptsz(_, _, _, _, _) => array_to_host_async::<true>,
    cuMemcpyHtoA_v2(_, _, _, _) => host_to_array::<false>,
    cuMemcpyHtoA_v2_ptds(_, _, _, _) => host_to_array::<true>,
    cuMemcpyHtoAAsync_v2(_, _, _, _, _) => host_to_array_async::<false>,
    cuMemcpyHtoAAsync_v2_ptsz(_, _, _, _, _) => host_to_array_async::<true>,
}

/// `cuArrayCreate`.
pub unsafe extern "C" fn create(out: Out<u64>, descriptor: In<CUDA_ARRAY_DESCRIPTOR>) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let given = descriptor.get()?;
        let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            width: given.width,
            height: given.height,
            format: given.format,
            channels: given.channels,
            ..CUDA_ARRAY3D_DESCRIPTOR::default()
        };
        let context = context::current()?;
        out.set(array::create(
            session()?,
            context,
            Kind::Array,
            &descriptor,
            0,
        )?)
    })
}

/// `cuArray3DCreate`.
pub unsafe extern "C" fn create_3d(
    out: Out<u64>,
    descriptor: In<CUDA_ARRAY3D_DESCRIPTOR>,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let (descriptor, context) = (descriptor.get()?, context::current()?);
        out.set(array::create(
            session()?,
            context,
            Kind::Array,
            &descriptor,
            0,
        )?)
    })
}

/// `cuMipmappedArrayCreate`.
pub unsafe extern "C" fn create_mipmapped(
    out: Out<u64>,
    descriptor: In<CUDA_ARRAY3D_DESCRIPTOR>,
    levels: u32,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let (descriptor, context) = (descriptor.get()?, context::current()?);
        let kind = Kind::MipmappedArray;
        out.set(array::create(
            session()?,
            context,
            kind,
            &descriptor,
            levels,
        )?)
    })
}

/// `cuArrayDestroy`.
pub unsafe extern "C" fn destroy(handle: u64) -> CUresult {
    guard(|| {
        // A level or plane lives as long as the array that it is a part of.
        if array::array(handle)?.is_part() {
            return Ok(());
        }
        array::destroy(session()?, handle)
    })
}

/// `cuMipmappedArrayDestroy`.
pub unsafe extern "C" fn destroy_mipmapped(handle: u64) -> CUresult {
    guard(|| {
        array::mipmap(handle)?;
        array::destroy(session()?, handle)
    })
}

/// `cuArrayGetDescriptor`.
pub unsafe extern "C" fn get_descriptor(out: Out<CUDA_ARRAY_DESCRIPTOR>, handle: u64) -> CUresult {
    guard(|| {
        let descriptor = array::array(handle)?.descriptor();
        out.required()?;
        out.set(CUDA_ARRAY_DESCRIPTOR {
            width: descriptor.width,
            height: descriptor.height,
            format: descriptor.format,
            channels: descriptor.channels,
        })
    })
}

/// `cuArray3DGetDescriptor`.
pub unsafe extern "C" fn get_descriptor_3d(
    out: Out<CUDA_ARRAY3D_DESCRIPTOR>,
    handle: u64,
) -> CUresult {
    guard(|| {
        let array = array::array(handle)?;
        out.set(array.descriptor())
    })
}

/// `cuArrayGetPlane`.
pub unsafe extern "C" fn get_plane(out: Out<u64>, handle: u64, index: u32) -> CUresult {
    guard(|| {
        let array = array::array(handle)?;
        out.required()?;
        out.set(array::part(session()?, array, index)?)
    })
}

/// `cuMipmappedArrayGetLevel`.
pub unsafe extern "C" fn get_level(out: Out<u64>, handle: u64, level: u32) -> CUresult {
    guard(|| {
        let array = array::mipmap(handle)?;
        out.required()?;
        out.set(array::part(session()?, array, level)?)
    })
}

/// The array of a query: `CUDA_ERROR_INVALID_VALUE` if there is none.
fn of_query(found: Status<ArrayRef>) -> Status<ArrayRef> {
    found.map_err(|_| CUDA_ERROR_INVALID_VALUE)
}

/// Requests facts that only the driver knows: [`ArrayQuery`].
fn query<T: FromBytes>(array: ArrayRef, kind: u32, device: u32) -> Status<T> {
    let body = ArrayQuery {
        array: array.handle(),
        kind,
        device,
    };
    session()?.request(Op::ArrayQuery, &body, &[])?.read()
}

fn memory_requirements(
    out: Out<CUDA_ARRAY_MEMORY_REQUIREMENTS>,
    array: Status<ArrayRef>,
    device: CUdevice,
) -> CUresult {
    guard(|| {
        out.required()?;
        let device = context::device(device)?.server;
        let device = device.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        out.set(query(of_query(array)?, 0, device)?)
    })
}

fn sparse_properties(out: Out<CUDA_ARRAY_SPARSE_PROPERTIES>, array: Status<ArrayRef>) -> CUresult {
    guard(|| {
        out.required()?;
        let array = of_query(array)?;
        out.set(query(array, 1, array.device())?)
    })
}

/// `cuArrayGetMemoryRequirements`.
pub unsafe extern "C" fn get_memory_requirements(
    out: Out<CUDA_ARRAY_MEMORY_REQUIREMENTS>,
    handle: u64,
    device: CUdevice,
) -> CUresult {
    memory_requirements(out, array::array(handle), device)
}

/// `cuMipmappedArrayGetMemoryRequirements`.
pub unsafe extern "C" fn get_mipmapped_memory_requirements(
    out: Out<CUDA_ARRAY_MEMORY_REQUIREMENTS>,
    handle: u64,
    device: CUdevice,
) -> CUresult {
    memory_requirements(out, array::mipmap(handle), device)
}

/// `cuArrayGetSparseProperties`.
pub unsafe extern "C" fn get_sparse_properties(
    out: Out<CUDA_ARRAY_SPARSE_PROPERTIES>,
    handle: u64,
) -> CUresult {
    sparse_properties(out, array::array(handle))
}

/// `cuMipmappedArrayGetSparseProperties`.
pub unsafe extern "C" fn get_mipmapped_sparse_properties(
    out: Out<CUDA_ARRAY_SPARSE_PROPERTIES>,
    handle: u64,
) -> CUresult {
    sparse_properties(out, array::mipmap(handle))
}

/// One side of a one-dimensional copy.
#[derive(Clone, Copy)]
enum End {
    /// An array, and bytes into it.
    Array(u64, usize),
    Device(CUdeviceptr),
    Host(u64),
}

/// Copies bytes of one row, to which an offset into an array refers.
fn line(to: End, from: End, len: usize, stream: (u64, bool), when: When) -> Status {
    let given = |end: End| match end {
        End::Array(array, at) => (CU_MEMORYTYPE_ARRAY, 0, 0, array, at as u64),
        End::Device(address) => (CU_MEMORYTYPE_DEVICE, 0, address, 0, 0),
        End::Host(address) => (CU_MEMORYTYPE_HOST, address, 0, 0, 0),
    };
    let mut copy = CUDA_MEMCPY3D {
        width: len as u64,
        height: 1,
        depth: 1,
        ..CUDA_MEMCPY3D::default()
    };
    (
        copy.dst_type,
        copy.dst_host,
        copy.dst_device,
        copy.dst_array,
        copy.dst_x,
    ) = given(to);
    (
        copy.src_type,
        copy.src_host,
        copy.src_device,
        copy.src_array,
        copy.src_x,
    ) = given(from);
    submit(stream, &copy, when)
}

/// `cuMemcpyAtoA`.
pub unsafe extern "C" fn array_to_array<const P: bool>(
    to: u64,
    to_at: usize,
    from: u64,
    from_at: usize,
    len: usize,
) -> CUresult {
    let (to, from) = (End::Array(to, to_at), End::Array(from, from_at));
    guard(|| line(to, from, len, (0, P), When::Sync))
}

/// `cuMemcpyAtoD`.
pub unsafe extern "C" fn array_to_device<const P: bool>(
    to: CUdeviceptr,
    from: u64,
    at: usize,
    len: usize,
) -> CUresult {
    guard(|| {
        line(
            End::Device(to),
            End::Array(from, at),
            len,
            (0, P),
            When::Sync,
        )
    })
}

/// `cuMemcpyDtoA`.
pub unsafe extern "C" fn device_to_array<const P: bool>(
    to: u64,
    at: usize,
    from: CUdeviceptr,
    len: usize,
) -> CUresult {
    guard(|| {
        line(
            End::Array(to, at),
            End::Device(from),
            len,
            (0, P),
            When::Sync,
        )
    })
}

/// `cuMemcpyAtoH`.
pub unsafe extern "C" fn array_to_host<const P: bool>(
    to: u64,
    from: u64,
    at: usize,
    len: usize,
) -> CUresult {
    guard(|| line(End::Host(to), End::Array(from, at), len, (0, P), When::Sync))
}

/// `cuMemcpyAtoHAsync`.
pub unsafe extern "C" fn array_to_host_async<const P: bool>(
    to: u64,
    from: u64,
    at: usize,
    len: usize,
    stream: u64,
) -> CUresult {
    let (to, from) = (End::Host(to), End::Array(from, at));
    guard(|| line(to, from, len, (stream, P), When::Async))
}

/// `cuMemcpyHtoA`.
pub unsafe extern "C" fn host_to_array<const P: bool>(
    to: u64,
    at: usize,
    from: u64,
    len: usize,
) -> CUresult {
    guard(|| line(End::Array(to, at), End::Host(from), len, (0, P), When::Sync))
}

/// `cuMemcpyHtoAAsync`.
pub unsafe extern "C" fn host_to_array_async<const P: bool>(
    to: u64,
    at: usize,
    from: u64,
    len: usize,
    stream: u64,
) -> CUresult {
    let (to, from) = (End::Array(to, at), End::Host(from));
    guard(|| line(to, from, len, (stream, P), When::Async))
}
