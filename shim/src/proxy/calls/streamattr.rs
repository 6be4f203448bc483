//! Attributes of streams. They are kept here; those that affect execution are sent to the server too.

use mpsshim_api::cuda::{
    CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE, CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT,
    CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN,
    CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, CU_STREAM_ATTRIBUTE_PRIORITY,
    CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, CUDA_ERROR_INVALID_VALUE, CUaccessPolicyWindow,
    CUresult,
};
use mpsshim_proto::message::Op;
use mpsshim_proto::message::stream::{STREAM_ATTRIBUTE_LEN, StreamAttribute};
use zerocopy::IntoBytes;

use super::entries;
use crate::ffi::{Status, guard};
use crate::proxy::context;
use crate::proxy::default_stream;
use crate::proxy::stream::{Attributes, StreamRef};
use crate::proxy::submit::session;

entries! {
    cuStreamGetAttribute(_, _, _) => get::<false>,
    cuStreamGetAttribute_ptsz(_, _, _) => get::<true>,
    cuStreamSetAttribute(_, _, _) => set::<false>,
    cuStreamSetAttribute_ptsz(_, _, _) => set::<true>,
    cuStreamCopyAttributes(_, _) => copy::<false>,
    cuStreamCopyAttributes_ptsz(_, _) => copy::<true>,
}

/// `CUlaunchAttributeValue`: of a size and an alignment only, since programs pass less that were built with CUDA 11.
type Value = [u64; 8];

/// `CUaccessProperty`.
const PERSISTING: u32 = 2;

/// Copies a value to the program, without the padding of the attribute's 64 bytes.
fn put<T: IntoBytes + zerocopy::Immutable>(to: *mut u8, value: &T) {
    let bytes = value.as_bytes();
    // SAFETY: the program gave a `CUlaunchAttributeValue`, 64 bytes.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}

fn take<T: zerocopy::FromBytes>(from: *const u8) -> T {
    let mut value = T::new_zeroed();
    // SAFETY: the program gave a `CUlaunchAttributeValue`, 64 bytes and at least as many as T; T takes any bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(from, (&raw mut value).cast::<u8>(), size_of::<T>());
    }
    value
}

/// `cuStreamGetAttribute`.
pub unsafe extern "C" fn get<const PER_THREAD: bool>(
    handle: u64,
    id: u32,
    out: *mut Value,
) -> CUresult {
    guard(|| {
        let stream = default_stream::resolve(handle, PER_THREAD)?;
        let out = out.cast::<u8>();
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let now = stream.attributes();
        match id {
            CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW => put(out, &now.window),
            CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY => put(out, &now.synchronization),
            CU_STREAM_ATTRIBUTE_PRIORITY => put(out, &stream.priority()),
            CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP => put(out, &now.domain_map),
            CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN => put(out, &now.domain),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    })
}

fn device_limit(stream: StreamRef, attribute: u32, otherwise: u64) -> u64 {
    context::device_attribute(stream.context().device, attribute)
        .map_or(otherwise, |value| value as u64)
}

/// Sets one attribute of `now`, and tells the server.
fn change(stream: StreamRef, now: &mut Attributes, id: u32, value: *const u8) -> Status {
    match id {
        CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW => {
            let window: CUaccessPolicyWindow = take(value);
            let most = device_limit(
                stream,
                CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE,
                1 << 27,
            );
            if !(0.0..=1.0).contains(&window.hit_ratio)
                || window.miss == PERSISTING
                || window.bytes > most
            {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            now.window = window;
        }
        CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY => {
            let policy: i32 = take(value);
            if !(1..=4).contains(&policy) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            now.synchronization = policy;
            return Ok(());
        }
        CU_STREAM_ATTRIBUTE_PRIORITY => stream.set_priority(take(value)),
        CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP => {
            let map: [u8; 2] = take(value);
            let domains = device_limit(stream, CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT, 4);
            if map.iter().any(|domain| u64::from(*domain) >= domains) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            now.domain_map = map;
        }
        CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN => {
            let domain: u32 = take(value);
            if domain > 1 {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            now.domain = domain;
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    let mut body = StreamAttribute {
        stream: stream.handle(),
        id,
        ..StreamAttribute::default()
    };
    match id {
        // Clamped.
        CU_STREAM_ATTRIBUTE_PRIORITY => {
            body.value[..4].copy_from_slice(&stream.priority().to_ne_bytes());
        }
        // SAFETY: the program gave a `CUlaunchAttributeValue`, 64 bytes.
        _ => unsafe {
            std::ptr::copy_nonoverlapping(value, body.value.as_mut_ptr(), STREAM_ATTRIBUTE_LEN);
        },
    }
    session()?.submit(Op::StreamAttribute, &body)
}

/// `cuStreamSetAttribute`.
pub unsafe extern "C" fn set<const PER_THREAD: bool>(
    handle: u64,
    id: u32,
    value: *const Value,
) -> CUresult {
    guard(|| {
        let stream = default_stream::resolve(handle, PER_THREAD)?;
        let value = value.cast::<u8>();
        if value.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut now = stream.attributes();
        change(stream, &mut now, id, value)?;
        stream.set_attributes(now);
        Ok(())
    })
}

/// `cuStreamCopyAttributes`.
pub unsafe extern "C" fn copy<const PER_THREAD: bool>(to: u64, from: u64) -> CUresult {
    guard(|| {
        let to = default_stream::resolve(to, PER_THREAD)?;
        let from = default_stream::resolve(from, PER_THREAD)?;
        let (mut now, new) = (to.attributes(), from.attributes());
        let mut value = [0u8; 64];
        let each: [(u32, &[u8]); 4] = [
            (
                CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW,
                new.window.as_bytes(),
            ),
            (CU_STREAM_ATTRIBUTE_PRIORITY, &from.priority().to_ne_bytes()),
            (CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, &new.domain_map),
            (CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN, new.domain.as_bytes()),
        ];
        for (id, bytes) in each {
            value[..bytes.len()].copy_from_slice(bytes);
            change(to, &mut now, id, value.as_ptr())?;
        }
        to.set_attributes(new);
        Ok(())
    })
}
