//! Streams, default streams, events.

use super::*;

pub fn streams(setup: &Setup) {
    let out = alloc(4096);
    let mut streams = [CUstream::NULL; 2];
    must!(cuStreamCreate, &mut streams[0], 0u32);
    must!(
        cuStreamCreateWithPriority,
        &mut streams[1],
        CU_STREAM_NON_BLOCKING,
        -1 as c_int
    );
    let [blocking, free_running] = streams;
    let mut flags = 7u32;
    say!(
        "flags",
        "{} {flags}",
        cu!(cuStreamGetFlags, blocking, &mut flags)
    );
    must!(cuStreamGetFlags, free_running, &mut flags);
    say!("flags of the other", "{flags}");
    let mut priority = 9 as c_int;
    say!(
        "priority",
        "{} {priority}",
        cu!(cuStreamGetPriority, free_running, &mut priority)
    );
    say!("its priority", "{priority}");
    say!("query idle", "{}", cu!(cuStreamQuery, blocking));
    let busy = setup.while_busy(out, 1, blocking, || cu!(cuStreamQuery, blocking));
    say!("query busy", "{busy}");
    say!("query the other", "{}", cu!(cuStreamQuery, free_running));
    say!("synchronize", "{}", cu!(cuStreamSynchronize, blocking));
    say!("query done", "{}", cu!(cuStreamQuery, blocking));
    say!("stored", "{}", read_i32(out, 1)[0]);
    // The legacy default stream waits for blocking streams, and they for it.
    setup.slow_store(out, 2, blocking);
    must!(cuMemcpyDtoDAsync_v2, out + 4, out, 4usize, CUstream::NULL);
    must!(cuMemcpyDtoDAsync_v2, out + 8, out + 4, 4usize, blocking);
    must!(cuStreamSynchronize, blocking);
    say!("legacy order", "{:?}", read_i32(out, 3));
    setup.slow_store(out, 3, CUstream::NULL);
    must!(cuMemcpyDtoDAsync_v2, out + 12, out, 4usize, blocking);
    must!(cuStreamSynchronize, blocking);
    say!(
        "a blocking stream waits for the default one",
        "{}",
        read_i32(out + 12, 1)[0]
    );
    let busy = setup.while_busy(out, 4, CUstream::NULL, || {
        must!(cuMemsetD32Async, out + 16, 6u32, 1usize, free_running);
        must!(cuStreamSynchronize, free_running);
        cu!(cuStreamQuery, CU_STREAM_LEGACY)
    });
    say!("a non-blocking stream does not", "{busy}");
    must!(cuStreamSynchronize, CU_STREAM_LEGACY);
    say!(
        "after it",
        "{:?}",
        (read_i32(out, 1)[0], read_i32(out + 16, 1)[0])
    );
    // Per-thread default streams.
    let busy = setup.while_busy(out, 5, CU_STREAM_PER_THREAD, || {
        cu!(cuStreamQuery, CU_STREAM_PER_THREAD)
    });
    say!("per-thread stream busy", "{busy}");
    must!(cuMemcpyDtoDAsync_v2, out + 20, out, 4usize, CUstream::NULL);
    must!(cuStreamSynchronize, CUstream::NULL);
    say!(
        "legacy waits for the per-thread stream",
        "{}",
        read_i32(out + 20, 1)[0]
    );
    setup.slow_store(out, 6, CU_STREAM_PER_THREAD);
    must!(
        cuMemcpyDtoDAsync_v2_ptsz,
        out + 24,
        out,
        4usize,
        CUstream::NULL
    );
    must!(cuStreamSynchronize_ptsz, CUstream::NULL);
    say!("ptsz means per-thread", "{}", read_i32(out + 24, 1)[0]);
    // Waiting for an event of another stream.
    let mut event = CUevent::NULL;
    must!(cuEventCreate, &mut event, CU_EVENT_DISABLE_TIMING);
    setup.slow_store(out, 7, free_running);
    must!(cuEventRecord, event, free_running);
    must!(cuStreamWaitEvent, blocking, event, 0u32);
    must!(cuMemcpyDtoDAsync_v2, out + 28, out, 4usize, blocking);
    must!(cuStreamSynchronize, blocking);
    say!("stream wait event", "{}", read_i32(out + 28, 1)[0]);
    must!(cuEventDestroy_v2, event);
    setup.slow_store(out, 8, free_running);
    say!(
        "destroy a busy stream",
        "{}",
        cu!(cuStreamDestroy_v2, free_running)
    );
    must!(cuCtxSynchronize);
    say!("its work was done", "{}", read_i32(out, 1)[0]);
    must!(cuStreamDestroy_v2, blocking);
    let many: Vec<CUstream> = (0..100)
        .map(|_| {
            let mut stream = CUstream::NULL;
            must!(cuStreamCreate, &mut stream, 0u32);
            stream
        })
        .collect();
    for (i, stream) in many.iter().enumerate() {
        must!(
            cuMemsetD32Async,
            out + 4 * i as u64,
            i as u32,
            1usize,
            *stream
        );
    }
    must!(cuCtxSynchronize);
    say!(
        "100 streams",
        "{}",
        read_i32(out, 100)
            .iter()
            .enumerate()
            .all(|(i, v)| *v == i as i32)
    );
    for stream in many {
        must!(cuStreamDestroy_v2, stream);
    }
    say!(
        "bad flags",
        "{}",
        cu!(cuStreamCreate, &mut streams[0], 99u32)
    );
    free(out);
}

pub fn events(setup: &Setup) {
    let out = alloc(4096);
    let [mut start, mut end, mut quiet] = [CUevent::NULL; 3];
    must!(cuEventCreate, &mut start, 0u32);
    must!(cuEventCreate, &mut end, 0u32);
    must!(cuEventCreate, &mut quiet, CU_EVENT_DISABLE_TIMING);
    say!("query unrecorded", "{}", cu!(cuEventQuery, start));
    say!(
        "synchronize unrecorded",
        "{}",
        cu!(cuEventSynchronize, start)
    );
    let mut ms = -1f32;
    say!(
        "elapsed unrecorded",
        "{}",
        cu!(cuEventElapsedTime, &mut ms, start, end)
    );
    must!(cuEventRecord, start, CUstream::NULL);
    let busy = setup.while_busy(out, 1, CUstream::NULL, || {
        must!(cuEventRecord, end, CUstream::NULL);
        cu!(cuEventQuery, end)
    });
    say!("query busy", "{busy}");
    let busy = setup.while_busy(out, 1, CUstream::NULL, || {
        must!(cuEventRecord, end, CUstream::NULL);
        cu!(cuEventElapsedTime, &mut ms, start, end)
    });
    say!("elapsed busy", "{busy}");
    say!("synchronize", "{}", cu!(cuEventSynchronize, end));
    say!("query done", "{}", cu!(cuEventQuery, end));
    say!(
        "elapsed",
        "{} {}",
        cu!(cuEventElapsedTime, &mut ms, start, end),
        ms > 0.0 && ms < 60_000.0
    );
    must!(cuEventRecord, quiet, CUstream::NULL);
    must!(cuEventSynchronize, quiet);
    say!(
        "elapsed without timing",
        "{}",
        cu!(cuEventElapsedTime, &mut ms, start, quiet)
    );
    // An event is about what was before it, not about what comes later.
    must!(cuEventRecord, start, CUstream::NULL);
    let busy = setup.while_busy(out, 2, CUstream::NULL, || {
        must!(cuEventSynchronize, start);
        cu!(cuStreamQuery, CUstream::NULL)
    });
    say!("later work still runs", "{busy}");
    must!(cuCtxSynchronize);
    say!(
        "recorded again",
        "{}",
        cu!(cuEventRecord, start, CUstream::NULL)
    );
    must!(cuEventSynchronize, start);
    say!("destroy", "{}", cu!(cuEventDestroy_v2, start));
    must!(cuEventDestroy_v2, end);
    must!(cuEventDestroy_v2, quiet);
    say!("bad flags", "{}", cu!(cuEventCreate, &mut start, 0x1000u32));
    free(out);
}
