//! The linker and JIT inputs. Values and layouts of `cuda.h`, CUDA 13.0.

/// `CU_JIT_INPUT_*` of `cuLinkAddData`: a cubin.
pub const CU_JIT_INPUT_CUBIN: u32 = 0;
/// As above: PTX text.
pub const CU_JIT_INPUT_PTX: u32 = 1;
/// How many kinds of input there are.
pub const CU_JIT_NUM_INPUT_TYPES: u32 = 6;

// CUjit_option
pub const CU_JIT_MAX_REGISTERS: u32 = 0;
pub const CU_JIT_THREADS_PER_BLOCK: u32 = 1;
pub const CU_JIT_WALL_TIME: u32 = 2;
pub const CU_JIT_INFO_LOG_BUFFER: u32 = 3;
pub const CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: u32 = 4;
pub const CU_JIT_ERROR_LOG_BUFFER: u32 = 5;
pub const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: u32 = 6;
pub const CU_JIT_OPTIMIZATION_LEVEL: u32 = 7;
pub const CU_JIT_TARGET_FROM_CUCONTEXT: u32 = 8;
pub const CU_JIT_TARGET: u32 = 9;
pub const CU_JIT_LOG_VERBOSE: u32 = 12;
pub const CU_JIT_GLOBAL_SYMBOL_NAMES: u32 = 17;
pub const CU_JIT_GLOBAL_SYMBOL_ADDRESSES: u32 = 18;
pub const CU_JIT_GLOBAL_SYMBOL_COUNT: u32 = 19;
pub const CU_JIT_REFERENCED_KERNEL_NAMES: u32 = 25;
pub const CU_JIT_REFERENCED_KERNEL_COUNT: u32 = 26;
pub const CU_JIT_REFERENCED_VARIABLE_NAMES: u32 = 27;
pub const CU_JIT_REFERENCED_VARIABLE_COUNT: u32 = 28;
pub const CU_JIT_NUM_OPTIONS: u32 = 35;
