//! Libraries: kernels and variables in several contexts and on several devices.

use super::*;

fn load() -> CUlibrary {
    let mut library = CUlibrary::NULL;
    let none = null_mut::<c_void>();
    let none_values = null_mut::<*mut c_void>();
    must!(
        cuLibraryLoadData,
        &mut library,
        PTX.as_ptr(),
        none,
        none_values,
        0u32,
        none,
        none_values,
        0u32
    );
    library
}

fn kernel_of(library: CUlibrary, name: &std::ffi::CStr) -> CUkernel {
    let mut kernel = CUkernel::NULL;
    must!(cuLibraryGetKernel, &mut kernel, library, name.as_ptr());
    kernel
}

/// Launches `count_threads` with 32 threads.
fn launch(function: u64, mut times: i32) -> CUresult {
    let params = &mut [(&raw mut times).cast::<c_void>()];
    cu!(
        cuLaunchKernel,
        CUfunction(function),
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
    )
}

/// The library's `counter` in the current context.
fn counter(library: CUlibrary) -> i32 {
    let (mut address, mut len) = (0u64, 0usize);
    must!(
        cuLibraryGetGlobal,
        &mut address,
        &mut len,
        library,
        c"counter".as_ptr()
    );
    read_i32(address, 1)[0]
}

pub fn libraries(setup: &Setup) {
    let library = load();
    let kernel = kernel_of(library, c"reverse");
    let mut function = CUfunction::NULL;
    say!(
        "cuKernelGetFunction",
        "{} another handle {}",
        cu!(cuKernelGetFunction, &mut function, kernel),
        function.0 != kernel.0
    );
    let mut again = CUfunction::NULL;
    must!(cuKernelGetFunction, &mut again, kernel);
    say!("the same each time", "{}", function == again);
    let mut of = CUlibrary::NULL;
    say!(
        "cuKernelGetLibrary",
        "{} {}",
        cu!(cuKernelGetLibrary, &mut of, kernel),
        of == library
    );
    let mut module = CUmodule::NULL;
    say!(
        "cuLibraryGetModule",
        "{}",
        cu!(cuLibraryGetModule, &mut module, library)
    );
    let mut of_function = CUmodule::NULL;
    say!(
        "cuFuncGetModule",
        "{} the library's {}",
        cu!(cuFuncGetModule, &mut of_function, function),
        of_function == module
    );
    say!(
        "cuModuleGetFunction of a library's module",
        "{} the kernel's {}",
        cu!(cuModuleGetFunction, &mut again, module, c"reverse".as_ptr()),
        again == function
    );
    let (mut address, mut len) = (0u64, 0usize);
    say!(
        "cuModuleGetGlobal of a library's module",
        "{}",
        cu!(
            cuModuleGetGlobal_v2,
            &mut address,
            &mut len,
            module,
            c"counter".as_ptr()
        )
    );
    let mut of_library = 0u64;
    must!(
        cuLibraryGetGlobal,
        &mut of_library,
        &mut len,
        library,
        c"counter".as_ptr()
    );
    say!("both are one variable", "{} {len}", address == of_library);
    say!(
        "size only",
        "{} {len}",
        cu!(
            cuLibraryGetGlobal,
            null_mut::<u64>(),
            &mut len,
            library,
            c"factors".as_ptr()
        )
    );
    say!(
        "address only",
        "{}",
        cu!(
            cuLibraryGetGlobal,
            &mut address,
            null_mut::<usize>(),
            library,
            c"factors".as_ptr()
        )
    );
    let mut factor = 0f32;
    must!(cuMemcpyDtoH_v2, &raw mut factor, address + 8, 4usize);
    say!("constant memory", "{factor}");
    say!(
        "neither",
        "{}",
        cu!(
            cuLibraryGetGlobal,
            null_mut::<u64>(),
            null_mut::<usize>(),
            library,
            c"factors".as_ptr()
        )
    );
    say!(
        "no such global",
        "{}",
        cu!(
            cuLibraryGetGlobal,
            &mut address,
            &mut len,
            library,
            c"missing".as_ptr()
        )
    );
    say!(
        "a managed variable that is none",
        "{}",
        cu!(
            cuLibraryGetManaged,
            &mut address,
            &mut len,
            library,
            c"counter".as_ptr()
        )
    );
    let mut pointer = null::<c_void>();
    say!(
        "a unified function that is none",
        "{}",
        cu!(
            cuLibraryGetUnifiedFunction,
            &mut pointer,
            library,
            c"reverse".as_ptr()
        )
    );
    let mut value = 0 as c_int;
    for attribute in [
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET,
        CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
        16,
        999,
    ] {
        let result = cu!(
            cuKernelGetAttribute,
            &mut value,
            attribute,
            kernel,
            setup.device
        );
        if result.is_ok() {
            say!(format!("kernel attribute {attribute}"), "{value}");
        } else {
            say!(format!("kernel attribute {attribute}"), "{result}");
        }
    }
    let dynamic = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    say!(
        "cuKernelSetAttribute",
        "{}",
        cu!(
            cuKernelSetAttribute,
            dynamic,
            8192 as c_int,
            kernel,
            setup.device
        )
    );
    must!(
        cuKernelGetAttribute,
        &mut value,
        dynamic,
        kernel,
        setup.device
    );
    say!("read again", "{value}");
    must!(cuFuncGetAttribute, &mut value, dynamic, function);
    say!("of its function", "{value}");
    say!(
        "on device 1000",
        "{}",
        cu!(cuKernelGetAttribute, &mut value, dynamic, kernel, 1000i32)
    );
    say!(
        "set on device 1000",
        "{}",
        cu!(
            cuKernelSetAttribute,
            dynamic,
            8192 as c_int,
            kernel,
            1000i32
        )
    );
    say!(
        "too much shared memory",
        "{}",
        cu!(
            cuKernelSetAttribute,
            dynamic,
            (1 << 20) as c_int,
            kernel,
            setup.device
        )
    );
    let mixed = kernel_of(library, c"mixed");
    let (mut offset, mut size) = (0usize, 0usize);
    must!(cuKernelGetParamInfo, mixed, 1usize, &mut offset, &mut size);
    say!("parameter 1", "{offset} {size}");
    say!(
        "parameter 3",
        "{}",
        cu!(cuKernelGetParamInfo, mixed, 3usize, &mut offset, &mut size)
    );
    let mut count = 0u32;
    must!(cuLibraryGetKernelCount, &mut count, library);
    let mut kernels = vec![CUkernel::NULL; count as usize];
    say!(
        "cuLibraryEnumerateKernels",
        "{}",
        cu!(
            cuLibraryEnumerateKernels,
            kernels.as_mut_ptr(),
            count,
            library
        )
    );
    let mut names: Vec<String> = kernels
        .iter()
        .map(|kernel| {
            let mut name: *const c_char = null();
            must!(cuKernelGetName, &mut name, *kernel);
            // SAFETY: the driver's names are NUL-ended.
            unsafe { std::ffi::CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    say!("their names", "{}", names.join(" "));
    say!("one of them", "{}", kernels.contains(&kernel));
    // Handles of other things, and none.
    say!(
        "a function as a kernel",
        "{}",
        cu!(cuKernelGetFunction, &mut again, CUkernel(function.0))
    );
    say!(
        "a kernel of NULL",
        "{}",
        cu!(
            cuLibraryGetKernel,
            &mut { CUkernel::NULL },
            CUlibrary::NULL,
            c"x".as_ptr()
        )
    );
    say!(
        "a module of NULL",
        "{}",
        cu!(cuLibraryGetModule, &mut module, CUlibrary::NULL)
    );
    say!(
        "cuKernelGetName into NULL",
        "{}",
        cu!(cuKernelGetName, null_mut::<*const c_char>(), kernel)
    );
    say!(
        "nonsense image",
        "{}",
        cu!(
            cuLibraryLoadData,
            &mut { CUlibrary::NULL },
            c"this is no image".as_ptr(),
            null_mut::<c_void>(),
            null_mut::<c_void>(),
            0u32,
            null_mut::<c_void>(),
            null_mut::<c_void>(),
            0u32
        )
    );
    say!(
        "missing file",
        "{}",
        cu!(
            cuLibraryLoadFromFile,
            &mut { CUlibrary::NULL },
            c"/nonexistent/file.cubin".as_ptr(),
            null_mut::<c_void>(),
            null_mut::<c_void>(),
            0u32,
            null_mut::<c_void>(),
            null_mut::<c_void>(),
            0u32
        )
    );
    say!("unload", "{}", cu!(cuLibraryUnload, library));
}

pub fn contexts(setup: &Setup) {
    let mut primary = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut primary);
    // Without any context.
    must!(cuCtxSetCurrent, CUcontext::NULL);
    let library = load();
    let kernel = kernel_of(library, c"count_threads");
    say!("a kernel without a context", "{}", kernel != CUkernel::NULL);
    let mut function = CUfunction::NULL;
    say!(
        "its function without a context",
        "{}",
        cu!(cuKernelGetFunction, &mut function, kernel)
    );
    let (mut address, mut len) = (0u64, 0usize);
    say!(
        "a global without a context",
        "{}",
        cu!(
            cuLibraryGetGlobal,
            &mut address,
            &mut len,
            library,
            c"counter".as_ptr()
        )
    );
    let (mut offset, mut size) = (9usize, 9usize);
    say!(
        "a parameter without a context",
        "{} {offset} {size}",
        cu!(cuKernelGetParamInfo, kernel, 0usize, &mut offset, &mut size)
    );
    say!("it is", "{offset} {size}");
    must!(cuCtxSetCurrent, primary);
    say!("launch of a kernel", "{}", launch(kernel.0, 1));
    say!("counter", "{}", counter(library));
    // Another context has variables of its own.
    let mut own = CUcontext::NULL;
    must!(cuCtxCreate_v2, &mut own, 0u32, setup.device);
    say!("counter in another context", "{}", counter(library));
    say!("launch there", "{}", launch(kernel.0, 2));
    say!("counter there", "{}", counter(library));
    let mut there = CUfunction::NULL;
    must!(cuKernelGetFunction, &mut there, kernel);
    must!(cuCtxSetCurrent, primary);
    say!("counter in the first", "{}", counter(library));
    must!(cuKernelGetFunction, &mut function, kernel);
    say!("its function is another", "{}", function != there);
    must!(cuCtxDestroy_v2, own);
    must!(cuCtxCreate_v2, &mut own, 0u32, setup.device);
    say!("counter in a new context", "{}", counter(library));
    must!(cuCtxDestroy_v2, own);
    must!(cuCtxSetCurrent, primary);
    say!("launch in the first", "{}", launch(kernel.0, 1));
    say!("counter in the end", "{}", counter(library));
    // Every device.
    let mut count = 0 as c_int;
    must!(cuDeviceGetCount, &mut count);
    let mut fine = true;
    for ordinal in 0..count {
        let mut device: CUdevice = 0;
        must!(cuDeviceGet, &mut device, ordinal);
        let mut context = CUcontext::NULL;
        must!(cuDevicePrimaryCtxRetain, &mut context, device);
        must!(cuCtxSetCurrent, context);
        let before = counter(library);
        fine &= launch(kernel.0, 5).is_ok();
        must!(cuCtxSynchronize);
        fine &= counter(library) == before + 5 * 32;
        let dynamic = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let mut value = 0 as c_int;
        must!(
            cuKernelSetAttribute,
            dynamic,
            (4096 * (ordinal + 1)) as c_int,
            kernel,
            device
        );
        must!(cuKernelGetAttribute, &mut value, dynamic, kernel, device);
        fine &= value == 4096 * (ordinal + 1);
    }
    let mut value = 0 as c_int;
    must!(cuCtxSetCurrent, primary);
    must!(
        cuKernelGetAttribute,
        &mut value,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        kernel,
        setup.device
    );
    say!("the first device's attribute", "{value}");
    say!("on every device", "{fine}");
    for ordinal in 0..count {
        must!(cuDevicePrimaryCtxRelease_v2, ordinal);
    }
    must!(cuCtxSetCurrent, primary);
    say!("unload", "{}", cu!(cuLibraryUnload, library));
}
