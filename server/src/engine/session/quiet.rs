//! Whether sessions have work in flight, and may submit more ([`crate::engine::base::calm`]).

use crate::engine::gpu::Gpu;
use crate::engine::objects::streams::Point;
use crate::engine::session::{Session, SessionShared};
use mpsshim_proto::segment::reached;
use std::sync::atomic::{Ordering, fence};

impl SessionShared {
    /// Whether it has work in flight, or may have.
    pub fn is_at_work(&self, gpu: &Gpu) -> bool {
        self.at_work.load(Ordering::SeqCst)
            && self.left.lock().as_ref().is_none_or(|points| {
                let ahead = |point: &Point| !reached(gpu.flags.value(point.slot), point.value);
                points.iter().any(ahead)
            })
    }
}

impl Session {
    /// To be asked before anything is submitted: notes that the session is at work; false when it has to wait a moment.
    #[inline]
    pub fn may_work(&mut self, gpu: &Gpu) -> bool {
        if !self.shared.at_work.load(Ordering::Relaxed) {
            if self.flow.moment.is_none() {
                let session = self.shared.info.session;
                gpu.calm(self.side).note_worker(session);
            }
            if self.is_hushed(gpu) {
                return false;
            }
            self.shared.at_work.store(true, Ordering::SeqCst);
            // Partner: [`crate::engine::base::calm::Calm::hush`].
            fence(Ordering::SeqCst);
        }
        if self.is_hushed(gpu) {
            self.say_whether_at_work(gpu);
            return false;
        }
        true
    }

    /// Whether it may submit nothing now. In its own moment it may.
    #[inline]
    pub fn is_hushed(&self, gpu: &Gpu) -> bool {
        gpu.calm(self.side).is_hushed() && self.flow.moment.is_none()
    }

    /// The thread that has it is about to be away for long, and submits nothing meanwhile: others look themselves whether
    /// what is in flight has ended.
    pub fn go_away(&mut self, gpu: &Gpu) {
        self.say_whether_at_work(gpu);
        if !self.shared.at_work.load(Ordering::Relaxed) {
            return;
        }
        let streams = self.objects.streams.iter().chain(&self.objects.retired);
        let points = streams.filter_map(|stream| stream.last_point()).collect();
        *self.shared.left.lock() = Some(points);
    }

    /// It is back.
    pub fn come_back(&self) {
        *self.shared.left.lock() = None;
    }

    /// Says whether anything is in flight.
    pub fn say_whether_at_work(&mut self, gpu: &Gpu) {
        self.enter();
        let at_work = self.has_work_in_flight(gpu);
        self.shared.at_work.store(at_work, Ordering::Release);
    }
}
