//! All images of the server: their contents, their instances in the driver, and the results of analyzing them.

pub mod ahead;
pub mod bonds;
pub mod changes;
pub mod contents;
pub mod families;
pub mod family;
pub mod instances;
pub mod packs;
pub mod prepared;
pub mod residents;
pub mod variables;

use crate::engine::base::jit::JitOptions;
use crate::engine::base::side::{self, Side};
use crate::engine::gpu::Gpu;
use crate::engine::gpu::cubin::{self, Calls, Leaves};
use crate::engine::gpu::managed_image::ManagedImage;
use crate::engine::images::ahead::{Ahead, Loaded, Unclaimed};
use crate::engine::images::changes::Changes;
use crate::engine::images::contents::{Content, Findings, ImageCache, Sent};
use crate::engine::images::families::Families;
use crate::engine::images::family::Family;
use crate::engine::images::instances::{Image, Instance};
use crate::engine::images::residents::Residents;
use crate::engine::images::variables::{KnownVariables, Variables};
use crossbeam_channel::Sender;
use mpsshim_api::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::shm::sealed_memfd;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Number of images whose analysis results are kept; at the limit, all results are discarded.
const MOST_KNOWN: usize = 16 << 10;

/// An image, or an instance of one, that is to be unloaded at a quiescent point.
pub enum Unloading {
    /// A module or library of a session.
    Image(Image),
    /// An instance without sessions, which may be kept for others.
    Left(Instance),
    /// An instance without sessions, which is not kept.
    Instance(Instance),
}

type Unload = Box<dyn Fn(Unloading) + Send + Sync>;

/// Findings about an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// State that is lost when it is loaded again elsewhere.
    pub leaves: Leaves,
    /// Functions of the driver that its kernels call.
    pub calls: Option<Calls>,
    /// Variables that its kernels may write.
    pub variables: Variables,
}

impl Found {
    /// Findings that the next server cannot do without.
    pub fn of(leaves: Leaves) -> Found {
        Found {
            leaves,
            calls: None,
            variables: None,
        }
    }
}

/// The images of all sessions.
pub struct ImageStore {
    /// Where they are loaded.
    pub gpu: Arc<Gpu>,
    /// Contents by SHA-256.
    pub cache: ImageCache,
    /// Identical images and their instances.
    pub families: Families,
    /// Instances without sessions.
    pub residents: Residents,
    ahead: Unclaimed,
    /// Tells of changes, for a standby.
    pub changes: Changes,
    /// Queues instances for the retain-or-unload decision.
    pub assessor: Sender<Arc<Instance>>,
    /// State lost when an image is reloaded elsewhere, by SHA-256.
    outlasting: Findings<Leaves>,
    variables: KnownVariables,
    /// Functions of the driver that the images call, by SHA-256.
    calls: Findings<Calls>,
    unload: Unload,
}

impl ImageStore {
    /// A store without images. `unload` takes images to unload at the next quiescent point.
    pub fn new(
        gpu: Arc<Gpu>,
        assessor: Sender<Arc<Instance>>,
        changes: Changes,
        unload: impl Fn(Unloading) + Send + Sync + 'static,
    ) -> ImageStore {
        ImageStore {
            cache: ImageCache::new(gpu.keeping.clone()),
            gpu,
            families: Families::default(),
            residents: Residents::default(),
            ahead: Unclaimed::default(),
            changes,
            assessor,
            outlasting: Findings::new(MOST_KNOWN),
            variables: KnownVariables::new(variables::MOST_KNOWN),
            calls: Findings::new(MOST_KNOWN),
            unload: Box::new(unload),
        }
    }

    /// Schedules an image or instance for unloading at the next quiescent point.
    pub fn bury(&self, unloading: Unloading) {
        (self.unload)(unloading);
    }

    /// `cuModuleLoadDataEx` or `cuLibraryLoadData`, by the kind of handle, unless an image of the family was loaded ahead.
    /// Also returns the encoded outcome of the options.
    ///
    /// # Errors
    /// The driver error of the load.
    pub fn load(
        &self,
        (kind, family): (Option<Kind>, Option<&Family>),
        content: &[u8],
        mut options: JitOptions,
    ) -> (Result<Loaded, CUresult>, Vec<u8>) {
        if let Some((loaded, said)) = family.and_then(|family| self.ahead.take(family)) {
            return (Ok(loaded), said);
        }
        let is_library = kind == Some(Kind::Library);
        let raw = ahead::load_raw(&self.gpu.driver, is_library, content, &mut options);
        let said = options.outcome(0);
        (raw.map(|raw| Loaded::new(raw, options)), said)
    }

    /// Takes over the images that were loaded ahead.
    pub fn take_over(&self, ahead: Ahead) {
        for (hash, calls) in self.ahead.fill(ahead) {
            let _ = self.calls.look_up(&hash, || calls);
        }
    }

    /// Unloads the images that were loaded ahead and that no session has taken.
    pub fn end_unclaimed(&self) {
        side::enter(Side::MAIN);
        self.ahead.end(&self.gpu.driver, &self.gpu.devices);
    }

    /// Unloads an image to which its session has no reference left.
    pub fn discard(&self, mut image: Image) {
        image.leave_charge();
        self.bury(Unloading::Image(image));
    }

    /// Whether the kernels of an image keep no state between launches on any device that it may be loaded on.
    pub fn keeps_nothing(&self, family: &Family, content: &Content) -> bool {
        let known = self.outlasting.known(content.hash());
        if known.is_some_and(|leaves| !leaves.variables) {
            return true;
        }
        family.keeps_nothing(&self.gpu.devices, &content[..content.len() - 1])
    }

    /// The variables of an image. Its content is analyzed once. Those of a long image are known only after [`Self::leaves`]
    /// has found that its kernels may write them.
    pub fn variables_of(&self, hash: &[u8; 32], content: &Content) -> Variables {
        let writes = || self.outlasting.known(hash).is_some_and(|one| one.variables);
        if content.len() > variables::LONG && !writes() {
            return None;
        }
        let devices = self.gpu.devices.iter();
        variables::find(
            &self.variables,
            hash,
            content,
            devices.map(|one| one.capability),
        )
    }

    /// The functions of the driver that an image may call on some device. Its content is analyzed once.
    pub fn calls(&self, hash: &[u8; 32], content: &Content) -> Calls {
        self.calls.look_up(hash, || {
            let archs: Vec<u32> = self.gpu.devices.iter().map(|one| one.capability).collect();
            cubin::calls(&content[..content.len() - 1], &archs)
        })
    }

    /// The image with its managed variables as the session's memory; `None` if it has none, or they cannot be placed there.
    pub fn managed_image(&self, content: &Content) -> Option<ManagedImage> {
        let mut archs = self.gpu.devices.iter().map(|one| one.capability);
        let arch = archs.next()?;
        let bytes = &content[..content.len() - 1];
        // A library is one object for all devices.
        let found = archs
            .all(|other| other == arch)
            .then(|| ManagedImage::of(bytes, arch));
        found.flatten().filter(|found| !found.variables.is_empty())
    }

    /// Stores code that was made here.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn store(&self, code: &[u8], sent: &Sent) -> Result<Content, CUresult> {
        let full = |_| CUDA_ERROR_OUT_OF_MEMORY;
        let file = sealed_memfd(c"mpsshim-image", code.len() as u64).map_err(full)?;
        let mut file = File::from(file);
        file.write_all(code).map_err(full)?;
        let hash: [u8; 32] = Sha256::digest(code).into();
        self.cache
            .receive(file.as_fd(), code.len() as u64, &hash, sent)
    }

    /// The findings about an image.
    pub fn findings(&self, content: &Content) -> Found {
        let (hash, leaves) = (content.hash(), self.leaves(content));
        let variables = self.variables.known(hash).flatten();
        Found {
            leaves,
            calls: self.calls.known(hash),
            variables: variables.filter(|_| leaves.variables),
        }
    }

    /// Records findings of the previous server about the image with this hash.
    pub fn note_findings(&self, hash: &[u8; 32], found: Found) {
        let _ = self.outlasting.look_up(hash, || found.leaves);
        if let Some(calls) = found.calls {
            let _ = self.calls.look_up(hash, || calls);
        }
        if let Some(variables) = found.variables {
            let _ = self.variables.look_up(hash, || Some(variables));
        }
    }

    /// Whether kernels of an image may have left addresses that are valid in their context alone. Takes no time; `true`
    /// if the image has not been analyzed.
    pub fn may_leave_addresses(&self, content: &Content) -> bool {
        let known = self.outlasting.known(content.hash());
        known.is_none_or(|leaves| leaves.addresses)
    }

    /// State of an image that is lost if it is reloaded elsewhere between two launches of its kernels. Its content is
    /// analyzed once.
    pub fn leaves(&self, content: &Content) -> Leaves {
        self.outlasting.look_up(content.hash(), || {
            let bytes = &content[..content.len() - 1];
            let devices = self.gpu.devices.iter();
            let of_each = devices.map(|device| cubin::leaves(bytes, device.capability));
            let leaves = of_each.fold(Leaves::default(), |all, one| Leaves {
                variables: all.variables || one.variables,
                addresses: all.addresses || one.addresses,
            });
            tracing::debug!(bytes = bytes.len(), ?leaves, "what an image leaves behind");
            leaves
        })
    }
}
