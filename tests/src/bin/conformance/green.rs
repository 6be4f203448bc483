//! Green contexts, and details of ordinary ones.

use super::*;

fn resource_of(device: CUdevice) -> CUdevResource {
    let mut resource = CUdevResource::INVALID;
    must!(
        cuDeviceGetDevResource,
        device,
        &mut resource,
        CU_DEV_RESOURCE_TYPE_SM
    );
    resource
}

pub fn green_contexts(setup: &Setup) {
    let device = setup.device;
    let mut primary = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut primary);
    let whole = resource_of(device);
    say!(
        "the device's resource",
        "type {} multiprocessors {} twice the same {}",
        whole.kind,
        whole.sm[0] >= 16,
        whole == resource_of(device)
    );
    let mut other = CUdevResource::INVALID;
    for kind in [0u32, 7] {
        say!(
            format!("resource of type {kind}"),
            "{}",
            cu!(cuDeviceGetDevResource, device, &mut other, kind)
        );
    }
    say!(
        "resource into NULL",
        "{}",
        cu!(
            cuDeviceGetDevResource,
            device,
            null_mut::<CUdevResource>(),
            1u32
        )
    );
    say!(
        "of device 99",
        "{}",
        cu!(cuDeviceGetDevResource, 99 as CUdevice, &mut other, 1u32)
    );
    say!(
        "of the context",
        "{} all {}",
        cu!(cuCtxGetDevResource, primary, &mut other, 1u32),
        other.sm[0] == whole.sm[0]
    );
    let mut groups = [CUdevResource::INVALID; 2];
    let mut rest = CUdevResource::INVALID;
    let mut count = 2u32;
    say!(
        "split",
        "{} {count}",
        cu!(
            cuDevSmResourceSplitByCount,
            groups.as_mut_ptr(),
            &mut count,
            &whole,
            &mut rest,
            0u32,
            8u32
        )
    );
    say!(
        "groups",
        "{count} of {} and {} with the rest all {}",
        groups[0].sm[0],
        groups[1].sm[0],
        16 + rest.sm[0] == whole.sm[0]
    );
    let mut forged = whole;
    forged.sm[0] -= 1;
    count = 1;
    say!(
        "split of a changed resource",
        "{}",
        cu!(
            cuDevSmResourceSplitByCount,
            &mut other,
            &mut count,
            &forged,
            null_mut::<CUdevResource>(),
            0u32,
            8u32
        )
    );
    count = 1;
    say!(
        "split of no resource",
        "{}",
        cu!(
            cuDevSmResourceSplitByCount,
            &mut other,
            &mut count,
            &CUdevResource::INVALID,
            null_mut::<CUdevResource>(),
            0u32,
            8u32
        )
    );
    count = 1;
    say!(
        "split into too large ones",
        "{}",
        cu!(
            cuDevSmResourceSplitByCount,
            &mut other,
            &mut count,
            &whole,
            &mut rest,
            0u32,
            100_000u32
        )
    );
    let mut description = 0u64;
    say!(
        "describe",
        "{}",
        cu!(
            cuDevResourceGenerateDesc,
            &mut description,
            groups.as_mut_ptr(),
            1u32
        )
    );
    say!(
        "describe into NULL",
        "{}",
        cu!(
            cuDevResourceGenerateDesc,
            null_mut::<u64>(),
            groups.as_mut_ptr(),
            1u32
        )
    );
    let mut nothing = CUdevResource::INVALID;
    let mut unused = 0u64;
    say!(
        "describe no resource",
        "{}",
        cu!(cuDevResourceGenerateDesc, &mut unused, &mut nothing, 1u32)
    );
    let mut green = 0u64;
    for flags in [0u32, 2] {
        say!(
            format!("create with flags {flags}"),
            "{}",
            cu!(cuGreenCtxCreate, &mut green, description, device, flags)
        );
    }
    say!(
        "create on device 99",
        "{}",
        cu!(
            cuGreenCtxCreate,
            &mut green,
            description,
            99 as CUdevice,
            1u32
        )
    );
    say!(
        "create",
        "{}",
        cu!(cuGreenCtxCreate, &mut green, description, device, 1u32)
    );
    let (mut context, mut again) = (CUcontext::NULL, CUcontext::NULL);
    must!(cuCtxFromGreenCtx, &mut again, green);
    say!(
        "its context",
        "{} the same each time {} not the primary one {}",
        cu!(cuCtxFromGreenCtx, &mut context, green),
        context == again,
        context != primary
    );
    say!(
        "the context of none",
        "{}",
        cu!(cuCtxFromGreenCtx, &mut again, 0u64)
    );
    must!(cuGreenCtxGetDevResource, green, &mut other, 1u32);
    say!("its multiprocessors", "{}", other.sm[0]);
    must!(cuCtxGetDevResource, context, &mut other, 1u32);
    say!("its context's", "{}", other.sm[0]);
    let (mut id, mut of_context) = (0u64, 0u64);
    must!(cuGreenCtxGetId, green, &mut id);
    must!(cuCtxGetId, context, &mut of_context);
    say!("one id", "{}", id == of_context);
    let mut stream = CUstream::NULL;
    say!(
        "a blocking stream",
        "{}",
        cu!(cuGreenCtxStreamCreate, &mut stream, green, 0u32, 0 as c_int)
    );
    say!(
        "a stream",
        "{}",
        cu!(cuGreenCtxStreamCreate, &mut stream, green, 1u32, 0 as c_int)
    );
    let mut of = 0u64;
    must!(cuStreamGetGreenCtx, stream, &mut of);
    say!("its green context", "{}", of == green);
    must!(cuStreamGetCtx, stream, &mut again);
    say!("its context", "{}", again == context);
    must!(cuStreamGetCtx_v2, stream, &mut again, &mut of);
    say!("both", "primary {} green {}", again == primary, of == green);
    must!(cuStreamGetGreenCtx, CUstream::NULL, &mut of);
    say!("of the default stream", "{of}");
    // Work there, with memory and functions of the primary context.
    let out = alloc(4096);
    assert!(setup.store_index(out, 100, 3, stream).is_ok());
    let mut event = CUevent::NULL;
    must!(cuEventCreate, &mut event, 0u32);
    say!("record", "{}", cu!(cuGreenCtxRecordEvent, green, event));
    say!("synchronize", "{}", cu!(cuEventSynchronize, event));
    say!("computed", "{}", read_i32(out, 100)[99]);
    say!("wait", "{}", cu!(cuGreenCtxWaitEvent, green, event));
    say!(
        "record of none",
        "{}",
        cu!(cuGreenCtxRecordEvent, 0u64, event)
    );
    say!(
        "record no event",
        "{}",
        cu!(cuGreenCtxRecordEvent, green, CUevent::NULL)
    );
    say!(
        "record in its context",
        "{}",
        cu!(cuCtxRecordEvent, context, event)
    );
    say!(
        "wait in its context",
        "{}",
        cu!(cuCtxWaitEvent, context, event)
    );
    must!(cuCtxSetCurrent, context);
    say!(
        "launch in it",
        "{}",
        setup.store_index(out, 100, 4, CUstream::NULL)
    );
    say!("cuCtxSynchronize", "{}", cu!(cuCtxSynchronize));
    say!("computed there", "{}", read_i32(out, 100)[99]);
    let mut module = CUmodule::NULL;
    must!(cuModuleLoadData, &mut module, PTX.as_ptr());
    let mut function = CUfunction::NULL;
    must!(
        cuModuleGetFunction,
        &mut function,
        module,
        c"nothing".as_ptr()
    );
    let none = null_mut::<*mut c_void>();
    say!(
        "launch of its own module",
        "{}",
        cu!(
            cuLaunchKernel,
            function,
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
    must!(cuCtxSynchronize);
    say!("cuCtxDestroy", "{}", cu!(cuCtxDestroy_v2, context));
    must!(cuStreamDestroy_v2, stream);
    must!(cuModuleUnload, module);
    say!("cuGreenCtxDestroy", "{}", cu!(cuGreenCtxDestroy, green));
    must!(cuCtxGetCurrent, &mut again);
    say!("still current", "{}", again == context);
    say!("cuCtxSynchronize", "{}", cu!(cuCtxSynchronize));
    must!(cuCtxSetCurrent, primary);
    say!("destroy none", "{}", cu!(cuGreenCtxDestroy, 0u64));
    must!(cuEventDestroy_v2, event);
    free(out);
}

pub fn context_details(setup: &Setup) {
    let device = setup.device;
    let mut primary = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut primary);
    let mut own = CUcontext::NULL;
    for wanted in [
        0u32, 1, 2, 3, 4, 5, 6, 7, 8, 0x10, 0x18, 0x20, 0x80, 0xff, 0x100,
    ] {
        let result = cu!(cuCtxCreate_v2, &mut own, wanted, device);
        if result.is_ok() {
            let (mut flags, mut version) = (0u32, 0u32);
            must!(cuCtxGetFlags, &mut flags);
            must!(cuCtxGetApiVersion, own, &mut version);
            say!(format!("flags {wanted:#x}"), "{flags:#x} version {version}");
            must!(cuCtxDestroy_v2, own);
        } else {
            say!(format!("flags {wanted:#x}"), "{result}");
        }
    }
    say!(
        "create on device 99",
        "{}",
        cu!(cuCtxCreate_v2, &mut own, 0u32, 99 as CUdevice)
    );
    // Limits belong to a context.
    must!(cuCtxCreate_v2, &mut own, 0u32, device);
    let mut value = 0usize;
    let get = |limit: u32| {
        let mut value = 0usize;
        must!(cuCtxGetLimit, &mut value, limit);
        value
    };
    for limit in [0u32, 2] {
        say!(format!("limit {limit}"), "{}", get(limit));
    }
    for (limit, wanted) in [
        (0u32, 0usize),
        (0, 1),
        (0, 1000),
        (0, 4096),
        (1, 1 << 20),
        (2, 1),
        (4, 1),
        (4, 4096),
        (5, 0),
        (5, 100),
        (5, 1000),
    ] {
        let result = cu!(cuCtxSetLimit, limit, wanted);
        say!(
            format!("set limit {limit} to {wanted}"),
            "{result} {}",
            get(limit)
        );
    }
    for limit in [3u32, 10] {
        say!(
            format!("limit {limit}"),
            "{} set {}",
            cu!(cuCtxGetLimit, &mut value, limit),
            cu!(cuCtxSetLimit, limit, 64usize)
        );
    }
    say!(
        "set the shared memory limit",
        "{}",
        cu!(cuCtxSetLimit, 7u32, 1024usize)
    );
    must!(cuCtxSetCurrent, primary);
    say!("the primary context's stack", "{}", get(0));
    must!(cuCtxDestroy_v2, own);
    must!(cuCtxSetCurrent, primary);
    let mut flags = 0u32;
    for wanted in [8u32, 4, 7, 256, 0] {
        let result = cu!(cuCtxSetFlags, wanted);
        must!(cuCtxGetFlags, &mut flags);
        say!(format!("cuCtxSetFlags {wanted}"), "{result} {flags}");
    }
    let mut active = 0 as c_int;
    for wanted in [1u32, 3, 4, 8, 16, 0] {
        let result = cu!(cuDevicePrimaryCtxSetFlags_v2, device, wanted);
        must!(cuDevicePrimaryCtxGetState, device, &mut flags, &mut active);
        say!(
            format!("primary flags {wanted}"),
            "{result} {flags} {active}"
        );
    }
    let mut affinity = [9u32; 2];
    say!(
        "cuCtxGetExecAffinity",
        "{} type {} {}",
        cu!(cuCtxGetExecAffinity, affinity.as_mut_ptr(), 0u32),
        affinity[0],
        affinity[1] >= 1
    );
    say!(
        "of type 1",
        "{}",
        cu!(cuCtxGetExecAffinity, affinity.as_mut_ptr(), 1u32)
    );
    let mut config = 0u32;
    must!(cuCtxSetSharedMemConfig, 2u32);
    must!(cuCtxGetSharedMemConfig, &mut config);
    say!("shared memory configuration", "{config}");
    say!("set to 9", "{}", cu!(cuCtxSetSharedMemConfig, 9u32));
    must!(cuCtxSetCacheConfig, 2u32);
    must!(cuCtxGetCacheConfig, &mut config);
    say!("cache configuration", "{config}");
    say!("set to 9", "{}", cu!(cuCtxSetCacheConfig, 9u32));
    must!(cuCtxSetCacheConfig, 0u32);
    say!("destroy the primary", "{}", cu!(cuCtxDestroy_v2, primary));
    say!("destroy none", "{}", cu!(cuCtxDestroy_v2, CUcontext::NULL));
    // Attached twice, so that it takes two to end it.
    must!(cuCtxCreate_v2, &mut own, 0u32, device);
    let mut attached = CUcontext::NULL;
    say!(
        "cuCtxAttach",
        "{} {}",
        cu!(cuCtxAttach, &mut attached, 0u32),
        attached == own
    );
    say!("with flags", "{}", cu!(cuCtxAttach, &mut attached, 1u32));
    let mut current = CUcontext::NULL;
    for _ in 0..2 {
        let result = cu!(cuCtxDetach, own);
        must!(cuCtxGetCurrent, &mut current);
        say!("cuCtxDetach", "{result} still current {}", current == own);
    }
    say!("detach none", "{}", cu!(cuCtxDetach, CUcontext::NULL));
    must!(cuCtxSetCurrent, primary);
    let mut event = CUevent::NULL;
    must!(cuEventCreate, &mut event, 0u32);
    let out = alloc(4096);
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    setup.slow_store(out, 7, stream);
    say!(
        "cuCtxRecordEvent",
        "{}",
        cu!(cuCtxRecordEvent, primary, event)
    );
    must!(cuEventSynchronize, event);
    say!("what it covers", "{}", read_i32(out, 1)[0]);
    say!("cuCtxWaitEvent", "{}", cu!(cuCtxWaitEvent, primary, event));
    say!(
        "record no event",
        "{}",
        cu!(cuCtxRecordEvent, primary, CUevent::NULL)
    );
    must!(cuStreamDestroy_v2, stream);
    must!(cuEventDestroy_v2, event);
    free(out);
}
