//! Two- and three-dimensional copies between device memory, pinned, registered and pageable host memory and arrays.

use super::*;

/// Bytes of a row, rows of a slice and slices in each of the memories here.
const PITCH: usize = 4096;
const ROWS: usize = 64;
const SLICES: usize = 8;
const LEN: usize = PITCH * ROWS * SLICES;

/// What a call names a side of a copy by.
#[derive(Clone, Copy)]
struct Side {
    kind: u32,
    host: u64,
    device: u64,
    array: CUarray,
}

/// Memory of one kind.
struct Memory {
    name: &'static str,
    address: u64,
    side: Side,
}

impl Memory {
    fn fill(&self, bytes: &[u8]) {
        must!(cuMemcpy, self.address, bytes.as_ptr() as u64, bytes.len());
        // A copy from pageable memory may still be under way.
        must!(cuCtxSynchronize);
    }
    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0u8; LEN];
        must!(cuMemcpy, bytes.as_mut_ptr() as u64, self.address, LEN);
        bytes
    }
}

fn host(address: u64) -> Side {
    Side {
        kind: CU_MEMORYTYPE_HOST,
        host: address,
        device: 0,
        array: CUarray::NULL,
    }
}

fn device(address: u64) -> Side {
    Side {
        kind: CU_MEMORYTYPE_DEVICE,
        host: 0,
        device: address,
        array: CUarray::NULL,
    }
}

fn unified(address: u64) -> Side {
    Side {
        kind: CU_MEMORYTYPE_UNIFIED,
        host: 0,
        device: address,
        array: CUarray::NULL,
    }
}

/// The array side of a copy.
fn array(array: CUarray) -> Side {
    Side {
        kind: CU_MEMORYTYPE_ARRAY,
        host: 0,
        device: 0,
        array,
    }
}

fn memories(pageable: &mut [u8], pinned: u64, block: u64) -> Vec<Memory> {
    let address = pageable.as_mut_ptr() as u64;
    vec![
        Memory {
            name: "pageable",
            address,
            side: host(address),
        },
        Memory {
            name: "pinned",
            address: pinned,
            side: host(pinned),
        },
        Memory {
            name: "device",
            address: block,
            side: device(block),
        },
        Memory {
            name: "unified pageable",
            address,
            side: unified(address),
        },
        Memory {
            name: "unified device",
            address: block,
            side: unified(block),
        },
    ]
}

fn rectangle(to: Side, from: Side) -> CUDA_MEMCPY2D {
    CUDA_MEMCPY2D {
        src_type: from.kind,
        src_host: from.host,
        src_device: from.device,
        src_array: from.array.0,
        src_pitch: PITCH as u64,
        dst_type: to.kind,
        dst_host: to.host,
        dst_device: to.device,
        dst_array: to.array.0,
        dst_pitch: PITCH as u64,
        width: 100,
        height: 10,
        ..Default::default()
    }
}

fn block(to: Side, from: Side) -> CUDA_MEMCPY3D {
    CUDA_MEMCPY3D {
        src_type: from.kind,
        src_host: from.host,
        src_device: from.device,
        src_array: from.array.0,
        src_pitch: PITCH as u64,
        src_height: ROWS as u64,
        dst_type: to.kind,
        dst_host: to.host,
        dst_device: to.device,
        dst_array: to.array.0,
        dst_pitch: PITCH as u64,
        dst_height: ROWS as u64,
        width: 100,
        height: 10,
        depth: 3,
        ..Default::default()
    }
}

fn pattern() -> Vec<u8> {
    (0..LEN)
        .map(|i| (i * 7 + i / 251 + i / 4096) as u8)
        .collect()
}

struct Buffers {
    pageable: [Vec<u8>; 2],
    pinned: [u64; 2],
    device: [u64; 2],
}

impl Buffers {
    fn new() -> Buffers {
        let pinned = || {
            let mut pointer: *mut u8 = null_mut();
            must!(cuMemHostAlloc, &mut pointer, LEN, CU_MEMHOSTALLOC_PORTABLE);
            pointer as u64
        };
        Buffers {
            pageable: [vec![0u8; LEN], vec![0u8; LEN]],
            pinned: [pinned(), pinned()],
            device: [alloc(LEN), alloc(LEN)],
        }
    }
    fn pairs(&mut self) -> [Vec<Memory>; 2] {
        let [first, second] = &mut self.pageable;
        [
            memories(first, self.pinned[0], self.device[0]),
            memories(second, self.pinned[1], self.device[1]),
        ]
    }
    fn release(self) {
        for pointer in self.pinned {
            must!(cuMemFreeHost, pointer);
        }
        self.device.into_iter().for_each(free);
    }
}

fn stream() -> CUstream {
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    stream
}

/// What a copy of a box must leave.
#[allow(clippy::too_many_arguments)]
fn model(
    to: &mut [u8],
    from: &[u8],
    (to_x, to_y, to_z): (usize, usize, usize),
    (from_x, from_y, from_z): (usize, usize, usize),
    (width, height, depth): (usize, usize, usize),
) {
    for z in 0..depth {
        for y in 0..height {
            let at = |x, row, slice| (slice * ROWS + row) * PITCH + x;
            let (to_at, from_at) = (
                at(to_x, to_y + y, to_z + z),
                at(from_x, from_y + y, from_z + z),
            );
            to[to_at..to_at + width].copy_from_slice(&from[from_at..from_at + width]);
        }
    }
}

pub fn copies_2d(_: &Setup) {
    let mut buffers = Buffers::new();
    let [sources, targets] = buffers.pairs();
    let (from_bytes, blank) = (pattern(), vec![0xeeu8; LEN]);
    let stream = stream();
    for from in &sources {
        for to in &targets {
            let mut outcome = Vec::new();
            for (width, height, to_at, from_at) in [
                (13usize, 5usize, (3usize, 2usize), (1usize, 7usize)),
                (1, 1, (0, 0), (4095, 511)),
                (1000, 300, (17, 1), (64, 0)),
                (4096, 512, (0, 0), (0, 0)),
                (4096, 1, (0, 9), (0, 3)),
            ] {
                from.fill(&from_bytes);
                to.fill(&blank);
                let mut copy = rectangle(to.side, from.side);
                (copy.width, copy.height) = (width as u64, height as u64);
                (copy.dst_x, copy.dst_y) = (to_at.0 as u64, to_at.1 as u64);
                (copy.src_x, copy.src_y) = (from_at.0 as u64, from_at.1 as u64);
                let result = match outcome.len() % 3 {
                    0 => cu!(cuMemcpy2D_v2, &copy),
                    1 => cu!(cuMemcpy2DUnaligned_v2, &copy),
                    _ => {
                        let result = cu!(cuMemcpy2DAsync_v2, &copy, stream);
                        must!(cuStreamSynchronize, stream);
                        result
                    }
                };
                must!(cuCtxSynchronize);
                let mut expected = blank.clone();
                model(
                    &mut expected,
                    &from_bytes,
                    (to_at.0, to_at.1, 0),
                    (from_at.0, from_at.1, 0),
                    (width, height, 1),
                );
                let right = to.content() == expected;
                outcome.push(format!("{result}{}", if right { "" } else { " wrong" }));
            }
            say!(
                format!("{} to {}", from.name, to.name),
                "{}",
                outcome.join(" ")
            );
        }
    }
    // Pitches that are no multiples of anything.
    for (pitch, width) in [(13u64, 13u64), (101, 99), (4095, 1000), (1, 1)] {
        let mut outcome = Vec::new();
        for (from, to) in [(0, 2), (2, 0), (1, 2), (2, 1), (2, 2), (0, 0), (0, 1)] {
            let (from, to) = (&sources[from], &targets[to]);
            from.fill(&from_bytes);
            to.fill(&blank);
            let mut copy = rectangle(to.side, from.side);
            (copy.src_pitch, copy.dst_pitch) = (pitch, pitch + 2);
            (copy.width, copy.height) = (width, 20);
            let result = cu!(cuMemcpy2DUnaligned_v2, &copy);
            must!(cuCtxSynchronize);
            let mut expected = blank.clone();
            for y in 0..20 {
                let (to_at, from_at) = (y * (pitch as usize + 2), y * pitch as usize);
                let len = width as usize;
                expected[to_at..to_at + len].copy_from_slice(&from_bytes[from_at..from_at + len]);
            }
            let right = to.content() == expected;
            outcome.push(format!("{result}{}", if right { "" } else { " wrong" }));
        }
        say!(format!("pitch of {pitch} bytes"), "{}", outcome.join(" "));
    }
    must!(cuStreamDestroy_v2, stream);
    buffers.release();
}

pub fn copies_2d_refused(_: &Setup) {
    let mut buffers = Buffers::new();
    let [a, b] = buffers.device;
    let pinned = buffers.pinned[0];
    let pageable = buffers.pageable[0].as_mut_ptr() as u64;
    let ways = [
        ("to device", device(a), host(pageable)),
        ("pinned to device", device(a), host(pinned)),
        ("from device", host(pageable), device(a)),
        ("from device to pinned", host(pinned), device(a)),
        ("on device", device(b), device(a)),
        ("on host", host(pageable), host(pinned)),
        ("unified", unified(b), unified(a)),
    ];
    type Change = fn(&mut CUDA_MEMCPY2D);
    let changes: &[(&str, Change)] = &[
        ("nothing wrong", |_| {}),
        ("width 0", |c| c.width = 0),
        ("height 0", |c| c.height = 0),
        ("width and height 0, no addresses", |c| {
            (c.width, c.height) = (0, 0);
            (c.src_host, c.src_device, c.dst_host, c.dst_device) = (0, 0, 0, 0);
        }),
        ("width 0, no addresses", |c| {
            c.width = 0;
            (c.src_host, c.src_device, c.dst_host, c.dst_device) = (0, 0, 0, 0);
        }),
        ("source pitch below width", |c| c.src_pitch = 99),
        ("target pitch below width", |c| c.dst_pitch = 99),
        ("source pitch below x and width", |c| {
            (c.src_pitch, c.src_x) = (100, 1);
        }),
        ("target pitch below x and width", |c| {
            (c.dst_pitch, c.dst_x) = (100, 1);
        }),
        ("pitches 0", |c| (c.src_pitch, c.dst_pitch) = (0, 0)),
        ("pitches 0, one row", |c| {
            (c.src_pitch, c.dst_pitch, c.height) = (0, 0, 1);
        }),
        ("pitches 99, one row", |c| {
            (c.src_pitch, c.dst_pitch, c.height) = (99, 99, 1);
        }),
        ("source pitch 2^31", |c| c.src_pitch = 1 << 31),
        ("source pitch 2^31, one row", |c| {
            (c.src_pitch, c.height) = (1 << 31, 1);
        }),
        ("target pitch 2^40", |c| c.dst_pitch = 1 << 40),
        ("source type 0", |c| c.src_type = 0),
        ("target type 0", |c| c.dst_type = 0),
        ("source type 5", |c| c.src_type = 5),
        ("target type 77", |c| c.dst_type = 77),
        ("no source", |c| (c.src_host, c.src_device) = (0, 0)),
        ("no target", |c| (c.dst_host, c.dst_device) = (0, 0)),
        ("source is an array that is none", |c| {
            (c.src_type, c.src_array) = (CU_MEMORYTYPE_ARRAY, 0);
        }),
        ("target is an array that is none", |c| {
            (c.dst_type, c.dst_array) = (CU_MEMORYTYPE_ARRAY, 0);
        }),
        ("width 2^40", |c| {
            (c.width, c.src_pitch, c.dst_pitch) = (1 << 40, 1 << 40, 1 << 40);
        }),
        ("an odd pitch on both sides", |c| {
            (c.src_pitch, c.dst_pitch) = (101, 103);
        }),
    ];
    for (what, change) in changes {
        let mut outcome = Vec::new();
        for (_, to, from) in &ways {
            let mut copy = rectangle(*to, *from);
            change(&mut copy);
            // No genuine driver looks at pageable memory before it copies.
            let wild = copy.src_type == CU_MEMORYTYPE_HOST && copy.src_host == 0
                || copy.dst_type == CU_MEMORYTYPE_HOST && copy.dst_host == 0;
            let far = |kind: u32, pitch: u64| kind == CU_MEMORYTYPE_HOST && pitch > 1 << 20;
            let far = far(copy.src_type, copy.src_pitch) || far(copy.dst_type, copy.dst_pitch);
            if wild && copy.width * copy.height != 0 || far {
                outcome.push("-".to_owned());
                continue;
            }
            let first = cu!(cuMemcpy2D_v2, &copy);
            let second = cu!(cuMemcpy2DUnaligned_v2, &copy);
            let third = cu!(cuMemcpy2DAsync_v2, &copy, CUstream::NULL);
            must!(cuCtxSynchronize);
            outcome.push(if first == second && second == third {
                format!("{first}")
            } else {
                format!("({first} {second} {third})")
            });
        }
        say!(what, "{}", outcome.join(" "));
    }
    // What a pitch of 0 means.
    let from_bytes = pattern();
    for (x, rows, from_pitch, to_pitch) in [
        (0u64, 10u64, 0u64, 4096u64),
        (0, 10, 4096, 0),
        (8, 10, 0, 4096),
        (8, 10, 4096, 0),
        (8, 1, 0, 0),
        (0, 10, 0, 0),
    ] {
        let mut outcome = Vec::new();
        for (to, from) in [
            (device(b), device(a)),
            (device(b), host(pinned)),
            (device(b), host(pageable)),
        ] {
            let source = if from.kind == CU_MEMORYTYPE_HOST {
                from.host
            } else {
                a
            };
            must!(cuMemcpy, source, from_bytes.as_ptr() as u64, LEN);
            must!(cuMemsetD8_v2, b, 0u8, LEN);
            must!(cuCtxSynchronize);
            let mut copy = rectangle(to, from);
            (copy.src_x, copy.dst_x, copy.height) = (x, x, rows);
            (copy.src_pitch, copy.dst_pitch) = (from_pitch, to_pitch);
            let result = cu!(cuMemcpy2D_v2, &copy);
            must!(cuCtxSynchronize);
            let mut bytes = vec![0u8; LEN];
            must!(cuMemcpyDtoH_v2, bytes.as_mut_ptr(), b, LEN);
            let at = |i: usize| bytes[x as usize + if to_pitch == 0 { 0 } else { 4096 } + i];
            let (first, tight, wide) = (
                from_bytes[x as usize],
                from_bytes[x as usize + 100],
                from_bytes[x as usize + 108],
            );
            let seen = if rows == 1 || to_pitch == 0 {
                "-"
            } else if at(0) == first {
                "the same row"
            } else if at(0) == tight {
                "rows of the width"
            } else if at(0) == wide {
                "rows of x and the width"
            } else {
                "something else"
            };
            outcome.push(format!("{result} {:016x} {seen}", checksum(&bytes)));
        }
        say!(
            format!("pitches {from_pitch} {to_pitch}, x {x}, {rows} rows"),
            "{}",
            outcome.join(", ")
        );
    }
    let single = |what: &str, to: Side, from: Side| {
        let result = cu!(cuMemcpy2D_v2, &rectangle(to, from));
        must!(cuCtxSynchronize);
        say!(what, "{result}");
    };
    single("device address 16", device(16), host(pageable));
    single("from device address 16", host(pageable), device(16));
    single("device side is pageable", device(pageable), device(a));
    single("device source is pageable", device(a), device(pageable));
    single("device side is pinned", device(pinned), device(a));
    single("host side is device memory", host(a), host(pageable));
    single("host source is device memory", host(pageable), host(b));
    let gone = alloc(LEN * 16);
    free(gone);
    single("freed memory", device(gone), host(pageable));
    single("from freed memory", host(pageable), device(gone));
    let mut far = rectangle(device(a), host(pageable));
    (far.dst_y, far.height) = (1 << 20, 1);
    say!("far beyond the block", "{}", cu!(cuMemcpy2D_v2, &far));
    let no_descriptor = null::<CUDA_MEMCPY2D>();
    say!("no descriptor", "{}", cu!(cuMemcpy2D_v2, no_descriptor));
    say!(
        "no descriptor, unaligned",
        "{}",
        cu!(cuMemcpy2DUnaligned_v2, no_descriptor)
    );
    say!(
        "no descriptor, async",
        "{}",
        cu!(cuMemcpy2DAsync_v2, no_descriptor, CUstream::NULL)
    );
    // Rows of device memory that overlap: only the last bytes are sure.
    let mut same = rectangle(device(a), device(a));
    same.dst_x = 200;
    say!("within one block", "{}", cu!(cuMemcpy2D_v2, &same));
    must!(cuCtxSynchronize);
    buffers.release();
}

pub fn copies_3d(_: &Setup) {
    let mut buffers = Buffers::new();
    let [sources, targets] = buffers.pairs();
    let (from_bytes, blank) = (pattern(), vec![0xeeu8; LEN]);
    let stream = stream();
    let mut context = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut context);
    for from in &sources {
        for to in &targets {
            let mut outcome = Vec::new();
            for (size, to_at, from_at) in [
                (
                    (13usize, 5usize, 3usize),
                    (3usize, 2usize, 1usize),
                    (1, 7, 4),
                ),
                ((1, 1, 8), (0, 0, 0), (4095, 63, 0)),
                ((1000, 60, 7), (17, 1, 1), (64, 0, 0)),
                ((4096, 64, 8), (0, 0, 0), (0, 0, 0)),
                ((4096, 1, 1), (0, 9, 2), (0, 3, 7)),
            ] {
                from.fill(&from_bytes);
                to.fill(&blank);
                let mut copy = block(to.side, from.side);
                (copy.width, copy.height, copy.depth) =
                    (size.0 as u64, size.1 as u64, size.2 as u64);
                (copy.dst_x, copy.dst_y, copy.dst_z) =
                    (to_at.0 as u64, to_at.1 as u64, to_at.2 as u64);
                (copy.src_x, copy.src_y, copy.src_z) =
                    (from_at.0 as u64, from_at.1 as u64, from_at.2 as u64);
                let mut peer = copy;
                (peer.src_context, peer.dst_context) = (context.0, context.0);
                let result = match outcome.len() {
                    0 | 3 => cu!(cuMemcpy3D_v2, &copy),
                    1 => cu!(cuMemcpy3DAsync_v2, &copy, stream),
                    2 => cu!(cuMemcpy3DPeer, &peer),
                    _ => cu!(cuMemcpy3DPeerAsync, &peer, stream),
                };
                must!(cuStreamSynchronize, stream);
                must!(cuCtxSynchronize);
                let mut expected = blank.clone();
                model(&mut expected, &from_bytes, to_at, from_at, size);
                let right = to.content() == expected;
                outcome.push(format!("{result}{}", if right { "" } else { " wrong" }));
            }
            say!(
                format!("{} to {}", from.name, to.name),
                "{}",
                outcome.join(" ")
            );
        }
    }
    must!(cuStreamDestroy_v2, stream);
    buffers.release();
}

pub fn copies_3d_refused(_: &Setup) {
    let mut buffers = Buffers::new();
    let [a, b] = buffers.device;
    let pinned = buffers.pinned[0];
    let pageable = buffers.pageable[0].as_mut_ptr() as u64;
    let ways = [device(a), host(pinned), host(pageable)];
    type Change = fn(&mut CUDA_MEMCPY3D);
    let changes: &[(&str, Change)] = &[
        ("nothing wrong", |_| {}),
        ("width 0", |c| c.width = 0),
        ("height 0", |c| c.height = 0),
        ("depth 0", |c| c.depth = 0),
        ("source pitch below width", |c| c.src_pitch = 99),
        ("source pitch 0, one row of many slices", |c| {
            (c.src_pitch, c.height) = (0, 1);
        }),
        ("source pitch 0, one row", |c| {
            (c.src_pitch, c.height, c.depth) = (0, 1, 1);
        }),
        ("source height below height", |c| c.src_height = 9),
        ("source height below y and height", |c| {
            (c.src_height, c.src_y) = (10, 1);
        }),
        ("source height 0", |c| c.src_height = 0),
        ("source height 0, one slice", |c| {
            (c.src_height, c.depth) = (0, 1)
        }),
        ("source height 9, one slice", |c| {
            (c.src_height, c.depth) = (9, 1)
        }),
        ("source height 0, one slice, z", |c| {
            (c.src_height, c.depth, c.src_z) = (0, 1, 1);
        }),
        ("target height 0", |c| c.dst_height = 0),
        ("source height 2^40", |c| c.src_height = 1 << 40),
        ("target height 9, z", |c| (c.dst_height, c.dst_z) = (9, 1)),
        ("heights 0 and z", |c| {
            (c.src_height, c.dst_height, c.src_z, c.dst_z) = (0, 0, 2, 2);
        }),
        ("source level 1", |c| c.src_lod = 1),
        ("target level 1", |c| c.dst_lod = 1),
        ("a reserved word", |c| c.src_context = 1),
        ("source type 0", |c| c.src_type = 0),
        ("target is an array that is none", |c| {
            (c.dst_type, c.dst_array) = (CU_MEMORYTYPE_ARRAY, 0);
        }),
        ("z far beyond", |c| c.src_z = 1 << 30),
    ];
    for (what, change) in changes {
        let mut outcome = Vec::new();
        for (index, from) in ways.iter().enumerate() {
            let mut copy = block(device(b), *from);
            change(&mut copy);
            let far = copy.src_z > 100 || copy.src_height == 1 << 40;
            if index > 0 && far {
                outcome.push("-".to_owned());
                continue;
            }
            let first = cu!(cuMemcpy3D_v2, &copy);
            let second = cu!(cuMemcpy3DAsync_v2, &copy, CUstream::NULL);
            must!(cuCtxSynchronize);
            outcome.push(if first == second {
                format!("{first}")
            } else {
                format!("({first} {second})")
            });
        }
        say!(what, "{}", outcome.join(" "));
    }
    let none = null::<CUDA_MEMCPY3D>();
    say!("no descriptor", "{}", cu!(cuMemcpy3D_v2, none));
    say!(
        "no descriptor, async",
        "{}",
        cu!(cuMemcpy3DAsync_v2, none, CUstream::NULL)
    );
    let mut context = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut context);
    for (what, to, from) in [
        ("peer without contexts", 0, 0),
        ("peer without a source context", context.0, 0),
        ("peer without a target context", 0, context.0),
    ] {
        let mut copy = block(device(b), device(a));
        (copy.dst_context, copy.src_context) = (to, from);
        say!(what, "{}", cu!(cuMemcpy3DPeer, &copy));
    }
    let mut copy = block(device(b), host(pageable));
    (copy.dst_context, copy.src_context) = (context.0, 0);
    say!(
        "peer from host, no source context",
        "{}",
        cu!(cuMemcpy3DPeer, &copy)
    );
    must!(cuCtxSynchronize);
    buffers.release();
}

fn pointer(address: u64, row: u64, layer: u64) -> CUmemcpy3DOperand {
    CUmemcpy3DOperand {
        kind: CU_MEMCPY_OPERAND_TYPE_POINTER,
        pad: 0,
        words: [address, row, layer, 0],
    }
}

pub fn copies_3d_batch(_: &Setup) {
    let mut buffers = Buffers::new();
    let [a, b] = buffers.device;
    let pinned = buffers.pinned[0];
    let pageable = buffers.pageable[0].as_mut_ptr() as u64;
    let stream = stream();
    let from_bytes = pattern();
    must!(cuMemcpyHtoD_v2, a, from_bytes.as_ptr(), LEN);
    must!(cuMemcpy, pinned, from_bytes.as_ptr() as u64, LEN);
    let op = |to: CUmemcpy3DOperand, from: CUmemcpy3DOperand| CUDA_MEMCPY3D_BATCH_OP {
        src: from,
        dst: to,
        width: 64,
        height: 4,
        depth: 2,
        src_access_order: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        flags: 0,
    };
    let batch = |what: &str, ops: &mut [CUDA_MEMCPY3D_BATCH_OP], stream: CUstream| {
        must!(cuMemsetD8_v2, b, 0xeeu8, LEN);
        must!(cuCtxSynchronize);
        let result = cu!(
            cuMemcpy3DBatchAsync_v2,
            ops.len(),
            ops.as_mut_ptr(),
            0u64,
            stream
        );
        must!(cuCtxSynchronize);
        let mut bytes = vec![0u8; 4096];
        must!(cuMemcpyDtoH_v2, bytes.as_mut_ptr(), b, bytes.len());
        say!(what, "{result} {:016x}", checksum(&bytes));
    };
    batch(
        "device to device",
        &mut [op(pointer(b, 128, 8), pointer(a, 256, 4))],
        stream,
    );
    batch(
        "two copies",
        &mut [
            op(pointer(b, 128, 8), pointer(pinned, 64, 4)),
            op(pointer(b + 64, 128, 8), pointer(a, 0, 0)),
        ],
        stream,
    );
    batch(
        "to pageable memory",
        &mut [op(pointer(pageable, 64, 4), pointer(a, 64, 4))],
        stream,
    );
    let same = buffers.pageable[0][..512] == from_bytes[..512];
    say!("what is there", "{same}");
    batch(
        "from pageable memory",
        &mut [op(pointer(b, 64, 4), pointer(pageable, 64, 4))],
        stream,
    );
    let mut ephemeral = op(pointer(b, 64, 4), pointer(pageable, 64, 4));
    ephemeral.src_access_order = CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    batch("during the call", &mut [ephemeral], stream);
    ephemeral.src_access_order = CU_MEMCPY_SRC_ACCESS_ORDER_ANY;
    batch("in any order", &mut [ephemeral], stream);
    ephemeral.src_access_order = 0;
    batch("order 0", &mut [ephemeral], stream);
    ephemeral.src_access_order = 9;
    batch("order 9", &mut [ephemeral], stream);
    let good = op(pointer(b, 64, 4), pointer(a, 64, 4));
    let mut bad = good;
    bad.flags = 1;
    batch("overlap with compute", &mut [bad], stream);
    bad.flags = 2;
    batch("flags 2", &mut [bad], stream);
    for (what, change) in [
        (
            "width 0",
            (|c| c.width = 0) as fn(&mut CUDA_MEMCPY3D_BATCH_OP),
        ),
        ("height 0", |c| c.height = 0),
        ("depth 0", |c| c.depth = 0),
        ("row below width", |c| c.src.words[1] = 63),
        ("layer below height", |c| c.src.words[2] = 3),
        ("kind 0", |c| c.src.kind = 0),
        ("kind 3", |c| c.dst.kind = 3),
        ("no target", |c| c.dst.words[0] = 0),
    ] {
        let mut bad = good;
        change(&mut bad);
        batch(what, &mut [good, bad], stream);
    }
    batch("the default stream", &mut [good], CUstream::NULL);
    batch("the thread's stream", &mut [good], CU_STREAM_PER_THREAD);
    batch("the legacy stream by name", &mut [good], CU_STREAM_LEGACY);
    batch("no copies", &mut [], stream);
    say!(
        "no list",
        "{}",
        cu!(
            cuMemcpy3DBatchAsync_v2,
            1usize,
            null_mut::<CUDA_MEMCPY3D_BATCH_OP>(),
            0u64,
            stream
        )
    );
    let mut list = [good];
    say!(
        "flags of the batch",
        "{}",
        cu!(
            cuMemcpy3DBatchAsync_v2,
            1usize,
            list.as_mut_ptr(),
            1u64,
            stream
        )
    );
    let mut failed = 77usize;
    let result = cu!(
        cuMemcpy3DBatchAsync,
        1usize,
        list.as_mut_ptr(),
        &mut failed,
        0u64,
        stream
    );
    say!("the first version", "{result} {failed}");
    let mut list = [good, good];
    list[1].width = 0;
    let result = cu!(
        cuMemcpy3DBatchAsync,
        2usize,
        list.as_mut_ptr(),
        &mut failed,
        0u64,
        stream
    );
    say!("the first version, the second bad", "{result} {failed}");
    must!(cuCtxSynchronize);
    must!(cuStreamDestroy_v2, stream);
    buffers.release();
}

/// Copies with arrays, from the same table of sides.
pub fn array_copies(_: &Setup) {
    let mut buffers = Buffers::new();
    let from_bytes = pattern();
    buffers.pageable[0].copy_from_slice(&from_bytes);
    let pageable = buffers.pageable[0].as_mut_ptr() as u64;
    let [a, b] = buffers.device;
    let pinned = buffers.pinned[0];
    must!(cuMemcpyHtoD_v2, a, from_bytes.as_ptr(), LEN);
    must!(cuMemcpy, pinned, from_bytes.as_ptr() as u64, LEN);
    let stream = stream();
    let descriptor = CUDA_ARRAY_DESCRIPTOR {
        width: 200,
        height: 30,
        format: CU_AD_FORMAT_UNSIGNED_INT32,
        channels: 1,
    };
    let made: Vec<CUarray> = (0..2)
        .map(|_| {
            let mut array = CUarray::NULL;
            must!(cuArrayCreate_v2, &mut array, &descriptor);
            array
        })
        .collect();
    let blank = vec![0xeeu8; LEN];
    let clear = || {
        let mut copy = rectangle(array(made[0]), host(blank.as_ptr() as u64));
        (copy.width, copy.height) = (800, 30);
        must!(cuMemcpy2D_v2, &copy);
        must!(cuCtxSynchronize);
    };
    // What the array holds, row by row.
    let content = |array_: CUarray| {
        let mut bytes = vec![0u8; 800 * 30];
        let mut copy = rectangle(host(bytes.as_mut_ptr() as u64), array(array_));
        (copy.width, copy.height, copy.dst_pitch) = (800, 30, 800);
        must!(cuMemcpy2D_v2, &copy);
        format!("{:016x}", checksum(&bytes))
    };
    for (what, from) in [
        ("pageable to array", host(pageable)),
        ("pinned to array", host(pinned)),
        ("device to array", device(a)),
        ("unified to array", unified(a)),
    ] {
        clear();
        let mut copy = rectangle(array(made[0]), from);
        (copy.width, copy.height, copy.dst_x, copy.dst_y) = (80, 7, 16, 3);
        (copy.src_x, copy.src_y) = (4, 2);
        let result = cu!(cuMemcpy2DAsync_v2, &copy, stream);
        must!(cuStreamSynchronize, stream);
        say!(what, "{result} {}", content(made[0]));
        clear();
        let mut copy = block(array(made[0]), from);
        (copy.width, copy.height, copy.depth) = (800, 30, 1);
        let result = cu!(cuMemcpy3DAsync_v2, &copy, stream);
        must!(cuStreamSynchronize, stream);
        say!(format!("{what}, 3D"), "{result} {}", content(made[0]));
    }
    let mut copy = rectangle(array(made[1]), array(made[0]));
    (copy.width, copy.height, copy.dst_x) = (400, 20, 100);
    say!(
        "array to array",
        "{} {}",
        cu!(cuMemcpy2D_v2, &copy),
        content(made[1]).len()
    );
    for (what, to, at) in [
        (
            "array to pageable",
            host(buffers.pageable[1].as_mut_ptr() as u64),
            0u64,
        ),
        (
            "array to pinned",
            host(buffers.pinned[1]),
            buffers.pinned[1],
        ),
        ("array to device", device(b), b),
    ] {
        let mut copy = rectangle(to, array(made[0]));
        (copy.width, copy.height, copy.src_x, copy.src_y) = (80, 7, 16, 3);
        let at = if at == 0 { to.host } else { at };
        must!(cuMemcpy, at, blank.as_ptr() as u64, LEN);
        must!(cuCtxSynchronize);
        let result = cu!(cuMemcpy2DAsync_v2, &copy, stream);
        must!(cuStreamSynchronize, stream);
        let mut bytes = vec![0u8; LEN];
        must!(cuMemcpy, bytes.as_mut_ptr() as u64, at, LEN);
        say!(what, "{result} {:016x}", checksum(&bytes));
    }
    // One-dimensional ones, in bytes.
    let mut line = CUarray::NULL;
    let descriptor = CUDA_ARRAY_DESCRIPTOR {
        width: 1000,
        height: 0,
        format: CU_AD_FORMAT_UNSIGNED_INT8,
        channels: 4,
    };
    must!(cuArrayCreate_v2, &mut line, &descriptor);
    say!(
        "HtoA",
        "{}",
        cu!(cuMemcpyHtoA_v2, line, 0usize, blank.as_ptr(), 4000usize)
    );
    say!(
        "HtoA at 400",
        "{}",
        cu!(
            cuMemcpyHtoA_v2,
            line,
            400usize,
            from_bytes.as_ptr(),
            1000usize
        )
    );
    say!(
        "DtoA",
        "{}",
        cu!(cuMemcpyDtoA_v2, line, 2000usize, a, 100usize)
    );
    // The stream waits for none of the copies before.
    must!(cuCtxSynchronize);
    say!(
        "HtoA async",
        "{}",
        cu!(
            cuMemcpyHtoAAsync_v2,
            line,
            3000usize,
            pinned,
            100usize,
            stream
        )
    );
    must!(cuStreamSynchronize, stream);
    let mut bytes = vec![0u8; 4000];
    let result = cu!(cuMemcpyAtoH_v2, bytes.as_mut_ptr(), line, 0usize, 4000usize);
    say!("AtoH", "{result} {:016x}", checksum(&bytes));
    let result = cu!(
        cuMemcpyAtoHAsync_v2,
        bytes.as_mut_ptr(),
        line,
        400usize,
        1000usize,
        stream
    );
    must!(cuStreamSynchronize, stream);
    say!(
        "AtoH async",
        "{result} {}",
        bytes[..1000] == from_bytes[..1000]
    );
    must!(cuMemsetD8_v2, b, 0u8, LEN);
    let result = cu!(cuMemcpyAtoD_v2, b, line, 400usize, 1000usize);
    must!(cuMemcpyDtoH_v2, bytes.as_mut_ptr(), b, 4000usize);
    say!("AtoD", "{result} {:016x}", checksum(&bytes));
    let mut other = CUarray::NULL;
    must!(cuArrayCreate_v2, &mut other, &descriptor);
    must!(cuMemcpyHtoA_v2, other, 0usize, blank.as_ptr(), 4000usize);
    let result = cu!(cuMemcpyAtoA_v2, other, 40usize, line, 400usize, 800usize);
    must!(
        cuMemcpyAtoH_v2,
        bytes.as_mut_ptr(),
        other,
        0usize,
        4000usize
    );
    say!("AtoA", "{result} {:016x}", checksum(&bytes));
    // What is refused.
    say!(
        "HtoA of nothing",
        "{}",
        cu!(cuMemcpyHtoA_v2, line, 0usize, blank.as_ptr(), 0usize)
    );
    say!(
        "HtoA beyond",
        "{}",
        cu!(cuMemcpyHtoA_v2, line, 3999usize, blank.as_ptr(), 2usize)
    );
    say!(
        "HtoA at half an element",
        "{}",
        cu!(cuMemcpyHtoA_v2, line, 2usize, blank.as_ptr(), 4usize)
    );
    say!(
        "HtoA of half an element",
        "{}",
        cu!(cuMemcpyHtoA_v2, line, 0usize, blank.as_ptr(), 6usize)
    );
    say!(
        "HtoA to NULL",
        "{}",
        cu!(
            cuMemcpyHtoA_v2,
            CUarray::NULL,
            0usize,
            blank.as_ptr(),
            4usize
        )
    );
    say!(
        "DtoA from NULL",
        "{}",
        cu!(cuMemcpyDtoA_v2, line, 0usize, 0u64, 4usize)
    );
    say!(
        "DtoA from 16",
        "{}",
        cu!(cuMemcpyDtoA_v2, line, 0usize, 16u64, 4usize)
    );
    say!(
        "HtoA of two dimensions",
        "{}",
        cu!(cuMemcpyHtoA_v2, made[0], 0usize, blank.as_ptr(), 80usize)
    );
    say!(
        "HtoA of two dimensions over a row's end",
        "{}",
        cu!(
            cuMemcpyHtoA_v2,
            made[0],
            0usize,
            from_bytes.as_ptr(),
            1600usize
        )
    );
    for (what, width, height, x, y) in [
        ("wider than the array", 804u64, 1u64, 0u64, 0u64),
        ("beyond the width", 400, 1, 404, 0),
        ("higher than the array", 8, 31, 0, 0),
        ("beyond the height", 8, 20, 0, 11),
        ("half an element", 6, 1, 0, 0),
        ("at half an element", 8, 1, 2, 0),
        ("all of it", 800, 30, 0, 0),
        ("no width", 0, 30, 0, 0),
    ] {
        let mut copy = rectangle(array(made[0]), device(a));
        (copy.width, copy.height, copy.dst_x, copy.dst_y) = (width, height, x, y);
        let mut back = rectangle(device(b), array(made[0]));
        (back.width, back.height, back.src_x, back.src_y) = (width, height, x, y);
        let (to, from) = (cu!(cuMemcpy2D_v2, &copy), cu!(cuMemcpy2D_v2, &back));
        say!(what, "{to} {from}");
    }
    let mut copy = block(array(made[0]), device(a));
    (copy.width, copy.height, copy.depth) = (80, 2, 2);
    say!("depth 2", "{}", cu!(cuMemcpy3D_v2, &copy));
    (copy.depth, copy.dst_z) = (1, 1);
    say!("z 1", "{}", cu!(cuMemcpy3D_v2, &copy));
    (copy.dst_z, copy.dst_lod) = (0, 1);
    say!("level 1", "{}", cu!(cuMemcpy3D_v2, &copy));
    // Three dimensions, and layers.
    for (what, flags) in [("cube", 0u32), ("layers", CUDA_ARRAY3D_LAYERED)] {
        let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            width: 32,
            height: 16,
            depth: 5,
            format: CU_AD_FORMAT_FLOAT,
            channels: 2,
            flags,
            pad: 0,
        };
        let mut solid = CUarray::NULL;
        must!(cuArray3DCreate_v2, &mut solid, &descriptor);
        let mut copy = block(array(solid), host(pageable));
        (copy.width, copy.height, copy.depth) = (256, 16, 5);
        say!(what, "{}", cu!(cuMemcpy3D_v2, &copy));
        let mut copy = block(array(solid), device(a));
        (copy.width, copy.height, copy.depth) = (64, 3, 2);
        (copy.dst_x, copy.dst_y, copy.dst_z, copy.src_x) = (8, 4, 2, 40);
        say!(format!("into the {what}"), "{}", cu!(cuMemcpy3D_v2, &copy));
        let mut bytes = vec![0u8; 256 * 16 * 5];
        let mut copy = block(host(bytes.as_mut_ptr() as u64), array(solid));
        (copy.width, copy.height, copy.depth) = (256, 16, 5);
        (copy.dst_pitch, copy.dst_height) = (256, 16);
        let result = cu!(cuMemcpy3D_v2, &copy);
        say!(
            format!("back from the {what}"),
            "{result} {:016x}",
            checksum(&bytes)
        );
        let mut op = CUDA_MEMCPY3D_BATCH_OP {
            src: CUmemcpy3DOperand {
                kind: CU_MEMCPY_OPERAND_TYPE_ARRAY,
                pad: 0,
                words: [solid.0, 1, 2, 3],
            },
            dst: pointer(b, 0, 0),
            width: 10,
            height: 4,
            depth: 2,
            src_access_order: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            flags: 0,
        };
        must!(cuMemsetD8_v2, b, 0u8, LEN);
        must!(cuCtxSynchronize);
        let result = cu!(cuMemcpy3DBatchAsync_v2, 1usize, &raw mut op, 0u64, stream);
        must!(cuStreamSynchronize, stream);
        let mut bytes = vec![0u8; 4096];
        must!(cuMemcpyDtoH_v2, bytes.as_mut_ptr(), b, 4096usize);
        say!(
            format!("batch from the {what}"),
            "{result} {:016x}",
            checksum(&bytes)
        );
        copy.depth = 6;
        say!(
            format!("deeper than the {what}"),
            "{}",
            cu!(cuMemcpy3D_v2, &copy)
        );
        must!(cuArrayDestroy, solid);
    }
    for array in made.into_iter().chain([line, other]) {
        must!(cuArrayDestroy, array);
    }
    must!(cuStreamDestroy_v2, stream);
    buffers.release();
}

/// Copies of more than one dimension in captures, and graph nodes with arrays.
pub fn array_graphs(_: &Setup) {
    let mut buffers = Buffers::new();
    let [a, b] = buffers.device;
    let pinned = buffers.pinned[0];
    let from_bytes = pattern();
    must!(cuMemcpyHtoD_v2, a, from_bytes.as_ptr(), LEN);
    must!(cuMemcpy, pinned, from_bytes.as_ptr() as u64, LEN);
    // Memory of its own pages, as a graph's host memory is best.
    let own = &mut buffers.pageable[0];
    own.copy_from_slice(&from_bytes);
    let pageable = own.as_ptr() as u64;
    let descriptor = CUDA_ARRAY_DESCRIPTOR {
        width: 256,
        height: 32,
        format: CU_AD_FORMAT_FLOAT,
        channels: 1,
    };
    let mut made = CUarray::NULL;
    must!(cuArrayCreate_v2, &mut made, &descriptor);
    let stream = stream();
    let shown = || {
        let mut bytes = vec![0u8; LEN];
        must!(cuMemcpyDtoH_v2, bytes.as_mut_ptr(), b, LEN);
        format!("{:016x}", checksum(&bytes))
    };
    let clear = || {
        must!(cuMemsetD8_v2, b, 0u8, LEN);
        must!(cuCtxSynchronize);
    };
    for (what, from) in [
        ("device", device(a)),
        ("pinned", host(pinned)),
        ("pageable", host(pageable)),
    ] {
        clear();
        let (mut graph, mut exec) = (CUgraph::NULL, CUgraphExec::NULL);
        must!(cuStreamBeginCapture_v2, stream, 2u32);
        let mut copy = rectangle(array(made), from);
        (copy.width, copy.height, copy.src_x, copy.src_y) = (1000, 30, 8, 2);
        let first = cu!(cuMemcpy2DAsync_v2, &copy, stream);
        let mut copy = rectangle(device(b), array(made));
        (copy.width, copy.height) = (1000, 30);
        let second = cu!(cuMemcpy2DAsync_v2, &copy, stream);
        let third = cu!(cuMemcpy3DAsync_v2, &block(device(b + 65_536), from), stream);
        let ended = cu!(cuStreamEndCapture, stream, &mut graph);
        say!(
            format!("captured, {what}"),
            "{first} {second} {third} {ended}"
        );
        if !ended.is_ok() {
            continue;
        }
        must!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64);
        let launched = cu!(cuGraphLaunch, exec, stream);
        let waited = cu!(cuStreamSynchronize, stream);
        say!(
            format!("launched, {what}"),
            "{launched} {waited} {}",
            shown()
        );
        must!(cuGraphExecDestroy, exec);
        must!(cuGraphDestroy, graph);
    }
    let mut context = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut context);
    clear();
    let (mut graph, mut exec) = (CUgraph::NULL, CUgraphExec::NULL);
    let (mut to_array, mut from_array) = (0u64, 0u64);
    must!(cuGraphCreate, &mut graph, 0u32);
    let mut copy = block(array(made), device(a));
    (copy.width, copy.height, copy.depth, copy.src_z) = (800, 20, 1, 3);
    let first = cu!(
        cuGraphAddMemcpyNode,
        &mut to_array,
        graph,
        null::<u64>(),
        0usize,
        &copy,
        context
    );
    let mut back = block(device(b), array(made));
    (back.width, back.height, back.depth, back.src_y) = (800, 20, 1, 1);
    let second = cu!(
        cuGraphAddMemcpyNode,
        &mut from_array,
        graph,
        &raw const to_array,
        1usize,
        &back,
        context
    );
    say!("nodes", "{first} {second}");
    let mut seen = CUDA_MEMCPY3D::default();
    let result = cu!(cuGraphMemcpyNodeGetParams, to_array, &mut seen);
    say!(
        "a node's array",
        "{result} {} {}",
        seen.dst_type,
        seen.dst_array == made.0
    );
    must!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64);
    let launched = cu!(cuGraphLaunch, exec, stream);
    let waited = cu!(cuStreamSynchronize, stream);
    say!("their launch", "{launched} {waited} {}", shown());
    must!(cuGraphExecDestroy, exec);
    must!(cuGraphDestroy, graph);
    must!(cuArrayDestroy, made);
    must!(cuStreamDestroy_v2, stream);
    buffers.release();
}
