//! Stream capture: what becomes of captured work, forks and joins, and what a capture forbids.

use super::*;
use std::sync::mpsc;

pub fn stream(flags: u32) -> CUstream {
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, flags);
    stream
}

pub fn event() -> CUevent {
    let mut event = CUevent::NULL;
    must!(cuEventCreate, &mut event, CU_EVENT_DISABLE_TIMING);
    event
}

/// What `cuStreamIsCapturing` says.
pub fn status(stream: CUstream) -> String {
    let mut status = 7u32;
    let result = cu!(cuStreamIsCapturing, stream, &mut status);
    format!("{result} {status}")
}

fn begin(stream: CUstream, mode: u32) -> CUresult {
    cu!(cuStreamBeginCapture_v2, stream, mode)
}

fn end(stream: CUstream) -> (CUresult, CUgraph) {
    let mut graph = CUgraph(1);
    let result = cu!(cuStreamEndCapture, stream, &mut graph);
    (result, graph)
}

/// Ends a capture; says whether there is a graph and how many nodes it has.
pub fn end_and_count(stream: CUstream) -> String {
    let (result, graph) = end(stream);
    let mut count = 0usize;
    if result.is_ok() && !graph.is_null() {
        must!(
            cuGraphGetNodes,
            graph,
            null_mut::<CUgraphNode>(),
            &mut count
        );
        must!(cuGraphDestroy, graph);
    }
    format!("{result} {} {count}", !graph.is_null() && graph.0 != 1)
}

pub fn instantiate(graph: CUgraph) -> CUgraphExec {
    let mut exec = CUgraphExec::NULL;
    must!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64);
    exec
}

pub fn kinds(graph: CUgraph) -> Vec<u32> {
    let mut count = 64usize;
    let mut nodes = [CUgraphNode::NULL; 64];
    must!(cuGraphGetNodes, graph, nodes.as_mut_ptr(), &mut count);
    let mut kinds: Vec<u32> = nodes[..count]
        .iter()
        .map(|node| {
            let mut kind = 99u32;
            must!(cuGraphNodeGetType, *node, &mut kind);
            kind
        })
        .collect();
    kinds.sort();
    kinds
}

pub fn capture(setup: &Setup) {
    let out = alloc(4096);
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    let [main, side] = [
        stream(CU_STREAM_NON_BLOCKING),
        stream(CU_STREAM_NON_BLOCKING),
    ];
    say!("before", "{}", status(main));
    say!("begin", "{}", begin(main, 0));
    say!("during", "{}", status(main));
    say!("the other", "{}", status(side));
    say!("begin again", "{}", begin(main, 0));
    say!("still", "{}", status(main));
    let (mut state, mut id) = (7u32, 0u64);
    let (mut graph, mut dependencies, mut count) = (CUgraph::NULL, null::<CUgraphNode>(), 9usize);
    let result = cu!(
        cuStreamGetCaptureInfo_v2,
        main,
        &mut state,
        &mut id,
        &mut graph,
        &mut dependencies,
        &mut count
    );
    say!(
        "info",
        "{result} {state} {} {} {count}",
        id != 0,
        !graph.is_null()
    );
    say!("kernel", "{}", setup.store_index(out, 64, 3, main));
    say!(
        "memset",
        "{}",
        cu!(cuMemsetD32Async, out + 256, 9u32, 4usize, main)
    );
    say!(
        "copy",
        "{}",
        cu!(cuMemcpyDtoDAsync_v2, out + 512, out, 16usize, main)
    );
    let mut again = 0u64;
    let result = cu!(
        cuStreamGetCaptureInfo_v2,
        main,
        &mut state,
        &mut again,
        &mut graph,
        &mut dependencies,
        &mut count
    );
    say!(
        "info behind work",
        "{result} {state} {} {count}",
        again == id
    );
    // SAFETY: the driver gave an array of `count`.
    let last = unsafe { *dependencies };
    let mut kind = 99u32;
    say!(
        "what comes last",
        "{} {kind}",
        cu!(cuGraphNodeGetType, last, &mut kind)
    );
    say!("its kind", "{kind}");
    let (result, made) = end(main);
    say!("end", "{result} {}", made == graph);
    say!("after", "{}", status(main));
    say!(
        "nothing ran",
        "{:?}",
        (read_i32(out + 4, 1), read_i32(out + 256, 1))
    );
    say!("kinds", "{:?}", kinds(made));
    let exec = instantiate(made);
    say!("launch", "{}", cu!(cuGraphLaunch, exec, main));
    must!(cuStreamSynchronize, main);
    say!(
        "it ran",
        "{:?}",
        (
            read_i32(out + 4, 3),
            read_i32(out + 256, 2),
            read_i32(out + 512, 4)
        )
    );
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    for _ in 0..20 {
        must!(cuGraphLaunch, exec, side);
    }
    say!("destroy the graph", "{}", cu!(cuGraphDestroy, made));
    say!("destroy while running", "{}", cu!(cuGraphExecDestroy, exec));
    must!(cuStreamSynchronize, side);
    say!(
        "it ran again",
        "{:?}",
        (
            read_i32(out + 4, 3),
            read_i32(out + 256, 2),
            read_i32(out + 512, 4)
        )
    );

    // Forks.
    let [fork, join] = [event(), event()];
    must!(cuStreamBeginCapture_v2, main, 1u32);
    must!(cuMemsetD32Async, out, 1u32, 1usize, main);
    say!("record", "{}", cu!(cuEventRecord, fork, main));
    say!("fork", "{}", cu!(cuStreamWaitEvent, side, fork, 0u32));
    say!("forked", "{}", status(side));
    must!(cuMemcpyDtoDAsync_v2, out + 4, out, 4usize, side);
    must!(cuMemcpyDtoDAsync_v2, out + 8, out, 4usize, main);
    say!("end with a fork", "{}", end_and_count(main));
    say!("main after it", "{}", status(main));
    say!("side after it", "{}", status(side));
    say!(
        "side works again",
        "{}",
        cu!(cuMemsetD32Async, out, 0u32, 4usize, side)
    );
    say!("side synchronizes", "{}", cu!(cuStreamSynchronize, side));
    must!(cuStreamBeginCapture_v2, main, 1u32);
    must!(cuMemsetD32Async, out, 6u32, 1usize, main);
    must!(cuEventRecord, fork, main);
    must!(cuStreamWaitEvent, side, fork, 0u32);
    must!(cuMemcpyDtoDAsync_v2, out + 4, out, 4usize, side);
    must!(cuMemcpyDtoDAsync_v2, out + 8, out, 4usize, main);
    must!(cuEventRecord, join, side);
    must!(cuStreamWaitEvent, main, join, 0u32);
    must!(cuMemcpyDtoDAsync_v2, out + 12, out + 4, 4usize, main);
    say!("end on the other stream", "{}", end(side).0);
    say!("and then", "{}", status(main));
    say!("really", "{}", end_and_count(main));
    must!(cuStreamBeginCapture_v2, main, 1u32);
    must!(cuMemsetD32Async, out, 6u32, 1usize, main);
    must!(cuEventRecord, fork, main);
    must!(cuStreamWaitEvent, side, fork, 0u32);
    must!(cuMemcpyDtoDAsync_v2, out + 4, out, 4usize, side);
    must!(cuMemcpyDtoDAsync_v2, out + 8, out, 4usize, main);
    must!(cuEventRecord, join, side);
    must!(cuStreamWaitEvent, main, join, 0u32);
    must!(cuMemcpyDtoDAsync_v2, out + 12, out + 4, 4usize, main);
    let (result, graph) = end(main);
    say!("fork and join", "{result}");
    say!("side is free", "{}", status(side));
    let (mut nodes, mut edges) = (0usize, 0usize);
    must!(
        cuGraphGetNodes,
        graph,
        null_mut::<CUgraphNode>(),
        &mut nodes
    );
    let nowhere = null_mut::<CUgraphNode>();
    must!(cuGraphGetEdges, graph, nowhere, nowhere, &mut edges);
    say!("nodes and edges", "{nodes} {edges}");
    let exec = instantiate(graph);
    must!(cuGraphLaunch, exec, CUstream::NULL);
    must!(cuCtxSynchronize);
    say!("forks ran", "{:?}", read_i32(out, 4));
    must!(cuGraphExecDestroy, exec);
    must!(cuGraphDestroy, graph);

    // Events of a capture, behind it.
    say!("query a captured event", "{}", cu!(cuEventQuery, fork));
    say!("wait for it", "{}", cu!(cuEventSynchronize, fork));
    say!(
        "a stream waits for it",
        "{}",
        cu!(cuStreamWaitEvent, side, fork, 0u32)
    );
    say!("side", "{}", status(side));
    must!(cuStreamSynchronize, side);
    must!(cuEventRecord, fork, side);
    say!("recorded anew", "{}", cu!(cuEventSynchronize, fork));
    say!("query it", "{}", cu!(cuEventQuery, fork));
    // Work before a capture is nothing to wait for in it.
    must!(cuStreamBeginCapture_v2, main, 2u32);
    say!(
        "wait for an event from outside",
        "{}",
        cu!(cuStreamWaitEvent, main, fork, 0u32)
    );
    say!("status", "{}", status(main));
    say!("end", "{}", end_and_count(main));
    must!(cuStreamBeginCapture_v2, main, 2u32);
    say!(
        "wait for an unrecorded event",
        "{}",
        cu!(cuStreamWaitEvent, main, event(), 0u32)
    );
    say!("end", "{}", end_and_count(main));
    // External records and waits are nodes.
    must!(cuStreamBeginCapture_v2, main, 2u32);
    say!(
        "external wait",
        "{}",
        cu!(cuStreamWaitEvent, main, fork, 1u32)
    );
    say!(
        "external record",
        "{}",
        cu!(cuEventRecordWithFlags, join, main, 1u32)
    );
    say!("query the recorded", "{}", cu!(cuEventQuery, join));
    let (result, graph) = end(main);
    say!("end", "{result} {:?}", kinds(graph));
    must!(cuGraphDestroy, graph);
    say!(
        "external record outside",
        "{}",
        cu!(cuEventRecordWithFlags, join, main, 1u32)
    );
    must!(cuStreamSynchronize, main);

    // An empty capture, and wrong arguments.
    must!(cuStreamBeginCapture_v2, main, 0u32);
    say!("empty", "{}", end_and_count(main));
    say!("end without begin", "{}", end(main).0);
    say!("graph of it", "{}", end(main).1.0);
    say!("mode 3", "{}", begin(main, 3));
    say!("legacy stream", "{}", begin(CUstream::NULL, 0));
    say!("per-thread stream", "{}", begin(CU_STREAM_PER_THREAD, 0));
    say!("per-thread status", "{}", status(CU_STREAM_PER_THREAD));
    say!("per-thread end", "{}", end_and_count(CU_STREAM_PER_THREAD));
    say!(
        "null status",
        "{}",
        cu!(cuStreamIsCapturing, main, null_mut::<u32>())
    );
    must!(cuStreamBeginCapture_v2, main, 0u32);
    say!(
        "end into null",
        "{}",
        cu!(cuStreamEndCapture, main, null_mut::<CUgraph>())
    );
    say!("status", "{}", status(main));
    say!("end", "{}", end_and_count(main));
    let mut mode = 2u32;
    say!(
        "exchange",
        "{} {mode}",
        cu!(cuThreadExchangeStreamCaptureMode, &mut mode)
    );
    say!("it was", "{mode}");
    say!(
        "exchange back",
        "{} {mode}",
        cu!(cuThreadExchangeStreamCaptureMode, &mut mode)
    );
    say!("it was", "{mode}");
    mode = 9;
    say!(
        "exchange wrong",
        "{}",
        cu!(cuThreadExchangeStreamCaptureMode, &mut mode)
    );
    mode = 0;
    must!(cuThreadExchangeStreamCaptureMode, &mut mode);
    say!("it was", "{mode}");

    // The older entry points.
    must!(cuStreamBeginCapture, main);
    must!(cuStreamGetCaptureInfo, main, &mut state, &mut id);
    say!("info of the first version", "{state} {}", id != 0);
    say!(
        "null id",
        "{}",
        cu!(cuStreamGetCaptureInfo, main, &mut state, null_mut::<u64>())
    );
    say!(
        "null state",
        "{}",
        cu!(cuStreamGetCaptureInfo, main, null_mut::<u32>(), &mut id)
    );
    say!("end", "{}", end_and_count(main));
    let mut data = null::<CUgraphEdgeData>();
    let result = cu!(
        cuStreamGetCaptureInfo_v3,
        main,
        &mut state,
        &mut id,
        &mut graph_of(),
        &mut dependencies,
        &mut data,
        &mut count
    );
    say!("info outside", "{result} {state}");

    // A capture ended by another thread.
    for mode in 0..3u32 {
        must!(cuStreamBeginCapture_v2, main, mode);
        let result = elsewhere(setup, move || end(main).0);
        say!(format!("end in another thread, mode {mode}"), "{result}");
        say!("status", "{}", status(main));
        say!("end here", "{}", end(main).0);
    }
    // A stream destroyed in its capture.
    must!(cuStreamBeginCapture_v2, side, 2u32);
    must!(cuMemsetD32Async, out, 6u32, 1usize, side);
    say!(
        "destroy a capturing stream",
        "{}",
        cu!(cuStreamDestroy_v2, side)
    );
    must!(cuStreamDestroy_v2, main);
    for event in [fork, join] {
        must!(cuEventDestroy_v2, event);
    }
    free(out);
}

fn graph_of() -> CUgraph {
    CUgraph::NULL
}

/// Runs a call in another thread with the same context.
fn elsewhere<R: Send + 'static>(setup: &Setup, call: impl FnOnce() -> R + Send + 'static) -> R {
    let device = setup.device;
    let (give, take) = mpsc::channel();
    std::thread::spawn(move || {
        let mut context = CUcontext::NULL;
        must!(cuDevicePrimaryCtxRetain, &mut context, device);
        must!(cuCtxSetCurrent, context);
        give.send(call()).expect("the other end");
        must!(cuDevicePrimaryCtxRelease_v2, device);
    })
    .join()
    .expect("no panic");
    take.recv().expect("an answer")
}

/// A call and its name.
type Call<'a> = (&'static str, Box<dyn Fn() -> CUresult + 'a>);

/// What a capture forbids: each call's status, and what became of the capture.
pub fn capture_unsafe(setup: &Setup) {
    let out = alloc(1 << 16);
    let [main, side, blocking] = [
        stream(CU_STREAM_NON_BLOCKING),
        stream(CU_STREAM_NON_BLOCKING),
        stream(0),
    ];
    let recorded = event();
    must!(cuEventRecord, recorded, side);
    must!(cuCtxSynchronize);
    let mut host = null_mut::<c_void>();
    must!(cuMemHostAlloc, &mut host, 4096usize, 0u32);
    let host = host as u64;
    let mut heap = vec![5u8; 1 << 16];
    let mut registered = vec![5u8; 1 << 20];
    let to_register = registered.as_mut_ptr() as u64;
    let pageable = heap.as_mut_ptr() as u64;
    let spare = alloc(1 << 22);
    let spare_host = {
        let mut host = null_mut::<c_void>();
        must!(cuMemHostAlloc, &mut host, 4096usize, 0u32);
        host as u64
    };
    let module_text = PTX;
    let mut graph = CUgraph::NULL;
    must!(cuGraphCreate, &mut graph, 0u32);
    let ready = instantiate(graph);
    let (device, function) = (setup.device, setup.functions["nothing"]);
    let calls: Vec<Call<'_>> = vec![
        (
            "cuMemAlloc",
            Box::new(|| cu!(cuMemAlloc_v2, &mut { 0u64 }, 1usize << 22)),
        ),
        (
            "cuMemAllocPitch",
            Box::new(|| {
                cu!(
                    cuMemAllocPitch_v2,
                    &mut { 0u64 },
                    &mut { 0usize },
                    64usize,
                    64usize,
                    4u32
                )
            }),
        ),
        (
            "cuMemHostAlloc",
            Box::new(|| cu!(cuMemHostAlloc, &mut { 0u64 }, 4096usize, 0u32)),
        ),
        (
            "cuMemAllocHost",
            Box::new(|| cu!(cuMemAllocHost_v2, &mut { 0u64 }, 4096usize)),
        ),
        (
            "cuMemHostRegister",
            Box::new(move || cu!(cuMemHostRegister_v2, to_register, 1usize << 20, 0u32)),
        ),
        (
            "cuMemGetInfo",
            Box::new(|| cu!(cuMemGetInfo_v2, &mut { 0usize }, &mut { 0usize })),
        ),
        ("cuCtxSynchronize", Box::new(|| cu!(cuCtxSynchronize))),
        (
            "cuStreamSynchronize of the same",
            Box::new(move || cu!(cuStreamSynchronize, main)),
        ),
        (
            "cuStreamQuery of the same",
            Box::new(move || cu!(cuStreamQuery, main)),
        ),
        (
            "cuStreamSynchronize of another",
            Box::new(move || cu!(cuStreamSynchronize, side)),
        ),
        (
            "cuStreamQuery of another",
            Box::new(move || cu!(cuStreamQuery, side)),
        ),
        (
            "cuStreamSynchronize of a blocking one",
            Box::new(move || cu!(cuStreamSynchronize, blocking)),
        ),
        (
            "cuStreamSynchronize of the legacy one",
            Box::new(move || cu!(cuStreamSynchronize, CUstream::NULL)),
        ),
        (
            "cuStreamQuery of the legacy one",
            Box::new(move || cu!(cuStreamQuery, CUstream::NULL)),
        ),
        (
            "cuEventQuery",
            Box::new(move || cu!(cuEventQuery, recorded)),
        ),
        (
            "cuEventSynchronize",
            Box::new(move || cu!(cuEventSynchronize, recorded)),
        ),
        (
            "cuEventCreate",
            Box::new(move || cu!(cuEventCreate, &mut { CUevent::NULL }, 0u32)),
        ),
        (
            "cuEventElapsedTime",
            Box::new(move || cu!(cuEventElapsedTime, &mut { 0f32 }, recorded, recorded)),
        ),
        (
            "cuStreamCreate",
            Box::new(move || cu!(cuStreamCreate, &mut { CUstream::NULL }, 1u32)),
        ),
        (
            "cuStreamDestroy",
            Box::new(move || {
                let mut stream = CUstream::NULL;
                cu!(cuStreamCreate, &mut stream, 1u32)
                    .ok()
                    .map_or_else(|e| e, |()| cu!(cuStreamDestroy_v2, stream))
            }),
        ),
        (
            "cuMemcpyHtoD",
            Box::new(move || cu!(cuMemcpyHtoD_v2, out, pageable, 16usize)),
        ),
        (
            "cuMemcpyHtoD of 64 KiB",
            Box::new(move || cu!(cuMemcpyHtoD_v2, out, pageable, 65536usize)),
        ),
        (
            "cuMemcpyDtoH",
            Box::new(move || cu!(cuMemcpyDtoH_v2, pageable, out, 16usize)),
        ),
        (
            "cuMemcpyDtoH to pinned",
            Box::new(move || cu!(cuMemcpyDtoH_v2, host, out, 16usize)),
        ),
        (
            "cuMemcpyDtoD",
            Box::new(move || cu!(cuMemcpyDtoD_v2, out, out + 64, 16usize)),
        ),
        (
            "cuMemcpy",
            Box::new(move || cu!(cuMemcpy, out, out + 64, 16usize)),
        ),
        (
            "cuMemsetD8",
            Box::new(move || cu!(cuMemsetD8_v2, out, 0u8, 16usize)),
        ),
        (
            "cuMemcpyDtoH of the per-thread stream",
            Box::new(move || cu!(cuMemcpyDtoH_v2_ptds, host, out, 16usize)),
        ),
        (
            "a copy in the legacy stream",
            Box::new(move || cu!(cuMemcpyDtoDAsync_v2, out, out + 64, 16usize, CUstream::NULL)),
        ),
        (
            "a launch in the legacy stream",
            Box::new(move || setup.launch("nothing", 1, 1, 0, CUstream::NULL, &mut [])),
        ),
        (
            "a launch in another stream",
            Box::new(move || setup.launch("nothing", 1, 1, 0, side, &mut [])),
        ),
        (
            "a launch in a blocking stream",
            Box::new(move || setup.launch("nothing", 1, 1, 0, blocking, &mut [])),
        ),
        (
            "a record in the legacy stream",
            Box::new(move || cu!(cuEventRecord, recorded, CUstream::NULL)),
        ),
        (
            "cuModuleLoadData",
            Box::new(move || {
                cu!(
                    cuModuleLoadData,
                    &mut { CUmodule::NULL },
                    module_text.as_ptr()
                )
            }),
        ),
        (
            "cuFuncGetAttribute",
            Box::new(move || cu!(cuFuncGetAttribute, &mut { 0 as c_int }, 0u32, function)),
        ),
        (
            "cuFuncSetAttribute",
            Box::new(move || cu!(cuFuncSetAttribute, function, 8u32, 1024 as c_int)),
        ),
        (
            "cuCtxGetLimit",
            Box::new(move || cu!(cuCtxGetLimit, &mut { 0usize }, 0u32)),
        ),
        (
            "cuCtxSetLimit",
            Box::new(move || cu!(cuCtxSetLimit, 0u32, 2048usize)),
        ),
        (
            "cuMemGetAddressRange",
            Box::new(move || cu!(cuMemGetAddressRange_v2, &mut { 0u64 }, &mut { 0usize }, out)),
        ),
        (
            "cuPointerGetAttribute",
            Box::new(move || cu!(cuPointerGetAttribute, &mut { 0u64 }, 2u32, out)),
        ),
        (
            "cuDevicePrimaryCtxRetain",
            Box::new(move || cu!(cuDevicePrimaryCtxRetain, &mut { CUcontext::NULL }, device)),
        ),
        (
            "a captured pageable copy to the device",
            Box::new(move || cu!(cuMemcpyHtoDAsync_v2, out, pageable, 65536usize, main)),
        ),
        (
            "a captured pageable copy from the device",
            Box::new(move || cu!(cuMemcpyDtoHAsync_v2, pageable, out, 65536usize, main)),
        ),
        (
            "a captured pinned copy",
            Box::new(move || cu!(cuMemcpyHtoDAsync_v2, out, host, 64usize, main)),
        ),
        (
            "a captured copy within host memory",
            Box::new(move || cu!(cuMemcpyAsync, host + 64, host, 64usize, main)),
        ),
        (
            "cuGraphInstantiate",
            Box::new(move || {
                let mut graph = CUgraph::NULL;
                must!(cuGraphCreate, &mut graph, 0u32);
                cu!(
                    cuGraphInstantiateWithFlags,
                    &mut { CUgraphExec::NULL },
                    graph,
                    0u64
                )
            }),
        ),
        (
            "cuGraphLaunch in another stream",
            Box::new(move || cu!(cuGraphLaunch, ready, side)),
        ),
        (
            "cuGraphLaunch in the same",
            Box::new(move || cu!(cuGraphLaunch, ready, main)),
        ),
    ];
    let last: Vec<Call<'_>> = vec![
        ("cuMemFree", Box::new(move || cu!(cuMemFree_v2, spare))),
        (
            "cuMemFreeHost",
            Box::new(move || cu!(cuMemFreeHost, spare_host)),
        ),
    ];
    for (mode, name) in [(0u32, "global"), (1, "thread-local"), (2, "relaxed")] {
        for (what, call) in &calls {
            must!(cuStreamBeginCapture_v2, main, mode);
            let result = call();
            say!(
                format!("{name}: {what}"),
                "{result}; {}; {}",
                status(main),
                end_and_count(main)
            );
        }
    }
    for (what, call) in &last {
        must!(cuStreamBeginCapture_v2, main, 0u32);
        let result = call();
        say!(what, "{result}; {}; {}", status(main), end_and_count(main));
    }
    // A blocking stream that captures, and the legacy stream.
    for (what, call) in calls.iter().filter(|(what, _)| {
        what.contains("legacy")
            || [
                "cuMemcpyDtoD",
                "cuMemcpyHtoD",
                "cuMemsetD8",
                "cuCtxSynchronize",
            ]
            .contains(what)
    }) {
        for mode in [0u32, 2] {
            must!(cuStreamBeginCapture_v2, blocking, mode);
            let result = call();
            say!(
                format!("blocking, mode {mode}: {what}"),
                "{result}; {}; {}",
                status(blocking),
                end_and_count(blocking)
            );
        }
    }
    must!(cuStreamBeginCapture_v2, blocking, 2u32);
    say!(
        "is the legacy stream capturing",
        "{}",
        status(CUstream::NULL)
    );
    say!("blocking", "{}", status(blocking));
    let mut flags = 0u32;
    say!(
        "flags of the legacy stream",
        "{}",
        cu!(cuStreamGetFlags, CUstream::NULL, &mut flags)
    );
    say!(
        "a memset in the per-thread stream",
        "{}",
        cu!(cuMemsetD8Async, out, 0u8, 4usize, CU_STREAM_PER_THREAD)
    );
    say!("end", "{}", end_and_count(blocking));
    // What another thread may do.
    for (mode, name) in [(0u32, "global"), (1, "thread-local"), (2, "relaxed")] {
        for own in 0..3u32 {
            must!(cuStreamBeginCapture_v2, main, mode);
            let (result, query) = elsewhere(setup, move || {
                let mut mode = own;
                must!(cuThreadExchangeStreamCaptureMode, &mut mode);
                (
                    cu!(cuMemAlloc_v2, &mut { 0u64 }, 16usize),
                    cu!(cuEventQuery, recorded),
                )
            });
            say!(
                format!("{name}, from a thread of mode {own}"),
                "{result} {query}; {}; {}",
                status(main),
                end_and_count(main)
            );
        }
        for own in 0..3u32 {
            must!(cuStreamBeginCapture_v2, main, mode);
            let mut mode = own;
            must!(cuThreadExchangeStreamCaptureMode, &mut mode);
            let result = cu!(cuMemAlloc_v2, &mut { 0u64 }, 16usize);
            must!(cuThreadExchangeStreamCaptureMode, &mut mode);
            say!(
                format!("{name}, this thread in mode {own}"),
                "{result}; {}; {}",
                status(main),
                end_and_count(main)
            );
        }
        must!(cuStreamBeginCapture_v2, main, mode);
        let result = elsewhere(setup, move || cu!(cuMemsetD8Async, out, 0u8, 4usize, main));
        say!(
            format!("{name}, work from another thread"),
            "{result}; {}; {}",
            status(main),
            end_and_count(main)
        );
    }
    // After an error everything else of the capture says so.
    must!(cuStreamBeginCapture_v2, main, 0u32);
    say!("spoil", "{}", cu!(cuStreamQuery, main));
    say!(
        "work behind it",
        "{}",
        cu!(cuMemsetD8Async, out, 0u8, 4usize, main)
    );
    say!(
        "launch behind it",
        "{}",
        setup.launch("nothing", 1, 1, 0, main, &mut [])
    );
    say!("record behind it", "{}", cu!(cuEventRecord, recorded, main));
    say!(
        "wait behind it",
        "{}",
        cu!(cuStreamWaitEvent, main, recorded, 0u32)
    );
    let mut state = 7u32;
    say!(
        "info behind it",
        "{} {state}",
        cu!(cuStreamGetCaptureInfo, main, &mut state, null_mut::<u64>())
    );
    say!("state", "{state}");
    say!("begin behind it", "{}", begin(main, 0));
    say!("end", "{}", end_and_count(main));
    say!("end again", "{}", end(main).0);
    say!(
        "works again",
        "{}",
        cu!(cuMemsetD8Async, out, 0u8, 4usize, main)
    );
    say!("synchronizes again", "{}", cu!(cuStreamSynchronize, main));
    // Two captures and a dependency between them.
    let fork = event();
    must!(cuStreamBeginCapture_v2, main, 2u32);
    must!(cuStreamBeginCapture_v2, side, 2u32);
    must!(cuMemsetD8Async, out, 0u8, 4usize, main);
    must!(cuEventRecord, fork, main);
    say!("merge", "{}", cu!(cuStreamWaitEvent, side, fork, 0u32));
    say!("main", "{}; {}", status(main), end_and_count(main));
    say!("side", "{}; {}", status(side), end_and_count(side));
    // An event of a capture that is queried in it.
    must!(cuStreamBeginCapture_v2, main, 2u32);
    must!(cuMemsetD8Async, out, 0u8, 4usize, main);
    must!(cuEventRecord, fork, main);
    say!(
        "query in the capture",
        "{}; {}",
        cu!(cuEventQuery, fork),
        status(main)
    );
    say!("end", "{}", end_and_count(main));
    must!(cuStreamBeginCapture_v2, main, 2u32);
    must!(cuEventRecord, fork, main);
    say!(
        "synchronize in the capture",
        "{}; {}",
        cu!(cuEventSynchronize, fork),
        status(main)
    );
    say!("end", "{}", end_and_count(main));
    // A stream that waits outside for an event of a capture that goes on is forked into it; one of an ended one is not.
    must!(cuStreamBeginCapture_v2, main, 2u32);
    must!(cuMemsetD8Async, out, 0u8, 4usize, main);
    must!(cuEventRecord, fork, main);
    say!("end", "{}", end_and_count(main));
    must!(cuStreamBeginCapture_v2, side, 2u32);
    say!(
        "wait in one capture for an event of an earlier one",
        "{}; {}",
        cu!(cuStreamWaitEvent, side, fork, 0u32),
        status(side)
    );
    say!("end", "{}", end_and_count(side));
    say!("begin on the legacy stream while another captures", "{}", {
        must!(cuStreamBeginCapture_v2, main, 0u32);
        let result = begin(CUstream::NULL, 0);
        format!("{result}; {}; {}", status(main), end_and_count(main))
    });
    drop((heap, registered));
    must!(cuEventDestroy_v2, fork);
    must!(cuEventDestroy_v2, recorded);
}

/// Captures whose dependencies are changed, and captures into a graph.
pub fn capture_further(setup: &Setup) {
    let out = alloc(4096);
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    let main = stream(CU_STREAM_NON_BLOCKING);
    must!(cuStreamBeginCapture_v2, main, 2u32);
    must!(cuMemsetD32Async, out, 1u32, 1usize, main);
    let info = |stream: CUstream| -> (
        CUresult,
        u32,
        CUgraph,
        Vec<CUgraphNode>,
        Vec<CUgraphEdgeData>,
    ) {
        let (mut state, mut id, mut graph, mut nodes, mut data, mut count) = (
            7u32,
            0u64,
            CUgraph::NULL,
            null::<CUgraphNode>(),
            null::<CUgraphEdgeData>(),
            0usize,
        );
        let result = cu!(
            cuStreamGetCaptureInfo_v3,
            stream,
            &mut state,
            &mut id,
            &mut graph,
            &mut nodes,
            &mut data,
            &mut count
        );
        if !result.is_ok() || nodes.is_null() {
            return (result, state, graph, Vec::new(), Vec::new());
        }
        // SAFETY: the driver gave arrays of `count`.
        let (nodes, data) = unsafe {
            let edges = if data.is_null() {
                Vec::new()
            } else {
                std::slice::from_raw_parts(data, count).to_vec()
            };
            (std::slice::from_raw_parts(nodes, count).to_vec(), edges)
        };
        (result, state, graph, nodes, data)
    };
    let (result, state, graph, nodes, edges) = info(main);
    say!("info", "{result} {state} {} {:?}", nodes.len(), edges);
    let mut empty = CUgraphNode::NULL;
    say!(
        "add a node to it",
        "{}",
        cu!(
            cuGraphAddEmptyNode,
            &mut empty,
            graph,
            nodes.as_ptr(),
            nodes.len()
        )
    );
    say!(
        "set dependencies",
        "{}",
        cu!(
            cuStreamUpdateCaptureDependencies,
            main,
            &empty,
            1usize,
            1u32
        )
    );
    let (_, _, _, now, _) = info(main);
    say!("they are", "{} {}", now.len(), now[0] == empty);
    let mut other = CUgraphNode::NULL;
    must!(
        cuGraphAddEmptyNode,
        &mut other,
        graph,
        null::<CUgraphNode>(),
        0usize
    );
    say!(
        "add dependencies",
        "{}",
        cu!(
            cuStreamUpdateCaptureDependencies_v2,
            main,
            &other,
            null::<CUgraphEdgeData>(),
            1usize,
            0u32
        )
    );
    say!("now", "{}", info(main).3.len());
    say!(
        "wrong flags",
        "{}",
        cu!(
            cuStreamUpdateCaptureDependencies,
            main,
            &other,
            1usize,
            7u32
        )
    );
    say!(
        "null nodes",
        "{}",
        cu!(
            cuStreamUpdateCaptureDependencies,
            main,
            null::<CUgraphNode>(),
            1usize,
            0u32
        )
    );
    say!("status", "{}", status(main));
    must!(cuMemsetD32Async, out + 4, 2u32, 1usize, main);
    say!(
        "set none",
        "{}",
        cu!(
            cuStreamUpdateCaptureDependencies,
            main,
            null::<CUgraphNode>(),
            0usize,
            1u32
        )
    );
    say!("now", "{}", info(main).3.len());
    must!(cuMemsetD32Async, out + 8, 3u32, 1usize, main);
    let (result, made) = end(main);
    let mut edges = 0usize;
    let nowhere = null_mut::<CUgraphNode>();
    must!(cuGraphGetEdges, made, nowhere, nowhere, &mut edges);
    say!(
        "end",
        "{result} {} {:?} {edges}",
        made == graph,
        kinds(made)
    );
    say!(
        "outside",
        "{}",
        cu!(
            cuStreamUpdateCaptureDependencies,
            main,
            &other,
            1usize,
            0u32
        )
    );
    must!(cuGraphDestroy, made);

    // Into a graph of one's own.
    let mut graph = CUgraph::NULL;
    must!(cuGraphCreate, &mut graph, 0u32);
    let mut first = CUgraphNode::NULL;
    must!(
        cuGraphAddEmptyNode,
        &mut first,
        graph,
        null::<CUgraphNode>(),
        0usize
    );
    let data = null::<CUgraphEdgeData>();
    say!(
        "begin into a graph",
        "{}",
        cu!(
            cuStreamBeginCaptureToGraph,
            main,
            graph,
            &first,
            data,
            1usize,
            2u32
        )
    );
    must!(cuMemsetD32Async, out, 11u32, 4usize, main);
    assert!(setup.store_index(out + 64, 8, 2, main).is_ok());
    let (result, made) = end(main);
    say!("end", "{result} {} {:?}", made == graph, kinds(graph));
    let exec = instantiate(graph);
    must!(cuGraphLaunch, exec, main);
    must!(cuStreamSynchronize, main);
    say!("ran", "{:?} {:?}", read_i32(out, 2), read_i32(out + 64, 4));
    say!(
        "begin into no graph",
        "{}",
        cu!(
            cuStreamBeginCaptureToGraph,
            main,
            CUgraph::NULL,
            null::<CUgraphNode>(),
            data,
            0usize,
            2u32
        )
    );
    must!(
        cuStreamBeginCaptureToGraph,
        main,
        graph,
        &first,
        data,
        1usize,
        2u32
    );
    say!("query in it", "{}", cu!(cuStreamQuery, main));
    let (result, made) = end(main);
    say!("end", "{result} {}", made.0);
    let mut count = 0usize;
    say!(
        "the graph is gone",
        "{} {count}",
        cu!(
            cuGraphGetNodes,
            graph,
            null_mut::<CUgraphNode>(),
            &mut count
        )
    );
    must!(cuGraphExecDestroy, exec);
    // A graph launched in a capture becomes a node.
    must!(cuGraphCreate, &mut graph, 0u32);
    must!(
        cuGraphAddEmptyNode,
        &mut first,
        graph,
        null::<CUgraphNode>(),
        0usize
    );
    let exec = instantiate(graph);
    must!(cuStreamBeginCapture_v2, main, 2u32);
    say!("launch in a capture", "{}", cu!(cuGraphLaunch, exec, main));
    say!(
        "upload in a capture",
        "{}; {}",
        cu!(cuGraphUpload, exec, main),
        status(main)
    );
    let (result, made) = end(main);
    say!("end", "{result}");
    if result.is_ok() {
        say!("kinds", "{:?}", kinds(made));
        must!(cuGraphDestroy, made);
    }
    say!("upload", "{}", cu!(cuGraphUpload, exec, main));
    must!(cuStreamSynchronize, main);
    must!(cuGraphExecDestroy, exec);
    must!(cuGraphDestroy, graph);
    // Pageable memory is read when the graph runs.
    let mut heap = vec![1i32; 64 << 10];
    let mut back = vec![0i32; 64 << 10];
    let len = heap.len() * 4;
    let room = alloc(len);
    must!(cuStreamBeginCapture_v2, main, 2u32);
    must!(cuMemcpyHtoDAsync_v2, room, heap.as_ptr(), len, main);
    must!(cuMemcpyDtoHAsync_v2, back.as_mut_ptr(), room, len, main);
    let (_, graph) = end(main);
    let exec = instantiate(graph);
    for round in 0..3 {
        heap.fill(round + 7);
        must!(cuGraphLaunch, exec, main);
        must!(cuStreamSynchronize, main);
        say!(
            format!("round {round}"),
            "{}",
            back.iter().all(|value| *value == round + 7)
        );
    }
    must!(cuGraphExecDestroy, exec);
    must!(cuGraphDestroy, graph);
    free(room);
    // And so is a stack.
    let (mut given, mut got) = ([0i32; 64], [0i32; 64]);
    must!(cuStreamBeginCapture_v2, main, 2u32);
    must!(cuMemcpyHtoDAsync_v2, out, given.as_ptr(), 256usize, main);
    must!(cuMemcpyDtoHAsync_v2, got.as_mut_ptr(), out, 256usize, main);
    let (_, graph) = end(main);
    let exec = instantiate(graph);
    for round in 0..3 {
        given.fill(std::hint::black_box(round + 70));
        std::hint::black_box(&given);
        must!(cuGraphLaunch, exec, main);
        must!(cuStreamSynchronize, main);
        let same = std::hint::black_box(&got)
            .iter()
            .all(|value| *value == round + 70);
        say!(format!("stack, round {round}"), "{same}");
    }
    must!(cuGraphExecDestroy, exec);
    must!(cuGraphDestroy, graph);
    must!(cuStreamDestroy_v2, main);
    free(out);
}

/// Operations at addresses that are nobody's: libraries capture such work only to look at the graph.
pub fn captured_addresses(_: &Setup) {
    let memory = alloc(4096);
    let freed = alloc(1 << 22);
    free(freed);
    let host = vec![0u8; 4096];
    let host_address = host.as_ptr() as u64;
    // Pages that no copy names: through the proxy those are registered.
    let untouched = vec![0u8; 1 << 16];
    let main = stream(CU_STREAM_NON_BLOCKING);
    let places = [
        ("NULL", 0u64),
        ("16", 16),
        ("a page nobody has", 0x1000_0000),
        ("far above", 0x7fff_ffff_f000),
        ("not canonical", 0xdead_beef_dead_beef),
        ("freed", freed),
        (
            "memory of the program",
            untouched.as_ptr() as u64 + (1 << 15),
        ),
        ("beyond its end", memory + 4090),
    ];
    for (name, place) in places {
        // Through the proxy a copy of what is no memory is refused when it is captured, not when the graph runs, and
        // a copy of the program's memory registers that. What is freed the driver may still have.
        let refused_early = [
            "16",
            "a page nobody has",
            "far above",
            "not canonical",
            "memory of the program",
            "freed",
        ]
        .contains(&name);
        // What is freed the driver may keep for the next allocation, and then takes nodes there.
        if place != freed {
            let mut graph = CUgraph::NULL;
            must!(cuGraphCreate, &mut graph, 0u32);
            say!(
                format!("memset node at {name}"),
                "{}",
                super::graphs::memset_at(graph, place)
            );
            if !refused_early {
                say!(
                    format!("copy node to {name}"),
                    "{}",
                    super::graphs::copy_at(graph, place, memory)
                );
                say!(
                    format!("copy node from {name}"),
                    "{}",
                    super::graphs::copy_at(graph, memory, place)
                );
            }
            let mut exec = CUgraphExec::NULL;
            say!(
                format!("instantiate with {name}"),
                "{}",
                cu!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64)
            );
            if !exec.is_null() {
                must!(cuGraphExecDestroy, exec);
            }
            must!(cuGraphDestroy, graph);
        }
        must!(cuStreamBeginCapture_v2, main, 2u32);
        let set = cu!(cuMemsetD8Async, place, 1u8, 64usize, main);
        say!(
            format!("memset at {name}"),
            "{set} {} {}",
            status(main),
            end_and_count(main)
        );
        must!(cuStreamBeginCapture_v2, main, 2u32);
        let rows = cu!(
            cuMemsetD2D8Async,
            place,
            128usize,
            1u8,
            64usize,
            3usize,
            main
        );
        say!(
            format!("rows at {name}"),
            "{rows} {} {}",
            status(main),
            end_and_count(main)
        );
        for (call, result) in [
            ("to", 0),
            ("from", 1),
            ("into the program from", 2),
            ("from the program to", 3),
            ("any to", 4),
            ("any from", 5),
        ] {
            if refused_early && result >= 4 {
                continue;
            }
            must!(cuStreamBeginCapture_v2, main, 2u32);
            let done = match result {
                0 => cu!(cuMemcpyDtoDAsync_v2, place, memory, 64usize, main),
                1 => cu!(cuMemcpyDtoDAsync_v2, memory, place, 64usize, main),
                2 => cu!(cuMemcpyDtoHAsync_v2, host_address, place, 64usize, main),
                3 => cu!(cuMemcpyHtoDAsync_v2, place, host_address, 64usize, main),
                4 => cu!(cuMemcpyAsync, place, memory, 64usize, main),
                _ => cu!(cuMemcpyAsync, memory, place, 64usize, main),
            };
            say!(
                format!("copy {call} {name}"),
                "{done} {} {}",
                status(main),
                end_and_count(main)
            );
        }
    }
    must!(cuStreamBeginCapture_v2, main, 2u32);
    let set = cu!(cuMemsetD32Async, 0x1000_0000u64, 1u32, 16usize, main);
    let (_, graph) = end(main);
    if set.is_ok() {
        let mut exec = CUgraphExec::NULL;
        say!(
            "instantiate a memset at a page nobody has",
            "{}",
            cu!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64)
        );
        if !exec.is_null() {
            must!(cuGraphExecDestroy, exec);
        }
        must!(cuGraphDestroy, graph);
    }
}

/// The kinds of memory that a captured copy names are those of the call.
pub fn captured_kinds(_: &Setup) {
    let memory = alloc(4096);
    let mut pinned = null_mut::<c_void>();
    must!(cuMemHostAlloc, &mut pinned, 4096usize, 0u32);
    let host = pinned as u64;
    let main = stream(CU_STREAM_NON_BLOCKING);
    let copies = [
        "any to device",
        "any to host",
        "any within",
        "to device",
        "to host",
        "within",
    ];
    for (call, name) in copies.into_iter().enumerate() {
        must!(cuStreamBeginCapture_v2, main, 2u32);
        match call {
            0 => must!(cuMemcpyAsync, memory, host, 64usize, main),
            1 => must!(cuMemcpyAsync, host, memory, 64usize, main),
            2 => must!(cuMemcpyAsync, memory, memory + 128, 64usize, main),
            3 => must!(
                cuMemcpyHtoDAsync_v2,
                memory,
                pinned.cast_const(),
                64usize,
                main
            ),
            4 => must!(cuMemcpyDtoHAsync_v2, pinned, memory, 64usize, main),
            _ => must!(cuMemcpyDtoDAsync_v2, memory, memory + 128, 64usize, main),
        }
        let (_, graph) = end(main);
        let (mut node, mut count) = ([CUgraphNode::NULL; 1], 1usize);
        must!(cuGraphGetNodes, graph, node.as_mut_ptr(), &mut count);
        let mut copy = CUDA_MEMCPY3D::default();
        must!(cuGraphMemcpyNodeGetParams, node[0], &mut copy);
        let address = |kind: u32, host: u64, device: u64| match kind {
            CU_MEMORYTYPE_HOST => host,
            _ => device,
        };
        let to = address(copy.dst_type, copy.dst_host, copy.dst_device);
        let from = address(copy.src_type, copy.src_host, copy.src_device);
        let (to, from) = (
            [memory, host].contains(&to),
            [memory, host, memory + 128].contains(&from),
        );
        say!(name, "{} to {} {from} {to}", copy.src_type, copy.dst_type);
        let exec = instantiate(graph);
        must!(cuGraphLaunch, exec, main);
        must!(cuStreamSynchronize, main);
        must!(cuGraphExecDestroy, exec);
        must!(cuGraphDestroy, graph);
    }
    must!(cuMemFreeHost, pinned);
    free(memory);
}
