//! Copies the content of device memory to host memory and back, piece by piece.
//!
//! Pinned memory of earlier moves takes pieces directly. Where that is not enough, the device is copied to a few new pinned
//! blocks again and again, and threads write their content to memory files, which are pinned later. To allocate the pages of
//! all pieces and register them at the same time would hold up launches of other sessions. The threads also find out which
//! pieces are zero and need no memory.

use crate::engine::base::account::Account;
use crate::engine::base::bounds::STACK;
use crate::engine::base::driver::Driver;
use crate::engine::base::rations::Holder;
use crate::engine::base::side;
use crate::engine::gpu::devices::Grant;
use crate::engine::gpu::host::{BegunBlock, HostBlock};
use crate::engine::gpu::moved::{self, Content, Failure, Piece, Store};
use crate::engine::lasting::memory::{forget_content, keep_piece};
use crate::engine::scheduling::parking::wants_attention;
use crate::engine::session::Session;
use crate::engine::session::suspension::Order;
use crate::engine::threads::shared::Shared;
use crossbeam_channel::{Receiver, Sender, unbounded};
use mpsshim_api::cuda::*;
use mpsshim_model::suspension::Unmoved;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::Scope;
use std::time::{Duration, Instant};

/// Most threads of a move.
const MOST_THREADS: usize = 8;
/// Number of threads of a move.
static THREADS: LazyLock<usize> = LazyLock::new(|| {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    MOST_THREADS.min(processors.div_ceil(2))
});
/// Most new pinned blocks: each thread writes one while the device is copied to another.
const MOST_BLOCKS: usize = MOST_THREADS + 1;
/// Bytes of a piece that a thread reads at a time.
const READ: usize = 8 << 20;
/// Bytes that the moving thread looks at itself to find out that a piece is not zero.
const GLANCE: usize = 4096;
/// Longest copy that is submitted at once, bytes.
const PART: u64 = 64 << 20;
/// How long a move waits for a quiescent point of another session before the session gives up its thread.
const HUSHED: Duration = Duration::from_millis(50);
/// Interval at which it looks whether the quiescent point is over.
const LOOK: Duration = Duration::from_micros(100);

/// How far a move has come.
pub enum Progress {
    /// All is where it was to be.
    Done,
    /// A quiescent point of another session comes first, or the order has been withdrawn.
    Later,
}

/// A piece: the number of its allocation in this move, and the number of the piece in the allocation.
type At = (usize, usize);

/// Work for a thread of a move.
enum Job {
    /// Allocate the pages of a block.
    Populate(BegunBlock),
    /// Find out whether this piece is zero.
    Look(At, HostBlock),
    /// Write this piece to another block, unless it is zero.
    Write(At, HostBlock, Box<BegunBlock>),
}

/// Outcome of a job.
enum Done {
    /// Whether all pages are there.
    Populated(BegunBlock, bool),
    /// Whether the piece is zero.
    Looked(At, HostBlock, bool),
    /// Whether the piece has been written; `None` if it is zero.
    Written(At, HostBlock, Box<BegunBlock>, Option<io::Result<()>>),
}

/// The threads of a move.
struct Crew<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    jobs: (Sender<Job>, Receiver<Job>),
    done: (Sender<Done>, Receiver<Done>),
    /// Whether the pages of further blocks are not needed.
    stop: &'scope (dyn Fn() -> bool + Sync),
    threads: usize,
    /// Blocks whose pages are being allocated.
    populating: usize,
    /// Pieces that are looked at or written.
    pieces: usize,
}

impl<'scope, 'env> Crew<'scope, 'env> {
    fn new(
        scope: &'scope Scope<'scope, 'env>,
        stop: &'scope (dyn Fn() -> bool + Sync),
    ) -> Crew<'scope, 'env> {
        Crew {
            scope,
            jobs: unbounded(),
            done: unbounded(),
            stop,
            threads: 0,
            populating: 0,
            pieces: 0,
        }
    }

    fn send(&mut self, job: Job) {
        match job {
            Job::Populate(_) => self.populating += 1,
            Job::Look(..) | Job::Write(..) => self.pieces += 1,
        }
        if self.threads < (*THREADS).min(self.populating + self.pieces) {
            let (jobs, done, stop) = (self.jobs.1.clone(), self.done.0.clone(), self.stop);
            let named = std::thread::Builder::new().name("move".into());
            let thread = named.stack_size(STACK).spawn_scoped(self.scope, move || {
                for job in jobs {
                    let _ = done.send(job.carry_out(stop));
                }
            });
            self.threads += usize::from(thread.is_ok());
        }
        match self.threads {
            // No thread could be started.
            0 => drop(self.done.0.send(job.carry_out(self.stop))),
            _ => drop(self.jobs.0.send(job)),
        }
    }

    fn is_busy(&self) -> bool {
        self.populating + self.pieces > 0
    }

    /// The next outcome; without `waits`, only if there is one. The crew must be busy.
    fn next(&mut self, waits: bool) -> Option<Done> {
        let done = match waits {
            true => self.done.1.recv().ok(),
            false => self.done.1.try_recv().ok(),
        };
        match &done {
            Some(Done::Populated(..)) => self.populating -= 1,
            Some(Done::Looked(..) | Done::Written(..)) => self.pieces -= 1,
            None => {}
        }
        done
    }
}

impl Job {
    fn carry_out(self, stop: &dyn Fn() -> bool) -> Done {
        match self {
            Job::Populate(mut block) => {
                let all = block.populate(stop);
                Done::Populated(block, all)
            }
            Job::Look(number, block) => {
                let is_zero = moved::is_zero(block.bytes());
                Done::Looked(number, block, is_zero)
            }
            Job::Write(number, block, mut to) => {
                let is_zero = moved::is_zero(block.bytes());
                let written = (!is_zero).then(|| to.write(block.bytes()));
                Done::Written(number, block, to, written)
            }
        }
    }
}

/// Moves device memory of a session to host memory, one allocation after the other. Pages of pinned memory for the next ones
/// are allocated meanwhile.
pub struct MovesOut<'a, 'scope, 'env> {
    shared: &'a Shared,
    crew: Crew<'scope, 'env>,
    /// The allocations that are being moved, by number.
    outs: BTreeMap<usize, Out>,
    /// Number of the next one.
    next: usize,
    /// Lengths of the pieces to come.
    ahead: VecDeque<u64>,
    /// Pinned memory for them.
    free: Vec<HostBlock>,
    /// Memory for them that is not pinned.
    unpinned: Vec<BegunBlock>,
    /// Number of new pinned blocks.
    made: usize,
    /// The pool has no further block.
    is_pool_empty: bool,
    /// Why there can be no further pinned memory.
    short: Option<Unmoved>,
    times: Times,
}

/// An allocation that is being moved to host memory.
struct Out {
    grant: Arc<Grant>,
    pieces: Vec<Option<Piece>>,
    file: Option<Store>,
}

impl Out {
    fn into_content(self) -> Content {
        Content {
            len: self.grant.len,
            pieces: self.pieces.into_iter().flatten().collect(),
            file: self.file,
        }
    }
}

/// Where the time of a move goes.
#[derive(Debug, Default)]
struct Times {
    /// New mappings.
    begin: Duration,
    /// Waiting for their pages.
    pages: Duration,
    /// Registering them.
    register: Duration,
    /// Copies.
    copies: Duration,
}

/// Calls a function and adds the time that it took.
fn timed<T>(total: &mut Duration, does: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let outcome = does();
    *total += began.elapsed();
    outcome
}

/// Calls a function that moves allocations of these lengths, in this order, to host memory. Where `most` bytes are enough,
/// no pinned memory is allocated for more.
pub fn moving_out<R>(
    session: &mut Session,
    shared: &Shared,
    (lens, most): (impl Iterator<Item = u64>, Option<u64>),
    does: impl FnOnce(&mut Session, &mut MovesOut<'_, '_, '_>) -> R,
) -> R {
    let (own, is_enough) = (session.shared.clone(), AtomicBool::new(false));
    let stop = || {
        is_enough.load(Ordering::Relaxed)
            || own.hung_up.load(Ordering::Relaxed)
            || shared.gpu.is_lost()
            || shared.fate.stopping.load(Ordering::Relaxed)
    };
    let mut left = most.unwrap_or(u64::MAX);
    let lens = lens.take_while(|len| {
        let is_needed = left > 0;
        left = left.saturating_sub(*len);
        is_needed
    });
    let ahead = lens.flat_map(|len| moved::ranges(len).map(|(_, len)| len));
    let ahead = ahead.collect();
    std::thread::scope(|scope| {
        let mut moves = MovesOut {
            shared,
            crew: Crew::new(scope, &stop),
            outs: BTreeMap::new(),
            next: 0,
            ahead,
            free: Vec::new(),
            unpinned: Vec::new(),
            made: 0,
            is_pool_empty: false,
            short: None,
            times: Times::default(),
        };
        let outcome = does(session, &mut moves);
        is_enough.store(true, Ordering::Relaxed);
        moves.end(session);
        outcome
    })
}

impl MovesOut<'_, '_, '_> {
    /// Copies the content of a grant. It is in host memory once [`MovesOut::take_finished`] returns it. The session must be
    /// allowed to submit.
    ///
    /// # Errors
    /// Why it stays; nothing has changed then.
    pub fn submit(
        &mut self,
        session: &mut Session,
        grant: &Arc<Grant>,
    ) -> Result<Progress, Unmoved> {
        let gpu = &self.shared.gpu;
        let device = &gpu.devices[grant.device];
        let failed = |status| failed(self.shared, status);
        device.make_current(&gpu.driver).map_err(failed)?;
        let stream = device.take_stream(&gpu.driver, 0).map_err(failed)?;
        let number = self.next;
        self.next += 1;
        let out = Out {
            grant: Arc::clone(grant),
            pieces: moved::ranges(grant.len).map(|_| None).collect(),
            file: None,
        };
        self.outs.insert(number, out);
        let outcome = self.run(session, number, (grant, stream));
        match &outcome {
            Ok(_) => device.keep_stream(&gpu.driver, 0, stream),
            Err(_) => drop(gpu.driver.context.stream_destroy(stream)),
        }
        if !matches!(outcome, Ok(Progress::Done)) {
            self.drop_out(number);
        }
        outcome
    }

    /// The grants whose content is in host memory now.
    pub fn take_finished(&mut self) -> Vec<(Arc<Grant>, Content)> {
        let outs = std::mem::take(&mut self.outs).into_iter();
        let is_finished = |(_, out): &(usize, Out)| out.pieces.iter().all(Option::is_some);
        let (finished, others): (Vec<_>, _) = outs.partition(is_finished);
        self.outs = others.into_iter().collect();
        let finished = finished.into_iter();
        let finished = finished.map(|(_, out)| (Arc::clone(&out.grant), out.into_content()));
        finished.collect()
    }

    /// Waits until another piece is in host memory. Returns `false` if there is none to come.
    ///
    /// # Errors
    /// Why a grant stays.
    pub fn wait(&mut self, session: &Session) -> Result<bool, Unmoved> {
        if self.crew.pieces == 0 {
            return Ok(false);
        }
        let crew = &mut self.crew;
        let done = timed(&mut self.times.pages, || crew.next(true));
        done.map_or(Ok(()), |done| self.note(session, done))?;
        Ok(true)
    }

    /// Leaves the grants where they are that are not in host memory yet.
    pub fn drop_outs(&mut self) {
        while let Some(number) = self.outs.keys().next().copied() {
            self.drop_out(number);
        }
    }

    fn drop_out(&mut self, number: usize) {
        let Some(out) = self.outs.remove(&number) else {
            return;
        };
        let gpu = &self.shared.gpu;
        let (start, content) = (out.grant.start, out.into_content());
        forget_content(&gpu.keeping, start, &content);
        self.free.extend(content.into_blocks(&gpu.arena));
    }

    fn run(
        &mut self,
        session: &mut Session,
        number: usize,
        (grant, stream): (&Grant, CUstream),
    ) -> Result<Progress, Unmoved> {
        let mut ranges = moved::ranges(grant.len).enumerate().peekable();
        while let Some((piece, range)) = ranges.peek().copied() {
            while self.crew.is_busy()
                && let Some(done) = self.crew.next(false)
            {
                self.note(session, done)?;
            }
            if !may_go_on(session, self.shared)? {
                return Ok(Progress::Later);
            }
            let at = (number, piece);
            if let Some(block) = self.take_block(session, range.1) {
                self.copy(session, at, (grant, stream, range), block)?;
            } else {
                self.begin_blocks(session, range.1);
                if self.crew.is_busy() {
                    // Nothing is submitted meanwhile.
                    session.say_whether_at_work(&self.shared.gpu);
                    let crew = &mut self.crew;
                    if let Some(done) = timed(&mut self.times.pages, || crew.next(true)) {
                        self.note(session, done)?;
                    }
                    continue;
                }
                self.store(at, (grant, stream, range))?;
            }
            self.ahead.pop_front();
            ranges.next();
        }
        Ok(Progress::Done)
    }

    /// Waits for the threads, and keeps the memory that was not needed for the next moves.
    fn end(mut self, session: &Session) {
        self.drop_outs();
        while self.crew.is_busy()
            && let Some(done) = self.crew.next(true)
        {
            // Without an allocation that is moved, nothing can fail but the populating that was stopped.
            let _ = self.note(session, done);
        }
        tracing::debug!(times = ?self.times, "device memory was copied to host memory");
        let (uid, pool) = (session.shared.info.uid, &self.shared.gpu.move_pool);
        let (free, unpinned) = (self.free.into_iter(), self.unpinned.into_iter());
        free.for_each(|block| pool.pinned.put(uid, block));
        unpinned.for_each(|block| pool.unpinned.put(uid, block));
    }

    fn note(&mut self, session: &Session, done: Done) -> Result<(), Unmoved> {
        let is_moved = |at: &At| self.outs.contains_key(&at.0);
        match done {
            Done::Populated(block, all) => return self.complete(block, all),
            // The grant stays where it is.
            Done::Looked(at, block, _) if !is_moved(&at) => self.free.push(block),
            Done::Written(at, block, unpinned, _) if !is_moved(&at) => {
                self.free.push(block);
                self.unpinned.push(*unpinned);
            }
            Done::Looked(at, block, true) => {
                self.free.push(block);
                return self.place(session, at, Piece::Zero);
            }
            Done::Looked(at, block, false) => {
                return self.place(session, at, Piece::Pinned(block));
            }
            Done::Written(at, block, unpinned, None) => {
                self.free.push(block);
                self.unpinned.push(*unpinned);
                return self.place(session, at, Piece::Zero);
            }
            Done::Written(at, block, unpinned, Some(Ok(()))) => {
                self.free.push(block);
                return self.place(session, at, Piece::Unpinned(*unpinned));
            }
            Done::Written(at, block, unpinned, Some(Err(error))) => {
                self.shared.gpu.arena.abandon(*unpinned);
                self.short = Some(no_host_memory(&error));
                return self.place(session, at, Piece::Pinned(block));
            }
        }
        Ok(())
    }

    /// Registers pinned memory.
    fn complete(&mut self, block: BegunBlock, all: bool) -> Result<(), Unmoved> {
        let gpu = &self.shared.gpu;
        if !all {
            gpu.arena.abandon(block);
            return Err(Unmoved::Ended);
        }
        let block = timed(&mut self.times.register, || {
            let device = gpu.any_device().ok_or(CUDA_ERROR_INVALID_VALUE)?;
            side::on_main(|| gpu.arena.complete(&gpu.driver, device, block))
        });
        match block {
            Ok(block) => self.free.push(block),
            Err(status) => self.short = Some(no_host_memory(&status)),
        }
        Ok(())
    }

    /// Pinned memory for a piece, if there is any at once.
    fn take_block(&mut self, session: &Session, len: u64) -> Option<HostBlock> {
        let fits = |block: &HostBlock| block.len() == len;
        if let Some(at) = self.free.iter().position(fits) {
            return Some(self.free.swap_remove(at));
        }
        let taken = match self.is_pool_empty {
            true => None,
            false => take_from_pool(session, self.shared, len),
        };
        // The last piece of an allocation may be shorter.
        self.is_pool_empty = taken.is_none() && self.shared.gpu.move_pool.is_empty();
        taken
    }

    /// Begins to allocate pinned memory for the next pieces, the first of which has `len` bytes.
    fn begin_blocks(&mut self, session: &Session, len: u64) {
        if self.ahead.front() != Some(&len) {
            self.ahead.push_front(len);
        }
        // One of this length is needed in any case.
        let least = usize::from(!self.crew.is_busy());
        let left = MOST_BLOCKS.saturating_sub(self.made).max(least);
        let next = self.ahead.iter().skip(self.crew.populating).take(left);
        let lens: Vec<u64> = next.copied().collect();
        for len in lens {
            if self.short.is_some() {
                return;
            }
            let begun = timed(&mut self.times.begin, || {
                begin_block(session, self.shared, len)
            });
            match begun {
                Ok(block) => {
                    self.made += 1;
                    self.crew.send(Job::Populate(block));
                }
                Err(why) => self.short = Some(why),
            }
        }
    }

    /// Copies a piece to pinned memory.
    fn copy(
        &mut self,
        session: &Session,
        at: At,
        (grant, stream, (offset, len)): (&Grant, CUstream, (u64, u64)),
        block: HostBlock,
    ) -> Result<(), Unmoved> {
        let driver = &self.shared.gpu.driver;
        let copied = timed(&mut self.times.copies, || {
            by_parts((driver, stream), len, |part, len| {
                let (to, from) = (block.start() + part, grant.start + offset + part);
                driver.memcpy_dtoh_async(to, from, len, stream)
            })
        });
        if let Err(status) = copied {
            self.free.push(block);
            return Err(failed(self.shared, status));
        }
        // New pinned blocks are used again if there are more pieces than blocks.
        let blocks = 1 + self.free.len() + self.crew.populating;
        if self.made > 0
            && self.ahead.len() > blocks
            && let Some(unpinned) = self.take_unpinned(session, len)
        {
            self.crew.send(Job::Write(at, block, Box::new(unpinned)));
            return Ok(());
        }
        let bytes = block.bytes();
        if moved::is_zero(&bytes[..GLANCE.min(bytes.len())]) {
            self.crew.send(Job::Look(at, block));
            return Ok(());
        }
        self.place(session, at, Piece::Pinned(block))
    }

    /// Host memory for a piece that is not pinned yet.
    fn take_unpinned(&mut self, session: &Session, len: u64) -> Option<BegunBlock> {
        let fits = |block: &BegunBlock| block.len() == len;
        if let Some(at) = self.unpinned.iter().position(fits) {
            return Some(self.unpinned.swap_remove(at));
        }
        let pool = &self.shared.gpu.move_pool;
        if let Some(kept) = pool.unpinned.take(payers(session), len) {
            return Some(kept);
        }
        if self.short.is_some() {
            return None;
        }
        let begun = timed(&mut self.times.begin, || {
            begin_block(session, self.shared, len)
        });
        match begun {
            Ok(block) => Some(block),
            Err(why) => {
                self.short = Some(why);
                None
            }
        }
    }

    /// A piece is in host memory.
    fn place(
        &mut self,
        session: &Session,
        (number, piece): At,
        place: Piece,
    ) -> Result<(), Unmoved> {
        let is_kept = keep_piece(session, &self.shared.images, &place);
        if let Some(out) = self.outs.get_mut(&number) {
            out.pieces[piece] = Some(place);
        }
        if is_kept {
            return Ok(());
        }
        self.drop_out(number);
        Err(no_keeper())
    }

    /// Writes a piece to a file, where the operator has chosen a directory.
    fn store(
        &mut self,
        (number, piece): At,
        (grant, stream, range): (&Grant, CUstream, (u64, u64)),
    ) -> Result<(), Unmoved> {
        let short = || self.short.clone().unwrap_or(Unmoved::Ended);
        let directory = self.shared.gpu.directory.as_deref().ok_or_else(short)?;
        let failed_to = |why: io::Error| {
            let place = directory.display();
            Unmoved::Failed(format!(
                "there is not enough host memory, and {place}: {why}"
            ))
        };
        let Some(out) = self.outs.get_mut(&number) else {
            return Ok(());
        };
        let file = match &mut out.file {
            Some(file) => file,
            none => none.insert(Store::new(directory, grant.len).map_err(failed_to)?),
        };
        let with = (&self.shared.gpu.driver, stream);
        let written = file.write(with, grant.start, range);
        written.map_err(|why| match why {
            Failure::Driver(status) => failed(self.shared, status),
            Failure::File(error) => failed_to(error),
        })?;
        out.pieces[piece] = Some(Piece::Stored);
        Ok(())
    }
}

fn failed(shared: &Shared, status: CUresult) -> Unmoved {
    shared.gpu.note_status(status);
    Unmoved::Failed(format!("its memory cannot be copied: {status}"))
}

/// The reason why memory stays that the next server could not find.
pub fn no_keeper() -> Unmoved {
    Unmoved::Failed("the keeper has no room for its memory".into())
}

/// Copies the content of a grant back to the device. The session must be allowed to submit.
///
/// # Errors
/// Driver errors, or errors of the file system.
pub fn move_in(
    session: &mut Session,
    shared: &Shared,
    grant: &Grant,
    content: &mut Content,
) -> Result<Progress, Failure> {
    let device = &shared.gpu.devices[grant.device];
    let driver = &shared.gpu.driver;
    device.make_current(driver)?;
    let stream = device.take_stream(driver, 0)?;
    let outcome = copy_back(session, shared, (grant, stream), content);
    match &outcome {
        Ok(_) => device.keep_stream(driver, 0, stream),
        Err(_) => drop(driver.context.stream_destroy(stream)),
    }
    outcome
}

fn copy_back(
    session: &mut Session,
    shared: &Shared,
    (grant, stream): (&Grant, CUstream),
    content: &mut Content,
) -> Result<Progress, Failure> {
    let mut read = BTreeMap::new();
    let mut outcome = Ok(Progress::Done);
    for (number, range) in moved::ranges(content.len).enumerate() {
        if let Err(why) = copy_piece(
            session,
            shared,
            (grant, stream),
            content,
            (number, range),
            &mut read,
        ) {
            outcome = Err(why);
            break;
        }
        if !is_quiet_for(session, shared) {
            outcome = Ok(Progress::Later);
            break;
        }
    }
    let uid = session.shared.info.uid;
    read.into_values()
        .for_each(|block| shared.gpu.move_pool.pinned.put(uid, block));
    outcome
}

/// Copies a piece back to the device. `read`: pinned memory into which pieces that are not pinned have been read.
fn copy_piece(
    session: &Session,
    shared: &Shared,
    (grant, stream): (&Grant, CUstream),
    content: &mut Content,
    (number, (at, len)): (usize, (u64, u64)),
    read: &mut BTreeMap<usize, HostBlock>,
) -> Result<(), Failure> {
    let gpu = &shared.gpu;
    let driver = &gpu.driver;
    let copy = |from: u64| {
        by_parts((driver, stream), len, |part, len| {
            let to = grant.start + at + part;
            driver.memcpy_htod_async(to, from + part, len, stream)
        })
    };
    let is_unpinned = matches!(content.pieces.get(number), Some(Piece::Unpinned(_)));
    if is_unpinned && !read.contains_key(&number) {
        read_pieces(session, shared, content, number, read);
    }
    if let Some(block) = read.remove(&number) {
        let copied = copy(block.start());
        gpu.move_pool.pinned.put(session.shared.info.uid, block);
        return Ok(copied?);
    }
    if is_unpinned {
        // If it cannot be pinned, the driver copies it by memory of its own.
        let device = &gpu.devices[grant.device];
        let _ = side::on_main(|| content.pin(number, (driver, device), &gpu.arena));
    }
    match content.pieces.get(number).unwrap_or(&Piece::Zero) {
        Piece::Zero => {
            driver.memset_d8_async(grant.start + at, 0, len as usize, stream)?;
            driver.stream_synchronize(stream)?;
        }
        Piece::Pinned(block) => copy(block.start())?,
        Piece::Unpinned(block) => copy(block.start())?,
        Piece::Stored => {
            let missing = || Failure::Driver(CUDA_ERROR_INVALID_VALUE);
            let file = content.file.as_ref().ok_or_else(missing)?;
            file.read((driver, stream), grant.start, (at, len))?;
        }
    }
    Ok(())
}

/// Reads pieces that are not pinned, from this one on, into pinned memory of the pool, by several threads. Reads none if the
/// pool has no memory for them or a file cannot be read.
fn read_pieces(
    session: &Session,
    shared: &Shared,
    content: &Content,
    from: usize,
    read: &mut BTreeMap<usize, HostBlock>,
) {
    let unpinned = content.pieces.iter().enumerate().skip(from);
    let unpinned = unpinned.filter_map(|(number, piece)| match piece {
        Piece::Unpinned(block) => Some((number, block)),
        _ => None,
    });
    let with_memory = unpinned.map_while(|(number, block)| {
        let memory = take_from_pool(session, shared, block.len())?;
        Some((number, block.file(), memory))
    });
    let mut pieces: Vec<_> = with_memory.take(MOST_BLOCKS).collect();
    if pieces.is_empty() {
        return;
    }
    let parts = pieces.iter_mut().flat_map(|(_, file, block)| {
        let parts = block.bytes_mut().chunks_mut(READ).enumerate();
        parts.map(|(part, bytes)| (*file, part * READ, bytes))
    });
    let (parts, has_failed) = (Mutex::new(parts), AtomicBool::new(false));
    let next = || parts.lock().next();
    let reads = || {
        while let Some((file, at, mut bytes)) = next() {
            let mut at = at as i64;
            while !bytes.is_empty() {
                match nix::sys::uio::pread(file, bytes, at) {
                    Ok(len) if len > 0 => {
                        bytes = &mut bytes[len..];
                        at += len as i64;
                    }
                    _ => return has_failed.store(true, Ordering::Relaxed),
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..*THREADS {
            let named = std::thread::Builder::new().name("move".into());
            let _ = named.stack_size(STACK).spawn_scoped(scope, reads);
        }
        reads();
    });
    let uid = session.shared.info.uid;
    for (number, _, block) in pieces {
        match has_failed.load(Ordering::Relaxed) {
            true => shared.gpu.move_pool.pinned.put(uid, block),
            false => drop(read.insert(number, block)),
        }
    }
}

/// Submits the parts of a copy of `len` bytes, by offset and length, each when the one before is done, so that copies of other
/// sessions come in between.
fn by_parts(
    (driver, stream): (&Driver, CUstream),
    len: u64,
    submit: impl Fn(u64, usize) -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    for at in (0..len).step_by(PART as usize) {
        submit(at, PART.min(len - at) as usize)?;
        driver.stream_synchronize(stream)?;
    }
    Ok(())
}

/// Whether the next piece may be copied to host memory.
fn may_go_on(session: &mut Session, shared: &Shared) -> Result<bool, Unmoved> {
    match session.shared.suspension.order() {
        Some(Order::Out) if wants_attention(session) => return Err(Unmoved::Resumed),
        Some(Order::Out | Order::MakeRoom(..)) => {}
        // The order has been withdrawn.
        Some(Order::In) | None => return Ok(false),
    }
    Ok(is_quiet_for(session, shared))
}

/// Whether the session may submit, after a short wait for another session's quiescent point.
fn is_quiet_for(session: &mut Session, shared: &Shared) -> bool {
    let until = Instant::now() + HUSHED;
    while !session.may_work(&shared.gpu) {
        if Instant::now() >= until || shared.gpu.is_lost() {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

fn no_host_memory(why: &dyn std::fmt::Display) -> Unmoved {
    Unmoved::Failed(format!("there is not enough host memory for it: {why}"))
}

/// The parties that pay for host memory of a session.
fn payers(session: &Session) -> (&Account, &Holder, u32) {
    let own = &session.shared;
    (&session.account, &own.held_files, own.info.uid)
}

fn take_from_pool(session: &Session, shared: &Shared, len: u64) -> Option<HostBlock> {
    shared.gpu.move_pool.pinned.take(payers(session), len)
}

/// Begins to allocate pinned memory.
fn begin_block(session: &Session, shared: &Shared, len: u64) -> Result<BegunBlock, Unmoved> {
    let (gpu, own) = (&shared.gpu, &session.shared);
    let pin = gpu.pinned.take(own.info.uid, len);
    let pin = pin.map_err(|beyond| {
        // Of other lengths.
        shared.release_move_pool(own.info.uid, 0);
        Unmoved::Failed(beyond.to_string())
    })?;
    let begun = gpu.begin_block((&session.account, &own.held_files), pin, len);
    begun.map_err(|status| no_host_memory(&status))
}
