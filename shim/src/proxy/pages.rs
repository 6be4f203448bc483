//! Managed memory that lives on the device while the device uses it.
//!
//! A region is device memory at addresses where this process maps pages of its own. Which of the two is valid is known
//! piece by piece ([`region::Home`]). Before work that may touch managed memory is given to the device, the host's changes
//! are copied there and all pages are protected. The first access of the host to a piece then faults, and the handler
//! fetches it ([`fault`]). Copies go through the express ring, so that they wait for nothing.
//!
//! While the device works, the host reads a copy of that moment ([`region::Home::Copy`]), which is dropped when the host
//! sees that work has ended, and after a while in any case. When the host writes meanwhile, its pages are compared with
//! their content before, and only bytes that differ go to the device.
//!
//! The state is one, under one lock. A thread that holds it has all signals blocked, touches no managed memory and takes no
//! lock under which other code of this library touches memory of the program. It may have interrupted any code of its
//! thread, since a signal handler may touch managed memory: it allocates from [`crate::fault_heap`], waits for no lock that
//! this code may hold, and asks the server for memory only if it can ([`Session::may_request`]).

mod along;
mod apart;
mod counts;
mod guard;
mod habits;
pub mod prefetch;
mod region;
pub mod remote;
mod stack;
mod timer;

use std::borrow::Cow;
use std::ffi::c_void;
use std::ops;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once};
use std::time::{Duration, Instant};

use along::{Fetched, Sent};
pub use along::{before_wait, behind_work};
use habits::Habits;
use mpsshim_api::cuda::{CU_STREAM_NON_BLOCKING, CUDA_ERROR_OUT_OF_MEMORY};
use mpsshim_proto::arena;
use mpsshim_proto::message::memory::FileRegister;
use mpsshim_proto::message::{Copy, Mark, Op, Range, Side};
use mpsshim_proto::shm;
use region::{Home, PIECE, Region, differences};
use std::collections::BTreeMap;

use crate::fault_heap::{self, Inside};
use crate::ffi::Status;
use crate::proxy::context::Context;
use crate::proxy::memory;
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::{Session, session};
use crate::proxy::wait::{self, Policy};
use crate::proxy::waited;
use crate::store_hold;
use crate::thread::locked;

/// There is or was a region.
pub static ANY: AtomicBool = AtomicBool::new(false);
/// The process that made the first one: not a child.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Regions of which something is not on the device.
static ATTENDED: AtomicUsize = AtomicUsize::new(0);
/// Pieces that are provisional.
static PROVISIONAL: AtomicU32 = AtomicU32::new(0);
/// Devices that the program uses.
static DEVICES: AtomicUsize = AtomicUsize::new(0);
/// Calls that are about to give work to the device.
static LAUNCHING: AtomicUsize = AtomicUsize::new(0);
/// How many of them wait for a lock.
static WAITING: AtomicUsize = AtomicUsize::new(0);
/// Held while regions become host memory: launches that begin meanwhile wait for it. The lock of the state does not do, since
/// host functions need that one, and work in flight may wait for them.
static SHARING: Mutex<()> = Mutex::new(());
/// A graph has a kernel for which managed memory has to be host memory.
static GRAPHS_SHARE: AtomicBool = AtomicBool::new(false);
/// How many calls gave work to the device.
static LAUNCHES: AtomicU64 = AtomicU64::new(0);

static STATE: Mutex<State> = Mutex::new(State::new());

#[derive(Debug)]
struct State {
    regions: BTreeMap<u64, Region>,
    /// The stream of the copies, which the program does not know.
    stream: Option<StreamRef>,
    /// Value of the last mark in its completion flag.
    value: u32,
    /// Address in the host arena of [`apart::BUFFER`] bytes.
    buffer: Option<u64>,
    /// Copies that a stream of the program may not have done yet.
    sent: Option<Sent>,
    habits: Habits,
    /// Address in the host arena of the memory for pieces that are fetched along.
    place: Option<u64>,
    fetched: Option<Fetched>,
    /// Pieces of prefetches to the host that were not done yet.
    wanted: Vec<prefetch::Pieces>,
}

/// A copy of managed memory: address on the device and in the host arena, and bytes.
type Part = (u64, u64, u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    ToDevice,
    ToHost,
}

impl Direction {
    /// The copy of a part, in no stream yet.
    fn copy(self, (device, host, len): Part) -> Copy {
        let (to, from, sides) = match self {
            Direction::ToDevice => (device, host, (Side::Device, Side::Host)),
            Direction::ToHost => (host, device, (Side::Host, Side::Device)),
        };
        Copy {
            to,
            from,
            len,
            stream: 0,
            sides: sides.0 as u32 | (sides.1 as u32) << 8,
            pad: 0,
        }
    }
}

/// The state, with signals blocked, and with memory that a handler may allocate and free.
struct Locked {
    state: MutexGuard<'static, State>,
    _inside: Inside,
}

fn lock() -> Locked {
    let inside = Inside::new();
    Locked {
        state: locked(&STATE),
        _inside: inside,
    }
}

/// Work is being given to the device, until this is dropped.
#[derive(Debug)]
pub struct Work(());

impl Drop for Work {
    fn drop(&mut self) {
        LAUNCHING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether an address is in a region.
#[inline]
pub fn is_in(address: u64) -> bool {
    arena::is_managed(address)
}

/// Whether there is or was a region.
#[inline]
pub fn any() -> bool {
    ANY.load(Ordering::Relaxed)
}

/// To be called before work that may touch managed memory is given to the device; the result is to be dropped when it is
/// counted in its stream. The device then has all that the host has written.
///
/// # Errors
/// Those of a session that has ended.
#[inline]
pub fn before_work(session: &Session) -> Status<Option<Work>> {
    before_work_in(session, None)
}

/// As [`before_work`], for work that is given to this stream next.
///
/// # Errors
/// As [`before_work`].
#[inline]
pub fn before_work_in(session: &Session, stream: Option<StreamRef>) -> Status<Option<Work>> {
    if !any() {
        return Ok(None);
    }
    LAUNCHING.fetch_add(1, Ordering::SeqCst);
    let work = Work(());
    LAUNCHES.fetch_add(1, Ordering::SeqCst);
    // Partner: `attend`. Either this thread sees that a region is attended, or the other one sees the beginning of work.
    if ATTENDED.load(Ordering::SeqCst) != 0 {
        give_all(session, stream)?;
    }
    Ok(Some(work))
}

#[cold]
fn give_all(session: &Session, stream: Option<StreamRef>) -> Status {
    store_hold::install();
    along::furnish(session);
    WAITING.fetch_add(1, Ordering::SeqCst);
    drop(locked(&SHARING));
    let mut locked = lock();
    WAITING.fetch_sub(1, Ordering::SeqCst);
    locked.state.pass_sent(session, stream)?;
    locked.state.give_all(session, stream)
}

/// To be called before a kernel is launched, or becomes part of a graph, whose code may exchange values with the host while
/// it runs (`system scope`): all managed memory becomes host memory, at the same addresses, for good.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY` if the host has no memory for it; those of the session.
#[cold]
pub fn share(session: &Session, in_graph: bool) -> Status {
    if in_graph {
        GRAPHS_SHARE.store(true, Ordering::Relaxed);
    }
    if !any() || !lock().state.regions.values().any(|region| !region.shared) {
        return Ok(());
    }
    let _sharing = locked(&SHARING);
    // Launches that begin from now on see that there is something to do, and wait.
    ATTENDED.fetch_add(1, Ordering::SeqCst);
    let shared = share_all(session);
    ATTENDED.fetch_sub(1, Ordering::SeqCst);
    let chunks = shared?;
    for chunk in chunks {
        give_back(session, chunk);
    }
    Ok(())
}

/// Frees the host's pages of a chunk: address and bytes.
fn give_back(session: &Session, (host, len): (u64, u64)) {
    if apart::is_apart(host) {
        return apart::free(host, len);
    }
    if let Err(status) = memory::host_give_back(session, host) {
        tracing::debug!(%status, "pages of managed memory were not freed");
    }
}

/// The program uses a further device. Kernels of several devices may touch managed memory, which then is host memory.
///
/// # Errors
/// As [`share`].
pub fn use_device(session: &Session) -> Status {
    match DEVICES.fetch_add(1, Ordering::Relaxed) {
        0 => Ok(()),
        _ => share(session, false),
    }
}

/// Whether managed memory may have its home on a device.
pub fn may_be_on_device() -> bool {
    DEVICES.load(Ordering::Relaxed) <= 1
}

/// As [`share`], before a graph is launched.
///
/// # Errors
/// As [`share`].
#[inline]
pub fn share_for_graph(session: &Session) -> Status {
    match GRAPHS_SHARE.load(Ordering::Relaxed) {
        true => share(session, true),
        false => Ok(()),
    }
}

/// Returns the pages that are not used any more.
fn share_all(session: &Session) -> Status<Vec<(u64, u64)>> {
    /// How long calls may take that have begun to give work to the device. They may wait for a thread that waits for the
    /// lock.
    const MOMENT: Duration = Duration::from_millis(1);
    loop {
        stream::quiesce(session, None)?;
        let mut locked = lock();
        let began = Instant::now();
        let launching = || LAUNCHING.load(Ordering::SeqCst) > WAITING.load(Ordering::SeqCst);
        while launching() && began.elapsed() < MOMENT {
            std::hint::spin_loop();
        }
        if launching() || stream::any_busy(session) {
            drop(locked);
            std::thread::yield_now();
            continue;
        }
        return locked.state.share(session);
    }
}

/// To be called whenever the host may learn that work of the device has ended: provisional pieces are dropped.
#[inline]
pub fn observe(session: &Session) {
    if PROVISIONAL.load(Ordering::SeqCst) != 0 {
        drop_provisional(session);
    }
    along::observe(session);
    prefetch::observe(session);
}

#[cold]
fn drop_provisional(session: &Session) {
    if let Err(status) = lock().state.drop_provisional(session) {
        tracing::debug!(%status, "managed memory was not given to the device");
    }
}

/// Adds a grant of managed memory. The server has mapped device memory there.
pub fn add(start: u64, len: u64) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        stack::prepare();
        timer::start();
        guard::start(admit);
        remote::start(touch);
        waited::add(|session, _| observe(session));
        PROCESS.store(std::process::id(), Ordering::Relaxed);
        ANY.store(true, Ordering::SeqCst);
    });
    store_hold::install();
    let mut locked = lock();
    let state = &mut *locked.state;
    let mut region = Region::new(start, len, LAUNCHES.load(Ordering::SeqCst));
    // All of it is nowhere: the next launch has to see it.
    attend(&mut region);
    furnish_early(&mut region);
    state.regions.insert(start, region);
}

/// Allocates the host's pages of a small region before they are used, if that lets system calls find them.
fn furnish_early(region: &mut Region) {
    const MOST: u64 = 64 << 20;
    if !guard::covers_the_kernel() || region.len > MOST {
        return;
    }
    let Ok(session) = session() else {
        return;
    };
    for chunk in 0..region.chunks.len() {
        if let Err(status) = State::furnish(region, session, chunk) {
            tracing::debug!(%status, "no host memory yet for managed memory");
            return;
        }
    }
}

/// Makes the stream of the copies, if there is none. A request must follow, so that the server knows it.
///
/// # Errors
/// Those of `cuStreamCreate`.
pub fn prepare(session: &Session, context: &'static Context) -> Status {
    // Not without `lock`: a signal that came while this thread waits could find it the owner.
    if lock().state.stream.is_some() {
        return Ok(());
    }
    let buffer = memory::host_alloc_of_pages(session, context.server_device, apart::BUFFER)?;
    let made = stream::create(session, context.home(), CU_STREAM_NON_BLOCKING, 0, false)?;
    let mut locked = lock();
    if locked.state.stream.is_none() {
        locked.state.stream = Some(made);
        locked.state.buffer = Some(buffer);
        locked.state.value = session.flag(made.slot()).load(Ordering::Acquire);
    }
    Ok(())
}

/// Removes a region, which no work uses. Its addresses are free again. Returns whether it is host memory.
pub fn remove(session: &Session, start: u64) -> bool {
    let region = {
        let mut locked = lock();
        let Some(region) = locked.state.regions.remove(&start) else {
            return false;
        };
        // Its pages will have another use. A session that has ended copies nothing.
        let _ = locked.state.pass_sent(session, None);
        locked.state.forget_habits(start);
        PROVISIONAL.fetch_sub(region.provisional() as u32, Ordering::SeqCst);
        if region.attended {
            ATTENDED.fetch_sub(1, Ordering::SeqCst);
        }
        clear(region.start, region.len);
        guard::wake((region.start, region.len));
        region
    };
    for chunk in region.furnished() {
        give_back(session, chunk);
    }
    region.shared
}

/// A block gets all addresses of a region, whose block was freed: its content is new.
pub fn renew(start: u64) {
    let mut locked = lock();
    locked.state.forget_habits(start);
    let region = locked.state.regions.get_mut(&start);
    let Some(region) = region.filter(|region| !region.shared) else {
        return;
    };
    PROVISIONAL.fetch_sub(region.provisional() as u32, Ordering::SeqCst);
    attend(region);
    guard::deny((region.start, region.len));
    region.twins.clear();
    region.set(0..region.pieces(), Home::Nowhere);
    region.born = LAUNCHES.load(Ordering::SeqCst);
}

/// All of a region is on the device: the server stores there.
pub fn settle(start: u64) {
    let mut locked = lock();
    let region = locked.state.regions.get_mut(&start);
    if let Some(region) = region.filter(|region| !region.shared) {
        region.set(0..region.pieces(), Home::Device);
        if region.attended {
            region.attended = false;
            ATTENDED.fetch_sub(1, Ordering::SeqCst);
        }
    }
    locked.state.forget_habits(start);
}

/// A thread of this process has faulted at an address. Returns whether the access is to be repeated. Async-signal-safe in a
/// handler of a fault at an address of a region.
pub fn fault(address: u64, write: bool) -> bool {
    if !is_in(address) || !any() {
        return false;
    }
    // SAFETY: no arguments.
    if PROCESS.load(Ordering::Relaxed) != unsafe { libc::getpid() } as u32 {
        return false;
    }
    // The program's stack for signals may be small.
    stack::call(address, write, admit)
}

/// Makes the pages accessible to the host that a call of the kernel will use.
pub fn touch(address: u64, len: u64, write: bool) {
    if len == 0 || !any() || !is_in(address) {
        return;
    }
    let end = address.saturating_add(len);
    let mut at = address;
    while at < end && is_in(at) {
        let next = {
            let mut locked = lock();
            let Some(region) = locked.state.region(at) else {
                return;
            };
            region.accessible(at, write)
        };
        if let Some(next) = next {
            at = next;
        } else if !admit(at, write) {
            return;
        }
    }
}

/// Bytes of the program that will be read while locks are held: a copy, if they lie in managed memory.
#[inline]
pub fn own(bytes: &[u8]) -> Cow<'_, [u8]> {
    match any() && is_in(bytes.as_ptr() as u64) {
        true => Cow::Owned(bytes.to_vec()),
        false => Cow::Borrowed(bytes),
    }
}

/// In a forked child: its parent's managed memory is not there.
pub fn leave() {
    ANY.store(false, Ordering::SeqCst);
    guard::leave();
    remote::leave();
    fault_heap::leave();
}

/// Makes a piece accessible. Returns whether the access is to be repeated.
fn admit(address: u64, write: bool) -> bool {
    let _counted = counts::Fault::begin();
    let mut locked = lock();
    let state = &mut *locked.state;
    let Some(region) = state.region(address) else {
        return false;
    };
    if region.accessible(address, write).is_some() {
        let stores = region.accessible(address, true).is_some();
        guard::allow_again(address, stores);
        return !seems_stuck(address);
    }
    let Ok(session) = session() else {
        return false;
    };
    let admitted = session
        .check()
        .and_then(|()| state.admit(session, address, write));
    if PROVISIONAL.load(Ordering::Relaxed) != 0 {
        timer::wake();
    }
    if let Err(status) = admitted {
        if session.check().is_ok() {
            tracing::error!(%status, "managed memory at {address:#x} cannot be fetched");
        }
        // The content is lost with the session, and every further call says so.
        return state.abandon(address);
    }
    true
}

/// Whether a thread has faulted again and again where it may access the memory.
fn seems_stuck(address: u64) -> bool {
    const MOST: u32 = 10_000;
    static LAST: AtomicU64 = AtomicU64::new(0);
    static TIMES: AtomicU32 = AtomicU32::new(0);
    if LAST.swap(address, Ordering::Relaxed) != address {
        TIMES.store(0, Ordering::Relaxed);
    }
    TIMES.fetch_add(1, Ordering::Relaxed) > MOST
}

/// Counts as a provisional piece until it is dropped.
struct Counted(());

impl Counted {
    fn new() -> Counted {
        PROVISIONAL.fetch_add(1, Ordering::SeqCst);
        Counted(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        PROVISIONAL.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Notes that a region is to be looked at by launches. Comes before its thread reads [`LAUNCHING`].
fn attend(region: &mut Region) {
    if !region.attended {
        region.attended = true;
        ATTENDED.fetch_add(1, Ordering::SeqCst);
    }
}

/// Pieces get another home, and the provisional ones among them count as such no more.
fn clear_provisional(region: &mut Region, pieces: &ops::Range<usize>) {
    let mut provisional = 0;
    for piece in pieces.clone() {
        provisional += u32::from(region.home(piece).is_provisional());
        region.twins.remove(&piece);
    }
    PROVISIONAL.fetch_sub(provisional, Ordering::SeqCst);
}

/// Whether the device may be changing a region.
fn is_in_use(session: &Session, region: &Region) -> bool {
    LAUNCHES.load(Ordering::SeqCst) != region.born
        && (LAUNCHING.load(Ordering::SeqCst) != 0 || stream::any_busy(session))
}

/// Maps nothing at these addresses, which stay reserved.
fn clear(start: u64, len: u64) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: addresses of a region that ends, in the arena that this process has reserved.
    unsafe {
        libc::mmap(
            start as *mut c_void,
            len as usize,
            libc::PROT_NONE,
            flags,
            -1,
            0,
        )
    };
}

/// Maps the pages at `host`, which are shared, at `start` too, without access.
fn map_again(host: u64, start: u64, len: u64) -> bool {
    let (host, to, len) = (host as *mut c_void, start as *mut c_void, len as usize);
    // SAFETY: a length of 0 maps the same pages once more, elsewhere; the new mapping then moves to addresses that this
    // process has reserved. There is no access to it before.
    unsafe {
        let made = libc::syscall(libc::SYS_mremap, host, 0, len, libc::MREMAP_MAYMOVE, 0);
        if made == -1 {
            return false;
        }
        let made = made as *mut c_void;
        libc::mprotect(made, len, libc::PROT_NONE);
        // As managed memory natively is: a child does not have it.
        libc::madvise(made, len, libc::MADV_DONTFORK);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        if libc::syscall(libc::SYS_mremap, made, len, len, flags, to) == -1 {
            libc::munmap(made, len);
            return false;
        }
    }
    true
}

impl State {
    const fn new() -> State {
        State {
            regions: BTreeMap::new(),
            stream: None,
            value: 0,
            buffer: None,
            sent: None,
            habits: Habits::new(),
            place: None,
            fetched: None,
            wanted: Vec::new(),
        }
    }

    /// The region of an address.
    fn region(&mut self, address: u64) -> Option<&mut Region> {
        let (_, region) = self.regions.range_mut(..=address).next_back()?;
        region.contains(address).then_some(region)
    }

    /// Copies parts of managed memory, and waits for that.
    fn copy(&mut self, session: &Session, parts: &[Part], direction: Direction) -> Status {
        if parts.is_empty() {
            return Ok(());
        }
        let stream = self.stream.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        // Marks in one flag rise only in the order of their execution.
        self.pass_sent(session, None)?;
        let mut sent = false;
        for part in parts {
            if apart::is_apart(part.1) {
                self.copy_apart(session, *part, direction)?;
                continue;
            }
            sent = true;
            let body = Copy {
                stream: stream.handle(),
                ..direction.copy(*part)
            };
            session.put_express(Op::Copy, &body)?;
        }
        if !sent {
            return Ok(());
        }
        self.value = self.value.wrapping_add(1);
        let body = Mark {
            stream: stream.handle(),
            slot: stream.slot(),
            value: self.value,
        };
        session.put_express(Op::Mark, &body)?;
        wait::wait(session, stream.slot(), self.value, Policy::Auto)
    }

    /// Allocates the host's pages of a chunk, if it has none.
    fn furnish(region: &mut Region, session: &Session, chunk: usize) -> Status {
        if region.chunks[chunk].is_some() {
            return Ok(());
        }
        let (start, len) = region.chunk(chunk);
        let device = memory::server_device_of(start).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let host = match session.may_request() {
            true => memory::host_alloc_of_pages(session, device, len)?,
            false => apart::alloc(len)?,
        };
        if !map_again(host, start, len) || !guard::attach(host, (start, len)) {
            clear(start, len);
            give_back(session, (host, len));
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        region.chunks[chunk] = Some(host);
        Ok(())
    }

    /// Makes the piece at `address` accessible to the host.
    fn admit(&mut self, session: &Session, address: u64, write: bool) -> Status {
        // A thread that sees meanwhile that work has ended waits for this copy, which may be older, and drops it.
        let _counted = Counted::new();
        let region = self.region(address).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        attend(region);
        let in_use = is_in_use(session, region);
        let piece = region.piece_of(address);
        let (start, size) = (region.start, region.piece);
        // The host uses more than the pages that were fetched along.
        self.close_pages(session, start, piece)?;
        let region = self.region(address).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        Self::furnish(region, session, region.chunk_of(piece))?;
        let scanned = region.scanned(piece);
        let mut pieces = region.wanted(piece);
        let home = region.home(piece);
        if write && (in_use || home.is_provisional()) {
            // Each piece that is written beside the device has a twin of its own.
            pieces.end = piece + 1;
        }
        self.use_apart(start, &pieces);
        let region = self.region(address).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        if home == Home::Device {
            let (start, len) = region.addresses(&pieces);
            let host = region.host(start).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
            self.copy(session, &[(start, host, len)], Direction::ToHost)?;
        }
        match (home, scanned) {
            // Read-ahead does for them.
            (Home::Device, Some(pieces)) => {
                pieces.for_each(|piece| self.habits.drop_piece((start, piece)));
            }
            (Home::Device | Home::Both, _) if size == PIECE => {
                let offset = (address - start) % PIECE;
                self.note_use((start, piece), offset, write);
            }
            _ => {}
        }
        let region = self.region(address).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let next = match (home, in_use, write) {
            (Home::Nowhere, ..) | (Home::Device | Home::Both, false, true) => Home::Host,
            (_, false, false) => Home::Both,
            (_, true, false) => Home::Copy,
            (_, _, true) => Home::Written,
        };
        if next == Home::Written {
            let (start, len) = region.addresses(&pieces);
            let host = region.host(start).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
            // SAFETY: pages of the host arena that belong to this region; while it is protected nothing changes them.
            let now = unsafe { std::slice::from_raw_parts(host as *const u8, len as usize) };
            region.twins.insert(piece, now.into());
        }
        let place = region.addresses(&pieces);
        if !guard::allow(place, home.permits(false), next.permits(true)) {
            region.twins.remove(&piece);
            if guard::covers_the_kernel() {
                return Err(CUDA_ERROR_OUT_OF_MEMORY);
            }
            // The process has too many mappings: with all pages protected it has few.
            return self.give_all(session, None);
        }
        let (was, count) = (home.is_provisional(), pieces.len() as u32);
        region.set(pieces, next);
        match (was, next.is_provisional()) {
            (false, true) => PROVISIONAL.fetch_add(count, Ordering::SeqCst),
            (true, false) => PROVISIONAL.fetch_sub(count, Ordering::SeqCst),
            _ => 0,
        };
        Ok(())
    }

    /// Gives the device all that the host has changed, and protects all pages. `stream`: it is given work next.
    fn give_all(&mut self, session: &Session, stream: Option<StreamRef>) -> Status {
        self.give(session, |_| true, None, stream)
    }

    /// Gives the device the changes that the host has made beside it, and protects pages that may be old.
    fn drop_provisional(&mut self, session: &Session) -> Status {
        self.give(session, Home::is_provisional, None, None)
    }

    /// Gives the device the pieces with such homes, of all or of these.
    fn give(
        &mut self,
        session: &Session,
        which: fn(Home) -> bool,
        within: Option<&prefetch::Pieces>,
        stream: Option<StreamRef>,
    ) -> Status {
        let mut parts = Vec::new();
        let mut given: Vec<(u64, ops::Range<usize>)> = Vec::new();
        let mut denied = true;
        let all = self.regions.values().filter(|region| region.attended);
        for region in all {
            let runs = match within {
                Some((start, _)) if *start != region.start => continue,
                Some((_, pieces)) => region.runs_in(pieces),
                None => region.runs(),
            };
            let mut runs = runs
                .into_iter()
                .filter(|(_, home)| *home != Home::Device && which(*home))
                .peekable();
            while let Some((run, home)) = runs.next() {
                // One call for all neighbours.
                let mut span = run.clone();
                let mut all = vec![(run, home)];
                while let Some((run, home)) = runs.next_if(|(run, _)| run.start == span.end) {
                    span.end = run.end;
                    all.push((run, home));
                }
                denied &= guard::deny(region.addresses(&span));
                for (run, home) in all {
                    collect(region, run, home, &mut parts);
                }
                given.push((region.start, span));
            }
        }
        let copied = match (denied, stream) {
            (true, Some(stream)) => match self.send(session, &parts, stream) {
                Ok(false) => self.copy(session, &parts, Direction::ToDevice),
                sent => sent.map(drop),
            },
            (true, None) => self.copy(session, &parts, Direction::ToDevice),
            (false, _) => Err(CUDA_ERROR_OUT_OF_MEMORY),
        };
        if copied.is_err() {
            self.take_back(given);
            return copied;
        }
        for (start, span) in given {
            let Some(region) = self.regions.get_mut(&start) else {
                continue;
            };
            clear_provisional(region, &span);
            region.set(span, Home::Device);
        }
        for region in self.regions.values_mut() {
            if region.attended && region.is_on_device() {
                region.attended = false;
                ATTENDED.fetch_sub(1, Ordering::SeqCst);
            }
        }
        Ok(())
    }

    /// Makes all regions host memory. Nothing is in flight. Returns the pages that are not used any more.
    fn share(&mut self, session: &Session) -> Status<Vec<(u64, u64)>> {
        self.give_all(session, None)?;
        let mut unused = Vec::new();
        let starts: Vec<u64> = self.regions.keys().copied().collect();
        for start in starts {
            let Some(region) = self.regions.get_mut(&start).filter(|region| !region.shared) else {
                continue;
            };
            let mut parts = Vec::new();
            for chunk in 0..region.chunks.len() {
                Self::furnish(region, session, chunk)?;
                let (first, len) = region.chunk(chunk);
                parts.extend(region.host(first).map(|host| (first, host, len)));
            }
            let len = region.len;
            self.copy(session, &parts, Direction::ToHost)?;
            let file = file_of(start, len, &parts)?;
            let body = FileRegister {
                len,
                address: start,
                device: memory::server_device_of(start).unwrap_or(0),
                ..FileRegister::default()
            };
            let answer =
                session.request_sending(Op::FileRegister, &body, &[], file.as_fd(), len)?;
            let range: Range = answer.read()?;
            if range.start != start || !map_file(&file, start, len) {
                tracing::error!(?range, "managed memory cannot be mapped");
                return Err(CUDA_ERROR_OUT_OF_MEMORY);
            }
            guard::wake((start, len));
            let Some(region) = self.regions.get_mut(&start) else {
                continue;
            };
            region.share();
            unused.extend(region.furnished());
            region.chunks.fill(None);
            tracing::info!(
                start = format_args!("{start:#x}"),
                len,
                "managed memory is host memory from now on: a kernel has accesses of system scope"
            );
        }
        Ok(unused)
    }

    /// Makes pieces accessible again that were not given to the device.
    fn take_back(&mut self, given: Vec<(u64, ops::Range<usize>)>) {
        for (start, span) in given {
            let Some(region) = self.regions.get(&start) else {
                continue;
            };
            for piece in span {
                let home = region.home(piece);
                if let Some(open) = region.open.get(&piece) {
                    guard::allow((open.start, open.len), false, open.written);
                } else if home.permits(false) {
                    let place = region.addresses(&(piece..piece + 1));
                    guard::allow(place, false, home.permits(true));
                }
            }
        }
    }

    /// Makes a piece accessible without its content, which is lost. Returns whether the kernel did.
    fn abandon(&mut self, address: u64) -> bool {
        let Some(region) = self.region(address) else {
            return false;
        };
        let piece = region.piece_of(address);
        let (start, len) = region.addresses(&(piece..piece + 1));
        let has_pages = region.host(start).is_some();
        if !has_pages {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: addresses of a region without pages, in the arena that this process has reserved.
            let made =
                unsafe { libc::mmap(start as *mut c_void, len as usize, access, flags, -1, 0) };
            if made == libc::MAP_FAILED {
                return false;
            }
        }
        attend(region);
        let was_mapped = region.home(piece).permits(false);
        let was = region.home(piece).is_provisional();
        region.twins.remove(&piece);
        region.set(piece..piece + 1, Home::Host);
        PROVISIONAL.fetch_sub(was.into(), Ordering::SeqCst);
        !has_pages || guard::allow((start, len), was_mapped, true)
    }
}

/// Adds the host's changes in pieces with this home.
fn collect(region: &Region, run: ops::Range<usize>, home: Home, parts: &mut Vec<Part>) {
    match home {
        Home::Host => {
            let (start, len) = region.addresses(&run);
            parts.extend(region.host(start).map(|host| (start, host, len)));
        }
        Home::Written => {
            for piece in run {
                let (start, len) = region.addresses(&(piece..piece + 1));
                let (Some(host), Some(twin)) = (region.host(start), region.twins.get(&piece))
                else {
                    continue;
                };
                // SAFETY: pages of the host arena that belong to this region, which is protected.
                let now = unsafe { std::slice::from_raw_parts(host as *const u8, len as usize) };
                parts.extend(differences(twin, now).into_iter().map(|bytes| {
                    let at = bytes.start as u64;
                    (start + at, host + at, bytes.len() as u64)
                }));
            }
        }
        Home::Pages => {
            for piece in run {
                let open = region.open.get(&piece).filter(|open| open.written);
                parts.extend(open.and_then(|open| {
                    let host = region.host(open.start)?;
                    Some((open.start, host, open.len))
                }));
            }
        }
        Home::Nowhere | Home::Device | Home::Both | Home::Copy => {}
    }
}

/// A file in memory with the content of parts of a region.
fn file_of(start: u64, len: u64, parts: &[Part]) -> Status<OwnedFd> {
    let file = shm::sealed_memfd(c"mpsshim-managed", len);
    let file = file.map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    let mapping = shm::Mapping::new(file.as_fd(), len as usize);
    let mapping = mapping.map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    for (device, host, len) in parts {
        // SAFETY: pages of the host arena that belong to the region, and as many of the new mapping.
        unsafe {
            let to = mapping.base().add((device - start) as usize);
            std::ptr::copy_nonoverlapping(*host as *const u8, to, *len as usize);
        }
    }
    Ok(file)
}

/// Maps a file at the addresses of a region.
fn map_file(file: &OwnedFd, start: u64, len: u64) -> bool {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    let (at, bytes, raw) = (start as *mut c_void, len as usize, file.as_raw_fd());
    // SAFETY: addresses of a region, whose pages this replaces.
    unsafe {
        let made = libc::mmap(at, bytes, access, flags, raw, 0);
        libc::madvise(at, bytes, libc::MADV_DONTFORK);
        made != libc::MAP_FAILED
    }
}
