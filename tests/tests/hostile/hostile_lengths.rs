//! Lengths that go from a client's own memory into what lies right behind it. A driver in whose eyes all clients' memory
//! is one process's takes such a length; the server must not. The neighbour is mapped in all tests, so that the check
//! of the server's is all there is in the way.

use mpsshim_api::cuda::*;
use mpsshim_proto::message::array::{BoxSide, CopyBox};
use mpsshim_proto::message::graph::{
    GraphCreate, GraphInstantiate, GraphInstantiated, GraphLaunch, GraphNode, GraphNodeAdded,
};
use mpsshim_proto::message::{CopyInline, HostAlloc, Memset, Named, Op, Range, Side, Value};
use mpsshim_tests::peer::{Peer, Status, copy, memset};
use mpsshim_tests::scene::Scene;
use zerocopy::{FromBytes, Immutable, IntoBytes};

const UNIT: u64 = 2 << 20;
const NO: Status = Err(CUDA_ERROR_INVALID_VALUE);

/// What a post came to.
fn posted<T: IntoBytes + Immutable>(peer: &mut Peer, op: Op, body: &T, behind: &[u8]) -> Status {
    peer.post(op, body, behind)?;
    // Whatever is asked next is answered after it.
    let _ = peer.mem_info();
    peer.posted_error()
}

fn write(peer: &mut Peer, stream: u64, to: u64, bytes: &[u8]) -> Status {
    let len = bytes.len() as u64;
    posted(peer, Op::CopyInline, &CopyInline { to, stream, len }, bytes)
}

/// `height` rows of `width` elements.
fn area(to: u64, stream: u64, element: u32, (width, pitch, height): (u64, u64, u64)) -> Memset {
    Memset {
        pitch,
        width,
        height,
        element,
        ..memset(to, 0xeeee_eeee, 0, stream)
    }
}

/// Launches a graph with one copy.
fn run_copy_node(peer: &mut Peer, stream: u64, does: &CUDA_MEMCPY3D) -> Status {
    let graph: Value = peer.ask(Op::GraphCreate, &GraphCreate::default(), &[])?;
    let body = GraphNode {
        object: graph.value,
        kind: CU_GRAPH_NODE_TYPE_MEMCPY,
        ..GraphNode::default()
    };
    peer.ask::<_, GraphNodeAdded>(Op::GraphNode, &body, does.as_bytes())?;
    let body = GraphInstantiate {
        graph: graph.value,
        ..GraphInstantiate::default()
    };
    let made: GraphInstantiated = peer.ask(Op::GraphInstantiate, &body, &[])?;
    let body = GraphLaunch {
        exec: made.exec,
        stream,
    };
    posted(peer, Op::GraphLaunch, &body, &[])
}

/// A client, and another whose memory begins where the first one's ends.
struct Neighbours {
    thief: Peer,
    victim: Peer,
    thief_stream: u64,
    victim_stream: u64,
    /// The thief's last byte is before it.
    border: u64,
    /// What went over the border, or was not refused as it should be.
    crossed: Vec<String>,
}

impl Neighbours {
    /// Both get memory in turn until two pieces meet.
    fn meet(scene: &Scene, get: impl Fn(&mut Peer) -> Range) -> Neighbours {
        let (mut thief, mut victim) = (scene.peer(), scene.peer());
        let (thief_stream, victim_stream) = (
            thief.stream().expect("a stream"),
            victim.stream().expect("a stream"),
        );
        let (mut ends, mut starts) = (Vec::new(), Vec::new());
        for _ in 0..32 {
            let range = get(&mut thief);
            ends.push(range.start + range.len);
            starts.push(get(&mut victim).start);
            if let Some(border) = ends.iter().find(|end| starts.contains(end)) {
                return Neighbours {
                    border: *border,
                    thief,
                    victim,
                    thief_stream,
                    victim_stream,
                    crossed: Vec::new(),
                };
            }
        }
        panic!("no two pieces of memory meet: {ends:x?}, {starts:x?}");
    }

    /// Has the thief do something, and looks whether the victim's bytes are what they were.
    fn attempt(&mut self, what: &str, crossing: impl FnOnce(&mut Peer, u64, u64) -> Status) {
        let own: Vec<u8> = (1..=64).collect();
        let (stream, border) = (self.victim_stream, self.border);
        write(&mut self.victim, stream, border, &own).expect("its own memory");
        self.victim.finish(stream).expect("written");
        let status = crossing(&mut self.thief, self.thief_stream, border);
        // A refusal ends no session, and what was let through is done.
        let finished = self.thief.finish(self.thief_stream);
        let now = self.victim.read(stream, border, own.len());
        if now.expect("its own memory") != own {
            self.crossed.push(format!("{what}: written"));
        }
        if (status, finished) != (NO, Ok(())) {
            let came = format!("{what}: {status:?}, {finished:?}");
            self.crossed.push(came);
        }
    }

    /// Every call that names a range and has it written or read.
    fn cannot_cross(&mut self) {
        let up_to = |peer: &mut Peer, stream, border: u64| {
            let whole = memset(border - 64, 0x0101_0101, 16, stream);
            posted(peer, Op::Memset, &whole, &[])
        };
        let own = up_to(&mut self.thief, self.thief_stream, self.border);
        own.expect("all of one's own memory");
        self.attempt("inline copy", |peer, stream, border| {
            write(peer, stream, border - 8, &[0xee; 16])
        });
        self.attempt("copy from staging", |peer, stream, border| {
            let body = copy(Side::Device, border - 8, Side::Staging, 0, 16, stream);
            posted(peer, Op::Copy, &body, &[])
        });
        self.attempt("copy to staging", |peer, stream, border| {
            let body = copy(Side::Staging, 0, Side::Device, border - 8, 16, stream);
            posted(peer, Op::Copy, &body, &[])
        });
        self.attempt("copy within the device", |peer, stream, border| {
            let to = (Side::Device, border - 8);
            let body = copy(to.0, to.1, Side::Device, border - 64, 16, stream);
            posted(peer, Op::Copy, &body, &[])
        });
        self.attempt("copy out of the neighbour's", |peer, stream, border| {
            let from = (Side::Device, border - 8);
            let body = copy(Side::Device, border - 64, from.0, from.1, 16, stream);
            posted(peer, Op::Copy, &body, &[])
        });
        for element in [1, 2, 4] {
            let row = 16 / u64::from(element);
            self.attempt("memset", |peer, stream, border| {
                let body = area(border - 8, stream, element, (row, 0, 1));
                posted(peer, Op::Memset, &body, &[])
            });
            self.attempt("second row of a memset", |peer, stream, border| {
                let body = area(border - 16, stream, element, (row, 16, 2));
                posted(peer, Op::Memset, &body, &[])
            });
            self.attempt("rows far apart", |peer, stream, border| {
                let body = area(border - 4096, stream, element, (row, 2048, 3));
                posted(peer, Op::Memset, &body, &[])
            });
            self.attempt("end of the last row", |peer, stream, border| {
                let body = area(border - 32, stream, element, (row, 24, 2));
                posted(peer, Op::Memset, &body, &[])
            });
        }
        // The driver takes a pitch and a number of rows of zero for those of the box.
        for (what, own, size, pitch, rows) in [
            ("rows of a box", 16, [16, 4, 1], 16, 4),
            ("rows without a pitch", 16, [16, 4, 1], 0, 4),
            ("slices of a box", 16, [16, 1, 4], 16, 1),
            ("slices without a pitch", 16, [16, 1, 4], 0, 1),
            ("slices without rows", 32, [16, 2, 2], 16, 0),
        ] {
            self.attempt(what, |peer, stream, border| {
                let side = |address, side: Side| BoxSide {
                    address,
                    pitch,
                    rows,
                    side: side as u32,
                    ..BoxSide::default()
                };
                let body = CopyBox {
                    to: side(border - own, Side::Device),
                    from: side(0, Side::Staging),
                    width: size[0],
                    height: size[1],
                    depth: size[2],
                    stream,
                };
                posted(peer, Op::CopyBox, &body, &[])
            });
        }
        for (what, own, size, at) in [
            ("rows of a copy node", 32, [16, 4, 1], [0, 0, 0]),
            ("rows behind an x", 32, [8, 3, 1], [8, 0, 0]),
            ("slices of a copy node", 32, [16, 1, 4], [0, 0, 0]),
            ("slices behind a y", 48, [16, 1, 2], [0, 1, 0]),
            ("slices behind a z", 32, [16, 1, 1], [0, 0, 3]),
        ] {
            self.attempt(what, |peer, stream, border| {
                let does = CUDA_MEMCPY3D {
                    src_type: CU_MEMORYTYPE_DEVICE,
                    src_device: border - 4096,
                    dst_type: CU_MEMORYTYPE_DEVICE,
                    dst_device: border - own,
                    dst_x: at[0],
                    dst_y: at[1],
                    dst_z: at[2],
                    width: size[0],
                    height: size[1],
                    depth: size[2],
                    ..CUDA_MEMCPY3D::default()
                };
                run_copy_node(peer, stream, &does)
            });
        }
        // What ends where the memory does is one's own.
        let body = area(self.border - 40, self.thief_stream, 1, (16, 24, 2));
        let own = posted(&mut self.thief, Op::Memset, &body, &[]);
        own.expect("all rows in one's own memory");
    }
}

#[test]
fn lengths_end_with_the_own_device_memory() {
    Scene::new().beside_a_worker(|scene| {
        let get = |peer: &mut Peer| peer.memory(UNIT).expect("memory");
        let mut neighbours = Neighbours::meet(scene, get);
        neighbours.cannot_cross();
        assert_eq!(neighbours.crossed, [""; 0]);
    });
}

#[test]
fn lengths_end_with_the_own_pinned_block() {
    Scene::new().beside_a_worker(|scene| {
        // A block has its addresses from a unit on: only one that fills it has a neighbour right behind.
        let get = |peer: &mut Peer| {
            let body = HostAlloc {
                len: UNIT,
                ..HostAlloc::default()
            };
            let answer = peer.ask_as(1, Op::HostAlloc, &body, &[]);
            Range::read_from_bytes(&answer.expect("pinned memory")).expect("a range")
        };
        let mut neighbours = Neighbours::meet(scene, get);
        neighbours.cannot_cross();
        for (what, to) in [("to pinned memory", true), ("from pinned memory", false)] {
            let memory = neighbours.thief.memory(UNIT).expect("memory").start;
            neighbours.attempt(what, |peer, stream, border| {
                let (own, host) = ((Side::Device, memory), (Side::Host, border - 8));
                let (to, from) = if to { (host, own) } else { (own, host) };
                let body = copy(to.0, to.1, from.0, from.1, 16, stream);
                posted(peer, Op::Copy, &body, &[])
            });
        }
        assert_eq!(neighbours.crossed, [""; 0]);
    });
}

/// Two variables, the second right behind the first.
const VARIABLES: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .b8 first[256];
.visible .global .align 4 .b8 second[256];
.visible .entry touch()
{
    .reg .b32 %r1;
    .reg .b64 %rd1;
    mov.u64 %rd1, first;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    mov.u64 %rd1, second;
    st.global.u32 [%rd1], %r1;
    ret;
}
";

#[test]
fn lengths_end_with_the_variable_of_a_module() {
    let mut scene = Scene::new();
    // The image stays for the next client, with a page of variables.
    scene.before.free -= 4096;
    scene.beside_a_worker(|scene| {
        let mut peer = scene.peer();
        let stream = peer.stream().expect("a stream");
        let module = peer.module(VARIABLES.as_bytes()).expect("a module");
        let variable = |peer: &mut Peer, name: &[u8]| {
            let body = Named {
                parent: module,
                ..Named::default()
            };
            peer.ask::<_, Range>(Op::GetGlobal, &body, name)
                .expect("a variable")
        };
        // A session may name what it has looked up, and that alone.
        let first = variable(&mut peer, b"first\0");
        let border = first.start + first.len;
        assert_eq!(first.len, 256);
        let crossing = [
            write(&mut peer, stream, border - 8, &[0xee; 16]),
            write(&mut peer, stream, border, &[0xee; 16]),
            posted(
                &mut peer,
                Op::Memset,
                &memset(border - 8, !0, 4, stream),
                &[],
            ),
            posted(
                &mut peer,
                Op::Memset,
                &area(border - 16, stream, 4, (4, 16, 2)),
                &[],
            ),
        ];
        let whole = memset(first.start, 0x0101_0101, 64, stream);
        let own = posted(&mut peer, Op::Memset, &whole, &[]);
        let second = variable(&mut peer, b"second\0");
        assert_eq!(second.start, border, "right behind the first");
        let found = peer.read(stream, second.start, 256);
        assert_eq!(found.expect("looked up"), [0; 256]);
        assert_eq!(crossing, [NO; 4]);
        own.expect("all of the first");
        let found = peer.read(stream, first.start, 256);
        assert_eq!(found.expect("looked up"), [1; 256]);
        // Each is one by itself: a range over both is none.
        let over = memset(border - 8, !0, 4, stream);
        assert_eq!(posted(&mut peer, Op::Memset, &over, &[]), NO);
    });
}
