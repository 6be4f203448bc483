//! Annexes that belong to one session each.
//!
//! A context has one heap for `malloc` in kernels, whose size is fixed with the first kernel that allocates, and which
//! keeps its allocations until the context is destroyed. A session that needs such a heap therefore owns an annex
//! ([`crate::engine::base::side`]) until it ends; the annex is then closed.

use crate::engine::base::side::{SIDES, Side};
use parking_lot::Mutex;

/// Most annexes that belong to sessions at a time; the others stay for sessions that move away from long kernels.
pub const MOST_OWNED: usize = SIDES - 3;

/// State of an annex that belongs to no session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Annex {
    /// It has no context and no objects.
    Free,
    /// No session uses it; its context can be closed.
    Closable,
    /// Sessions use it.
    Used,
}

/// Answer to a session that asks for an annex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The annex is the session's.
    Granted(Side),
    /// An annex is about to be closed and free.
    Soon,
    /// Other sessions own or use all of them.
    Taken,
}

#[derive(Clone, Copy, Debug)]
struct Owner {
    session: u64,
    ended: bool,
}

/// The owners of the annexes.
#[derive(Debug, Default)]
pub struct Owners(Mutex<[Option<Owner>; SIDES]>);

impl Owners {
    /// Assigns a free annex to a session, or the annex that it already owns. `state`: of an annex without an owner.
    pub fn claim(&self, session: u64, state: impl Fn(Side) -> Annex) -> Claim {
        let mut owners = self.0.lock();
        let annexes = || Side::ALL.into_iter().filter(|side| *side != Side::MAIN);
        let owner = |side: &Side| owners[side.index()];
        let own = annexes().find(|side| owner(side).is_some_and(|one| one.session == session));
        if let Some(own) = own {
            return Claim::Granted(own);
        }
        let owned = annexes().filter_map(|side| owner(&side));
        let ending = owned.clone().any(|one| one.ended);
        if owned.count() >= MOST_OWNED {
            return if ending { Claim::Soon } else { Claim::Taken };
        }
        let mut closable = false;
        // From the last: sessions that move away from long kernels begin with the first.
        for side in annexes().rev().filter(|side| owner(side).is_none()) {
            match state(side) {
                Annex::Free => {
                    let ended = false;
                    owners[side.index()] = Some(Owner { session, ended });
                    return Claim::Granted(side);
                }
                Annex::Closable => closable = true,
                Annex::Used => {}
            }
        }
        match ending || closable {
            true => Claim::Soon,
            false => Claim::Taken,
        }
    }

    /// Whether a session may use a side: it owns it, or no session does.
    pub fn may_use(&self, side: Side, session: u64) -> bool {
        self.0.lock()[side.index()].is_none_or(|owner| owner.session == session)
    }

    /// Whether a side belongs to any session.
    pub fn is_owned(&self, side: Side) -> bool {
        self.0.lock()[side.index()].is_some()
    }

    /// Whether a side belongs to a session that has ended, or does not need it any more.
    pub fn is_left(&self, side: Side) -> bool {
        self.0.lock()[side.index()].is_some_and(|owner| owner.ended)
    }

    /// Notes that a session has ended, or does not need its annex. Returns the annex.
    pub fn leave(&self, session: u64) -> Option<Side> {
        let mut owners = self.0.lock();
        let of_session = |side: &Side| owners[side.index()].is_some_and(|o| o.session == session);
        let side = Side::ALL.into_iter().find(of_session)?;
        owners[side.index()] = Some(Owner {
            session,
            ended: true,
        });
        Some(side)
    }

    /// Makes a side available again, once its context has been closed.
    pub fn release(&self, side: Side) {
        self.0.lock()[side.index()] = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(_: Side) -> Annex {
        Annex::Free
    }

    #[test]
    fn each_session_gets_an_annex_of_its_own_until_they_are_taken() {
        let owners = Owners::default();
        let mut sides = Vec::new();
        for session in 0..MOST_OWNED as u64 {
            let Claim::Granted(side) = owners.claim(session, free) else {
                panic!("none for {session}");
            };
            assert!(side != Side::MAIN && !sides.contains(&side));
            assert_eq!(owners.claim(session, free), Claim::Granted(side), "again");
            assert!(owners.may_use(side, session) && !owners.may_use(side, 99));
            sides.push(side);
        }
        assert_eq!(owners.claim(99, free), Claim::Taken);
        assert!(owners.may_use(Side::MAIN, 99) && owners.may_use(Side::ALL[1], 99));
    }

    #[test]
    fn an_annex_that_is_left_is_free_once_it_is_closed() {
        let owners = Owners::default();
        for session in 0..MOST_OWNED as u64 {
            assert_ne!(owners.claim(session, free), Claim::Taken);
        }
        let side = owners.leave(1).expect("its annex");
        assert!(owners.is_left(side) && owners.is_owned(side));
        assert_eq!(owners.claim(99, free), Claim::Soon);
        owners.release(side);
        assert_eq!(owners.claim(99, free), Claim::Granted(side));
        assert_eq!(owners.leave(1), None, "it owns none any more");
    }

    #[test]
    fn annexes_in_use_are_not_assigned() {
        let owners = Owners::default();
        assert_eq!(owners.claim(1, |_| Annex::Used), Claim::Taken);
        let one = |side: Side| match side == Side::ALL[2] {
            true => Annex::Closable,
            false => Annex::Used,
        };
        assert_eq!(owners.claim(1, one), Claim::Soon);
        assert!(!owners.is_owned(Side::ALL[2]));
    }
}
