//! Names of servers, by which interface 3 knows them.

use super::named::OF_USERS;
use super::{Server, Servers, State};

impl Servers {
    /// The name of a server: the one given when it was created, or `uid_UID` for the usual server of a user. A further
    /// server of the same name, such as that of a quarantined program, has its process id behind it: `uid_UID.PID`.
    pub fn name_of(&self, server: &Server) -> String {
        let defined = server.named.and_then(|id| self.definition(id));
        let name = match defined {
            Some(one) => one.named.name.clone(),
            None => format!("{OF_USERS}{}", server.uid),
        };
        let is_usual = |one: &&Server| match server.named {
            // Its user may have been changed, and its process of the former user be ending.
            Some(_) => one.named == server.named && one.quarantined.is_none(),
            None => one.serves(server.owner(), None, None),
        };
        let leaves = [State::HandedOver, State::Stopping, State::Fault];
        let working = |one: &&Server| !leaves.contains(&one.state);
        let usual = self.iter().filter(is_usual).find(working);
        let usual = usual.or_else(|| self.iter().find(is_usual));
        match usual.is_some_and(|usual| usual.pid == server.pid) {
            true => name,
            false => format!("{name}.{}", server.pid),
        }
    }

    /// The process of the server of this name.
    pub fn by_name(&self, name: &str) -> Option<&Server> {
        self.iter().find(|server| self.name_of(server) == name)
    }
}
