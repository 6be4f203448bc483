//! Locks of the CUDA driver, as taken by threads of the server.
//!
//! The driver has one lock for all streams of a context, held for some 2 µs per call. The C library's mutex puts a
//! thread to sleep at once if it is taken, which costs that thread 10 to 50 µs, and costs the holder a system call. So
//! the server's executable exports functions of the same names that first spin for a while. The loader resolves these
//! names to the executable before the C library, for the driver too, which needs no change. The rest is left to the C
//! library: these functions only try a lock, and then wait for it as usual.

use std::ffi::CStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a thread spins, in nanoseconds.
static SPIN: AtomicU64 = AtomicU64::new(0);
/// Spin iterations between two attempts to take the lock.
const LOOKS: u32 = 8;

/// A function of the C library that takes a lock and waits for it.
type Take<T> = unsafe extern "C" fn(*mut T) -> libc::c_int;

/// From now on threads spin on a taken lock for this long before they sleep.
pub fn spin_for(time: Duration) {
    SPIN.store(time.as_nanos() as u64, Ordering::Relaxed);
}

/// `pthread_mutex_lock` (POSIX).
///
/// # Safety
/// As of that function.
pub unsafe fn lock_mutex(mutex: *mut libc::pthread_mutex_t) -> libc::c_int {
    static REAL: OnceLock<Option<Take<libc::pthread_mutex_t>>> = OnceLock::new();
    // SAFETY: the caller's promise; the name is that of a function of this type.
    unsafe {
        take(
            mutex,
            libc::pthread_mutex_trylock,
            &REAL,
            c"pthread_mutex_lock",
        )
    }
}

/// `pthread_rwlock_rdlock` (POSIX).
///
/// # Safety
/// As of that function.
pub unsafe fn lock_shared(lock: *mut libc::pthread_rwlock_t) -> libc::c_int {
    static REAL: OnceLock<Option<Take<libc::pthread_rwlock_t>>> = OnceLock::new();
    // SAFETY: as above.
    unsafe {
        take(
            lock,
            libc::pthread_rwlock_tryrdlock,
            &REAL,
            c"pthread_rwlock_rdlock",
        )
    }
}

/// `pthread_rwlock_wrlock` (POSIX).
///
/// # Safety
/// As of that function.
pub unsafe fn lock_exclusive(lock: *mut libc::pthread_rwlock_t) -> libc::c_int {
    static REAL: OnceLock<Option<Take<libc::pthread_rwlock_t>>> = OnceLock::new();
    // SAFETY: as above.
    unsafe {
        take(
            lock,
            libc::pthread_rwlock_trywrlock,
            &REAL,
            c"pthread_rwlock_wrlock",
        )
    }
}

/// Takes a lock: first by repeated attempts, then with the function `name` of the C library. That function also reports
/// errors, such as a lock that the thread already holds.
#[inline]
unsafe fn take<T>(
    lock: *mut T,
    try_take: Take<T>,
    real: &OnceLock<Option<Take<T>>>,
    name: &CStr,
) -> libc::c_int {
    // SAFETY: the caller's promise.
    let try_take = || match unsafe { try_take(lock) } {
        libc::EBUSY => None,
        status => Some(status),
    };
    if let Some(status) = try_take() {
        return status;
    }
    let spin = Duration::from_nanos(SPIN.load(Ordering::Relaxed));
    if !spin.is_zero() {
        let began = Instant::now();
        while began.elapsed() < spin {
            for _ in 0..LOOKS {
                std::hint::spin_loop();
            }
            if let Some(status) = try_take() {
                return status;
            }
        }
    }
    let real = real.get_or_init(|| {
        // SAFETY: looks up a name; the result, if any, is the C library's function of this type.
        unsafe {
            let found = libc::dlsym(libc::RTLD_NEXT, name.as_ptr());
            std::mem::transmute_copy::<*mut libc::c_void, Option<Take<T>>>(&found)
        }
    });
    match real {
        // SAFETY: the caller's promise.
        Some(real) => unsafe { real(lock) },
        None => loop {
            std::thread::yield_now();
            if let Some(status) = try_take() {
                return status;
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::UnsafeCell;
    use std::mem::MaybeUninit;
    use std::sync::Barrier;
    use std::thread;

    struct Mutex(UnsafeCell<libc::pthread_mutex_t>);
    // SAFETY: threads share it through the functions of POSIX only.
    unsafe impl Sync for Mutex {}

    impl Mutex {
        fn new(kind: libc::c_int) -> Mutex {
            let mut attributes = MaybeUninit::uninit();
            let mut mutex = MaybeUninit::uninit();
            // SAFETY: attributes and mutex are initialised before they are used.
            unsafe {
                assert_eq!(libc::pthread_mutexattr_init(attributes.as_mut_ptr()), 0);
                let set = libc::pthread_mutexattr_settype(attributes.as_mut_ptr(), kind);
                assert_eq!(set, 0);
                let made = libc::pthread_mutex_init(mutex.as_mut_ptr(), attributes.as_ptr());
                assert_eq!(made, 0);
                Mutex(mutex.assume_init().into())
            }
        }

        fn lock(&self) -> libc::c_int {
            // SAFETY: the mutex is initialised and stays where it is.
            unsafe { lock_mutex(self.0.get()) }
        }

        fn unlock(&self) {
            // SAFETY: as above; each unlock in the tests follows a lock by the same thread.
            assert_eq!(unsafe { libc::pthread_mutex_unlock(self.0.get()) }, 0);
        }
    }

    /// Runs with threads that spin, and with threads that do not.
    fn both(test: impl Fn()) {
        for spin in [Duration::ZERO, Duration::from_micros(20)] {
            spin_for(spin);
            test();
        }
    }

    #[test]
    fn one_thread_has_a_mutex_at_a_time() {
        both(|| {
            let mutex = Mutex::new(libc::PTHREAD_MUTEX_NORMAL);
            let count = Count(UnsafeCell::new(0));
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        for _ in 0..20_000 {
                            assert_eq!(mutex.lock(), 0);
                            count.add();
                            mutex.unlock();
                        }
                    });
                }
            });
            assert_eq!(count.0.into_inner(), 80_000);
        });
    }

    struct Count(UnsafeCell<u64>);
    // SAFETY: `add` is called by one thread at a time if the lock that is tested works.
    unsafe impl Sync for Count {}

    impl Count {
        fn add(&self) {
            // SAFETY: as above; two steps, so that a lock that does not work shows.
            unsafe {
                self.0
                    .get()
                    .write_volatile(self.0.get().read_volatile() + 1)
            };
        }
    }

    #[test]
    fn a_lock_that_is_held_for_long_is_waited_for() {
        both(|| {
            let mutex = Mutex::new(libc::PTHREAD_MUTEX_NORMAL);
            let held = Barrier::new(2);
            thread::scope(|scope| {
                scope.spawn(|| {
                    assert_eq!(mutex.lock(), 0);
                    held.wait();
                    thread::sleep(Duration::from_millis(20));
                    mutex.unlock();
                });
                held.wait();
                let began = Instant::now();
                assert_eq!(mutex.lock(), 0);
                assert!(began.elapsed() > Duration::from_millis(10));
                mutex.unlock();
            });
        });
    }

    #[test]
    fn what_a_mutex_is_made_for_stays() {
        both(|| {
            let recursive = Mutex::new(libc::PTHREAD_MUTEX_RECURSIVE);
            assert_eq!((recursive.lock(), recursive.lock()), (0, 0));
            recursive.unlock();
            recursive.unlock();
            let checking = Mutex::new(libc::PTHREAD_MUTEX_ERRORCHECK);
            assert_eq!((checking.lock(), checking.lock()), (0, libc::EDEADLK));
            checking.unlock();
        });
    }

    #[test]
    fn many_read_and_one_writes() {
        both(|| {
            let lock = UnsafeCell::new(libc::PTHREAD_RWLOCK_INITIALIZER);
            let lock = Shared(&lock);
            // SAFETY: the lock is initialised and stays where it is.
            let taken = unsafe { (lock_shared(lock.get()), lock_shared(lock.get())) };
            assert_eq!(taken, (0, 0));
            thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    // SAFETY: as above.
                    assert_eq!(unsafe { lock_exclusive(lock.get()) }, 0);
                    // SAFETY: as above; this thread has it.
                    assert_eq!(unsafe { libc::pthread_rwlock_unlock(lock.get()) }, 0);
                });
                thread::sleep(Duration::from_millis(5));
                assert!(!writer.is_finished());
                for _ in 0..2 {
                    // SAFETY: as above; this thread holds it twice.
                    assert_eq!(unsafe { libc::pthread_rwlock_unlock(lock.get()) }, 0);
                }
            });
        });
    }

    struct Shared<'a>(&'a UnsafeCell<libc::pthread_rwlock_t>);
    // SAFETY: threads share it through the functions of POSIX only.
    unsafe impl Sync for Shared<'_> {}

    impl Shared<'_> {
        fn get(&self) -> *mut libc::pthread_rwlock_t {
            self.0.get()
        }
    }
}
