//! Green contexts and device resources.

use super::reply::{Reply, number};
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::side::Side;
use crate::engine::gpu::green::Green;
use crate::engine::lasting::resources::{
    describe_green_end, describe_joined, describe_part, describe_told, join, place_on, put_part,
    query, split, told_of,
};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::context::{
    Confine, GreenCreate, ResourceGroups, ResourceJoin, ResourceQuery, ResourceSplit,
};
use mpsshim_proto::message::{Object, Op};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// `cuDeviceGetDevResource`, `cuGreenCtxGetDevResource`.
pub fn resource_query(session: &mut Session, shared: &Shared, body: ResourceQuery) -> Reply {
    let (resource, device) = query(session, shared, &body)?;
    let resources = &mut session.objects.resources;
    let before = resources.len();
    let shown = resources.tell(&[resource], device)?;
    if body.green != 0 && resources.len() > before {
        resources.note_source(body.green);
    }
    let told = told_of(&[resource], &shown);
    describe_told(session, shared, (Op::ResourceQuery, before), &body, told);
    Ok(shown.as_bytes().to_vec())
}

/// `cuDevSmResourceSplitByCount`.
pub fn resource_split(session: &mut Session, shared: &Shared, body: ResourceSplit) -> Reply {
    let groups = split(session, shared, &body)?;
    let all = groups.all();
    let before = session.objects.resources.len();
    let shown = session.objects.resources.tell(&all, groups.device)?;
    let told = told_of(&all, &shown);
    describe_told(session, shared, (Op::ResourceSplit, before), &body, told);
    let mut head = ResourceGroups {
        groups: groups.count,
        ..ResourceGroups::default()
    };
    let mut shown = &shown[..];
    if groups.remaining.is_some()
        && let Some((remaining, others)) = shown.split_first()
    {
        (head.remaining, shown) = (*remaining, others);
    }
    Ok([head.as_bytes(), shown.as_bytes()].concat())
}

/// `cuDevResourceGenerateDesc`.
pub fn resource_join(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, ResourceJoin>,
) -> Reply {
    let before = session.objects.resources.len();
    let at = join(session, shared, call.message)?;
    describe_joined(session, shared, before, call.message, at);
    Ok(number(at.into()))
}

/// Fails in an annex: a device can be partitioned only in its main context.
fn check_parts(session: &Session) -> Result<(), CUresult> {
    match session.side {
        Side::MAIN => Ok(()),
        _ => Err(CUDA_ERROR_NOT_SUPPORTED),
    }
}

/// `cuGreenCtxCreate`.
pub fn green_create(session: &mut Session, shared: &Shared, body: GreenCreate) -> Reply {
    check_parts(session)?;
    let device = shared.gpu.device(body.device)?;
    let description = match (body.description, place_on(session, device)) {
        (0, None) => CUdevResourceDesc::NULL,
        (0, Some(place)) => place.description(&shared.gpu.driver)?,
        (at, _) => session
            .objects
            .resources
            .description(at as usize - 1, device.ordinal)?,
    };
    device.make_current(&shared.gpu.driver)?;
    let mut raw = CUgreenCtx::NULL;
    shared
        .gpu
        .driver
        .context
        .green_create(&mut raw, description, device.raw, body.flags)?;
    let green = Arc::new(Green::of_client(raw, device.ordinal));
    if let Err((status, green)) = session.objects.greens.insert(body.green, green) {
        shared.lanes.bury(Buried::Green(green));
        return Err(status.into());
    }
    Ok(Vec::new())
}

/// Assigns a part of a device to one of the client's contexts, under a handle like a green context's. Returns its
/// number of multiprocessors.
pub fn confine(session: &mut Session, shared: &Shared, body: Confine) -> Reply {
    check_parts(session)?;
    let count = put_part(session, shared, &body, None)?;
    describe_part(session, shared, &body, count);
    Ok(number(count.into()))
}

/// `cuGreenCtxDestroy`, once its last stream has drained.
pub fn green_destroy(
    session: &mut Session,
    shared: &Shared,
    body: Object,
) -> Result<(), CallError> {
    let green = session.objects.greens.remove(body.object)?;
    session.objects.places_of_contexts.remove(&body.object);
    describe_green_end(session, shared, body);
    shared.lanes.bury(Buried::Green(green));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, obeys, obeys_with_handle, others,
    };
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::StreamCreate;
    use mpsshim_proto::message::context::{MAX_GROUPS, Resource};

    /// Tells of 8 multiprocessors, and [`obeys`].
    extern "C" fn whole(_: u64, resource: &mut CUdevResource) -> CUresult {
        resource.kind = CU_DEV_RESOURCE_TYPE_SM;
        resource.sm = [8, 2, 2];
        obeys()
    }

    /// As the driver's function: two groups of 4.
    extern "C" fn split(groups: *mut CUdevResource, count: &mut u32) -> CUresult {
        *count = (*count).min(2);
        for at in 0..*count as usize {
            let group = CUdevResource {
                kind: CU_DEV_RESOURCE_TYPE_SM,
                sm: [4, 2, 2],
                ..CUdevResource::INVALID
            };
            // SAFETY: as many as the caller has room for.
            unsafe { groups.add(at).write(group) };
        }
        let _ = counts();
        obeys()
    }

    const FUNCTIONS: [(&str, Function); 3] = [
        ("cuDeviceGetDevResource", whole as Function),
        ("cuGreenCtxGetDevResource", whole as Function),
        ("cuDevSmResourceSplitByCount", split as Function),
    ];

    fn query(green: u64, device: u32) -> ResourceQuery {
        ResourceQuery {
            green,
            device,
            kind: CU_DEV_RESOURCE_TYPE_SM,
        }
    }

    fn resource(test: &mut Fixture) -> Resource {
        let told = test.reply(Op::ResourceQuery, &query(0, 0), &[]);
        told.expect("a resource")
    }

    fn green(test: &mut Fixture) -> GreenCreate {
        GreenCreate {
            green: test.new_handle(Kind::GreenContext),
            ..GreenCreate::default()
        }
    }

    #[test]
    fn resources_are_of_devices_and_green_contexts_of_the_session() {
        let mut test = Fixture::new(&FUNCTIONS);
        let body = green(&mut test);
        assert_eq!(test.status(Op::GreenCreate, &body, &[]), CUDA_SUCCESS);
        let status = test.status(Op::ResourceQuery, &query(0, 1), &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_DEVICE);
        let [_, stale, context] = others(body.green);
        for green in [stale, context] {
            let status = test.status(Op::ResourceQuery, &query(green, 0), &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{green:#x}");
        }
        for green in [0, body.green] {
            test.orders(CUDA_ERROR_NOT_SUPPORTED);
            let status = test.status(Op::ResourceQuery, &query(green, 0), &[]);
            assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
            assert_eq!(test.session.objects.resources.len(), 0);
        }
        test.orders(CUDA_SUCCESS);
        assert_eq!(resource(&mut test).count, 8);
        test.orders(FAULT);
        assert_eq!(test.told(Op::ResourceQuery, &query(0, 0), &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn only_resources_that_the_client_was_told_of_are_split() {
        let mut test = Fixture::new(&FUNCTIONS);
        let split = |token, count, groups| ResourceSplit {
            token,
            count,
            groups,
            wanted: 3,
            flags: 0,
            least: 4,
        };
        let status = test.status(Op::ResourceSplit, &split(0, 8, 2), &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_RESOURCE_TYPE);
        let token = resource(&mut test).token;
        let status = test.status(Op::ResourceSplit, &split(token + 1, 8, 2), &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_RESOURCE_TYPE);
        // The program has changed it.
        let status = test.status(Op::ResourceSplit, &split(token, 7, 2), &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
        assert_eq!(test.calls(), 0);
        let body = split(token, 8, u32::MAX);
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let status = test.status(Op::ResourceSplit, &body, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        test.orders(CUDA_SUCCESS);
        let head: ResourceGroups = test.reply(Op::ResourceSplit, &body, &[]).expect("groups");
        assert_eq!(head.groups, 2);
        let groups = test.answer().len() - size_of::<ResourceGroups>();
        assert_eq!(groups, 2 * size_of::<Resource>());
    }

    #[test]
    fn only_resources_that_the_client_was_told_of_are_joined() {
        let mut functions = FUNCTIONS.to_vec();
        functions.push(("cuDevResourceGenerateDesc", obeys_with_handle as Function));
        let mut test = Fixture::new(&functions);
        let join = |count| ResourceJoin { count, device: 0 };
        let token = resource(&mut test).token;
        let known = token.to_le_bytes();
        for count in [0, MAX_GROUPS + 1, u32::MAX] {
            let status = test.status(Op::ResourceJoin, &join(count), &known);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{count}");
        }
        assert!(test.is_violation(Op::ResourceJoin, &join(2), &known));
        let unknown = (token + 1).to_le_bytes();
        let status = test.status(Op::ResourceJoin, &join(1), &unknown);
        assert_eq!(status, CUDA_ERROR_INVALID_RESOURCE_TYPE);
        let both = [known, unknown].concat();
        let status = test.status(Op::ResourceJoin, &join(2), &both);
        assert_eq!(status, CUDA_ERROR_INVALID_RESOURCE_TYPE);
        for (ordered, told) in [
            (CUDA_ERROR_NOT_SUPPORTED, Err(CUDA_ERROR_NOT_SUPPORTED)),
            (CUDA_SUCCESS, Ok(0)),
            // The same as before.
            (CUDA_SUCCESS, Ok(0)),
        ] {
            test.orders(ordered);
            let at = test.reply::<u64>(Op::ResourceJoin, &join(1), &known);
            assert_eq!(at, told);
        }
    }

    #[test]
    fn a_green_context_that_is_not_created_has_no_handle() {
        let mut test = Fixture::new(&[("cuGreenCtxCreate", obeys_with_handle as Function)]);
        let good = green(&mut test);
        let elsewhere = GreenCreate { device: 1, ..good };
        let undescribed = GreenCreate {
            description: 1,
            ..good
        };
        for (body, ordered, status, count) in [
            (elsewhere, CUDA_SUCCESS, CUDA_ERROR_INVALID_DEVICE, 0),
            (undescribed, CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, 0),
            (good, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED, 0),
            (good, CUDA_SUCCESS, CUDA_SUCCESS, 1),
            (good, CUDA_SUCCESS, CUDA_ERROR_INVALID_HANDLE, 1),
            (good, FAULT, FAULT, 1),
        ] {
            test.orders(ordered);
            assert_eq!(test.told(Op::GreenCreate, &body, &[]), status);
            assert_eq!(test.session.objects.greens.len(), count, "{status}");
        }
        assert_eq!(test.buried(), 1, "the one without a handle");
        assert!(test.has_ended());
    }

    #[test]
    fn parts_of_a_device_are_of_its_main_context_only() {
        let mut test = Fixture::new(&[("cuGreenCtxCreate", counts as Function)]);
        test.session.side = Side::ALL[1];
        let body = green(&mut test);
        let status = test.status(Op::GreenCreate, &body, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        let body = Confine {
            green: body.green,
            device: 0,
            hundredths: 5000,
        };
        let status = test.status(Op::Confine, &body, &[]);
        assert_eq!((status, test.calls()), (CUDA_ERROR_NOT_SUPPORTED, 0));
        test.session.side = Side::MAIN;
    }

    #[test]
    fn a_green_context_is_destroyed_once() {
        let mut test = Fixture::new(&[]);
        let object = green(&mut test);
        assert_eq!(test.status(Op::GreenCreate, &object, &[]), CUDA_SUCCESS);
        let object = object.green;
        for object in others(object) {
            let status = test.status(Op::GreenDestroy, &Object { object }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{object:#x}");
        }
        let body = Object { object };
        for status in [CUDA_SUCCESS, CUDA_ERROR_INVALID_HANDLE] {
            assert_eq!(test.status(Op::GreenDestroy, &body, &[]), status);
        }
        assert_eq!(test.buried(), 1);
    }

    #[test]
    fn a_stream_in_a_green_context_is_of_that_contexts_device() {
        let name = "cuGreenCtxStreamCreate";
        let mut test = Fixture::with_devices(2, &[(name, obeys_with_handle as Function)]);
        let of = green(&mut test);
        assert_eq!(test.status(Op::GreenCreate, &of, &[]), CUDA_SUCCESS);
        let good = StreamCreate {
            stream: test.new_handle(Kind::Stream),
            green: of.green,
            ..StreamCreate::default()
        };
        let elsewhere = StreamCreate { device: 1, ..good };
        let stale = StreamCreate {
            green: of.green + (1 << 32),
            ..good
        };
        for (body, ordered, status, count) in [
            (elsewhere, CUDA_SUCCESS, CUDA_ERROR_INVALID_DEVICE, 0),
            (stale, CUDA_SUCCESS, CUDA_ERROR_INVALID_HANDLE, 0),
            (good, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED, 0),
            (good, CUDA_SUCCESS, CUDA_SUCCESS, 1),
        ] {
            test.orders(ordered);
            assert_eq!(test.status(Op::StreamCreate, &body, &[]), status);
            assert_eq!(test.session.objects.streams.len(), count, "{status}");
        }
    }
}
