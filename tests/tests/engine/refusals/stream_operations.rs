//! Stream memory operations, stream attributes, host functions, events of several processes.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::Op;
use mpsshim_proto::message::stream::*;
use mpsshim_proto::segment::{FLAGS, RETURNED};
use mpsshim_tests::refusals::{Draft, Scene, Table};
use std::sync::atomic::Ordering;

fn operation(stream: u64, operation: u32, address: u64) -> Draft {
    Draft::of(&MemOp {
        stream,
        address,
        value: 0,
        operation,
        flags: 0,
    })
}

fn attribute(stream: u64, id: u32) -> Draft {
    Draft::of(&StreamAttribute {
        stream,
        id,
        ..StreamAttribute::default()
    })
}

fn export(s: &mut Scene) -> [u64; 8] {
    let event = s.make(Kind::Event);
    let made: EventToken = s
        .peer
        .ask(Op::EventExport, &EventExport { event }, &[])
        .expect("exported");
    made.token
}

pub fn table() -> Table {
    let mut t = Table::default();
    t.op(Op::HostFunction)
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            // The function has returned already.
            s.peer.flag(RETURNED).store(1, Ordering::Release);
            Draft::of(&HostFunction {
                stream,
                slot: 0,
                value: 1,
            })
        })
        .ends("a flag that is not there", |s| {
            Draft::of(&HostFunction {
                stream: s.stream,
                slot: FLAGS as u32,
                value: 1,
            })
        });
    t.op(Op::MemOp)
        .address(CUDA_ERROR_INVALID_VALUE, |s, address| {
            operation(s.stream, CU_STREAM_MEM_OP_WRITE_VALUE_32, address)
        })
        .address(CUDA_ERROR_INVALID_VALUE, |s, address| {
            operation(s.stream, CU_STREAM_MEM_OP_WRITE_VALUE_64, address)
        })
        // Memory is zero at first, and at least that.
        .address(CUDA_ERROR_INVALID_VALUE, |s, address| {
            operation(s.stream, CU_STREAM_MEM_OP_WAIT_VALUE_32, address)
        })
        .address(CUDA_ERROR_INVALID_VALUE, |s, address| {
            operation(s.stream, CU_STREAM_MEM_OP_WAIT_VALUE_64, address)
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            operation(stream, CU_STREAM_MEM_OP_WRITE_VALUE_32, s.memory.start)
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            operation(stream, CU_STREAM_MEM_OP_WAIT_VALUE_32, s.memory.start)
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |_, stream| {
            operation(stream, CU_STREAM_MEM_OP_BARRIER, 0)
        })
        .fine("the last word", |s| {
            let last = s.memory.start + s.memory.len - 4;
            operation(s.stream, CU_STREAM_MEM_OP_WRITE_VALUE_32, last)
        })
        .refused("an odd address", CUDA_ERROR_INVALID_VALUE, |s| {
            operation(
                s.stream,
                CU_STREAM_MEM_OP_WRITE_VALUE_32,
                s.memory.start + 2,
            )
        })
        .refused(
            "an address that is not one of two words",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                operation(
                    s.stream,
                    CU_STREAM_MEM_OP_WRITE_VALUE_64,
                    s.memory.start + 4,
                )
            },
        )
        .refused("an odd address to wait at", CUDA_ERROR_INVALID_VALUE, |s| {
            operation(s.stream, CU_STREAM_MEM_OP_WAIT_VALUE_32, s.memory.start + 2)
        })
        .refused(
            "an address to wait at that is not one of two words",
            CUDA_ERROR_INVALID_VALUE,
            |s| operation(s.stream, CU_STREAM_MEM_OP_WAIT_VALUE_64, s.memory.start + 4),
        )
        .refused("an unknown operation", CUDA_ERROR_INVALID_VALUE, |s| {
            operation(s.stream, 9, s.memory.start)
        });
    t.op(Op::StreamAttribute)
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |_, stream| {
            attribute(stream, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN)
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |_, stream| {
            attribute(stream, CU_STREAM_ATTRIBUTE_PRIORITY)
        })
        .fine("an access policy window", |s| {
            attribute(s.stream, CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW)
        })
        .fine("a map of domains", |s| {
            attribute(s.stream, CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP)
        })
        .refused("an unknown attribute", CUDA_ERROR_INVALID_VALUE, |s| {
            attribute(s.stream, 99)
        });
    t.op(Op::EventExport)
        .handle(Kind::Event, CUDA_ERROR_INVALID_HANDLE, |_, event| {
            Draft::of(&EventExport { event })
        });
    t.op(Op::EventImport)
        .new_handle(Kind::Event, CUDA_ERROR_INVALID_HANDLE, |s, event| {
            let token = export(s);
            Draft::of(&EventImport {
                event,
                token,
                device: 0,
                pad: 0,
            })
        })
        .device(|s, device| {
            let (event, token) = (s.unused(Kind::Event), export(s));
            Draft::of(&EventImport {
                event,
                token,
                device,
                pad: 0,
            })
        })
        .refused("a forged token", CUDA_ERROR_MAP_FAILED, |s| {
            let (event, mut token) = (s.unused(Kind::Event), export(s));
            token[0] ^= 1;
            Draft::of(&EventImport {
                event,
                token,
                device: 0,
                pad: 0,
            })
        });
    t
}
