//! Arrays, textures, references to them, tensor maps, two- and three-dimensional copies.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::array::*;
use mpsshim_proto::message::{Object, Op, Range, Side};
use mpsshim_proto::segment::STAGING_LEN;
use mpsshim_tests::refusals::{Draft, Scene, Table, array};

fn side(side: u32, address: u64) -> BoxSide {
    BoxSide {
        address,
        side,
        ..BoxSide::default()
    }
}

fn device(address: u64) -> BoxSide {
    side(Side::Device as u32, address)
}

/// A copy of a row.
fn row(to: BoxSide, from: BoxSide, len: u64, stream: u64) -> CopyBox {
    CopyBox {
        to,
        from,
        width: len,
        height: 1,
        depth: 1,
        stream,
    }
}

fn part(parent: u64, part: u64, index: u32) -> Draft {
    Draft::of(&ArrayPart {
        parent,
        part,
        index,
        pad: 0,
    })
}

fn query(array: u64, kind: u32, device: u32) -> Draft {
    Draft::of(&ArrayQuery {
        array,
        kind,
        device,
    })
}

fn texture(kind: u32, first: u64) -> TextureCreate {
    let mut body = TextureCreate::default();
    body.resource.kind = kind;
    body.resource.words[0] = first;
    body
}

/// A texture of 64 floats in memory.
fn linear(address: u64) -> TextureCreate {
    let mut body = texture(CU_RESOURCE_TYPE_LINEAR, address);
    body.resource.words[1] = u64::from(CU_AD_FORMAT_FLOAT) | 1 << 32;
    body.resource.words[2] = 256;
    body
}

/// A texture of rows of 64 floats in memory.
fn rows(address: u64, count: u64, pitch: u64) -> TextureCreate {
    let mut body = texture(CU_RESOURCE_TYPE_PITCH2D, address);
    body.resource.words[1] = u64::from(CU_AD_FORMAT_FLOAT) | 1 << 32;
    body.resource.words[2..5].copy_from_slice(&[64, count, pitch]);
    body
}

fn surface(array: u64) -> TextureCreate {
    TextureCreate {
        flags: TEXTURE_IS_SURFACE,
        ..texture(CU_RESOURCE_TYPE_ARRAY, array)
    }
}

/// An array that surfaces may write to.
fn writable(s: &mut Scene) -> u64 {
    let handle = s.unused(Kind::Array);
    let body = ArrayCreate {
        flags: CUDA_ARRAY3D_SURFACE_LDST,
        ..array(handle, 0)
    };
    let made = s.peer.ask_as(0, Op::ArrayCreate, &body, &[]);
    made.expect("an array");
    handle
}

fn get(module: u64, reference: u64, device: u32) -> Draft {
    Draft::of(&GetReference {
        module,
        reference,
        device,
        pad: 0,
    })
}

fn call(reference: u64, call: ReferenceCall, first: u64) -> Draft {
    Draft::of(&ReferenceArguments {
        reference,
        words: [first, 0, 0, 0, 0, 0],
        call: call as u32,
        pad: 0,
    })
}

/// A tensor map of 64 floats.
fn tensor(s: &Scene) -> TensorMap {
    TensorMap {
        address: s.memory.start,
        size: [64; 8],
        strides: [256; 8],
        tile: [16; 8],
        element_strides: [1; 8],
        data_type: 7,
        rank: 1,
        ..TensorMap::default()
    }
}

pub fn table() -> Table {
    let mut t = Table::default();
    t.op(Op::CopyBox)
        .range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            let from = device(s.memory.start);
            Draft::of(&row(device(to.start), from, to.len, s.stream))
        })
        .range(CUDA_ERROR_INVALID_VALUE, |s, from| {
            let to = device(s.memory.start);
            Draft::of(&row(to, device(from.start), from.len, s.stream))
        })
        .host_range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            let from = device(s.memory.start);
            let side = side(Side::Host as u32, to.start);
            Draft::of(&row(side, from, to.len, s.stream))
        })
        .host_range(CUDA_ERROR_INVALID_VALUE, |s, from| {
            let to = device(s.memory.start);
            let side = side(Side::Host as u32, from.start);
            Draft::of(&row(to, side, from.len, s.stream))
        })
        .handle(Kind::Array, CUDA_ERROR_INVALID_HANDLE, |s, array| {
            let from = device(s.memory.start);
            Draft::of(&row(side(ARRAY_SIDE, array), from, 64, s.stream))
        })
        .handle(Kind::Array, CUDA_ERROR_INVALID_HANDLE, |s, array| {
            let to = device(s.memory.start);
            Draft::of(&row(to, side(ARRAY_SIDE, array), 64, s.stream))
        })
        .refused("a mipmapped array", CUDA_ERROR_INVALID_HANDLE, |s| {
            let (to, array) = (device(s.memory.start), s.make(Kind::MipmappedArray));
            Draft::of(&row(to, side(ARRAY_SIDE, array), 64, s.stream))
        })
        .refused("more than the array has", CUDA_ERROR_INVALID_VALUE, |s| {
            let (to, array) = (device(s.memory.start), s.make(Kind::Array));
            Draft::of(&row(to, side(ARRAY_SIDE, array), 260, s.stream))
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            let (to, from) = (s.memory.start, s.memory.start + 64);
            Draft::of(&row(device(to), device(from), 64, stream))
        })
        .refused("a pitch below the width", CUDA_ERROR_INVALID_VALUE, |s| {
            let from = BoxSide {
                pitch: 63,
                ..device(s.memory.start)
            };
            let body = row(device(s.memory.start), from, 64, s.stream);
            Draft::of(&CopyBox { height: 2, ..body })
        })
        .refused("rows beyond the memory", CUDA_ERROR_INVALID_VALUE, |s| {
            let from = BoxSide {
                pitch: s.memory.len / 2,
                ..device(s.memory.start)
            };
            let body = row(device(s.memory.start), from, 64, s.stream);
            Draft::of(&CopyBox { height: 3, ..body })
        })
        .refused("rows that overflow", CUDA_ERROR_INVALID_VALUE, |s| {
            let to = device(s.memory.start);
            let body = row(to, to, 1 << 32, s.stream);
            Draft::of(&CopyBox {
                height: 1 << 32,
                ..body
            })
        })
        .ends("more than there is of the staging area", |s| {
            let from = side(Side::Staging as u32, STAGING_LEN as u64 - 32);
            Draft::of(&row(device(s.memory.start), from, 64, s.stream))
        })
        .ends("an unknown side", |s| {
            let (to, from) = (device(s.memory.start), side(3, s.memory.start));
            Draft::of(&row(to, from, 64, s.stream))
        })
        .ends("a side whose low byte is known", |s| {
            let (to, from) = (device(s.memory.start), side(256, s.memory.start));
            Draft::of(&row(to, from, 64, s.stream))
        })
        .ends("host memory on both sides", |s| {
            let host = side(Side::Host as u32, s.host.start);
            Draft::of(&row(host, host, 64, s.stream))
        });
    t.op(Op::ArrayCreate)
        .new_handle(Kind::Array, CUDA_ERROR_INVALID_HANDLE, |_, handle| {
            Draft::of(&array(handle, 0))
        })
        .new_handle(
            Kind::MipmappedArray,
            CUDA_ERROR_INVALID_HANDLE,
            |_, handle| Draft::of(&array(handle, 0)),
        )
        .device(|s, device| Draft::of(&array(s.unused(Kind::Array), device)))
        .refused("an unknown format", CUDA_ERROR_INVALID_VALUE, |s| {
            let handle = s.unused(Kind::Array);
            Draft::of(&ArrayCreate {
                format: 0,
                ..array(handle, 0)
            })
        })
        .refused("no elements", CUDA_ERROR_INVALID_VALUE, |s| {
            let handle = s.unused(Kind::Array);
            Draft::of(&ArrayCreate {
                size: [0; 3],
                ..array(handle, 0)
            })
        })
        .refused("sizes that overflow", CUDA_ERROR_OUT_OF_MEMORY, |s| {
            let handle = s.unused(Kind::Array);
            Draft::of(&ArrayCreate {
                size: [u64::MAX; 3],
                ..array(handle, 0)
            })
        });
    t.op(Op::ArrayPart)
        .handle(
            Kind::MipmappedArray,
            CUDA_ERROR_INVALID_HANDLE,
            |s, parent| part(parent, s.unused(Kind::Array), 0),
        )
        // It has no planes.
        .handle_where(
            Kind::Array,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_HANDLE),
            |s, parent| part(parent, s.unused(Kind::Array), 0),
        )
        .new_handle(Kind::Array, CUDA_ERROR_INVALID_HANDLE, |s, handle| {
            part(s.make(Kind::MipmappedArray), handle, 0)
        })
        .refused("a level that is not there", CUDA_ERROR_INVALID_VALUE, |s| {
            let parent = s.make(Kind::MipmappedArray);
            part(parent, s.unused(Kind::Array), 2)
        });
    t.op(Op::ArrayQuery)
        .handle_where(
            Kind::Array,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_HANDLE),
            |_, array| query(array, 0, 0),
        )
        .handle_where(
            Kind::MipmappedArray,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_HANDLE),
            |_, array| query(array, 1, 0),
        )
        .no_device(|s, device| query(s.make(Kind::Array), 0, device));
    t.op(Op::ArrayDestroy)
        .handle(Kind::Array, CUDA_ERROR_INVALID_HANDLE, |_, object| {
            Draft::of(&Object { object })
        })
        .handle(
            Kind::MipmappedArray,
            CUDA_ERROR_INVALID_HANDLE,
            |_, object| Draft::of(&Object { object }),
        );
    t.op(Op::TextureCreate)
        .handle(Kind::Array, CUDA_ERROR_INVALID_HANDLE, |_, array| {
            Draft::of(&texture(CU_RESOURCE_TYPE_ARRAY, array))
        })
        .handle(
            Kind::MipmappedArray,
            CUDA_ERROR_INVALID_HANDLE,
            |_, array| Draft::of(&texture(CU_RESOURCE_TYPE_MIPMAPPED_ARRAY, array)),
        )
        .fine("an array that is written to", |s| {
            let array = writable(s);
            Draft::of(&surface(array))
        })
        .refused(
            "a mipmapped array that is written to",
            CUDA_ERROR_INVALID_HANDLE,
            |s| Draft::of(&surface(s.make(Kind::MipmappedArray))),
        )
        .refused("no array", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&texture(CU_RESOURCE_TYPE_ARRAY, 0))
        })
        .device(|s, device| {
            Draft::of(&TextureCreate {
                device,
                ..linear(s.memory.start)
            })
        })
        .address(CUDA_ERROR_INVALID_VALUE, |_, address| {
            Draft::of(&linear(address))
        })
        .fine("rows", |s| Draft::of(&rows(s.memory.start, 4, 256)))
        .refused("rows beyond the memory", CUDA_ERROR_INVALID_VALUE, |s| {
            let Range { start, len } = s.memory;
            Draft::of(&rows(start, len / 256 + 1, 256))
        })
        .refused("rows that overflow", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&rows(s.memory.start, 1 << 40, 1 << 40))
        })
        .refused("an unknown kind", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&texture(99, s.memory.start))
        });
    t.op(Op::TextureDestroy)
        .refused("what is not there", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&TextureDestroy {
                object: 1 << 40,
                ..TextureDestroy::default()
            })
        })
        .refused("a texture as a surface", CUDA_ERROR_INVALID_VALUE, |s| {
            let object = textured(s);
            Draft::of(&TextureDestroy {
                object,
                flags: TEXTURE_IS_SURFACE,
                pad: 0,
            })
        })
        .fine("a texture", |s| {
            let object = textured(s);
            Draft::of(&TextureDestroy {
                object,
                flags: 0,
                pad: 0,
            })
        });
    // softgpu has no references.
    t.op(Op::GetReference)
        .handle_where(
            Kind::Module,
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_INVALID_HANDLE),
            |s, module| get(module, s.unused(Kind::TextureReference), 0).with(b"picture\0"),
        )
        .handle_where(
            Kind::Module,
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_INVALID_HANDLE),
            |s, module| get(module, s.unused(Kind::SurfaceReference), 0).with(b"canvas\0"),
        )
        .no_device(|s, device| get(0, s.unused(Kind::TextureReference), device).with(b"\0"))
        .refused("a library", CUDA_ERROR_INVALID_HANDLE, |s| {
            let library = s.make(Kind::Library);
            get(library, s.unused(Kind::TextureReference), 0).with(b"picture\0")
        })
        .ends("a name without its end", |s| {
            get(s.module, s.unused(Kind::TextureReference), 0).with_endless_name()
        });
    t.op(Op::ReferenceCall)
        .refused("no reference", CUDA_ERROR_INVALID_HANDLE, |s| {
            let reference = s.unused(Kind::TextureReference);
            call(reference, ReferenceCall::GetFlags, 0)
        })
        .refused("no surface reference", CUDA_ERROR_INVALID_HANDLE, |s| {
            let reference = s.unused(Kind::SurfaceReference);
            call(reference, ReferenceCall::SurfaceGetArray, 0)
        })
        .refused("an array", CUDA_ERROR_INVALID_HANDLE, |s| {
            call(s.make(Kind::Array), ReferenceCall::GetFlags, 0)
        })
        .ends("an unknown call", |s| {
            Draft::of(&ReferenceArguments {
                reference: s.unused(Kind::TextureReference),
                call: 99,
                ..ReferenceArguments::default()
            })
        });
    t.op(Op::TensorMap)
        .no_device(|s, device| {
            Draft::of(&TensorMap {
                device,
                ..tensor(s)
            })
        })
        // softgpu makes none.
        .refused("a tensor map", CUDA_ERROR_NOT_SUPPORTED, |s| {
            Draft::of(&tensor(s))
        })
        .refused(
            "more dimensions than there may be",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                Draft::of(&TensorMap {
                    rank: TENSOR_RANK_MAX as u32 + 1,
                    ..tensor(s)
                })
            },
        )
        .ends("an unknown call", |s| {
            Draft::of(&TensorMap {
                call: 4,
                ..tensor(s)
            })
        });
    t
}

/// A texture object.
fn textured(s: &mut Scene) -> u64 {
    let body = linear(s.memory.start);
    let made: TextureInfo = s
        .peer
        .ask(Op::TextureCreate, &body, &[])
        .expect("a texture");
    made.object
}
