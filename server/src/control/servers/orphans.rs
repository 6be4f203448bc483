//! Servers of a daemon that has died.

use super::{Server, Servers};
use crate::control::process::Process;
use crate::engine::Credentials;
use crate::link::Link;
use crate::takeover::{Introduction, Unknown, Verdict};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long no server is started after a daemon has died: its servers look for the next one ten times a second.
const GRACE: Duration = Duration::from_millis(500);

impl Servers {
    /// The daemon before this one has died: what clients want may be there already.
    pub fn expect_orphans(&mut self) {
        self.orphans_until = Some(Instant::now() + GRACE);
    }

    /// A server has introduced itself whose daemon has died.
    pub fn meet(
        &mut self,
        connection: OwnedFd,
        who: Credentials,
        said: Result<Introduction, Unknown>,
    ) {
        let Credentials { pid, uid, .. } = who;
        let process = said
            .map_err(|error| error.to_string())
            .and_then(|said| Ok((self.may_take_over(connection.as_fd(), who)?, said)));
        let link = Link::new(connection);
        let (
            process,
            Introduction {
                clients, limits, ..
            },
        ) = match process {
            Ok(found) => found,
            Err(reason) => {
                tracing::warn!("Server {pid} of user {uid} not taken over: {reason}");
                // One that has gone needs no answer.
                let _ = link.send(&Verdict::Refused { reason }, None);
                return;
            }
        };
        if let Err(error) = link.send(&Verdict::TakenOver, None) {
            return tracing::warn!("Server {pid} of user {uid} not taken over: {error}");
        }
        tracing::info!("Server {pid} of user {uid} taken over with {clients} clients");
        // It reports its clients, then that it is ready. Its log may have been renamed while there was no daemon.
        let mut server = Server::new(pid, uid, process, link, limits.clone());
        server.hand_log(self.launcher.log());
        self.running.push(server);
        self.adopt_user_limits(&limits);
    }

    /// Whether this process may serve its user's clients from now on.
    fn may_take_over(
        &self,
        connection: BorrowedFd<'_>,
        who: Credentials,
    ) -> Result<Process, String> {
        // A server serves whom it runs as: nobody gets another user's clients.
        if !self.launcher.serves(who.uid) || self.launcher.owner(who.uid, None).uid != who.uid {
            return Err("this daemon has no servers of that user".into());
        }
        if self.closing {
            return Err("the daemon is shutting down".into());
        }
        if self.running.iter().any(|server| server.uid == who.uid) {
            return Err("another server serves that user".into());
        }
        Process::of_peer(connection, who).map_err(|error| format!("its process: {error}"))
    }
}
