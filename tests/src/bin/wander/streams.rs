//! Streams and events, and the order between streams: memory is used by one stream at a time, and the next one waits for it.

use crate::call;
use crate::calls::{Status, Trouble, same};
use mpsshim_api::cuda::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint};

/// The legacy default stream, which calls without a stream use.
pub const LEGACY: u32 = 0;
/// The default stream of the thread.
const OF_THREAD: u32 = 1;

pub struct Stream {
    pub handle: CUstream,
    flags: u32,
    priority: i32,
}

pub struct Streams(BTreeMap<u32, Stream>);

impl Streams {
    pub fn new() -> Streams {
        let default = |handle| Stream {
            handle,
            flags: 0,
            priority: 0,
        };
        Streams(BTreeMap::from([
            (LEGACY, default(CUstream::NULL)),
            (OF_THREAD, default(CU_STREAM_PER_THREAD)),
        ]))
    }

    pub fn numbers(&self) -> Vec<u32> {
        self.0.keys().copied().collect()
    }

    /// Those that the program has created.
    pub fn own(&self) -> Vec<u32> {
        self.0
            .keys()
            .copied()
            .filter(|number| *number > OF_THREAD)
            .collect()
    }

    pub fn handle(&self, number: u32) -> CUstream {
        self.0[&number].handle
    }

    /// # Errors
    /// A call's status.
    pub fn create(&mut self, number: u32, flags: u32, wants_priority: bool) -> Status {
        let mut handle = CUstream::NULL;
        let (mut least, mut greatest): (c_int, c_int) = (0, 0);
        call!(cuCtxGetStreamPriorityRange, &mut least, &mut greatest)?;
        let priority = if wants_priority { greatest } else { 0 };
        match wants_priority {
            true => call!(cuStreamCreateWithPriority, &mut handle, flags, priority)?,
            false => call!(cuStreamCreate, &mut handle, flags)?,
        }
        self.0.insert(
            number + OF_THREAD + 1,
            Stream {
                handle,
                flags,
                priority,
            },
        );
        Ok(())
    }

    /// # Errors
    /// A call's status.
    pub fn destroy(&mut self, number: u32) -> Status {
        let stream = self.0.remove(&number).expect("a stream");
        call!(cuStreamDestroy_v2, stream.handle)
    }

    /// At rest: the settings are as they were, and nothing is in flight.
    ///
    /// # Errors
    /// A call's status, or what is not as it was.
    pub fn check(&self) -> Status {
        for (number, stream) in &self.0 {
            let status = mpsshim_tests::cu!(cuStreamQuery, stream.handle);
            is_done(|| format!("stream {number}"), "cuStreamQuery", status)?;
            if *number <= OF_THREAD {
                continue;
            }
            let (mut flags, mut priority): (c_uint, c_int) = (0, 0);
            call!(cuStreamGetFlags, stream.handle, &mut flags)?;
            same(|| format!("flags of stream {number}"), flags, stream.flags)?;
            call!(cuStreamGetPriority, stream.handle, &mut priority)?;
            same(
                || format!("priority of stream {number}"),
                priority,
                stream.priority,
            )?;
        }
        Ok(())
    }
}

/// Events that order streams, used in turn, and which stream uses each buffer.
pub struct Hands {
    events: Vec<CUevent>,
    next: usize,
    users: BTreeMap<u32, u32>,
}

impl Hands {
    /// # Errors
    /// A call's status.
    pub fn new() -> Status<Hands> {
        let mut events = Vec::new();
        for flags in [CU_EVENT_DISABLE_TIMING; 5] {
            let mut event = CUevent::NULL;
            call!(cuEventCreate, &mut event, flags)?;
            events.push(event);
        }
        Ok(Hands {
            events,
            next: 0,
            users: BTreeMap::new(),
        })
    }

    /// `to` waits for what `from` has now.
    ///
    /// # Errors
    /// A call's status.
    pub fn order(&mut self, from: CUstream, to: CUstream) -> Status {
        self.next += 1;
        let event = self.events[self.next % self.events.len()];
        call!(cuEventRecord, event, from)?;
        call!(cuStreamWaitEvent, to, event, 0 as c_uint)
    }

    /// From now on this stream uses these buffers, behind the streams that have used them.
    ///
    /// # Errors
    /// A call's status.
    pub fn claim(&mut self, buffers: &[u32], stream: u32, streams: &Streams) -> Status {
        let users = buffers.iter().filter_map(|buffer| self.users.get(buffer));
        let others: BTreeSet<u32> = users.copied().filter(|other| *other != stream).collect();
        for other in others {
            self.order(streams.handle(other), streams.handle(stream))?;
        }
        self.users
            .extend(buffers.iter().map(|buffer| (*buffer, stream)));
        Ok(())
    }

    /// The stream that uses a buffer.
    pub fn user(&self, buffer: u32) -> Option<u32> {
        self.users.get(&buffer).copied()
    }

    /// All that this stream uses is the legacy stream's.
    ///
    /// # Errors
    /// A call's status.
    pub fn leave(&mut self, stream: u32, streams: &Streams) -> Status {
        let of_it = self.users.iter().filter(|(_, user)| **user == stream);
        let buffers: Vec<u32> = of_it.map(|(buffer, _)| *buffer).collect();
        self.claim(&buffers, LEGACY, streams)
    }

    pub fn forget(&mut self, buffer: u32) {
        self.users.remove(&buffer);
    }

    /// Nothing is in flight any more.
    pub fn rest(&mut self) {
        self.users.clear();
    }

    /// # Errors
    /// A call's status.
    pub fn check(&self) -> Status {
        self.events.iter().try_for_each(|event| {
            let status = mpsshim_tests::cu!(cuEventQuery, *event);
            is_done(|| "an event".into(), "cuEventQuery", status)
        })
    }
}

/// Two events with times in one stream.
pub struct Span {
    events: [CUevent; 2],
    recorded: usize,
    /// Milliseconds between them, as the driver said at first.
    said: Option<f32>,
}

impl Span {
    /// # Errors
    /// A call's status.
    pub fn new() -> Status<Span> {
        let mut events = [CUevent::NULL; 2];
        for event in &mut events {
            call!(cuEventCreate, event, CU_EVENT_DEFAULT)?;
        }
        Ok(Span {
            events,
            recorded: 0,
            said: None,
        })
    }

    /// Records the first or the second event, or begins anew.
    ///
    /// # Errors
    /// A call's status.
    pub fn record(&mut self, stream: CUstream) -> Status {
        self.said = None;
        self.recorded = match self.recorded {
            1 => 2,
            _ => 1,
        };
        call!(cuEventRecord, self.events[self.recorded - 1], stream)
    }

    /// At rest: the time between the two is what it was.
    ///
    /// # Errors
    /// A call's status, or the difference.
    pub fn check(&mut self) -> Status {
        if self.recorded < 2 {
            return Ok(());
        }
        let mut between = 0f32;
        call!(
            cuEventElapsedTime,
            &mut between,
            self.events[0],
            self.events[1]
        )?;
        let said = *self.said.get_or_insert(between);
        // Of different clocks of one device.
        match (between - said).abs() < 0.01 {
            true => Ok(()),
            false => Err(Trouble::Wrong(format!(
                "{between} ms between events, not {said}"
            ))),
        }
    }

    /// # Errors
    /// A call's status.
    pub fn destroy(self) -> Status {
        self.events
            .iter()
            .try_for_each(|event| call!(cuEventDestroy_v2, *event))
    }
}

/// An error unless a query at rest says that nothing is in flight.
fn is_done(what: impl Fn() -> String, call: &'static str, status: CUresult) -> Status {
    match status {
        CUDA_SUCCESS => Ok(()),
        CUDA_ERROR_NOT_READY => Err(Trouble::Wrong(format!("{} is not ready at rest", what()))),
        status => Err(Trouble::Call(call, status)),
    }
}
