//! Device and pinned memory, registration, copies, memsets.

use super::*;

pub fn memory() {
    let mut pointer: CUdeviceptr = 0;
    say!("alloc 0", "{}", cu!(cuMemAlloc_v2, &mut pointer, 0usize));
    say!(
        "alloc too much",
        "{}",
        cu!(cuMemAlloc_v2, &mut pointer, 1usize << 46)
    );
    let blocks: Vec<CUdeviceptr> = [1usize, 100, 4096, 1 << 20, (1 << 20) + 1, 5 << 20]
        .into_iter()
        .map(alloc)
        .collect();
    say!(
        "alignment",
        "{}",
        blocks.iter().all(|block| block % 256 == 0)
    );
    let (mut start, mut len) = (0u64, 0usize);
    say!(
        "address range",
        "{} {}",
        cu!(
            cuMemGetAddressRange_v2,
            &mut start,
            &mut len,
            blocks[2] + 100
        ),
        start == blocks[2] && len >= 4096
    );
    let mut kind = 0u32;
    say!(
        "memory type",
        "{} {kind}",
        cu!(
            cuPointerGetAttribute,
            &mut kind,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            blocks[3]
        )
    );
    let mut ordinal = -1 as c_int;
    say!(
        "ordinal",
        "{} {ordinal}",
        cu!(
            cuPointerGetAttribute,
            &mut ordinal,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            blocks[3]
        )
    );
    let mut local = 5u64;
    let address = &raw mut local as u64;
    say!(
        "attribute of a stack pointer",
        "{}",
        cu!(
            cuPointerGetAttribute,
            &mut kind,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            address
        )
    );
    let mut attributes = [
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
    ];
    let (mut kind, mut device_pointer) = (77u32, 77u64);
    let mut into: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut device_pointer).cast()];
    let result = cu!(
        cuPointerGetAttributes,
        2u32,
        attributes.as_mut_ptr(),
        into.as_mut_ptr(),
        address
    );
    say!(
        "attributes of a stack pointer",
        "{result} {kind} {device_pointer}"
    );
    let result = cu!(
        cuPointerGetAttributes,
        2u32,
        attributes.as_mut_ptr(),
        into.as_mut_ptr(),
        blocks[1] + 8
    );
    say!(
        "attributes of device memory",
        "{result} {kind} {}",
        device_pointer == blocks[1] + 8
    );
    for block in blocks {
        free(block);
    }
    say!("free of NULL", "{}", cu!(cuMemFree_v2, 0u64));
    say!("free of a stack pointer", "{}", cu!(cuMemFree_v2, address));
    let block = alloc(1000);
    free(block);
    say!("double free", "{}", cu!(cuMemFree_v2, block));
    let mut pitch = 0usize;
    must!(
        cuMemAllocPitch_v2,
        &mut pointer,
        &mut pitch,
        100usize,
        10usize,
        4u32
    );
    say!("pitch", "{}", pitch >= 100 && pitch.is_multiple_of(32));
    free(pointer);
    say!(
        "pitch of 3-byte elements",
        "{}",
        cu!(
            cuMemAllocPitch_v2,
            &mut pointer,
            &mut pitch,
            100usize,
            10usize,
            3u32
        )
    );
    let (mut free_bytes, mut total) = (0usize, 0usize);
    say!(
        "info",
        "{} {}",
        cu!(cuMemGetInfo_v2, &mut free_bytes, &mut total),
        free_bytes > 0 && free_bytes <= total
    );
    let many: Vec<CUdeviceptr> = (0..500).map(|i| alloc(64 + i * 40)).collect();
    let mut sorted = many.clone();
    sorted.sort_unstable();
    sorted.dedup();
    say!("500 blocks differ", "{}", sorted.len());
    many.into_iter().for_each(free);
}

pub fn copies() {
    const LEN: usize = 9 << 20;
    let source: Vec<u8> = (0..LEN).map(|i| (i * 7 + i / 251) as u8).collect();
    let (a, b) = (alloc(LEN), alloc(LEN));
    for len in [
        1usize,
        3,
        4,
        1000,
        4096,
        4097,
        65_536,
        65_537,
        1 << 20,
        (4 << 20) + 5,
        LEN,
    ] {
        let mut back = vec![0u8; len];
        must!(cuMemsetD8_v2, a, 0u8, LEN);
        must!(cuMemcpyHtoD_v2, a, source.as_ptr(), len);
        must!(cuMemcpyDtoD_v2, b, a, len);
        must!(cuMemcpyDtoH_v2, back.as_mut_ptr(), b, len);
        say!(
            format!("round trip of {len} bytes"),
            "{}",
            back == source[..len]
        );
    }
    let mut back = vec![0u8; 1000];
    must!(cuMemcpyHtoD_v2, a, source.as_ptr(), LEN);
    must!(cuMemcpyDtoH_v2, back.as_mut_ptr(), a + 12_345, 1000usize);
    say!("from the middle", "{}", back == source[12_345..13_345]);
    must!(cuMemcpyHtoD_v2, a + 7, source.as_ptr(), 100usize);
    must!(cuMemcpyDtoH_v2, back.as_mut_ptr(), a, 200usize);
    say!(
        "into the middle",
        "{}",
        back[7..107] == source[..100] && back[..7] == source[..7]
    );
    let (host, device) = (back.as_mut_ptr() as u64, a);
    must!(cuMemcpy, host, device, 1000usize);
    must!(cuMemcpy, b, host, 1000usize);
    let mut again = vec![0u8; 1000];
    must!(cuMemcpy, again.as_mut_ptr() as u64, b, 1000usize);
    say!("cuMemcpy", "{}", again == back);
    say!(
        "copy of 0 bytes",
        "{}",
        cu!(cuMemcpyHtoD_v2, a, source.as_ptr(), 0usize)
    );
    say!(
        "copy beyond the block",
        "{}",
        cu!(cuMemcpyHtoD_v2, 16u64, source.as_ptr(), 16usize)
    );
    say!(
        "copy to NULL",
        "{}",
        cu!(cuMemcpyHtoD_v2, 0u64, source.as_ptr(), 16usize)
    );
    let memset = |what: &str, result: CUresult| {
        let mut bytes = vec![0u8; 256];
        must!(cuMemcpyDtoH_v2, bytes.as_mut_ptr(), a, 256usize);
        say!(what, "{result} {:016x}", checksum(&bytes));
    };
    memset("memset D8", cu!(cuMemsetD8_v2, a, 0x5au8, 256usize));
    memset("memset D16", cu!(cuMemsetD16_v2, a, 0x1234u16, 100usize));
    memset(
        "memset D32",
        cu!(cuMemsetD32_v2, a, 0xdead_beefu32, 50usize),
    );
    memset(
        "memset D2D8",
        cu!(cuMemsetD2D8_v2, a, 32usize, 7u8, 10usize, 8usize),
    );
    memset(
        "memset D2D32",
        cu!(cuMemsetD2D32_v2, a, 64usize, 9u32, 5usize, 4usize),
    );
    say!(
        "memset D32 unaligned",
        "{}",
        cu!(cuMemsetD32_v2, a + 2, 1u32, 4usize)
    );
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    let mut small = vec![1u8; 3000];
    must!(cuMemcpyHtoDAsync_v2, a, small.as_ptr(), 3000usize, stream);
    // Pageable memory up to 64 KiB is taken before the call returns.
    small.fill(2);
    must!(cuMemsetD8Async, a + 3000, 3u8, 1000usize, stream);
    must!(cuMemcpyDtoDAsync_v2, b, a, 4000usize, stream);
    let mut back = vec![0u8; 4000];
    must!(
        cuMemcpyDtoHAsync_v2,
        back.as_mut_ptr(),
        b,
        4000usize,
        stream
    );
    must!(cuStreamSynchronize, stream);
    say!(
        "async chain",
        "{}",
        back[..3000].iter().all(|b| *b == 1) && back[3000..].iter().all(|b| *b == 3)
    );
    must!(cuStreamDestroy_v2, stream);
    free(a);
    free(b);
}

pub fn host_memory(setup: &Setup) {
    let mut pinned: *mut i32 = null_mut();
    must!(
        cuMemHostAlloc,
        &mut pinned,
        1usize << 20,
        CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE
    );
    let mut device: CUdeviceptr = 0;
    say!(
        "device pointer",
        "{} same {}",
        cu!(cuMemHostGetDevicePointer_v2, &mut device, pinned, 0u32),
        device == pinned as u64
    );
    let mut kind = 0u32;
    say!(
        "type of pinned memory",
        "{} {kind}",
        cu!(
            cuPointerGetAttribute,
            &mut kind,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            pinned as u64
        )
    );
    let mut flags = 0u32;
    say!(
        "flags",
        "{} {flags}",
        cu!(cuMemHostGetFlags, &mut flags, pinned)
    );
    must!(cuStreamSynchronize, CUstream::NULL);
    assert!(setup.store_index(device, 1000, 3, CUstream::NULL).is_ok());
    must!(cuCtxSynchronize);
    // SAFETY: 1 MiB was allocated, the kernel is done.
    let values = unsafe { std::slice::from_raw_parts_mut(pinned, 1000) };
    say!(
        "kernel wrote to pinned memory",
        "{}",
        values.iter().enumerate().all(|(i, v)| *v == i as i32 * 3)
    );
    let block = alloc(1 << 20);
    must!(
        cuMemcpyHtoDAsync_v2,
        block,
        pinned,
        1usize << 20,
        CUstream::NULL
    );
    must!(cuStreamSynchronize, CUstream::NULL);
    values.fill(0);
    must!(cuMemcpyDtoH_v2, pinned, block, 4000usize);
    say!(
        "pinned round trip",
        "{}",
        values.iter().enumerate().all(|(i, v)| *v == i as i32 * 3)
    );
    say!("free", "{}", cu!(cuMemFreeHost, pinned));
    let mut local = 0u64;
    say!(
        "free of a stack pointer",
        "{}",
        cu!(cuMemFreeHost, &raw mut local)
    );
    let small: Vec<*mut u8> = (0..20)
        .map(|i| {
            let mut pointer: *mut u8 = null_mut();
            must!(cuMemAllocHost_v2, &mut pointer, 100usize + i * 999);
            pointer
        })
        .collect();
    for (i, pointer) in small.iter().enumerate() {
        // SAFETY: at least 100 bytes were allocated.
        unsafe { pointer.write_bytes(i as u8, 100) };
    }
    let intact = small.iter().enumerate().all(|(i, pointer)| {
        // SAFETY: as above.
        let last = unsafe { pointer.add(99).read() };
        last == i as u8
    });
    say!("20 small blocks", "{intact}");
    for pointer in small {
        must!(cuMemFreeHost, pointer);
    }
    // Registration of the program's own pages.
    let len = 1usize << 20;
    // SAFETY: an anonymous mapping at a place the kernel chooses.
    let pages = unsafe {
        libc::mmap(
            null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    let values = pages.cast::<i32>();
    // SAFETY: the mapping has `len` bytes.
    unsafe { values.write(41) };
    say!(
        "register",
        "{}",
        cu!(
            cuMemHostRegister_v2,
            pages,
            len,
            CU_MEMHOSTREGISTER_DEVICEMAP
        )
    );
    say!(
        "register again",
        "{}",
        cu!(
            cuMemHostRegister_v2,
            pages,
            len,
            CU_MEMHOSTREGISTER_DEVICEMAP
        )
    );
    must!(cuMemHostGetDevicePointer_v2, &mut device, pages, 0u32);
    // SAFETY: as above.
    say!("content survived", "{}", unsafe { values.read() });
    assert!(setup.store_index(device, 100, 5, CUstream::NULL).is_ok());
    must!(cuCtxSynchronize);
    // SAFETY: as above; the kernel is done.
    say!("kernel wrote to registered memory", "{}", unsafe {
        values.add(99).read()
    });
    say!("unregister", "{}", cu!(cuMemHostUnregister, pages));
    say!("unregister again", "{}", cu!(cuMemHostUnregister, pages));
    // SAFETY: as above.
    say!("content after", "{}", unsafe { values.add(99).read() });
    free(block);
}
