//! A server without an engine, for tests of the control daemon: every client gets a session that does nothing.
//!
//! `FAKE_SERVER=refuse` turns its first client away as a server does whose context is lost, `drop` closes its
//! connection and ends; wherever the file `FAKE_SERVER_DONE` is there it becomes the program `FAKE_SERVER_THEN` instead.
//! `FAKE_SERVER=crash` ends before it is ready, `slow` takes half a second to get ready, `stuck` never does. A client may
//! send `fault` (the context is lost) or `die` (the process ends as if it had crashed).

use crossbeam_channel::{Sender, unbounded};
use mpsshim_proto::cuda::{CUDA_ERROR_MPS_SERVER_NOT_READY, CUDA_SUCCESS};
use mpsshim_proto::handshake::{ClientHello, Welcome};
use mpsshim_server::control::greeting::refusal;
use mpsshim_server::engine::{ClientInfo, Credentials, DeviceInfo, EngineEvent};
use mpsshim_server::link::Link;
use mpsshim_server::logging;
use mpsshim_server::seqpacket;
use mpsshim_server::serve::{End, Host, serve};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{env, io};
use zerocopy::IntoBytes;

struct Fake {
    sessions: AtomicU64,
    manner: String,
    events: Sender<EngineEvent>,
}

impl Host for Fake {
    fn add_client(&self, socket: OwnedFd, _: ClientHello, who: Credentials) {
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
                    .send(EngineEvent::Fault(700))
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
        };
        let events = self.events.clone();
        std::thread::spawn(move || attend(&socket, client, &events));
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        vec![DeviceInfo {
            name: "Fake device".into(),
            uuid: "GPU-00000000-0000-0000-0000-000000000000".into(),
            pci: "0000:00:06.0".into(),
        }]
    }

    fn terminate(&self, _: u64) {}

    fn shutdown(self) {}
}

fn attend(socket: &OwnedFd, client: ClientInfo, events: &Sender<EngineEvent>) {
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
                b"fault" => tell(EngineEvent::Fault(700)),
                b"die" => std::process::abort(),
                _ => {}
            }
        }
    }
    tell(EngineEvent::Gone(client, None));
}

fn main() -> io::Result<ExitCode> {
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
    let link = io::stdin().as_fd().try_clone_to_owned()?;
    let log = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    logging::install("Server", vec![log], None);
    let (events, receiver) = unbounded();
    let host = Fake {
        sessions: AtomicU64::new(0),
        manner,
        events,
    };
    Ok(match serve(Link::new(link), host, &receiver) {
        End::Orderly => ExitCode::SUCCESS,
        End::Fault => ExitCode::FAILURE,
    })
}
