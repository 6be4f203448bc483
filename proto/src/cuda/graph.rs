//! Graphs and stream capture. Values and layouts of `cuda.h`, CUDA 13.0.

handles! {
    CUgraphNode; CUuserObject; CUgraphDeviceNode;
}
