//! Graphs and stream capture.
//!
//! Graphs, nodes and instances get their handles from the server, because only it knows when the driver has created
//! one. A node's parameters travel as the struct of its kind ([`mpsshim_api::cuda`], [`KernelNode`]) behind the
//! message's own, with handles of this session in place of the driver's, and are returned in the same form.

use mpsshim_api::plain_structs;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

plain_structs! {
    /// `cuStreamBeginCapture`, `cuStreamBeginCaptureToGraph`.
    CaptureBegin {
        stream: u64,
        /// 0: a new graph is created.
        graph: u64,
        /// Number of nodes behind this struct that the first captured node depends on.
        nodes: u32,
        /// Whether as many [`mpsshim_api::cuda::CUgraphEdgeData`] follow the nodes.
        edges: u32,
    }
    /// Answer to `cuStreamGetCaptureInfo`. `nodes` nodes follow, then as many edges if `edges` is not 0.
    CaptureState {
        id: u64,
        graph: u64,
        /// `CU_STREAM_CAPTURE_STATUS_*`.
        status: u32,
        nodes: u32,
        edges: u32,
        pad: u32,
    }
    /// `cuStreamUpdateCaptureDependencies`. Nodes and edges follow as in [`CaptureBegin`].
    CaptureUpdate { stream: u64, flags: u32, nodes: u32, edges: u32, pad: u32, }
    GraphCreate { flags: u32, device: u32, }
    /// A part of a list of nodes or edges.
    GraphList {
        /// Graph or node.
        object: u64,
        /// [`list`].
        what: u32,
        /// Number of entries to skip.
        first: u32,
        /// Maximum number of entries, at most [`LIST_MOST`].
        most: u32,
        pad: u32,
    }
    /// `part` nodes follow; for edges, as many successors; for edges and dependencies, as many
    /// [`mpsshim_api::cuda::CUgraphEdgeData`].
    GraphListed { total: u32, part: u32, }
    /// `count` nodes follow, then as many dependents, then as many edges.
    GraphDependencies { graph: u64, count: u32, remove: u32, }
    /// Adds a node, or changes a node's parameters in its graph or in an instance of it.
    GraphNode {
        /// The graph to which a node is added, or the node that is changed.
        object: u64,
        /// 0, or the instance in which the node is changed.
        exec: u64,
        /// `CU_GRAPH_NODE_TYPE_*`.
        kind: u32,
        /// Server's ordinal, of the context that the node runs in.
        device: u32,
        /// Number of dependencies behind this struct; as many edges follow, then the node's parameters.
        nodes: u32,
        /// [`node_flags`].
        flags: u32,
    }
    /// `graphs` graphs follow: the bodies of a conditional node, or the graph of a child node.
    GraphNodeAdded {
        node: u64,
        /// Of a node that allocates memory.
        address: u64,
        graphs: u32,
        pad: u32,
    }
    /// Parameters of a kernel node; packed kernel parameters follow.
    KernelNode {
        /// Handle of a function or a kernel.
        function: u64,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        param_len: u32,
    }
    /// An access descriptor of a node that allocates memory, in place of a [`mpsshim_api::cuda::CUmemAccessDesc`].
    Access { kind: u32, id: i32, flags: u32, }
    /// Parameters of a node of stream memory operations; the operations follow, six words each.
    BatchNode { count: u32, flags: u32, }
    /// Parameters of a host node. The node writes the client's token for the function to flag `slot + ARRIVED` of the
    /// instance's slot for the node, waits until the client has written 1 to flag `slot + RETURNED`, and clears that
    /// flag.
    HostNode { token: u32, pad: u32, }
    /// A captured `cuLaunchHostFunc`.
    CaptureHost { stream: u64, token: u32, pad: u32, }
    /// A node's kind and device; its parameters follow.
    GraphNodeIs { kind: u32, device: u32, }
    /// Two objects.
    GraphPair { first: u64, second: u64, }
    /// An attribute of a kernel node.
    GraphAttribute { node: u64, id: u32, set: u32, value: [u64; 8], }
    GraphInstantiate {
        graph: u64,
        flags: u64,
        /// 0, or the stream for the upload.
        stream: u64,
        /// Whether the call was `cuGraphInstantiateWithParams`.
        with_params: u32,
        /// Number of slots behind this struct, `u32` each, one for each host node.
        slots: u32,
    }
    /// Result of an instantiation, successful or not.
    GraphInstantiated {
        exec: u64,
        error_node: u64,
        status: u32,
        /// `CUgraphInstantiateResult`.
        result: u32,
        /// Whether its kernels may print.
        prints: u32,
        /// Number of host nodes. If fewer slots were given, nothing was created and `exec` is not set.
        hosts: u32,
    }
    GraphLaunch { exec: u64, stream: u64, }
    /// Result of an update, successful or not.
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

/// Maximum number of nodes or edges of one [`GraphList`], limited by the size of an answer.
pub const LIST_MOST: u32 = 2048;

/// Maximum number of nodes or edges of one message, limited by its size. Longer lists are sent in parts.
pub const NODES_MOST: usize = 4096;

/// Contents of a [`GraphList`].
pub mod list {
    /// Nodes of a graph.
    pub const NODES: u32 = 0;
    /// Its nodes without dependencies.
    pub const ROOTS: u32 = 1;
    /// Its edges.
    pub const EDGES: u32 = 2;
    /// Dependencies of a node.
    pub const DEPENDENCIES: u32 = 3;
    /// Dependents of a node.
    pub const DEPENDENTS: u32 = 4;
}

/// Operations of [`GraphMemory`].
pub mod graph_memory {
    /// `cuDeviceGetGraphMemAttribute`.
    pub const GET: u32 = 0;
    /// `cuDeviceSetGraphMemAttribute`.
    pub const SET: u32 = 1;
    /// `cuDeviceGraphMemTrim`.
    pub const TRIM: u32 = 2;
}

/// Flags of [`GraphNode`].
pub mod node_flags {
    /// Edges follow the nodes.
    pub const EDGES: u32 = 1;
    /// The node is changed, not added.
    pub const CHANGE: u32 = 2;
}
