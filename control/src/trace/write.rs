//! The file: a JSON array of trace events, one a line. Several servers append to it one after the other, whole lines each
//! time; the daemon writes its first and last lines.

use super::naming::Naming;
use super::{Blockers, Detail, Event, Slice, Totals};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use nix::time::{ClockId, clock_gettime};
use quanta::Clock;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Bytes that are written together.
const CHUNK: usize = 64 << 10;
/// Maximum delay of a line that waits for others.
const PATIENCE: Duration = Duration::from_millis(200);

/// Converts the processor's counter to microseconds of `CLOCK_MONOTONIC`, which is the same in all processes.
pub struct Timeline {
    clock: Clock,
    counter: u64,
    nanoseconds: u64,
}

impl Timeline {
    /// Calibrates by reading both clocks now.
    pub fn new(clock: Clock) -> Timeline {
        let counter = clock.raw();
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
            .map_or(0, |time| Duration::from(time).as_nanos() as u64);
        Timeline {
            clock,
            counter,
            nanoseconds: now,
        }
    }

    fn nanoseconds(&self, time: u64) -> u64 {
        // A slice that began before the trace starts with the trace.
        self.nanoseconds + self.clock.delta_as_nanos(self.counter, time)
    }
}

/// Writes events until all senders are gone.
pub fn run(mut file: File, events: &Receiver<Event>, time: &Timeline) -> Totals {
    let mut naming = Naming::new();
    let mut totals = Totals::default();
    let mut lines = Vec::with_capacity(2 * CHUNK);
    let mut flushed = Instant::now();
    loop {
        let event = match events.recv_timeout(PATIENCE) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        if let Some(event) = event {
            totals.written += u64::from(matches!(event, Event::Slice(_)));
            // Writing to memory cannot fail.
            let _ = line(&mut lines, &event, time, &mut naming);
        }
        for (process, name) in naming.found() {
            let _ = process_name(&mut lines, process, &name);
        }
        if lines.len() >= CHUNK || flushed.elapsed() >= PATIENCE {
            flush(&mut file, &mut lines, &mut totals);
            flushed = Instant::now();
        }
    }
    for (process, name) in naming.finish() {
        let _ = process_name(&mut lines, process, &name);
    }
    flush(&mut file, &mut lines, &mut totals);
    totals
}

/// After an error nothing more is written, since the last line may be incomplete.
fn flush(file: &mut File, lines: &mut Vec<u8>, totals: &mut Totals) {
    if totals.error.is_none()
        && let Err(error) = file.write_all(lines)
    {
        tracing::error!("The trace cannot be written: {error}");
        totals.error = Some(error.to_string());
    }
    lines.clear();
}

/// Writes values of a counter of a client at a time in nanoseconds.
fn counter(
    out: &mut Vec<u8>,
    process: super::Process,
    now: u64,
    name: &str,
    values: std::fmt::Arguments<'_>,
) -> io::Result<()> {
    writeln!(
        out,
        "{{\"ph\":\"C\",\"pid\":{},\"ts\":{}.{:03},\"name\":\"{name}\",\"args\":{{{values}}}}},",
        process.number(),
        now / 1000,
        now % 1000,
    )
}

fn line(out: &mut Vec<u8>, event: &Event, time: &Timeline, naming: &mut Naming) -> io::Result<()> {
    let value = match event {
        Event::Slice(found) => return slice(out, found, time),
        Event::DeviceWait(process, now, percentage)
        | Event::MemoryWait(process, now, percentage) => {
            let values = format_args!("\"%\":{percentage}");
            let name = match event {
                Event::DeviceWait(..) => "waits for the device",
                _ => "waits for device memory",
            };
            return counter(out, *process, time.nanoseconds(*now), name, values);
        }
        Event::Managed(process, now, [to_host, to_device])
        | Event::DeviceMemory(process, now, [to_host, to_device]) => {
            let values = format_args!("\"to the host\":{to_host},\"to devices\":{to_device}");
            let name = match event {
                Event::Managed(..) => "managed memory, bytes/s",
                _ => "moves of device memory, bytes/s",
            };
            return counter(out, *process, time.nanoseconds(*now), name, values);
        }
        Event::Process(process, _) if process.pid == 0 => {
            return process_name(out, *process, "process of another PID namespace");
        }
        Event::Process(process, uid) => {
            naming.begin(*process, *uid);
            return Ok(());
        }
        Event::Track(track, name) => {
            metadata("thread_name", track.process.number(), track.thread(), name)
        }
    };
    serde_json::to_writer(&mut *out, &value)?;
    out.write_all(b",\n")?;
    if let Event::Track(track, _) = event {
        // Without an index, tracks would be sorted by name.
        let (process, thread) = (track.process.number(), track.thread());
        let mut order = metadata("thread_sort_index", process, thread, "");
        order["args"] = json!({"sort_index": track.number});
        serde_json::to_writer(&mut *out, &order)?;
        out.write_all(b",\n")?;
    }
    Ok(())
}

fn process_name(out: &mut Vec<u8>, process: super::Process, name: &str) -> io::Result<()> {
    let value = metadata("process_name", process.number(), 0, name);
    serde_json::to_writer(&mut *out, &value)?;
    out.write_all(b",\n")
}

fn metadata(what: &str, process: u64, thread: u64, name: &str) -> Value {
    json!({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}})
}

fn slice(out: &mut Vec<u8>, slice: &Slice, time: &Timeline) -> io::Result<()> {
    let (begin, end) = (
        time.nanoseconds(slice.time.0),
        time.nanoseconds(slice.time.1),
    );
    let duration = end.saturating_sub(begin);
    let (process, thread) = (slice.track.process.number(), slice.track.thread());
    write!(
        out,
        "{{\"ph\":\"X\",\"pid\":{process},\"tid\":{thread},\"ts\":{}.{:03},\"dur\":{}.{:03},\"cat\":\"{}\",\"name\":",
        begin / 1000,
        begin % 1000,
        duration / 1000,
        duration % 1000,
        slice.category,
    )?;
    serde_json::to_writer(&mut *out, &*slice.name)?;
    match slice.detail {
        Detail::None => {}
        Detail::Bytes(bytes) => write!(out, ",\"args\":{{\"bytes\":{bytes}}}")?,
        Detail::Blocks(blocks) => write!(out, ",\"args\":{{\"blocks\":{blocks}}}")?,
        Detail::Operations(count) => write!(out, ",\"args\":{{\"operations\":{count}}}")?,
        Detail::Unfinished => write!(out, ",\"args\":{{\"unfinished\":true}}")?,
        Detail::Gate(blockers, unfinished) => {
            out.write_all(b",\"args\":")?;
            serde_json::to_writer(&mut *out, &gate(blockers, unfinished))?;
        }
    }
    out.write_all(b"},\n")
}

fn gate(blockers: Blockers, unfinished: bool) -> Value {
    let processes = blockers.processes.iter().filter(|process| **process != 0);
    let mut all: Vec<Value> = processes.map(|process| json!(process)).collect();
    if blockers.left {
        all.push(json!("clients that have left"));
    }
    let mut args = json!({"blockers": all});
    if unfinished {
        args["unfinished"] = json!(true);
    }
    args
}

#[cfg(test)]
mod tests {
    use super::super::{Process, Track};
    use super::*;

    #[test]
    fn what_cannot_be_written_is_said_in_the_end() {
        let folder = tempfile::tempdir().expect("directory");
        let path = folder.path().join("trace");
        File::create(&path).expect("create");
        let (mut read_only, mut totals) = (File::open(&path).expect("open"), Totals::default());
        let mut lines = b"x".to_vec();
        flush(&mut read_only, &mut lines, &mut totals);
        assert!(lines.is_empty() && totals.error.is_some());
    }

    fn written(event: &Event) -> Vec<Value> {
        let time = Timeline {
            clock: Clock::mock().0,
            counter: 1000,
            nanoseconds: 5_000_000,
        };
        let mut out = Vec::new();
        line(&mut out, event, &time, &mut Naming::new()).expect("memory");
        let text = String::from_utf8(out).expect("UTF-8");
        let value = |line: &str| {
            serde_json::from_str(line.strip_suffix(',').expect("a comma")).expect("JSON")
        };
        text.lines().map(value).collect()
    }

    #[test]
    fn events_are_lines_of_json() {
        let process = Process {
            session: 2,
            pid: 77,
        };
        let track = Track { process, number: 3 };
        let slice = Slice {
            track,
            name: "a\"<b>\n".into(),
            category: "kernel",
            time: (3500, 4001),
            detail: Detail::Blocks(9),
        };
        assert_eq!(
            written(&Event::Slice(slice)),
            [
                json!({"ph": "X", "pid": 77, "tid": 2 * 4096 + 3, "ts": 5002.5, "dur": 0.501, "cat": "kernel",
                    "name": "a\"<b>\n", "args": {"blocks": 9}})
            ]
        );
        assert_eq!(
            written(&Event::DeviceWait(process, 3500, 40)),
            [
                json!({"ph": "C", "pid": 77, "ts": 5002.5, "name": "waits for the device", "args": {"%": 40}})
            ]
        );
        assert_eq!(
            written(&Event::MemoryWait(process, 3500, 40)),
            [
                json!({"ph": "C", "pid": 77, "ts": 5002.5, "name": "waits for device memory", "args": {"%": 40}})
            ]
        );
        assert_eq!(
            written(&Event::DeviceMemory(process, 3500, [4096, 7])),
            [
                json!({"ph": "C", "pid": 77, "ts": 5002.5, "name": "moves of device memory, bytes/s",
                       "args": {"to the host": 4096, "to devices": 7}})
            ]
        );
        assert_eq!(
            written(&Event::Managed(process, 3500, [4096, 7])),
            [
                json!({"ph": "C", "pid": 77, "ts": 5002.5, "name": "managed memory, bytes/s",
                       "args": {"to the host": 4096, "to devices": 7}})
            ]
        );
        let client = |session, pid| Process { session, pid };
        let blockers = Blockers::new([client(3, 78), client(4, 0)].into_iter(), true);
        let waits = Slice {
            track,
            name: "gate: ImageLoad".into(),
            category: "gate",
            time: (0, 1500),
            detail: Detail::Gate(blockers, true),
        };
        assert_eq!(
            written(&Event::Slice(waits))[0]["args"],
            json!({"blockers": [78, (1 << 22) + 4, "clients that have left"], "unfinished": true})
        );
        let named = written(&Event::Track(track, "stream 1".into()));
        assert_eq!(named[0]["args"], json!({"name": "stream 1"}));
        assert_eq!(named[1]["args"], json!({"sort_index": 3}));
        let nobody = Process { session: 2, pid: 0 };
        let named = written(&Event::Process(nobody, 7));
        assert_eq!(named[0]["pid"], (1 << 22) + 2);
    }
}
