//! Tensor maps. The genuine driver encodes them only with a context, so the server does it; results are cached, since
//! programs describe the same tensors before every launch.

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUresult};
use mpsshim_proto::message::Op;
use mpsshim_proto::message::array::{
    TENSOR_RANK_MAX, TensorMap, TensorMapCall as Call, TensorMapMade,
};
use zerocopy::IntoBytes;

use super::entries;
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::context;
use crate::proxy::known::Known;
use crate::proxy::submit::session;

entries! {
    cuTensorMapEncodeTiled(_, _, _, _, _, _, _, _, _, _, _, _) => encode_tiled,
    cuTensorMapEncodeIm2col(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _) => encode_im2col,
    cuTensorMapEncodeIm2colWide(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _) => encode_im2col_wide,
    cuTensorMapReplaceAddress(_, _) => replace_address,
}

/// Maximum number of cached maps; when it is reached, all are dropped.
const KNOWN: usize = 1024;
/// Alignment of a map's address, bytes.
const ALIGNMENT: usize = 64;

/// `CUtensorMap`.
type Map = [u64; 16];

/// The first `count` elements, in an array of the message's size.
fn list<T: Copy + Default, const N: usize>(from: In<T>, count: u32) -> Status<[T; N]> {
    let mut list = [T::default(); N];
    if count as usize <= TENSOR_RANK_MAX {
        for (index, element) in list.iter_mut().enumerate().take(count as usize) {
            *element = from.at(index)?;
        }
    }
    Ok(list)
}

/// The arguments that all calls have in common.
fn tensor(
    (call, data_type, rank): (Call, u32, u32),
    address: u64,
    size: In<u64>,
    strides: In<u64>,
    element_strides: In<u32>,
) -> Status<TensorMap> {
    Ok(TensorMap {
        call: call as u32,
        data_type,
        rank,
        address,
        size: list(size, rank)?,
        strides: list(strides, rank.saturating_sub(1))?,
        element_strides: list(element_strides, rank)?,
        ..TensorMap::default()
    })
}

fn make(out: Out<Map>, body: Status<TensorMap>) -> CUresult {
    static MADE: Known<Vec<u8>, Map, KNOWN> = Known::new();
    guard(|| {
        context::current()?;
        out.required()?;
        if !out.address().is_multiple_of(ALIGNMENT) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let session = session()?;
        session.check()?;
        let mut body = body?;
        body.device = context::current()?.server_device;
        let map = MADE.get_or_request(body.as_bytes().to_vec(), || {
            let made: TensorMapMade = session.request(Op::TensorMap, &body, &[])?.read()?;
            Ok(made.map)
        })?;
        out.set(map)
    })
}

/// `cuTensorMapEncodeTiled`.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn encode_tiled(
    out: Out<Map>,
    data_type: u32,
    rank: u32,
    address: u64,
    size: In<u64>,
    strides: In<u64>,
    tile: In<u32>,
    element_strides: In<u32>,
    interleave: u32,
    swizzle: u32,
    promotion: u32,
    fill: u32,
) -> CUresult {
    let body = || -> Status<TensorMap> {
        Ok(TensorMap {
            tile: list(tile, rank)?,
            interleave,
            swizzle,
            promotion,
            fill,
            ..tensor(
                (Call::Tiled, data_type, rank),
                address,
                size,
                strides,
                element_strides,
            )?
        })
    };
    make(out, body())
}

/// `cuTensorMapEncodeIm2col`.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn encode_im2col(
    out: Out<Map>,
    data_type: u32,
    rank: u32,
    address: u64,
    size: In<u64>,
    strides: In<u64>,
    lower: In<i32>,
    upper: In<i32>,
    channels: u32,
    pixels: u32,
    element_strides: In<u32>,
    interleave: u32,
    swizzle: u32,
    promotion: u32,
    fill: u32,
) -> CUresult {
    let body = || -> Status<TensorMap> {
        Ok(TensorMap {
            lower: list(lower, rank.saturating_sub(2))?,
            upper: list(upper, rank.saturating_sub(2))?,
            channels,
            pixels,
            interleave,
            swizzle,
            promotion,
            fill,
            ..tensor(
                (Call::Im2col, data_type, rank),
                address,
                size,
                strides,
                element_strides,
            )?
        })
    };
    make(out, body())
}

/// `cuTensorMapEncodeIm2colWide`.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn encode_im2col_wide(
    out: Out<Map>,
    data_type: u32,
    rank: u32,
    address: u64,
    size: In<u64>,
    strides: In<u64>,
    lower: i32,
    upper: i32,
    channels: u32,
    pixels: u32,
    element_strides: In<u32>,
    interleave: u32,
    mode: u32,
    swizzle: u32,
    promotion: u32,
    fill: u32,
) -> CUresult {
    let body = || -> Status<TensorMap> {
        Ok(TensorMap {
            lower: [lower, 0, 0, 0],
            upper: [upper, 0, 0, 0],
            channels,
            pixels,
            interleave,
            mode,
            swizzle,
            promotion,
            fill,
            ..tensor(
                (Call::Im2colWide, data_type, rank),
                address,
                size,
                strides,
                element_strides,
            )?
        })
    };
    make(out, body())
}

/// `cuTensorMapReplaceAddress`.
pub unsafe extern "C" fn replace_address(out: Out<Map>, address: u64) -> CUresult {
    let body = out.get().map(|map| TensorMap {
        call: Call::ReplaceAddress as u32,
        map,
        address,
        ..TensorMap::default()
    });
    make(out, body)
}
