//! Streams of a session: ordering between default and blocking streams as CUDA specifies, and the work in flight of
//! each.
//!
//! Every stream is a non-blocking stream of the shared context. The order of the legacy default stream is established
//! with events, and only if both streams have work that is not known to be done.

mod session;

use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::progress::Progress;
use crate::engine::base::rations::Holder;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::client_segment::Segment;
use crate::engine::gpu::green::GreenRef;
use crate::engine::gpu::host::Flag;
use crate::engine::gpu::reserve::Extent;
use crate::engine::objects::levels::Level;
use crate::engine::objects::pace::Pace;
use crate::engine::objects::runs::Chains;
use mpsshim_api::cuda::*;
use mpsshim_proto::segment::reached;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Weight of the latest kernel in a stream's average part of the device, for each wave of its blocks: a kernel of many
/// waves takes longer than others.
const RECENT: f32 = 0.25;
/// Most waves that count.
const MOST_WAVES: f32 = 32.0;

/// A kernel with blocks for more than this part of the device leaves no room for others.
const FULL: f32 = 0.9;

/// How a stream is ordered against its context's legacy default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Not ordered: `CU_STREAM_NON_BLOCKING`.
    Independent,
    /// Blocking: it and the legacy stream at this index wait for each other.
    Blocking(usize),
    /// It is the legacy default stream.
    Legacy,
}

/// A flag that the GPU writes when a stream reaches this point.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    /// Number of the stream's operations that precede it.
    pub ops: u64,
    /// The flag's slot.
    pub slot: u32,
    /// Value that the flag will have.
    pub value: u32,
}

/// The flag and value that covered a stream's work before the next flag was expected, if any.
#[must_use]
pub struct Expected(Option<(u32, u32)>);

/// Range of the driver's priorities; bounded, because the server keeps streams of each priority for reuse.
const PRIORITIES: std::ops::RangeInclusive<i32> = -16..=0;

/// The nearest priority in the driver's range.
pub fn clamped(priority: i32) -> i32 {
    priority.clamp(*PRIORITIES.start(), *PRIORITIES.end())
}

/// The driver's stream that is not in use, of a stream whose kernels are confined at times.
#[derive(Debug)]
struct Twin {
    /// The green context without the device's reserve, to which one of the two streams belongs.
    green: GreenRef,
    raw: CUstream,
    raw_priority: i32,
    given: i32,
}

/// A stream of a session.
#[derive(Debug)]
pub struct Stream {
    /// Unique number in the server.
    pub number: u32,
    /// The driver's stream.
    pub raw: CUstream,
    /// Server's ordinal.
    pub device: Ordinal,
    /// The priority that the client set.
    pub priority: i32,
    /// The driver priority with which it was created, by which kept streams are found for reuse.
    pub raw_priority: i32,
    /// The driver priority that it has now.
    given: i32,
    /// Part of the device that its kernels can fill, on average over the latest ones.
    fill: f32,
    /// How often the blocks of the latest kernel fill the device.
    waves: f32,
    /// `ops` when the latest kernel had been submitted.
    last_kernel: u64,
    /// Number of operations that were done at the latest look.
    looked: u64,
    /// Its role.
    pub role: Role,
    /// Indices of the blocking streams, if this is the legacy default stream.
    pub members: Vec<usize>,
    /// Whether it is capturing. Its operations then become nodes of a graph, so the server must not submit any of its
    /// own (flags, joins), and they do not count as in flight.
    pub capturing: bool,
    /// Operations submitted.
    ops: u64,
    /// Operations known to be complete.
    done: u64,
    /// `ops` at the previous call of `was_used`.
    seen: u64,
    checkpoints: VecDeque<Point>,
    /// The client's latest completion marker.
    mark: Option<Point>,
    own_flag: Option<(Flag, u32)>,
    /// `ops` of this stream when the legacy stream last waited for it.
    joined: u64,
    /// `ops` of the legacy stream when this one last waited for it.
    seen_legacy: u64,
    join_event: Option<CUevent>,
    /// Whether any attribute differs from its default.
    has_attributes: bool,
    /// `ops` when `join_event` was last recorded.
    join_recorded: u64,
    /// The green context that contains it.
    pub green: Option<GreenRef>,
    /// Handle of the client's green context in which it was made; 0: none.
    pub part: u64,
    /// The driver's other streams, if its kernels have been confined, by the extent of the reserve.
    twins: [Option<Twin>; Extent::ALL.len()],
    /// Its operations go to the driver's stream in the green context without this reserve. That of the whole device is
    /// the twin then.
    confined: Option<Extent>,
    /// Graphs for launch batches.
    pub chains: Chains,
    /// Whether there was exactly one operation between the client's last two marks, besides moves of managed memory.
    pub waits_for_each: bool,
    /// Moves of managed memory since the client's last mark.
    pub moves: u64,
    /// Measured progress and the resulting limit of operations in flight.
    pub pace: Pace,
    /// Its progress in the session's description.
    pub progress: Option<Progress>,
}

impl Stream {
    /// Creates a stream with no work.
    pub fn new(
        gpu: &Gpu,
        holder: &Holder,
        raw: CUstream,
        device: Ordinal,
        priority: i32,
        role: Role,
    ) -> Stream {
        Stream {
            number: gpu.streams.fetch_add(1, Ordering::Relaxed),
            raw,
            device,
            priority,
            raw_priority: priority,
            given: priority,
            fill: 0.0,
            waves: 0.0,
            last_kernel: 0,
            looked: 0,
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
            part: 0,
            twins: Default::default(),
            confined: None,
            chains: Chains::default(),
            waits_for_each: false,
            moves: 0,
            pace: Pace::default(),
            progress: None,
        }
    }

    /// Updates the stream's progress and returns how many operations may still be in flight. The client's own marks are
    /// trusted: by forging one, a client can only disturb the order of its own streams.
    #[inline]
    pub fn in_flight(&mut self, gpu: &Gpu, segment: &Segment) -> u64 {
        let marked = match self.mark {
            Some(mark) if reached(segment.flag(mark.slot), mark.value) => mark.ops,
            _ => 0,
        };
        self.ops - marked.max(self.take_notice(gpu))
    }

    /// Updates and returns the number of operations that are done according to the server's own flags or the driver.
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

    /// Whether the driver reports all submitted work as done. A capturing stream must not be queried; the event
    /// recorded before the capture is queried instead.
    fn ask_driver(&self, gpu: &Gpu) -> bool {
        let done = match self.join_event {
            _ if !self.capturing => gpu.driver.stream_query(self.raw),
            Some(event) if self.join_recorded == self.ops => gpu.driver.event_query(event),
            _ => return false,
        };
        done.is_ok()
    }

    /// Prepares for a capture: makes it possible to detect during the capture that earlier work is done.
    ///
    /// # Errors
    /// The driver's status.
    pub fn ready_for_capture(&mut self, gpu: &Gpu) -> Result<(), CUresult> {
        if self.own_flag.is_some() {
            return self.checkpoint(gpu);
        }
        if self.ops != self.done {
            self.record_join(gpu)?;
        }
        Ok(())
    }

    /// Whether work was submitted since the previous call, or is in flight.
    pub fn was_used(&mut self, gpu: &Gpu, segment: &Segment) -> bool {
        let seen = std::mem::replace(&mut self.seen, self.ops);
        seen != self.ops || self.in_flight(gpu, segment) != 0
    }

    /// Whether the driver reports all submitted work as done. The stream must not be capturing.
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

    /// Whether it cannot be replaced by another stream of the driver.
    pub fn is_special(&self) -> bool {
        self.capturing || self.has_attributes || self.green.is_some()
    }

    /// Replaces its driver stream. Nothing may be in flight, and its old side must be entered.
    pub fn replace(&mut self, gpu: &Gpu, raw: CUstream) {
        let device = &gpu.devices[self.device];
        let _ = device.make_current(&gpu.driver);
        self.end_twins(gpu);
        self.chains.end(&gpu.driver);
        if let Some(event) = self.join_event.take() {
            let _ = gpu.driver.event_destroy(event);
        }
        let old = std::mem::replace(&mut self.raw, raw);
        if std::mem::replace(&mut self.given, self.raw_priority) != self.raw_priority {
            set_priority(gpu, old, self.raw_priority);
        }
        device.keep_stream(&gpu.driver, self.raw_priority, old);
    }

    /// Gives it the driver's priority for its client's level. Work that was submitted before keeps its priority.
    #[inline]
    pub fn take_level(&mut self, gpu: &Gpu, level: Level) {
        let priority = level.priority(self.priority);
        if priority != self.given {
            self.given = priority;
            set_priority(gpu, self.raw, priority);
        }
    }

    /// The part of the device that its operations leave free.
    #[inline]
    pub fn confined(&self) -> Option<Extent> {
        self.confined
    }

    /// Makes later operations leave a part of the device free, or use the whole device, behind all earlier ones. The stream
    /// stays as it is if no stream of the driver is left for it. Must not be capturing.
    ///
    /// # Errors
    /// The driver's status; the context must be current.
    pub fn set_confined(&mut self, gpu: &Gpu, confined: Option<Extent>) -> Result<(), CUresult> {
        if confined == self.confined {
            return Ok(());
        }
        if let Some(extent) = confined
            && self.twins[extent.index()].is_none()
        {
            let Some((green, raw)) = gpu.devices[self.device].reserve.take_stream(extent) else {
                return Ok(());
            };
            self.twins[extent.index()] = Some(Twin {
                green,
                raw,
                raw_priority: 0,
                given: 0,
            });
        }
        let before = match self.ops == self.take_notice(gpu) {
            true => None,
            false => Some(self.record_join(gpu)?),
        };
        let was = self.confined;
        self.go_to(confined);
        if let Some(event) = before
            && let Err(status) = gpu.driver.stream_wait_event(self.raw, event, 0)
        {
            self.go_to(was);
            return Err(status);
        }
        Ok(())
    }

    /// Exchanges its driver's stream.
    fn go_to(&mut self, confined: Option<Extent>) {
        for extent in [self.confined, confined].into_iter().flatten() {
            if let Some(twin) = &mut self.twins[extent.index()] {
                std::mem::swap(&mut self.raw, &mut twin.raw);
                std::mem::swap(&mut self.raw_priority, &mut twin.raw_priority);
                std::mem::swap(&mut self.given, &mut twin.given);
            }
        }
        self.confined = confined;
    }

    /// Gives the driver's streams for confined kernels back. Nothing may be in flight.
    fn end_twins(&mut self, gpu: &Gpu) {
        self.go_to(None);
        for twin in self.twins.iter_mut().filter_map(Option::take) {
            if twin.given != twin.raw_priority {
                set_priority(gpu, twin.raw, twin.raw_priority);
            }
            twin.green
                .end_stream(&gpu.driver, twin.raw_priority, twin.raw);
        }
    }

    /// The driver priority that it has now.
    pub fn given_priority(&self) -> i32 {
        self.given
    }

    /// Notes that the latest operation includes kernels with blocks for this part of the device, more than 1 for several
    /// waves. The nodes of a capture do not run.
    #[inline]
    pub fn note_fill(&mut self, waves: f32) {
        if self.capturing {
            return;
        }
        self.waves = waves;
        let weight = waves.ceil().clamp(1.0, MOST_WAVES) as i32;
        let stays = (1.0 - RECENT).powi(weight);
        self.fill += (waves.min(1.0) - self.fill) * (1.0 - stays);
        self.last_kernel = self.ops;
    }

    /// Part of the device that its kernels in flight can fill, and the number of operations that have ended since the
    /// previous call.
    pub fn fills(&mut self, gpu: &Gpu, segment: &Segment) -> (f32, u64) {
        let done = self.ops - self.in_flight(gpu, segment);
        // A later mark of the client's, which has not been reached, hides the one before.
        let before = self.looked;
        self.looked = before.max(done);
        let fill = if done < self.last_kernel {
            self.fill
        } else {
            0.0
        };
        (fill, self.looked - before)
    }

    /// Estimates the times of a block and of the whole kernel in flight, if the kernel is known to be long and fills the
    /// device.
    pub fn long_block(&self) -> Option<(Duration, Duration)> {
        let time = self.pace.runs_long().filter(|_| self.waves > FULL)?;
        Some((time.div_f32(self.waves.ceil()), time))
    }

    /// Whether no mark of the server's will show when its latest kernel ends.
    pub fn is_unmarked(&self) -> bool {
        self.done < self.last_kernel && self.uncovered() > 0
    }

    /// Number of operations submitted.
    pub fn ops(&self) -> u64 {
        self.ops
    }

    /// The server's flags not yet seen written, in order.
    pub fn points(&self) -> impl Iterator<Item = Point> + '_ {
        self.checkpoints.iter().copied()
    }

    /// The last of the server's flags to be written.
    pub fn last_point(&self) -> Option<Point> {
        self.checkpoints.back().copied()
    }

    /// Updates how long the oldest checkpoint has been pending. Returns whether that is long.
    pub fn look_at_pace(&mut self, gpu: &Gpu, now: Instant) -> bool {
        self.take_notice(gpu);
        let Some(first) = self.checkpoints.front() else {
            return false;
        };
        self.pace.note_waiting(first.ops - self.done, now);
        self.pace.is_long()
    }

    /// Whether at least `window` operations are in flight. Ensures that there is a checkpoint that shows when they are
    /// done.
    ///
    /// # Errors
    /// The driver's status; the context must be current.
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

    /// Number of operations that no checkpoint covers.
    #[inline]
    fn uncovered(&self) -> u64 {
        self.ops - self.checkpoints.back().map_or(self.done, |last| last.ops)
    }

    /// Notes that the client's own flag will be written after everything submitted so far, before the driver gets it: when
    /// the client sees the flag, it has nothing in flight, and the server may be killed. The result is for
    /// [`Stream::withdraw_mark`].
    fn expect_mark(&mut self, slot: u32, value: u32) -> Expected {
        let progress = self.progress.as_mut();
        Expected(progress.and_then(|progress| progress.cover(slot, value)))
    }

    /// Undoes [`Stream::expect_mark`], because the driver has refused the flag.
    fn withdraw_mark(&mut self, Expected(before): Expected) {
        if let Some(progress) = &mut self.progress {
            progress.uncover(before);
        }
    }

    /// Counts operations just submitted, of which the last writes the flag that was expected.
    fn note_mark(&mut self, operations: u64, slot: u32, value: u32) {
        self.ops += operations;
        let before = self.mark.map_or(0, |mark| mark.ops);
        // The operation and the mark itself.
        self.waits_for_each = self.ops == before + 2 + std::mem::take(&mut self.moves);
        self.mark = Some(Point {
            ops: self.ops,
            slot,
            value,
        });
    }

    /// Notes that the driver reports none of its work as in flight.
    pub fn settle_progress(&mut self) {
        if let Some(progress) = &mut self.progress {
            progress.settle();
        }
    }

    /// Undoes `begin_work` after an operation was refused, if the counts show that nothing was submitted since the last
    /// mark.
    pub fn take_back_begun(&mut self) {
        let covered = self.ops == self.done || self.mark.is_some_and(|mark| mark.ops == self.ops);
        if let Some(progress) = self.progress.as_mut().filter(|_| covered) {
            progress.take_back();
        }
    }

    /// Records in the session's description that work is about to be submitted or was.
    #[inline]
    fn begin_work(&mut self) {
        if let Some(progress) = &mut self.progress {
            progress.begin();
        }
    }

    /// Adds a checkpoint if too many operations are not covered by one.
    #[inline]
    fn checkpoint_if_due(&mut self, gpu: &Gpu) -> Result<(), CUresult> {
        let interval = gpu.window().min(self.pace.window()) / 4;
        if self.uncovered() >= interval {
            self.checkpoint(gpu)?;
        }
        Ok(())
    }

    /// Makes the GPU write a flag of the server's when everything submitted so far is done.
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

    /// Whether launches may be submitted as a graph. Graph nodes do not inherit a stream's attributes or its green
    /// context.
    #[inline]
    pub fn takes_runs(&self) -> bool {
        !self.capturing && !self.has_attributes && self.green.is_none() && self.confined.is_none()
    }

    /// Whether nothing was submitted since the client's last mark, so that the GPU may be waiting for the next
    /// operation.
    #[inline]
    pub fn is_fresh(&self) -> bool {
        self.ops == self.mark.map_or(0, |mark| mark.ops)
    }

    /// Frees the stream's resources. It must be idle and its context current.
    pub fn release(mut self, gpu: &Gpu) {
        self.end_twins(gpu);
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
        } else if kept && self.given != self.raw_priority {
            set_priority(gpu, self.raw, self.raw_priority);
        }
        match self.green {
            Some(green) => green.end_stream(&gpu.driver, self.raw_priority, self.raw),
            // A capture that could not be ended, because other streams joined it or it failed.
            None if self.capturing && gpu.driver.is_capturing(self.raw) => {
                let _ = gpu.driver.context.stream_destroy(self.raw);
            }
            None => gpu.devices[self.device].keep_stream(&gpu.driver, self.raw_priority, self.raw),
        }
    }

    /// Sets an attribute (`cuStreamSetAttribute`). If the driver refuses, that is only logged: attributes affect how
    /// fast work runs, not its results.
    pub fn set_attribute(&mut self, gpu: &Gpu, id: u32, value: &[u8]) {
        self.has_attributes = true;
        set_attribute(gpu, self.raw, id, value);
    }

    /// Resets the attributes to the defaults that the next session expects.
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

fn set_priority(gpu: &Gpu, stream: CUstream, priority: i32) {
    set_attribute(
        gpu,
        stream,
        CU_STREAM_ATTRIBUTE_PRIORITY,
        &priority.to_ne_bytes(),
    );
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
