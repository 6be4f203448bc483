//! How long a dispatch thread with nothing to do looks for messages before it sleeps.
//!
//! To wake up takes a thread 15 to 30 µs, which a client feels that waits for a kernel and then launches the next one. A
//! thread looks for [`SPIN`], longer than the pause between two small kernels. Where pauses have been longer lately, but
//! not longer than a limit, it looks for twice the longest of them, and naps for most of the shortest one. One pause
//! beyond the limit, and it knows nothing: what a change of a client's habits costs is bounded, and clients that are quiet
//! cost no processor time.

use std::time::{Duration, Instant};

/// How long a thread looks that knows nothing better.
const SPIN: Duration = Duration::from_micros(200);
/// How long it looks before a nap, and before it yields, which can cost a whole time slice. Shorter pauses are not
/// remembered.
const LOOK: Duration = Duration::from_micros(50);
/// A shorter nap is not worth it.
const NAP: Duration = Duration::from_micros(100);
/// So much before the end of the shortest pause a nap ends at least: timers are late.
const LATE: Duration = Duration::from_micros(150);
/// So many pauses are remembered.
const REMEMBERED: usize = 8;

/// What a thread with nothing to do does next.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Next {
    /// It looks again.
    Look,
    /// It lets other threads run, and looks again: there are more of them than processors.
    Yield,
    /// It sleeps for so long, if no bell rings.
    Nap(Duration),
    /// It sleeps until a bell rings.
    Sleep,
}

/// What a thread has learnt of its clients.
#[derive(Debug)]
pub struct Patience {
    most: Duration,
    /// The last pauses, of [`LOOK`] to `most` each; the oldest is overwritten.
    pauses: [Duration; REMEMBERED],
    count: usize,
    /// How long it looks where it knows nothing.
    usual: Duration,
    /// How long it looks, by the last pauses.
    spin: Duration,
    /// Until when it naps, by the last pauses; zero: not at all.
    nap: Duration,
    /// The first and the last look without a message since there was one.
    quiet: Option<(Instant, Instant)>,
    /// The first look without a message since then, or since it woke up for something to do.
    idle_since: Option<Instant>,
    /// It slept after the last look.
    slept: bool,
    /// It waited for the GPU, not for a client.
    full: bool,
}

impl Patience {
    /// That of a thread that looks for `most` at most.
    pub fn new(most: Duration) -> Patience {
        let usual = SPIN.min(most);
        Patience {
            most,
            pauses: [Duration::ZERO; REMEMBERED],
            count: 0,
            usual,
            spin: usual,
            nap: Duration::ZERO,
            quiet: None,
            idle_since: None,
            slept: false,
            full: false,
        }
    }

    /// There were messages.
    #[inline]
    pub fn worked(&mut self) {
        if let Some((first, last)) = self.quiet.take() {
            let last = if self.slept { Instant::now() } else { last };
            let pause = last.duration_since(first);
            if pause >= LOOK && !self.full {
                self.learn(pause);
            }
            (self.idle_since, self.slept, self.full) = (None, false, false);
        }
    }

    fn learn(&mut self, pause: Duration) {
        if pause >= self.most {
            self.count = 0;
        } else {
            self.pauses[self.count % REMEMBERED] = pause;
            self.count += 1;
        }
        let known = &self.pauses[..self.count.min(REMEMBERED)];
        let longest = known.iter().max().copied().unwrap_or_default();
        let shortest = known.iter().min().copied().unwrap_or_default();
        self.spin = (2 * longest).clamp(self.usual, self.most);
        self.nap = (shortest / 4 * 3).min(shortest.saturating_sub(LATE));
    }

    /// There is no message at `now`: what to do. `crowded`: threads outnumber processors, so that it does not look for
    /// longer than [`SPIN`]. `full`: there are messages that wait for the GPU.
    #[inline]
    pub fn next(&mut self, now: Instant, crowded: bool, full: bool) -> Next {
        let first = self.quiet.map_or(now, |(first, _)| first);
        self.quiet = Some((first, now));
        self.full |= full;
        self.slept = false;
        let quiet = now - first;
        let idle = now - *self.idle_since.get_or_insert(now);
        if idle < LOOK.min(self.usual) {
            return Next::Look;
        }
        if !crowded && !full {
            if quiet + NAP <= self.nap {
                self.slept = true;
                return Next::Nap(self.nap - quiet);
            }
            if quiet < self.spin {
                return Next::Look;
            }
        }
        if idle < self.usual {
            return if crowded { Next::Yield } else { Next::Look };
        }
        self.slept = true;
        Next::Sleep
    }

    /// It woke up for something to do, and looks again.
    pub fn woke(&mut self) {
        self.idle_since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_millis(5);

    fn us(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    /// Passes a pause in looks of 10 µs; when the thread napped or slept in it, and for how long at most.
    fn pass(patience: &mut Patience, start: Instant, pause: Duration) -> Vec<(Duration, Next)> {
        let mut slept = Vec::new();
        let mut at = Duration::ZERO;
        while at < pause {
            match patience.next(start + at, false, false) {
                Next::Look | Next::Yield => at += us(10),
                Next::Nap(nap) => {
                    slept.push((at, Next::Nap(nap)));
                    at += nap;
                }
                Next::Sleep => {
                    slept.push((at, Next::Sleep));
                    at = pause;
                }
            }
        }
        // The look that finds the message; a test cannot have slept for real.
        patience.slept = false;
        patience.quiet = patience.quiet.map(|(first, _)| (first, start + pause));
        patience.worked();
        slept
    }

    #[test]
    fn pauses_are_learnt() {
        let (mut patience, start) = (Patience::new(MOST), Instant::now());
        assert_eq!(pass(&mut patience, start, us(900)), [(SPIN, Next::Sleep)]);
        for _ in 0..3 {
            // 50 µs of looking, asleep for most of the usual pause, then looking again.
            assert_eq!(
                pass(&mut patience, start, us(900)),
                [(LOOK, Next::Nap(us(625)))]
            );
        }
        // Twice the longest pause, and no longer.
        let quiet = pass(&mut patience, start, us(60_000));
        assert_eq!(quiet, [(LOOK, Next::Nap(us(625))), (us(1805), Next::Sleep)]);
        // That was beyond all: it knows nothing.
        assert_eq!(
            pass(&mut patience, start, us(60_000)),
            [(SPIN, Next::Sleep)]
        );
    }

    #[test]
    fn a_nap_ends_early_enough_for_a_late_timer() {
        let (mut patience, start) = (Patience::new(MOST), Instant::now());
        for (pause, napped) in [(us(400), us(200)), (us(300), us(100)), (us(290), us(0))] {
            for _ in 0..REMEMBERED {
                pass(&mut patience, start, pause);
            }
            let slept = pass(&mut patience, start, pause);
            let expected = [(LOOK, Next::Nap(napped))];
            assert_eq!(slept, expected[..usize::from(napped > us(0))], "{pause:?}");
        }
    }

    #[test]
    fn it_can_be_forbidden_to_look() {
        let (mut patience, start) = (Patience::new(Duration::ZERO), Instant::now());
        for _ in 0..3 {
            assert_eq!(pass(&mut patience, start, us(900)), [(us(0), Next::Sleep)]);
        }
    }

    #[test]
    fn a_short_pause_forbids_naps() {
        let (mut patience, start) = (Patience::new(MOST), Instant::now());
        pass(&mut patience, start, us(900));
        pass(&mut patience, start, us(100));
        assert_eq!(pass(&mut patience, start, us(1700)), []);
        // Until it is forgotten.
        for _ in 0..REMEMBERED {
            pass(&mut patience, start, us(900));
        }
        assert_eq!(
            pass(&mut patience, start, us(900)),
            [(LOOK, Next::Nap(us(625)))]
        );
    }

    #[test]
    fn short_pauses_are_looked_through() {
        let (mut patience, start) = (Patience::new(MOST), Instant::now());
        for _ in 0..100 {
            assert_eq!(pass(&mut patience, start, us(40)), []);
        }
        assert_eq!(patience.count, 0);
    }

    #[test]
    fn where_threads_outnumber_processors_it_does_not_look_for_longer() {
        let (mut patience, start) = (Patience::new(MOST), Instant::now());
        pass(&mut patience, start, us(900));
        assert_eq!(patience.next(start, true, false), Next::Look);
        assert_eq!(patience.next(start + us(100), true, false), Next::Yield);
        assert_eq!(patience.next(start + SPIN, true, false), Next::Sleep);
    }

    #[test]
    fn waiting_for_the_gpu_is_no_pause() {
        let (mut patience, start) = (Patience::new(MOST), Instant::now());
        patience.next(start, false, true);
        patience.next(start + us(900), false, true);
        patience.worked();
        assert_eq!(patience.count, 0);
    }
}
