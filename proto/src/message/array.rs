//! Arrays, textures, surfaces, two- and three-dimensional copies.

use mpsshim_api::cuda::{CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC, CUDA_TEXTURE_DESC};
use mpsshim_api::plain_structs;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

plain_structs! {
    /// A two- or three-dimensional copy whose host side, if any, the server can reach.
    CopyBox {
        to: BoxSide,
        from: BoxSide,
        /// Bytes of a row.
        width: u64,
        /// Rows of a slice.
        height: u64,
        /// Slices.
        depth: u64,
        stream: u64,
    }
    /// One side of a [`CopyBox`].
    BoxSide {
        /// Of the first byte, as in [`super::Copy`]; for an array its handle.
        address: u64,
        /// Bytes from row to row of memory.
        pitch: u64,
        /// Rows from slice to slice of memory.
        rows: u64,
        /// Where the box begins in an array: bytes, rows, slices.
        at: [u64; 3],
        /// A [`super::Side`], or [`ARRAY_SIDE`].
        side: u32,
        pad: u32,
    }
    /// `cuArrayCreate`, `cuArray3DCreate`, `cuMipmappedArrayCreate`, by the kind of the handle.
    ArrayCreate {
        array: u64,
        /// In elements.
        size: [u64; 3],
        format: u32,
        channels: u32,
        flags: u32,
        /// Of a mipmapped array.
        levels: u32,
        /// Server's ordinal.
        device: u32,
        pad: u32,
    }
    /// The properties of a created array.
    ArrayInfo {
        /// In elements.
        size: [u64; 3],
        format: u32,
        channels: u32,
        flags: u32,
        pad: u32,
    }
    /// `cuMipmappedArrayGetLevel`, `cuArrayGetPlane`, by the kind of the parent's handle.
    ArrayPart {
        parent: u64,
        /// Handle for the part, which dies with the parent.
        part: u64,
        index: u32,
        pad: u32,
    }
    /// `cuArrayGetMemoryRequirements` (kind 0), `cuArrayGetSparseProperties` (kind 1) and the same of mipmapped arrays.
    ArrayQuery { array: u64, kind: u32, device: u32, }
    /// `cuTexObjectCreate`, `cuSurfObjectCreate`. Arrays are named by handle.
    TextureCreate {
        resource: CUDA_RESOURCE_DESC,
        texture: CUDA_TEXTURE_DESC,
        view: CUDA_RESOURCE_VIEW_DESC,
        /// [`TEXTURE_HAS_VIEW`], [`TEXTURE_IS_SURFACE`].
        flags: u32,
        /// Server's ordinal.
        device: u32,
    }
    /// The properties of a created object, as the driver reports them. The array in the resource is meaningless to a
    /// client.
    TextureInfo {
        /// The driver's own value, which kernels use.
        object: u64,
        resource: CUDA_RESOURCE_DESC,
        texture: CUDA_TEXTURE_DESC,
        view: CUDA_RESOURCE_VIEW_DESC,
    }
    /// `cuTexObjectDestroy`, `cuSurfObjectDestroy`.
    TextureDestroy { object: u64, flags: u32, pad: u32, }
    /// `cuModuleGetTexRef`, `cuModuleGetSurfRef`, by the kind of the handle chosen for it; `cuTexRefCreate` without a
    /// module. The name follows.
    GetReference { module: u64, reference: u64, device: u32, pad: u32, }
    /// A call on a texture or surface reference. [`ReferenceCall`] defines `call` and the meaning of the words.
    ReferenceArguments { reference: u64, words: [u64; 6], call: u32, pad: u32, }
    /// `cuTensorMapEncode…`, `cuTensorMapReplaceAddress`: [`TensorMapCall`] says which.
    TensorMap {
        /// The map whose address is replaced.
        map: [u64; 16],
        address: u64,
        /// In elements.
        size: [u64; 8],
        /// Bytes.
        strides: [u64; 8],
        tile: [u32; 8],
        element_strides: [u32; 8],
        lower: [i32; 4],
        upper: [i32; 4],
        channels: u32,
        pixels: u32,
        data_type: u32,
        rank: u32,
        interleave: u32,
        swizzle: u32,
        promotion: u32,
        fill: u32,
        mode: u32,
        call: u32,
        /// Server's ordinal.
        device: u32,
        pad: u32,
    }
    /// A `CUtensorMap`.
    TensorMapMade { map: [u64; 16], }
    /// Results of a call on a reference.
    ReferenceResult { words: [u64; 4], }
}

/// In [`BoxSide::side`]: an array.
pub const ARRAY_SIDE: u32 = 16;

/// In [`TextureCreate::flags`]: the view was given.
pub const TEXTURE_HAS_VIEW: u32 = 1;
/// In [`TextureCreate::flags`] and [`TextureDestroy::flags`]: a surface object, which has a resource only.
pub const TEXTURE_IS_SURFACE: u32 = 2;

/// Dimensions that a tensor map may have.
pub const TENSOR_RANK_MAX: usize = 5;

macro_rules! calls {
    ($(#[$whole:meta])* $calls:ident; $($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        $(#[$whole])*
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $calls { $($(#[$doc])* $name = $number,)* }

        impl $calls {
            /// The call of this number.
            pub fn from_u32(value: u32) -> Option<$calls> {
                match value { $($number => Some($calls::$name),)* _ => None }
            }
        }
    };
}

calls! {
    /// Calls that make or change a tensor map.
    TensorMapCall;
    /// `cuTensorMapEncodeTiled`.
    Tiled = 0,
    /// `cuTensorMapEncodeIm2col`.
    Im2col = 1,
    /// `cuTensorMapEncodeIm2colWide`.
    Im2colWide = 2,
    /// `cuTensorMapReplaceAddress`.
    ReplaceAddress = 3,
}

calls! {
    /// Calls on texture and surface references. Floats travel as their bits.
    ReferenceCall;
    /// `cuTexRefDestroy`.
    Destroy = 0,
    /// Array, flags.
    SetArray = 1,
    /// Mipmapped array, flags.
    SetMipmappedArray = 2,
    /// Address, bytes -> offset.
    SetAddress = 3,
    /// Address, pitch, width, height, format and channels << 32.
    SetAddress2D = 4,
    /// Format, channels.
    SetFormat = 5,
    /// Dimension, mode.
    SetAddressMode = 6,
    /// Mode.
    SetFilterMode = 7,
    /// Mode.
    SetMipmapFilterMode = 8,
    /// Bias.
    SetMipmapLevelBias = 9,
    /// Least, most.
    SetMipmapLevelClamp = 10,
    /// Ratio.
    SetMaxAnisotropy = 11,
    /// Four floats, two in a word.
    SetBorderColor = 12,
    /// Flags.
    SetFlags = 13,
    /// -> address.
    GetAddress = 14,
    /// -> array.
    GetArray = 15,
    /// -> mipmapped array.
    GetMipmappedArray = 16,
    /// Dimension -> mode.
    GetAddressMode = 17,
    /// -> mode.
    GetFilterMode = 18,
    /// -> format, channels.
    GetFormat = 19,
    /// -> mode.
    GetMipmapFilterMode = 20,
    /// -> bias.
    GetMipmapLevelBias = 21,
    /// -> least, most.
    GetMipmapLevelClamp = 22,
    /// -> ratio.
    GetMaxAnisotropy = 23,
    /// -> four floats, two in a word.
    GetBorderColor = 24,
    /// -> flags.
    GetFlags = 25,
    /// `cuSurfRefSetArray`: array, flags.
    SurfaceSetArray = 26,
    /// `cuSurfRefGetArray` -> array.
    SurfaceGetArray = 27,
}
