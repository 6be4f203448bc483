//! Reasons why clients wait for a server, for their users.

use super::{Server, Servers, Sought, State, Waiting};
use crate::link::Arrival;
use crate::logging::limit;
use crate::seqpacket;
use mpsshim_proto::handshake::{LONGEST_REASON, MAGIC_WAIT};
use nix::unistd::{Uid, User};
use std::os::fd::AsFd;
use std::time::Instant;

/// A client that waits for a server.
#[derive(Debug)]
pub struct Wait {
    /// Its process.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    /// The program as it was called, if known.
    pub command: Option<String>,
    /// The reason.
    pub reason: String,
}

/// Sends a client a packet with a reason. The client may have disconnected.
pub(super) fn tell(client: &Arrival, magic: [u8; 4], reason: &str) {
    let mut end = reason.len().min(LONGEST_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let packet = [&magic[..], &reason.as_bytes()[..end]].concat();
    let _ = seqpacket::send(client.connection.as_fd(), &packet, None);
}

impl Servers {
    /// Tells the clients that have waited long enough for which reason they wait.
    pub(super) fn tell_reasons(&mut self, now: Instant) {
        let is_due = |waiting: &Waiting| waiting.notice_at.is_some_and(|at| at <= now);
        let due: Vec<usize> = (0..self.waiting.len())
            .filter(|index| is_due(&self.waiting[*index]))
            .collect();
        for index in due {
            let reason = self.reason(&self.waiting[index]);
            let waiting = &mut self.waiting[index];
            waiting.notice_at = None;
            let who = waiting.client.who;
            let _guard = limit::caused_by_user(who.uid);
            tracing::info!(
                "Client {} of user {} waits for a session: {reason}",
                who.pid,
                who.uid
            );
            tell(&waiting.client, MAGIC_WAIT, &reason);
        }
    }

    /// The clients that wait.
    pub fn waits(&self) -> impl Iterator<Item = Wait> {
        self.waiting.iter().map(|waiting| Wait {
            pid: waiting.client.who.pid,
            uid: waiting.client.who.uid,
            command: match &waiting.identity {
                Sought::Reading(..) => None,
                Sought::Found(identity) => identity.command.clone(),
            },
            reason: self.reason(waiting),
        })
    }

    /// The reason why a client waits, and the remedy if there is one.
    fn reason(&self, waiting: &Waiting) -> String {
        if !waiting.is_identified() {
            return "the daemon is reading its command line".to_owned();
        }
        if self.orphans_until.is_some() {
            return "the daemon has just started and waits for servers of the previous one"
                .to_owned();
        }
        let owner = waiting.owner;
        let program = self.needed_by(waiting);
        if let Some(server) = self
            .iter()
            .find(|server| server.serves(owner, program, Some(waiting.wire())))
        {
            return of_own_server(server);
        }
        let is_other = |server: &&Server| server.named.is_none() && server.uid != owner.uid;
        let waits_for_user = owner.named.is_none() && !self.users_are_apart();
        if let Some(server) = self.iter().find(is_other).filter(|_| waits_for_user) {
            return of_other_user(server);
        }
        if self.exclusive
            && let Some(server) = self.iter().next()
        {
            return format!(
                "a device is not in DEFAULT compute mode and admits one server; it is this program's turn when the clients of \
                 server {} have ended",
                server.pid
            );
        }
        "its server is being started; server.log says more".to_owned()
    }
}

fn of_own_server(server: &Server) -> String {
    let pid = server.pid;
    match server.state {
        State::Initializing => format!("server {pid} is starting; server.log says more"),
        State::HandingOver | State::HandedOver => format!("server {pid} is being replaced"),
        State::Stopping | State::Fault => {
            format!("server {pid} is ending, and the next one starts then")
        }
        State::Active => format!("server {pid} is busy with other new clients"),
    }
}

fn of_other_user(server: &Server) -> String {
    let name = User::from_uid(Uid::from_raw(server.uid)).ok().flatten();
    let name = name.map_or_else(|| server.uid.to_string(), |user| user.name);
    let clients = match server.sessions.len() {
        1 => "1 client".to_owned(),
        count => format!("{count} clients"),
    };
    format!(
        "server {} serves user {name}, who has {clients}; it is the next user's turn when they have ended \
         (`mps-control ps` lists them). A daemon started with --users apart or --users together serves all users at once",
        server.pid
    )
}
