//! Lines on standard error about a refusal or a long wait for a session, for programs that mps-run starts:
//! `MPSSHIM_NOTICES=stderr` asks for them. Without it the library prints none.

use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use mpsshim_api::cuda::{
    CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, CUDA_ERROR_MPS_SERVER_NOT_READY, CUresult,
};
use mpsshim_proto::handshake::{MAGIC_REFUSAL, MAGIC_WAIT};

use crate::settings;

/// How long daemon and server may be silent before the program's user is told: longer than [`mpsshim_proto::handshake::WAIT_NOTICE`],
/// after which the daemon gives the reason.
const SILENCE: Duration = Duration::from_millis(1500);

/// The notices of one attempt to get a session.
pub struct Notices<'a> {
    /// The daemon's pipe directory.
    directory: &'a Path,
    is_on: bool,
    /// Refusals are told in any case.
    names_partition: bool,
    has_waited: bool,
    /// The daemon's reason for a refusal.
    refusal: Option<String>,
}

impl<'a> Notices<'a> {
    /// Of an attempt at this daemon; `wanted`: as its hello says.
    pub fn new(directory: &'a Path, wanted: bool) -> Notices<'a> {
        Notices {
            directory,
            is_on: wanted && settings::notices(),
            names_partition: settings::sm_partition().is_some(),
            has_waited: false,
            refusal: None,
        }
    }

    /// Waits until the socket has a packet, or says after [`SILENCE`] that there is none.
    pub fn wait(&mut self, socket: &OwnedFd) {
        if !self.is_on || self.has_waited {
            return;
        }
        let mut readable = libc::pollfd {
            fd: socket.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor, ours.
        let ready = unsafe { libc::poll(&mut readable, 1, SILENCE.as_millis() as libc::c_int) };
        if ready == 0 {
            self.say_waiting("no answer yet; server.log and `mps-control ps` may tell more");
        }
    }

    /// Takes a packet that precedes the welcome; `false`: it is another packet.
    pub fn take(&mut self, packet: &[u8]) -> bool {
        let text = |text: &[u8]| printable(&String::from_utf8_lossy(text));
        if let Some(reason) = packet.strip_prefix(&MAGIC_WAIT) {
            self.say_waiting(&text(reason));
            return true;
        }
        match packet.strip_prefix(&MAGIC_REFUSAL) {
            Some(reason) => {
                self.refusal = Some(text(reason));
                true
            }
            None => false,
        }
    }

    /// The program has no session, for this reason of the server's or the daemon's.
    pub fn refused(&self, status: CUresult) {
        let reason = self.refusal.as_deref().unwrap_or_else(|| reason(status));
        if !(self.is_on || self.names_partition) {
            return;
        }
        self.write(&format!(
            "no session ({status}): {reason}; {}",
            remedy(status)
        ));
    }

    fn say_waiting(&mut self, reason: &str) {
        if !self.has_waited {
            self.has_waited = true;
            self.say(&format!("the program waits for a session: {reason}"));
        }
    }

    fn say(&self, text: &str) {
        if self.is_on {
            self.write(text);
        }
    }

    fn write(&self, text: &str) {
        let (directory, owner) = (self.directory.display(), owner(self.directory));
        // Unlike eprintln it does not panic where nothing can be written.
        let _ = writeln!(
            std::io::stderr(),
            "mpsshim: daemon in {directory}, {owner}: {text}"
        );
    }
}

/// The owner of a daemon's directory, in words.
fn owner(directory: &Path) -> String {
    match std::fs::metadata(directory).map(|found| found.uid()) {
        Ok(0) => "of root".to_owned(),
        Ok(uid) => format!("of user {uid}"),
        Err(_) => "gone".to_owned(),
    }
}

/// The reason for a status that comes without one.
fn reason(status: CUresult) -> &'static str {
    match status {
        CUDA_ERROR_MPS_MAX_CLIENTS_REACHED => "the server has as many clients as it may",
        _ => "control.log and server.log say why",
    }
}

/// The remedy for a refusal.
fn remedy(status: CUresult) -> &'static str {
    match status {
        CUDA_ERROR_MPS_MAX_CLIENTS_REACHED => {
            "end some (`mps-control ps`), or raise MPSSHIM_MAX_CLIENTS for the daemon"
        }
        CUDA_ERROR_MPS_SERVER_NOT_READY => {
            "set MPSSHIM_PIPE_DIRECTORY to a directory of your own for a daemon of your own"
        }
        _ => "see docs/troubleshooting.md",
    }
}

/// A text without characters that would garble a terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}
