//! Threads that wait for completion flags: how many of them may stay awake, and how the others sleep.
//!
//! The segment has records for some sleepers, which the server's watcher wakes. Further sleepers have records of this
//! process, and one of them, the watching thread, wakes the others: however many there are, one thread polls.
//!
//! Nothing here allocates when a thread waits: handlers of faults wait too.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::thread::available_parallelism;
use std::time::Duration;

use mpsshim_proto::segment::{Sleeper, reached, sleeper};
use mpsshim_proto::shm;

use crate::ffi::Status;
use crate::proxy::submit::Session;
use crate::proxy::wait::LOOK_AGAIN;

/// Records beyond those of the segment. A thread that finds all in use polls with long pauses.
const FURTHER: usize = 1024;
/// Pause between two looks of the watching thread.
const PAUSE: Duration = Duration::from_micros(100);
/// Pauses of the watching thread between two checks of the socket.
const PAUSES_PER_LOOK: u32 = 256;

/// The waiting threads of a session.
#[derive(Debug)]
pub struct Sleepers {
    /// Threads that spin or yield.
    awake: AtomicU32,
    /// The most of them: the processors that the process may use.
    most_awake: u32,
    further: Box<[Sleeper]>,
    /// Whether one of the threads in `further` wakes the others.
    watched: AtomicBool,
}

impl Default for Sleepers {
    fn default() -> Sleepers {
        // Of the affinity mask and the quota of the cgroup.
        Sleepers::on(available_parallelism().map_or(1, |count| count.get() as u32))
    }
}

/// A thread that may spin and yield. Dropping this lets another one do so.
pub struct Awake<'a>(&'a AtomicU32);

impl Drop for Awake<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Sleepers {
    fn on(processors: u32) -> Sleepers {
        Sleepers {
            awake: AtomicU32::new(0),
            most_awake: processors,
            further: (0..FURTHER).map(|_| Sleeper::default()).collect(),
            watched: AtomicBool::new(false),
        }
    }

    /// Lets this thread wait awake; `None` if as many threads as there are processors do so already. More would take the
    /// processors from the threads that they wait for.
    #[inline]
    pub fn stay_awake(&self) -> Option<Awake<'_>> {
        let awake = Awake(&self.awake);
        let others = self.awake.fetch_add(1, Ordering::Relaxed);
        (others < self.most_awake).then_some(awake)
    }

    /// Wakes the sleepers whose flags have been written.
    fn wake(&self, session: &Session) {
        for record in &self.further {
            if record.state.load(Ordering::Acquire) != sleeper::SLEEPS {
                continue;
            }
            let flag = session.flag(record.slot.load(Ordering::Relaxed));
            if reached(
                flag.load(Ordering::Acquire),
                record.value.load(Ordering::Relaxed),
            ) {
                rouse(record);
            }
        }
    }

    /// Wakes one sleeper, which becomes the watching thread, unless there is one.
    fn pass_on(&self) {
        // Partner: the fence of a sleeper between saying that it sleeps and looking for a watching thread.
        fence(Ordering::SeqCst);
        if !self.watched.load(Ordering::Relaxed) {
            let _ = self.further.iter().any(rouse);
        }
    }

    /// Wakes the others until its own flag has been written.
    fn watch(&self, session: &Session, done: &dyn Fn() -> bool) -> Status {
        let mut round = 0u32;
        loop {
            self.wake(session);
            if done() {
                return Ok(());
            }
            std::thread::sleep(PAUSE);
            round += 1;
            if round.is_multiple_of(PAUSES_PER_LOOK) {
                session.look()?;
            }
        }
    }
}

/// Wakes the thread of this record, if it sleeps.
fn rouse(record: &Sleeper) -> bool {
    let woken = record.state.compare_exchange(
        sleeper::SLEEPS,
        sleeper::WOKEN,
        Ordering::Release,
        Ordering::Relaxed,
    );
    if woken.is_ok() {
        shm::futex_wake(&record.state);
    }
    woken.is_ok()
}

/// A free record, which this thread fills.
fn claim(records: &[Sleeper]) -> Option<&Sleeper> {
    records.iter().find(|record| {
        let state = &record.state;
        // The load alone leaves the cache line to its owner.
        state.load(Ordering::Relaxed) == sleeper::FREE
            && state
                .compare_exchange(
                    sleeper::FREE,
                    sleeper::CLAIMED,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                )
                .is_ok()
    })
}

fn say(record: &Sleeper, slot: u32, value: u32) {
    record.slot.store(slot, Ordering::Relaxed);
    record.value.store(value, Ordering::Relaxed);
    // Release: the watcher that sees SLEEPS sees slot and value.
    record.state.store(sleeper::SLEEPS, Ordering::Release);
}

/// Sleeps until the flag of `slot` has reached `value`, which `done` tells.
///
/// # Errors
/// The session's, when it ends meanwhile.
pub fn sleep(session: &Session, slot: u32, value: u32, done: &dyn Fn() -> bool) -> Status {
    let header = session.header();
    let status = if let Some(record) = claim(&header.sleepers) {
        say(record, slot, value);
        header.sleeping.0.fetch_add(1, Ordering::Relaxed);
        // Partner: the watcher, which looks at `sleeping` after it has said that it will sleep.
        fence(Ordering::SeqCst);
        session.ring_doorbell();
        let status = sleep_in(record, session, done, || None);
        record.state.store(sleeper::FREE, Ordering::Release);
        header.sleeping.0.fetch_sub(1, Ordering::Relaxed);
        status
    } else if let Some(record) = claim(&session.sleepers.further) {
        let sleepers = &session.sleepers;
        say(record, slot, value);
        let status = sleep_in(record, session, done, || {
            // Partner: the fence in `pass_on`. Either that finds this thread asleep, or this thread finds no watching one.
            fence(Ordering::SeqCst);
            if sleepers.watched.swap(true, Ordering::Acquire) {
                return None;
            }
            // Not woken as a sleeper while it wakes the others.
            record.state.store(sleeper::CLAIMED, Ordering::Relaxed);
            let status = sleepers.watch(session, done);
            sleepers.watched.store(false, Ordering::Release);
            Some(status)
        });
        record.state.store(sleeper::FREE, Ordering::Release);
        sleepers.pass_on();
        status
    } else {
        nap(session, done)
    };
    status.and_then(|()| session.check())
}

/// Sleeps until `done`, or until `instead` has waited in another way.
fn sleep_in(
    record: &Sleeper,
    session: &Session,
    done: &dyn Fn() -> bool,
    instead: impl Fn() -> Option<Status>,
) -> Status {
    while !done() {
        if let Some(status) = instead() {
            return status;
        }
        if record.state.load(Ordering::Acquire) == sleeper::SLEEPS {
            shm::futex_wait(&record.state, sleeper::SLEEPS, LOOK_AGAIN);
        } else {
            // Woken although the flag has not reached the value.
            record.state.store(sleeper::SLEEPS, Ordering::Release);
            std::thread::yield_now();
        }
        if done() {
            break;
        }
        session.look()?;
    }
    Ok(())
}

/// When every record is in use.
fn nap(session: &Session, done: &dyn Fn() -> bool) -> Status {
    const LONGEST: Duration = Duration::from_millis(10);
    let mut pause = Duration::from_micros(200);
    while !done() {
        std::thread::sleep(pause);
        if pause < LONGEST {
            pause *= 2;
        } else {
            session.look()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::fake::Fake;
    use crate::proxy::wait::{Policy, wait};
    use mpsshim_proto::segment::SLEEPERS;

    #[test]
    fn as_many_threads_stay_awake_as_there_are_processors() {
        let sleepers = Sleepers::on(2);
        let first = sleepers.stay_awake();
        let second = sleepers.stay_awake();
        assert!(first.is_some() && second.is_some());
        assert!(sleepers.stay_awake().is_none());
        assert!(sleepers.stay_awake().is_none(), "a refusal takes no place");
        drop(first);
        let third = sleepers.stay_awake();
        assert!(third.is_some());
        assert!(sleepers.stay_awake().is_none());
    }

    /// Time that the calling thread has been on a processor.
    fn cpu_time() -> Duration {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: a plain system call with memory of this thread.
        let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        assert_eq!(status, 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    #[test]
    fn a_wait_beyond_the_processors_takes_no_processor() {
        let fake = Fake::new();
        let session = fake.session;
        let (slot, before) = session.take_slot().unwrap();
        let awake: Vec<_> = std::iter::from_fn(|| session.sleepers.stay_awake()).collect();
        assert!(!awake.is_empty());
        let used = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let began = cpu_time();
                wait(session, slot, before + 1, Policy::Spin).unwrap();
                cpu_time() - began
            });
            // Longer than the policy spins.
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(session.header().sleeping.0.load(Ordering::Relaxed), 1);
            session.flag(slot).store(before + 1, Ordering::Release);
            waiter.join().unwrap()
        });
        assert!(used < Duration::from_millis(20), "{used:?}");
    }

    /// States of the records of this process: how many are free, asleep, and of the watching thread.
    fn counts(sleepers: &Sleepers) -> [usize; 3] {
        let count = |wanted: u32| {
            let is = |record: &&Sleeper| record.state.load(Ordering::Acquire) == wanted;
            sleepers.further.iter().filter(is).count()
        };
        [sleeper::FREE, sleeper::SLEEPS, sleeper::CLAIMED].map(count)
    }

    fn until(what: &str, found: impl Fn() -> bool) {
        let began = std::time::Instant::now();
        while !found() {
            assert!(began.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn one_of_the_further_sleepers_wakes_the_others() {
        const MORE: usize = 100;
        let fake = Fake::new();
        let session = fake.session;
        let sleepers = &session.sleepers;
        let slots: Vec<_> = (0..SLEEPERS + MORE)
            .map(|_| session.take_slot().unwrap())
            .collect();
        std::thread::scope(|scope| {
            for &(slot, before) in &slots {
                scope.spawn(move || wait(session, slot, before + 1, Policy::Block).unwrap());
            }
            until("one watches, the others sleep", || {
                counts(sleepers) == [FURTHER - MORE, MORE - 1, 1]
            });
            // The watching thread leaves: another one takes its place.
            let watching =
                |record: &&Sleeper| record.state.load(Ordering::Acquire) == sleeper::CLAIMED;
            let watching = sleepers.further.iter().find(watching).unwrap();
            let first = watching.slot.load(Ordering::Relaxed);
            session
                .flag(first)
                .store(watching.value.load(Ordering::Relaxed), Ordering::Release);
            until("another one watches", || {
                counts(sleepers) == [FURTHER - MORE + 1, MORE - 2, 1]
            });
            for &(slot, before) in &slots {
                session.flag(slot).store(before + 1, Ordering::Release);
            }
        });
        assert_eq!(counts(sleepers), [FURTHER, 0, 0]);
        assert!(!sleepers.watched.load(Ordering::Relaxed));
        assert_eq!(session.header().sleeping.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn more_threads_than_records_wait_as_well() {
        let fake = Fake::new();
        let session = fake.session;
        let records: Vec<_> = std::iter::from_fn(|| claim(&session.header().sleepers))
            .chain(std::iter::from_fn(|| claim(&session.sleepers.further)))
            .collect();
        assert_eq!(records.len(), SLEEPERS + FURTHER);
        let (slot, before) = session.take_slot().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| wait(session, slot, before + 1, Policy::Block));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiter.is_finished());
            session.flag(slot).store(before + 1, Ordering::Release);
            waiter.join().unwrap().unwrap();
            let waiter = scope.spawn(|| wait(session, slot, before + 2, Policy::Block));
            fake.hang_up();
            assert!(waiter.join().unwrap().is_err());
        });
    }

    #[test]
    fn further_sleepers_wake_when_the_server_goes() {
        let fake = Fake::new();
        let session = fake.session;
        let slots: Vec<_> = (0..SLEEPERS + 10)
            .map(|_| session.take_slot().unwrap())
            .collect();
        std::thread::scope(|scope| {
            let waits: Vec<_> = slots
                .iter()
                .map(|&(slot, before)| {
                    scope.spawn(move || wait(session, slot, before + 1, Policy::Block))
                })
                .collect();
            until("all sleep", || {
                counts(&session.sleepers) == [FURTHER - 10, 9, 1]
            });
            fake.hang_up();
            for wait in waits {
                assert!(wait.join().unwrap().is_err());
            }
        });
        assert_eq!(counts(&session.sleepers), [FURTHER, 0, 0]);
    }
}
