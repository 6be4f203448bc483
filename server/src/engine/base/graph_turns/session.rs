//! A session's turn with graphs that allocate memory ([`super`]).

use super::Answer;
use crate::engine::base::printing::session::is_idle;
use crate::engine::gpu::Gpu;
use crate::engine::session::Session;

/// Whether a graph or its instance allocates memory, or frees memory that another one has allocated.
fn uses_graph_memory(session: &Session, graph: u64) -> bool {
    let memory = &session.objects.graphs.memory;
    !memory.is_empty() && (memory.of(graph).next().is_some() || !memory.frees_of(graph).is_empty())
}

/// Whether a graph may be launched or uploaded now; takes the turn if it allocates memory.
pub fn may_launch_graph(session: &mut Session, gpu: &Gpu, graph: u64) -> bool {
    !uses_graph_memory(session, graph) || may_use_graph_memory(session, gpu)
}

/// Whether memory of graphs may be allocated or freed now; takes the turn if it is free.
pub fn may_use_graph_memory(session: &mut Session, gpu: &Gpu) -> bool {
    let (number, uid) = (session.shared.info.session, session.shared.info.uid);
    match gpu.graph_turns.ask(number, uid) {
        Answer::Goes => session.flow.has_graph_turn = true,
        Answer::Trims => {
            session.flow.has_graph_turn = true;
            gpu.trim_graph_memory();
        }
        Answer::Waits => return false,
        Answer::Yields => {
            end_graph_turn(session, gpu);
            return false;
        }
    }
    true
}

/// Releases the turn if nothing is in flight.
pub fn end_graph_turn(session: &mut Session, gpu: &Gpu) {
    if session.flow.has_graph_turn && !session.has_work_in_flight(gpu) && is_idle(session, gpu) {
        leave_graph_turn(session, gpu);
    }
}

/// Releases the turn for an ended session whose streams are idle.
pub fn leave_graph_turn(session: &mut Session, gpu: &Gpu) {
    if std::mem::take(&mut session.flow.has_graph_turn) {
        gpu.graph_turns.leave(session.shared.info.session);
    }
}
