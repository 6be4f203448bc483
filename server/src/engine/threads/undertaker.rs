//! Deferred destruction of objects whose destruction makes the driver wait for work in flight.
//!
//! `cuMemHostUnregister`, `cuModuleUnload` and similar calls wait for all queued work of all clients, and some of them
//! hold the driver's lock meanwhile, so that no client can launch anything. A single kernel that never ends would stop
//! the whole server. These calls are therefore made only here, at quiescent points: while no session has work in flight
//! and none may submit any ([`crate::engine::base::calm`]), so that they do not have to wait.
//!
//! Until then, registered memory ([`Spare`]) is reused for new sessions instead of registering more.

pub mod run;

use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::{self, Side};
use crate::engine::gpu::green::GreenRef;
use crate::engine::gpu::host::HostBlock;
use crate::engine::gpu::textures::Object;
use crate::engine::images::Unloading;
use crate::engine::images::instances::{Image, Instance};
use crate::engine::objects::arrays::Array;
use crate::engine::objects::files::FileRegistration;
use crate::engine::session::SessionShared;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long objects wait for a quiescent point to occur by itself; after that the gate is asked to establish one.
const PATIENCE: Duration = Duration::from_secs(5);

/// An object whose destruction waits for the work of all clients.
pub enum Buried {
    /// A module or library.
    Image(Image),
    /// A loaded instance that no image uses any more and that may be retained for other clients.
    Left(Instance),
    /// A loaded instance that no image uses any more and that is not retained.
    Instance(Instance),
    /// An annex that probably no session uses any more.
    UnusedAnnex(Side),
    /// No object: wakes the thread, since memory has been kept for moves that it is to pin or to give back later.
    MovePool,
    /// A green context, which its streams may still reference.
    Green(GreenRef),
    /// Pinned memory of a client, with its user.
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
    /// The side on which it is to be destroyed.
    pub fn side(&self) -> Side {
        match self {
            Buried::Host(..) | Buried::Segment(_) | Buried::File(_) | Buried::MovePool => {
                Side::MAIN
            }
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

/// The objects of one side that wait to be destroyed.
pub struct Graves(Mutex<Lots>);

struct Lots {
    side: Side,
    objects: Vec<Buried>,
    /// When the oldest object was queued or the last batch was destroyed; and when the gate was last asked for a
    /// quiescent point.
    since: Option<Instant>,
    asked: Option<Instant>,
    pause: Duration,
    /// When submissions may be held back again.
    next: Instant,
}

impl Graves {
    /// Creates an empty queue for this side.
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

    /// Whether no object is waiting.
    pub fn are_empty(&self) -> bool {
        self.0.lock().objects.is_empty()
    }
}
