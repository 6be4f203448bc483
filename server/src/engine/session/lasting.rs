//! State of a session's description: how much of the session another server can restore.

use crate::engine::gpu::textures::Object;
use crate::engine::objects::snapshot::Saved;
use crate::engine::objects::times::Times;
use std::collections::{BTreeMap, HashMap, HashSet};

/// State of a session's description.
#[derive(Debug)]
pub struct Lasting {
    /// The keeper holds the descriptors that every session has.
    pub kept: bool,
    /// The keeper does not hold some memory of the session.
    pub unkept_memory: bool,
    /// Addresses of registered memory that the next server cannot register again.
    pub unkept_files: HashSet<u64>,
    /// Handles of arrays that the next server cannot make again.
    pub unkept_arrays: HashSet<u64>,
    /// Texture and surface objects that the next server cannot make again.
    pub unkept_textures: HashSet<Object>,
    /// Images of the session whose content the keeper does not hold.
    pub unkept_images: HashSet<u64>,
    /// Some state did not fit into the description.
    pub undescribed: bool,
    /// It has used an image whose kernels may store addresses. Such an image cannot be loaded elsewhere, even with the
    /// contents of its variables.
    pub binding_images: bool,
    /// It has had more streams than its description has room for.
    pub far_streams: bool,
    /// Saved state of its event times.
    pub times: Times,
    /// Whether its description covers its variables.
    pub saved: Saved,
    /// Images for which the description contains findings (`images::Found`), and bytes of these; 0: a part of them.
    pub appraised: HashMap<u64, usize>,
    /// Libraries with a function that was looked up, by handle and device.
    pub looked_into: HashSet<(u64, u32)>,
    /// Address range from the first to the last variable that the client knows.
    pub variables_span: (u64, u64),
    /// Variables that have moved since the client learned their address: length and present address, by the known
    /// address.
    pub moved: BTreeMap<u64, (u64, u64)>,
}

impl Lasting {
    /// State of a session of which nothing is described yet.
    pub fn new() -> Lasting {
        Lasting {
            kept: false,
            unkept_memory: false,
            unkept_files: HashSet::new(),
            unkept_arrays: HashSet::new(),
            unkept_textures: HashSet::new(),
            unkept_images: HashSet::new(),
            undescribed: false,
            binding_images: false,
            far_streams: false,
            times: Times::default(),
            saved: Saved::default(),
            appraised: HashMap::new(),
            looked_into: HashSet::new(),
            variables_span: (0, 0),
            moved: BTreeMap::new(),
        }
    }
}
