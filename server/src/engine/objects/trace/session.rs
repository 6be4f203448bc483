//! Trace records of a session.

use super::{Kind, RECORDS, Subject, Tracer, What};
use crate::engine::base::call::Incoming;
use crate::engine::base::waits::Wait;
use crate::engine::calls::{self, Undone};
use crate::engine::objects::runs::Planned;
use crate::engine::objects::streams::{Point, Stream};
use crate::engine::objects::trace::traces::Joined;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_proto::message::{Launch, Mark, Memset, Op};
use mpsshim_proto::ops::Traced;
use mpsshim_proto::ring::Place;
use rtrb::RingBuffer;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Session {
    /// Joins the current trace, if there is one. Returns whether the session takes part in it.
    fn join_trace(&mut self, shared: &Shared) -> bool {
        // The trace that the session had joined may have ended and another begun.
        let known = self.tracer.as_ref().map(|tracer| tracer.of);
        if known.is_some() && known == Some(shared.traces.latest.load(Ordering::Relaxed)) {
            return true;
        }
        let mut state = shared.traces.state.lock();
        let Some(run) = state.run.clone() else {
            return false;
        };
        let (producer, consumer) = RingBuffer::new(RECORDS);
        state.joined.push(Joined {
            session: Arc::clone(&self.shared),
            records: consumer,
        });
        let mut tracer = Tracer {
            of: state.number,
            clock: run.clock(),
            records: producer,
            lost: 0,
            saved: (0, 0),
            wanting: Arc::clone(&state.wanting),
            began: state.began,
            wanted: None,
        };
        drop(state);
        let now = tracer.clock.raw();
        for stream in self
            .objects
            .streams
            .iter()
            .filter(|stream| !stream.capturing)
        {
            for point in stream.points() {
                let stream = stream.number;
                let (kind, amount, ops) = (Kind::Earlier, 0, point.ops);
                let what = What::Operation {
                    stream,
                    ops,
                    kind,
                    amount,
                };
                tracer.record(now, now, what);
                let own = true;
                tracer.record(now, now, What::Point { stream, point, own });
            }
        }
        self.tracer = Some(tracer);
        true
    }

    /// Returns the subject of a message. The client may change the message meanwhile, which only affects its own trace.
    fn subject(&self, message: Incoming<'_>) -> Subject {
        let word = |at| message.word(at);
        let operation = |stream, kind, amount| Ok(Subject::operation(word(stream), kind, amount));
        let found = match message.op.traced() {
            Traced::Nothing if message.op.is_slow() => Ok(Subject::Call),
            Traced::Nothing => Ok(Subject::Nothing),
            Traced::Launch => message.body().map(|body: Launch| Subject::Launch {
                stream: body.stream,
                function: body.function,
                blocks: body.blocks(),
            }),
            Traced::Graph { stream } => operation(stream, Kind::Graph, 0),
            Traced::Copy { stream, len } => operation(stream, Kind::Copy, len.map_or(0, word)),
            Traced::Set => message.body().map(|body: Memset| {
                let row = body.width.saturating_mul(body.element.into());
                Subject::operation(body.stream, Kind::Set, row.saturating_mul(body.height))
            }),
            Traced::Wait => message.body().map(Subject::Wait),
        };
        found.unwrap_or(Subject::Nothing)
    }

    /// Returns the trace number of a function's name, which is looked up once per trace.
    fn traced_name(&mut self, shared: &Shared, function: u64, of: u32) -> u32 {
        let Ok(function) = self.objects.functions.get_mut(function) else {
            return 0;
        };
        if function.traced.0 != of {
            function.traced = (of, shared.traces.number(&function.key.0));
        }
        function.traced.1
    }

    /// Whether the message at this position is a mark.
    fn is_mark_at(&mut self, mut place: Place) -> bool {
        let message = self.inbox.consumer.peek_at(&mut place);
        matches!(message, Ok(Some(message)) if message.op == Op::Mark as u16)
    }

    /// Records the execution of a message; `next` is the position behind it.
    fn record(
        &mut self,
        shared: &Shared,
        op: Op,
        subject: Subject,
        next: Place,
        (begun, ended): (u64, u64),
    ) {
        let Some(mut tracer) = self.tracer.take() else {
            return;
        };
        let (stream, kind, amount) = match subject {
            Subject::Nothing => {
                self.tracer = Some(tracer);
                return;
            }
            Subject::Call => {
                tracer.record(begun, ended, What::Call(op));
                self.tracer = Some(tracer);
                return;
            }
            Subject::Wait(mark) => (mark.stream, None, 0),
            Subject::Operation {
                stream,
                kind,
                amount,
            } => (stream, Some(kind), amount),
            Subject::Launch {
                stream,
                function,
                blocks,
            } => {
                let name = self.traced_name(shared, function, tracer.of);
                (stream, Some(Kind::Kernel(name)), blocks)
            }
        };
        // A mark that follows immediately shows completion as well.
        let may_have = kind.is_some() && !self.is_mark_at(next);
        if let Ok(stream) = self.objects.streams.get_mut(stream)
            && !stream.capturing
        {
            if let Some(kind) = kind {
                let what = What::Operation {
                    stream: stream.number,
                    ops: stream.ops(),
                    kind,
                    amount,
                };
                tracer.record(begun, ended, what);
            }
            let mark = match subject {
                Subject::Wait(mark) => Some(mark),
                _ => None,
            };
            tracer.record_points(&shared.gpu, stream, (mark, may_have), (begun, ended));
        }
        self.tracer = Some(tracer);
    }

    /// The clock of the current trace, if there is one and the session takes part in it.
    #[inline]
    pub fn trace_clock(&mut self, shared: &Shared) -> Option<u64> {
        match shared.gpu.is_tracing() {
            true => self.traced_now(shared),
            false => None,
        }
    }

    #[cold]
    fn traced_now(&mut self, shared: &Shared) -> Option<u64> {
        self.join_trace(shared);
        self.tracer.as_ref().map(|tracer| tracer.clock.raw())
    }

    /// Number and clock of the current trace, if there is one.
    pub fn trace_point(&mut self, shared: &Shared) -> Option<(u32, u64)> {
        let now = self.trace_clock(shared)?;
        Some((self.tracer.as_ref()?.of, now))
    }

    /// Records a completed wait at the gate.
    pub fn record_wait(&mut self, shared: &Shared, wait: &Wait) {
        let Some((of, now)) = self.trace_point(shared) else {
            return;
        };
        if let Some(tracer) = &mut self.tracer {
            let begun = wait.begun_in(of, tracer.began);
            tracer.record(begun, now, What::Gate(wait.op, wait.traced_blockers()));
        }
    }

    /// Records launches, and the mark after them, that were submitted to the driver together since `begun`. Each is
    /// recorded as if it had taken an equal part of the time.
    #[cold]
    pub fn record_run(&mut self, shared: &Shared, begun: u64, run: &[Planned], mark: Option<Mark>) {
        let (Some(mut tracer), Some(first)) = (self.tracer.take(), run.first()) else {
            return;
        };
        let ended = tracer.clock.raw();
        // A mark that follows immediately shows completion as well.
        let may_have = mark.is_none() && !self.is_mark_at(self.inbox.consumer.place());
        let each = ended.saturating_sub(begun) / run.len() as u64;
        let ops = self
            .objects
            .streams
            .get(first.body().stream)
            .map_or(0, Stream::ops);
        let before = ops.saturating_sub(run.len() as u64 + u64::from(mark.is_some()));
        for (at, launch) in (0..).zip(run) {
            let (kind, amount) = match launch.pieces() {
                None => {
                    let name = self.traced_name(shared, launch.body().function, tracer.of);
                    (Kind::Kernel(name), launch.body().blocks())
                }
                Some(pieces) => (Kind::Copy, pieces.len()),
            };
            let Ok(stream) = self.objects.streams.get(launch.body().stream) else {
                continue;
            };
            let what = What::Operation {
                stream: stream.number,
                ops: before + at + 1,
                kind,
                amount,
            };
            tracer.record(begun + at * each, begun + (at + 1) * each, what);
        }
        if let Ok(stream) = self.objects.streams.get_mut(first.body().stream) {
            tracer.record_points(&shared.gpu, stream, (mark, may_have), (ended, ended));
        }
        self.tracer = Some(tracer);
    }

    /// Records flags that streams have got while nothing was dispatched.
    pub fn trace_points(&mut self, points: &[(u32, Point)]) {
        if let Some(tracer) = &mut self.tracer {
            let now = tracer.clock.raw();
            for (stream, point) in points {
                let what = What::Point {
                    stream: *stream,
                    point: *point,
                    own: true,
                };
                tracer.record(now, now, what);
            }
        }
    }
}

/// [`calls::perform`], recorded if a trace is active.
///
/// # Errors
/// See [`Undone`].
#[inline]
pub fn execute(
    shared: &Shared,
    session: &mut Session,
    message: Incoming<'_>,
) -> Result<(), Undone> {
    if shared.gpu.is_tracing() {
        return execute_traced(shared, session, message);
    }
    calls::perform(shared, session, message)
}

#[cold]
fn execute_traced(
    shared: &Shared,
    session: &mut Session,
    message: Incoming<'_>,
) -> Result<(), Undone> {
    if !session.join_trace(shared) {
        return calls::perform(shared, session, message);
    }
    let now = |session: &Session| {
        session
            .tracer
            .as_ref()
            .map_or(0, |tracer| tracer.clock.raw())
    };
    let subject = session.subject(message);
    let begun = now(session);
    let outcome = calls::perform(shared, session, message);
    if outcome.is_ok() {
        let ended = now(session);
        let next = session.inbox.consumer.place().after(message.len());
        session.record(shared, message.op, subject, next, (begun, ended));
    }
    outcome
}

impl Subject {
    fn operation(stream: u64, kind: Kind, amount: u64) -> Subject {
        Subject::Operation {
            stream,
            kind,
            amount,
        }
    }
}
