//! Two devices: copies between them, access to each other's memory.

use super::*;

pub fn two_devices(setup: &Setup) {
    let mut count = 0 as c_int;
    must!(cuDeviceGetCount, &mut count);
    if count < 2 {
        println!("there is one device");
        return;
    }
    let (mut yes, mut there) = (0 as c_int, 0 as c_int);
    must!(cuDeviceCanAccessPeer, &mut yes, 0 as c_int, 1 as c_int);
    must!(cuDeviceCanAccessPeer, &mut there, 1 as c_int, 0 as c_int);
    say!("access", "{yes} {there}");
    let (mut here, mut other) = (CUcontext::NULL, CUcontext::NULL);
    must!(cuCtxGetCurrent, &mut here);
    must!(cuDevicePrimaryCtxRetain, &mut other, 1 as c_int);
    const LEN: usize = 3 << 20;
    let on = |context: CUcontext, len: usize| {
        must!(cuCtxSetCurrent, context);
        let block = alloc(len);
        must!(cuCtxSetCurrent, here);
        block
    };
    let a = on(here, LEN);
    let b = on(other, LEN);
    let small = on(other, 4000);
    let mut ordinal = 77u32;
    let status = cu!(
        cuPointerGetAttribute,
        &mut ordinal,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        b + 5
    );
    say!("ordinal", "{status} {ordinal}");
    let mut context = 0u64;
    let status = cu!(
        cuPointerGetAttribute,
        &mut context,
        CU_POINTER_ATTRIBUTE_CONTEXT,
        b
    );
    say!("context", "{status} {}", context == other.0);

    println!("-- copies without access");
    let words: Vec<i32> = (0..LEN as i32 / 4).collect();
    say!(
        "to the other device",
        "{}",
        cu!(cuMemcpyHtoD_v2, b, words.as_ptr(), LEN)
    );
    say!("from it", "{}", read_i32(b, LEN / 4) == words);
    say!(
        "memset of it",
        "{}",
        cu!(cuMemsetD32_v2, small, 7u32, 1000usize)
    );
    must!(cuCtxSetCurrent, other);
    must!(cuCtxSynchronize);
    must!(cuCtxSetCurrent, here);
    say!("its content", "{}", read_i32(small, 1000)[999]);
    say!("between them", "{}", cu!(cuMemcpyDtoD_v2, a, b, LEN));
    must!(cuCtxSynchronize);
    say!("arrived", "{}", read_i32(a, LEN / 4) == words);
    must!(cuMemsetD8_v2, a, 0u8, LEN);
    must!(cuCtxSynchronize);
    say!(
        "between contexts",
        "{}",
        cu!(cuMemcpyPeer, b, other, a, here, LEN)
    );
    must!(cuCtxSynchronize);
    say!("arrived", "{}", read_i32(b, 3) == [0, 0, 0]);
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    must!(cuMemcpyHtoD_v2, b, words.as_ptr(), LEN);
    must!(cuCtxSynchronize);
    say!(
        "in a stream",
        "{}",
        cu!(cuMemcpyPeerAsync, a, here, b, other, LEN, stream)
    );
    must!(cuStreamSynchronize, stream);
    say!("arrived", "{}", read_i32(a, LEN / 4) == words);

    println!("-- access");
    say!("enable", "{}", cu!(cuCtxEnablePeerAccess, other, 0u32));
    say!("again", "{}", cu!(cuCtxEnablePeerAccess, other, 0u32));
    say!("with flags", "{}", cu!(cuCtxEnablePeerAccess, other, 1u32));
    say!(
        "kernel on the other's memory",
        "{}",
        setup.store_index(b, 1000, 5, stream)
    );
    must!(cuStreamSynchronize, stream);
    say!("what it wrote", "{}", read_i32(b, 1000)[999]);
    say!(
        "kernel on a small block",
        "{}",
        setup.store_index(small, 1000, 3, stream)
    );
    must!(cuStreamSynchronize, stream);
    say!("what it wrote", "{}", read_i32(small, 1000)[999]);
    let later = on(other, LEN);
    say!(
        "kernel on memory allocated later",
        "{}",
        setup.store_index(later, 1000, 2, stream)
    );
    must!(cuStreamSynchronize, stream);
    say!("what it wrote", "{}", read_i32(later, 1000)[999]);
    say!("disable", "{}", cu!(cuCtxDisablePeerAccess, other));
    say!("again", "{}", cu!(cuCtxDisablePeerAccess, other));
    must!(cuStreamDestroy_v2, stream);
    [a, b, small, later].into_iter().for_each(free);
    must!(cuDevicePrimaryCtxRelease_v2, 1 as c_int);
}
