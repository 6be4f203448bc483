//! Traces: the activity of all clients on one time line, in the JSON trace event format that Perfetto and
//! chrome://tracing read.
//!
//! Engine and arbiter report [`Slice`]s on [`Track`]s; a separate thread writes the file, which mps-control has opened.
//! Events that this thread cannot keep up with are dropped and counted. docs/design/0013-trace.md has the reasons.

mod naming;
mod write;

use crossbeam_channel::{Sender, bounded};
use mpsshim_model::client::ClientInfo;
use mpsshim_model::limits::MOST_BLOCKERS;
use quanta::Clock;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Events that may wait to be written; one takes about 80 bytes.
const WAITING: usize = 1 << 16;
/// Maximum number of tracks of a client; the last one is shared by all further streams.
const TRACKS: u64 = 4096;
/// Above all process ids (22 bits): base of the ids of clients whose process id is unknown.
const UNKNOWN: u64 = 1 << 22;

/// A client in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Number of its session.
    pub session: u64,
    /// Process id, 0 when it is not known.
    pub pid: i32,
}

impl From<&ClientInfo> for Process {
    fn from(info: &ClientInfo) -> Process {
        Process {
            session: info.session,
            pid: info.pid,
        }
    }
}

impl Process {
    /// Its process id in the trace.
    fn number(self) -> u64 {
        match u64::try_from(self.pid) {
            Ok(pid @ 1..) => pid,
            _ => UNKNOWN + self.session,
        }
    }
}

/// A line of slices that do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Track {
    /// The client.
    pub process: Process,
    /// Number of the track within the client.
    pub number: u64,
}

impl Track {
    /// The trace's thread id: a process may have several sessions.
    fn thread(self) -> u64 {
        self.process.session * TRACKS + self.number.min(TRACKS - 1)
    }
}

/// Additional information of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// None.
    None,
    /// Bytes copied or set.
    Bytes(u64),
    /// Blocks of a kernel's grid.
    Blocks(u64),
    /// Operations observed to complete at the same time.
    Operations(u64),
    /// It had not ended when the trace ended.
    Unfinished,
    /// A wait at the gate: the clients waited for, and whether it was still in progress when the trace ended.
    Gate(Blockers, bool),
}

/// Clients whose long work a wait at the gate is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blockers {
    /// Process ids as in the trace, padded with zeros.
    processes: [u32; MOST_BLOCKERS],
    /// Whether clients that have left are among them.
    left: bool,
}

impl Blockers {
    /// Takes the first [`MOST_BLOCKERS`] clients.
    pub fn new(clients: impl Iterator<Item = Process>, left: bool) -> Blockers {
        let mut processes = [0; MOST_BLOCKERS];
        for (place, client) in processes.iter_mut().zip(clients) {
            *place = u32::try_from(client.number()).unwrap_or(u32::MAX);
        }
        Blockers { processes, left }
    }
}

/// An interval of activity.
#[derive(Clone, Debug)]
pub struct Slice {
    /// Its track.
    pub track: Track,
    /// Its name.
    pub name: Arc<str>,
    /// Its category, for filters.
    pub category: &'static str,
    /// Begin and end, in the unit of [`Run::now`].
    pub time: (u64, u64),
    /// Additional information.
    pub detail: Detail,
}

/// An event to be written.
#[derive(Debug)]
enum Event {
    /// A client and its user.
    Process(Process, u32),
    Track(Track, String),
    Slice(Slice),
    /// Percentage of the time in which a client has waited for its devices lately, and the time in the unit of
    /// [`Run::now`].
    DeviceWait(Process, u64, u32),
    /// As [`Event::DeviceWait`], of waits for device memory that is in host memory, or for room.
    MemoryWait(Process, u64, u32),
    /// Bytes of device memory per second that were moved to host memory and back for a client lately, and the time.
    DeviceMemory(Process, u64, [u64; 2]),
    /// Bytes of managed memory per second that were copied to the host and to devices for a client lately, and the time.
    Managed(Process, u64, [u64; 2]),
}

/// Result of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Totals {
    /// Slices written.
    pub written: u64,
    /// Slices and operations that were lost for lack of time or room.
    pub lost: u64,
    /// Why writing has failed, if it has.
    pub error: Option<String>,
}

/// A trace in progress.
#[derive(Debug)]
pub struct Run {
    clock: Clock,
    events: Sender<Event>,
    lost: AtomicU64,
}

/// The thread that writes a trace, for the caller that ends it.
#[derive(Debug)]
pub struct Writer {
    thread: JoinHandle<Totals>,
}

/// Starts a trace into a file that is open for appending. The first call in a process takes up to 0.2 s, to calibrate
/// the processor's counter against the clock.
///
/// # Errors
/// The thread cannot be started.
pub fn start(file: File) -> std::io::Result<(Arc<Run>, Writer)> {
    let clock = Clock::new();
    let (events, receiver) = bounded(WAITING);
    let time = write::Timeline::new(clock.clone());
    let thread = std::thread::Builder::new()
        .name("trace-file".into())
        .spawn(move || write::run(file, &receiver, &time))?;
    let run = Run {
        clock,
        events,
        lost: AtomicU64::new(0),
    };
    Ok((Arc::new(run), Writer { thread }))
}

impl Run {
    /// The current time, in the processor's unit. Takes some nanoseconds.
    #[inline]
    pub fn now(&self) -> u64 {
        self.clock.raw()
    }

    /// The clock of [`Run::now`], for callers that must not hold the `Run`, since that keeps the trace from ending.
    pub fn clock(&self) -> Clock {
        self.clock.clone()
    }

    /// Names a client of this user by its program, once its command line is read: by other threads, since the process can
    /// delay that for as long as it likes.
    pub fn name_process(&self, process: Process, uid: u32) {
        self.send(Event::Process(process, uid));
    }

    /// Names a track.
    pub fn name_track(&self, track: Track, name: impl Into<String>) {
        self.send(Event::Track(track, name.into()));
    }

    /// Writes a slice, or counts it as lost. The slices of a track must be passed in order of time.
    pub fn slice(&self, slice: Slice) {
        self.send(Event::Slice(slice));
    }

    /// Writes which percentage of the time a client has waited for its devices until now. Counted as lost like a slice.
    pub fn device_wait(&self, process: Process, now: u64, percentage: u32) {
        self.send(Event::DeviceWait(process, now, percentage));
    }

    /// As [`Run::device_wait`], of waits for device memory that is in host memory, or for room.
    pub fn memory_wait(&self, process: Process, now: u64, percentage: u32) {
        self.send(Event::MemoryWait(process, now, percentage));
    }

    /// As [`Run::managed`], of device memory that was moved to host memory and back.
    pub fn device_memory(&self, process: Process, now: u64, rates: [u64; 2]) {
        self.send(Event::DeviceMemory(process, now, rates));
    }

    /// Writes how many bytes of managed memory per second were copied to the host and to devices for a client until now.
    /// Counted as lost like a slice.
    pub fn managed(&self, process: Process, now: u64, rates: [u64; 2]) {
        self.send(Event::Managed(process, now, rates));
    }

    /// Counts slices that were lost before they reached the trace.
    pub fn lose(&self, count: u64) {
        self.lost.fetch_add(count, Ordering::Relaxed);
    }

    fn send(&self, event: Event) {
        if self.events.try_send(event).is_err() {
            self.lose(1);
        }
    }
}

impl Writer {
    /// Ends the trace, once engine and arbiter have dropped their references to it.
    pub fn finish(self, run: Arc<Run>) -> Totals {
        let lost = run.lost.load(Ordering::Relaxed);
        drop(run);
        let totals = self.thread.join().unwrap_or_else(|_| Totals {
            error: Some("the thread that writes has panicked".into()),
            ..Totals::default()
        });
        Totals {
            lost: totals.lost + lost,
            ..totals
        }
    }
}
