//! Arrays, textures, surfaces, two- and three-dimensional copies. Values and layouts of `cuda.h`, CUDA 13.0.
//!
//! Reserved words and the gaps that C leaves are fields, so that a descriptor can travel in a message as it is.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

handles! {
    CUmipmappedArray; CUtexObject; CUsurfObject; CUtexref; CUsurfref; CUexternalMemory;
}

plain_structs! {
    CUDA_MEMCPY2D {
        src_x: u64,
        src_y: u64,
        src_type: u32,
        pad0: u32,
        src_host: u64,
        src_device: u64,
        src_array: u64,
        src_pitch: u64,
        dst_x: u64,
        dst_y: u64,
        dst_type: u32,
        pad1: u32,
        dst_host: u64,
        dst_device: u64,
        dst_array: u64,
        dst_pitch: u64,
        width: u64,
        height: u64,
    }
    /// Of the same layout as `CUDA_MEMCPY3D_PEER`, which has contexts where this one has reserved words.
    CUDA_MEMCPY3D {
        src_x: u64,
        src_y: u64,
        src_z: u64,
        src_lod: u64,
        src_type: u32,
        pad0: u32,
        src_host: u64,
        src_device: u64,
        src_array: u64,
        src_context: u64,
        src_pitch: u64,
        src_height: u64,
        dst_x: u64,
        dst_y: u64,
        dst_z: u64,
        dst_lod: u64,
        dst_type: u32,
        pad1: u32,
        dst_host: u64,
        dst_device: u64,
        dst_array: u64,
        dst_context: u64,
        dst_pitch: u64,
        dst_height: u64,
        width: u64,
        height: u64,
        depth: u64,
    }
    CUDA_ARRAY_DESCRIPTOR {
        width: u64,
        height: u64,
        format: u32,
        channels: u32,
    }
    CUDA_ARRAY3D_DESCRIPTOR {
        width: u64,
        height: u64,
        depth: u64,
        format: u32,
        channels: u32,
        flags: u32,
        pad: u32,
    }
    CUDA_ARRAY_SPARSE_PROPERTIES {
        tile: [u32; 3],
        miptail_first_level: u32,
        miptail_size: u64,
        flags: u32,
        reserved: [u32; 5],
    }
    CUDA_ARRAY_MEMORY_REQUIREMENTS {
        size: u64,
        alignment: u64,
        reserved: [u32; 4],
    }
    /// The meaning of `words` depends on the kind: see `CU_RESOURCE_TYPE_*`.
    CUDA_RESOURCE_DESC {
        kind: u32,
        pad0: u32,
        words: [u64; 16],
        flags: u32,
        pad1: u32,
    }
    CUDA_TEXTURE_DESC {
        address_mode: [u32; 3],
        filter_mode: u32,
        flags: u32,
        max_anisotropy: u32,
        mipmap_filter_mode: u32,
        mipmap_level_bias: f32,
        min_mipmap_level_clamp: f32,
        max_mipmap_level_clamp: f32,
        border_color: [f32; 4],
        reserved: [u32; 12],
    }
    CUDA_RESOURCE_VIEW_DESC {
        format: u32,
        pad: u32,
        width: u64,
        height: u64,
        depth: u64,
        first_mipmap_level: u32,
        last_mipmap_level: u32,
        first_layer: u32,
        last_layer: u32,
        reserved: [u32; 16],
    }
    /// The meaning of `words` depends on the kind: address, row length, layer height, location hint of a pointer; array
    /// and offsets of an array.
    CUmemcpy3DOperand {
        kind: u32,
        pad: u32,
        words: [u64; 4],
    }
    CUDA_MEMCPY3D_BATCH_OP {
        src: CUmemcpy3DOperand,
        dst: CUmemcpy3DOperand,
        width: u64,
        height: u64,
        depth: u64,
        src_access_order: u32,
        flags: u32,
    }
}

/// No message carries it. Of a descriptor the low half of the first word of `handle` is the number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
    pub kind: u32,
    pub pad0: u32,
    pub handle: [u64; 2],
    pub size: u64,
    pub flags: u32,
    pub reserved: [u32; 16],
    pub pad1: u32,
}

/// No message carries it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC {
    pub offset: u64,
    pub array: CUDA_ARRAY3D_DESCRIPTOR,
    pub levels: u32,
    pub reserved: [u32; 16],
    pub pad: u32,
}

const _: () = {
    assert!(size_of::<CUDA_MEMCPY2D>() == 128);
    assert!(size_of::<CUDA_MEMCPY3D>() == 200);
    assert!(size_of::<CUDA_ARRAY_SPARSE_PROPERTIES>() == 48);
    assert!(size_of::<CUDA_RESOURCE_DESC>() == 144);
    assert!(size_of::<CUDA_TEXTURE_DESC>() == 104);
    assert!(size_of::<CUDA_RESOURCE_VIEW_DESC>() == 112);
    assert!(size_of::<CUDA_MEMCPY3D_BATCH_OP>() == 112);
    assert!(size_of::<CUDA_EXTERNAL_MEMORY_HANDLE_DESC>() == 104);
    assert!(size_of::<CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC>() == 120);
};

impl From<CUDA_MEMCPY2D> for CUDA_MEMCPY3D {
    /// The same copy, one slice deep.
    fn from(copy: CUDA_MEMCPY2D) -> CUDA_MEMCPY3D {
        CUDA_MEMCPY3D {
            src_x: copy.src_x,
            src_y: copy.src_y,
            src_type: copy.src_type,
            src_host: copy.src_host,
            src_device: copy.src_device,
            src_array: copy.src_array,
            src_pitch: copy.src_pitch,
            dst_x: copy.dst_x,
            dst_y: copy.dst_y,
            dst_type: copy.dst_type,
            dst_host: copy.dst_host,
            dst_device: copy.dst_device,
            dst_array: copy.dst_array,
            dst_pitch: copy.dst_pitch,
            width: copy.width,
            height: copy.height,
            depth: 1,
            ..CUDA_MEMCPY3D::default()
        }
    }
}

impl CUDA_ARRAY3D_DESCRIPTOR {
    /// Bytes of an element, where the format is made of elements.
    pub fn element_bytes(&self) -> u64 {
        let channel = match self.format {
            CU_AD_FORMAT_UNSIGNED_INT16 | CU_AD_FORMAT_SIGNED_INT16 | CU_AD_FORMAT_HALF => 2,
            CU_AD_FORMAT_UNSIGNED_INT32 | CU_AD_FORMAT_SIGNED_INT32 | CU_AD_FORMAT_FLOAT => 4,
            // CU_AD_FORMAT_UNORM_INT16X1 to X4, CU_AD_FORMAT_SNORM_INT16X1 to X4.
            0xc3..=0xc5 | 0xc9..=0xcb => 2,
            _ => 1,
        };
        channel * self.channels as u64
    }

    /// Bytes of a row, rows and slices, where the format is made of elements or of blocks of four by four.
    pub fn rows(&self) -> Option<[u64; 3]> {
        let (height, depth) = (self.height.max(1), self.depth.max(1));
        match self.format {
            // CU_AD_FORMAT_BC1_UNORM to CU_AD_FORMAT_BC7_UNORM_SRGB.
            0x91..=0x9e => {
                let block = match self.format {
                    0x91 | 0x92 | 0x97 | 0x98 => 8,
                    _ => 16,
                };
                let width = self.width.div_ceil(4).saturating_mul(block);
                Some([width, height.div_ceil(4), depth])
            }
            0x01..=0x20 | 0xc0..=0xcb => {
                let width = self.width.saturating_mul(self.element_bytes());
                Some([width, height, depth])
            }
            _ => None,
        }
    }

    /// Approximate bytes of device memory of an array of this kind with `levels` levels, each half as wide, high and
    /// deep as the one before it; 1 for an array without levels.
    pub fn bytes(&self, levels: u32) -> u64 {
        let level = |level: u32| {
            let halved = |extent: u64| extent.checked_shr(level).unwrap_or(0);
            let layered = self.flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP) != 0;
            let level = CUDA_ARRAY3D_DESCRIPTOR {
                width: halved(self.width).max(1),
                height: halved(self.height).max(self.height.min(1)),
                depth: match layered {
                    true => self.depth,
                    false => halved(self.depth).max(self.depth.min(1)),
                },
                ..*self
            };
            let elements = || {
                [
                    level.width.saturating_mul(2),
                    level.height.max(1),
                    level.depth.max(1),
                ]
            };
            let [row, rows, slices] = level.rows().unwrap_or_else(elements);
            row.saturating_mul(rows).saturating_mul(slices)
        };
        (0..levels.clamp(1, 64))
            .map(level)
            .fold(0, u64::saturating_add)
    }
}

// CUarray_format
pub const CU_AD_FORMAT_UNSIGNED_INT8: u32 = 0x01;
pub const CU_AD_FORMAT_UNSIGNED_INT16: u32 = 0x02;
pub const CU_AD_FORMAT_UNSIGNED_INT32: u32 = 0x03;
pub const CU_AD_FORMAT_SIGNED_INT8: u32 = 0x08;
pub const CU_AD_FORMAT_SIGNED_INT16: u32 = 0x09;
pub const CU_AD_FORMAT_SIGNED_INT32: u32 = 0x0a;
pub const CU_AD_FORMAT_HALF: u32 = 0x10;
pub const CU_AD_FORMAT_FLOAT: u32 = 0x20;
pub const CU_AD_FORMAT_BC1_UNORM: u32 = 0x91;
pub const CU_AD_FORMAT_NV12: u32 = 0xb0;

// Flags of an array
pub const CUDA_ARRAY3D_LAYERED: u32 = 0x01;
pub const CUDA_ARRAY3D_SURFACE_LDST: u32 = 0x02;
pub const CUDA_ARRAY3D_CUBEMAP: u32 = 0x04;
pub const CUDA_ARRAY3D_TEXTURE_GATHER: u32 = 0x08;
pub const CUDA_ARRAY3D_SPARSE: u32 = 0x40;
pub const CUDA_ARRAY3D_DEFERRED_MAPPING: u32 = 0x80;

// CUresourcetype
/// The first word is a `CUarray`.
pub const CU_RESOURCE_TYPE_ARRAY: u32 = 0;
/// The first word is a `CUmipmappedArray`.
pub const CU_RESOURCE_TYPE_MIPMAPPED_ARRAY: u32 = 1;
/// Device address; format and channels; bytes.
pub const CU_RESOURCE_TYPE_LINEAR: u32 = 2;
/// Device address; format and channels; width and height in elements; pitch in bytes.
pub const CU_RESOURCE_TYPE_PITCH2D: u32 = 3;

// CUaddress_mode
pub const CU_TR_ADDRESS_MODE_WRAP: u32 = 0;
pub const CU_TR_ADDRESS_MODE_CLAMP: u32 = 1;
pub const CU_TR_ADDRESS_MODE_BORDER: u32 = 3;
// CUfilter_mode
pub const CU_TR_FILTER_MODE_POINT: u32 = 0;
pub const CU_TR_FILTER_MODE_LINEAR: u32 = 1;
// Flags of a texture
pub const CU_TRSA_OVERRIDE_FORMAT: u32 = 0x01;
pub const CU_TRSF_READ_AS_INTEGER: u32 = 0x01;
pub const CU_TRSF_NORMALIZED_COORDINATES: u32 = 0x02;

// CUexternalMemoryHandleType
pub const CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD: u32 = 1;
// Flags of external memory
pub const CUDA_EXTERNAL_MEMORY_DEDICATED: u32 = 0x1;

// CUmemcpy3DOperandType
pub const CU_MEMCPY_OPERAND_TYPE_POINTER: u32 = 1;
pub const CU_MEMCPY_OPERAND_TYPE_ARRAY: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_counted() {
        let of = |width, height, depth, flags| CUDA_ARRAY3D_DESCRIPTOR {
            width,
            height,
            depth,
            format: CU_AD_FORMAT_FLOAT,
            channels: 1,
            flags,
            pad: 0,
        };
        assert_eq!(of(64, 0, 0, 0).bytes(1), 256);
        assert_eq!(of(4, 4, 0, 0).bytes(3), 64 + 16 + 4);
        assert_eq!(of(2, 2, 2, 0).bytes(2), 32 + 4);
        assert_eq!(of(2, 2, 6, CUDA_ARRAY3D_CUBEMAP).bytes(2), 96 + 24);
        assert_eq!(of(1, 1, 1, 0).bytes(u32::MAX), 64 * 4);
        assert_eq!(of(u64::MAX, u64::MAX, 1, 0).bytes(1), u64::MAX);
    }
}
