//! Moves sessions to another side of the devices ([`crate::engine::base::side`]).
//!
//! While a kernel runs that does not end, or not for long, nothing can be loaded into its context. A session with
//! nothing in flight can move to another context: its memory has the same addresses there, its streams and events are
//! created again and its images are loaded again. A session stays and waits if its client may know addresses of
//! variables, if its kernels may have stored addresses in memory, or if it has graphs, arrays or textures.

use crate::engine::base::moment::Moment;
use crate::engine::base::side::{self, Side};
use crate::engine::calls::module::forget_offer;
use crate::engine::images::instances;
use crate::engine::objects::pace::Length;
use crate::engine::scheduling::own_context::stay_in_shared_context;
use crate::engine::scheduling::visit::Visit;
use crate::engine::session::Session;
use crate::engine::session::bonds::Destination;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::{
    CU_EVENT_DISABLE_TIMING, CU_LIMIT_STACK_SIZE, CUDA_ERROR_INVALID_HANDLE, CUevent, CUfunction,
    CUresult, CUstream,
};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl Shared {
    /// Returns a side to which a session that cannot load on `from` can move, preferably one that already has a
    /// context.
    pub fn way_out(&self, from: Side) -> Option<Side> {
        let free = |side: &Side| {
            *side != from && !self.lanes.owners.is_owned(*side) && !self.has_long_work(*side)
        };
        let mut free: Vec<Side> = Side::ALL.into_iter().filter(free).collect();
        free.sort_by_key(|side| !self.gpu.devices.iter().any(|device| device.has(*side)));
        free.first().copied()
    }

    /// Whether sessions, work of ended sessions or events between processes are on a side.
    pub fn is_in_use(&self, side: Side) -> bool {
        self.roster.sessions_of(side).next().is_some()
            || !self.gpu.calm(side).is_still()
            || self.roster.shared_events.any_of(side)
    }

    /// Closes an annex if no session uses it or is likely to move to it soon. Called by the undertaker.
    pub fn close_unused_annex(&self, side: Side, nothing_comes: impl Fn() -> bool) {
        let Some(_nobody_moves) = self.lanes.moving.try_write() else {
            return;
        };
        let left = self.lanes.owners.is_left(side);
        let used = self.is_in_use(side)
            || !left && self.lanes.owners.is_owned(side)
            || !left && self.is_blocked(Side::MAIN, Duration::ZERO);
        // Retained instances of the side are unloaded first, and pending decisions about instances are awaited.
        if used || self.images.assesses() || self.images.give_up_residents_of(side) {
            return;
        }
        // Sessions of other sides may still have images here.
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
        if left {
            self.release_own_context(side);
        }
    }
}

/// How long a session that is to leave its context submits nothing new while none of its work in flight ends: that may
/// wait for the messages that are held back.
const LEAVES: Duration = Duration::from_secs(3);
/// How long a session that could not leave is not ordered to again.
const STAYS: Duration = Duration::from_secs(600);

/// Submits nothing new until nothing is in flight, so that the session can move to the side that it was ordered to.
/// `None` if it stays.
pub fn leave(session: &mut Session, shared: &Shared) -> Option<Visit> {
    let own = session.flow.own.granted();
    let to = own.or(session.shared.standing.goes_to());
    let stayed = session.flow.stayed.is_some_and(|at| at.elapsed() < STAYS);
    let refused = own.is_none() && stayed;
    let to = to.filter(|to| *to != session.side && !session.flow.stays && !refused);
    let in_flight = session.inbox.held.any() || session.has_work_in_flight(&shared.gpu);
    if to.is_some() && in_flight && ends_its_work(session, shared) {
        return Some(Visit::Full);
    }
    session.shared.standing.set_goes_to(None);
    session.flow.leaves = None;
    let Some(to) = to else {
        if own.is_some() {
            stay_in_shared_context(session, shared, "it cannot move");
        }
        return None;
    };
    if in_flight || !may_move(session, shared) {
        let bonds = session.bonds(&shared.images, Destination::Annex);
        if own.is_some() {
            let why = match in_flight {
                true => "its work in flight does not end".into(),
                false => bonds.to_string(),
            };
            stay_in_shared_context(session, shared, &why);
            return None;
        }
        let client = &session.shared.info;
        tracing::info!("Client {client} stays in its context beside others: {bonds}");
        session.flow.stayed = Some(Instant::now());
        return None;
    }
    let apart = to != Side::MAIN && own.is_none();
    session.shared.standing.set_apart(apart);
    Some(Visit::Move(to))
}

/// Whether any of its work in flight has ended in the last [`LEAVES`].
fn ends_its_work(session: &mut Session, shared: &Shared) -> bool {
    let streams = session.objects.streams.iter_mut();
    let streams = streams.chain(&mut session.objects.retired);
    let done: u64 = streams.map(|stream| stream.take_notice(&shared.gpu)).sum();
    let now = (done, Instant::now());
    let last = session.flow.leaves.filter(|last| last.0 == done);
    let last = *session.flow.leaves.insert(last.unwrap_or(now));
    last.1.elapsed() < LEAVES
}

/// Whether the session has no objects that bind it to its current context.
pub fn may_move(session: &mut Session, shared: &Shared) -> bool {
    let bonds = session.bonds(&shared.images, Destination::Annex);
    bonds.is_empty() && !session.has_work_in_flight(&shared.gpu)
}

/// Whether its images are still in their initial state and its kernels have left no addresses of them in memory, as
/// far as [`may_move`] could not determine that.
pub fn has_images_as_new(session: &Session, shared: &Shared) -> bool {
    if session.flow.counts.launches == 0 {
        return true;
    }
    let mut images = session
        .objects
        .images
        .iter()
        .chain(session.objects.libraries.iter());
    !session.flow.left_images && images.all(|image| image.is_as_new(&shared.images))
}

/// Moves to a side where its calls need not wait. Its images follow at its next quiescent point there
/// ([`bring_images`]).
///
/// # Errors
/// The driver's status; the session then stays on its side.
pub fn move_to(session: &mut Session, shared: &Shared, to: Side) -> Result<(), CUresult> {
    forget_offer(session, shared);
    forget_brought(session, shared);
    let _annex_stays = shared.lanes.moving.read();
    let (streams, events) = side::on(to, || make_again(session, shared))?;
    session.end_runs(shared);
    for (stream, raw) in session.objects.streams.iter_mut().zip(streams) {
        stream.replace(&shared.gpu, raw);
    }
    for (event, raw) in session.objects.events.iter_mut().zip(events) {
        let old = std::mem::replace(&mut event.raw, raw);
        let _ = shared.gpu.driver.event_destroy(old);
    }
    for stream in session.objects.retired.drain(..) {
        let _ = shared.gpu.devices[stream.device].make_current(&shared.gpu.driver);
        stream.release(&shared.gpu);
    }
    session.shared.description.set_retired(false);
    let of = session.flow.images_of.unwrap_or(session.side);
    let any = session.objects.images.len() + session.objects.libraries.len() > 0;
    session.flow.images_of = (any && of != to).then_some(of);
    session.side = to;
    let number = to.index() as u8;
    session.shared.side.store(number, Ordering::SeqCst);
    session.enter();
    Ok(())
}

/// Loads its images and functions on its current side. The driver waits for work in flight there. Returns whether all
/// are loaded; `false` if the quiescent point has ended first, and the rest is to be loaded at the next one.
///
/// # Errors
/// The driver's status; the images then stay on their side.
pub fn bring_images(
    session: &mut Session,
    shared: &Shared,
    moment: &Moment,
) -> Result<bool, CUresult> {
    let functions = match load_again(session, shared, moment) {
        Ok(Some(functions)) => functions,
        Ok(None) => return Ok(false),
        Err(status) => {
            forget_brought(session, shared);
            return Err(status);
        }
    };
    let images = std::mem::take(&mut session.flow.brought);
    let own = session
        .objects
        .libraries
        .iter_mut()
        .chain(session.objects.images.iter_mut());
    for (image, instance) in own.zip(images) {
        image.move_to(&shared.images, session.side, instance);
    }
    for (function, raw) in session.objects.functions.iter_mut().zip(functions) {
        (function.raw, function.taken) = (raw, false);
        // The first launch also makes the driver allocate resources that the context lacks, so it is measured
        // separately.
        function.length = Length::Unknown;
    }
    session.flow.images_of = None;
    Ok(true)
}

/// Loads its images and functions again, in order, on its current side, where earlier attempts have left off. Returns
/// the functions; `None` if the quiescent point has ended first.
fn load_again(
    session: &mut Session,
    shared: &Shared,
    moment: &Moment,
) -> Result<Option<Vec<CUfunction>>, CUresult> {
    let all = || {
        session
            .objects
            .libraries
            .iter()
            .chain(session.objects.images.iter())
    };
    let brought = &mut session.flow.brought;
    for image in all().skip(brought.len()) {
        if moment.is_over() {
            return Ok(None);
        }
        shared.gpu.use_any_device();
        brought.push(image.load_there(&shared.images)?);
    }
    let mut functions = Vec::new();
    for function in session.objects.functions.iter() {
        if moment.is_over() {
            return Ok(None);
        }
        let image = session.objects.image(function.image)?;
        let at = all().position(|one| std::ptr::eq(one, image));
        let instance = at.and_then(|at| session.flow.brought.get(at));
        let instance = instance.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        // The instance remembers functions of earlier attempts.
        functions.push(instance.function(&shared.images, &function.key)?);
    }
    Ok(Some(functions))
}

/// Gives up the instances of [`bring_images`], if not all have been loaded.
pub fn forget_brought(session: &mut Session, shared: &Shared) {
    for instance in session.flow.brought.drain(..) {
        instances::let_go(&shared.images, instance);
    }
}

/// Raises the limits of the contexts on the entered side to the values that the session has set.
fn raise_limits_again(session: &Session, shared: &Shared) -> Result<(), CUresult> {
    let driver = &shared.gpu.driver;
    for (device, limit, value) in session.objects.limits.iter() {
        let device = &shared.gpu.devices[device];
        device.attach(driver)?;
        device.make_current(driver)?;
        let mut present = 0;
        driver.ctx_get_limit(&mut present, limit)?;
        if value > present as u64 {
            driver.ctx_set_limit(limit, value as usize)?;
        }
        if limit == CU_LIMIT_STACK_SIZE {
            device.has_grown(value.max(present as u64));
        }
    }
    Ok(())
}

/// Creates its streams and events again, in order, on the entered side.
fn make_again(
    session: &mut Session,
    shared: &Shared,
) -> Result<(Vec<CUstream>, Vec<CUevent>), CUresult> {
    let driver = &shared.gpu.driver;
    let (mut streams, mut events) = (Vec::new(), Vec::new());
    let outcome = (|| {
        for stream in session.objects.streams.iter() {
            let device = &shared.gpu.devices[stream.device];
            device.attach(driver)?;
            device.make_current(driver)?;
            streams.push(device.take_stream(driver, stream.raw_priority)?);
        }
        for event in session.objects.events.iter() {
            let device = &shared.gpu.devices[event.device];
            device.attach(driver)?;
            device.make_current(driver)?;
            let mut raw = CUevent::NULL;
            driver.event_create(&mut raw, event.flags & CU_EVENT_DISABLE_TIMING)?;
            events.push(raw);
            if event.captured {
                shared.gpu.record_in_capture(event.device, raw)?;
            } else if event.recorded {
                // The work before the record is done.
                shared.gpu.record_at_once(event.device, raw)?;
            }
        }
        raise_limits_again(session, shared)
    })();
    if let Err(status) = outcome {
        for (stream, raw) in session.objects.streams.iter().zip(streams) {
            shared.gpu.devices[stream.device].keep_stream(driver, stream.raw_priority, raw);
        }
        for raw in events {
            let _ = driver.event_destroy(raw);
        }
        return Err(status);
    }
    Ok((streams, events))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{Fixture, Function, gives_handle};
    use mpsshim_api::cuda::CUDA_ERROR_INVALID_IMAGE;
    use mpsshim_proto::handle::Kind;
    use parking_lot::Mutex;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    static LOADS: AtomicU32 = AtomicU32::new(0);
    /// The quiescent point, which ends with the next load.
    static MOMENT: Mutex<Option<Arc<Moment>>> = Mutex::new(None);
    /// The load with this number fails.
    static FAILS: AtomicU32 = AtomicU32::new(0);

    /// `cuModuleLoadDataEx`.
    extern "C" fn loads(module: *mut u64) -> CUresult {
        let number = LOADS.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(moment) = MOMENT.lock().take() {
            moment.close();
        }
        match number == FAILS.load(Ordering::Relaxed) {
            true => CUDA_ERROR_INVALID_IMAGE,
            false => gives_handle(module),
        }
    }

    fn ends_with_next_load() -> Arc<Moment> {
        let moment = Moment::of(1);
        *MOMENT.lock() = Some(moment.clone());
        moment
    }

    #[test]
    fn images_that_take_longer_than_a_quiescent_point_are_brought_at_several() {
        let mut test = Fixture::new(&[("cuModuleLoadDataEx", loads as Function)]);
        for _ in 0..3 {
            test.image(Kind::Module);
        }
        test.session.flow.images_of = Some(Side::MAIN);
        LOADS.store(0, Ordering::Relaxed);
        for brought in 1..=2 {
            let moment = ends_with_next_load();
            let all = bring_images(&mut test.session, &test.shared, &moment);
            assert_eq!((all, test.session.flow.brought.len()), (Ok(false), brought));
        }
        let moment = Moment::endless();
        assert_eq!(
            bring_images(&mut test.session, &test.shared, &moment),
            Ok(true)
        );
        assert_eq!(LOADS.load(Ordering::Relaxed), 3, "each once");
        assert!(test.session.flow.images_of.is_none() && test.session.flow.brought.is_empty());

        // A failure gives the instances up.
        test.session.flow.images_of = Some(Side::MAIN);
        FAILS.store(5, Ordering::Relaxed);
        let moment = ends_with_next_load();
        let all = bring_images(&mut test.session, &test.shared, &moment);
        assert_eq!((all, test.session.flow.brought.len()), (Ok(false), 1));
        let failed = bring_images(&mut test.session, &test.shared, &Moment::endless());
        assert_eq!(failed, Err(CUDA_ERROR_INVALID_IMAGE));
        assert!(test.session.flow.images_of.is_some() && test.session.flow.brought.is_empty());
    }
}
