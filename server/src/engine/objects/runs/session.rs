//! Launch batches of a session.

use super::{FOR_MARK, LENGTHS, MOST, Marking, Params, Planned, UNBEGUN, Unfit};
use crate::engine::base::call::Incoming;
use crate::engine::base::call_error::CallError;
use crate::engine::calls::function;
use crate::engine::gpu::copy_kernel::{MoveKernel, Moves};
use crate::engine::objects::levels::session::{confinement, note_fill};
use crate::engine::objects::marks::session::writer;
use crate::engine::objects::moves::session::{move_kernel, note_moved, pieces};
use crate::engine::objects::pace::session::prepare_work;
use crate::engine::objects::pace::{Length, Runs};
use crate::engine::objects::streams::Stream;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_proto::message::{Launch, ManagedMove, Mark, Op, PARAMS_MAX};
use mpsshim_proto::ring::{Message, Place, Violation};
use std::time::Instant;

impl Session {
    /// Submits the launches at the ring's tail to the driver as one graph, possibly with the mark after them, and
    /// consumes them. Returns the number of messages; 0 if the first one must be executed individually.
    ///
    /// # Errors
    /// The client violated the ring protocol.
    pub fn launch_run(&mut self, shared: &Shared) -> Result<u64, Violation> {
        let most = shared.gpu.launch_run.min(MOST);
        if most < 2 || self.inbox.held.any() || !self.objects.graphs.captures.is_empty() {
            return Ok(0);
        }
        let mut run = std::mem::take(&mut self.flow.planned);
        let mark = self.plan(shared, most, &mut run);
        let launched = mark.map(|mark| self.launch_planned(shared, &run, mark));
        run.clear();
        self.flow.planned = run;
        Ok(launched?.unwrap_or(0))
    }

    /// Collects the launches at the ring's tail that can be in a batch, and the mark after them. An invalid message
    /// ends the batch; its error is reported when it is executed individually.
    fn plan(
        &mut self,
        shared: &Shared,
        most: usize,
        run: &mut Vec<Planned>,
    ) -> Result<Option<Marking>, Violation> {
        let mut place = self.inbox.consumer.place();
        while run.len() < most {
            let mut found = self.inbox.consumer.peek_at(&mut place)?;
            if found.is_none() && self.expects_mark(shared, run) {
                found = self.await_message(&mut place)?;
            }
            let Some(found) = found else { break };
            let Some(op @ (Op::Launch | Op::ManagedMove | Op::Mark)) = Op::from_u16(found.op)
            else {
                break;
            };
            let message = Incoming::in_ring(op, *self.inbox.consumer.memory(), &found);
            if op == Op::Mark {
                return Ok(self.marking(shared, run, message, place));
            }
            place = place.behind(&found);
            let planned = match op {
                Op::Launch => self.planned(shared, run.first(), message, place),
                _ => self.planned_move(shared, run.first(), message, place),
            };
            let Some(planned) = planned else {
                break;
            };
            run.push(planned);
        }
        Ok(None)
    }

    /// Returns the launch in a message if it can be in a batch that begins with `first`.
    fn planned(
        &mut self,
        shared: &Shared,
        first: Option<&Planned>,
        message: Incoming<'_>,
        end: Place,
    ) -> Option<Planned> {
        let body: Launch = message.body().ok()?;
        let len = body.param_len as usize;
        let fits = body.attributes == 0
            && len <= PARAMS_MAX
            && first.is_none_or(|first| first.body.stream == body.stream);
        fits.then_some(())?;
        let function = function::function(self, shared, body.function).ok()?;
        let fits = function.in_runs
            && !function.prints
            && function.length == Length::Short
            && body.param_len >= function.param_bytes;
        let raw = fits.then_some(function.raw)?;
        let (device, gpu) = (function.device, &shared.gpu);
        gpu.devices[device].make_current(&gpu.driver).ok()?;
        let fill = function.fills(gpu, &body);
        let writes = function.note_launch();
        let params = message.in_place(size_of::<Launch>(), len).ok()?;
        // Parameters that need address translation cannot be used in place.
        if self.note_params(params, len) {
            return None;
        }
        if writes {
            self.note_written();
        }
        Some(Planned {
            body,
            raw,
            params: Params::InRing(params as u64),
            end,
            fill,
        })
    }

    /// Returns a launch that moves the pieces of managed memory in a message, if it can be in a batch that begins with
    /// `first`.
    fn planned_move(
        &mut self,
        shared: &Shared,
        first: Option<&Planned>,
        message: Incoming<'_>,
        end: Place,
    ) -> Option<Planned> {
        let body: ManagedMove = message.body().ok()?;
        let fits = first.is_none_or(|first| first.body.stream == body.stream);
        fits.then_some(())?;
        let index = self.objects.streams.index(body.stream).ok()?;
        let device = self.objects.streams.at(index).ok()?.device;
        let gpu = &shared.gpu;
        gpu.devices[device].make_current(&gpu.driver).ok()?;
        let pieces = pieces(self, message, &body).ok()?;
        let (kernel, moves) = move_kernel(self, shared, index, &body, &pieces).ok()??;
        Some(Planned {
            body: Launch {
                stream: body.stream,
                grid: [1; 3],
                block: [MoveKernel::THREADS, 1, 1],
                param_len: Moves::PARAMS as u32,
                ..Launch::default()
            },
            raw: kernel.function(),
            params: Params::Moves(Box::new((moves, pieces))),
            end,
            fill: 0.0,
        })
    }

    /// Whether the batch has at most one launch, with managed memory that is moved around it, on an idle stream, of a client
    /// that usually waits for each launch.
    fn expects_mark(&self, shared: &Shared, run: &[Planned]) -> bool {
        let Some(first) = run.first() else {
            return false;
        };
        let launches = run.iter().filter(|planned| planned.pieces().is_none());
        if run.len() >= UNBEGUN || launches.count() > 1 {
            return false;
        }
        let threads = run.iter().map(Planned::threads).max().unwrap_or(0);
        let waits = |stream: &Stream| stream.is_fresh() && stream.waits_for_each;
        let expects =
            |stream: &Stream| waits(stream) && writer(self, &shared.gpu, stream, threads).is_some();
        self.objects
            .streams
            .get(first.body.stream)
            .is_ok_and(expects)
    }

    fn await_message(&mut self, place: &mut Place) -> Result<Option<Message>, Violation> {
        let since = Instant::now();
        loop {
            let found = self.inbox.consumer.peek_at(place)?;
            if found.is_some() || since.elapsed() > FOR_MARK {
                return Ok(found);
            }
            std::hint::spin_loop();
        }
    }

    /// Returns the mark in a message if it can be at the end of the batch.
    fn marking(
        &self,
        shared: &Shared,
        run: &[Planned],
        message: Incoming<'_>,
        at: Place,
    ) -> Option<Marking> {
        let body: Mark = message.body().ok()?;
        let fits = run.first()?.body.stream == body.stream && LENGTHS.contains(&run.len());
        fits.then_some(())?;
        let stream = self.objects.streams.get(body.stream).ok()?;
        let threads = run.iter().map(Planned::threads).max()?;
        Some(Marking {
            body,
            by: writer(self, &shared.gpu, stream, threads)?,
            context: shared.gpu.devices[stream.device].context()?,
            address: self.shared.segment.flag_address(body.slot).ok()?,
            end: at.after(message.len()),
        })
    }

    /// Submits the batch and returns the number of messages; `None` if nothing was launched.
    fn launch_planned(
        &mut self,
        shared: &Shared,
        run: &[Planned],
        mark: Option<Marking>,
    ) -> Option<u64> {
        let first = run.first()?;
        let messages = |run: &[Planned]| run.len() + usize::from(mark.is_some());
        let end_of = |run: &[Planned]| match mark {
            Some(mark) => Some(mark.end),
            None => run.last().map(|last| last.end),
        };
        // With single launches, an idle GPU starts the first while the rest are prepared; a batch would keep it idle
        // meanwhile.
        let stays_idle = mark.is_none() || run.len() > UNBEGUN;
        let stream = self.objects.streams.get(first.body.stream).ok()?;
        let fits = messages(run) > 1 && stream.takes_runs() && !(stays_idle && stream.is_fresh());
        fits.then_some(())?;
        let (index, raw) =
            prepare_work(self, &shared.gpu, first.body.stream, Runs::Nothing).ok()?;
        // The nodes of a graph are not confined.
        let is_confined = |waves| confinement(self, &shared.gpu, index, waves).is_some();
        if is_confined(0.0) && run.iter().any(|one| is_confined(one.fill)) {
            return None;
        }
        let begun = self.trace_clock(shared);
        // They may be more than will be launched: the rest is not consumed.
        self.note_commands_before(end_of(run)?).ok()?;
        let stream = self.objects.streams.at_mut(index).ok()?;
        let room = shared.gpu.window().min(stream.pace.window()) as usize / 4;
        if room < 2 || mark.is_some() && run.len() > room {
            return None;
        }
        let priority = stream.given_priority();
        let chains = &mut stream.chains;
        let len = run.len().min(room);
        let chain = chains.longest(&shared.gpu.driver, len, first, mark.as_ref(), priority)?;
        let run = &run[..chain.kernels.len()];
        match chain.set(&shared.gpu.driver, run, mark.as_ref()) {
            Ok(()) => {}
            Err(Unfit::Function(handle)) => {
                self.objects.functions.get_mut(handle).ok()?.in_runs = false;
                return None;
            }
            Err(Unfit::Mark) => {
                chains.refuse(&shared.gpu.driver);
                return None;
            }
        }
        let end = end_of(run)?;
        // Noted before the launch, since a fault may be seen before it returns.
        for one in run.iter().filter(|one| one.pieces().is_none()) {
            self.shared.launched.note(one.body.function, index);
        }
        let exec = chain.exec;
        let flag = mark.as_ref().map(|mark| (mark.body.slot, mark.body.value));
        let expected = flag.map(|(slot, value)| self.expect_mark(index, slot, value));
        let expected = expected.transpose().ok()?;
        if shared.gpu.driver.graph.launch(exec, raw).is_err() {
            let stream = self.objects.streams.at_mut(index).ok()?;
            stream.chains.refuse(&shared.gpu.driver);
            if let Some(expected) = expected {
                self.withdraw_mark(index, expected);
            }
            return None;
        }
        self.inbox.consumer.consume_to(end);
        let mut launches = 0;
        for one in run {
            match one.pieces() {
                None => launches += 1,
                Some(pieces) => note_moved(self, index, pieces),
            }
        }
        self.flow.counts.launches += launches;
        let messages = messages(run) as u64;
        let counted = match flag {
            Some(flag) => {
                self.flow.marks.note();
                self.marked(&shared.gpu, index, messages, flag)
            }
            None => self.submitted(&shared.gpu, index, messages),
        };
        if let Err(CallError::Status(status)) = counted {
            shared.gpu.note_status(status);
            // If the context is lost, the session has ended before the client finds the status.
            if !(shared.gpu.is_lost() && self.shared.goes_on(&shared.gpu)) {
                self.post_error(status);
            }
        }
        if launches != 0 {
            let fill = run.iter().map(|one| one.fill).sum::<f32>() / launches as f32;
            note_fill(self, index, fill);
        }
        if let Some(begun) = begun {
            self.record_run(shared, begun, run, mark.map(|mark| mark.body));
        }
        Some(messages)
    }

    /// Destroys all chains, because functions are about to be unloaded or replaced.
    pub fn end_runs(&mut self, shared: &Shared) {
        let streams = self
            .objects
            .streams
            .iter_mut()
            .chain(&mut self.objects.retired);
        for stream in streams.filter(|stream| stream.chains.any()) {
            let device = &shared.gpu.devices[stream.device];
            if device.make_current(&shared.gpu.driver).is_ok() {
                stream.chains.end(&shared.gpu.driver);
            }
        }
    }
}
