//! The linker and what else concerns code.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

wire! {
    /// `cuKernelGetAttribute` (`set` is 0), `cuKernelSetAttribute`, where the kernel is no function yet.
    KernelAttribute { library: u64, device: u32, attribute: u32, set: u32, value: i32, }
}
