//! One client as the server sees it.

pub mod portable;
pub mod quiet;

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::bounds;
use crate::engine::base::description::Description;
use crate::engine::base::moment::{Moment, Want};
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::printing::Printed;
use crate::engine::base::rations::Holder;
use crate::engine::base::side::{self, Side};
use crate::engine::base::slots::Slots;
use crate::engine::base::waits::Waits;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::client_segment::Segment;
use crate::engine::gpu::context_limits::RaisedLimits;
use crate::engine::gpu::devices::Grant;
use crate::engine::gpu::green::{GreenRef, Resources};
use crate::engine::gpu::host::HostBlock;
use crate::engine::gpu::partition::Place;
use crate::engine::images::contents::Sent;
use crate::engine::images::instances::{Image, Instance};
use crate::engine::images::prepared::Prepared;
use crate::engine::objects::activity::{Counts, Published, Quiet};
use crate::engine::objects::arrays::{Array, Objects, Reference};
use crate::engine::objects::events::Event;
use crate::engine::objects::fairness::Standing;
use crate::engine::objects::files::FileRegistration;
use crate::engine::objects::functions::{Function, Global};
use crate::engine::objects::graphs::Graphs;
use crate::engine::objects::held::Held;
use crate::engine::objects::links::Link;
use crate::engine::objects::marks::Marks;
use crate::engine::objects::pools::Pools;
use crate::engine::objects::runs::Planned;
use crate::engine::objects::shares::Sharing;
use crate::engine::objects::snapshot::Saved;
use crate::engine::objects::streams::{Point, Stream};
use crate::engine::objects::suspects::Launched;
use crate::engine::objects::times::Times;
use crate::engine::objects::trace::Tracer;
use crate::engine::objects::virtual_memory::VirtualMemory;
use mpsshim_api::cuda::*;
use mpsshim_control::closers::Stranger;
use mpsshim_model::client::ClientInfo;
use mpsshim_model::limits::{Terms, Usage};
use mpsshim_model::mode::Mode;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::ring::Consumer;
use mpsshim_proto::segment::{self, Header, RingMemory};
use mpsshim_proto::shm::{self, Doorbell};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::time::Instant;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What more than one thread needs of a session.
#[derive(Debug)]
pub struct SessionShared {
    /// Who it is.
    pub info: ClientInfo,
    /// The segment.
    pub segment: Segment,
    /// Rung by the client after it posted while the dispatch thread slept.
    pub bell: Doorbell,
    /// The client's connection.
    pub socket: Stranger,
    /// Its other end is closed, or it is to be ended.
    pub hung_up: AtomicBool,
    /// The operator ended it.
    pub terminated: AtomicBool,
    /// It has work in flight, or may have: see [`Session::may_work`].
    pub at_work: AtomicBool,
    /// How long something of that has taken already, as was last seen, and is likely to take from now on, in milliseconds.
    pub works_for: (AtomicU32, AtomicU32),
    /// While its thread is away: the last flags of what was in flight when it went.
    pub left: Mutex<Option<Vec<Point>>>,
    /// Number of its [`Side`].
    pub side: AtomicU8,
    /// Bytes it holds and may hold.
    pub account: Account,
    /// Active-thread percentage and priority it came with.
    pub terms: Terms,
    /// Its server flags.
    pub flags: Holder,
    /// Memory files that the server holds for it.
    pub held_files: Holder,
    /// Its share of dispatch in relation to others.
    pub standing: Standing,
    /// What it does.
    pub activity: Published,
    /// Its waits at the gate.
    pub waits: Waits,
    /// What it has made, for a server that comes after this one.
    pub description: Arc<Description>,
    /// The last attempt to bring all sessions to rest with which this one came to rest.
    pub rested: AtomicU64,
    /// The last attempt with which its thread has tried to.
    pub asked_to_rest: AtomicU64,
    /// What it launched last.
    pub launched: Launched,
}

impl SessionShared {
    /// A session that has nothing yet, with its doorbell and its client's connection.
    pub fn new(
        info: ClientInfo,
        segment: Segment,
        (bell, socket): (Doorbell, Stranger),
        (terms, account): (Terms, Account),
        description: Arc<Description>,
    ) -> SessionShared {
        let uid = info.uid;
        SessionShared {
            info,
            segment,
            bell,
            socket,
            hung_up: AtomicBool::new(false),
            terminated: AtomicBool::new(false),
            at_work: AtomicBool::new(false),
            works_for: Default::default(),
            left: Mutex::default(),
            side: AtomicU8::new(Side::MAIN.index() as u8),
            account,
            terms,
            flags: Holder::new(uid),
            held_files: Holder::new(uid),
            standing: Standing::default(),
            activity: Published::default(),
            waits: Waits::default(),
            description,
            rested: AtomicU64::new(0),
            asked_to_rest: AtomicU64::new(0),
            launched: Launched::default(),
        }
    }

    /// What the client has and may have.
    pub fn usage(&self) -> Usage {
        let (launches, activity) = self.activity();
        Usage {
            session: self.info.session,
            threads: self.terms.threads,
            priority: self.terms.priority,
            weight: self.standing.weight(),
            memory: self.account.held_of_devices(),
            memory_limit: self.account.limits_of_devices(),
            host: self.account.held(Memory::Host),
            mode: Mode::Proxy,
            turns: None,
            launches,
            activity: Some(activity),
            gate: Some(self.waits.usage(self.side())),
            bonds: Some(self.description.bonds()),
        }
    }
    fn base(&self) -> *mut u8 {
        self.segment.base()
    }
    /// The segment's header.
    pub fn header(&self) -> &Header {
        self.segment.header()
    }
    /// The value of a flag: see [`Segment::flag`].
    #[inline]
    pub fn flag(&self, slot: u32) -> u32 {
        self.segment.flag(slot)
    }
    /// Ends the session for the client: every further call of it returns `status`, sleepers wake.
    pub fn end(&self, status: CUresult) {
        segment::end(self.segment.registration.mapping(), status.0);
    }
    /// After a context was lost: whether the session goes on in the next server. Waits until that is decided.
    pub fn goes_on(&self, gpu: &Gpu) -> bool {
        gpu.health.await_decision();
        self.description.may_outlive()
    }
    /// Its side of the devices.
    pub fn side(&self) -> Side {
        Side::at(self.side.load(Ordering::SeqCst).into())
    }
    /// The client's connection.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Positions that linkers may have; fewer of them are taken at a time.
const LINK_PLACES: usize = 1 << 10;

/// Everything a client owns here. Belongs to one thread at a time: its dispatch thread, the slow lane while it
/// executes a call that may block, the reaper in the end.
#[derive(Debug)]
pub struct Session {
    /// What other threads see.
    pub shared: Arc<SessionShared>,
    /// Our end of the ring.
    pub consumer: Consumer<RingMemory>,
    /// Streams by handle.
    pub streams: Slots<Stream>,
    /// Events by handle.
    pub events: Slots<Event>,
    /// Modules and libraries by handle.
    pub images: Slots<Image>,
    /// The same for libraries.
    pub libraries: Slots<Image>,
    /// The part of each device that it may use, by the server's ordinal; `None`: all of it.
    pub places: Vec<Option<Place>>,
    /// The parts that contexts of its own have, by handle.
    pub places_of_contexts: HashMap<u64, Place>,
    /// Green contexts by handle.
    pub greens: Slots<GreenRef>,
    /// Multiprocessors that the client was told of.
    pub resources: Resources,
    /// Linkers by handle.
    pub links: Slots<Link>,
    /// Functions by handle, those that kernels of libraries became included.
    pub functions: Slots<Function>,
    /// Device memory by first address.
    pub grants: BTreeMap<u64, Arc<Grant>>,
    /// Device memory given back while work was in flight.
    pub releasing: Vec<Arc<Grant>>,
    /// What counts of other memory that was given back while work was in flight.
    pub leaving: Vec<Charge>,
    /// Since when a message waits for such memory.
    pub short_since: Option<Instant>,
    /// What it shares with other sessions, and they with it.
    pub sharing: Sharing,
    /// Devices whose memory other devices may use: the owner's and the user's ordinal.
    pub peers: BTreeSet<(Ordinal, Ordinal)>,
    /// Streams for copies from and to memory of devices that its own streams are not of.
    pub helpers: Vec<(Ordinal, CUstream)>,
    /// Memory files of the client's that are registered, by first address.
    pub files: BTreeMap<u64, FileRegistration>,
    /// Pinned host memory by first address.
    pub host: BTreeMap<u64, HostBlock>,
    /// Pinned host memory the client gave back, for its next request of the same size.
    pub host_spare: Vec<HostBlock>,
    /// What it reserved, allocated and mapped itself.
    pub virtual_memory: VirtualMemory,
    /// Its memory pools.
    pub pools: Pools,
    /// Bytes it holds.
    pub account: Account,
    /// Known globals by first address.
    pub globals: BTreeMap<u64, Global>,
    /// Arrays by handle, levels and planes included.
    pub arrays: Slots<Array>,
    /// Mipmapped arrays by handle.
    pub mipmaps: Slots<Array>,
    /// Arrays that the client destroyed and a reference may still name.
    pub bound_arrays: Vec<Array>,
    /// Texture and surface objects.
    pub textures: Objects,
    /// Texture references by handle.
    pub texture_references: Slots<Reference>,
    /// The same for surface references.
    pub surface_references: Slots<Reference>,
    /// Streams that the client destroyed while they had work.
    pub retired: Vec<Stream>,
    /// Room for the launches of the next run.
    pub planned: Vec<Planned>,
    /// Its marks that the server asks about.
    pub marks: Marks,
    /// What waits for the client, and the messages behind it.
    pub held: Held,
    /// What its kernels printed.
    pub printed: Printed,
    /// It has the turn of graphs that allocate memory, or goes on beside who has it.
    pub has_graph_turn: bool,
    /// Its graphs and captures.
    pub graphs: Graphs,
    /// Why the server ended the session, if it did.
    pub fault: Option<String>,
    /// Dispatch thread it belongs to.
    pub home: usize,
    /// Messages that dispatch threads have executed.
    pub dispatched: u64,
    /// Since when it has sent nothing.
    pub quiet: Quiet,
    /// What else is counted.
    pub counts: Counts,
    /// What it has to do with traces.
    pub tracer: Option<Tracer>,
    /// Its side of the devices.
    pub side: Side,
    /// Limits of its contexts that it has raised.
    pub raised_limits: RaisedLimits,
    /// When a kernel that takes long was last seen in flight.
    pub had_kernel: Option<Instant>,
    /// It was to go to another side, and could not.
    pub stays: bool,
    /// The moment in which it makes its call, while nobody else submits anything.
    pub moment: Option<Arc<Moment>>,
    /// Its images are still those of this side; they are loaded again in its next moment.
    pub images_of: Option<Side>,
    /// It has unloaded an image whose kernels may have run.
    pub left_images: bool,
    /// What others have of the image that its next message loads.
    pub offered: Option<Arc<Instance>>,
    /// Bytes of images that it has sent.
    pub sent: Sent,
    /// The image that it waits to load.
    pub prepared: Option<Prepared>,
    /// Something that was held back has to be done in such a moment.
    pub wants_moment: bool,
    /// What its next launch needs before it can be made.
    pub wants: Option<Want>,
    /// The keeper has what every session has.
    pub kept: bool,
    /// Some memory or image of it, the keeper has not.
    pub unkept_memory: bool,
    /// Its description has had no room for something.
    pub undescribed: bool,
    /// It has used an image that cannot be loaded elsewhere unnoticed, whatever its variables hold.
    pub binding_images: bool,
    /// It has had more streams than its description has room for.
    pub far_streams: bool,
    /// What its description has of the times of its events.
    pub times: Times,
    /// What its description has of its variables.
    pub saved: Saved,
    /// Images of which the description says what they leave behind.
    pub appraised: HashSet<u64>,
    /// First address and end of the variables that the client knows.
    pub variables_span: (u64, u64),
    /// Variables that are elsewhere than the client knows: length, and where, by the address that it knows.
    pub moved: BTreeMap<u64, (u64, u64)>,
    /// It has had memory or events in common with other processes.
    pub shares: bool,
    /// The driver's priorities of its streams tell it from clients of the other priority, and are not the client's own.
    pub classed: bool,
}

impl Session {
    /// A session with nothing in it yet.
    pub fn new(shared: Arc<SessionShared>, home: usize) -> Session {
        let side = shared.side();
        Session {
            consumer: Consumer::new(shared.segment.ring()),
            account: shared.account.clone(),
            shared,
            streams: Slots::new(Kind::Stream, bounds::STREAMS),
            events: Slots::new(Kind::Event, bounds::EVENTS),
            images: Slots::new(Kind::Module, bounds::IMAGES),
            libraries: Slots::new(Kind::Library, bounds::IMAGES),
            places: Vec::new(),
            places_of_contexts: HashMap::new(),
            greens: Slots::new(Kind::GreenContext, bounds::GREENS),
            resources: Resources::default(),
            links: Slots::new(Kind::Link, LINK_PLACES),
            functions: Slots::new(Kind::Function, bounds::FUNCTIONS),
            grants: BTreeMap::new(),
            releasing: Vec::new(),
            leaving: Vec::new(),
            short_since: None,
            sharing: Sharing::default(),
            peers: BTreeSet::new(),
            helpers: Vec::new(),
            files: BTreeMap::new(),
            host: BTreeMap::new(),
            host_spare: Vec::new(),
            virtual_memory: VirtualMemory::default(),
            pools: Pools::default(),
            globals: BTreeMap::new(),
            arrays: Slots::new(Kind::Array, bounds::ARRAYS),
            mipmaps: Slots::new(Kind::MipmappedArray, bounds::ARRAYS),
            bound_arrays: Vec::new(),
            textures: Objects::new(),
            texture_references: Slots::new(Kind::TextureReference, bounds::IMAGES),
            surface_references: Slots::new(Kind::SurfaceReference, bounds::IMAGES),
            retired: Vec::new(),
            planned: Vec::new(),
            marks: Marks::default(),
            held: Held::default(),
            printed: Printed::default(),
            has_graph_turn: false,
            quiet: Quiet::default(),
            graphs: Graphs::default(),
            fault: None,
            home,
            dispatched: 0,
            counts: Counts::default(),
            tracer: None,
            side,
            raised_limits: RaisedLimits::default(),
            had_kernel: None,
            stays: false,
            moment: None,
            images_of: None,
            left_images: false,
            offered: None,
            sent: Sent::default(),
            prepared: None,
            wants_moment: false,
            wants: None,
            kept: false,
            unkept_memory: false,
            undescribed: false,
            binding_images: false,
            far_streams: false,
            times: Times::default(),
            saved: Saved::default(),
            appraised: HashSet::new(),
            variables_span: (0, 0),
            moved: BTreeMap::new(),
            shares: false,
            classed: false,
        }
    }

    /// From now on the calling thread works for this session.
    #[inline]
    pub fn enter(&self) {
        side::enter(self.side);
    }

    /// Answers an ask.
    pub fn answer(&self, status: Result<(), CUresult>, payload: &[u8]) {
        let header = self.shared.header();
        let payload = &payload[..payload.len().min(segment::ANSWER_LEN)];
        // SAFETY: the answer area is inside the mapping and has ANSWER_LEN bytes; the client reads it after `answers`.
        unsafe {
            let to = self.shared.base().add(segment::ANSWER);
            std::ptr::copy_nonoverlapping(payload.as_ptr(), to, payload.len());
        }
        header
            .answer_len
            .store(payload.len() as u32, Ordering::Relaxed);
        header
            .answer_status
            .store(status.err().unwrap_or(CUDA_SUCCESS).0, Ordering::Relaxed);
        header.answers.0.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if header.answer_sleeps.0.load(Ordering::Relaxed) != 0 {
            shm::futex_wake(&header.answers.0);
        }
    }

    /// Keeps the first error of a post for the client's next call that waits.
    pub fn post_error(&self, status: CUresult) {
        let _ = self.shared.header().posted_error.compare_exchange(
            0,
            status.0,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }

    /// Whether `[address, address + len)` is device memory the session may name in a call: inside its own
    /// mappings, or outside the arena (globals of modules) where the driver decides.
    #[inline]
    pub fn check_device(&self, address: u64, len: u64) -> Result<(), CUresult> {
        if !mpsshim_proto::arena::is_device(address) {
            // Pinned memory may be named where device memory is expected, but only one's own.
            if mpsshim_proto::arena::is_host(address) {
                return self.check_reachable(address, len);
            }
            if mpsshim_proto::arena::is_virtual(address) {
                return self.check_mapped(address, len);
            }
            if self.pools.contains(address, len) || self.is_file(address, len) {
                return Ok(());
            }
            let global = self.globals.range(..=address).next_back();
            return match global {
                Some((start, global))
                    if address - start < global.len && len <= global.len - (address - start) =>
                {
                    self.note_variable(global);
                    Ok(())
                }
                _ if self.graphs.owns(address, len) => Ok(()),
                _ => Err(CUDA_ERROR_INVALID_VALUE),
            };
        }
        let end = address.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut at = address;
        loop {
            match self.grants.range(..=at).next_back() {
                Some((start, grant)) if at - start < grant.len => {
                    at = start + grant.len;
                    if end <= at {
                        return Ok(());
                    }
                }
                _ if self.sharing.contains(address, len) => return Ok(()),
                _ => return Err(CUDA_ERROR_INVALID_VALUE),
            }
        }
    }

    /// Whether `[address, address + len)` is mapped by the session, and a device may use it.
    fn check_mapped(&self, address: u64, len: u64) -> Result<(), CUresult> {
        let end = address.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut at = address;
        while let Some(next) = self.virtual_memory.usable_until(at) {
            if end <= next {
                return Ok(());
            }
            at = next;
        }
        Err(CUDA_ERROR_INVALID_VALUE)
    }

    /// Whether `[address, address + len)` is inside one block of the session's pinned memory, which this process too
    /// may touch.
    #[inline]
    pub fn check_host(&self, address: u64, len: u64) -> Result<(), CUresult> {
        match self.host.range(..=address).next_back() {
            Some((start, block))
                if address - start <= block.len() && len <= block.len() - (address - start) =>
            {
                Ok(())
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// Whether `[address, address + len)` is inside a registered file of the session's. Devices reach it; this
    /// process must not touch it.
    fn is_file(&self, address: u64, len: u64) -> bool {
        self.files
            .range(..=address)
            .next_back()
            .is_some_and(|(start, file)| {
                address - start <= file.len() && len <= file.len() - (address - start)
            })
    }

    /// Whether something may be written to `address`, which is known to be the session's: not where it has registered a
    /// file for reading. A device that tried would lose the context of all.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    #[inline]
    pub fn check_writable(&self, address: u64) -> Result<(), CUresult> {
        match self.files.range(..=address).next_back() {
            Some((start, file)) if address - start < file.len() && !file.is_writable() => {
                Err(CUDA_ERROR_INVALID_VALUE)
            }
            _ => Ok(()),
        }
    }

    /// Whether devices reach `[address, address + len)` as the session's host memory: pinned, or of a registered file.
    #[inline]
    pub fn check_reachable(&self, address: u64, len: u64) -> Result<(), CUresult> {
        match self.check_host(address, len) {
            Err(_) if self.is_file(address, len) => Ok(()),
            other => other,
        }
    }
}
