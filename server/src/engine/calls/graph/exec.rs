//! Instances of graphs: instantiation, changes, launches.

use crate::engine::base::bounds::GRAPH_DEPTH;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::driver::is_sticky;
use crate::engine::base::graph_turns::session::may_launch_graph;
use crate::engine::base::journal::Refusal;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::printing::session::may_print;
use crate::engine::calls::capture::{all_nodes, take};
use crate::engine::calls::graph::loops::may_launch_loop;
use crate::engine::calls::graph::shown::{give_slots, host_nodes};
use crate::engine::calls::graph::{drop_kept, graph_ready, saved};
use crate::engine::calls::reply::{Reply, number};
use crate::engine::gpu::devices::volume;
use crate::engine::objects::graphs::{Exec, Origin};
use crate::engine::objects::levels::Level;
use crate::engine::objects::levels::session::{confine, level, note_fill};
use crate::engine::objects::pace::session::{prepare_work, submitted_work};
use crate::engine::objects::pace::{Length, Runs};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::graph::{
    GraphEnabled, GraphInstantiate, GraphInstantiated, GraphLaunch, GraphPair, GraphUpdated,
};
use mpsshim_proto::message::{Object, Op};
use mpsshim_proto::segment::FLAGS;
use zerocopy::IntoBytes;

/// `cuGraphInstantiate` in all its forms.
pub fn graph_instantiate(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, GraphInstantiate>,
) -> Reply {
    let Call { body, message } = call;
    const DEVICE_LAUNCH: u64 = 4;
    let (graph, device) = graph_ready(session, shared, body.graph)?;
    if body.flags & DEVICE_LAUNCH != 0 {
        // A kernel could launch it at any time, without any control by the server.
        return Err(CUDA_ERROR_NOT_SUPPORTED.into());
    }
    let slots: Vec<u32> = {
        let bytes = message.behind::<GraphInstantiate>()?;
        take(&mut &bytes[..], (body.slots as usize).min(FLAGS))?
    };
    let mut raw = CUgraphExec::NULL;
    let mut made = GraphInstantiated::default();
    let flags = flags_in_level(session, body.flags, device);
    let hosts = host_nodes(session, shared, graph, GRAPH_DEPTH)?;
    made.hosts = hosts.len() as u32;
    if slots.len() < hosts.len() {
        return Ok(made.as_bytes().to_vec());
    }
    give_slots(session, shared, &hosts, &slots, device)?;
    // From here on, anything that the driver has made must be kept or destroyed.
    let uploads_on = match body.stream {
        0 => None,
        handle => Some(session.objects.streams.index(handle)?),
    };
    let source = session.objects.graphs.graphs.get(body.graph)?;
    let (parts, is_conditional) = (source.size.parts, !source.conditions.is_empty());
    // Conditions that may defer the message are checked before anything is counted.
    if uploads_on.is_some() && !may_launch_graph(session, &shared.gpu, body.graph) {
        return Err(CallError::Full);
    }
    let stream = match (body.with_params, body.stream) {
        (0, _) | (_, 0) => CUstream::NULL,
        (_, handle) => session.prepare(&shared.gpu, handle)?.1,
    };
    session.objects.graphs.hold(parts)?;
    let status = if body.with_params == 0 {
        shared.gpu.driver.graph.instantiate(&mut raw, graph, flags)
    } else {
        let mut params = CUDA_GRAPH_INSTANTIATE_PARAMS {
            flags,
            upload_stream: stream.0,
            ..CUDA_GRAPH_INSTANTIATE_PARAMS::default()
        };
        let driver = &shared.gpu.driver.graph;
        let status = driver.instantiate_with(&mut raw, graph, &mut params);
        made.result = params.result;
        let node = CUgraphNode(params.error_node);
        made.error_node = session
            .objects
            .graphs
            .node_handle(node, body.graph)
            .unwrap_or(0);
        status
    };
    if let Err(status) = status {
        session.objects.graphs.let_go(parts);
        if is_sticky(status) {
            // A session that goes on in the next server has it executed there.
            return Err(status.into());
        }
        made.status = status.0;
        return Ok(made.as_bytes().to_vec());
    }
    if let Some(index) = uploads_on
        && let Err(error) = session.submitted(&shared.gpu, index, 1)
    {
        session.objects.graphs.let_go(parts);
        let _ = shared.gpu.driver.graph.exec_destroy(raw);
        return Err(error);
    }
    made.prints = u32::from(session.objects.graphs.prints);
    let origin = saved::origin(session, shared, body.graph);
    let exec = Exec {
        raw,
        device,
        prints: session.objects.graphs.prints,
        length: Length::Unknown,
        fill: fill_of(shared, graph, device),
        parts,
        slots: hosts.iter().map(|(node, _)| *node).zip(slots).collect(),
        flags: body.flags,
        calls_or_waits: origin.as_ref().is_none_or(Origin::calls_or_waits),
        is_conditional,
        origin,
        written: false,
    };
    session
        .objects
        .graphs
        .waits
        .extend(exec.slots.iter().map(|(_, slot)| *slot));
    match session.objects.graphs.execs.insert(exec) {
        Ok(handle) => {
            made.exec = handle;
            session.objects.graphs.note_stale();
            session.objects.graphs.memory.share(body.graph, handle);
            if let Err(status) = session.objects.graphs.charge(&session.account, handle) {
                let _ = shared.gpu.driver.graph.exec_destroy(raw);
                session.objects.graphs.execs.remove(handle);
                session.objects.graphs.let_go(parts);
                session.objects.graphs.memory.ended(handle);
                return Err(status.into());
            }
        }
        Err(status) => {
            session.objects.graphs.let_go(parts);
            let _ = shared.gpu.driver.graph.exec_destroy(raw);
            return Err(status.into());
        }
    }
    Ok(made.as_bytes().to_vec())
}

/// The flags with which a graph is instantiated. Where clients have levels, all kernels of a graph have the priority
/// of the stream in which it is launched, since that is the client's level and the kernels' own priorities are not.
pub fn flags_in_level(session: &Session, flags: u64, device: Ordinal) -> u64 {
    match level(session, device) {
        Level::Own => flags,
        _ => flags & !u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY),
    }
}

/// `cuGraphLaunch`.
pub fn graph_launch(
    session: &mut Session,
    shared: &Shared,
    body: GraphLaunch,
) -> Result<(), CallError> {
    let exec = session.objects.graphs.execs.get(body.exec)?;
    let (raw, prints, parts, fill) = (exec.raw, exec.prints, exec.parts, exec.fill);
    let (calls_or_waits, is_conditional) = (exec.calls_or_waits, exec.is_conditional);
    if prints && !may_print(session, &shared.gpu)
        || !may_launch_graph(session, &shared.gpu, body.exec)
        || !may_launch_loop(session, shared, body.exec, body.stream)
    {
        return Err(CallError::Full);
    }
    if calls_or_waits {
        session.note_unrepeatable(Refusal::Operation(Op::GraphLaunch as u16));
    }
    session.note_graph_launch();
    let (index, mut stream) =
        prepare_work(session, &shared.gpu, body.stream, Runs::Graph(body.exec))?;
    match session.objects.streams.at(index)?.capturing {
        true => session.objects.graphs.capture(parts)?,
        false => {
            stream = confine(session, &shared.gpu, index, None)?;
            if is_conditional {
                // A launch that also uploads the graph may end the context. An error recurs in the launch.
                let _ = shared.gpu.driver.graph.upload(raw, stream);
            }
        }
    }
    // A fault may be detected before the launch returns.
    session.shared.launched.note_graph(index);
    shared.gpu.driver.graph.launch(raw, stream)?;
    if !session.objects.graphs.memory.is_empty() {
        // The graph may also free memory of pools.
        for address in session.objects.graphs.memory.frees_of(body.exec) {
            let charge = session.objects.pools.note_free(address);
            session.objects.leaving.extend(charge);
        }
        session.objects.graphs.memory.launched(body.exec);
        session.objects.graphs.discharge();
    }
    session.flow.counts.launches += 1;
    submitted_work(session, &shared.gpu, index, Runs::Graph(body.exec))?;
    if let Some(fill) = fill {
        note_fill(session, index, fill);
    }
    Ok(())
}

/// `cuGraphUpload`.
pub fn graph_upload(
    session: &mut Session,
    shared: &Shared,
    body: GraphLaunch,
) -> Result<(), CallError> {
    let raw = session.objects.graphs.execs.get(body.exec)?.raw;
    if !may_launch_graph(session, &shared.gpu, body.exec)
        || !may_launch_loop(session, shared, body.exec, body.stream)
    {
        return Err(CallError::Full);
    }
    let (index, stream) = session.prepare(&shared.gpu, body.stream)?;
    shared.gpu.driver.graph.upload(raw, stream)?;
    session.submitted(&shared.gpu, index, 1)
}

fn exec_ready(session: &Session, shared: &Shared, handle: u64) -> Result<CUgraphExec, CUresult> {
    let exec = session.objects.graphs.execs.get(handle)?;
    shared.gpu.devices[exec.device].make_current(&shared.gpu.driver)?;
    Ok(exec.raw)
}

/// `cuGraphExecDestroy`: launches in flight still complete.
pub fn graph_exec_destroy(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let raw = exec_ready(session, shared, body.object)?;
    shared.gpu.driver.graph.exec_destroy(raw)?;
    if let Some(exec) = session.objects.graphs.execs.remove(body.object) {
        session.objects.graphs.let_go(exec.parts);
    }
    session.objects.graphs.forget_bytes(body.object);
    session.objects.graphs.note_destroyed();
    session.objects.graphs.memory.ended(body.object);
    session.objects.graphs.discharge();
    drop_kept(session, shared);
    Ok(Vec::new())
}

/// `cuGraphExecGetFlags`.
pub fn graph_exec_flags(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let raw = exec_ready(session, shared, body.object)?;
    let mut flags = 0;
    shared.gpu.driver.graph.exec_flags(raw, &mut flags)?;
    Ok(number(flags))
}

/// `cuGraphExecUpdate`.
pub fn graph_exec_update(session: &mut Session, shared: &Shared, body: GraphPair) -> Reply {
    let (graph, _) = graph_ready(session, shared, body.second)?;
    let exec = exec_ready(session, shared, body.first)?;
    let mut given = None;
    if session.objects.graphs.hosts {
        let exec = session.objects.graphs.execs.get(body.first)?;
        let slots: Vec<u32> = exec.slots.iter().map(|(_, slot)| *slot).collect();
        let hosts = host_nodes(session, shared, graph, GRAPH_DEPTH)?;
        // The driver refuses the update if the number of host nodes differs.
        give_slots(session, shared, &hosts, &slots, exec.device)?;
        let source = exec.origin.as_ref().map(|origin| origin.graph);
        let hosts = hosts.into_iter().map(|(node, _)| node);
        // Otherwise the client still names the instance's nodes by the nodes of its source graph.
        given = (source == Some(0) || source == Some(body.second))
            .then(|| hosts.zip(slots).collect::<Vec<_>>());
    }
    let mut info = CUgraphExecUpdateResultInfo::default();
    let status = shared.gpu.driver.graph.exec_update(exec, graph, &mut info);
    let mut updated = GraphUpdated {
        result: info.result,
        prints: u32::from(session.objects.graphs.prints),
        ..GraphUpdated::default()
    };
    if session.objects.graphs.prints {
        session.objects.graphs.execs.get_mut(body.first)?.prints = true;
    }
    if status.is_ok() {
        session.objects.graphs.memory.share(body.second, body.first);
        // Which handles an updated instance has is not known.
        let now = saved::origin(session, shared, body.second)
            .filter(|now| !now.read.template.is_conditional());
        session.objects.graphs.update_origin(body.first, now);
        if let Some(slots) = given {
            session.objects.graphs.execs.get_mut(body.first)?.slots = slots;
        }
    }
    if let Err(status) = status {
        if is_sticky(status) {
            return Err(status.into());
        }
        updated.status = status.0;
        // Nodes inside child graphs have no handle of this graph.
        let now = all_nodes(shared, graph).unwrap_or_default();
        for (raw, handle) in [
            (info.error_node, &mut updated.error_node),
            (info.error_from, &mut updated.error_from),
        ] {
            let node = CUgraphNode(raw);
            if now.contains(&node) {
                *handle = session.objects.graphs.node_handle(node, body.second)?;
            }
        }
    }
    Ok(updated.as_bytes().to_vec())
}

/// `cuGraphNodeGetEnabled`, `cuGraphNodeSetEnabled`.
pub fn graph_enabled(session: &mut Session, shared: &Shared, mut body: GraphEnabled) -> Reply {
    let exec = exec_ready(session, shared, body.exec)?;
    let node = session.objects.graphs.nodes.get(body.node)?.raw;
    let driver = &shared.gpu.driver.graph;
    if body.set == 0 {
        driver.enabled(exec, node, &mut body.enabled)?;
    } else {
        driver.set_enabled(exec, node, body.enabled)?;
        session.objects.graphs.touch_exec(body.exec, |origin| {
            let place = *origin.read.places.get(&node)?;
            match body.enabled {
                0 => origin.disabled.insert(place),
                _ => origin.disabled.remove(&place),
            };
            Some(())
        });
    }
    Ok(body.as_bytes().to_vec())
}

/// Part of a device that the kernels of a graph can fill, on average; `None` if it has none. Child graphs do not count.
pub fn fill_of(shared: &Shared, graph: CUgraph, device: Ordinal) -> Option<f32> {
    let driver = &shared.gpu.driver;
    let (mut sum, mut kernels) = (0.0, 0u32);
    for node in all_nodes(shared, graph).ok()? {
        let mut kind = 0;
        if driver.graph.node_kind(node, &mut kind).is_err() || kind != CU_GRAPH_NODE_TYPE_KERNEL {
            continue;
        }
        let mut kernel = CUDA_KERNEL_NODE_PARAMS::default();
        if driver.graph.kernel_get(node, &mut kernel).is_err() {
            continue;
        }
        let (device, function) = (&shared.gpu.devices[device], CUfunction(kernel.function));
        let part = device.part_of_block(driver, function, kernel.block, kernel.shared);
        sum += (volume(kernel.grid) as f32 * part).min(1.0);
        kernels += 1;
    }
    (kernels > 0).then(|| sum / kernels as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::base::call::Incoming;
    use crate::engine::base::journal::Reach;
    use crate::engine::calls::Undone;
    use crate::engine::objects::held::{Awaited, Order};
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, obeys, obeys_with_handle, others,
    };
    use mpsshim_model::bonds::Bonds;
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::{EventOnStream, Op};
    use std::cell::Cell;

    const WITH_FLAGS: &str = "cuGraphInstantiateWithFlags";
    const WITH_PARAMS: &str = "cuGraphInstantiateWithParams";

    fn instantiate(graph: u64) -> GraphInstantiate {
        GraphInstantiate {
            graph,
            ..GraphInstantiate::default()
        }
    }

    fn exec_of(test: &mut Fixture, graph: u64) -> u64 {
        let made = test.reply::<u64>(Op::GraphInstantiate, &instantiate(graph), &[]);
        made.expect("an instance")
    }

    fn exec(test: &mut Fixture) -> u64 {
        let graph = test.graph();
        test.node(graph);
        exec_of(test, graph)
    }

    /// A record that is deferred is the event's latest for a graph that is launched behind it, and a wait behind the launch is
    /// for the record in the graph.
    #[test]
    fn a_launch_of_a_graph_with_events_overtakes_no_call_on_them_nor_is_overtaken() {
        let mut test = Fixture::new(&[]);
        let (exec, held, stream) = (exec(&mut test), test.stream(), test.stream());
        let body = GraphLaunch { exec, stream };
        let at = test.session.objects.streams.index(held).expect("a stream");
        test.session.hold(at, Awaited::passed(u64::MAX));
        let order =
            |test: &mut Fixture, op, body: &[u8]| test.session.order(Incoming::copied(op, 0, body));
        let launch = |test: &mut Fixture| order(test, Op::GraphLaunch, body.as_bytes());
        let image = test.image(Kind::Module);
        test.session.objects.graphs.refer_to(image);
        let event = test.event();
        test.session.objects.graphs.refer_to(event);
        assert!(matches!(launch(&mut test), Order::Now));
        let on = |stream| EventOnStream {
            event,
            stream,
            ..EventOnStream::default()
        };
        let record = order(&mut test, Op::EventRecord, on(held).as_bytes());
        assert!(matches!(record, Order::Taken));
        assert!(matches!(launch(&mut test), Order::Taken));
        let other = on(test.stream());
        let wait = order(&mut test, Op::StreamWaitEvent, other.as_bytes());
        assert!(matches!(wait, Order::Taken));
    }

    /// The client's functions have run already, or some of them.
    #[test]
    fn a_launch_that_calls_the_client_is_not_repeated() {
        let mut test = Fixture::new(&[]);
        let (exec, stream) = (exec(&mut test), test.stream());
        test.session.keep_journal();
        let body = GraphLaunch { exec, stream };
        for calls in [false, true] {
            let exec = test.session.objects.graphs.execs.get_mut(exec);
            let exec = exec.expect("an instance");
            (exec.calls_or_waits, exec.length) = (calls, Length::Short);
            assert_eq!(test.status(Op::GraphLaunch, &body, &[]), CUDA_SUCCESS);
            let pending = test
                .session
                .shared
                .description
                .journal()
                .pending(Reach { rested: 0, seen: 0 });
            assert_eq!(pending.is_err(), calls);
        }
    }

    /// Takes the instance away, and says whether only what its graph has still counted.
    fn counts_graph_only(test: &mut Fixture, graph: u64) -> bool {
        let graphs = &mut test.session.objects.graphs;
        let parts = graphs.graphs.get(graph).expect("a graph").size.parts;
        graphs.let_go(parts);
        let only = test.has_no_graph_parts();
        let again = test.session.objects.graphs.hold(parts);
        only && again.is_ok()
    }

    #[test]
    fn an_instance_is_of_a_graph_and_a_stream_of_the_session() {
        let mut test = Fixture::new(&[
            (WITH_FLAGS, counts as Function),
            (WITH_PARAMS, counts as Function),
        ]);
        let (graph, stream) = (test.graph(), test.stream());
        test.node(graph);
        let mut wrong = Vec::new();
        wrong.extend(others(graph).map(|graph| (instantiate(graph), CUDA_ERROR_INVALID_VALUE)));
        for stream in &others(stream)[1..] {
            let body = GraphInstantiate {
                stream: *stream,
                ..instantiate(graph)
            };
            wrong.push((body, CUDA_ERROR_INVALID_HANDLE));
        }
        let by_device = GraphInstantiate {
            flags: 4,
            ..instantiate(graph)
        };
        wrong.push((by_device, CUDA_ERROR_NOT_SUPPORTED));
        for (body, status) in wrong {
            for with_params in [0, 1] {
                let body = GraphInstantiate {
                    with_params,
                    ..body
                };
                let refused = test.status(Op::GraphInstantiate, &body, &[]);
                assert_eq!(refused, status, "{:#x}", body.stream);
            }
        }
        for slots in [1, u32::MAX] {
            let body = GraphInstantiate {
                slots,
                ..instantiate(graph)
            };
            assert!(
                test.is_violation(Op::GraphInstantiate, &body, &[]),
                "{slots}"
            );
        }
        assert_eq!(test.calls(), 0);
        assert!(test.session.objects.graphs.execs.is_empty());
        assert!(counts_graph_only(&mut test, graph));
    }

    #[test]
    fn an_instance_that_the_driver_does_not_make_does_not_count() {
        for (with_params, name) in [(0, WITH_FLAGS), (1, WITH_PARAMS)] {
            let mut test = Fixture::new(&[(name, obeys_with_handle as Function)]);
            let graph = test.graph();
            test.node(graph);
            let body = GraphInstantiate {
                with_params,
                ..instantiate(graph)
            };
            for (status, none) in [(CUDA_ERROR_INVALID_VALUE, true), (CUDA_SUCCESS, false)] {
                test.orders(status);
                // A client is told more than the status.
                let made: GraphInstantiated =
                    test.reply(Op::GraphInstantiate, &body, &[]).expect("told");
                assert_eq!(made.status, status.0, "{name}");
                assert_eq!(made.exec == 0, status != CUDA_SUCCESS, "{name}");
                assert_eq!(test.session.objects.graphs.execs.is_empty(), none);
                assert_eq!(counts_graph_only(&mut test, graph), none, "{name}");
            }
            test.orders(FAULT);
            // A session that goes on in the next server makes it there.
            test.session
                .shared
                .description
                .set_bonds(Bonds::default(), 0);
            let later = test.execute(Op::GraphInstantiate, &body, &[]);
            assert!(matches!(later, Err(Undone::Later)), "{name}");
        }
    }

    fn launch(exec: u64, stream: u64) -> GraphLaunch {
        GraphLaunch { exec, stream }
    }

    #[test]
    fn an_instance_is_launched_and_uploaded_in_a_stream_of_the_session() {
        for (op, name) in [
            (Op::GraphLaunch, "cuGraphLaunch"),
            (Op::GraphUpload, "cuGraphUpload"),
        ] {
            let mut test = Fixture::new(&[(name, counts as Function)]);
            let (exec, stream) = (exec(&mut test), test.stream());
            for exec in others(exec) {
                let status = test.status(op, &launch(exec, stream), &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{op:?} {exec:#x}");
            }
            for stream in others(stream) {
                let status = test.status(op, &launch(exec, stream), &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{op:?} {stream:#x}");
            }
            assert_eq!((test.calls(), test.session.flow.counts.launches), (0, 0));
        }
    }

    #[test]
    fn a_launch_that_the_driver_refuses_does_not_count_and_a_fault_ends_the_session() {
        for (op, name, launches) in [
            (Op::GraphLaunch, "cuGraphLaunch", 1),
            (Op::GraphUpload, "cuGraphUpload", 0),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let exec = exec(&mut test);
            for (status, count) in [
                (CUDA_ERROR_INVALID_VALUE, 0),
                (CUDA_SUCCESS, launches),
                (FAULT, launches),
            ] {
                // Where a launch is measured, the next one waits.
                let body = launch(exec, test.stream());
                test.orders(status);
                assert_eq!(test.told(op, &body, &[]), status, "{op:?}");
                assert_eq!(test.session.flow.counts.launches, count, "{op:?}");
            }
            assert!(test.has_ended(), "{op:?}");
        }
    }

    #[test]
    fn an_instance_counts_until_the_driver_has_destroyed_it() {
        let mut test = Fixture::new(&[("cuGraphExecDestroy", obeys as Function)]);
        let graph = test.graph();
        test.node(graph);
        let object = exec_of(&mut test, graph);
        for object in others(object) {
            let status = test.status(Op::GraphExecDestroy, &Object { object }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{object:#x}");
        }
        for (ordered, status, gone) in [
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED, false),
            (CUDA_SUCCESS, CUDA_SUCCESS, true),
            (CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, true),
        ] {
            test.orders(ordered);
            let told = test.status(Op::GraphExecDestroy, &Object { object }, &[]);
            assert_eq!(told, status);
            assert_eq!(counts_graph_only(&mut test, graph), gone, "{status}");
        }
    }

    #[test]
    fn requests_are_of_instances_of_the_session() {
        let mut test = Fixture::new(&[
            ("cuGraphExecGetFlags", counts as Function),
            ("cuGraphExecUpdate_v2", counts as Function),
            ("cuGraphNodeGetEnabled", counts as Function),
            ("cuGraphNodeSetEnabled", counts as Function),
        ]);
        let graph = test.graph();
        let node = test.node(graph);
        let exec = exec_of(&mut test, graph);
        let enabled = |exec, node, set| GraphEnabled {
            exec,
            node,
            set,
            enabled: 0,
        };
        let value = CUDA_ERROR_INVALID_VALUE;
        for wrong in others(exec) {
            let update = GraphPair {
                first: wrong,
                second: graph,
            };
            let flags = Object { object: wrong };
            assert_eq!(test.status(Op::GraphExecFlags, &flags, &[]), value);
            assert_eq!(test.status(Op::GraphExecUpdate, &update, &[]), value);
            for set in [0, 1] {
                let body = enabled(wrong, node, set);
                assert_eq!(test.status(Op::GraphEnabled, &body, &[]), value);
            }
        }
        for wrong in others(graph) {
            let update = GraphPair {
                first: exec,
                second: wrong,
            };
            assert_eq!(test.status(Op::GraphExecUpdate, &update, &[]), value);
        }
        for wrong in others(node) {
            let body = enabled(exec, wrong, 1);
            assert_eq!(test.status(Op::GraphEnabled, &body, &[]), value);
        }
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn each_call_on_an_instance_returns_the_error_of_the_driver() {
        for (op, set, name) in [
            (Op::GraphExecFlags, 0, "cuGraphExecGetFlags"),
            (Op::GraphEnabled, 0, "cuGraphNodeGetEnabled"),
            (Op::GraphEnabled, 1, "cuGraphNodeSetEnabled"),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let graph = test.graph();
            let node = test.node(graph);
            let exec = exec_of(&mut test, graph);
            let enabled = GraphEnabled {
                exec,
                node,
                set,
                enabled: 0,
            };
            for status in [CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, FAULT] {
                test.orders(status);
                let told = match op {
                    Op::GraphExecFlags => test.told(op, &Object { object: exec }, &[]),
                    _ => test.told(op, &enabled, &[]),
                };
                assert_eq!(told, status, "{name}");
            }
            assert!(test.has_ended(), "{name}");
        }
    }

    thread_local! {
        /// The node that an update fails at.
        static AT: Cell<u64> = const { Cell::new(0) };
    }

    extern "C" fn update(_: u64, _: u64, info: &mut CUgraphExecUpdateResultInfo) -> CUresult {
        info.result = 5;
        info.error_node = AT.get();
        obeys()
    }

    extern "C" fn only_node(_: u64, nodes: *mut u64, count: &mut usize) -> CUresult {
        if *count > 0 {
            // SAFETY: room for one.
            unsafe { nodes.write(AT.get()) };
        }
        *count = 1;
        CUDA_SUCCESS
    }

    #[test]
    fn a_client_is_told_where_an_update_failed_if_it_has_such_a_node() {
        let mut test = Fixture::new(&[
            ("cuGraphExecUpdate_v2", update as Function),
            ("cuGraphGetNodes", only_node as Function),
        ]);
        let graph = test.graph();
        let node = test.node(graph);
        let raw = test.session.objects.graphs.nodes.get(node);
        AT.set(raw.expect("a node").raw.0);
        let body = GraphPair {
            first: exec_of(&mut test, graph),
            second: graph,
        };
        for (status, at) in [
            (CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, node),
            (CUDA_SUCCESS, 0),
        ] {
            test.orders(status);
            let told: GraphUpdated = test.reply(Op::GraphExecUpdate, &body, &[]).expect("told");
            assert_eq!((told.status, told.result), (status.0, 5));
            assert_eq!((told.error_node, told.error_from), (at, 0), "{status}");
        }
        test.orders(FAULT);
        assert_eq!(test.told(Op::GraphExecUpdate, &body, &[]), FAULT);
        assert!(test.has_ended());
    }
}
