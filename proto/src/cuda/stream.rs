//! Stream memory operations, stream attributes, host functions. Values and layouts of `cuda.h`, CUDA 13.0.

handles! {
    CUasyncCallbackHandle;
}
