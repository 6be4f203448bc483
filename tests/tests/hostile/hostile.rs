//! Clients that break the rules, die, or fault, against the real daemon and server on softgpu.
//!
//! In each test a well-behaved second client goes on computing and checks its results all the while; afterwards
//! the server has neither more descriptors, nor more shared mappings, nor less device memory than before.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::handshake::{ClientHello, OLDEST_HELLO, PROTOCOL_VERSION};
use mpsshim_proto::message::array::{
    ARRAY_SIDE, ArrayCreate, ArrayPart, ArrayQuery, BoxSide, CopyBox, GetReference,
    ReferenceArguments, TEXTURE_IS_SURFACE, TensorMap, TextureCreate, TextureDestroy,
};
use mpsshim_proto::message::context::{GreenCreate, ResourceJoin, ResourceQuery, ResourceSplit};
use mpsshim_proto::message::image::{KernelAttribute, LinkAdd, LinkCreate};
use mpsshim_proto::message::stream::{
    EventExport, EventImport, EventToken, HostFunction, MemOp, StreamAttribute,
};
use mpsshim_proto::message::{
    Attach, CopyInline, HostAlloc, INLINE_COPY_MAX, ImageLoad, JitOption, Mark, MarkEvent, Named,
    Object, Op, Range, Side,
};
use mpsshim_proto::ring::{MAX_MESSAGE, WRAP};
use mpsshim_proto::segment::{ARRIVED, FLAGS, RETURNED, RING_LEN, SEGMENT_LEN, STAGING_LEN};
use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::peer::{
    PTX, Peer, Status, Worker, copy, fill_params, greet, hello, launch, memory_file, memset,
    truncate,
};
use mpsshim_tests::scene::{Scene, control, daemon, reconnect};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Each of these ends its session, and the log says why.
fn each_ends_its_session(cases: Vec<Case>) {
    Scene::new().beside_a_worker(|scene| {
        for (breach, reason) in cases {
            let mut peer = scene.peer();
            let context = format!("Context ID: {}}}", peer.welcome.session);
            // Its messages may or may not all get into the ring before the end.
            let _ = breach(&mut peer);
            let status = peer.await_end();
            assert_eq!(status, Ok(CUDA_ERROR_MPS_RPC_FAILURE), "{reason}");
            wait_until(reason, || {
                let log = scene.place.log("server.log");
                let mut lines = log.lines().filter(|line| line.contains(&context));
                lines.any(|line| line.contains("ended by the server") && line.contains(reason))
            });
        }
    });
}

/// What a peer does, and what the log says of it.
type Case = (Box<dyn FnOnce(&mut Peer) -> Status>, &'static str);

fn case(reason: &'static str, breach: impl FnOnce(&mut Peer) -> Status + 'static) -> Case {
    (Box::new(breach), reason)
}

#[test]
fn a_message_that_is_not_one_ends_the_session() {
    let body = |op: Op, len: usize| move |peer: &mut Peer| peer.put(op as u16, 0, &[&vec![0; len]]);
    let header = |len: u32, op: u16, published: u64| {
        move |peer: &mut Peer| {
            peer.put_header(len, op, published);
            Ok(())
        }
    };
    let head = |head: u64| {
        move |peer: &mut Peer| {
            peer.publish_head(head);
            Ok(())
        }
    };
    let mut cases = vec![
        case("unknown opcode 0", |peer| peer.put(0, 0, &[])),
        case("unknown opcode 63", |peer| peer.put(63, 0, &[&[1; 64]])),
        case("unknown opcode 65535", |peer| peer.put(u16::MAX, 7, &[])),
        case("message length 0 is", header(0, 2, 64)),
        case("message length 8 is", header(8, 2, 64)),
        case("message length 24 is", header(24, 2, 64)),
        case("message length 80 is", header(80, 2, 64)),
        case("message length 4294967280 is", header(!15, 2, 64)),
        case(
            "is impossible",
            header(MAX_MESSAGE + 16, 2, RING_LEN as u64),
        ),
        case("message length 32 is", header(32, WRAP, 32)),
        case("head 2097168 is impossible", head(RING_LEN as u64 + 16)),
        case("head 24 is impossible", head(24)),
        case("is impossible", head(u64::MAX - 15)),
        case("is impossible", |peer| {
            peer.ask_as(0, Op::Printed, &(), &[])?;
            // Backwards.
            peer.publish_head(0);
            Ok(())
        }),
    ];
    for &op in Op::ALL {
        // These have no body.
        if !matches!(op, Op::Printed | Op::Settle | Op::Taken) {
            cases.push(case("too short", body(op, 0)));
        }
    }
    each_ends_its_session(cases);
}

#[test]
fn a_range_outside_the_segment_ends_the_session() {
    let staging = |offset: u64, len: u64, towards: bool| {
        move |peer: &mut Peer| {
            let (stream, memory) = (peer.stream()?, peer.memory(2 * STAGING_LEN as u64)?.start);
            let (to, from) = (Side::Device, Side::Staging);
            let body = if towards {
                copy(to, memory, from, offset, len, stream)
            } else {
                copy(from, offset, to, memory, len, stream)
            };
            peer.post(Op::Copy, &body, &[])
        }
    };
    let (len, flags) = (STAGING_LEN as u64, FLAGS as u32);
    each_ends_its_session(vec![
        case("staging range", staging(0, len + 1, true)),
        case("staging range", staging(len, 1, false)),
        case("staging range", staging(len - 1, 2, true)),
        case("staging range", staging(u64::MAX - 3, 8, false)),
        case("flag slot", move |peer| {
            let stream = peer.stream()?;
            let mark = Mark {
                stream,
                slot: flags,
                value: 1,
            };
            peer.post(Op::Mark, &mark, &[])
        }),
        case("flag slot", |peer| {
            let body = MarkEvent {
                event: 0,
                stream: 0,
                slot: u32::MAX,
                value: 1,
            };
            peer.post(Op::MarkEvent, &body, &[])
        }),
        case("flag slot", move |peer| {
            let body = HostFunction {
                stream: peer.stream()?,
                slot: flags,
                value: 1,
            };
            peer.post(Op::HostFunction, &body, &[])
        }),
        case("copy side", |peer| {
            let stream = peer.stream()?;
            let mut body = copy(Side::Staging, 0, Side::Staging, 0, 4, stream);
            body.sides = 3;
            peer.post(Op::Copy, &body, &[])
        }),
        case("from host to host", |peer| {
            let stream = peer.stream()?;
            let body = copy(Side::Staging, 0, Side::Staging, 64, 4, stream);
            peer.post(Op::Copy, &body, &[])
        }),
    ]);
}

/// A box of `size` from staging to device memory.
fn box_of(peer: &mut Peer, size: [u64; 3]) -> Status<CopyBox> {
    Ok(CopyBox {
        to: BoxSide {
            address: peer.memory(1 << 20)?.start,
            pitch: 64,
            rows: 4,
            ..BoxSide::default()
        },
        from: BoxSide {
            pitch: 64,
            rows: 4,
            side: Side::Staging as u32,
            ..BoxSide::default()
        },
        width: size[0],
        height: size[1],
        depth: size[2],
        stream: peer.stream()?,
    })
}

#[test]
fn a_box_outside_the_segment_ends_the_session() {
    let with = |size: [u64; 3], change: fn(&mut CopyBox)| {
        move |peer: &mut Peer| {
            let mut body = box_of(peer, size)?;
            change(&mut body);
            peer.post(Op::CopyBox, &body, &[])
        }
    };
    each_ends_its_session(vec![
        case("tensor map call 4", |peer| {
            let body = TensorMap {
                call: 4,
                ..TensorMap::default()
            };
            peer.post(Op::TensorMap, &body, &[])
        }),
        case("reference call 99", |peer| {
            let body = ReferenceArguments {
                call: 99,
                ..ReferenceArguments::default()
            };
            peer.post(Op::ReferenceCall, &body, &[])
        }),
        case("a name without its end", |peer| {
            peer.post(Op::GetReference, &GetReference::default(), &[b'x'; 40])
        }),
        case("copy side 3", with([8, 2, 2], |b| b.from.side = 3)),
        case("copy side 256", with([8, 2, 2], |b| b.to.side = 256)),
        case(
            "staging range",
            with([64, 1 << 14, 1], |b| {
                (b.to.rows, b.from.rows) = (1 << 14, 1 << 14)
            }),
        ),
        case("staging range", with([64, 4, 1 << 12], |_| ())),
        case(
            "staging range",
            with([8, 2, 2], |b| b.from.address = STAGING_LEN as u64 - 8),
        ),
        case("staging range", with([8, 2, 1], |b| b.from.pitch = 1 << 62)),
        case("from host to host", with([8, 2, 2], |b| b.to = b.from)),
    ]);
}

/// Copies, arrays and textures that are refused but break no rule: memory that is not the session's, sizes that
/// overflow, handles of nothing.
#[test]
fn boxes_and_arrays_of_others_are_refused() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        let boxes: &[fn(&mut CopyBox)] = &[
            |b| b.to.address = 16,
            |b| b.to.address += 1 << 30,
            |b| b.to.pitch = 1 << 40,
            |b| (b.to.pitch, b.to.rows) = (u64::MAX, u64::MAX),
            |b| (b.to.pitch, b.height) = (u64::MAX / 2, 4),
            |b| (b.width, b.to.address) = (u64::MAX, u64::MAX - 4),
            |b| (b.to.side, b.to.address) = (ARRAY_SIDE, 7),
            |b| (b.to.side, b.to.address) = (ARRAY_SIDE, Handle::new(Kind::Array, 0, 5).0),
            |b| (b.to.side, b.to.address) = (ARRAY_SIDE, Handle::new(Kind::MipmappedArray, 0, 0).0),
            |b| (b.to.side, b.to.address) = (Side::Host as u32, b.to.address),
        ];
        for (index, change) in boxes.iter().enumerate() {
            let mut body = box_of(&mut peer, [8, 2, 2]).expect("a box");
            change(&mut body);
            let posted = peer.post(Op::CopyBox, &body, &[]);
            posted.unwrap_or_else(|status| panic!("{index}: {status}"));
            peer.mem_info().expect("an answer behind it");
            assert!(peer.posted_error().is_err(), "{index}");
        }
        let array = peer.handle(Kind::Array);
        let mut create = ArrayCreate {
            array,
            size: [16, 16, 0],
            format: CU_AD_FORMAT_FLOAT,
            channels: 1,
            ..ArrayCreate::default()
        };
        assert!(peer.ask_as(0, Op::ArrayCreate, &create, &[]).is_ok());
        assert!(
            peer.ask_as(0, Op::ArrayCreate, &create, &[]).is_err(),
            "twice"
        );
        create.array = Handle::new(Kind::Event, 0, 1).0;
        assert!(peer.ask_as(0, Op::ArrayCreate, &create, &[]).is_err());
        create.array = Handle::new(Kind::Array, 0, u32::MAX).0;
        assert!(peer.ask_as(0, Op::ArrayCreate, &create, &[]).is_err());
        for (kind, word) in [(0, 7), (0, 0), (1, array), (2, 16), (3, 16), (9, array)] {
            let mut body = TextureCreate::default();
            body.resource.kind = kind;
            body.resource.words = [
                word,
                u64::MAX,
                u64::MAX,
                u64::MAX,
                u64::MAX,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
            ];
            assert!(
                peer.ask_as(0, Op::TextureCreate, &body, &[]).is_err(),
                "{kind} {word}"
            );
        }
        for object in [0, 1, array, u64::MAX] {
            for flags in [0, TEXTURE_IS_SURFACE] {
                let body = TextureDestroy {
                    object,
                    flags,
                    pad: 0,
                };
                peer.post(Op::TextureDestroy, &body, &[]).expect("posted");
            }
        }
        for object in [0, array, array, u64::MAX] {
            peer.post(Op::ArrayDestroy, &Object { object }, &[])
                .expect("posted");
        }
        for call in 0..28 {
            for kind in [Kind::TextureReference, Kind::SurfaceReference, Kind::Array] {
                let body = ReferenceArguments {
                    reference: Handle::new(kind, 0, 0).0,
                    words: [u64::MAX; 6],
                    call,
                    pad: 0,
                };
                assert!(peer.ask_as(0, Op::ReferenceCall, &body, &[]).is_err());
            }
        }
        for module in [0, 1, array, u64::MAX] {
            let body = GetReference {
                module,
                reference: array,
                ..GetReference::default()
            };
            assert!(peer.ask_as(0, Op::GetReference, &body, b"a\0").is_err());
        }
        let part = peer.handle(Kind::Array);
        for parent in [0, array, part] {
            let body = ArrayPart {
                parent,
                part,
                ..ArrayPart::default()
            };
            assert!(peer.ask_as(0, Op::ArrayPart, &body, &[]).is_err());
            let body = ArrayQuery {
                array: parent,
                ..ArrayQuery::default()
            };
            assert!(peer.ask_as(0, Op::ArrayQuery, &body, &[]).is_err());
        }
    });
}

#[test]
fn counts_beyond_all_reason_end_the_session() {
    fn with_function(
        change: impl Fn(&mut mpsshim_proto::message::Launch) + 'static,
    ) -> impl FnOnce(&mut Peer) -> Status {
        move |peer| {
            let (stream, module) = (peer.stream()?, peer.module(PTX.as_bytes())?);
            let function = peer.function(module, "fill")?;
            let params = fill_params(0, 0, 0);
            let mut body = launch(function, stream, 1, params.len());
            change(&mut body);
            peer.post(Op::Launch, &body, &params)
        }
    }
    let inline = |len: u64, carried: usize| {
        move |peer: &mut Peer| {
            let (stream, to) = (peer.stream()?, peer.memory(1 << 20)?.start);
            let body = CopyInline { to, stream, len };
            peer.post(Op::CopyInline, &body, &vec![7; carried])
        }
    };
    let list = |option: u32, len: u32, value: u64| {
        move |peer: &mut Peer| {
            let fd = memory_file(PTX.as_bytes()).expect("memory");
            let mut body = peer.image_load(PTX.as_bytes());
            body.options = 1;
            let option = JitOption { option, len, value };
            peer.load(&body, option.as_bytes(), fd.as_fd()).map(drop)
        }
    };
    let options = |count: u32| {
        move |peer: &mut Peer| {
            let fd = memory_file(PTX.as_bytes()).expect("memory");
            let mut body = peer.image_load(PTX.as_bytes());
            body.options = count;
            peer.load(&body, &[], fd.as_fd()).map(drop)
        }
    };
    each_ends_its_session(vec![
        case(
            "launch attributes",
            with_function(|body| body.attributes = u32::MAX),
        ),
        case(
            "launch attributes",
            with_function(|body| body.attributes = 33),
        ),
        case(
            "attributes do not fit",
            with_function(|body| body.attributes = 1),
        ),
        case(
            "bytes of kernel parameters",
            with_function(|body| body.param_len = u32::MAX),
        ),
        case(
            "do not fit a message",
            with_function(|body| body.param_len = 4096),
        ),
        case("inline copy of", inline(INLINE_COPY_MAX as u64 + 1, 64)),
        case("inline copy of", inline(u64::MAX, 64)),
        case("do not fit a message", inline(4096, 64)),
        case("load options", options(u32::MAX)),
        case("options do not fit", options(64)),
        case(
            "a list of load options does not fit",
            list(CU_JIT_GLOBAL_SYMBOL_NAMES, u32::MAX, 1),
        ),
        case(
            "a list of 0 instead of",
            list(CU_JIT_REFERENCED_KERNEL_NAMES, 0, u64::MAX),
        ),
        case("a name without its end", |peer| {
            let module = peer.module(PTX.as_bytes())?;
            let function = peer.handle(Kind::Function);
            let body = mpsshim_proto::message::GetFunction {
                parent: module,
                function,
                device: 0,
                pad: 0,
            };
            peer.post(Op::GetFunction, &body, &[b'x'; 40])
        }),
        case("memset of 3-byte elements", |peer| {
            let (stream, to) = (peer.stream()?, peer.memory(4096)?.start);
            let mut body = memset(to, 0, 16, stream);
            body.element = 3;
            peer.post(Op::Memset, &body, &[])
        }),
    ]);
}

#[test]
fn descriptors_that_do_not_match_end_the_session() {
    let load = |token: u64, send: fn(&Peer)| {
        move |peer: &mut Peer| {
            send(peer);
            let body = peer.image_load(PTX.as_bytes());
            peer.ask_as(token, Op::ImageLoad, &body, &[]).map(drop)
        }
    };
    fn image() -> OwnedFd {
        memory_file(PTX.as_bytes()).expect("memory")
    }
    each_ends_its_session(vec![
        case("no descriptor for token 9", load(9, |_| {})),
        case(
            "does not match token 9",
            load(9, |peer| {
                peer.send_descriptor(8, image().as_fd()).expect("send")
            }),
        ),
        case(
            "does not match token 9",
            load(9, |peer| {
                mpsshim_proto::shm::send_packet(peer.socket.as_fd(), &[9; 16], &[]).expect("send");
            }),
        ),
        case(
            "does not match token 9",
            load(9, |peer| {
                let (first, second) = (image(), image());
                let mut note = 9u64.to_ne_bytes().to_vec();
                note.resize(16, 0);
                let both = [first.as_fd(), second.as_fd()];
                mpsshim_proto::shm::send_packet(peer.socket.as_fd(), &note, &both).expect("send");
            }),
        ),
        case(
            "no descriptor for token 9",
            load(9, |peer| {
                let fd = image();
                let long = [9; 4096];
                mpsshim_proto::shm::send_packet(peer.socket.as_fd(), &long, &[fd.as_fd()])
                    .expect("send");
            }),
        ),
    ]);
}

#[test]
fn resources_that_were_never_told_are_refused() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        let mut split = ResourceSplit {
            groups: u32::MAX,
            wanted: 3,
            ..ResourceSplit::default()
        };
        for token in [0, 7, u32::MAX] {
            split.token = token;
            let asked = peer.ask_as(0, Op::ResourceSplit, &split, &[]);
            assert_eq!(asked.map(drop), Err(CUDA_ERROR_INVALID_RESOURCE_TYPE));
        }
        let join = |count| ResourceJoin { count, device: 0 };
        for (count, status) in [
            (0, CUDA_ERROR_INVALID_VALUE),
            (u32::MAX, CUDA_ERROR_INVALID_VALUE),
            (1, CUDA_ERROR_INVALID_RESOURCE_TYPE),
        ] {
            let asked = peer.ask_as(0, Op::ResourceJoin, &join(count), &[7; 4]);
            assert_eq!(asked.map(drop), Err(status));
        }
        let mut create = GreenCreate {
            green: peer.handle(Kind::GreenContext),
            description: 9,
            flags: 1,
            ..GreenCreate::default()
        };
        let asked = peer.ask_as(0, Op::GreenCreate, &create, &[]);
        assert_eq!(asked.map(drop), Err(CUDA_ERROR_INVALID_VALUE));
        create.device = 99;
        let asked = peer.ask_as(0, Op::GreenCreate, &create, &[]);
        assert_eq!(asked.map(drop), Err(CUDA_ERROR_INVALID_DEVICE));
        let green = create.green;
        peer.post(Op::GreenDestroy, &Object { object: green }, &[])
            .expect("posted");
        let query = ResourceQuery {
            green,
            device: 0,
            kind: 1,
        };
        let asked = peer.ask_as(0, Op::ResourceQuery, &query, &[]);
        assert_eq!(asked.map(drop), Err(CUDA_ERROR_INVALID_HANDLE));
        assert!(peer.mem_info().is_ok(), "the session goes on");
    });
}

#[test]
fn links_and_libraries_of_nobody_are_refused() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        let link = peer.handle(Kind::Link);
        let create = LinkCreate {
            link,
            info_log: u32::MAX,
            error_log: u32::MAX,
            ..LinkCreate::default()
        };
        let mut elsewhere = create;
        elsewhere.device = 99;
        let ask = |peer: &mut Peer, op, body: &LinkCreate| peer.ask_as(0, op, body, &[]).map(drop);
        assert_eq!(
            ask(&mut peer, Op::LinkCreate, &elsewhere),
            Err(CUDA_ERROR_INVALID_DEVICE)
        );
        assert_eq!(ask(&mut peer, Op::LinkCreate, &create), Ok(()));
        assert_eq!(
            ask(&mut peer, Op::LinkCreate, &create),
            Err(CUDA_ERROR_INVALID_HANDLE)
        );
        // Nothing was linked; another's or no handle.
        for (object, status) in [
            (link, CUDA_ERROR_NOT_FOUND),
            (link + 1, CUDA_ERROR_INVALID_HANDLE),
            (0, CUDA_ERROR_INVALID_HANDLE),
        ] {
            let fetched = peer.ask_as(0, Op::LinkFetch, &Object { object }, &[]);
            assert_eq!(fetched.map(drop), Err(status));
        }
        let mut add = LinkAdd {
            link,
            len: 64,
            kind: 1,
            options: 0,
        };
        let name = b"x\0";
        // Without a descriptor, and with one that is shorter than it says or holds no image.
        assert_eq!(
            peer.ask_as(0, Op::LinkAdd, &add, name).map(drop),
            Err(CUDA_ERROR_INVALID_VALUE)
        );
        let elf = fs::read(env!("CARGO_BIN_EXE_busy-peer")).expect("an ELF file");
        for (content, len, status) in [
            (&elf[..64], u64::MAX, CUDA_ERROR_INVALID_VALUE),
            (&elf[..64], 64, CUDA_ERROR_INVALID_IMAGE),
        ] {
            let fd = memory_file(content).expect("memory");
            add.len = len;
            let token = len;
            peer.send_descriptor(token, fd.as_fd()).expect("sent");
            let added = peer.ask_as(token, Op::LinkAdd, &add, name);
            assert_eq!(added.map(drop), Err(status));
        }
        let mut attribute = KernelAttribute {
            library: peer.module(PTX.as_bytes()).expect("a module"),
            ..KernelAttribute::default()
        };
        for device in [0, 99] {
            attribute.device = device;
            let asked = peer.ask_as(0, Op::KernelAttribute, &attribute, name);
            assert!(asked.is_err(), "a module is no library");
        }
        let left = Named {
            parent: link,
            device: 99,
            pad: 0,
        };
        peer.post(Op::ImageLeave, &left, &[]).expect("posted");
        peer.post(Op::LinkDestroy, &Object { object: link }, &[])
            .expect("posted");
        assert!(peer.mem_info().is_ok(), "the session goes on");
    });
}

#[test]
fn images_that_are_not_what_they_say_are_refused() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        let mut refused = |content: &[u8], change: &dyn Fn(&mut ImageLoad), status: CUresult| {
            let fd = memory_file(content).expect("memory");
            let mut body = peer.image_load(content);
            change(&mut body);
            assert_eq!(
                peer.load(&body, &[], fd.as_fd()),
                Err(status),
                "{} bytes",
                content.len()
            );
        };
        let as_is = |_: &mut ImageLoad| {};
        let mut fatbin = vec![0u8; 64];
        fatbin[..16]
            .copy_from_slice(b"\x50\xed\x55\xba\x01\x00\x10\x00\x31\x00\x00\x00\x00\x00\x00\x00");
        refused(&fatbin, &as_is, CUDA_ERROR_INVALID_IMAGE);
        refused(&fatbin[..10], &as_is, CUDA_ERROR_INVALID_IMAGE);
        let elf = fs::read(env!("CARGO_BIN_EXE_busy-peer")).expect("an ELF file");
        refused(&elf[..elf.len() - 64], &as_is, CUDA_ERROR_INVALID_IMAGE);
        refused(&elf[..60], &as_is, CUDA_ERROR_INVALID_IMAGE);
        refused(b"\x7fELF", &as_is, CUDA_ERROR_INVALID_IMAGE);
        refused(
            &PTX.as_bytes()[..PTX.len() - 20],
            &as_is,
            CUDA_ERROR_INVALID_PTX,
        );
        // A fatbin wrapper holds an address, which means nothing in the server.
        refused(
            b"\xb1\x43\x62\x46\x01\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00",
            &as_is,
            CUDA_ERROR_INVALID_IMAGE,
        );
        let ptx = [PTX, "// another"].concat();
        let ptx = ptx.as_bytes();
        refused(ptx, &|body| body.hash[0] ^= 1, CUDA_ERROR_INVALID_IMAGE);
        refused(ptx, &|body| body.len += 4096, CUDA_ERROR_INVALID_IMAGE);
        refused(ptx, &|body| body.len = u64::MAX, CUDA_ERROR_INVALID_IMAGE);
        refused(ptx, &|body| body.len = 0, CUDA_ERROR_INVALID_IMAGE);
        refused(ptx, &|body| body.device = 99, CUDA_ERROR_INVALID_DEVICE);
        refused(ptx, &|body| body.image = 7, CUDA_ERROR_INVALID_HANDLE);
        // Another one's content under the name of a known one: what is loaded is the known one.
        let lie = memory_file(b"not PTX at all").expect("memory");
        let mut body = peer.image_load(PTX.as_bytes());
        body.len = 14;
        let module = peer
            .load(&body, &[], lie.as_fd())
            .expect("the bystander has it loaded");
        peer.function(module, "fill").expect("the true content");

        let unsealed = tempfile::tempfile().expect("file");
        (&unsealed).write_all(ptx).expect("write");
        let body = peer.image_load(ptx);
        assert_eq!(
            peer.load(&body, &[], unsealed.as_fd()),
            Err(CUDA_ERROR_INVALID_IMAGE)
        );
        let (_reader, pipe) = std::io::pipe().expect("pipe");
        let body = peer.image_load(ptx);
        assert_eq!(
            peer.load(&body, &[], pipe.as_fd()),
            Err(CUDA_ERROR_INVALID_IMAGE)
        );
        peer.module(ptx).expect("the session goes on");
    });
}

#[test]
fn handles_that_are_stale_or_foreign_are_refused() {
    Scene::new().beside_a_worker(|scene| {
        let (mut worker, mut other) = (scene.worker(), scene.worker());
        worker.round().expect("round");
        other.round().expect("round");
        // A handle of the other session that this one has no object behind.
        let foreign = (0..40)
            .map(|_| other.peer.stream().expect("stream"))
            .last()
            .expect("forty");
        let (fill, own) = (worker.fill, worker.stream);
        let peer = &mut worker.peer;
        let stale = peer.stream().expect("stream");
        peer.post(Op::StreamDestroy, &Object { object: stale }, &[])
            .expect("post");
        let params = fill_params(0, 1, 1);
        let next = Handle::new(Kind::Stream, 2, Handle(own).index()).0;
        let event = Handle::new(Kind::Event, 1, Handle(own).index()).0;
        for stream in [foreign, stale, next, event, fill, 0, 1, 2, u64::MAX] {
            let body = launch(fill, stream, 1, params.len());
            peer.post(Op::Launch, &body, &params).expect("post");
            assert_eq!(
                peer.finish(own),
                Err(CUDA_ERROR_INVALID_HANDLE),
                "{stream:#x}"
            );
            peer.post(
                Op::StreamDestroy,
                &Object {
                    object: if stream == own { 0 } else { stream },
                },
                &[],
            )
            .expect("post");
            assert_eq!(
                peer.finish(own),
                Err(CUDA_ERROR_INVALID_HANDLE),
                "{stream:#x}"
            );
            // The flag of a mark on no stream is written all the same: its waiter must not wait for ever.
            assert_eq!(
                peer.finish(stream),
                Err(CUDA_ERROR_INVALID_HANDLE),
                "{stream:#x}"
            );
        }
        for function in [
            own,
            Handle::new(Kind::Function, 2, Handle(fill).index()).0,
            0,
        ] {
            let body = launch(function, own, 1, params.len());
            peer.post(Op::Launch, &body, &params).expect("post");
            assert_eq!(
                peer.finish(own),
                Err(CUDA_ERROR_INVALID_HANDLE),
                "{function:#x}"
            );
        }
        let far = Handle::new(Kind::Event, 1, u32::MAX).0;
        let create = mpsshim_proto::message::EventCreate {
            event: far,
            flags: 0,
            device: 0,
        };
        peer.post(Op::EventCreate, &create, &[]).expect("post");
        assert_eq!(peer.finish(own), Err(CUDA_ERROR_OUT_OF_MEMORY));
        let short = launch(fill, own, 1, 8);
        peer.post(Op::Launch, &short, &params).expect("post");
        assert_eq!(
            peer.finish(own),
            Err(CUDA_ERROR_INVALID_VALUE),
            "fewer parameters than the kernel has"
        );
        worker.round().expect("the session goes on");
        other.round().expect("and so does the other");
    });
}

#[test]
fn a_function_dies_with_its_module() {
    Scene::new().beside_a_worker(|scene| {
        let mut worker = scene.worker();
        let (stream, memory) = (worker.stream, worker.memory.start);
        let peer = &mut worker.peer;
        let module = peer.module(PTX.as_bytes()).expect("module");
        let fill = peer.function(module, "fill").expect("function");
        peer.post(Op::ImageUnload, &Object { object: module }, &[])
            .expect("post");
        let params = fill_params(memory, 1, 1);
        peer.post(Op::Launch, &launch(fill, stream, 1, params.len()), &params)
            .expect("post");
        assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_HANDLE));
        worker.round().expect("the session goes on");
    });
}

#[test]
fn memory_of_another_session_is_out_of_reach() {
    Scene::new().beside_a_worker(|scene| {
        let (mut victim, mut thief) = (scene.worker(), scene.worker());
        let pinned: Range = victim
            .peer
            .ask(
                Op::HostAlloc,
                &HostAlloc {
                    len: 8192,
                    ..HostAlloc::default()
                },
                &[],
            )
            .expect("pinned memory");
        let (stream, target) = (victim.stream, victim.memory);
        victim
            .peer
            .post(
                Op::Memset,
                &memset(target.start, 0x5ec2e7, 1024, stream),
                &[],
            )
            .expect("post");
        victim.peer.finish(stream).expect("finish");
        let (stream, own) = (thief.stream, thief.memory);
        let peer = &mut thief.peer;
        let (d, h, s) = (Side::Device, Side::Host, Side::Staging);
        let after = own.start + own.len;
        let operation = |operation: u32, address: u64| {
            let body = MemOp {
                stream,
                address,
                operation,
                ..MemOp::default()
            };
            body.as_bytes().to_vec()
        };
        let refused: Vec<(Op, Vec<u8>)> = vec![
            (
                Op::Copy,
                copy(s, 0, d, target.start, 64, stream).as_bytes().to_vec(),
            ),
            (
                Op::Copy,
                copy(d, target.start, s, 0, 64, stream).as_bytes().to_vec(),
            ),
            (
                Op::Copy,
                copy(d, own.start, d, target.start + 256, 64, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            (
                Op::Copy,
                copy(d, target.start, d, own.start, 64, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            (
                Op::Copy,
                copy(d, own.start, h, pinned.start, 64, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            (
                Op::Copy,
                copy(h, pinned.start, d, own.start, 64, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            // Pinned memory named as device memory; the server's own memory; past the end; around the corner.
            (
                Op::Copy,
                copy(d, own.start, d, pinned.start, 64, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            (
                Op::Copy,
                copy(d, own.start, h, 0x7fff_0000_0000, 64, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            (
                Op::Copy,
                copy(d, own.start, d, 0x5555_5555_4000, 64, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            (
                Op::Copy,
                copy(d, own.start, s, 0, own.len + 1, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            (
                Op::Copy,
                copy(d, after - 32, d, own.start, 64, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            (
                Op::Copy,
                copy(d, own.start + 64, d, own.start, u64::MAX - 63, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            (
                Op::Memset,
                memset(target.start, 7, 16, stream).as_bytes().to_vec(),
            ),
            (
                Op::Memset,
                memset(own.start, 7, u64::MAX / 2, stream)
                    .as_bytes()
                    .to_vec(),
            ),
            (
                Op::Memset,
                memset(after - 4, 7, 2, stream).as_bytes().to_vec(),
            ),
            (Op::MemOp, operation(1, target.start)),
            (Op::MemOp, operation(2, target.start)),
            (Op::MemOp, operation(4, after - 4)),
            (Op::MemOp, operation(5, own.start + 4)),
            (Op::MemOp, operation(1, pinned.start)),
            (Op::MemOp, operation(2, 0x7fff_0000_0000)),
            (Op::MemOp, operation(7, own.start)),
            (Op::MemRelease, target.as_bytes().to_vec()),
            (Op::HostFree, pinned.as_bytes().to_vec()),
        ];
        for (number, (op, body)) in refused.into_iter().enumerate() {
            peer.put(op as u16, 0, &[&body]).expect("put");
            assert_eq!(
                peer.finish(stream),
                Err(CUDA_ERROR_INVALID_VALUE),
                "{number}: {op:?}"
            );
        }
        let inline = CopyInline {
            to: target.start,
            stream,
            len: 4,
        };
        peer.post(Op::CopyInline, &inline, b"evil").expect("post");
        assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_VALUE));
        thief.round().expect("the session goes on");
        let found = victim
            .peer
            .read(victim.stream, target.start, 4096)
            .expect("read");
        assert!(
            found
                .chunks_exact(4)
                .all(|word| word == 0x5ec2e7u32.to_le_bytes()),
            "untouched"
        );
        victim.round().expect("the victim goes on");
    });
}

#[test]
fn what_is_no_attribute_and_no_token_is_refused() {
    Scene::new().beside_a_worker(|scene| {
        let mut worker = scene.worker();
        let stream = worker.stream;
        let peer = &mut worker.peer;
        for id in [0, 3, 11, u32::MAX] {
            let body = StreamAttribute {
                stream,
                id,
                value: [0xff; 32],
                ..StreamAttribute::default()
            };
            peer.post(Op::StreamAttribute, &body, &[]).expect("post");
            assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_VALUE), "{id}");
        }
        let event = peer.handle(Kind::Event);
        let mut import = EventImport {
            event,
            ..EventImport::default()
        };
        let ask = |peer: &mut Peer, body: &EventImport| {
            peer.ask_as(0, Op::EventImport, body, &[]).map(drop)
        };
        assert_eq!(ask(peer, &import), Err(CUDA_ERROR_MAP_FAILED));
        import.device = 99;
        assert_eq!(ask(peer, &import), Err(CUDA_ERROR_INVALID_DEVICE));
        let export = EventExport { event };
        let token: Status<EventToken> = peer.ask(Op::EventExport, &export, &[]);
        assert_eq!(token, Err(CUDA_ERROR_INVALID_HANDLE));
        // Opened where another event is.
        let create = mpsshim_proto::message::EventCreate {
            event,
            flags: 0,
            device: 0,
        };
        peer.post(Op::EventCreate, &create, &[]).expect("post");
        let token: EventToken = peer.ask(Op::EventExport, &export, &[]).expect("token");
        let again: EventToken = peer.ask(Op::EventExport, &export, &[]).expect("token");
        assert_eq!(token, again);
        (import.device, import.token) = (0, token.token);
        assert_eq!(ask(peer, &import), Err(CUDA_ERROR_INVALID_HANDLE));
        import.event = peer.handle(Kind::Event);
        assert_eq!(ask(peer, &import), Ok(()), "twice in one session");
        worker.round().expect("the session goes on");
    });
}

/// Far more behind a host function than the server keeps, memory given back meanwhile, and no return.
#[test]
fn what_waits_for_a_client_goes_with_it() {
    Scene::new().beside_a_worker(|scene| {
        for returns in [true, false] {
            let mut worker = scene.worker();
            worker.round().expect("round");
            let (stream, memory) = (worker.stream, worker.memory.start);
            let peer = &mut worker.peer;
            let (other, lent) = (
                peer.stream().expect("stream"),
                peer.memory(64).expect("memory"),
            );
            let slot = 5;
            let function = |stream| HostFunction {
                stream,
                slot,
                value: 1,
            };
            peer.post(Op::HostFunction, &function(stream), &[])
                .expect("post");
            peer.wait(|peer| {
                (peer.flag(slot + ARRIVED).load(Ordering::Acquire) == 1).then_some(())
            })
            .expect("the stream gets there");
            for word in 0..2000 {
                let body = memset(memory + 4 * word, 9, 1, stream);
                peer.post(Op::Memset, &body, &[]).expect("post");
            }
            // Waits of another stream for words of both kinds of memory.
            for (operation, address) in [(1, lent.start), (4, lent.start + 8)] {
                let body = MemOp {
                    stream: other,
                    address,
                    value: 1,
                    operation,
                    flags: CU_STREAM_WAIT_VALUE_EQ,
                };
                peer.post(Op::MemOp, &body, &[]).expect("post");
            }
            peer.post(Op::MemRelease, &lent, &[]).expect("post");
            let third = peer.stream().expect("stream");
            peer.post(Op::Memset, &memset(memory + 8192, 7, 1, third), &[])
                .expect("post");
            peer.finish(third).expect("a third stream goes on");
            let before = peer.read(third, memory, 4).expect("read");
            assert_ne!(before, 9u32.to_le_bytes(), "it is held back");
            if returns {
                for word in 0..5000 {
                    let body = memset(memory + 4 * (word % 2000), 11, 1, stream);
                    peer.post(Op::Memset, &body, &[]).expect("post");
                }
                peer.flag(slot + RETURNED).store(1, Ordering::Release);
                peer.ring();
                peer.finish(stream).expect("everything is done");
                let after = peer.read(stream, memory + 7996, 4).expect("read");
                assert_eq!(after, 11u32.to_le_bytes());
            }
        }
    });
}

#[test]
fn memory_freed_under_running_work_stays_until_that_is_done() {
    Scene::new().beside_a_worker(|scene| {
        let mut hasty = scene.worker();
        let (stream, fill) = (hasty.stream, hasty.fill);
        let free = |hasty: &mut Worker| hasty.peer.mem_info().expect("info").free;
        let before = free(&mut hasty);
        let memory = hasty.peer.memory(4 << 20).expect("memory");
        // Stores at its end only.
        let params = fill_params(memory.start, 1, 1_000_000);
        let body = launch(fill, stream, 1, params.len());
        hasty.peer.post(Op::Launch, &body, &params).expect("launch");
        hasty
            .peer
            .post(Op::MemRelease, &memory, &[])
            .expect("release");
        let mut other = scene.peer();
        let theirs = other.memory(4 << 20).expect("memory of another");
        assert!(
            theirs.start + theirs.len <= memory.start || memory.start + memory.len <= theirs.start
        );
        assert_eq!(
            hasty.peer.finish(stream),
            Ok(()),
            "the kernel stores where it may"
        );
        drop(other);
        wait_until("the memory is free", || free(&mut hasty) == before);
        hasty.round().expect("the session goes on");
    });
}

#[test]
fn memory_beyond_all_reason_is_refused() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        peer.attach().expect("attach");
        for len in [1 << 39, 1 << 40, 1 << 50, u64::MAX - 4095, u64::MAX] {
            assert_eq!(peer.memory(len), Err(CUDA_ERROR_OUT_OF_MEMORY), "{len:#x}");
            let body = HostAlloc {
                len,
                ..HostAlloc::default()
            };
            let pinned = peer.ask::<_, Range>(Op::HostAlloc, &body, &[]);
            assert_eq!(pinned, Err(CUDA_ERROR_OUT_OF_MEMORY), "{len:#x} pinned");
        }
        peer.memory(0).expect("the session goes on");
    });
}

#[test]
fn a_client_cannot_change_its_segment_s_size() {
    Scene::new().beside_a_worker(|scene| {
        let mut worker = scene.worker();
        let segment = worker.peer.segment.as_fd();
        for len in [0, 4096, SEGMENT_LEN as i64 - 1, SEGMENT_LEN as i64 + 1] {
            let error = truncate(segment, len).expect_err("sealed");
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        }
        worker.round().expect("the session goes on");
    });
}

#[test]
fn a_client_of_another_release_is_turned_away() {
    Scene::new().beside_a_worker(|scene| {
        let status = |hello: &[u8]| {
            let (_, answer) = greet(&control(&scene.place), hello).expect("greet");
            answer.map(|(welcome, descriptors)| (welcome.status, descriptors.len()))
        };
        let refused = Some((CUDA_ERROR_MPS_CONNECTION_FAILED.0, 0));
        let version = ClientHello {
            protocol: PROTOCOL_VERSION + 1,
            ..hello()
        };
        assert_eq!(status(version.as_bytes()), refused);
        let table = ClientHello {
            table_hash: !hello().table_hash,
            ..hello()
        };
        assert_eq!(status(table.as_bytes()), refused);
        let older = ClientHello {
            protocol: OLDEST_HELLO - 1,
            ..hello()
        };
        assert_eq!(status(older.as_bytes()), refused);
        let log = scene.place.log("control.log");
        for said in [version.wire(), table.wire()].map(|wire| wire.to_string()) {
            assert!(log.contains(&said), "{said}: {log}");
        }
        assert!(log.contains("the client speaks protocol version"), "{log}");
    });
}

#[test]
fn a_client_that_leaves_at_once_leaves_nothing() {
    Scene::new().beside_a_worker(|scene| {
        for round in 0..20 {
            let socket =
                mpsshim_control::seqpacket::connect(&control(&scene.place)).expect("connect");
            match round % 4 {
                0 => {}
                1 => drop(mpsshim_proto::shm::send_packet(
                    socket.as_fd(),
                    &hello().as_bytes()[..9],
                    &[],
                )),
                2 => drop(mpsshim_proto::shm::send_packet(
                    socket.as_fd(),
                    hello().as_bytes(),
                    &[],
                )),
                _ => drop(scene.peer()),
            }
        }
    });
}

#[test]
fn a_client_that_asks_and_never_listens_stops_nobody() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        peer.attach().expect("attach");
        // Descriptors pile up in its socket until there is no room.
        let body = HostAlloc {
            len: 4096,
            ..HostAlloc::default()
        };
        let refused = (0..2000).find_map(|_| peer.ask::<_, Range>(Op::HostAlloc, &body, &[]).err());
        assert_eq!(refused, Some(CUDA_ERROR_OUT_OF_MEMORY));
    });
}

#[test]
fn a_printing_client_that_dies_leaves_its_turn() {
    Scene::new().beside_a_worker(|scene| {
        let image = format!("// vprintf\n{PTX}");
        for round in 0..3 {
            let mut peer = scene.peer();
            peer.attach().expect("attach");
            let stream = peer.stream().expect("stream");
            let module = peer.module(image.as_bytes()).expect("module");
            let fill = peer.function(module, "fill").expect("function");
            let memory = peer.memory(4096).expect("memory").start;
            let params = fill_params(memory, 1, 1);
            let body = launch(fill, stream, 1, params.len());
            peer.post(Op::Launch, &body, &params).expect("post");
            peer.finish(stream)
                .unwrap_or_else(|status| panic!("the turn comes in round {round}: {status}"));
            // No mark follows this one: as far as flags tell it is in flight for ever.
            peer.post(Op::Launch, &body, &params).expect("post");
            peer.ask_as(0, Op::MemInfo, &Attach::default(), &[])
                .expect("it has been taken out of the ring");
        }
    });
}

/// A child process that is busy until it is killed.
struct Doomed(Child);

impl Doomed {
    fn start(place: &Place) -> Doomed {
        let mut child = Command::new(env!("CARGO_BIN_EXE_busy-peer"))
            .arg(control(place))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("busy-peer");
        let mut line = String::new();
        let out = child.stdout.take().expect("piped");
        BufReader::new(out).read_line(&mut line).expect("read");
        assert_eq!(line, "busy\n");
        Doomed(child)
    }
    fn kill(&mut self) {
        self.0.kill().expect("kill");
        self.0.wait().expect("wait");
    }
}

#[test]
fn clients_killed_at_any_moment_leave_nothing() {
    Scene::new().beside_a_worker(|scene| {
        // Moments that differ from run to run and from round to round.
        let mut random = u64::from(std::process::id()) | 1;
        for _ in 0..20 {
            let mut doomed = Doomed::start(&scene.place);
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            std::thread::sleep(Duration::from_micros(random >> 49));
            doomed.kill();
        }
    });
}

/// One that ends with its server, whatever it has in flight.
fn bound_worker(place: &Place) -> Worker {
    let mut worker = Worker::connect(&control(place)).expect("worker");
    worker.peer.bind().expect("a pool");
    worker
}

#[test]
fn a_killed_server_is_noticed_by_all_and_replaced() {
    let place = daemon();
    let workers: Vec<Worker> = (0..4).map(|_| bound_worker(&place)).collect();
    let server = workers[0].peer.welcome.server_pid;
    let busy: Vec<_> = workers
        .into_iter()
        .map(|worker| std::thread::spawn(move || (worker.run(), Instant::now())))
        .collect();
    std::thread::sleep(Duration::from_millis(50));
    kill(Pid::from_raw(server as i32), Signal::SIGKILL).expect("kill");
    let killed = Instant::now();
    for worker in busy {
        let (status, at) = worker.join().expect("worker");
        assert_eq!(status, CUDA_ERROR_MPS_RPC_FAILURE);
        assert!(at - killed < PATIENCE, "after {:?}", at - killed);
    }
    let mut next = reconnect(&place);
    assert_ne!(next.peer.welcome.server_pid, server);
    next.round().expect("it works");
    let log = place.log("control.log");
    assert!(
        log.lines().any(|line| line.contains(&server.to_string())
            && line.contains("ended unexpectedly, with 4 clients")),
        "{log}"
    );
}

#[test]
fn an_illegal_address_ends_every_session_and_the_server_is_replaced() {
    let place = daemon();
    let connect = || bound_worker(&place);
    let (mut guilty, busy, idle) = (connect(), connect(), connect());
    let server = idle.peer.welcome.server_pid;
    let busy = std::thread::spawn(move || (busy.run(), Instant::now()));
    std::thread::sleep(Duration::from_millis(50));
    let body = launch(guilty.stray, guilty.stream, 1, 8);
    guilty
        .peer
        .post(Op::Launch, &body, &0x10u64.to_le_bytes())
        .expect("post");
    let fault = Instant::now();
    assert_eq!(
        guilty.peer.finish(guilty.stream),
        Err(CUDA_ERROR_ILLEGAL_ADDRESS)
    );
    assert_eq!(idle.peer.await_end(), Ok(CUDA_ERROR_ILLEGAL_ADDRESS));
    let told = fault.elapsed();
    assert!(told < PATIENCE, "after {told:?}");
    let (status, at) = busy.join().expect("worker");
    assert_eq!(status, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(at - fault < PATIENCE, "after {:?}", at - fault);
    let mut next = reconnect(&place);
    assert_ne!(
        next.peer.welcome.server_pid, server,
        "the process is replaced"
    );
    next.round().expect("it works");
    wait_until("the old server has ended", || {
        !PathBuf::from(format!("/proc/{server}/maps")).exists()
    });
    assert!(place.log("server.log").contains("The context is lost"));
}
