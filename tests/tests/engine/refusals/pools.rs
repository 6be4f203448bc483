//! Memory pools. softgpu exports none, so another session exports an allocation instead.

use super::{FD, exported, pipe};
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::memory::*;
use mpsshim_proto::message::{Object, Op, Range};
use mpsshim_tests::refusals::{Draft, Scene, Table, properties};

fn create(handle: u64, device: u32) -> PoolCreate {
    PoolCreate {
        handle,
        max_size: 0,
        properties: properties(device),
    }
}

fn alloc(pool: u64, stream: u64) -> PoolAlloc {
    PoolAlloc {
        pool,
        len: 4096,
        stream,
    }
}

/// Memory from a pool of the session's.
fn allocated(s: &mut Scene) -> Range {
    let body = alloc(s.make(Kind::MemPool), s.stream);
    s.peer.ask(Op::PoolAlloc, &body, &[]).expect("memory")
}

/// The same of the other session's.
fn allocated_elsewhere(s: &mut Scene) -> Range {
    let stream = s.other.stream().expect("a stream");
    let body = alloc(s.other.pool().expect("a pool"), stream);
    s.other.ask(Op::PoolAlloc, &body, &[]).expect("memory")
}

fn attribute(pool: u64, attribute: u32) -> Draft {
    Draft::of(&PoolAttribute {
        pool,
        value: 0,
        attribute,
        pad: 0,
    })
}

fn access(pool: u64, count: u32) -> Draft {
    Draft::of(&PoolAccess {
        pool,
        count,
        pad: 0,
    })
}

fn place(kind: u32, device: u32) -> Access {
    Access {
        location: Location {
            kind,
            id: device as i32,
        },
        flags: 3,
        pad: 0,
    }
}

fn export(handle: u64, kind: u32) -> Draft {
    Draft::of(&PhysicalExport {
        handle,
        flags: 0,
        kind,
        pad: 0,
    })
}

fn import(handle: u64, device: u32, kind: u32) -> Draft {
    Draft::of(&PoolImport {
        handle,
        kind,
        device,
        flags: 0,
    })
}

pub fn table() -> Table {
    let mut t = Table::default();
    t.op(Op::PoolCreate)
        .new_handle(Kind::MemPool, CUDA_ERROR_INVALID_HANDLE, |_, handle| {
            Draft::of(&create(handle, 0))
        })
        .device(|s, device| Draft::of(&create(s.unused(Kind::MemPool), device)))
        .refused("a fabric handle", CUDA_ERROR_NOT_SUPPORTED, |s| {
            let mut body = create(s.unused(Kind::MemPool), 0);
            body.properties.handle_types = CU_MEM_HANDLE_TYPE_FABRIC;
            Draft::of(&body)
        })
        .refused(
            "host memory of the driver's",
            CUDA_ERROR_NOT_SUPPORTED,
            |s| {
                let mut body = create(s.unused(Kind::MemPool), 0);
                body.properties.location.kind = CU_MEM_LOCATION_TYPE_HOST;
                Draft::of(&body)
            },
        )
        .refused("an unknown place", CUDA_ERROR_INVALID_VALUE, |s| {
            let mut body = create(s.unused(Kind::MemPool), 0);
            body.properties.location.kind = 99;
            Draft::of(&body)
        });
    t.op(Op::PoolDestroy)
        .handle(Kind::MemPool, CUDA_ERROR_INVALID_VALUE, |_, object| {
            Draft::of(&Object { object })
        });
    t.op(Op::PoolAlloc)
        .handle(Kind::MemPool, CUDA_ERROR_INVALID_VALUE, |s, pool| {
            Draft::of(&alloc(pool, s.stream))
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            Draft::of(&alloc(s.make(Kind::MemPool), stream))
        })
        .refused("more than there is", CUDA_ERROR_OUT_OF_MEMORY, |s| {
            let body = alloc(s.make(Kind::MemPool), s.stream);
            Draft::of(&PoolAlloc {
                len: 1 << 46,
                ..body
            })
        })
        .refused("a length that overflows", CUDA_ERROR_OUT_OF_MEMORY, |s| {
            let body = alloc(s.make(Kind::MemPool), s.stream);
            Draft::of(&PoolAlloc {
                len: u64::MAX,
                ..body
            })
        });
    t.op(Op::PoolFree)
        .fine("memory from a pool", |s| {
            let (address, stream) = (allocated(s).start, s.stream);
            Draft::of(&PoolFree { address, stream })
        })
        .refused("the inside of it", CUDA_ERROR_INVALID_VALUE, |s| {
            let (address, stream) = (allocated(s).start + 64, s.stream);
            Draft::of(&PoolFree { address, stream })
        })
        .refused("memory from no pool", CUDA_ERROR_INVALID_VALUE, |s| {
            let (address, stream) = (s.memory.start, s.stream);
            Draft::of(&PoolFree { address, stream })
        })
        .refused("another session's", CUDA_ERROR_INVALID_VALUE, |s| {
            let (address, stream) = (allocated_elsewhere(s).start, s.stream);
            Draft::of(&PoolFree { address, stream })
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            let address = allocated(s).start;
            Draft::of(&PoolFree { address, stream })
        });
    for op in [Op::PoolGetAttribute, Op::PoolSetAttribute] {
        t.op(op)
            .handle(Kind::MemPool, CUDA_ERROR_INVALID_VALUE, |_, pool| {
                attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
            })
            .handle(Kind::MemPool, CUDA_ERROR_INVALID_VALUE, |_, pool| {
                attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH)
            })
            .refused("an unknown attribute", CUDA_ERROR_INVALID_VALUE, |s| {
                attribute(s.make(Kind::MemPool), 99)
            });
    }
    t.op(Op::PoolTrim)
        .handle(Kind::MemPool, CUDA_ERROR_INVALID_VALUE, |_, pool| {
            attribute(pool, 0)
        });
    for op in [Op::PoolSetAccess, Op::PoolGetAccess] {
        t.op(op)
            .handle(Kind::MemPool, CUDA_ERROR_INVALID_VALUE, |_, pool| {
                access(pool, 1).with(&place(CU_MEM_LOCATION_TYPE_DEVICE, 0))
            })
            .device(|s, device| {
                let pool = s.make(Kind::MemPool);
                access(pool, 1).with(&place(CU_MEM_LOCATION_TYPE_DEVICE, device))
            })
            .refused("an unknown place", CUDA_ERROR_INVALID_VALUE, |s| {
                access(s.make(Kind::MemPool), 1).with(&place(99, 0))
            })
            .ends("a place that is not in the message", |s| {
                let pool = s.make(Kind::MemPool);
                access(pool, 2).with(&place(CU_MEM_LOCATION_TYPE_DEVICE, 0))
            })
            .ends("more places than there may be", |s| {
                let places = [place(CU_MEM_LOCATION_TYPE_DEVICE, 0); ACCESSES_MAX + 1];
                access(s.make(Kind::MemPool), places.len() as u32).with(&places)
            })
            .ends("a count that overflows", |s| {
                access(s.make(Kind::MemPool), u32::MAX)
            });
    }
    t.op(Op::PoolGetAccess)
        .refused("no place", CUDA_ERROR_INVALID_VALUE, |s| {
            access(s.make(Kind::MemPool), 0)
        });
    t.op(Op::PoolExport)
        .handle_where(
            Kind::MemPool,
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_INVALID_VALUE),
            |_, pool| export(pool, FD),
        )
        .refused("a fabric handle", CUDA_ERROR_INVALID_VALUE, |s| {
            export(s.make(Kind::MemPool), CU_MEM_HANDLE_TYPE_FABRIC)
        });
    t.op(Op::PoolImport)
        .refused("memory", CUDA_ERROR_NOT_SUPPORTED, |s| {
            import(s.unused(Kind::MemPool), 0, FD).carrying(exported(s))
        })
        .no_device(|s, device| {
            let handle = s.unused(Kind::MemPool);
            import(handle, device, FD).carrying(exported(s))
        })
        .refused("a fabric handle", CUDA_ERROR_INVALID_VALUE, |s| {
            let handle = s.unused(Kind::MemPool);
            import(handle, 0, CU_MEM_HANDLE_TYPE_FABRIC).carrying(exported(s))
        })
        .refused("a pipe", CUDA_ERROR_INVALID_VALUE, |s| {
            import(s.unused(Kind::MemPool), 0, FD).carrying(pipe())
        })
        .ends("no descriptor", |s| {
            import(s.unused(Kind::MemPool), 0, FD).promising()
        });
    t.op(Op::PoolExportPointer)
        // softgpu has none.
        .refused("memory from a pool", CUDA_ERROR_NOT_SUPPORTED, |s| {
            Draft::of(&Object {
                object: allocated(s).start,
            })
        })
        .refused("memory from no pool", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&Object {
                object: s.memory.start,
            })
        })
        .refused("another session's", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&Object {
                object: allocated_elsewhere(s).start,
            })
        });
    t.op(Op::PoolImportPointer).handle_where(
        Kind::MemPool,
        (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_INVALID_VALUE),
        |_, pool| {
            Draft::of(&PoolImportPointer {
                pool,
                data: Opaque::default(),
            })
        },
    );
    t
}
