//! Copies by the CPU: large ones with several threads, bypassing the caches.
//!
//! One thread copies 8 to 13 GB/s, while the bus transfers 55. The threads start with the first large copy and sleep while
//! there is none.

use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::settings;
use crate::thread;

/// Default maximum number of threads besides the program's own.
const HELPERS: usize = 3;
/// One helper per this many processors that the process may use: other threads need processors too.
const PROCESSORS: usize = 4;

/// The helper threads, and the process that they are in: a forked child has none of them.
static POOL: OnceLock<(u32, Option<ThreadPool>)> = OnceLock::new();

/// Threads that help with a copy.
#[derive(Clone, Copy, Debug)]
pub struct Helpers {
    pool: Option<&'static ThreadPool>,
    /// How many.
    pub count: usize,
}

impl Helpers {
    /// Finds helpers, at most `most`, if `wanted` and the machine has processors to spare.
    pub fn find(wanted: bool, most: usize) -> Helpers {
        let pool = wanted.then(pool).flatten();
        Helpers {
            pool,
            count: pool.map_or(0, |pool| pool.current_num_threads().min(most)),
        }
    }

    /// Gives them work.
    ///
    /// # Safety
    /// The returned value is dropped, not leaked, before the data that `work` borrows.
    pub unsafe fn give<'a>(&self, work: impl FnOnce() + Send + 'a) -> Given<'a> {
        let work: Box<dyn FnOnce() + Send + 'a> = Box::new(work);
        // SAFETY: dropping the returned value waits for the work, which no longer exists then; the caller's promise.
        let work: Work = unsafe { std::mem::transmute(work) };
        let job = Arc::new(Job {
            state: AtomicU8::new(WAITS),
            work: Cell::new(Some(work)),
        });
        if let Some(pool) = self.pool {
            let job = job.clone();
            pool.spawn(move || job.do_if_first());
        }
        Given {
            job,
            borrows: PhantomData,
        }
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Work for the first thread that claims it: a helper, or the thread that needs it done. Waking a helper takes longer
/// than a small copy.
struct Job {
    state: AtomicU8,
    /// Belongs to the thread that set `state` to BEGUN.
    work: Cell<Option<Work>>,
}

const WAITS: u8 = 0;
const BEGUN: u8 = 1;
const DONE: u8 = 2;

// SAFETY: only the thread that made `state` BEGUN uses `work`, which may go to any thread.
unsafe impl Sync for Job {}

impl Job {
    fn do_if_first(&self) {
        // Acquire: nothing but for the partner below. The job itself came with the Arc.
        let first = self
            .state
            .compare_exchange(WAITS, BEGUN, Ordering::Acquire, Ordering::Relaxed);
        if first.is_ok() {
            if let Some(work) = self.work.take() {
                work();
            }
            // Partner: `is_done`.
            self.state.store(DONE, Ordering::Release);
        }
    }

    fn is_done(&self) -> bool {
        self.state.load(Ordering::Acquire) == DONE
    }
}

/// Work given to a helper. Dropping this completes it.
pub struct Given<'a> {
    job: Arc<Job>,
    borrows: PhantomData<&'a ()>,
}

impl Given<'_> {
    /// Whether it is done.
    pub fn is_done(&self) -> bool {
        self.job.is_done()
    }
}

impl Drop for Given<'_> {
    fn drop(&mut self) {
        self.job.do_if_first();
        let mut rounds = 0u32;
        while !self.job.is_done() {
            rounds += 1;
            match rounds.is_multiple_of(1024) {
                true => std::thread::yield_now(),
                false => std::hint::spin_loop(),
            }
        }
    }
}

fn pool() -> Option<&'static ThreadPool> {
    let process = std::process::id();
    let (of, pool) = POOL.get_or_init(|| (process, start()));
    pool.as_ref().filter(|_| *of == process)
}

fn start() -> Option<ThreadPool> {
    let helpers = settings::copy_threads().unwrap_or_else(|| {
        // Those of the process's affinity and its cgroup.
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        (processors / PROCESSORS).min(HELPERS)
    });
    if helpers == 0 {
        return None;
    }
    let builder = ThreadPoolBuilder::new()
        .num_threads(helpers)
        .thread_name(|_| "mpsshim-copy".into());
    match thread::without_signals(|| builder.build()) {
        Ok(pool) => Some(pool),
        Err(error) => {
            tracing::warn!(%error, "no helper threads for large copies");
            None
        }
    }
}

/// Copies bytes that the processor will not soon read again, without fetching the target's lines first, which would
/// cost half as much memory traffic again.
///
/// # Safety
/// As [`ptr::copy_nonoverlapping`].
pub unsafe fn copy_past_caches(from: *const u8, to: *mut u8, len: usize) {
    let before = to.align_offset(BLOCK).min(len);
    let blocks = (len - before) / BLOCK;
    if blocks == 0 || !std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(from, to, len) };
        return;
    }
    let after = before + blocks * BLOCK;
    // SAFETY: the three parts make up the whole, the caller's promise; the middle one begins at a multiple of BLOCK, and
    // the processor has AVX.
    unsafe {
        ptr::copy_nonoverlapping(from, to, before);
        stream_blocks(from.add(before), to.add(before), blocks);
        ptr::copy_nonoverlapping(from.add(after), to.add(after), len - after);
    }
}

const BLOCK: usize = 128;

/// # Safety
/// As [`ptr::copy_nonoverlapping`] of `blocks` blocks; `to` is a multiple of 32.
#[target_feature(enable = "avx")]
unsafe fn stream_blocks(from: *const u8, to: *mut u8, blocks: usize) {
    for block in 0..blocks {
        // SAFETY: the caller's promise.
        unsafe {
            let from = from.add(block * BLOCK).cast::<__m256i>();
            let to = to.add(block * BLOCK).cast::<__m256i>();
            let all = [0, 1, 2, 3].map(|at| _mm256_loadu_si256(from.add(at)));
            for (at, bytes) in all.into_iter().enumerate() {
                _mm256_stream_si256(to.add(at), bytes);
            }
        }
    }
    // Until here the stores above are not ordered with any others.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_byte_arrives_and_no_other() {
        let from: Vec<u8> = (0..4096u32).map(|at| (at * 7 % 251) as u8).collect();
        for skip in 0..70 {
            for len in [0, 1, 31, 127, 128, 129, 300, 1024, 2000] {
                let mut to = vec![255u8; 4096];
                // SAFETY: both ranges are inside their vectors.
                unsafe {
                    copy_past_caches(from.as_ptr().add(skip * 3), to.as_mut_ptr().add(skip), len);
                }
                assert_eq!(to[skip..skip + len], from[skip * 3..skip * 3 + len]);
                assert!(
                    to[..skip]
                        .iter()
                        .chain(&to[skip + len..])
                        .all(|b| *b == 255)
                );
            }
        }
    }

    #[test]
    fn what_was_given_is_done_once_it_is_dropped() {
        let pool = ThreadPoolBuilder::new().num_threads(2).build();
        let pool: &'static ThreadPool = Box::leak(Box::new(pool.expect("two threads")));
        for (pool, count) in [(Some(pool), 2), (None, 0)] {
            let done = AtomicUsize::new(0);
            let helpers = Helpers { pool, count };
            for round in 1..=200 {
                // SAFETY: they are dropped in this round.
                let given: Vec<_> = (0..5)
                    .map(|_| unsafe {
                        helpers.give(|| {
                            done.fetch_add(1, Ordering::Relaxed);
                        })
                    })
                    .collect();
                drop(given);
                assert_eq!(done.load(Ordering::Relaxed), round * 5);
            }
        }
    }
}
