//! Graphs and their instances.

use crate::acts::{Act, Form, Images, add_all};
use crate::call;
use crate::calls::{Status, Trouble};
use crate::memory::Buffers;
use crate::streams::{Hands, Streams};
use mpsshim_api::cuda::*;
use std::ffi::c_uint;

/// How a graph is made.
#[derive(Clone, Debug)]
pub enum Made {
    Built,
    /// From these two streams; the second one has every third operation if it is used at all.
    Captured([u32; 2], bool),
    /// In a way that cannot be repeated: a stream has gone, or the nodes of a clone have another order.
    Once,
}

#[derive(Clone)]
pub struct Recipe {
    pub acts: Vec<Act>,
    pub made: Made,
}

pub struct Graph {
    pub graph: CUgraph,
    pub recipe: Recipe,
    /// In the order of its operations; none if it was captured.
    pub nodes: Vec<CUgraphNode>,
    /// Recorded in its capture.
    event: Option<CUevent>,
}

pub struct Exec {
    pub exec: CUgraphExec,
    pub recipe: Recipe,
    pub enabled: Vec<bool>,
    /// The graph with the nodes by which it may be changed.
    pub of: Option<u32>,
    /// The graph that it was made from, unless that was a clone.
    pub from: Option<u32>,
}

impl Recipe {
    pub fn buffers(&self, images: &Images) -> Vec<u32> {
        self.acts
            .iter()
            .flat_map(|act| act.buffers(images))
            .collect()
    }

    pub fn uses_image(&self, image: u32) -> bool {
        self.acts.iter().any(|act| act.images().contains(&image))
    }

    /// `hands` orders the streams of a capture; its events are kept, since a graph may refer to them.
    ///
    /// # Errors
    /// A call's status.
    pub fn make(
        self,
        context: CUcontext,
        streams: &Streams,
        buffers: &Buffers,
        images: &Images,
        hands: &mut Hands,
    ) -> Status<Graph> {
        let mut graph = CUgraph::NULL;
        let (nodes, event) = match &self.made {
            Made::Built => {
                call!(cuGraphCreate, &mut graph, 0 as c_uint)?;
                (add_all(&self.acts, graph, context, buffers, images)?, None)
            }
            Made::Captured(both, forks) => {
                let event;
                (graph, event) = self.capture(*both, *forks, streams, buffers, images, hands)?;
                (Vec::new(), Some(event))
            }
            Made::Once => unreachable!("it cannot be repeated"),
        };
        Ok(Graph {
            graph,
            recipe: self,
            nodes,
            event,
        })
    }

    fn capture(
        &self,
        [first, second]: [u32; 2],
        forks: bool,
        streams: &Streams,
        buffers: &Buffers,
        images: &Images,
        hands: &mut Hands,
    ) -> Status<(CUgraph, CUevent)> {
        let (main, side) = (streams.handle(first), streams.handle(second));
        hands.rest();
        let mut event = CUevent::NULL;
        call!(cuEventCreate, &mut event, CU_EVENT_DISABLE_TIMING)?;
        let mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        call!(cuStreamBeginCapture_v2, main, mode)?;
        if forks {
            hands.order(main, side)?;
        }
        for (at, act) in self.acts.iter().enumerate() {
            let stream = if forks && at % 3 == 2 { second } else { first };
            hands.claim(&act.buffers(images), stream, streams)?;
            act.submit(streams.handle(stream), Form::Capture, buffers, images)?;
        }
        if forks {
            hands.order(side, main)?;
        }
        call!(cuEventRecord, event, main)?;
        let mut graph = CUgraph::NULL;
        call!(cuStreamEndCapture, main, &mut graph)?;
        Ok((graph, event))
    }
}

impl Graph {
    /// An instance of it, or of a clone that is destroyed again.
    ///
    /// # Errors
    /// A call's status.
    pub fn instantiate(&self, number: u32, clones: bool) -> Status<Exec> {
        let mut graph = self.graph;
        if clones {
            call!(cuGraphClone, &mut graph, self.graph)?;
        }
        let mut exec = CUgraphExec::NULL;
        call!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64)?;
        if clones {
            call!(cuGraphDestroy, graph)?;
        }
        let mut recipe = self.recipe.clone();
        if clones && matches!(recipe.made, Made::Captured(..)) {
            recipe.made = Made::Once;
        }
        Ok(Exec {
            exec,
            enabled: vec![true; self.recipe.acts.len()],
            recipe,
            from: (!clones).then_some(number),
            of: (!clones && !self.nodes.is_empty()).then_some(number),
        })
    }

    /// # Errors
    /// A call's status.
    pub fn destroy(self) -> Status<Recipe> {
        call!(cuGraphDestroy, self.graph)?;
        if let Some(event) = self.event {
            call!(cuEventDestroy_v2, event)?;
        }
        Ok(self.recipe)
    }

    /// At rest: it has as many nodes as it was given, and the event of its capture cannot be queried.
    ///
    /// # Errors
    /// A call's status, or the difference.
    pub fn check(&self) -> Status {
        if let Some(event) = self.event {
            match mpsshim_tests::cu!(cuEventQuery, event) {
                CUDA_ERROR_INVALID_VALUE => {}
                CUDA_SUCCESS => {
                    let what = "an event that was recorded in a capture can be queried";
                    return Err(Trouble::Wrong(what.into()));
                }
                status => return Err(Trouble::Call("cuEventQuery", status)),
            }
        }
        if self.nodes.is_empty() {
            return Ok(());
        }
        let (mut found, mut count) = ([CUgraphNode::NULL; 32], 32usize);
        call!(cuGraphGetNodes, self.graph, found.as_mut_ptr(), &mut count)?;
        crate::calls::same(|| "nodes of a graph".into(), count, self.nodes.len())?;
        let is_there = self.nodes.iter().all(|node| found[..count].contains(node));
        crate::calls::same(
            || "the handles of a graph's nodes are there".into(),
            is_there,
            true,
        )
    }
}

impl Exec {
    /// Replaces it by another graph of the same form.
    ///
    /// # Errors
    /// A call's status.
    pub fn update(&mut self, graph: Graph) -> Status {
        let mut info = CUgraphExecUpdateResultInfo::default();
        call!(cuGraphExecUpdate_v2, self.exec, graph.graph, &mut info)?;
        self.recipe = graph.destroy()?;
        self.of = None;
        Ok(())
    }
}
