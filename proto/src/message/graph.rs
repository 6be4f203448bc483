//! Graphs and stream capture.
//!
//! Graphs, nodes and instances get their handles from the server: only it knows when the driver has made one. What a
//! node does travels as a struct of its kind ([`mpsshim_api::cuda`], [`KernelNode`]) behind the message's own, with handles
//! of this session in place of the driver's, and comes back in the same form.

use mpsshim_api::plain_structs;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

plain_structs! {
    /// `cuStreamBeginCapture`, `cuStreamBeginCaptureToGraph`.
    CaptureBegin {
        stream: u64,
        /// 0: a graph is made.
        graph: u64,
        /// Nodes behind this struct that the first captured node depends on.
        nodes: u32,
        /// Whether as many [`mpsshim_api::cuda::CUgraphEdgeData`] follow the nodes.
        edges: u32,
    }
    /// What `cuStreamGetCaptureInfo` says. `nodes` nodes follow, then as many edges if `edges` is not 0.
    CaptureState {
        id: u64,
        graph: u64,
        /// `CU_STREAM_CAPTURE_STATUS_*`.
        status: u32,
        nodes: u32,
        edges: u32,
        pad: u32,
    }
    /// `cuStreamUpdateCaptureDependencies`; what follows is as with [`CaptureBegin`].
    CaptureUpdate { stream: u64, flags: u32, nodes: u32, edges: u32, pad: u32, }
    GraphCreate { flags: u32, device: u32, }
    /// A part of a list of nodes or edges.
    GraphList {
        /// Graph or node.
        object: u64,
        /// [`list`].
        what: u32,
        /// How many to leave out.
        first: u32,
        /// How many at most, [`LIST_MOST`] or fewer.
        most: u32,
        pad: u32,
    }
    /// `part` nodes follow, then for edges as many nodes that they lead to, then for edges and dependencies as many
    /// [`mpsshim_api::cuda::CUgraphEdgeData`].
    GraphListed { total: u32, part: u32, }
    /// `count` nodes, as many that depend on them, as many edges.
    GraphDependencies { graph: u64, count: u32, remove: u32, }
    /// A node is added, or what it does is changed in its graph or in an instance of it.
    GraphNode {
        /// The graph that gets a node, or the node that is changed.
        object: u64,
        /// 0, or the instance in which the node is changed.
        exec: u64,
        /// `CU_GRAPH_NODE_TYPE_*`.
        kind: u32,
        /// Server's ordinal, of the context that the node runs in.
        device: u32,
        /// Nodes behind this struct that it depends on, then as many edges, then what it does.
        nodes: u32,
        /// [`node_flags`].
        flags: u32,
    }
    /// `graphs` graphs follow: the bodies of a conditional node, the graph of a child node.
    GraphNodeAdded {
        node: u64,
        /// Of a node that allocates memory.
        address: u64,
        graphs: u32,
        pad: u32,
    }
    /// What a kernel node does; packed parameters follow.
    KernelNode {
        /// Handle of a function or a kernel.
        function: u64,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        param_len: u32,
    }
    /// What a node that allocates memory does; [`mpsshim_api::cuda::CUmemAccessDesc`]s follow as [`Access`].
    Access { kind: u32, id: i32, flags: u32, }
    /// What a node of stream memory operations does; the operations follow, six words each.
    BatchNode { count: u32, flags: u32, }
    /// What a host node does: it gives this number, which the client knows a function by, to flag `slot + ARRIVED` of
    /// the instance's slot for the node, waits until the client has written 1 into flag `slot + RETURNED`, and clears
    /// that.
    HostNode { token: u32, pad: u32, }
    /// A captured `cuLaunchHostFunc`.
    CaptureHost { stream: u64, token: u32, pad: u32, }
    /// What is known of a node: the kind, then what it does.
    GraphNodeIs { kind: u32, device: u32, }
    /// An object and another one.
    GraphPair { first: u64, second: u64, }
    /// An attribute of a kernel node.
    GraphAttribute { node: u64, id: u32, set: u32, value: [u64; 8], }
    GraphInstantiate {
        graph: u64,
        flags: u64,
        /// 0, or where to upload.
        stream: u64,
        /// Whether as `cuGraphInstantiateWithParams`.
        with_params: u32,
        /// Slots behind this struct, `u32` each, one for each host node.
        slots: u32,
    }
    /// What came of it, success or not.
    GraphInstantiated {
        exec: u64,
        error_node: u64,
        status: u32,
        /// `CUgraphInstantiateResult`.
        result: u32,
        /// Launching it may print.
        prints: u32,
        /// Host nodes. With fewer slots than these nothing was made, and no `exec` is given.
        hosts: u32,
    }
    GraphLaunch { exec: u64, stream: u64, }
    /// What came of an update, success or not.
    GraphUpdated {
        error_node: u64,
        error_from: u64,
        status: u32,
        result: u32,
        prints: u32,
        pad: u32,
    }
    /// `cuGraphNodeGetEnabled`, `cuGraphNodeSetEnabled`.
    GraphEnabled { exec: u64, node: u64, set: u32, enabled: u32, }
    GraphDot { graph: u64, flags: u32, pad: u32, }
    /// [`graph_memory`].
    GraphMemory { value: u64, device: u32, attribute: u32, what: u32, pad: u32, }
    GraphCondition { graph: u64, device: u32, default: u32, flags: u32, pad: u32, }
}

/// Nodes or edges that one [`GraphList`] can ask for: what an answer holds.
pub const LIST_MOST: u32 = 2048;

/// Nodes or edges that one message can bring: what a message holds. Longer lists come in parts.
pub const NODES_MOST: usize = 4096;

/// What a [`GraphList`] lists.
pub mod list {
    /// Nodes of a graph.
    pub const NODES: u32 = 0;
    /// Its nodes without dependencies.
    pub const ROOTS: u32 = 1;
    /// Its edges.
    pub const EDGES: u32 = 2;
    /// What a node depends on.
    pub const DEPENDENCIES: u32 = 3;
    /// What depends on a node.
    pub const DEPENDENTS: u32 = 4;
}

/// What a [`GraphMemory`] does.
pub mod graph_memory {
    /// `cuDeviceGetGraphMemAttribute`.
    pub const GET: u32 = 0;
    /// `cuDeviceSetGraphMemAttribute`.
    pub const SET: u32 = 1;
    /// `cuDeviceGraphMemTrim`.
    pub const TRIM: u32 = 2;
}

/// What a [`GraphNode`] says besides.
pub mod node_flags {
    /// Edges follow the nodes.
    pub const EDGES: u32 = 1;
    /// The node is changed, not added.
    pub const CHANGE: u32 = 2;
}
