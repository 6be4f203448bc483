//! Copies the content of device memory to host memory and back, piece by piece.
//!
//! Threads that exist only for the move allocate the pages of new pinned memory, which takes longer than the copies, and look
//! whether a piece is zero. Pinned memory of a piece that is zero is used for the next one.

use crate::engine::base::account::Memory;
use crate::engine::base::bounds::STACK;
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
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Scope;
use std::time::{Duration, Instant};

/// Most threads of a move.
const MOST_THREADS: usize = 8;
/// Most new pinned blocks whose pages are allocated at the same time.
const MOST_BLOCKS: usize = 2 * MOST_THREADS;
/// Bytes that the moving thread looks at itself to find out that a piece is not zero.
const GLANCE: usize = 4096;
/// Longest copy that is submitted at once, bytes.
const PART: u64 = 64 << 20;
/// How long a move waits for a quiescent point of another session before the session gives up its thread.
const HUSHED: Duration = Duration::from_millis(50);
/// Interval at which it looks whether the quiescent point is over.
const LOOK: Duration = Duration::from_micros(100);

/// Whether a move was carried out.
pub enum Moved<T> {
    /// It was.
    All(T),
    /// A quiescent point of another session comes first, or the order has been withdrawn.
    Later,
}

/// Work for a thread of a move.
enum Job {
    /// Allocate the pages of a block.
    Populate(BegunBlock),
    /// Find out whether the piece with this number is zero.
    Look(usize, HostBlock),
}

/// What became of it.
enum Done {
    /// Whether all pages are there.
    Populated(BegunBlock, bool),
    /// Whether the piece is zero.
    Looked(usize, HostBlock, bool),
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
    /// Pieces that are looked at.
    looking: usize,
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
            looking: 0,
        }
    }

    fn send(&mut self, job: Job) {
        match job {
            Job::Populate(_) => self.populating += 1,
            Job::Look(..) => self.looking += 1,
        }
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let most = MOST_THREADS.min(processors.div_ceil(2));
        if self.threads < most.min(self.populating + self.looking) {
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
        self.populating + self.looking > 0
    }

    /// The next outcome; without `waits`, only if there is one. The crew must be busy.
    fn next(&mut self, waits: bool) -> Option<Done> {
        let done = match waits {
            true => self.done.1.recv().ok(),
            false => self.done.1.try_recv().ok(),
        };
        match &done {
            Some(Done::Populated(..)) => self.populating -= 1,
            Some(Done::Looked(..)) => self.looking -= 1,
            None => {}
        }
        done
    }
}

impl Job {
    fn carry_out(self, stop: &dyn Fn() -> bool) -> Done {
        match self {
            Job::Populate(mut block) => {
                let mut all = false;
                while !all && !stop() {
                    all = block.populate(stop);
                }
                Done::Populated(block, all)
            }
            Job::Look(number, block) => {
                let is_zero = moved::is_zero(block.bytes());
                Done::Looked(number, block, is_zero)
            }
        }
    }
}

/// Moves device memory of a session to host memory, one allocation after the other. Pages of pinned memory for the next ones
/// are allocated meanwhile.
pub struct MovesOut<'a, 'scope, 'env> {
    shared: &'a Shared,
    crew: Crew<'scope, 'env>,
    /// Lengths of the pieces to come.
    ahead: VecDeque<u64>,
    /// Pinned memory for them.
    free: Vec<HostBlock>,
    /// Memory for them that is not registered yet. Beside threads that allocate pages, registration takes five times as long,
    /// and launches of others wait for it: up to 0.4 s were seen. So all blocks of a batch are registered when their pages are
    /// there, and the pages of the next batch are allocated during the copies.
    populated: Vec<BegunBlock>,
    /// The pool has no further block.
    is_pool_empty: bool,
    /// Why there can be no further pinned memory.
    short: Option<Unmoved>,
    times: Times,
}

/// An allocation that is moved to host memory.
struct Out<'a> {
    grant: &'a Grant,
    stream: CUstream,
    pieces: Vec<Option<Piece>>,
    file: Option<Store>,
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
            ahead,
            free: Vec::new(),
            populated: Vec::new(),
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
    /// Copies the content of a grant to host memory. The session must be allowed to submit.
    ///
    /// # Errors
    /// Why it stays; nothing has changed then.
    pub fn move_out(
        &mut self,
        session: &mut Session,
        grant: &Grant,
    ) -> Result<Moved<Content>, Unmoved> {
        let gpu = &self.shared.gpu;
        let device = &gpu.devices[grant.device];
        let failed = |status| failed(self.shared, status);
        device.make_current(&gpu.driver).map_err(failed)?;
        let stream = device.take_stream(&gpu.driver, 0).map_err(failed)?;
        let mut out = Out {
            grant,
            stream,
            pieces: moved::ranges(grant.len).map(|_| None).collect(),
            file: None,
        };
        let outcome = self.run(session, &mut out);
        while self.crew.looking > 0
            && let Some(done) = self.crew.next(true)
        {
            // Only after a failure.
            let _ = self.note(session, &mut out, done);
        }
        match &outcome {
            Ok(_) => device.keep_stream(&gpu.driver, 0, stream),
            Err(_) => drop(gpu.driver.context.stream_destroy(stream)),
        }
        let content = Content {
            len: grant.len,
            pieces: out.pieces.into_iter().flatten().collect(),
            file: out.file,
        };
        match outcome {
            Ok(Moved::All(())) => Ok(Moved::All(content)),
            other => {
                forget_content(&gpu.keeping, grant.start, &content);
                self.free.extend(content.into_blocks());
                other.map(|_| Moved::Later)
            }
        }
    }

    fn run(&mut self, session: &mut Session, out: &mut Out<'_>) -> Result<Moved<()>, Unmoved> {
        let mut ranges = moved::ranges(out.grant.len).enumerate().peekable();
        while let Some((number, range)) = ranges.peek().copied() {
            while self.crew.is_busy()
                && let Some(done) = self.crew.next(false)
            {
                self.note(session, out, done)?;
            }
            if !may_go_on(session, self.shared)? {
                return Ok(Moved::Later);
            }
            if let Some(block) = self.take_block(session, range.1) {
                self.copy(session, out, (number, range), block)?;
            } else {
                self.prepare_blocks(session, range.1);
                if self.free.iter().any(|block| block.len() == range.1) {
                    continue;
                }
                if self.crew.is_busy() {
                    // Nothing is submitted meanwhile.
                    session.say_whether_at_work(&self.shared.gpu);
                    let crew = &mut self.crew;
                    if let Some(done) = timed(&mut self.times.pages, || crew.next(true)) {
                        self.note(session, out, done)?;
                    }
                    continue;
                }
                self.store(out, (number, range))?;
            }
            self.ahead.pop_front();
            ranges.next();
        }
        while self.crew.looking > 0
            && let Some(done) = self.crew.next(true)
        {
            self.note(session, out, done)?;
        }
        Ok(Moved::All(()))
    }

    /// Waits for the threads, and keeps the pinned memory that was not needed for the next moves.
    fn end(mut self, session: &Session) {
        while self.crew.is_busy()
            && let Some(done) = self.crew.next(true)
        {
            match done {
                Done::Populated(block, all) => drop(self.note_populated(block, all)),
                Done::Looked(_, block, _) => self.free.push(block),
            }
        }
        self.register();
        tracing::debug!(times = ?self.times, "device memory was copied to host memory");
        let uid = session.shared.info.uid;
        let blocks = self.free.drain(..);
        blocks.for_each(|block| self.shared.gpu.move_pool.put(uid, block));
    }

    fn note(
        &mut self,
        session: &mut Session,
        out: &mut Out<'_>,
        done: Done,
    ) -> Result<(), Unmoved> {
        match done {
            Done::Populated(block, all) => self.note_populated(block, all),
            Done::Looked(number, block, true) => {
                out.pieces[number] = Some(Piece::Zero);
                self.free.push(block);
                Ok(())
            }
            Done::Looked(number, block, false) => self.keep(session, out, (number, block)),
        }
    }

    fn note_populated(&mut self, block: BegunBlock, all: bool) -> Result<(), Unmoved> {
        if !all {
            self.shared.gpu.arena.abandon(block);
            return Err(Unmoved::Ended);
        }
        self.populated.push(block);
        Ok(())
    }

    /// Registers the memory whose pages are there.
    fn register(&mut self) {
        let gpu = &self.shared.gpu;
        for block in std::mem::take(&mut self.populated) {
            let block = timed(&mut self.times.register, || {
                let device = gpu.any_device().ok_or(CUDA_ERROR_INVALID_VALUE)?;
                side::on_main(|| gpu.arena.complete(&gpu.driver, device, block))
            });
            match block {
                Ok(block) => self.free.push(block),
                Err(status) => self.short = Some(no_host_memory(&status)),
            }
        }
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

    /// Registers a batch of pinned memory whose pages are there, and begins to allocate the next one. The next piece has `len`
    /// bytes.
    fn prepare_blocks(&mut self, session: &Session, len: u64) {
        if self.crew.populating > 0 {
            return;
        }
        if self.ahead.front() != Some(&len) {
            self.ahead.push_front(len);
        }
        self.register();
        let has = match self.free.iter().any(|block| block.len() == len) {
            true => self.free.len(),
            false => 0,
        };
        let next = self.ahead.iter().skip(has).take(MOST_BLOCKS);
        let lens: Vec<u64> = next.copied().collect();
        for len in lens {
            if self.short.is_some() {
                return;
            }
            let begun = timed(&mut self.times.begin, || {
                begin_block(session, self.shared, len)
            });
            match begun {
                Ok(block) => self.crew.send(Job::Populate(block)),
                Err(why) => self.short = Some(why),
            }
        }
    }

    /// Copies a piece to pinned memory.
    fn copy(
        &mut self,
        session: &mut Session,
        out: &mut Out<'_>,
        (number, (at, len)): (usize, (u64, u64)),
        block: HostBlock,
    ) -> Result<(), Unmoved> {
        let driver = &self.shared.gpu.driver;
        let copied = timed(&mut self.times.copies, || {
            for (part, len) in parts(len) {
                let (to, from) = (block.start() + part, out.grant.start + at + part);
                driver.memcpy_dtoh_async(to, from, len as usize, out.stream)?;
                driver.stream_synchronize(out.stream)?;
            }
            Ok(())
        });
        if let Err(status) = copied {
            self.free.push(block);
            return Err(failed(self.shared, status));
        }
        let bytes = block.bytes();
        if moved::is_zero(&bytes[..GLANCE.min(bytes.len())]) {
            self.crew.send(Job::Look(number, block));
            return Ok(());
        }
        self.keep(session, out, (number, block))
    }

    /// A piece is in pinned memory.
    fn keep(
        &mut self,
        session: &Session,
        out: &mut Out<'_>,
        (number, block): (usize, HostBlock),
    ) -> Result<(), Unmoved> {
        if !keep_piece(session, &self.shared.images, &block) {
            self.free.push(block);
            return Err(no_keeper());
        }
        out.pieces[number] = Some(Piece::Pinned(block));
        Ok(())
    }

    /// Writes a piece to a file, where the operator has chosen a directory.
    fn store(
        &mut self,
        out: &mut Out<'_>,
        (number, range): (usize, (u64, u64)),
    ) -> Result<(), Unmoved> {
        let short = || self.short.clone().unwrap_or(Unmoved::Ended);
        let directory = self.shared.gpu.directory.as_deref().ok_or_else(short)?;
        let failed_to = |why: std::io::Error| {
            let place = directory.display();
            Unmoved::Failed(format!(
                "there is not enough host memory, and {place}: {why}"
            ))
        };
        let file = match out.file.take() {
            Some(file) => file,
            None => Store::new(directory, out.grant.len).map_err(failed_to)?,
        };
        let with = (&self.shared.gpu.driver, out.stream);
        let written = file.write(with, out.grant.start, range);
        out.file = Some(file);
        written.map_err(|why| match why {
            Failure::Driver(status) => failed(self.shared, status),
            Failure::File(error) => failed_to(error),
        })?;
        out.pieces[number] = Some(Piece::Stored);
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
    content: &Content,
) -> Result<Moved<()>, Failure> {
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
    content: &Content,
) -> Result<Moved<()>, Failure> {
    let driver = &shared.gpu.driver;
    for ((at, len), piece) in content.pieces() {
        let to = grant.start + at;
        match piece {
            Piece::Zero => driver.memset_d8_async(to, 0, len as usize, stream)?,
            Piece::Pinned(block) => {
                for (part, len) in parts(len) {
                    let (to, from) = (to + part, block.start() + part);
                    driver.memcpy_htod_async(to, from, len as usize, stream)?;
                    driver.stream_synchronize(stream)?;
                }
            }
            Piece::Stored => {
                let missing = || Failure::Driver(CUDA_ERROR_INVALID_VALUE);
                let file = content.file.as_ref().ok_or_else(missing)?;
                file.read((driver, stream), grant.start, (at, len))?;
            }
        }
        driver.stream_synchronize(stream)?;
        if !is_quiet_for(session, shared) {
            return Ok(Moved::Later);
        }
    }
    Ok(Moved::All(()))
}

/// Offsets and lengths of copies that are submitted one after the other, so that those of other sessions come in between.
fn parts(len: u64) -> impl Iterator<Item = (u64, u64)> {
    let starts = (0..len).step_by(PART as usize);
    starts.map(move |at| (at, PART.min(len - at)))
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

fn take_from_pool(session: &Session, shared: &Shared, len: u64) -> Option<HostBlock> {
    let own = &session.shared;
    let mut block = shared.gpu.move_pool.take(own.info.uid, len)?;
    match session.account.take(Memory::Host, len) {
        Ok(charge) => block.host = Some(charge),
        Err(_) => {
            shared.gpu.move_pool.put(own.info.uid, block);
            return None;
        }
    }
    block.place.pass_to(&own.held_files);
    Some(block)
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
