//! Green contexts, peers, device-wide settings. Values and layouts of `cuda.h`, CUDA 13.0.

handles! {
    CUdevResourceDesc;
}
