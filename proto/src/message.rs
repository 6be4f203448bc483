//! The structs that messages and answers begin with. [`crate::ops`] says which message has which; trailing bytes
//! (parameters, names, data) follow the struct.

use mpsshim_api::plain_structs;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use crate::ops::Op;

pub mod array;
pub mod context;
pub mod graph;
pub mod image;
pub mod memory;
pub mod stream;

plain_structs! {
    /// `cuLaunchKernel`, `cuLaunchKernelEx`, `cuLaunchCooperativeKernel`.
    Launch {
        /// Handle of a function or a kernel.
        function: u64,
        stream: u64,
        /// Blocks.
        grid: [u32; 3],
        /// Threads.
        block: [u32; 3],
        /// Bytes of dynamic shared memory per block.
        shared: u32,
        /// Bytes of packed parameters behind this struct (padded to 8).
        param_len: u32,
        /// Attributes behind the parameters.
        attributes: u32,
        /// 0; in [`Op::Clusters`]: 0 active clusters, 1 potential cluster size.
        flags: u32,
    }
    /// `cuStreamWriteValue32` of `value` into flag `slot`, in stream order.
    Mark { stream: u64, slot: u32, value: u32, }
    /// Host to device with the data in the message. Bytes.
    CopyInline { to: u64, stream: u64, len: u64, }
    /// A copy whose host side, if any, the server can reach.
    Copy {
        /// Device address, or host address in the arena, or offset in the staging area.
        to: u64,
        from: u64,
        /// Bytes.
        len: u64,
        stream: u64,
        /// [`Side`] of `to` | [`Side`] of `from` << 8, and [`SIDES_UNNAMED`].
        sides: u32,
        pad: u32,
    }
    /// Copies pieces of managed memory between a device and the host's pages behind them, in stream order. Trailing:
    /// [`Piece`]s, at most [`PIECES_MAX`].
    ManagedMove {
        stream: u64,
        /// Bytes of all pieces.
        len: u64,
        /// [`Side`] that they are copied to: `Device` or `Host`.
        to: u32,
        /// How many pieces.
        pieces: u32,
        /// Flag that is written behind the copies, or [`NO_FLAG`].
        slot: u32,
        /// Its value.
        value: u32,
    }
    /// A piece of managed memory.
    Piece {
        /// Its address on the device.
        device: u64,
        /// The address of its bytes in the host arena.
        host: u64,
        /// Bytes.
        len: u64,
    }
    /// `cuMemsetD8/16/32` and `cuMemsetD2D8/16/32`.
    Memset {
        to: u64,
        stream: u64,
        /// Elements in a row.
        width: u64,
        /// Rows, 1 for the one-dimensional ones.
        height: u64,
        /// Bytes from row to row.
        pitch: u64,
        value: u32,
        /// Bytes of an element: 1, 2 or 4.
        element: u32,
    }
    /// `cuStreamCreateWithPriority`, and the default streams of a context.
    StreamCreate {
        stream: u64,
        /// Handle of the green context it is in; 0: none.
        green: u64,
        /// Handle of the legacy default stream it is ordered against; 0: non-blocking; itself: it *is* one.
        legacy: u64,
        priority: i32,
        /// Server's ordinal.
        device: u32,
    }
    /// One object by handle.
    Object { object: u64, }
    EventCreate {
        event: u64,
        /// `CU_EVENT_*`.
        flags: u32,
        device: u32,
    }
    EventOnStream { event: u64, stream: u64, flags: u32, pad: u32, }
    MarkEvent {
        event: u64,
        /// The stream that waits for the event and writes the flag; belongs to the waiting thread.
        stream: u64,
        slot: u32,
        value: u32,
    }
    /// Addresses `[start, start + len)`.
    Range { start: u64, len: u64, }
    /// A device by the server's ordinal.
    Attach {
        device: u32,
        /// [`REPLAYS`], or 0.
        flags: u32,
    }
    MemGrant {
        /// Bytes; the server rounds up to the driver's granularity.
        len: u64,
        device: u32,
        /// [`MANAGED`]: at addresses where the client may map pages of its own; else 0.
        flags: u32,
    }
    HostAlloc {
        /// Bytes; rounded up to pages.
        len: u64,
        /// `CU_MEMHOSTALLOC_*`, or [`MANAGED`] and `CU_MEM_ATTACH_*`.
        flags: u32,
        /// Server's ordinal.
        device: u32,
    }
    /// Bytes.
    MemInfo { free: u64, total: u64, }
    /// `cuModuleLoadData(Ex)`, `cuLibraryLoadData`.
    ImageLoad {
        /// Handle of kind module or library, chosen by the client.
        image: u64,
        /// SHA-256 of the content.
        hash: [u8; 32],
        /// Bytes of the content, which comes in a descriptor with the message's token. Token 0: there is no descriptor,
        /// and the server is to use its own copy; it answers `CUDA_ERROR_NOT_FOUND` if it has none.
        len: u64,
        /// [`JitOption`]s behind this struct, then their lists.
        options: u32,
        device: u32,
        /// Bytes of log wanted.
        info_log: u32,
        error_log: u32,
        /// Pinned memory of the session for the image's managed variables; 0: none. If the image has such variables, the
        /// server answers `CUDA_ERROR_NOT_READY` and how many bytes they take.
        managed: u64,
        /// 1: the memory is all zeros, and the variables get their initial values.
        fresh: u32,
        pad: u32,
    }
    /// One `CUjit_option`.
    JitOption {
        option: u32,
        /// Bytes of a list behind all options: NUL-ended names, or addresses. 0 for a number.
        len: u32,
        /// The number, or how many entries the list has.
        value: u64,
    }
    /// Values that the compiler returned in the options, and the lengths of the logs. Bytes of the info log, then of
    /// the error log, follow.
    ImageLoaded {
        info_log: u32,
        error_log: u32,
        /// `CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES`, `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
        info_size: u32,
        error_size: u32,
        wall_time_ms: f32,
        /// `CU_JIT_THREADS_PER_BLOCK`.
        threads_per_block: u32,
        /// Bytes of a linked cubin.
        cubin: u64,
        /// Bytes of the memory for managed variables that the request lacks.
        managed: u64,
    }
    /// `cuModuleGetFunction`, `cuLibraryGetKernel` with `cuKernelGetFunction`.
    GetFunction {
        parent: u64,
        /// 0: only looks up and describes a library's kernel.
        function: u64,
        /// Device on which a library's kernel becomes a function; a module has a device already.
        device: u32,
        pad: u32,
    }
    /// An object inside a module, or inside a library on a device, by name.
    Named {
        parent: u64,
        device: u32,
        /// [`HOLDS_VARIABLES`] in [`Op::GetGlobal`], or 0.
        pad: u32,
    }
    /// A variable of a module, or of a library on a device, that the client holds in memory of its own.
    PlaceGlobal {
        parent: u64,
        /// Device memory of the session.
        start: u64,
        /// Bytes of the variable.
        len: u64,
        device: u32,
        pad: u32,
    }
    /// Data that a client needs for launches. Values of `CU_FUNC_ATTRIBUTE_*` 0 to 15, `i32::MIN` if unknown.
    FunctionInfo {
        attributes: [i32; 16],
        params: u32,
        /// [`FUNCTION_PRINTS`], [`FUNCTION_SYSTEM_SCOPE`].
        flags: u32,
    }
    /// Where a parameter lies in the packed buffer, bytes.
    Param { offset: u32, size: u32, }
    FunctionAttribute { function: u64, attribute: u32, value: i32, }
    /// A single number.
    Value { value: u64, }
    /// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags` (kind 0), `cuOccupancyAvailableDynamicSMemPerBlock`
    /// (kind 1; `shared` is the number of blocks).
    Occupancy { function: u64, shared: u64, block: i32, flags: u32, kind: u32, pad: u32, }
    Limit { value: u64, limit: u32, device: u32, }
    EventPair { start: u64, end: u64, }
    PointerQuery { pointer: u64, attribute: u32, pad: u32, }
}

/// Which memory one side of a [`Copy`] lies in.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Device address.
    Device = 0,
    /// Address in the host arena, the same in both processes.
    Host = 1,
    /// Offset in the segment's staging area.
    Staging = 2,
}

impl Launch {
    /// Blocks of the grid.
    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|count| u64::from(*count)).product()
    }
}

impl Side {
    /// The side of this number.
    pub fn from_u8(value: u8) -> Option<Side> {
        [Side::Device, Side::Host, Side::Staging]
            .into_iter()
            .find(|s| *s as u8 == value)
    }
}

/// In [`Copy::sides`]: the call was `cuMemcpyAsync`, which names no memory types; a node made from it has
/// `CU_MEMORYTYPE_UNIFIED` on both sides.
pub const SIDES_UNNAMED: u32 = 1 << 16;

/// Most pieces of a [`ManagedMove`].
pub const PIECES_MAX: usize = 8;

/// In [`ManagedMove::slot`]: no flag is written.
pub const NO_FLAG: u32 = u32::MAX;

/// Host-to-device copies up to this many bytes travel in the ring. Above it the copy from registered staging
/// memory costs the server less (1.3 µs whatever the size, against 6.2 µs for 64 KiB of unregistered memory).
pub const INLINE_COPY_MAX: usize = 4 << 10;

/// Token of marks for which no thread of the client waits when it submits them.
pub const UNAWAITED: u64 = u64::MAX;

/// In [`Attach::flags`]: the client's kernels may run again from the point where it last waited
/// ([`crate::environment::REPLAY`]).
pub const REPLAYS: u32 = 1;
/// In [`HostAlloc::flags`]: the memory is managed. `CU_MEM_ATTACH_*` flags are combined with it.
pub const MANAGED: u32 = 1 << 31;
/// In [`Named::pad`]: the client can hold a variable in memory of its own, if no code uses the variable
/// ([`Op::PlaceGlobal`]). The server answers such a variable's size, with 0 as its address.
pub const HOLDS_VARIABLES: u32 = 1;
/// In [`FunctionInfo::flags`]: the function's module may print. A client that has launched it sends [`Op::Printed`]
/// after each wait.
pub const FUNCTION_PRINTS: u32 = 1;
/// In [`FunctionInfo::flags`]: the function's code may access global or generic memory with system scope: volatile
/// accesses, atomic operations and fences that the host or other devices may see while it runs.
pub const FUNCTION_SYSTEM_SCOPE: u32 = 2;

/// Attributes that one launch may carry: twice as many as there are kinds.
pub const ATTRIBUTES_MAX: usize = 32;

/// The most bytes of kernel parameters the driver takes (CUDA 12.1 and later).
pub const PARAMS_MAX: usize = 32_764;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring;
    use zerocopy::FromZeros;

    #[test]
    fn a_grid_has_as_many_blocks_as_its_sides_give() {
        let blocks = |grid| {
            Launch {
                grid,
                ..Launch::new_zeroed()
            }
            .blocks()
        };
        assert_eq!(blocks([3, 5, 7]), 105);
        assert_eq!(blocks([1, 1, 1]), 1);
        assert_eq!(blocks([1 << 31, 65_535, 0]), 0);
        assert_eq!(blocks([i32::MAX as u32, 65_535, 1]), 140_735_340_806_145);
    }

    #[test]
    fn a_side_has_a_number_and_other_numbers_are_no_side() {
        for side in [Side::Device, Side::Host, Side::Staging] {
            assert_eq!(Side::from_u8(side as u8), Some(side));
        }
        assert_eq!(
            [0, 1, 2].map(|side| Side::from_u8(side).is_some()),
            [true; 3]
        );
        assert_eq!([3, 4, 255].map(Side::from_u8), [None; 3]);
    }

    #[test]
    fn managed_memory_is_told_by_a_flag_that_the_driver_does_not_know() {
        // `CU_MEMHOSTALLOC_*` and `CU_MEM_ATTACH_*` are 1, 2 and 4.
        assert_eq!(MANAGED & 7, 0);
        assert_eq!(MANAGED.count_ones(), 1);
    }

    #[test]
    fn the_largest_launch_and_the_largest_copy_are_one_message_each() {
        assert_eq!(INLINE_COPY_MAX, 4096);
        let copy = size_of::<CopyInline>() + INLINE_COPY_MAX;
        let launch = size_of::<Launch>() + PARAMS_MAX;
        for payload in [copy, launch] {
            assert!(ring::message_len(payload) <= ring::MAX_MESSAGE as usize);
        }
    }
}
