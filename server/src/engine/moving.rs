//! Sessions that go to the other side of the devices ([`super::side`]).
//!
//! Beside a kernel that does not end, or not for long, nothing can be loaded into the context that it runs in. A session
//! that has nothing in flight can go into another one: its memory is the same there, its streams and events are made and
//! its images loaded once more. One whose client may know addresses of variables, or has graphs, arrays or textures, stays,
//! and waits.

use super::Shared;
use super::instances::{self, Image, Instance};
use super::session::{Event, Session};
use super::side::{self, Side};
use super::streams::Stream;
use mpsshim_proto::cuda::{
    CU_EVENT_DISABLE_TIMING, CUDA_ERROR_INVALID_HANDLE, CUevent, CUfunction, CUresult, CUstream,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Shared {
    /// Where a session can load that cannot where it is; where there is a context already, if there is one.
    pub fn way_out(&self, from: Side) -> Option<Side> {
        let free = |side: &Side| *side != from && !self.has_long_work(*side);
        let mut free: Vec<Side> = Side::ALL.into_iter().filter(free).collect();
        free.sort_by_key(|side| !self.devices.iter().any(|device| device.has(*side)));
        free.first().copied()
    }

    /// Ends an annex if nobody has anything there, and nobody would go there now.
    pub fn close_unused_annex(&self, side: Side) {
        let Some(_nobody_comes) = self.moving.try_write() else {
            return;
        };
        let calm = self.calm(side);
        let used = self.sessions_of(side).next().is_some()
            || !calm.is_still()
            || self.shared_events.any_of(side)
            || self.is_blocked(Side::MAIN, Duration::ZERO);
        // What is given up goes first.
        if used || self.give_up_residents_of(side) || !self.graves(side).are_empty() {
            return;
        }
        for device in self.devices.iter().filter(|device| device.has(side)) {
            device.close_annex(&self.driver, side);
        }
    }
}

impl Session {
    /// Whether nothing binds it to the context that it is in.
    pub fn may_move(&mut self, shared: &Shared) -> bool {
        let own = |image: &Image| !image.is_tracked();
        let loaded = self.images.iter().any(own)
            || self.libraries.iter().any(own)
            || !self.globals.is_empty()
            || self.arrays.len() + self.mipmaps.len() > 0
            || !self.bound_arrays.is_empty()
            || !self.textures.is_empty()
            || self.texture_references.len() + self.surface_references.len() > 0
            || !self.graphs.is_untouched();
        let parted = self.greens.len() > 0
            || !self.places_of_contexts.is_empty()
            || self.places.iter().any(Option::is_some)
            || !self.peers.is_empty()
            || self.raised_limits;
        let special = self.streams.iter().any(Stream::is_special)
            || self.retired.iter().any(Stream::is_special);
        // Recorded once more, one event alone says how long what comes now takes; two would say nothing.
        let timed = |event: &&Event| event.recorded && event.flags & CU_EVENT_DISABLE_TIMING == 0;
        let timed = self.events.iter().filter(timed).count();
        let bound = timed > 1 || self.events.iter().any(|event| event.shared.is_some());
        let waits = self.held.any() || self.marks.is_waiting() || self.prints();
        let stays = loaded || parted || special || bound || waits || !self.helpers.is_empty();
        !stays && !self.has_work_in_flight(shared)
    }

    /// Goes to a side where its calls need not wait.
    ///
    /// # Errors
    /// The driver's; the session is then where it was.
    pub fn move_to(&mut self, shared: &Shared, to: Side) -> Result<(), CUresult> {
        let _annex_stays = shared.moving.read();
        let (streams, events, images, functions) = side::on(to, || self.make_again(shared))?;
        self.end_runs(shared);
        let own = self.libraries.iter_mut().chain(self.images.iter_mut());
        for (image, instance) in own.zip(images) {
            image.move_to(shared, to, instance);
        }
        for (function, raw) in self.functions.iter_mut().zip(functions) {
            (function.raw, function.taken) = (raw, false);
        }
        for (stream, raw) in self.streams.iter_mut().zip(streams) {
            stream.replace(shared, raw);
        }
        for (event, raw) in self.events.iter_mut().zip(events) {
            let old = std::mem::replace(&mut event.raw, raw);
            let _ = shared.driver.event_destroy(old);
        }
        for stream in self.retired.drain(..) {
            let _ = shared.devices[stream.device].make_current(&shared.driver);
            stream.release(shared);
        }
        self.release_marks(shared);
        self.side = to;
        let number = to.index() as u8;
        self.shared.side.store(number, Ordering::SeqCst);
        self.enter();
        Ok(())
    }

    /// Its streams, events, images and functions once more, in order, on the side that was entered.
    fn make_again(&mut self, shared: &Shared) -> Result<Made, CUresult> {
        let driver = &shared.driver;
        let mut made = Made::default();
        let outcome = (|| {
            for stream in self.streams.iter() {
                let device = &shared.devices[stream.device];
                device.attach(driver)?;
                device.make_current(driver)?;
                made.0
                    .push(device.take_stream(driver, stream.raw_priority)?);
            }
            for event in self.events.iter() {
                let device = &shared.devices[event.device];
                device.attach(driver)?;
                device.make_current(driver)?;
                let mut raw = CUevent::NULL;
                driver.event_create(&mut raw, event.flags & CU_EVENT_DISABLE_TIMING)?;
                made.1.push(raw);
                if event.recorded {
                    // What it was recorded behind is done.
                    let stream = device.take_stream(driver, 0)?;
                    let recorded = driver.event_record(raw, stream, 0);
                    device.keep_stream(driver, 0, stream);
                    recorded?;
                }
            }
            for image in self.libraries.iter().chain(self.images.iter()) {
                shared.use_any_device();
                made.2.push(image.load_there(shared)?);
            }
            for function in self.functions.iter() {
                let image = self.image(function.image)?;
                let mut all = self.libraries.iter().chain(self.images.iter());
                let at = all.position(|one| std::ptr::eq(one, image));
                let instance = at.and_then(|at| made.2.get(at));
                let instance = instance.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
                made.3.push(instance.function(shared, &function.key)?);
            }
            Ok(())
        })();
        if outcome.is_err() {
            for (stream, raw) in self.streams.iter().zip(made.0.drain(..)) {
                shared.devices[stream.device].keep_stream(driver, stream.raw_priority, raw);
            }
            for raw in made.1.drain(..) {
                let _ = driver.event_destroy(raw);
            }
            for instance in made.2.drain(..) {
                instances::let_go(shared, instance);
            }
        }
        outcome.map(|()| made)
    }
}

/// Streams, events, instances of images, and functions.
type Made = (
    Vec<CUstream>,
    Vec<CUevent>,
    Vec<Arc<Instance>>,
    Vec<CUfunction>,
);
