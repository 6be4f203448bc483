//! Traces: what clients do, on one time line, in the JSON trace event format that Perfetto and chrome://tracing read.
//!
//! Engine and arbiter say what has happened, as [`Slice`]s on [`Track`]s; a thread of the trace's own writes the file, which
//! mps-control has opened. What it cannot keep up with is lost and counted. docs/design/0013-trace.md has the reasons.

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
/// Tracks of one client at most, the last one for all further streams.
const TRACKS: u64 = 4096;
/// Above all process ids (22 bits): where a client's is not known.
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
    /// As the trace has it.
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
    /// Whose.
    pub process: Process,
    /// Which of its.
    pub number: u64,
}

impl Track {
    /// The trace's thread id: a process may have several sessions.
    fn thread(self) -> u64 {
        self.process.session * TRACKS + self.number.min(TRACKS - 1)
    }
}

/// What a slice tells besides its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Nothing.
    None,
    /// Bytes copied or set.
    Bytes(u64),
    /// Blocks of a kernel's grid.
    Blocks(u64),
    /// Operations that were seen to be done at the same time.
    Operations(u64),
    /// It was not over when the trace was.
    Unfinished,
    /// A wait at the gate: for whom, and whether it was still going on when the trace ended.
    Gate(Blockers, bool),
}

/// Clients whose long work a wait at the gate was for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blockers {
    /// Process ids as in the trace, padded with zeros.
    processes: [u32; MOST_BLOCKERS],
    /// Clients that have left were among them.
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

/// Something that took time.
#[derive(Clone, Debug)]
pub struct Slice {
    /// Where.
    pub track: Track,
    /// What.
    pub name: Arc<str>,
    /// What sort of thing, for filters.
    pub category: &'static str,
    /// When it began and ended, as [`Run::now`] has it.
    pub time: (u64, u64),
    /// And more.
    pub detail: Detail,
}

/// What is written.
#[derive(Debug)]
enum Event {
    Process(Process, String),
    Track(Track, String),
    Slice(Slice),
}

/// What has come of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Totals {
    /// Slices written.
    pub written: u64,
    /// Slices and operations that were lost for lack of time or room.
    pub lost: u64,
    /// Why writing has failed, if it has.
    pub error: Option<String>,
}

/// A trace that goes on.
#[derive(Debug)]
pub struct Run {
    clock: Clock,
    events: Sender<Event>,
    lost: AtomicU64,
}

/// The one who ends it.
#[derive(Debug)]
pub struct Writer {
    thread: JoinHandle<Totals>,
}

/// Begins to write into a file, which is opened for appending. The first time in a process it takes up to 0.2 s: the
/// processor's counter is compared with the clock.
///
/// # Errors
/// No thread.
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
    /// The time, in the processor's unit. Some nanoseconds.
    #[inline]
    pub fn now(&self) -> u64 {
        self.clock.raw()
    }

    /// What [`Run::now`] looks at, for those who do not keep the trace from ending.
    pub fn clock(&self) -> Clock {
        self.clock.clone()
    }

    /// Names a client by its program.
    pub fn name_process(&self, process: Process) {
        let line = std::fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
        let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
        let program = String::from_utf8_lossy(program);
        let name = program.rsplit('/').next().unwrap_or_default().to_owned();
        self.send(Event::Process(process, name));
    }

    /// Names a track.
    pub fn name_track(&self, track: Track, name: impl Into<String>) {
        self.send(Event::Track(track, name.into()));
    }

    /// Writes a slice, or counts it as lost. Slices of a track come in the order of time.
    pub fn slice(&self, slice: Slice) {
        self.send(Event::Slice(slice));
    }

    /// So many were lost before they came here.
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
    /// Ends the trace, once engine and arbiter have let go of it.
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
