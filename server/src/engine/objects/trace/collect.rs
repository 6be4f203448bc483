//! The collector, which turns records and flags into slices.
//!
//! A stream's operations complete in order, and a flag shows that all operations up to some number are done. Operations
//! found done in the same poll form one slice, named after them. It begins when the first of them was submitted or the
//! preceding slice ended, whichever is later, and ends with the poll. In addition, each operation has a slice of its
//! own on the submissions track.

use super::{Kind, Record, What};
use crate::engine::objects::streams::Point;
use crate::engine::objects::trace::traces::Joined;
use crate::engine::scheduling::dispatch::run_ahead;
use crate::engine::session::SessionShared;
use crate::engine::threads::shared::Shared;
use mpsshim_control::trace::{Detail, Process, Run, Slice, Track};
use mpsshim_proto::message::Op;
use mpsshim_proto::segment::reached;
use rtrb::Consumer;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Range of the poll interval: short while work is in flight, growing while nothing happens.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_micros(500);
/// Interval of the values of a client's counters, in nanoseconds.
const COUNTED: u64 = 10_000_000;
/// Most kinds of operations in the name of a slice.
const NAMED: usize = 3;

/// Track numbers of a client; its streams have the numbers from `STREAMS` on.
const SUBMISSIONS: u64 = 0;
const WAITS: u64 = 1;
const STREAMS: u64 = 2;

impl Shared {
    /// Starts or stops tracing; returns when all records of the previous trace have been collected.
    ///
    /// # Errors
    /// The error of the thread's creation.
    pub fn trace(self: &Arc<Shared>, run: Option<Arc<Run>>) -> std::io::Result<()> {
        let mut state = self.traces.state.lock();
        self.gpu.tracing.store(false, Ordering::SeqCst);
        state.run = None;
        if let Some(collector) = state.collector.take() {
            drop(state);
            // Nothing is left to collect if it has panicked.
            let _ = collector.join();
            state = self.traces.state.lock();
        }
        let Some(run) = run else { return Ok(()) };
        state.number += 1;
        self.traces.latest.store(state.number, Ordering::Relaxed);
        state.joined.clear();
        state.numbers.clear();
        state.names.clear();
        state.wanting = Arc::default();
        state.began = run.clock().raw();
        let (shared, told) = (Arc::clone(self), Arc::clone(&run));
        let collector = std::thread::Builder::new()
            .name("trace".into())
            .spawn(move || collect(&shared, &told))?;
        state.collector = Some(collector);
        state.run = Some(run);
        self.gpu.tracing.store(true, Ordering::SeqCst);
        Ok(())
    }
}

/// Collects until the trace ends.
fn collect(shared: &Arc<Shared>, run: &Arc<Run>) {
    // The kernel may otherwise delay each short sleep by 50 µs, and by much more when all CPUs are busy.
    // SAFETY: a plain system call on the calling thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000) };
    // A late poll is recorded as a wrong time.
    run_ahead();
    let mut names = Names::default();
    let mut clients: Vec<Client> = Vec::new();
    let mut pause = SHORTEST;
    loop {
        // Read before the records, so that everything recorded up to this point is collected.
        let over = !shared.gpu.is_tracing() && shared.traces.state.lock().run.is_none();
        let joined = shared.traces.take_joined();
        clients.extend(joined.into_iter().map(|joined| Client::new(joined, run)));
        let mut busy = false;
        clients.retain_mut(|client| {
            let gone = client.records.is_abandoned();
            client.read(shared, run, &mut names);
            client.look(shared, run, &names);
            client.count(run);
            if gone {
                client.end(run, &names);
            }
            busy |= client.is_busy();
            !gone
        });
        if over {
            clients
                .iter_mut()
                .for_each(|client| client.end(run, &names));
            tell_waiting(shared, run, &clients);
            return;
        }
        pause = match busy {
            true => SHORTEST,
            false => (pause * 5 / 4).min(LONGEST),
        };
        std::thread::sleep(pause);
    }
}

/// Kernel names as displayed.
#[derive(Default)]
struct Names(Vec<Arc<str>>);

impl Names {
    fn learn(&mut self, shared: &Shared) {
        let new = shared.traces.names_from(self.0.len());
        self.0.extend(new.iter().map(|name| shown(name)));
    }

    fn of(&self, kind: Kind) -> Arc<str> {
        match kind {
            Kind::Kernel(number) => {
                let name = (number as usize)
                    .checked_sub(1)
                    .and_then(|at| self.0.get(at));
                name.cloned().unwrap_or_else(|| "kernel".into())
            }
            Kind::Graph => "graph".into(),
            Kind::Copy => "copy".into(),
            Kind::Set => "memset".into(),
            Kind::Earlier => "earlier work".into(),
        }
    }

    fn knows(&self, kind: Kind) -> bool {
        !matches!(kind, Kind::Kernel(number) if number as usize > self.0.len())
    }
}

/// Demangles a C++ name.
fn shown(name: &[u8]) -> Arc<str> {
    let name = name.strip_suffix(b"\0").unwrap_or(name);
    let source = cpp_demangle::Symbol::new(name).ok();
    let source = source.and_then(|symbol| symbol.demangle().ok());
    source.map_or_else(|| String::from_utf8_lossy(name).into(), Into::into)
}

fn category(kind: Kind) -> &'static str {
    match kind {
        Kind::Kernel(_) | Kind::Graph | Kind::Earlier => "kernel",
        Kind::Copy | Kind::Set => "copy",
    }
}

fn detail(kind: Kind, amount: u64) -> Detail {
    match kind {
        Kind::Kernel(_) => Detail::Blocks(amount),
        Kind::Copy | Kind::Set if amount > 0 => Detail::Bytes(amount),
        _ => Detail::None,
    }
}

struct Operation {
    begun: u64,
    ops: u64,
    kind: Kind,
    amount: u64,
}

/// Known state of a stream.
struct Stream {
    track: Track,
    /// Operations not known to be done.
    operations: VecDeque<Operation>,
    points: VecDeque<(Point, bool)>,
    /// When the latest completed operations were found done.
    done: u64,
}

struct Wait {
    begun: u64,
    slot: u32,
    value: u32,
}

struct Client {
    session: Arc<SessionShared>,
    process: Process,
    records: Consumer<Record>,
    streams: BTreeMap<u32, Stream>,
    waits: VecDeque<Wait>,
    /// When the latest wait slice ended.
    waited: u64,
    /// When its counters were last read.
    counted: u64,
    /// Its waits for its devices then, and the percentage that was last written.
    device_wait: (Duration, u32),
    /// Likewise its waits for device memory.
    memory_wait: (Duration, u32),
    /// Bytes of managed memory that had been copied then, and the rates that were last written: to the host, to devices.
    managed: ([u64; 2], [u64; 2]),
    /// Likewise bytes of device memory that had been moved.
    device_memory: ([u64; 2], [u64; 2]),
}

/// Names a client and its first tracks.
fn introduce(session: &SessionShared, run: &Run) -> Process {
    let process = Process::from(&session.info);
    run.name_process(process, session.info.uid);
    let name = |number, name| run.name_track(Track { process, number }, name);
    name(SUBMISSIONS, "submissions");
    name(WAITS, "waits");
    process
}

/// Bytes of managed memory copied for a client: to the host, to devices.
fn moved(session: &SessionShared) -> [u64; 2] {
    let moves = session.moves();
    [moves.to_host.bytes, moves.to_device.bytes]
}

/// Which percentage of the time was waited since the last value, and `None` if that is the percentage that was last written.
fn part(last: &mut (Duration, u32), waited: Duration, between: u64) -> Option<u32> {
    let (before, written) = *last;
    let part = waited.saturating_sub(before).as_nanos() as f64 / between as f64;
    let percentage = (part * 100.0).round().min(100.0) as u32;
    *last = (waited, percentage);
    (percentage != written).then_some(percentage)
}

/// How many bytes per second came on since the last value, and `None` if these are the rates that were last written.
fn rates(last: &mut ([u64; 2], [u64; 2]), bytes: [u64; 2], between: u64) -> Option<[u64; 2]> {
    let (before, written) = *last;
    let rate = |at: usize| {
        let more = bytes[at].saturating_sub(before[at]) as f64;
        (more * 1e9 / between as f64) as u64
    };
    let rates = [rate(0), rate(1)];
    *last = (bytes, rates);
    (rates != written).then_some(rates)
}

/// Writes slices for sessions still waiting at the gate when the trace ends, including clients with no other records in
/// it.
fn tell_waiting(shared: &Shared, run: &Run, clients: &[Client]) {
    let (of, began) = {
        let state = shared.traces.state.lock();
        (state.number, state.began)
    };
    for session in shared.roster.session_list() {
        let Some(wait) = session.waits.present() else {
            continue;
        };
        let known = |client: &&Client| client.session.info.session == session.info.session;
        let process = match clients.iter().find(known) {
            Some(client) => client.process,
            None => introduce(&session, run),
        };
        run.slice(Slice {
            track: Track {
                process,
                number: SUBMISSIONS,
            },
            name: waited_with(wait.op),
            category: "gate",
            time: (wait.begun_in(of, began), run.now()),
            detail: Detail::Gate(wait.traced_blockers(), true),
        });
    }
}

impl Client {
    fn new(joined: Joined, run: &Run) -> Client {
        let process = introduce(&joined.session, run);
        Client {
            counted: run.now(),
            device_wait: (joined.session.standing.device_wait(), 0),
            memory_wait: (joined.session.suspension.waited(Instant::now()), 0),
            managed: (moved(&joined.session), [0; 2]),
            device_memory: (joined.session.suspension.moved_bytes(), [0; 2]),
            session: joined.session,
            process,
            records: joined.records,
            streams: BTreeMap::new(),
            waits: VecDeque::new(),
            waited: 0,
        }
    }

    fn track(&self, number: u64) -> Track {
        Track {
            process: self.process,
            number,
        }
    }

    fn is_busy(&self) -> bool {
        let in_flight = |stream: &Stream| !stream.points.is_empty();
        !self.waits.is_empty() || self.streams.values().any(in_flight)
    }

    /// Writes the values of its counters that have changed.
    fn count(&mut self, run: &Run) {
        let now = run.now();
        let between = run.clock().delta_as_nanos(self.counted, now);
        if between < COUNTED {
            return;
        }
        self.counted = now;
        self.count_waits(run, now, between);
        self.count_bytes(run, now, between);
    }

    /// For which part of the time it has waited for its devices, and for device memory.
    fn count_waits(&mut self, run: &Run, now: u64, between: u64) {
        let waited = self.session.standing.device_wait();
        if let Some(percentage) = part(&mut self.device_wait, waited, between) {
            run.device_wait(self.process, now, percentage);
        }
        let waited = self.session.suspension.waited(Instant::now());
        if let Some(percentage) = part(&mut self.memory_wait, waited, between) {
            run.memory_wait(self.process, now, percentage);
        }
    }

    /// How much managed memory was copied per second, and how much device memory was moved.
    fn count_bytes(&mut self, run: &Run, now: u64, between: u64) {
        if let Some(rates) = rates(&mut self.managed, moved(&self.session), between) {
            run.managed(self.process, now, rates);
        }
        let moved = self.session.suspension.moved_bytes();
        if let Some(rates) = rates(&mut self.device_memory, moved, between) {
            run.device_memory(self.process, now, rates);
        }
    }

    /// Reads the available records.
    fn read(&mut self, shared: &Shared, run: &Run, names: &mut Names) {
        // Not records that arrive meanwhile: a client that keeps producing would delay the others.
        for _ in 0..self.records.slots() {
            let Ok(record) = self.records.pop() else {
                return;
            };
            self.take(&record, shared, run, names);
        }
    }

    fn take(&mut self, record: &Record, shared: &Shared, run: &Run, names: &mut Names) {
        let Record { begun, ended, what } = *record;
        let submitted = |name, category, detail| Slice {
            track: self.track(SUBMISSIONS),
            name,
            category,
            time: (begun, ended),
            detail,
        };
        match what {
            What::Operation {
                stream,
                ops,
                kind,
                amount,
            } => {
                if !names.knows(kind) {
                    names.learn(shared);
                }
                if kind != Kind::Earlier {
                    run.slice(submitted(
                        names.of(kind),
                        "submission",
                        detail(kind, amount),
                    ));
                }
                self.stream(stream, run).operations.push_back(Operation {
                    begun,
                    ops,
                    kind,
                    amount,
                });
            }
            What::Point { stream, point, own } => {
                self.stream(stream, run).points.push_back((point, own));
            }
            What::Wait { slot, value } => self.waits.push_back(Wait { begun, slot, value }),
            What::Gate(op, blockers) => {
                let detail = Detail::Gate(blockers, false);
                run.slice(submitted(waited_with(op), "gate", detail));
            }
            What::Call(op) => run.slice(submitted(called(op).into(), "call", Detail::None)),
            What::Lost(count) => run.lose(count),
        }
    }

    fn stream(&mut self, number: u32, run: &Run) -> &mut Stream {
        let count = self.streams.len() as u64;
        let track = self.track(STREAMS + count);
        self.streams.entry(number).or_insert_with(|| {
            run.name_track(track, format!("stream {}", count + 1));
            Stream {
                track,
                operations: VecDeque::new(),
                points: VecDeque::new(),
                done: 0,
            }
        })
    }

    /// Polls the flags.
    fn look(&mut self, shared: &Shared, run: &Run, names: &Names) {
        let session = &self.session;
        for stream in self.streams.values_mut() {
            let is_done = |(point, own): &(Point, bool)| match own {
                true => reached(shared.gpu.flags.value(point.slot), point.value),
                false => reached(session.flag(point.slot), point.value),
            };
            // Flags are written in order.
            let count = stream
                .points
                .iter()
                .take_while(|point| is_done(point))
                .count();
            let last = stream.points.drain(..count).next_back();
            if let Some((point, _)) = last {
                stream.done_up_to(point.ops, run, names);
            }
        }
        let is_over = |wait: &Wait| reached(session.flag(wait.slot), wait.value);
        let over = self.waits.iter().take_while(|wait| is_over(wait)).count();
        for wait in self.waits.drain(..over) {
            self.waited = slice_of_wait(run, self.process, &wait, self.waited, Detail::None);
        }
    }

    /// Writes slices for unfinished operations and waits.
    fn end(&mut self, run: &Run, names: &Names) {
        for stream in self.streams.values_mut() {
            let operations = stream.operations.drain(..).collect::<Vec<_>>();
            stream.tell(&operations, run, names, true);
        }
        for wait in std::mem::take(&mut self.waits) {
            self.waited = slice_of_wait(run, self.process, &wait, self.waited, Detail::Unfinished);
        }
    }
}

/// Threads that wait at the same time share one track, so a slice begins no earlier than the preceding one has ended.
fn slice_of_wait(run: &Run, process: Process, wait: &Wait, before: u64, detail: Detail) -> u64 {
    let now = run.now();
    run.slice(Slice {
        track: Track {
            process,
            number: WAITS,
        },
        name: "wait".into(),
        category: "wait",
        time: (wait.begun.max(before), now),
        detail,
    });
    now
}

impl Stream {
    fn done_up_to(&mut self, ops: u64, run: &Run, names: &Names) {
        let count = self
            .operations
            .partition_point(|operation| operation.ops <= ops);
        let done: Vec<Operation> = self.operations.drain(..count).collect();
        self.tell(&done, run, names, false);
    }

    /// Writes one slice for all of these operations.
    fn tell(&mut self, done: &[Operation], run: &Run, names: &Names, unfinished: bool) {
        let Some(first) = done.first() else {
            return;
        };
        let now = run.now();
        let detail = match done {
            _ if unfinished => Detail::Unfinished,
            [one] => detail(one.kind, one.amount),
            _ => Detail::Operations(done.len() as u64),
        };
        run.slice(Slice {
            track: self.track,
            name: name_of(done, names),
            category: category(first.kind),
            time: (first.begun.max(self.done), now),
            detail,
        });
        self.done = now;
    }
}

/// Names a slice, such as `fill`, or `fill ×3, copy`.
fn name_of(operations: &[Operation], names: &Names) -> Arc<str> {
    if let [one] = operations {
        return names.of(one.kind);
    }
    let mut kinds: Vec<(Kind, usize)> = Vec::new();
    for operation in operations {
        match kinds.iter_mut().find(|(kind, _)| *kind == operation.kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((operation.kind, 1)),
        }
    }
    let one = |(kind, count): &(Kind, usize)| match count {
        1 => names.of(*kind).to_string(),
        count => format!("{} ×{count}", names.of(*kind)),
    };
    let mut parts: Vec<String> = kinds.iter().take(NAMED).map(one).collect();
    if kinds.len() > NAMED {
        parts.push("…".into());
    }
    parts.join(", ").into()
}

/// Names a wait at the gate.
fn waited_with(op: Op) -> Arc<str> {
    format!("gate: {}", called(op)).into()
}

/// Names a call by its message.
fn called(op: Op) -> String {
    format!("{op:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_source() {
        assert_eq!(&*shown(b"_Z4fillPji\0"), "fill(unsigned int*, int)");
        assert_eq!(&*shown(b"fill"), "fill");
        assert_eq!(&*shown(b"_Znonsense"), "_Znonsense");
        assert_eq!(&*shown(b"\xff"), "\u{fffd}");
    }

    #[test]
    fn a_slice_is_named_after_its_operations() {
        let names = Names(vec!["fill".into(), "add".into()]);
        let named = |kinds: &[Kind]| {
            let operation = |kind: &Kind| Operation {
                begun: 0,
                ops: 0,
                kind: *kind,
                amount: 0,
            };
            let operations: Vec<Operation> = kinds.iter().map(operation).collect();
            name_of(&operations, &names).to_string()
        };
        let [fill, add] = [Kind::Kernel(1), Kind::Kernel(2)];
        assert_eq!(named(&[fill]), "fill");
        assert_eq!(named(&[fill, fill, Kind::Copy]), "fill ×2, copy");
        assert_eq!(
            named(&[fill, add, Kind::Copy, Kind::Set]),
            "fill, add, copy, …"
        );
        assert_eq!(named(&[Kind::Kernel(0)]), "kernel");
    }
}
