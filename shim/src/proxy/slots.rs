//! Which completion flags of the segment are in use.

use mpsshim_proto::segment::{FLAGS, reached};

/// The completion flags of a session.
#[derive(Debug, Default)]
pub struct Slots {
    used: u32,
    /// Slot and last value given out, all reached.
    free: Vec<(u32, u32)>,
    /// Slots of destroyed streams whose last mark may be outstanding. Reused only once it is written: a late write
    /// would reset the successor's flag.
    retiring: Vec<(u32, u32)>,
}

impl Slots {
    /// A slot, and the last value that was written to its flag. `flag` reads a slot's flag.
    pub fn take(&mut self, flag: impl Fn(u32) -> u32) -> Option<(u32, u32)> {
        self.sweep(flag);
        if let Some(found) = self.free.pop() {
            return Some(found);
        }
        (self.used < FLAGS as u32).then(|| {
            self.used += 1;
            (self.used - 1, 0)
        })
    }

    /// Gives back a slot whose flag holds `value`, which nothing will change.
    pub fn put_back(&mut self, slot: u32, value: u32) {
        self.free.push((slot, value));
    }

    /// The stream of a slot was destroyed; its last mark writes `value`.
    pub fn retire(&mut self, slot: u32, value: u32) {
        self.retiring.push((slot, value));
    }

    /// Slots of destroyed streams whose last marks are not reached, with the values of these.
    pub fn retiring(&mut self, flag: impl Fn(u32) -> u32) -> Vec<(u32, u32)> {
        self.sweep(flag);
        self.retiring.clone()
    }

    /// Whether work of destroyed streams has not been seen to end.
    pub fn any_in_flight(&self, flag: impl Fn(u32) -> u32) -> bool {
        let mut retiring = self.retiring.iter();
        retiring.any(|&(slot, value)| !reached(flag(slot), value))
    }

    fn sweep(&mut self, flag: impl Fn(u32) -> u32) {
        let free = &mut self.free;
        self.retiring.retain(|&(slot, value)| {
            let done = reached(flag(slot), value);
            if done {
                free.push((slot, value));
            }
            !done
        });
    }
}
