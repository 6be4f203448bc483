//! The devices with their contexts, and everything of the server that belongs to them rather than to a client.

pub mod array_memory;
pub mod client_segment;
pub mod context_limits;
pub mod copy_kernel;
pub mod cubin;
pub mod devices;
pub mod flag_kernel;
pub mod footprint;
pub mod green;
pub mod hold;
pub mod host;
pub mod kept_streams;
pub mod managed_arena;
pub mod managed_image;
pub mod moved;
pub mod open;
pub mod partition;
pub mod pool_memory;
pub mod reserve;
pub mod spare;
pub mod system_scope;
pub mod textures;
pub mod virtual_arena;

use crate::engine::base::account::{Account, Memory};
use crate::engine::base::assertions;
use crate::engine::base::calm::Calm;
use crate::engine::base::driver::{Driver, is_sticky};
use crate::engine::base::graph_turns::GraphTurns;
use crate::engine::base::health::Health;
use crate::engine::base::keeping::Keeping;
use crate::engine::base::pinned::{Pin, Pinned};
use crate::engine::base::printing::Printing;
use crate::engine::base::rations::{Holder, Part, Ration, Rations};
use crate::engine::base::side::{self, SIDES, Side};
use crate::engine::gpu::array_memory::ArraySizes;
use crate::engine::gpu::devices::{Device, Devices, Grant};
use crate::engine::gpu::green::GreenRef;
use crate::engine::gpu::hold::Hold;
use crate::engine::gpu::host::{BegunBlock, HostArena, HostBlock, Paid, ServerFlags};
use crate::engine::gpu::moved::MovePool;
use crate::engine::gpu::partition::{Ground, Place};
use crate::engine::gpu::spare::Spare;
use crate::engine::gpu::textures::Numbers;
use crate::engine::gpu::virtual_arena::VirtualArena;
use crate::keeper::{self, Name};
use mpsshim_api::cuda::*;
use mpsshim_model::host_memory::HostMemory;
use mpsshim_model::limits::Percentage;
use mpsshim_model::partitions::{self, Partitions};
use mpsshim_model::policy::MarkKind;
use mpsshim_proto::handshake::SM_PARTITION;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Operations of one stream that may be in flight: below the driver's queue of 1,021 launches (measured), so that
/// a dispatch thread never waits inside a launch.
pub const WINDOW: u64 = 256;
/// Limit of operations in flight per stream while clients wait at the gate.
const WINDOW_BESIDE_LOAD: u64 = 16;

/// Why a client cannot have a part of the devices.
#[derive(Debug, thiserror::Error)]
pub enum NoPlace {
    /// The driver cannot partition a device for the client's percentage.
    #[error("the driver cannot partition the device ({0})")]
    Percentage(CUresult),
    /// The driver cannot partition a device that has static partitions.
    #[error("the driver cannot partition the device ({0})")]
    Partition(CUresult),
    /// The client names a static partition, and there can be none.
    #[error("{var}={0}, and the daemon was started without -S", var = SM_PARTITION)]
    Off(String),
    /// There is no such static partition.
    #[error("{var}={0}: there is no such partition; lspart lists the partitions, and sm-partition list (-p 3) also those of named servers", var = SM_PARTITION)]
    Unknown(String),
    /// The client names no partition, and no multiprocessors are outside of partitions.
    #[error(
        "all multiprocessors are in static partitions; set {SM_PARTITION} to one that lspart lists, or at a named server sm-partition list (-p 3)"
    )]
    Full,
}

/// The devices, the driver, and the state of the contexts.
pub struct Gpu {
    /// The driver's functions.
    pub driver: Driver,
    /// The devices, by ordinal.
    pub devices: Devices,
    /// Flags in host memory that devices write for the server.
    pub flags: ServerFlags,
    /// Addresses of pinned memory.
    pub arena: HostArena,
    /// Addresses of programs' reservations.
    pub virtual_arena: VirtualArena,
    /// Memory files that the server may hold open for sessions.
    pub held_files: Arc<Rations>,
    /// Pinned host memory by user.
    pub pinned: Pinned,
    /// Registered memory without a user.
    pub spare: Spare,
    /// Pinned memory kept for moves of device memory.
    pub move_pool: MovePool,
    /// Directory for device memory that moves and finds no room in pinned memory.
    pub directory: Option<PathBuf>,
    /// Whether the contexts are sound.
    pub health: Health,
    /// Descriptors kept for the next server.
    pub keeping: Keeping,
    /// Whether new work is held back for other users.
    pub hold: Hold,
    /// Requests for a quiescent point, by side.
    pub calm: [Calm; SIDES],
    /// Text that kernels print.
    pub printing: Printing,
    /// The turn of graphs that allocate memory.
    pub graph_turns: GraphTurns,
    /// How completion markers are written.
    pub marks: MarkKind,
    /// Maximum number of kernels in a launch batch; 1: each kernel is launched by itself.
    pub launch_run: usize,
    /// Number of sessions that synchronize with the device often.
    pub synchronizing: AtomicUsize,
    /// A trace is being recorded.
    pub tracing: AtomicBool,
    /// Number of the next stream.
    pub streams: AtomicU32,
    /// Bytes that arrays need, by shape.
    pub array_sizes: ArraySizes,
    /// Texture and surface objects that keep numbers occupied.
    pub texture_numbers: Numbers,
}

impl Gpu {
    /// State for a driver, its devices and the reserved addresses of pinned memory; the first device must have a
    /// context.
    ///
    /// # Errors
    /// Driver errors.
    pub fn new(
        (driver, devices, arena): (Driver, Devices, HostArena),
        printing: Printing,
        keeping: Keeping,
        (marks, launch_run): (MarkKind, usize),
        host_memory: HostMemory,
    ) -> Result<Gpu, CUresult> {
        Ok(Gpu {
            virtual_arena: VirtualArena::new(&driver),
            flags: ServerFlags::new(&driver)?,
            driver,
            devices,
            arena,
            held_files: Rations::of_files(),
            pinned: Pinned::new(host_memory),
            spare: Spare::default(),
            move_pool: MovePool::new(),
            directory: None,
            health: Health::default(),
            keeping,
            hold: Hold::default(),
            calm: Default::default(),
            printing,
            graph_turns: GraphTurns::default(),
            marks,
            launch_run,
            synchronizing: AtomicUsize::new(0),
            tracing: AtomicBool::new(false),
            streams: AtomicU32::new(0),
            array_sizes: ArraySizes::default(),
            texture_numbers: Numbers::default(),
        })
    }

    /// The device of this ordinal.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE`.
    pub fn device(&self, ordinal: u32) -> Result<&Device, CUresult> {
        self.devices.get(ordinal)
    }

    /// A device that has a context.
    pub fn any_device(&self) -> Option<&Device> {
        self.devices.iter().find(|device| device.is_attached())
    }

    /// Makes the context of some device current.
    pub fn use_any_device(&self) {
        if let Some(device) = self.any_device() {
            let _ = device.make_current(&self.driver);
        }
    }

    /// Whether an allocation failed recently for lack of device memory.
    pub fn is_short(&self) -> bool {
        self.devices.iter().any(Device::was_short)
    }

    /// Requests for a quiescent point of a side.
    #[inline]
    pub fn calm(&self, side: Side) -> &Calm {
        &self.calm[side.index()]
    }

    /// Whether clients wait at any gate.
    pub fn is_urgent(&self) -> bool {
        self.calm.iter().any(Calm::is_urgent)
    }

    /// Whether a trace is being recorded.
    #[inline]
    pub fn is_tracing(&self) -> bool {
        self.tracing.load(Ordering::Relaxed)
    }

    /// Maximum number of operations in flight per stream of the current side.
    pub fn window(&self) -> u64 {
        if self.calm(side::entered()).is_urgent() {
            WINDOW_BESIDE_LOAD
        } else {
            WINDOW
        }
    }

    /// Returns device memory to the driver if this was the last reference to it.
    ///
    /// # Errors
    /// Driver errors.
    pub fn revoke(&self, grant: Arc<Grant>) -> Result<(), CUresult> {
        match Arc::into_inner(grant) {
            Some(grant) => {
                let name = Name::numbered(keeper::Kind::Memory, grant.start);
                self.keeping.forget(name);
                self.devices[grant.device].revoke(&self.driver, grant)
            }
            None => Ok(()),
        }
    }

    /// The part of each device, by ordinal, for an active thread percentage and the static partition with this name;
    /// `None` for all of a device.
    ///
    /// # Errors
    /// As of [`NoPlace`].
    pub fn places(
        &self,
        threads: Percentage,
        partitions: Option<&Partitions>,
        chosen: Option<&str>,
    ) -> Result<Vec<Option<Place>>, NoPlace> {
        let find = |name: &str| {
            let partitions = partitions.ok_or_else(|| NoPlace::Off(name.to_owned()))?;
            let found = partitions.find(name);
            found.ok_or_else(|| NoPlace::Unknown(name.to_owned()))
        };
        let chosen = chosen.map(find).transpose()?;
        let place = |device: &Device| {
            let uuid = device.uuid.to_string();
            let own = chosen.filter(|(of, ..)| *of == uuid);
            let used = partitions.map_or_else(BTreeSet::new, |partitions| partitions.used(&uuid));
            if used.is_empty() {
                let place = self.place(device, threads);
                return place.map_err(NoPlace::Percentage);
            }
            let ground = match own {
                Some((_, _, chunks)) => Ground::Chunks(chunks),
                None => Ground::Without(&used),
            };
            let partition = device.partition(&self.driver);
            let place = partition
                .map_err(NoPlace::Partition)?
                .place_in(ground, threads);
            match own {
                Some((uuid, id, _)) if place.count == 0 => {
                    Err(NoPlace::Unknown(partitions::name(uuid, id)))
                }
                _ => Ok(Some(place)),
            }
        };
        let places = self.devices.iter().map(place);
        let places = places.collect::<Result<Vec<_>, _>>()?;
        let is_closed = |place: &Option<Place>| place.as_ref().is_some_and(|one| one.count == 0);
        match !places.is_empty() && places.iter().all(is_closed) {
            true => Err(NoPlace::Full),
            false => Ok(places),
        }
    }

    fn place(&self, device: &Device, threads: Percentage) -> Result<Option<Place>, CUresult> {
        if threads == Percentage::ALL {
            return Ok(None);
        }
        let partition = device.partition(&self.driver)?;
        Ok(Some(partition.place(threads.of(partition.total))))
    }

    /// Destroys a green context if this was the last reference; returns it while a stream still refers to it.
    pub fn end_green(&self, green: GreenRef) -> Option<GreenRef> {
        if green.is_lasting() {
            return None;
        }
        match Arc::try_unwrap(green) {
            Ok(green) => {
                let _ = self.devices[green.device].make_current(&self.driver);
                if let Err(status) = self.driver.context.green_destroy(green.raw) {
                    tracing::warn!(%status, "cannot destroy a green context");
                }
                None
            }
            Err(green) => Some(green),
        }
    }

    /// A ration for more registered memory. Both the memory held by all sessions and the memory waiting to be
    /// unregistered are bounded.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn place_to_register(&self, holder: &Holder) -> Result<Ration, CUresult> {
        if self.spare.is_full() {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.held_files.take(holder, Part::USUAL)
    }

    /// Spare pinned memory of the same user with `len` bytes, all zero.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn take_spare_block(
        &self,
        (account, holder, uid): (&Account, &Holder, u32),
        len: u64,
    ) -> Result<Option<HostBlock>, CUresult> {
        let charge = account.take(Memory::Host, len)?;
        let spare = self.spare.take_block(uid, len);
        Ok(spare.map(|mut block| {
            block.host = Some(charge);
            block.place.pass_to(holder);
            block
        }))
    }

    /// Begins to allocate pinned memory of `len` bytes, which are whole pages: [`HostArena::begin`].
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn begin_block(
        &self,
        (account, holder): (&Account, &Holder),
        pin: Pin,
        len: u64,
    ) -> Result<BegunBlock, CUresult> {
        let unpopulated = self.pinned.reserve(len).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let place = self.place_to_register(holder)?;
        let paid = Paid {
            account,
            pin,
            place,
        };
        self.arena.begin(paid, unpopulated, len)
    }

    /// Passes a descriptor of a session's device memory to the keeper for the next server. Returns whether the keeper
    /// holds it.
    pub fn keep_grant(&self, grant: &Grant, holder: &Holder) -> bool {
        if !self.keeping.is_on() {
            return false;
        }
        let name = Name::numbered(keeper::Kind::Memory, grant.start);
        let exported = grant.export(&self.driver);
        exported.is_ok_and(|fd| {
            self.keeping
                .keep(name, std::os::fd::AsFd::as_fd(&fd), holder)
        })
    }

    /// Returns unused graph memory to the driver (`cuDeviceGraphMemTrim`), which clears memory before handing it out
    /// again.
    pub fn trim_graph_memory(&self) {
        for device in self.devices.iter().filter(|device| device.is_attached()) {
            let trimmed = device
                .make_current(&self.driver)
                .and_then(|()| self.driver.graph.memory_trim(device.raw));
            if let Err(status) = trimmed {
                self.note_status(status);
            }
        }
    }

    /// Whether a context is lost.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.health.is_lost()
    }

    /// The sticky status of a lost context.
    pub fn lost_status(&self) -> Option<CUresult> {
        self.health.lost()
    }

    /// Checks whether a status means that the context is lost; if so, every client is notified before this returns.
    pub fn note_status(&self, status: CUresult) {
        if is_sticky(status) {
            self.health.lose(status);
        }
    }

    /// Asks the driver whether the contexts are sound.
    pub fn probe(&self) {
        if assertions::are_coming() {
            return;
        }
        for device in self.devices.iter().filter(|device| device.is_attached()) {
            // The main context comes last, so that it stays current for the thread.
            for side in Side::ALL.into_iter().rev() {
                if let Err(status) = side::on(side, || device.probe(&self.driver)) {
                    self.note_status(status);
                }
            }
        }
    }
}
