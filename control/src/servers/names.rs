//! Names of servers, by which interface 3 knows them.

use super::{Server, Servers, State};

/// The name of the usual server of a user.
fn of_user(uid: u32) -> String {
    format!("uid_{uid}")
}

impl Servers {
    /// The name of a server: `uid_UID` for the usual server of a user. A further server of the same user, such as that of a
    /// quarantined program, has its process id in its name: `uid_UID.PID`.
    pub fn name_of(&self, server: &Server) -> String {
        let name = of_user(server.uid);
        let is_usual = |one: &&Server| one.serves(server.uid, None);
        let working = |one: &&Server| !matches!(one.state, State::Stopping | State::Fault);
        let usual = self.iter().filter(is_usual).find(working);
        let usual = usual.or_else(|| self.iter().find(is_usual));
        match usual.is_some_and(|usual| usual.pid == server.pid) {
            true => name,
            false => format!("{name}.{}", server.pid),
        }
    }

    /// The server of this name.
    pub fn by_name(&self, name: &str) -> Option<&Server> {
        self.iter().find(|server| self.name_of(server) == name)
    }
}
