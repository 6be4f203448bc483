//! Reservations, physical allocations, mappings, and their exchange by descriptor.

use super::*;
use std::os::fd::{FromRawFd, OwnedFd};

/// Where the device's memory lies.
fn on_device(setup: &Setup) -> CUmemLocation {
    CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: setup.device,
    }
}

fn properties(setup: &Setup) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: on_device(setup),
        ..CUmemAllocationProp::default()
    }
}

fn access(setup: &Setup) -> CUmemAccessDesc {
    CUmemAccessDesc {
        location: on_device(setup),
        flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    }
}

fn attribute(which: CUpointer_attribute, address: u64) -> String {
    let mut value = 0u64;
    let status = cu!(cuPointerGetAttribute, &mut value, which, address);
    if status.is_ok() {
        format!("{value}")
    } else {
        format!("{status}")
    }
}

pub fn virtual_memory(setup: &Setup) {
    let props = properties(setup);
    let (mut unit, mut recommended) = (0usize, 0usize);
    say!(
        "granularity",
        "{} {}",
        cu!(cuMemGetAllocationGranularity, &mut unit, &props, 0u32),
        unit.is_power_of_two()
    );
    say!(
        "recommended granularity",
        "{} {}",
        cu!(
            cuMemGetAllocationGranularity,
            &mut recommended,
            &props,
            1u32
        ),
        recommended >= unit
    );
    say!(
        "granularity of nothing",
        "{}",
        cu!(
            cuMemGetAllocationGranularity,
            &mut unit,
            null::<CUmemAllocationProp>(),
            0u32
        )
    );
    say!(
        "granularity, option 7",
        "{}",
        cu!(
            cuMemGetAllocationGranularity,
            &mut recommended,
            &props,
            7u32
        )
    );
    let nowhere = CUmemAllocationProp {
        location: CUmemLocation {
            id: 99,
            ..on_device(setup)
        },
        ..props
    };
    say!(
        "granularity on device 99",
        "{}",
        cu!(
            cuMemGetAllocationGranularity,
            &mut recommended,
            &nowhere,
            0u32
        )
    );

    println!("-- reservations");
    let mut at = 0u64;
    let flags = 0u64;
    let reserve = |at: &mut u64, len: usize, alignment: usize| {
        cu!(cuMemAddressReserve, at, len, alignment, 0u64, flags)
    };
    say!("reserve 0 bytes", "{}", reserve(&mut at, 0, 0));
    say!("reserve half a unit", "{}", reserve(&mut at, unit / 2, 0));
    say!("reserve at odd alignment", "{}", reserve(&mut at, unit, 3));
    say!(
        "reserve with flags",
        "{}",
        cu!(cuMemAddressReserve, &mut at, unit, 0usize, 0u64, 8u64)
    );
    say!(
        "reserve without a place for the answer",
        "{}",
        cu!(
            cuMemAddressReserve,
            null_mut::<u64>(),
            unit,
            0usize,
            0u64,
            flags
        )
    );
    say!("reserve 16 units", "{}", reserve(&mut at, 16 * unit, 0));
    let mut aligned = 0u64;
    say!(
        "reserve aligned to 1 GiB",
        "{} {}",
        reserve(&mut aligned, unit, 1 << 30),
        aligned.is_multiple_of(1 << 30)
    );
    say!("free it", "{}", cu!(cuMemAddressFree, aligned, unit));
    say!("free it again", "{}", cu!(cuMemAddressFree, aligned, unit));
    let mut far = 0u64;
    say!("reserve 512 GiB", "{}", reserve(&mut far, 512 << 30, 0));
    say!(
        "free half of it",
        "{}",
        cu!(cuMemAddressFree, far, 256usize << 30)
    );
    say!("free it", "{}", cu!(cuMemAddressFree, far, 512usize << 30));

    println!("-- allocations");
    let create = |len: usize, props: &CUmemAllocationProp, flags: u64| {
        let mut handle = CUmemGenericAllocationHandle::NULL;
        (cu!(cuMemCreate, &mut handle, len, props, flags), handle)
    };
    say!("create 0 bytes", "{}", create(0, &props, 0).0);
    say!("create half a unit", "{}", create(unit / 2, &props, 0).0);
    say!("create with flags", "{}", create(unit, &props, 1).0);
    say!("create on device 99", "{}", create(unit, &nowhere, 0).0);
    let wrong = CUmemAllocationProp { kind: 0, ..props };
    say!("create of no type", "{}", create(unit, &wrong, 0).0);
    say!("create too much", "{}", create(1 << 46, &props, 0).0);
    let (status, first) = create(2 * unit, &props, 0);
    say!("create 2 units", "{status}");
    let (status, second) = create(4 * unit, &props, 0);
    say!("create 4 units", "{status} differs {}", first != second);
    let mut found = CUmemAllocationProp::default();
    say!(
        "properties",
        "{} type {} handles {} location {} {}",
        cu!(cuMemGetAllocationPropertiesFromHandle, &mut found, first),
        found.kind,
        found.requested_handle_types,
        found.location.kind,
        found.location.id == setup.device
    );
    let none = CUmemGenericAllocationHandle::NULL;
    say!(
        "properties of no handle",
        "{}",
        cu!(cuMemGetAllocationPropertiesFromHandle, &mut found, none)
    );
    say!("release of no handle", "{}", cu!(cuMemRelease, none));

    println!("-- mappings");
    let map = |to: u64, len: usize, offset: usize, handle, flags: u64| {
        cu!(cuMemMap, to, len, offset, handle, flags)
    };
    say!("map with flags", "{}", map(at, 2 * unit, 0, first, 1));
    say!("map with an offset", "{}", map(at, unit, unit, first, 0));
    say!("map too much", "{}", map(at, 4 * unit, 0, first, 0));
    say!("map part", "{}", map(at, unit, 0, first, 0));
    // A mapping of a part, where a driver takes one, is in the way of the next.
    let _ = cu!(cuMemUnmap, at, unit);
    let size = unit as u64;
    say!(
        "map at half a unit",
        "{}",
        map(at + size / 2, 2 * unit, 0, first, 0)
    );
    say!("map no handle", "{}", map(at, 2 * unit, 0, none, 0));
    say!(
        "map before the reservation",
        "{}",
        map(at - size, 2 * unit, 0, first, 0)
    );
    // A driver that takes a mapping which only ends beyond the reservation does so unseen by others' memory: ours
    // does not. What nobody reserved is nobody's.
    say!(
        "map far beyond the reservation",
        "{}",
        map(at + (1 << 41), 2 * unit, 0, first, 0)
    );
    say!("map 2 units", "{}", map(at, 2 * unit, 0, first, 0));
    say!("map there again", "{}", map(at, 4 * unit, 0, second, 0));
    say!(
        "map behind",
        "{}",
        map(at + 2 * size, 4 * unit, 0, second, 0)
    );
    say!(
        "map elsewhere too",
        "{}",
        map(at + 8 * size, 2 * unit, 0, first, 0)
    );
    let mut flags = 77u64;
    let here = on_device(setup);
    say!(
        "access before it is given",
        "{} {flags}",
        cu!(cuMemGetAccess, &mut flags, &here, at)
    );
    say!(
        "memset without access",
        "{}",
        cu!(cuMemsetD8_v2, at, 1u8, 16usize)
    );
    let give =
        |to: u64, len: usize, count: usize| cu!(cuMemSetAccess, to, len, &access(setup), count);
    say!("access for nobody", "{}", give(at, 2 * unit, 0));
    say!("access to 0 bytes", "{}", give(at, 0, 1));
    say!("access beyond the mappings", "{}", give(at, 7 * unit, 1));
    say!("access to half a mapping", "{}", give(at, unit, 1));
    say!("access to the first", "{}", give(at, 2 * unit, 1));
    say!("access to both", "{}", give(at, 6 * unit, 1));
    say!(
        "access to the second view",
        "{}",
        give(at + 8 * size, 2 * unit, 1)
    );
    say!(
        "access",
        "{} {flags}",
        cu!(cuMemGetAccess, &mut flags, &here, at + size + 5)
    );
    say!(
        "access to nothing mapped",
        "{} {flags}",
        cu!(cuMemGetAccess, &mut flags, &here, at + 12 * size)
    );

    println!("-- use");
    let across = at + 2 * size - 400;
    must!(cuMemsetD8_v2, at, 0u8, 6 * unit);
    say!(
        "kernel",
        "{}",
        setup.store_index(across, 200, 3, CUstream::NULL)
    );
    let values = read_i32(across, 200);
    say!(
        "across two mappings",
        "{}",
        (0..200).all(|i| values[i as usize] == i * 3)
    );
    let words: Vec<i32> = (0..1000).collect();
    must!(cuMemcpyHtoD_v2, at, words.as_ptr(), 4000usize);
    say!(
        "the second view",
        "{}",
        read_i32(at + 8 * size, 1000) == words
    );
    say!(
        "copy beyond",
        "{}",
        cu!(cuMemcpyHtoD_v2, at + 6 * size - 8, words.as_ptr(), 16usize)
    );
    let (mut start, mut len) = (0u64, 0usize);
    let status = cu!(cuMemGetAddressRange_v2, &mut start, &mut len, at + 3 * size);
    say!(
        "address range",
        "{status} start {} len {}",
        start.wrapping_sub(at) / size,
        len / unit
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
        ("pool", CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE),
        ("host pointer", CU_POINTER_ATTRIBUTE_HOST_POINTER),
    ] {
        say!(name, "{}", attribute(which, at + 3 * size));
    }
    for (name, which) in [
        ("range start", CU_POINTER_ATTRIBUTE_RANGE_START_ADDR),
        ("mapping start", CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR),
        ("device pointer", CU_POINTER_ATTRIBUTE_DEVICE_POINTER),
    ] {
        let mut value = 0u64;
        let status = cu!(cuPointerGetAttribute, &mut value, which, at + 3 * size);
        say!(name, "{status} {}", value.wrapping_sub(at) / size);
    }
    for (name, which) in [
        ("range size", CU_POINTER_ATTRIBUTE_RANGE_SIZE),
        ("mapping size", CU_POINTER_ATTRIBUTE_MAPPING_SIZE),
    ] {
        let mut value = 0u64;
        let status = cu!(cuPointerGetAttribute, &mut value, which, at + 3 * size);
        say!(name, "{status} {}", value / size);
    }
    let mut context = 0u64;
    let status = cu!(
        cuPointerGetAttribute,
        &mut context,
        CU_POINTER_ATTRIBUTE_CONTEXT,
        at
    );
    say!("context", "{status} none {}", context == 0);
    say!(
        "reserved and not mapped: type",
        "{}",
        attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at + 12 * size)
    );
    say!(
        "reserved and not mapped: mapped",
        "{}",
        attribute(CU_POINTER_ATTRIBUTE_MAPPED, at + 12 * size)
    );
    say!("cuMemFree of a mapping", "{}", cu!(cuMemFree_v2, at));

    println!("-- handles");
    let mut retained = CUmemGenericAllocationHandle::NULL;
    say!(
        "retain",
        "{} same {}",
        cu!(cuMemRetainAllocationHandle, &mut retained, at + 5),
        retained == first
    );
    say!("release", "{}", cu!(cuMemRelease, first));
    say!(
        "release what was retained",
        "{}",
        cu!(cuMemRelease, retained)
    );
    must!(cuMemsetD8_v2, at, 9u8, 2 * unit);
    say!(
        "memory without a handle",
        "{}",
        read_i32(at, 1)[0] == 0x0909_0909
    );
    say!(
        "retain anew",
        "{}",
        cu!(cuMemRetainAllocationHandle, &mut retained, at)
    );
    say!("release it", "{}", cu!(cuMemRelease, retained));
    say!(
        "retain of nothing mapped",
        "{}",
        cu!(cuMemRetainAllocationHandle, &mut retained, at + 12 * size)
    );

    println!("-- export and import");
    let mut fd = -1 as c_int;
    say!(
        "export",
        "{} {}",
        cu!(
            cuMemExportToShareableHandle,
            &mut fd,
            second,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            0u64
        ),
        fd >= 0
    );
    let mut other = -1 as c_int;
    say!(
        "export with flags",
        "{}",
        cu!(
            cuMemExportToShareableHandle,
            &mut other,
            second,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            1u64
        )
    );
    say!(
        "export of type 0",
        "{}",
        cu!(cuMemExportToShareableHandle, &mut other, second, 0u32, 0u64)
    );
    let mut imported = CUmemGenericAllocationHandle::NULL;
    say!(
        "import",
        "{}",
        cu!(
            cuMemImportFromShareableHandle,
            &mut imported,
            fd as usize as *mut c_void,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
    );
    let found_status = cu!(cuMemGetAllocationPropertiesFromHandle, &mut found, imported);
    say!(
        "properties of the import",
        "{found_status} type {} handles {} location {}",
        found.kind,
        found.requested_handle_types,
        found.location.kind
    );
    say!(
        "map it",
        "{}",
        map(at + 10 * size, 4 * unit, 0, imported, 0)
    );
    say!("access to it", "{}", give(at + 10 * size, 4 * unit, 1));
    must!(cuMemsetD32_v2, at + 2 * size, 41u32, 10usize);
    say!("same memory", "{:?}", read_i32(at + 10 * size, 2));
    // SAFETY: the descriptor is ours.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    say!(
        "import of a closed descriptor",
        "{}",
        cu!(
            cuMemImportFromShareableHandle,
            &mut retained,
            4000usize as *mut c_void,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
    );
    let file = std::fs::File::open("/dev/null").expect("/dev/null");
    let raw = std::os::fd::AsRawFd::as_raw_fd(&file);
    say!(
        "import of a file",
        "{}",
        cu!(
            cuMemImportFromShareableHandle,
            &mut retained,
            raw as usize as *mut c_void,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
    );
    let private = CUmemAllocationProp {
        requested_handle_types: CU_MEM_HANDLE_TYPE_NONE,
        ..props
    };
    let (status, unshared) = create(unit, &private, 0);
    say!("create without handle types", "{status}");
    say!(
        "export of it",
        "{}",
        cu!(
            cuMemExportToShareableHandle,
            &mut other,
            unshared,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            0u64
        )
    );
    must!(cuMemRelease, unshared);

    println!("-- the end");
    say!(
        "free of a reservation in use",
        "{}",
        cu!(cuMemAddressFree, at, 16 * unit)
    );
    say!("unmap half", "{}", cu!(cuMemUnmap, at, unit));
    say!(
        "unmap what is not mapped",
        "{}",
        cu!(cuMemUnmap, at + 6 * size, unit)
    );
    say!("unmap two mappings", "{}", cu!(cuMemUnmap, at, 6 * unit));
    say!("unmap them again", "{}", cu!(cuMemUnmap, at, 6 * unit));
    say!(
        "memset of what was unmapped",
        "{}",
        cu!(cuMemsetD8_v2, at, 1u8, 16usize)
    );
    say!(
        "unmap the second view",
        "{}",
        cu!(cuMemUnmap, at + 8 * size, 2 * unit)
    );
    say!(
        "unmap the import",
        "{}",
        cu!(cuMemUnmap, at + 10 * size, 4 * unit)
    );
    say!("map again", "{}", map(at, 4 * unit, 0, second, 0));
    say!("access again", "{}", give(at, 4 * unit, 1));
    say!("its content", "{:?}", read_i32(at, 2));
    must!(cuMemUnmap, at, 4 * unit);
    say!("release", "{}", cu!(cuMemRelease, second));
    say!("release the import", "{}", cu!(cuMemRelease, imported));
    say!(
        "free the reservation",
        "{}",
        cu!(cuMemAddressFree, at, 16 * unit)
    );
}
