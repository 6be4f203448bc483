//! Objects whose end makes the driver wait for work in flight, until nothing is.
//!
//! `cuMemHostUnregister`, `cuModuleUnload` and the like wait for all work that is queued, everyone's, and some of them
//! hold the driver's lock meanwhile, so that no client launches anything. No patience is long enough for that: one kernel
//! that never ends would stop the whole server. So they are called here only, while no session has work in flight and
//! none is given a chance to submit any ([`Calm::Hush`]): then they wait for nothing.
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
use super::rations::{Part, Ration};
use super::session::{Session, SessionShared};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use mpsshim_proto::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use mpsshim_proto::shm;
use parking_lot::Mutex;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

/// How often it is looked whether all is quiet.
const TICK: Duration = Duration::from_millis(1);
/// The same once that has been in vain for [`PATIENCE`].
const SLOW_TICK: Duration = Duration::from_millis(10);
/// Beside clients that are never all idle at once something waits so long; then submission is held back for a moment.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long submission is held back at most, for what is in flight to end.
const MOMENT: Duration = Duration::from_millis(20);
/// The longest pause between two such moments that were in vain.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long clients are held back for one lot of objects.
const LOT: Duration = Duration::from_millis(2);
/// Objects that wait here at a time; with more, clients get no further registered memory.
const MOST_BURIED: usize = 16 << 10;
/// Bytes of registered memory that wait here at a time; with more, clients get no further registered memory.
const MOST_SPARE: u64 = 4 << 30;

/// An object whose end waits for everyone's work.
pub enum Buried {
    /// A module or library.
    Image(Image),
    /// One in the driver, when no image has it any more.
    Instance(Instance),
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

/// What the undertaker has to do with the others.
#[derive(Debug, Default)]
pub struct Calm {
    /// [`Calm::IDLE`], [`Calm::WAITING`] or [`Calm::HUSH`].
    state: AtomicU8,
    /// Sessions that are over and have work in flight, or may have.
    dying: AtomicUsize,
    /// Objects that wait.
    buried: AtomicUsize,
    /// Some ended session's work does not end.
    stuck: AtomicBool,
}

impl Calm {
    /// Nothing waits.
    const IDLE: u8 = 0;
    /// Something waits for all to be quiet.
    const WAITING: u8 = 1;
    /// Nobody submits anything now.
    const HUSH: u8 = 2;

    /// A session is over.
    pub fn begin_dying(&self) {
        self.dying.fetch_add(1, Ordering::SeqCst);
    }
    /// Nothing of it is in flight.
    pub fn end_dying(&self) {
        self.dying.fetch_sub(1, Ordering::SeqCst);
    }
    /// Whether there are ended sessions whose work does not end.
    pub fn set_stuck(&self, stuck: bool) {
        self.stuck.store(stuck, Ordering::Relaxed);
    }
    /// Whether sessions that are looked at anyway should say if they have work in flight.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.state.load(Ordering::Relaxed) != Self::IDLE
    }
    /// Whether nobody may submit anything now; a moment.
    #[inline]
    pub fn is_hushed(&self) -> bool {
        self.state.load(Ordering::Relaxed) == Self::HUSH
    }
    fn set(&self, state: u8) {
        self.state.store(state, Ordering::SeqCst);
        // Partner: [`Session::may_work`]. Either it sees the hush, or the session is seen to be at work.
        fence(Ordering::SeqCst);
    }
}

impl Session {
    /// To be asked before anything is submitted: notes that the session is at work; false when it has to wait a moment.
    #[inline]
    pub fn may_work(&mut self, shared: &Shared) -> bool {
        if !self.shared.at_work.load(Ordering::Relaxed) {
            self.shared.at_work.store(true, Ordering::SeqCst);
            // Partner: [`Calm::set`].
            fence(Ordering::SeqCst);
        }
        if shared.calm.is_hushed() {
            self.say_whether_at_work(shared);
            return false;
        }
        true
    }

    /// Says whether anything is in flight.
    pub fn say_whether_at_work(&mut self, shared: &Shared) {
        let at_work = self.has_work_in_flight(shared);
        self.shared.at_work.store(at_work, Ordering::Release);
    }
}

/// Registered memory that nobody uses: taken by sessions that come, unregistered when all is quiet.
///
/// It goes to clients of the same user only, and only when nobody has it open or mapped any more, since the one who had it
/// cannot be made to let go.
#[derive(Debug, Default)]
pub struct Spare(Mutex<Kept>);

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

fn take_sole<T>(
    kept: &mut Vec<(u32, T)>,
    uid: u32,
    fits: impl Fn(&T) -> bool,
    file: impl Fn(&T) -> std::os::fd::BorrowedFd<'_>,
) -> Option<T> {
    let found = kept
        .iter()
        .position(|(of, one)| *of == uid && fits(one) && shm::is_sole(file(one)))?;
    Some(kept.swap_remove(found).1)
}

impl Spare {
    /// A block of exactly `len` bytes for a client of this user, all zero.
    fn take_block(&self, uid: u32, len: u64) -> Option<HostBlock> {
        let block = take_sole(
            &mut self.0.lock().blocks,
            uid,
            |block| block.len() == len,
            |block| block.fd.as_fd(),
        )?;
        block.registration.clear();
        Some(block)
    }

    /// A segment for a client of this user, all zero.
    pub fn take_segment(&self, uid: u32) -> Option<Segment> {
        let segment = take_sole(
            &mut self.0.lock().segments,
            uid,
            |_| true,
            |segment| segment.file.as_fd(),
        )?;
        segment.registration.clear();
        Some(segment)
    }

    fn put_block(&self, uid: u32, block: HostBlock) {
        self.0.lock().blocks.push((uid, block));
    }
    /// Puts a segment there.
    pub fn put_segment(&self, uid: u32, segment: Segment) {
        self.0.lock().segments.push((uid, segment));
    }
    fn len(&self) -> usize {
        self.0.lock().len()
    }
    fn bytes(&self) -> u64 {
        let blocks = &self.0.lock().blocks;
        blocks.iter().map(|(_, block)| block.len()).sum()
    }

    /// Unregisters one; false when there is none.
    fn end_one(&self, shared: &Shared) -> bool {
        let block = self.0.lock().blocks.pop();
        if let Some((_, block)) = block {
            shared.use_any_device();
            shared.arena.free(&shared.driver, block);
            return true;
        }
        let segment = self.0.lock().segments.pop();
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
        let buried = self.calm.buried.load(Ordering::Relaxed);
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
        self.arena
            .allocate(&self.driver, device, (account, place), len)
    }

    /// Whether nothing is in flight, as far as the sessions have said.
    fn is_quiet(&self) -> bool {
        self.calm.dying.load(Ordering::SeqCst) == 0
            && self
                .session_list()
                .iter()
                .all(|session| !session.at_work.load(Ordering::SeqCst))
    }
}

/// The undertaker thread's body.
pub fn run(shared: &Arc<Shared>, tasks: &Receiver<Buried>) {
    let mut graves: Vec<Buried> = Vec::new();
    let mut since = Instant::now();
    let (mut pause, mut tried) = (PATIENCE, since);
    loop {
        let empty = graves.is_empty() && shared.spare.len() == 0;
        if empty {
            shared.calm.set(Calm::IDLE);
        }
        let task = if empty {
            tasks.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else if since.elapsed() < PATIENCE {
            tasks.recv_timeout(TICK)
        } else {
            tasks.recv_timeout(SLOW_TICK)
        };
        if empty {
            (since, pause) = (Instant::now(), PATIENCE);
            tried = since;
            shared.calm.set(Calm::WAITING);
        }
        match task {
            Ok(object) => graves.extend(spared(shared, object)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        for object in tasks.try_iter() {
            graves.extend(spared(shared, object));
        }
        // A segment that somebody looked at just now.
        graves = graves
            .into_iter()
            .filter_map(|g| spared(shared, g))
            .collect();
        if shared.is_lost() {
            // Nothing can be freed any more; the process is about to be replaced.
            graves.drain(..).for_each(std::mem::forget);
            std::mem::forget(std::mem::take(&mut *shared.spare.0.lock()));
        }
        let waiting = graves.len() + shared.spare.len();
        shared.calm.buried.store(waiting, Ordering::Relaxed);
        let stuck = shared.calm.stuck.load(Ordering::Relaxed);
        let overdue = !stuck && since.elapsed() > PATIENCE && tried.elapsed() > pause;
        if waiting == 0 || !(overdue || shared.is_quiet()) {
            continue;
        }
        shared.calm.set(Calm::HUSH);
        let mut quiet = shared.is_quiet();
        if overdue {
            tried = Instant::now();
            while !quiet && tried.elapsed() < MOMENT {
                std::thread::sleep(Duration::from_micros(100));
                quiet = shared.is_quiet();
            }
            let longer = LONGEST_PAUSE.min(2 * pause);
            pause = if quiet { PATIENCE } else { longer };
        }
        if quiet {
            lay_to_rest(shared, &mut graves);
            since = Instant::now();
        }
        shared.calm.set(Calm::WAITING);
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
        Buried::Image(image) => image.leave_shared(shared).map(Buried::Image),
        other => Some(other),
    }
}

/// Ends objects, for as long as others may be held back. What has another holder stays.
fn lay_to_rest(shared: &Shared, graves: &mut Vec<Buried>) {
    let began = Instant::now();
    let mut kept = Vec::new();
    for object in std::mem::take(graves) {
        if began.elapsed() < LOT {
            kept.extend(end(shared, object));
        } else {
            kept.push(object);
        }
    }
    *graves = kept;
    while began.elapsed() < LOT && shared.spare.end_one(shared) {}
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
        kept @ (Buried::Host(..) | Buried::Segment(_)) => return Some(kept),
    }
    None
}
