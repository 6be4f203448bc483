//! The arbiter's thread: connects descriptors and the turn policy.

use super::Order;
use super::overhead::Overheads;
use super::page::SharedPage;
use super::traced::Traced;
use super::turns::{Decision, Nanoseconds, Standing, Turns};
use crate::admission::{self, Admission};
use crossbeam_channel::{Receiver, Sender};
use mpsshim_api::cuda::*;
use mpsshim_control::closers::Stranger;
use mpsshim_control::seqpacket;
use mpsshim_control::user_memory::Place;
use mpsshim_model::client::{ClientInfo, Credentials, EngineEvent, Newcomer};
use mpsshim_model::limits::{DEFAULT_WEIGHT, Limits, Terms, TurnUsage, Usage};
use mpsshim_model::mode::Mode;
use mpsshim_model::policy::TurnPolicy;
use mpsshim_proto::direct::{self, PAGE_LEN};
use mpsshim_proto::handshake::{ClientHello, MAX_DEVICES, Wire};
use mpsshim_proto::shm::{self, Doorbell};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{Shutdown, shutdown};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Divisor of a client's share if its priority is below normal: the same ratio at which such a client is dispatched in
/// proxy mode while others are busy.
const BELOW_NORMAL: u64 = crate::engine::LOW_TURN as u64;

/// Numbers registered with epoll, which identify the source of an event; each session, from 1 on, has two numbers.
const ORDERS: u64 = 0;
const TIMER: u64 = 1;
/// Maximum number of events taken at a time.
const BATCH: usize = 64;

fn bell_of(session: u64) -> u64 {
    session * 2
}
fn socket_of(session: u64) -> u64 {
    session * 2 + 1
}

struct Client {
    info: ClientInfo,
    socket: Stranger,
    bell: Doorbell,
    page: Arc<SharedPage>,
    terms: Terms,
    weight: u32,
    memory_limit: BTreeMap<usize, u64>,
    /// Dropping it removes the client's charges to its user's memory.
    place: Arc<Place>,
}

impl Client {
    fn share(&self) -> u64 {
        let share = u64::from(self.weight) * u64::from(self.terms.threads.hundredths());
        match self.terms.priority {
            0 => share,
            _ => share / BELOW_NORMAL,
        }
    }
}

/// State of the thread.
pub struct Arbiting {
    devices: Vec<[u8; 16]>,
    admission: Arc<Admission>,
    events: Sender<EngineEvent>,
    orders: Receiver<Order>,
    order_bell: Arc<Doorbell>,
    epoll: Epoll,
    timer: TimerFd,
    armed_for: Option<Nanoseconds>,
    began: Instant,
    limits: Limits,
    clients: BTreeMap<u64, Client>,
    turns: Turns,
    /// Determines the device memory of clients beyond their own counts.
    overheads: Option<Overheads>,
    traced: Option<Traced>,
    ending: bool,
}

impl Arbiting {
    pub fn new(
        devices: &[[u8; 16]],
        policy: TurnPolicy,
        admission: Arc<Admission>,
        events: Sender<EngineEvent>,
        orders: Receiver<Order>,
        order_bell: Arc<Doorbell>,
    ) -> io::Result<Arbiting> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        let readable = |number| EpollEvent::new(EpollFlags::EPOLLIN, number);
        epoll.add(order_bell.fd(), readable(ORDERS))?;
        epoll.add(timer.as_fd(), readable(TIMER))?;
        let limits = Limits::default();
        Ok(Arbiting {
            devices: devices.to_vec(),
            admission,
            events,
            orders,
            order_bell,
            epoll,
            timer,
            armed_for: None,
            began: Instant::now(),
            turns: Turns::new(limits.quantum.nanoseconds(), policy),
            limits,
            clients: BTreeMap::new(),
            overheads: None,
            traced: None,
            ending: false,
        })
    }

    /// Runs until it is ordered to end.
    pub fn run(mut self) {
        let mut happened = [EpollEvent::empty(); BATCH];
        while !self.ending {
            let count = match self.epoll.wait(&mut happened, EpollTimeout::NONE) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(error) => {
                    tracing::error!("The arbiter of direct mode cannot wait: {error}");
                    break;
                }
            };
            for event in &happened[..count] {
                match event.data() {
                    ORDERS => self.obey(),
                    TIMER => {
                        self.armed_for = None;
                        // Reading clears the readiness; it does not block.
                        let _ = self.timer.wait();
                    }
                    number if number % 2 == 0 => self.rung(number / 2),
                    number => self.end(number / 2, None),
                }
            }
            self.pass_on();
            self.trace_turns();
            self.arm();
        }
        for session in self.clients.keys().copied().collect::<Vec<_>>() {
            self.end(session, None);
        }
    }

    fn now(&self) -> Nanoseconds {
        self.began.elapsed().as_nanos() as Nanoseconds
    }

    fn tell(&self, event: EngineEvent) {
        // The receiver may have ended too.
        let _ = self.events.send(event);
    }

    fn obey(&mut self) {
        self.order_bell.silence();
        while let Ok(order) = self.orders.try_recv() {
            match order {
                Order::Add(socket, hello, newcomer) => {
                    let socket = Stranger::new(socket, newcomer.who.uid);
                    self.add(socket, &hello, newcomer);
                }
                Order::Overheads(overheads) => self.overheads = Some(overheads),
                Order::Terminate(session) => {
                    self.end(session, Some("terminated by the operator".into()));
                }
                Order::Limits(limits) => {
                    self.turns.set_quantum(limits.quantum.nanoseconds());
                    self.limits = limits;
                }
                Order::Weight(session, weight) => {
                    let now = self.now();
                    if let Some(client) = self.clients.get_mut(&session) {
                        client.weight = weight;
                        self.turns.set_share(session, client.share(), now);
                    }
                }
                Order::Usage(answer) => {
                    // The caller may have timed out.
                    let _ = answer.send(self.usage());
                }
                Order::Trace(run, done) => {
                    if let Some(traced) = self.traced.take() {
                        traced.end();
                    }
                    self.traced = run.map(Traced::new);
                    // The caller may have timed out.
                    let _ = done.send(());
                }
                Order::End => self.ending = true,
            }
        }
    }

    fn refuse(&self, socket: &OwnedFd, who: Credentials, status: CUresult, why: String) {
        admission::refuse(&self.events, socket, who, status, why);
    }

    fn add(&mut self, socket: Stranger, hello: &ClientHello, newcomer: Newcomer) {
        let Newcomer { who, namespace } = newcomer;
        let wire = hello.wire();
        if let Err(why) = admission::check_wire(wire) {
            return self.refuse(&socket, who, CUDA_ERROR_MPS_CONNECTION_FAILED, why);
        }
        let limits = match self.limits.in_namespace(namespace.as_deref()) {
            Ok(limits) => limits.into_owned(),
            Err(error) => {
                let why = error.to_string();
                admission::tell_reason(&socket, hello, &why);
                return self.refuse(&socket, who, CUDA_ERROR_MPS_CONNECTION_FAILED, why);
            }
        };
        let Some(session) = self.admission.admit() else {
            let why = format!("there are {} clients already", self.admission.limit());
            return self.refuse(&socket, who, CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, why);
        };
        let made = || -> io::Result<(SharedPage, OwnedFd, Doorbell, Place)> {
            // A client that does not read packets must not block the others.
            seqpacket::set_nonblocking(&socket, true)?;
            let (page, fd) = SharedPage::new()?;
            let bell = Doorbell::new()?;
            let place = self.admission.users().place(who.uid)?;
            let ended = EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLHUP;
            self.epoll
                .add(&socket, EpollEvent::new(ended, socket_of(session)))?;
            let rings = EpollEvent::new(EpollFlags::EPOLLIN, bell_of(session));
            if let Err(error) = self.epoll.add(bell.fd(), rings) {
                let _ = self.epoll.delete(&socket);
                return Err(error.into());
            }
            Ok((page, fd, bell, place))
        };
        let (page, fd, bell, place) = match made() {
            Ok(made) => made,
            Err(error) => {
                self.admission.retract();
                let why = format!("cannot make its page: {error}");
                return self.refuse(&socket, who, CUDA_ERROR_OUT_OF_MEMORY, why);
            }
        };
        let memory_limit: BTreeMap<usize, u64> = limits
            .memory
            .range(..self.devices.len())
            .map(|(at, bytes)| (*at, *bytes))
            .collect();
        for device in 0..MAX_DEVICES {
            let limit = memory_limit.get(&device);
            page.set_limit(device, limit.copied().unwrap_or(u64::MAX));
        }
        if hello.nvidia_mps != 0 {
            page.set_free();
            let pid = who.pid;
            tracing::info!("Process {pid} is served by NVIDIA's MPS and takes no turns");
        }
        page.set_place(place.number());
        let client = Client {
            info: ClientInfo {
                session,
                pid: who.pid,
                uid: who.uid,
                partition: None,
                namespace,
            },
            socket,
            bell,
            page: Arc::new(page),
            terms: Terms::new(&limits, hello),
            weight: DEFAULT_WEIGHT,
            memory_limit,
            place: Arc::new(place),
        };
        if let Some(overheads) = &self.overheads {
            overheads.add(session, who.pid, &client.page, &client.place);
        }
        self.turns.join(session, client.share());
        self.tell(EngineEvent::Connected(client.info.clone()));
        let welcomed = self.welcome(wire, &client, &fd);
        self.clients.insert(session, client);
        if let Err(error) = welcomed {
            tracing::debug!("client {} left before it was welcomed: {error}", who.pid);
            self.end(session, None);
        }
    }

    fn welcome(&self, wire: Wire, client: &Client, page: &OwnedFd) -> io::Result<()> {
        let mut welcome = admission::welcome(wire.protocol, CUDA_SUCCESS);
        welcome.mode = Mode::Direct.number();
        welcome.session = client.info.session;
        welcome.segment_len = PAGE_LEN as u64;
        welcome.active_thread_centipercent = client.terms.threads.hundredths();
        welcome.priority = client.terms.priority;
        welcome.device_count = self.devices.len() as u32;
        for (to, uuid) in welcome.devices.iter_mut().zip(&self.devices) {
            *to = *uuid;
        }
        for (device, bytes) in &client.memory_limit {
            welcome.memory[*device] = *bytes;
        }
        shm::send_packet(
            client.socket.as_fd(),
            welcome.as_bytes(),
            &[page.as_fd(), client.bell.fd(), client.place.file()],
        )
    }

    /// A client has changed its state in the shared page.
    fn rung(&mut self, session: u64) {
        let now = self.now();
        let Some(client) = self.clients.get(&session) else {
            return;
        };
        client.bell.silence();
        let state = client.page.state();
        let devices = client.page.devices(self.devices.len());
        let submissions = client.page.submissions();
        self.turns.has_done(session, submissions);
        match (self.turns.standing(session), state) {
            (Standing::Idle, direct::IDLE) => {}
            (Standing::Holds, direct::HELD | direct::GIVING) => {}
            (Standing::Idle | Standing::Waits, direct::WANTS) => {
                self.turns.wants(session, devices, now);
            }
            (Standing::Waits | Standing::Holds, direct::IDLE) => self.turns.rests(session, now),
            (Standing::Holds, direct::WANTS) => self.turns.wants_again(session, devices, now),
            (standing, state) => {
                let why = format!(
                    "its turn's state is {state} although it {}",
                    match standing {
                        Standing::Idle => "wants none",
                        Standing::Waits => "waits for one",
                        Standing::Holds => "has one",
                    }
                );
                return self.end(session, Some(why));
            }
        }
        let account = self.turns.account(session, now);
        if let Some(client) = self.clients.get(&session) {
            client.page.write(&account);
        }
    }

    /// Carries out the decisions of the policy.
    fn pass_on(&mut self) {
        if self.turns.wants_reports() {
            for (session, client) in &self.clients {
                self.turns.has_done(*session, client.page.submissions());
            }
        }
        loop {
            let now = self.now();
            let mut changed_their_minds = false;
            for decision in self.turns.decide(now) {
                match decision {
                    Decision::Grant(session, asked) => {
                        let Some(client) = self.clients.get(&session) else {
                            continue;
                        };
                        // Before the client has the turn, since it may read the account at once.
                        client.page.write(&self.turns.account(session, now));
                        if !client.page.grant(asked) {
                            self.turns.ungrant(session);
                            changed_their_minds = true;
                        }
                    }
                    Decision::Ask(session, asked) => {
                        if let Some(client) = self.clients.get(&session) {
                            client.page.ask(asked);
                        }
                    }
                    Decision::NotDraining(session) => self.note_late(session),
                }
            }
            if !changed_their_minds {
                return;
            }
        }
    }

    fn trace_turns(&mut self) {
        if let Some(traced) = &mut self.traced {
            let clients = self.clients.values().map(|client| &client.info);
            traced.look(clients, &self.turns);
        }
    }

    fn note_late(&self, session: u64) {
        if let Some(client) = self.clients.get(&session) {
            tracing::warn!(
                "Client {} was asked for its turn a second ago and has not given it up; others wait",
                client.info
            );
        }
    }

    /// Sets the timer for the next decision.
    fn arm(&mut self) {
        let now = self.now();
        let next = self.turns.deadline(now);
        if next == self.armed_for {
            return;
        }
        let set = match next {
            None => self.timer.unset(),
            Some(at) => {
                // 0 would disarm the timer.
                let left = Duration::from_nanos(at.saturating_sub(now).max(1));
                let once = Expiration::OneShot(TimeSpec::from(left));
                self.timer.set(once, TimerSetTimeFlags::empty())
            }
        };
        match set {
            Ok(()) => self.armed_for = next,
            Err(error) => tracing::error!("The arbiter's timer cannot be set: {error}"),
        }
    }

    /// Ends a session; `why`: the reason if the server ends it.
    fn end(&mut self, session: u64, why: Option<String>) {
        let Some(client) = self.clients.remove(&session) else {
            return;
        };
        if let Some(traced) = &mut self.traced {
            traced.leave(session);
        }
        self.turns.leave(session, self.now());
        if why.is_some() {
            client.page.terminate();
        }
        // The client's process has these descriptors too, so that closing them here would not take them out of the epoll.
        let _ = self.epoll.delete(client.bell.fd());
        let _ = self.epoll.delete(&client.socket);
        // A child that the client has forked may have its end of the socket.
        let _ = shutdown(client.socket.as_raw_fd(), Shutdown::Both);
        self.admission.retract();
        self.tell(EngineEvent::Gone(client.info, why));
    }

    fn usage(&self) -> Vec<Usage> {
        let now = self.now();
        let of = |(session, client): (&u64, &Client)| {
            let account = self.turns.account(*session, now);
            // The count reported since the last query. Querying the client first would race with its report.
            let launches = client.page.submissions();
            client.page.want_count();
            let held = (0..self.devices.len()).map(|device| {
                let held = client.page.held(device);
                (device, held.saturating_add(client.page.overhead(device)))
            });
            Usage {
                session: *session,
                threads: client.terms.threads,
                priority: client.terms.priority,
                weight: client.weight,
                memory: held.filter(|(_, bytes)| *bytes > 0).collect(),
                memory_limit: client.memory_limit.clone(),
                memory_guarantee: BTreeMap::new(),
                host: 0,
                mode: Mode::Direct,
                turns: Some(TurnUsage {
                    turns: account.turns,
                    held_ns: account.held,
                    waited_ns: account.waited,
                    not_draining: account.not_draining,
                }),
                launches,
                activity: None,
                level: None,
                device_waits: None,
                gate: None,
                managed: None,
                bonds: None,
                moved_out: None,
                moves: None,
            }
        };
        self.clients.iter().map(of).collect()
    }
}
