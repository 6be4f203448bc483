//! Images that a standby loads ahead of a restart: it gets them from the server that it is going to replace, which works on
//! meanwhile. A restart waits for that for a limited time, and goes on without if anything fails.

use super::Servers;
use super::server::{Server, State};
use std::os::fd::AsFd;

impl Servers {
    /// Asks a server for the images of its sessions, for its standby. Returns whether that may load images ahead.
    pub(super) fn ask_for_images(&mut self, pid: i32) -> bool {
        // Without a context of its own, a standby can load nothing.
        let has_images = |server: &&mut Server| {
            let serves = server.state == State::Active && !server.sessions.is_empty();
            serves && !server.is_exclusive()
        };
        let Some(server) = self.by_pid_mut(pid).filter(has_images) else {
            return false;
        };
        server.images = None;
        let asked = server.link.as_ref().map(|link| link.ask_images());
        matches!(asked, Some(Ok(())))
    }

    /// Passes the images of a server on to its standby, at this index, if they have come. Returns whether the standby is done
    /// with them, or will not get any.
    pub(super) fn has_loaded_ahead(&mut self, pid: i32, standby: usize) -> bool {
        let images = self.by_pid_mut(pid).and_then(|server| server.images.take());
        let standby = &self.running[standby];
        match images {
            None => standby.loaded_ahead,
            Some(None) => true,
            Some(Some(images)) => {
                let link = standby.link.as_ref();
                let ordered = link.map(|link| link.order_images(images.as_fd()));
                !matches!(ordered, Some(Ok(())))
            }
        }
    }
}
