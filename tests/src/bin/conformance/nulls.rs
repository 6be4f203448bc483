//! NULL arguments of calls that programs make with them, with and without a current context. tests/gpu/sweep.py has all calls.

use super::*;

pub fn null_codes(_: &Setup) {
    let mut current = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut current);
    let none = null_mut::<u64>();
    println!("-- no current context");
    must!(cuCtxSetCurrent, CUcontext::NULL);
    say!("cuMemFree", "{}", cu!(cuMemFree_v2, 0u64));
    say!("cuMemFreeHost", "{}", cu!(cuMemFreeHost, 0u64));
    say!(
        "cuMemGetAddressRange",
        "{}",
        cu!(cuMemGetAddressRange_v2, none, none, 0x1234u64)
    );
    say!("cuMemAlloc", "{}", cu!(cuMemAlloc_v2, none, 4096usize));
    say!(
        "cuMemHostAlloc",
        "{}",
        cu!(cuMemHostAlloc, none, 4096usize, 0u32)
    );
    say!(
        "cuMemAllocAsync",
        "{}",
        cu!(cuMemAllocAsync, none, 4096usize, CUstream::NULL)
    );
    say!("cuEventCreate", "{}", cu!(cuEventCreate, none, 0u32));
    say!("cuModuleLoadData", "{}", cu!(cuModuleLoadData, none, none));
    say!("cuTexObjectDestroy", "{}", cu!(cuTexObjectDestroy, 5u64));
    say!("cuSurfObjectDestroy", "{}", cu!(cuSurfObjectDestroy, 5u64));
    must!(cuCtxSetCurrent, current);

    println!("-- a current context");
    let (mut value, mut bytes) = (0u64, 0usize);
    say!("cuMemFree", "{}", cu!(cuMemFree_v2, 0u64));
    say!("cuMemFreeHost", "{}", cu!(cuMemFreeHost, 0u64));
    say!("cuMemHostUnregister", "{}", cu!(cuMemHostUnregister, 0u64));
    say!(
        "cuMemGetAddressRange",
        "{}",
        cu!(cuMemGetAddressRange_v2, none, none, 0x1234u64)
    );
    say!(
        "cuFuncGetModule",
        "{}",
        cu!(cuFuncGetModule, &mut value, 0u64)
    );
    say!(
        "cuFuncIsLoaded",
        "{}",
        cu!(cuFuncIsLoaded, &mut value, 0u64)
    );
    say!(
        "cuFuncGetParamInfo",
        "{}",
        cu!(cuFuncGetParamInfo, 0u64, 0usize, &mut bytes, none)
    );
    say!(
        "cuKernelGetParamInfo",
        "{}",
        cu!(cuKernelGetParamInfo, 0u64, 0usize, &mut bytes, none)
    );
    let mut graph = CUgraph::NULL;
    must!(cuGraphCreate, &mut graph, 0u32);
    let mut room = 0usize;
    say!(
        "cuGraphGetNodes with room for none",
        "{}",
        cu!(cuGraphGetNodes, graph, &mut value, &mut room)
    );
    must!(cuGraphDestroy, graph);
}
