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
    /// Whether a session's limit depends on the rest of its user's share, so that the user's sessions cannot use it up.
    pub nested: bool,
}

impl Part {
    /// At most half of all for a user and a third for a session.
    pub const USUAL: Part = Part {
        user: 1,
        session: 2,
        nested: false,
    };

    /// At most half of all for a user and a quarter for a session; something is always left for the user's next one.
    pub const NESTED: Part = Part {
        nested: true,
        ..Part::USUAL
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
        match self.is_due(&given, holder, part) {
            true => Ok(self.give(&mut given, holder)),
            false => Err(CUDA_ERROR_OUT_OF_MEMORY),
        }
    }

    /// Gives a session one unit beyond any share: it has been using it all along.
    pub fn take_over(self: &Arc<Self>, holder: &Holder) -> Ration {
        self.give(&mut self.given.lock(), holder)
    }

    /// Whether [`Rations::take`] would give a unit now.
    pub fn has_room(&self, holder: &Holder, part: Part) -> bool {
        self.is_due(&self.given.lock(), holder, part)
    }

    fn is_due(&self, given: &Given, holder: &Holder, part: Part) -> bool {
        let left = self.most.saturating_sub(given.all);
        let of_user = given.users.get(&holder.uid).copied().unwrap_or(0);
        let of_session = holder.count.load(Ordering::Relaxed);
        let for_user = left.div_ceil(part.user);
        let for_session = match part.nested {
            true => for_user.saturating_sub(of_user),
            false => left,
        };
        of_user < for_user && of_session < for_session.div_ceil(part.session)
    }

    fn give(self: &Arc<Self>, given: &mut Given, holder: &Holder) -> Ration {
        given.all += 1;
        *given.users.entry(holder.uid).or_default() += 1;
        holder.count.fetch_add(1, Ordering::Relaxed);
        Ration {
            of: self.clone(),
            holder: holder.clone(),
        }
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
    fn the_next_session_of_a_user_gets_some_too() {
        let rations = Rations::new(800);
        let all = |holder: &Holder| {
            let each = std::iter::from_fn(|| rations.take(holder, Part::NESTED).ok());
            each.collect::<Vec<Ration>>()
        };
        let first = Holder::new(1);
        let given: Vec<Vec<Ration>> = [first.clone(), Holder::new(1), Holder::new(1)]
            .iter()
            .map(all)
            .collect();
        let counts: Vec<usize> = given.iter().map(Vec::len).collect();
        assert_eq!(counts, [200, 100, 50]);
        assert_eq!(all(&Holder::new(2)).len(), 113);
        assert!(!rations.has_room(&first, Part::NESTED));
        // A unit of an earlier server.
        let more = rations.take_over(&first);
        drop(given);
        assert!(rations.has_room(&first, Part::NESTED));
        drop(more);
        assert_eq!(all(&first).len(), 200);
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
