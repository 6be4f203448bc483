//! Objects whose end makes the driver wait for work in flight, until nothing is.
//!
//! `cuMemHostUnregister`, `cuModuleUnload` and the like wait for all work that is queued, everyone's, and some of them
//! hold the driver's lock meanwhile, so that no client launches anything. No patience is long enough for that: one kernel
//! that never ends would stop the whole server. So they are called here only, while no session has work in flight and
//! none is given a chance to submit any ([`crate::engine::base::calm`]): then they wait for nothing.
//!
//! Meanwhile registered memory ([`Spare`]) serves the next sessions instead of more of it.

pub mod run;

use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::{self, Side};
use crate::engine::gpu::green::GreenRef;
use crate::engine::gpu::host::HostBlock;
use crate::engine::images::Unloading;
use crate::engine::images::instances::{Image, Instance};
use crate::engine::objects::arrays::{Array, Object};
use crate::engine::objects::files::FileRegistration;
use crate::engine::session::SessionShared;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Beside clients that are never all idle at once something waits so long; then the gate is to see to a moment.
const PATIENCE: Duration = Duration::from_secs(5);

/// An object whose end waits for everyone's work.
pub enum Buried {
    /// A module or library.
    Image(Image),
    /// One in the driver that no image has any more, and that may be kept for others.
    Left(Instance),
    /// The same when it is not kept.
    Instance(Instance),
    /// An annex that nobody seems to use any more.
    UnusedAnnex(Side),
    /// A green context, which its streams may still hold.
    Green(GreenRef),
    /// Pinned memory of a client of this user.
    Host(HostBlock, u32),
    /// An array.
    Array(Array),
    /// A texture or surface object, and its device.
    Object(Object, Ordinal),
    /// Registered memory of a client's file.
    File(FileRegistration),
    /// A session's segment.
    Segment(Arc<SessionShared>),
}

impl Buried {
    /// The side that it is to be ended on.
    pub fn side(&self) -> Side {
        match self {
            Buried::Host(..) | Buried::Segment(_) | Buried::File(_) => Side::MAIN,
            Buried::Image(image) => image.side(),
            Buried::Left(instance) | Buried::Instance(instance) => instance.side,
            Buried::UnusedAnnex(side) => *side,
            _ => side::entered(),
        }
    }
}

impl From<Unloading> for Buried {
    fn from(unloading: Unloading) -> Buried {
        match unloading {
            Unloading::Image(image) => Buried::Image(image),
            Unloading::Left(instance) => Buried::Left(instance),
            Unloading::Instance(instance) => Buried::Instance(instance),
        }
    }
}

/// What waits on one side to be ended.
pub struct Graves(Mutex<Lots>);

struct Lots {
    side: Side,
    objects: Vec<Buried>,
    /// Since when something waits, or the last lot was ended; and when the gate was last asked for a moment.
    since: Option<Instant>,
    asked: Option<Instant>,
    pause: Duration,
    /// When the others may be held back again.
    next: Instant,
}

impl Graves {
    /// Of this side.
    pub fn new(side: Side) -> Graves {
        Graves(Mutex::new(Lots {
            side,
            objects: Vec::new(),
            since: None,
            asked: None,
            pause: PATIENCE,
            next: Instant::now(),
        }))
    }

    /// Whether nothing waits.
    pub fn are_empty(&self) -> bool {
        self.0.lock().objects.is_empty()
    }
}
