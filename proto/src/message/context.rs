//! Green contexts, peers, device-wide settings.

use mpsshim_api::plain_structs;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Groups of multiprocessors that one split gives, and resources of one description, at most: more than any device has
/// multiprocessors.
pub const MAX_GROUPS: u32 = 1024;

plain_structs! {
    /// `cuDeviceGetDevResource` (`green` is 0), `cuGreenCtxGetDevResource`.
    ResourceQuery {
        green: u64,
        /// Server's ordinal.
        device: u32,
        /// `CU_DEV_RESOURCE_TYPE_*`.
        kind: u32,
    }
    /// A resource as a client sees it; the driver's own structure, which holds addresses, stays in the server.
    Resource {
        /// Its index in the session's list.
        token: u32,
        /// Multiprocessors.
        count: u32,
        /// Minimum number of multiprocessors of a part.
        least: u32,
        alignment: u32,
    }
    /// `cuDevSmResourceSplitByCount`.
    ResourceSplit {
        token: u32,
        /// Its multiprocessors according to the program.
        count: u32,
        groups: u32,
        /// Bit mask of the results requested: 1 the groups, 2 the remainder.
        wanted: u32,
        flags: u32,
        least: u32,
    }
    /// Number of groups, and the remainder of the split.
    ResourceGroups { groups: u32, pad: u32, remaining: Resource, }
    /// `cuDevResourceGenerateDesc`. `count` tokens follow.
    ResourceJoin { count: u32, device: u32, }
    /// Restricts the session to a part of a device.
    Confine {
        /// Handle of a green context that represents it.
        green: u64,
        device: u32,
        /// Percentage of the multiprocessors in hundredths of a percent.
        hundredths: u32,
    }
    /// A limit, in bytes, that the client sets on its own use of a device's memory.
    LimitMemory { device: u32, pad: u32, bytes: u64, }
    /// `cuGreenCtxCreate`.
    GreenCreate {
        green: u64,
        /// Answer of [`super::Op::ResourceJoin`] plus 1; 0: the whole device.
        description: u32,
        device: u32,
        flags: u32,
        pad: u32,
    }
}
