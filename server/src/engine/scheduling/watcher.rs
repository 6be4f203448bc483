//! Wakes clients that sleep until the GPU writes a flag, and notices clients that are gone.

use crate::engine::session::SessionShared;
use crate::engine::threads::shared::Shared;
use mpsshim_proto::segment::{SLEEPERS, reached, sleeper, state};
use mpsshim_proto::shm::futex_wake;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// Pause between two looks at the flags: short at first, longer while nothing happens.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_micros(100);

/// The watcher thread's body. It costs nothing while no client sleeps.
pub fn run(shared: &Arc<Shared>) {
    // The kernel may otherwise delay each short sleep by 50 µs.
    // SAFETY: a plain system call on the calling thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000) };
    let mut pause = SHORTEST;
    while !shared.fate.stopping.load(Ordering::Relaxed) {
        let sessions = shared.roster.session_list();
        let (mut any, mut woke) = (false, false);
        for session in &sessions {
            let header = session.header();
            if header.sleeping.0.load(Ordering::Relaxed) == 0 {
                continue;
            }
            any = true;
            let ended = header.state.0.load(Ordering::Relaxed) != state::LIVE;
            for record in header.sleepers.iter().take(SLEEPERS) {
                if record.state.load(Ordering::Acquire) != sleeper::SLEEPS {
                    continue;
                }
                let slot = record.slot.load(Ordering::Relaxed);
                if ended || reached(session.flag(slot), record.value.load(Ordering::Relaxed)) {
                    // The client may have given up meanwhile: only a record that still sleeps is woken.
                    let sleeping = sleeper::SLEEPS;
                    let won = record.state.compare_exchange(
                        sleeping,
                        sleeper::WOKEN,
                        Ordering::Release,
                        Ordering::Relaxed,
                    );
                    if won.is_ok() {
                        futex_wake(&record.state);
                        woke = true;
                    }
                }
            }
        }
        drop(sessions);
        if !any {
            shared.lanes.watcher_idle.store(true, Ordering::SeqCst);
            // Partner: the fence of a client between counting itself in `sleeping` and ringing the doorbell. Either this
            // thread sees the count, or the dispatch thread that hears the bell sees that this thread is idle.
            fence(Ordering::SeqCst);
            if !any_sleeps(&shared.roster.session_list()) {
                std::thread::park();
            }
            shared.lanes.watcher_idle.store(false, Ordering::SeqCst);
            pause = SHORTEST;
            continue;
        }
        pause = if woke {
            SHORTEST
        } else {
            (pause * 5 / 4).min(LONGEST)
        };
        std::thread::sleep(pause);
    }
}

fn any_sleeps(sessions: &[Arc<SessionShared>]) -> bool {
    let sleeping =
        |session: &Arc<SessionShared>| session.header().sleeping.0.load(Ordering::Relaxed);
    sessions.iter().any(|session| sleeping(session) != 0)
}

/// The body of the thread that waits for clients' sockets to close.
pub fn run_sockets(shared: &Arc<Shared>) {
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
    while !shared.fate.stopping.load(Ordering::Relaxed) {
        // SAFETY: the array is as long as said.
        let count = unsafe {
            libc::epoll_wait(
                shared.roster.epoll(),
                events.as_mut_ptr(),
                events.len() as i32,
                -1,
            )
        };
        for event in &events[..count.max(0) as usize] {
            let id = event.u64;
            if let Some(session) = shared.roster.session(id) {
                session.hung_up.store(true, Ordering::SeqCst);
                shared.roster.unwatch_socket(&session);
                session.bell.ring();
            }
        }
    }
}
