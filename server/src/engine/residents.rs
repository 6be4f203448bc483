//! Instances of images that no client has at the moment, kept loaded for the next one that wants them.
//!
//! A load waits until nothing is in flight ([`super::gate`]). A program that is started again, or a further worker of the
//! same program, finds its images loaded and waits for nobody. What kernels keep between launches, and what a client has
//! had for itself, is not kept: the next one must find it as new.

use super::Shared;
use super::footprint::footprint;
use super::instances::Instance;
use super::side::{self, Side};
use super::undertaker::Buried;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Instances at most.
const MOST: usize = 1024;
/// The part of the smallest device's memory that they may take, together.
const PART: u64 = 256;

/// Loaded instances without clients, the one that was left first at the front.
#[derive(Debug, Default)]
pub struct Residents(Mutex<Kept>);

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
    fn pop(&mut self) -> Option<Arc<Instance>> {
        let first = self.instances.pop_front()?;
        self.bytes -= first.bytes;
        Some(first.instance)
    }
}

impl Residents {
    /// A client has an instance: it is kept no longer.
    pub fn take(&self, instance: &Arc<Instance>) {
        let mut kept = self.0.lock();
        let found = kept
            .instances
            .iter()
            .position(|one| Arc::ptr_eq(&one.instance, instance));
        if let Some(found) = found.and_then(|at| kept.instances.remove(at)) {
            kept.bytes -= found.bytes;
        }
    }
}

impl Shared {
    /// Keeps an instance that nobody has; gives back one that is to be unloaded.
    pub fn keep_resident(&self, instance: Arc<Instance>) -> Option<Arc<Instance>> {
        let most = self.devices.iter().map(|device| device.memory / PART).min();
        let (bytes, most) = match (self.resident_bytes(&instance), most) {
            (Some(bytes), Some(most)) if bytes <= most && !self.is_lost() => (bytes, most),
            _ => return Some(instance),
        };
        let mut kept = self.residents.0.lock();
        kept.bytes += bytes;
        kept.instances.push_back(Resident { instance, bytes });
        let mut over = Vec::new();
        while kept.bytes > most || kept.instances.len() > MOST {
            over.extend(kept.pop());
        }
        drop(kept);
        self.unload(over);
        None
    }

    /// Gives up all of them, for others to have the memory when next nothing is in flight.
    pub fn give_up_residents(&self) {
        let mut kept = self.residents.0.lock();
        let over: Vec<_> = std::iter::from_fn(|| kept.pop()).collect();
        drop(kept);
        self.unload(over);
    }

    /// Gives up those of a side; whether there were any.
    pub fn give_up_residents_of(&self, side: Side) -> bool {
        let mut kept = self.residents.0.lock();
        let mut over = Vec::new();
        kept.instances.retain(|one| {
            let stays = one.instance.side != side;
            if !stays {
                over.push((one.instance.clone(), one.bytes));
            }
            stays
        });
        kept.bytes -= over.iter().map(|(_, bytes)| bytes).sum::<u64>();
        drop(kept);
        let any = !over.is_empty();
        self.unload(over.into_iter().map(|(instance, _)| instance).collect());
        any
    }

    fn unload(&self, instances: Vec<Arc<Instance>>) {
        for instance in instances {
            // A client may have found it meanwhile, and leaves it later.
            if let Some(last) = Arc::into_inner(instance) {
                side::on(last.side, || self.bury(Buried::Instance(last)));
            }
        }
    }

    /// Bytes that an instance takes, on a device or in the server's own memory; `None` for one that cannot be had again.
    fn resident_bytes(&self, instance: &Instance) -> Option<u64> {
        let (family, content) = instance.to_share()?;
        if !self.families.keeps_nothing(self, family, content) {
            return None;
        }
        let bytes = &content[..content.len() - 1];
        let of_device = footprint(bytes, self.devices[instance.device].capability)?;
        Some(of_device.max(bytes.len() as u64))
    }
}
