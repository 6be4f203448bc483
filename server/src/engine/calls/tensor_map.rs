//! Tensor maps. The driver encodes them on the host, but needs a context.

use super::Reply;
use crate::engine::base::call_error::CallError;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::array::{
    TENSOR_RANK_MAX, TensorMap, TensorMapCall as Call, TensorMapMade,
};
use zerocopy::IntoBytes;

/// A tensor map, aligned as the driver requires.
#[repr(align(128))]
struct Aligned([u64; 16]);

impl Session {
    /// `cuTensorMapEncodeTiled`, `…Im2col`, `…Im2colWide`, `cuTensorMapReplaceAddress`. Addresses are not checked: a
    /// kernel could read the same memory without a map.
    pub fn tensor_map(&mut self, shared: &Shared, body: TensorMap) -> Reply {
        let call = Call::from_u32(body.call)
            .ok_or_else(|| CallError::Violation(format!("tensor map call {}", body.call)))?;
        shared
            .gpu
            .device(body.device)?
            .make_current(&shared.gpu.driver)?;
        if call != Call::ReplaceAddress && body.rank as usize > TENSOR_RANK_MAX {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        let mut map = Aligned(body.map);
        let made = map.0.as_mut_ptr().cast();
        let driver = &shared.gpu.driver.array;
        let b = &body;
        match call {
            Call::Tiled => driver.tensor_map_encode_tiled(
                made,
                b.data_type,
                b.rank,
                b.address,
                b.size.as_ptr(),
                b.strides.as_ptr(),
                b.tile.as_ptr(),
                b.element_strides.as_ptr(),
                b.interleave,
                b.swizzle,
                b.promotion,
                b.fill,
            )?,
            Call::Im2col => driver.tensor_map_encode_im2col(
                made,
                b.data_type,
                b.rank,
                b.address,
                b.size.as_ptr(),
                b.strides.as_ptr(),
                b.lower.as_ptr(),
                b.upper.as_ptr(),
                b.channels,
                b.pixels,
                b.element_strides.as_ptr(),
                b.interleave,
                b.swizzle,
                b.promotion,
                b.fill,
            )?,
            Call::Im2colWide => driver.tensor_map_encode_im2col_wide(
                made,
                b.data_type,
                b.rank,
                b.address,
                b.size.as_ptr(),
                b.strides.as_ptr(),
                b.lower[0],
                b.upper[0],
                b.channels,
                b.pixels,
                b.element_strides.as_ptr(),
                b.interleave,
                b.mode,
                b.swizzle,
                b.promotion,
                b.fill,
            )?,
            Call::ReplaceAddress => driver.tensor_map_replace_address(made, b.address)?,
        }
        Ok(TensorMapMade { map: map.0 }.as_bytes().to_vec())
    }
}
