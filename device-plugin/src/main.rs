//! The device plugin of mpsshim for Kubernetes.

use anyhow::Context;
use clap::Parser;
use mpsshim_control::cli::documents;
use mpsshim_control::logging::{self, Sink};
use mpsshim_control::settings::{self, Settings};
use mpsshim_device_plugin::cli::Plugin as Given;
use mpsshim_device_plugin::fleet::{self, Fleet};
use mpsshim_device_plugin::kubelet::Kubelet;
use mpsshim_device_plugin::plugin::Plugin;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

fn main() -> ExitCode {
    let given = Given::parse();
    match start(&given) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mps-device-plugin: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(given: &Given) -> anyhow::Result<()> {
    if documents::print::<Given>(&given.documents)? {
        return Ok(());
    }
    let settings = Settings::load(|name| match &given.config {
        Some(path) if name == settings::CONFIG => Some(path.clone().into_os_string()),
        _ => std::env::var_os(name),
    })?
    .at_daemon();
    let kubelet = Kubelet::new(&given.kubelet_dir, &given.resource)?;
    let (fleet, devices) = watch::channel(Fleet::default());
    let plugin = Arc::new(Plugin::new(given, &settings, devices.clone())?);
    logging::install("Plugin", vec![Sink::StandardError], settings.log.as_deref());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start")?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        fleet::follow(settings, given.interval, fleet)?;
        tokio::select! {
            done = serve(&kubelet, plugin, devices) => done,
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
        }
    })
}

/// Serves once the daemon has listed its devices: kubelet would take an empty list for the loss of all devices.
async fn serve(
    kubelet: &Kubelet,
    plugin: Arc<Plugin>,
    mut devices: watch::Receiver<Fleet>,
) -> anyhow::Result<()> {
    let found = devices.wait_for(|fleet| !fleet.gpus.is_empty()).await;
    let gpus = found
        .context("the task that polls the control daemon has ended")?
        .gpus
        .len();
    tracing::info!("GPUs of the control daemon: {gpus}");
    Ok(kubelet.serve(plugin).await?)
}
