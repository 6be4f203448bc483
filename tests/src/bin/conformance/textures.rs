//! What kernels see through texture and surface objects, and the references of old modules.

use super::arrays::{element, resource, solid};
use super::*;

const SAMPLING: &str = concat!(include_str!("../../../fixtures/textures.ptx"), "\0");
const REFERENCES: &str = concat!(
    include_str!("../../../fixtures/texture-references.ptx"),
    "\0"
);

struct Sampler {
    module: CUmodule,
    out: CUdeviceptr,
}

impl Sampler {
    fn run(&self, name: &str, threads: u32, object: u64, extra: f32) -> Vec<f32> {
        let mut function = CUfunction::NULL;
        let text = CString::new(name).expect("no NUL");
        must!(
            cuModuleGetFunction,
            &mut function,
            self.module,
            text.as_ptr()
        );
        must!(cuMemsetD8_v2, self.out, 0u8, 4096usize);
        let (mut out, mut object, mut extra) = (self.out, object, extra);
        let mut params: [*mut c_void; 3] = [
            (&raw mut out).cast(),
            (&raw mut object).cast(),
            (&raw mut extra).cast(),
        ];
        must!(
            cuLaunchKernel,
            function,
            1u32,
            1u32,
            1u32,
            threads,
            1u32,
            1u32,
            0u32,
            CUstream::NULL,
            params.as_mut_ptr(),
            null_mut::<*mut c_void>()
        );
        must!(cuCtxSynchronize);
        let mut values = vec![0f32; threads as usize];
        must!(
            cuMemcpyDtoH_v2,
            values.as_mut_ptr(),
            self.out,
            values.len() * 4
        );
        values
    }
}

fn texture(filter: u32, mode: u32, flags: u32) -> CUDA_TEXTURE_DESC {
    CUDA_TEXTURE_DESC {
        address_mode: [mode; 3],
        filter_mode: filter,
        flags,
        border_color: [-1.0; 4],
        max_mipmap_level_clamp: 10.0,
        ..Default::default()
    }
}

fn object(resource: CUDA_RESOURCE_DESC, texture: CUDA_TEXTURE_DESC) -> u64 {
    let mut object = CUtexObject::NULL;
    must!(
        cuTexObjectCreate,
        &mut object,
        &resource,
        &texture,
        null::<CUDA_RESOURCE_VIEW_DESC>()
    );
    object.0
}

fn upload(array: u64, values: &[f32], width: u64, height: u64, depth: u64) {
    let copy = CUDA_MEMCPY3D {
        src_type: CU_MEMORYTYPE_HOST,
        src_host: values.as_ptr() as u64,
        src_pitch: width * 4,
        src_height: height,
        dst_type: CU_MEMORYTYPE_ARRAY,
        dst_array: array,
        width: width * 4,
        height: height.max(1),
        depth: depth.max(1),
        ..Default::default()
    };
    must!(cuMemcpy3D_v2, &copy);
}

pub fn textures(_: &Setup) {
    let mut module = CUmodule::NULL;
    must!(cuModuleLoadData, &mut module, SAMPLING.as_ptr());
    let sampler = Sampler {
        module,
        out: alloc(4096),
    };
    let (point, linear) = (CU_TR_FILTER_MODE_POINT, CU_TR_FILTER_MODE_LINEAR);
    let (clamp, wrap, border) = (
        CU_TR_ADDRESS_MODE_CLAMP,
        CU_TR_ADDRESS_MODE_WRAP,
        CU_TR_ADDRESS_MODE_BORDER,
    );
    let float = (CU_AD_FORMAT_FLOAT, 1);
    let values: Vec<f32> = (0..16 * 8 * 4).map(|i| i as f32 * 0.5).collect();
    let destroy = |object: u64| must!(cuTexObjectDestroy, object);
    // Two dimensions.
    let mut flat = CUarray::NULL;
    must!(
        cuArray3DCreate_v2,
        &mut flat,
        &solid((16, 8, 0), float, CUDA_ARRAY3D_SURFACE_LDST)
    );
    upload(flat.0, &values, 16, 8, 1);
    let of_flat = resource(CU_RESOURCE_TYPE_ARRAY, &[flat.0]);
    for (what, description) in [
        ("2D, point", texture(point, clamp, 0)),
        ("2D, linear", texture(linear, clamp, 0)),
        ("2D, linear, border", texture(linear, border, 0)),
        (
            "2D, normalised",
            texture(linear, wrap, CU_TRSF_NORMALIZED_COORDINATES),
        ),
    ] {
        let object = object(of_flat, description);
        say!(what, "{:?}", sampler.run("sample_2d", 10, object, 3.25));
        destroy(object);
    }
    // Other layouts.
    let mut line = CUarray::NULL;
    must!(cuArray3DCreate_v2, &mut line, &solid((16, 0, 0), float, 0));
    upload(line.0, &values, 16, 1, 1);
    let seen = object(
        resource(CU_RESOURCE_TYPE_ARRAY, &[line.0]),
        texture(linear, clamp, 0),
    );
    say!("1D", "{:?}", sampler.run("sample_1d", 6, seen, 0.75));
    destroy(seen);
    let mut cube = CUarray::NULL;
    must!(cuArray3DCreate_v2, &mut cube, &solid((16, 8, 4), float, 0));
    upload(cube.0, &values, 16, 8, 4);
    let seen = object(
        resource(CU_RESOURCE_TYPE_ARRAY, &[cube.0]),
        texture(linear, clamp, 0),
    );
    say!("3D", "{:?}", sampler.run("sample_3d", 6, seen, 1.5));
    destroy(seen);
    let mut layers = CUarray::NULL;
    must!(
        cuArray3DCreate_v2,
        &mut layers,
        &solid((16, 8, 4), float, CUDA_ARRAY3D_LAYERED)
    );
    upload(layers.0, &values, 16, 8, 4);
    let seen = object(
        resource(CU_RESOURCE_TYPE_ARRAY, &[layers.0]),
        texture(point, clamp, 0),
    );
    say!("layers", "{:?}", sampler.run("sample_layers", 4, seen, 2.5));
    destroy(seen);
    let mut mipmap = CUmipmappedArray::NULL;
    must!(
        cuMipmappedArrayCreate,
        &mut mipmap,
        &solid((16, 8, 0), float, 0),
        3u32
    );
    for level in 0..3u32 {
        let mut array = CUarray::NULL;
        must!(cuMipmappedArrayGetLevel, &mut array, mipmap, level);
        let filled = vec![level as f32 * 10.0; 128];
        upload(array.0, &filled, 16 >> level, 8 >> level, 1);
    }
    let mut description = texture(linear, clamp, CU_TRSF_NORMALIZED_COORDINATES);
    description.mipmap_filter_mode = linear;
    let seen = object(
        resource(CU_RESOURCE_TYPE_MIPMAPPED_ARRAY, &[mipmap.0]),
        description,
    );
    say!("levels", "{:?}", sampler.run("sample_levels", 5, seen, 0.5));
    destroy(seen);
    let memory = alloc(1 << 14);
    must!(cuMemcpyHtoD_v2, memory, values.as_ptr(), values.len() * 4);
    let (format, whole) = (element(CU_AD_FORMAT_FLOAT, 1), texture(point, clamp, 0));
    let seen = object(
        resource(CU_RESOURCE_TYPE_LINEAR, &[memory, format, 256]),
        whole,
    );
    say!("linear memory", "{:?}", sampler.run("fetch", 6, seen, 0.0));
    destroy(seen);
    let seen = object(
        resource(CU_RESOURCE_TYPE_PITCH2D, &[memory, format, 16, 4, 512]),
        texture(linear, clamp, 0),
    );
    say!(
        "pitched memory",
        "{:?}",
        sampler.run("sample_2d", 6, seen, 1.5)
    );
    destroy(seen);
    // A surface, written and read.
    let mut surface = CUsurfObject::NULL;
    must!(cuSurfObjectCreate, &mut surface, &of_flat);
    sampler.run("write_surface", 8, surface.0, 100.0);
    say!(
        "surface",
        "{:?}",
        sampler.run("read_surface", 8, surface.0, 0.0)
    );
    must!(cuSurfObjectDestroy, surface);
    let seen = object(of_flat, texture(point, clamp, 0));
    say!(
        "what it wrote",
        "{:?}",
        sampler.run("sample_2d", 6, seen, 0.5)
    );
    destroy(seen);
    for array in [flat, line, cube, layers] {
        must!(cuArrayDestroy, array);
    }
    must!(cuMipmappedArrayDestroy, mipmap);
    free(memory);
    free(sampler.out);
    must!(cuModuleUnload, module);
}

/// The texture and surface references that modules had before there were objects.
pub fn texture_references(setup: &Setup) {
    let mut made = CUtexref::NULL;
    say!(
        "create",
        "{} {}",
        cu!(cuTexRefCreate, &mut made),
        !made.is_null()
    );
    say!(
        "create without a place",
        "{}",
        cu!(cuTexRefCreate, null_mut::<CUtexref>())
    );
    let mut found = CUtexref::NULL;
    say!(
        "reference of a module without",
        "{}",
        cu!(
            cuModuleGetTexRef,
            &mut found,
            setup.module,
            c"picture".as_ptr()
        )
    );
    let mut surface = CUsurfref::NULL;
    say!(
        "surface of a module without",
        "{}",
        cu!(
            cuModuleGetSurfRef,
            &mut surface,
            setup.module,
            c"canvas".as_ptr()
        )
    );
    let mut module = CUmodule::NULL;
    let result = cu!(cuModuleLoadData, &mut module, REFERENCES.as_ptr());
    say!("module with references", "{result}");
    if result.is_ok() {
        say!(
            "texture reference",
            "{} {}",
            cu!(cuModuleGetTexRef, &mut found, module, c"picture".as_ptr()),
            !found.is_null()
        );
        say!(
            "surface reference",
            "{} {}",
            cu!(cuModuleGetSurfRef, &mut surface, module, c"canvas".as_ptr()),
            !surface.is_null()
        );
        say!(
            "a name there is not",
            "{}",
            cu!(cuModuleGetTexRef, &mut made, module, c"missing".as_ptr())
        );
        say!(
            "no name",
            "{}",
            cu!(cuModuleGetTexRef, &mut made, module, null::<c_char>())
        );
    }
    let reference = if found.is_null() { made } else { found };
    if reference.is_null() {
        return;
    }
    settings(reference);
    let mut array = CUarray::NULL;
    must!(
        cuArray3DCreate_v2,
        &mut array,
        &solid((16, 0, 0), (CU_AD_FORMAT_FLOAT, 1), 2)
    );
    let values: Vec<f32> = (0..16).map(|i| i as f32 * 2.0 + 1.0).collect();
    must!(cuMemcpyHtoA_v2, array, 0usize, values.as_ptr(), 64usize);
    let result = cu!(cuTexRefSetArray, reference, array, CU_TRSA_OVERRIDE_FORMAT);
    let mut back = CUarray::NULL;
    let got = cu!(cuTexRefGetArray, &mut back, reference);
    say!("array", "{result} {got} {}", back == array);
    say!(
        "array without the flag",
        "{}",
        cu!(cuTexRefSetArray, reference, array, 0u32)
    );
    say!(
        "array NULL",
        "{}",
        cu!(cuTexRefSetArray, reference, CUarray::NULL, 1u32)
    );
    if !found.is_null() {
        let _ = cu!(cuTexRefSetArray, reference, array, CU_TRSA_OVERRIDE_FORMAT);
        let result = cu!(cuSurfRefSetArray, surface, array, 0u32);
        let got = cu!(cuSurfRefGetArray, &mut back, surface);
        say!("surface's array", "{result} {got} {}", back == array);
        let mut function = CUfunction::NULL;
        must!(cuModuleGetFunction, &mut function, module, c"look".as_ptr());
        say!(
            "cuParamSetTexRef",
            "{}",
            cu!(cuParamSetTexRef, function, -1 as c_int, reference)
        );
        let out = alloc(256);
        must!(cuMemsetD8_v2, out, 0u8, 256usize);
        let mut out_ = out;
        let params = &mut [(&raw mut out_).cast()];
        let result = launch_function(function, (1, 8, 0), CUstream::NULL, params);
        let mut seen = vec![0f32; 8];
        must!(cuCtxSynchronize);
        must!(cuMemcpyDtoH_v2, seen.as_mut_ptr(), out, 32usize);
        say!("what a kernel sees", "{result} {seen:?}");
        free(out);
        say!("destroy of a module's", "{}", cu!(cuTexRefDestroy, found));
    }
    if !made.is_null() {
        say!("destroy", "{}", cu!(cuTexRefDestroy, made));
    }
    say!("destroy NULL", "{}", cu!(cuTexRefDestroy, CUtexref::NULL));
    must!(cuArrayDestroy, array);
    if !module.is_null() {
        must!(cuModuleUnload, module);
    }
}

fn settings(reference: CUtexref) {
    let memory = alloc(1 << 16);
    let mut offset = 77usize;
    let result = cu!(
        cuTexRefSetAddress_v2,
        &mut offset,
        reference,
        memory,
        4096usize
    );
    let mut address = 0u64;
    let got = cu!(cuTexRefGetAddress_v2, &mut address, reference);
    say!("address", "{result} {offset} {got} {}", address == memory);
    let result = cu!(
        cuTexRefSetAddress_v2,
        &mut offset,
        reference,
        memory + 16,
        4096usize
    );
    say!("address at 16", "{result} {offset}");
    let result = cu!(
        cuTexRefSetAddress_v2,
        null_mut::<usize>(),
        reference,
        memory + 16,
        4096usize
    );
    say!("address at 16, no place for the offset", "{result}");
    say!(
        "address that is none",
        "{}",
        cu!(
            cuTexRefSetAddress_v2,
            &mut offset,
            reference,
            16u64,
            4096usize
        )
    );
    say!(
        "address of nothing",
        "{}",
        cu!(cuTexRefSetAddress_v2, &mut offset, reference, 0u64, 0usize)
    );
    let descriptor = CUDA_ARRAY_DESCRIPTOR {
        width: 32,
        height: 8,
        format: CU_AD_FORMAT_FLOAT,
        channels: 1,
    };
    say!(
        "address in two dimensions",
        "{}",
        cu!(
            cuTexRefSetAddress2D_v3,
            reference,
            &descriptor,
            memory,
            512usize
        )
    );
    say!(
        "address in two dimensions, pitch 100",
        "{}",
        cu!(
            cuTexRefSetAddress2D_v3,
            reference,
            &descriptor,
            memory,
            100usize
        )
    );
    let result = cu!(cuTexRefSetFormat, reference, CU_AD_FORMAT_FLOAT, 1 as c_int);
    let (mut format, mut channels) = (0u32, 0 as c_int);
    let got = cu!(cuTexRefGetFormat, &mut format, &mut channels, reference);
    say!("format", "{result} {got} {format:#x} {channels}");
    say!(
        "format 0",
        "{}",
        cu!(cuTexRefSetFormat, reference, 0u32, 1 as c_int)
    );
    say!(
        "three channels",
        "{}",
        cu!(cuTexRefSetFormat, reference, CU_AD_FORMAT_FLOAT, 3 as c_int)
    );
    let result = cu!(
        cuTexRefSetAddressMode,
        reference,
        0 as c_int,
        CU_TR_ADDRESS_MODE_CLAMP
    );
    let mut mode = 9u32;
    let got = cu!(cuTexRefGetAddressMode, &mut mode, reference, 0 as c_int);
    say!("address mode", "{result} {got} {mode}");
    say!(
        "address mode of dimension 3",
        "{}",
        cu!(cuTexRefSetAddressMode, reference, 3 as c_int, 0u32)
    );
    let result = cu!(cuTexRefSetFilterMode, reference, CU_TR_FILTER_MODE_POINT);
    let got = cu!(cuTexRefGetFilterMode, &mut mode, reference);
    say!("filter mode", "{result} {got} {mode}");
    say!(
        "filter mode 7",
        "{}",
        cu!(cuTexRefSetFilterMode, reference, 7u32)
    );
    let result = cu!(
        cuTexRefSetMipmapFilterMode,
        reference,
        CU_TR_FILTER_MODE_LINEAR
    );
    let got = cu!(cuTexRefGetMipmapFilterMode, &mut mode, reference);
    say!("mipmap filter mode", "{result} {got} {mode}");
    let result = cu!(cuTexRefSetMipmapLevelBias, reference, 0.5f32);
    let (mut bias, mut least, mut most) = (0f32, 0f32, 0f32);
    let got = cu!(cuTexRefGetMipmapLevelBias, &mut bias, reference);
    say!("mipmap level bias", "{result} {got} {bias}");
    let result = cu!(cuTexRefSetMipmapLevelClamp, reference, 0.25f32, 3.5f32);
    let got = cu!(
        cuTexRefGetMipmapLevelClamp,
        &mut least,
        &mut most,
        reference
    );
    say!("mipmap level clamp", "{result} {got} {least} {most}");
    let result = cu!(cuTexRefSetMaxAnisotropy, reference, 4u32);
    let mut anisotropy = 0 as c_int;
    let got = cu!(cuTexRefGetMaxAnisotropy, &mut anisotropy, reference);
    say!("anisotropy", "{result} {got} {anisotropy}");
    let mut colour = [1f32, 2.0, 3.0, 4.0];
    let result = cu!(cuTexRefSetBorderColor, reference, colour.as_mut_ptr());
    let mut back = [0f32; 4];
    let got = cu!(cuTexRefGetBorderColor, back.as_mut_ptr(), reference);
    say!("border colour", "{result} {got} {back:?}");
    let result = cu!(cuTexRefSetFlags, reference, CU_TRSF_NORMALIZED_COORDINATES);
    let mut flags = 0u32;
    let got = cu!(cuTexRefGetFlags, &mut flags, reference);
    say!("flags", "{result} {got} {flags}");
    say!(
        "flags 0x100",
        "{}",
        cu!(cuTexRefSetFlags, reference, 0x100u32)
    );
    let _ = cu!(cuTexRefSetFlags, reference, 0u32);
    let mut mipmap = CUmipmappedArray::NULL;
    let descriptor = solid((16, 16, 0), (CU_AD_FORMAT_FLOAT, 1), 0);
    must!(cuMipmappedArrayCreate, &mut mipmap, &descriptor, 3u32);
    let result = cu!(
        cuTexRefSetMipmappedArray,
        reference,
        mipmap,
        CU_TRSA_OVERRIDE_FORMAT
    );
    let mut seen = CUmipmappedArray::NULL;
    let got = cu!(cuTexRefGetMipmappedArray, &mut seen, reference);
    say!("mipmap", "{result} {got} {}", seen == mipmap);
    let mut array = CUarray::NULL;
    say!(
        "array of a mipmap",
        "{}",
        cu!(cuTexRefGetArray, &mut array, reference)
    );
    say!(
        "flags without a place",
        "{}",
        cu!(cuTexRefGetFlags, null_mut::<u32>(), reference)
    );
    say!(
        "flags of NULL",
        "{}",
        cu!(cuTexRefGetFlags, &mut flags, CUtexref::NULL)
    );
    say!(
        "flags for NULL",
        "{}",
        cu!(cuTexRefSetFlags, CUtexref::NULL, 0u32)
    );
    // The reference must let go of both before they end.
    let _ = cu!(cuTexRefSetMaxAnisotropy, reference, 0u32);
    must!(cuMipmappedArrayDestroy, mipmap);
    free(memory);
}
