//! Managed memory: allocation, advice, prefetches, attributes.

use super::*;

fn range(which: u32, at: u64, len: usize) -> String {
    let mut value = 0i32;
    let status = cu!(cuMemRangeGetAttribute, &mut value, 4usize, which, at, len);
    if status.is_ok() {
        format!("{value}")
    } else {
        format!("{status}")
    }
}

pub fn managed(setup: &Setup) {
    let mut at = 0u64;
    let allocate = |at: &mut u64, len: usize, flags: u32| cu!(cuMemAllocManaged, at, len, flags);
    say!(
        "alloc 0 bytes",
        "{}",
        allocate(&mut at, 0, CU_MEM_ATTACH_GLOBAL)
    );
    say!("alloc with no flags", "{}", allocate(&mut at, 4096, 0));
    say!("alloc with both flags", "{}", allocate(&mut at, 4096, 3));
    say!(
        "alloc for one stream",
        "{}",
        allocate(&mut at, 4096, CU_MEM_ATTACH_SINGLE)
    );
    const LEN: usize = 4 << 20;
    say!("alloc", "{}", allocate(&mut at, LEN, CU_MEM_ATTACH_GLOBAL));
    let words = at as *mut i32;
    // SAFETY: managed memory of LEN bytes.
    unsafe {
        for i in 0..1000 {
            words.add(i).write(i as i32);
        }
    }
    say!(
        "kernel",
        "{}",
        setup.store_index(at + 4000, 1000, 5, CUstream::NULL)
    );
    must!(cuCtxSynchronize);
    // SAFETY: as above.
    let good = unsafe {
        (0..1000)
            .all(|i| words.add(i).read() == i as i32 && words.add(1000 + i).read() == 5 * i as i32)
    };
    say!("both sides", "{good}");
    say!("host read", "{}", read_i32(at + 4000, 3)[2]);
    let block = alloc(LEN);
    must!(cuMemcpyDtoD_v2, block, at, 8000usize);
    say!("to device memory", "{}", read_i32(block, 1002)[1001]);
    must!(cuMemsetD32_v2, at, 12u32, 100usize);
    must!(cuCtxSynchronize);
    // SAFETY: as above.
    say!("memset", "{}", unsafe { words.add(99).read() });
    for (name, which, bytes) in [
        ("memory type", CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 4),
        ("managed", CU_POINTER_ATTRIBUTE_IS_MANAGED, 4),
        ("ordinal", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 4),
        ("mapped", CU_POINTER_ATTRIBUTE_MAPPED, 4),
        (
            "legacy IPC",
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            4,
        ),
        ("handle types", CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, 8),
        ("range size", CU_POINTER_ATTRIBUTE_RANGE_SIZE, 8),
        ("access flags", CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, 4),
        ("pool", CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, 8),
    ] {
        let mut value = 0u64;
        let status = cu!(cuPointerGetAttribute, &mut value, which, at + 8);
        let value = if bytes == 4 {
            value as u32 as u64
        } else {
            value
        };
        say!(name, "{status} {value}");
    }
    for (name, which) in [
        ("device pointer", CU_POINTER_ATTRIBUTE_DEVICE_POINTER),
        ("host pointer", CU_POINTER_ATTRIBUTE_HOST_POINTER),
        ("range start", CU_POINTER_ATTRIBUTE_RANGE_START_ADDR),
    ] {
        let mut value = 0u64;
        let status = cu!(cuPointerGetAttribute, &mut value, which, at + 8);
        say!(name, "{status} {}", value.wrapping_sub(at));
    }
    let (mut start, mut len) = (0u64, 0usize);
    let status = cu!(cuMemGetAddressRange_v2, &mut start, &mut len, at + 9);
    say!("address range", "{status} {} {}", start == at, len == LEN);
    let mut device = 0u64;
    say!(
        "host device pointer",
        "{}",
        cu!(cuMemHostGetDevicePointer_v2, &mut device, at, 0u32)
    );
    say!("free as host memory", "{}", cu!(cuMemFreeHost, at));

    println!("-- advice");
    let here = CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: setup.device,
    };
    let host = CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_HOST,
        id: 0,
    };
    let nowhere = CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: 99,
    };
    for (name, which) in [
        ("read mostly", CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY),
        ("preferred", CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION),
        ("accessed by", CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY),
        (
            "last prefetch",
            CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
        ),
        (
            "preferred type",
            CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE,
        ),
        (
            "last prefetch type",
            CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE,
        ),
        ("attribute 77", 77),
    ] {
        say!(name, "{}", range(which, at, LEN));
    }
    let advise = |at: u64, len: usize, advice: u32, to: CUmemLocation| {
        cu!(cuMemAdvise_v2, at, len, advice, to)
    };
    say!(
        "read mostly",
        "{}",
        advise(at, LEN / 2, CU_MEM_ADVISE_SET_READ_MOSTLY, here)
    );
    say!(
        "first half",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, at, LEN / 2)
    );
    say!(
        "all",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, at, LEN)
    );
    say!(
        "not any more",
        "{}",
        advise(at, LEN, CU_MEM_ADVISE_UNSET_READ_MOSTLY, here)
    );
    say!(
        "first half",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, at, LEN / 2)
    );
    say!(
        "prefer the device",
        "{}",
        advise(at, LEN, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, here)
    );
    say!(
        "preferred",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, at, LEN)
    );
    say!(
        "type",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, at, LEN)
    );
    say!(
        "id",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID, at, LEN)
    );
    say!(
        "prefer the host",
        "{}",
        advise(at, LEN / 2, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, host)
    );
    say!(
        "preferred, first half",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, at, LEN / 2)
    );
    say!(
        "preferred, all",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, at, LEN)
    );
    say!(
        "type, first half",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, at, LEN / 2)
    );
    say!(
        "prefer nothing",
        "{}",
        advise(at, LEN, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, here)
    );
    say!(
        "preferred",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, at, LEN)
    );
    say!(
        "accessed by the device",
        "{}",
        advise(at, LEN, CU_MEM_ADVISE_SET_ACCESSED_BY, here)
    );
    let mut devices = [77i32; 4];
    let status = cu!(
        cuMemRangeGetAttribute,
        devices.as_mut_ptr(),
        16usize,
        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY,
        at,
        LEN
    );
    say!("accessed by", "{status} {devices:?}");
    say!(
        "accessed by the host",
        "{}",
        advise(at, LEN, CU_MEM_ADVISE_SET_ACCESSED_BY, host)
    );
    let status = cu!(
        cuMemRangeGetAttribute,
        devices.as_mut_ptr(),
        16usize,
        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY,
        at,
        LEN
    );
    say!("accessed by", "{status} {devices:?}");
    say!(
        "not by the device",
        "{}",
        advise(at, LEN, CU_MEM_ADVISE_UNSET_ACCESSED_BY, here)
    );
    let status = cu!(
        cuMemRangeGetAttribute,
        devices.as_mut_ptr(),
        16usize,
        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY,
        at,
        LEN
    );
    say!("accessed by", "{status} {devices:?}");
    say!(
        "on device 99",
        "{}",
        advise(at, LEN, CU_MEM_ADVISE_SET_ACCESSED_BY, nowhere)
    );
    say!("advice 77", "{}", advise(at, LEN, 77, here));
    say!(
        "advice on 0 bytes",
        "{}",
        advise(at, 0, CU_MEM_ADVISE_SET_READ_MOSTLY, here)
    );
    say!(
        "advice beyond",
        "{}",
        advise(at, LEN + 65536, CU_MEM_ADVISE_SET_READ_MOSTLY, here)
    );
    say!(
        "advice on device memory",
        "{}",
        advise(block, LEN, CU_MEM_ADVISE_SET_READ_MOSTLY, here)
    );
    say!(
        "old advice",
        "{}",
        cu!(
            cuMemAdvise,
            at,
            LEN,
            CU_MEM_ADVISE_SET_READ_MOSTLY,
            setup.device
        )
    );
    say!(
        "old advice to the host",
        "{}",
        cu!(
            cuMemAdvise,
            at,
            LEN,
            CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
            CU_DEVICE_CPU
        )
    );
    say!(
        "preferred",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, at, LEN)
    );
    let mut value = 0i32;
    say!(
        "attribute of 3 bytes",
        "{}",
        cu!(
            cuMemRangeGetAttribute,
            &mut value,
            3usize,
            CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
            at,
            LEN
        )
    );
    say!(
        "attribute of 8 bytes",
        "{}",
        cu!(
            cuMemRangeGetAttribute,
            &mut value,
            8usize,
            CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
            at,
            LEN
        )
    );
    say!(
        "attribute of device memory",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, block, LEN)
    );
    let (mut first, mut second) = (0i32, 0i32);
    let mut into: [*mut c_void; 2] = [(&raw mut first).cast(), (&raw mut second).cast()];
    let mut sizes = [4usize, 4];
    let mut which = [
        CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
    ];
    let status = cu!(
        cuMemRangeGetAttributes,
        into.as_mut_ptr(),
        sizes.as_mut_ptr(),
        which.as_mut_ptr(),
        2usize,
        at,
        LEN
    );
    say!("two attributes", "{status} {first} {second}");

    println!("-- prefetches");
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    let prefetch = |at: u64, len: usize, to: CUmemLocation, flags: u32| {
        cu!(cuMemPrefetchAsync_v2, at, len, to, flags, stream)
    };
    say!("to the device", "{}", prefetch(at, LEN, here, 0));
    must!(cuStreamSynchronize, stream);
    say!(
        "last prefetch",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, at, LEN)
    );
    say!(
        "last prefetch type",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE, at, LEN)
    );
    say!("half to the host", "{}", prefetch(at, LEN / 2, host, 0));
    say!(
        "last prefetch, all",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, at, LEN)
    );
    say!(
        "last prefetch, half",
        "{}",
        range(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, at, LEN / 2)
    );
    say!("to device 99", "{}", prefetch(at, LEN, nowhere, 0));
    say!("with flags", "{}", prefetch(at, LEN, here, 1));
    say!("0 bytes", "{}", prefetch(at, 0, here, 0));
    say!("device memory", "{}", prefetch(block, LEN, here, 0));
    say!("beyond", "{}", prefetch(at, LEN + 65536, here, 0));
    say!(
        "old prefetch",
        "{}",
        cu!(cuMemPrefetchAsync, at, LEN, setup.device, stream)
    );
    say!(
        "old prefetch to the host",
        "{}",
        cu!(cuMemPrefetchAsync, at, LEN, CU_DEVICE_CPU, stream)
    );
    let (mut places, mut lens) = ([at, at + LEN as u64 / 2], [LEN / 2, LEN / 2]);
    let (mut to, mut index) = ([here, host], [0usize, 1]);
    let batch = |places: &mut [u64; 2],
                 lens: &mut [usize; 2],
                 to: &mut [CUmemLocation; 2],
                 index: &mut [usize; 2],
                 count: usize,
                 kinds: usize,
                 flags: u64| {
        cu!(
            cuMemPrefetchBatchAsync,
            places.as_mut_ptr(),
            lens.as_mut_ptr(),
            count,
            to.as_mut_ptr(),
            index.as_mut_ptr(),
            kinds,
            flags,
            stream
        )
    };
    say!(
        "batch",
        "{}",
        batch(&mut places, &mut lens, &mut to, &mut index, 2, 2, 0)
    );
    say!(
        "batch of none",
        "{}",
        batch(&mut places, &mut lens, &mut to, &mut index, 0, 2, 0)
    );
    say!(
        "batch with flags",
        "{}",
        batch(&mut places, &mut lens, &mut to, &mut index, 2, 2, 1)
    );
    say!(
        "batch with more kinds",
        "{}",
        batch(&mut places, &mut lens, &mut to, &mut index, 1, 2, 0)
    );
    say!(
        "batch that begins late",
        "{}",
        batch(&mut places, &mut lens, &mut to, &mut [1, 1], 2, 2, 0)
    );
    say!(
        "discard",
        "{}",
        cu!(
            cuMemDiscardBatchAsync,
            places.as_mut_ptr(),
            lens.as_mut_ptr(),
            2usize,
            0u64,
            stream
        )
    );
    say!(
        "discard with flags",
        "{}",
        cu!(
            cuMemDiscardBatchAsync,
            places.as_mut_ptr(),
            lens.as_mut_ptr(),
            2usize,
            1u64,
            stream
        )
    );
    say!(
        "discard and prefetch",
        "{}",
        cu!(
            cuMemDiscardAndPrefetchBatchAsync,
            places.as_mut_ptr(),
            lens.as_mut_ptr(),
            2usize,
            to.as_mut_ptr(),
            index.as_mut_ptr(),
            2usize,
            0u64,
            stream
        )
    );
    say!(
        "discard of device memory",
        "{}",
        cu!(
            cuMemDiscardBatchAsync,
            &mut [block, block] as *mut [u64; 2],
            lens.as_mut_ptr(),
            2usize,
            0u64,
            stream
        )
    );
    must!(cuStreamSynchronize, stream);
    println!("-- attachment");
    say!(
        "to the stream",
        "{}",
        cu!(
            cuStreamAttachMemAsync,
            stream,
            at,
            0usize,
            CU_MEM_ATTACH_SINGLE
        )
    );
    say!(
        "global",
        "{}",
        cu!(
            cuStreamAttachMemAsync,
            stream,
            at,
            0usize,
            CU_MEM_ATTACH_GLOBAL
        )
    );
    say!(
        "to the host",
        "{}",
        cu!(cuStreamAttachMemAsync, stream, at, LEN, CU_MEM_ATTACH_HOST)
    );
    say!(
        "half of it",
        "{}",
        cu!(
            cuStreamAttachMemAsync,
            stream,
            at,
            LEN / 2,
            CU_MEM_ATTACH_GLOBAL
        )
    );
    say!(
        "device memory",
        "{}",
        cu!(
            cuStreamAttachMemAsync,
            stream,
            block,
            0usize,
            CU_MEM_ATTACH_GLOBAL
        )
    );
    must!(cuStreamSynchronize, stream);
    must!(cuStreamDestroy_v2, stream);
    say!("free", "{}", cu!(cuMemFree_v2, at));
    say!("free again", "{}", cu!(cuMemFree_v2, at));
    let mut on_host = 0u64;
    say!(
        "alloc for the host",
        "{}",
        allocate(&mut on_host, 4096, CU_MEM_ATTACH_HOST)
    );
    say!("free it", "{}", cu!(cuMemFree_v2, on_host));
    free(block);
}
