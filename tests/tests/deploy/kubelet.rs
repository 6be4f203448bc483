//! As much of kubelet as a device plugin sees.

use mpsshim_device_plugin::api::{Empty, KUBELET_SOCKET, RegisterRequest, path};
use mpsshim_device_plugin::rpc;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(30);

fn runtime() -> Runtime {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime")
}

/// Kubelet's end that plugins register at.
pub struct Kubelet {
    folder: PathBuf,
    /// Where the folder goes with the value.
    own: Option<TempDir>,
    registrations: Receiver<RegisterRequest>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Kubelet {
    pub fn start() -> Kubelet {
        Kubelet::in_own_folder(None)
    }

    /// Begins by removing all sockets, as kubelet does.
    pub fn start_in(folder: &Path) -> Kubelet {
        Kubelet::with(folder, None)
    }

    /// One that wants no plugin, with these words.
    pub fn start_that_refuses(why: &'static str) -> Kubelet {
        Kubelet::in_own_folder(Some(why))
    }

    fn in_own_folder(refusal: Option<&'static str>) -> Kubelet {
        let own = TempDir::with_prefix("kubelet-").expect("directory");
        let mut kubelet = Kubelet::with(own.path(), refusal);
        kubelet.own = Some(own);
        kubelet
    }

    fn with(folder: &Path, refusal: Option<&'static str>) -> Kubelet {
        for entry in fs::read_dir(folder).expect("folder") {
            let entry = entry.expect("entry");
            if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
                // The plugin may remove its own.
                let _ = fs::remove_file(entry.path());
            }
        }
        let socket = folder.join(KUBELET_SOCKET);
        let (register, registrations) = channel();
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = channel();
        let thread = thread::spawn(move || {
            runtime().block_on(async {
                let listener = UnixListener::bind(&socket).expect("socket");
                ready.send(()).expect("somebody waits");
                let route = move |call: rpc::Call| {
                    let register = register.clone();
                    async move {
                        if call.uri().path() != path::REGISTER {
                            return rpc::unknown(&call);
                        }
                        let answer = |asked: RegisterRequest| match refusal {
                            Some(why) => Err(Status::unknown(why)),
                            None => {
                                // The test may be over.
                                let _ = register.send(asked);
                                Ok(Empty {})
                            }
                        };
                        rpc::answer(call, answer).await
                    }
                };
                tokio::select! {
                    served = rpc::serve(listener, route) => served.expect("serves"),
                    _ = stopped => {}
                }
            });
        });
        is_ready.recv().expect("it listens");
        Kubelet {
            folder: folder.to_owned(),
            own: None,
            registrations,
            stop,
            thread,
        }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The next registration.
    #[track_caller]
    pub fn registered(&self) -> RegisterRequest {
        self.registered_within(PATIENCE).expect("a registration")
    }

    pub fn registered_within(&self, time: Duration) -> Option<RegisterRequest> {
        self.registrations.recv_timeout(time).ok()
    }

    /// Ends it; what is in its folder stays.
    pub fn end(self) {
        self.stop.send(()).expect("it runs");
        self.thread.join().expect("no panic");
    }
}

/// Kubelet's end of a plugin's socket.
pub struct Connection {
    runtime: Runtime,
    channel: Channel,
}

impl Connection {
    pub fn open(socket: &Path) -> Connection {
        let runtime = runtime();
        let channel = runtime.block_on(rpc::connect(socket)).expect("connect");
        Connection { runtime, channel }
    }

    pub fn ask<Q, A>(&self, path: &'static str, question: Q) -> Result<A, Status>
    where
        Q: prost::Message + Default + 'static,
        A: prost::Message + Default + 'static,
    {
        let asked = rpc::ask(&self.channel, path, question);
        self.runtime.block_on(asked)
    }

    pub fn watch<A: prost::Message + Default + 'static>(
        &self,
        path: &'static str,
    ) -> Watched<'_, A> {
        let asked = rpc::watch(&self.channel, path, Empty {});
        Watched {
            stream: self.runtime.block_on(asked).expect("a stream"),
            runtime: &self.runtime,
        }
    }
}

/// What a plugin goes on telling.
pub struct Watched<'a, A> {
    stream: Streaming<A>,
    runtime: &'a Runtime,
}

impl<A> Watched<'_, A> {
    #[track_caller]
    pub fn next(&mut self) -> A {
        let next = async { timeout(PATIENCE, self.stream.next()).await };
        let next = self.runtime.block_on(next);
        next.expect("in time").expect("no end").expect("no error")
    }
}
