//! Green contexts, peers, device-wide settings.

use mpsshim_api::plain_structs;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

plain_structs! {
    /// `cuDeviceGetDevResource` (`green` is 0), `cuGreenCtxGetDevResource`.
    ResourceQuery {
        green: u64,
        /// Server's ordinal.
        device: u32,
        /// `CU_DEV_RESOURCE_TYPE_*`.
        kind: u32,
    }
    /// A resource as a client knows it; the driver's own structure, which holds addresses, stays in the server.
    Resource {
        /// Its place in the session's list.
        token: u32,
        /// Multiprocessors.
        count: u32,
        /// Multiprocessors that a part of it has at the least.
        least: u32,
        alignment: u32,
    }
    /// `cuDevSmResourceSplitByCount`.
    ResourceSplit {
        token: u32,
        /// Multiprocessors that it has as the program says.
        count: u32,
        groups: u32,
        /// 1: the groups are wanted, 2: what remains is wanted.
        wanted: u32,
        flags: u32,
        least: u32,
    }
    /// How many groups there are, and what remains.
    ResourceGroups { groups: u32, pad: u32, remaining: Resource, }
    /// `cuDevResourceGenerateDesc`: so many tokens follow.
    ResourceJoin { count: u32, device: u32, }
    /// A part of a device for one context.
    Confine {
        /// Handle of a green context that stands for it.
        green: u64,
        device: u32,
        /// Percentage of the multiprocessors in hundredths of a percent.
        hundredths: u32,
    }
    /// The client lets itself have no more memory of a device than so many bytes.
    LimitMemory { device: u32, pad: u32, bytes: u64, }
    /// `cuGreenCtxCreate`.
    GreenCreate {
        green: u64,
        /// What [`super::Op::ResourceJoin`] gave, and 1; 0: the whole device.
        description: u32,
        device: u32,
        flags: u32,
        pad: u32,
    }
}
