//! A message of each kind, filled by chance: mostly as a proper client would, now and then not.

use crate::fuzzing::client::{Client, Common, SAFE_INDICES};
use crate::fuzzing::images::{Images, SAFE_PARAMS};
use mpsshim_api::cuda::*;
use mpsshim_proto::arena::{DEVICE_ARENA, HOST_ARENA, VIRTUAL_ARENA};
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::array::{
    ARRAY_SIDE, ArrayCreate, ArrayPart, ArrayQuery, BoxSide, CopyBox, GetReference,
    ReferenceArguments, TEXTURE_HAS_VIEW, TEXTURE_IS_SURFACE, TensorMap, TextureCreate,
    TextureDestroy,
};
use mpsshim_proto::message::context::{
    Confine, GreenCreate, ResourceJoin, ResourceQuery, ResourceSplit,
};
use mpsshim_proto::message::graph::{
    Access as NodeAccess, BatchNode, CaptureBegin, CaptureHost, CaptureUpdate, GraphAttribute,
    GraphCondition, GraphCreate, GraphDependencies, GraphDot, GraphEnabled, GraphInstantiate,
    GraphLaunch, GraphList, GraphListed, GraphMemory, GraphNode, GraphNodeIs, GraphPair, HostNode,
    KernelNode, node_flags,
};
use mpsshim_proto::message::image::{KernelAttribute, LinkAdd, LinkCreate};
use mpsshim_proto::message::memory::{
    Access, AddressReserve, FilePart, FileRegister, GetAccess, Granularity, IpcOpen, Location,
    MapMemory, Opaque, Peers, PhysicalCreate, PhysicalExport, PhysicalRetain, PoolAccess,
    PoolAlloc, PoolAttribute, PoolCreate, PoolFree, PoolImport, PoolImportPointer, Properties,
    RangeHandle, SetAccess,
};
use mpsshim_proto::message::stream::{
    EventExport, EventImport, HostFunction, MemOp, STREAM_ATTRIBUTE_LEN, StreamAttribute,
};
use mpsshim_proto::message::{
    Attach, Copy, CopyInline, EventCreate, EventOnStream, EventPair, FunctionAttribute,
    GetFunction, HOLDS_VARIABLES, HostAlloc, INLINE_COPY_MAX, ImageLoad, JitOption, Launch, Limit,
    MANAGED, ManagedMove, Mark, MarkEvent, MemGrant, Memset, NO_FLAG, Named, Object, Occupancy, Op,
    PIECES_MAX, Piece, PlaceGlobal, PointerQuery, Range, StreamCreate,
};
use mpsshim_proto::segment::{FLAGS, STAGING_LEN};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use zerocopy::{FromZeros, Immutable, IntoBytes};

/// A page, and the driver's unit of device memory.
const PAGE: u64 = 4096;
const UNIT: u64 = 2 << 20;
const GIB: u64 = 1 << 30;
/// More pinned memory than this is always refused.
const MOST_HOST: u64 = 1 << 40;

/// Whether streams and graphs wait for words in memory, too. A graph that waits for a word that nobody writes keeps its
/// session for ever.
const WORD_WAITS: bool = false;
/// `CU_STREAM_MEM_OP_*` without those that wait, and with them.
const OPERATIONS: [&[u64]; 2] = [&[2, 5, 3, 6, 9], &[1, 2, 4, 5, 2, 5, 3, 6, 9]];

/// What a success tells the client.
#[derive(Debug)]
pub enum Gives {
    Nothing,
    /// The handle that it chose is live.
    Own(u64),
    /// The answer is a handle.
    Handle,
    /// There are handles so many bytes behind the beginning of the answer.
    Handles(usize),
    Node,
    Instance,
    Condition,
    Range,
    /// An opened range.
    Opened,
    /// What stands for something in other sessions.
    Opaque,
    /// The same of an event.
    Event,
    Texture,
    Resource,
    Groups,
}

/// A message that is about to be sent.
#[derive(Debug)]
pub struct Draft {
    pub op: Op,
    pub token: u64,
    pub body: Vec<u8>,
    pub descriptor: Option<OwnedFd>,
    pub gives: Gives,
    /// A handle or address that is not live any more.
    pub drops: Option<u64>,
    /// A stream may wait for this client from now on.
    pub waits: bool,
    /// The opcode is another.
    pub sent_as: Option<u16>,
}

/// What a case lets its clients do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    /// Streams wait for words that the client may never write.
    pub waits: bool,
    /// Messages are those of a correct program: wrong handles are rare, and none breaks the protocol.
    pub correct: bool,
    /// No message makes an object that binds its session to the context for good.
    pub portable: bool,
    /// There are no graphs and captures.
    pub graphless: bool,
}

/// Operations on graphs and captures have a hundred opcodes of their own.
pub fn is_of_graphs(op: Op) -> bool {
    (100..200).contains(&(op as u16))
}

/// Whether a message of this kind may make an object that binds its session to the context for good.
fn binds(op: Op) -> bool {
    matches!(
        op,
        Op::GetReference | Op::LinkCreate | Op::PoolExport | Op::PoolImport
    )
}

/// Kinds of nodes with which a graph goes on in the next server.
const PORTABLE_NODES: [u32; 9] = [
    CU_GRAPH_NODE_TYPE_KERNEL,
    CU_GRAPH_NODE_TYPE_MEMCPY,
    CU_GRAPH_NODE_TYPE_MEMSET,
    CU_GRAPH_NODE_TYPE_GRAPH,
    CU_GRAPH_NODE_TYPE_EMPTY,
    CU_GRAPH_NODE_TYPE_WAIT_EVENT,
    CU_GRAPH_NODE_TYPE_EVENT_RECORD,
    CU_GRAPH_NODE_TYPE_CONDITIONAL,
    CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
];

/// Makes messages of one client.
pub struct Maker<'a> {
    pub client: &'a mut Client,
    pub common: &'a Common,
    pub images: &'a Images,
    pub rules: Rules,
    pub rng: &'a mut SmallRng,
}

fn plain<T: IntoBytes + Immutable>(op: Op, body: &T) -> Draft {
    Draft {
        op,
        token: 0,
        body: body.as_bytes().to_vec(),
        descriptor: None,
        gives: Gives::Nothing,
        drops: None,
        waits: false,
        sent_as: None,
    }
}

impl Draft {
    fn gives(mut self, gives: Gives) -> Draft {
        self.gives = gives;
        self
    }
    fn drops(mut self, handle: u64) -> Draft {
        self.drops = Some(handle);
        self
    }
    fn with(mut self, behind: &[u8]) -> Draft {
        self.body.extend_from_slice(behind);
        self
    }
    fn carrying(mut self, token: u64, descriptor: OwnedFd) -> Draft {
        (self.token, self.descriptor) = (token, Some(descriptor));
        self
    }
    fn answered_under(mut self, token: u64) -> Draft {
        self.token = token;
        self
    }
}

impl Maker<'_> {
    /// A message of a kind chosen by chance, in a form that may be damaged.
    pub fn any(&mut self) -> Draft {
        let op = *Op::ALL.choose(self.rng).unwrap_or(&Op::Mark);
        // Some are what sessions are made of, some are slow.
        let op = match self.rng.random_range(0..100) {
            0..6 => Op::Launch,
            6..10 => Op::Copy,
            10..13 => Op::Mark,
            13..18 => Op::GraphNode,
            18..20 => Op::GraphLaunch,
            20..22 => Op::EventRecord,
            22..24 => Op::MemGrant,
            _ => op,
        };
        let op = match op {
            Op::ImageLoad | Op::LinkAdd | Op::LinkComplete | Op::LinkCreate
                if self.rng.random_ratio(3, 4) =>
            {
                Op::CopyInline
            }
            // Below such a limit everything else would be refused.
            Op::LimitMemory if self.rules.correct && !self.once_in(20) => Op::MemGrant,
            op if self.rules.portable && binds(op) => Op::Memset,
            op if self.rules.graphless && is_of_graphs(op) => {
                self.pick(&[Op::Launch, Op::Copy, Op::PoolAlloc, Op::CopyInline])
            }
            op => op,
        };
        let mut draft = self.make(op);
        if !self.rules.correct && self.rng.random_ratio(1, 400) {
            self.damage(&mut draft);
        }
        draft
    }

    fn damage(&mut self, draft: &mut Draft) {
        // What the shape of a grid is stays what it is: one that is too large takes for ever.
        let runs = matches!(
            draft.op,
            Op::Launch | Op::GraphNode | Op::GraphLaunch | Op::MemOp | Op::HostFunction
        );
        match self.rng.random_range(0..5) {
            0 => {
                let len = self.rng.random_range(0..draft.body.len() + 1);
                draft.body.truncate(len);
            }
            1 => {
                let more = self.rng.random_range(0..4096);
                draft.body.resize(draft.body.len() + more, 0xff);
            }
            2 if !runs && !draft.body.is_empty() => {
                let at = self.rng.random_range(0..draft.body.len());
                draft.body[at] ^= 1 << self.rng.random_range(0..8);
            }
            3 if !runs && !draft.body.is_empty() => {
                let at = self.rng.random_range(0..draft.body.len()) & !3;
                let end = draft.body.len().min(at + 4);
                self.rng.fill_bytes(&mut draft.body[at..end]);
            }
            _ => {
                let sent_as: u16 = self.rng.random_range(0..700);
                let waits = [
                    Op::Launch,
                    Op::GraphNode,
                    Op::MemOp,
                    Op::HostFunction,
                    Op::CaptureHost,
                ]
                .map(|op| op as u16);
                if !waits.contains(&sent_as) {
                    draft.sent_as = Some(sent_as);
                }
            }
        }
    }

    fn pick<T: std::marker::Copy>(&mut self, from: &[T]) -> T {
        from[self.rng.random_range(0..from.len())]
    }
    fn once_in(&mut self, count: u32) -> bool {
        self.rng.random_ratio(1, count)
    }
    /// As [`Maker::once_in`], for contents that break the protocol.
    fn breaks_once_in(&mut self, count: u32) -> bool {
        !self.rules.correct && self.once_in(count)
    }
    fn handle(&mut self, kind: Kind) -> u64 {
        self.client.handle(kind, self.common, self.rng)
    }
    fn fresh(&mut self, kind: Kind) -> u64 {
        self.client.fresh(kind, self.common, self.rng)
    }
    fn stream(&mut self) -> u64 {
        self.handle(Kind::Stream)
    }
    fn image(&mut self) -> u64 {
        let kind = self.pick(&[Kind::Module, Kind::Library]);
        self.handle(kind)
    }
    fn array(&mut self) -> u64 {
        let kind = self.pick(&[Kind::Array, Kind::Array, Kind::MipmappedArray]);
        self.handle(kind)
    }
    fn device(&mut self) -> u32 {
        match self.rng.random_range(0..40) {
            0 => self.pick(&[2, 5, 15, 16, 17, 64, u32::MAX, 1 << 31]),
            1..8 => 1,
            _ => 0,
        }
    }
    fn small(&mut self) -> u32 {
        match self.rng.random_range(0..30) {
            0 => self.pick(&[u32::MAX, 1 << 31, i32::MAX as u32, 4096, 4097, 65536]),
            1 => self.rng.random(),
            _ => self.rng.random_range(0..9),
        }
    }
    /// A flag and its value for completion in this stream.
    fn mark(&mut self, stream: u64) -> (u32, u32) {
        match self.rules.correct {
            true => self.client.mark(stream),
            false => (self.slot(), self.rng.random()),
        }
    }
    fn slot(&mut self) -> u32 {
        match self.breaks_once_in(300) {
            true => self.pick(&[FLAGS as u32, 3 * FLAGS as u32, u32::MAX]),
            false => self.rng.random_range(0..FLAGS as u32),
        }
    }
    /// Bytes of something that is allocated.
    fn bytes(&mut self) -> u64 {
        match self.rng.random_range(0..40) {
            0 => self.pick(&[0, u64::MAX, u64::MAX - PAGE, 1 << 63, 1 << 40, 1 << 32]),
            1 => self.pick(&[16 * UNIT, 8 * UNIT + 1, 64 * UNIT]),
            2..10 => self.pick(&[UNIT, UNIT - 1, UNIT + 1, 2 * UNIT]),
            _ => self.pick(&[1, 8, 256, PAGE - 1, PAGE, PAGE + 1, 16 * PAGE]),
        }
    }
    /// Bytes of pinned memory. What is granted is taken from the system and cleared, so that gigabytes are left out.
    fn host_bytes(&mut self) -> u64 {
        match self.bytes() {
            bytes @ GIB..MOST_HOST if self.once_in(50) => bytes / 16,
            GIB..MOST_HOST => 16 * UNIT,
            bytes => bytes,
        }
    }
    /// Bytes of something that is touched.
    fn len(&mut self) -> u64 {
        match self.rng.random_range(0..60) {
            0 => self.pick(&[u64::MAX, 1 << 63, UNIT, UNIT + 1, 1 << 32]),
            1 => 0,
            2..8 => self.pick(&[1, 3, 4095, 4097]),
            _ => self.pick(&[4, 8, 64, 256, 1024, PAGE]),
        }
    }
    /// Where `len` bytes of the session's lie, or not quite.
    fn address(&mut self, len: u64) -> u64 {
        let ranges = match self.once_in(30) {
            true => &self.common.ranges,
            false => &self.client.ranges,
        };
        let range = ranges.choose(self.rng).copied().unwrap_or_default();
        match self.rng.random_range(0..60) {
            0 => self.pick(&[
                0,
                8,
                u64::MAX,
                DEVICE_ARENA,
                HOST_ARENA,
                VIRTUAL_ARENA,
                DEVICE_ARENA - 8,
                1 << 47,
            ]),
            1 => range.start.wrapping_add(range.len),
            2 => range.start.wrapping_add(range.len).wrapping_sub(4),
            3 => range.start.wrapping_sub(8),
            4..16 => {
                let room = range.len.saturating_sub(len);
                range.start + (self.rng.random_range(0..=room) & !7)
            }
            _ => range.start,
        }
    }
    fn staging(&mut self, len: u64) -> u64 {
        match self.breaks_once_in(300) {
            true => self.pick(&[STAGING_LEN as u64, u64::MAX, STAGING_LEN as u64 - 3]),
            false => {
                let room = (STAGING_LEN as u64).saturating_sub(len);
                self.rng.random_range(0..=room)
            }
        }
    }
    fn range(&mut self) -> Range {
        let range = self.client.ranges.choose(self.rng).copied();
        let mut range = range.unwrap_or_default();
        if self.once_in(10) {
            range.len = self.bytes();
        }
        if self.once_in(20) {
            range.start = self.address(range.len);
        }
        range
    }
    fn location(&mut self) -> Location {
        Location {
            kind: match self.once_in(10) {
                true => self.small(),
                false => CU_MEM_LOCATION_TYPE_DEVICE,
            },
            id: self.device() as i32,
        }
    }
    fn accesses(&mut self) -> Vec<Access> {
        let count = self.rng.random_range(0..3);
        (0..count)
            .map(|_| Access {
                location: self.location(),
                flags: self.pick(&[0, 1, 3, 3, 3, 7]),
                pad: 0,
            })
            .collect()
    }
    /// A count that stands beside a list of so many.
    fn count(&mut self, of: usize) -> u32 {
        match self.breaks_once_in(400) {
            true => self.pick(&[u32::MAX, of as u32 + 1, 65, 4097]),
            false => of as u32,
        }
    }
    fn properties(&mut self) -> Properties {
        Properties {
            kind: match self.once_in(10) {
                true => self.small(),
                false => CU_MEM_ALLOCATION_TYPE_PINNED,
            },
            handle_types: match self.rules.portable {
                true => CU_MEM_HANDLE_TYPE_NONE,
                false => self.pick(&[
                    CU_MEM_HANDLE_TYPE_NONE,
                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                    CU_MEM_HANDLE_TYPE_FABRIC,
                    u32::MAX,
                ]),
            },
            location: self.location(),
            compression: 0,
            rdma: 0,
            usage: 0,
            pad: 0,
        }
    }
    fn name(&mut self) -> Vec<u8> {
        let names: [&[u8]; 8] = [
            b"safe\0",
            b"idle\0",
            b"table\0",
            b"\0",
            b"counter\0",
            b"tex\0",
            b"parent\0",
            b"%s%n\xff\xfe\0",
        ];
        match self.rng.random_range(0..300) {
            0 | 1 if self.rules.correct => self.pick(&names).to_vec(),
            0 => Vec::new(),
            1 => vec![b'a'; 60_000],
            2 => [&[b'b'; 60_000][..], b"\0"].concat(),
            _ => self.pick(&names).to_vec(),
        }
    }
    /// Compiler options, and how many.
    fn options(&mut self) -> (u32, Vec<u8>) {
        let count = match self.rng.random_range(0..20) {
            0..5 if self.rules.correct => 1,
            0 => 64,
            1 => 3,
            2..5 => 1,
            _ => 0,
        };
        let (mut heads, mut lists) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let option = match self.rules.correct {
                true => self.rng.random_range(0..17),
                false => self.rng.random_range(0..36),
            };
            let list: &[u8] = match option {
                17 | 32 | 30 => b"safe\0table\0",
                18 => &[0; 16],
                _ => b"",
            };
            let value = match option {
                17 | 18 | 30 | 32 => 2,
                _ => self.small().into(),
            };
            let head = JitOption {
                option,
                len: list.len() as u32,
                value,
            };
            heads.extend_from_slice(head.as_bytes());
            lists.extend_from_slice(list);
        }
        let count = self.count(count);
        (count, [heads, lists].concat())
    }
    /// Any descriptor, mostly one of the right kind.
    fn descriptor(&mut self, content: &[u8]) -> io::Result<OwnedFd> {
        match self.rng.random_range(0..24) {
            0..9 if self.rules.correct => crate::peer::memory_file(content),
            0 => Ok(io::pipe()?.0.into()),
            1 => Ok(io::pipe()?.1.into()),
            2 => Ok(mpsshim_control::seqpacket::pair()?.0),
            3 => Ok(File::open("/")?.into()),
            4 => Ok(File::open("/dev/zero")?.into()),
            5 => Ok(File::open("/proc/self/mem")?.into()),
            6 => Ok(std::net::UdpSocket::bind("127.0.0.1:0")?.into()),
            7 => unsealed(content),
            8 => match self.common.descriptors.choose(self.rng) {
                Some(known) => known.try_clone(),
                None => unsealed(content),
            },
            9 => unsealed(&[]),
            _ => crate::peer::memory_file(content),
        }
    }
    /// A descriptor of shared memory.
    fn exported(&mut self) -> io::Result<OwnedFd> {
        match self.common.descriptors.choose(self.rng) {
            Some(known) if !self.once_in(8) => known.try_clone(),
            _ => self.descriptor(&[0; PAGE as usize]),
        }
    }
    fn grid(&mut self) -> ([u32; 3], [u32; 3]) {
        let grid = [
            self.pick(&[1, 1, 2, 4]),
            self.pick(&[1, 1, 1, 2]),
            match self.once_in(50) {
                true => self.pick(&[0, 65536, u32::MAX]),
                false => 1,
            },
        ];
        let block = match self.once_in(50) {
            true => self.pick(&[[0, 1, 1], [1025, 1, 1], [u32::MAX; 3], [32, 32, 2]]),
            false => self.pick(&[[1, 1, 1], [32, 1, 1], [8, 4, 2]]),
        };
        (grid, block)
    }
    /// Parameters, and how many bytes of them there are said to be.
    fn params(&mut self) -> (u32, Vec<u8>) {
        let len = match self.rng.random_range(0..60) {
            0 => self.pick(&[0, 1, 8, 15]),
            1 if self.rules.correct => self.pick(&[17, 4096, 32_764]),
            1 => self.pick(&[17, 4096, 32_764, 32_765]),
            _ => SAFE_PARAMS,
        };
        let mut params = vec![0; len];
        self.rng.fill_bytes(&mut params);
        (self.count(len), params)
    }
    fn attributes(&mut self) -> (u32, Vec<u8>) {
        let count = match self.rng.random_range(0..24) {
            0 if !self.rules.correct => 33,
            1 => 32,
            2..5 => self.rng.random_range(1..4),
            _ => 0,
        };
        let mut bytes = Vec::new();
        for _ in 0..count {
            let id: u32 = match self.once_in(10) {
                true => self.small(),
                false => self.rng.random_range(0..18),
            };
            let mut value = [0u8; 64];
            value[0] = self.rng.random_range(0..4);
            if self.once_in(3) {
                value[..8].copy_from_slice(&self.handle(Kind::Event).to_le_bytes());
            }
            if self.once_in(5) {
                self.rng.fill_bytes(&mut value);
            }
            bytes.extend_from_slice(&u64::from(id).to_le_bytes());
            bytes.extend_from_slice(&value);
        }
        (self.count(count), bytes)
    }
    /// Nodes of a graph, mostly few.
    fn nodes(&mut self) -> Vec<u8> {
        let count = match self.rng.random_range(0..60) {
            0 => 300,
            1 => 8,
            2..20 => 1,
            20..24 => 2,
            _ => 0,
        };
        let nodes: Vec<u64> = (0..count).map(|_| self.handle(Kind::GraphNode)).collect();
        nodes.as_bytes().to_vec()
    }
    fn edges(&mut self, count: usize) -> Vec<u8> {
        let mut edges = vec![0; count * size_of::<CUgraphEdgeData>()];
        if self.once_in(4) {
            self.rng.fill_bytes(&mut edges);
        }
        edges
    }
    fn side(&mut self, len: u64) -> BoxSide {
        let side = match self.breaks_once_in(300) {
            true => self.small(),
            false => self.pick(&[0, 0, 1, 2, ARRAY_SIDE, ARRAY_SIDE]),
        };
        BoxSide {
            address: match side {
                2 => self.staging(len.saturating_mul(64)),
                ARRAY_SIDE => self.array(),
                _ => self.address(len),
            },
            pitch: self.pick(&[0, 64, 256, 1024, u64::MAX, 1 << 32]),
            rows: self.pick(&[0, 1, 4, 64, u64::MAX]),
            at: [self.pick(&[0, 0, 4, u64::MAX]), self.pick(&[0, 0, 1]), 0],
            side,
            pad: 0,
        }
    }
    fn copy_node(&mut self) -> CUDA_MEMCPY3D {
        let width = self.pick(&[4, 64, 256, 0, u64::MAX]);
        let mut copy = CUDA_MEMCPY3D {
            src_type: self.pick(&[1, 2, 2, 2, 3, 4, 9]),
            dst_type: self.pick(&[1, 2, 2, 2, 3, 4, 9]),
            src_device: self.address(256),
            dst_device: self.address(256),
            src_array: self.array(),
            dst_array: self.array(),
            src_pitch: self.pick(&[0, 64, 256, u64::MAX]),
            dst_pitch: self.pick(&[0, 64, 256, u64::MAX]),
            src_height: self.pick(&[0, 1, 4]),
            dst_height: self.pick(&[0, 1, 4]),
            width,
            height: self.pick(&[1, 1, 4, 0, u64::MAX]),
            depth: self.pick(&[1, 1, 2, 0, u64::MAX]),
            ..CUDA_MEMCPY3D::default()
        };
        (copy.src_host, copy.dst_host) = (copy.src_device, copy.dst_device);
        copy
    }
    /// What a node does; whether it may wait.
    fn node(&mut self, kind: u32) -> (Vec<u8>, bool) {
        let bytes = match kind {
            CU_GRAPH_NODE_TYPE_KERNEL => {
                let (grid, block) = self.grid();
                let (param_len, params) = self.params();
                let kernel = KernelNode {
                    function: self.client.kernel(self.common, self.rng),
                    grid,
                    block,
                    shared: self.pick(&[0, 0, 1024, u32::MAX]),
                    param_len,
                };
                [kernel.as_bytes(), &params].concat()
            }
            CU_GRAPH_NODE_TYPE_MEMCPY => self.copy_node().as_bytes().to_vec(),
            CU_GRAPH_NODE_TYPE_MEMSET => {
                let set = CUDA_MEMSET_NODE_PARAMS {
                    to: self.address(1024),
                    pitch: self.pick(&[0, 64, 1024, u64::MAX]),
                    value: self.rng.random(),
                    element: self.pick(&[1, 2, 4, 4, 4, 0, 3]),
                    width: self.pick(&[1, 16, 64, u64::MAX]),
                    height: self.pick(&[1, 1, 4, 0, u64::MAX]),
                };
                set.as_bytes().to_vec()
            }
            CU_GRAPH_NODE_TYPE_HOST => HostNode {
                token: self.small(),
                pad: 0,
            }
            .as_bytes()
            .to_vec(),
            CU_GRAPH_NODE_TYPE_GRAPH => CUDA_CHILD_GRAPH_NODE_PARAMS {
                graph: self.handle(Kind::Graph),
                ownership: self.pick(&[0, 0, 1, 9]),
                pad: 0,
            }
            .as_bytes()
            .to_vec(),
            CU_GRAPH_NODE_TYPE_WAIT_EVENT | CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
                self.handle(Kind::Event).to_le_bytes().to_vec()
            }
            CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
                let access = NodeAccess {
                    kind: 1,
                    id: self.device() as i32,
                    flags: 3,
                };
                let mut alloc = CUDA_MEM_ALLOC_NODE_PARAMS::new_zeroed();
                (alloc.kind, alloc.location_kind) = (1, 1);
                alloc.location = self.device();
                alloc.bytes = self.bytes();
                alloc.access_count = self.pick(&[0, 1, 1, 65]);
                [alloc.as_bytes(), access.as_bytes()].concat()
            }
            CU_GRAPH_NODE_TYPE_MEM_FREE => self.address(1).to_le_bytes().to_vec(),
            CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {
                let count = self.rng.random_range(0..4);
                let mut waits = false;
                let mut operations = Vec::new();
                for _ in 0..count {
                    let mut operation = [0u64; 6];
                    operation[0] =
                        self.pick(OPERATIONS[usize::from(WORD_WAITS && self.rules.waits)]);
                    waits |= matches!(operation[0], 1 | 4);
                    operation[1] = self.address(8);
                    operation[2] = self.small().into();
                    operations.extend_from_slice(operation.as_bytes());
                }
                let batch = BatchNode {
                    count: self.count(count),
                    flags: 0,
                };
                return ([batch.as_bytes(), &operations].concat(), waits);
            }
            CU_GRAPH_NODE_TYPE_CONDITIONAL => {
                let condition = self.client.conditions.choose(self.rng).copied();
                let conditional = CUDA_CONDITIONAL_NODE_PARAMS {
                    handle: condition.unwrap_or(0),
                    kind: self.small(),
                    size: self.small(),
                    graphs: 0,
                    context: 0,
                };
                conditional.as_bytes().to_vec()
            }
            _ => Vec::new(),
        };
        (bytes, kind == CU_GRAPH_NODE_TYPE_HOST)
    }
    fn object(&mut self, op: Op, kind: Kind) -> Draft {
        let object = self.handle(kind);
        plain(op, &Object { object })
    }
    fn end_of(&mut self, op: Op, kind: Kind) -> Draft {
        // What clients have is taken away more seldom than it is given.
        let object = self.handle(kind);
        plain(op, &Object { object }).drops(object)
    }
    fn opaque(&mut self) -> [u64; 8] {
        let mut words = self.common.opaque.choose(self.rng).copied();
        if self.once_in(8)
            && let Some(words) = &mut words
        {
            words[self.rng.random_range(0..8)] ^= 1 << self.rng.random_range(0..64);
        }
        words.unwrap_or_else(|| std::array::from_fn(|_| self.rng.random()))
    }
    /// A descriptor, or when the process has none left a message without.
    fn carrying(&mut self, draft: Draft, descriptor: io::Result<OwnedFd>) -> Draft {
        match descriptor {
            Ok(descriptor) if !self.breaks_once_in(400) => {
                let token = self.client.token();
                draft.carrying(token, descriptor)
            }
            _ => draft,
        }
    }
    fn answered(&mut self, draft: Draft) -> Draft {
        let token = self.client.token();
        draft.answered_under(token)
    }

    /// A message of this kind.
    pub fn make(&mut self, op: Op) -> Draft {
        match op {
            Op::Launch => {
                let (grid, block) = self.grid();
                let (param_len, params) = self.params();
                let (attributes, behind) = self.attributes();
                let launch = Launch {
                    function: self.client.kernel(self.common, self.rng),
                    stream: self.stream(),
                    grid,
                    block,
                    shared: self.pick(&[0, 0, 0, 1024, 49152, u32::MAX]),
                    param_len,
                    attributes,
                    flags: 0,
                };
                let pad = vec![0; params.len().next_multiple_of(8) - params.len()];
                plain(op, &launch).with(&params).with(&pad).with(&behind)
            }
            Op::Clusters => {
                let (attributes, behind) = self.attributes();
                let launch = Launch {
                    function: self.handle(Kind::Function),
                    grid: [self.small(), 1, 1],
                    block: [self.small(), 1, 1],
                    attributes,
                    flags: self.small(),
                    ..Launch::default()
                };
                plain(op, &launch).with(&behind)
            }
            Op::Mark => {
                let stream = self.stream();
                let (slot, value) = self.mark(stream);
                plain(
                    op,
                    &Mark {
                        stream,
                        slot,
                        value,
                    },
                )
            }
            Op::CopyInline => {
                let len = match self.breaks_once_in(100) {
                    true => self.pick(&[0, INLINE_COPY_MAX, INLINE_COPY_MAX + 1]),
                    false => self.pick(&[1, 4, 64, 1000]),
                };
                let inline = CopyInline {
                    to: self.address(len as u64),
                    stream: self.stream(),
                    len: self.count(len).into(),
                };
                plain(op, &inline).with(&vec![0x5a; len])
            }
            Op::ManagedMove => {
                let count = match self.breaks_once_in(100) {
                    true => self.pick(&[0, PIECES_MAX, PIECES_MAX + 1]),
                    false => self.rng.random_range(1..4),
                };
                let pieces: Vec<Piece> = (0..count)
                    .map(|_| {
                        let len = self.len();
                        Piece {
                            device: self.address(len),
                            host: self.address(len),
                            len,
                        }
                    })
                    .collect();
                let stream = self.stream();
                let mut body = ManagedMove {
                    stream,
                    len: match self.rules.correct {
                        true => pieces
                            .iter()
                            .map(|piece| piece.len)
                            .fold(0, u64::wrapping_add),
                        false => self.len(),
                    },
                    to: match self.breaks_once_in(300) {
                        true => self.small(),
                        false => self.rng.random_range(0..2),
                    },
                    pieces: self.count(count),
                    slot: NO_FLAG,
                    value: 0,
                };
                match self.once_in(3) {
                    true => body.value = self.rng.random(),
                    false => (body.slot, body.value) = self.mark(stream),
                }
                plain(op, &body).with(pieces.as_bytes())
            }
            Op::Copy => {
                let len = self.len();
                let sides: [u32; 2] = match self.breaks_once_in(300) {
                    true => [self.small(), self.small()],
                    false => self.pick(&[[0, 0], [0, 1], [1, 0], [0, 2], [2, 0]]),
                };
                let sides = match self.rules.correct && len > STAGING_LEN as u64 {
                    true => sides.map(|side| side.min(1)),
                    false => sides,
                };
                let mut place = |side: u32| match side {
                    2 => self.staging(len),
                    _ => self.address(len),
                };
                let (to, from) = (place(sides[0]), place(sides[1]));
                let copy = Copy {
                    to,
                    from,
                    len,
                    stream: self.stream(),
                    sides: sides[0] | sides[1] << 8,
                    pad: 0,
                };
                plain(op, &copy)
            }
            Op::Memset => {
                let len = self.len();
                let memset = Memset {
                    to: self.address(len),
                    stream: self.stream(),
                    width: self.pick(&[1, 16, 64, 256, len, u64::MAX]),
                    height: self.pick(&[1, 1, 1, 2, 16, 0, u64::MAX]),
                    pitch: self.pick(&[64, 256, 1024, 0, u64::MAX]),
                    value: self.rng.random(),
                    element: match self.breaks_once_in(300) {
                        true => self.small(),
                        false => self.pick(&[1, 2, 4]),
                    },
                };
                plain(op, &memset)
            }
            Op::StreamCreate => {
                let stream = self.fresh(Kind::Stream);
                let body = StreamCreate {
                    stream,
                    green: match self.once_in(8) {
                        true => self.handle(Kind::GreenContext),
                        false => 0,
                    },
                    legacy: match self.rng.random_range(0..8) {
                        0 => stream,
                        1 => self.stream(),
                        _ => 0,
                    },
                    priority: self.pick(&[0, 0, -1, -5, 9, i32::MIN, i32::MAX]),
                    device: self.device(),
                };
                plain(op, &body).gives(Gives::Own(stream))
            }
            Op::StreamDestroy => self.end_of(op, Kind::Stream),
            Op::EventCreate => {
                let event = self.fresh(Kind::Event);
                let body = EventCreate {
                    event,
                    flags: self.pick(&[0, 0, 1, 2, 2 | 4, 4, u32::MAX]),
                    device: self.device(),
                };
                plain(op, &body).gives(Gives::Own(event))
            }
            Op::EventDestroy => self.end_of(op, Kind::Event),
            Op::EventRecord | Op::StreamWaitEvent => plain(
                op,
                &EventOnStream {
                    event: self.handle(Kind::Event),
                    stream: self.stream(),
                    flags: self.pick(&[0, 0, 0, 1, u32::MAX]),
                    pad: 0,
                },
            ),
            Op::MarkEvent => {
                let event = self.handle(Kind::Event);
                let stream = self.stream();
                let (slot, value) = self.mark(stream);
                let mark = MarkEvent {
                    event,
                    stream,
                    slot,
                    value,
                };
                plain(op, &mark)
            }
            Op::MemRelease | Op::HostFree | Op::AddressFree => {
                let range = self.range();
                plain(op, &range).drops(range.start)
            }
            Op::UnmapMemory => {
                let range = self.range();
                plain(op, &range)
            }
            Op::ImageUnload => {
                let object = self.image();
                // Without its kernels a session has little to do.
                if self.rules.correct && Handle(object).index() < SAFE_INDICES && !self.once_in(20)
                {
                    return self.make(Op::Launch);
                }
                plain(op, &Object { object }).drops(object)
            }
            Op::Attach | Op::MemInfo => plain(
                op,
                &Attach {
                    device: self.device(),
                    flags: 0,
                },
            ),
            Op::MemGrant => {
                let grant = MemGrant {
                    len: self.bytes(),
                    device: self.device(),
                    flags: 0,
                };
                plain(op, &grant).gives(Gives::Range)
            }
            Op::HostAlloc => {
                let alloc = HostAlloc {
                    len: self.host_bytes(),
                    flags: self.pick(&[0, 2, 3, MANAGED, MANAGED | 1, u32::MAX]),
                    device: self.device(),
                };
                let draft = plain(op, &alloc).gives(Gives::Range);
                self.answered(draft)
            }
            Op::ImageLoad => {
                let content = self.images.any(self.rng);
                let kind = self.pick(&[Kind::Module, Kind::Module, Kind::Library]);
                let image = self.fresh(kind);
                let (options, behind) = self.options();
                let body = ImageLoad {
                    image,
                    hash: match self.once_in(30) {
                        true => [7; 32],
                        false => Sha256::digest(&content).into(),
                    },
                    len: match self.once_in(20) {
                        true => self.bytes(),
                        false => content.len() as u64,
                    },
                    options,
                    device: self.device(),
                    info_log: self.pick(&[0, 0, 1, 1024, u32::MAX]),
                    error_log: self.pick(&[0, 0, 1, 1024, u32::MAX]),
                    managed: match self.once_in(2) {
                        true => 0,
                        false => self.address(4 << 10),
                    },
                    fresh: self.pick(&[0, 1, u32::MAX]),
                    pad: 0,
                };
                let draft = plain(op, &body).with(&behind).gives(Gives::Own(image));
                if self.once_in(5) {
                    return draft;
                }
                let descriptor = self.descriptor(&content);
                self.carrying(draft, descriptor)
            }
            Op::GetFunction => {
                let function = self.fresh(Kind::Function);
                let get = GetFunction {
                    parent: self.image(),
                    function: match self.once_in(6) {
                        true => 0,
                        false => function,
                    },
                    device: self.device(),
                    pad: 0,
                };
                let name = self.name();
                plain(op, &get).with(&name).gives(Gives::Own(function))
            }
            Op::GetGlobal | Op::GetManaged => {
                let named = Named {
                    parent: self.image(),
                    device: self.device(),
                    pad: self.small() & HOLDS_VARIABLES,
                };
                let name = self.name();
                let draft = plain(op, &named).with(&name);
                match op {
                    Op::GetGlobal => draft.gives(Gives::Range),
                    _ => draft,
                }
            }
            Op::PlaceGlobal => {
                let Range { start, len } = self.range();
                let place = PlaceGlobal {
                    parent: self.image(),
                    start,
                    len,
                    device: self.device(),
                    pad: 0,
                };
                let name = self.name();
                plain(op, &place).with(&name)
            }
            Op::EnumerateFunctions | Op::ImageLeave => plain(
                op,
                &Named {
                    parent: self.image(),
                    device: self.device(),
                    pad: 0,
                },
            ),
            Op::GetFunctionAttribute | Op::SetFunctionAttribute => plain(
                op,
                &FunctionAttribute {
                    function: self.handle(Kind::Function),
                    attribute: self.small(),
                    value: self.small() as i32,
                },
            ),
            Op::Occupancy => plain(
                op,
                &Occupancy {
                    function: self.handle(Kind::Function),
                    shared: self.small().into(),
                    block: self.small() as i32,
                    flags: self.small(),
                    kind: self.pick(&[0, 1, 2]),
                    pad: 0,
                },
            ),
            Op::GetLimit | Op::SetLimit => plain(
                op,
                &Limit {
                    value: self.pick(&[0, 1024, 1 << 20, u64::MAX]),
                    limit: self.small(),
                    device: self.device(),
                },
            ),
            Op::EventQuery => self.object(op, Kind::Event),
            Op::EventElapsed => plain(
                op,
                &EventPair {
                    start: self.handle(Kind::Event),
                    end: self.handle(Kind::Event),
                },
            ),
            Op::PointerAttribute => plain(
                op,
                &PointerQuery {
                    pointer: self.address(1),
                    attribute: self.small(),
                    pad: 0,
                },
            ),
            Op::Printed => plain(op, &0u64),

            Op::GraphLaunch | Op::GraphUpload => {
                let launch = GraphLaunch {
                    exec: self.handle(Kind::GraphExec),
                    stream: self.stream(),
                };
                plain(op, &launch)
            }
            Op::CaptureHost => {
                let host = CaptureHost {
                    stream: self.stream(),
                    token: self.small(),
                    pad: 0,
                };
                if !self.rules.waits {
                    return self.make(Op::CaptureState);
                }
                let mut draft = plain(op, &host);
                draft.waits = true;
                draft
            }
            Op::CaptureBegin => {
                let nodes = self.nodes();
                let begin = CaptureBegin {
                    stream: self.stream(),
                    graph: match self.once_in(3) {
                        true => self.handle(Kind::Graph),
                        false => 0,
                    },
                    nodes: self.count(nodes.len() / 8),
                    edges: 1,
                };
                let edges = self.edges(nodes.len() / 8);
                plain(op, &begin).with(&nodes).with(&edges)
            }
            Op::CaptureEnd => self.object(op, Kind::Stream).gives(Gives::Handle),
            Op::CaptureState => self.object(op, Kind::Stream).gives(Gives::Handles(8)),
            Op::CaptureUpdate => {
                let nodes = self.nodes();
                let update = CaptureUpdate {
                    stream: self.stream(),
                    flags: self.pick(&[0, 1, 2]),
                    nodes: self.count(nodes.len() / 8),
                    edges: 0,
                    pad: 0,
                };
                plain(op, &update).with(&nodes)
            }
            Op::CaptureBreak | Op::Settle => self.object(op, Kind::Stream),
            Op::GraphCreate => {
                let create = GraphCreate {
                    flags: self.pick(&[0, 0, 0, 1]),
                    device: self.device(),
                };
                plain(op, &create).gives(Gives::Handle)
            }
            Op::GraphDestroy => self.end_of(op, Kind::Graph),
            Op::GraphClone => self.object(op, Kind::Graph).gives(Gives::Handle),
            Op::GraphFindInClone => {
                let pair = GraphPair {
                    first: self.handle(Kind::GraphNode),
                    second: self.handle(Kind::Graph),
                };
                plain(op, &pair).gives(Gives::Handle)
            }
            Op::GraphCopyAttributes => plain(
                op,
                &GraphPair {
                    first: self.handle(Kind::GraphNode),
                    second: self.handle(Kind::GraphNode),
                },
            ),
            Op::GraphExecUpdate => plain(
                op,
                &GraphPair {
                    first: self.handle(Kind::GraphExec),
                    second: self.handle(Kind::Graph),
                },
            ),
            Op::GraphList => {
                let kind = self.pick(&[Kind::Graph, Kind::GraphNode]);
                let list = GraphList {
                    object: self.handle(kind),
                    what: self.rng.random_range(0..6),
                    first: self.small(),
                    most: self.small(),
                    pad: 0,
                };
                plain(op, &list).gives(Gives::Handles(size_of::<GraphListed>()))
            }
            Op::GraphDependencies => {
                let (from, mut to) = (self.nodes(), self.nodes());
                to.resize(from.len(), 0);
                let body = GraphDependencies {
                    graph: self.handle(Kind::Graph),
                    count: self.count(from.len() / 8),
                    remove: self.pick(&[0, 1]),
                };
                let edges = self.edges(from.len() / 8);
                let edges = match self.once_in(2) {
                    true => edges,
                    false => Vec::new(),
                };
                plain(op, &body).with(&from).with(&to).with(&edges)
            }
            Op::GraphNode => {
                let kind = match self.rng.random_range(0..30) {
                    0 => self.small(),
                    1..10 => CU_GRAPH_NODE_TYPE_KERNEL,
                    10..16 => CU_GRAPH_NODE_TYPE_EMPTY,
                    _ => self.rng.random_range(0..14),
                };
                let kind = match kind {
                    CU_GRAPH_NODE_TYPE_HOST if !self.rules.waits => CU_GRAPH_NODE_TYPE_EMPTY,
                    kind if self.rules.portable && !PORTABLE_NODES.contains(&kind) => {
                        CU_GRAPH_NODE_TYPE_KERNEL
                    }
                    kind => kind,
                };
                let change = self.once_in(5);
                let nodes = match change {
                    true => Vec::new(),
                    false => self.nodes(),
                };
                let with_edges = self.once_in(5);
                let edges = match with_edges {
                    true => self.edges(nodes.len() / 8),
                    false => Vec::new(),
                };
                let (does, waits) = self.node(kind);
                let body = GraphNode {
                    object: match change {
                        true => self.handle(Kind::GraphNode),
                        false => self.handle(Kind::Graph),
                    },
                    exec: match change && self.once_in(2) {
                        true => self.handle(Kind::GraphExec),
                        false => 0,
                    },
                    kind,
                    device: self.device(),
                    nodes: self.count(nodes.len() / 8),
                    flags: match (with_edges, change) {
                        (true, true) => node_flags::EDGES | node_flags::CHANGE,
                        (true, false) => node_flags::EDGES,
                        (false, true) => node_flags::CHANGE,
                        (false, false) => 0,
                    },
                };
                let draft = plain(op, &body).with(&nodes).with(&edges).with(&does);
                let mut draft = draft.gives(Gives::Node);
                draft.waits = waits;
                draft
            }
            Op::GraphNodeGet => {
                let draft = self.object(op, Kind::GraphNode);
                draft.gives(Gives::Handles(size_of::<GraphNodeIs>()))
            }
            Op::GraphNodeKind => self.object(op, Kind::GraphNode),
            Op::GraphNodeDestroy => self.end_of(op, Kind::GraphNode),
            Op::GraphAttribute => plain(
                op,
                &GraphAttribute {
                    node: self.handle(Kind::GraphNode),
                    id: self.rng.random_range(0..20),
                    set: self.pick(&[0, 1]),
                    value: [self.small().into(); 8],
                },
            ),
            Op::GraphInstantiate => {
                let count = self.pick(&[0usize, 0, 4, 64, 1024]);
                let slots: Vec<u32> = (0..count).map(|_| self.slot()).collect();
                let body = GraphInstantiate {
                    graph: self.handle(Kind::Graph),
                    flags: self.pick(&[0, 0, 0, 1, 2, 4, 8, u64::MAX]),
                    stream: match self.once_in(3) {
                        true => self.stream(),
                        false => 0,
                    },
                    with_params: self.pick(&[0, 1]),
                    slots: self.count(count),
                };
                plain(op, &body)
                    .with(slots.as_bytes())
                    .gives(Gives::Instance)
            }
            Op::GraphExecDestroy => self.end_of(op, Kind::GraphExec),
            Op::GraphExecFlags => self.object(op, Kind::GraphExec),
            Op::GraphEnabled => plain(
                op,
                &GraphEnabled {
                    exec: self.handle(Kind::GraphExec),
                    node: self.handle(Kind::GraphNode),
                    set: self.pick(&[0, 1]),
                    enabled: self.pick(&[0, 1, 2]),
                },
            ),
            Op::GraphDot => {
                let dot = GraphDot {
                    graph: self.handle(Kind::Graph),
                    flags: self.small(),
                    pad: 0,
                };
                let draft = plain(op, &dot);
                self.answered(draft)
            }
            Op::GraphMemory => plain(
                op,
                &GraphMemory {
                    value: self.small().into(),
                    device: self.device(),
                    attribute: self.small(),
                    what: self.rng.random_range(0..4),
                    pad: 0,
                },
            ),
            Op::GraphCondition => {
                let condition = GraphCondition {
                    graph: self.handle(Kind::Graph),
                    device: self.device(),
                    default: 0,
                    flags: self.small(),
                    pad: 0,
                };
                plain(op, &condition).gives(Gives::Condition)
            }

            Op::PhysicalRelease => self.end_of(op, Kind::Allocation),
            Op::PoolDestroy => self.end_of(op, Kind::MemPool),
            Op::PoolFree => {
                let address = self.address(1);
                let free = PoolFree {
                    address,
                    stream: self.stream(),
                };
                plain(op, &free).drops(address)
            }
            Op::IpcForget | Op::PoolExportPointer => {
                let object = self.address(1);
                let draft = plain(op, &Object { object });
                match op {
                    Op::IpcForget => draft,
                    _ => draft.gives(Gives::Opaque),
                }
            }
            Op::IpcClose | Op::FileUnregister => {
                let object = self.address(1);
                plain(op, &Object { object }).drops(object)
            }
            Op::AddressReserve => {
                let len = self.bytes();
                let reserve = AddressReserve {
                    len: match self.once_in(4) {
                        true => len,
                        false => len.checked_next_multiple_of(UNIT).unwrap_or(len),
                    },
                    alignment: self.pick(&[0, 0, UNIT, 3, 1 << 40, u64::MAX, 1 << 63]),
                    hint: match self.once_in(4) {
                        true => self.address(UNIT),
                        false => 0,
                    },
                    flags: self.pick(&[0, 0, 0, 1]),
                };
                plain(op, &reserve).gives(Gives::Range)
            }
            Op::PhysicalCreate => {
                let handle = self.fresh(Kind::Allocation);
                let len = self.bytes();
                let create = PhysicalCreate {
                    handle,
                    len: match self.once_in(4) {
                        true => len,
                        false => len.checked_next_multiple_of(UNIT).unwrap_or(len),
                    },
                    flags: self.pick(&[0, 0, 0, 1]),
                    properties: self.properties(),
                };
                plain(op, &create).gives(Gives::Own(handle))
            }
            Op::MapMemory => {
                let range = self.range();
                plain(
                    op,
                    &MapMemory {
                        handle: self.handle(Kind::Allocation),
                        address: range.start,
                        len: match self.once_in(3) {
                            true => UNIT,
                            false => range.len,
                        },
                        offset: self.pick(&[0, 0, 0, UNIT, 1, u64::MAX]),
                        flags: self.pick(&[0, 0, 0, 1]),
                    },
                )
            }
            Op::SetAccess => {
                let (range, accesses) = (self.range(), self.accesses());
                let set = SetAccess {
                    address: range.start,
                    len: range.len,
                    count: self.count(accesses.len()),
                    pad: 0,
                };
                plain(op, &set).with(accesses.as_bytes())
            }
            Op::GetAccess => plain(
                op,
                &GetAccess {
                    address: self.address(1),
                    location: self.location(),
                },
            ),
            Op::PhysicalExport | Op::PoolExport => {
                let kind = match op {
                    Op::PhysicalExport => Kind::Allocation,
                    _ => Kind::MemPool,
                };
                let export = PhysicalExport {
                    handle: self.handle(kind),
                    flags: self.pick(&[0, 0, 0, 1]),
                    kind: self.pick(&[1, 1, 1, 8, 0]),
                    pad: 0,
                };
                let draft = plain(op, &export);
                self.answered(draft)
            }
            Op::PhysicalImport => {
                let object = self.fresh(Kind::Allocation);
                let draft = plain(op, &Object { object }).gives(Gives::Own(object));
                let descriptor = self.exported();
                self.carrying(draft, descriptor)
            }
            Op::PhysicalRetain => {
                let handle = self.fresh(Kind::Allocation);
                let retain = PhysicalRetain {
                    handle,
                    address: self.address(1),
                };
                plain(op, &retain).gives(Gives::Own(handle))
            }
            Op::Granularity => plain(
                op,
                &Granularity {
                    properties: self.properties(),
                    option: self.small(),
                    pad: 0,
                },
            ),
            Op::PoolCreate => {
                let handle = self.fresh(Kind::MemPool);
                let create = PoolCreate {
                    handle,
                    max_size: self.pick(&[0, 0, UNIT, u64::MAX]),
                    properties: self.properties(),
                };
                plain(op, &create).gives(Gives::Own(handle))
            }
            Op::PoolAlloc => {
                let alloc = PoolAlloc {
                    pool: self.handle(Kind::MemPool),
                    len: self.bytes(),
                    stream: self.stream(),
                };
                plain(op, &alloc).gives(Gives::Range)
            }
            Op::PoolGetAttribute | Op::PoolSetAttribute | Op::PoolTrim => plain(
                op,
                &PoolAttribute {
                    pool: self.handle(Kind::MemPool),
                    value: self.pick(&[0, 1, UNIT, u64::MAX]),
                    attribute: self.small(),
                    pad: 0,
                },
            ),
            Op::PoolSetAccess | Op::PoolGetAccess => {
                let accesses = self.accesses();
                let access = PoolAccess {
                    pool: self.handle(Kind::MemPool),
                    count: self.count(accesses.len()),
                    pad: 0,
                };
                plain(op, &access).with(accesses.as_bytes())
            }
            Op::PoolImport => {
                let handle = self.fresh(Kind::MemPool);
                let import = PoolImport {
                    handle,
                    kind: self.pick(&[1, 1, 1, 8, 0]),
                    device: self.device(),
                    flags: self.pick(&[0, 0, 0, 1]),
                };
                let draft = plain(op, &import).gives(Gives::Own(handle));
                let descriptor = self.exported();
                self.carrying(draft, descriptor)
            }
            Op::PoolImportPointer => {
                let import = PoolImportPointer {
                    pool: self.handle(Kind::MemPool),
                    data: Opaque {
                        words: self.opaque(),
                    },
                };
                plain(op, &import).gives(Gives::Range)
            }
            Op::IpcShare => {
                let range = self.range();
                plain(op, &range).gives(Gives::Opaque)
            }
            Op::IpcOpen => {
                let open = IpcOpen {
                    handle: Opaque {
                        words: self.opaque(),
                    },
                    device: self.device(),
                    pad: 0,
                };
                plain(op, &open).gives(Gives::Opened)
            }
            Op::FileRegister => {
                let len = self.pick(&[PAGE, PAGE, 16 * PAGE, 0, 1, u64::MAX, 1 << 40]);
                let register = FileRegister {
                    offset: self.pick(&[0, 0, 0, PAGE, 1, u64::MAX]),
                    len,
                    address: self.pick(&[0, 0x7100_0000_0000, PAGE, u64::MAX, HOST_ARENA]),
                    flags: self.small(),
                    device: self.device(),
                };
                let mut draft = plain(op, &register).gives(Gives::Range);
                let parts = match self.rules.correct {
                    true => self.pick(&[0, 0, 1, 3, 16]),
                    false => self.pick(&[0, 0, 1, 3, 20]),
                };
                for _ in 0..parts {
                    let part = FilePart {
                        offset: self.pick(&[0, PAGE, 2 * PAGE, 1, u64::MAX]),
                        len: self.pick(&[PAGE, PAGE, 0, 1, u64::MAX]),
                    };
                    draft = draft.with(part.as_bytes());
                }
                let descriptor = self.descriptor(&vec![0; 16 * PAGE as usize]);
                self.carrying(draft, descriptor)
            }
            Op::PeerAccess => plain(
                op,
                &Peers {
                    owner: self.device(),
                    user: self.pick(&[0, 1, 1, 2, u32::MAX]),
                    enable: self.pick(&[0, 1, 1]),
                    pad: 0,
                },
            ),
            Op::RangeHandle => {
                let range = self.range();
                let handle = RangeHandle {
                    address: range.start,
                    len: range.len,
                    flags: self.pick(&[0, 0, 1]),
                    kind: self.pick(&[1, 1, 0]),
                    pad: 0,
                };
                let draft = plain(op, &handle);
                self.answered(draft)
            }

            Op::CopyBox => {
                let width = self.pick(&[4, 16, 64, 0, u64::MAX]);
                let (to, from) = (self.side(width), self.side(width));
                let is_host = |side: &BoxSide| matches!(side.side, 1 | 2);
                if self.rules.correct && is_host(&to) && is_host(&from) {
                    return self.make(Op::Memset);
                }
                plain(
                    op,
                    &CopyBox {
                        to,
                        from,
                        width,
                        height: self.pick(&[1, 1, 4, 0, u64::MAX]),
                        depth: self.pick(&[1, 1, 2, 0, u64::MAX]),
                        stream: self.stream(),
                    },
                )
            }
            Op::ArrayDestroy => {
                let object = self.array();
                plain(op, &Object { object }).drops(object)
            }
            Op::TextureDestroy => {
                let object = self.client.textures.choose(self.rng).copied();
                plain(
                    op,
                    &TextureDestroy {
                        object: object.unwrap_or_else(|| self.rng.random()),
                        flags: self.pick(&[0, 0, TEXTURE_IS_SURFACE]),
                        pad: 0,
                    },
                )
            }
            Op::ArrayCreate => {
                let kind = self.pick(&[Kind::Array, Kind::Array, Kind::MipmappedArray]);
                let array = self.fresh(kind);
                let sides = [0, 1, 2, 16, 64, 1000, 16384, u64::MAX, 1 << 32];
                let create = ArrayCreate {
                    array,
                    size: [
                        self.pick(&sides),
                        self.pick(&sides[..6]),
                        self.pick(&[0, 0, 1, 16]),
                    ],
                    format: self.pick(&[1, 2, 3, 8, 9, 10, 16, 32, 32, 0, 0xff]),
                    channels: self.pick(&[1, 2, 4, 4, 3, 0, u32::MAX]),
                    flags: self.pick(&[0, 0, 1, 2, 4, 8, 0x40, u32::MAX]),
                    levels: self.small(),
                    device: self.device(),
                    pad: 0,
                };
                plain(op, &create).gives(Gives::Own(array))
            }
            Op::ArrayPart => {
                let part = self.fresh(Kind::Array);
                let body = ArrayPart {
                    parent: self.array(),
                    part,
                    index: self.small(),
                    pad: 0,
                };
                plain(op, &body).gives(Gives::Own(part))
            }
            Op::ArrayQuery => plain(
                op,
                &ArrayQuery {
                    array: self.array(),
                    kind: self.pick(&[0, 1, 2]),
                    device: self.device(),
                },
            ),
            Op::TextureCreate => {
                let mut create = TextureCreate::default();
                create.resource.kind = self.rng.random_range(0..5);
                create.resource.words[0] = match self.once_in(2) {
                    true => self.array(),
                    false => self.address(64),
                };
                create.resource.words[1] = self.small().into();
                create.resource.words[2] = self.small().into();
                create.flags = self.pick(&[0, 0, TEXTURE_HAS_VIEW, TEXTURE_IS_SURFACE, u32::MAX]);
                create.device = self.device();
                plain(op, &create).gives(Gives::Texture)
            }
            Op::GetReference => {
                let kind = self.pick(&[Kind::TextureReference, Kind::SurfaceReference]);
                let reference = self.fresh(kind);
                let get = GetReference {
                    module: match self.once_in(3) {
                        true => 0,
                        false => self.handle(Kind::Module),
                    },
                    reference,
                    device: self.device(),
                    pad: 0,
                };
                let name = self.name();
                plain(op, &get).with(&name).gives(Gives::Own(reference))
            }
            Op::ReferenceCall => {
                let kind = self.pick(&[Kind::TextureReference, Kind::SurfaceReference]);
                plain(
                    op,
                    &ReferenceArguments {
                        reference: self.handle(kind),
                        words: [
                            self.array(),
                            self.address(64),
                            self.small().into(),
                            self.small().into(),
                            self.small().into(),
                            0,
                        ],
                        call: match self.breaks_once_in(400) {
                            true => self.small(),
                            false => self.rng.random_range(0..28),
                        },
                        pad: 0,
                    },
                )
            }
            Op::TensorMap => {
                let mut map = TensorMap::default();
                self.rng.fill_bytes(map.map.as_mut_bytes());
                map.address = self.address(64);
                map.size = [self.small().into(); 8];
                map.strides = [u64::from(self.small()) * 16; 8];
                map.tile = [self.small(); 8];
                map.element_strides = [1; 8];
                map.rank = self.rng.random_range(0..7);
                map.data_type = self.small();
                map.call = match self.breaks_once_in(400) {
                    true => self.small(),
                    false => self.rng.random_range(0..4),
                };
                map.device = self.device();
                plain(op, &map)
            }

            Op::KernelAttribute => {
                let attribute = KernelAttribute {
                    library: self.image(),
                    device: self.device(),
                    attribute: self.small(),
                    set: self.pick(&[0, 1]),
                    value: self.small() as i32,
                };
                let name = self.name();
                plain(op, &attribute).with(&name)
            }
            Op::LinkCreate => {
                let link = self.fresh(Kind::Link);
                let (options, behind) = self.options();
                let create = LinkCreate {
                    link,
                    device: self.device(),
                    options,
                    info_log: self.pick(&[0, 1024, u32::MAX]),
                    error_log: self.pick(&[0, 1024, u32::MAX]),
                };
                plain(op, &create).with(&behind).gives(Gives::Own(link))
            }
            Op::LinkAdd => {
                let content = self.images.any(self.rng);
                let (options, behind) = self.options();
                let add = LinkAdd {
                    link: self.handle(Kind::Link),
                    len: match self.once_in(20) {
                        true => self.bytes(),
                        false => content.len() as u64,
                    },
                    kind: self.pick(&[0, 1, 1, 1, 2, 3, 9]),
                    options,
                };
                let name = self.name();
                let draft = plain(op, &add).with(&behind).with(&name);
                let descriptor = self.descriptor(&content);
                self.carrying(draft, descriptor)
            }
            Op::LinkComplete => self.object(op, Kind::Link),
            Op::LinkFetch => {
                let draft = self.object(op, Kind::Link);
                self.answered(draft)
            }
            Op::LinkDestroy => self.end_of(op, Kind::Link),

            Op::HostFunction => {
                let host = HostFunction {
                    stream: self.stream(),
                    slot: self.slot(),
                    value: 1,
                };
                if !self.rules.waits {
                    return self.make(Op::Mark);
                }
                let mut draft = plain(op, &host);
                draft.waits = true;
                draft
            }
            Op::MemOp => {
                let operations = OPERATIONS[usize::from(WORD_WAITS && self.rules.waits)];
                let operation = self.pick(operations) as u32;
                let body = MemOp {
                    stream: self.stream(),
                    address: self.address(8),
                    value: self.small().into(),
                    operation,
                    flags: self.pick(&[0, 0, 1, 2, 3, u32::MAX]),
                };
                let mut draft = plain(op, &body);
                draft.waits = matches!(operation, 1 | 4);
                draft
            }
            Op::StreamAttribute => {
                let mut value = [0; STREAM_ATTRIBUTE_LEN];
                self.rng.fill_bytes(&mut value);
                plain(
                    op,
                    &StreamAttribute {
                        stream: self.stream(),
                        id: self.rng.random_range(0..20),
                        pad: 0,
                        value,
                    },
                )
            }
            Op::EventExport => {
                let event = self.handle(Kind::Event);
                plain(op, &EventExport { event }).gives(Gives::Event)
            }
            Op::EventImport => {
                let event = self.fresh(Kind::Event);
                let import = EventImport {
                    event,
                    device: self.device(),
                    pad: 0,
                    token: self.opaque(),
                };
                plain(op, &import).gives(Gives::Own(event))
            }
            Op::Taken => plain(op, &()),

            Op::ResourceQuery => {
                let query = ResourceQuery {
                    green: match self.once_in(2) {
                        true => self.handle(Kind::GreenContext),
                        false => 0,
                    },
                    device: self.device(),
                    kind: self.pick(&[1, 1, 1, 0, 2]),
                };
                plain(op, &query).gives(Gives::Resource)
            }
            Op::ResourceSplit => {
                let split = ResourceSplit {
                    token: self.resource(),
                    count: self.small(),
                    groups: self.small(),
                    wanted: self.pick(&[1, 2, 3, 3, 0]),
                    flags: self.pick(&[0, 0, 1]),
                    least: self.small(),
                };
                plain(op, &split).gives(Gives::Groups)
            }
            Op::ResourceJoin => {
                let count = self.rng.random_range(0..4);
                let tokens: Vec<u32> = (0..count).map(|_| self.resource()).collect();
                let join = ResourceJoin {
                    count: self.count(count),
                    device: self.device(),
                };
                plain(op, &join).with(tokens.as_bytes())
            }
            Op::GreenCreate => {
                let green = self.fresh(Kind::GreenContext);
                let create = GreenCreate {
                    green,
                    description: self.small(),
                    device: self.device(),
                    flags: self.pick(&[1, 1, 1, 0, 2]),
                    pad: 0,
                };
                plain(op, &create).gives(Gives::Own(green))
            }
            Op::GreenDestroy => self.end_of(op, Kind::GreenContext),
            Op::Confine => {
                let green = self.fresh(Kind::GreenContext);
                let confine = Confine {
                    green,
                    device: self.device(),
                    hundredths: self.pick(&[0, 1, 100, 5000, 10_000, 10_001, u32::MAX]),
                };
                plain(op, &confine).gives(Gives::Own(green))
            }
            _ => self.words(op),
        }
    }

    /// A message of a kind that has no form of its own here: words that may be ordinals, sizes, handles or addresses.
    fn words(&mut self, op: Op) -> Draft {
        let words = op.lengths().0.div_ceil(8);
        let word = |this: &mut Self| match this.rng.random_range(0..6) {
            0 => 0,
            1 => this.device().into(),
            2 => this.bytes(),
            3 => this.image(),
            4 => this.address(1),
            _ => u64::from(this.device()) | this.bytes() << 32,
        };
        let body: Vec<u64> = (0..words).map(|_| word(self)).collect();
        let mut draft = plain(op, &());
        draft.body.extend_from_slice(body.as_bytes());
        draft
    }

    fn resource(&mut self) -> u32 {
        match self.client.tokens.choose(self.rng).copied() {
            Some(token) if !self.once_in(10) => token,
            _ => self.small(),
        }
    }
}

/// A memory file that may still shrink.
fn unsealed(content: &[u8]) -> io::Result<OwnedFd> {
    use std::io::Write;
    // SAFETY: a NUL-ended name; the new descriptor is ours.
    let file = unsafe {
        let raw = libc::memfd_create(c"fuzz".as_ptr(), libc::MFD_CLOEXEC);
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        File::from_raw_fd(raw)
    };
    (&file).write_all(content)?;
    Ok(file.into())
}
