//! What was sent of each kind, how it went, and what the time was spent on.

use mpsshim_api::cuda::CUresult;
use mpsshim_proto::message::Op;
use mpsshim_tests::fuzzing::client::Sent;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Refusals as the server logs them, of posts too, which have no answer: by opcode and status.
static REFUSED: LazyLock<Mutex<BTreeMap<(String, String), u64>>> = LazyLock::new(Mutex::default);

/// Parts of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Sessions begin.
    Connect,
    /// Messages are written, and answers awaited.
    Send,
    /// Rings are emptied at the end.
    Settle,
    /// Sessions go.
    End,
    /// What they had comes back.
    Look,
}

const PARTS: [Part; 5] = [
    Part::Connect,
    Part::Send,
    Part::Settle,
    Part::End,
    Part::Look,
];

#[derive(Default)]
struct Kind {
    sent: u64,
    /// Of those whose answer was awaited.
    succeeded: u64,
    refused: u64,
    ended: u64,
    stuck: u64,
    took: Duration,
    longest: Duration,
}

/// Counts and times of a run.
#[derive(Default)]
pub struct Summary {
    kinds: BTreeMap<u16, Kind>,
    parts: [Duration; PARTS.len()],
}

impl Summary {
    /// Has the server's refusals counted from now on, and printed if so wanted.
    pub fn listen(print: bool) {
        // Nobody else in this process subscribes.
        let _ = tracing::subscriber::set_global_default(Refusals { print });
    }

    /// Runs a part of a case.
    pub fn time<R>(&mut self, part: Part, run: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let result = run();
        self.parts[part as usize] += began.elapsed();
        result
    }

    /// A message was sent as `op`, and answered with `status` if that was awaited.
    pub fn count(&mut self, op: Op, sent: &Sent, status: Option<CUresult>, took: Duration) {
        self.parts[Part::Send as usize] += took;
        let kind = self.kinds.entry(op as u16).or_default();
        kind.sent += 1;
        kind.took += took;
        kind.longest = kind.longest.max(took);
        match (sent, status) {
            (Sent::Ended(_), _) => kind.ended += 1,
            (Sent::Stuck, _) => kind.stuck += 1,
            (Sent::Fine, Some(status)) if status.is_ok() => kind.succeeded += 1,
            (Sent::Fine, Some(_)) => kind.refused += 1,
            (Sent::Fine, None) => {}
        }
    }

    /// As a table.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, text: &mut String) -> fmt::Result {
        for part in PARTS {
            let spent = self.parts[part as usize].as_secs_f64();
            writeln!(text, "{part:?} {spent:.2} s")?;
        }
        let refused = REFUSED.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(
            text,
            "opcode: sent, answered with success, with a refusal, session ended, stuck; milliseconds, longest; \
             refusals that the server logged by status"
        )?;
        for op in Op::ALL {
            let none = Kind::default();
            let kind = self.kinds.get(&(*op as u16)).unwrap_or(&none);
            write!(
                text,
                "{op:?}: {} {} {} {} {}; {:.1} {:.1};",
                kind.sent,
                kind.succeeded,
                kind.refused,
                kind.ended,
                kind.stuck,
                kind.took.as_secs_f64() * 1e3,
                kind.longest.as_secs_f64() * 1e3,
            )?;
            let name = format!("{op:?}");
            let of_this = |((known, _), _): &(&(String, String), &u64)| *known == name;
            for ((_, status), count) in refused.iter().filter(of_this) {
                write!(text, " {status} {count}")?;
            }
            writeln!(text)?;
        }
        Ok(())
    }
}

/// Counts what the server logs of messages that it refuses.
struct Refusals {
    print: bool,
}

#[derive(Default)]
struct Fields {
    op: Option<String>,
    status: Option<String>,
    session: Option<u64>,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "session" {
            self.session = Some(value);
        }
    }
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "op" => self.op = Some(format!("{value:?}")),
            "status" => self.status = Some(format!("{value:?}")),
            _ => {}
        }
    }
}

impl Subscriber for Refusals {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::DEBUG
            && metadata.is_event()
            && metadata.target().contains("::calls")
            && metadata.fields().field("op").is_some()
    }
    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        if let (Some(op), Some(status)) = (fields.op, fields.status) {
            if self.print {
                eprintln!("  {} {op}: {status}", fields.session.unwrap_or(0));
            }
            let mut refused = REFUSED.lock().unwrap_or_else(PoisonError::into_inner);
            *refused.entry((op, status)).or_default() += 1;
        }
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
