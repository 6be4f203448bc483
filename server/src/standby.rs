//! A standby: a server that has created its context and waits for the sessions of another server, to shorten their
//! pause. It loads their images ahead if it is told to, as often as it is told to.

use crate::engine::bounds::STACK;
use crate::engine::{self, Ahead, OpenDriver};
use crate::keeper::Keeper;
use crossbeam_channel::{Receiver, Sender, unbounded};
use mpsshim_control::link::{Link, LinkError, Order, ToDaemon};
use mpsshim_model::limits::Limits;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
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
        formats: engine::FORMATS.to_vec(),
    })?;
    let latest = AtomicU64::new(0);
    thread::scope(|scope| {
        let mut loader = Loader::new(&latest);
        let keeper = take_orders(link, limits, |task| {
            if !loader.is_given(scope, (link, opened), task) {
                link.report(&ToDaemon::LoadedAhead)?;
            }
            Ok(())
        });
        // The image that is being loaded would have to be loaded anyway. If that hangs, the daemon is not told that this
        // process goes on, and ends it.
        let ahead = loader.end();
        Ok(match keeper? {
            Some(keeper) => {
                link.report(&ToDaemon::Adopts)?;
                Some((keeper, ahead))
            }
            None => None,
        })
    })
}

/// An order to the loader.
enum Task {
    /// Load those of a temporary keeper, and unload the others.
    Load(OwnedFd),
    /// Unload all.
    Unload,
}

/// Follows the daemon's orders until sessions come, with `give` for images to load ahead. Returns the sessions' keeper;
/// `None`: the standby is not needed any more.
fn take_orders(
    link: &Link,
    limits: &mut Limits,
    mut give: impl FnMut(Task) -> Result<(), LinkError>,
) -> anyhow::Result<Option<Keeper>> {
    loop {
        match link.next_order() {
            Ok(None | Some(Order::Shutdown { .. })) => {
                tracing::info!("Exiting");
                return Ok(None);
            }
            Ok(Some(Order::Adopt(keeper))) => return Ok(Some(Keeper::on(keeper)?)),
            Ok(Some(Order::LoadAhead(images))) => give(Task::Load(images))?,
            Ok(Some(Order::UnloadAhead)) => give(Task::Unload)?,
            Ok(Some(Order::Limits(new))) => *limits = *new,
            Ok(Some(Order::Log(log))) => nix::unistd::dup2_stderr(log)?,
            // Other orders concern clients.
            Ok(Some(_)) => {}
            Err(LinkError::Io(error)) => return Err(error.into()),
            Err(error) => tracing::error!("{error}"),
        }
    }
}

/// The thread that loads and unloads images, once there are any. A new task interrupts an earlier one.
struct Loader<'scope> {
    /// Number of the last task, the only one for which images are loaded.
    latest: &'scope AtomicU64,
    thread: Option<Started<'scope>>,
}

impl<'scope> Loader<'scope> {
    /// Number behind all tasks.
    const END: u64 = u64::MAX;

    fn new(latest: &'scope AtomicU64) -> Loader<'scope> {
        Loader {
            latest,
            thread: None,
        }
    }

    /// Gives a task to the thread, which reports its end to the daemon. Returns whether there is such a thread.
    fn is_given(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        (link, opened): (&'scope Link, &'scope OpenDriver),
        task: Task,
    ) -> bool {
        if self.thread.is_none() && matches!(task, Task::Load(_)) {
            let latest = self.latest;
            let body = move |tasks| work((link, opened), &tasks, latest);
            self.thread = start(scope, body)
                .inspect_err(|error| tracing::warn!("No images are loaded ahead: {error}"))
                .ok();
        }
        let Some((tasks, _)) = &self.thread else {
            return false;
        };
        let number = self.latest.fetch_add(1, Ordering::AcqRel) + 1;
        tasks.send((number, task)).is_ok()
    }

    /// Stops the loading, and returns the images.
    fn end(self) -> Ahead {
        self.latest.store(Loader::END, Ordering::Release);
        let ahead = self.thread.and_then(|(tasks, thread)| {
            drop(tasks);
            // A panic has already ended the process.
            thread.join().ok()
        });
        ahead.unwrap_or_default()
    }
}

type Started<'scope> = (Sender<(u64, Task)>, ScopedJoinHandle<'scope, Ahead>);

fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    body: impl FnOnce(Receiver<(u64, Task)>) -> Ahead + Send + 'scope,
) -> io::Result<Started<'scope>> {
    let (sender, tasks) = unbounded();
    // The driver compiles images on this thread's stack.
    let thread = thread::Builder::new()
        .name("ahead".into())
        .stack_size(STACK)
        .spawn_scoped(scope, move || body(tasks))?;
    Ok((sender, thread))
}

/// Carries the tasks out, unless a later one has made them obsolete, and reports the end of each.
fn work(
    (link, opened): (&Link, &OpenDriver),
    tasks: &Receiver<(u64, Task)>,
    latest: &AtomicU64,
) -> Ahead {
    let mut ahead = Ahead::default();
    for (number, task) in tasks {
        let is_over = || latest.load(Ordering::Acquire) != number;
        if !is_over() {
            carry_out(opened, task, &mut ahead, &is_over);
        }
        if let Err(error) = link.report(&ToDaemon::LoadedAhead) {
            tracing::debug!("{error}");
        }
    }
    ahead
}

/// Ends the process if the context is lost: the daemon starts another standby.
fn carry_out(
    opened: &OpenDriver,
    task: Task,
    ahead: &mut Ahead,
    is_over: &(dyn Fn() -> bool + Sync),
) {
    let done = match task {
        Task::Load(images) => match Keeper::on(images) {
            Ok(keeper) => opened.load_ahead(ahead, keeper, is_over),
            Err(error) => {
                tracing::warn!("No images are loaded ahead: {error}");
                Ok(())
            }
        },
        Task::Unload => opened.unload_ahead(ahead),
    };
    if let Err(status) = done {
        tracing::error!("The context is lost as images are loaded ahead: {status}");
        // SAFETY: _exit ends the process and touches nothing of it; the driver's exit handlers might hang.
        unsafe { nix::libc::_exit(1) }
    }
}
