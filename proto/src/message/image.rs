//! The linker and attributes of kernels.

use mpsshim_api::plain_structs;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum number of options of a load or link; there are fewer kinds.
pub const MAX_OPTIONS: u32 = 64;
/// Maximum bytes of each log that a load or link returns; two fit an answer.
pub const MAX_LOG: u32 = 24 << 10;

plain_structs! {
    /// `cuKernelGetAttribute` (`set` is 0), `cuKernelSetAttribute`, where the kernel is no function yet.
    KernelAttribute { library: u64, device: u32, attribute: u32, set: u32, value: i32, }
    /// `cuLinkCreate`.
    LinkCreate {
        link: u64,
        device: u32,
        /// [`super::JitOption`]s behind this struct, then their lists.
        options: u32,
        /// Bytes of log wanted.
        info_log: u32,
        error_log: u32,
    }
    /// `cuLinkAddData`, `cuLinkAddFile`.
    LinkAdd {
        link: u64,
        /// Bytes of the data.
        len: u64,
        /// `CU_JIT_INPUT_*`.
        kind: u32,
        options: u32,
    }
}
