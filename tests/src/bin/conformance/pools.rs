//! Stream-ordered allocation and memory pools.

use super::*;

fn number(pool: CUmemoryPool, attribute: u32) -> String {
    let mut value = 0u64;
    let status = cu!(cuMemPoolGetAttribute, pool, attribute, &mut value);
    if status.is_ok() {
        format!("{value}")
    } else {
        format!("{status}")
    }
}

pub fn pools(setup: &Setup) {
    let here = CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: setup.device,
    };
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    let mut at = 0u64;
    println!("-- the device's pool");
    let (mut default, mut current) = (CUmemoryPool::NULL, CUmemoryPool::NULL);
    say!(
        "default pool",
        "{}",
        cu!(cuDeviceGetDefaultMemPool, &mut default, setup.device)
    );
    say!(
        "current pool",
        "{} default {}",
        cu!(cuDeviceGetMemPool, &mut current, setup.device),
        current == default
    );
    say!(
        "pool of device 99",
        "{}",
        cu!(cuDeviceGetDefaultMemPool, &mut current, 99 as c_int)
    );
    say!(
        "default pool of a location",
        "{} same {}",
        cu!(
            cuMemGetDefaultMemPool,
            &mut current,
            &here,
            CU_MEM_ALLOCATION_TYPE_PINNED
        ),
        current == default
    );
    say!(
        "pool of a location",
        "{} same {}",
        cu!(
            cuMemGetMemPool,
            &mut current,
            &here,
            CU_MEM_ALLOCATION_TYPE_PINNED
        ),
        current == default
    );
    say!(
        "destroy of the default pool",
        "{}",
        cu!(cuMemPoolDestroy, default)
    );
    for (name, which) in [
        (
            "follow events",
            CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
        ),
        ("opportunistic", CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC),
        (
            "internal dependencies",
            CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
        ),
        ("threshold", CU_MEMPOOL_ATTR_RELEASE_THRESHOLD),
        ("used", CU_MEMPOOL_ATTR_USED_MEM_CURRENT),
        ("attribute 77", 77),
    ] {
        say!(name, "{}", number(default, which));
    }
    println!("-- allocation");
    say!(
        "alloc 0 bytes",
        "{}",
        cu!(cuMemAllocAsync, &mut at, 0usize, stream)
    );
    say!(
        "alloc without a place",
        "{}",
        cu!(cuMemAllocAsync, null_mut::<u64>(), 16usize, stream)
    );
    say!(
        "alloc too much",
        "{}",
        cu!(cuMemAllocAsync, &mut at, 1usize << 46, stream)
    );
    say!(
        "alloc",
        "{}",
        cu!(cuMemAllocAsync, &mut at, 4000usize, stream)
    );
    say!("alignment", "{}", at.is_multiple_of(256));
    say!("kernel", "{}", setup.store_index(at, 1000, 2, stream));
    let mut second = 0u64;
    say!(
        "alloc on NULL",
        "{}",
        cu!(cuMemAllocAsync, &mut second, 1usize << 20, CUstream::NULL)
    );
    say!("differs", "{}", at != second);
    must!(cuStreamSynchronize, CUstream::NULL);
    must!(cuMemcpyDtoDAsync_v2, second, at, 4000usize, stream);
    let mut values = vec![0i32; 1000];
    must!(
        cuMemcpyDtoHAsync_v2,
        values.as_mut_ptr(),
        second,
        4000usize,
        stream
    );
    must!(cuStreamSynchronize, stream);
    say!(
        "content",
        "{}",
        (0..1000).all(|i| values[i as usize] == 2 * i)
    );
    say!(
        "used",
        "{}",
        number(default, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) != "0"
    );
    for (name, which) in [
        ("memory type", CU_POINTER_ATTRIBUTE_MEMORY_TYPE),
        ("managed", CU_POINTER_ATTRIBUTE_IS_MANAGED),
        ("ordinal", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL),
        (
            "legacy IPC",
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        ),
        ("mapped", CU_POINTER_ATTRIBUTE_MAPPED),
        ("handle types", CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES),
        ("access flags", CU_POINTER_ATTRIBUTE_ACCESS_FLAGS),
    ] {
        let mut value = 0u64;
        let status = cu!(cuPointerGetAttribute, &mut value, which, at + 8);
        say!(name, "{status} {value}");
    }
    let mut owner = CUmemoryPool::NULL;
    let status = cu!(
        cuPointerGetAttribute,
        &mut owner,
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        at
    );
    say!("its pool", "{status} default {}", owner == default);
    let mut context = 0u64;
    let status = cu!(
        cuPointerGetAttribute,
        &mut context,
        CU_POINTER_ATTRIBUTE_CONTEXT,
        at
    );
    say!("its context", "{status} none {}", context == 0);
    let (mut start, mut len) = (0u64, 0usize);
    let status = cu!(cuMemGetAddressRange_v2, &mut start, &mut len, at + 100);
    say!("address range", "{status} {} {}", start == at, len);
    println!("-- free");
    say!("free of NULL", "{}", cu!(cuMemFreeAsync, 0u64, stream));
    say!(
        "free of a stack pointer",
        "{}",
        cu!(cuMemFreeAsync, &raw mut at as u64, stream)
    );
    say!(
        "free of the interior",
        "{}",
        cu!(cuMemFreeAsync, at + 256, stream)
    );
    let local = at;
    say!("free", "{}", cu!(cuMemFreeAsync, at, stream));
    say!("free again", "{}", cu!(cuMemFreeAsync, at, stream));
    say!(
        "alloc",
        "{}",
        cu!(cuMemAllocAsync, &mut at, 4000usize, stream)
    );
    say!("same address in the same stream", "{}", at == local);
    say!("cuMemFree of it", "{}", cu!(cuMemFree_v2, at));
    say!("cuMemFree again", "{}", cu!(cuMemFree_v2, at));
    say!(
        "free the other",
        "{}",
        cu!(cuMemFreeAsync, second, CUstream::NULL)
    );
    let block = alloc(1000);
    say!(
        "cuMemFreeAsync of cuMemAlloc",
        "{}",
        cu!(cuMemFreeAsync, block, stream)
    );
    must!(cuStreamSynchronize, stream);
    must!(cuCtxSynchronize);
    println!("-- pools of one's own");
    let props = CUmemPoolProps {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: here,
        ..CUmemPoolProps::default()
    };
    let create = |props: &CUmemPoolProps| {
        let mut pool = CUmemoryPool::NULL;
        (cu!(cuMemPoolCreate, &mut pool, props), pool)
    };
    say!(
        "create of no type",
        "{}",
        create(&CUmemPoolProps { kind: 0, ..props }).0
    );
    let nowhere = CUmemLocation { id: 99, ..here };
    say!(
        "create on device 99",
        "{}",
        create(&CUmemPoolProps {
            location: nowhere,
            ..props
        })
        .0
    );
    say!(
        "create of nothing",
        "{}",
        cu!(cuMemPoolCreate, &mut current, null::<CUmemPoolProps>())
    );
    let (status, pool) = create(&props);
    say!("create", "{status} default {}", pool == default);
    let mut threshold = 1u64 << 30;
    say!(
        "set threshold",
        "{}",
        cu!(
            cuMemPoolSetAttribute,
            pool,
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            &mut threshold
        )
    );
    say!(
        "threshold",
        "{}",
        number(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
    );
    let mut off = 0 as c_int;
    say!(
        "set opportunistic",
        "{}",
        cu!(
            cuMemPoolSetAttribute,
            pool,
            CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
            &mut off
        )
    );
    say!(
        "opportunistic",
        "{}",
        number(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC)
    );
    say!(
        "set used to 1",
        "{}",
        cu!(
            cuMemPoolSetAttribute,
            pool,
            CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            &mut threshold
        )
    );
    say!(
        "set attribute 77",
        "{}",
        cu!(cuMemPoolSetAttribute, pool, 77u32, &mut threshold)
    );
    let mut flags = 77u32;
    say!(
        "access",
        "{} {flags}",
        cu!(cuMemPoolGetAccess, &mut flags, pool, &here)
    );
    let mut desc = CUmemAccessDesc {
        location: here,
        flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    say!(
        "set access",
        "{}",
        cu!(cuMemPoolSetAccess, pool, &desc, 1usize)
    );
    desc.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    say!(
        "take the owner's access",
        "{}",
        cu!(cuMemPoolSetAccess, pool, &desc, 1usize)
    );
    desc.location.id = 99;
    say!(
        "set access of device 99",
        "{}",
        cu!(cuMemPoolSetAccess, pool, &desc, 1usize)
    );
    say!(
        "alloc from it",
        "{}",
        cu!(cuMemAllocFromPoolAsync, &mut at, 5000usize, pool, stream)
    );
    say!(
        "alloc from no pool",
        "{}",
        cu!(
            cuMemAllocFromPoolAsync,
            &mut second,
            5000usize,
            CUmemoryPool::NULL,
            stream
        )
    );
    say!("used", "{}", number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
    say!(
        "most used",
        "{}",
        number(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    );
    let mut zero = 0u64;
    say!(
        "reset most used",
        "{} {}",
        cu!(
            cuMemPoolSetAttribute,
            pool,
            CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            &mut zero
        ),
        number(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    );
    say!("kernel", "{}", setup.store_index(at, 1000, 7, stream));

    println!("-- the current pool");
    say!("set", "{}", cu!(cuDeviceSetMemPool, setup.device, pool));
    say!(
        "set to none",
        "{}",
        cu!(cuDeviceSetMemPool, setup.device, CUmemoryPool::NULL)
    );
    say!(
        "is it",
        "{} {}",
        cu!(cuDeviceGetMemPool, &mut current, setup.device),
        current == pool
    );
    must!(cuMemAllocAsync, &mut second, 100usize, stream);
    let status = cu!(
        cuPointerGetAttribute,
        &mut owner,
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        second
    );
    say!("alloc from it", "{status} {}", owner == pool);
    say!(
        "set by location",
        "{}",
        cu!(
            cuMemSetMemPool,
            &here,
            CU_MEM_ALLOCATION_TYPE_PINNED,
            default
        )
    );
    say!(
        "is it",
        "{} {}",
        cu!(cuDeviceGetMemPool, &mut current, setup.device),
        current == default
    );
    must!(cuMemFreeAsync, second, stream);
    must!(cuMemFreeAsync, at, stream);
    must!(cuStreamSynchronize, stream);
    say!("trim", "{}", cu!(cuMemPoolTrimTo, pool, 0usize));
    say!(
        "reserved",
        "{}",
        number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    );
    say!("destroy", "{}", cu!(cuMemPoolDestroy, pool));
    must!(cuStreamDestroy_v2, stream);
}

/// Handles that are none: the genuine driver may look at what they point to.
pub fn pools_destroyed(_: &Setup) {
    let mut pool = CUmemoryPool::NULL;
    let none = CUmemoryPool::NULL;
    say!("destroy of none", "{}", cu!(cuMemPoolDestroy, none));
    say!("trim of none", "{}", cu!(cuMemPoolTrimTo, none, 0usize));
    say!(
        "attribute of none",
        "{}",
        number(none, CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    );
    say!(
        "default pool without a place",
        "{}",
        cu!(
            cuDeviceGetDefaultMemPool,
            null_mut::<CUmemoryPool>(),
            0 as c_int
        )
    );
    let host = CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_INVALID,
        id: 0,
    };
    say!(
        "pool of no location",
        "{}",
        cu!(
            cuMemGetDefaultMemPool,
            &mut pool,
            &host,
            CU_MEM_ALLOCATION_TYPE_PINNED
        )
    );
}
