//! Contexts of their own for sessions whose kernels use the heap of the device.
//!
//! A context has one heap for `malloc` and `free` in kernels. Programs on the plain driver each have their own, with the
//! size that they set. A session whose next message loads an image with such calls, or raises that limit, therefore moves
//! to an annex that it owns until it ends ([`crate::engine::base::owners`]). A session that cannot move shares the heap of
//! the context in which it works.

use crate::engine::base::call::Incoming;
use crate::engine::base::owners::{Annex, Claim};
use crate::engine::base::side::Side;
use crate::engine::calls::context::raises_limit_of_program;
use crate::engine::gpu::devices::OwnHeap;
use crate::engine::session::Session;
use crate::engine::session::flow::OwnContext;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use mpsshim_api::cuda::CU_LIMIT_MALLOC_HEAP_SIZE;
use mpsshim_proto::message::image::KernelAttribute;
use mpsshim_proto::message::{GetFunction, ImageLoad, Named};
use mpsshim_proto::ops::Gate;
use std::time::{Duration, Instant};

/// How long a session waits for an annex to be closed.
const AWAITS: Duration = Duration::from_secs(5);
/// Interval at which it asks again meanwhile.
const ASKS: Duration = Duration::from_millis(10);

impl Shared {
    /// Assigns an annex to a session.
    fn claim(&self, session: u64) -> Claim {
        // No session moves meanwhile.
        let Some(_nobody_moves) = self.lanes.moving.try_write() else {
            return Claim::Soon;
        };
        let state = |side: Side| {
            let has_context = self.gpu.devices.iter().any(|device| device.has(side));
            match (self.is_in_use(side), has_context) {
                (true, _) => Annex::Used,
                (false, true) => Annex::Closable,
                (false, false) => Annex::Free,
            }
        };
        let claim = self.lanes.owners.claim(session, state);
        if claim == Claim::Soon {
            let unused = |side: &Side| !self.lanes.owners.is_owned(*side);
            let annexes = Side::ALL.into_iter().filter(|side| *side != Side::MAIN);
            for side in annexes.filter(unused) {
                if state(side) == Annex::Closable {
                    self.lanes.bury(Buried::UnusedAnnex(side));
                }
            }
        }
        claim
    }

    /// Closes the annex of a session that has ended, or that could not move there, as soon as nothing uses it.
    pub fn leave_own_context(&self, session: u64) {
        let Some(side) = self.lanes.owners.leave(session) else {
            return;
        };
        if self.gpu.devices.iter().any(|device| device.has(side)) {
            self.lanes.gate(side).knock();
        } else {
            self.release_own_context(side);
        }
    }

    /// Makes an annex available again whose context has been closed.
    pub fn release_own_context(&self, side: Side) {
        for device in self.gpu.devices.iter() {
            device.set_heap(side, None);
        }
        self.lanes.owners.release(side);
    }
}

/// Whether its next message waits for the session to move to a context of its own.
pub fn awaits_own_context(session: &mut Session, shared: &Shared, message: Incoming<'_>) -> bool {
    let since = match session.flow.own {
        OwnContext::Owned | OwnContext::Taken | OwnContext::Bound => return false,
        OwnContext::Granted(side) => {
            session.shared.standing.set_goes_to(Some(side));
            return true;
        }
        OwnContext::Awaited { asked, .. } if asked.elapsed() < ASKS => return true,
        OwnContext::Awaited { since, .. } => since,
        OwnContext::Unneeded if !needs_own_context(session, shared, message) => return false,
        OwnContext::Unneeded => Instant::now(),
    };
    match shared.claim(session.shared.info.session) {
        Claim::Granted(side) => {
            for device in shared.gpu.devices.iter() {
                let limits = &session.objects.limits;
                let heap = limits.value(device.ordinal, CU_LIMIT_MALLOC_HEAP_SIZE);
                device.set_heap(side, Some(OwnHeap(heap)));
            }
            session.flow.own = OwnContext::Granted(side);
            session.shared.standing.set_goes_to(Some(side));
            true
        }
        Claim::Soon if since.elapsed() < AWAITS => {
            let asked = Instant::now();
            session.flow.own = OwnContext::Awaited { since, asked };
            true
        }
        Claim::Soon | Claim::Taken => {
            tracing::warn!(
                "Client {} has no context of its own, because other clients have them all: its kernels share the \
                 heap for malloc",
                session.shared.info
            );
            session.flow.own = OwnContext::Taken;
            false
        }
    }
}

/// Gives up the context of its own to which the session could not move.
pub fn stay_in_shared_context(session: &mut Session, shared: &Shared, why: &str) {
    tracing::warn!(
        "Client {} cannot leave the context that it shares with others ({why}): its kernels share the heap for \
         malloc",
        session.shared.info
    );
    session.flow.own = OwnContext::Bound;
    shared.leave_own_context(session.shared.info.session);
}

/// Whether a message loads an image whose kernels allocate, or raises a limit that belongs to one program.
fn needs_own_context(session: &Session, shared: &Shared, message: Incoming<'_>) -> bool {
    let allocates = |handle: u64| {
        let image = session.objects.image(handle);
        image.is_ok_and(|image| image.calls.allocates)
    };
    match message.op.gate() {
        Gate::NewModule => loads_allocating_module(session, shared, message),
        Gate::NewFunction => {
            let body = message.body::<GetFunction>();
            body.is_ok_and(|body| allocates(body.parent))
        }
        Gate::NewImage => {
            let body = message.body::<Named>();
            body.is_ok_and(|body| allocates(body.parent))
        }
        Gate::KernelAttribute => {
            let body = message.body::<KernelAttribute>();
            body.is_ok_and(|body| allocates(body.library))
        }
        Gate::Variable(handle_at) => allocates(message.word(handle_at)),
        Gate::HigherLimit => raises_limit_of_program(shared, message),
        Gate::Never | Gate::Always | Gate::FunctionAttribute | Gate::NewStream => false,
    }
}

/// Whether a message loads a module whose kernels allocate. [`crate::engine::calls::module::loads_module`] has
/// received it, or found an instance of it.
fn loads_allocating_module(session: &Session, shared: &Shared, message: Incoming<'_>) -> bool {
    let Ok(body) = message.body::<ImageLoad>() else {
        return false;
    };
    if let Some(offered) = &session.flow.offered {
        let content = offered.content();
        return shared.images.calls(content.hash(), content).allocates;
    }
    let prepared = session.flow.prepared.as_ref();
    let ready = prepared.filter(|prepared| prepared.is_for(&body, message));
    ready.is_some_and(|prepared| {
        let outcome = prepared.outcome.as_ref();
        outcome.is_ok_and(|ready| ready.calls.allocates)
    })
}
