//! Reports to the daemon on which devices clients have work in flight, while the users' shares of the devices matter
//! (docs/design/0024-shares.md).

use crate::engine::threads::shared::Shared;
use mpsshim_model::client::EngineEvent;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Interval between two looks at the sessions.
const LOOK: Duration = Duration::from_millis(1);
/// Interval between reports while there is work.
const REPORT: Duration = Duration::from_millis(5);

/// Starts or ends the reports.
pub fn set(shared: &Arc<Shared>, on: bool) {
    let reporting = &shared.fate.reports_work;
    if !on {
        reporting.store(0, Ordering::SeqCst);
        return shared.gpu.hold.set(Duration::ZERO);
    }
    let number = shared.fate.work_reports.fetch_add(1, Ordering::SeqCst) + 1;
    let begins = reporting.compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst);
    if begins.is_err() {
        return;
    }
    let for_thread = shared.clone();
    let thread = std::thread::Builder::new().name("work-reports".into());
    if let Err(error) = thread.spawn(move || run(&for_thread, number)) {
        reporting.store(0, Ordering::SeqCst);
        tracing::error!("The users' shares of the devices do not apply to this server: {error}");
    }
}

fn run(shared: &Shared, number: u64) {
    let mut last = ((0, 0), Instant::now());
    let on = || {
        shared.fate.reports_work.load(Ordering::Relaxed) == number
            && !shared.fate.stopping.load(Ordering::Relaxed)
    };
    let mut wanted = 0;
    while on() {
        wanted |= shared.gpu.hold.take_wanted();
        let (now, found) = (Instant::now(), (in_flight(shared), wanted));
        let (reported, at) = last;
        let is_idle = |(busy, wanted): (u64, u64)| busy | wanted == 0;
        let changes = found.0 != reported.0 || is_idle(found) != is_idle(reported);
        if changes || !is_idle(found) && now.duration_since(at) >= REPORT {
            shared.roster.tell(EngineEvent::Work(found.0, found.1));
            (last, wanted) = ((found, now), 0);
        }
        std::thread::sleep(LOOK);
    }
}

/// The devices on which sessions have work in flight, as a bit mask of ordinals.
fn in_flight(shared: &Shared) -> u64 {
    let sessions = shared.roster.session_list();
    let at_work = sessions.iter().filter(|session| !session.is_drained());
    at_work.fold(0, |all, session| {
        all | session.devices.load(Ordering::Relaxed)
    })
}
