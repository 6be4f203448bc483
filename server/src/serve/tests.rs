//! Behaviour of a server as its clients, its daemon and its device come and go.

use super::*;
use crossbeam_channel::Sender;
use mpsshim_control::closers::Stranger;
use mpsshim_control::seqpacket;
use mpsshim_control::takeover::{MAGIC_SERVER, Verdict};
use mpsshim_model::client::Credentials;
use mpsshim_model::limits::{
    Activity, DeviceWaits, GateUsage, LevelUsage, MOST_AWAITED, MOST_BLOCKERS, ManagedUsage,
    MoveUsage, Moved, Percentage, TurnUsage,
};
use mpsshim_model::mode::Mode;
use mpsshim_model::suspension::Placement;
use parking_lot::Mutex;
use std::os::fd::AsFd;
use std::thread::JoinHandle;
use tempfile::TempDir;
use zerocopy::{FromZeros, IntoBytes};

const MOST: Moved = Moved {
    bytes: u64::MAX,
    copies: u64::MAX,
};

/// Connects every client at once as session 1, 2, …
struct Fake {
    events: Sender<EngineEvent>,
    held: Mutex<Vec<OwnedFd>>,
}

fn info(session: u64) -> ClientInfo {
    ClientInfo {
        session,
        pid: 100 + session as i32,
        uid: 0,
        partition: None,
        namespace: None,
    }
}

impl Host for Fake {
    fn add_client(&self, socket: OwnedFd, _: ClientHello, _: Newcomer) {
        let mut held = self.held.lock();
        held.push(socket);
        self.events
            .send(EngineEvent::Connected(info(held.len() as u64)))
            .expect("serving");
    }
    fn devices(&self) -> Vec<DeviceInfo> {
        vec![DeviceInfo {
            name: "Test device".into(),
            uuid: "GPU-0".into(),
            pci: "0000:00:06.0".into(),
            memory: 1 << 30,
            compute_mode: Default::default(),
            chunks: Default::default(),
        }]
    }
    fn terminate(&self, session: u64) {
        let reason = Some("terminated".into());
        let gone = EngineEvent::Gone(info(session), reason);
        self.events.send(gone).expect("serving");
    }
    fn set_limits(&self, _: Limits) {}
    fn set_weight(&self, _: u64, _: u32) {}
    fn move_memory(&self, order: MoveMemory) {
        let moved = Placement {
            moved_out: order.patience_ms,
            resident: 1,
        };
        let event = EngineEvent::MemoryMoved(order.number, order.session, Ok(moved));
        self.events.send(event).expect("serving");
    }
    fn usage(&self) -> Vec<Usage> {
        let usage = |index: usize| Usage {
            session: index as u64 + 1,
            threads: Percentage::ALL,
            priority: 0,
            weight: 100,
            memory: (0..16).map(|device| (device, u64::MAX)).collect(),
            memory_limit: (0..16).map(|device| (device, u64::MAX)).collect(),
            memory_guarantee: (0..16).map(|device| (device, u64::MAX)).collect(),
            host: u64::MAX,
            mode: Mode::Direct,
            turns: Some(TurnUsage {
                turns: u64::MAX,
                held_ns: u64::MAX,
                waited_ns: u64::MAX,
                not_draining: false,
            }),
            launches: u64::MAX,
            activity: Some(Activity {
                copies: u64::MAX,
                messages: u64::MAX,
                queued: u64::MAX,
                ring: u64::MAX,
                held_ns: u64::MAX,
                waited_ns: u64::MAX,
            }),
            level: Some(LevelUsage {
                level: u32::MAX,
                thousandths: Some(u32::MAX),
            }),
            device_waits: Some(DeviceWaits {
                waited_ns: u64::MAX,
                awaited: vec![(i32::MIN, u64::MAX); MOST_AWAITED],
            }),
            gate: Some(GateUsage {
                waited_ns: u64::MAX,
                blockers: vec![i32::MAX; MOST_BLOCKERS],
                blockers_left: true,
                device_context: u32::MAX,
            }),
            managed: Some(ManagedUsage {
                device: u64::MAX,
                host: u64::MAX,
                to_host: MOST,
                to_device: MOST,
                faults: u64::MAX,
                waited_ns: u64::MAX,
            }),
            bonds: None,
            moved_out: Some(u64::MAX),
            moves: Some(MoveUsage {
                fixed: (0..16).map(|device| (device, u64::MAX)).collect(),
                to_host: u64::MAX,
                to_device: u64::MAX,
                waited_ns: u64::MAX,
            }),
        };
        (0..self.held.lock().len()).map(usage).collect()
    }
    fn gate_moments(&self) -> u64 {
        u64::MAX
    }
    fn start_trace(&self, _: File) -> io::Result<()> {
        Ok(())
    }
    fn stop_trace(&self) -> Option<Totals> {
        None
    }
    fn shutdown(self) {}
}

struct Running {
    directory: TempDir,
    daemon: Link,
    events: Sender<EngineEvent>,
    thread: JoinHandle<End>,
}

impl Running {
    fn start() -> Running {
        let running = Running::with(0);
        assert!(matches!(
            running.report(),
            ToDaemon::Ready { devices } if devices.len() == 1
        ));
        running
    }

    /// A server that goes on with sessions 1 to `restored`.
    fn with(restored: u64) -> Running {
        let (ours, theirs) = seqpacket::pair().expect("pair");
        let directory = tempfile::tempdir().expect("directory");
        let control = directory.path().join("control");
        let (events, receiver) = unbounded();
        for session in 1..=restored {
            let event = EngineEvent::Connected(info(session));
            events.send(event).expect("serving");
        }
        let host = Fake {
            events: events.clone(),
            held: Mutex::default(),
        };
        let thread = std::thread::spawn(move || {
            serve(
                Link::new(theirs),
                host,
                &receiver,
                (Limits::default(), None),
                &control,
            )
        });
        Running {
            directory,
            daemon: Link::new(ours),
            events,
            thread,
        }
    }

    fn report(&self) -> ToDaemon {
        self.daemon.next_report().expect("link").expect("server")
    }

    fn add_client(&self, session: u64) {
        let (_, connection) = seqpacket::pair().expect("pair");
        let who = Credentials {
            pid: 1,
            uid: 0,
            gid: 0,
        };
        let hello = ClientHello::new_zeroed();
        self.daemon
            .hand_over(&Arrival {
                connection: Stranger::new(connection, who.uid),
                hello,
                packet: hello.as_bytes().to_vec(),
                who,
                namespace: None,
            })
            .expect("hand over");
        assert_eq!(self.report(), ToDaemon::from(&info(session)));
    }

    /// Ends the daemon and answers the server's introduction as the next daemon; returns that introduction.
    fn next_daemon(&mut self, verdict: &Verdict) -> Vec<u8> {
        let control = self.directory.path().join("control");
        // Removes the socket of the dead daemon.
        std::fs::remove_file(&control).unwrap_or_default();
        let (unused, _) = seqpacket::pair().expect("pair");
        drop(std::mem::replace(&mut self.daemon, Link::new(unused)));
        let listener = seqpacket::listen(&control).expect("listen");
        let connection = loop {
            match seqpacket::accept(listener.as_fd()) {
                Ok(connection) => break connection,
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        seqpacket::set_nonblocking(&connection, false).expect("blocking");
        let mut buffer = vec![0; 4096];
        let len = seqpacket::receive(connection.as_fd(), &mut buffer).expect("introduction");
        buffer.truncate(len);
        self.daemon = Link::new(connection);
        self.daemon.send(verdict, None).expect("verdict");
        buffer
    }

    /// Expects the next report to say that this client has gone.
    #[track_caller]
    fn is_gone(&self, session: u64) {
        let report = self.report();
        let told = matches!(report, ToDaemon::Gone { session: gone, .. } if gone == session);
        assert!(told, "{report:?}");
    }

    fn leave(&self, session: u64) {
        self.events
            .send(EngineEvent::Gone(info(session), None))
            .expect("serving");
    }
}

#[test]
fn work_that_does_not_end_goes_with_the_last_client() {
    let running = Running::start();
    running.add_client(1);
    running.add_client(2);
    let stuck = EngineEvent::Stuck(info(1));
    running.events.send(stuck).expect("serving");
    assert_eq!(running.report(), ToDaemon::Stuck { session: 1 });
    assert!(!running.thread.is_finished());
    running.leave(2);
    running.is_gone(2);
    assert_eq!(running.report(), ToDaemon::Stopping);
    assert_eq!(running.thread.join().expect("end"), End::Unfinished);
}

#[test]
fn a_shutdown_waits_for_clients() {
    let running = Running::start();
    running.add_client(1);
    running.add_client(2);
    running.daemon.order_shutdown(false).expect("order");
    running.leave(1);
    running.is_gone(1);
    assert!(!running.thread.is_finished());
    running.leave(2);
    running.is_gone(2);
    assert_eq!(running.report(), ToDaemon::Stopping);
    assert_eq!(running.thread.join().expect("end"), End::Orderly);
}

#[test]
fn a_forced_shutdown_does_not() {
    let running = Running::start();
    running.add_client(1);
    running.daemon.order_shutdown(true).expect("order");
    assert_eq!(running.report(), ToDaemon::Stopping);
    assert_eq!(running.thread.join().expect("end"), End::Orderly);
}

#[test]
fn clients_outlive_the_daemon() {
    let Running {
        daemon,
        events,
        thread,
        directory: _directory,
    } = {
        let running = Running::start();
        running.add_client(1);
        running
    };
    drop(daemon);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!thread.is_finished());
    events
        .send(EngineEvent::Gone(info(1), None))
        .expect("serving");
    assert_eq!(thread.join().expect("end"), End::Orderly);
}

#[test]
fn sessions_that_go_on_are_reported_before_the_server_is_ready() {
    let running = Running::with(2);
    for session in 1..=2 {
        assert_eq!(running.report(), ToDaemon::from(&info(session)));
    }
    assert!(matches!(running.report(), ToDaemon::Ready { .. }));
    running.daemon.order_shutdown(true).expect("order");
    assert_eq!(running.thread.join().expect("end"), End::Orderly);
}

#[test]
fn another_daemon_takes_the_server_over_as_often_as_need_be() {
    let mut running = Running::start();
    running.add_client(1);
    for session in 2..4 {
        let said = running.next_daemon(&Verdict::TakenOver);
        let json = said.strip_prefix(&MAGIC_SERVER).expect("a server");
        let said = Introduction::read(json).expect("introduction");
        assert_eq!(said.clients as u64, session - 1);
        for client in 1..session {
            assert_eq!(running.report(), ToDaemon::from(&info(client)));
        }
        assert!(matches!(running.report(), ToDaemon::Ready { devices } if devices.len() == 1));
        running.add_client(session);
    }
    running.daemon.order_shutdown(false).expect("order");
    running.leave(2);
    running.is_gone(2);
    // The order to end is reported to the next daemon.
    running.next_daemon(&Verdict::TakenOver);
    assert_eq!(running.report(), ToDaemon::from(&info(1)));
    assert_eq!(running.report(), ToDaemon::from(&info(3)));
    assert_eq!(running.report(), ToDaemon::Stopping);
    assert!(matches!(running.report(), ToDaemon::Ready { .. }));
    for session in [1, 3] {
        running.leave(session);
        assert!(matches!(running.report(), ToDaemon::Gone { .. }));
    }
    assert_eq!(running.report(), ToDaemon::Stopping);
    assert_eq!(running.thread.join().expect("end"), End::Orderly);
}

#[test]
fn a_server_that_is_refused_ends_with_its_clients() {
    let mut running = Running::start();
    running.add_client(1);
    let reason = "too old".to_owned();
    running.next_daemon(&Verdict::Refused { reason });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!running.thread.is_finished());
    running.leave(1);
    assert_eq!(running.thread.join().expect("end"), End::Orderly);
}

#[test]
fn many_clients_usage_comes_in_parts() {
    let running = Running::start();
    let ask = |question| {
        running.daemon.ask_usage(question).expect("ask");
        let mut sessions = Vec::new();
        loop {
            let ToDaemon::Usage {
                question: of,
                clients,
                gate_moments: Some(u64::MAX),
                last,
            } = running.report()
            else {
                panic!("no usage")
            };
            assert_eq!(of, question);
            sessions.extend(clients.iter().map(|client| client.session));
            if last {
                return sessions;
            }
        }
    };
    assert_eq!(ask(7), [0; 0]);
    for session in 1..=70 {
        running.add_client(session);
    }
    assert_eq!(ask(8), (1..=70).collect::<Vec<u64>>());
    running.daemon.order_shutdown(true).expect("order");
    assert_eq!(running.report(), ToDaemon::Stopping);
}

#[test]
fn a_client_is_terminated_and_the_others_stay() {
    let running = Running::start();
    running.add_client(1);
    running.add_client(2);
    running.daemon.order_termination(1).expect("order");
    running.is_gone(1);
    running.daemon.order_shutdown(false).expect("order");
    running.leave(2);
    running.is_gone(2);
    assert_eq!(running.report(), ToDaemon::Stopping);
    assert_eq!(running.thread.join().expect("end"), End::Orderly);
}

#[test]
fn a_fault_is_told_and_ends_the_server() {
    let running = Running::start();
    running.add_client(1);
    let start = Instant::now();
    running
        .events
        .send(EngineEvent::Fault {
            status: 700,
            going_on: 0,
            suspects: vec![Suspect {
                client: ClientInfo {
                    session: 1,
                    pid: 1,
                    uid: 0,
                    partition: None,
                    namespace: None,
                },
                kernel: Some("stray".into()),
            }],
        })
        .expect("serving");
    let suspects = vec![link::Suspect {
        session: 1,
        kernel: Some("stray".into()),
    }];
    let status = 700;
    assert_eq!(running.report(), ToDaemon::Fault { status, suspects });
    running.leave(1);
    running.is_gone(1);
    assert_eq!(running.thread.join().expect("end"), End::Fault);
    assert!(
        start.elapsed() < FAULT_PATIENCE,
        "nobody was left to wait for"
    );
}

#[test]
fn a_fault_does_not_wait_longer_than_a_second() {
    let running = Running::start();
    running.add_client(1);
    let start = Instant::now();
    running
        .events
        .send(EngineEvent::Fault {
            status: 719,
            going_on: 0,
            suspects: Vec::new(),
        })
        .expect("serving");
    assert_eq!(running.thread.join().expect("end"), End::Fault);
    assert!(start.elapsed() >= FAULT_PATIENCE && start.elapsed() < 3 * FAULT_PATIENCE);
}
