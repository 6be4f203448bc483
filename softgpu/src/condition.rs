//! Conditional handles of graphs, and their values while an instance runs.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use mpsshim_api::cuda::*;
use parking_lot::Mutex;

use crate::api::R;

/// `CU_GRAPH_COND_TYPE_*`.
pub const IF: u32 = 0;
pub const WHILE: u32 = 1;
pub const SWITCH: u32 = 2;

/// Lets a graph with conditional nodes run. With `SOFTGPU_LOOPS=fault`, two of them at a time end their context, as with a
/// genuine driver (580.159.04).
pub fn count(loops: &AtomicUsize) -> R<impl Drop> {
    struct Running<'a>(&'a AtomicUsize);
    impl Drop for Running<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    static FAULTS: LazyLock<bool> =
        LazyLock::new(|| std::env::var("SOFTGPU_LOOPS").is_ok_and(|value| value == "fault"));
    let others = loops.fetch_add(1, Ordering::SeqCst);
    let running = Running(loops);
    match others {
        1.. if *FAULTS => Err(CUDA_ERROR_LAUNCH_FAILED),
        _ => Ok(running),
    }
}

/// A conditional handle.
struct Condition {
    /// Its value at the start of each launch; otherwise it keeps its value.
    default: Option<u32>,
    /// Whether it has a node.
    used: bool,
}

/// The conditional handles of a graph and of the bodies inside it: numbers from 1.
#[derive(Default)]
pub struct Conditions(Mutex<Vec<Condition>>);

impl Conditions {
    /// `cuGraphConditionalHandleCreate`.
    pub fn create(&self, default: u32, flags: u32) -> R<u64> {
        if flags & !CU_GRAPH_COND_ASSIGN_DEFAULT != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut all = self.0.lock();
        all.push(Condition {
            default: (flags != 0).then_some(default),
            used: false,
        });
        Ok(all.len() as u64)
    }

    /// Gives a handle to a node. A handle has one node at most.
    pub fn take(&self, handle: u64) -> R<()> {
        let mut all = self.0.lock();
        let at = usize::try_from(handle)
            .ok()
            .and_then(|at| at.checked_sub(1));
        let condition = at.and_then(|at| all.get_mut(at));
        let condition = condition.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if std::mem::replace(&mut condition.used, true) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(())
    }

    /// Takes a handle back from a node that was not added.
    pub fn give_back(&self, handle: u64) {
        if let Some(condition) = self.0.lock().get_mut(handle as usize - 1) {
            condition.used = false;
        }
    }

    /// Defaults in an instance that is made now.
    pub fn values(&self) -> Values {
        let defaults: Vec<_> = self.0.lock().iter().map(|one| one.default).collect();
        Values {
            now: Mutex::new(vec![0; defaults.len()]),
            defaults,
        }
    }
}

/// The values of an instance's conditions.
pub struct Values {
    now: Mutex<Vec<u32>>,
    defaults: Vec<Option<u32>>,
}

impl Values {
    /// A launch begins.
    pub fn reset(&self) {
        for (now, default) in self.now.lock().iter_mut().zip(&self.defaults) {
            *now = default.unwrap_or(*now);
        }
    }

    /// `cudaGraphSetConditional`: whether there is such a handle.
    pub fn set(&self, handle: u64, value: u32) -> bool {
        let mut now = self.now.lock();
        let at = (handle as usize).wrapping_sub(1);
        let found = now.get_mut(at);
        found.map(|now| *now = value).is_some()
    }

    pub fn get(&self, handle: u64) -> u32 {
        let at = (handle as usize).wrapping_sub(1);
        self.now.lock().get(at).copied().unwrap_or_default()
    }
}

thread_local! {
    /// Conditions of the instance that this thread runs.
    static RUNNING: RefCell<Option<Arc<Values>>> = const { RefCell::new(None) };
}

/// The conditions of the instance that the calling thread runs.
pub fn running() -> Option<Arc<Values>> {
    RUNNING.with_borrow(Clone::clone)
}

/// Runs an instance with its conditions.
pub fn run_with<T>(values: &Arc<Values>, run: impl FnOnce() -> T) -> T {
    RUNNING.set(Some(Arc::clone(values)));
    let done = run();
    RUNNING.set(None);
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_numbers_from_one_and_have_one_node_each() {
        let conditions = Conditions::default();
        assert_eq!(conditions.create(5, CU_GRAPH_COND_ASSIGN_DEFAULT), Ok(1));
        assert_eq!(conditions.create(6, 0), Ok(2));
        assert_eq!(conditions.create(6, 77), Err(CUDA_ERROR_INVALID_VALUE));
        for wrong in [0, 3, u64::MAX] {
            assert_eq!(conditions.take(wrong), Err(CUDA_ERROR_INVALID_VALUE));
        }
        assert_eq!(conditions.take(2), Ok(()));
        assert_eq!(conditions.take(2), Err(CUDA_ERROR_INVALID_VALUE));
        conditions.give_back(2);
        assert_eq!(conditions.take(2), Ok(()));
        let values = conditions.values();
        assert!(values.set(1, 9) && values.set(2, 8) && !values.set(3, 1) && !values.set(0, 1));
        values.reset();
        assert_eq!([values.get(1), values.get(2)], [5, 8]);
    }
}
