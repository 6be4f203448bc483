//! Memory shared between processes, memory registered from files, batches of copies, pointers' own attributes.

use super::*;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What the other process does: opens the handle, looks, writes, closes. Its lines are printed between ours.
fn in_another_process(what: &str, handle: &[u8; 64]) {
    let program = std::env::current_exe().expect("a path");
    let done = Command::new(program)
        .args([what, &hex(handle)])
        .stderr(Stdio::inherit())
        .output()
        .expect("another process");
    print!("{}", String::from_utf8_lossy(&done.stdout));
}

/// `conformance --open HANDLE`.
pub fn open(text: &str) {
    let setup = Setup::new();
    let mut handle = CUipcMemHandle([0; 64]);
    for (i, byte) in handle.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hex");
    }
    let mut at = 0u64;
    let status = cu!(
        cuIpcOpenMemHandle_v2,
        &mut at,
        handle,
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    );
    say!("  open", "{status}");
    if !status.is_ok() {
        return;
    }
    let mut again = 0u64;
    let status = cu!(
        cuIpcOpenMemHandle_v2,
        &mut again,
        handle,
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    );
    say!("  open again", "{status} same {}", again == at);
    say!("  content", "{:?}", read_i32(at, 3));
    let (mut start, mut len) = (0u64, 0usize);
    let result = cu!(cuMemGetAddressRange_v2, &mut start, &mut len, at + 5);
    say!("  address range", "{result} {} {len}", start == at);
    for (name, which) in [
        ("  memory type", CU_POINTER_ATTRIBUTE_MEMORY_TYPE),
        ("  ordinal", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL),
        (
            "  legacy IPC",
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        ),
    ] {
        let mut value = 0u64;
        let status = cu!(cuPointerGetAttribute, &mut value, which, at);
        say!(name, "{status} {}", value as u32);
    }
    let mut own = CUipcMemHandle([0; 64]);
    say!("  handle of it", "{}", cu!(cuIpcGetMemHandle, &mut own, at));
    say!(
        "  kernel",
        "{}",
        setup.store_index(at, 1000, 9, CUstream::NULL)
    );
    say!("  cuMemFree of it", "{}", cu!(cuMemFree_v2, at));
    must!(cuCtxSynchronize);
    say!("  close", "{}", cu!(cuIpcCloseMemHandle, at));
    say!("  close again", "{}", cu!(cuIpcCloseMemHandle, at));
    say!("  close once more", "{}", cu!(cuIpcCloseMemHandle, at));
}

pub fn ipc_memory(setup: &Setup) {
    let block = alloc(3 << 20);
    let small = alloc(4000);
    assert!(setup.store_index(small, 1000, 1, CUstream::NULL).is_ok());
    must!(cuCtxSynchronize);
    let mut handle = CUipcMemHandle([0; 64]);
    say!(
        "handle of NULL",
        "{}",
        cu!(cuIpcGetMemHandle, &mut handle, 0u64)
    );
    let mut local = 0u64;
    say!(
        "handle of a stack pointer",
        "{}",
        cu!(cuIpcGetMemHandle, &mut handle, &raw mut local as u64)
    );
    say!(
        "handle without a place",
        "{}",
        cu!(cuIpcGetMemHandle, null_mut::<CUipcMemHandle>(), small)
    );
    say!("handle", "{}", cu!(cuIpcGetMemHandle, &mut handle, small));
    let first = handle;
    say!(
        "handle again",
        "{} same {}",
        cu!(cuIpcGetMemHandle, &mut handle, small),
        first == handle
    );
    in_another_process("--open", &handle.0);
    say!("what it wrote", "{:?}", read_i32(small, 3));
    must!(cuMemsetD32_v2, block, 5u32, 100usize);
    must!(cuCtxSynchronize);
    say!(
        "handle of the interior",
        "{}",
        cu!(cuIpcGetMemHandle, &mut handle, block + 4096)
    );
    in_another_process("--open", &handle.0);
    say!(
        "open in the same process",
        "{}",
        cu!(
            cuIpcOpenMemHandle_v2,
            &mut local,
            handle,
            CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        )
    );
    say!(
        "open with flags 0",
        "{}",
        cu!(cuIpcOpenMemHandle_v2, &mut local, handle, 0u32)
    );
    say!(
        "open with flags 2",
        "{}",
        cu!(cuIpcOpenMemHandle_v2, &mut local, handle, 2u32)
    );
    say!(
        "close of what is one's own",
        "{}",
        cu!(cuIpcCloseMemHandle, block)
    );
    say!("close of NULL", "{}", cu!(cuIpcCloseMemHandle, 0u64));
    let none = CUipcMemHandle([7; 64]);
    say!(
        "open of no handle",
        "{}",
        cu!(
            cuIpcOpenMemHandle_v2,
            &mut local,
            none,
            CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        )
    );
    let mut managed = 0u64;
    must!(
        cuMemAllocManaged,
        &mut managed,
        4096usize,
        CU_MEM_ATTACH_GLOBAL
    );
    say!(
        "handle of managed memory",
        "{}",
        cu!(cuIpcGetMemHandle, &mut handle, managed)
    );
    free(managed);
    let mut pinned: *mut i32 = null_mut();
    must!(cuMemHostAlloc, &mut pinned, 4096usize, 0u32);
    say!(
        "handle of pinned memory",
        "{}",
        cu!(cuIpcGetMemHandle, &mut handle, pinned as u64)
    );
    must!(cuMemFreeHost, pinned);
    free(block);
    free(small);
}

/// A memory file of `len` bytes, mapped for all to see.
struct Shared {
    file: OwnedFd,
    base: *mut i32,
    len: usize,
}

impl Shared {
    fn new(len: usize, flags: c_int) -> Shared {
        // SAFETY: a name, and a new descriptor that is ours; a mapping wherever the kernel likes.
        unsafe {
            let raw = libc::memfd_create(c"conformance".as_ptr(), libc::MFD_CLOEXEC);
            let file = OwnedFd::from_raw_fd(raw);
            assert_eq!(libc::ftruncate(raw, len as libc::off_t), 0);
            let (flags, raw) = if flags & libc::MAP_ANONYMOUS != 0 {
                (flags, -1)
            } else {
                (flags, raw)
            };
            let base = libc::mmap(
                null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                raw,
                0,
            );
            assert_ne!(base, libc::MAP_FAILED);
            Shared {
                file,
                base: base.cast(),
                len,
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// Variables on the stacks of this thread and of another one.
pub fn registered_stack(setup: &Setup) {
    println!("-- this thread");
    on_stack(setup);
    println!("-- another thread");
    let mut context = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut context);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            must!(cuCtxSetCurrent, context);
            on_stack(setup);
        });
        other.join().expect("the other thread");
    });
}

fn on_stack(setup: &Setup) {
    let mut sum = 0;
    let mut statuses = std::collections::BTreeSet::new();
    for round in 1..=50 {
        let mut values = [round; 8];
        let base = std::hint::black_box(values.as_mut_ptr());
        let mut device = 0u64;
        let mut tell = |status: CUresult| statuses.insert(format!("{status}"));
        tell(cu!(
            cuMemHostRegister_v2,
            base as u64,
            32usize,
            CU_MEMHOSTREGISTER_DEVICEMAP
        ));
        tell(cu!(
            cuMemHostGetDevicePointer_v2,
            &mut device,
            base as u64,
            0u32
        ));
        tell(setup.store_index(device, 7, round, CUstream::NULL));
        tell(cu!(cuCtxSynchronize));
        // SAFETY: the array is there; a kernel wrote it.
        let written = unsafe { base.add(6).read_volatile() };
        // SAFETY: as above; the kernel leaves the last element.
        unsafe { base.add(7).write_volatile(written + 1) };
        tell(cu!(cuMemHostUnregister, base as u64));
        // SAFETY: as above.
        sum += unsafe { base.add(6).read_volatile() + base.add(7).read_volatile() };
    }
    say!("all calls", "{statuses:?}");
    say!("sum", "{sum}");
}

pub fn registered(setup: &Setup) {
    const LEN: usize = 1 << 20;
    for (name, flags) in [
        ("a memory file", libc::MAP_SHARED),
        (
            "shared anonymous memory",
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
        ),
        (
            "private anonymous memory",
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        ),
    ] {
        println!("-- {name}");
        let memory = Shared::new(LEN, flags);
        let base = memory.base as u64;
        // SAFETY: LEN bytes.
        unsafe { (0..1000).for_each(|i| memory.base.add(i).write(i as i32)) };
        let status = cu!(
            cuMemHostRegister_v2,
            base,
            LEN,
            CU_MEMHOSTREGISTER_DEVICEMAP
        );
        say!("register", "{status}");
        if !status.is_ok() {
            continue;
        }
        say!(
            "register again",
            "{}",
            cu!(cuMemHostRegister_v2, base, LEN, 0u32)
        );
        let mut device = 0u64;
        say!(
            "device pointer",
            "{}",
            cu!(cuMemHostGetDevicePointer_v2, &mut device, base, 0u32)
        );
        let mut flags = 0u32;
        say!(
            "flags",
            "{} {flags}",
            cu!(cuMemHostGetFlags, &mut flags, base)
        );
        say!(
            "kernel",
            "{}",
            setup.store_index(device + 4000, 1000, 4, CUstream::NULL)
        );
        must!(cuCtxSynchronize);
        // SAFETY: as above.
        say!("what it wrote", "{}", unsafe {
            memory.base.add(1999).read()
        });
        let block = alloc(LEN);
        must!(cuMemcpyHtoD_v2, block, base as *const i32, LEN);
        say!(
            "to the device",
            "{:?}",
            [read_i32(block, 1)[0], read_i32(block + 7996, 1)[0]]
        );
        must!(cuMemsetD32_v2, block, 6u32, 100usize);
        must!(cuMemcpyDtoH_v2, base as *mut i32, block, 400usize);
        // SAFETY: as above.
        say!("from the device", "{}", unsafe {
            memory.base.add(99).read()
        });
        for (name, which) in [
            ("memory type", CU_POINTER_ATTRIBUTE_MEMORY_TYPE),
            ("managed", CU_POINTER_ATTRIBUTE_IS_MANAGED),
            ("mapped", CU_POINTER_ATTRIBUTE_MAPPED),
            ("range size", CU_POINTER_ATTRIBUTE_RANGE_SIZE),
        ] {
            let mut value = 0u64;
            let status = cu!(cuPointerGetAttribute, &mut value, which, base + 8);
            say!(name, "{status} {value}");
        }
        say!(
            "unregister the interior",
            "{}",
            cu!(cuMemHostUnregister, base + 4096)
        );
        say!("free it", "{}", cu!(cuMemFreeHost, base));
        say!("unregister", "{}", cu!(cuMemHostUnregister, base));
        say!("unregister again", "{}", cu!(cuMemHostUnregister, base));
        // SAFETY: as above.
        say!("still there", "{}", unsafe { memory.base.add(1998).read() });
        let _ = memory.file.as_raw_fd();
        free(block);
    }
    println!("-- what cannot be");
    let memory = Shared::new(LEN, libc::MAP_SHARED);
    let base = memory.base as u64;
    say!(
        "0 bytes",
        "{}",
        cu!(cuMemHostRegister_v2, base, 0usize, 0u32)
    );
    say!("NULL", "{}", cu!(cuMemHostRegister_v2, 0u64, LEN, 0u32));
    say!(
        "flags 16",
        "{}",
        cu!(cuMemHostRegister_v2, base, LEN, 16u32)
    );
    say!(
        "part",
        "{}",
        cu!(cuMemHostRegister_v2, base + 4096, 8192usize, 0u32)
    );
    say!(
        "what overlaps",
        "{}",
        cu!(cuMemHostRegister_v2, base, LEN, 0u32)
    );
    say!("unregister", "{}", cu!(cuMemHostUnregister, base + 4096));
    say!(
        "not a page",
        "{}",
        cu!(cuMemHostRegister_v2, base + 100, 8192usize, 0u32)
    );
    say!("unregister", "{}", cu!(cuMemHostUnregister, base + 100));
}

pub fn batches(setup: &Setup) {
    let (a, b, c) = (alloc(4096), alloc(4096), alloc(4096));
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    let words: Vec<i32> = (0..1024).collect();
    let mut back = vec![0i32; 1024];
    let mut to = [a, b, back.as_mut_ptr() as u64];
    let mut from = [words.as_ptr() as u64, a, b];
    let mut lens = [4096usize, 4096, 4096];
    let here = CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: setup.device,
    };
    let mut attributes = [CUmemcpyAttributes {
        src_access_order: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        src_location_hint: here,
        dst_location_hint: here,
        flags: 0,
    }];
    let mut index = [0usize];
    let mut batch = |count: usize,
                     kinds: usize,
                     index: &mut [usize; 1],
                     attributes: &mut [CUmemcpyAttributes; 1],
                     stream: CUstream| {
        cu!(
            cuMemcpyBatchAsync_v2,
            to.as_mut_ptr(),
            from.as_mut_ptr(),
            lens.as_mut_ptr(),
            count,
            attributes.as_mut_ptr(),
            index.as_mut_ptr(),
            kinds,
            stream
        )
    };
    say!(
        "one copy",
        "{}",
        batch(1, 1, &mut index, &mut attributes, stream)
    );
    must!(cuStreamSynchronize, stream);
    say!(
        "three copies",
        "{}",
        batch(3, 1, &mut index, &mut attributes, stream)
    );
    must!(cuStreamSynchronize, stream);
    say!("arrived", "{}", read_i32(a, 1024) == words);
    say!(
        "no copies",
        "{}",
        batch(0, 1, &mut index, &mut attributes, stream)
    );
    say!(
        "no attributes",
        "{}",
        batch(1, 0, &mut index, &mut attributes, stream)
    );
    say!(
        "attributes that begin late",
        "{}",
        batch(1, 1, &mut [1], &mut attributes, stream)
    );
    say!(
        "on the NULL stream",
        "{}",
        batch(1, 1, &mut index, &mut attributes, CUstream::NULL)
    );
    let mut wrong = attributes;
    wrong[0].src_access_order = 0;
    say!(
        "no order",
        "{}",
        batch(1, 1, &mut index, &mut wrong, stream)
    );
    wrong[0].src_access_order = 9;
    say!("order 9", "{}", batch(1, 1, &mut index, &mut wrong, stream));
    wrong[0] = CUmemcpyAttributes {
        flags: 8,
        ..attributes[0]
    };
    say!("flags 8", "{}", batch(1, 1, &mut index, &mut wrong, stream));
    must!(cuCtxSynchronize);
    say!("the first version", "{}", {
        let mut fail = 77usize;
        let status = cu!(
            cuMemcpyBatchAsync,
            &mut [c] as *mut [u64; 1],
            &mut [a] as *mut [u64; 1],
            &mut [4096usize] as *mut [usize; 1],
            1usize,
            attributes.as_mut_ptr(),
            index.as_mut_ptr(),
            1usize,
            &mut fail,
            stream
        );
        format!("{status} {}", fail == 77 || fail == usize::MAX)
    });
    must!(cuStreamSynchronize, stream);
    say!("arrived", "{}", read_i32(c, 1024) == words);

    println!("-- copies between contexts");
    let mut context = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut context);
    must!(cuMemsetD8_v2, c, 0u8, 4096usize);
    say!(
        "within one",
        "{}",
        cu!(cuMemcpyPeer, c, context, a, context, 4096usize)
    );
    say!(
        "in a stream",
        "{}",
        cu!(cuMemcpyPeerAsync, b, context, c, context, 4096usize, stream)
    );
    must!(cuCtxSynchronize);
    say!("arrived", "{}", read_i32(b, 1024) == words);
    say!(
        "to no context",
        "{}",
        cu!(cuMemcpyPeer, c, CUcontext::NULL, a, context, 4096usize)
    );
    say!(
        "enable access to itself",
        "{}",
        cu!(cuCtxEnablePeerAccess, context, 0u32)
    );
    say!(
        "enable access to none",
        "{}",
        cu!(cuCtxEnablePeerAccess, CUcontext::NULL, 0u32)
    );
    say!(
        "enable with flags",
        "{}",
        cu!(cuCtxEnablePeerAccess, context, 1u32)
    );
    say!(
        "disable access to itself",
        "{}",
        cu!(cuCtxDisablePeerAccess, context)
    );
    say!(
        "disable access to none",
        "{}",
        cu!(cuCtxDisablePeerAccess, CUcontext::NULL)
    );

    println!("-- pointers");
    let attribute = |which: CUpointer_attribute, at: u64| {
        let mut value = [0u64; 2];
        let status = cu!(cuPointerGetAttribute, &mut value, which, at);
        (status, value[0])
    };
    for (name, which) in [
        (
            "legacy IPC",
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        ),
        ("handle types", CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES),
        ("pool", CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE),
        ("access flags", CU_POINTER_ATTRIBUTE_ACCESS_FLAGS),
        ("sync memops", CU_POINTER_ATTRIBUTE_SYNC_MEMOPS),
        ("mapped", CU_POINTER_ATTRIBUTE_MAPPED),
        ("range size", CU_POINTER_ATTRIBUTE_RANGE_SIZE),
        ("managed", CU_POINTER_ATTRIBUTE_IS_MANAGED),
        ("host pointer", CU_POINTER_ATTRIBUTE_HOST_POINTER),
        ("attribute 0", 0),
        ("attribute 99", 99),
    ] {
        let (status, value) = attribute(which, a + 16);
        say!(name, "{status} {value}");
    }
    let same = attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, a).1
        == attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, a + 9).1;
    let other = attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, a).1
        == attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, b).1;
    say!("buffer ids", "{same} {other}");
    let (status, value) = attribute(CU_POINTER_ATTRIBUTE_CONTEXT, a);
    say!("context", "{status} {}", value == context.0);
    let mut on = 1u32;
    say!(
        "set sync memops",
        "{}",
        cu!(
            cuPointerSetAttribute,
            &mut on,
            CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
            a
        )
    );
    say!(
        "sync memops",
        "{:?}",
        attribute(CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, a)
    );
    say!(
        "set another",
        "{}",
        cu!(
            cuPointerSetAttribute,
            &mut on,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            a
        )
    );
    let mut local = 0u64;
    let stack = &raw mut local as u64;
    say!(
        "set of a stack pointer",
        "{}",
        cu!(
            cuPointerSetAttribute,
            &mut on,
            CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
            stack
        )
    );
    say!(
        "set nothing",
        "{}",
        cu!(
            cuPointerSetAttribute,
            null_mut::<u32>(),
            CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
            a
        )
    );
    say!(
        "mapped, a stack pointer",
        "{:?}",
        attribute(CU_POINTER_ATTRIBUTE_MAPPED, stack)
    );
    say!(
        "managed, a stack pointer",
        "{:?}",
        attribute(CU_POINTER_ATTRIBUTE_IS_MANAGED, stack)
    );
    say!(
        "ordinal, a stack pointer",
        "{:?}",
        attribute(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, stack)
    );
    println!("-- handles for address ranges");
    let mut fd = -1 as c_int;
    say!(
        "odd range",
        "{}",
        cu!(
            cuMemGetHandleForAddressRange,
            &mut fd,
            a + 1,
            100usize,
            CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
            0u64
        )
    );
    say!(
        "of a stack pointer",
        "{}",
        cu!(
            cuMemGetHandleForAddressRange,
            &mut fd,
            stack & !0xffff,
            65536usize,
            CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
            0u64
        )
    );
    say!(
        "of type 7",
        "{}",
        cu!(
            cuMemGetHandleForAddressRange,
            &mut fd,
            a,
            4096usize,
            7u32,
            0u64
        )
    );
    must!(cuStreamDestroy_v2, stream);
    [a, b, c].into_iter().for_each(free);
}

/// What is given to other processes, here to this one.
pub fn pool_sharing(setup: &Setup) {
    let here = CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: setup.device,
    };
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    let props = CUmemPoolProps {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: here,
        ..CUmemPoolProps::default()
    };
    let (mut pool, mut default) = (CUmemoryPool::NULL, CUmemoryPool::NULL);
    must!(cuMemPoolCreate, &mut pool, &props);
    must!(cuDeviceGetDefaultMemPool, &mut default, setup.device);
    let (mut at, mut second) = (77u64, 77u64);
    must!(cuMemAllocFromPoolAsync, &mut at, 0usize, pool, stream);
    say!("address of 0 bytes", "{at}");
    must!(cuMemAllocFromPoolAsync, &mut at, 5000usize, pool, stream);
    let mut types = 0u64;
    must!(
        cuPointerGetAttribute,
        &mut types,
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        at
    );
    say!("handle types", "{types}");
    assert!(setup.store_index(at, 1000, 7, stream).is_ok());
    println!("-- export and import");
    let mut fd = -1 as c_int;
    say!(
        "export",
        "{} {}",
        cu!(
            cuMemPoolExportToShareableHandle,
            &mut fd,
            pool,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            0u64
        ),
        fd >= 0
    );
    let mut none = -1 as c_int;
    say!(
        "export of the default pool",
        "{}",
        cu!(
            cuMemPoolExportToShareableHandle,
            &mut none,
            default,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            0u64
        )
    );
    say!(
        "export of type 0",
        "{}",
        cu!(
            cuMemPoolExportToShareableHandle,
            &mut none,
            pool,
            0u32,
            0u64
        )
    );
    let mut data = CUmemPoolPtrExportData([0; 64]);
    say!(
        "export of a pointer",
        "{}",
        cu!(cuMemPoolExportPointer, &mut data, at)
    );
    say!(
        "export of a stack pointer",
        "{}",
        cu!(cuMemPoolExportPointer, &mut data, &raw mut at as u64)
    );
    let mut imported = CUmemoryPool::NULL;
    let status = cu!(
        cuMemPoolImportFromShareableHandle,
        &mut imported,
        fd as usize as *mut c_void,
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        0u64
    );
    say!("import", "{status} same {}", imported == pool);
    if status.is_ok() {
        must!(cuMemPoolExportPointer, &mut data, at);
        let mut seen = 0u64;
        let status = cu!(cuMemPoolImportPointer, &mut seen, imported, &mut data);
        say!("import of a pointer", "{status} same {}", seen == at);
        if status.is_ok() {
            must!(cuStreamSynchronize, stream);
            say!("its content", "{:?}", read_i32(seen + 4, 1));
            say!(
                "alloc from the import",
                "{}",
                cu!(
                    cuMemAllocFromPoolAsync,
                    &mut second,
                    16usize,
                    imported,
                    stream
                )
            );
            say!(
                "free of the import",
                "{}",
                cu!(cuMemFreeAsync, seen, stream)
            );
            must!(cuStreamSynchronize, stream);
        }
        say!("destroy the import", "{}", cu!(cuMemPoolDestroy, imported));
    }
    // SAFETY: the descriptor is ours.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });

    must!(cuMemFreeAsync, at, stream);
    must!(cuStreamSynchronize, stream);
    must!(cuMemPoolDestroy, pool);
    must!(cuStreamDestroy_v2, stream);
}

/// What another process says of an event's handle, which is the only thing that it gets.
pub fn open_event(text: &str) {
    Setup::new();
    let mut handle = CUipcEventHandle([0; 64]);
    for (i, byte) in handle.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hex");
    }
    let mut event = CUevent::NULL;
    let status = cu!(cuIpcOpenEventHandle, &mut event, handle);
    say!("  open", "{status}");
    if !status.is_ok() {
        return;
    }
    say!("  query", "{}", cu!(cuEventQuery, event));
    say!(
        "  wait",
        "{}",
        cu!(cuStreamWaitEvent, CUstream::NULL, event, 0u32)
    );
    say!("  record", "{}", cu!(cuEventRecord, event, CUstream::NULL));
    say!("  synchronize", "{}", cu!(cuEventSynchronize, event));
    say!("  destroy", "{}", cu!(cuEventDestroy_v2, event));
    let mut again = CUevent::NULL;
    say!(
        "  open again",
        "{}",
        cu!(cuIpcOpenEventHandle, &mut again, handle)
    );
}

/// Handles of events: opened by others, by the maker, and when the maker has destroyed the event.
pub fn ipc_events(_: &Setup) {
    let flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    let mut event = CUevent::NULL;
    must!(cuEventCreate, &mut event, flags);
    let mut handle = CUipcEventHandle([0; 64]);
    say!("handle", "{}", cu!(cuIpcGetEventHandle, &mut handle, event));
    let mut own = CUevent::NULL;
    say!(
        "open in the same process",
        "{}",
        cu!(cuIpcOpenEventHandle, &mut own, handle)
    );
    println!("another process opens it:");
    in_another_process("--open-event", &handle.0);
    must!(cuEventRecord, event, CUstream::NULL);
    must!(cuCtxSynchronize);
    println!("recorded:");
    in_another_process("--open-event", &handle.0);
    must!(cuEventDestroy_v2, event);
    println!("destroyed:");
    in_another_process("--open-event", &handle.0);
    println!("once more:");
    in_another_process("--open-event", &handle.0);
    println!("a handle that is none:");
    in_another_process("--open-event", &[0; 64]);
}
