//! The thread that destroys objects at quiescent points.

use super::{Buried, Graves, Lots, PATIENCE};
use crate::engine::base::side::{self, Side};
use crate::engine::gpu::host::HostBlock;
use crate::engine::gpu::spare::Unused;
use crate::engine::threads::shared::Shared;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Poll interval for a quiescent point.
const TICK: Duration = Duration::from_millis(1);
/// Poll interval once no quiescent point has occurred for [`PATIENCE`].
const SLOW_TICK: Duration = Duration::from_millis(10);
/// Longest interval between requests to the gate for a quiescent point.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Interval at which memory for moves is pinned.
const PIN_TICK: Duration = Duration::from_millis(20);
/// Poll interval for pinned memory that no move has used for long.
const LONG_TICK: Duration = Duration::from_secs(1);
/// How long clients are held back to destroy one batch of objects.
const LOT: Duration = Duration::from_millis(2);
/// After a batch was destroyed, submissions run for this multiple of the time they were held back.
const AFTER: u32 = 4;

impl Graves {
    /// Destroys some objects at a quiescent point that another thread has established.
    pub fn end_some(&self, shared: &Shared) {
        // The undertaker itself may hold the lock and be waiting for a quiescent point.
        if let Some(mut lots) = self.0.try_lock() {
            lots.end_some(shared);
        }
    }
}

impl Lots {
    fn is_empty(&self, shared: &Shared) -> bool {
        self.objects.is_empty() && (self.side != Side::MAIN || shared.gpu.spare.len() == 0)
    }

    fn bury(&mut self, shared: &Shared, object: Buried) {
        if self.is_empty(shared) {
            (self.since, self.asked, self.pause) = (Some(Instant::now()), None, PATIENCE);
        }
        self.objects.extend(spared(shared, object));
    }

    fn end_some(&mut self, shared: &Shared) {
        lay_to_rest(shared, self);
        (self.since, self.asked, self.pause) = (Some(Instant::now()), None, PATIENCE);
        shared.gpu.calm(self.side).set_overdue(false);
    }

    /// Destroys objects if nothing is in flight; requests a quiescent point from the gate if none has occurred for
    /// long.
    fn look(&mut self, shared: &Shared) {
        side::enter(self.side);
        // Includes segments that another thread was still using at the last attempt.
        self.objects = std::mem::take(&mut self.objects)
            .into_iter()
            .filter_map(|object| spared(shared, object))
            .collect();
        if shared.gpu.is_lost() {
            // Nothing can be freed any more; the process is about to be replaced.
            self.objects.drain(..).for_each(std::mem::forget);
            std::mem::forget(shared.gpu.spare.take_all());
        }
        let (calm, waits) = (shared.gpu.calm(self.side), !self.is_empty(shared));
        calm.set_undertaker_waits(waits);
        if !waits {
            return;
        }
        let may = Instant::now() >= self.next || calm.is_left_to(None);
        if may && shared.roster.is_quiet(&shared.gpu, self.side) {
            let began = Instant::now();
            let _hush = calm.hush();
            if shared.roster.is_quiet(&shared.gpu, self.side) {
                self.end_some(shared);
            }
            self.next = Instant::now() + AFTER * began.elapsed();
            return;
        }
        let over = |then: Option<Instant>, time| then.is_none_or(|then| then.elapsed() > time);
        if over(self.since, PATIENCE) && over(self.asked, self.pause) && !calm.is_stuck() {
            self.pause = LONGEST_PAUSE.min(2 * self.pause);
            self.asked = Some(Instant::now());
            calm.set_overdue(true);
            shared.lanes.gate(self.side).knock();
        }
    }
}

impl Shared {
    /// Unregisters pinned memory of a user that is kept for moves of device memory, until `most` bytes or fewer are left.
    pub fn release_move_pool(&self, uid: u32, most: u64) {
        self.bury_blocks(self.gpu.move_pool.take_beyond(uid, most, &self.gpu.arena));
    }

    /// Pins a block of the memory that is kept for moves.
    fn pin_for_moves(&self) {
        let may = !self.gpu.is_lost() && !self.gpu.calm(Side::MAIN).is_hushed();
        if may && let Some(device) = self.gpu.any_device() {
            let with = (&self.gpu.driver, device);
            side::on_main(|| self.gpu.move_pool.pin_one(with, &self.gpu.arena));
        }
    }

    fn release_old_move_pool(&self) {
        self.bury_blocks(self.gpu.move_pool.take_old());
    }

    /// Unregisters all memory that is kept for moves, of all users. Returns whether there was any.
    pub fn release_all_move_pools(&self) -> bool {
        self.bury_blocks(self.gpu.move_pool.take_all(&self.gpu.arena))
    }

    fn bury_blocks(&self, blocks: Vec<(u32, HostBlock)>) -> bool {
        let any = !blocks.is_empty();
        for (uid, block) in blocks {
            self.lanes.bury(Buried::Host(block, uid));
        }
        any
    }
}

/// The undertaker thread's body.
pub fn run(shared: &Arc<Shared>, tasks: &Receiver<(Side, Buried)>) {
    let all = |side: Side| shared.lanes.graves(side).0.lock();
    let mut pool_looked_at = Instant::now();
    loop {
        let waiting: Vec<_> = Side::ALL
            .into_iter()
            .filter(|side| !all(*side).is_empty(shared))
            .collect();
        let fresh = |side: &Side| {
            let since = all(*side).since;
            since.is_some_and(|since| since.elapsed() < PATIENCE)
        };
        let task = if waiting.is_empty() {
            let pool = &shared.gpu.move_pool;
            match (pool.pinned.is_empty(), pool.unpinned.is_empty()) {
                (true, true) => tasks.recv().map_err(|_| RecvTimeoutError::Disconnected),
                (false, true) => tasks.recv_timeout(LONG_TICK),
                (_, false) => tasks.recv_timeout(PIN_TICK),
            }
        } else if waiting.iter().any(fresh) {
            tasks.recv_timeout(TICK)
        } else {
            tasks.recv_timeout(SLOW_TICK)
        };
        let first = match task {
            Ok(task) => Some(task),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let mut unused = None;
        for (side, object) in first.into_iter().chain(tasks.try_iter()) {
            side::enter(side);
            match object {
                Buried::UnusedAnnex(side) => unused = Some(side),
                Buried::MovePool => {}
                object => all(side).bury(shared, object),
            }
        }
        if pool_looked_at.elapsed() >= PIN_TICK {
            shared.pin_for_moves();
            shared.release_old_move_pool();
            pool_looked_at = Instant::now();
        }
        let mut buried = 0;
        for side in Side::ALL {
            let mut lots = all(side);
            lots.look(shared);
            buried += lots.objects.len();
        }
        shared
            .gpu
            .spare
            .note_waiting(buried + shared.gpu.spare.len());
        if let Some(side) = unused {
            // No object of the side is still queued.
            shared.close_unused_annex(side, || tasks.is_empty());
        }
    }
}

/// Keeps registered memory for the next session and shared images for other clients; returns any other object.
fn spared(shared: &Shared, object: Buried) -> Option<Buried> {
    match object {
        Buried::Host(mut block, uid) => {
            block.host = None;
            shared.gpu.spare.put_block(uid, block);
            None
        }
        Buried::Segment(session) => match Arc::try_unwrap(session) {
            Ok(session) => {
                let uid = session.info.uid;
                shared.gpu.spare.put_segment(uid, session.segment);
                None
            }
            Err(session) => Some(Buried::Segment(session)),
        },
        // Dropping a reference to an image that others use does not block.
        Buried::Image(image) => image
            .leave_shared(&shared.images)
            .and_then(|image| image.retire(&shared.images))
            .map(Buried::Image),
        Buried::Left(instance) => {
            let instance = Arc::new(instance);
            shared.images.families.add(&instance);
            let refused = shared.images.assess(instance)?;
            Arc::into_inner(refused).map(Buried::Instance)
        }
        other => Some(other),
    }
}

/// Destroys objects for at most [`LOT`]. Objects that are still referenced elsewhere are kept.
fn lay_to_rest(shared: &Shared, graves: &mut Lots) {
    let began = Instant::now();
    let mut kept = Vec::new();
    for object in std::mem::take(&mut graves.objects) {
        if began.elapsed() < LOT {
            kept.extend(end(shared, object));
        } else {
            kept.push(object);
        }
    }
    graves.objects = kept;
    while graves.side == Side::MAIN && began.elapsed() < LOT && end_spare(shared) {}
}

/// Unregisters one piece of memory that no session uses. Returns false if there is none.
fn end_spare(shared: &Shared) -> bool {
    let Some(unused) = shared.gpu.spare.take_any() else {
        return false;
    };
    shared.gpu.use_any_device();
    match unused {
        Unused::Block(block) => shared.gpu.arena.free(&shared.gpu.driver, block),
        Unused::Segment(segment) => drop(segment.registration.unregister(&shared.gpu.driver)),
    }
    true
}

/// Destroys an object. Returns it if another reference must be dropped first.
fn end(shared: &Shared, object: Buried) -> Option<Buried> {
    match object {
        Buried::Image(image) => image.end(&shared.images),
        Buried::Instance(instance) => instance.end(&shared.images),
        Buried::Array(array) => array.end(&shared.gpu),
        Buried::Object(object, device) => {
            if let Err(status) = object.end(device, &shared.gpu) {
                shared.gpu.note_status(status);
            }
        }
        Buried::Green(green) => return shared.gpu.end_green(green).map(Buried::Green),
        Buried::File(file) => {
            shared.gpu.use_any_device();
            shared.gpu.unregister_file(file);
        }
        Buried::UnusedAnnex(_) | Buried::MovePool => {}
        kept @ (Buried::Host(..) | Buried::Segment(_) | Buried::Left(_)) => return Some(kept),
    }
    None
}
