//! Shares out the server's fixed-size resources so that no user or session can exhaust them: the limits of a user and
//! of a session depend on the remaining number.

use mpsshim_api::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use nix::sys::resource::{Resource, getrlimit};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The kernel's default limit of mappings per process, used if the actual limit is unknown.
const USUAL_MAPPINGS: usize = 65_530;
/// Minimum number of descriptors and mappings for clients.
const FEWEST: usize = 64;

/// Limit of a holder: the remaining number divided by this.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Divisor for all sessions of a user.
    pub user: usize,
    /// Divisor for one session; greater than the user's, so that the user's other sessions get some.
    pub session: usize,
}

impl Part {
    /// At most half of all for a user and a third for a session.
    pub const USUAL: Part = Part {
        user: 1,
        session: 2,
    };
}

/// A resource of which there is a fixed number.
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

/// The session that rations belong to, and its user.
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

/// One unit of a resource, returned when this is dropped.
#[derive(Debug)]
pub struct Ration {
    of: Arc<Rations>,
    holder: Holder,
}

impl Rations {
    /// A resource of `most` units.
    pub fn new(most: usize) -> Arc<Rations> {
        Arc::new(Rations {
            most,
            given: Mutex::default(),
        })
    }

    /// Memory files held for clients, each with a descriptor and a mapping: half of the process's descriptors, and a
    /// quarter of its mappings, since each one splits the reservation around it.
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

    /// Takes one unit for a session.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` beyond the share of the session or its user.
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
    /// Transfers it to another session of the same user.
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
