//! The table of operations: every message of a client, once, with all that the other parts have to know about it.
//!
//! One operation is not one entry point: every copy of the driver API becomes one of three copy messages, every
//! synchronization a completion marker. An *asynchronous* operation awaits no answer; a *request* gets exactly one
//! [`crate::segment::Answer`], whose payload begins with the struct behind the arrow.
//!
//! [`for_each_op!`](crate::for_each_op) hands the rows to another macro. The opcodes and their properties are made from them
//! here, dispatch in the server; docs/protocol.md has them as a table, and [`crate::wire::fingerprint`] covers them.

use crate::message::*;
use std::mem::offset_of;

/// Hands all rows of the table to a macro, behind its own arguments if it has any. A row is
///
/// ```text
/// Name = number: kind handler(Body, rest) -> Answer; lane, ordering, gate, trace subject, change;
/// ```
///
/// with `rest` where something may follow the body or come in a descriptor. An opcode, once given, is never reused. Each
/// subject has a hundred of its own.
#[macro_export]
macro_rules! for_each_op {
    ($callback:ident $($arguments:tt)?) => {
        $callback! {
            $($arguments)?
            // Launches, copies, streams, events, memory, images.
            /// Launches a kernel: `cuLaunchKernel`, `cuLaunchKernelEx`, `cuLaunchCooperativeKernel`. Trailing: packed parameters, then `CUlaunchAttribute`s.
            Launch = 2: Async launch(Launch, rest); Dispatch, [Launch stream], Never, Launch, Nothing;
            /// Writes a completion marker when the stream gets there.
            Mark = 3: Async mark(Mark); Dispatch, [Stream stream], Never, Wait, Nothing;
            /// Copies the trailing bytes to device memory.
            CopyInline = 4: Async copy_inline(CopyInline, rest); Dispatch, [Stream stream], Never, [Copy stream len], Nothing;
            /// Copies between memory that the server can reach.
            Copy = 5: Async copy(Copy); Dispatch, [Stream stream], Never, [Copy stream len], Nothing;
            /// Sets one- or two-dimensional memory.
            Memset = 6: Async memset(Memset); Dispatch, [Stream stream], Never, Set, Nothing;
            /// Creates a stream, or a default stream of a context.
            StreamCreate = 7: Async stream_create(StreamCreate); Dispatch, [Stream stream], NewStream, Nothing, [Makes stream];
            /// Destroys a stream; work already queued still runs.
            StreamDestroy = 8: Async stream_destroy(Object); Dispatch, [Stream object], Never, Nothing, [Ends object];
            /// Creates an event.
            EventCreate = 9: Async event_create(EventCreate); Dispatch, [Event event], Never, Nothing, [Makes event];
            /// Destroys an event.
            EventDestroy = 10: Async event_destroy(Object); Dispatch, [Event object], Never, Nothing, [Ends object];
            /// Records an event on a stream.
            EventRecord = 11: Async event_record(EventOnStream); Dispatch, [Stream stream, Event event], Never, Nothing, Nothing;
            /// Makes a stream wait for an event.
            StreamWaitEvent = 12: Async stream_wait_event(EventOnStream); Dispatch, [Stream stream, Read event], Never, Nothing, Nothing;
            /// Writes a completion marker when the event's last record is complete.
            MarkEvent = 13: Async mark_event(MarkEvent); Dispatch, [Stream stream, Read event], Never, Nothing, Nothing;
            /// Returns a granted mapping.
            MemRelease = 14: Async mem_release(Range); SlowSubmits, Earlier, Never, Nothing, Own;
            /// Unloads a module or a library.
            ImageUnload = 15: Async image_unload(Object); SlowSubmits, Everything, Never, Nothing, [Ends object];
            /// Returns pinned host memory.
            HostFree = 16: Async host_free(Range); Dispatch, Earlier, Never, Nothing, Own;
            /// Copies pieces of managed memory between host and device. Trailing: [`Piece`]s.
            ManagedMove = 17: Async managed_move(ManagedMove, rest); Dispatch, [Stream stream], Never, [Copy stream len], Nothing;
            /// Creates the device's context, if there is none.
            Attach = 64: Request attach(Attach) -> (); SlowSubmits, Free, Never, Nothing, [Makes device];
            /// Maps device memory for the client's allocator.
            MemGrant = 65: Request mem_grant(MemGrant) -> Range; SlowSubmits, Free, Never, Nothing, Own;
            /// Allocates pinned or managed memory. Answered with a descriptor of it.
            HostAlloc = 66: Request host_alloc(HostAlloc, rest) -> Range; Slow, Free, Never, Nothing, Own;
            /// Free and total memory of a device.
            MemInfo = 67: Request mem_info(Attach) -> MemInfo; Dispatch, Free, Never, Nothing, Nothing;
            /// Loads a module or a library from a descriptor, or by its hash. Trailing: options and lists. Answered with the logs.
            ImageLoad = 68: Request image_load(ImageLoad, rest) -> ImageLoaded; Slow, Free, NewModule, Nothing, [Makes image];
            /// Finds a function and describes it. Trailing: its name. Answered with [`Param`]s.
            GetFunction = 69: Request get_function(GetFunction, rest) -> FunctionInfo; Slow, Free, NewFunction, Nothing, [Makes function];
            /// Address and size of a variable. Trailing: its name. The address is 0 if the client may hold it ([`HOLDS_VARIABLES`]).
            GetGlobal = 70: Request get_global(Named, rest) -> Range; Slow, Free, [Variable parent], Nothing, Own;
            /// An attribute of a function.
            GetFunctionAttribute = 71: Request get_function_attribute(FunctionAttribute) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// Sets an attribute of a function.
            SetFunctionAttribute = 72: Request set_function_attribute(FunctionAttribute) -> (); Dispatch, Free, FunctionAttribute, Nothing, [Sets function];
            /// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`, `cuOccupancyAvailableDynamicSMemPerBlock`.
            Occupancy = 73: Request occupancy(Occupancy) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// `cuOccupancyMaxActiveClusters` or `cuOccupancyMaxPotentialClusterSize`, by the body's flags. Trailing: attributes.
            Clusters = 74: Request clusters(Launch, rest) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// A limit of the context.
            GetLimit = 75: Request get_limit(Limit) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// Sets a limit of the context.
            SetLimit = 76: Request set_limit(Limit) -> Value; SlowSubmits, Free, HigherLimit, Nothing, Own;
            /// `cuEventQuery`: the answer is its status.
            EventQuery = 77: Request event_query(Object) -> (); Dispatch, [Read object], Never, Nothing, Nothing;
            /// Milliseconds between two events: the bits of an `f32`.
            EventElapsed = 78: Request event_elapsed(EventPair) -> Value; Dispatch, [Read start, Read end], Never, Nothing, Nothing;
            /// Counts the kernels of a library or the functions of a module. Answered with their names, each ended by NUL.
            EnumerateFunctions = 79: Request enumerate_functions(Named) -> Value; Slow, Free, NewImage, Nothing, Nothing;
            /// An attribute of a pointer that the client does not know, such as one into a variable.
            PointerAttribute = 80: Request pointer_attribute(PointerQuery) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// Text that the session's kernels have printed. Answered with the number of bytes still unread, then text.
            Printed = 81: Request printed(()) -> Value; SlowSubmits, Free, Never, Nothing, Nothing;

            /// Stores the initial content of a variable in memory of the client. Trailing: its name.
            PlaceGlobal = 82: Request place_global(PlaceGlobal, rest) -> (); SlowSubmits, Free, Never, Nothing, Nothing;

            // Graphs and capture: [`graph`].
            /// Launches a graph's instance.
            GraphLaunch = 100: Async graph_launch(graph::GraphLaunch); Dispatch, [Launch stream], Never, [Graph stream], Nothing;
            /// Makes an instance ready for its launch.
            GraphUpload = 101: Async graph_upload(graph::GraphLaunch); Dispatch, [Stream stream], Never, Nothing, Nothing;
            /// Captures a host function.
            CaptureHost = 128: Async capture_host(graph::CaptureHost); Dispatch, [Stream stream], Never, Nothing, Binds;
            /// Begins a capture. Trailing: nodes, edges.
            CaptureBegin = 102: Request capture_begin(graph::CaptureBegin, rest) -> (); Dispatch, [Stream stream], Never, Nothing, Binds;
            /// Ends a stream's capture; the answer is the graph.
            CaptureEnd = 103: Request capture_end(Object) -> Value; SlowSubmits, [Stream object], Never, Nothing, Binds;
            /// State of a stream's capture. Answered with nodes and edges.
            CaptureState = 104: Request capture_state(Object) -> graph::CaptureState; Dispatch, [Stream object], Never, Nothing, Nothing;
            /// Changes the dependencies of the next captured node. Trailing: nodes, edges.
            CaptureUpdate = 105: Request capture_update(graph::CaptureUpdate, rest) -> (); Dispatch, [Stream stream], Never, Nothing, Binds;
            /// Invalidates a stream's capture, so that it ends with an error.
            CaptureBreak = 106: Request capture_break(Object) -> (); Dispatch, [Stream object], Never, Nothing, Binds;
            /// No-op in stream order; the client's wait for the answer returns the first error of earlier asynchronous operations.
            Settle = 107: Request show_failure(Object) -> (); Dispatch, [Stream object], Never, Nothing, Nothing;
            /// Creates a graph.
            GraphCreate = 108: Request graph_create(graph::GraphCreate) -> Value; Dispatch, Free, Never, Nothing, Binds;
            /// Destroys a graph.
            GraphDestroy = 109: Request graph_destroy(Object) -> (); SlowSubmits, Free, Never, Nothing, [Ends object];
            /// Clones a graph.
            GraphClone = 110: Request graph_clone(Object) -> Value; SlowSubmits, Free, Never, Nothing, Binds;
            /// Finds a node's copy in a clone of its graph.
            GraphFindInClone = 111: Request graph_find_in_clone(graph::GraphPair) -> Value; SlowSubmits, Free, Never, Nothing, Binds;
            /// Lists a graph's nodes and edges. Answered with both.
            GraphList = 112: Request graph_list(graph::GraphList) -> graph::GraphListed; SlowSubmits, Free, Never, Nothing, Binds;
            /// Adds or removes dependencies. Trailing: nodes, edges.
            GraphDependencies = 113: Request graph_dependencies(graph::GraphDependencies, rest) -> (); Dispatch, Free, Never, Nothing, Binds;
            /// Adds a node to a graph, or sets a node's parameters in a graph or an instance. Trailing: nodes, edges, parameters. Answered with the graphs inside it.
            GraphNode = 114: Request graph_node(graph::GraphNode, rest) -> graph::GraphNodeAdded; SlowForGraphs, Instances, Never, Nothing, Binds;
            /// Kind and device of a node. Answered with its parameters.
            GraphNodeGet = 115: Request graph_node_get(Object) -> graph::GraphNodeIs; SlowSubmits, Free, Never, Nothing, Binds;
            /// `CUgraphNodeType` of a node.
            GraphNodeKind = 116: Request graph_node_kind(Object) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// Destroys a node.
            GraphNodeDestroy = 117: Request graph_node_destroy(Object) -> (); SlowSubmits, Free, Never, Nothing, Binds;
            /// Gets or sets an attribute of a kernel node.
            GraphAttribute = 118: Request graph_attribute(graph::GraphAttribute) -> graph::GraphAttribute; Dispatch, Free, Never, Nothing, Binds;
            /// Copies the attributes of the second kernel node to the first.
            GraphCopyAttributes = 119: Request graph_copy_attributes(graph::GraphPair) -> (); Dispatch, Free, Never, Nothing, Binds;
            /// Instantiates a graph.
            GraphInstantiate = 120: Request graph_instantiate(graph::GraphInstantiate, rest) -> graph::GraphInstantiated; SlowSubmits, [Optional stream], Always, Nothing, Binds;
            /// Destroys an instance.
            GraphExecDestroy = 121: Request graph_exec_destroy(Object) -> (); SlowSubmits, Instances, Never, Nothing, [Ends object];
            /// Flags that an instance was created with.
            GraphExecFlags = 122: Request graph_exec_flags(Object) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// Updates an instance from a graph.
            GraphExecUpdate = 123: Request graph_exec_update(graph::GraphPair) -> graph::GraphUpdated; SlowSubmits, Instances, Never, Nothing, Binds;
            /// Gets or sets whether a node of an instance is enabled.
            GraphEnabled = 124: Request graph_enabled(graph::GraphEnabled) -> graph::GraphEnabled; Dispatch, Instances, Never, Nothing, Binds;
            /// Describes a graph in DOT. Answered with a descriptor of the text.
            GraphDot = 125: Request graph_dot(graph::GraphDot, rest) -> Value; SlowSubmits, Free, Never, Nothing, Nothing;
            /// Gets, sets or trims the memory that graphs keep on a device.
            GraphMemory = 126: Request graph_memory(graph::GraphMemory) -> Value; SlowSubmits, Free, Never, Nothing, Nothing;
            /// The driver's number of a conditional handle.
            GraphCondition = 127: Request graph_condition(graph::GraphCondition) -> Value; Dispatch, Free, Never, Nothing, Binds;

            // Pools, virtual memory, managed and shared memory: [`memory`].
            /// Frees a reservation of addresses.
            AddressFree = 200: Async address_free(Range); SlowSubmits, Free, Never, Nothing, Own;
            /// Releases the handle of an allocation; its mappings stay valid.
            PhysicalRelease = 201: Async physical_release(Object); SlowSubmits, Free, Never, Nothing, Own;
            /// Destroys a pool; memory allocated from it stays valid.
            PoolDestroy = 202: Async pool_destroy(Object); SlowSubmits, Everything, Never, Nothing, Binds;
            /// Frees memory in the order of a stream.
            PoolFree = 203: Async pool_free(memory::PoolFree); Dispatch, [Stream stream], Never, Nothing, Nothing;
            /// Revokes the IPC handles of an allocation, which is being freed.
            IpcForget = 204: Async ipc_forget(Object); Dispatch, Everything, Never, Nothing, Own;
            /// Closes memory that was opened by an IPC handle.
            IpcClose = 205: Async ipc_close(Object); SlowSubmits, Everything, Never, Nothing, Own;
            /// Unregisters a file's memory.
            FileUnregister = 206: Async file_unregister(Object); Dispatch, Everything, Never, Nothing, Own;
            /// Reserves addresses.
            AddressReserve = 210: Request address_reserve(memory::AddressReserve) -> Range; SlowSubmits, Free, Never, Nothing, Own;
            /// Creates an allocation without an address.
            PhysicalCreate = 211: Request physical_create(memory::PhysicalCreate) -> (); SlowSubmits, Free, Never, Nothing, Own;
            /// Maps an allocation.
            MapMemory = 212: Request map_memory(memory::MapMemory) -> (); Dispatch, Free, Never, Nothing, Own;
            /// Unmaps addresses, when nothing in flight may touch them.
            UnmapMemory = 213: Request unmap_memory(Range) -> (); SlowSubmits, Free, Never, Nothing, Own;
            /// Sets which devices may access addresses. Trailing: [`memory::Access`]es.
            SetAccess = 214: Request set_access(memory::SetAccess, rest) -> (); SlowSubmits, Free, Never, Nothing, Own;
            /// How a device may access an address.
            GetAccess = 215: Request get_access(memory::GetAccess) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// Exports an allocation. Answered with a descriptor.
            PhysicalExport = 216: Request physical_export(memory::PhysicalExport, rest) -> (); SlowSubmits, Free, Never, Nothing, Own;
            /// Imports an allocation from a descriptor.
            PhysicalImport = 217: Request physical_import(Object, rest) -> memory::Properties; SlowSubmits, Free, Never, Nothing, Own;
            /// Another handle of the allocation that is mapped at an address.
            PhysicalRetain = 218: Request physical_retain(memory::PhysicalRetain) -> memory::Properties; SlowSubmits, Free, Never, Nothing, Own;
            /// Granularity of allocations with these properties.
            Granularity = 219: Request granularity(memory::Granularity) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// Creates a pool.
            PoolCreate = 230: Request pool_create(memory::PoolCreate) -> (); SlowSubmits, Free, Never, Nothing, Binds;
            /// Allocates memory in the order of a stream.
            PoolAlloc = 231: Request pool_alloc(memory::PoolAlloc) -> Range; Dispatch, Free, Never, Nothing, Binds;
            /// An attribute of a pool.
            PoolGetAttribute = 232: Request pool_get_attribute(memory::PoolAttribute) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// Sets an attribute of a pool.
            PoolSetAttribute = 233: Request pool_set_attribute(memory::PoolAttribute) -> (); Dispatch, Free, Never, Nothing, Binds;
            /// Sets which devices may access a pool. Trailing: [`memory::Access`]es.
            PoolSetAccess = 234: Request pool_set_access(memory::PoolAccess, rest) -> (); SlowSubmits, Free, Never, Nothing, Binds;
            /// How a device may access a pool. Trailing: a [`memory::Access`].
            PoolGetAccess = 235: Request pool_get_access(memory::PoolAccess, rest) -> Value; Dispatch, Free, Never, Nothing, Nothing;
            /// Releases a pool's unused memory down to a number of bytes.
            PoolTrim = 236: Request pool_trim(memory::PoolAttribute) -> (); SlowSubmits, Free, Never, Nothing, Nothing;
            /// Exports a pool. Answered with a descriptor.
            PoolExport = 237: Request pool_export(memory::PhysicalExport, rest) -> (); SlowSubmits, Free, Never, Nothing, Binds;
            /// Imports a pool from a descriptor.
            PoolImport = 238: Request pool_import(memory::PoolImport, rest) -> (); SlowSubmits, Free, Never, Nothing, Binds;
            /// Exports an allocation of a pool.
            PoolExportPointer = 239: Request pool_export_pointer(Object) -> memory::Opaque; SlowSubmits, Free, Never, Nothing, Binds;
            /// Imports an allocation of an imported pool.
            PoolImportPointer = 240: Request pool_import_pointer(memory::PoolImportPointer) -> Range; SlowSubmits, Free, Never, Nothing, Binds;
            /// An IPC handle of an allocation.
            IpcShare = 250: Request ipc_share(Range) -> memory::Opaque; Dispatch, Free, Never, Nothing, Own;
            /// Opens memory by an IPC handle.
            IpcOpen = 251: Request ipc_open(memory::IpcOpen) -> memory::IpcOpened; SlowSubmits, Free, Never, Nothing, Own;
            /// Registers a file's memory from a descriptor. Trailing: `FilePart`s.
            FileRegister = 252: Request file_register(memory::FileRegister, rest) -> Range; SlowSubmits, Free, Never, Nothing, Binds;
            /// Enables or disables access between devices.
            PeerAccess = 253: Request peer_access(memory::Peers) -> (); SlowSubmits, Free, Never, Nothing, [Sets owner];
            /// Exports a range of addresses. Answered with a descriptor.
            RangeHandle = 254: Request range_handle(memory::RangeHandle, rest) -> (); SlowSubmits, Free, Never, Nothing, Own;

            // Arrays, textures, two- and three-dimensional copies: [`array`].
            /// Copies in two or three dimensions, arrays too.
            CopyBox = 300: Async copy_box(array::CopyBox); Dispatch, [Stream stream], Never, [CopyBox stream], Nothing;
            /// Destroys an array or a mipmapped array.
            ArrayDestroy = 301: Async array_destroy(Object); Dispatch, Everything, Never, Nothing, Own;
            /// Destroys a texture object or a surface object.
            TextureDestroy = 302: Async texture_destroy(array::TextureDestroy); Dispatch, Everything, Never, Nothing, Own;
            /// Creates an array or a mipmapped array.
            ArrayCreate = 303: Request array_create(array::ArrayCreate) -> array::ArrayInfo; SlowSubmits, Free, Never, Nothing, Own;
            /// A level of a mipmapped array, or a plane of an array.
            ArrayPart = 304: Request array_part(array::ArrayPart) -> array::ArrayInfo; Dispatch, Free, Never, Nothing, Own;
            /// Answered with `CUDA_ARRAY_MEMORY_REQUIREMENTS`, `CUDA_ARRAY_SPARSE_PROPERTIES`.
            ArrayQuery = 305: Request array_query(array::ArrayQuery) -> (); Dispatch, Free, Never, Nothing, Nothing;
            /// Creates a texture object or a surface object.
            TextureCreate = 306: Request texture_create(array::TextureCreate) -> array::TextureInfo; Dispatch, Free, Never, Nothing, Own;
            /// Finds a texture or surface reference. Trailing: its name.
            GetReference = 307: Request get_reference(array::GetReference, rest) -> (); SlowSubmits, Free, [Variable module], Nothing, Binds;
            /// A call on a texture or surface reference.
            ReferenceCall = 308: Request reference_call(array::ReferenceArguments) -> array::ReferenceResult; SlowSubmits, Free, Never, Nothing, Binds;
            /// Encodes a tensor map.
            TensorMap = 309: Request tensor_map(array::TensorMap) -> array::TensorMapMade; Dispatch, Free, Never, Nothing, Nothing;

            // Linker, module options: [`image`].
            /// Releases the functions and variables found in a library on a device.
            ImageLeave = 400: Async image_leave(Named); Dispatch, Earlier, Never, Nothing, [Sets parent];
            /// Gets or sets an attribute of a library's kernel on a device. Trailing: its name.
            KernelAttribute = 401: Request kernel_attribute(image::KernelAttribute, rest) -> Value; SlowSubmits, Free, KernelAttribute, Nothing, [Sets library];
            /// A managed variable of a library; its address is 0 if it is known to the driver only. Trailing: its name.
            GetManaged = 402: Request get_managed(Named, rest) -> Range; SlowSubmits, Free, [Variable parent], Nothing, Nothing;
            /// Creates a linker. Trailing: options and lists.
            LinkCreate = 403: Request link_create(image::LinkCreate, rest) -> (); Slow, Free, Never, Nothing, Binds;
            /// Adds an image from a descriptor to a linker. Trailing: options and lists, its name. Answered with the logs.
            LinkAdd = 404: Request link_add(image::LinkAdd, rest) -> ImageLoaded; Slow, Free, Never, Nothing, Binds;
            /// Completes a linker. Answered with the logs.
            LinkComplete = 405: Request link_complete(Object) -> ImageLoaded; Slow, Free, Never, Nothing, Binds;
            /// The linked cubin. Answered with a descriptor.
            LinkFetch = 406: Request link_fetch(Object, rest) -> (); Slow, Free, Never, Nothing, Own;
            /// Destroys a linker.
            LinkDestroy = 407: Async link_destroy(Object); SlowSubmits, Everything, Never, Nothing, [Ends object];

            // Stream memory operations, attributes, host functions: [`stream`].
            /// Makes a stream wait until the client has run a host function.
            HostFunction = 500: Async host_function(stream::HostFunction); Dispatch, [Stream stream], Never, Nothing, Nothing;
            /// Writes a word in memory, or waits for one, in the order of a stream.
            MemOp = 501: Async mem_op(stream::MemOp); Dispatch, [Stream stream], Never, Nothing, Nothing;
            /// Sets an attribute of a stream.
            StreamAttribute = 502: Async stream_attribute(stream::StreamAttribute); Dispatch, [Stream stream], Never, Nothing, [Sets stream];
            /// An IPC handle of an event.
            EventExport = 503: Request event_export(stream::EventExport) -> stream::EventToken; Dispatch, Free, Never, Nothing, Own;
            /// Opens an event by an IPC handle.
            EventImport = 504: Request event_import(stream::EventImport) -> (); Dispatch, [Event event], Never, Nothing, Own;
            /// No-op: when it is answered, all earlier messages have been executed, or deferred in order.
            Taken = 505: Request taken(()) -> (); Dispatch, Free, Never, Nothing, Nothing;

            // Green contexts, device-wide settings: [`context`].
            /// Resources of a device, a context or a stream.
            ResourceQuery = 600: Request resource_query(context::ResourceQuery) -> context::Resource; Dispatch, Free, Never, Nothing, Own;
            /// Splits multiprocessors into groups. Answered with a [`context::Resource`] for each.
            ResourceSplit = 601: Request resource_split(context::ResourceSplit) -> context::ResourceGroups; SlowSubmits, Free, Never, Nothing, Own;
            /// Combines resources into a description for green contexts. Trailing: tokens of resources.
            ResourceJoin = 602: Request resource_join(context::ResourceJoin, rest) -> Value; SlowSubmits, Free, Never, Nothing, Own;
            /// Creates a green context.
            GreenCreate = 603: Request green_create(context::GreenCreate) -> (); SlowSubmits, Free, Always, Nothing, [Makes green];
            /// Destroys a green context whose streams have all been destroyed.
            GreenDestroy = 604: Async green_destroy(Object); Dispatch, Everything, Never, Nothing, Own;
            /// Confines the session to a part of the multiprocessors; the answer is their number.
            Confine = 605: Request confine(context::Confine) -> Value; SlowSubmits, Free, Never, Nothing, Own;
            /// Sets the client's own memory limit of a device.
            LimitMemory = 606: Async limit_memory(context::LimitMemory); Dispatch, Everything, Never, Nothing, [Sets device];
        }
    };
}

macro_rules! touch {
    ($body:ty, $kind:ident $field:ident) => {
        Touch::$kind(offset_of!($body, $field))
    };
}

macro_rules! ordering {
    ($body:ty, [Launch $field:ident]) => {
        Ordering::Launch(touch!($body, Stream $field))
    };
    ($body:ty, [Optional $field:ident]) => {
        Ordering::Optional(touch!($body, Stream $field))
    };
    ($body:ty, [$($kind:ident $field:ident),+]) => {
        Ordering::Objects(&[$(touch!($body, $kind $field)),+])
    };
    ($body:ty, $ordering:ident) => {
        Ordering::$ordering
    };
}

macro_rules! gate {
    ($body:ty, [Variable $field:ident]) => {
        Gate::Variable(offset_of!($body, $field))
    };
    ($body:ty, $gate:ident) => {
        Gate::$gate
    };
}

macro_rules! traced {
    ($body:ty, [Copy $stream:ident $len:ident]) => {
        Traced::Copy {
            stream: offset_of!($body, $stream),
            len: Some(offset_of!($body, $len)),
        }
    };
    ($body:ty, [CopyBox $stream:ident]) => {
        Traced::Copy {
            stream: offset_of!($body, $stream),
            len: None,
        }
    };
    ($body:ty, [Graph $stream:ident]) => {
        Traced::Graph {
            stream: offset_of!($body, $stream),
        }
    };
    ($body:ty, $traced:ident) => {
        Traced::$traced
    };
}

macro_rules! change {
    ($body:ty, [$kind:ident $field:ident]) => {
        Change::$kind(offset_of!($body, $field))
    };
    ($body:ty, $change:ident) => {
        Change::$change
    };
}

macro_rules! text {
    () => {
        ""
    };
    ($($text:tt)+) => {
        stringify!($($text)+)
    };
}

macro_rules! define {
    ($(
        #[doc = $doc:literal]
        $name:ident = $number:literal: $kind:ident $handler:ident($body:ty $(, $rest:ident)?) $(-> $answer:ty)?;
        $lane:ident, $ordering:tt, $gate:tt, $traced:tt, $change:tt;
    )*) => {
        /// The operation that a message requests.
        #[repr(u16)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Op { $(#[doc = $doc] $name = $number,)* }

        impl Op {
            /// All opcodes.
            pub const ALL: &'static [Op] = &[$(Op::$name,)*];
            /// The opcode of this number.
            pub fn from_u16(value: u16) -> Option<Op> {
                match value { $($number => Some(Op::$name),)* _ => None }
            }
            /// Whether the client waits for an answer.
            pub const fn kind(self) -> Kind {
                match self { $(Op::$name => Kind::$kind,)* }
            }
            /// The server thread that executes it.
            pub const fn lane(self) -> Lane {
                match self { $(Op::$name => Lane::$lane,)* }
            }
            /// Its ordering constraint against deferred messages.
            pub const fn ordering(self) -> Ordering {
                match self { $(Op::$name => ordering!($body, $ordering),)* }
            }
            /// Whether it needs a quiescent point.
            pub const fn gate(self) -> Gate {
                match self { $(Op::$name => gate!($body, $gate),)* }
            }
            /// How a trace records it.
            pub const fn traced(self) -> Traced {
                match self { $(Op::$name => traced!($body, $traced),)* }
            }
            /// Its effect on the description of its session.
            pub const fn change(self) -> Change {
                match self { $(Op::$name => change!($body, $change),)* }
            }
            /// A sentence for docs/protocol.md.
            pub const fn description(self) -> &'static str {
                match self { $(Op::$name => $doc,)* }
            }
            /// Names of the structs at the beginning of the message and of its answer.
            pub const fn structs(self) -> (&'static str, &'static str) {
                match self { $(Op::$name => (stringify!($body), text!($($answer)?)),)* }
            }
            /// Lengths of both structs, bytes.
            pub const fn lengths(self) -> (usize, usize) {
                match self { $(Op::$name => (size_of::<$body>(), 0 $(+ size_of::<$answer>())?),)* }
            }
            /// Whether further bytes may follow the body, or a descriptor may come with it.
            pub const fn has_rest(self) -> bool {
                match self { $(Op::$name => !text!($($rest)?).is_empty(),)* }
            }
        }

        $(impl Message for Number<$number> {
            type Body = $body;
        })*
    };
}

for_each_op!(define);

impl Op {
    /// Whether the client waits for an answer.
    pub const fn is_request(self) -> bool {
        matches!(self.kind(), Kind::Request)
    }

    /// Whether its content decides where and when it is executed.
    pub const fn is_judged(self) -> bool {
        !matches!(self.gate(), Gate::Never) || matches!(self.lane(), Lane::SlowForGraphs)
    }

    /// Whether it may take long or block in the driver, regardless of its content.
    pub const fn is_slow(self) -> bool {
        matches!(self.lane(), Lane::Slow | Lane::SlowSubmits)
    }
}

/// A message by its number.
#[derive(Debug)]
pub struct Number<const NUMBER: u16>;

/// The types of a message.
pub trait Message {
    /// The struct that it begins with.
    type Body;
}

/// The struct that the message of this number begins with.
pub type Body<const NUMBER: u16> = <Number<NUMBER> as Message>::Body;

/// Whether the client waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No. The first error is reported by the client's next call that waits.
    Async,
    /// Yes.
    Request,
}

/// Which thread of the server executes a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The session's dispatch thread, in a few microseconds.
    Dispatch,
    /// The slow lane; it submits nothing to a device.
    Slow,
    /// The slow lane; it may submit something.
    SlowSubmits,
    /// The slow lane if it adds a graph to a graph, which takes the driver time proportional to the graph's size;
    /// otherwise the dispatch thread.
    SlowForGraphs,
}

/// A stream or an event that a message names: the offset of its handle in the body, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// A stream.
    Stream(usize),
    /// An event that is created, destroyed or recorded.
    Event(usize),
    /// An event that is waited for or asked about.
    Read(usize),
}

/// Which earlier messages a message must not overtake while some of them are deferred because their streams wait.
///
/// A request that overtakes nothing can always be answered. That matters: the thread that waits for the answer may hold
/// a lock that a host function needs, and a stream may be waiting for that function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// None: it creates or queries an object, or releases one that is no longer in use.
    Free,
    /// Those that name one of these objects.
    Objects(&'static [Touch]),
    /// Those of its stream; all, for a launch that may name events: by attributes, or by nodes of a graph.
    Launch(Touch),
    /// Those of a stream, if it names one.
    Optional(Touch),
    /// All, if they include graph launches: an instance runs in the state it had when it was launched.
    Instances,
    /// All; it is deferred behind them, and nothing waits for it.
    Earlier,
    /// All; it stays in the ring until none is deferred, because it frees the index of a handle, which the next message
    /// may reuse.
    Everything,
}

/// Whether a message needs a quiescent point. The driver would otherwise wait for all work in flight and block every
/// other client meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// Never.
    Never,
    /// Always.
    Always,
    /// A module that is not loaded yet.
    NewModule,
    /// A function that no client has looked up yet.
    NewFunction,
    /// A variable, which requires a private instance of the image. The offset of the image's handle in the body, bytes.
    Variable(usize),
    /// An image that is not loaded yet.
    NewImage,
    /// A limit that has to be raised.
    HigherLimit,
    /// An attribute of a kernel that no instance of its library has yet.
    KernelAttribute,
    /// An attribute of a function that no instance of its image has yet.
    FunctionAttribute,
    /// A stream, if no kept stream fits.
    NewStream,
}

/// How a trace records a message. Offsets in the body, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traced {
    /// Nothing.
    Nothing,
    /// A kernel.
    Launch,
    /// A graph.
    Graph {
        /// Of the stream's handle.
        stream: usize,
    },
    /// A copy.
    Copy {
        /// Of the stream's handle.
        stream: usize,
        /// Of its length in bytes.
        len: Option<usize>,
    },
    /// A memset.
    Set,
    /// A wait of the client.
    Wait,
}

/// The effect of an executed message on the description of its session, from which the session can be re-created in
/// another context. Offsets in the body, bytes, of the object's handle; a handle of 0 names no object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    Nothing,
    /// It creates this object; executing it again re-creates the object.
    Makes(usize),
    /// It changes this object and must be executed again after the message that creates the object.
    Sets(usize),
    /// It destroys this object and all settings of it.
    Ends(usize),
    /// Its handler updates the description itself.
    Own,
    /// It may create, or destroy, an object that cannot be re-created.
    Binds,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::WRAP;
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

    /// A dispatch thread serves many sessions, so that messages that wait at the gate must run elsewhere.
    #[test]
    fn what_always_waits_is_on_the_slow_lane() {
        for op in Op::ALL {
            assert!(op.gate() != Gate::Always || op.is_slow(), "{op:?}");
        }
    }

    /// The handle of the object that is created, changed or destroyed lies inside the body.
    #[test]
    fn changes_name_an_object_inside_the_body() {
        for op in Op::ALL {
            let (Change::Makes(at) | Change::Sets(at) | Change::Ends(at)) = op.change() else {
                continue;
            };
            assert!(at + 8 <= op.lengths().0, "{op:?}");
        }
    }

    /// Deferred messages are never answered, so that requests must not be deferred.
    #[test]
    fn requests_are_not_deferred() {
        for op in Op::ALL {
            assert!(
                !op.is_request() || op.ordering() != Ordering::Earlier,
                "{op:?}"
            );
        }
    }

    #[test]
    fn an_operation_s_declaration_says_how_it_is_served() {
        // Whether it is a request, whether its content decides lane and gate, and whether it is slow.
        for (op, is_request, is_judged, is_slow) in [
            (Op::StreamAttribute, false, false, false),
            (Op::EventExport, true, false, false),
            (Op::ImageLoad, true, true, true),
            (Op::GraphNode, true, true, false),
            (Op::Confine, true, false, true),
        ] {
            let what = (op.is_request(), op.is_judged(), op.is_slow());
            assert_eq!(what, (is_request, is_judged, is_slow), "{op:?}");
        }
    }
}
