//! How much of a session is described, so that another server can make it again.

use crate::engine::objects::snapshot::Saved;
use crate::engine::objects::times::Times;
use std::collections::{BTreeMap, HashSet};

/// State of a session's description.
#[derive(Debug)]
pub struct Lasting {
    /// The keeper has what every session has.
    pub kept: bool,
    /// Some memory or image of it, the keeper has not.
    pub unkept_memory: bool,
    /// Its description has had no room for something.
    pub undescribed: bool,
    /// It has used an image that cannot be loaded elsewhere unnoticed, whatever its variables hold.
    pub binding_images: bool,
    /// It has had more streams than its description has room for.
    pub far_streams: bool,
    /// What its description has of the times of its events.
    pub times: Times,
    /// What its description has of its variables.
    pub saved: Saved,
    /// Images of which the description says what they leave behind.
    pub appraised: HashSet<u64>,
    /// First address and end of the variables that the client knows.
    pub variables_span: (u64, u64),
    /// Variables that are elsewhere than the client knows: length, and where, by the address that it knows.
    pub moved: BTreeMap<u64, (u64, u64)>,
    /// It has had memory or events in common with other processes.
    pub shares: bool,
}

impl Lasting {
    /// Nothing is described yet.
    pub fn new() -> Lasting {
        Lasting {
            kept: false,
            unkept_memory: false,
            undescribed: false,
            binding_images: false,
            far_streams: false,
            times: Times::default(),
            saved: Saved::default(),
            appraised: HashSet::new(),
            variables_span: (0, 0),
            moved: BTreeMap::new(),
            shares: false,
        }
    }
}
