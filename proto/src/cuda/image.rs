//! The linker and what else concerns code. Values and layouts of `cuda.h`, CUDA 13.0.

/// `CU_JIT_INPUT_*` of `cuLinkAddData`: a cubin.
pub const CU_JIT_INPUT_CUBIN: u32 = 0;
/// As above: PTX text.
pub const CU_JIT_INPUT_PTX: u32 = 1;
