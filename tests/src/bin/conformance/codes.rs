//! Codes of calls with NULL and odd arguments, and what contexts say of their flags.

use super::*;

pub fn null_arguments(setup: &Setup) {
    let mut name = null::<c_char>();
    say!(
        "name of no function",
        "{}",
        cu!(cuFuncGetName, &mut name, CUfunction::NULL)
    );
    say!(
        "name of no kernel",
        "{}",
        cu!(cuKernelGetName, &mut name, CUkernel::NULL)
    );
    let mut function = CUfunction::NULL;
    for text in [c"", c"nope"] {
        let result = cu!(
            cuModuleGetFunction,
            &mut function,
            setup.module,
            text.as_ptr()
        );
        say!(format!("function {text:?}"), "{result}");
    }
    let (mut free_, mut total) = (0usize, 0usize);
    let none = null_mut::<usize>();
    let infos = [
        cu!(cuMemGetInfo_v2, &mut free_, none),
        cu!(cuMemGetInfo_v2, none, &mut total),
        cu!(cuMemGetInfo_v2, none, none),
    ];
    say!("memory info", "{infos:?} {} {}", free_ > 0, total > free_);
    let mut memory: CUdeviceptr = 0;
    say!(
        "allocate 0 bytes",
        "{}",
        cu!(cuMemAlloc_v2, &mut memory, 0usize)
    );
    let mut pinned = null_mut::<c_void>();
    say!(
        "allocate 0 bytes of pinned memory",
        "{}",
        cu!(cuMemHostAlloc, &mut pinned, 0usize, 0u32)
    );
    say!("free NULL", "{}", cu!(cuMemFree_v2, 0u64));
    let memory = alloc(4096);
    say!("free its middle", "{}", cu!(cuMemFree_v2, memory + 256));
    let word = 0u32;
    let own = &raw const word as u64;
    let (mut kind, mut context) = (9u32, CUcontext(1));
    say!(
        "memory type of the stack",
        "{}",
        cu!(
            cuPointerGetAttribute,
            (&raw mut kind).cast::<c_void>(),
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            own
        )
    );
    let mut asked = [
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CU_POINTER_ATTRIBUTE_CONTEXT,
    ];
    let mut places = [(&raw mut kind).cast::<c_void>(), (&raw mut context).cast()];
    let result = cu!(
        cuPointerGetAttributes,
        2u32,
        asked.as_mut_ptr(),
        places.as_mut_ptr(),
        own
    );
    say!(
        "attributes of the stack",
        "{result} {kind} {}",
        context.is_null()
    );
    let (mut base, mut len) = (0u64, 0usize);
    say!(
        "range of the stack",
        "{}",
        cu!(cuMemGetAddressRange_v2, &mut base, &mut len, own)
    );
    say!(
        "copy to NULL",
        "{}",
        cu!(cuMemcpyHtoD_v2, 0u64, own as *const c_void, 4usize)
    );
    say!(
        "copy of nothing to NULL",
        "{}",
        cu!(cuMemcpyHtoD_v2, 0u64, null::<c_void>(), 0usize)
    );
    let mut value = 0 as c_int;
    say!(
        "attribute 9999",
        "{}",
        cu!(cuDeviceGetAttribute, &mut value, 9999u32, setup.device)
    );
    say!(
        "of device 55",
        "{}",
        cu!(cuDeviceGetAttribute, &mut value, 10u32, 55 as c_int)
    );
    free(memory);
}

/// A primary context maps host memory, and says so when it is current.
pub fn primary_flags(setup: &Setup) {
    let (mut flags, mut active) = (99u32, 9 as c_int);
    must!(cuCtxGetFlags, &mut flags);
    say!("of the current context", "{flags}");
    must!(
        cuDevicePrimaryCtxGetState,
        setup.device,
        &mut flags,
        &mut active
    );
    say!("of the device", "{flags} {active}");
}

/// Ends what is in the primary context: nothing else may follow in the process.
pub fn primary_reset(setup: &Setup) {
    let active = || {
        let (mut flags, mut active) = (99u32, 9 as c_int);
        let device = setup.device;
        must!(cuDevicePrimaryCtxGetState, device, &mut flags, &mut active);
        active
    };
    let mut primary = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut primary);
    must!(cuDevicePrimaryCtxReset_v2, setup.device);
    say!("active", "{}", active());
    let mut current = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut current);
    say!("still current", "{}", current == primary);
    let mut device: CUdevice = -1;
    say!("its device", "{}", cu!(cuCtxGetDevice, &mut device));
    say!("wait in it", "{}", cu!(cuCtxSynchronize));
    let mut memory: CUdeviceptr = 0;
    say!("allocate", "{}", cu!(cuMemAlloc_v2, &mut memory, 4096usize));
    say!("destroy it", "{}", cu!(cuCtxDestroy_v2, primary));
    say!("make it current", "{}", cu!(cuCtxSetCurrent, primary));
    say!("active", "{}", active());
    must!(cuDevicePrimaryCtxRetain, &mut current, setup.device);
    say!(
        "retained anew",
        "same {} active {}",
        current == primary,
        active()
    );
    must!(cuCtxSetCurrent, primary);
    let memory = alloc(4096);
    must!(cuMemsetD32_v2, memory, 7u32, 1024usize);
    must!(cuCtxSynchronize);
    say!("memory", "{:?}", read_i32(memory + 4092, 1));
    free(memory);
    // One that resets twice, and one that gives its retains back.
    must!(cuDevicePrimaryCtxReset_v2, setup.device);
    must!(cuDevicePrimaryCtxReset_v2, setup.device);
    say!("active", "{}", active());
    say!(
        "release",
        "{}",
        cu!(cuDevicePrimaryCtxRelease_v2, setup.device)
    );
}
