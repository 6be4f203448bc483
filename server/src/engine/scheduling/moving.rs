//! Sessions that go to another side of the devices ([`crate::engine::base::side`]).
//!
//! Beside a kernel that does not end, or not for long, nothing can be loaded into the context that it runs in. A session
//! that has nothing in flight can go into another one: its memory is the same there, its streams and events are made and
//! its images loaded once more. One stays, and waits,
//! whose client may know addresses of variables, whose kernels could have left addresses in memory, or that has graphs,
//! arrays or textures.

use crate::engine::base::moment::Moment;
use crate::engine::base::side::{self, Side};
use crate::engine::images::instances::{self, Image, Instance};
use crate::engine::objects::events::Event;
use crate::engine::objects::pace::Length;
use crate::engine::objects::streams::Stream;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::{
    CU_EVENT_DISABLE_TIMING, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_READY, CUevent, CUfunction,
    CUresult, CUstream,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Streams and events of a session that goes to another side, at most.
const MOST_STREAMS: usize = 64;
const MOST_EVENTS: usize = 1024;

impl Shared {
    /// Where a session can load that cannot where it is; where there is a context already, if there is one.
    pub fn way_out(&self, from: Side) -> Option<Side> {
        let free = |side: &Side| *side != from && !self.has_long_work(*side);
        let mut free: Vec<Side> = Side::ALL.into_iter().filter(free).collect();
        free.sort_by_key(|side| !self.gpu.devices.iter().any(|device| device.has(*side)));
        free.first().copied()
    }

    /// Ends an annex if nobody has anything there, and nobody would go there now. The undertaker's.
    pub fn close_unused_annex(&self, side: Side, nothing_comes: impl Fn() -> bool) {
        let Some(_nobody_moves) = self.lanes.moving.try_write() else {
            return;
        };
        let used = self.roster.sessions_of(side).next().is_some()
            || !self.gpu.calm(side).is_still()
            || self.roster.shared_events.any_of(side)
            || self.is_blocked(Side::MAIN, Duration::ZERO);
        // What is given up goes first.
        if used || self.images.assesses() || self.images.give_up_residents_of(side) {
            return;
        }
        // Sessions of other sides may have images here still.
        if self.images.families.alive(side) > 0
            || !nothing_comes()
            || !self.lanes.graves(side).are_empty()
        {
            return;
        }
        self.roster
            .shared_events
            .clear_spare(&self.gpu.driver, side);
        for device in self.gpu.devices.iter().filter(|device| device.has(side)) {
            device.close_annex(&self.gpu.driver, side);
        }
    }
}

impl Session {
    /// Whether nothing binds it to the context that it is in.
    pub fn may_move(&mut self, shared: &Shared) -> bool {
        let own = |image: &Image| !image.may_move(&shared.images);
        let loaded = self.objects.images.iter().any(own)
            || self.objects.libraries.iter().any(own)
            || !self.objects.globals.is_empty()
            || self.objects.arrays.len() + self.objects.mipmaps.len() > 0
            || !self.objects.bound_arrays.is_empty()
            || !self.objects.textures.is_empty()
            || self.objects.texture_references.len() + self.objects.surface_references.len() > 0
            || !self.objects.graphs.is_untouched();
        let parted = self.objects.greens.len() > 0
            || !self.objects.places_of_contexts.is_empty()
            || self.objects.places.iter().any(Option::is_some)
            || !self.objects.peers.is_empty()
            || self.objects.raised_limits.any();
        let special = self.objects.streams.iter().any(Stream::is_special)
            || self.objects.retired.iter().any(Stream::is_special);
        // Recorded once more, one event alone says how long what comes now takes; two would say nothing.
        let timed = |event: &&Event| event.recorded && event.flags & CU_EVENT_DISABLE_TIMING == 0;
        let timed = self.objects.events.iter().filter(timed).count();
        let has_own = |event: &Event| event.shared.is_some() || event.time.is_of_another_server();
        let bound = timed > 1 || self.objects.events.iter().any(has_own);
        let waits = self.inbox.held.any() || self.prints() || self.flow.has_graph_turn;
        // They are made there while others work.
        let many =
            self.objects.streams.len() > MOST_STREAMS || self.objects.events.len() > MOST_EVENTS;
        let stays = loaded
            || parted
            || special
            || bound
            || waits
            || many
            || !self.objects.helpers.is_empty();
        !stays && !self.has_work_in_flight(&shared.gpu)
    }

    /// Whether what its kernels may have left in its images, and of them in memory, is nothing, as far as
    /// [`Session::may_move`] could not tell.
    pub fn has_images_as_new(&self, shared: &Shared) -> bool {
        if self.flow.counts.launches == 0 {
            return true;
        }
        let mut images = self
            .objects
            .images
            .iter()
            .chain(self.objects.libraries.iter());
        !self.flow.left_images && images.all(|image| image.is_as_new(&shared.images))
    }

    /// Goes to a side where its calls need not wait. Its images come after, in its next moment there
    /// ([`Session::bring_images`]).
    ///
    /// # Errors
    /// The driver's; the session is then where it was.
    pub fn move_to(&mut self, shared: &Shared, to: Side) -> Result<(), CUresult> {
        self.forget_offer(shared);
        let _annex_stays = shared.lanes.moving.read();
        let (streams, events) = side::on(to, || self.make_again(shared))?;
        self.end_runs(shared);
        for (stream, raw) in self.objects.streams.iter_mut().zip(streams) {
            stream.replace(&shared.gpu, raw);
        }
        for (event, raw) in self.objects.events.iter_mut().zip(events) {
            let old = std::mem::replace(&mut event.raw, raw);
            let _ = shared.gpu.driver.event_destroy(old);
        }
        for stream in self.objects.retired.drain(..) {
            let _ = shared.gpu.devices[stream.device].make_current(&shared.gpu.driver);
            stream.release(&shared.gpu);
        }
        self.shared.description.set_retired(false);
        let of = self.flow.images_of.unwrap_or(self.side);
        let any = self.objects.images.len() + self.objects.libraries.len() > 0;
        self.flow.images_of = (any && of != to).then_some(of);
        self.side = to;
        let number = to.index() as u8;
        self.shared.side.store(number, Ordering::SeqCst);
        self.enter();
        Ok(())
    }

    /// Has its images and functions loaded where it is now, which waits for what is in flight there.
    ///
    /// # Errors
    /// The driver's, or `CUDA_ERROR_NOT_READY` where the moment is over before; the images are then where they were.
    pub fn bring_images(&mut self, shared: &Shared, moment: &Moment) -> Result<(), CUresult> {
        let (images, functions) = self.load_again(shared, moment)?;
        let own = self
            .objects
            .libraries
            .iter_mut()
            .chain(self.objects.images.iter_mut());
        for (image, instance) in own.zip(images) {
            image.move_to(&shared.images, self.side, instance);
        }
        for (function, raw) in self.objects.functions.iter_mut().zip(functions) {
            (function.raw, function.taken) = (raw, false);
            // Its first launch takes what the context lacks, and is one by itself.
            function.length = Length::Unknown;
        }
        self.flow.images_of = None;
        Ok(())
    }

    /// Its images and functions once more, in order, on the side that it is on.
    fn load_again(
        &self,
        shared: &Shared,
        moment: &Moment,
    ) -> Result<(Vec<Arc<Instance>>, Vec<CUfunction>), CUresult> {
        let in_time = || match moment.is_over() {
            true => Err(CUDA_ERROR_NOT_READY),
            false => Ok(()),
        };
        let all = || {
            self.objects
                .libraries
                .iter()
                .chain(self.objects.images.iter())
        };
        let (mut images, mut functions) = (Vec::new(), Vec::new());
        let outcome = (|| {
            for image in all() {
                in_time()?;
                shared.gpu.use_any_device();
                images.push(image.load_there(&shared.images)?);
            }
            for function in self.objects.functions.iter() {
                in_time()?;
                let image = self.image(function.image)?;
                let at = all().position(|one| std::ptr::eq(one, image));
                let instance = at.and_then(|at| images.get(at));
                let instance = instance.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
                functions.push(instance.function(&shared.images, &function.key)?);
            }
            Ok(())
        })();
        if let Err(status) = outcome {
            for instance in images {
                instances::let_go(&shared.images, instance);
            }
            return Err(status);
        }
        Ok((images, functions))
    }

    /// Its streams and events once more, in order, on the side that was entered.
    fn make_again(&mut self, shared: &Shared) -> Result<(Vec<CUstream>, Vec<CUevent>), CUresult> {
        let driver = &shared.gpu.driver;
        let (mut streams, mut events) = (Vec::new(), Vec::new());
        let outcome = (|| {
            for stream in self.objects.streams.iter() {
                let device = &shared.gpu.devices[stream.device];
                device.attach(driver)?;
                device.make_current(driver)?;
                streams.push(device.take_stream(driver, stream.raw_priority)?);
            }
            for event in self.objects.events.iter() {
                let device = &shared.gpu.devices[event.device];
                device.attach(driver)?;
                device.make_current(driver)?;
                let mut raw = CUevent::NULL;
                driver.event_create(&mut raw, event.flags & CU_EVENT_DISABLE_TIMING)?;
                events.push(raw);
                if event.recorded {
                    // What it was recorded behind is done.
                    shared.gpu.record_at_once(event.device, raw)?;
                }
            }
            Ok(())
        })();
        if let Err(status) = outcome {
            for (stream, raw) in self.objects.streams.iter().zip(streams) {
                shared.gpu.devices[stream.device].keep_stream(driver, stream.raw_priority, raw);
            }
            for raw in events {
                let _ = driver.event_destroy(raw);
            }
            return Err(status);
        }
        Ok((streams, events))
    }
}
