//! Groups identical images loaded with identical options and picks the instance that a new client reuses.
//!
//! If the kernels keep no state between launches ([`crate::engine::gpu::cubin`]), clients share one instance. If they
//! keep state, or if clients ask for variables, each client has a private instance; when it leaves, and the initial
//! contents of the variables are restored ([`crate::engine::images::variables`]), the next client reuses the instance.

use crate::engine::base::side::{SIDES, Side};
use crate::engine::images::ImageStore;
use crate::engine::images::contents::Content;
use crate::engine::images::family::Family;
use crate::engine::images::instances::{Instance, let_go};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

#[derive(Debug, Default)]
struct Members {
    instances: Vec<Weak<Instance>>,
    keeps_nothing: Option<bool>,
    /// A client asked for a variable, so other clients of the image are likely to.
    asked: bool,
}

/// Size limit for private instances handed out in advance, bytes. A larger image is shared even if its clients are
/// likely to ask for variables: it is large on the device too, and many of its clients never ask.
const LONGEST_APART: usize = 1 << 20;

/// All instances that clients may share.
#[derive(Debug, Default)]
pub struct Families {
    known: Mutex<HashMap<Family, Members>>,
    /// Instances loaded in the driver by side, private ones included.
    alive: [AtomicUsize; SIDES],
}

impl Families {
    /// Number of instances of a side loaded in the driver.
    pub fn alive(&self, side: Side) -> usize {
        self.alive[side.index()].load(Ordering::Acquire)
    }

    /// An instance for a new client, if there is one. The content is analyzed only here, when a second client wants it.
    pub fn another(&self, store: &ImageStore, family: &Family) -> Option<Arc<Instance>> {
        self.known.lock().retain(|_, members| {
            members.instances.retain(|one| one.strong_count() > 0);
            !members.instances.is_empty()
        });
        let found = self.offer(store, family)?;
        store.residents.take(&found);
        Some(found)
    }

    /// Like [`Families::another`], for a client that has yet to load the image.
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
        // Residents have no client.
        store.residents.take_of(family)
    }

    /// Notes that a client asked for a variable of an image.
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

    /// Uncounts an instance that the driver has unloaded.
    pub fn discount(&self, side: Side) {
        self.alive[side.index()].fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether no analysis has found that the kernels of a family keep state.
    pub fn may_keep_nothing(&self, family: &Family) -> bool {
        let known = self
            .known
            .lock()
            .get(family)
            .and_then(|members| members.keeps_nothing);
        known.unwrap_or(true)
    }

    /// Whether an analysis has found that the kernels of a family keep no state.
    pub fn is_known_to_keep_nothing(&self, family: &Family) -> bool {
        let known = self.known.lock();
        let members = known.get(family);
        members.is_some_and(|members| members.keeps_nothing == Some(true))
    }

    /// Whether the kernels of a family keep no state between launches. The content is analyzed once.
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

    /// The open instances of a family. The caller must pass those it does not keep to [`let_go`].
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

    /// Registers an instance so that new clients can share it.
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
