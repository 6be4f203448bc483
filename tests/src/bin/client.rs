//! Clients for the end-to-end tests, which see nothing but the driver API: `client work [ROUNDS]`, `launch`, `idle`,
//! `stray`, `fork`, `beside`, `exec`, `early`, `blocked`, `wait`, `pending`, `share`, `threads`, `copies`, `bulk`, `small`,
//! `launches`, `heap [MIB]`, `managed`, `crowd THREADS`.
//!
//! A call that fails ends it: the status is printed, and the exit status is 1.

use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use mpsshim_tests::peer::PTX;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::io::{self, Write};
use std::process::{Command, ExitCode};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

type Status<T = ()> = Result<T, CUresult>;

/// What every client has.
struct Client {
    fill: CUfunction,
    stray: CUfunction,
    stream: CUstream,
    memory: CUdeviceptr,
}

/// Takes blocks of a MiB from the heap and stores their number. Beyond 1,024 it stops.
const GRAB: &str = ".version 7.0
.target sm_50
.address_size 64
.extern .func (.param .b64 address) malloc (.param .b64 bytes);
.visible .entry grab(.param .u64 out)
{
    .reg .pred %none;
    .reg .b32 %count;
    .reg .b64 %out, %block, %bytes;
    mov.u32 %count, 0;
    mov.u64 %bytes, 1048576;
again:
    {
        .param .b64 argument;
        .param .b64 result;
        st.param.b64 [argument], %bytes;
        call.uni (result), malloc, (argument);
        ld.param.b64 %block, [result];
    }
    setp.eq.u64 %none, %block, 0;
    @%none bra done;
    st.u32 [%block], %count;
    add.u32 %count, %count, 1;
    setp.lt.u32 %none, %count, 1024;
    @%none bra again;
done:
    ld.param.u64 %out, [out];
    cvta.to.global.u64 %out, %out;
    st.global.u32 [%out], %count;
    ret;
}
";
/// Managed variables and kernels that use them.
const VARIABLES: &str = include_str!("../../fixtures/managed/variables.ptx");
const WORDS: u32 = 1024;
const BYTES: usize = WORDS as usize * 4;
/// More than fits a ring's message.
const LARGE: usize = 512 << 10;

impl Client {
    fn new() -> Status<Client> {
        cu!(cuInit, 0 as c_uint).ok()?;
        let mut device: CUdevice = 0;
        cu!(cuDeviceGet, &mut device, 0 as c_int).ok()?;
        let mut context = CUcontext::NULL;
        cu!(cuDevicePrimaryCtxRetain, &mut context, device).ok()?;
        cu!(cuCtxSetCurrent, context).ok()?;
        // With it, the session ends with its server.
        let properties = CUmemPoolProps {
            kind: CU_MEM_ALLOCATION_TYPE_PINNED,
            handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location: CUmemLocation {
                kind: CU_MEM_LOCATION_TYPE_DEVICE,
                id: 0,
            },
            ..CUmemPoolProps::default()
        };
        let mut pool = CUmemoryPool::NULL;
        cu!(cuMemPoolCreate, &mut pool, &raw const properties).ok()?;
        Client::in_context()
    }

    /// In the thread's context.
    fn in_context() -> Status<Client> {
        let image = CString::new(PTX).expect("no NUL");
        let mut module = CUmodule::NULL;
        cu!(cuModuleLoadData, &mut module, image.as_ptr()).ok()?;
        let [mut fill, mut stray] = [CUfunction::NULL; 2];
        cu!(cuModuleGetFunction, &mut fill, module, c"fill".as_ptr()).ok()?;
        cu!(cuModuleGetFunction, &mut stray, module, c"stray".as_ptr()).ok()?;
        let mut stream = CUstream::NULL;
        cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok()?;
        let mut memory: CUdeviceptr = 0;
        cu!(cuMemAlloc_v2, &mut memory, LARGE).ok()?;
        Ok(Client {
            fill,
            stray,
            stream,
            memory,
        })
    }

    fn launch(&self, function: CUfunction, params: &mut [*mut c_void]) -> Status {
        self.launch_blocks(WORDS / 32, 32, function, params)
    }

    /// Launches one thread.
    fn launch_once(&self, function: CUfunction, params: &mut [*mut c_void]) -> Status {
        self.launch_blocks(1, 1, function, params)?;
        self.synchronize()
    }

    fn launch_blocks(
        &self,
        blocks: u32,
        threads: u32,
        function: CUfunction,
        params: &mut [*mut c_void],
    ) -> Status {
        cu!(
            cuLaunchKernel,
            function,
            blocks,
            1u32,
            1u32,
            threads,
            1u32,
            1u32,
            0u32,
            self.stream,
            params.as_mut_ptr(),
            null_mut::<*mut c_void>()
        )
        .ok()
    }

    /// out[i] = 3 * i * seed.
    fn fill(&self, mut out: CUdeviceptr, mut seed: u32) -> Status {
        let mut rounds = 3u32;
        let params = &mut [
            (&raw mut out).cast(),
            (&raw mut seed).cast(),
            (&raw mut rounds).cast(),
        ];
        self.launch(self.fill, params)
    }

    /// Writes where nothing is.
    fn stray(&self) -> Status {
        let mut nowhere = 0x10u64;
        self.launch(self.stray, &mut [(&raw mut nowhere).cast()])?;
        self.synchronize()
    }

    /// Launches a kernel that takes its time, by each launch call, and says whether it is complete when the call returns;
    /// then captures a launch, and launches a kernel that faults.
    fn launches(&self) -> Status {
        let (mut out, mut seed, mut rounds) = (self.memory, 1u32, 20_000u32);
        let params = &mut [
            (&raw mut out).cast::<c_void>(),
            (&raw mut seed).cast(),
            (&raw mut rounds).cast(),
        ];
        let none = null_mut::<*mut c_void>();
        let query = || cu!(cuStreamQuery, self.stream);
        self.launch(self.fill, params)?;
        say(&format!("cuLaunchKernel {}", query()));
        let config = CUlaunchConfig {
            grid: [WORDS / 32, 1, 1],
            block: [32, 1, 1],
            shared_mem_bytes: 0,
            stream: self.stream,
            attrs: std::ptr::null(),
            num_attrs: 0,
        };
        cu!(
            cuLaunchKernelEx,
            &config,
            self.fill,
            params.as_mut_ptr(),
            none
        )
        .ok()?;
        say(&format!("cuLaunchKernelEx {}", query()));
        cu!(
            cuFuncSetBlockShape,
            self.fill,
            32 as c_int,
            1 as c_int,
            1 as c_int
        )
        .ok()?;
        cu!(cuParamSetSize, self.fill, 16 as c_uint).ok()?;
        cu!(
            cuParamSetv,
            self.fill,
            0 as c_int,
            &raw mut out,
            8 as c_uint
        )
        .ok()?;
        cu!(cuParamSeti, self.fill, 8 as c_int, seed).ok()?;
        cu!(cuParamSeti, self.fill, 12 as c_int, rounds).ok()?;
        let blocks = (WORDS / 32) as c_int;
        cu!(
            cuLaunchGridAsync,
            self.fill,
            blocks,
            1 as c_int,
            self.stream
        )
        .ok()?;
        say(&format!("cuLaunchGridAsync {}", query()));
        cu!(cuStreamBeginCapture_v2, self.stream, 0 as c_uint).ok()?;
        self.launch(self.fill, params)?;
        let mut graph = CUgraph::NULL;
        cu!(cuStreamEndCapture, self.stream, &mut graph).ok()?;
        say("captured");
        let mut nowhere = 0x10u64;
        self.launch(self.stray, &mut [(&raw mut nowhere).cast()])?;
        say("launched");
        self.synchronize()
    }

    /// Pageable copies of sizes around those at which the shim takes another way, there and back, by two threads.
    fn copies(&self) -> Status {
        const KIB: usize = 1 << 10;
        let sizes = [
            1, 4, 5, 128, 511, 512, 513, 1024, 2047, 2048, 3000, 4095, 4096, 9000,
        ];
        let copy = |seed: u32| -> Status {
            let mut stream = CUstream::NULL;
            cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok()?;
            let mut memory: CUdeviceptr = 0;
            cu!(cuMemAlloc_v2, &mut memory, 9001 * KIB).ok()?;
            for (round, size) in sizes.into_iter().enumerate() {
                for len in [size * KIB - 3, size * KIB, size * KIB + 7] {
                    // Of one byte more, so that nothing is aligned.
                    let byte =
                        |at: usize| (at as u32).wrapping_mul(seed + round as u32).to_le_bytes()[1];
                    let sent: Vec<u8> = (0..=len).map(byte).collect();
                    let mut back = vec![0u8; len + 2];
                    let (from, to) = (&raw const sent[1], &raw mut back[1]);
                    cu!(cuMemcpyHtoDAsync_v2, memory, from, len, stream).ok()?;
                    cu!(cuMemcpyDtoHAsync_v2, to, memory, len, stream).ok()?;
                    cu!(cuStreamSynchronize, stream).ok()?;
                    assert!(sent[1..] == back[1..=len], "{len} bytes");
                    assert_eq!((back[0], back[len + 1]), (0, 0), "{len} bytes");
                }
            }
            cu!(cuMemFree_v2, memory).ok()
        };
        let mut context = CUcontext::NULL;
        cu!(cuCtxGetCurrent, &mut context).ok()?;
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                cu!(cuCtxSetCurrent, context).ok()?;
                copy(3)
            });
            copy(5).and(other.join().expect("no panic"))
        })?;
        say("copied");
        Ok(())
    }

    /// Copies of 32 MiB of pinned memory each way, of which several are in flight, until it is killed.
    fn bulk(&self) -> Status {
        const BULK: usize = 32 << 20;
        let mut memory: CUdeviceptr = 0;
        cu!(cuMemAlloc_v2, &mut memory, BULK).ok()?;
        let mut pinned = null_mut::<c_void>();
        cu!(cuMemHostAlloc, &mut pinned, BULK, 0 as c_uint).ok()?;
        for round in 0u64.. {
            for _ in 0..4 {
                cu!(cuMemcpyHtoDAsync_v2, memory, pinned, BULK, self.stream).ok()?;
                cu!(cuMemcpyDtoHAsync_v2, pinned, memory, BULK, self.stream).ok()?;
            }
            if round == 0 {
                say("busy");
            }
            self.synchronize()?;
        }
        Ok(())
    }

    /// Small copies of pinned memory at any alignment, each way, between kernels of the same stream: the kernels' words
    /// are copied out, other bytes are copied in and out again.
    fn small(&self) -> Status {
        let mut pinned = null_mut::<c_void>();
        cu!(cuMemHostAlloc, &mut pinned, 4 * BYTES, 0 as c_uint).ok()?;
        let (words, sent, back) = (pinned as u64, pinned as u64 + BYTES as u64, {
            pinned as u64 + 2 * BYTES as u64
        });
        // SAFETY: `at` is in `pinned`, which has 4 * BYTES bytes; all copies are done when it is looked at.
        let bytes = |at: u64| unsafe { std::slice::from_raw_parts_mut(at as *mut u8, BYTES) };
        let lens = (1..40).chain([63, 64, 255, 256, 300, 1024, 2049, 4000]);
        for (round, len) in lens.cycle().take(400).enumerate() {
            let (seed, at) = (round as u32 + 1, [0, 1, 3, 4, 8, 16][round % 6]);
            bytes(sent).fill_with({
                let mut next = seed as u8;
                move || {
                    next = next.wrapping_mul(5).wrapping_add(1);
                    next
                }
            });
            bytes(back).fill(0xee);
            self.fill(self.memory, seed)?;
            cu!(cuMemcpyDtoHAsync_v2, words, self.memory, BYTES, self.stream).ok()?;
            let (from, to) = (sent + round as u64 % 5, self.memory + at);
            cu!(cuMemcpyHtoDAsync_v2, to, from, len, self.stream).ok()?;
            cu!(cuMemcpyDtoHAsync_v2, back + at, to, len, self.stream).ok()?;
            // Overwrites what was copied, after it was copied.
            self.fill(self.memory, seed + 1)?;
            self.synchronize()?;
            for (index, word) in bytes(words).chunks_exact(4).enumerate() {
                let expected = (index as u32).wrapping_mul(seed).wrapping_mul(3);
                assert_eq!(
                    word,
                    expected.to_le_bytes(),
                    "word {index} of round {round}"
                );
            }
            let (first, skip) = (at as usize, round % 5);
            let back = bytes(back);
            let sent = &bytes(sent)[skip..skip + len];
            assert!(back[first..first + len] == *sent, "{len} bytes at {at}");
            back[first..first + len].fill(0xee);
            assert!(back.iter().all(|byte| *byte == 0xee), "{len} bytes at {at}");
        }
        cu!(cuMemFreeHost, pinned).ok()?;
        say("copied");
        Ok(())
    }

    fn synchronize(&self) -> Status {
        cu!(cuStreamSynchronize, self.stream).ok()
    }

    /// Allocates device and pinned memory, launches, copies small and large blocks each way, checks, and frees.
    fn round(&self, seed: u32) -> Status {
        let mut extra: CUdeviceptr = 0;
        cu!(cuMemAlloc_v2, &mut extra, LARGE).ok()?;
        let mut pinned = null_mut::<c_void>();
        cu!(cuMemHostAlloc, &mut pinned, BYTES, 0 as c_uint).ok()?;
        let sent: Vec<u32> = (0..LARGE as u32 / 4).map(|i| i ^ seed).collect();
        cu!(
            cuMemcpyHtoDAsync_v2,
            extra,
            sent.as_ptr(),
            LARGE,
            self.stream
        )
        .ok()?;
        cu!(cuMemcpyDtoDAsync_v2, self.memory, extra, LARGE, self.stream).ok()?;
        self.fill(extra, seed)?;
        cu!(cuMemcpyDtoHAsync_v2, pinned, extra, BYTES, self.stream).ok()?;
        let mut back = vec![0u32; sent.len()];
        cu!(
            cuMemcpyDtoHAsync_v2,
            back.as_mut_ptr(),
            self.memory,
            LARGE,
            self.stream
        )
        .ok()?;
        self.synchronize()?;
        assert!(back == sent, "a copy there and back differs");
        for i in 0..WORDS {
            // SAFETY: `pinned` has BYTES bytes, and the copy into it is done.
            let found = unsafe { pinned.cast::<u32>().add(i as usize).read() };
            assert_eq!(
                found,
                i.wrapping_mul(seed).wrapping_mul(3),
                "word {i} of round {seed}"
            );
        }
        cu!(cuMemFreeHost, pinned).ok()?;
        cu!(cuMemFree_v2, extra).ok()
    }

    fn work(&self, rounds: u32) -> Status {
        for round in 1..=rounds {
            self.round(round)?;
            if round == 1 {
                say("busy");
            }
        }
        Ok(())
    }

    fn launch_on_and_on(&self) -> Status {
        say("busy");
        loop {
            self.fill(self.memory, 1)?;
            self.synchronize()?;
        }
    }

    /// Kernels that could fill softgpu's device, so that some are always in flight.
    fn flood(&self) -> Status {
        say("busy");
        let (mut out, mut seed, mut rounds) = (self.memory, 1u32, 500u32);
        loop {
            for _ in 0..64 {
                let params = &mut [
                    (&raw mut out).cast(),
                    (&raw mut seed).cast(),
                    (&raw mut rounds).cast(),
                ];
                self.launch_blocks(4 * WORDS / 32, 32, self.fill, params)?;
            }
            self.synchronize()?;
        }
    }

    /// Until the end of its input: kernels of several sizes that each overwrite results of those before, and a copy of all
    /// results. Most could fill softgpu's device.
    fn ordered(&self) -> Status {
        const ROUNDS: u32 = 200;
        // Of the device's multiprocessors, the blocks of one are 32.
        const BLOCKS: [u32; 4] = [120, 128, 90, 1];
        let ends = Arc::new(AtomicBool::new(false));
        let told = ends.clone();
        std::thread::spawn(move || {
            let _ = io::stdin().read_line(&mut String::new());
            told.store(true, Ordering::Relaxed);
        });
        let mut expected = vec![0u32; 2 * 128 * 32];
        let bytes = expected.len() * 4;
        cu!(cuMemsetD8Async, self.memory, 0u8, bytes, self.stream).ok()?;
        say("busy");
        let mut seed = 0u32;
        while !ends.load(Ordering::Relaxed) {
            for _ in 0..24 {
                seed = seed.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
                let blocks = BLOCKS[(seed >> 28) as usize % BLOCKS.len()];
                let from = (seed >> 8) as usize % (expected.len() - blocks as usize * 32 + 1);
                let (mut out, mut rounds) = (self.memory + from as u64 * 4, ROUNDS);
                let params = &mut [
                    (&raw mut out).cast(),
                    (&raw mut seed).cast(),
                    (&raw mut rounds).cast(),
                ];
                self.launch_blocks(blocks, 32, self.fill, params)?;
                for (i, word) in (0..blocks * 32).zip(&mut expected[from..]) {
                    *word = i.wrapping_mul(seed).wrapping_mul(ROUNDS);
                }
            }
            let mut found = vec![0u32; expected.len()];
            cu!(
                cuMemcpyDtoHAsync_v2,
                found.as_mut_ptr(),
                self.memory,
                bytes,
                self.stream
            )
            .ok()?;
            self.synchronize()?;
            assert!(
                found == expected,
                "results of kernels that overwrite each other"
            );
        }
        Ok(())
    }

    /// One call after a line on standard input.
    fn idle(&self) -> Status {
        say("ready");
        io::stdin().read_line(&mut String::new()).expect("stdin");
        cu!(cuStreamQuery, self.stream).ok()
    }

    /// Uses managed variables, of a module and of a library, from the host and in kernels.
    fn managed(&self) -> Status {
        let image = CString::new(VARIABLES).expect("no NUL");
        let mut module = CUmodule::NULL;
        cu!(cuModuleLoadData, &mut module, image.as_ptr()).ok()?;
        let variable = |name: &CStr| -> Status<(u64, usize)> {
            let (mut start, mut len) = (0u64, 0usize);
            cu!(
                cuModuleGetGlobal_v2,
                &mut start,
                &mut len,
                module,
                name.as_ptr()
            )
            .ok()?;
            Ok((start, len))
        };
        let function = |name: &CStr| -> Status<CUfunction> {
            let mut function = CUfunction::NULL;
            cu!(cuModuleGetFunction, &mut function, module, name.as_ptr()).ok()?;
            Ok(function)
        };
        let (counter, values, table) = (
            variable(c"counter")?,
            variable(c"values")?,
            variable(c"table")?,
        );
        let (mut plain, mut len) = variable(c"plain")?;
        say(&format!(
            "bytes {} {} {} {len}",
            counter.1, values.1, table.1
        ));
        // SAFETY: managed memory of these lengths, which no kernel uses meanwhile.
        let word = |at: u64| unsafe { (at as *mut i32).read_volatile() };
        let single = |at: u64| f64::from(f32::from_bits(word(at) as u32));
        // SAFETY: as above.
        let double = |at: u64| unsafe { (at as *mut f64).read_volatile() };
        let show = |what: &str| {
            let (sum, value) = (double(table.0 + 16), single(values.0 + 4 * 3));
            say(&format!("{what} {} {value} {sum}", word(counter.0)));
        };
        show("first");
        let add = function(c"add")?;
        let mut three = 3i32;
        self.launch_once(add, &mut [(&raw mut three).cast()])?;
        show("launched");
        // SAFETY: as above.
        unsafe { (counter.0 as *mut i32).write_volatile(100) };
        self.launch_once(add, &mut [(&raw mut three).cast()])?;
        show("written");
        let mut out = self.memory;
        self.launch_once(function(c"where")?, &mut [(&raw mut out).cast()])?;
        let mut address = 0u64;
        cu!(cuMemcpyDtoH_v2, &raw mut address, self.memory, 8usize).ok()?;
        let mut managed = 0u32;
        let attribute = CU_POINTER_ATTRIBUTE_IS_MANAGED;
        cu!(
            cuPointerGetAttribute,
            &raw mut managed,
            attribute,
            counter.0
        )
        .ok()?;
        say(&format!("same {} managed {managed}", address == counter.0));
        let (copy, mut four) = (7i32, 4usize);
        cu!(cuMemcpyHtoD_v2, counter.0, &raw const copy, four).ok()?;
        cu!(cuMemcpyDtoD_v2, self.memory, counter.0, four).ok()?;
        let mut back = 0i32;
        cu!(cuMemcpyDtoH_v2, &raw mut back, self.memory, four).ok()?;
        say(&format!("copied {} {back}", word(counter.0)));
        // Another image with these variables has its own.
        let library = load_library(&image)?;
        let mut other = 0u64;
        for name in [c"counter", c"plain"] {
            let status = cu!(
                cuLibraryGetManaged,
                &mut other,
                &mut four,
                library,
                name.as_ptr()
            );
            say(&format!("{} {status}", name.to_string_lossy()));
        }
        let global = cu!(
            cuLibraryGetGlobal,
            &mut plain,
            &mut len,
            library,
            c"counter".as_ptr()
        );
        say(&format!("{global} {}", word(plain)));
        cu!(cuModuleUnload, module).ok()?;
        say(&format!("kept {}", word(plain)));
        cu!(cuLibraryUnload, library).ok()?;
        self.round(2)
    }

    /// Takes blocks of a MiB in a kernel until there is no memory left in its heap, whose size it sets before if one is
    /// given, and keeps them until the standard input ends.
    fn heap(&self, mib: Option<u32>) -> Status {
        self.round(1)?;
        let limit = CU_LIMIT_MALLOC_HEAP_SIZE;
        if let Some(mib) = mib {
            cu!(cuCtxSetLimit, limit, (mib as usize) << 20).ok()?;
        }
        let mut size = 0usize;
        cu!(cuCtxGetLimit, &mut size, limit).ok()?;
        let image = CString::new(GRAB).expect("no NUL");
        let mut module = CUmodule::NULL;
        cu!(cuModuleLoadData, &mut module, image.as_ptr()).ok()?;
        let mut grab = CUfunction::NULL;
        cu!(cuModuleGetFunction, &mut grab, module, c"grab".as_ptr()).ok()?;
        let mut out = self.memory;
        let params = &mut [(&raw mut out).cast()];
        self.launch_once(grab, params)?;
        let mut blocks = 0u32;
        cu!(cuMemcpyDtoH_v2, &raw mut blocks, self.memory, 4usize).ok()?;
        say(&format!("{blocks} blocks of {} MiB", size >> 20));
        io::stdin().read_line(&mut String::new()).expect("stdin");
        self.round(2)
    }

    /// A host function that never returns, and work and another function behind it. Everything else goes on, but for
    /// what waits for all work, as `cuMemFree` does natively too.
    fn blocked(&self) -> Status {
        self.enqueue(for_ever, 0)?;
        self.fill(self.memory, 1)?;
        self.enqueue(unreachable, 0)?;
        let other = Client::new()?;
        other.fill(other.memory, 2)?;
        other.synchronize()?;
        cu!(
            cuLaunchHostFunc,
            other.stream,
            tell as HostFunction,
            null_mut::<c_void>()
        )
        .ok()?;
        other.synchronize()?;
        self.idle()
    }

    /// Leaves while a stream waits for a word, and functions wait for their turn.
    fn pending(&self) -> Status {
        cu!(
            cuStreamWaitValue32_v2,
            self.stream,
            self.memory,
            0x5eed_u32,
            CU_STREAM_WAIT_VALUE_EQ
        )
        .ok()?;
        self.enqueue(unreachable, 0)?;
        self.enqueue(unreachable, 0)
    }

    /// Sleeps for a word that nobody writes.
    fn wait(&self) -> Status {
        let (word, equal) = (self.memory, CU_STREAM_WAIT_VALUE_EQ);
        cu!(cuStreamWaitValue32_v2, self.stream, word, 0x5eed_u32, equal).ok()?;
        say("busy");
        self.synchronize()
    }

    fn enqueue(&self, function: HostFunction, data: usize) -> Status {
        cu!(cuLaunchHostFunc, self.stream, function, data as *mut c_void).ok()
    }

    /// An event that a second process opens, records and waits for. Its handle travels in the environment.
    fn share(&self) -> Status {
        const HANDLE: &str = "MPSSHIM_TEST_EVENT";
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct IpcHandle([u64; 8]);
        let mut event = CUevent::NULL;
        let Ok(text) = std::env::var(HANDLE) else {
            let flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
            cu!(cuEventCreate, &mut event, flags).ok()?;
            let mut handle = IpcHandle([0; 8]);
            cu!(cuIpcGetEventHandle, &mut handle, event).ok()?;
            self.fill(self.memory, 1)?;
            cu!(cuEventRecord, event, self.stream).ok()?;
            let own = std::env::current_exe().expect("a running program has a file");
            let words: Vec<_> = handle.0.iter().map(u64::to_string).collect();
            let mut child = Command::new(own);
            let child = child.arg("share").env(HANDLE, words.join(" ")).status();
            say(&format!("child {}", child.expect("run").success()));
            cu!(cuEventSynchronize, event).ok()?;
            cu!(cuEventQuery, event).ok()?;
            return cu!(cuEventDestroy_v2, event).ok();
        };
        let mut handle = IpcHandle([0; 8]);
        for (word, text) in handle.0.iter_mut().zip(text.split(' ')) {
            *word = text.parse().expect("a number");
        }
        cu!(cuIpcOpenEventHandle, &mut event, handle).ok()?;
        cu!(cuStreamWaitEvent, self.stream, event, 0u32).ok()?;
        cu!(cuEventSynchronize, event).ok()?;
        self.fill(self.memory, 2)?;
        cu!(cuEventRecord, event, self.stream).ok()?;
        cu!(cuEventSynchronize, event).ok()?;
        cu!(cuEventQuery, event).ok()?;
        cu!(cuEventDestroy_v2, event).ok()?;
        handle.0[3] ^= 1;
        let status = cu!(cuIpcOpenEventHandle, &mut event, handle);
        assert_eq!(status, CUDA_ERROR_MAP_FAILED, "a handle of nothing");
        Ok(())
    }

    /// Threads with a context each and their own default streams, host functions included.
    fn threads(&self) -> Status {
        fn one(number: u32) -> Status {
            let mut context = CUcontext::NULL;
            cu!(cuCtxCreate_v2, &mut context, 0u32, 0 as c_int).ok()?;
            let client = Client {
                stream: CU_STREAM_PER_THREAD,
                ..Client::in_context()?
            };
            let seen = std::sync::atomic::AtomicU32::new(0);
            unsafe extern "C" fn note(data: *mut c_void) {
                // SAFETY: the thread below waits for this before it leaves.
                let seen = unsafe { &*data.cast::<std::sync::atomic::AtomicU32>() };
                seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
            for round in 0..5 {
                client.fill(client.memory, number + round)?;
                client.enqueue(note, &raw const seen as usize)?;
                client.round(number + round)?;
                let seen = seen.load(std::sync::atomic::Ordering::SeqCst);
                assert_eq!(seen, round + 1, "thread {number}");
            }
            let mut current = CUcontext::NULL;
            cu!(cuCtxGetCurrent, &mut current).ok()?;
            assert_eq!(current, context, "thread {number}");
            cu!(cuCtxDestroy_v2, context).ok()
        }
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..12)
                .map(|number| scope.spawn(move || one(number)))
                .collect();
            all.into_iter()
                .try_for_each(|thread| thread.join().expect("no panic"))
        })?;
        self.round(1)
    }

    /// So many threads, each of which allocates, launches, waits and frees in a stream of its own until standard input
    /// ends, and at least four times.
    fn crowd(&self, threads: u32) -> Status {
        const LEAST: u32 = 4;
        let mut context = CUcontext::NULL;
        cu!(cuCtxGetCurrent, &mut context).ok()?;
        let over = AtomicBool::new(false);
        let at_work = Barrier::new(threads as usize + 1);
        let one = || -> Status {
            cu!(cuCtxSetCurrent, context).ok()?;
            let mut stream = CUstream::NULL;
            let made = cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok();
            at_work.wait();
            made?;
            let client = Client { stream, ..*self };
            let mut rounds = 0;
            while rounds < LEAST || !over.load(Ordering::Relaxed) {
                let mut memory: CUdeviceptr = 0;
                cu!(cuMemAlloc_v2, &mut memory, BYTES).ok()?;
                client.fill(memory, rounds)?;
                client.synchronize()?;
                cu!(cuMemFree_v2, memory).ok()?;
                rounds += 1;
            }
            cu!(cuStreamDestroy_v2, stream).ok()
        };
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
            at_work.wait();
            say("busy");
            io::stdin().read_line(&mut String::new()).expect("stdin");
            over.store(true, Ordering::Relaxed);
            all.into_iter()
                .try_for_each(|thread| thread.join().expect("no panic"))
        })
    }

    /// A child without exec is refused; the parent goes on.
    fn fork(&self) -> Status {
        self.round(1)?;
        // SAFETY: this process has one thread of its own; the child makes some calls, writes, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut count: c_int = 0;
            let statuses = [
                cu!(cuDeviceGetCount, &mut count),
                self.synchronize().err().unwrap_or(CUDA_SUCCESS),
                cu!(cuMemAlloc_v2, &mut { 0u64 }, 16usize),
                cu!(cuCtxGetCurrent, &mut { CUcontext::NULL }),
                cu!(cuStreamQuery, self.stream),
                self.enqueue(unreachable, 0).err().unwrap_or(CUDA_SUCCESS),
                cu!(cuInit, 0 as c_uint),
            ];
            let refused = statuses
                .iter()
                .all(|status| *status == CUDA_ERROR_NOT_INITIALIZED);
            // What touches no device still answers.
            let mut name = std::ptr::null::<std::ffi::c_char>();
            let answered = cu!(cuDriverGetVersion, &mut count).is_ok()
                && cu!(cuGetErrorName, CUDA_ERROR_NOT_INITIALIZED, &mut name).is_ok();
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(if refused && answered { 7 } else { 8 }) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        say(&format!("child {}", libc::WEXITSTATUS(status)));
        self.round(2)
    }

    /// Works on and on beside a forked child, which uses nothing and lives until the input ends.
    fn beside(&self) -> Status {
        // SAFETY: this process has one thread of its own; the child waits and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let _ = io::stdin().read_line(&mut String::new());
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(0) };
        }
        self.work(u32::MAX)
    }

    /// A child with exec is a client of its own.
    fn exec(&self) -> Status {
        self.round(1)?;
        let own = std::env::current_exe().expect("a running program has a file");
        let child = Command::new(own).args(["work", "2"]).status();
        say(&format!("child {}", child.expect("run").success()));
        self.round(2)
    }
}

fn load_library(image: &CStr) -> Status<CUlibrary> {
    let none = null_mut::<c_void>();
    let mut library = CUlibrary::NULL;
    cu!(
        cuLibraryLoadData,
        &mut library,
        image.as_ptr(),
        none,
        none,
        0 as c_uint,
        none,
        none,
        0 as c_uint
    )
    .ok()?;
    Ok(library)
}

/// Loads a library before there is a context, as cudart does when a launch is a program's first call.
fn early() -> Status {
    cu!(cuInit, 0 as c_uint).ok()?;
    let image = CString::new(PTX).expect("no NUL");
    let library = load_library(&image)?;
    let mut kernel = CUkernel::NULL;
    let client = Client::new()?;
    cu!(cuLibraryGetKernel, &mut kernel, library, c"fill".as_ptr()).ok()?;
    let client = Client {
        fill: CUfunction(kernel.0),
        ..client
    };
    client.round(1)
}

type HostFunction = unsafe extern "C" fn(*mut c_void);

unsafe extern "C" fn for_ever(_: *mut c_void) {
    loop {
        std::thread::park();
    }
}

unsafe extern "C" fn tell(_: *mut c_void) {
    say("beside");
}

unsafe extern "C" fn unreachable(_: *mut c_void) {
    say("not reached");
}

fn say(line: &str) {
    println!("{line}");
    // Whoever reads it may have gone.
    let _ = io::stdout().flush();
}

fn run(what: &str, rounds: u32) -> Status {
    if what == "early" {
        return early();
    }
    let client = Client::new()?;
    match what {
        "work" => client.work(rounds),
        "launch" => client.launch_on_and_on(),
        "flood" => client.flood(),
        "ordered" => client.ordered(),
        "idle" => client.idle(),
        "managed" => client.managed(),
        "heap" => client.heap((rounds != u32::MAX).then_some(rounds)),
        "stray" => client.stray(),
        "fork" => client.fork(),
        "beside" => client.beside(),
        "exec" => client.exec(),
        "blocked" => client.blocked(),
        "pending" => client.pending(),
        "wait" => client.wait(),
        "share" => client.share(),
        "threads" => client.threads(),
        "crowd" => client.crowd(rounds),
        "copies" => client.copies(),
        "bulk" => client.bulk(),
        "small" => client.small(),
        "launches" => client.launches(),
        _ => panic!("client {what:?}"),
    }
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().unwrap_or_default();
    let rounds = arguments
        .next()
        .map_or(u32::MAX, |rounds| rounds.parse().expect("a number"));
    match run(&what, rounds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(status) => {
            say(&format!("{status}"));
            ExitCode::FAILURE
        }
    }
}
