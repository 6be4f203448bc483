//! Drops provisional pieces after a while although the program has seen no work end: it may be polling them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use mpsshim_proto::shm;

use super::{LAUNCHES, PROVISIONAL, observe};
use crate::proxy::submit::session;
use crate::thread;

/// How long a piece is at least valid, and at most. The interval grows while the program launches nothing, since each
/// piece that is still used has to be fetched again.
const LEAST: Duration = Duration::from_millis(1);
const MOST: Duration = Duration::from_millis(64);
/// How often the thread looks, if it is not woken.
const LOOK: Duration = Duration::from_secs(3600);

/// Starts the thread. To be called once, and not in the handler of a fault.
pub fn start() {
    let builder = std::thread::Builder::new()
        .name("mpsshim-pages".into())
        .stack_size(256 << 10);
    if let Err(error) = thread::without_signals(|| builder.spawn(run)) {
        tracing::warn!(%error, "no thread to refresh managed memory");
    }
}

/// There are provisional pieces.
pub fn wake() {
    shm::futex_wake(&PROVISIONAL);
}

fn run() {
    let Ok(session) = session() else {
        return;
    };
    let (mut interval, mut launches) = (LEAST, 0);
    loop {
        while PROVISIONAL.load(Ordering::SeqCst) == 0 {
            shm::futex_wait(&PROVISIONAL, 0, LOOK);
        }
        let now = LAUNCHES.load(Ordering::Relaxed);
        interval = match now == launches {
            true => (interval * 2).min(MOST),
            false => LEAST,
        };
        launches = now;
        std::thread::sleep(interval);
        observe(session);
        if session.check().is_err() {
            return;
        }
    }
}
