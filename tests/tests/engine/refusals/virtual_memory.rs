//! Reserved addresses, physical memory, mappings.

use super::{FD, exported, pipe};
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::memory::*;
use mpsshim_proto::message::{Object, Op, Range};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::refusals::{Draft, Scene, Table, properties};
use std::os::fd::AsFd;

/// What the driver allocates at a time, bytes.
const UNIT: u64 = 2 << 20;

fn reserve(peer: &mut Peer) -> Range {
    let body = AddressReserve {
        len: 2 * UNIT,
        ..AddressReserve::default()
    };
    peer.ask(Op::AddressReserve, &body, &[]).expect("addresses")
}

fn create(handle: u64) -> PhysicalCreate {
    PhysicalCreate {
        handle,
        len: UNIT,
        flags: 0,
        properties: properties(0),
    }
}

fn map(s: &mut Scene, handle: u64) -> MapMemory {
    MapMemory {
        handle,
        address: reserve(&mut s.peer).start,
        len: UNIT,
        offset: 0,
        flags: 0,
    }
}

/// Addresses with memory in their first half.
fn mapped(s: &mut Scene) -> Range {
    let handle = s.make(Kind::Allocation);
    let body = map(s, handle);
    let made = s.peer.ask_as(0, Op::MapMemory, &body, &[]);
    made.expect("a mapping");
    Range {
        start: body.address,
        len: UNIT,
    }
}

fn mapped_elsewhere(s: &mut Scene) -> Range {
    let handle = s.of_other(Kind::Allocation);
    let body = MapMemory {
        handle,
        address: reserve(&mut s.other).start,
        len: UNIT,
        offset: 0,
        flags: 0,
    };
    let made = s.other.ask_as(0, Op::MapMemory, &body, &[]);
    made.expect("a mapping");
    Range {
        start: body.address,
        len: UNIT,
    }
}

fn place(kind: u32, device: u32) -> Location {
    Location {
        kind,
        id: device as i32,
    }
}

fn access(range: Range, count: u32) -> Draft {
    Draft::of(&SetAccess {
        address: range.start,
        len: range.len,
        count,
        pad: 0,
    })
}

fn to(kind: u32, device: u32) -> Access {
    Access {
        location: place(kind, device),
        flags: 3,
        pad: 0,
    }
}

const DEVICE: u32 = CU_MEM_LOCATION_TYPE_DEVICE;

fn export(handle: u64, kind: u32) -> Draft {
    Draft::of(&PhysicalExport {
        handle,
        flags: 0,
        kind,
        pad: 0,
    })
}

fn reserve_of(len: u64, alignment: u64) -> Draft {
    Draft::of(&AddressReserve {
        len,
        alignment,
        hint: 0,
        flags: 0,
    })
}

pub fn table() -> Table {
    let mut t = Table::default();
    t.op(Op::AddressReserve)
        .fine("addresses", |_| reserve_of(UNIT, UNIT))
        .refused("no bytes", CUDA_ERROR_INVALID_VALUE, |_| reserve_of(0, 0))
        .refused(
            "an alignment that is no power of two",
            CUDA_ERROR_INVALID_VALUE,
            |_| reserve_of(UNIT, 3 * UNIT),
        )
        .refused(
            "a length that is no multiple",
            CUDA_ERROR_INVALID_VALUE,
            |_| reserve_of(UNIT + 1, 0),
        )
        .refused("more than there are", CUDA_ERROR_OUT_OF_MEMORY, |_| {
            reserve_of(1 << 60, 0)
        })
        .refused("a length that overflows", CUDA_ERROR_OUT_OF_MEMORY, |_| {
            reserve_of(!(UNIT - 1), 1 << 40)
        });
    t.op(Op::AddressFree)
        .fine("addresses", |s| Draft::of(&reserve(&mut s.peer)))
        .refused("part of them", CUDA_ERROR_INVALID_VALUE, |s| {
            let Range { start, .. } = reserve(&mut s.peer);
            Draft::of(&Range { start, len: UNIT })
        })
        .refused("the inside of them", CUDA_ERROR_INVALID_VALUE, |s| {
            let Range { start, .. } = reserve(&mut s.peer);
            Draft::of(&Range {
                start: start + UNIT,
                len: UNIT,
            })
        })
        .refused("addresses with memory", CUDA_ERROR_INVALID_VALUE, |s| {
            let Range { start, .. } = mapped(s);
            Draft::of(&Range {
                start,
                len: 2 * UNIT,
            })
        })
        .refused("another session's", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&reserve(&mut s.other))
        });
    t.op(Op::PhysicalCreate)
        .new_handle(Kind::Allocation, CUDA_ERROR_INVALID_HANDLE, |_, handle| {
            Draft::of(&create(handle))
        })
        .device(|s, device| {
            Draft::of(&PhysicalCreate {
                properties: properties(device),
                ..create(s.unused(Kind::Allocation))
            })
        })
        .refused("a fabric handle", CUDA_ERROR_NOT_SUPPORTED, |s| {
            let mut body = create(s.unused(Kind::Allocation));
            body.properties.handle_types = CU_MEM_HANDLE_TYPE_FABRIC;
            Draft::of(&body)
        })
        .refused(
            "host memory of the driver's",
            CUDA_ERROR_NOT_SUPPORTED,
            |s| {
                let mut body = create(s.unused(Kind::Allocation));
                body.properties.location.kind = CU_MEM_LOCATION_TYPE_HOST_NUMA;
                Draft::of(&body)
            },
        )
        .refused("an unknown place", CUDA_ERROR_INVALID_VALUE, |s| {
            let mut body = create(s.unused(Kind::Allocation));
            body.properties.location.kind = 99;
            Draft::of(&body)
        })
        .refused(
            "a length that is no multiple",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                let handle = s.unused(Kind::Allocation);
                Draft::of(&PhysicalCreate {
                    len: UNIT + 1,
                    ..create(handle)
                })
            },
        )
        .refused("more than there is", CUDA_ERROR_OUT_OF_MEMORY, |s| {
            let handle = s.unused(Kind::Allocation);
            Draft::of(&PhysicalCreate {
                len: 1 << 46,
                ..create(handle)
            })
        });
    t.op(Op::PhysicalRelease)
        .handle(Kind::Allocation, CUDA_ERROR_INVALID_VALUE, |_, object| {
            Draft::of(&Object { object })
        });
    t.op(Op::MapMemory)
        .handle(Kind::Allocation, CUDA_ERROR_INVALID_VALUE, |s, handle| {
            Draft::of(&map(s, handle))
        })
        .refused(
            "another session's addresses",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                let handle = s.make(Kind::Allocation);
                let address = reserve(&mut s.other).start;
                Draft::of(&MapMemory {
                    address,
                    ..map(s, handle)
                })
            },
        )
        .refused(
            "addresses that are not reserved",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                let (handle, address) = (s.make(Kind::Allocation), s.memory.start);
                Draft::of(&MapMemory {
                    address,
                    ..map(s, handle)
                })
            },
        )
        .refused("more than is reserved", CUDA_ERROR_INVALID_VALUE, |s| {
            let handle = s.make(Kind::Allocation);
            let body = map(s, handle);
            Draft::of(&MapMemory {
                address: body.address + 2 * UNIT,
                ..body
            })
        })
        // softgpu maps all of an allocation or nothing.
        .refused("more than the memory has", CUDA_ERROR_NOT_SUPPORTED, |s| {
            let handle = s.make(Kind::Allocation);
            Draft::of(&MapMemory {
                len: 2 * UNIT,
                ..map(s, handle)
            })
        })
        .refused("an end that overflows", CUDA_ERROR_INVALID_VALUE, |s| {
            let handle = s.make(Kind::Allocation);
            let body = map(s, handle);
            Draft::of(&MapMemory {
                len: u64::MAX - body.address + 1,
                ..body
            })
        })
        .refused("an offset that overflows", CUDA_ERROR_INVALID_VALUE, |s| {
            let (object, descriptor) = (s.unused(Kind::Allocation), exported(s));
            let sent = s.peer.send_descriptor(1, descriptor.as_fd());
            sent.expect("a descriptor");
            let body = Object { object };
            let made = s.peer.ask_as(1, Op::PhysicalImport, &body, &[]);
            made.expect("imported");
            Draft::of(&MapMemory {
                offset: u64::MAX - UNIT + 1,
                ..map(s, object)
            })
        })
        .refused("what has memory", CUDA_ERROR_INVALID_VALUE, |s| {
            let (handle, taken) = (s.make(Kind::Allocation), mapped(s));
            Draft::of(&MapMemory {
                address: taken.start,
                ..map(s, handle)
            })
        });
    t.op(Op::UnmapMemory)
        .fine("memory", |s| Draft::of(&mapped(s)))
        .refused("part of it", CUDA_ERROR_INVALID_VALUE, |s| {
            let Range { start, len } = mapped(s);
            Draft::of(&Range {
                start,
                len: len / 2,
            })
        })
        .refused("a length that overflows", CUDA_ERROR_INVALID_VALUE, |s| {
            let Range { start, .. } = mapped(s);
            Draft::of(&Range {
                start,
                len: u64::MAX,
            })
        })
        .refused("another session's", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&mapped_elsewhere(s))
        })
        .refused("memory that was granted", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&s.memory)
        });
    t.op(Op::SetAccess)
        .fine("a device", |s| access(mapped(s), 1).with(&to(DEVICE, 0)))
        .no_device(|s, device| access(mapped(s), 1).with(&to(DEVICE, device)))
        .refused("an unknown place", CUDA_ERROR_INVALID_VALUE, |s| {
            access(mapped(s), 1).with(&to(99, 0))
        })
        .refused("another session's", CUDA_ERROR_INVALID_VALUE, |s| {
            access(mapped_elsewhere(s), 1).with(&to(DEVICE, 0))
        })
        .refused("more than is mapped", CUDA_ERROR_INVALID_VALUE, |s| {
            let Range { start, .. } = mapped(s);
            let len = 2 * UNIT;
            access(Range { start, len }, 1).with(&to(DEVICE, 0))
        })
        .refused("a length that overflows", CUDA_ERROR_INVALID_VALUE, |s| {
            let Range { start, .. } = mapped(s);
            let len = u64::MAX;
            access(Range { start, len }, 1).with(&to(DEVICE, 0))
        })
        .ends("a place that is not in the message", |s| {
            access(mapped(s), 2).with(&to(DEVICE, 0))
        })
        .ends("more places than there may be", |s| {
            let places = [to(DEVICE, 0); ACCESSES_MAX + 1];
            access(mapped(s), places.len() as u32).with(&places)
        });
    t.op(Op::GetAccess)
        .fine("memory", |s| {
            Draft::of(&GetAccess {
                address: mapped(s).start,
                location: place(DEVICE, 0),
            })
        })
        .no_device(|s, device| {
            Draft::of(&GetAccess {
                address: mapped(s).start,
                location: place(DEVICE, device),
            })
        })
        .refused("what has no memory", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&GetAccess {
                address: reserve(&mut s.peer).start,
                location: place(DEVICE, 0),
            })
        })
        .refused("another session's", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&GetAccess {
                address: mapped_elsewhere(s).start,
                location: place(DEVICE, 0),
            })
        });
    t.op(Op::PhysicalExport)
        .handle(Kind::Allocation, CUDA_ERROR_INVALID_VALUE, |_, handle| {
            export(handle, FD)
        })
        .refused("a fabric handle", CUDA_ERROR_INVALID_VALUE, |s| {
            export(s.make(Kind::Allocation), CU_MEM_HANDLE_TYPE_FABRIC)
        });
    t.op(Op::PhysicalImport)
        .new_handle(Kind::Allocation, CUDA_ERROR_INVALID_HANDLE, |s, object| {
            Draft::of(&Object { object }).carrying(exported(s))
        })
        .refused("a pipe", CUDA_ERROR_UNKNOWN, |s| {
            let object = s.unused(Kind::Allocation);
            Draft::of(&Object { object }).carrying(pipe())
        })
        .ends("no descriptor", |s| {
            let object = s.unused(Kind::Allocation);
            Draft::of(&Object { object }).promising()
        });
    t.op(Op::PhysicalRetain)
        .new_handle(Kind::Allocation, CUDA_ERROR_INVALID_HANDLE, |s, handle| {
            Draft::of(&PhysicalRetain {
                handle,
                address: mapped(s).start,
            })
        })
        .refused("what has no memory", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&PhysicalRetain {
                handle: s.unused(Kind::Allocation),
                address: reserve(&mut s.peer).start,
            })
        })
        .refused("another session's", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&PhysicalRetain {
                handle: s.unused(Kind::Allocation),
                address: mapped_elsewhere(s).start,
            })
        });
    t.op(Op::Granularity)
        .device(|_, device| {
            Draft::of(&Granularity {
                properties: properties(device),
                option: 0,
                pad: 0,
            })
        })
        .refused("a fabric handle", CUDA_ERROR_NOT_SUPPORTED, |_| {
            let mut properties = properties(0);
            properties.handle_types = CU_MEM_HANDLE_TYPE_FABRIC;
            Draft::of(&Granularity {
                properties,
                option: 0,
                pad: 0,
            })
        })
        .refused("an unknown option", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&Granularity {
                properties: properties(0),
                option: 99,
                pad: 0,
            })
        });
    t
}
