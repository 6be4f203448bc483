//! How far a stream is, noted in its session's description.

use crate::engine::base::description::Description;
use std::sync::Arc;

/// Where a stream notes how far it is.
#[derive(Debug)]
pub struct Progress {
    description: Arc<Description>,
    stream: usize,
    begun: bool,
}

impl Progress {
    /// Of the stream at this position, which has nothing in flight.
    pub fn new(description: &Arc<Description>, stream: usize) -> Progress {
        description.settle(stream);
        Progress {
            description: description.clone(),
            stream,
            begun: false,
        }
    }

    /// Something is about to be submitted.
    #[inline]
    pub fn begin(&mut self) {
        if !self.begun {
            self.begun = true;
            self.description.begin(self.stream);
        }
    }

    /// A flag of the client's covers everything that was submitted.
    #[inline]
    pub fn cover(&mut self, slot: u32, value: u32) {
        self.begun = false;
        self.description.cover(self.stream, slot, value);
    }

    /// Nothing was submitted after all.
    pub fn take_back(&mut self) {
        if std::mem::take(&mut self.begun) {
            self.description.take_back(self.stream);
        }
    }

    /// Nothing is in flight.
    #[inline]
    pub fn settle(&mut self) {
        if self.begun {
            self.begun = false;
            self.description.settle(self.stream);
        }
    }
}

impl Drop for Progress {
    /// The stream is destroyed: the session says whether it has work.
    fn drop(&mut self) {
        self.description.settle(self.stream);
    }
}
