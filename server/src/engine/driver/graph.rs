//! Graphs and stream capture.

use super::{DriverError, symbol, unsupported};
use mpsshim_proto::cuda::*;
use std::ffi::c_void;

functions! {
    /// Graphs and stream capture. A driver may lack any of them: it then answers `CUDA_ERROR_NOT_SUPPORTED`.
    GraphFunctions, |_| true;
    graph_create = "cuGraphCreate" (graph: &mut CUgraph, flags: u32);
}
