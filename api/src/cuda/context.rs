//! Green contexts, peers, device-wide settings. Values and layouts of `cuda.h`, CUDA 13.0.

handles! {
    CUdevResourceDesc;
}

/// `CUdevResource`: 144 bytes, of which programs read the first and those about multiprocessors.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUdevResource {
    pub kind: u32,
    pub internal: [u8; 92],
    /// Multiprocessors, how many a part has at the least, and their alignment.
    pub sm: [u32; 3],
    pub rest: [u8; 36],
}

impl CUdevResource {
    /// `CU_DEV_RESOURCE_TYPE_INVALID`.
    pub const INVALID: CUdevResource = CUdevResource {
        kind: 0,
        internal: [0; 92],
        sm: [0; 3],
        rest: [0; 36],
    };
}

const _: () = assert!(size_of::<CUdevResource>() == 144);

pub const CU_DEV_RESOURCE_TYPE_SM: u32 = 1;
/// The one flag of `cuGreenCtxCreate`, and required.
pub const CU_GREEN_CTX_DEFAULT_STREAM: u32 = 1;
