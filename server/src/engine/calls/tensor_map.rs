//! Tensor maps. The driver encodes them on the host, but needs a context.

use super::reply::Reply;
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

/// `cuTensorMapEncodeTiled`, `…Im2col`, `…Im2colWide`, `cuTensorMapReplaceAddress`. Addresses are not checked: a
/// kernel could read the same memory without a map.
pub fn tensor_map(_: &mut Session, shared: &Shared, body: TensorMap) -> Reply {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{FAULT, Fixture, Function, counts, obeys};
    use mpsshim_proto::message::Op;

    const CALLS: [(Call, &str); 4] = [
        (Call::Tiled, "cuTensorMapEncodeTiled"),
        (Call::Im2col, "cuTensorMapEncodeIm2col"),
        (Call::Im2colWide, "cuTensorMapEncodeIm2colWide"),
        (Call::ReplaceAddress, "cuTensorMapReplaceAddress"),
    ];

    fn map(call: Call) -> TensorMap {
        TensorMap {
            call: call as u32,
            rank: TENSOR_RANK_MAX as u32,
            ..TensorMap::default()
        }
    }

    #[test]
    fn a_tensor_map_of_too_many_dimensions_or_no_device_is_refused() {
        let mut test = Fixture::new(&CALLS.map(|(_, name)| (name, counts as Function)));
        for (call, name) in CALLS {
            let elsewhere = TensorMap {
                device: 1,
                ..map(call)
            };
            let status = test.status(Op::TensorMap, &elsewhere, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_DEVICE, "{name}");
            if call == Call::ReplaceAddress {
                continue;
            }
            // The driver would read beyond the arrays of the message.
            for rank in [TENSOR_RANK_MAX as u32 + 1, u32::MAX] {
                let body = TensorMap { rank, ..map(call) };
                let status = test.status(Op::TensorMap, &body, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{name} {rank}");
            }
        }
        for call in [4, u32::MAX] {
            let body = TensorMap {
                call,
                ..map(Call::Tiled)
            };
            assert!(test.is_violation(Op::TensorMap, &body, &[]), "{call}");
        }
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn each_call_on_a_tensor_map_returns_the_error_of_the_driver() {
        for (call, name) in CALLS {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            for status in [CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS, FAULT] {
                test.orders(status);
                assert_eq!(test.told(Op::TensorMap, &map(call), &[]), status, "{name}");
            }
            assert!(test.has_ended(), "{name}");
        }
    }

    extern "C" fn replaces(map: &mut [u64; 16], address: u64) -> CUresult {
        // The driver may use instructions that need it.
        assert!(std::ptr::from_ref(map).addr().is_multiple_of(128));
        map[0] = address;
        CUDA_SUCCESS
    }

    #[test]
    fn a_client_gets_its_map_with_another_address() {
        let mut test = Fixture::new(&[("cuTensorMapReplaceAddress", replaces as Function)]);
        let body = TensorMap {
            map: [7; 16],
            address: 9,
            ..map(Call::ReplaceAddress)
        };
        let made: TensorMapMade = test.reply(Op::TensorMap, &body, &[]).expect("a map");
        let mut expected = [7; 16];
        expected[0] = 9;
        assert_eq!(made.map, expected);
    }
}
