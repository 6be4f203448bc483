//! The engine's state of a trace.

use super::{NAMES, Record, Wanting};
use crate::engine::session::SessionShared;
use mpsshim_control::trace::Run;
use parking_lot::Mutex;
use rtrb::Consumer;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::thread::JoinHandle;

/// The engine's state of a trace.
#[derive(Debug, Default)]
pub struct Traces {
    /// Number of the last trace.
    pub latest: AtomicU32,
    pub(super) state: Mutex<State>,
}

#[derive(Debug, Default)]
pub struct State {
    /// Number of the last trace.
    pub(super) number: u32,
    pub(super) run: Option<Arc<Run>>,
    pub(super) joined: Vec<Joined>,
    pub(super) numbers: HashMap<Box<[u8]>, u32>,
    /// Kernel names; the name with number `n` is at index `n - 1`.
    pub(super) names: Vec<Box<[u8]>>,
    pub(super) wanting: Arc<Wanting>,
    /// When the trace began, by the run's clock.
    pub(super) began: u64,
    pub(super) collector: Option<JoinHandle<()>>,
}

/// A session that has joined the trace, as handed to the collector.
#[derive(Debug)]
pub struct Joined {
    pub(super) session: Arc<SessionShared>,
    pub(super) records: Consumer<Record>,
}

impl Traces {
    /// Returns the number of a kernel's name; 0 if there are too many names.
    pub(super) fn number(&self, name: &[u8]) -> u32 {
        let mut state = self.state.lock();
        if let Some(number) = state.numbers.get(name) {
            return *number;
        }
        if state.names.len() >= NAMES {
            return 0;
        }
        state.names.push(name.into());
        let number = state.names.len() as u32;
        state.numbers.insert(name.into(), number);
        number
    }

    /// Returns the names from this index on.
    pub(super) fn names_from(&self, number: usize) -> Vec<Box<[u8]>> {
        let state = self.state.lock();
        state.names.get(number..).unwrap_or_default().to_vec()
    }

    pub(super) fn take_joined(&self) -> Vec<Joined> {
        std::mem::take(&mut self.state.lock().joined)
    }
}
