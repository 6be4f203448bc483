//! The objects that a client owns on the server.

use crate::engine::base::account::Charge;
use crate::engine::base::bounds;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::slots::Slots;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::array_memory::Roomy;
use crate::engine::gpu::context_limits::SetLimits;
use crate::engine::gpu::devices::Grant;
use crate::engine::gpu::green::{GreenRef, Resources};
use crate::engine::gpu::host::{BegunBlock, HostBlock};
use crate::engine::gpu::moved::Content;
use crate::engine::gpu::partition::Place;
use crate::engine::images::instances::Image;
use crate::engine::objects::arrays::{Array, Reference, TextureObjects};
use crate::engine::objects::events::Event;
use crate::engine::objects::files::FileRegistration;
use crate::engine::objects::functions::{Function, Global};
use crate::engine::objects::graphs::Graphs;
use crate::engine::objects::links::Link;
use crate::engine::objects::pools::Pools;
use crate::engine::objects::shares::Sharing;
use crate::engine::objects::streams::Stream;
use crate::engine::objects::virtual_memory::VirtualMemory;
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Positions that linkers may have; fewer of them are taken at a time.
const LINK_PLACES: usize = 1 << 10;

/// Objects of a session.
#[derive(Debug)]
pub struct Objects {
    /// Streams by handle.
    pub streams: Slots<Stream>,
    /// Streams that the client destroyed while they had work.
    pub retired: Vec<Stream>,
    /// Events by handle.
    pub events: Slots<Event>,
    /// Modules by handle.
    pub images: Slots<Image>,
    /// Libraries by handle.
    pub libraries: Slots<Image>,
    /// Functions by handle, including those of library kernels.
    pub functions: Slots<Function>,
    /// Known globals by first address.
    pub globals: BTreeMap<u64, Global>,
    /// Linkers by handle.
    pub links: Slots<Link>,
    /// The part of each device that the session may use, by the server's ordinal; `None`: the whole device.
    pub places: Vec<Option<Place>>,
    /// Parts of devices that are assigned to contexts of the client, by handle.
    pub places_of_contexts: HashMap<u64, Place>,
    /// Green contexts by handle.
    pub greens: Slots<GreenRef>,
    /// Multiprocessor resources that were reported to the client.
    pub resources: Resources,
    /// Device memory by first address.
    pub grants: BTreeMap<u64, Arc<Grant>>,
    /// Host memory with the content of grants that have no physical memory now, by the first address of the grant.
    pub evicted: BTreeMap<u64, Content>,
    /// Device memory that the client freed while work was in flight.
    pub releasing: Vec<Arc<Grant>>,
    /// Charges for other memory freed while work was in flight.
    pub leaving: Vec<Charge>,
    /// Memory that it shares with other sessions, and memory of theirs that it has opened.
    pub sharing: Sharing,
    /// Peer access: the ordinal of the device that owns the memory, and of the device that may use it.
    pub peers: BTreeSet<(Ordinal, Ordinal)>,
    /// Internal streams for copies between host memory and a device other than the client's stream's, by device.
    pub helpers: Vec<(Ordinal, CUstream)>,
    /// Registered memory files of the client, by first address.
    pub files: BTreeMap<u64, FileRegistration>,
    /// Pinned host memory by first address.
    pub host: BTreeMap<u64, HostBlock>,
    /// Pinned host memory that is being allocated for the client's next message.
    pub host_begun: Option<BegunBlock>,
    /// Pinned host memory that the client freed, reused for its next request of the same size.
    pub host_spare: Vec<HostBlock>,
    /// Reserved addresses, physical memory and mappings that the client manages itself.
    pub virtual_memory: VirtualMemory,
    /// Its memory pools.
    pub pools: Pools,
    /// Arrays by handle, levels and planes included.
    pub arrays: Slots<Array>,
    /// Mipmapped arrays by handle.
    pub mipmaps: Slots<Array>,
    /// Arrays that the client destroyed but that a reference or a graph may still name.
    pub bound_arrays: Vec<Array>,
    /// Memory of its arrays that has room for others.
    pub array_memory: Roomy,
    /// Texture and surface objects.
    pub textures: TextureObjects,
    /// Texture references by handle.
    pub texture_references: Slots<Reference>,
    /// Surface references by handle.
    pub surface_references: Slots<Reference>,
    /// Its graphs and captures.
    pub graphs: Graphs,
    /// Context limits that it has set.
    pub limits: SetLimits,
}

impl Objects {
    /// No objects yet.
    pub fn new() -> Objects {
        Objects {
            streams: Slots::new(Kind::Stream, bounds::STREAMS),
            retired: Vec::new(),
            events: Slots::new(Kind::Event, bounds::EVENTS),
            images: Slots::new(Kind::Module, bounds::IMAGES),
            libraries: Slots::new(Kind::Library, bounds::IMAGES),
            functions: Slots::new(Kind::Function, bounds::FUNCTIONS),
            globals: BTreeMap::new(),
            links: Slots::new(Kind::Link, LINK_PLACES),
            places: Vec::new(),
            places_of_contexts: HashMap::new(),
            greens: Slots::new(Kind::GreenContext, bounds::GREENS),
            resources: Resources::default(),
            grants: BTreeMap::new(),
            evicted: BTreeMap::new(),
            releasing: Vec::new(),
            leaving: Vec::new(),
            sharing: Sharing::default(),
            peers: BTreeSet::new(),
            helpers: Vec::new(),
            files: BTreeMap::new(),
            host: BTreeMap::new(),
            host_begun: None,
            host_spare: Vec::new(),
            virtual_memory: VirtualMemory::default(),
            pools: Pools::default(),
            arrays: Slots::new(Kind::Array, bounds::ARRAYS),
            mipmaps: Slots::new(Kind::MipmappedArray, bounds::ARRAYS),
            bound_arrays: Vec::new(),
            array_memory: Roomy::default(),
            textures: TextureObjects::new(),
            texture_references: Slots::new(Kind::TextureReference, bounds::IMAGES),
            surface_references: Slots::new(Kind::SurfaceReference, bounds::IMAGES),
            graphs: Graphs::default(),
            limits: SetLimits::default(),
        }
    }

    /// The array or mipmapped array behind a handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`.
    pub fn array(&self, handle: u64) -> Result<&Array, CUresult> {
        match Handle(handle).kind() {
            Some(Kind::MipmappedArray) => self.mipmaps.get(handle),
            _ => self.arrays.get(handle),
        }
    }

    /// The array or mipmapped array behind a handle, to be changed.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`.
    pub fn array_mut(&mut self, handle: u64) -> Result<&mut Array, CUresult> {
        match Handle(handle).kind() {
            Some(Kind::MipmappedArray) => self.mipmaps.get_mut(handle),
            _ => self.arrays.get_mut(handle),
        }
    }

    /// The image behind a handle, to be changed.
    pub fn image_mut(&mut self, handle: u64) -> Result<&mut Image, CUresult> {
        match Handle(handle).kind() {
            Some(Kind::Library) => self.libraries.get_mut(handle),
            _ => self.images.get_mut(handle),
        }
    }

    /// The image behind a handle, for reading.
    pub fn image(&self, handle: u64) -> Result<&Image, CUresult> {
        match Handle(handle).kind() {
            Some(Kind::Library) => self.libraries.get(handle),
            _ => self.images.get(handle),
        }
    }

    /// Makes a grant accessible to the devices that have access to its device's memory.
    pub fn share_with_peers(&self, gpu: &Gpu, start: u64) -> Result<(), CUresult> {
        let Some(grant) = self.grants.get(&start) else {
            return Ok(());
        };
        for (_, user) in self
            .peers
            .iter()
            .filter(|(owner, _)| *owner == grant.device)
        {
            gpu.devices[*user].may_use(&gpu.driver, grant)?;
        }
        Ok(())
    }
}
