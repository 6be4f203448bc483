//! Instances of graphs: instantiation, changes, launches.

use crate::engine::base::bounds::GRAPH_DEPTH;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::calls::Reply;
use crate::engine::calls::capture::{all_nodes, take};
use crate::engine::objects::graphs::Exec;
use crate::engine::objects::pace::{Length, Runs};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::Object;
use mpsshim_proto::message::graph::{
    GraphEnabled, GraphInstantiate, GraphInstantiated, GraphLaunch, GraphPair, GraphUpdated,
};
use mpsshim_proto::segment::FLAGS;
use zerocopy::IntoBytes;

impl Session {
    /// `cuGraphInstantiate` in all its forms.
    pub fn graph_instantiate(
        &mut self,
        shared: &Shared,
        call: Call<'_, GraphInstantiate>,
    ) -> Reply {
        let Call { body, message } = call;
        const DEVICE_LAUNCH: u64 = 4;
        let (graph, device) = self.graph_ready(shared, body.graph)?;
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
        let hosts = self.host_nodes(shared, graph, GRAPH_DEPTH)?;
        made.hosts = hosts.len() as u32;
        if slots.len() < hosts.len() {
            return Ok(made.as_bytes().to_vec());
        }
        self.give_slots(shared, &hosts, &slots, device)?;
        // From here on, anything that the driver has made must be kept or destroyed.
        let uploads_on = match body.stream {
            0 => None,
            handle => Some(self.objects.streams.index(handle)?),
        };
        let parts = self.objects.graphs.graphs.get(body.graph)?.size.parts;
        // Conditions that may defer the message are checked before anything is counted.
        if uploads_on.is_some() && !self.may_launch_graph(&shared.gpu, body.graph) {
            return Err(CallError::Full);
        }
        let stream = match (body.with_params, body.stream) {
            (0, _) | (_, 0) => CUstream::NULL,
            (_, handle) => self.prepare(&shared.gpu, handle)?.1,
        };
        self.objects.graphs.hold(parts)?;
        let status = if body.with_params == 0 {
            shared
                .gpu
                .driver
                .graph
                .instantiate(&mut raw, graph, body.flags)
        } else {
            let mut params = CUDA_GRAPH_INSTANTIATE_PARAMS {
                flags: body.flags,
                upload_stream: stream.0,
                ..CUDA_GRAPH_INSTANTIATE_PARAMS::default()
            };
            let driver = &shared.gpu.driver.graph;
            let status = driver.instantiate_with(&mut raw, graph, &mut params);
            made.result = params.result;
            let node = CUgraphNode(params.error_node);
            made.error_node = self
                .objects
                .graphs
                .node_handle(node, body.graph)
                .unwrap_or(0);
            status
        };
        if let Err(status) = status {
            self.objects.graphs.let_go(parts);
            shared.gpu.note_status(status);
            made.status = status.0;
            return Ok(made.as_bytes().to_vec());
        }
        if let Some(index) = uploads_on
            && let Err(error) = self.submitted(&shared.gpu, index, 1)
        {
            self.objects.graphs.let_go(parts);
            let _ = shared.gpu.driver.graph.exec_destroy(raw);
            return Err(error);
        }
        made.prints = u32::from(self.objects.graphs.prints);
        let origin = self.origin(shared, body.graph);
        let exec = Exec {
            raw,
            device,
            prints: self.objects.graphs.prints,
            length: Length::Unknown,
            parts,
            slots: hosts.iter().map(|(node, _)| *node).zip(slots).collect(),
            flags: body.flags,
            origin,
            written: false,
        };
        self.objects
            .graphs
            .waits
            .extend(exec.slots.iter().map(|(_, slot)| *slot));
        match self.objects.graphs.execs.insert(exec) {
            Ok(handle) => {
                made.exec = handle;
                self.objects.graphs.note_stale();
                self.objects.graphs.memory.share(body.graph, handle);
                if let Err(status) = self.objects.graphs.charge(&self.account, handle) {
                    let _ = shared.gpu.driver.graph.exec_destroy(raw);
                    self.objects.graphs.execs.remove(handle);
                    self.objects.graphs.let_go(parts);
                    self.objects.graphs.memory.ended(handle);
                    return Err(status.into());
                }
            }
            Err(status) => {
                self.objects.graphs.let_go(parts);
                let _ = shared.gpu.driver.graph.exec_destroy(raw);
                return Err(status.into());
            }
        }
        Ok(made.as_bytes().to_vec())
    }

    /// `cuGraphLaunch`.
    pub fn graph_launch(&mut self, shared: &Shared, body: GraphLaunch) -> Result<(), CallError> {
        let exec = self.objects.graphs.execs.get(body.exec)?;
        let (raw, prints, parts) = (exec.raw, exec.prints, exec.parts);
        if prints && !self.may_print(&shared.gpu) || !self.may_launch_graph(&shared.gpu, body.exec)
        {
            return Err(CallError::Full);
        }
        self.note_graph_launch();
        let (index, stream) =
            self.prepare_work(&shared.gpu, body.stream, Runs::Graph(body.exec))?;
        if self.objects.streams.at(index)?.capturing {
            self.objects.graphs.capture(parts)?;
        }
        // A fault may be detected before the launch returns.
        self.shared.launched.note_graph(index);
        shared.gpu.driver.graph.launch(raw, stream)?;
        if !self.objects.graphs.memory.is_empty() {
            // The graph may also free memory of pools.
            for address in self.objects.graphs.memory.frees_of(body.exec) {
                let charge = self.objects.pools.note_free(address);
                self.objects.leaving.extend(charge);
            }
            self.objects.graphs.memory.launched(body.exec);
            self.objects.graphs.discharge();
        }
        self.flow.counts.launches += 1;
        self.submitted_work(&shared.gpu, index, Runs::Graph(body.exec))
    }

    /// `cuGraphUpload`.
    pub fn graph_upload(&mut self, shared: &Shared, body: GraphLaunch) -> Result<(), CallError> {
        let raw = self.objects.graphs.execs.get(body.exec)?.raw;
        if !self.may_launch_graph(&shared.gpu, body.exec) {
            return Err(CallError::Full);
        }
        let (index, stream) = self.prepare(&shared.gpu, body.stream)?;
        shared.gpu.driver.graph.upload(raw, stream)?;
        self.submitted(&shared.gpu, index, 1)
    }

    fn exec_ready(&self, shared: &Shared, handle: u64) -> Result<CUgraphExec, CUresult> {
        let exec = self.objects.graphs.execs.get(handle)?;
        shared.gpu.devices[exec.device].make_current(&shared.gpu.driver)?;
        Ok(exec.raw)
    }

    /// `cuGraphExecDestroy`: launches in flight still complete.
    pub fn graph_exec_destroy(&mut self, shared: &Shared, body: Object) -> Reply {
        let raw = self.exec_ready(shared, body.object)?;
        shared.gpu.driver.graph.exec_destroy(raw)?;
        if let Some(exec) = self.objects.graphs.execs.remove(body.object) {
            self.objects.graphs.let_go(exec.parts);
        }
        self.objects.graphs.forget_bytes(body.object);
        self.objects.graphs.memory.ended(body.object);
        self.objects.graphs.discharge();
        self.drop_kept(shared);
        Ok(Vec::new())
    }

    /// `cuGraphExecGetFlags`.
    pub fn graph_exec_flags(&mut self, shared: &Shared, body: Object) -> Reply {
        let raw = self.exec_ready(shared, body.object)?;
        let mut flags = 0;
        shared.gpu.driver.graph.exec_flags(raw, &mut flags)?;
        Ok(crate::engine::calls::value(flags))
    }

    /// `cuGraphExecUpdate`.
    pub fn graph_exec_update(&mut self, shared: &Shared, body: GraphPair) -> Reply {
        let (graph, _) = self.graph_ready(shared, body.second)?;
        let exec = self.exec_ready(shared, body.first)?;
        if self.objects.graphs.hosts {
            let exec = self.objects.graphs.execs.get(body.first)?;
            let slots: Vec<u32> = exec.slots.iter().map(|(_, slot)| *slot).collect();
            let hosts = self.host_nodes(shared, graph, GRAPH_DEPTH)?;
            // The driver refuses the update if the number of host nodes differs.
            self.give_slots(shared, &hosts, &slots, exec.device)?;
        }
        let mut info = CUgraphExecUpdateResultInfo::default();
        let status = shared.gpu.driver.graph.exec_update(exec, graph, &mut info);
        let mut updated = GraphUpdated {
            result: info.result,
            prints: u32::from(self.objects.graphs.prints),
            ..GraphUpdated::default()
        };
        if self.objects.graphs.prints {
            self.objects.graphs.execs.get_mut(body.first)?.prints = true;
        }
        if status.is_ok() {
            self.objects.graphs.memory.share(body.second, body.first);
            let now = self.origin(shared, body.second);
            self.objects.graphs.update_origin(body.first, now);
        }
        if let Err(status) = status {
            shared.gpu.note_status(status);
            updated.status = status.0;
            // Nodes inside child graphs have no handle of this graph.
            let now = all_nodes(shared, graph).unwrap_or_default();
            for (raw, handle) in [
                (info.error_node, &mut updated.error_node),
                (info.error_from, &mut updated.error_from),
            ] {
                let node = CUgraphNode(raw);
                if now.contains(&node) {
                    *handle = self.objects.graphs.node_handle(node, body.second)?;
                }
            }
        }
        Ok(updated.as_bytes().to_vec())
    }

    /// `cuGraphNodeGetEnabled`, `cuGraphNodeSetEnabled`.
    pub fn graph_enabled(&mut self, shared: &Shared, mut body: GraphEnabled) -> Reply {
        let exec = self.exec_ready(shared, body.exec)?;
        let node = self.objects.graphs.nodes.get(body.node)?.raw;
        let driver = &shared.gpu.driver.graph;
        if body.set == 0 {
            driver.enabled(exec, node, &mut body.enabled)?;
        } else {
            driver.set_enabled(exec, node, body.enabled)?;
            self.objects.graphs.touch_exec(body.exec, |origin| {
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
}
