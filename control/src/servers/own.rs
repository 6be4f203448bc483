//! Servers for single clients. Graphs with conditional nodes may end a context in which other clients work, so a client that
//! launches such graphs beside others moves to a server of its own, as far as there may be more servers.

use super::standby::{Restart, Single, Step};
use super::{Server, Servers};
use crate::logging::limit;

impl Server {
    /// A session needs a server of its own.
    pub(super) fn note_need(&mut self, session: u64) {
        if self.sessions.contains_key(&session) && !self.need_own.contains(&session) {
            self.need_own.push_back(session);
        }
    }

    /// Tells the server that a session stays with the others.
    fn tell_to_share(&self, session: u64) {
        if let Some(Err(error)) = self.link.as_ref().map(|link| link.order_sharing(session)) {
            tracing::warn!("Server {}: {error}", self.pid);
        }
    }
}

impl Servers {
    /// Tells a server that is ready whether it may ask for servers for single clients.
    pub(super) fn allow_separation(&mut self, pid: i32) {
        let most = self.launcher.own_servers();
        let Some(server) = self.by_pid_mut(pid) else {
            return;
        };
        if !std::mem::take(&mut server.asks_separation) {
            return;
        }
        let may = most > 0 && !server.is_exclusive();
        if let Some(Err(error)) = server.link.as_ref().map(|link| link.order_separation(may)) {
            tracing::warn!("Server {pid}: {error}");
        }
    }

    /// Begins to move clients that need servers of their own, one of each server at a time.
    pub(super) fn begin_separations(&mut self) {
        let in_need = self.running.iter().filter(|one| !one.need_own.is_empty());
        let pids: Vec<i32> = in_need.map(|one| one.pid).collect();
        for pid in pids {
            while self.is_restarted(pid)
                && self.by_pid(pid).is_some_and(Server::may_hand_over)
                && let Some(session) = self.next_in_need(pid)
            {
                self.begin_separation(pid, session);
            }
        }
    }

    fn next_in_need(&mut self, pid: i32) -> Option<u64> {
        self.by_pid_mut(pid)?.need_own.pop_front()
    }

    fn begin_separation(&mut self, pid: i32, session: u64) {
        let Some(server) = self.by_pid(pid) else {
            return;
        };
        // It may have ended.
        let Some(client) = server.sessions.get(&session) else {
            return;
        };
        let (client, uid) = (client.pid, client.uid);
        let _guard = limit::caused_by_user(uid);
        if server.sessions.len() == 1 {
            // It is alone by now.
            return server.tell_to_share(session);
        }
        let single = Single { session, uid };
        let begun = match self.has_room_for_own(uid) {
            true => self.separate(pid, single),
            false => Err("there are as many servers for single clients as there may be".into()),
        };
        match begun {
            Ok(()) => tracing::info!(
                "Client {client} of server {pid} gets a server of its own, for its graphs with conditional nodes"
            ),
            Err(why) => self.decline(pid, single, &why),
        }
    }

    /// Whether one more server may be for a single client of this user. Each user may have one, however many others have.
    fn has_room_for_own(&self, uid: u32) -> bool {
        let most = self.launcher.own_servers();
        let running = self.running.iter().filter_map(|server| server.single);
        // During the adoption, the server is among the running ones.
        let is_coming = |restart: &&Restart| !matches!(restart.step, Step::Adopts(_));
        let coming = self.restarts.iter().filter(is_coming);
        let coming = coming.filter_map(|restart| Some(restart.only?.uid));
        let users: Vec<u32> = running.chain(coming).collect();
        most > 0 && !self.closing && (users.len() < most || !users.contains(&uid))
    }

    fn decline(&self, pid: i32, single: Single, why: &str) {
        let _guard = limit::caused_by_user(single.uid);
        let Some(server) = self.by_pid(pid) else {
            return;
        };
        if let Some(client) = server.sessions.get(&single.session) {
            tracing::warn!(
                "Client {} of server {pid} shares it, although its graphs with conditional nodes may end the context: {why}",
                client.pid
            );
        }
        server.tell_to_share(single.session);
    }

    /// The client that has left goes on in this server, which ends with it.
    pub(super) fn note_separated(&mut self, next: Option<i32>, client: Single) {
        if let Some(next) = next.and_then(|next| self.by_pid_mut(next)) {
            next.single = Some(client.uid);
            next.left_behind = true;
            next.stop(false);
        }
    }

    /// Forgets the moves to servers for single clients that are over. Clients that have not moved stay for now. Returns whether
    /// there were any.
    pub(super) fn end_separations(&mut self) -> bool {
        let is_over =
            |restart: &mut Restart| restart.only.is_some() && matches!(restart.step, Step::Over(_));
        let over: Vec<_> = self.restarts.extract_if(.., is_over).collect();
        let any = !over.is_empty();
        for restart in over {
            if let (Step::Over(Err(why)), Some(client)) = (restart.step, restart.only) {
                self.decline(restart.server, client, &why);
            }
        }
        any
    }
}
