//! Pieces that the host uses again after the same number of launches each time, as the edges of a domain that an MPI rank
//! exchanges after each step: a wait can fetch them along, before they are used.

use std::collections::BTreeMap;
use std::ops::Range;

/// Pieces that are fetched along at most, each with a place of its own in the memory that they are fetched to.
pub const SLOTS: usize = 16;
/// Pieces that are watched at most.
const WATCHED: usize = 64;
/// Longest interval, in launches.
const LONGEST: u64 = 8;
/// How often a piece must be used after the same interval before it is fetched along.
const SURE: u32 = 3;
/// A piece that was fetched along is accessible, so that its use is not seen. Each time in this number it is not fetched, and
/// must fault.
const PROBE: u32 = 64;

/// Start of a region, and a piece of it.
pub type Piece = (u64, usize);

/// Pages of a piece.
pub type Pages = Range<u64>;

/// When the host uses a piece.
#[derive(Debug)]
struct Habit {
    /// Launches of the process when it was last used.
    last: u64,
    /// Launches from use to use.
    interval: u64,
    /// Uses after this interval, one after the other.
    uses: u32,
    /// The pages that the host uses, and those between them.
    pages: Pages,
    /// The host writes to it.
    written: bool,
    /// Its place, once it is fetched along.
    slot: Option<usize>,
}

/// A piece that the host is expected to use next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Due {
    pub piece: Piece,
    pub pages: Pages,
    pub slot: usize,
    /// The host will write to it too.
    pub written: bool,
}

/// The pieces that are watched.
#[derive(Debug)]
pub struct Habits {
    known: BTreeMap<Piece, Habit>,
    taken: [bool; SLOTS],
}

impl Habits {
    /// Without pieces.
    pub const fn new() -> Habits {
        Habits {
            known: BTreeMap::new(),
            taken: [false; SLOTS],
        }
    }

    /// Whether pieces are fetched along.
    pub fn any(&self) -> bool {
        self.taken.contains(&true)
    }

    /// The host uses a page of a piece, after this number of launches of the process.
    pub fn used(&mut self, piece: Piece, page: u64, write: bool, launches: u64) {
        if let Some(habit) = self.known.get_mut(&piece) {
            let interval = launches - habit.last;
            if interval == 0 || interval == habit.interval {
                habit.written |= write;
                habit.pages.start = habit.pages.start.min(page);
                habit.pages.end = habit.pages.end.max(page + 1);
            }
            if interval == 0 {
                return;
            }
            if interval == habit.interval {
                habit.uses += 1;
            } else {
                (habit.interval, habit.uses) = (interval, 0);
                (habit.pages, habit.written) = (page..page + 1, write);
                free(&mut self.taken, &mut habit.slot);
            }
            habit.last = launches;
            if habit.uses >= SURE && interval <= LONGEST && habit.slot.is_none() {
                habit.slot = self.taken.iter().position(|taken| !taken);
                if let Some(slot) = habit.slot {
                    self.taken[slot] = true;
                }
            }
            return;
        }
        if self.known.len() == WATCHED {
            self.forget(|_, habit| habit.last + LONGEST < launches);
        }
        if self.known.len() < WATCHED {
            let habit = Habit {
                last: launches,
                interval: 0,
                uses: 0,
                pages: page..page + 1,
                written: write,
                slot: None,
            };
            self.known.insert(piece, habit);
        }
    }

    /// The pieces to fetch along now.
    pub fn due(&mut self, launches: u64) -> Vec<Due> {
        let mut due = Vec::new();
        for (piece, habit) in &mut self.known {
            let Some(slot) = habit.slot else {
                continue;
            };
            let since = launches - habit.last;
            if since > habit.interval {
                // It was not used when that was expected.
                habit.uses = 0;
                free(&mut self.taken, &mut habit.slot);
            } else if since == habit.interval && habit.uses % PROBE != PROBE - 1 {
                due.push(Due {
                    piece: *piece,
                    pages: habit.pages.clone(),
                    slot,
                    written: habit.written,
                });
            }
        }
        due
    }

    /// A piece was fetched along, and counts as used.
    pub fn fetched(&mut self, piece: Piece, launches: u64) {
        if let Some(habit) = self.known.get_mut(&piece) {
            habit.last = launches;
            habit.uses += 1;
        }
    }

    /// A piece is not watched any more.
    pub fn drop_piece(&mut self, piece: Piece) {
        self.forget(|other, _| *other == piece);
    }

    /// The region that starts there has ended, or its content is new.
    pub fn drop_region(&mut self, start: u64) {
        self.forget(|piece, _| piece.0 == start);
    }

    fn forget(&mut self, which: impl Fn(&Piece, &Habit) -> bool) {
        let taken = &mut self.taken;
        self.known.retain(|piece, habit| {
            let goes = which(piece, habit);
            if goes {
                free(taken, &mut habit.slot);
            }
            !goes
        });
    }
}

fn free(taken: &mut [bool; SLOTS], slot: &mut Option<usize>) {
    if let Some(slot) = slot.take() {
        taken[slot] = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: Piece = (0x2cc0_0000_0000, 3);

    fn due(habits: &mut Habits, launches: u64) -> Vec<Piece> {
        let due = habits.due(launches).into_iter();
        due.map(|due| due.piece).collect()
    }

    /// A piece that was used after every second launch until this one, at least.
    fn steady(habits: &mut Habits, piece: Piece) -> u64 {
        let last = 10 + 2 * (u64::from(SURE) + 1);
        for launches in (10..=last).step_by(2) {
            habits.used(piece, 5, false, launches);
        }
        last
    }

    #[test]
    fn a_piece_that_is_used_regularly_is_due_at_its_next_use() {
        let mut habits = Habits::new();
        let last = steady(&mut habits, PIECE);
        assert!(habits.any());
        assert_eq!(due(&mut habits, last), []);
        assert_eq!(due(&mut habits, last + 1), []);
        assert_eq!(due(&mut habits, last + 2), [PIECE]);
        habits.fetched(PIECE, last + 2);
        assert_eq!(due(&mut habits, last + 3), []);
        assert_eq!(due(&mut habits, last + 4), [PIECE]);
    }

    #[test]
    fn it_is_not_when_its_interval_changes_or_no_use_comes() {
        let mut habits = Habits::new();
        let last = steady(&mut habits, PIECE);
        habits.used(PIECE, 5, false, last + 1);
        assert!(!habits.any());
        assert_eq!(due(&mut habits, last + 2), []);

        let mut habits = Habits::new();
        let last = steady(&mut habits, PIECE);
        assert_eq!(due(&mut habits, last + 3), [], "no use came at + 2");
        assert!(!habits.any());
    }

    #[test]
    fn uses_too_far_apart_are_none() {
        let mut habits = Habits::new();
        for round in 0..10 {
            habits.used(PIECE, 5, false, round * (LONGEST + 1));
        }
        assert!(!habits.any());
    }

    #[test]
    fn whether_it_is_still_used_is_seen_now_and_then() {
        let mut habits = Habits::new();
        let mut launches = steady(&mut habits, PIECE);
        let mut fetched = 0;
        loop {
            launches += 2;
            if due(&mut habits, launches).is_empty() {
                break;
            }
            habits.fetched(PIECE, launches);
            fetched += 1;
        }
        assert!(fetched < PROBE);
        // The fault of this time.
        habits.used(PIECE, 5, false, launches);
        assert_eq!(due(&mut habits, launches + 2), [PIECE]);
        assert!(habits.any());
    }

    #[test]
    fn a_write_in_the_same_round_is_part_of_the_habit() {
        let mut habits = Habits::new();
        let last = steady(&mut habits, PIECE);
        assert!(!habits.due(last + 2)[0].written);
        habits.used(PIECE, 5, true, last);
        assert!(habits.due(last + 2)[0].written);
    }

    #[test]
    fn pages_that_are_used_and_those_between_them_are_due() {
        let mut habits = Habits::new();
        let last = steady(&mut habits, PIECE);
        assert_eq!(habits.due(last + 2)[0].pages, 5..6);
        habits.used(PIECE, 9, false, last + 2);
        habits.used(PIECE, 4, false, last + 2);
        assert_eq!(habits.due(last + 4)[0].pages, 4..10);
        // Another interval: from the beginning.
        habits.used(PIECE, 2, false, last + 5);
        for launches in [last + 6, last + 7, last + 8, last + 9, last + 10] {
            habits.used(PIECE, 2, false, launches);
        }
        assert_eq!(habits.due(last + 11)[0].pages, 2..3);
    }

    #[test]
    fn there_are_as_many_as_slots_and_each_has_its_own() {
        let mut habits = Habits::new();
        let mut last = 0;
        for piece in 0..WATCHED {
            last = steady(&mut habits, (PIECE.0, piece));
        }
        let all = habits.due(last + 2);
        let mut slots: Vec<usize> = all.iter().map(|due| due.slot).collect();
        slots.sort_unstable();
        assert_eq!(slots, (0..SLOTS).collect::<Vec<_>>());
        // More are not watched, until some have not been used for long.
        habits.used((PIECE.0, WATCHED), 5, false, last);
        assert!(!habits.known.contains_key(&(PIECE.0, WATCHED)));
        habits.used((PIECE.0, WATCHED), 5, false, last + LONGEST + 1);
        assert!(habits.known.contains_key(&(PIECE.0, WATCHED)));
        assert!(!habits.any());
    }

    #[test]
    fn a_region_that_ends_gives_its_slots_back() {
        let mut habits = Habits::new();
        steady(&mut habits, PIECE);
        steady(&mut habits, (7, 0));
        habits.drop_region(PIECE.0);
        assert!(habits.any());
        habits.drop_piece((7, 0));
        assert!(!habits.any());
    }
}
