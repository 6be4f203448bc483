//! Threads that read the command lines and programs of processes from /proc, so that the threads of daemon and servers
//! do not wait for it.
//!
//! The kernel reads a command line from the process's memory, and a process can keep that memory locked for as long as
//! it likes. Each user has readers of its own: a process that cannot be read delays programs of its own user only.

use super::{Identity, Program};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How long a client waits for its program to be read, which takes some microseconds for a cooperative process.
pub const READ_PATIENCE: Duration = Duration::from_secs(10);
/// Readers of one user at a time: all but one may be stuck, and the user's other programs are still read.
const READERS: usize = 4;
/// Readers of all users at a time.
const MOST_READERS: usize = 256;
/// Processes of one user that may wait for a reader.
const WAITING: usize = 4096;
/// Stack of a reader, bytes.
const STACK: usize = 256 << 10;

type Read = dyn Fn(i32, u32) -> Identity + Send + Sync;

#[derive(Default)]
struct User {
    /// Numbers of the clients that wait for a reader, and their process ids.
    waiting: VecDeque<(u64, i32)>,
    readers: usize,
}

#[derive(Default)]
struct State {
    /// Users with readers.
    users: BTreeMap<u32, User>,
    /// Results that have not been taken yet, by the client's number.
    found: Vec<(u64, Identity)>,
}

struct Shared {
    state: Mutex<State>,
    /// Readable while there are results.
    wake: EventFd,
    read: Box<Read>,
}

/// The readers of all users.
pub struct Readers(Arc<Shared>);

/// A process that is being read. Dropped, it is not read any more, or its result is not needed.
pub struct Reading {
    shared: Arc<Shared>,
    number: u64,
    uid: u32,
}

/// The programs of processes, each with its user, as far as they can be read within this time.
pub fn read_within(patience: Duration, processes: &[(i32, u32)]) -> Vec<Option<Program>> {
    let until = Instant::now() + patience;
    let mut programs = vec![None; processes.len()];
    let Ok(readers) = Readers::new() else {
        return programs;
    };
    let numbered = (0..).zip(processes);
    let readings = numbered.map(|(number, (pid, uid))| readers.read(number, *pid, *uid));
    let readings: Vec<Reading> = readings.flatten().collect();
    let mut left = readings.len();
    while left > 0 && Instant::now() < until {
        for (number, found) in readers.take_by(until) {
            programs[number as usize] = found.program;
            left -= 1;
        }
    }
    programs
}

impl Reading {
    /// The number that its result comes with.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Readers {
    /// No readers yet.
    ///
    /// # Errors
    /// There is no descriptor for the event.
    pub fn new() -> io::Result<Readers> {
        Readers::with(Identity::of_process)
    }

    fn with(read: impl Fn(i32, u32) -> Identity + Send + Sync + 'static) -> io::Result<Readers> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Readers(Arc::new(Shared {
            state: Mutex::default(),
            wake: EventFd::from_flags(flags)?,
            read: Box::new(read),
        })))
    }

    /// Begins to read the command line and program of a process of this user; the result comes with `number`. `None`: too
    /// many processes are being read, and they stay unknown.
    pub fn read(&self, number: u64, pid: i32, uid: u32) -> Option<Reading> {
        let mut state = self.0.state.lock();
        let readers: usize = state.users.values().map(|user| user.readers).sum();
        let user = state.users.entry(uid).or_default();
        if user.readers < READERS && readers < MOST_READERS {
            let shared = Arc::clone(&self.0);
            let started = thread::Builder::new()
                .name("program".into())
                .stack_size(STACK)
                .spawn(move || shared.run(uid));
            match started {
                Ok(_) => user.readers += 1,
                // The user's other readers will read it, if there are any.
                Err(error) => tracing::warn!("no thread to read a program: {error}"),
            }
        }
        if user.readers == 0 {
            state.users.remove(&uid);
            return None;
        }
        if user.waiting.len() >= WAITING {
            return None;
        }
        user.waiting.push_back((number, pid));
        Some(Reading {
            shared: Arc::clone(&self.0),
            number,
            uid,
        })
    }

    /// The next results, once there are any; none after the deadline.
    pub fn take_by(&self, until: Instant) -> Vec<(u64, Identity)> {
        // Rounded up, so that the deadline has passed when poll returns without an event.
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        // An interrupted call finds no results.
        let _ = poll(&mut [PollFd::new(self.wake(), PollFlags::POLLIN)], left);
        self.take()
    }

    /// Readable while there are results.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }

    /// The results since the last call, each with the client's number.
    pub fn take(&self) -> Vec<(u64, Identity)> {
        // First, so that a result that comes now wakes again. Not readable: no result has come.
        let _ = self.0.wake.read();
        mem::take(&mut self.0.state.lock().found)
    }
}

impl Shared {
    /// A reader: it ends when no process of its user waits.
    fn run(&self, uid: u32) {
        let mut state = self.state.lock();
        while let Some(user) = state.users.get_mut(&uid) {
            let Some((number, pid)) = user.waiting.pop_front() else {
                user.readers -= 1;
                if user.readers == 0 {
                    state.users.remove(&uid);
                }
                return;
            };
            drop(state);
            let found = (self.read)(pid, uid);
            state = self.state.lock();
            state.found.push((number, found));
            // Fails only when the counter is full: then it is readable.
            let _ = self.wake.write(1);
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if let Some(user) = state.users.get_mut(&self.uid) {
            user.waiting.retain(|(number, _)| *number != self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Condvar;

    const STUCK: u32 = 7;
    const OTHER: u32 = 8;

    /// Readers that do not return from a read of a process with an odd id before the gate opens.
    struct Gate {
        readers: Readers,
        open: Arc<(Mutex<bool>, Condvar)>,
    }

    impl Gate {
        fn new() -> Gate {
            let open = Arc::new((Mutex::new(false), Condvar::new()));
            let gate = Arc::clone(&open);
            let readers = Readers::with(move |pid, uid| {
                if pid % 2 == 1 {
                    let mut is_open = gate.0.lock();
                    gate.1.wait_while(&mut is_open, |is_open| !*is_open);
                }
                let name = format!("/{pid}");
                Identity {
                    program: Some(Program::named(uid, &name)),
                    command: Some(name),
                }
            });
            Gate {
                readers: readers.expect("an event"),
                open,
            }
        }

        fn open(&self) {
            *self.open.0.lock() = true;
            self.open.1.notify_all();
        }

        /// Waits for this number of results.
        fn results(&self, count: usize) -> Vec<(u64, String)> {
            let mut results = Vec::new();
            let until = Instant::now() + Duration::from_secs(120);
            while results.len() < count {
                // None, if the results of this event came with those of the event before.
                let found = self.readers.take_by(until);
                assert!(Instant::now() < until, "only {results:?} came");
                let named = |(number, found): (u64, Identity)| {
                    (number, found.program.expect("a program").name)
                };
                results.extend(found.into_iter().map(named));
            }
            results.sort();
            results
        }
    }

    impl Drop for Gate {
        fn drop(&mut self) {
            self.open();
        }
    }

    fn row(number: u64, name: &str) -> (u64, String) {
        (number, name.to_owned())
    }

    #[test]
    fn processes_that_cannot_be_read_delay_their_own_user_only() {
        let gate = Gate::new();
        let read = |number, pid, uid| gate.readers.read(number, pid, uid).expect("it is read");
        let mut readings: Vec<Reading> = (1..READERS as u64)
            .map(|number| read(number, 1, STUCK))
            .collect();
        // One reader is left, until it is stuck too.
        readings.push(read(10, 2, STUCK));
        assert_eq!(gate.results(1), [row(10, "/2")]);
        readings.push(read(11, 1, STUCK));
        readings.push(read(12, 4, STUCK));
        let left = read(13, 6, STUCK);
        for number in 20..30 {
            readings.push(read(number, 2, OTHER));
            assert_eq!(gate.results(1), [row(number, "/2")]);
        }
        // Its client has gone before a reader came to it.
        drop(left);
        gate.open();
        let mut expected: Vec<_> = (1..READERS as u64)
            .map(|number| row(number, "/1"))
            .collect();
        expected.extend([row(11, "/1"), row(12, "/4")]);
        assert_eq!(gate.results(expected.len()), expected);
        assert_eq!(gate.readers.take(), []);
    }

    #[test]
    fn a_user_without_a_reader_is_told_so() {
        let gate = Gate::new();
        let users = (MOST_READERS / READERS) as u32;
        let mut readings = Vec::new();
        for uid in 0..users {
            readings.extend((0..READERS as u64).map(|number| gate.readers.read(number, 1, uid)));
        }
        assert!(readings.iter().all(Option::is_some));
        assert!(gate.readers.read(0, 2, users).is_none());
        gate.open();
        gate.results(MOST_READERS);
        readings.clear();
        // Readers end a moment after their last result.
        let reading = std::iter::repeat_with(|| gate.readers.read(0, 2, users));
        assert!(
            reading
                .inspect(|_| thread::yield_now())
                .any(|one| one.is_some())
        );
    }

    #[test]
    fn programs_are_read_for_a_caller_that_waits() {
        let own = (std::process::id() as i32, nix::unistd::geteuid().as_raw());
        let none = (0, own.1);
        let programs = read_within(Duration::from_secs(120), &[own, none, own]);
        assert!(programs[0].is_some() && programs[1].is_none());
        assert_eq!(programs[0], programs[2]);
        assert_eq!(read_within(Duration::ZERO, &[]), []);
    }

    #[test]
    fn the_processes_of_a_user_that_wait_are_bounded() {
        let gate = Gate::new();
        let mut readings = Vec::new();
        while let Some(reading) = gate.readers.read(0, 1, STUCK) {
            readings.push(reading);
            assert!(readings.len() <= WAITING + READERS);
        }
        assert!(readings.len() >= WAITING);
        assert!(gate.readers.read(1, 2, OTHER).is_some());
        readings.clear();
        assert!(gate.readers.read(1, 2, STUCK).is_some(), "those have gone");
    }
}
