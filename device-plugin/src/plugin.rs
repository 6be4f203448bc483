//! Replies to kubelet's calls.

use crate::api::{
    AllocateRequest, Allocation, CdiDevice, ContainerAllocateRequest, ContainerAllocation,
    ContainerPreference, Device, Devices, Empty, HEALTHY, Mount, Options, Preference,
    PreferenceRequest, UNHEALTHY, path,
};
use crate::cli::Plugin as Given;
use crate::fleet::{Fleet, Gpu};
use crate::parts;
use crate::rpc::{self, Call, Reply};
use anyhow::Context;
use mpsshim_control::cdi::{self, Injection};
use mpsshim_control::settings::{self, Settings};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

/// The loader's list of libraries to preload into every program.
const LD_SO_PRELOAD: &str = "/etc/ld.so.preload";

/// The plugin.
#[derive(Debug)]
pub struct Plugin {
    parts: u32,
    thread_percentage: bool,
    memory_limit: bool,
    pipe_directory: String,
    /// The part of the reply that is the same for every container.
    always: ContainerAllocation,
    fleet: watch::Receiver<Fleet>,
    watching: Arc<AtomicUsize>,
}

/// Counts one open `ListAndWatch` stream of kubelet while it lives.
#[derive(Debug)]
struct Watching(Arc<AtomicUsize>);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Plugin {
    /// For these settings, which are the daemon's: its paths are those of the node.
    ///
    /// # Errors
    /// There is no library, a path is not UTF-8, or the file of `--ld-so-preload` cannot be written.
    pub fn new(
        given: &Given,
        settings: &Settings,
        fleet: watch::Receiver<Fleet>,
    ) -> anyhow::Result<Plugin> {
        Ok(Plugin {
            parts: given.parts,
            thread_percentage: !given.no_thread_percentage,
            memory_limit: !given.no_memory_limit,
            pipe_directory: settings.pipe_directory.display().to_string(),
            always: always(given, settings)?,
            fleet,
            watching: Arc::default(),
        })
    }

    /// Number of open `ListAndWatch` streams.
    pub fn watching(&self) -> usize {
        self.watching.load(Ordering::Relaxed)
    }

    /// The options that kubelet receives at registration and on request.
    pub fn options() -> Options {
        Options {
            pre_start_required: false,
            preferred_allocation_available: true,
        }
    }

    /// Answers a call.
    pub async fn route(self: Arc<Self>, call: Call) -> Reply {
        match call.uri().path() {
            path::OPTIONS => rpc::answer(call, |_: Empty| Ok(Plugin::options())).await,
            path::LIST_AND_WATCH => rpc::stream(call, |_: Empty| self.watch()).await,
            path::PREFERENCE => rpc::answer(call, |asked| Ok(prefer(&asked))).await,
            path::ALLOCATE => rpc::answer(call, |asked| self.allocate(&asked)).await,
            path::PRE_START => rpc::answer(call, |_: ContainerAllocateRequest| Ok(Empty {})).await,
            _ => rpc::unknown(&call),
        }
    }

    fn watch(&self) -> impl Stream<Item = Result<Devices, Status>> + use<> {
        self.watching.fetch_add(1, Ordering::Relaxed);
        let watching = Watching(self.watching.clone());
        let parts = self.parts;
        WatchStream::new(self.fleet.clone()).map(move |fleet| {
            // Moved into the stream, so that it is dropped with it.
            let _ = &watching;
            Ok(devices(&fleet, parts))
        })
    }

    fn allocate(&self, asked: &AllocateRequest) -> Result<Allocation, Status> {
        let containers = asked.containers.iter();
        let containers = containers.map(|container| self.container(&container.ids));
        let allocated = containers.collect::<Result<_, _>>();
        if let Err(refused) = &allocated {
            tracing::warn!("a pod is refused: {}", refused.message());
        }
        Ok(Allocation {
            containers: allocated?,
        })
    }

    fn container(&self, ids: &[String]) -> Result<ContainerAllocation, Status> {
        let (uuid, count) =
            parts::share(ids).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let fleet = self.fleet.borrow();
        let gpu = fleet.gpus.iter().find(|gpu| gpu.uuid == uuid);
        let gpu = gpu.ok_or_else(|| Status::not_found(format!("the node has no GPU {uuid}")))?;
        if !gpu.served {
            // The program would find no daemon and run unshared, with the whole GPU.
            return Err(Status::unavailable(format!(
                "no control daemon in {} serves {uuid}; the pod can be made again when one does",
                self.pipe_directory
            )));
        }
        let mut allocation = self.always.clone();
        allocation.env.extend(self.environment(gpu, count));
        tracing::info!(
            "allocated {count} of {} parts of {uuid} to a container",
            self.parts
        );
        Ok(allocation)
    }

    /// The part of the environment that differs between containers.
    fn environment(&self, gpu: &Gpu, count: u32) -> BTreeMap<String, String> {
        let mut env = vec![
            // For NVIDIA's container runtime, and for CUDA where that has given the container more.
            ("NVIDIA_VISIBLE_DEVICES", gpu.uuid.clone()),
            ("CUDA_VISIBLE_DEVICES", gpu.uuid.clone()),
        ];
        if self.thread_percentage {
            let percentage = parts::percentage(count, self.parts).to_string();
            env.push((settings::ACTIVE_THREAD_PERCENTAGE, percentage));
        }
        if self.memory_limit {
            let amount = parts::mebibytes(gpu.memory, count, self.parts);
            // The program sees one device.
            env.push((settings::PINNED_DEVICE_MEM_LIMIT, format!("0={amount}M")));
        }
        let named = env.into_iter();
        named
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}

fn devices(fleet: &Fleet, parts: u32) -> Devices {
    let of_gpu = |gpu: &Gpu| {
        let health = if gpu.served { HEALTHY } else { UNHEALTHY };
        let part = |number| Device {
            id: parts::id(&gpu.uuid, number),
            health: health.to_owned(),
        };
        (0..parts).map(part).collect::<Vec<_>>()
    };
    Devices {
        devices: fleet.gpus.iter().flat_map(of_gpu).collect(),
    }
}

fn prefer(asked: &PreferenceRequest) -> Preference {
    let containers = asked.containers.iter().map(|container| {
        let size = container.size.try_into().unwrap_or(0);
        ContainerPreference {
            ids: parts::prefer(&container.available, &container.must_include, size),
        }
    });
    Preference {
        containers: containers.collect(),
    }
}

/// Library and sockets: by the container engine's specification, or by mounts and environment.
fn always(given: &Given, settings: &Settings) -> anyhow::Result<ContainerAllocation> {
    if given.cdi {
        return Ok(ContainerAllocation {
            cdi_devices: vec![CdiDevice {
                name: cdi::DEVICE.to_owned(),
            }],
            ..ContainerAllocation::default()
        });
    }
    let injection = Injection::new(settings)?;
    let mount = |host_path: String, container_path: &str| Mount {
        container_path: container_path.to_owned(),
        host_path,
        read_only: true,
    };
    let mounts = injection.mounts.into_iter();
    let mut mounts: Vec<Mount> = mounts
        .map(|one| mount(one.host_path, one.container_path))
        .collect();
    let env = injection.env.into_iter();
    let mut env: BTreeMap<String, String> = env
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    if let Some(file) = &given.ld_so_preload {
        env.remove(cdi::PRELOAD);
        let host_path = file.to_str().context("--ld-so-preload is not UTF-8")?;
        write_ld_so_preload(file)?;
        mounts.push(mount(host_path.to_owned(), LD_SO_PRELOAD));
    }
    Ok(ContainerAllocation {
        env,
        mounts,
        ..ContainerAllocation::default()
    })
}

/// A new file in the place of an old one, which containers may have mounted.
fn write_ld_so_preload(file: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(
        file.is_absolute(),
        "--ld-so-preload {}: give an absolute path, which must be the node's",
        file.display()
    );
    let new = file.with_extension("new");
    let written = fs::write(&new, format!("{}\n", cdi::LIBRARY));
    written
        .and_then(|()| fs::rename(&new, file))
        .with_context(|| format!("cannot write {} (--ld-so-preload)", file.display()))
}
