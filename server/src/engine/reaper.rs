//! What is left of sessions that are over, and of objects whose end would make other clients wait.
//!
//! `cuMemHostUnregister`, `cuModuleUnload` and `cuLibraryUnload` wait for all queued work of everyone and hold
//! the driver's lock meanwhile (measured: a third client's launch stalls for the whole wait). They are put off
//! until nothing is in flight, or until they have waited for [`PATIENCE`].

use super::Shared;
use super::arrays::{Array, Object};
use super::dispatch::any_busy;
use super::files::FileRegistration;
use super::green::{self, GreenRef};
use super::host::HostBlock;
use super::instances::{Image, Instance};
use super::session::{Session, SessionShared};
use super::{EngineEvent, Registration};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use mpsshim_proto::cuda::CUDA_ERROR_NOT_READY;
use mpsshim_proto::segment::RETURNED;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a buried object waits for quiet before others are made to wait for its end.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often dying sessions are looked at.
const TICK: Duration = Duration::from_millis(1);

/// Work for the reaper.
pub enum ReaperTask {
    /// A session that is over.
    Session(Box<Session>),
    /// An object to end when all is quiet.
    Bury(Buried),
}

/// An object whose end waits for everyone's work.
pub enum Buried {
    /// A module or library.
    Image(Image),
    /// One in the driver, when no image has it any more.
    Instance(Instance),
    /// A green context, which its streams may still hold.
    Green(GreenRef),
    /// Pinned memory.
    Host(HostBlock),
    /// An array.
    Array(Array),
    /// A texture or surface object, and its device.
    Object(Object, usize),
    /// Registered memory of a client's file.
    File(FileRegistration),
    /// A session's segment.
    Segment(Arc<SessionShared>),
}

/// The reaper thread's body.
pub fn run(shared: &Arc<Shared>, tasks: &Receiver<ReaperTask>) {
    let mut dying: Vec<Box<Session>> = Vec::new();
    let mut graves: Vec<(Instant, Buried)> = Vec::new();
    loop {
        let idle = dying.is_empty() && graves.is_empty();
        let task = if idle {
            tasks.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            tasks.recv_timeout(TICK)
        };
        match task {
            Ok(ReaperTask::Session(mut session)) => {
                session.abandon_captures(shared, None);
                dying.push(session);
            }
            Ok(ReaperTask::Bury(object)) => graves.push((Instant::now(), object)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if shared.is_lost() {
            // Nothing can be freed any more; the process is about to be replaced.
            for session in dying.drain(..) {
                shared.gone(&session.shared, session.fault.clone());
                std::mem::forget(session);
            }
            graves.drain(..).for_each(std::mem::forget);
            continue;
        }
        let mut at = 0;
        while at < dying.len() {
            if dying[at].forget_held(shared) && is_drained(shared, &dying[at]) {
                let session = dying.swap_remove(at);
                release(shared, *session, &mut graves);
            } else {
                at += 1;
            }
        }
        let quiet = !any_busy(&shared.dispatchers) && dying.is_empty();
        let now = Instant::now();
        let mut kept = Vec::new();
        for (since, object) in graves.drain(..) {
            if quiet || now.duration_since(since) > PATIENCE {
                if let Some(object) = lay_to_rest(shared, object) {
                    kept.push((now, object));
                }
            } else {
                kept.push((since, object));
            }
        }
        graves = kept;
    }
}

fn is_drained(shared: &Shared, session: &Session) -> bool {
    // A graph that waits for the client's functions goes on without them.
    for slot in &session.graphs.waits {
        session.shared.set_flag(slot + RETURNED, 1);
    }
    session
        .streams
        .iter()
        .chain(&session.retired)
        .all(|stream| {
            let _ = shared.devices[stream.device].make_current(&shared.driver);
            match shared.driver.stream_query(stream.raw) {
                Err(CUDA_ERROR_NOT_READY) => false,
                Err(status) => {
                    shared.note_status(status);
                    true
                }
                Ok(()) => true,
            }
        })
}

/// Frees what an idle session owned; what would make others wait is buried.
fn release(shared: &Arc<Shared>, mut session: Session, graves: &mut Vec<(Instant, Buried)>) {
    session.surrender_printing(shared);
    for (device, stream) in session.helpers.drain(..) {
        let _ = shared.devices[device].make_current(&shared.driver);
        let _ = shared.driver.context.stream_destroy(stream);
    }
    for stream in session.streams.drain().chain(session.retired.drain(..)) {
        let _ = shared.devices[stream.device].make_current(&shared.driver);
        stream.release(shared);
    }
    session.release_marks(shared);
    for event in session.events.drain() {
        let _ = shared.devices[event.device].make_current(&shared.driver);
        let _ = shared.end_event(event);
    }
    let grants = std::mem::take(&mut session.grants).into_values();
    let opened = session.sharing.clear(&shared.shares);
    for grant in grants.chain(opened).chain(session.releasing.drain(..)) {
        if let Err(status) = shared.revoke(grant) {
            tracing::error!(
                "device memory of session {} was not freed: {status}",
                session.shared.info.session
            );
        }
    }
    let account = session.account.clone();
    session.pools.clear(shared, &account);
    session.virtual_memory.clear(shared, &account);
    let greens = session.greens.drain().map(Buried::Green);
    graves.extend(greens.map(|green| (Instant::now(), green)));
    for link in session.links.drain() {
        link.end(shared);
    }
    let now = Instant::now();
    let (images, events) = session.graphs.release(shared);
    graves.extend(images.into_iter().map(|image| (now, Buried::Image(image))));
    for event in events {
        let _ = shared.driver.event_destroy(event.raw);
    }
    let images = session
        .images
        .drain()
        .chain(session.libraries.drain())
        .map(Buried::Image);
    graves.extend(images.map(|image| (now, image)));
    graves.extend(
        session
            .take_arrays(shared)
            .into_iter()
            .map(|array| (now, array)),
    );
    let host = std::mem::take(&mut session.host)
        .into_values()
        .chain(session.host_spare.drain(..));
    graves.extend(host.map(|block| (now, Buried::Host(block))));
    let files = std::mem::take(&mut session.files).into_values();
    graves.extend(files.map(|file| (now, Buried::File(file))));
    graves.push((now, Buried::Segment(session.shared.clone())));
    shared.gone(&session.shared, session.fault.take());
}

/// Ends an object; gives it back when that must wait for another holder.
fn lay_to_rest(shared: &Shared, object: Buried) -> Option<Buried> {
    match object {
        Buried::Image(image) => {
            image.end(shared);
            None
        }
        Buried::Instance(instance) => {
            instance.end(shared);
            None
        }
        Buried::Array(array) => {
            array.end(shared);
            None
        }
        Buried::Object(object, device) => {
            if let Err(status) = object.end(device, shared) {
                shared.note_status(status);
            }
            None
        }
        Buried::Green(green) => green::end(shared, green).map(Buried::Green),
        Buried::Host(block) => {
            shared.use_any_device();
            shared.arena.free(&shared.driver, block);
            None
        }
        Buried::File(file) => {
            shared.use_any_device();
            shared.arena.unregister_file(&shared.driver, file);
            None
        }
        Buried::Segment(segment) => match Arc::try_unwrap(segment) {
            Ok(segment) => {
                shared.use_any_device();
                drop(Registration::unregister(
                    segment.registration,
                    &shared.driver,
                ));
                None
            }
            Err(segment) => Some(Buried::Segment(segment)),
        },
    }
}

impl Shared {
    /// Tells the owner that a session's resources are gone.
    fn gone(&self, session: &SessionShared, why: Option<String>) {
        self.admission.retract();
        self.tell(EngineEvent::Gone(session.info.clone(), why));
    }
}
