//! A case: a daemon, a few sessions, and some ends of servers.

use crate::daemon::{Daemon, PATIENCE, Row};
use crate::tally::Tally;
use crate::view::{self, Reader, View};
use crate::{Events, Options, step};
use anyhow::{Context, bail, ensure};
use mpsshim_api::cuda::CUresult;
use mpsshim_model::bonds::Bonds;
use mpsshim_proto::message::{Attach, Op};
use mpsshim_tests::fuzzing::client::{Client, Common, Sent};
use mpsshim_tests::fuzzing::images::Images;
use mpsshim_tests::fuzzing::message::{Maker, Rules};
use mpsshim_tests::peer::Peer;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use std::time::{Duration, Instant};

/// How long sessions at rest are given to be saved. Those that are not are bound.
const SAVING: Duration = Duration::from_millis(500);
/// Messages that busy sessions send at most while a server ends.
const MEANWHILE: usize = 400;
/// Why a session at rest ends with another one.
const TORN: &str = "it shares an event that a lost client";
/// Bytes of a session's scratch memory.
const SCRATCH: u64 = 64 << 10;

/// A session, and what is known of it.
struct Session {
    client: Client,
    rules: Rules,
    reader: Reader,
    /// The server that has it.
    server: i32,
    /// Where server.log ended when it was last known to go on.
    since: usize,
    rest: Option<Rest>,
}

/// What a session at rest sees.
struct Rest {
    view: View,
    /// Empty if it is portable.
    bound_by: String,
}

impl Session {
    fn id(&self) -> u64 {
        self.client.peer.welcome.session
    }
}

/// How a server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Kill,
    Restart,
}

/// A case.
pub struct Case<'a> {
    options: &'a Options,
    images: &'a Images,
    tally: &'a mut Tally,
    daemon: Daemon,
    rng: SmallRng,
    sessions: Vec<Session>,
    common: Common,
}

impl<'a> Case<'a> {
    /// Runs a case.
    ///
    /// # Errors
    /// What does not hold.
    pub fn run(
        options: &'a Options,
        number: u64,
        images: &'a Images,
        tally: &'a mut Tally,
    ) -> anyhow::Result<()> {
        let seed = options.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut rng = SmallRng::seed_from_u64(seed.wrapping_add(number));
        let mut case = Case {
            options,
            images,
            tally,
            daemon: Daemon::start(rng.random_ratio(1, 4)),
            rng,
            sessions: Vec::new(),
            common: Common::default(),
        };
        let outcome = case.events();
        case.tally.contexts_lost += case.daemon.contexts_lost() as u64;
        let outcome = outcome.and_then(|()| case.leave());
        if outcome.is_err() {
            eprintln!("{}", case.daemon.story());
            return outcome;
        }
        case.daemon.quit()
    }

    fn say(&self, text: impl FnOnce() -> String) {
        if self.options.verbose {
            eprintln!("{}", text());
        }
    }

    fn events(&mut self) -> anyhow::Result<()> {
        let wanted = self.rng.random_range(2..5);
        for _ in 0..self.rng.random_range(3..8) {
            while self.sessions.len() < wanted {
                self.connect()?;
            }
            for _ in 0..self.rng.random_range(20..400) {
                if !self.sessions.is_empty() {
                    let at = self.rng.random_range(0..self.sessions.len());
                    self.message(at)?;
                }
            }
            self.rest()?;
            if !self.sessions.is_empty() {
                self.event()?;
            }
            self.daemon.is_sound()?;
        }
        Ok(())
    }

    /// A new session. Most are of correct and portable programs, as most programs are.
    fn connect(&mut self) -> anyhow::Result<()> {
        let rules = match self.rng.random_range(0..20) {
            0 | 1 => Rules::default(),
            2..5 => Rules {
                correct: true,
                ..Rules::default()
            },
            number => Rules {
                correct: true,
                portable: true,
                graphless: number < 15,
                ..Rules::default()
            },
        };
        let peer = self.peer()?;
        let server = peer.welcome.server_pid as i32;
        let patience = Duration::from_secs(self.options.patience);
        let mut client = match rules.correct {
            true => Client::correct(peer, patience)?,
            false => Client::new(peer, patience)?,
        };
        client.peer.patience = patience;
        let mut prepare = || {
            client.prepare(&mut self.common, &mut self.rng)?;
            // A correct client names only devices that it has attached.
            let second = Attach {
                device: 1,
                flags: 0,
            };
            client.peer.ask_as(0, Op::Attach, &second, &[])?;
            Ok::<_, CUresult>(Reader {
                stream: client.peer.stream()?,
                scratch: client.peer.memory(SCRATCH)?,
            })
        };
        let reader = prepare().context("a new session cannot be made ready")?;
        client.spared = Some(reader.scratch.start);
        self.tally.sessions += 1;
        let session = Session {
            client,
            rules,
            reader,
            server,
            since: self.daemon.log_len(),
            rest: None,
        };
        self.say(|| format!("session {} on server {server}: {rules:?}", session.id()));
        self.sessions.push(session);
        Ok(())
    }

    /// One that is handed to a server as it ends is refused, and may try again.
    fn peer(&mut self) -> anyhow::Result<Peer> {
        let began = Instant::now();
        loop {
            match Peer::connect(&self.daemon.socket()) {
                Ok(peer) => return Ok(peer),
                Err(error) if began.elapsed() > PATIENCE => {
                    return Err(error).context("no new session");
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// A message of a session.
    fn message(&mut self, at: usize) -> anyhow::Result<()> {
        let sent = self.exchange(at);
        match sent {
            Sent::Fine => Ok(()),
            Sent::Ended(status) => self.ended(at, status, "at work"),
            Sent::Stuck => {
                eprintln!("{}", self.daemon.threads());
                bail!("session {} is stuck", self.sessions[at].id())
            }
        }
    }

    fn exchange(&mut self, at: usize) -> Sent {
        step();
        let session = &mut self.sessions[at];
        let draft = Maker {
            client: &mut session.client,
            common: &self.common,
            images: self.images,
            rules: session.rules,
            rng: &mut self.rng,
        }
        .any();
        self.tally.messages += 1;
        if self.options.verbose {
            eprintln!("{} {draft:?}", session.id());
        }
        let client = &mut session.client;
        client.send(draft, &mut self.common, &mut self.rng).0
    }

    /// A session has ended that need not go on.
    fn ended(&mut self, at: usize, status: CUresult, when: &str) -> anyhow::Result<()> {
        let session = self.sessions.swap_remove(at);
        let why = self.daemon.why_ended(session.id(), session.since);
        let why = why.unwrap_or_else(|| format!("{status}"));
        self.say(|| format!("session {} ended {when}: {why}", session.id()));
        Tally::count(&mut self.tally.ended, &format!("{when}: {why}"));
        Ok(())
    }

    /// Most sessions come to rest, and look at what they have.
    fn rest(&mut self) -> anyhow::Result<()> {
        let mut at = 0;
        while at < self.sessions.len() {
            let session = &mut self.sessions[at];
            session.rest = None;
            if !session.rules.correct || self.rng.random_ratio(1, 6) {
                at += 1;
                continue;
            }
            step();
            match look(session) {
                Ok(rest) => {
                    session.rest = rest;
                    at += 1;
                }
                Err(Sent::Ended(status)) => self.ended(at, status, "at work")?,
                Err(_) => {
                    eprintln!("{}", self.daemon.threads());
                    bail!("session {} does not come to rest", session.id())
                }
            }
        }
        self.await_saved()
    }

    /// Waits until the sessions at rest are saved, if that is possible, and notes what binds each of them.
    fn await_saved(&mut self) -> anyhow::Result<()> {
        let began = Instant::now();
        let passing: Vec<&str> = Bonds::UNTIL_SAVED.names().collect();
        loop {
            step();
            let rows = self.daemon.rows()?;
            self.locate(&rows);
            let mut waits = false;
            for session in &mut self.sessions {
                let (id, server) = (session.id(), session.server);
                let Some(rest) = &mut session.rest else {
                    continue;
                };
                let row = rows
                    .iter()
                    .find(|row| (row.session, row.server) == (id, server));
                let row = row.with_context(|| format!("ps does not list session {id}"))?;
                rest.bound_by.clone_from(&row.bound_by);
                waits |= row.bound_by.split("; ").any(|bond| passing.contains(&bond));
            }
            if !waits || began.elapsed() > SAVING {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let since = self.daemon.log_len();
        for session in &mut self.sessions {
            session.since = since;
            if let Some(rest) = &mut session.rest
                && !rest.bound_by.is_empty()
            {
                // Other sessions may change its memory meanwhile.
                if Bonds::SHARED
                    .names()
                    .any(|bond| rest.bound_by.contains(bond))
                {
                    rest.view.forget_contents();
                }
                Tally::count(&mut self.tally.bound, &rest.bound_by);
            }
        }
        Ok(())
    }

    /// Notes where the sessions are. Sessions of two servers may have the same number.
    fn locate(&mut self, rows: &[Row]) {
        let known: Vec<(u64, i32)> = self
            .sessions
            .iter()
            .map(|one| (one.id(), one.server))
            .collect();
        for session in &mut self.sessions {
            let id = session.id();
            let mine = |row: &&Row| row.session == id;
            if rows
                .iter()
                .filter(mine)
                .any(|row| row.server == session.server)
            {
                continue;
            }
            let free = |row: &&Row| !known.contains(&(id, row.server));
            if let Some(row) = rows.iter().filter(mine).find(free) {
                session.server = row.server;
            }
        }
    }

    /// A server ends while busy sessions send messages; then the sessions at rest look again.
    fn event(&mut self) -> anyhow::Result<()> {
        let event = match self.options.events {
            Events::Kills => Event::Kill,
            Events::Restarts => Event::Restart,
            Events::Both => *[Event::Kill, Event::Restart]
                .choose(&mut self.rng)
                .unwrap_or(&Event::Kill),
        };
        let server = self.sessions[self.rng.random_range(0..self.sessions.len())].server;
        let lost = self.daemon.contexts_lost();
        self.say(|| format!("{event:?} of server {server}"));
        let is_done = self.end_server(event, server)?;
        self.look_again(event, server, is_done, lost)?;
        let rows = self.daemon.rows()?;
        self.locate(&rows);
        Ok(())
    }

    /// Whether it was replaced, or killed.
    fn end_server(&mut self, event: Event, server: i32) -> anyhow::Result<bool> {
        let busy: Vec<u64> = self
            .sessions
            .iter()
            .filter(|one| one.rest.is_none())
            .map(Session::id)
            .collect();
        match event {
            Event::Kill => {
                self.tally.kills += 1;
                for _ in 0..self.rng.random_range(0..60) {
                    self.busy_message(&busy)?;
                }
                Ok(self.daemon.kill(server))
            }
            Event::Restart => {
                self.tally.restarts += 1;
                let restart = self.daemon.restart(server);
                for _ in 0..MEANWHILE {
                    if restart.is_finished() {
                        break;
                    }
                    self.busy_message(&busy)?;
                }
                let outcome = restart.join().map_err(|_| anyhow::anyhow!("a panic"))?;
                if let Err(why) = &outcome {
                    self.say(|| format!("{why}\n{}", self.daemon.last_lines()));
                    Tally::count(&mut self.tally.refused, why);
                }
                Ok(outcome.is_ok())
            }
        }
    }

    /// A message of one of these sessions.
    fn busy_message(&mut self, busy: &[u64]) -> anyhow::Result<()> {
        let Some(id) = busy.choose(&mut self.rng) else {
            std::thread::sleep(Duration::from_micros(200));
            return Ok(());
        };
        match self
            .sessions
            .iter()
            .position(|one| one.id() == *id && one.rest.is_none())
        {
            Some(at) => self.message(at),
            None => Ok(()),
        }
    }

    /// The sessions at rest are as they were, if they had to go on. A fault ends those that are bound.
    fn look_again(
        &mut self,
        event: Event,
        server: i32,
        is_done: bool,
        lost: usize,
    ) -> anyhow::Result<()> {
        let mut at = 0;
        while at < self.sessions.len() {
            step();
            let session = &mut self.sessions[at];
            let Some(rest) = session.rest.take() else {
                at += 1;
                continue;
            };
            let (id, portable) = (session.id(), rest.bound_by.is_empty());
            let since = session.since;
            let ends = session.server == server && is_done;
            match look_at(session, &rest.view) {
                Ok(None) => {
                    self.tally.compared += rest.view.len() as u64;
                    match ends && portable {
                        true => self.tally.made_again += 1,
                        false => self.tally.stayed += 1,
                    }
                    at += 1;
                }
                Ok(Some(differs)) => bail!(
                    "session {id} is not as it was after {event:?} of {server} ({}): {differs}",
                    rest.bound_by
                ),
                Err(Sent::Ended(status)) => {
                    let may_end =
                        ends && event == Event::Kill || self.daemon.contexts_lost() > lost;
                    let why = self.daemon.why_ended(id, since).unwrap_or_default();
                    let is_torn = why.contains(TORN);
                    ensure!(
                        (!portable || is_torn) && may_end,
                        "session {id} was at rest, bound by “{}”, and ended with {status} after {event:?} of {server}: {why}",
                        rest.bound_by,
                    );
                    let when = match is_torn {
                        true => "with a record for which it may wait",
                        false => "at rest and bound",
                    };
                    self.ended(at, status, when)?;
                }
                Err(_) => bail!("session {id} does not answer after {event:?} of {server}"),
            }
        }
        Ok(())
    }

    /// All sessions leave: nothing of them is left.
    fn leave(&mut self) -> anyhow::Result<()> {
        self.sessions.clear();
        self.common = Common::default();
        step();
        self.daemon.is_left()?;
        self.daemon.is_sound()
    }
}

/// Whether a session at rest is as it was, and works.
fn look_at(session: &mut Session, view: &View) -> Result<Option<String>, Sent> {
    let Session { client, reader, .. } = session;
    if let Some(differs) = view.differs(client, *reader)? {
        return Ok(Some(differs.to_string()));
    }
    let value = client.mark(reader.stream).1;
    view::store(client, *reader, value)
}

/// Waits for all that a session has in flight, and looks at what it has. `None` if it cannot come to rest.
fn look(session: &mut Session) -> Result<Option<Rest>, Sent> {
    if !session.client.wait_for_all()? {
        return Ok(None);
    }
    let view = View::take(&mut session.client, session.reader)?;
    Ok(Some(Rest {
        view,
        bound_by: String::new(),
    }))
}
