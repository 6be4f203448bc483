//! The daemon's side of a command: answered at once, or when the event that it waits for has occurred.

use super::apply::read_sent;
use super::{Awaiting, Daemon, Until};
use crate::closers::Stranger;
use crate::commands::{self, Command, Request, Whose};
use crate::listing::{self, Listing};
use crate::logging::limit;
use crate::modules;
use crate::parse::parse_in;
use crate::program::Program;
use crate::server_file::ServerFile;
use crate::servers::Server;
use crate::usage::{Answers, Question, UsageBySession};
use crate::wire::{self, Answer, Interface};
use mpsshim_model::amount;
use mpsshim_model::client::Credentials;
use mpsshim_model::device::{self, DeviceInfo};
use mpsshim_model::limits::{Limits, MemoryBound, Percentage};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long servers may take to begin or end a trace.
const TRACE_PATIENCE: Duration = Duration::from_secs(10);
/// Number of commands of a connection that are remembered, to log each only once.
const REMEMBERED: usize = 8;

/// Result of a command that completes at once; the error is the answer to a command that fails.
pub(super) type Outcome = Result<Answer, Answer>;

/// The request to apply a file that was sent with the command.
fn read_file(path: &str, descriptor: Option<Stranger>) -> Result<Request, Answer> {
    let descriptor = descriptor.ok_or_else(|| {
        Answer::failed("-a: mps-control must send the file with the command, and sent none")
    })?;
    let text = read_sent(OwnedFd::from(descriptor)).map_err(Answer::failed)?;
    let file = ServerFile::parse(&text, path);
    let file = file.map_err(|mistakes| Answer::failed(mistakes.to_string()))?;
    Ok(Request {
        command: Command::Module(modules::Command::ApplyFile(file)),
        format: commands::Format::default(),
    })
}

impl Daemon {
    /// `descriptor`: the descriptor sent with the command.
    pub(super) fn command(
        &mut self,
        number: u64,
        (interface, line): (Interface, &str),
        descriptor: Option<Stranger>,
    ) {
        let Some(peer) = self.peers.get_mut(&number) else {
            return;
        };
        if peer.silent_until.take().is_some() {
            tracing::info!("NEW UI");
        }
        if line.len() > wire::COMMAND_LIMIT {
            let limit = wire::COMMAND_LIMIT;
            return self.answer(
                number,
                &Answer::failed(format!("a command line may have {limit} bytes")),
            );
        }
        peer.repeats = peer.asked.iter().any(|before| before == line);
        if !peer.repeats {
            tracing::info!("Cmd:{}", line.trim());
            let looks = commands::only_looks(line)
                || interface == Interface::Three && modules::only_looks(line);
            if peer.asked.len() < REMEMBERED && looks {
                peer.asked.push(line.to_owned());
            }
        }
        match parse_in(interface, line, peer.privileged) {
            Ok(None) => self.answer(number, &Answer::done("")),
            Ok(Some(request)) => self.serve(number, request, descriptor),
            Err(error) => {
                if error.is_refusal() {
                    let Credentials { pid, uid, .. } = peer.who;
                    tracing::warn!("Command of process {pid} of user {uid} refused: {error}");
                }
                self.answer(number, &Answer::failed(error.to_string()));
            }
        }
    }

    /// Executes a command as far as possible now; the rest waits for its event.
    fn serve(&mut self, by: u64, request: Request, descriptor: Option<Stranger>) {
        let outcome = match &request.command {
            Command::Quit { patience } => return self.begin_quit(Some(by), *patience),
            Command::ShutdownServer { server, force } => self.pid(server).map(|pid| {
                self.servers.shut_down(pid, *force);
                Until::Gone(pid, Vec::new(), Answer::done(""))
            }),
            Command::RestartServer {
                server,
                patience,
                force,
            } => self.pid(server).and_then(|pid| {
                let begun = self.servers.restart(pid, *patience, *force);
                begun.map_err(Answer::failed)?;
                Ok(Until::Restarted(pid))
            }),
            Command::MoveMemory {
                server,
                client,
                out,
                patience,
            } => self.pid(server).and_then(|pid| {
                let ordered = self.servers.move_memory(pid, *client, *out, *patience);
                Ok(Until::Moved(ordered.map_err(Answer::failed)?))
            }),
            Command::TerminateClient { server, client } => self
                .pid(server)
                .and_then(|pid| {
                    let sessions = self.servers.terminate(pid, *client);
                    let sessions = sessions.map_err(Answer::failed)?;
                    Ok(Until::Gone(pid, sessions, Answer::done("0")))
                })
                // As with NVIDIA's, 0 or 1 is the last line.
                .map_err(|answer| Answer::failed(answer.text + "1")),
            Command::DeviceQuery { .. }
            | Command::Memory(..)
            | Command::SetMemory(..)
            | Command::UserMemory(..)
            | Command::SetUserMemory(..)
            | Command::AddPartition(..)
            | Command::RemovePartition(..)
            | Command::Partitions
            | Command::Module(
                modules::Command::DeviceList(_)
                | modules::Command::ApplyFile(_)
                | modules::Command::PartitionCreate { .. }
                | modules::Command::PartitionDelete(_)
                | modules::Command::PartitionList { .. }
                | modules::Command::ServerCreate { .. }
                | modules::Command::ServerSet { .. }
                | modules::Command::NamespaceCreate(..)
                | modules::Command::NamespaceSet(..),
            ) if self.devices.known().is_none() => {
                match self.devices.search(self.servers.launcher()) {
                    Ok(()) => Ok(Until::Devices(request)),
                    Err(error) => Err(Answer::failed(error.to_string())),
                }
            }
            // `info` also prints other rows, so it is answered even if the devices are not found.
            Command::Info if self.devices.known().is_none() => {
                match self.devices.search(self.servers.launcher()) {
                    Ok(()) => Ok(Until::Devices(request)),
                    Err(_) => {
                        let answer = self.perform(&request, &Answers::default());
                        return self.answer(by, &answer);
                    }
                }
            }
            Command::Processes { .. } | Command::ServerList
                if request.format != commands::Format::Table =>
            {
                let all: Vec<i32> = self.servers.iter().map(|server| server.pid).collect();
                Ok(Until::Usage(self.ask(&all), request))
            }
            Command::ClientList(wanted) if request.format != commands::Format::Table => {
                let pid = self.pid(wanted);
                pid.map(|pid| Until::Usage(self.ask(&[pid]), request))
            }
            Command::Module(modules::Command::Apply(path)) => {
                let request = read_file(path, descriptor);
                let Err(answer) = request.map(|request| self.serve(by, request, None)) else {
                    return;
                };
                Err(answer)
            }
            Command::TraceStart(path) => match descriptor {
                Some(file) => {
                    let until = Until::TraceStart(Instant::now() + TRACE_PATIENCE);
                    let begun = self.servers.start_trace(OwnedFd::from(file).into(), path);
                    begun.map(|()| until).map_err(Answer::failed)
                }
                None => Err(Answer::failed(
                    "trace start: mps-control must send the file with the command, and sent none",
                )),
            },
            Command::TraceStop => {
                let until = Until::TraceStop(Instant::now() + TRACE_PATIENCE);
                let ended = self.servers.stop_trace();
                ended.map(|()| until).map_err(Answer::failed)
            }
            Command::Users => {
                let all: Vec<i32> = self.servers.iter().map(|server| server.pid).collect();
                Ok(Until::Usage(self.ask(&all), request))
            }
            Command::Weight { server, .. } => match self.pid(server) {
                Ok(pid) => Ok(Until::Usage(self.ask(&[pid]), request)),
                Err(answer) => Err(answer),
            },
            Command::Module(modules::Command::ServerDelete { name, force }) => {
                self.delete_server(name, *force).map(Until::AllGone)
            }
            Command::Module(modules::Command::ServerSet { name, uid, limits }) => {
                self.set_server(name, *uid, limits).map(Until::AllGone)
            }
            Command::Module(modules::Command::NamespaceDelete { name, force }) => {
                self.delete_namespace(name, *force).map(Until::AllGone)
            }
            Command::Module(modules::Command::ClientTerminate(client)) => {
                self.terminate_everywhere(*client).map(Until::AllGone)
            }
            Command::QuarantineAdd { .. } | Command::QuarantineRelease { .. } => {
                let done = self.change_quarantine(by, request.command);
                return self.answer(by, &done.unwrap_or_else(|answer| answer));
            }
            _ => {
                let answer = self.perform(&request, &Answers::default());
                return self.answer(by, &answer);
            }
        };
        match outcome {
            Ok(until) => self.awaiting.push(Awaiting { by, until }),
            Err(answer) => self.answer(by, &answer),
        }
    }

    fn ask(&mut self, servers: &[i32]) -> Question {
        self.last_question += 1;
        let number = self.last_question;
        let mut asked = servers.to_vec();
        asked.retain(|pid| self.servers.ask_usage(*pid, number));
        Question::new(number, asked)
    }

    /// The server that the command names.
    fn find(&self, wanted: &commands::Server) -> Result<&Server, Answer> {
        let found = self.servers.iter().find(|server| wanted.is(server.pid));
        found.ok_or_else(|| Answer::failed(format!("Server {wanted} not found")))
    }

    fn pid(&self, wanted: &commands::Server) -> Result<i32, Answer> {
        Ok(self.find(wanted)?.pid)
    }

    /// Answers commands whose event has occurred.
    pub(super) fn settle(&mut self) {
        let ready = self.servers.iter().find(|server| {
            !server.devices.is_empty()
                && server.named.is_none()
                && self.servers.launcher().trusts(server.uid)
        });
        if let Some(server) = ready {
            self.devices.learn(&server.devices);
        }
        if let Some(devices) = self.devices.known() {
            self.servers.learn_devices(devices);
        }
        self.servers.collect_traces();
        let reports = self.servers.take_usage();
        let (servers, searching) = (&self.servers, self.devices.is_searching());
        let found = self.devices.known().is_some();
        let now = Instant::now();
        let over = |awaiting: &mut Awaiting| match &mut awaiting.until {
            Until::Gone(pid, sessions, _) => match servers.by_pid(*pid) {
                None => true,
                Some(server) => {
                    server.remains().is_some()
                        || !sessions.is_empty()
                            && !sessions.iter().any(|id| server.has_session(*id))
                }
            },
            Until::AllGone(all) => all.iter().all(|(pid, sessions)| {
                let server = servers.by_pid(*pid);
                server.is_none_or(|server| {
                    let mut left = sessions.iter();
                    server.remains().is_some()
                        || !sessions.is_empty() && !left.any(|id| server.has_session(*id))
                })
            }),
            Until::Restarted(pid) => servers.is_restarted(*pid),
            Until::Moved(number) => servers.is_moved(*number, now),
            Until::Devices(_) => found || !searching,
            Until::TraceStart(until) | Until::TraceStop(until) => {
                servers.is_tracing_settled() || now >= *until
            }
            Until::Usage(question, _) => {
                reports.iter().for_each(|report| question.hear(report));
                question.is_over(|pid| servers.is_linked(pid), now)
            }
        };
        let done: Vec<Awaiting> = self.awaiting.extract_if(.., over).collect();
        for Awaiting { by, until } in done {
            let answer = match until {
                Until::Gone(pid, sessions, answer) => {
                    let remains = self.servers.by_pid(pid).and_then(Server::remains);
                    match remains {
                        None => answer,
                        Some(why) if sessions.is_empty() => Answer::failed(why),
                        Some(why) => Answer::failed(format!("{why}\n1")),
                    }
                }
                Until::AllGone(all) => {
                    let left = all.iter().find_map(|(pid, _)| {
                        let server = self.servers.by_pid(*pid);
                        server.and_then(Server::remains)
                    });
                    left.map_or_else(|| Answer::done(""), Answer::failed)
                }
                Until::Restarted(pid) => match self.servers.restarted(pid) {
                    Ok(next) => Answer::done(next.to_string()),
                    Err(why) => Answer::failed(why),
                },
                Until::Moved(number) => match self.servers.moved(number) {
                    Ok(text) => Answer::done(text),
                    Err(why) => Answer::failed(why),
                },
                Until::Devices(request) if !found && request.command != Command::Info => {
                    Answer::failed(self.devices.failure())
                }
                Until::Devices(request) if found => {
                    self.serve(by, request, None);
                    continue;
                }
                Until::Devices(request) => self.perform(&request, &Answers::default()),
                Until::TraceStart(_) => match self.servers.trace_troubles().as_slice() {
                    [] => Answer::done(""),
                    troubles => Answer::failed(troubles.join("\n")),
                },
                Until::TraceStop(_) => match self.servers.finish_trace() {
                    Some((true, text)) => Answer::done(text),
                    Some((false, text)) => Answer::failed(text),
                    // Another command has ended the trace.
                    None => Answer::done(""),
                },
                Until::Usage(question, request) => {
                    let note = question.note(|pid| self.servers.is_linked(pid));
                    let answer = self.perform(&request, &question.found);
                    // A failed command contains its own explanation.
                    if answer.ok {
                        answer.with_note(note)
                    } else {
                        answer
                    }
                }
            };
            self.answer(by, &answer);
        }
    }

    /// Executes a command whose data is complete.
    fn perform(&mut self, request: &Request, found: &Answers) -> Answer {
        let usage = &found.clients;
        let print = |listing: Listing| Answer::done(listing.print(request.format));
        let outcome = match &request.command {
            Command::Module(command) => self.perform_module(command),
            Command::Info => Ok(print(self.info())),
            Command::ServerList => {
                let servers = self.servers.iter().filter(|one| !one.succeeded());
                Ok(print(listing::servers(servers, &found.gate_moments)))
            }
            Command::ServerStatus(wanted) => self.find(wanted).map(listing::status).map(print),
            Command::ClientList(wanted) => {
                let server = self.find(wanted);
                server.map(|server| print(listing::clients(server, usage)))
            }
            Command::DeviceClientList(wanted) => self
                .servers_meant(wanted.as_ref())
                .map(|servers| print(listing::device_clients(&servers))),
            Command::Processes { pid } => self.processes(pid.as_ref(), usage).map(print),
            Command::Users => {
                let (servers, waiting) = (self.servers.iter(), self.servers.waiting_users());
                Ok(print(listing::users(servers, waiting, usage)))
            }
            Command::DeviceQuery { server, commas } => {
                self.device_query(server.as_ref(), *commas).map(print)
            }
            Command::StartServer { uid } => match self.servers.want(*uid) {
                Ok(()) => Ok(Answer::done("")),
                Err(why) => Err(Answer::failed(format!("start_server: {why}"))),
            },
            Command::Percentage(whose) => self.percentage(whose).map(print),
            Command::SetPercentage(whose, value) => self.set_percentage(whose, value),
            Command::Memory(bound, whose, device) => self.memory(*bound, whose, device).map(print),
            Command::SetMemory(bound, whose, device, bytes) => {
                self.set_memory(*bound, whose, device, *bytes)
            }
            Command::UserMemory(bound, uid, device) => {
                self.user_memory(*bound, *uid, device).map(print)
            }
            Command::SetUserMemory(bound, uid, device, bytes) => {
                self.set_user_memory(*bound, *uid, device, *bytes)
            }
            Command::AddPartition(device, chunks) => self.add_partition(device, *chunks),
            Command::RemovePartition(device, partition) => self.remove_partition(device, partition),
            Command::Partitions => self.partitions().map(print),
            Command::Priority => Ok(print(listing::priority(self.servers.default_limits()))),
            Command::SetPriority(priority) => {
                let change = |limits: &mut Limits| limits.priority = *priority;
                self.servers.change_defaults(change);
                Ok(Answer::done(""))
            }
            Command::Quantum(whose) => {
                let limits = self.limits(whose);
                limits.map(|(server, limits)| print(listing::quantum(server, limits)))
            }
            Command::SetQuantum(whose, quantum) => {
                let done = self.change(whose, |limits| limits.quantum = *quantum);
                done.map(|()| Answer::done(""))
            }
            Command::Scheduling(uid) => {
                let policy = &self.servers.default_limits().scheduling;
                Ok(print(listing::policy(listing::SCHEDULING, policy, *uid)))
            }
            Command::SetScheduling(scheduling) => {
                self.servers.set_scheduling(*scheduling);
                Ok(Answer::done(""))
            }
            Command::SetUserScheduling(uid, scheduling) => {
                let set = self.servers.set_user_scheduling(*uid, *scheduling);
                set.map(|()| Answer::done("")).map_err(Answer::failed)
            }
            Command::Oversubscription(uid) => {
                let policy = &self.servers.default_limits().oversubscription;
                Ok(print(listing::policy(
                    listing::OVERSUBSCRIPTION,
                    policy,
                    *uid,
                )))
            }
            Command::SetOversubscription(choice) => {
                self.servers.set_oversubscription(*choice);
                Ok(Answer::done(""))
            }
            Command::SetUserOversubscription(uid, choice) => {
                let set = self.servers.set_user_oversubscription(*uid, *choice);
                set.map(|()| Answer::done("")).map_err(Answer::failed)
            }
            Command::UserWeight(uid) => {
                let weights = &self.servers.default_limits().user_weights;
                let holds = self.servers.holds();
                Ok(print(listing::user_weights(weights, *uid, holds)))
            }
            Command::SetUserWeight(uid, weight) => {
                let set = self.servers.set_user_weight(*uid, *weight);
                set.map(|()| Answer::done("")).map_err(Answer::failed)
            }
            Command::Weight { server, client } => self.weights(server, *client, usage).map(print),
            Command::SetWeight {
                server,
                client,
                weight,
            } => self.pid(server).and_then(|pid| {
                let done = self.servers.set_weight(pid, *client, *weight);
                done.map_err(Answer::failed)?;
                Ok(Answer::done(""))
            }),
            Command::ReopenLogs => match self.reopen_logs() {
                Ok(()) => Ok(Answer::done("")),
                Err(why) => Err(Answer::failed(format!("The logs stay as they are: {why}"))),
            },
            Command::Help => Ok(Answer::done(commands::help())),
            Command::QuarantineList => Ok(print(listing::quarantine(self.servers.quarantined()))),
            // These depend on the requesting user, or wait for their effect.
            Command::QuarantineAdd { .. }
            | Command::QuarantineRelease { .. }
            | Command::Quit { .. }
            | Command::TraceStart(_)
            | Command::TraceStop
            | Command::ShutdownServer { .. }
            | Command::RestartServer { .. }
            | Command::MoveMemory { .. }
            | Command::TerminateClient { .. } => Ok(Answer::done("")),
        };
        outcome.unwrap_or_else(|answer| answer)
    }

    /// Users other than root and the daemon's own may change only their own entries.
    fn change_quarantine(&mut self, by: u64, command: Command) -> Outcome {
        let Some(who) = self.peers.get(&by).map(|peer| peer.who) else {
            return Ok(Answer::done(""));
        };
        let commands_all = who.uid == 0 || who.uid == nix::unistd::geteuid().as_raw();
        let refuse = |what: &str| {
            let (pid, uid) = (who.pid, who.uid);
            tracing::warn!("Command of process {pid} of user {uid} refused: {what}");
            Err(Answer::failed(format!(
                "{what} is reserved for root and the user who runs the daemon"
            )))
        };
        match command {
            Command::QuarantineAdd { uid, program } => {
                let uid = uid.unwrap_or(who.uid);
                if uid != who.uid && !commands_all {
                    return refuse("quarantine add for another user");
                }
                let program = Program::named(uid, &program);
                let added = self.servers.quarantine_program(program);
                added.map_err(Answer::failed)?;
            }
            Command::QuarantineRelease { uid, program } => {
                if !commands_all && !self.servers.has_server_per_user() {
                    return refuse("quarantine release where one server serves all users");
                }
                if !commands_all && uid.is_some_and(|uid| uid != who.uid) {
                    return refuse("quarantine release for another user");
                }
                let uid = uid.or((!commands_all).then_some(who.uid));
                let is_meant = |candidate: &Program| {
                    let named = |name: &String| Program::named(candidate.uid, name) == *candidate;
                    uid.is_none_or(|uid| uid == candidate.uid) && program.as_ref().is_none_or(named)
                };
                let released = self.servers.release_programs(is_meant);
                if let (0, Some(program)) = (released, &program) {
                    let note = format!("{program} is not quarantined\n");
                    return Ok(Answer::done("").with_note(note));
                }
            }
            _ => {}
        }
        Ok(Answer::done(""))
    }

    fn servers_meant(&self, wanted: Option<&commands::Server>) -> Result<Vec<&Server>, Answer> {
        match wanted {
            Some(wanted) => Ok(vec![self.find(wanted)?]),
            None => Ok(self.servers.iter().collect()),
        }
    }

    /// `ps` takes the process id of a server, as NVIDIA's does, or of a client.
    fn processes(
        &self,
        wanted: Option<&commands::Server>,
        usage: &UsageBySession,
    ) -> Result<Listing, Answer> {
        let is_client = |client: &i32| wanted.is_some_and(|wanted| wanted.is(*client));
        let server = self.servers_meant(wanted);
        let client = self
            .servers
            .iter()
            .flat_map(Server::clients)
            .find(is_client);
        match (server, client) {
            (Ok(servers), _) => {
                // Clients that wait have no server.
                let waits = self.servers.waits().filter(|_| wanted.is_none());
                Ok(listing::processes(servers.into_iter(), None, waits, usage))
            }
            (Err(_), Some(client)) => {
                let (servers, none) = (self.servers.iter(), std::iter::empty());
                Ok(listing::processes(servers, Some(client), none, usage))
            }
            (Err(answer), None) => Err(answer),
        }
    }

    fn info(&self) -> Listing {
        listing::info(&listing::Info {
            settings: &self.settings,
            modes: self.servers.launcher().modes(),
            users: self.servers.launcher().users(),
            servers: self.servers.iter().count(),
            clients: self.servers.iter().flat_map(Server::clients).count(),
            devices: self.devices.known(),
        })
    }

    fn device_query(
        &self,
        wanted: Option<&commands::Server>,
        commas: bool,
    ) -> Result<Listing, Answer> {
        let servers = self.servers_meant(wanted)?;
        for server in &servers {
            server.log_device_query();
        }
        let own = (None, self.devices.known().unwrap_or_default());
        let theirs = servers
            .iter()
            .map(|server| (Some(server.pid), server.devices.as_slice()));
        // The daemon's own list comes first, with or without a server in the command, as with NVIDIA's daemon.
        let lists: Vec<_> = std::iter::once(own).chain(theirs).collect();
        Ok(listing::devices(&lists, commas))
    }

    /// Limits and, unless they are the defaults, the process id of the server.
    fn limits(&self, whose: &Whose) -> Result<(Option<i32>, &Limits), Answer> {
        match whose {
            Whose::Server(wanted) => {
                let server = self.find(wanted)?;
                Ok((Some(server.pid), &server.limits))
            }
            Whose::Default | Whose::All => Ok((None, self.servers.default_limits())),
        }
    }

    fn change(&mut self, whose: &Whose, change: impl Fn(&mut Limits)) -> Result<(), Answer> {
        let servers: Vec<i32> = match whose {
            Whose::Default => {
                self.servers.change_defaults(change);
                return Ok(());
            }
            Whose::Server(wanted) => vec![self.pid(wanted)?],
            Whose::All => self.servers.iter().map(|server| server.pid).collect(),
        };
        for pid in servers {
            let changed = self.servers.change_limits(pid, &change);
            changed.map_err(Answer::failed)?;
        }
        Ok(())
    }

    fn percentage(&self, whose: &Whose) -> Result<Listing, Answer> {
        if *whose == Whose::All {
            return Ok(listing::percentages(self.servers.iter()));
        }
        let (server, limits) = self.limits(whose)?;
        Ok(listing::percentage(server, limits))
    }

    /// Prints the value in force, as NVIDIA's daemon does; an invalid percentage changes nothing.
    fn set_percentage(&mut self, whose: &Whose, value: &str) -> Outcome {
        let number = value.strip_suffix('%').unwrap_or(value);
        let changed = match number.parse::<Percentage>() {
            Ok(threads) => {
                self.change(whose, |limits| limits.threads = threads)?;
                Ok(())
            }
            Err(error) => Err(format!("\"{value}\": {error}; nothing is changed")),
        };
        let text = self.percentage(whose)?.print(commands::Format::Table);
        Ok(match changed {
            Ok(()) => Answer::done(text),
            Err(why) => Answer::failed(text).with_note(why),
        })
    }

    fn device(&self, wanted: &str) -> Result<(usize, &DeviceInfo), Answer> {
        let devices = self.devices.known().unwrap_or_default();
        let ordinal = device::find(devices, wanted).map_err(Answer::failed)?;
        Ok((ordinal, &devices[ordinal]))
    }

    /// A device's ordinal at the server whose limits are meant.
    fn own_ordinal(&self, whose: &Whose, ordinal: usize) -> Result<usize, Answer> {
        let Whose::Server(wanted) = whose else {
            return Ok(ordinal);
        };
        let server = self.find(wanted)?;
        let own = server.own_ordinal(ordinal);
        own.ok_or_else(|| Answer::failed(format!("Server {wanted} does not have device {ordinal}")))
    }

    fn memory(&self, bound: MemoryBound, whose: &Whose, device: &str) -> Result<Listing, Answer> {
        let (server, limits) = self.limits(whose)?;
        let (ordinal, info) = self.device(device)?;
        let own = self.own_ordinal(whose, ordinal)?;
        let bytes = limits.memory_of(bound).get(&own).copied();
        Ok(listing::memory(bound, server, bytes, (ordinal, info)))
    }

    fn set_memory(
        &mut self,
        bound: MemoryBound,
        whose: &Whose,
        device: &str,
        bytes: Option<u64>,
    ) -> Outcome {
        let (ordinal, _) = self.device(device)?;
        let own = self.own_ordinal(whose, ordinal)?;
        self.change(whose, |limits| {
            let memory = limits.memory_of_mut(bound);
            match bytes {
                Some(bytes) => memory.insert(own, bytes),
                None => memory.remove(&own),
            };
        })?;
        Ok(Answer::done(""))
    }

    fn user_memory(&self, bound: MemoryBound, uid: u32, device: &str) -> Result<Listing, Answer> {
        let limits = self.servers.default_limits();
        let device = self.device(device)?;
        Ok(listing::user_memory(bound, uid, limits, device))
    }

    fn add_partition(&mut self, device: &str, chunks: u32) -> Outcome {
        self.servers.partitions().map_err(Answer::failed)?;
        let device = self.device(device)?.1.clone();
        let name = self.servers.add_partition(None, (&device, chunks), None);
        let name = name.map_err(Answer::failed)?;
        Ok(Answer::done(format!("Partition {name} created")))
    }

    fn remove_partition(&mut self, device: &str, partition: &str) -> Outcome {
        self.servers.partitions().map_err(Answer::failed)?;
        let device = self.device(device)?.1.clone();
        let removed = self.servers.remove_partition(None, &device, partition);
        removed.map_err(Answer::failed)?;
        Ok(Answer::done(""))
    }

    fn partitions(&self) -> Result<Listing, Answer> {
        let partitions = self.servers.partitions().map_err(Answer::failed)?;
        let devices = self.devices.known().unwrap_or_default();
        let is_in_use = |device: &DeviceInfo, partition: Option<&str>| {
            self.servers.is_in_use(device, partition)
        };
        Ok(listing::partitions(devices, partitions, is_in_use))
    }

    /// Applies to all servers, running and future, since a user may have clients at several.
    fn set_user_memory(
        &mut self,
        bound: MemoryBound,
        uid: u32,
        device: &str,
        bytes: Option<u64>,
    ) -> Outcome {
        let (ordinal, info) = self.device(device)?;
        if bytes.is_some_and(|bytes| info.memory > 0 && bytes > info.memory) {
            let all = amount::print(info.memory);
            return Err(Answer::failed(format!("Device {device} has only {all}")));
        }
        let set = self.servers.set_user_memory(bound, uid, ordinal, bytes);
        set.map_err(Answer::failed)?;
        Ok(Answer::done(""))
    }

    fn weights(
        &self,
        server: &commands::Server,
        client: i32,
        usage: &UsageBySession,
    ) -> Result<Listing, Answer> {
        let server = self.find(server)?;
        let sessions = server.sessions_of(client).map_err(Answer::failed)?;
        let weights: Vec<(u64, u32)> = sessions
            .into_iter()
            .filter_map(|session| Some((session, usage.get(&(server.pid, session))?.weight)))
            .collect();
        if weights.is_empty() {
            return Err(Answer::failed(format!(
                "Server {} does not answer",
                server.pid
            )));
        }
        Ok(listing::weights(server.pid, client, &weights))
    }

    pub(super) fn answer(&mut self, number: u64, answer: &Answer) {
        let Some(peer) = self.peers.get(&number) else {
            return;
        };
        let _guard = limit::caused_by_user(peer.who.uid);
        // Logged as NVIDIA's daemon does, except long and repeated answers, which would only fill the log.
        if !peer.repeats && answer.text.len() <= wire::COMMAND_LIMIT {
            for line in answer.text.lines() {
                tracing::info!("{line}");
            }
        }
        if peer.tell(answer).is_err() {
            // It does not read its answers, or has disconnected.
            self.forget(number);
        }
    }
}
