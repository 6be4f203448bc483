//! Green contexts and what they are made of.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::context::*;
use mpsshim_proto::message::{Object, Op, Value};
use mpsshim_tests::refusals::{Draft, Scene, Table};

/// The multiprocessors of a device.
fn whole(s: &mut Scene, device: u32) -> Resource {
    let body = ResourceQuery {
        green: 0,
        device,
        kind: CU_DEV_RESOURCE_TYPE_SM,
    };
    s.peer
        .ask(Op::ResourceQuery, &body, &[])
        .expect("a resource")
}

/// A description of all of them.
fn described(s: &mut Scene, device: u32) -> u32 {
    let token = whole(s, device).token;
    let body = ResourceJoin { count: 1, device };
    let made: Value = s
        .peer
        .ask(Op::ResourceJoin, &body, &token.to_le_bytes())
        .expect("a description");
    made.value as u32 + 1
}

fn split(resource: Resource) -> ResourceSplit {
    ResourceSplit {
        token: resource.token,
        count: resource.count,
        groups: 1,
        wanted: 3,
        flags: 0,
        least: resource.least,
    }
}

fn create(green: u64, device: u32, description: u32) -> Draft {
    Draft::of(&GreenCreate {
        green,
        description,
        device,
        flags: 1,
        pad: 0,
    })
}

fn confine(green: u64, device: u32) -> Draft {
    Draft::of(&Confine {
        green,
        device,
        hundredths: 5000,
    })
}

pub fn table() -> Table {
    let mut t = Table::default();
    t.op(Op::ResourceQuery)
        .handle(Kind::GreenContext, CUDA_ERROR_INVALID_HANDLE, |_, green| {
            Draft::of(&ResourceQuery {
                green,
                device: 0,
                kind: CU_DEV_RESOURCE_TYPE_SM,
            })
        })
        .device(|_, device| {
            Draft::of(&ResourceQuery {
                green: 0,
                device,
                kind: CU_DEV_RESOURCE_TYPE_SM,
            })
        })
        .refused("an unknown kind", CUDA_ERROR_INVALID_RESOURCE_TYPE, |_| {
            Draft::of(&ResourceQuery {
                green: 0,
                device: 0,
                kind: 99,
            })
        });
    t.op(Op::ResourceSplit)
        .fine("what the session was told", |s| {
            Draft::of(&split(whole(s, 0)))
        })
        .refused(
            "another number of multiprocessors",
            CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
            |s| {
                let resource = whole(s, 0);
                Draft::of(&ResourceSplit {
                    count: resource.count + 1,
                    ..split(resource)
                })
            },
        )
        .refused(
            "what the session was not told",
            CUDA_ERROR_INVALID_RESOURCE_TYPE,
            |s| {
                let resource = whole(s, 0);
                Draft::of(&ResourceSplit {
                    token: 1000,
                    ..split(resource)
                })
            },
        );
    t.op(Op::ResourceJoin)
        .fine("what the session was told", |s| {
            let token = whole(s, 0).token;
            Draft::of(&ResourceJoin {
                count: 1,
                device: 0,
            })
            .with(&token)
        })
        .refused("nothing", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&ResourceJoin::default())
        })
        .refused(
            "more than may be put together",
            CUDA_ERROR_INVALID_VALUE,
            |_| {
                Draft::of(&ResourceJoin {
                    count: 1025,
                    device: 0,
                })
                .with(&[0u32; 1025])
            },
        )
        .refused(
            "what the session was not told",
            CUDA_ERROR_INVALID_RESOURCE_TYPE,
            |_| {
                Draft::of(&ResourceJoin {
                    count: 1,
                    device: 0,
                })
                .with(&1000u32)
            },
        )
        .ends("resources that are not in the message", |s| {
            let token = whole(s, 0).token;
            Draft::of(&ResourceJoin {
                count: 64,
                device: 0,
            })
            .with(&token)
        });
    t.op(Op::GreenCreate)
        .new_handle(Kind::GreenContext, CUDA_ERROR_INVALID_HANDLE, |s, green| {
            let description = described(s, 0);
            create(green, 0, description)
        })
        .device(|s, device| {
            let green = s.unused(Kind::GreenContext);
            create(green, device, 0)
        })
        .refused("what was never described", CUDA_ERROR_INVALID_VALUE, |s| {
            let green = s.unused(Kind::GreenContext);
            create(green, 0, 1000)
        })
        .refused(
            "what was described of another device",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                let (green, description) = (s.unused(Kind::GreenContext), described(s, 1));
                create(green, 0, description)
            },
        );
    t.op(Op::GreenDestroy).handle(
        Kind::GreenContext,
        CUDA_ERROR_INVALID_HANDLE,
        |_, object| Draft::of(&Object { object }),
    );
    t.op(Op::Confine)
        .new_handle(Kind::GreenContext, CUDA_ERROR_INVALID_HANDLE, |_, green| {
            confine(green, 0)
        })
        .device(|s, device| {
            let green = s.unused(Kind::GreenContext);
            confine(green, device)
        });
    t
}
