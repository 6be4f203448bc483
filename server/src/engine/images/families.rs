//! Images that are the same, loaded the same way, and which of their instances a client that comes may have.
//!
//! Where kernels keep nothing between launches ([`crate::engine::gpu::cubin`]) clients have one instance together. Where they keep
//! something, or clients ask for variables, an instance is one client's own; once it was left and its variables hold again
//! what they held at first ([`crate::engine::images::variables`]), it is the next client's.

use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::{SIDES, Side};
use crate::engine::images::ImageStore;
use crate::engine::images::contents::Content;
use crate::engine::images::instances::{Instance, let_go};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Contents that are the same, loaded the same way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Family {
    /// SHA-256 of the content.
    pub hash: [u8; 32],
    /// The device of a module, `None` for a library.
    pub device: Option<Ordinal>,
    /// The side that it is loaded on.
    pub side: Side,
    /// Options, as the message had them.
    pub options: Vec<u8>,
}

#[derive(Debug, Default)]
struct Members {
    instances: Vec<Weak<Instance>>,
    keeps_nothing: Option<bool>,
    /// A client asked for a variable: others that load the same are likely to.
    asked: bool,
}

/// A longer image is given to several clients together even where each is likely to want its own, bytes: it is large on the
/// device too, and many of its clients ask for nothing.
const LONGEST_APART: usize = 1 << 20;

/// All instances that clients may have together.
#[derive(Debug, Default)]
pub struct Families {
    known: Mutex<HashMap<Family, Members>>,
    /// Instances in the driver, of each side, whoever has them.
    alive: [AtomicUsize; SIDES],
}

impl Families {
    /// How many instances of a side there are in the driver.
    pub fn alive(&self, side: Side) -> usize {
        self.alive[side.index()].load(Ordering::Acquire)
    }

    /// An instance that a client may have, if there is one. Only now, when a second client wants it, the content is looked
    /// into.
    pub fn another(&self, store: &ImageStore, family: &Family) -> Option<Arc<Instance>> {
        self.known.lock().retain(|_, members| {
            members.instances.retain(|one| one.strong_count() > 0);
            !members.instances.is_empty()
        });
        let found = self.offer(store, family)?;
        store.residents.take(&found);
        Some(found)
    }

    /// The same, for a client that is yet to take it.
    pub fn offer(&self, store: &ImageStore, family: &Family) -> Option<Arc<Instance>> {
        if self.is_asked(family)
            && let Some(own) = store.residents.take_of(family)
        {
            if own.content().len() <= LONGEST_APART {
                own.close();
            }
            return Some(own);
        }
        let mut open = self.all(store, family).into_iter();
        let first = open.next();
        open.for_each(|one| let_go(store, one));
        let first = first?;
        if self.keeps_nothing(store, family, first.content()) {
            return Some(first);
        }
        let_go(store, first);
        // What is resident has no client.
        store.residents.take_of(family)
    }

    /// A client asks for a variable of it.
    pub fn note_asked(&self, family: &Family) {
        if let Some(members) = self.known.lock().get_mut(family) {
            members.asked = true;
        }
    }

    fn is_asked(&self, family: &Family) -> bool {
        let known = self.known.lock();
        known.get(family).is_some_and(|members| members.asked)
    }

    /// Counts an instance in the driver.
    pub fn count(&self, side: Side) {
        self.alive[side.index()].fetch_add(1, Ordering::AcqRel);
    }

    /// The driver has unloaded one.
    pub fn discount(&self, side: Side) {
        self.alive[side.index()].fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether nothing says that the kernels of a family keep something.
    pub fn may_keep_nothing(&self, family: &Family) -> bool {
        let known = self
            .known
            .lock()
            .get(family)
            .and_then(|members| members.keeps_nothing);
        known.unwrap_or(true)
    }

    /// Whether it was found that the kernels of a family keep nothing.
    pub fn is_known_to_keep_nothing(&self, family: &Family) -> bool {
        let known = self.known.lock();
        let members = known.get(family);
        members.is_some_and(|members| members.keeps_nothing == Some(true))
    }

    /// Whether the kernels of a family keep nothing between launches. The content is looked into once.
    pub fn keeps_nothing(&self, store: &ImageStore, family: &Family, content: &Content) -> bool {
        let members = self
            .known
            .lock()
            .get(family)
            .map(|known| known.keeps_nothing);
        if let Some(Some(known)) = members {
            return known;
        }
        let found = store.keeps_nothing(family, content);
        tracing::debug!(
            bytes = content.len(),
            "what an image keeps was looked into: {}",
            if found { "shared" } else { "not shared" }
        );
        if let Some(members) = self.known.lock().get_mut(family) {
            members.keeps_nothing = Some(found);
        }
        found
    }

    /// The open instances of a family. Whoever does not keep one lets go of it.
    pub fn all(&self, store: &ImageStore, family: &Family) -> Vec<Arc<Instance>> {
        let alive: Vec<_> = {
            let families = self.known.lock();
            let members = families.get(family).map(|members| &members.instances[..]);
            let members = members.unwrap_or(&[]).iter();
            members.filter_map(Weak::upgrade).collect()
        };
        let (open, closed): (Vec<_>, Vec<_>) = alive.into_iter().partition(|one| one.is_open());
        closed.into_iter().for_each(|one| let_go(store, one));
        open
    }

    /// Those who come may have it.
    pub fn add(&self, instance: &Arc<Instance>) {
        let Some(family) = instance.family() else {
            return;
        };
        let mut families = self.known.lock();
        let members = families.entry(family.clone()).or_default();
        let one = Arc::downgrade(instance);
        if !members.instances.iter().any(|known| known.ptr_eq(&one)) {
            members.instances.push(one);
        }
    }
}
