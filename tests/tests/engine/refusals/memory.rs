//! Device memory and pinned memory, shared and registered memory, devices.

use super::pipe;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::context::LimitMemory;
use mpsshim_proto::message::memory::*;
use mpsshim_proto::message::*;
use mpsshim_tests::peer::memory_file;
use mpsshim_tests::refusals::{Draft, Scene, Table};
use std::os::fd::OwnedFd;
use zerocopy::IntoBytes;

fn file() -> OwnedFd {
    memory_file(&[0; 4096]).expect("a memory file")
}

fn register(device: u32) -> FileRegister {
    FileRegister {
        len: 4096,
        device,
        ..FileRegister::default()
    }
}

/// A registration of parts (offset, bytes) of a file of two pages, which are said to have `len` bytes.
fn parts(parts: &[(u64, u64)], len: u64) -> Draft {
    let (offset, _) = parts[0];
    let further = parts[1..].iter();
    let further = further.map(|&(offset, len)| FilePart { offset, len });
    let behind: Vec<u8> = further.flat_map(|part| part.as_bytes().to_vec()).collect();
    let body = FileRegister {
        offset,
        len,
        ..register(0)
    };
    let file = memory_file(&[0; 8192]).expect("a memory file");
    Draft::of(&body).with(&behind[..]).carrying(file)
}

fn share(s: &mut Scene) -> Opaque {
    // What a session shares itself it does not open.
    let range = s.others_memory;
    s.other.ask(Op::IpcShare, &range, &[]).expect("shared")
}

fn peers(owner: u32, user: u32) -> Draft {
    Draft::of(&Peers {
        owner,
        user,
        enable: 1,
        pad: 0,
    })
}

fn limit(limit: u32, value: u64) -> Draft {
    Draft::of(&Limit {
        value,
        limit,
        device: 0,
    })
}

fn at(device: u32) -> Draft {
    Draft::of(&Attach { device, flags: 0 })
}

pub fn table() -> Table {
    let mut t = Table::default();
    t.op(Op::Attach).device(|_, device| at(device));
    t.op(Op::MemInfo).device(|_, device| at(device));
    t.op(Op::LimitMemory).device(|_, device| {
        Draft::of(&LimitMemory {
            device,
            pad: 0,
            bytes: 1 << 40,
        })
    });
    t.op(Op::PointerAttribute)
        .address(CUDA_ERROR_INVALID_VALUE, |_, pointer| {
            Draft::of(&PointerQuery {
                pointer,
                attribute: CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                pad: 0,
            })
        })
        .refused(
            "an attribute that is an address of the server's",
            CUDA_ERROR_NOT_SUPPORTED,
            |s| {
                Draft::of(&PointerQuery {
                    pointer: s.memory.start,
                    attribute: CU_POINTER_ATTRIBUTE_CONTEXT,
                    pad: 0,
                })
            },
        );
    t.op(Op::IpcShare)
        .range(CUDA_ERROR_INVALID_VALUE, |_, range| Draft::of(&range))
        .refused("no bytes", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&Range {
                start: s.memory.start,
                len: 0,
            })
        });
    t.op(Op::IpcClose)
        .refused("what was not opened", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&Object {
                object: s.memory.start,
            })
        })
        .refused("what another session has", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&Object {
                object: s.others_memory.start,
            })
        });
    t.op(Op::IpcOpen)
        .fine("what another session shares", |s| {
            let handle = share(s);
            Draft::of(&IpcOpen {
                handle,
                device: 0,
                pad: 0,
            })
        })
        .no_device(|s, device| {
            let handle = share(s);
            Draft::of(&IpcOpen {
                handle,
                device,
                pad: 0,
            })
        })
        .refused("a forged handle", CUDA_ERROR_INVALID_VALUE, |s| {
            let mut handle = share(s);
            handle.words[1] ^= 1 << 40;
            Draft::of(&IpcOpen {
                handle,
                device: 0,
                pad: 0,
            })
        })
        .refused("no handle", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&IpcOpen::default())
        });
    t.op(Op::FileRegister)
        .fine("a memory file", |_| {
            Draft::of(&register(0)).carrying(file())
        })
        .no_device(|_, device| Draft::of(&register(device)).carrying(file()))
        .refused("a pipe", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&register(0)).carrying(pipe())
        })
        .refused("more than the file has", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&FileRegister {
                len: 8192,
                ..register(0)
            })
            .carrying(file())
        })
        .refused("a part behind its end", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&FileRegister {
                offset: 4096,
                ..register(0)
            })
            .carrying(file())
        })
        .refused("a part that overflows", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&FileRegister {
                offset: u64::MAX - 4095,
                ..register(0)
            })
            .carrying(file())
        })
        .refused("a part of a page", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&FileRegister {
                offset: 1,
                len: 4095,
                ..register(0)
            })
            .carrying(file())
        })
        .fine("several parts", |_| {
            parts(&[(0, 4096), (4096, 4096), (0, 4096)], 12288)
        })
        .refused(
            "parts that are longer than all",
            CUDA_ERROR_INVALID_VALUE,
            |_| parts(&[(0, 4096), (4096, 8192)], 4096),
        )
        .refused("no first part", CUDA_ERROR_INVALID_VALUE, |_| {
            parts(&[(0, 0), (4096, 4096)], 4096)
        })
        .refused(
            "a further part behind the end",
            CUDA_ERROR_INVALID_VALUE,
            |_| parts(&[(0, 4096), (8192, 4096)], 8192),
        )
        .refused("a further part of a page", CUDA_ERROR_INVALID_VALUE, |_| {
            parts(&[(0, 4096), (4096, 100)], 4196)
        })
        .ends("too many parts", |_| {
            parts(
                &[(0, 4096); FILE_PARTS_MAX + 2],
                4096 * (FILE_PARTS_MAX as u64 + 2),
            )
        })
        .ends("no descriptor", |_| Draft::of(&register(0)).promising());
    t.op(Op::FileUnregister)
        .refused("what is not registered", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&Object {
                object: s.host.start,
            })
        });
    t.op(Op::PeerAccess)
        .fine("the other device", |_| peers(0, 1))
        .no_device(|_, device| peers(device, 1))
        .no_device(|_, device| peers(0, device))
        .refused(
            "the same device",
            CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            |_| peers(1, 1),
        );
    t.op(Op::RangeHandle)
        // softgpu has none.
        .range_where(
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_INVALID_VALUE),
            |_, range| {
                Draft::of(&RangeHandle {
                    address: range.start,
                    len: range.len,
                    flags: 0,
                    kind: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                    pad: 0,
                })
            },
        )
        .refused("an unknown kind", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&RangeHandle {
                address: s.memory.start,
                len: s.memory.len,
                flags: 0,
                kind: 2,
                pad: 0,
            })
        });
    t.op(Op::GetLimit)
        .device(|_, device| {
            Draft::of(&Limit {
                value: 0,
                limit: CU_LIMIT_STACK_SIZE,
                device,
            })
        })
        .refused("an unknown limit", CUDA_ERROR_INVALID_VALUE, |_| {
            limit(99, 0)
        });
    t.op(Op::SetLimit)
        .device(|_, device| {
            Draft::of(&Limit {
                value: 1024,
                limit: CU_LIMIT_STACK_SIZE,
                device,
            })
        })
        .refused("an unknown limit", CUDA_ERROR_INVALID_VALUE, |_| {
            limit(99, 0)
        })
        .fine("the largest granularity", |_| {
            limit(CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 128)
        })
        .refused("a larger granularity", CUDA_ERROR_INVALID_VALUE, |_| {
            limit(CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 129)
        })
        .refused(
            "more to print than the server takes",
            CUDA_ERROR_OUT_OF_MEMORY,
            |_| limit(CU_LIMIT_PRINTF_FIFO_SIZE, 1 << 40),
        );
    t.op(Op::HostFree)
        .refused("the inside of a block", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&Range {
                start: s.host.start + 64,
                len: 64,
            })
        })
        .refused("another session's block", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&s.others_host)
        })
        .fine("a block", |s| Draft::of(&s.host))
        .refused("a block that is free", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&s.host)
        });
    t.op(Op::HostAlloc)
        .device(|_, device| {
            Draft::of(&HostAlloc {
                len: 4096,
                flags: 0,
                device,
            })
        })
        .no_device(|_, device| {
            Draft::of(&HostAlloc {
                len: 4096,
                flags: MANAGED,
                device,
            })
        })
        .refused("a length that overflows", CUDA_ERROR_OUT_OF_MEMORY, |_| {
            Draft::of(&HostAlloc {
                len: u64::MAX,
                flags: 0,
                device: 0,
            })
        })
        .refused("more than there is", CUDA_ERROR_OUT_OF_MEMORY, |_| {
            Draft::of(&HostAlloc {
                len: 1 << 46,
                flags: 0,
                device: 0,
            })
        });
    t.op(Op::MemRelease)
        .refused("the inside of memory", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&Range {
                start: s.memory.start + 64,
                len: 64,
            })
        })
        .refused("another session's memory", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&s.others_memory)
        })
        .fine("memory", |s| Draft::of(&s.memory))
        .refused("memory that is free", CUDA_ERROR_INVALID_VALUE, |s| {
            Draft::of(&s.memory)
        });
    t.op(Op::MemGrant)
        .device(|_, device| {
            Draft::of(&MemGrant {
                len: 4096,
                device,
                flags: 0,
            })
        })
        .refused("more than there is", CUDA_ERROR_OUT_OF_MEMORY, |_| {
            Draft::of(&MemGrant {
                len: 1 << 46,
                device: 0,
                flags: 0,
            })
        })
        .refused("a length that overflows", CUDA_ERROR_OUT_OF_MEMORY, |_| {
            Draft::of(&MemGrant {
                len: u64::MAX,
                device: 0,
                flags: 0,
            })
        });
    t
}
