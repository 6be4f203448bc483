//! Arrays, textures, surfaces, two- and three-dimensional copies.

use crate::engine::base::driver::symbols::{DriverError, Find, unsupported};
use mpsshim_api::cuda::*;
use std::ffi::{c_char, c_int, c_void};

functions! {
    /// Arrays, textures, surfaces, two- and three-dimensional copies.
    /// A function that the driver lacks returns `CUDA_ERROR_NOT_SUPPORTED`.
    ArrayFunctions, |_| true;
    memcpy3d_async = "cuMemcpy3DAsync_v2" (copy: &CUDA_MEMCPY3D, stream: CUstream);
    array3d_create = "cuArray3DCreate_v2" (array: &mut CUarray, descriptor: &CUDA_ARRAY3D_DESCRIPTOR);
    array3d_get_descriptor = "cuArray3DGetDescriptor_v2" (descriptor: &mut CUDA_ARRAY3D_DESCRIPTOR, array: CUarray);
    array_destroy = "cuArrayDestroy" (array: CUarray);
    array_get_plane = "cuArrayGetPlane" (plane: &mut CUarray, array: CUarray, index: u32);
    array_get_memory_requirements = "cuArrayGetMemoryRequirements" (requirements: &mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUarray, device: CUdevice);
    array_get_sparse_properties = "cuArrayGetSparseProperties" (properties: &mut CUDA_ARRAY_SPARSE_PROPERTIES, array: CUarray);
    mipmapped_array_create = "cuMipmappedArrayCreate" (array: &mut CUmipmappedArray, descriptor: &CUDA_ARRAY3D_DESCRIPTOR, levels: u32);
    mipmapped_array_destroy = "cuMipmappedArrayDestroy" (array: CUmipmappedArray);
    mipmapped_array_get_level = "cuMipmappedArrayGetLevel" (level: &mut CUarray, array: CUmipmappedArray, index: u32);
    mipmapped_array_get_memory_requirements = "cuMipmappedArrayGetMemoryRequirements" (requirements: &mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUmipmappedArray, device: CUdevice);
    mipmapped_array_get_sparse_properties = "cuMipmappedArrayGetSparseProperties" (properties: &mut CUDA_ARRAY_SPARSE_PROPERTIES, array: CUmipmappedArray);
    import_external_memory = "cuImportExternalMemory" (memory: &mut CUexternalMemory, descriptor: &CUDA_EXTERNAL_MEMORY_HANDLE_DESC);
    destroy_external_memory = "cuDestroyExternalMemory" (memory: CUexternalMemory);
    external_mipmapped_array = "cuExternalMemoryGetMappedMipmappedArray" (array: &mut CUmipmappedArray, memory: CUexternalMemory, descriptor: &CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC);
    tex_object_create = "cuTexObjectCreate" (object: &mut CUtexObject, resource: &CUDA_RESOURCE_DESC, texture: &CUDA_TEXTURE_DESC, view: *const CUDA_RESOURCE_VIEW_DESC);
    tex_object_destroy = "cuTexObjectDestroy" (object: CUtexObject);
    tex_object_get_resource_desc = "cuTexObjectGetResourceDesc" (resource: &mut CUDA_RESOURCE_DESC, object: CUtexObject);
    tex_object_get_texture_desc = "cuTexObjectGetTextureDesc" (texture: &mut CUDA_TEXTURE_DESC, object: CUtexObject);
    tex_object_get_resource_view_desc = "cuTexObjectGetResourceViewDesc" (view: &mut CUDA_RESOURCE_VIEW_DESC, object: CUtexObject);
    surf_object_create = "cuSurfObjectCreate" (object: &mut CUsurfObject, resource: &CUDA_RESOURCE_DESC);
    surf_object_destroy = "cuSurfObjectDestroy" (object: CUsurfObject);
    tensor_map_encode_tiled = "cuTensorMapEncodeTiled" (map: *mut c_void, data_type: u32, rank: u32, address: u64, size: *const u64, strides: *const u64, tile: *const u32, element_strides: *const u32, interleave: u32, swizzle: u32, promotion: u32, fill: u32);
    tensor_map_encode_im2col = "cuTensorMapEncodeIm2col" (map: *mut c_void, data_type: u32, rank: u32, address: u64, size: *const u64, strides: *const u64, lower: *const i32, upper: *const i32, channels: u32, pixels: u32, element_strides: *const u32, interleave: u32, swizzle: u32, promotion: u32, fill: u32);
    tensor_map_encode_im2col_wide = "cuTensorMapEncodeIm2colWide" (map: *mut c_void, data_type: u32, rank: u32, address: u64, size: *const u64, strides: *const u64, lower: i32, upper: i32, channels: u32, pixels: u32, element_strides: *const u32, interleave: u32, mode: u32, swizzle: u32, promotion: u32, fill: u32);
    tensor_map_replace_address = "cuTensorMapReplaceAddress" (map: *mut c_void, address: u64);
    module_get_tex_ref = "cuModuleGetTexRef" (reference: &mut CUtexref, module: CUmodule, name: *const c_char);
    module_get_surf_ref = "cuModuleGetSurfRef" (reference: &mut CUsurfref, module: CUmodule, name: *const c_char);
    tex_ref_create = "cuTexRefCreate" (reference: &mut CUtexref);
    tex_ref_destroy = "cuTexRefDestroy" (reference: CUtexref);
    tex_ref_set_array = "cuTexRefSetArray" (reference: CUtexref, array: CUarray, flags: u32);
    tex_ref_set_mipmapped_array = "cuTexRefSetMipmappedArray" (reference: CUtexref, array: CUmipmappedArray, flags: u32);
    tex_ref_set_address = "cuTexRefSetAddress_v2" (offset: *mut usize, reference: CUtexref, address: CUdeviceptr, len: usize);
    tex_ref_set_address_2d = "cuTexRefSetAddress2D_v3" (reference: CUtexref, descriptor: &CUDA_ARRAY_DESCRIPTOR, address: CUdeviceptr, pitch: usize);
    tex_ref_set_format = "cuTexRefSetFormat" (reference: CUtexref, format: u32, channels: c_int);
    tex_ref_set_address_mode = "cuTexRefSetAddressMode" (reference: CUtexref, dimension: c_int, mode: u32);
    tex_ref_set_filter_mode = "cuTexRefSetFilterMode" (reference: CUtexref, mode: u32);
    tex_ref_set_mipmap_filter_mode = "cuTexRefSetMipmapFilterMode" (reference: CUtexref, mode: u32);
    tex_ref_set_mipmap_level_bias = "cuTexRefSetMipmapLevelBias" (reference: CUtexref, bias: f32);
    tex_ref_set_mipmap_level_clamp = "cuTexRefSetMipmapLevelClamp" (reference: CUtexref, least: f32, most: f32);
    tex_ref_set_max_anisotropy = "cuTexRefSetMaxAnisotropy" (reference: CUtexref, ratio: u32);
    tex_ref_set_border_color = "cuTexRefSetBorderColor" (reference: CUtexref, colour: *mut f32);
    tex_ref_set_flags = "cuTexRefSetFlags" (reference: CUtexref, flags: u32);
    tex_ref_get_address = "cuTexRefGetAddress_v2" (address: &mut CUdeviceptr, reference: CUtexref);
    tex_ref_get_array = "cuTexRefGetArray" (array: &mut CUarray, reference: CUtexref);
    tex_ref_get_mipmapped_array = "cuTexRefGetMipmappedArray" (array: &mut CUmipmappedArray, reference: CUtexref);
    tex_ref_get_address_mode = "cuTexRefGetAddressMode" (mode: &mut u32, reference: CUtexref, dimension: c_int);
    tex_ref_get_filter_mode = "cuTexRefGetFilterMode" (mode: &mut u32, reference: CUtexref);
    tex_ref_get_format = "cuTexRefGetFormat" (format: &mut u32, channels: &mut c_int, reference: CUtexref);
    tex_ref_get_mipmap_filter_mode = "cuTexRefGetMipmapFilterMode" (mode: &mut u32, reference: CUtexref);
    tex_ref_get_mipmap_level_bias = "cuTexRefGetMipmapLevelBias" (bias: &mut f32, reference: CUtexref);
    tex_ref_get_mipmap_level_clamp = "cuTexRefGetMipmapLevelClamp" (least: &mut f32, most: &mut f32, reference: CUtexref);
    tex_ref_get_max_anisotropy = "cuTexRefGetMaxAnisotropy" (ratio: &mut c_int, reference: CUtexref);
    tex_ref_get_border_color = "cuTexRefGetBorderColor" (colour: *mut f32, reference: CUtexref);
    tex_ref_get_flags = "cuTexRefGetFlags" (flags: &mut u32, reference: CUtexref);
    surf_ref_set_array = "cuSurfRefSetArray" (reference: CUsurfref, array: CUarray, flags: u32);
    surf_ref_get_array = "cuSurfRefGetArray" (array: &mut CUarray, reference: CUsurfref);
}
