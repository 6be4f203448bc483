//! Instances without clients, kept loaded for the next client.
//!
//! A load waits for a quiescent point ([`crate::engine::threads::gate`]). With residents, a restarted program or
//! another worker of the same program finds its images loaded and does not wait. The next client must not see state of
//! earlier ones: an instance that keeps state between launches, or that was private, is retained only if the initial
//! contents of its variables can be restored ([`crate::engine::images::variables`]).

use crate::engine::base::side::{self, Side};
use crate::engine::gpu::footprint::footprint;
use crate::engine::images::family::Family;
use crate::engine::images::instances::Instance;
use crate::engine::images::{ImageStore, Unloading};
use crossbeam_channel::Receiver;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Maximum number of residents.
const MOST: usize = 1024;
/// Maximum number of instances queued for the retain-or-unload decision; any more are unloaded.
pub const MOST_ASSESSED: usize = 256;
/// All residents together may take this fraction (1/`PART`) of the smallest device's memory.
const PART: u64 = 256;

/// Multiple of the [`PART`] limit that residents may take together with evicted ones not yet unloaded by the driver.
const WITH_LEAVING: u64 = 2;

/// Loaded instances without clients, least recently used first.
#[derive(Debug, Default)]
pub struct Residents {
    kept: Mutex<Kept>,
    /// Number of instances queued for the retain-or-unload decision.
    assessed: AtomicUsize,
    /// Bytes of evicted instances that the driver has not unloaded yet; no client pays for them.
    leaving: Arc<AtomicU64>,
}

/// Bytes of an evicted instance, counted until the driver has unloaded it or a client takes it.
#[derive(Debug)]
pub struct Counted {
    bytes: u64,
    among: Arc<AtomicU64>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.among.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[derive(Debug, Default)]
struct Kept {
    instances: VecDeque<Resident>,
    bytes: u64,
}

#[derive(Debug)]
struct Resident {
    instance: Arc<Instance>,
    bytes: u64,
}

impl Kept {
    fn pop(&mut self) -> Option<Resident> {
        let first = self.instances.pop_front()?;
        self.bytes -= first.bytes;
        Some(first)
    }
}

impl Residents {
    /// Removes an instance from the residents because a client uses it.
    pub fn take(&self, instance: &Arc<Instance>) {
        let mut kept = self.kept.lock();
        let found = kept
            .instances
            .iter()
            .position(|one| Arc::ptr_eq(&one.instance, instance));
        if let Some(found) = found.and_then(|at| kept.instances.remove(at)) {
            kept.bytes -= found.bytes;
        }
    }

    /// Removes and returns the most recently used resident of a family.
    pub fn take_of(&self, family: &Family) -> Option<Arc<Instance>> {
        let mut kept = self.kept.lock();
        let of_family = |one: &Resident| one.instance.family() == Some(family);
        let found = kept.instances.iter().rposition(of_family)?;
        let found = kept.instances.remove(found)?;
        kept.bytes -= found.bytes;
        Some(found.instance)
    }
}

/// Body of the thread that makes the retain-or-unload decisions. Analyzing an image takes time, and its client
/// determines how much.
pub fn run(store: &ImageStore, left: &Receiver<Arc<Instance>>) {
    for instance in left {
        side::enter(instance.side);
        if let Some(refused) = store.keep_resident(instance) {
            store.unload(refused);
        }
        store.residents.assessed.fetch_sub(1, Ordering::AcqRel);
    }
}

impl ImageStore {
    /// Queues an instance without clients for the retain-or-unload decision. Returns it if it cannot be retained or the
    /// queue is full.
    pub fn assess(&self, instance: Arc<Instance>) -> Option<Arc<Instance>> {
        let residents = &self.residents;
        let most = self.most_resident();
        let may_stay = instance.family().is_some()
            && instance.content().len() as u64 <= most
            && (instance.is_open() || instance.may_be_renewed());
        if !may_stay || self.gpu.is_lost() {
            return Some(instance);
        }
        residents.assessed.fetch_add(1, Ordering::AcqRel);
        match self.assessor.try_send(instance) {
            Ok(()) => None,
            Err(refused) => {
                residents.assessed.fetch_sub(1, Ordering::AcqRel);
                Some(refused.into_inner())
            }
        }
    }

    /// Whether any retain-or-unload decision is pending.
    pub fn assesses(&self) -> bool {
        self.residents.assessed.load(Ordering::Acquire) > 0
    }

    /// Bytes that all residents together may take.
    fn most_resident(&self) -> u64 {
        let parts = self.gpu.devices.iter().map(|device| device.memory / PART);
        parts.min().unwrap_or(0)
    }

    /// Retains an instance without clients. Returns it if it is to be unloaded.
    fn keep_resident(&self, instance: Arc<Instance>) -> Option<Arc<Instance>> {
        let most = self.most_resident();
        let bytes = match self.resident_bytes(&instance) {
            Some(bytes) if bytes <= most && !self.gpu.is_lost() => bytes,
            _ => return Some(instance),
        };
        let mut kept = self.residents.kept.lock();
        let leaving = self.residents.leaving.load(Ordering::Acquire);
        if kept.bytes + leaving + bytes > WITH_LEAVING * most {
            return Some(instance);
        }
        instance.forgive();
        self.families.add(&instance);
        tracing::debug!(bytes, "an image: kept for the next client");
        kept.bytes += bytes;
        kept.instances.push_back(Resident { instance, bytes });
        let mut over = Vec::new();
        while kept.bytes > most || kept.instances.len() > MOST {
            over.extend(kept.pop());
        }
        drop(kept);
        self.give_up(over);
        None
    }

    /// Evicts all residents, which frees their memory at the next quiescent point.
    pub fn give_up_residents(&self) {
        let mut kept = self.residents.kept.lock();
        let over: Vec<_> = std::iter::from_fn(|| kept.pop()).collect();
        drop(kept);
        self.give_up(over);
    }

    /// Evicts the residents of a side. Returns whether there were any.
    pub fn give_up_residents_of(&self, side: Side) -> bool {
        let mut kept = self.residents.kept.lock();
        let (over, stay) = std::mem::take(&mut kept.instances)
            .into_iter()
            .partition(|one: &Resident| one.instance.side == side);
        kept.instances = stay;
        kept.bytes -= over.iter().map(|one: &Resident| one.bytes).sum::<u64>();
        drop(kept);
        let any = !over.is_empty();
        self.give_up(over.into());
        any
    }

    fn give_up(&self, residents: Vec<Resident>) {
        for Resident { instance, bytes } in residents {
            let among = self.residents.leaving.clone();
            among.fetch_add(bytes, Ordering::AcqRel);
            instance.count(Counted { bytes, among });
            self.unload(instance);
        }
    }

    fn unload(&self, instance: Arc<Instance>) {
        // If a client has taken it meanwhile, that client releases it later.
        if let Some(last) = Arc::into_inner(instance) {
            self.bury(Unloading::Instance(last));
        }
    }

    /// Bytes that an instance takes on a device or in the server's memory, whichever is more; `None` if it cannot be
    /// reused.
    fn resident_bytes(&self, instance: &Instance) -> Option<u64> {
        let (family, content) = (instance.family()?, instance.content());
        let is_as_new = || instance.is_open() && self.families.keeps_nothing(self, family, content);
        if !is_as_new() && !instance.renew(self) {
            return None;
        }
        let bytes = &content[..content.len() - 1];
        let of_device = footprint(bytes, self.gpu.devices[instance.device].capability)?;
        Some(of_device.max(bytes.len() as u64))
    }
}
