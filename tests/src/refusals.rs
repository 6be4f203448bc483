//! Tables of messages that a server refuses, and what it says to each of them. Like the fuzzer of the engine
//! (docs/fuzzing.md) they run against an engine in their own process ([`crate::in_process`]).
//!
//! A row makes one message and says what comes of it. The rows that vary one field ([`Table::handle`], [`Table::range`],
//! [`Table::device`]) begin with a row in which that field is right and the message is accepted, so that the others are
//! refused for that field and for nothing else.

use crate::in_process::{Counts, InProcess};
use crate::peer::{PTX, Peer, memory_file};
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::array::ArrayCreate;
use mpsshim_proto::message::context::GreenCreate;
use mpsshim_proto::message::graph::{
    GraphCreate, GraphInstantiate, GraphInstantiated, GraphNode, GraphNodeAdded,
};
use mpsshim_proto::message::image::LinkCreate;
use mpsshim_proto::message::memory::{Location, PhysicalCreate, Properties};
use mpsshim_proto::message::{EventCreate, Object, Op, Range, Value};
use mpsshim_proto::ring::ALIGN;
use mpsshim_proto::shm;
use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use zerocopy::{FromZeros, Immutable, IntoBytes};

/// How long the server may take to give back what a table's sessions had.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that rows about memory name.
const LEN: u64 = 64;
/// The token of messages that a descriptor belongs to.
pub const TOKEN: u64 = 7;
/// A device that is not there: an [`InProcess`] of these tests has two.
pub const NO_DEVICE: u32 = 2;
/// Handles that another session chooses begin here.
const ELSEWHERE: u32 = 500;

/// What comes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A request is answered with this status; of an asynchronous operation it is the posted error.
    Status(CUresult),
    /// The session ends: the message breaks the protocol.
    Ends,
}

use Outcome::{Ends, Status};

/// A message that is about to be sent.
#[derive(Debug)]
pub struct Draft {
    token: u64,
    body: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl Draft {
    /// A message that is this struct.
    pub fn of<T: IntoBytes + Immutable>(body: &T) -> Draft {
        Draft {
            token: 0,
            body: body.as_bytes().to_vec(),
            descriptor: None,
        }
    }

    /// With more behind it.
    #[must_use]
    pub fn with<T: IntoBytes + Immutable + ?Sized>(mut self, behind: &T) -> Draft {
        self.body.extend_from_slice(behind.as_bytes());
        self
    }

    /// With a descriptor that is sent before it.
    #[must_use]
    pub fn carrying(mut self, descriptor: OwnedFd) -> Draft {
        (self.token, self.descriptor) = (TOKEN, Some(descriptor));
        self
    }

    /// With a name behind it that does not end before the message does.
    #[must_use]
    pub fn with_endless_name(mut self) -> Draft {
        let len = (self.body.len() + 1).next_multiple_of(ALIGN as usize);
        self.body.resize(len, b'a');
        self
    }

    /// With a token, and without the descriptor that it promises.
    #[must_use]
    pub fn promising(mut self) -> Draft {
        self.token = TOKEN;
        self
    }
}

/// A session with objects of each kind, and another one beside it.
pub struct Scene {
    /// The session that sends the messages.
    pub peer: Peer,
    /// A session that has as much.
    pub other: Peer,
    /// 2 MiB of device memory.
    pub memory: Range,
    /// 4 KiB of pinned memory.
    pub host: Range,
    /// The same of the other session.
    pub others_memory: Range,
    /// The same of the other session.
    pub others_host: Range,
    /// A stream.
    pub stream: u64,
    /// A module of [`PTX`].
    pub module: u64,
    /// `fill` of it, which takes 16 bytes of parameters.
    pub function: u64,
    made: HashSet<u64>,
}

fn furnish(peer: &mut Peer) -> (Range, Range) {
    peer.attach().expect("attach");
    let memory = peer.memory(4096).expect("device memory");
    let (host, _) = peer.pinned(4096).expect("pinned memory");
    (memory, host)
}

/// An empty node in a new graph.
pub fn node(peer: &mut Peer, graph: u64) -> u64 {
    let body = GraphNode {
        object: graph,
        kind: CU_GRAPH_NODE_TYPE_EMPTY,
        ..GraphNode::default()
    };
    let added: GraphNodeAdded = peer.ask(Op::GraphNode, &body, &[]).expect("a node");
    added.node
}

/// What [`Op::PhysicalCreate`] and [`Op::PoolCreate`] say of memory on a device that can be exported.
pub fn properties(device: u32) -> Properties {
    Properties {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: Location {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: device as i32,
        },
        ..Properties::default()
    }
}

/// A one-dimensional array, or a mipmapped one.
pub fn array(handle: u64, device: u32) -> ArrayCreate {
    ArrayCreate {
        array: handle,
        size: [64, 0, 0],
        format: CU_AD_FORMAT_FLOAT,
        channels: 1,
        flags: 0,
        levels: 2,
        device,
        pad: 0,
    }
}

/// A new object of a session, of any kind that a handle names.
fn make(peer: &mut Peer, kind: Kind) -> u64 {
    let handle = match kind {
        Kind::Stream => return peer.stream().expect("a stream"),
        Kind::Module => return peer.module(PTX.as_bytes()).expect("a module"),
        Kind::MemPool => return peer.pool().expect("a pool"),
        Kind::Graph => {
            let body = GraphCreate::default();
            let made: Value = peer.ask(Op::GraphCreate, &body, &[]).expect("a graph");
            return made.value;
        }
        Kind::GraphNode => {
            let graph = make(peer, Kind::Graph);
            return node(peer, graph);
        }
        Kind::GraphExec => {
            let body = GraphInstantiate {
                graph: make(peer, Kind::Graph),
                ..GraphInstantiate::default()
            };
            let made: GraphInstantiated = peer
                .ask(Op::GraphInstantiate, &body, &[])
                .expect("an instance");
            return made.exec;
        }
        Kind::Function => {
            let module = make(peer, Kind::Module);
            return peer.function(module, "fill").expect("a function");
        }
        _ => peer.handle(kind),
    };
    let made = match kind {
        Kind::Event => {
            let body = EventCreate {
                event: handle,
                flags: 0,
                device: 0,
            };
            peer.post(Op::EventCreate, &body, &[]).map(|()| Vec::new())
        }
        Kind::Library => {
            let body = mpsshim_proto::message::ImageLoad {
                image: handle,
                ..peer.image_load(PTX.as_bytes())
            };
            let content = memory_file(PTX.as_bytes()).expect("a memory file");
            peer.load(&body, &[], content.as_fd()).map(|_| Vec::new())
        }
        Kind::Allocation => {
            let body = PhysicalCreate {
                handle,
                len: 2 << 20,
                flags: 0,
                properties: properties(0),
            };
            peer.ask_as(0, Op::PhysicalCreate, &body, &[])
        }
        Kind::Array | Kind::MipmappedArray => {
            peer.ask_as(0, Op::ArrayCreate, &array(handle, 0), &[])
        }
        Kind::Link => {
            let body = LinkCreate {
                link: handle,
                ..LinkCreate::default()
            };
            peer.ask_as(0, Op::LinkCreate, &body, &[])
        }
        Kind::GreenContext => {
            let body = GreenCreate {
                green: handle,
                flags: 1,
                ..GreenCreate::default()
            };
            peer.ask_as(0, Op::GreenCreate, &body, &[])
        }
        _ => unreachable!("nothing of a client's has a handle of kind {kind:?}"),
    };
    made.unwrap_or_else(|status| panic!("{kind:?}: {status}"));
    handle
}

impl Scene {
    fn new(engine: &InProcess) -> Scene {
        let mut peer = engine.connect().expect("a session");
        let mut other = engine.connect().expect("another session");
        for _ in 0..ELSEWHERE {
            other.handle(Kind::Stream);
        }
        let (memory, host) = furnish(&mut peer);
        let (others_memory, others_host) = furnish(&mut other);
        let stream = peer.stream().expect("a stream");
        let module = peer.module(PTX.as_bytes()).expect("a module");
        let function = peer.function(module, "fill").expect("a function");
        Scene {
            peer,
            other,
            memory,
            host,
            others_memory,
            others_host,
            stream,
            module,
            function,
            made: HashSet::new(),
        }
    }

    /// A new object of the session's.
    pub fn make(&mut self, kind: Kind) -> u64 {
        let handle = make(&mut self.peer, kind);
        self.made.insert(handle);
        handle
    }

    /// A handle that the session may give to a new object.
    pub fn unused(&mut self, kind: Kind) -> u64 {
        self.peer.handle(kind)
    }

    /// The handle of an object of the other session, which names nothing in this one.
    pub fn of_other(&mut self, kind: Kind) -> u64 {
        let own = self
            .made
            .iter()
            .map(|handle| Handle(*handle))
            .filter(|handle| handle.kind() == Some(kind))
            .map(Handle::index);
        // What the server has made in this session besides has a place, too.
        let beyond = own.max().unwrap_or(0) + 16;
        loop {
            let handle = make(&mut self.other, kind);
            if Handle(handle).index() > beyond {
                return handle;
            }
        }
    }

    /// The descriptor that belongs to the answer of a request of the other session.
    pub fn descriptor_of_other<T: IntoBytes + Immutable>(&mut self, op: Op, body: &T) -> OwnedFd {
        self.other.ask_as(TOKEN, op, body, &[]).expect("an answer");
        let mut note = DescriptorNote::new_zeroed();
        let socket = self.other.socket.as_fd();
        let received = shm::recv_packet(socket, note.as_mut_bytes(), true);
        received.expect("a packet").1.remove(0)
    }

    fn send(&mut self, op: Op, draft: &Draft) -> Outcome {
        let (peer, stream) = (&mut self.peer, self.stream);
        if let Some(descriptor) = &draft.descriptor {
            peer.send_descriptor(draft.token, descriptor.as_fd())
                .expect("a descriptor is sent");
        }
        let answers = peer.answers();
        let sent = peer
            .put(op as u16, draft.token, &[&draft.body])
            .and_then(|()| match op.is_request() {
                true => {
                    peer.wait(|peer| (peer.answers() != answers).then_some(()))?;
                    Ok(peer.answer().0)
                }
                false => {
                    // A stream that waits for a word defers what it was given.
                    let settle = Object { object: stream };
                    peer.ask_as(0, Op::Settle, &settle, &[])?;
                    Ok(peer.posted_error().err().unwrap_or(CUDA_SUCCESS))
                }
            });
        match (sent, peer.ended()) {
            (Ok(status), None) => {
                self.take_descriptors();
                Status(status)
            }
            (_, Some(CUDA_ERROR_MPS_RPC_FAILURE)) => Ends,
            (sent, ended) => panic!("{op:?}: {sent:?}, session: {ended:?}"),
        }
    }

    /// Closes what the server has sent.
    fn take_descriptors(&self) {
        let socket = self.peer.socket.as_fd();
        let mut note = DescriptorNote::new_zeroed();
        while shm::recv_packet(socket, note.as_mut_bytes(), false).is_ok_and(|(len, _)| len > 0) {}
    }
}

type Make = Box<dyn Fn(&mut Scene) -> Draft>;

struct Row {
    op: Op,
    what: String,
    outcome: Outcome,
    make: Make,
}

/// Messages, and what comes of each.
#[derive(Default)]
pub struct Table {
    rows: Vec<Row>,
}

/// A part of a table: the rows of one operation.
pub struct Rows<'a> {
    op: Op,
    table: &'a mut Table,
}

impl Table {
    /// Rows of this operation.
    pub fn op(&mut self, op: Op) -> Rows<'_> {
        Rows { op, table: self }
    }

    /// The operations that have rows in which they are refused.
    pub fn refused(&self) -> impl Iterator<Item = Op> {
        let refused = |row: &&Row| row.outcome != Status(CUDA_SUCCESS);
        self.rows.iter().filter(refused).map(|row| row.op)
    }

    /// Sends all messages, one after the other, and waits until there is no more of anything than there was `before` any
    /// session.
    ///
    /// # Panics
    /// Where something else comes of a message, with all such rows.
    pub fn run(&self, engine: &InProcess, before: &Counts) {
        let mut wrong = Vec::new();
        let mut scene = None;
        for row in &self.rows {
            let scene_now = scene.get_or_insert_with(|| Scene::new(engine));
            let draft = (row.make)(scene_now);
            let outcome = scene_now.send(row.op, &draft);
            if outcome != row.outcome {
                let (op, what, expected) = (row.op, &row.what, row.outcome);
                wrong.push(format!("{op:?}, {what}: {outcome:?}, not {expected:?}"));
            }
            if outcome == Ends {
                scene = None;
            }
        }
        drop(scene);
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        let back = engine.await_counts(before, 0, PATIENCE);
        assert_eq!(back, Ok(()), "kind, before, now");
    }
}

impl Rows<'_> {
    fn push(
        &mut self,
        what: impl Into<String>,
        outcome: Outcome,
        make: impl Fn(&mut Scene) -> Draft + 'static,
    ) -> &mut Self {
        self.table.rows.push(Row {
            op: self.op,
            what: what.into(),
            outcome,
            make: Box::new(make),
        });
        self
    }

    /// A message that is accepted.
    pub fn fine(&mut self, what: &str, make: fn(&mut Scene) -> Draft) -> &mut Self {
        self.push(what, Status(CUDA_SUCCESS), make)
    }

    /// A message that is refused with a status.
    pub fn refused(
        &mut self,
        what: &str,
        status: CUresult,
        make: fn(&mut Scene) -> Draft,
    ) -> &mut Self {
        self.push(what, Status(status), make)
    }

    /// A message that breaks the protocol.
    pub fn ends(&mut self, what: &str, make: fn(&mut Scene) -> Draft) -> &mut Self {
        self.push(what, Ends, make)
    }

    /// A field that names an object of this kind.
    pub fn handle(
        &mut self,
        kind: Kind,
        status: CUresult,
        make: fn(&mut Scene, u64) -> Draft,
    ) -> &mut Self {
        self.handle_where(kind, (CUDA_SUCCESS, status), make)
    }

    /// The same where this status is the driver's answer to a live object.
    pub fn handle_where(
        &mut self,
        kind: Kind,
        (live, status): (CUresult, CUresult),
        make: fn(&mut Scene, u64) -> Draft,
    ) -> &mut Self {
        let other_kind = match kind {
            Kind::Event => Kind::Stream,
            _ => Kind::Event,
        };
        self.push(format!("a live {kind:?}"), Status(live), move |scene| {
            let live = scene.make(kind);
            make(scene, live)
        });
        self.push(format!("a stale {kind:?}"), Status(status), move |scene| {
            let live = Handle(scene.make(kind));
            let stale = Handle::new(kind, live.generation() + 1, live.index());
            make(scene, stale.0)
        });
        self.push(
            format!("a {other_kind:?} in place of a {kind:?}"),
            Status(status),
            move |scene| {
                let live = Handle(scene.make(kind));
                let other = Handle::new(other_kind, live.generation(), live.index());
                make(scene, other.0)
            },
        );
        self.push(
            format!("another session's {kind:?}"),
            Status(status),
            move |scene| {
                let other = scene.of_other(kind);
                make(scene, other)
            },
        );
        self.push(
            format!("a number in place of a {kind:?}"),
            Status(status),
            move |scene| make(scene, 0x1234_5678),
        )
    }

    /// A field that names a new object of this kind.
    pub fn new_handle(
        &mut self,
        kind: Kind,
        status: CUresult,
        make: fn(&mut Scene, u64) -> Draft,
    ) -> &mut Self {
        self.push(
            format!("a new {kind:?}"),
            Status(CUDA_SUCCESS),
            move |scene| {
                let unused = scene.unused(kind);
                make(scene, unused)
            },
        );
        self.push(
            format!("a {kind:?} that is there"),
            Status(status),
            move |scene| {
                let live = scene.make(kind);
                make(scene, live)
            },
        );
        self.push(
            format!("the place of a {kind:?} that is there"),
            Status(status),
            move |scene| {
                let live = Handle(scene.make(kind));
                make(
                    scene,
                    Handle::new(kind, live.generation() + 1, live.index()).0,
                )
            },
        );
        let other_kind = Kind::UserObject;
        self.push(
            format!("a new {other_kind:?} in place of a {kind:?}"),
            Status(status),
            move |scene| {
                let unused = scene.unused(other_kind);
                make(scene, unused)
            },
        );
        self.push(
            format!("a {kind:?} out of bounds"),
            Status(CUDA_ERROR_OUT_OF_MEMORY),
            move |scene| make(scene, Handle::new(kind, 1, u32::MAX).0),
        )
    }

    /// Fields that name a range of device memory.
    pub fn range(&mut self, status: CUresult, make: fn(&mut Scene, Range) -> Draft) -> &mut Self {
        self.range_where((CUDA_SUCCESS, status), make)
    }

    /// The same where this status is the driver's answer to the session's own memory.
    pub fn range_where(
        &mut self,
        statuses: (CUresult, CUresult),
        make: fn(&mut Scene, Range) -> Draft,
    ) -> &mut Self {
        self.ranges("device memory", statuses, make, |scene| {
            (scene.memory, scene.others_memory)
        })
    }

    /// Fields that name a range of pinned memory.
    pub fn host_range(
        &mut self,
        status: CUresult,
        make: fn(&mut Scene, Range) -> Draft,
    ) -> &mut Self {
        self.ranges("pinned memory", (CUDA_SUCCESS, status), make, |scene| {
            (scene.host, scene.others_host)
        })
    }

    fn ranges(
        &mut self,
        what: &str,
        (own, status): (CUresult, CUresult),
        make: fn(&mut Scene, Range) -> Draft,
        of: fn(&Scene) -> (Range, Range),
    ) -> &mut Self {
        type Choose = fn(Range, Range) -> Range;
        let faults: [(&str, Choose); 5] = [
            ("another session's", |_, other| Range {
                start: other.start,
                len: LEN,
            }),
            ("a byte more than there is of", |own, _| Range {
                start: own.start + own.len - LEN + 1,
                len: LEN,
            }),
            ("a length that overflows of", |own, _| Range {
                start: own.start,
                len: u64::MAX,
            }),
            ("an end that overflows of", |own, _| Range {
                start: own.start + LEN,
                len: u64::MAX - own.start,
            }),
            ("nothing in place of", |_, _| Range {
                start: 4096,
                len: LEN,
            }),
        ];
        let last: Choose = |own, _| Range {
            start: own.start + own.len - LEN,
            len: LEN,
        };
        let fine = std::iter::once(("the last of the session's", own, last));
        let refused = faults.map(|(fault, choose)| (fault, status, choose));
        for (which, outcome, choose) in fine.chain(refused) {
            self.push(format!("{which} {what}"), Status(outcome), move |scene| {
                let (own, other) = of(scene);
                make(scene, choose(own, other))
            });
        }
        self
    }

    /// A field that names an address in device memory.
    pub fn address(&mut self, status: CUresult, make: fn(&mut Scene, u64) -> Draft) -> &mut Self {
        type Choose = fn(&Scene) -> u64;
        let rows: [(&str, CUresult, Choose); 4] = [
            ("the session's memory", CUDA_SUCCESS, |s| s.memory.start),
            ("another session's memory", status, |s| {
                s.others_memory.start
            }),
            ("the end of the session's memory", status, |s| {
                s.memory.start + s.memory.len
            }),
            ("no memory", status, |_| 4096),
        ];
        for (what, outcome, choose) in rows {
            self.push(what, Status(outcome), move |scene| {
                let address = choose(scene);
                make(scene, address)
            });
        }
        self
    }

    /// A field that names a device.
    pub fn device(&mut self, make: fn(&mut Scene, u32) -> Draft) -> &mut Self {
        self.push("a device", Status(CUDA_SUCCESS), move |scene| {
            make(scene, 0)
        });
        self.no_device(make)
    }

    /// A field that names a device, without a message that is accepted.
    pub fn no_device(&mut self, make: fn(&mut Scene, u32) -> Draft) -> &mut Self {
        for device in [NO_DEVICE, 16, u32::MAX] {
            self.push(
                format!("device {device}"),
                Status(CUDA_ERROR_INVALID_DEVICE),
                move |scene| make(scene, device),
            );
        }
        self
    }

    /// What follows the body: a name that is there, one that is not, and one that does not end.
    pub fn name(
        &mut self,
        name: &'static str,
        status: CUresult,
        make: fn(&mut Scene) -> Draft,
    ) -> &mut Self {
        self.push("a name", Status(CUDA_SUCCESS), move |scene| {
            make(scene).with(name.as_bytes()).with(b"\0")
        });
        self.push("an unknown name", Status(status), move |scene| {
            make(scene).with(b"nobody\0")
        });
        self.push("a name without its end", Ends, move |scene| {
            make(scene).with_endless_name()
        })
    }
}
