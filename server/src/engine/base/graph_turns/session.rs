//! A session's turn with graphs that allocate memory ([`super`]).

use super::Answer;
use crate::engine::gpu::Gpu;
use crate::engine::session::Session;

impl Session {
    /// Whether a graph or its instance allocates memory, or frees memory that another one has allocated.
    fn uses_graph_memory(&self, graph: u64) -> bool {
        let memory = &self.objects.graphs.memory;
        !memory.is_empty()
            && (memory.of(graph).next().is_some() || !memory.frees_of(graph).is_empty())
    }

    /// Whether a graph may be launched or uploaded now; takes the turn if it allocates memory.
    pub fn may_launch_graph(&mut self, gpu: &Gpu, graph: u64) -> bool {
        !self.uses_graph_memory(graph) || self.may_use_graph_memory(gpu)
    }

    /// Whether memory of graphs may be allocated or freed now; takes the turn if it is free.
    pub fn may_use_graph_memory(&mut self, gpu: &Gpu) -> bool {
        let (session, uid) = (self.shared.info.session, self.shared.info.uid);
        match gpu.graph_turns.ask(session, uid) {
            Answer::Goes => self.flow.has_graph_turn = true,
            Answer::Trims => {
                self.flow.has_graph_turn = true;
                gpu.trim_graph_memory();
            }
            Answer::Waits => return false,
            Answer::Yields => {
                self.end_graph_turn(gpu);
                return false;
            }
        }
        true
    }

    /// Releases the turn if nothing is in flight.
    pub fn end_graph_turn(&mut self, gpu: &Gpu) {
        if self.flow.has_graph_turn && !self.has_work_in_flight(gpu) && self.is_idle(gpu) {
            self.leave_graph_turn(gpu);
        }
    }

    /// Releases the turn for an ended session whose streams are idle.
    pub fn leave_graph_turn(&mut self, gpu: &Gpu) {
        if std::mem::take(&mut self.flow.has_graph_turn) {
            let session = self.shared.info.session;
            gpu.graph_turns.leave(session);
        }
    }
}
