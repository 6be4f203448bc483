//! Launches, copies, streams, events.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::*;
use mpsshim_proto::segment::{FLAGS, STAGING_LEN};
use mpsshim_tests::peer::{copy, fill_params, launch, memset, spinning_ptx};
use mpsshim_tests::refusals::{Draft, Scene, Table};

/// A launch of `fill` on the session's memory.
fn fill(s: &Scene, function: u64, stream: u64) -> Draft {
    let params = fill_params(s.memory.start, 1, 1);
    Draft::of(&launch(function, stream, 1, params.len())).with(&params[..])
}

/// The same with one attribute, which begins with this word.
fn fill_with(s: &Scene, attribute: u32, value: u64) -> Draft {
    let params = fill_params(s.memory.start, 1, 1);
    let body = Launch {
        attributes: 1,
        ..launch(s.function, s.stream, 1, params.len())
    };
    let mut bytes = [0u64; 9];
    (bytes[0], bytes[1]) = (attribute.into(), value);
    Draft::of(&body).with(&params[..]).with(&bytes)
}

fn on_stream(event: u64, stream: u64) -> Draft {
    Draft::of(&EventOnStream {
        event,
        stream,
        flags: 0,
        pad: 0,
    })
}

fn mark_event(event: u64, stream: u64, slot: u32) -> Draft {
    Draft::of(&MarkEvent {
        event,
        stream,
        slot,
        value: 1,
    })
}

fn stream(stream: u64) -> StreamCreate {
    StreamCreate {
        stream,
        ..StreamCreate::default()
    }
}

/// A stream of the first device, with a legacy default stream of this device.
fn blocking(s: &mut Scene, device: u32) -> Draft {
    let legacy = s.unused(Kind::Stream);
    let body = StreamCreate {
        legacy,
        device,
        ..stream(legacy)
    };
    s.peer.post(Op::StreamCreate, &body, &[]).expect("posted");
    let new = s.unused(Kind::Stream);
    Draft::of(&StreamCreate {
        legacy,
        ..stream(new)
    })
}

fn from_staging(s: &Scene, at: u64, len: u64) -> Draft {
    let to = s.memory.start;
    Draft::of(&copy(Side::Device, to, Side::Staging, at, len, s.stream))
}

fn rows(s: &Scene, width: u64, height: u64, pitch: u64) -> Draft {
    Draft::of(&Memset {
        width,
        height,
        pitch,
        ..memset(s.memory.start, 0, 0, s.stream)
    })
}

pub fn table() -> Table {
    let mut t = Table::default();
    t.op(Op::Launch)
        .handle(Kind::Function, CUDA_ERROR_INVALID_HANDLE, |s, function| {
            fill(s, function, s.stream)
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            fill(s, s.function, stream)
        })
        .refused(
            "fewer parameters than the kernel has",
            CUDA_ERROR_INVALID_VALUE,
            |s| Draft::of(&launch(s.function, s.stream, 1, 15)).with(&[0u8; 15]),
        )
        .refused("no block", CUDA_ERROR_INVALID_VALUE, |s| {
            let params = fill_params(s.memory.start, 1, 1);
            Draft::of(&launch(s.function, s.stream, 0, params.len())).with(&params[..])
        })
        .fine("an attribute", |s| {
            fill_with(s, CU_LAUNCH_ATTRIBUTE_PRIORITY, 0)
        })
        .refused("an unknown attribute", CUDA_ERROR_INVALID_VALUE, |s| {
            fill_with(s, CU_LAUNCH_ATTRIBUTE_MAX, 0)
        })
        .refused(
            "a node that kernels may change",
            CUDA_ERROR_NOT_SUPPORTED,
            |s| fill_with(s, CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, 1),
        )
        // softgpu records no events in launches.
        .handle_where(
            Kind::Event,
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_INVALID_HANDLE),
            |s, event| fill_with(s, CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT, event),
        )
        .handle_where(
            Kind::Event,
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_INVALID_HANDLE),
            |s, event| fill_with(s, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT, event),
        )
        .ends("parameters that are not in the message", |s| {
            Draft::of(&launch(s.function, s.stream, 1, 16))
        })
        .fine("as many parameters as there may be", |s| {
            let mut params = fill_params(s.memory.start, 1, 1);
            params.resize(PARAMS_MAX, 0);
            Draft::of(&launch(s.function, s.stream, 1, PARAMS_MAX)).with(&params[..])
        })
        .fine("as many attributes as there may be", |s| {
            let params = fill_params(s.memory.start, 1, 1);
            let body = Launch {
                attributes: ATTRIBUTES_MAX as u32,
                ..launch(s.function, s.stream, 1, params.len())
            };
            Draft::of(&body)
                .with(&params[..])
                .with(&[0u8; ATTRIBUTES_MAX * size_of::<CUlaunchAttribute>()])
        })
        .refused(
            "an unknown attribute behind another, and both behind 12 bytes",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                let module = s.peer.module(spinning_ptx().as_bytes()).expect("a module");
                let spin = s.peer.function(module, "spin").expect("a function");
                let body = Launch {
                    attributes: 2,
                    ..launch(spin, s.stream, 1, 12)
                };
                let mut attributes = [0u64; 18];
                attributes[9] = CU_LAUNCH_ATTRIBUTE_MAX.into();
                Draft::of(&body).with(&[0u64; 2]).with(&attributes)
            },
        )
        .ends("more parameters than there may be", |s| {
            Draft::of(&launch(s.function, s.stream, 1, PARAMS_MAX + 1))
                .with(&vec![0u8; PARAMS_MAX + 1][..])
        })
        .ends("more attributes than there may be", |s| {
            let attributes = ATTRIBUTES_MAX + 1;
            let body = Launch {
                attributes: attributes as u32,
                ..launch(s.function, s.stream, 1, 16)
            };
            Draft::of(&body)
                .with(&[0u8; 16])
                .with(&vec![0u8; attributes * size_of::<CUlaunchAttribute>()][..])
        })
        .ends("an attribute that is not all in the message", |s| {
            let body = Launch {
                attributes: 1,
                ..launch(s.function, s.stream, 1, 16)
            };
            Draft::of(&body)
                .with(&[0u8; 16])
                .with(&[0u8; size_of::<CUlaunchAttribute>() - 16])
        });
    t.op(Op::Clusters)
        .handle_where(
            Kind::Function,
            (CUDA_SUCCESS, CUDA_ERROR_INVALID_HANDLE),
            |_, function| Draft::of(&launch(function, 0, 1, 0)),
        )
        .refused("an unknown attribute", CUDA_ERROR_INVALID_VALUE, |s| {
            let body = Launch {
                attributes: 1,
                ..launch(s.function, 0, 1, 0)
            };
            Draft::of(&body).with(&[u64::from(CU_LAUNCH_ATTRIBUTE_MAX), 0, 0, 0, 0, 0, 0, 0, 0])
        })
        .ends("more attributes than there may be", |s| {
            let body = Launch {
                attributes: u32::MAX,
                ..launch(s.function, 0, 1, 0)
            };
            Draft::of(&body)
        })
        .ends("an attribute that is not in the message", |s| {
            let body = Launch {
                attributes: 1,
                ..launch(s.function, 0, 1, 0)
            };
            Draft::of(&body)
        });
    t.op(Op::Mark)
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |_, stream| {
            Draft::of(&Mark {
                stream,
                slot: FLAGS as u32 - 1,
                value: 1,
            })
        })
        .ends("a flag that is not there", |s| {
            Draft::of(&Mark {
                stream: s.stream,
                slot: FLAGS as u32,
                value: 1,
            })
        });
    t.op(Op::CopyInline)
        .range(CUDA_ERROR_INVALID_VALUE, |s, range| {
            // A longer one breaks the protocol.
            let (to, len) = match range.len {
                64 => (range.start, 64),
                len => (range.start.wrapping_add(len), 64),
            };
            let stream = s.stream;
            Draft::of(&CopyInline { to, stream, len }).with(&[0u8; 64])
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            let (to, len) = (s.memory.start, 64);
            Draft::of(&CopyInline { to, stream, len }).with(&[0u8; 64])
        })
        .fine("as much as there may be", |s| {
            let (to, stream, len) = (s.memory.start, s.stream, INLINE_COPY_MAX as u64);
            Draft::of(&CopyInline { to, stream, len }).with(&[0u8; INLINE_COPY_MAX])
        })
        .ends("more than there may be", |s| {
            let (to, stream, len) = (s.memory.start, s.stream, INLINE_COPY_MAX as u64 + 1);
            Draft::of(&CopyInline { to, stream, len }).with(&[0u8; INLINE_COPY_MAX + 1])
        })
        .ends("bytes that are not in the message", |s| {
            let (to, stream, len) = (s.memory.start, s.stream, 64);
            Draft::of(&CopyInline { to, stream, len }).with(&[0u8; 48])
        });
    t.op(Op::Copy)
        .range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            let from = s.memory.start;
            let (to, len) = (to.start, to.len);
            Draft::of(&copy(Side::Device, to, Side::Device, from, len, s.stream))
        })
        .range(CUDA_ERROR_INVALID_VALUE, |s, from| {
            let to = s.memory.start;
            let (from, len) = (from.start, from.len);
            Draft::of(&copy(Side::Device, to, Side::Device, from, len, s.stream))
        })
        .host_range(CUDA_ERROR_INVALID_VALUE, |s, from| {
            let to = s.memory.start;
            let (from, len) = (from.start, from.len);
            Draft::of(&copy(Side::Device, to, Side::Host, from, len, s.stream))
        })
        .host_range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            let from = s.memory.start;
            let (to, len) = (to.start, to.len);
            Draft::of(&copy(Side::Host, to, Side::Device, from, len, s.stream))
        })
        .range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            let from = s.host.start;
            let (to, len) = (to.start, to.len);
            Draft::of(&copy(Side::Device, to, Side::Host, from, len, s.stream))
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            let (to, from) = (s.memory.start, s.memory.start + 64);
            Draft::of(&copy(Side::Device, to, Side::Device, from, 64, stream))
        })
        .fine("the end of the staging area", |s| {
            from_staging(s, STAGING_LEN as u64 - 64, 64)
        })
        .ends("more than there is of the staging area", |s| {
            from_staging(s, STAGING_LEN as u64 - 64, 65)
        })
        .ends("a place behind the staging area", |s| {
            from_staging(s, STAGING_LEN as u64 + 1, 0)
        })
        .ends("a length that overflows", |s| {
            let (from, len) = (s.memory.start, u64::MAX - 63);
            Draft::of(&copy(Side::Staging, 64, Side::Device, from, len, s.stream))
        })
        .ends("an unknown side", |s| {
            let (to, stream) = (s.memory.start, s.stream);
            let body = copy(Side::Device, to, Side::Device, to, 64, stream);
            Draft::of(&Copy { sides: 3, ..body })
        })
        .ends("an unknown side to copy from", |s| {
            let (to, stream) = (s.memory.start, s.stream);
            let body = copy(Side::Device, to, Side::Device, to, 64, stream);
            Draft::of(&Copy {
                sides: 3 << 8,
                ..body
            })
        })
        .ends("host memory on both sides", |s| {
            let (to, from) = (s.host.start, s.host.start + 64);
            Draft::of(&copy(Side::Host, to, Side::Host, from, 64, s.stream))
        });
    t.op(Op::Memset)
        .range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            Draft::of(&Memset {
                element: 1,
                ..memset(to.start, 0, to.len, s.stream)
            })
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            Draft::of(&memset(s.memory.start, 0, 16, stream))
        })
        .refused(
            "nothing of another session's memory",
            CUDA_ERROR_INVALID_VALUE,
            |s| Draft::of(&memset(s.others_memory.start, 0, 0, s.stream)),
        )
        .fine("rows", |s| rows(s, 16, 4, 64))
        .refused("rows that overlap", CUDA_ERROR_INVALID_VALUE, |s| {
            rows(s, 16, 4, 63)
        })
        .refused("a row that overflows", CUDA_ERROR_INVALID_VALUE, |s| {
            rows(s, 1 << 62, 1, 0)
        })
        .refused("rows that overflow", CUDA_ERROR_INVALID_VALUE, |s| {
            rows(s, 16, 1 << 32, 1 << 32)
        })
        .refused("no rows", CUDA_ERROR_INVALID_VALUE, |s| rows(s, 16, 0, 64))
        .refused("a row too many", CUDA_ERROR_INVALID_VALUE, |s| {
            rows(s, 16, s.memory.len / 64 + 1, 64)
        })
        .ends("elements of 3 bytes", |s| {
            Draft::of(&Memset {
                element: 3,
                ..memset(s.memory.start, 0, 16, s.stream)
            })
        })
        .ends("rows of elements of 8 bytes", |s| {
            Draft::of(&Memset {
                element: 8,
                height: 2,
                pitch: 256,
                ..memset(s.memory.start, 0, 16, s.stream)
            })
        });
    t.op(Op::StreamCreate)
        .new_handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |_, new| {
            Draft::of(&stream(new))
        })
        .device(|s, device| {
            let new = s.unused(Kind::Stream);
            Draft::of(&StreamCreate {
                device,
                ..stream(new)
            })
        })
        .fine("a blocking stream", |s| blocking(s, 0))
        .refused(
            "another device's legacy default stream",
            CUDA_ERROR_INVALID_HANDLE,
            |s| blocking(s, 1),
        )
        // The live stream is no legacy default stream.
        .handle_where(
            Kind::Stream,
            [CUDA_ERROR_INVALID_HANDLE; 2].into(),
            |s, legacy| {
                let new = s.unused(Kind::Stream);
                Draft::of(&StreamCreate {
                    legacy,
                    ..stream(new)
                })
            },
        )
        .handle(Kind::GreenContext, CUDA_ERROR_INVALID_HANDLE, |s, green| {
            let new = s.unused(Kind::Stream);
            Draft::of(&StreamCreate {
                green,
                ..stream(new)
            })
        })
        .refused(
            "another device's green context",
            CUDA_ERROR_INVALID_DEVICE,
            |s| {
                let (new, green) = (s.unused(Kind::Stream), s.make(Kind::GreenContext));
                Draft::of(&StreamCreate {
                    green,
                    device: 1,
                    ..stream(new)
                })
            },
        );
    t.op(Op::StreamDestroy)
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |_, object| {
            Draft::of(&Object { object })
        });
    t.op(Op::EventCreate)
        .new_handle(Kind::Event, CUDA_ERROR_INVALID_HANDLE, |_, event| {
            Draft::of(&EventCreate {
                event,
                ..EventCreate::default()
            })
        })
        .device(|s, device| {
            let event = s.unused(Kind::Event);
            Draft::of(&EventCreate {
                event,
                flags: 0,
                device,
            })
        });
    t.op(Op::EventDestroy)
        .handle(Kind::Event, CUDA_ERROR_INVALID_HANDLE, |_, object| {
            Draft::of(&Object { object })
        });
    t.op(Op::EventRecord)
        .handle(Kind::Event, CUDA_ERROR_INVALID_HANDLE, |s, event| {
            on_stream(event, s.stream)
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            on_stream(s.make(Kind::Event), stream)
        })
        .refused("unknown flags", CUDA_ERROR_INVALID_VALUE, |s| {
            let event = s.make(Kind::Event);
            Draft::of(&EventOnStream {
                event,
                stream: s.stream,
                flags: u32::MAX,
                pad: 0,
            })
        });
    t.op(Op::StreamWaitEvent)
        .handle(Kind::Event, CUDA_ERROR_INVALID_HANDLE, |s, event| {
            on_stream(event, s.stream)
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            on_stream(s.make(Kind::Event), stream)
        });
    t.op(Op::MarkEvent)
        .handle(Kind::Event, CUDA_ERROR_INVALID_HANDLE, |s, event| {
            mark_event(event, s.stream, 0)
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            mark_event(s.make(Kind::Event), stream, 0)
        })
        .ends("a flag that is not there", |s| {
            mark_event(s.make(Kind::Event), s.stream, FLAGS as u32)
        });
    t.op(Op::EventQuery)
        .handle(Kind::Event, CUDA_ERROR_INVALID_HANDLE, |_, object| {
            Draft::of(&Object { object })
        });
    t.op(Op::EventElapsed)
        // Neither was ever recorded.
        .handle_where(
            Kind::Event,
            (CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE),
            |s, start| {
                let end = s.make(Kind::Event);
                Draft::of(&EventPair { start, end })
            },
        )
        .fine("events that were recorded", |s| {
            let start = recorded(s);
            Draft::of(&EventPair { start, end: start })
        })
        .refused("a stale second event", CUDA_ERROR_INVALID_HANDLE, |s| {
            let start = recorded(s);
            let live = Handle(start);
            let end = Handle::new(Kind::Event, live.generation() + 1, live.index()).0;
            Draft::of(&EventPair { start, end })
        })
        .refused(
            "another session's second event",
            CUDA_ERROR_INVALID_HANDLE,
            |s| {
                let (start, end) = (recorded(s), s.of_other(Kind::Event));
                Draft::of(&EventPair { start, end })
            },
        );
    t
}

/// An event that was recorded.
fn recorded(s: &mut Scene) -> u64 {
    let event = s.make(Kind::Event);
    let body = EventOnStream {
        event,
        stream: s.stream,
        flags: 0,
        pad: 0,
    };
    let stream = s.stream;
    let posted = s.peer.post(Op::EventRecord, &body, &[]);
    posted
        .and_then(|()| s.peer.finish(stream))
        .expect("recorded");
    event
}
