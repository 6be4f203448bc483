//! How a session gets on: its thread, its turns, and the moments that it needs.

use crate::engine::base::moment::{Moment, Want};
use crate::engine::base::printing::Printed;
use crate::engine::base::side::Side;
use crate::engine::images::contents::Sent;
use crate::engine::images::instances::Instance;
use crate::engine::images::prepared::Prepared;
use crate::engine::objects::activity::{Counts, Quiet};
use crate::engine::objects::marks::Marks;
use crate::engine::objects::runs::Planned;
use std::sync::Arc;
use std::time::Instant;

/// Progress of a session.
#[derive(Debug)]
pub struct Flow {
    /// Dispatch thread it belongs to.
    pub home: usize,
    /// Messages that dispatch threads have executed.
    pub dispatched: u64,
    /// Since when it has sent nothing.
    pub quiet: Quiet,
    /// What else is counted.
    pub counts: Counts,
    /// Why the server ended the session, if it did.
    pub fault: Option<String>,
    /// Room for the launches of the next run.
    pub planned: Vec<Planned>,
    /// Its marks that the server asks about.
    pub marks: Marks,
    /// What its kernels printed.
    pub printed: Printed,
    /// It has the turn of graphs that allocate memory, or goes on beside who has it.
    pub has_graph_turn: bool,
    /// Since when a message waits for such memory.
    pub short_since: Option<Instant>,
    /// When a kernel that takes long was last seen in flight.
    pub had_kernel: Option<Instant>,
    /// It was to go to another side, and could not.
    pub stays: bool,
    /// The moment in which it makes its call, while nobody else submits anything.
    pub moment: Option<Arc<Moment>>,
    /// Its images are still those of this side; they are loaded again in its next moment.
    pub images_of: Option<Side>,
    /// It has unloaded an image whose kernels may have run.
    pub left_images: bool,
    /// What others have of the image that its next message loads.
    pub offered: Option<Arc<Instance>>,
    /// Bytes of images that it has sent.
    pub sent: Sent,
    /// The image that it waits to load.
    pub prepared: Option<Prepared>,
    /// Something that was held back has to be done in such a moment.
    pub wants_moment: bool,
    /// What its next launch needs before it can be made.
    pub wants: Option<Want>,
    /// The driver's priorities of its streams tell it from clients of the other priority, and are not the client's own.
    pub classed: bool,
}

impl Flow {
    /// Of a session that has sent nothing; `home` is its dispatch thread.
    pub fn new(home: usize) -> Flow {
        Flow {
            home,
            dispatched: 0,
            quiet: Quiet::default(),
            counts: Counts::default(),
            fault: None,
            planned: Vec::new(),
            marks: Marks::default(),
            printed: Printed::default(),
            has_graph_turn: false,
            short_since: None,
            had_kernel: None,
            stays: false,
            moment: None,
            images_of: None,
            left_images: false,
            offered: None,
            sent: Sent::default(),
            prepared: None,
            wants_moment: false,
            wants: None,
            classed: false,
        }
    }
}
