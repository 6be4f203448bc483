//! How long an idle dispatch thread polls for messages before it sleeps.
//!
//! Waking up takes a thread 15 to 30 µs, which delays a client that waits for a kernel and then launches the next one.
//! A thread polls for [`SPIN`], longer than the pause between two small kernels. If recent pauses were longer than that
//! but below a limit, it polls for twice the longest of them and naps for most of the shortest one. After a single
//! pause beyond the limit it discards its history. So a change in a client's behaviour has a bounded cost, and idle
//! clients use no CPU time.

use std::time::{Duration, Instant};

/// How long a thread without history polls.
const SPIN: Duration = Duration::from_micros(200);
/// How long it polls before a nap, and before it yields, which can cost a whole time slice. Shorter pauses are not
/// recorded.
const LOOK: Duration = Duration::from_micros(50);
/// Shortest worthwhile nap.
const NAP: Duration = Duration::from_micros(100);
/// A nap ends at least this long before the end of the shortest pause, since timers fire late.
const LATE: Duration = Duration::from_micros(150);
/// Number of pauses that are recorded.
const REMEMBERED: usize = 8;

/// Next step of an idle thread.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Next {
    /// Poll again.
    Look,
    /// Yield to other threads, then poll again: there are more threads than CPUs.
    Yield,
    /// Sleep until a doorbell rings, at most for this time.
    Nap(Duration),
    /// Sleep until a doorbell rings.
    Sleep,
}

/// A dispatch thread's history of its clients' pauses.
#[derive(Debug)]
pub struct Patience {
    most: Duration,
    /// The last pauses, each between [`LOOK`] and `most`, as a ring buffer.
    pauses: [Duration; REMEMBERED],
    count: usize,
    /// How long it polls without history.
    usual: Duration,
    /// How long it polls, derived from the last pauses.
    spin: Duration,
    /// Time into a pause until which it naps, derived from the last pauses; zero disables naps.
    nap: Duration,
    /// Times of the first and the latest poll since there was last a message.
    quiet: Option<(Instant, Instant)>,
    /// Time of the first poll without a message since the last message, or since it was last woken.
    idle_since: Option<Instant>,
    /// Whether it slept after the latest poll.
    slept: bool,
    /// Whether it was waiting for the GPU rather than for a client.
    full: bool,
}

impl Patience {
    /// Creates the state of a thread that polls for at most `most`.
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

    /// Records that there were messages.
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

    /// Returns the next step if there is no message at `now`. `crowded`: there are more threads than CPUs, so it polls
    /// no longer than [`SPIN`]. `full`: some messages wait for the GPU.
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

    /// Records that it was woken by a doorbell, after which it polls again.
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

    /// Simulates a pause polled every 10 µs. Returns each nap or sleep with its start and its maximum duration.
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
        // The poll that finds the message; a test cannot have slept in reality.
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
            // Polls for 50 µs, naps for most of the usual pause, then polls again.
            assert_eq!(
                pass(&mut patience, start, us(900)),
                [(LOOK, Next::Nap(us(625)))]
            );
        }
        // Polls for twice the longest pause.
        let quiet = pass(&mut patience, start, us(60_000));
        assert_eq!(quiet, [(LOOK, Next::Nap(us(625))), (us(1805), Next::Sleep)]);
        // That pause was beyond the limit, so the history was discarded.
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
        // Until the short pause has left the history.
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
