//! Launches, modules, occupancy, and an illegal address.

use super::*;
use mpsshim_tests::peer::asserting_ptx;
use std::io::{Read, Seek};
use std::os::fd::FromRawFd;

pub fn launches(setup: &Setup) {
    let out = alloc(1 << 16);
    assert!(setup.store_index(out, 10_000, 2, CUstream::NULL).is_ok());
    say!(
        "store_index",
        "{}",
        read_i32(out, 10_000)
            .iter()
            .enumerate()
            .all(|(i, v)| *v == 2 * i as i32)
    );
    // The same through `extra`.
    #[repr(C)]
    struct Packed {
        out: u64,
        count: i32,
        factor: i32,
    }
    let packed = Packed {
        out,
        count: 100,
        factor: 11,
    };
    let mut size = size_of::<Packed>();
    let mut extra: [*mut c_void; 5] = [
        CU_LAUNCH_PARAM_BUFFER_POINTER as *mut c_void,
        (&raw const packed).cast_mut().cast(),
        CU_LAUNCH_PARAM_BUFFER_SIZE as *mut c_void,
        (&raw mut size).cast(),
        CU_LAUNCH_PARAM_END as *mut c_void,
    ];
    let none = null_mut::<*mut c_void>();
    let function = setup.functions["store_index"];
    let result = cu!(
        cuLaunchKernel,
        function,
        2u32,
        1u32,
        1u32,
        64u32,
        1u32,
        1u32,
        0u32,
        CUstream::NULL,
        none,
        extra.as_mut_ptr()
    );
    say!("launch with extra", "{result} {}", read_i32(out, 100)[99]);
    // A struct parameter with padding.
    #[repr(C)]
    struct Mixed {
        tag: u8,
        scale: f64,
        offset: i16,
    }
    let mut mixed = Mixed {
        tag: 3,
        scale: 1.5,
        offset: -2,
    };
    let (mut target, mut unused) = (out, 0u64);
    let params = &mut [
        (&raw mut target).cast(),
        (&raw mut mixed).cast(),
        (&raw mut unused).cast(),
    ];
    assert!(
        setup
            .launch("mixed", 1, 8, 0, CUstream::NULL, params)
            .is_ok()
    );
    let mut doubles = [0f64; 8];
    must!(cuMemcpyDtoH_v2, doubles.as_mut_ptr(), out, 64usize);
    say!("struct parameter and constant memory", "{doubles:?}");
    assert!(setup.store_index(out, 256, 1, CUstream::NULL).is_ok());
    assert!(
        setup
            .launch(
                "reverse",
                2,
                128,
                512,
                CUstream::NULL,
                &mut [(&raw mut target).cast()]
            )
            .is_ok()
    );
    let reversed = read_i32(out, 256);
    say!(
        "dynamic shared memory",
        "{} {} {}",
        reversed[0],
        reversed[127],
        reversed[128]
    );
    let nothing = |grid: [u32; 3], block: [u32; 3], shared: u32| {
        cu!(
            cuLaunchKernel,
            setup.functions["nothing"],
            grid[0],
            grid[1],
            grid[2],
            block[0],
            block[1],
            block[2],
            shared,
            CUstream::NULL,
            none,
            none
        )
    };
    say!("launch of nothing", "{}", nothing([1, 1, 1], [1, 1, 1], 0));
    say!("grid of 0", "{}", nothing([0, 1, 1], [1, 1, 1], 0));
    say!("block of 0", "{}", nothing([1, 1, 1], [1, 0, 1], 0));
    say!("block of 2048", "{}", nothing([1, 1, 1], [2048, 1, 1], 0));
    say!("block of 32x64", "{}", nothing([1, 1, 1], [32, 64, 1], 0));
    say!(
        "grid y of 65536",
        "{}",
        nothing([1, 65_536, 1], [1, 1, 1], 0)
    );
    say!(
        "too much shared memory",
        "{}",
        nothing([1, 1, 1], [32, 1, 1], 1 << 20)
    );
    say!(
        "a bad function",
        "{}",
        cu!(
            cuLaunchKernel,
            CUfunction::NULL,
            1u32,
            1u32,
            1u32,
            1u32,
            1u32,
            1u32,
            0u32,
            CUstream::NULL,
            none,
            none
        )
    );
    let attribute = CUlaunchAttribute {
        id: CU_LAUNCH_ATTRIBUTE_IGNORE,
        pad: 0,
        value: [0; 64],
    };
    let config = CUlaunchConfig {
        grid: [4, 1, 1],
        block: [32, 1, 1],
        shared_mem_bytes: 0,
        stream: CUstream::NULL,
        attrs: &attribute,
        num_attrs: 1,
    };
    let (mut count, mut factor) = (128i32, 9i32);
    let mut params: [*mut c_void; 3] = [
        (&raw mut target).cast(),
        (&raw mut count).cast(),
        (&raw mut factor).cast(),
    ];
    let result = cu!(
        cuLaunchKernelEx,
        &config,
        function,
        params.as_mut_ptr(),
        none
    );
    say!("cuLaunchKernelEx", "{result} {}", read_i32(out, 128)[127]);
    say!("the context is fine", "{}", cu!(cuCtxSynchronize));
    free(out);
}

pub fn modules(setup: &Setup) {
    let (mut address, mut len) = (0u64, 0usize);
    say!(
        "global",
        "{} {len}",
        cu!(
            cuModuleGetGlobal_v2,
            &mut address,
            &mut len,
            setup.module,
            c"counter".as_ptr()
        )
    );
    say!("its size", "{len}");
    say!("its initial value", "{}", read_i32(address, 1)[0]);
    let mut times = 3i32;
    assert!(
        setup
            .launch(
                "count_threads",
                2,
                64,
                0,
                CUstream::NULL,
                &mut [(&raw mut times).cast()]
            )
            .is_ok()
    );
    say!("after the kernel", "{}", read_i32(address, 1)[0]);
    let new = 100i32;
    must!(cuMemcpyHtoD_v2, address, &raw const new, 4usize);
    say!("after a copy", "{}", read_i32(address, 1)[0]);
    say!(
        "no such global",
        "{}",
        cu!(
            cuModuleGetGlobal_v2,
            &mut address,
            &mut len,
            setup.module,
            c"missing".as_ptr()
        )
    );
    let mut function = CUfunction::NULL;
    say!(
        "no such function",
        "{}",
        cu!(
            cuModuleGetFunction,
            &mut function,
            setup.module,
            c"missing".as_ptr()
        )
    );
    let mut second = CUmodule::NULL;
    must!(cuModuleLoadData, &mut second, PTX.as_ptr());
    must!(
        cuModuleGetGlobal_v2,
        &mut address,
        &mut len,
        second,
        c"counter".as_ptr()
    );
    say!(
        "a second load has its own globals",
        "{}",
        read_i32(address, 1)[0]
    );
    say!("unload", "{}", cu!(cuModuleUnload, second));
    let mut module = CUmodule::NULL;
    say!(
        "nonsense image",
        "{}",
        cu!(cuModuleLoadData, &mut module, c"this is no image".as_ptr())
    );
    say!(
        "missing file",
        "{}",
        cu!(
            cuModuleLoad,
            &mut module,
            c"/nonexistent/file.cubin".as_ptr()
        )
    );
    let mut value = 0 as c_int;
    let function = setup.functions["reverse"];
    say!(
        "max threads",
        "{} {value}",
        cu!(
            cuFuncGetAttribute,
            &mut value,
            CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
            function
        )
    );
    say!(
        "static shared",
        "{} {value}",
        cu!(
            cuFuncGetAttribute,
            &mut value,
            CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            function
        )
    );
    say!(
        "set dynamic shared",
        "{}",
        cu!(
            cuFuncSetAttribute,
            function,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            8192 as c_int
        )
    );
    must!(
        cuFuncGetAttribute,
        &mut value,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        function
    );
    say!("dynamic shared", "{value}");
    say!(
        "attribute 999",
        "{}",
        cu!(cuFuncGetAttribute, &mut value, 999u32, function)
    );
    let (mut offset, mut size) = (0usize, 0usize);
    let mixed = setup.functions["mixed"];
    for index in 0..4usize {
        let result = cu!(cuFuncGetParamInfo, mixed, index, &mut offset, &mut size);
        if result.is_ok() {
            say!(format!("parameter {index}"), "{offset} {size}")
        } else {
            say!(format!("parameter {index}"), "{result}")
        }
    }
    let mut library = CUlibrary::NULL;
    let none = null_mut::<c_void>();
    let result = cu!(
        cuLibraryLoadData,
        &mut library,
        PTX.as_ptr(),
        none,
        none,
        0u32,
        none,
        none,
        0u32
    );
    say!("library", "{result}");
    let mut kernel = CUkernel::NULL;
    say!(
        "kernel",
        "{}",
        cu!(
            cuLibraryGetKernel,
            &mut kernel,
            library,
            c"store_index".as_ptr()
        )
    );
    let mut again = CUkernel::NULL;
    must!(
        cuLibraryGetKernel,
        &mut again,
        library,
        c"store_index".as_ptr()
    );
    say!("same kernel", "{}", kernel == again);
    say!(
        "no such kernel",
        "{}",
        cu!(cuLibraryGetKernel, &mut again, library, c"missing".as_ptr())
    );
    let mut of_kernel = CUfunction::NULL;
    say!(
        "function of it",
        "{}",
        cu!(cuKernelGetFunction, &mut of_kernel, kernel)
    );
    let out = alloc(4096);
    for (what, function) in [
        ("launch of a kernel", CUfunction(kernel.0)),
        ("launch of its function", of_kernel),
    ] {
        let (mut target, mut count, mut factor) = (out, 10i32, 4i32);
        let mut params: [*mut c_void; 3] = [
            (&raw mut target).cast(),
            (&raw mut count).cast(),
            (&raw mut factor).cast(),
        ];
        let result = cu!(
            cuLaunchKernel,
            function,
            1u32,
            1u32,
            1u32,
            32u32,
            1u32,
            1u32,
            0u32,
            CUstream::NULL,
            params.as_mut_ptr(),
            null_mut::<*mut c_void>()
        );
        say!(what, "{result} {}", read_i32(out, 10)[9]);
    }
    let mut count = 0u32;
    say!(
        "kernels in it",
        "{} {count}",
        cu!(cuLibraryGetKernelCount, &mut count, library)
    );
    say!("count", "{count}");
    must!(
        cuLibraryGetGlobal,
        &mut address,
        &mut len,
        library,
        c"counter".as_ptr()
    );
    say!(
        "a library has its own globals",
        "{}",
        read_i32(address, 1)[0]
    );
    say!("library unload", "{}", cu!(cuLibraryUnload, library));
    free(out);
}

pub fn occupancy(setup: &Setup) {
    let function = setup.functions["store_index"];
    let mut blocks = 0 as c_int;
    let result = cu!(
        cuOccupancyMaxActiveBlocksPerMultiprocessor,
        &mut blocks,
        function,
        128 as c_int,
        0usize
    );
    say!("active blocks", "{result} {}", (1..=64).contains(&blocks));
    let result = cu!(
        cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
        &mut blocks,
        function,
        1024 as c_int,
        0usize,
        0u32
    );
    say!(
        "active blocks of 1024",
        "{result} {}",
        (1..=2).contains(&blocks)
    );
    let (mut grid, mut block) = (0 as c_int, 0 as c_int);
    let result = cu!(
        cuOccupancyMaxPotentialBlockSize,
        &mut grid,
        &mut block,
        function,
        null::<c_void>(),
        0usize,
        0 as c_int
    );
    say!(
        "potential block size",
        "{result} {}",
        grid >= 1 && (32..=1024).contains(&block)
    );
    let mut bytes = 0usize;
    let result = cu!(
        cuOccupancyAvailableDynamicSMemPerBlock,
        &mut bytes,
        function,
        1 as c_int,
        128 as c_int
    );
    say!("available shared memory", "{result} {}", bytes >= 1024);
}

pub fn absent_fault(setup: &Setup) {
    let mut bad = 0x10u64;
    assert!(
        setup
            .launch(
                "write_to",
                1,
                1,
                0,
                CUstream::NULL,
                &mut [(&raw mut bad).cast()]
            )
            .is_ok()
    );
    say!(
        "synchronize after an illegal address",
        "{}",
        cu!(cuCtxSynchronize)
    );
    say!(
        "the next call",
        "{}",
        cu!(cuMemAlloc_v2, &mut { 0u64 }, 16usize)
    );
    say!(
        "a launch",
        "{}",
        setup.launch("nothing", 1, 1, 0, CUstream::NULL, &mut [])
    );
}

/// A buffer of parameters that ends before they do, as NCCL gives it.
pub fn short_parameters(setup: &Setup) {
    let out = alloc(4096);
    must!(cuMemsetD32_v2, out, 7u32, 16usize);
    // No element is to be stored, so that the factor, which is missing, does not matter.
    let mut buffer = (out, 0i32, 0i32);
    let mut size = 12usize;
    let mut extra: [*mut c_void; 5] = [
        CU_LAUNCH_PARAM_BUFFER_POINTER as *mut c_void,
        (&raw mut buffer).cast(),
        CU_LAUNCH_PARAM_BUFFER_SIZE as *mut c_void,
        (&raw mut size).cast(),
        CU_LAUNCH_PARAM_END as *mut c_void,
    ];
    let function = setup.functions["store_index"];
    let mut launch = || {
        cu!(
            cuLaunchKernel,
            function,
            1u32,
            1u32,
            1u32,
            16u32,
            1u32,
            1u32,
            0u32,
            CUstream::NULL,
            null_mut::<*mut c_void>(),
            extra.as_mut_ptr()
        )
    };
    say!("the last parameter is missing", "{}", launch());
    say!("synchronize", "{}", cu!(cuCtxSynchronize));
    say!("nothing was stored", "{:?}", read_i32(out, 2));
    free(out);
}

/// A failed assertion: what is written to standard error by the time that a call returns the status. The context is lost.
pub fn assertion(_: &Setup) {
    let image = CString::new(asserting_ptx()).expect("no NUL");
    let mut module = CUmodule::NULL;
    must!(cuModuleLoadData, &mut module, image.as_ptr());
    let mut check = CUfunction::NULL;
    must!(cuModuleGetFunction, &mut check, module, c"check".as_ptr());
    // What the driver and the library write goes into a file for a while.
    // SAFETY: plain system calls; the descriptors are new and ours.
    let (mut file, before) = unsafe {
        let file = libc::memfd_create(c"stderr".as_ptr(), 0);
        let before = libc::dup(2);
        assert!(file > 2 && before > 2 && libc::dup2(file, 2) == 2);
        (std::fs::File::from_raw_fd(file), before)
    };
    let launch = |mut limit: u32| {
        let params = &mut [(&raw mut limit).cast()];
        launch_function(check, (1, 8, 0), CUstream::NULL, params)
    };
    say!(
        "a launch in which nothing fails",
        "{} {}",
        launch(8),
        cu!(cuCtxSynchronize)
    );
    say!(
        "a launch in which two threads fail",
        "{} {}",
        launch(6),
        cu!(cuCtxSynchronize)
    );
    let mut text = String::new();
    file.rewind()
        .and_then(|()| file.read_to_string(&mut text))
        .expect("text");
    say!(
        "the next call",
        "{}",
        cu!(cuMemAlloc_v2, &mut { 0u64 }, 16usize)
    );
    say!("a launch after it", "{}", launch(8));
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
        .iter()
        .for_each(|line| println!("standard error: {line}"));
    // SAFETY: as above.
    unsafe { libc::dup2(before, 2) };
}
