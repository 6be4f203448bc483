//! Settings that cannot be applied. Without them the program would run unlimited or unshared, so `cuInit` fails, with a
//! line on standard error, whatever `MPSSHIM_LOG` is, and one in the daemon's log.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

use mpsshim_api::cuda::CUresult;
use parking_lot::Mutex;

use crate::daemon;

/// Reports why `cuInit` fails with this status, once for each reason. Returns the status.
pub fn refuse(status: CUresult, why: impl Display) -> CUresult {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let why = why.to_string();
    tracing::error!(%status, why, "refused");
    // A program may try again and again.
    if SAID.lock().insert(why.clone()) {
        // Unlike eprintln it does not panic where nothing can be written.
        let _ = writeln!(
            std::io::stderr(),
            "mpsshim: cuInit fails with {status}: {why}"
        );
        tell_daemon(&format!(
            "Client {} refused itself with status {}: {why}\n",
            std::process::id(),
            status.0
        ));
    }
    status
}

/// Writes a line to control.log, through the pipe for users who may not write to that file. Without a daemon it is lost.
fn tell_daemon(line: &str) {
    let Some(directory) = daemon::directory() else {
        return;
    };
    let pipe = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
        .open(directory.join("log"));
    if let Ok(mut pipe) = pipe
        && pipe
            .metadata()
            .is_ok_and(|found| found.file_type().is_fifo())
    {
        // A full pipe loses the line: the program is not to wait for its refusal.
        let _ = pipe.write_all(line.as_bytes());
    }
}
