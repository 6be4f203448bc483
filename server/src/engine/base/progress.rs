//! Progress of a stream, noted in its session's description.

use crate::engine::base::description::Description;
use std::sync::Arc;

/// Notes the progress of one stream.
#[derive(Debug)]
pub struct Progress {
    description: Arc<Description>,
    stream: usize,
    begun: bool,
}

impl Progress {
    /// For the stream at this position, which must have nothing in flight.
    pub fn new(description: &Arc<Description>, stream: usize) -> Progress {
        description.settle(stream);
        Progress {
            description: description.clone(),
            stream,
            begun: false,
        }
    }

    /// Notes that work is about to be submitted.
    #[inline]
    pub fn begin(&mut self) {
        if !self.begun {
            self.begun = true;
            self.description.begin(self.stream);
        }
    }

    /// Notes that a flag of the client covers all submitted work. Returns the flag and value before.
    #[inline]
    pub fn cover(&mut self, slot: u32, value: u32) -> Option<(u32, u32)> {
        self.begun = false;
        let before = self.description.covered(self.stream);
        self.description.cover(self.stream, slot, value);
        before
    }

    /// Undoes [`Progress::cover`], because the driver has refused the flag.
    pub fn uncover(&mut self, before: Option<(u32, u32)>) {
        self.begun = true;
        self.description.uncover(self.stream, before);
    }

    /// Cancels [`Progress::begin`], because nothing was submitted.
    pub fn take_back(&mut self) {
        if std::mem::take(&mut self.begun) {
            self.description.take_back(self.stream);
        }
    }

    /// Notes that nothing is in flight.
    #[inline]
    pub fn settle(&mut self) {
        if self.begun {
            self.begun = false;
            self.description.settle(self.stream);
        }
    }
}

impl Drop for Progress {
    /// When the stream is destroyed, its remaining work is noted for the session instead.
    fn drop(&mut self) {
        self.description.settle(self.stream);
    }
}
