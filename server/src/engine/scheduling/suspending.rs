//! Moves the device memory of idle sessions to host memory, and back before their next call.
//!
//! A grant keeps its addresses, so nothing that the client or its graphs know changes. Its content goes to a block of pinned
//! memory of the same length, which the keeper holds in its place; then the physical memory returns to the driver. The moves
//! run on the slow lane, one grant after the other. Between two grants a quiescent point for other sessions may come: the
//! session then returns to its dispatch thread, which sends it here again.
//!
//! Memory that other sessions or processes may use, managed memory, and memory that is not granted by the server (pools,
//! mappings of the client's own, arrays, images) stays on the device.

use crate::engine::base::account::Memory;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side;
use crate::engine::gpu::devices::Grant;
use crate::engine::gpu::moved::{Content, Failure};
use crate::engine::lasting::memory::{
    describe_evicted, describe_refilled, forget_content, note_evicted,
};
use crate::engine::scheduling::parking::wants_attention;
use crate::engine::scheduling::resting::{finish_work, owes_nothing};
use crate::engine::scheduling::transfers::{self, MovesOut, Progress};
use crate::engine::scheduling::visit::Visit;
use crate::engine::session::Session;
use crate::engine::session::suspension::{Order, fitting};
use crate::engine::threads::room::{self, Making};
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use mpsshim_api::cuda::*;
use mpsshim_control::panics;
use mpsshim_model::suspension::{Placement, Unmoved};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Interval at which a session asks again for device memory that it lacks.
const ASKS: Duration = Duration::from_millis(20);

/// Poll interval for the outcome of an order.
const LOOK: Duration = Duration::from_millis(1);
/// Interval at which a session is reminded of an order.
const REMINDS: Duration = Duration::from_millis(10);

/// Whether some of its device memory is in host memory.
#[inline]
pub fn is_evicted(session: &Session) -> bool {
    !session.objects.evicted.is_empty()
}

/// Visits a session some of whose device memory is in host memory: it executes nothing until the memory is back.
pub fn visit_evicted(session: &mut Session) -> Visit {
    let order = session.shared.suspension.order();
    let calls = wants_attention(session);
    if calls {
        session.shared.suspension.begin_wait(Instant::now());
    }
    match order {
        Some(Order::MakeRoom(..)) => return Visit::Evict,
        Some(Order::Out) if !calls => return Visit::Evict,
        Some(Order::Out) => session.shared.suspension.settle(Err(Unmoved::Resumed)),
        Some(Order::In) | None => {}
    }
    if !calls && order != Some(Order::In) {
        session.flow.room_at = None;
        return Visit::Idle;
    }
    match waits_for_memory(session) {
        true => Visit::Idle,
        false => Visit::Refill,
    }
}

/// Whether it waits for free device memory before it can execute anything.
pub fn waits_for_memory(session: &Session) -> bool {
    let at = session.flow.room_at;
    at.is_some_and(|at| Instant::now() < at)
}

/// How long it waits until it asks for device memory again.
pub fn room_pause(session: &Session) -> Option<Duration> {
    let at = session.flow.room_at?;
    Some(at.saturating_duration_since(Instant::now()))
}

/// Whether an order to move its device memory to host memory can be carried out now. It has nothing to execute.
pub fn is_due_for_eviction(session: &mut Session, shared: &Shared) -> bool {
    match session.shared.suspension.order() {
        Some(Order::Out) => !refuses_to_move(session) && owes_nothing(session, shared),
        Some(Order::In) => {
            // Nothing of it is in host memory.
            settle_suspension(session);
            false
        }
        Some(Order::MakeRoom(..)) | None => false,
    }
}

/// Executes nothing new until its work in flight is done, so that its memory can make room for another session.
pub fn make_way(session: &mut Session, shared: &Shared) -> Visit {
    if refuses_to_move(session) {
        return Visit::Worked;
    }
    finish_work(session, shared).unwrap_or(Visit::Evict)
}

/// Whether it captures, which an order does not interrupt. The order is settled then.
fn refuses_to_move(session: &Session) -> bool {
    let captures = !session.objects.graphs.captures.is_empty();
    if captures {
        session.shared.suspension.resist(Instant::now());
        session.shared.suspension.settle(Err(Unmoved::Captures));
    }
    captures
}

/// Reports that an order has been carried out.
fn settle_suspension(session: &Session) {
    let held = session.account.held_of_devices().into_values().sum::<u64>();
    let moved = session.shared.suspension.moved();
    session.shared.suspension.settle(Ok(Placement {
        moved_out: moved,
        resident: held.saturating_sub(moved),
    }));
}

/// The grants, of this device or of all, whose content may be moved to host memory, and is not there yet.
fn grants_to_evict(session: &Session, device: Option<Ordinal>) -> Vec<Arc<Grant>> {
    let grants = session.objects.grants.values();
    // A session that has opened memory of another one holds a reference to it.
    let may_move = |grant: &&Arc<Grant>| {
        let is_meant = device.is_none_or(|device| device == grant.device);
        is_meant && grant.is_on_device() && !grant.stays() && Arc::strong_count(grant) == 1
    };
    let found = grants.filter(may_move).cloned().collect();
    // For another session only those beyond the guarantee.
    let most = device.map_or(u64::MAX, |device| {
        let held = session.account.held(Memory::Device(device));
        session.shared.suspension.resident_beyond(device, held)
    });
    fitting(found, |grant| grant.len, most)
}

fn evict_grants(session: &mut Session, shared: &Shared) -> Result<Progress, Unmoved> {
    let (device, most) = match session.shared.suspension.order() {
        Some(Order::MakeRoom(device, bytes)) => (Some(device), Some(bytes)),
        Some(Order::Out) => (None, None),
        // The order has been withdrawn.
        Some(Order::In) | None => return Ok(Progress::Later),
    };
    let grants = grants_to_evict(session, device);
    if device.is_some() && grants.is_empty() {
        // There is less than was counted on.
        session.shared.suspension.resist(Instant::now());
    }
    let lens = grants.iter().map(|grant| grant.len);
    let outcome = transfers::moving_out(session, shared, (lens, most), |session, moves| {
        let outcome = evict_with(session, shared, (&grants, most), moves);
        if !matches!(outcome, Ok(Progress::Done)) {
            moves.drop_outs();
        }
        outcome
    });
    if let Some(keeper) = shared.gpu.keeping.keeper() {
        // The physical memory is free once the keeper has closed its descriptor.
        keeper.settle();
    }
    outcome
}

/// Moves grants to host memory, until there are `most` bytes.
fn evict_with(
    session: &mut Session,
    shared: &Shared,
    (grants, most): (&[Arc<Grant>], Option<u64>),
    moves: &mut MovesOut<'_, '_, '_>,
) -> Result<Progress, Unmoved> {
    let mut submitted = 0;
    for grant in grants {
        if most.is_some_and(|most| submitted >= most) {
            break;
        }
        if !session.may_work(&shared.gpu) {
            return Ok(Progress::Later);
        }
        let moved = moves.submit(session, grant);
        session.say_whether_at_work(&shared.gpu);
        if let Progress::Later = moved? {
            return Ok(Progress::Later);
        }
        submitted += grant.len;
        release_finished(session, shared, moves)?;
    }
    while moves.wait(session)? {
        release_finished(session, shared, moves)?;
    }
    Ok(Progress::Done)
}

/// Releases the device memory whose content is in host memory.
fn release_finished(
    session: &mut Session,
    shared: &Shared,
    moves: &mut MovesOut<'_, '_, '_>,
) -> Result<(), Unmoved> {
    let mut outcome = Ok(());
    for (grant, content) in moves.take_finished() {
        if !describe_evicted(session, &shared.images, &grant, &content) {
            forget_content(&shared.gpu.keeping, grant.start, &content);
            spare(session, shared, content);
            outcome = Err(transfers::no_keeper());
            continue;
        }
        session.objects.evicted.insert(grant.start, content);
        note_evicted(session);
        let suspension = &session.shared.suspension;
        suspension.take_movable(grant.device, grant.len);
        suspension.count_room(grant.len);
        let of = &shared.gpu.devices[grant.device];
        if let Err(status) = of.evict(&shared.gpu.driver, &grant) {
            shared.gpu.note_status(status);
            let why = format!("its memory cannot be released: {status}");
            outcome = Err(Unmoved::Failed(why));
        }
    }
    outcome
}

fn refill_grants(session: &mut Session, shared: &Shared) -> Result<Progress, CUresult> {
    while let Some(start) = session.objects.evicted.keys().next().copied() {
        if !session.may_work(&shared.gpu) {
            return Ok(Progress::Later);
        }
        let grant = session.objects.grants.get(&start);
        let grant = grant.cloned().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let refilled = refill_one(session, shared, &grant);
        session.say_whether_at_work(&shared.gpu);
        if let Progress::Later = refilled? {
            return Ok(Progress::Later);
        }
    }
    Ok(Progress::Done)
}

/// Whether room is being made for all its memory of a device that is in host memory.
fn waits_for_its_memory(session: &mut Session, shared: &Shared, device: Ordinal) -> bool {
    let evicted = session.objects.evicted.keys();
    let grants = evicted.filter_map(|start| session.objects.grants.get(start));
    let own = grants.filter(|grant| grant.device == device);
    let bytes = own.map(|grant| grant.len).sum();
    let makes = shared.make_room(&session.shared, device, bytes);
    if makes == Making::Waits {
        session.flow.room_at = Some(Instant::now() + room::ASKS);
    }
    makes == Making::Waits
}

fn refill_one(
    session: &mut Session,
    shared: &Shared,
    grant: &Arc<Grant>,
) -> Result<Progress, CUresult> {
    let device = &shared.gpu.devices[grant.device];
    let driver = &shared.gpu.driver;
    if !grant.is_on_device() {
        let mut made = device.refill(driver, grant);
        if made == Err(CUDA_ERROR_OUT_OF_MEMORY) {
            if let Some(keeper) = shared.gpu.keeping.keeper() {
                keeper.settle();
            }
            shared.images.give_up_residents();
            made = device.refill(driver, grant);
        }
        if made == Err(CUDA_ERROR_OUT_OF_MEMORY) && shared.images.changes.ask_for_memory() {
            session.flow.room_at = Some(Instant::now() + room::ASKS);
            return Ok(Progress::Later);
        }
        if made == Err(CUDA_ERROR_OUT_OF_MEMORY)
            && waits_for_its_memory(session, shared, grant.device)
        {
            return Ok(Progress::Later);
        }
        made?;
    }
    let content = session.objects.evicted.remove(&grant.start);
    let mut content = content.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let shown = session.objects.share_with_peers(&shared.gpu, grant.start);
    let copied = shown
        .map_err(Failure::Driver)
        .and_then(|()| transfers::move_in(session, shared, grant, &mut content));
    if !matches!(copied, Ok(Progress::Done)) {
        // The content stays in host memory. Device memory that has only a part of it must not be moved there.
        session.objects.evicted.insert(grant.start, content);
        let _ = device.evict(driver, grant);
        return copied.map_err(|why| match why {
            Failure::Driver(status) => status,
            Failure::File(error) => {
                let client = &session.shared.info;
                tracing::error!("Client {client}: its memory cannot be read back: {error}");
                CUDA_ERROR_OPERATING_SYSTEM
            }
        });
    }
    let suspension = &session.shared.suspension;
    suspension.add_movable(grant.device, grant.len);
    describe_refilled(session, &shared.images, grant, &content);
    spare(session, shared, content);
    note_evicted(session);
    Ok(Progress::Done)
}

/// Keeps host memory whose content is not needed any more for the next moves.
fn spare(session: &Session, shared: &Shared, content: Content) {
    let uid = session.shared.info.uid;
    content.into_pool(&shared.gpu.move_pool, uid);
}

/// Moves the device memory of a session to host memory and returns the session to its dispatch thread.
pub fn evict(shared: &Shared, mut session: Box<Session>) {
    panics::works_for(Some(session.shared.info.session));
    session.enter();
    let before = session.shared.suspension.moved();
    let (reason, calls) = (
        session.shared.suspension.reason(),
        wants_attention(&session),
    );
    let began = Instant::now();
    session.shared.suspension.set_moving(true);
    let outcome = evict_grants(&mut session, shared);
    session.shared.suspension.set_moving(false);
    shared.room.note_move(began.elapsed());
    let moved = session.shared.suspension.moved() - before;
    let client = session.shared.info.clone();
    if moved > 0 {
        session.shared.suspension.count_moved(moved, 0);
        if calls {
            session.shared.suspension.begin_wait(began);
        }
        tracing::info!(
            "Client {client}: {moved} bytes of device memory are in host memory, after {} ms, {reason}",
            began.elapsed().as_millis()
        );
    }
    match outcome {
        Ok(Progress::Done) if session.shared.suspension.wants_host_memory() => {
            settle_suspension(&session);
        }
        Ok(_) => {}
        Err(why) => {
            tracing::info!("Client {client} is not suspended: {why}");
            session.shared.suspension.settle(Err(why));
        }
    }
    pin_pieces(&mut session, shared);
    shared.lanes.bury(Buried::MovePool);
    shared.lanes.send_home(session);
}

/// Pins host memory with the content of device memory, for a fast way back, until the session or another one needs the
/// thread.
fn pin_pieces(session: &mut Session, shared: &Shared) {
    let gpu = &shared.gpu;
    let own = session.shared.clone();
    let stops = |session: &Session| {
        wants_attention(session)
            || shared.lanes.slow.is_wanted()
            || own.suspension.is_ordered()
            || own.hung_up.load(Ordering::Relaxed)
            || own.is_to_rest(shared.fate.attempt())
            || gpu.is_lost()
            || gpu.calm(session.side).is_hushed()
            || shared.fate.stopping.load(Ordering::Relaxed)
    };
    let starts: Vec<u64> = session.objects.evicted.keys().copied().collect();
    for start in starts {
        let pieces = session.objects.evicted.get(&start);
        let pieces = pieces.map_or(0, |content| content.pieces.len());
        for number in 0..pieces {
            if stops(session) {
                return;
            }
            let (Some(content), Some(device)) =
                (session.objects.evicted.get_mut(&start), gpu.any_device())
            else {
                return;
            };
            let pinned = side::on_main(|| content.pin(number, (&gpu.driver, device), &gpu.arena));
            if let Err(status) = pinned {
                tracing::debug!(%status, "moved memory is not pinned");
                return;
            }
        }
    }
}

/// Brings the device memory of a session back and returns the session to its dispatch thread.
pub fn refill(shared: &Shared, mut session: Box<Session>) {
    panics::works_for(Some(session.shared.info.session));
    session.enter();
    let before = session.shared.suspension.moved();
    let reason = session.shared.suspension.reason();
    let began = Instant::now();
    let outcome = refill_grants(&mut session, shared);
    shared.room.note_move(began.elapsed());
    let moved = before - session.shared.suspension.moved();
    let client = session.shared.info.clone();
    if moved > 0 {
        session.shared.suspension.count_moved(0, moved);
        tracing::info!(
            "Client {client}: {moved} bytes of device memory are back, after {} ms, {reason}",
            began.elapsed().as_millis()
        );
    }
    match outcome {
        Ok(Progress::Done) => {
            session.flow.room_at = None;
            shared.has_room(&session.shared);
            if session.shared.suspension.order() == Some(Order::In) {
                settle_suspension(&session);
            }
        }
        Ok(Progress::Later) => {}
        Err(status) => {
            shared.gpu.note_status(status);
            if session.flow.room_at.is_none() {
                tracing::warn!(
                    "Client {client} waits for {} bytes of device memory, which are in host memory: {status}",
                    session.shared.suspension.moved()
                );
            }
            session.flow.room_at = Some(Instant::now() + ASKS);
            if session.shared.suspension.order() == Some(Order::In) {
                session.shared.suspension.settle(Err(match status {
                    CUDA_ERROR_OUT_OF_MEMORY => Unmoved::NoRoom,
                    status => Unmoved::Failed(status.to_string()),
                }));
            }
        }
    }
    shared.lanes.bury(Buried::MovePool);
    shared.lanes.send_home(session);
}

impl Shared {
    /// Moves the device memory of a session to host memory, or back, within `patience`, which does not include the copies.
    ///
    /// # Errors
    /// Why it is not there.
    pub fn move_memory(
        &self,
        session: u64,
        order: Order,
        patience: Duration,
    ) -> Result<Placement, Unmoved> {
        let session = self.roster.session(session).ok_or(Unmoved::Ended)?;
        let suspension = &session.suspension;
        if !suspension.give(order) {
            return Err(Unmoved::Ordered);
        }
        let mut reminds_at = Instant::now();
        let mut quiet_until = reminds_at + patience;
        let mut seen = suspension.moved();
        loop {
            if Instant::now() >= reminds_at {
                session.bell.ring();
                reminds_at = Instant::now() + REMINDS;
            }
            if let Some(outcome) = suspension.take_outcome() {
                return outcome;
            }
            let now = Instant::now();
            if suspension.is_moving() || suspension.moved() != seen {
                seen = suspension.moved();
                quiet_until = now + patience;
            }
            let has_ended = session.hung_up.load(Ordering::Relaxed) || self.gpu.is_lost();
            if has_ended || now >= quiet_until {
                let why = match has_ended {
                    true => Unmoved::Ended,
                    false => Unmoved::Busy,
                };
                return suspension.withdraw().unwrap_or(Err(why));
            }
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::gpu::moved::{Piece, ranges};
    use crate::engine::testing::Fixture;

    #[test]
    fn memory_whose_way_back_is_interrupted_is_in_host_memory_only() {
        let mut test = Fixture::new(&[]);
        let start = test.memory(256 << 20);
        let (session, shared) = (&mut test.session, test.shared.clone());
        let grant = session.objects.grants[&start].clone();
        let device = &shared.gpu.devices[grant.device];
        device.evict(&shared.gpu.driver, &grant).expect("evicted");
        let content = Content {
            len: grant.len,
            pieces: ranges(grant.len).map(|_| Piece::Zero).collect(),
            file: None,
        };
        session.objects.evicted.insert(start, content);
        let hush = shared.gpu.calm(session.side).hush();
        let refilled = refill_one(session, &shared, &grant);
        assert!(matches!(refilled, Ok(Progress::Later)));
        // Otherwise the next move would replace the content by what has come back of it.
        assert!(!grant.is_on_device() && session.objects.evicted.contains_key(&start));
        drop(hush);
        let refilled = refill_one(session, &shared, &grant);
        assert!(matches!(refilled, Ok(Progress::Done)));
        assert!(grant.is_on_device() && session.objects.evicted.is_empty());
    }
}
