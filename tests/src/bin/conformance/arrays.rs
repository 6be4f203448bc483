//! Arrays, mipmapped arrays, texture and surface objects, as far as no kernel looks at them.

use super::*;

pub fn solid(
    size: (u64, u64, u64),
    (format, channels): (u32, u32),
    flags: u32,
) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        width: size.0,
        height: size.1,
        depth: size.2,
        format,
        channels,
        flags,
        pad: 0,
    }
}

const FLOAT: (u32, u32) = (CU_AD_FORMAT_FLOAT, 1);
const LAYERED: u32 = CUDA_ARRAY3D_LAYERED;
const CUBEMAP: u32 = CUDA_ARRAY3D_CUBEMAP;
const SURFACE: u32 = CUDA_ARRAY3D_SURFACE_LDST;
const GATHER: u32 = CUDA_ARRAY3D_TEXTURE_GATHER;

fn shown(d: &CUDA_ARRAY3D_DESCRIPTOR) -> String {
    format!(
        "{}x{}x{} format {:#x} channels {} flags {:#x}",
        d.width, d.height, d.depth, d.format, d.channels, d.flags
    )
}

pub fn arrays(setup: &Setup) {
    for (what, width, height, format, channels) in [
        ("one dimension", 100u64, 0u64, CU_AD_FORMAT_FLOAT, 1u32),
        ("two dimensions", 100, 50, CU_AD_FORMAT_UNSIGNED_INT8, 4),
        ("half floats", 10, 10, CU_AD_FORMAT_HALF, 2),
        ("width 0", 0, 10, CU_AD_FORMAT_FLOAT, 1),
        ("three channels", 10, 10, CU_AD_FORMAT_FLOAT, 3),
        ("no channels", 10, 10, CU_AD_FORMAT_FLOAT, 0),
        ("five channels", 10, 10, CU_AD_FORMAT_FLOAT, 5),
        ("format 0", 10, 10, 0, 1),
        ("format 0x7f", 10, 10, 0x7f, 1),
        ("too wide", 1 << 30, 0, CU_AD_FORMAT_FLOAT, 1),
        ("too high", 10, 1 << 30, CU_AD_FORMAT_FLOAT, 1),
    ] {
        let descriptor = CUDA_ARRAY_DESCRIPTOR {
            width,
            height,
            format,
            channels,
        };
        let mut array = CUarray(7);
        let result = cu!(cuArrayCreate_v2, &mut array, &descriptor);
        if !result.is_ok() {
            say!(what, "{result} {}", array.0);
            continue;
        }
        let mut back = CUDA_ARRAY_DESCRIPTOR::default();
        let got = cu!(cuArrayGetDescriptor_v2, &mut back, array);
        let mut full = solid((9, 9, 9), (9, 9), 9);
        let full_got = cu!(cuArray3DGetDescriptor_v2, &mut full, array);
        say!(
            what,
            "{result} {got} {} {full_got} {}",
            back == descriptor,
            shown(&full)
        );
        say!(format!("{what}: destroy"), "{}", cu!(cuArrayDestroy, array));
    }
    for (what, descriptor) in [
        ("3D", solid((16, 8, 4), FLOAT, 0)),
        ("3D without height", solid((16, 0, 4), FLOAT, 0)),
        ("3D array of 2D", solid((16, 8, 0), FLOAT, 0)),
        ("3D array of 1D", solid((16, 0, 0), FLOAT, SURFACE)),
        ("layers of 1D", solid((16, 0, 3), FLOAT, LAYERED)),
        ("layers of 2D", solid((16, 8, 3), FLOAT, LAYERED | SURFACE)),
        ("no layers", solid((16, 8, 0), FLOAT, LAYERED)),
        ("cubemap", solid((8, 8, 6), FLOAT, CUBEMAP)),
        ("cubemap of 5", solid((8, 8, 5), FLOAT, CUBEMAP)),
        (
            "cubemap that is no square",
            solid((8, 9, 6), FLOAT, CUBEMAP),
        ),
        (
            "cubemap layers",
            solid((8, 8, 12), FLOAT, CUBEMAP | LAYERED),
        ),
        (
            "cubemap layers of 7",
            solid((8, 8, 7), FLOAT, CUBEMAP | LAYERED),
        ),
        ("gather", solid((8, 8, 0), FLOAT, GATHER)),
        ("gather of 3D", solid((8, 8, 8), FLOAT, GATHER)),
        ("gather of 1D", solid((8, 0, 0), FLOAT, GATHER)),
        ("unknown flag", solid((8, 8, 0), FLOAT, 1 << 20)),
        ("too deep", solid((8, 8, 1 << 20), FLOAT, 0)),
        ("too many layers", solid((8, 8, 1 << 20), FLOAT, LAYERED)),
    ] {
        let mut array = CUarray(7);
        let result = cu!(cuArray3DCreate_v2, &mut array, &descriptor);
        if !result.is_ok() {
            say!(what, "{result} {}", array.0);
            continue;
        }
        let mut back = CUDA_ARRAY3D_DESCRIPTOR::default();
        let got = cu!(cuArray3DGetDescriptor_v2, &mut back, array);
        let mut flat = CUDA_ARRAY_DESCRIPTOR::default();
        let flat_got = cu!(cuArrayGetDescriptor_v2, &mut flat, array);
        say!(
            what,
            "{result} {got} {} {flat_got} {}x{}",
            back == descriptor,
            flat.width,
            flat.height
        );
        must!(cuArrayDestroy, array);
    }
    let mut array = CUarray::NULL;
    let descriptor = solid((64, 64, 0), FLOAT, SURFACE);
    say!(
        "no place for the array",
        "{}",
        cu!(cuArray3DCreate_v2, null_mut::<CUarray>(), &descriptor)
    );
    say!(
        "no descriptor",
        "{}",
        cu!(
            cuArray3DCreate_v2,
            &mut array,
            null::<CUDA_ARRAY3D_DESCRIPTOR>()
        )
    );
    say!(
        "no descriptor, two dimensions",
        "{}",
        cu!(
            cuArrayCreate_v2,
            &mut array,
            null::<CUDA_ARRAY_DESCRIPTOR>()
        )
    );
    must!(cuArray3DCreate_v2, &mut array, &descriptor);
    say!(
        "no place for the descriptor",
        "{}",
        cu!(
            cuArray3DGetDescriptor_v2,
            null_mut::<CUDA_ARRAY3D_DESCRIPTOR>(),
            array
        )
    );
    let mut requirements = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
    let result = cu!(
        cuArrayGetMemoryRequirements,
        &mut requirements,
        array,
        setup.device
    );
    say!("memory requirements", "{result} {}", requirements.size);
    let mut sparse = CUDA_ARRAY_SPARSE_PROPERTIES::default();
    say!(
        "sparse properties of an array that is not",
        "{}",
        cu!(cuArrayGetSparseProperties, &mut sparse, array)
    );
    let mut plane = CUarray::NULL;
    say!(
        "plane of an array that has none",
        "{}",
        cu!(cuArrayGetPlane, &mut plane, array, 0u32)
    );
    say!("destroy", "{}", cu!(cuArrayDestroy, array));
    say!("destroy NULL", "{}", cu!(cuArrayDestroy, CUarray::NULL));
    let mut back = CUDA_ARRAY3D_DESCRIPTOR::default();
    say!(
        "descriptor of NULL",
        "{}",
        cu!(cuArray3DGetDescriptor_v2, &mut back, CUarray::NULL)
    );
    say!(
        "memory requirements of NULL",
        "{}",
        cu!(
            cuArrayGetMemoryRequirements,
            &mut requirements,
            CUarray::NULL,
            setup.device
        )
    );
}

/// Arrays of other kinds: block compressed, sparse, mapped later, with planes.
pub fn array_kinds(setup: &Setup) {
    let mut requirements = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
    let mut sparse = CUDA_ARRAY_SPARSE_PROPERTIES::default();
    let mut array = CUarray::NULL;
    let descriptor = solid((16, 16, 0), (CU_AD_FORMAT_BC1_UNORM, 4), 0);
    let result = cu!(cuArray3DCreate_v2, &mut array, &descriptor);
    say!("block compressed", "{result}");
    let from: Vec<u8> = (0..128).collect();
    let mut copy = CUDA_MEMCPY2D {
        src_type: CU_MEMORYTYPE_HOST,
        src_host: from.as_ptr() as u64,
        src_pitch: 32,
        dst_type: CU_MEMORYTYPE_ARRAY,
        dst_array: array.0,
        width: 32,
        height: 4,
        ..Default::default()
    };
    say!("copy of its blocks", "{}", cu!(cuMemcpy2D_v2, &copy));
    copy.height = 5;
    say!("copy of too many", "{}", cu!(cuMemcpy2D_v2, &copy));
    must!(cuArrayDestroy, array);
    let mut deferred = CUarray::NULL;
    let result = cu!(
        cuArray3DCreate_v2,
        &mut deferred,
        &solid((64, 64, 0), FLOAT, CUDA_ARRAY3D_DEFERRED_MAPPING)
    );
    say!("deferred mapping", "{result}");
    if result.is_ok() {
        let result = cu!(
            cuArrayGetMemoryRequirements,
            &mut requirements,
            deferred,
            setup.device
        );
        let (size, alignment) = (requirements.size, requirements.alignment);
        say!(
            "its memory requirements",
            "{result} {} {}",
            size >= 64 * 64 * 4,
            alignment.is_power_of_two()
        );
        say!("destroy", "{}", cu!(cuArrayDestroy, deferred));
    }
    let mut tiled = CUarray::NULL;
    let result = cu!(
        cuArray3DCreate_v2,
        &mut tiled,
        &solid((1024, 1024, 0), FLOAT, CUDA_ARRAY3D_SPARSE)
    );
    say!("sparse", "{result}");
    if result.is_ok() {
        let result = cu!(cuArrayGetSparseProperties, &mut sparse, tiled);
        say!("its properties", "{result} {:?}", sparse.tile);
        say!("destroy", "{}", cu!(cuArrayDestroy, tiled));
    }
    let mut mipmap = CUmipmappedArray::NULL;
    let descriptor = solid((1024, 1024, 0), FLOAT, CUDA_ARRAY3D_SPARSE);
    let result = cu!(cuMipmappedArrayCreate, &mut mipmap, &descriptor, 5u32);
    say!("sparse mipmap", "{result}");
    if result.is_ok() {
        let result = cu!(cuMipmappedArrayGetSparseProperties, &mut sparse, mipmap);
        say!("its properties", "{result} {:?}", sparse.tile);
        let result = cu!(
            cuMipmappedArrayGetMemoryRequirements,
            &mut requirements,
            mipmap,
            setup.device
        );
        say!(
            "its memory requirements",
            "{result} {}",
            requirements.size > 0
        );
        must!(cuMipmappedArrayDestroy, mipmap);
    }
    for (channels, flags) in [(3u32, 0u32), (3, 0x100), (1, 0x100), (3, SURFACE), (2, 0)] {
        planes(channels, flags);
    }
}

fn planes(channels: u32, flags: u32) {
    let mut plane = CUarray::NULL;
    let mut planar = CUarray::NULL;
    let result = cu!(
        cuArray3DCreate_v2,
        &mut planar,
        &solid((64, 32, 0), (CU_AD_FORMAT_NV12, channels), flags)
    );
    say!(
        format!("planar, {channels} channels, flags {flags:#x}"),
        "{result}"
    );
    if result.is_ok() {
        for index in 0..3u32 {
            let result = cu!(cuArrayGetPlane, &mut plane, planar, index);
            let mut back = CUDA_ARRAY3D_DESCRIPTOR::default();
            if result.is_ok() {
                must!(cuArray3DGetDescriptor_v2, &mut back, plane);
            }
            say!(format!("plane {index}"), "{result} {}", shown(&back));
        }
        say!("destroy", "{}", cu!(cuArrayDestroy, planar));
    }
}

pub fn mipmaps(setup: &Setup) {
    for (what, descriptor, levels) in [
        ("2D", solid((64, 32, 0), FLOAT, 0), 3u32),
        ("2D, all levels", solid((64, 32, 0), FLOAT, SURFACE), 7),
        ("2D, too many levels", solid((64, 32, 0), FLOAT, 0), 20),
        ("1D", solid((33, 0, 0), FLOAT, 0), 4),
        ("3D", solid((16, 16, 16), FLOAT, 0), 4),
        ("layers", solid((16, 16, 3), FLOAT, LAYERED), 2),
        ("cubemap", solid((16, 16, 6), FLOAT, CUBEMAP), 5),
        ("no levels", solid((64, 32, 0), FLOAT, 0), 0),
        ("no width", solid((0, 32, 0), FLOAT, 0), 1),
        (
            "three channels",
            solid((32, 32, 0), (CU_AD_FORMAT_FLOAT, 3), 0),
            1,
        ),
    ] {
        let mut mipmap = CUmipmappedArray(7);
        let result = cu!(cuMipmappedArrayCreate, &mut mipmap, &descriptor, levels);
        if !result.is_ok() {
            say!(what, "{result} {}", mipmap.0);
            continue;
        }
        let mut sizes = Vec::new();
        for level in 0..9u32 {
            let mut array = CUarray::NULL;
            let result = cu!(cuMipmappedArrayGetLevel, &mut array, mipmap, level);
            if !result.is_ok() {
                sizes.push(format!("{result}"));
                break;
            }
            let mut back = CUDA_ARRAY3D_DESCRIPTOR::default();
            must!(cuArray3DGetDescriptor_v2, &mut back, array);
            sizes.push(format!(
                "{}x{}x{}/{:#x}",
                back.width, back.height, back.depth, back.flags
            ));
        }
        say!(what, "{result} {}", sizes.join(" "));
        must!(cuMipmappedArrayDestroy, mipmap);
    }
    let mut mipmap = CUmipmappedArray::NULL;
    let descriptor = solid((64, 64, 0), FLOAT, 0);
    say!(
        "no place for it",
        "{}",
        cu!(
            cuMipmappedArrayCreate,
            null_mut::<CUmipmappedArray>(),
            &descriptor,
            1u32
        )
    );
    say!(
        "no descriptor",
        "{}",
        cu!(
            cuMipmappedArrayCreate,
            &mut mipmap,
            null::<CUDA_ARRAY3D_DESCRIPTOR>(),
            1u32
        )
    );
    must!(cuMipmappedArrayCreate, &mut mipmap, &descriptor, 4u32);
    let (mut first, mut again) = (CUarray::NULL, CUarray::NULL);
    must!(cuMipmappedArrayGetLevel, &mut first, mipmap, 1u32);
    must!(cuMipmappedArrayGetLevel, &mut again, mipmap, 1u32);
    say!("the same level", "{}", first == again);
    let from: Vec<u8> = (0..32 * 32 * 4).map(|i| (i * 5 + i / 100) as u8).collect();
    let mut copy = CUDA_MEMCPY2D {
        src_type: CU_MEMORYTYPE_HOST,
        src_host: from.as_ptr() as u64,
        src_pitch: 128,
        dst_type: CU_MEMORYTYPE_ARRAY,
        dst_array: first.0,
        width: 128,
        height: 32,
        ..Default::default()
    };
    say!("copy to a level", "{}", cu!(cuMemcpy2D_v2, &copy));
    let mut back = vec![0u8; from.len()];
    copy = CUDA_MEMCPY2D {
        src_type: CU_MEMORYTYPE_ARRAY,
        src_array: first.0,
        dst_type: CU_MEMORYTYPE_HOST,
        dst_host: back.as_mut_ptr() as u64,
        dst_pitch: 128,
        width: 128,
        height: 32,
        ..Default::default()
    };
    let result = cu!(cuMemcpy2D_v2, &copy);
    say!("and back", "{result} {}", back == from);
    let mut requirements = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
    say!(
        "memory requirements",
        "{}",
        cu!(
            cuMipmappedArrayGetMemoryRequirements,
            &mut requirements,
            mipmap,
            setup.device
        )
    );
    let mut sparse = CUDA_ARRAY_SPARSE_PROPERTIES::default();
    say!(
        "sparse properties",
        "{}",
        cu!(cuMipmappedArrayGetSparseProperties, &mut sparse, mipmap)
    );
    say!(
        "no place for the level",
        "{}",
        cu!(
            cuMipmappedArrayGetLevel,
            null_mut::<CUarray>(),
            mipmap,
            0u32
        )
    );
    say!("destroy", "{}", cu!(cuMipmappedArrayDestroy, mipmap));
    say!(
        "destroy NULL",
        "{}",
        cu!(cuMipmappedArrayDestroy, CUmipmappedArray::NULL)
    );
    say!(
        "level of NULL",
        "{}",
        cu!(
            cuMipmappedArrayGetLevel,
            &mut first,
            CUmipmappedArray::NULL,
            0u32
        )
    );
}

/// A resource of an array, or of device memory.
pub fn resource(kind: u32, words: &[u64]) -> CUDA_RESOURCE_DESC {
    let mut descriptor = CUDA_RESOURCE_DESC {
        kind,
        ..Default::default()
    };
    descriptor.words[..words.len()].copy_from_slice(words);
    descriptor
}

/// Format and channels as they stand in a resource descriptor.
pub fn element(format: u32, channels: u32) -> u64 {
    format as u64 | (channels as u64) << 32
}

pub fn texture_objects(_: &Setup) {
    let mut array = CUarray::NULL;
    must!(
        cuArray3DCreate_v2,
        &mut array,
        &solid((32, 32, 0), FLOAT, SURFACE)
    );
    let mut plain = CUarray::NULL;
    must!(
        cuArray3DCreate_v2,
        &mut plain,
        &solid((32, 32, 0), FLOAT, 0)
    );
    let mut mipmap = CUmipmappedArray::NULL;
    must!(
        cuMipmappedArrayCreate,
        &mut mipmap,
        &solid((32, 32, 0), FLOAT, 0),
        3u32
    );
    let memory = alloc(1 << 16);
    let float = element(CU_AD_FORMAT_FLOAT, 1);
    let texture = CUDA_TEXTURE_DESC {
        address_mode: [CU_TR_ADDRESS_MODE_CLAMP; 3],
        filter_mode: CU_TR_FILTER_MODE_LINEAR,
        flags: CU_TRSF_NORMALIZED_COORDINATES,
        ..Default::default()
    };
    let integers = CUDA_TEXTURE_DESC {
        flags: CU_TRSF_READ_AS_INTEGER,
        ..Default::default()
    };
    let view = CUDA_RESOURCE_VIEW_DESC {
        format: 0x16,
        width: 32,
        height: 32,
        ..Default::default()
    };
    let create = |what: &str,
                  resource: CUDA_RESOURCE_DESC,
                  texture: &CUDA_TEXTURE_DESC,
                  view: Option<CUDA_RESOURCE_VIEW_DESC>| {
        let mut object = CUtexObject::NULL;
        let view_at = view.as_ref().map_or(null(), |v| v as *const _);
        let result = cu!(
            cuTexObjectCreate,
            &mut object,
            &resource,
            texture as *const CUDA_TEXTURE_DESC,
            view_at
        );
        if !result.is_ok() {
            say!(what, "{result}");
            return;
        }
        let mut resource_back = CUDA_RESOURCE_DESC::default();
        let first = cu!(cuTexObjectGetResourceDesc, &mut resource_back, object);
        let mut texture_back = CUDA_TEXTURE_DESC::default();
        let second = cu!(cuTexObjectGetTextureDesc, &mut texture_back, object);
        let mut view_back = CUDA_RESOURCE_VIEW_DESC::default();
        let third = cu!(cuTexObjectGetResourceViewDesc, &mut view_back, object);
        say!(
            what,
            "{result} {} {first} {} {second} {} {third} {}",
            object.is_null(),
            resource_back.kind == resource.kind && resource_back.words[..2] == resource.words[..2],
            texture_back == *texture,
            view.map_or("-".into(), |v| (v == view_back).to_string())
        );
        say!(
            format!("{what}: destroy"),
            "{}",
            cu!(cuTexObjectDestroy, object)
        );
    };
    let of_array = resource(CU_RESOURCE_TYPE_ARRAY, &[array.0]);
    create("array", of_array, &texture, None);
    create("array with a view", of_array, &texture, Some(view));
    create(
        "mipmap",
        resource(CU_RESOURCE_TYPE_MIPMAPPED_ARRAY, &[mipmap.0]),
        &texture,
        None,
    );
    let linear = resource(CU_RESOURCE_TYPE_LINEAR, &[memory, float, 4096]);
    create("linear", linear, &CUDA_TEXTURE_DESC::default(), None);
    create("linear, integers", linear, &integers, None);
    create("linear, filtered", linear, &texture, None);
    let pitched = resource(CU_RESOURCE_TYPE_PITCH2D, &[memory, float, 32, 16, 512]);
    create("pitched", pitched, &texture, None);
    for (what, words) in [
        ("linear at 16", vec![16u64, float, 4096]),
        ("linear at NULL", vec![0, float, 4096]),
        ("linear, unaligned", vec![memory + 4, float, 4096]),
        ("linear of nothing", vec![memory, float, 0]),
        ("linear of 2^40", vec![memory, float, 1 << 40]),
        (
            "linear of three channels",
            vec![memory, element(CU_AD_FORMAT_FLOAT, 3), 4096],
        ),
        ("linear of no format", vec![memory, element(0, 1), 4096]),
    ] {
        create(
            what,
            resource(CU_RESOURCE_TYPE_LINEAR, &words),
            &CUDA_TEXTURE_DESC::default(),
            None,
        );
    }
    for (what, words) in [
        ("pitch 100", vec![memory, float, 20u64, 16, 100]),
        ("pitch below width", vec![memory, float, 200, 16, 512]),
        ("pitched at 16", vec![16, float, 32, 16, 512]),
        ("pitched, no width", vec![memory, float, 0, 16, 512]),
        ("pitched, too high", vec![memory, float, 32, 1 << 20, 512]),
    ] {
        create(
            what,
            resource(CU_RESOURCE_TYPE_PITCH2D, &words),
            &texture,
            None,
        );
    }
    create("kind 4", resource(4, &[array.0]), &texture, None);
    create(
        "array NULL",
        resource(CU_RESOURCE_TYPE_ARRAY, &[0]),
        &texture,
        None,
    );
    create(
        "mipmap NULL",
        resource(CU_RESOURCE_TYPE_MIPMAPPED_ARRAY, &[0]),
        &texture,
        None,
    );
    let mut flagged = of_array;
    flagged.flags = 1;
    create("resource flags", flagged, &texture, None);
    for (what, change) in [
        (
            "address mode 9",
            (|t| t.address_mode[0] = 9) as fn(&mut CUDA_TEXTURE_DESC),
        ),
        ("filter mode 2", |t| t.filter_mode = 2),
        ("texture flags 0x80", |t| t.flags = 0x80),
        ("anisotropy 100", |t| t.max_anisotropy = 100),
        ("integers, filtered", |t| t.flags = CU_TRSF_READ_AS_INTEGER),
        ("wrap, not normalised", |t| {
            (t.flags, t.address_mode) = (0, [CU_TR_ADDRESS_MODE_WRAP; 3]);
        }),
    ] {
        let mut changed = texture;
        change(&mut changed);
        create(what, of_array, &changed, None);
    }
    let mut odd = view;
    odd.format = 0x99;
    create("view of no format", of_array, &texture, Some(odd));
    let mut odd = view;
    odd.width = 64;
    create("view that is wider", of_array, &texture, Some(odd));
    let mut object = CUtexObject::NULL;
    say!(
        "no place",
        "{}",
        cu!(
            cuTexObjectCreate,
            null_mut::<CUtexObject>(),
            &of_array,
            &texture,
            null::<CUDA_RESOURCE_VIEW_DESC>()
        )
    );
    say!(
        "no resource",
        "{}",
        cu!(
            cuTexObjectCreate,
            &mut object,
            null::<CUDA_RESOURCE_DESC>(),
            &texture,
            null::<CUDA_RESOURCE_VIEW_DESC>()
        )
    );
    say!(
        "no texture",
        "{}",
        cu!(
            cuTexObjectCreate,
            &mut object,
            &of_array,
            null::<CUDA_TEXTURE_DESC>(),
            null::<CUDA_RESOURCE_VIEW_DESC>()
        )
    );
    must!(
        cuTexObjectCreate,
        &mut object,
        &of_array,
        &texture,
        null::<CUDA_RESOURCE_VIEW_DESC>()
    );
    let mut view_back = CUDA_RESOURCE_VIEW_DESC::default();
    let result = cu!(cuTexObjectGetResourceViewDesc, &mut view_back, object);
    say!(
        "a view there is not",
        "{result} {:#x} {}x{}",
        view_back.format,
        view_back.width,
        view_back.height
    );
    say!(
        "no place for the resource",
        "{}",
        cu!(
            cuTexObjectGetResourceDesc,
            null_mut::<CUDA_RESOURCE_DESC>(),
            object
        )
    );
    must!(cuTexObjectDestroy, object);
    say!(
        "destroy NULL",
        "{}",
        cu!(cuTexObjectDestroy, CUtexObject::NULL)
    );
    let mut surface = CUsurfObject::NULL;
    let result = cu!(cuSurfObjectCreate, &mut surface, &of_array);
    say!("surface", "{result} {}", surface.is_null());
    let mut back = CUDA_RESOURCE_DESC::default();
    let result = cu!(cuSurfObjectGetResourceDesc, &mut back, surface);
    say!(
        "its resource",
        "{result} {} {}",
        back.kind,
        back.words[0] == array.0
    );
    say!("destroy", "{}", cu!(cuSurfObjectDestroy, surface));
    for (what, resource) in [
        (
            "surface of a plain array",
            resource(CU_RESOURCE_TYPE_ARRAY, &[plain.0]),
        ),
        (
            "surface of a mipmap",
            resource(CU_RESOURCE_TYPE_MIPMAPPED_ARRAY, &[mipmap.0]),
        ),
        ("surface of linear memory", linear),
        ("surface of NULL", resource(CU_RESOURCE_TYPE_ARRAY, &[0])),
    ] {
        let mut surface = CUsurfObject::NULL;
        let result = cu!(cuSurfObjectCreate, &mut surface, &resource);
        say!(what, "{result}");
        if result.is_ok() {
            must!(cuSurfObjectDestroy, surface);
        }
    }
    say!(
        "surface of no resource",
        "{}",
        cu!(
            cuSurfObjectCreate,
            &mut surface,
            null::<CUDA_RESOURCE_DESC>()
        )
    );
    say!(
        "destroy no surface",
        "{}",
        cu!(cuSurfObjectDestroy, CUsurfObject::NULL)
    );
    must!(cuArrayDestroy, array);
    must!(cuArrayDestroy, plain);
    must!(cuMipmappedArrayDestroy, mipmap);
    free(memory);
}

/// What an array's end does to what hangs on it, and a handle that is no more.
pub fn stale_arrays(_: &Setup) {
    let mut array = CUarray::NULL;
    must!(
        cuArray3DCreate_v2,
        &mut array,
        &solid((32, 32, 0), FLOAT, 0)
    );
    let mut object = CUtexObject::NULL;
    let texture = CUDA_TEXTURE_DESC::default();
    must!(
        cuTexObjectCreate,
        &mut object,
        &resource(CU_RESOURCE_TYPE_ARRAY, &[array.0]),
        &texture,
        null::<CUDA_RESOURCE_VIEW_DESC>()
    );
    say!("array with a texture", "{}", cu!(cuArrayDestroy, array));
    say!("its texture", "{}", cu!(cuTexObjectDestroy, object));
    let mut mipmap = CUmipmappedArray::NULL;
    must!(
        cuMipmappedArrayCreate,
        &mut mipmap,
        &solid((32, 32, 0), FLOAT, 0),
        3u32
    );
    let mut level = CUarray::NULL;
    must!(cuMipmappedArrayGetLevel, &mut level, mipmap, 1u32);
    say!("destroy of a level", "{}", cu!(cuArrayDestroy, level));
    say!("destroy", "{}", cu!(cuMipmappedArrayDestroy, mipmap));
    say!("texture again", "{}", cu!(cuTexObjectDestroy, object));
    let mut back = CUDA_RESOURCE_DESC::default();
    say!(
        "resource of no texture",
        "{}",
        cu!(cuTexObjectGetResourceDesc, &mut back, object)
    );
    let mut surface = CUsurfObject::NULL;
    must!(
        cuArray3DCreate_v2,
        &mut array,
        &solid((32, 32, 0), FLOAT, SURFACE)
    );
    let of_array = resource(CU_RESOURCE_TYPE_ARRAY, &[array.0]);
    must!(cuSurfObjectCreate, &mut surface, &of_array);
    must!(cuSurfObjectDestroy, surface);
    say!("surface again", "{}", cu!(cuSurfObjectDestroy, surface));
    say!(
        "resource of no surface",
        "{}",
        cu!(cuSurfObjectGetResourceDesc, &mut back, surface)
    );
    must!(cuArrayDestroy, array);
}
