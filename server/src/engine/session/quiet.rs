//! Whether sessions have work in flight, and whether they may submit more ([`crate::engine::base::calm`]).

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
    /// Must be called before anything is submitted: notes that the session is at work. Returns `false` while
    /// submissions are held back for a quiescent point.
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

    /// Whether submissions of the session are held back. At its own quiescent point it may submit.
    #[inline]
    pub fn is_hushed(&self, gpu: &Gpu) -> bool {
        let calm = gpu.calm(self.side);
        let held_back = || calm.loops.holds_back(self.shared.info.session);
        (calm.is_hushed() || held_back()) && self.flow.moment.is_none()
    }

    /// Called before the session's thread does something long without submitting: publishes the last point of each
    /// stream, so that other threads can check whether the work in flight has completed.
    pub fn go_away(&mut self, gpu: &Gpu) {
        self.say_whether_at_work(gpu);
        if !self.shared.at_work.load(Ordering::Relaxed) {
            return;
        }
        let streams = self.objects.streams.iter().chain(&self.objects.retired);
        let points = streams.filter_map(|stream| stream.last_point()).collect();
        *self.shared.left.lock() = Some(points);
    }

    /// Ends [`Session::go_away`].
    pub fn come_back(&self) {
        *self.shared.left.lock() = None;
    }

    /// Publishes whether the session has work in flight.
    pub fn say_whether_at_work(&mut self, gpu: &Gpu) {
        self.enter();
        let at_work = self.has_work_in_flight(gpu);
        self.shared.at_work.store(at_work, Ordering::Release);
    }
}
