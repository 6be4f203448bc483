//! The plugin's socket and kubelet's, both checked every second. When kubelet starts it removes the plugins' sockets and
//! creates a new one of its own; a plugin that does not register again is lost. A check costs two system calls, while
//! watches of a folder (inotify) are scarce on nodes with many pods.

use crate::api::{Empty, KUBELET_SOCKET, RegisterRequest, VERSION, path};
use crate::plugin::Plugin;
use crate::rpc;
use std::error::Error as _;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

/// Interval between checks.
const LOOK: Duration = Duration::from_secs(1);
/// Kubelet opens a `ListAndWatch` stream as soon as a plugin has registered. Without one for this long, it has lost the
/// plugin.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum duration of a registration.
const ANSWER: Duration = Duration::from_secs(10);

/// Reasons for which the plugin cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// The folder does not exist.
    #[error(
        "there is no folder {0}: kubelet has it on a node, mount it at this path or name it with --kubelet-dir"
    )]
    NoFolder(PathBuf),
    /// The socket cannot be made.
    #[error("cannot create the socket {path}: {source}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process listens there.
    #[error(
        "another device plugin listens at {0}: stop it, or give this one a different --resource"
    )]
    Taken(PathBuf),
    /// Kubelet does not want the plugin.
    #[error("kubelet refuses {resource}: {why}")]
    Refused {
        /// Name of the resource that pods request.
        resource: String,
        /// Kubelet's message.
        why: String,
    },
}

/// Identifies a socket: a different one at the same path compares unequal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    /// Device and inode.
    file: (u64, u64),
    /// Time of the last change: inode numbers are reused.
    changed: (i64, i64),
}

impl Identity {
    fn of(path: &Path) -> Option<Identity> {
        let found = fs::symlink_metadata(path).ok()?;
        Some(Identity {
            file: (found.dev(), found.ino()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

/// The plugin at its socket, which goes with the value.
#[derive(Debug)]
struct Serving {
    path: PathBuf,
    /// Of the socket. While it is open no other has them, whatever is done to its rights.
    file: Option<(u64, u64)>,
    task: JoinHandle<()>,
}

impl Serving {
    fn start(path: &Path, plugin: &Arc<Plugin>) -> Result<Serving, KubeletError> {
        let failed = |source| KubeletError::Socket {
            path: path.to_owned(),
            source,
        };
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if UnixStream::connect(path).is_ok() {
                    return Err(KubeletError::Taken(path.to_owned()));
                }
                // Left by a plugin that was killed.
                fs::remove_file(path).map_err(failed)?;
                UnixListener::bind(path)
            }
            result => result,
        };
        let listener = listener.map_err(failed)?;
        let plugin = plugin.clone();
        let route = move |call| plugin.clone().route(call);
        let task = tokio::spawn(async move {
            if let Err(error) = rpc::serve(listener, route).await {
                tracing::error!("the socket has failed: {error}");
            }
        });
        Ok(Serving {
            path: path.to_owned(),
            file: Identity::of(path).map(|found| found.file),
            task,
        })
    }

    fn is_there(&self) -> bool {
        self.is_at_its_path() && !self.task.is_finished()
    }

    fn is_at_its_path(&self) -> bool {
        let found = Identity::of(&self.path).map(|found| found.file);
        found.is_some() && found == self.file
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.task.abort();
        if self.is_at_its_path() {
            // It may be gone this very moment.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// How kubelet is reached.
#[derive(Debug)]
pub struct Kubelet {
    socket: PathBuf,
    own: PathBuf,
    request: RegisterRequest,
}

impl Kubelet {
    /// For the folder of sockets and the name of the resource that pods request.
    ///
    /// # Errors
    /// There is no such folder.
    pub fn new(folder: &Path, resource: &str) -> Result<Kubelet, KubeletError> {
        if !folder.is_dir() {
            return Err(KubeletError::NoFolder(folder.to_owned()));
        }
        // Plugins of several resources can be side by side.
        let endpoint = format!("{}.sock", resource.replace('/', "_"));
        Ok(Kubelet {
            socket: folder.join(KUBELET_SOCKET),
            own: folder.join(&endpoint),
            request: RegisterRequest {
                version: VERSION.to_owned(),
                endpoint,
                resource_name: resource.to_owned(),
                options: Some(Plugin::options()),
            },
        })
    }

    /// Serves the plugin and keeps it registered with kubelet, until the future is dropped.
    ///
    /// # Errors
    /// The socket cannot be made, or kubelet refuses the plugin.
    pub async fn serve(&self, plugin: Arc<Plugin>) -> Result<(), KubeletError> {
        let mut serving: Option<Serving> = None;
        let mut known: Option<(Identity, Instant)> = None;
        let mut trouble = None;
        loop {
            if !serving.as_ref().is_some_and(Serving::is_there) {
                // The old one must end before the new one starts.
                drop(serving.take());
                serving = Some(Serving::start(&self.own, &plugin)?);
                known = None;
                tracing::info!("serving at {}", self.own.display());
            }
            let kubelet = Identity::of(&self.socket);
            let forgotten = known
                .is_some_and(|(_, since)| plugin.watching() == 0 && since.elapsed() > PATIENCE);
            if kubelet.is_none() || forgotten || kubelet != known.map(|(identity, _)| identity) {
                known = None;
                let outcome = self.register().await?;
                match (&outcome, kubelet) {
                    (None, Some(kubelet)) => {
                        tracing::info!("registered {} with kubelet", self.request.resource_name);
                        known = Some((kubelet, Instant::now()));
                    }
                    (Some(why), _) if trouble.as_ref() != Some(why) => {
                        tracing::warn!("kubelet at {}: {why}; trying again", self.socket.display());
                    }
                    _ => {}
                }
                trouble = outcome;
            }
            sleep(LOOK).await;
        }
    }

    /// Registers the plugin. Returns a message if kubelet cannot be reached.
    async fn register(&self) -> Result<Option<String>, KubeletError> {
        let channel = match timeout(ANSWER, rpc::connect(&self.socket)).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(error)) => return Ok(Some(words(&error))),
            Err(_) => return Ok(Some("it does not answer".to_owned())),
        };
        let asked = rpc::ask(&channel, path::REGISTER, self.request.clone());
        match timeout(ANSWER, asked).await {
            Ok(Ok(Empty {})) => Ok(None),
            Ok(Err(status)) if is_of_transport(&status) => Ok(Some(status.to_string())),
            Ok(Err(status)) => Err(KubeletError::Refused {
                resource: self.request.resource_name.clone(),
                why: status.message().to_owned(),
            }),
            Err(_) => Ok(Some("it does not answer".to_owned())),
        }
    }
}

/// Whether the error comes from the transport rather than from kubelet.
fn is_of_transport(status: &Status) -> bool {
    status.source().is_some()
}

/// The innermost source of an error; the outer ones carry no detail.
fn words(mut error: &dyn std::error::Error) -> String {
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
