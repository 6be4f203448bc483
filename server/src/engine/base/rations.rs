//! What a server has a fixed number of, given out so that nobody gets the last of it: what a user, or a session, may have
//! follows from what is left over.

use mpsshim_api::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use nix::sys::resource::{Resource, getrlimit};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Mappings that a process may have where nobody says, as the kernel's default.
const USUAL_MAPPINGS: usize = 65_530;
/// What a process may have at least of descriptors and mappings for its clients.
const FEWEST: usize = 64;

/// How much one may have: what is left over, divided by this.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// All of a user's sessions.
    pub user: usize,
    /// One session; more than a user's, so that its other sessions get some.
    pub session: usize,
}

impl Part {
    /// A user gets half of all at most, and a session a third.
    pub const USUAL: Part = Part {
        user: 1,
        session: 2,
    };
}

/// Things of one kind.
#[derive(Debug)]
pub struct Rations {
    most: usize,
    given: Mutex<Given>,
}

#[derive(Debug, Default)]
struct Given {
    all: usize,
    users: BTreeMap<u32, usize>,
}

/// Whose things they are.
#[derive(Debug, Clone)]
pub struct Holder {
    uid: u32,
    count: Arc<AtomicUsize>,
}

impl Holder {
    /// A session of this user.
    pub fn new(uid: u32) -> Holder {
        Holder {
            uid,
            count: Arc::default(),
        }
    }
}

/// One thing that was given out; it is there for others when this is dropped.
#[derive(Debug)]
pub struct Ration {
    of: Arc<Rations>,
    holder: Holder,
}

impl Rations {
    /// So many.
    pub fn new(most: usize) -> Arc<Rations> {
        Arc::new(Rations {
            most,
            given: Mutex::default(),
        })
    }

    /// Memory files that clients may have this process hold, each with a descriptor and a mapping: half of its descriptors,
    /// and a quarter of its mappings, since one splits the reservation around it.
    pub fn of_files() -> Arc<Rations> {
        let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(usize::MAX, |(now, _)| {
            usize::try_from(now).unwrap_or(usize::MAX)
        });
        let mappings = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        let mappings = mappings
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(USUAL_MAPPINGS);
        Rations::new((descriptors / 2).min(mappings / 4).max(FEWEST))
    }

    /// One more for a session.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` when that is too much.
    pub fn take(self: &Arc<Self>, holder: &Holder, part: Part) -> Result<Ration, CUresult> {
        let mut given = self.given.lock();
        let left = self.most - given.all;
        let of_user = given.users.get(&holder.uid).copied().unwrap_or(0);
        let of_session = holder.count.load(Ordering::Relaxed);
        if of_user >= left.div_ceil(part.user) || of_session >= left.div_ceil(part.session) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        given.all += 1;
        *given.users.entry(holder.uid).or_default() += 1;
        holder.count.fetch_add(1, Ordering::Relaxed);
        Ok(Ration {
            of: self.clone(),
            holder: holder.clone(),
        })
    }
}

impl Ration {
    /// Another session of the same user has it from now on.
    pub fn pass_to(&mut self, holder: &Holder) {
        debug_assert_eq!(self.holder.uid, holder.uid);
        self.holder.count.fetch_sub(1, Ordering::Relaxed);
        holder.count.fetch_add(1, Ordering::Relaxed);
        self.holder = holder.clone();
    }
}

impl Drop for Ration {
    fn drop(&mut self) {
        let mut given = self.of.given.lock();
        given.all -= 1;
        if let Some(of_user) = given.users.get_mut(&self.holder.uid) {
            *of_user -= 1;
            if *of_user == 0 {
                given.users.remove(&self.holder.uid);
            }
        }
        self.holder.count.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(of: &Arc<Rations>, holder: &Holder) -> Vec<Ration> {
        std::iter::from_fn(|| of.take(holder, Part::USUAL).ok()).collect()
    }

    #[test]
    fn nobody_gets_the_last() {
        let rations = Rations::new(900);
        let (one, other, stranger) = (Holder::new(1), Holder::new(1), Holder::new(2));
        let first = all(&rations, &one);
        assert_eq!(first.len(), 300);
        let second = all(&rations, &other);
        assert_eq!(first.len() + second.len(), 450);
        assert_eq!(all(&rations, &Holder::new(1)).len(), 0);
        assert_eq!(all(&rations, &stranger).len(), 150);
        drop(first);
        assert!(all(&rations, &one).len() >= 250);
    }

    #[test]
    fn what_is_passed_on_counts_for_the_other() {
        let rations = Rations::new(90);
        let (one, other) = (Holder::new(1), Holder::new(1));
        let mut first = all(&rations, &one);
        assert_eq!(first.len(), 30);
        first.iter_mut().for_each(|ration| ration.pass_to(&other));
        assert!(rations.take(&other, Part::USUAL).is_err());
        assert_eq!(all(&rations, &one).len(), 15);
        drop(first);
        assert_eq!(all(&rations, &other).len(), 30);
    }
}
