//! Pools, virtual memory, managed, shared and registered memory. Values and layouts of `cuda.h`, CUDA 13.0.

handles! {
    CUmemoryPool;
}
