//! Objects whose end makes the driver wait for work in flight, until nothing is.
//!
//! `cuMemHostUnregister`, `cuModuleUnload` and the like wait for all work that is queued, everyone's, and some of them
//! hold the driver's lock meanwhile, so that no client launches anything. No patience is long enough for that: one kernel
//! that never ends would stop the whole server. So they are called here only, while no session has work in flight and
//! none is given a chance to submit any ([`super::calm`]): then they wait for nothing.
//!
//! Meanwhile registered memory ([`Spare`]) serves the next sessions instead of more of it.

use super::Shared;
use super::account::Memory;
use super::arrays::{Array, Object};
use super::devices::{Device, Ordinal};
use super::files::FileRegistration;
use super::green::{self, GreenRef};
use super::host::{HostBlock, Segment};
use super::instances::{Image, Instance};
use super::memory_file::MemoryFile;
use super::rations::{Part, Ration};
use super::session::SessionShared;
use super::side::{self, Side};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use mpsshim_api::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How often it is looked whether all is quiet.
const TICK: Duration = Duration::from_millis(1);
/// The same once that has been in vain for [`PATIENCE`].
const SLOW_TICK: Duration = Duration::from_millis(10);
/// Beside clients that are never all idle at once something waits so long; then the gate is to see to a moment.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest pause between two such demands.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long clients are held back for one lot of objects.
const LOT: Duration = Duration::from_millis(2);
/// All go on for so many times as long as they were held back for a lot.
const AFTER: u32 = 4;
/// Objects that wait here at a time; with more, clients get no further registered memory.
const MOST_BURIED: usize = 16 << 10;
/// Bytes of registered memory that wait here at a time; with more, clients get no further registered memory.
const MOST_SPARE: u64 = 4 << 30;

/// An object whose end waits for everyone's work.
pub enum Buried {
    /// A module or library.
    Image(Image),
    /// One in the driver that no image has any more, and that may be kept for others.
    Left(Instance),
    /// The same when it is not kept.
    Instance(Instance),
    /// An annex that nobody seems to use any more.
    UnusedAnnex(Side),
    /// A green context, which its streams may still hold.
    Green(GreenRef),
    /// Pinned memory of a client of this user.
    Host(HostBlock, u32),
    /// An array.
    Array(Array),
    /// A texture or surface object, and its device.
    Object(Object, Ordinal),
    /// Registered memory of a client's file.
    File(FileRegistration),
    /// A session's segment.
    Segment(Arc<SessionShared>),
}

/// Registered memory that nobody uses: taken by sessions that come, unregistered when all is quiet.
///
/// It goes to clients of the same user only, and only when nobody has it open or mapped any more, since the one who had it
/// cannot be made to let go, and has lost no pages ([`MemoryFile::pass_on`]).
#[derive(Debug, Default)]
pub struct Spare {
    kept: Mutex<Kept>,
    /// What the undertaker has to do, graves included.
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Kept {
    blocks: Vec<(u32, HostBlock)>,
    segments: Vec<(u32, Segment)>,
}

impl Kept {
    fn len(&self) -> usize {
        self.blocks.len() + self.segments.len()
    }
}

fn take_unshared<T>(
    kept: &mut Vec<(u32, T)>,
    uid: u32,
    fits: impl Fn(&T) -> bool,
    file: impl Fn(&mut T) -> &mut MemoryFile,
) -> Option<T> {
    let found = kept
        .iter_mut()
        .position(|(of, one)| *of == uid && fits(one) && file(one).pass_on())?;
    Some(kept.swap_remove(found).1)
}

impl Spare {
    /// A block of exactly `len` bytes for a client of this user, all zero.
    fn take_block(&self, uid: u32, len: u64) -> Option<HostBlock> {
        let block = take_unshared(
            &mut self.kept.lock().blocks,
            uid,
            |block| block.len() == len,
            |block| &mut block.file,
        )?;
        block.registration.clear();
        Some(block)
    }

    /// A segment for a client of this user, all zero.
    pub fn take_segment(&self, uid: u32) -> Option<Segment> {
        let segment = take_unshared(
            &mut self.kept.lock().segments,
            uid,
            |_| true,
            |segment| &mut segment.file,
        )?;
        segment.registration.clear();
        Some(segment)
    }

    fn put_block(&self, uid: u32, block: HostBlock) {
        self.kept.lock().blocks.push((uid, block));
    }
    /// Puts a segment there.
    pub fn put_segment(&self, uid: u32, segment: Segment) {
        self.kept.lock().segments.push((uid, segment));
    }
    fn len(&self) -> usize {
        self.kept.lock().len()
    }
    fn note_waiting(&self, waiting: usize) {
        self.waiting.store(waiting, Ordering::Relaxed);
    }
    fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
    fn bytes(&self) -> u64 {
        let blocks = &self.kept.lock().blocks;
        blocks.iter().map(|(_, block)| block.len()).sum()
    }

    /// Unregisters one; false when there is none.
    fn end_one(&self, shared: &Shared) -> bool {
        let block = self.kept.lock().blocks.pop();
        if let Some((_, block)) = block {
            shared.use_any_device();
            shared.arena.free(&shared.driver, block);
            return true;
        }
        let segment = self.kept.lock().segments.pop();
        let Some((_, segment)) = segment else {
            return false;
        };
        shared.use_any_device();
        drop(segment.registration.unregister(&shared.driver));
        true
    }
}

impl Shared {
    /// A place for more registered memory of a session: what waits to be unregistered is bounded, and what all hold.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn place_to_register(&self, session: &SessionShared) -> Result<Ration, CUresult> {
        let buried = self.spare.waiting();
        if buried >= MOST_BURIED || self.spare.bytes() >= MOST_SPARE {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.held_files.take(&session.held_files, Part::USUAL)
    }

    /// Pinned memory for a session, all zero: what another of the user's has left, or new.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, or the driver's.
    pub fn take_block(
        &self,
        session: &SessionShared,
        device: &Device,
        len: u64,
    ) -> Result<HostBlock, CUresult> {
        let (account, uid) = (&session.account, session.info.uid);
        let charge = account.take(Memory::Host, len)?;
        if let Some(mut block) = self.spare.take_block(uid, len) {
            block.host = Some(charge);
            block.place.pass_to(&session.held_files);
            return Ok(block);
        }
        drop(charge);
        let place = self.place_to_register(session)?;
        let paid = (account, place);
        side::on_main(|| self.arena.allocate(&self.driver, device, paid, len))
    }
}

/// What waits on one side to be ended.
pub struct Graves(Mutex<Lots>);

struct Lots {
    side: Side,
    objects: Vec<Buried>,
    /// Since when something waits, or the last lot was ended; and when the gate was last asked for a moment.
    since: Option<Instant>,
    asked: Option<Instant>,
    pause: Duration,
    /// When the others may be held back again.
    next: Instant,
}

impl Graves {
    /// Of this side.
    pub fn new(side: Side) -> Graves {
        Graves(Mutex::new(Lots {
            side,
            objects: Vec::new(),
            since: None,
            asked: None,
            pause: PATIENCE,
            next: Instant::now(),
        }))
    }

    /// Whether nothing waits.
    pub fn are_empty(&self) -> bool {
        self.0.lock().objects.is_empty()
    }

    /// Ends some, in a moment of somebody else's.
    pub fn end_some(&self, shared: &Shared) {
        // The undertaker itself may be about to want a moment.
        if let Some(mut lots) = self.0.try_lock() {
            lots.end_some(shared);
        }
    }
}

impl Lots {
    fn is_empty(&self, shared: &Shared) -> bool {
        self.objects.is_empty() && (self.side != Side::MAIN || shared.spare.len() == 0)
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
        shared.calm(self.side).set_overdue(false);
    }

    /// Ends what it can, if all is quiet; asks for a moment if that has not been so for long.
    fn look(&mut self, shared: &Shared) {
        side::enter(self.side);
        // A segment that somebody looked at just now.
        self.objects = std::mem::take(&mut self.objects)
            .into_iter()
            .filter_map(|object| spared(shared, object))
            .collect();
        if shared.is_lost() {
            // Nothing can be freed any more; the process is about to be replaced.
            self.objects.drain(..).for_each(std::mem::forget);
            std::mem::forget(std::mem::take(&mut *shared.spare.kept.lock()));
        }
        let (calm, waits) = (shared.calm(self.side), !self.is_empty(shared));
        calm.set_undertaker_waits(waits);
        if !waits {
            return;
        }
        let may = Instant::now() >= self.next || calm.is_left_to(None);
        if may && shared.is_quiet(self.side) {
            let began = Instant::now();
            let _hush = calm.hush();
            if shared.is_quiet(self.side) {
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
            shared.gate(self.side).knock();
        }
    }
}

/// The undertaker thread's body.
pub fn run(shared: &Arc<Shared>, tasks: &Receiver<(Side, Buried)>) {
    let all = |side: Side| shared.graves(side).0.lock();
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
            tasks.recv().map_err(|_| RecvTimeoutError::Disconnected)
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
                object => all(side).bury(shared, object),
            }
        }
        let mut buried = 0;
        for side in Side::ALL {
            let mut lots = all(side);
            lots.look(shared);
            buried += lots.objects.len();
        }
        shared.spare.note_waiting(buried + shared.spare.len());
        if let Some(side) = unused {
            // Nothing of it is on its way here.
            shared.close_unused_annex(side, || tasks.is_empty());
        }
    }
}

/// Keeps registered memory for the next session; gives back what is none.
fn spared(shared: &Shared, object: Buried) -> Option<Buried> {
    match object {
        Buried::Host(mut block, uid) => {
            (block.charge, block.host) = (None, None);
            shared.spare.put_block(uid, block);
            None
        }
        Buried::Segment(session) => match Arc::try_unwrap(session) {
            Ok(session) => {
                let uid = session.info.uid;
                shared.spare.put_segment(uid, session.segment);
                None
            }
            Err(session) => Some(Buried::Segment(session)),
        },
        // What others have too needs nobody to wait.
        Buried::Image(image) => image
            .leave_shared(shared)
            .and_then(|image| image.retire(shared))
            .map(Buried::Image),
        Buried::Left(instance) => {
            let instance = Arc::new(instance);
            shared.families.add(&instance);
            let refused = shared.assess(instance)?;
            Arc::into_inner(refused).map(Buried::Instance)
        }
        other => Some(other),
    }
}

/// Ends objects, for as long as others may be held back. What has another holder stays.
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
    while graves.side == Side::MAIN && began.elapsed() < LOT && shared.spare.end_one(shared) {}
}

/// Ends an object; gives it back when that must wait for another holder.
fn end(shared: &Shared, object: Buried) -> Option<Buried> {
    match object {
        Buried::Image(image) => image.end(shared),
        Buried::Instance(instance) => instance.end(shared),
        Buried::Array(array) => array.end(shared),
        Buried::Object(object, device) => {
            if let Err(status) = object.end(device, shared) {
                shared.note_status(status);
            }
        }
        Buried::Green(green) => return green::end(shared, green).map(Buried::Green),
        Buried::File(file) => {
            shared.use_any_device();
            shared.arena.unregister_file(&shared.driver, file);
        }
        Buried::UnusedAnnex(_) => {}
        kept @ (Buried::Host(..) | Buried::Segment(_) | Buried::Left(_)) => return Some(kept),
    }
    None
}
