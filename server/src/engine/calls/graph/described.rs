//! Parameters of nodes in the driver's form.

use crate::engine::base::graph_templates::Size;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::PARAMS_MAX;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Maximum number of stream memory operations in a node: the driver's own limit.
pub const OPERATIONS_MOST: u32 = 256;
/// Number of stream memory operations in a host node: notify the client, wait for it, clear its flag.
pub const HOST_OPERATIONS: usize = 3;
/// Maximum number of access descriptors of an allocation.
pub const ACCESS_MOST: u64 = 64;

/// Parameters of a node in the driver's form, and the data that they point to. The addresses in `params` lead into the
/// vectors' buffers, which do not move.
pub struct Described {
    pub params: CUgraphNodeParams,
    pub(super) _bytes: Vec<u8>,
    pub(super) _pointers: Vec<u64>,
    pub(super) _operations: Vec<[u64; 6]>,
    pub(super) _access: Vec<CUmemAccessDesc>,
    /// Whether a kernel in the node may print.
    pub(super) prints: bool,
    /// Size of the graph inside the node.
    pub(super) inside: Size,
    /// Image or event to which the graph refers.
    pub(super) refers: Option<u64>,
}

/// Offset and size of each parameter of a function. Packed parameters would work too, but not with every attribute that
/// a node may get later.
pub fn layout(shared: &Shared, function: CUfunction) -> Vec<(usize, usize)> {
    let mut layout = Vec::new();
    let (mut offset, mut size) = (0, 0);
    while shared
        .gpu
        .driver
        .func_get_param_info(function, layout.len(), &mut offset, &mut size)
        .is_ok()
        && offset + size <= PARAMS_MAX
    {
        layout.push((offset, size));
    }
    layout
}

impl Described {
    /// Makes it a host node, which for the driver is a node of stream memory operations.
    pub fn host(&mut self, operations: [[u64; 6]; HOST_OPERATIONS], context: CUcontext) {
        self._operations = operations.to_vec();
        self.params.kind = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
        let batch = CUDA_BATCH_MEM_OP_NODE_PARAMS {
            context: context.0,
            count: HOST_OPERATIONS as u32,
            operations: self._operations.as_ptr() as u64,
            ..CUDA_BATCH_MEM_OP_NODE_PARAMS::default()
        };
        into_words(&mut self.params, &batch);
    }

    /// A node for which the driver makes a copy of a child graph.
    pub fn child(graph: CUgraph) -> Described {
        let mut described = Described::new(CU_GRAPH_NODE_TYPE_GRAPH);
        let body = CUDA_CHILD_GRAPH_NODE_PARAMS {
            graph: graph.0,
            ..CUDA_CHILD_GRAPH_NODE_PARAMS::default()
        };
        into_words(&mut described.params, &body);
        described
    }

    pub fn new(kind: u32) -> Described {
        Described {
            params: CUgraphNodeParams {
                kind,
                ..CUgraphNodeParams::default()
            },
            _bytes: Vec::new(),
            _pointers: Vec::new(),
            _operations: Vec::new(),
            _access: Vec::new(),
            prints: false,
            inside: Size::default(),
            refers: None,
        }
    }
}

pub fn into_words<T: IntoBytes + Immutable>(params: &mut CUgraphNodeParams, body: &T) {
    let bytes = body.as_bytes();
    params.words.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
}

pub fn out_of_words<T: FromBytes + IntoBytes>(params: &CUgraphNodeParams) -> T {
    let mut body = T::new_zeroed();
    let len = size_of::<T>();
    body.as_mut_bytes()
        .copy_from_slice(&params.words.as_bytes()[..len]);
    body
}
