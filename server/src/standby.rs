//! A standby: a server that has created its context and waits for the sessions of another server, to shorten their
//! pause. It loads their images ahead if it is told to.

use crate::engine::bounds::STACK;
use crate::engine::{self, Ahead, OpenDriver};
use crate::keeper::Keeper;
use mpsshim_control::link::{Link, LinkError, Order, ToDaemon};
use mpsshim_model::limits::Limits;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Scope, ScopedJoinHandle};

/// Waits for sessions; `None`: the standby is not needed any more. Updates `limits` to those in force by then. Returns the
/// keeper of the sessions, and the images loaded ahead.
///
/// # Errors
/// The link has failed, or the connection to the keeper takes no limit of time.
pub fn wait(
    link: &Link,
    opened: &OpenDriver,
    limits: &mut Limits,
) -> anyhow::Result<Option<(Keeper, Ahead)>> {
    tracing::info!("Standing by");
    link.report(&ToDaemon::Standby {
        fingerprint: engine::fingerprint(),
    })?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut loading = None;
        let keeper = take_orders(link, limits, |images| {
            if loading.is_none() {
                loading = start_loading(scope, (link, opened), images, &stop);
            }
            if loading.is_none() {
                link.report(&ToDaemon::LoadedAhead)?;
            }
            Ok(())
        });
        // The image that is being loaded would have to be loaded anyway.
        stop.store(true, Ordering::Release);
        // A panic has already ended the process.
        let ahead = loading.and_then(|thread| thread.join().ok());
        Ok(keeper?.map(|keeper| (keeper, ahead.unwrap_or_default())))
    })
}

/// Follows the daemon's orders until sessions come, with `load` for images to load ahead. Returns the sessions' keeper;
/// `None`: the standby is not needed any more.
fn take_orders(
    link: &Link,
    limits: &mut Limits,
    mut load: impl FnMut(OwnedFd) -> Result<(), LinkError>,
) -> anyhow::Result<Option<Keeper>> {
    loop {
        match link.next_order() {
            Ok(None | Some(Order::Shutdown { .. })) => {
                tracing::info!("Exiting");
                return Ok(None);
            }
            Ok(Some(Order::Adopt(keeper))) => {
                link.report(&ToDaemon::Adopts)?;
                return Ok(Some(Keeper::on(keeper)?));
            }
            Ok(Some(Order::LoadAhead(images))) => load(images)?,
            Ok(Some(Order::Limits(new))) => *limits = new,
            Ok(Some(Order::Log(log))) => nix::unistd::dup2_stderr(log)?,
            // Other orders concern clients.
            Ok(Some(_)) => {}
            Err(LinkError::Io(error)) => return Err(error.into()),
            Err(error) => tracing::error!("{error}"),
        }
    }
}

/// Starts a thread that loads the images of a temporary keeper until `stop` is set, and then reports to the daemon. `None`:
/// it could not be started.
fn start_loading<'scope>(
    scope: &'scope Scope<'scope, '_>,
    (link, opened): (&'scope Link, &'scope OpenDriver),
    images: OwnedFd,
    stop: &'scope AtomicBool,
) -> Option<ScopedJoinHandle<'scope, Ahead>> {
    // The driver compiles images on this thread's stack.
    let thread = thread::Builder::new()
        .name("ahead".into())
        .stack_size(STACK);
    let keeper = Keeper::on(images);
    let started = keeper.and_then(|keeper| {
        thread.spawn_scoped(scope, move || {
            let ahead = load(opened, keeper, stop);
            if let Err(error) = link.report(&ToDaemon::LoadedAhead) {
                tracing::debug!("{error}");
            }
            ahead
        })
    });
    started
        .inspect_err(|error| tracing::warn!("No images are loaded ahead: {error}"))
        .ok()
}

/// Ends the process if the context is lost: the daemon starts another standby.
fn load(opened: &OpenDriver, keeper: Keeper, stop: &AtomicBool) -> Ahead {
    opened.load_ahead(keeper, stop).unwrap_or_else(|status| {
        tracing::error!("The context is lost as images are loaded ahead: {status}");
        // SAFETY: _exit ends the process and touches nothing of it; the driver's exit handlers might hang.
        unsafe { nix::libc::_exit(1) }
    })
}
