//! Streams of a session: the order CUDA promises between default and blocking streams, and how much of each is
//! in flight.
//!
//! Every stream here is a non-blocking stream of the shared context; the legacy default stream's order is made
//! with events, and only where both sides have work that is not known to be done.

mod session;

use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::progress::Progress;
use crate::engine::base::rations::Holder;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::client_segment::Segment;
use crate::engine::gpu::green::GreenRef;
use crate::engine::gpu::host::Flag;
use crate::engine::objects::pace::Pace;
use crate::engine::objects::runs::Chains;
use mpsshim_api::cuda::*;
use mpsshim_proto::segment::reached;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How a stream is ordered against its context's legacy default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// `CU_STREAM_NON_BLOCKING`: not at all.
    Independent,
    /// Waits for the legacy stream at this position, and it for this one.
    Blocking(usize),
    /// It is the legacy stream.
    Legacy,
}

/// A flag that the GPU will write when a stream gets to a point.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    /// Operations of the stream it covers.
    pub ops: u64,
    /// The flag.
    pub slot: u32,
    /// What it will be then.
    pub value: u32,
}

/// A stream of a session.
#[derive(Debug)]
pub struct Stream {
    /// No other stream has it.
    pub number: u32,
    /// The driver's stream.
    pub raw: CUstream,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Its priority as the client gave it.
    pub priority: i32,
    /// The driver's priority of it when it was made, to find it again among the kept ones.
    pub raw_priority: i32,
    /// Its role.
    pub role: Role,
    /// Blocking streams of this legacy stream, by position.
    pub members: Vec<usize>,
    /// What it is given goes into a graph. Nothing of the server's own may get in there: no flags, no joins; and
    /// nothing is in flight on its account.
    pub capturing: bool,
    /// Operations submitted.
    ops: u64,
    /// Operations known to be complete.
    done: u64,
    /// `ops` when it was last asked whether the stream is used.
    seen: u64,
    checkpoints: VecDeque<Point>,
    /// The client's last mark.
    mark: Option<Point>,
    own_flag: Option<(Flag, u32)>,
    /// `ops` of this stream when the legacy stream last waited for it.
    joined: u64,
    /// `ops` of the legacy stream when this one last waited for it.
    seen_legacy: u64,
    join_event: Option<CUevent>,
    /// Some attribute is not what it was at first.
    has_attributes: bool,
    /// `ops` when `join_event` was last recorded.
    join_recorded: u64,
    /// The green context it is in.
    pub green: Option<GreenRef>,
    /// Graphs for runs of launches.
    pub chains: Chains,
    /// Between the client's last two marks was a single operation.
    pub waits_for_each: bool,
    /// How fast it gets on.
    pub pace: Pace,
    /// Where it notes how far it is.
    pub progress: Option<Progress>,
}

impl Stream {
    /// A stream with no work.
    pub fn new(
        gpu: &Gpu,
        holder: &Holder,
        raw: CUstream,
        device: Ordinal,
        (priority, raw_priority): (i32, i32),
        role: Role,
    ) -> Stream {
        Stream {
            number: gpu.streams.fetch_add(1, Ordering::Relaxed),
            raw,
            device,
            priority,
            raw_priority,
            role,
            members: Vec::new(),
            capturing: false,
            ops: 0,
            done: 0,
            seen: 0,
            checkpoints: VecDeque::new(),
            mark: None,
            own_flag: gpu.flags.for_stream(holder),
            joined: 0,
            seen_legacy: 0,
            join_event: None,
            has_attributes: false,
            join_recorded: 0,
            green: None,
            chains: Chains::default(),
            waits_for_each: false,
            pace: Pace::default(),
            progress: None,
        }
    }

    /// Takes notice of what the GPU has done; returns operations still in flight as far as is known. The client's
    /// own marks count: by forging one it misleads only the order of its own streams.
    #[inline]
    pub fn in_flight(&mut self, gpu: &Gpu, segment: &Segment) -> u64 {
        let marked = match self.mark {
            Some(mark) if reached(segment.flag(mark.slot), mark.value) => mark.ops,
            _ => 0,
        };
        self.ops - marked.max(self.take_notice(gpu))
    }

    /// Operations that the server's own flags, or the driver, say are done.
    pub fn take_notice(&mut self, gpu: &Gpu) -> u64 {
        while let Some(first) = self.checkpoints.front() {
            if !reached(gpu.flags.value(first.slot), first.value) {
                break;
            }
            self.pace.note_reached(first.ops - self.done, first.ops);
            self.done = first.ops;
            self.checkpoints.pop_front();
            if !self.checkpoints.is_empty() {
                self.pace.begin();
            }
        }
        if self.own_flag.is_none() && self.done != self.ops && self.ask_driver(gpu) {
            self.done = self.ops;
        }
        if self.done == self.ops
            && let Some(progress) = &mut self.progress
        {
            progress.settle();
        }
        self.done
    }

    /// Whether the driver says that everything submitted is done. A stream that captures must not be asked; the event from
    /// before says how far it is.
    fn ask_driver(&self, gpu: &Gpu) -> bool {
        let done = match self.join_event {
            _ if !self.capturing => gpu.driver.stream_query(self.raw),
            Some(event) if self.join_recorded == self.ops => gpu.driver.event_query(event),
            _ => return false,
        };
        done.is_ok()
    }

    /// To be called before the stream captures: what it was given so far can be told to be done then, too.
    ///
    /// # Errors
    /// The driver's.
    pub fn ready_for_capture(&mut self, gpu: &Gpu) -> Result<(), CUresult> {
        if self.own_flag.is_some() {
            return self.checkpoint(gpu);
        }
        if self.ops != self.done {
            self.record_join(gpu)?;
        }
        Ok(())
    }

    /// Whether it was given work since this was last asked, or has some.
    pub fn was_used(&mut self, gpu: &Gpu, segment: &Segment) -> bool {
        let seen = std::mem::replace(&mut self.seen, self.ops);
        seen != self.ops || self.in_flight(gpu, segment) != 0
    }

    /// Whether all that the driver was given is done. It does not capture.
    pub fn is_drained(&self, gpu: &Gpu) -> bool {
        let _ = gpu.devices[self.device].make_current(&gpu.driver);
        match gpu.driver.stream_query(self.raw) {
            Err(CUDA_ERROR_NOT_READY) => false,
            Err(status) => {
                gpu.note_status(status);
                true
            }
            Ok(()) => true,
        }
    }

    /// Whether it is more than a stream that another could take the place of.
    pub fn is_special(&self) -> bool {
        self.capturing || self.has_attributes || self.green.is_some()
    }

    /// Gives it another of the driver's streams; it has nothing in flight, and its old side is entered.
    pub fn replace(&mut self, gpu: &Gpu, raw: CUstream) {
        let device = &gpu.devices[self.device];
        let _ = device.make_current(&gpu.driver);
        self.chains.end(&gpu.driver);
        if let Some(event) = self.join_event.take() {
            let _ = gpu.driver.event_destroy(event);
        }
        let old = std::mem::replace(&mut self.raw, raw);
        device.keep_stream(&gpu.driver, self.raw_priority, old);
    }

    /// Operations submitted.
    pub fn ops(&self) -> u64 {
        self.ops
    }

    /// The server's flags that were not seen to be written, in order.
    pub fn points(&self) -> impl Iterator<Item = Point> + '_ {
        self.checkpoints.iter().copied()
    }

    /// The server's flag that will be written last.
    pub fn last_point(&self) -> Option<Point> {
        self.checkpoints.back().copied()
    }

    /// Looks how long its oldest checkpoint has not been reached; whether it takes long.
    pub fn look_at_pace(&mut self, gpu: &Gpu, now: Instant) -> bool {
        self.take_notice(gpu);
        let Some(first) = self.checkpoints.front() else {
            return false;
        };
        self.pace.note_waiting(first.ops - self.done, now);
        self.pace.is_long()
    }

    /// Whether so much is in flight that `window` allows no more. Sees to it that somebody will see the stream drain.
    ///
    /// # Errors
    /// The driver's; the context must be current.
    pub fn is_beyond(&mut self, gpu: &Gpu, window: u64) -> Result<bool, CUresult> {
        if self.ops - self.done < window || self.ops - self.take_notice(gpu) < window {
            return Ok(false);
        }
        // The window may have shrunk since the last checkpoint.
        if self.checkpoints.is_empty() {
            self.checkpoint(gpu)?;
        }
        Ok(true)
    }

    /// Operations that no checkpoint covers.
    #[inline]
    fn uncovered(&self) -> u64 {
        self.ops - self.checkpoints.back().map_or(self.done, |last| last.ops)
    }

    /// Notes that the client's own flag will be written after everything submitted so far.
    fn note_mark(&mut self, slot: u32, value: u32) {
        let before = self.mark.map_or(0, |mark| mark.ops);
        // It, and the mark.
        self.waits_for_each = self.ops == before + 2;
        self.mark = Some(Point {
            ops: self.ops,
            slot,
            value,
        });
        if let Some(progress) = &mut self.progress {
            progress.cover(slot, value);
        }
    }

    /// Nothing of it is in flight, by the driver's word.
    pub fn settle_progress(&mut self) {
        if let Some(progress) = &mut self.progress {
            progress.settle();
        }
    }

    /// What was begun was refused: whether something was submitted since the last mark, the counts say.
    pub fn take_back_begun(&mut self) {
        let covered = self.ops == self.done || self.mark.is_some_and(|mark| mark.ops == self.ops);
        if let Some(progress) = self.progress.as_mut().filter(|_| covered) {
            progress.take_back();
        }
    }

    /// Something is about to be submitted to it, or was.
    #[inline]
    fn begin_work(&mut self) {
        if let Some(progress) = &mut self.progress {
            progress.begin();
        }
    }

    /// Has the GPU tell the server when everything submitted so far is done.
    pub fn checkpoint(&mut self, gpu: &Gpu) -> Result<(), CUresult> {
        let Some((flag, value)) = self.own_flag.as_mut() else {
            return Ok(());
        };
        if self.capturing
            || self.ops == self.done
            || self
                .checkpoints
                .back()
                .is_some_and(|last| last.ops == self.ops)
        {
            return Ok(());
        }
        let next = value.wrapping_add(1);
        let address = gpu.flags.device_address(flag.slot);
        gpu.driver
            .stream_write_value32(self.raw, address, next, 0)?;
        *value = next;
        if self.checkpoints.is_empty() {
            self.pace.begin();
        }
        self.checkpoints.push_back(Point {
            ops: self.ops,
            slot: flag.slot,
            value: next,
        });
        Ok(())
    }

    /// Whether launches may be given to it as a graph. Nodes know nothing of a stream's attributes and of its part of a
    /// device.
    #[inline]
    pub fn takes_runs(&self) -> bool {
        !self.capturing && !self.has_attributes && self.green.is_none()
    }

    /// Whether nothing was submitted since the client's last mark: the GPU may be waiting for what comes next.
    #[inline]
    pub fn is_fresh(&self) -> bool {
        self.ops == self.mark.map_or(0, |mark| mark.ops)
    }

    /// Frees what belongs to the stream; the caller knows that it is idle, and has its context made current.
    pub fn release(mut self, gpu: &Gpu) {
        self.chains.end(&gpu.driver);
        if let Some(event) = self.join_event {
            let _ = gpu.driver.event_destroy(event);
        }
        if let Some((flag, _)) = self.own_flag.take() {
            gpu.flags.give_back(flag);
        }
        let kept = self.green.as_ref().is_none_or(|green| green.is_lasting());
        if kept && self.has_attributes {
            self.reset_attributes(gpu);
        }
        match self.green {
            Some(green) => green.end_stream(&gpu.driver, self.raw_priority, self.raw),
            // Its capture could not be ended: one that others took part in, or that failed.
            None if self.capturing && gpu.driver.is_capturing(self.raw) => {
                let _ = gpu.driver.context.stream_destroy(self.raw);
            }
            None => gpu.devices[self.device].keep_stream(&gpu.driver, self.raw_priority, self.raw),
        }
    }

    /// `cuStreamSetAttribute`. A driver that refuses says so in its log only: an attribute changes how fast work is
    /// done, not what comes of it.
    pub fn set_attribute(&mut self, gpu: &Gpu, id: u32, value: &[u8]) {
        self.has_attributes = true;
        set_attribute(gpu, self.raw, id, value);
    }

    /// Makes the stream as the next session expects it.
    fn reset_attributes(&self, gpu: &Gpu) {
        let priority = self.raw_priority.to_ne_bytes();
        let each: [(u32, &[u8]); 4] = [
            (CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, &[0; 32]),
            (CU_STREAM_ATTRIBUTE_PRIORITY, &priority),
            (CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, &[0, 1]),
            (CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN, &[0; 4]),
        ];
        for (id, value) in each {
            set_attribute(gpu, self.raw, id, value);
        }
    }

    fn record_join(&mut self, gpu: &Gpu) -> Result<CUevent, CUresult> {
        let event = match self.join_event {
            Some(event) => event,
            None => {
                let mut event = CUevent::NULL;
                gpu.driver
                    .event_create(&mut event, CU_EVENT_DISABLE_TIMING)?;
                self.join_event = Some(event);
                self.join_recorded = 0;
                event
            }
        };
        if self.join_recorded != self.ops {
            gpu.driver.event_record(event, self.raw, 0)?;
            self.join_recorded = self.ops;
        }
        Ok(event)
    }
}

fn set_attribute(gpu: &Gpu, stream: CUstream, id: u32, value: &[u8]) {
    let mut whole = [0; 64];
    whole[..value.len()].copy_from_slice(value);
    let set = gpu.driver.stream.stream_set_attribute(stream, id, &whole);
    if let Err(status) = set {
        tracing::debug!(id, %status, "an attribute of a stream was not set");
        gpu.note_status(status);
    }
}
