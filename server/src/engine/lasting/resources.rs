//! Multiprocessors that a client was told of, and parts of devices that are assigned to its contexts.
//!
//! The driver's structures belong to one process. The next server asks its driver the same again, in the same order; a
//! resource keeps its token. Green contexts are made again by their messages.

use super::{Lasting, Lost, Making, describe, failed};
use crate::engine::base::call::Incoming;
use crate::engine::base::call_error::CallError;
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::green::{GreenRef, Told, count_of};
use crate::engine::gpu::partition::Place;
use crate::engine::objects::streams::Stream;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_model::limits::Percentage;
use mpsshim_proto::message::context::{
    self, Confine, GreenCreate, MAX_GROUPS, ResourceJoin, ResourceQuery, ResourceSplit,
};
use mpsshim_proto::message::{Object, Op};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use zerocopy::{Immutable, IntoBytes};

/// State of a record of [`Resource`]; the record's operation is the message's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceState {
    message: Vec<u8>,
    /// The resources of the answer; none for a description.
    told: Vec<Told>,
    /// Index of the description, if it is one.
    description: Option<u32>,
}

/// A message that told the client of resources or of a description.
pub struct Resource;

impl Lasting for Resource {
    const KIND: Kind = Kind::Resource;
    type State = ResourceState;

    fn make(
        record: &Record,
        state: ResourceState,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let op = Op::from_u16(record.op).ok_or("its description cannot be read")?;
        let message = Incoming::copied(op, 0, &state.message);
        let again = tell_again(session, making.shared, message, &state);
        again.map_err(|why| format!("{op:?}: {why}"))
    }
}

fn tell_again(
    session: &mut Session,
    shared: &Shared,
    message: Incoming<'_>,
    state: &ResourceState,
) -> Result<(), Lost> {
    let lost = |error: CallError| error.to_string();
    match message.op {
        Op::ResourceQuery => {
            let body: ResourceQuery = message.body().map_err(lost)?;
            let (resource, device) =
                query(session, shared, &body).map_err(|one| one.to_string())?;
            let resources = &mut session.objects.resources;
            resources.tell_again(&[resource], device, &state.told)?;
            if body.green != 0 {
                resources.note_source(body.green);
            }
            Ok(())
        }
        Op::ResourceSplit => {
            let body: ResourceSplit = message.body().map_err(lost)?;
            let groups = split(session, shared, &body).map_err(|one| one.to_string())?;
            let resources = &mut session.objects.resources;
            resources.tell_again(&groups.all(), groups.device, &state.told)
        }
        Op::ResourceJoin => {
            let at = join(session, shared, message).map_err(lost)?;
            let before = state.description.ok_or("its description cannot be read")?;
            match at == before {
                true => Ok(()),
                false => Err(format!("description {at} instead of {before}")),
            }
        }
        _ => Err("its description cannot be read".to_owned()),
    }
}

/// The part of a device in which the session has its place; `None`: the whole device.
pub fn place_on<'a>(session: &'a Session, device: &Device) -> Option<&'a Place> {
    let place = session.objects.places.get(device.ordinal.index());
    place.and_then(Option::as_ref)
}

/// The part of a device that the session may use; `None`: the whole device.
///
/// # Errors
/// Driver errors; `CUDA_ERROR_DEVICE_UNAVAILABLE` if static partitions of other clients leave nothing of it.
pub fn part_of(
    session: &Session,
    shared: &Shared,
    device: &Device,
) -> Result<Option<GreenRef>, CUresult> {
    let green = |place: &Place| place.green(&shared.gpu.driver, device);
    place_on(session, device).map(green).transpose()
}

/// The resource that a client asks for, and its device.
///
/// # Errors
/// Driver errors; `CUDA_ERROR_INVALID_HANDLE` for another session's green context.
pub fn query(
    session: &Session,
    shared: &Shared,
    body: &ResourceQuery,
) -> Result<(CUdevResource, Ordinal), CUresult> {
    let mut resource = CUdevResource::INVALID;
    let driver = &shared.gpu.driver.context;
    let device = if body.green == 0 {
        let device = shared.gpu.device(body.device)?;
        device.make_current(&shared.gpu.driver)?;
        match part_of(session, shared, device)? {
            Some(part) => driver.green_get_dev_resource(part.raw, &mut resource, body.kind)?,
            None => driver.device_get_dev_resource(device.raw, &mut resource, body.kind)?,
        }
        device.ordinal
    } else {
        let green = session.objects.greens.get(body.green)?;
        shared.gpu.devices[green.device].make_current(&shared.gpu.driver)?;
        driver.green_get_dev_resource(green.raw, &mut resource, body.kind)?;
        green.device
    };
    Ok((resource, device))
}

/// The result of a split.
pub struct Groups {
    /// The device of the resource.
    pub device: Ordinal,
    /// Number of groups; the client may not want them.
    pub count: u32,
    /// The rest of the resource, if the client wants it and there is one.
    pub remaining: Option<CUdevResource>,
    /// The groups, if the client wants them.
    pub groups: Vec<CUdevResource>,
}

impl Groups {
    /// The resources in the order in which the client is told of them.
    pub fn all(&self) -> Vec<CUdevResource> {
        let remaining = self.remaining.iter();
        remaining.chain(&self.groups).copied().collect()
    }
}

/// Splits a resource that the client was told of.
///
/// # Errors
/// Driver errors; `CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION` if the client has another number of multiprocessors.
pub fn split(session: &Session, shared: &Shared, body: &ResourceSplit) -> Result<Groups, CUresult> {
    let (from, device) = session.objects.resources.get(body.token)?;
    if body.count != from.sm[0] {
        // The program has changed the resource's multiprocessor count, which is read-only.
        return Err(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    }
    let mut groups = vec![CUdevResource::INVALID; body.groups.min(MAX_GROUPS) as usize];
    let mut count = groups.len() as u32;
    let mut remaining = CUdevResource::INVALID;
    let groups_at = match body.wanted & 1 {
        0 => std::ptr::null_mut(),
        _ => groups.as_mut_ptr(),
    };
    let remaining_at = match body.wanted & 2 {
        0 => std::ptr::null_mut(),
        _ => &raw mut remaining,
    };
    shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
    shared.gpu.driver.context.split_by_count(
        groups_at,
        &mut count,
        &from,
        remaining_at,
        body.flags,
        body.least,
    )?;
    let wanted = match body.wanted & 1 {
        0 => 0,
        _ => count as usize,
    };
    groups.truncate(wanted);
    Ok(Groups {
        device,
        count,
        remaining: (remaining.kind == CU_DEV_RESOURCE_TYPE_SM).then_some(remaining),
        groups,
    })
}

/// Combines resources that the client was told of into a description. Returns its index.
///
/// # Errors
/// Driver errors; a violation if the message is too short.
pub fn join(
    session: &mut Session,
    shared: &Shared,
    message: Incoming<'_>,
) -> Result<u32, CallError> {
    let body: ResourceJoin = message.body()?;
    let behind = message.behind::<ResourceJoin>()?;
    if body.count == 0 || body.count > MAX_GROUPS {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    let Some(tokens) = behind.get(..body.count as usize * 4) else {
        return Err(CallError::Violation(format!(
            "{} resources do not fit the message",
            body.count
        )));
    };
    let (words, _) = tokens.as_chunks::<4>();
    let tokens: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let device = session.objects.resources.get(tokens[0])?.1;
    shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
    let resources = &mut session.objects.resources;
    let at = resources.describe(&shared.gpu.driver, tokens, device)?;
    Ok(at as u32)
}

/// Describes a message that told the client of resources, if one of them is new. `before`: [`Resources::len`] before it.
///
/// [`Resources::len`]: crate::engine::gpu::green::Resources::len
pub fn describe_told(
    session: &mut Session,
    shared: &Shared,
    (op, before): (Op, usize),
    body: &(impl IntoBytes + Immutable),
    told: Vec<Told>,
) {
    let state = ResourceState {
        message: body.as_bytes().to_vec(),
        told,
        description: None,
    };
    describe_new(session, shared, (op, before), &state);
}

/// As [`describe_told`], for the description with this index.
pub fn describe_joined(
    session: &mut Session,
    shared: &Shared,
    before: usize,
    message: Incoming<'_>,
    at: u32,
) {
    let mut message = message.whole();
    message.truncate(size_of::<ResourceJoin>() + MAX_GROUPS as usize * 4);
    let state = ResourceState {
        message,
        told: Vec::new(),
        description: Some(at),
    };
    describe_new(session, shared, (Op::ResourceJoin, before), &state);
}

fn describe_new(
    session: &mut Session,
    shared: &Shared,
    (op, before): (Op, usize),
    state: &ResourceState,
) {
    if session.lasting.kept && session.objects.resources.len() > before {
        let record = Record::of(Kind::Resource, op as u16, before as u64, state);
        session.write_down(record);
        session.note_bonds(&shared.images);
    }
}

/// Describes the end of a green context.
pub fn describe_green_end(session: &mut Session, shared: &Shared, body: Object) {
    let green = body.object;
    let is_there = |stream: &Stream| stream.part == green;
    let has_streams = session.objects.streams.iter().any(is_there);
    let is_needed = session.objects.resources.note_ended(green, has_streams);
    if !session.lasting.kept {
        return;
    }
    // Before the record: the server may end in between.
    session.note_bonds(&shared.images);
    let op = Op::GreenDestroy as u16;
    session.write_down(match is_needed {
        // The next server makes it again, and destroys it behind the objects that come from it.
        true => Record::of(Kind::Sets, op, green, &body.as_bytes().to_vec()),
        false => Record::ending(Kind::Ends, op, green),
    });
    session.note_bonds(&shared.images);
}

/// Gives the parts of the devices, by ordinal, the sizes of which their client was told.
///
/// # Errors
/// If there is no part of such a size.
pub fn with_sizes(
    mut places: Vec<Option<Place>>,
    records: &[Record],
) -> Result<Vec<Option<Place>>, Lost> {
    // Devices of green contexts that have the whole part.
    let mut whole: HashMap<u64, u32> = HashMap::new();
    for record in records {
        let (device, count) = match (record.kind, Op::from_u16(record.op)) {
            (Kind::Makes, Some(op @ Op::GreenCreate)) => {
                let message: Vec<u8> = record.state().unwrap_or_default();
                let body = Incoming::copied(op, 0, &message).body::<GreenCreate>();
                if let Some(body) = body.ok().filter(|body| body.description == 0) {
                    whole.insert(body.green, body.device);
                }
                continue;
            }
            (Kind::Resource, Some(op @ Op::ResourceQuery)) => {
                let state: Option<ResourceState> = record.state();
                let Some(ResourceState { message, told, .. }) = state else {
                    continue;
                };
                let body = Incoming::copied(op, 0, &message).body::<ResourceQuery>();
                let (Ok(body), [(_, count)]) = (body, &told[..]) else {
                    continue;
                };
                match (body.kind, body.green, whole.get(&body.green)) {
                    (CU_DEV_RESOURCE_TYPE_SM, 0, _) => (body.device, *count),
                    (CU_DEV_RESOURCE_TYPE_SM, _, Some(device)) => (*device, *count),
                    _ => continue,
                }
            }
            _ => continue,
        };
        if let Some(Some(place)) = places.get_mut(device as usize)
            && place.count != count
        {
            let sized = place.part_of_size(count);
            let none = || format!("it has no part of {count} multiprocessors any more");
            *place = sized.ok_or_else(none)?;
        }
    }
    Ok(places)
}

/// A part of a device that is assigned to a context of the client.
pub struct Confined;

impl Lasting for Confined {
    const KIND: Kind = Kind::Confined;
    /// The server's ordinal of the device, hundredths of a percent, and the number of multiprocessors.
    type State = (u32, u32, u32);

    fn make(
        record: &Record,
        (device, hundredths, count): Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let body = Confine {
            green: record.key,
            device,
            hundredths,
        };
        let put = put_part(session, making.shared, &body, Some(count));
        put.map_err(failed("a part of a device", record))?;
        Ok(())
    }
}

/// Assigns a part of a device to a context of the client; one of exactly `count` multiprocessors if that is given. Returns
/// their number.
///
/// # Errors
/// Driver errors; `CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION` if there is no such part.
pub fn put_part(
    session: &mut Session,
    shared: &Shared,
    body: &Confine,
    count: Option<u32>,
) -> Result<u32, CUresult> {
    let device = shared.gpu.device(body.device)?;
    let asked = Percentage::from_hundredths(body.hundredths).unwrap_or(Percentage::ALL);
    let threads = asked.min(session.shared.terms.threads);
    let place = match (place_on(session, device), count) {
        (Some(place), None) => Some(place.part(threads)),
        (Some(place), Some(count)) => place.part_of_size(count),
        (None, count) => {
            let partition = device.partition(&shared.gpu.driver)?;
            match count {
                None => Some(partition.place(threads.of(partition.total))),
                Some(count) => partition.place_of_size(count),
            }
        }
    };
    let place = place.ok_or(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION)?;
    let count = place.count;
    let green = place.green(&shared.gpu.driver, device)?;
    let inserted = session.objects.greens.insert(body.green, green);
    inserted.map_err(|(status, _)| status)?;
    session.objects.places_of_contexts.insert(body.green, place);
    Ok(count)
}

/// Describes a part of a device that was assigned to a context of the client.
pub fn describe_part(session: &mut Session, shared: &Shared, body: &Confine, count: u32) {
    let state = (body.device, body.hundredths, count);
    describe::<Confined>(session, body.green, &state);
    session.note_bonds(&shared.images);
}

/// The resources that a client is told of, with their tokens, as its description has them.
pub fn told_of(resources: &[CUdevResource], shown: &[context::Resource]) -> Vec<Told> {
    let pairs = resources.iter().zip(shown);
    let told = pairs.map(|(resource, shown)| (shown.token, count_of(resource)));
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::calls::{Makes, Sets};
    use crate::engine::lasting::{Left, make};
    use crate::engine::testing::{Fixture, Function, obeys_with_handle};
    use mpsshim_model::bonds::Bonds;
    use mpsshim_proto::handle::Kind as HandleKind;
    use mpsshim_proto::message::StreamCreate;
    use mpsshim_proto::message::context::Resource as Shown;
    use mpsshim_proto::message::graph::CaptureBegin;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Multiprocessors of the device; the driver's structures of each server differ.
    static SIZE: AtomicU32 = AtomicU32::new(8);
    static SERVER: AtomicU32 = AtomicU32::new(0);

    fn resource(count: u32, which: u8) -> CUdevResource {
        let mut resource = CUdevResource {
            kind: CU_DEV_RESOURCE_TYPE_SM,
            sm: [count, 2, 2],
            ..CUdevResource::INVALID
        };
        resource.internal[0] = which;
        resource.internal[1] = SERVER.load(Ordering::Relaxed) as u8;
        resource
    }

    extern "C" fn whole(_: u64, to: &mut CUdevResource) -> CUresult {
        *to = resource(SIZE.load(Ordering::Relaxed), 0);
        CUDA_SUCCESS
    }

    extern "C" fn of_green(_: u64, to: &mut CUdevResource) -> CUresult {
        *to = resource(SIZE.load(Ordering::Relaxed) / 2, 9);
        CUDA_SUCCESS
    }

    /// Two halves, without a rest.
    extern "C" fn halves(
        to: *mut CUdevResource,
        count: &mut u32,
        from: &CUdevResource,
    ) -> CUresult {
        *count = (*count).min(2);
        for at in 0..*count as usize {
            let half = resource(from.sm[0] / 2, 10 * from.internal[0] + 1 + at as u8);
            // SAFETY: as many as the caller has room for.
            unsafe { to.add(at).write(half) };
        }
        CUDA_SUCCESS
    }

    fn fixture() -> Fixture {
        SIZE.store(8, Ordering::Relaxed);
        let functions = [
            ("cuDeviceGetDevResource", whole as Function),
            ("cuGreenCtxGetDevResource", of_green as Function),
            ("cuDevSmResourceSplitByCount", halves as Function),
            ("cuDevResourceGenerateDesc", obeys_with_handle as Function),
            ("cuGreenCtxStreamCreate", obeys_with_handle as Function),
        ];
        Fixture::with_keeper(&functions)
    }

    /// Another server.
    fn next() -> Fixture {
        let mut test = fixture();
        // Handles that the client has used.
        (0..16).for_each(|_| _ = test.new_handle(HandleKind::GreenContext));
        test
    }

    fn ask(test: &mut Fixture, green: u64) -> Shown {
        let body = ResourceQuery {
            green,
            device: 0,
            kind: CU_DEV_RESOURCE_TYPE_SM,
        };
        test.reply(Op::ResourceQuery, &body, &[]).expect("it")
    }

    fn halve(test: &mut Fixture, of: Shown) -> CUresult {
        let body = ResourceSplit {
            token: of.token,
            count: of.count,
            groups: 2,
            wanted: 3,
            flags: 0,
            least: 1,
        };
        test.told(Op::ResourceSplit, &body, &[])
    }

    fn joined(test: &mut Fixture, tokens: &[u32]) -> u64 {
        let body = ResourceJoin {
            count: tokens.len() as u32,
            device: 0,
        };
        let at = test.reply(Op::ResourceJoin, &body, tokens.as_bytes());
        at.expect("a description")
    }

    fn green(test: &mut Fixture, description: u32) -> u64 {
        let body = GreenCreate {
            green: test.new_handle(HandleKind::GreenContext),
            description,
            ..GreenCreate::default()
        };
        assert_eq!(test.told(Op::GreenCreate, &body, &[]), CUDA_SUCCESS);
        body.green
    }

    fn stream_in(test: &mut Fixture, green: u64) -> u64 {
        let body = StreamCreate {
            stream: test.new_handle(HandleKind::Stream),
            green,
            ..StreamCreate::default()
        };
        assert_eq!(test.told(Op::StreamCreate, &body, &[]), CUDA_SUCCESS);
        body.stream
    }

    fn destroy(test: &mut Fixture, op: Op, object: u64) {
        assert_eq!(test.told(op, &Object { object }, &[]), CUDA_SUCCESS);
    }

    fn described(test: &Fixture) -> Vec<Record> {
        let mut records = test.session.shared.description.records();
        records.retain(|record| record.kind != Kind::Client);
        records
    }

    fn kinds(test: &Fixture) -> Vec<(Kind, u16)> {
        let records = described(test);
        let kinds = records.iter().map(|record| (record.kind, record.op));
        kinds.collect()
    }

    /// Makes the objects of these records in another server.
    fn make_again(test: &mut Fixture, records: &[Record]) -> Result<(), Lost> {
        SERVER.fetch_add(1, Ordering::Relaxed);
        let shared = test.shared.clone();
        let mut left = Left::new();
        let session = &mut test.session;
        session.lasting.kept = false;
        let made = records.iter().try_for_each(|record| {
            let rest = (&*shared, &mut left);
            match record.kind {
                Kind::Makes => make::<Makes>(record, session, rest),
                Kind::Sets => make::<Sets>(record, session, rest),
                Kind::Resource => make::<Resource>(record, session, rest),
                Kind::Confined => make::<Confined>(record, session, rest),
                kind => panic!("{kind:?}"),
            }
        });
        session.lasting.kept = true;
        made
    }

    fn is_bound(test: &Fixture) -> bool {
        test.session.shared.description.bonds() != Bonds::default()
    }

    fn is_bound_by_parts(test: &Fixture) -> bool {
        let bonds = test.session.shared.description.bonds();
        bonds.0 & Bonds::PARTITIONS.0 != 0
    }

    #[test]
    fn a_graph_that_was_captured_in_a_green_context_binds_until_it_is_gone() {
        let mut test = fixture();
        let plain = test.stream();
        let own = green(&mut test, 0);
        for (stream, binds) in [(plain, false), (stream_in(&mut test, own), true)] {
            let begin = CaptureBegin {
                stream,
                ..CaptureBegin::default()
            };
            assert_eq!(test.told(Op::CaptureBegin, &begin, &[]), CUDA_SUCCESS);
            assert_eq!(is_bound_by_parts(&test), binds);
            let end = Object { object: stream };
            let object: u64 = test.reply(Op::CaptureEnd, &end, &[]).expect("a graph");
            assert_eq!(is_bound_by_parts(&test), binds);
            destroy(&mut test, Op::GraphDestroy, object);
            assert!(!is_bound_by_parts(&test));
        }
    }

    #[test]
    fn many_green_contexts_that_are_needed_and_gone_bind() {
        let mut test = fixture();
        for number in 1..=70 {
            let parent = green(&mut test, 0);
            let stream = stream_in(&mut test, parent);
            destroy(&mut test, Op::GreenDestroy, parent);
            destroy(&mut test, Op::StreamDestroy, stream);
            assert_eq!(is_bound_by_parts(&test), number > 64, "{number}");
        }
    }

    #[test]
    fn a_session_has_places_of_the_sizes_that_it_was_told() {
        let mut test = fixture();
        let shared = test.shared.clone();
        let device = shared.gpu.device(0).expect("a device");
        let partition = device.partition(&shared.gpu.driver);
        let partition = partition.expect("a partition");
        test.session.objects.places = vec![Some(partition.place(4))];
        let of_all = green(&mut test, 0);
        assert_eq!(ask(&mut test, of_all).count, 4);
        let records = described(&test);
        let sizes = |records: &[Record]| {
            let places = with_sizes(vec![Some(partition.place(8)), None], records);
            places.map(|places| places[0].as_ref().map(|place| place.count))
        };
        assert_eq!(sizes(&[]), Ok(Some(8)));
        assert_eq!(sizes(&records), Ok(Some(4)));
        // Without its green context, the resource may be of a part of the place.
        assert_eq!(sizes(&records[1..]), Ok(Some(8)));
        assert_eq!(ask(&mut test, 0).count, 4);
        SIZE.store(6, Ordering::Relaxed);
        let third = green(&mut test, 0);
        assert_eq!(ask(&mut test, third).count, 3);
        assert!(sizes(&described(&test)).is_err());
    }

    #[test]
    fn resources_and_green_contexts_are_made_again_in_their_order() {
        let mut test = fixture();
        let device = ask(&mut test, 0);
        assert_eq!(halve(&mut test, device), CUDA_SUCCESS);
        assert_eq!(joined(&mut test, &[1, 2]), 0);
        let own = green(&mut test, 1);
        let stream = stream_in(&mut test, own);
        let of_own = ask(&mut test, own);
        assert_eq!((of_own.token, of_own.count), (3, 4));
        assert_eq!(halve(&mut test, of_own), CUDA_SUCCESS);
        assert_eq!(joined(&mut test, &[4]), 1);
        let count = described(&test).len();
        // The same once more tells nothing new.
        assert_eq!(ask(&mut test, 0), device);
        assert_eq!(halve(&mut test, of_own), CUDA_SUCCESS);
        assert_eq!(joined(&mut test, &[1, 2]), 0);
        assert_eq!((described(&test).len(), is_bound(&test)), (count, false));
        let records = described(&test);
        drop(test);

        let mut test = next();
        assert_eq!(make_again(&mut test, &records), Ok(()));
        assert_eq!(test.session.objects.resources.len(), 8);
        assert!(test.session.objects.streams.index(stream).is_ok());
        assert_eq!(ask(&mut test, 0), device);
        assert_eq!(ask(&mut test, own), of_own);
        assert_eq!(joined(&mut test, &[1, 2]), 0);
        assert_eq!(joined(&mut test, &[4]), 1);
        assert!(described(&test).is_empty());
        green(&mut test, 2);
        destroy(&mut test, Op::StreamDestroy, stream);
        destroy(&mut test, Op::GreenDestroy, own);
        assert!(!is_bound(&test));
    }

    #[test]
    fn a_green_context_is_described_for_as_long_as_something_comes_from_it() {
        let mut test = fixture();
        let plain = green(&mut test, 0);
        destroy(&mut test, Op::GreenDestroy, plain);
        assert_eq!(kinds(&test), []);
        let source = green(&mut test, 0);
        let told = ask(&mut test, source);
        destroy(&mut test, Op::GreenDestroy, source);
        let of_source = [
            (Kind::Makes, Op::GreenCreate as u16),
            (Kind::Resource, Op::ResourceQuery as u16),
            (Kind::Sets, Op::GreenDestroy as u16),
        ];
        assert_eq!(kinds(&test), of_source);
        let parent = green(&mut test, 0);
        let stream = stream_in(&mut test, parent);
        destroy(&mut test, Op::GreenDestroy, parent);
        let of_parent = [
            (Kind::Makes, Op::GreenCreate as u16),
            (Kind::Makes, Op::StreamCreate as u16),
            (Kind::Sets, Op::GreenDestroy as u16),
        ];
        assert_eq!(kinds(&test)[3..], of_parent);
        assert!(!is_bound(&test));
        let records = described(&test);
        drop(test);

        let mut test = next();
        assert_eq!(make_again(&mut test, &records), Ok(()));
        assert_eq!(test.session.objects.greens.len(), 0);
        assert!(test.session.objects.streams.index(stream).is_ok());
        assert_eq!(halve(&mut test, told), CUDA_SUCCESS);
    }

    #[test]
    fn a_session_is_lost_if_its_resources_are_others() {
        let mut test = fixture();
        let device = ask(&mut test, 0);
        assert_eq!(halve(&mut test, device), CUDA_SUCCESS);
        joined(&mut test, &[1]);
        let records = described(&test);
        let [of_device, of_halves, of_join] = &records[..] else {
            panic!("{records:?}");
        };
        drop(test);
        let mut test = next();
        SIZE.store(6, Ordering::Relaxed);
        let why = "ResourceQuery: 6 multiprocessors instead of 8".to_owned();
        assert_eq!(make_again(&mut test, &records), Err(why));
        SIZE.store(8, Ordering::Relaxed);
        // Records of another process may be damaged.
        let damaged = |record: &Record, change: &dyn Fn(&mut ResourceState)| {
            let mut state: ResourceState = record.state().expect("a state");
            change(&mut state);
            Record::of(Kind::Resource, record.op, record.key, &state)
        };
        let all: [Vec<Record>; 8] = [
            vec![of_halves.clone()],
            vec![of_join.clone()],
            vec![damaged(of_device, &|state| state.told[0].0 = 1)],
            vec![damaged(of_device, &|state| state.told[0].0 = u32::MAX)],
            vec![damaged(of_device, &|state| state.told.clear())],
            vec![damaged(of_device, &|state| state.message.truncate(3))],
            vec![damaged(of_join, &|state| state.message.clear())],
            vec![Record {
                op: Op::GreenCreate as u16,
                ..of_device.clone()
            }],
        ];
        for records in all {
            assert!(make_again(&mut test, &records).is_err(), "{records:?}");
            assert_eq!(test.session.objects.resources.len(), 0);
        }
        let first = std::slice::from_ref(of_device);
        assert_eq!(make_again(&mut test, first), Ok(()));
        let splits = [
            damaged(of_halves, &|state| state.told[1].1 = 5),
            damaged(of_halves, &|state| state.told.push((3, 4))),
        ];
        for record in splits {
            assert!(make_again(&mut test, &[record]).is_err());
        }
    }

    #[test]
    fn a_context_has_a_part_of_the_same_size_again() {
        let mut test = fixture();
        let body = Confine {
            green: test.new_handle(HandleKind::GreenContext),
            device: 0,
            hundredths: 5000,
        };
        let count: u64 = test.reply(Op::Confine, &body, &[]).expect("a part");
        assert_eq!(count, 4);
        let records = described(&test);
        assert_eq!(kinds(&test), [(Kind::Confined, 0)]);
        assert!(!is_bound(&test));
        drop(test);
        let mut test = next();
        assert_eq!(make_again(&mut test, &records), Ok(()));
        let place = &test.session.objects.places_of_contexts[&body.green];
        assert_eq!(u64::from(place.count), count);
        destroy(&mut test, Op::GreenDestroy, body.green);
        for count in [0, 3, 9, u32::MAX] {
            let record = Record::of(Kind::Confined, 0, body.green, &(0u32, 5000u32, count));
            assert!(make_again(&mut test, &[record]).is_err(), "{count}");
        }
        assert_eq!(test.session.objects.greens.len(), 0);
    }
}
