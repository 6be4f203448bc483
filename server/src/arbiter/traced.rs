//! Trace events of the arbiter: turns, and waits for turns.

use super::turns::{Standing, Turns};
use mpsshim_control::trace::{Detail, Process, Run, Slice, Track};
use mpsshim_model::client::ClientInfo;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Number of a client's only track.
const TURNS: u64 = 0;

/// A client's state at the last check.
#[derive(Clone, Copy, Debug)]
struct Seen {
    process: Process,
    standing: Standing,
    /// Number of its turns so far: one may end and the next begin between two checks.
    turns: u64,
    since: u64,
}

/// A trace in progress.
#[derive(Debug)]
pub struct Traced {
    run: Arc<Run>,
    clients: BTreeMap<u64, Seen>,
}

impl Traced {
    /// Reports to `run` from now on.
    pub fn new(run: Arc<Run>) -> Traced {
        Traced {
            run,
            clients: BTreeMap::new(),
        }
    }

    /// Reports the changes since the last check.
    pub fn look<'a>(&mut self, clients: impl Iterator<Item = &'a ClientInfo>, turns: &Turns) {
        // The same time for all clients: the end of one client's turn is the beginning of another's.
        let now = self.run.now();
        for client in clients {
            let session = client.session;
            let (standing, had) = (turns.standing(session), turns.turns_had(session));
            let before = self.clients.get(&session).copied();
            let same = |seen: Seen| seen.standing == standing && seen.turns == had;
            if before.is_some_and(same) {
                continue;
            }
            let process = Process {
                session,
                pid: client.pid,
            };
            match before {
                Some(seen) => self.tell(seen, now, Detail::None),
                None => {
                    self.run.name_process(process, client.uid);
                    let track = Track {
                        process,
                        number: TURNS,
                    };
                    self.run.name_track(track, "turns");
                }
            }
            let seen = Seen {
                process,
                standing,
                turns: had,
                since: now,
            };
            self.clients.insert(session, seen);
        }
    }

    /// A client has gone.
    pub fn leave(&mut self, session: u64) {
        if let Some(seen) = self.clients.remove(&session) {
            self.tell(seen, self.run.now(), Detail::None);
        }
    }

    /// Reports the intervals still in progress when the trace ends.
    pub fn end(self) {
        let now = self.run.now();
        for seen in self.clients.values() {
            self.tell(*seen, now, Detail::Unfinished);
        }
    }

    fn tell(&self, seen: Seen, now: u64, detail: Detail) {
        let (name, category) = match seen.standing {
            Standing::Idle => return,
            Standing::Waits => ("waits for a turn", "wait"),
            Standing::Holds => ("has a turn", "turn"),
        };
        let process = seen.process;
        self.run.slice(Slice {
            track: Track {
                process,
                number: TURNS,
            },
            name: name.into(),
            category,
            time: (seen.since, now),
            detail,
        });
    }
}
