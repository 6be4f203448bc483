//! Limits of a context (`cuCtxSetLimit`): the device memory they take, how far a session may raise them, and the charge
//! for them.
//!
//! In a context that clients share, a limit that one client raises stays raised, and the driver keeps the memory it
//! took for it. Each limit is therefore bounded, and a session pays for the memory that a context of its own would have
//! taken beyond the default. A session that raises the size of the heap for kernels gets a context of its own
//! ([`crate::engine::base::owners`]).

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::bounds;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::devices::Device;
use mpsshim_api::cuda::*;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Device memory for each pending kernel launch made by a kernel, bytes (measured: 9,376 on an H100, driver
/// 580.159.04).
const PENDING_LAUNCH: u64 = 9_376;
/// Device memory for each nesting level at which kernels wait for their child kernels, bytes (CUDA programming guide:
/// up to 150 MB). The driver has this limit only before compute capability 9.0.
const SYNC_LEVEL: u64 = 150 << 20;

/// A limit of a device's context and its target value.
#[derive(Debug, Clone, Copy)]
pub struct ContextLimit {
    /// `CU_LIMIT_*`.
    pub limit: CUlimit,
    /// The requested value, rounded as the driver does.
    pub value: u64,
}

impl ContextLimit {
    /// A limit that takes device memory; `None` for other limits. `value` is the client's.
    pub fn new(limit: CUlimit, value: u64) -> Option<ContextLimit> {
        // Measured: 580.159.04.
        let value = match limit {
            CU_LIMIT_STACK_SIZE => value.div_ceil(16).saturating_mul(16),
            CU_LIMIT_PRINTF_FIFO_SIZE => value.max(512 << 10),
            CU_LIMIT_MALLOC_HEAP_SIZE => value.max(4 << 20),
            CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH => value,
            CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT => value.max(32),
            _ => return None,
        };
        Some(ContextLimit { limit, value })
    }

    /// Whether the limit belongs to one program: the driver fixes it with the first kernel that uses it, and its memory is
    /// used up by the kernels of one. Pending launches do not count: the load of an image with launches by kernels did not
    /// return in a further context beside long kernels (H100, driver 580.159.04).
    pub fn is_of_program(self) -> bool {
        self.limit == CU_LIMIT_MALLOC_HEAP_SIZE
    }

    /// Whether the value is within the session's bounds on this device.
    pub fn is_within_bounds(self, device: &Device) -> bool {
        self.fits(device.threads, device.memory)
    }

    fn fits(self, threads: u64, memory: u64) -> bool {
        let ContextLimit { limit, value } = self;
        match limit {
            CU_LIMIT_STACK_SIZE => value.saturating_mul(threads) <= memory / bounds::STACKS_PART,
            CU_LIMIT_MALLOC_HEAP_SIZE => value <= memory / bounds::HEAP_PART,
            CU_LIMIT_PRINTF_FIFO_SIZE => value <= bounds::PRINT_BUFFER,
            CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH => value <= bounds::SYNC_DEPTH,
            _ => value <= bounds::PENDING_LAUNCHES,
        }
    }

    /// Device memory that this value takes beyond that of the value `first`, bytes.
    pub fn taken(self, first: u64, device: &Device) -> u64 {
        self.beyond(first, device.threads)
    }

    fn beyond(self, first: u64, threads: u64) -> u64 {
        let each = match self.limit {
            CU_LIMIT_STACK_SIZE => threads,
            CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH => SYNC_LEVEL,
            CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT => PENDING_LAUNCH,
            _ => 1,
        };
        self.value.saturating_sub(first).saturating_mul(each)
    }
}

/// The limits that a session has set, with the charges held until the session ends.
#[derive(Debug, Default)]
pub struct SetLimits(BTreeMap<(Ordinal, CUlimit), SetLimit>);

#[derive(Debug)]
struct SetLimit {
    value: u64,
    /// For the memory beyond that of the initial value.
    charge: Charge,
}

/// Value and charged bytes of a limit before it was set.
#[derive(Debug, PartialEq, Eq)]
pub struct Before(Option<(u64, u64)>);

impl SetLimits {
    /// Whether the session is charged for any limit.
    #[cfg(test)]
    pub fn any(&self) -> bool {
        self.0.values().any(|set| set.charge.bytes() > 0)
    }

    /// Records a limit that takes `bytes` more than its initial value, and charges the session for it. Lowering a limit
    /// does not reduce the charge, because the context does not shrink. Returns the state for [`SetLimits::undo`].
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` beyond the session's memory limit; then nothing has changed.
    pub fn set(
        &mut self,
        account: &Account,
        device: Ordinal,
        wanted: ContextLimit,
        bytes: u64,
    ) -> Result<Before, CUresult> {
        let value = wanted.value;
        match self.0.entry((device, wanted.limit)) {
            Entry::Vacant(entry) => {
                let charge = account.take(Memory::Device(device), bytes)?;
                entry.insert(SetLimit { value, charge });
                Ok(Before(None))
            }
            Entry::Occupied(mut entry) => {
                let set = entry.get_mut();
                let before = (set.value, set.charge.bytes());
                if bytes > before.1 {
                    set.charge.resize(bytes)?;
                }
                set.value = value;
                Ok(Before(Some(before)))
            }
        }
    }

    /// Restores the earlier state after the driver has refused the limit.
    pub fn undo(&mut self, device: Ordinal, limit: CUlimit, before: Before) {
        let Before(Some((value, bytes))) = before else {
            self.0.remove(&(device, limit));
            return;
        };
        if let Some(set) = self.0.get_mut(&(device, limit)) {
            set.value = value;
            // Shrinking a charge never fails.
            let _ = set.charge.resize(bytes);
        }
    }

    /// The value that the session has set for a limit.
    pub fn value(&self, device: Ordinal, limit: CUlimit) -> Option<u64> {
        self.0.get(&(device, limit)).map(|set| set.value)
    }

    /// All limits that the session has set, by device.
    pub fn iter(&self) -> impl Iterator<Item = (Ordinal, CUlimit, u64)> {
        let sets = self.0.iter();
        sets.map(|((device, limit), set)| (*device, *limit, set.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    /// An H100: 132 multiprocessors with 2,048 threads each, 80 GB.
    const THREADS: u64 = 132 * 2048;
    const MEMORY: u64 = 79 * GIB;

    fn limit(limit: CUlimit, value: u64) -> ContextLimit {
        ContextLimit::new(limit, value).expect("a limit that takes memory")
    }

    #[test]
    fn memory_of_limits_is_what_was_measured() {
        // 264 MiB for each KiB of stack, 668 - 376 MiB for 32,768 launches.
        let stack = limit(CU_LIMIT_STACK_SIZE, 32 << 10);
        assert_eq!(stack.beyond(1024, THREADS), 31 * (264 << 20));
        let launches = limit(CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 65_536);
        assert_eq!(launches.beyond(32_768, THREADS) >> 20, 293);
        let heap = limit(CU_LIMIT_MALLOC_HEAP_SIZE, GIB);
        assert_eq!(heap.beyond(8 << 20, THREADS), GIB - (8 << 20));
        assert_eq!(heap.beyond(2 * GIB, THREADS), 0);
        let depth = limit(CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 4);
        assert_eq!(depth.beyond(2, THREADS), 300 << 20);
        let all = limit(CU_LIMIT_STACK_SIZE, u64::MAX);
        assert_eq!(all.beyond(1024, THREADS), u64::MAX);
    }

    #[test]
    fn values_are_rounded_as_the_driver_does() {
        for (of, value, rounded) in [
            (CU_LIMIT_STACK_SIZE, 1, 16),
            (CU_LIMIT_STACK_SIZE, 4096, 4096),
            (CU_LIMIT_PRINTF_FIFO_SIZE, 1, 512 << 10),
            (CU_LIMIT_MALLOC_HEAP_SIZE, 0, 4 << 20),
            (CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 3, 3),
            (CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 1, 32),
        ] {
            assert_eq!(limit(of, value).value, rounded, "{of}");
        }
        for other in [
            CU_LIMIT_MAX_L2_FETCH_GRANULARITY,
            CU_LIMIT_PERSISTING_L2_CACHE_SIZE,
            u32::MAX,
        ] {
            assert!(ContextLimit::new(other, 1).is_none(), "{other}");
        }
    }

    #[test]
    fn each_limit_has_a_bound() {
        let stack = MEMORY / bounds::STACKS_PART / THREADS / 16 * 16;
        for (of, most, step) in [
            (CU_LIMIT_STACK_SIZE, stack, 16),
            (CU_LIMIT_MALLOC_HEAP_SIZE, MEMORY / bounds::HEAP_PART, 1),
            (CU_LIMIT_PRINTF_FIFO_SIZE, bounds::PRINT_BUFFER, 1),
            (CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, bounds::SYNC_DEPTH, 1),
            (
                CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT,
                bounds::PENDING_LAUNCHES,
                1,
            ),
        ] {
            assert!(limit(of, most).fits(THREADS, MEMORY), "{of}");
            for more in [most + step, u64::MAX] {
                assert!(!limit(of, more).fits(THREADS, MEMORY), "{of}: {more}");
            }
        }
        // A value that recursive programs set explicitly.
        assert!(limit(CU_LIMIT_STACK_SIZE, 64 << 10).fits(THREADS, MEMORY));
    }

    #[test]
    fn a_session_pays_until_it_ends() {
        let (account, device) = (Account::default(), Ordinal::of_test(0));
        let (memory, mut limits) = (Memory::Device(device), SetLimits::default());
        account.lower_limit(memory, 100);
        let (stack, heap) = (CU_LIMIT_STACK_SIZE, CU_LIMIT_MALLOC_HEAP_SIZE);
        let set = |limits: &mut SetLimits, which, value, bytes| {
            let before = limits.set(&account, device, limit(which, value), bytes);
            (before.map(|before| before.0), account.held(memory))
        };
        assert_eq!(set(&mut limits, stack, 16, 0), (Ok(None), 0));
        assert!(!limits.any());
        assert_eq!(set(&mut limits, stack, 32, 60), (Ok(Some((16, 0))), 60));
        assert!(limits.any());
        assert_eq!(set(&mut limits, stack, 48, 20), (Ok(Some((32, 60))), 60));
        let full = Err(CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(set(&mut limits, stack, 64, 101), (full, 60));
        assert_eq!(set(&mut limits, heap, 8 << 20, 41), (full, 60));
        let all: Vec<_> = limits.iter().collect();
        assert_eq!(all, [(device, stack, 48)], "as before what was refused");
        assert_eq!(set(&mut limits, heap, 8 << 20, 40), (Ok(None), 100));
        limits.undo(device, heap, Before(None));
        assert_eq!(limits.value(device, heap), None);
        assert_eq!(set(&mut limits, stack, 80, 90), (Ok(Some((48, 60))), 90));
        limits.undo(device, stack, Before(Some((48, 60))));
        assert_eq!(account.held(memory), 60);
        assert_eq!(limits.value(device, stack), Some(48));
        drop(limits);
        assert_eq!(account.held(memory), 0);
    }
}
