//! Sessions that may have caused a fault, and the recipients of the driver's message about it.

use super::GRAPH;
use crate::engine::base::assertions::{self, Assertion};
use crate::engine::gpu::cubin;
use crate::engine::images::contents::WeakContent;
use crate::engine::objects::shared_events::session::take_torn;
use crate::engine::session::SessionShared;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::CUresult;
use mpsshim_model::client::{EngineEvent, Suspect};
use mpsshim_proto::segment::reached;
use std::sync::Arc;

impl SessionShared {
    /// The report about it after a fault.
    fn suspect(&self) -> Suspect {
        Suspect {
            client: self.info.clone(),
            kernel: self.launched.kernel(),
        }
    }
}

impl SessionShared {
    fn fits(&self, said: &Assertion<'_>, archs: &[u32]) -> Fit {
        let words = [said.file, said.function, said.expression];
        let images = self.launched.images.lock();
        let mut images = images.iter().filter_map(WeakContent::get);
        if !images.any(|image| cubin::holds(&image[..image.len() - 1], archs, &words)) {
            return Fit::OtherCode;
        }
        let has = |slot, value| reached(self.flag(slot), value);
        let mut fit = Fit::OtherKernels;
        for function in self.launched.in_flight(has) {
            let name = match function {
                GRAPH => None,
                function => self.launched.name_of(function),
            };
            fit = fit.max(match (name, said.name()) {
                (Some(kernel), Some(name)) if assertions::names(&kernel, name) => Fit::Kernel,
                (Some(_), Some(_)) => Fit::OtherKernels,
                _ => Fit::UnknownKernels,
            });
        }
        fit
    }
}

impl Shared {
    /// Sends clients the output of their kernels and the driver's assertion message after the context was lost. Must
    /// precede the publication of the status, so that no client sees the status first.
    pub fn hand_out_text(&self, status: CUresult, at_work: &[Arc<SessionShared>]) {
        let printed = self.gpu.printing.take_last();
        let asserted = assertions::take();
        let owners = self.owners(&asserted, at_work);
        if owners.is_empty() && !asserted.is_empty() {
            let text = String::from_utf8_lossy(&asserted);
            let first = text.lines().next().unwrap_or_default();
            let count = text.lines().count();
            tracing::warn!(
                "Whose kernel failed is not known; the first of {count} lines that the driver wrote: {first}"
            );
        }
        for session in at_work.iter().filter(|one| !one.description.may_outlive()) {
            let id = session.info.session;
            let printed = match &printed {
                Some((holder, text)) if *holder == id => &text[..],
                _ => &[],
            };
            let is_owner = owners.iter().any(|owner| Arc::ptr_eq(owner, session));
            let asserted = if is_owner { &asserted[..] } else { &[] };
            if printed.is_empty() && asserted.is_empty() {
                continue;
            }
            if let Err(error) = assertions::send(session.socket(), printed, asserted) {
                tracing::warn!(
                    "Client {} does not get what its kernels wrote before {status}: {error}",
                    session.info
                );
            }
        }
    }

    /// Returns the recipients of an assertion message: the sessions with work in flight that match it best. There are
    /// several only if they run the same code.
    fn owners(&self, text: &[u8], at_work: &[Arc<SessionShared>]) -> Vec<Arc<SessionShared>> {
        if text.is_empty() || at_work.len() < 2 {
            return at_work.to_vec();
        }
        let Some(said) = Assertion::read(text) else {
            return Vec::new();
        };
        let archs: Vec<u32> = self.gpu.devices.iter().map(|one| one.capability).collect();
        let fits = at_work.iter().map(|session| session.fits(&said, &archs));
        let fits: Vec<Fit> = fits.collect();
        let Some(best) = fits.iter().max().filter(|best| **best > Fit::OtherCode) else {
            return Vec::new();
        };
        let owners = at_work.iter().zip(&fits).filter(|(_, fit)| *fit == best);
        owners.map(|(session, _)| session.clone()).collect()
    }
}

/// How well an assertion message matches a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    /// None of its images contains the assertion.
    OtherCode,
    /// An image contains it, but the kernels in flight have other names.
    OtherKernels,
    /// An image contains it, and kernels with unknown names are in flight.
    UnknownKernels,
    /// The kernel that the message names is in flight.
    Kernel,
}

impl Shared {
    /// Handles the loss of a context: chooses the sessions that continue in the next server, and ends the others.
    pub fn decide(&self, status: CUresult) {
        let mut going_on = Vec::new();
        let mut ending = Vec::new();
        let mut at_work = Vec::new();
        let mut repeats = Vec::new();
        let sessions = self.roster.session_list();
        // Read after the list of sessions: a session leaving meanwhile is in both, not in neither.
        let leaving = self.roster.leaving_at_work();
        for session in sessions {
            let is_at_rest = session.is_at_rest();
            if is_at_rest && session.description.bonds().is_empty() {
                going_on.push(session);
                continue;
            }
            let may_repeat = session.may_repeat();
            // Nothing of it was executed in this context; or all of it is complete, only its changes are not saved.
            if may_repeat && (is_at_rest || session.description.journal().is_owed()) {
                going_on.push(session);
                continue;
            }
            if !is_at_rest {
                at_work.push(session.clone());
            }
            match may_repeat {
                true => repeats.push(session),
                false => ending.push(session),
            }
        }
        for session in leaving {
            if !at_work.iter().any(|known| Arc::ptr_eq(known, &session)) {
                at_work.push(session);
            }
        }
        // The only session with work in flight has caused the fault, and would again.
        if at_work.len() > 1 {
            going_on.append(&mut repeats);
        }
        ending.append(&mut repeats);
        let mut lost = at_work.clone();
        lost.retain(|lost| !going_on.iter().any(|one| Arc::ptr_eq(one, lost)));
        ending.append(&mut take_torn(&mut going_on, &lost));
        for session in &going_on {
            session.description.set_outlives();
        }
        // This must happen before any client can see the status.
        self.hand_out_text(status, &at_work);
        let suspects = at_work.iter().map(|session| session.suspect()).collect();
        for session in ending {
            session.end(status);
            self.gpu.keeping.forget_session(session.info.session);
        }
        // Precedes the end of any suspect, which the daemon would no longer know.
        self.roster.tell(EngineEvent::Fault {
            status: status.0,
            going_on: going_on.len(),
            suspects,
        });
        self.gpu.health.set_decided();
    }

    /// Has [`Shared::decide`] called when a context is lost.
    pub fn decide_on_loss(self: &Arc<Shared>) {
        let deciding = Arc::downgrade(self);
        self.gpu.health.on_loss(move |status| {
            if let Some(shared) = deciding.upgrade() {
                shared.decide(status);
            }
        });
    }
}
