//! The messages a client writes into the ring, and the answers.
//!
//! One message is not one entry point: every copy of the driver API becomes one of three copy messages, every
//! synchronization a mark. A *post* awaits no answer; an *ask* gets exactly one [`crate::segment::Answer`],
//! whose payload is the struct named with it. Trailing bytes (parameters, names, data) follow the struct.
//!
//! An opcode, once given, is never reused. Each subject has a hundred of its own: from 100 on graphs, 200 memory,
//! 300 arrays, 400 images, 500 streams and host functions, 600 contexts and devices.

use crate::ring::WRAP;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! opcodes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $class:ident;)*) => {
        /// What a message asks for.
        #[repr(u16)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Op { $($(#[$doc])* $name = $number,)* }

        impl Op {
            /// All opcodes.
            pub const ALL: &'static [Op] = &[$(Op::$name,)*];
            /// The opcode of this number.
            pub fn from_u16(value: u16) -> Option<Op> {
                match value { $($number => Some(Op::$name),)* _ => None }
            }
            /// Whether the client waits for an answer.
            pub fn is_ask(self) -> bool {
                match self { $(Op::$name => matches!(Class::$class, Class::Ask),)* }
            }
        }
        enum Class { Post, Ask }
    };
}

opcodes! {
    /// [`Launch`], packed parameters, then [`crate::cuda::CUlaunchAttribute`]s.
    Launch = 2, Post;
    /// [`Mark`]: write a flag when the stream gets there.
    Mark = 3, Post;
    /// [`CopyInline`], then the bytes: host to device.
    CopyInline = 4, Post;
    /// [`Copy`].
    Copy = 5, Post;
    /// [`Memset`].
    Memset = 6, Post;
    /// [`StreamCreate`].
    StreamCreate = 7, Post;
    /// [`Object`]: work already queued still runs.
    StreamDestroy = 8, Post;
    /// [`EventCreate`].
    EventCreate = 9, Post;
    /// [`Object`].
    EventDestroy = 10, Post;
    /// [`EventOnStream`].
    EventRecord = 11, Post;
    /// [`EventOnStream`].
    StreamWaitEvent = 12, Post;
    /// [`MarkEvent`]: write a flag when the event's last record is complete.
    MarkEvent = 13, Post;
    /// [`Range`]: a granted mapping is given back.
    MemRelease = 14, Post;
    /// [`Object`], a module or a library.
    ImageUnload = 15, Post;
    /// [`Range`]: pinned host memory is given back.
    HostFree = 16, Post;

    /// [`Attach`] -> nothing: the device's context exists from now on.
    Attach = 64, Ask;
    /// [`MemGrant`] -> [`Range`].
    MemGrant = 65, Ask;
    /// [`HostAlloc`] -> [`Range`], with a descriptor of the same token on the socket.
    HostAlloc = 66, Ask;
    /// [`Attach`] -> [`MemInfo`].
    MemInfo = 67, Ask;
    /// [`ImageLoad`], options and lists -> [`ImageLoaded`], then the logs.
    ImageLoad = 68, Ask;
    /// [`GetFunction`], name -> [`FunctionInfo`], then [`Param`]s.
    GetFunction = 69, Ask;
    /// [`Named`], name -> [`Range`].
    GetGlobal = 70, Ask;
    /// [`FunctionAttribute`] -> [`Value`].
    GetFunctionAttribute = 71, Ask;
    /// [`FunctionAttribute`] -> nothing.
    SetFunctionAttribute = 72, Ask;
    /// [`Occupancy`] -> [`Value`].
    Occupancy = 73, Ask;
    /// [`Launch`], attributes -> [`Value`]: `cuOccupancyMaxActiveClusters`, `cuOccupancyMaxPotentialClusterSize` by `flags`.
    Clusters = 74, Ask;
    /// [`Limit`] -> [`Value`].
    GetLimit = 75, Ask;
    /// [`Limit`] -> [`Value`].
    SetLimit = 76, Ask;
    /// [`Object`] -> nothing; the status is that of `cuEventQuery`.
    EventQuery = 77, Ask;
    /// [`EventPair`] -> [`Value`]: bits of an f32, milliseconds.
    EventElapsed = 78, Ask;
    /// [`Named`] -> [`Value`] count, then NUL-ended names: the kernels of a library or functions of a module.
    EnumerateFunctions = 79, Ask;
    /// [`PointerQuery`] -> [`Value`]: an attribute of a pointer the client does not know (a global's interior, say).
    PointerAttribute = 80, Ask;
    /// Nothing -> [`Value`] bytes left, then what the session's kernels printed (device `printf`).
    Printed = 81, Ask;

    // Graphs and capture: [`graph`].

    /// [`graph::GraphLaunch`].
    GraphLaunch = 100, Post;
    /// [`graph::GraphLaunch`]: the instance is made ready, nothing runs.
    GraphUpload = 101, Post;
    /// [`graph::CaptureHost`].
    CaptureHost = 128, Post;
    /// [`graph::CaptureBegin`], nodes, edges -> nothing.
    CaptureBegin = 102, Ask;
    /// [`Object`], a stream -> [`Value`], a graph.
    CaptureEnd = 103, Ask;
    /// [`Object`], a stream -> [`graph::CaptureState`], nodes, edges.
    CaptureState = 104, Ask;
    /// [`graph::CaptureUpdate`], nodes, edges -> nothing.
    CaptureUpdate = 105, Ask;
    /// [`Object`], a stream whose capture is to end with an error -> nothing.
    CaptureBreak = 106, Ask;
    /// [`Object`], a stream -> nothing: whoever waits for it finds the error of what the stream was given.
    Settle = 107, Ask;
    /// [`graph::GraphCreate`] -> [`Value`], a graph.
    GraphCreate = 108, Ask;
    /// [`Object`], a graph -> nothing.
    GraphDestroy = 109, Ask;
    /// [`Object`], a graph -> [`Value`], a graph.
    GraphClone = 110, Ask;
    /// [`graph::GraphPair`], a node and a clone of its graph -> [`Value`], a node.
    GraphFindInClone = 111, Ask;
    /// [`graph::GraphList`] -> [`graph::GraphListed`], nodes, edges.
    GraphList = 112, Ask;
    /// [`graph::GraphDependencies`], nodes, edges -> nothing.
    GraphDependencies = 113, Ask;
    /// [`graph::GraphNode`], nodes, edges, what it does -> [`graph::GraphNodeAdded`], graphs.
    GraphNode = 114, Ask;
    /// [`Object`], a node -> [`graph::GraphNodeIs`], what it does.
    GraphNodeGet = 115, Ask;
    /// [`Object`], a node -> [`Value`], its kind.
    GraphNodeKind = 116, Ask;
    /// [`Object`], a node -> nothing.
    GraphNodeDestroy = 117, Ask;
    /// [`graph::GraphAttribute`] -> [`graph::GraphAttribute`].
    GraphAttribute = 118, Ask;
    /// [`graph::GraphPair`], the node that gets them, the node that has them -> nothing.
    GraphCopyAttributes = 119, Ask;
    /// [`graph::GraphInstantiate`] -> [`graph::GraphInstantiated`].
    GraphInstantiate = 120, Ask;
    /// [`Object`], an instance -> nothing.
    GraphExecDestroy = 121, Ask;
    /// [`Object`], an instance -> [`Value`].
    GraphExecFlags = 122, Ask;
    /// [`graph::GraphPair`], an instance and a graph -> [`graph::GraphUpdated`].
    GraphExecUpdate = 123, Ask;
    /// [`graph::GraphEnabled`] -> [`graph::GraphEnabled`].
    GraphEnabled = 124, Ask;
    /// [`graph::GraphDot`] -> [`Value`] bytes of text, in a descriptor of the same token on the socket.
    GraphDot = 125, Ask;
    /// [`graph::GraphMemory`] -> [`Value`].
    GraphMemory = 126, Ask;
    /// [`graph::GraphCondition`] -> [`Value`], the driver's own number of a condition.
    GraphCondition = 127, Ask;

    // Pools, virtual memory, managed and shared memory: [`memory`].

    /// [`Range`]: a reservation of the program's own is given back.
    AddressFree = 200, Post;
    /// [`Object`]: an allocation's handle is given back; what is mapped stays.
    PhysicalRelease = 201, Post;
    /// [`Object`]: a pool is destroyed; what was allocated from it stays.
    PoolDestroy = 202, Post;
    /// [`memory::PoolFree`], in the order of a stream.
    PoolFree = 203, Post;
    /// [`Object`]: the address of an allocation that is freed; its handle opens nothing any more.
    IpcForget = 204, Post;
    /// [`Object`]: the address of what was opened.
    IpcClose = 205, Post;
    /// [`Object`]: the device address of a registered file.
    FileUnregister = 206, Post;
    /// [`memory::AddressReserve`] -> [`Range`].
    AddressReserve = 210, Ask;
    /// [`memory::PhysicalCreate`] -> nothing.
    PhysicalCreate = 211, Ask;
    /// [`memory::MapMemory`] -> nothing.
    MapMemory = 212, Ask;
    /// [`Range`] -> nothing. Answered when nothing is in flight that may touch it.
    UnmapMemory = 213, Ask;
    /// [`memory::SetAccess`], [`memory::Access`]es -> nothing.
    SetAccess = 214, Ask;
    /// [`memory::GetAccess`] -> [`Value`].
    GetAccess = 215, Ask;
    /// [`memory::PhysicalExport`] -> nothing, with a descriptor of the same token on the socket.
    PhysicalExport = 216, Ask;
    /// [`Object`], with a descriptor -> [`memory::Properties`].
    PhysicalImport = 217, Ask;
    /// [`memory::PhysicalRetain`] -> [`memory::Properties`]: another handle of what is mapped at an address.
    PhysicalRetain = 218, Ask;
    /// [`memory::Granularity`] -> [`Value`].
    Granularity = 219, Ask;
    /// [`memory::PoolCreate`] -> nothing.
    PoolCreate = 230, Ask;
    /// [`memory::PoolAlloc`] -> [`Range`], in the order of a stream.
    PoolAlloc = 231, Ask;
    /// [`memory::PoolAttribute`] -> [`Value`].
    PoolGetAttribute = 232, Ask;
    /// [`memory::PoolAttribute`] -> nothing.
    PoolSetAttribute = 233, Ask;
    /// [`memory::PoolAccess`], [`memory::Access`]es -> nothing.
    PoolSetAccess = 234, Ask;
    /// [`memory::PoolAccess`], [`memory::Access`] -> [`Value`].
    PoolGetAccess = 235, Ask;
    /// [`memory::PoolAttribute`]: `value` bytes to keep -> nothing.
    PoolTrim = 236, Ask;
    /// [`memory::PhysicalExport`] of a pool -> nothing, with a descriptor of the same token on the socket.
    PoolExport = 237, Ask;
    /// [`memory::PoolImport`], with a descriptor -> nothing.
    PoolImport = 238, Ask;
    /// [`Object`]: an address -> [`memory::Opaque`].
    PoolExportPointer = 239, Ask;
    /// [`memory::PoolImportPointer`] -> [`Range`].
    PoolImportPointer = 240, Ask;
    /// [`Range`]: an allocation -> [`memory::Opaque`].
    IpcShare = 250, Ask;
    /// [`memory::IpcOpen`] -> [`memory::IpcOpened`].
    IpcOpen = 251, Ask;
    /// [`memory::FileRegister`], with a descriptor -> [`Range`].
    FileRegister = 252, Ask;
    /// [`memory::HostAlias`] -> nothing: pinned memory is registered at the client's other address of it too.
    HostAlias = 255, Ask;
    /// [`memory::Peers`] -> nothing.
    PeerAccess = 253, Ask;
    /// [`memory::RangeHandle`] -> nothing, with a descriptor of the same token on the socket.
    RangeHandle = 254, Ask;

    // Arrays, textures, two- and three-dimensional copies: [`array`].

    /// [`array::CopyBox`].
    CopyBox = 300, Post;
    /// [`Object`], an array or a mipmapped array.
    ArrayDestroy = 301, Post;
    /// [`array::TextureDestroy`].
    TextureDestroy = 302, Post;
    /// [`array::ArrayCreate`] -> [`array::ArrayInfo`].
    ArrayCreate = 303, Ask;
    /// [`array::ArrayPart`] -> [`array::ArrayInfo`].
    ArrayPart = 304, Ask;
    /// [`array::ArrayQuery`] -> `CUDA_ARRAY_MEMORY_REQUIREMENTS`, `CUDA_ARRAY_SPARSE_PROPERTIES`.
    ArrayQuery = 305, Ask;
    /// [`array::TextureCreate`] -> [`array::TextureInfo`].
    TextureCreate = 306, Ask;
    /// [`array::GetReference`], name -> nothing.
    GetReference = 307, Ask;
    /// [`array::ReferenceArguments`] -> [`array::ReferenceResult`].
    ReferenceCall = 308, Ask;
    /// [`array::TensorMap`] -> [`array::TensorMapMade`].
    TensorMap = 309, Ask;

    // Linker, module options: [`image`].

    /// [`Named`] without a name: what was found in a library on a device is not used any more.
    ImageLeave = 400, Post;
    /// [`image::KernelAttribute`], name -> [`Value`].
    KernelAttribute = 401, Ask;
    /// [`Named`], name -> nothing; the status says whether a library has such a managed variable.
    GetManaged = 402, Ask;
    /// [`image::LinkCreate`], options and lists -> nothing.
    LinkCreate = 403, Ask;
    /// [`image::LinkAdd`], options and lists, name, with a descriptor -> [`ImageLoaded`], then the logs.
    LinkAdd = 404, Ask;
    /// [`Object`] -> [`ImageLoaded`], then the logs.
    LinkComplete = 405, Ask;
    /// [`Object`] -> nothing, with a descriptor of the cubin.
    LinkFetch = 406, Ask;
    /// [`Object`].
    LinkDestroy = 407, Post;

    // Stream memory operations, attributes, host functions: [`stream`].
    /// [`stream::HostFunction`]: the stream goes on when the client has run it.
    HostFunction = 500, Post;
    /// [`stream::MemOp`].
    MemOp = 501, Post;
    /// [`stream::StreamAttribute`].
    StreamAttribute = 502, Post;
    /// [`stream::EventExport`] -> [`stream::EventToken`].
    EventExport = 503, Ask;
    /// [`stream::EventImport`] -> nothing.
    EventImport = 504, Ask;

    /// [`context::ResourceQuery`] -> [`context::Resource`].
    ResourceQuery = 600, Ask;
    /// [`context::ResourceSplit`] -> [`context::ResourceGroups`], then a [`context::Resource`] for each group.
    ResourceSplit = 601, Ask;
    /// [`context::ResourceJoin`], tokens -> [`Value`]: what a green context can be made of.
    ResourceJoin = 602, Ask;
    /// [`context::GreenCreate`] -> nothing.
    GreenCreate = 603, Ask;
    /// [`Object`]: its streams were destroyed before.
    GreenDestroy = 604, Post;
    /// [`context::Confine`] -> [`Value`]: multiprocessors.
    Confine = 605, Ask;
    /// [`context::LimitMemory`].
    LimitMemory = 606, Post;
}

const _: () = assert!(WRAP == 1);

pub mod array;
pub mod context;
pub mod graph;
pub mod image;
pub mod memory;
pub mod stream;

plain_structs! {
    /// `cuLaunchKernel`, `cuLaunchKernelEx`, `cuLaunchCooperativeKernel`.
    Launch {
        /// Handle of a function or a kernel.
        function: u64,
        stream: u64,
        /// Blocks.
        grid: [u32; 3],
        /// Threads.
        block: [u32; 3],
        /// Bytes of dynamic shared memory per block.
        shared: u32,
        /// Bytes of packed parameters behind this struct (padded to 8).
        param_len: u32,
        /// Attributes behind the parameters.
        attributes: u32,
        /// 0; in [`Op::Clusters`]: 0 active clusters, 1 potential cluster size.
        flags: u32,
    }
    /// `cuStreamWriteValue32` of `value` into flag `slot`, in stream order.
    Mark { stream: u64, slot: u32, value: u32, }
    /// Host to device with the data in the message. Bytes.
    CopyInline { to: u64, stream: u64, len: u64, }
    /// A copy whose host side, if any, the server can reach.
    Copy {
        /// Device address, or host address in the arena, or offset in the staging area.
        to: u64,
        from: u64,
        /// Bytes.
        len: u64,
        stream: u64,
        /// [`Side`] of `to` | [`Side`] of `from` << 8.
        sides: u32,
        pad: u32,
    }
    /// `cuMemsetD8/16/32` and `cuMemsetD2D8/16/32`.
    Memset {
        to: u64,
        stream: u64,
        /// Elements in a row.
        width: u64,
        /// Rows, 1 for the one-dimensional ones.
        height: u64,
        /// Bytes from row to row.
        pitch: u64,
        value: u32,
        /// Bytes of an element: 1, 2 or 4.
        element: u32,
    }
    /// `cuStreamCreateWithPriority`, and the default streams of a context.
    StreamCreate {
        stream: u64,
        /// Handle of the green context it is in; 0: none.
        green: u64,
        /// Handle of the legacy default stream it is ordered against; 0: non-blocking; itself: it *is* one.
        legacy: u64,
        priority: i32,
        /// Server's ordinal.
        device: u32,
    }
    /// One object by handle.
    Object { object: u64, }
    EventCreate {
        event: u64,
        /// `CU_EVENT_*`.
        flags: u32,
        device: u32,
    }
    EventOnStream { event: u64, stream: u64, flags: u32, pad: u32, }
    MarkEvent {
        event: u64,
        /// The stream that waits for the event and writes the flag; belongs to the waiting thread.
        stream: u64,
        slot: u32,
        value: u32,
    }
    /// Addresses `[start, start + len)`.
    Range { start: u64, len: u64, }
    /// A device by the server's ordinal.
    Attach { device: u32, pad: u32, }
    MemGrant {
        /// Bytes; the server rounds up to the driver's granularity.
        len: u64,
        device: u32,
        pad: u32,
    }
    HostAlloc {
        /// Bytes; rounded up to pages.
        len: u64,
        /// `CU_MEMHOSTALLOC_*`, or [`MANAGED`] and `CU_MEM_ATTACH_*`.
        flags: u32,
        /// Server's ordinal.
        device: u32,
    }
    /// Bytes.
    MemInfo { free: u64, total: u64, }
    /// `cuModuleLoadData(Ex)`, `cuLibraryLoadData`.
    ImageLoad {
        /// Handle of kind module or library, chosen by the client.
        image: u64,
        /// SHA-256 of the content.
        hash: [u8; 32],
        /// Bytes of the content. It comes in a descriptor with the message's token; none when the token is 0 (the
        /// server is asked to use the copy it has; it answers `CUDA_ERROR_NOT_FOUND` if it has none).
        len: u64,
        /// [`JitOption`]s behind this struct, then their lists.
        options: u32,
        device: u32,
        /// Bytes of log wanted.
        info_log: u32,
        error_log: u32,
    }
    /// One `CUjit_option`.
    JitOption {
        option: u32,
        /// Bytes of a list behind all options: NUL-ended names, or addresses. 0 for a number.
        len: u32,
        /// The number, or how many entries the list has.
        value: u64,
    }
    /// Bytes of info log, then of error log, behind this struct; before them what the compiler left in the options.
    ImageLoaded {
        info_log: u32,
        error_log: u32,
        /// `CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES`, `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
        info_size: u32,
        error_size: u32,
        wall_time_ms: f32,
        /// `CU_JIT_THREADS_PER_BLOCK`.
        threads_per_block: u32,
        /// Bytes of a linked cubin.
        cubin: u64,
    }
    /// `cuModuleGetFunction`, `cuLibraryGetKernel` with `cuKernelGetFunction`.
    GetFunction {
        parent: u64,
        /// 0: a library's kernel is only looked for and described.
        function: u64,
        /// Where a library's kernel becomes a function; a module's device is the module's.
        device: u32,
        pad: u32,
    }
    /// An object inside a module, or inside a library on a device, by name.
    Named { parent: u64, device: u32, pad: u32, }
    /// What a client needs to know to launch. Values of `CU_FUNC_ATTRIBUTE_*` 0 to 15, `i32::MIN` where unknown.
    FunctionInfo {
        attributes: [i32; 16],
        params: u32,
        /// [`FUNCTION_PRINTS`].
        flags: u32,
    }
    /// Where a parameter lies in the packed buffer, bytes.
    Param { offset: u32, size: u32, }
    FunctionAttribute { function: u64, attribute: u32, value: i32, }
    /// A single number.
    Value { value: u64, }
    /// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags` (kind 0), `cuOccupancyAvailableDynamicSMemPerBlock`
    /// (kind 1; `shared` is the number of blocks).
    Occupancy { function: u64, shared: u64, block: i32, flags: u32, kind: u32, pad: u32, }
    Limit { value: u64, limit: u32, device: u32, }
    EventPair { start: u64, end: u64, }
    PointerQuery { pointer: u64, attribute: u32, pad: u32, }
}

/// Which memory one side of a [`Copy`] lies in.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Device address.
    Device = 0,
    /// Address in the host arena, the same in both processes.
    Host = 1,
    /// Offset in the segment's staging area.
    Staging = 2,
}

impl Launch {
    /// Blocks of the grid.
    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|count| u64::from(*count)).product()
    }
}

impl Side {
    /// The side of this number.
    pub fn from_u8(value: u8) -> Option<Side> {
        [Side::Device, Side::Host, Side::Staging]
            .into_iter()
            .find(|s| *s as u8 == value)
    }
}

/// Host-to-device copies up to this many bytes travel in the ring. Above it the copy from registered staging
/// memory costs the server less (1.3 µs whatever the size, against 6.2 µs for 64 KiB of unregistered memory).
pub const INLINE_COPY_MAX: usize = 4 << 10;

/// In [`HostAlloc::flags`]: it is managed memory. Beside it stand `CU_MEM_ATTACH_*`.
pub const MANAGED: u32 = 1 << 31;
/// In [`FunctionInfo::flags`]: its module may print, so that a client that has launched it asks for [`Op::Printed`]
/// when it has waited.
pub const FUNCTION_PRINTS: u32 = 1;

/// Attributes that one launch may carry: twice as many as there are kinds.
pub const ATTRIBUTES_MAX: usize = 32;

/// The most bytes of kernel parameters the driver takes (CUDA 12.1 and later).
pub const PARAMS_MAX: usize = 32_764;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn opcodes_are_unique_and_not_the_filler() {
        let numbers: HashSet<u16> = Op::ALL.iter().map(|op| *op as u16).collect();
        assert_eq!(numbers.len(), Op::ALL.len());
        assert!(!numbers.contains(&WRAP));
        assert!(
            Op::ALL
                .iter()
                .all(|op| Op::from_u16(*op as u16) == Some(*op))
        );
        assert_eq!(Op::from_u16(0), None);
    }
}
