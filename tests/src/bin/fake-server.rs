//! A server without an engine, for tests of the control daemon: every client gets a session that does nothing.
//!
//! `FAKE_SERVER=refuse` turns its first client away as a server does whose context is lost, `drop` closes its
//! connection and ends; wherever the file `FAKE_SERVER_DONE` is there it becomes the program `FAKE_SERVER_THEN` instead.
//! `FAKE_SERVER=crash` ends before it is ready, `slow` takes half a second to get ready, `stuck` never does. A client may
//! send `fault` (the context is lost) or `die` (the process ends as if it had crashed).
//!
//! Its executable says that it is of release 9.9.9 and speaks the wire `OTHER_WIRE` besides this release's.
//!
//! `fake-server introduce` is no server: it says that it is one whose daemon has died, prints the daemon's answer, and
//! keeps the connection until its standard input ends. A further argument is the limits that it reports, as JSON; it sends
//! each line of its standard input as a report.

use crossbeam_channel::{Sender, unbounded};
use mpsshim_api::cuda::{CUDA_ERROR_MPS_SERVER_NOT_READY, CUDA_SUCCESS};
use mpsshim_control::greeting::refusal;
use mpsshim_control::link::{LINK_VERSION, Link, MoveMemory, OLDEST_LINK};
use mpsshim_control::logging::{self, Sink};
use mpsshim_control::seqpacket;
use mpsshim_control::settings::Settings;
use mpsshim_control::takeover::{Introduction, Versions};
use mpsshim_control::trace::Totals;
use mpsshim_model::client::{ClientInfo, EngineEvent, Newcomer};
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::limits::{DEFAULT_WEIGHT, Limits, Usage};
use mpsshim_model::mode::Mode;
use mpsshim_proto::handshake::{ClientHello, Welcome};
use mpsshim_proto::release::ServerNote;
use mpsshim_proto::wire;
use mpsshim_server::serve::{End, Host, serve};
use mpsshim_tests::control_daemon::OTHER_WIRE;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{env, io};
use zerocopy::IntoBytes;

/// It speaks this release's wire, and another one.
#[used]
#[unsafe(link_section = ".note.mpsshim")]
static RELEASE: ServerNote = ServerNote::of(
    "9.9.9",
    (OLDEST_LINK, LINK_VERSION),
    &[wire::OWN, OTHER_WIRE],
    &[],
);

struct Fake {
    sessions: AtomicU64,
    manner: String,
    events: Sender<EngineEvent>,
    limits: Mutex<Limits>,
    clients: Arc<Mutex<Vec<Usage>>>,
}

impl Host for Fake {
    fn move_memory(&self, _: MoveMemory) {}

    fn add_client(&self, socket: OwnedFd, _: ClientHello, newcomer: Newcomer) {
        let Newcomer { who, namespace } = newcomer;
        match self.manner.as_str() {
            "refuse" => {
                let welcome = Welcome {
                    server_pid: std::process::id(),
                    ..refusal(CUDA_ERROR_MPS_SERVER_NOT_READY)
                };
                // The client may have gone.
                let _ = seqpacket::send(socket.as_fd(), welcome.as_bytes(), None);
                return self
                    .events
                    .send(EngineEvent::Fault {
                        status: 700,
                        going_on: 0,
                        suspects: Vec::new(),
                    })
                    .unwrap_or_default();
            }
            "drop" => std::process::abort(),
            _ => {}
        }
        let session = self.sessions.fetch_add(1, Ordering::Relaxed) + 1;
        let client = ClientInfo {
            session,
            pid: who.pid,
            uid: who.uid,
            partition: None,
            namespace,
        };
        let limits = self.limits.lock().expect("limits").clone();
        let usage = Usage {
            session,
            threads: limits.threads,
            priority: limits.priority,
            weight: DEFAULT_WEIGHT,
            memory: BTreeMap::new(),
            memory_limit: limits.memory,
            memory_guarantee: limits.guarantee,
            host: 0,
            mode: Mode::Proxy,
            turns: None,
            launches: 0,
            activity: None,
            level: None,
            device_waits: None,
            gate: None,
            managed: None,
            bonds: None,
            moved_out: None,
            moves: None,
        };
        self.clients.lock().expect("clients").push(usage);
        let (events, clients) = (self.events.clone(), self.clients.clone());
        std::thread::spawn(move || {
            attend(&socket, &client, &events);
            let mut clients = clients.lock().expect("clients");
            clients.retain(|usage| usage.session != client.session);
            drop(clients);
            events
                .send(EngineEvent::Gone(client, None))
                .unwrap_or_default();
        });
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        devices()
    }

    fn terminate(&self, _: u64) {}

    fn set_limits(&self, limits: Limits) {
        *self.limits.lock().expect("limits") = limits;
    }

    fn set_weight(&self, session: u64, weight: u32) {
        let mut clients = self.clients.lock().expect("clients");
        for usage in clients.iter_mut().filter(|usage| usage.session == session) {
            usage.weight = weight;
        }
    }

    fn usage(&self) -> Vec<Usage> {
        self.clients.lock().expect("clients").clone()
    }

    fn gate_moments(&self) -> u64 {
        0
    }
    fn start_trace(&self, _: std::fs::File) -> io::Result<()> {
        Ok(())
    }

    fn stop_trace(&self) -> Option<Totals> {
        Some(Totals::default())
    }

    fn shutdown(self) {}
}

fn devices() -> Vec<DeviceInfo> {
    vec![DeviceInfo {
        name: "Fake device".into(),
        uuid: "GPU-00000000-0000-0000-0000-000000000000".into(),
        pci: "0000:00:06.0".into(),
        memory: 4 << 30,
        compute_mode: Default::default(),
        chunks: Default::default(),
    }]
}

fn attend(socket: &OwnedFd, client: &ClientInfo, events: &Sender<EngineEvent>) {
    // The other end is gone only when the process ends.
    let tell = |event| events.send(event).unwrap_or_default();
    let welcome = Welcome {
        session: client.session,
        server_pid: std::process::id(),
        ..refusal(CUDA_SUCCESS)
    };
    tell(EngineEvent::Connected(client.clone()));
    let mut buffer = [0; 64];
    if seqpacket::send(socket.as_fd(), welcome.as_bytes(), None).is_ok() {
        while let Ok(len @ 1..) = seqpacket::receive(socket.as_fd(), &mut buffer) {
            match &buffer[..len] {
                b"fault" => tell(EngineEvent::Fault {
                    status: 700,
                    going_on: 0,
                    suspects: Vec::new(),
                }),
                b"die" => std::process::abort(),
                _ => {}
            }
        }
    }
}

fn introduce() -> io::Result<ExitCode> {
    let connection = seqpacket::connect(&control())?;
    let introduction = Introduction {
        versions: Versions::OWN,
        release: None,
        clients: 1,
        limits: env::args().nth(2).map_or_else(Limits::default, |json| {
            serde_json::from_str(&json).expect("limits")
        }),
        quarantined: None,
    };
    seqpacket::send(connection.as_fd(), &introduction.packet()?, None)?;
    let mut buffer = [0; 4096];
    let len = seqpacket::receive(connection.as_fd(), &mut buffer)?;
    println!("{}", String::from_utf8_lossy(&buffer[..len]));
    for line in io::stdin().lines() {
        // The daemon may have closed the link.
        let _ = seqpacket::send(connection.as_fd(), line?.as_bytes(), None);
    }
    Ok(ExitCode::SUCCESS)
}

fn control() -> PathBuf {
    Settings::from_env().expect("settings").control_socket()
}

fn main() -> io::Result<ExitCode> {
    if env::args().nth(1).as_deref() == Some("introduce") {
        return introduce();
    }
    let manner = env::var("FAKE_SERVER").unwrap_or_default();
    match manner.as_str() {
        "refuse" | "drop" => {
            let done = env::var_os("FAKE_SERVER_DONE").unwrap_or_default();
            if Path::new(&done).exists() {
                let then = env::var_os("FAKE_SERVER_THEN").unwrap_or_default();
                return Err(Command::new(then).args(env::args_os().skip(1)).exec());
            }
            File::create(&done)?;
        }
        "crash" => return Ok(ExitCode::from(3)),
        "slow" => std::thread::sleep(Duration::from_millis(500)),
        "stuck" => std::thread::sleep(Duration::from_secs(3600)),
        _ => {}
    }
    if env::args().nth(1).as_deref() == Some("--list-devices") {
        println!("{}", serde_json::to_string(&devices())?);
        return Ok(ExitCode::SUCCESS);
    }
    let link = io::stdin().as_fd().try_clone_to_owned()?;
    logging::install("Server", vec![Sink::StandardError], None);
    let (events, receiver) = unbounded();
    let host = Fake {
        sessions: AtomicU64::new(0),
        manner,
        events,
        limits: Mutex::default(),
        clients: Arc::default(),
    };
    let limits = env::args()
        .skip_while(|argument| argument != "--limits")
        .nth(1);
    let limits = limits.map_or_else(Limits::default, |json| {
        serde_json::from_str(&json).expect("limits")
    });
    Ok(
        match serve(Link::new(link), host, &receiver, (limits, None), &control()) {
            End::Orderly => ExitCode::SUCCESS,
            End::Fault | End::Unfinished | End::HandedOver => ExitCode::FAILURE,
        },
    )
}
