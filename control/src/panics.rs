//! No thread of a server dies alone.
//!
//! A thread that panics would leave the others waiting for it: clients without answers, memory that is never freed, a
//! daemon that keeps sending clients to a broken server. So a panic on any thread is logged and ends the process;
//! clients see the end of their server as usual, and the daemon starts the next one.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::panic::{self, PanicHookInfo};
use std::thread;

/// Exit status of a process after a panic (`EX_SOFTWARE` of sysexits.h).
pub const EXIT_STATUS: i32 = 70;

/// How long the log may take, seconds: the thread may have panicked while it held a lock of the log's.
const LOG_PATIENCE: u32 = 5;

thread_local! {
    static SESSION: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Sets the session that the calling thread works for from now on.
#[inline]
pub fn works_for(session: Option<u64>) {
    SESSION.set(session);
}

/// From now on a panic on any thread is logged and ends the process with [`EXIT_STATUS`].
pub fn end_process() {
    panic::set_hook(Box::new(|info| {
        // SAFETY: plain system calls. The alarm, for which nothing here has a handler, ends a process whose log hangs.
        unsafe { libc::alarm(LOG_PATIENCE) };
        log(info);
        // SAFETY: _exit ends the process and touches nothing of it: destructors and the driver's exit handlers might wait
        // for the thread that has panicked.
        unsafe { libc::_exit(EXIT_STATUS) }
    }));
}

fn log(info: &PanicHookInfo<'_>) {
    let thread = thread::current();
    let name = thread.name().unwrap_or("without a name");
    let session = match SESSION.get() {
        Some(session) => format!(", at work for session {session}"),
        None => String::new(),
    };
    let payload = info.payload();
    let payload = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    tracing::error!("Thread {name} has panicked{session}: {payload} ({place}). The server ends");
    for line in Backtrace::capture().to_string().lines() {
        tracing::debug!("{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logging::{self, Sink};
    use std::process::Command;
    use std::thread::Builder;
    use std::time::Duration;

    /// In a process of its own, since it ends.
    #[test]
    #[ignore = "a part of the test below"]
    fn panicking_process() {
        logging::install("Server", vec![Sink::StandardError], None);
        end_process();
        let thread = Builder::new().name("slow-7".into()).spawn(|| {
            works_for(Some(42));
            let devices: [u8; 16] = [0; 16];
            let ordinal = std::hint::black_box(16);
            std::hint::black_box(devices[ordinal]);
        });
        let _ = thread.expect("a thread").join();
        // Without the hook the process lives on.
        std::thread::sleep(Duration::from_millis(10));
    }

    #[test]
    fn a_panic_on_any_thread_is_logged_and_ends_the_process() {
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "panics::tests::panicking_process"])
            .args(["--ignored", "--nocapture"])
            .output()
            .expect("a process");
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(EXIT_STATUS), "{log}");
        let said = log.lines().find(|line| line.contains("has panicked"));
        let said = said.unwrap_or_else(|| panic!("nothing is said: {log}"));
        for part in ["slow-7", "session 42", "index out of bounds", "panics.rs"] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}
