//! The server of mpsshim, started by the control daemon and not meant to be started by hand.

use anyhow::{Context, ensure};
use clap::Parser;
use crossbeam_channel::unbounded;
use mpsshim_control::cli::{Server, documents};
use mpsshim_control::link::Link;
use mpsshim_control::logging::{self, Sink};
use mpsshim_control::panics;
use mpsshim_control::settings::Settings;
use mpsshim_proto::release::ServerNote;
use mpsshim_server::driver_locks;
use mpsshim_server::engine::{Ahead, OpenDriver, describe_driver, list_devices};
use mpsshim_server::hosting::{Hosting, HostingConfig};
use mpsshim_server::keeper::{self, Keeper};
use mpsshim_server::release;
use mpsshim_server::serve::{End, serve};
use mpsshim_server::standby;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Names the release in the file, for the daemon.
#[used]
#[unsafe(link_section = ".note.mpsshim")]
static RELEASE: ServerNote = release::NOTE;

fn main() -> ExitCode {
    let options = Server::parse();
    let said = |error: &anyhow::Error| {
        eprintln!("mps-server: {error:#}");
        ExitCode::FAILURE
    };
    if options.keeper {
        return match run_keeper() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => said(&error),
        };
    }
    match describe(&options) {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => {}
        Err(error) => return said(&error),
    }
    let (link, settings) = match prepare(&options) {
        Ok(prepared) => prepared,
        Err(error) => return said(&error),
    };
    match run(&options, link, settings) {
        Ok(End::Orderly) => ExitCode::SUCCESS,
        // SAFETY: as below.
        Ok(End::Unfinished | End::HandedOver) => unsafe { nix::libc::_exit(0) },
        Ok(End::Fault) => {
            // Neither destructors nor the driver's exit handlers run: after a fault they may hang.
            // SAFETY: _exit ends the process and touches nothing of it.
            unsafe { nix::libc::_exit(1) }
        }
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints requested information instead of serving; `false`: none was requested.
fn describe(options: &Server) -> anyhow::Result<bool> {
    if options.describe_driver {
        let settings = Settings::from_env()?;
        let driver = describe_driver(settings.cuda_library.as_deref())?;
        println!("{}", serde_json::to_string(&driver)?);
        return Ok(true);
    }
    if !options.list_devices {
        return Ok(documents::print::<Server>(&options.documents)?);
    }
    let settings = Settings::from_env()?;
    let devices = list_devices(settings.cuda_library.as_deref())?;
    println!("{}", serde_json::to_string(&devices)?);
    Ok(true)
}

/// The keeper's connection is standard input.
fn run_keeper() -> anyhow::Result<()> {
    let connection = std::io::stdin().as_fd().try_clone_to_owned()?;
    nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
    Ok(keeper::run(connection)?)
}

/// Sets up link, settings and log; errors up to here go to standard error.
fn prepare(options: &Server) -> anyhow::Result<(Link, Settings)> {
    let by_hand = "mps-server is started by the control daemon with a link to it; start `mps-control -d`, \
                   or run a program with `mps-run`";
    let link = take_link(options.link_fd.context(by_hand)?).context(by_hand)?;
    release::check()?;
    let settings = Settings::from_env()?;
    // Standard error is server.log, opened by the daemon, since this user may not be permitted to open it.
    let sinks = vec![Sink::StandardError];
    logging::limit::serve_clients();
    logging::install("Server", sinks, settings.log.as_deref());
    panics::end_process();
    Ok((link, settings))
}

fn run(options: &Server, link: Link, settings: Settings) -> anyhow::Result<End> {
    tracing::info!(target: logging::OTHER, "Startup");
    tracing::info!(
        target: logging::OTHER,
        "Connecting to control daemon on socket: {}",
        settings.control_socket().display()
    );
    let control = settings.control_socket();
    let mut config = HostingConfig {
        cuda_library: settings.cuda_library,
        nvml_library: settings.nvml_library,
        max_clients: options.max_clients,
        partitions: None,
        modes: options.mode.clone(),
        visible_devices: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
        turns: options.turns,
        dispatch_threads: options.dispatch_threads,
        marks: options.marks,
        launch_run: options.launch_run,
        host_memory: options.host_memory.clone(),
        moved_memory_directory: options.moved_memory_directory.clone(),
        max_spin: Duration::from_micros(options.max_spin_us),
        further_context: Duration::from_millis(options.further_context_ms),
    };
    driver_locks::spin_for(Duration::from_micros(options.lock_spin_us));
    let (events, receiver) = unbounded();
    let opened = OpenDriver::open(config.cuda_library.as_deref());
    let opened = opened.context("cannot start the engine")?;
    let mut limits = options.limits.clone().unwrap_or_default();
    let mut ahead = Ahead::default();
    let keeper = match options.keeper_fd {
        Some(fd) => Some(take_keeper(fd).context("cannot take over sessions")?),
        None if options.standby => {
            if !options.without_context {
                let attached = opened.attach();
                attached.context("cannot make the first device's context")?;
            }
            let sessions = standby::wait(&link, &opened, &mut limits).context("the standby")?;
            let Some((keeper, loaded)) = sessions else {
                return Ok(End::Orderly);
            };
            ahead = loaded;
            Some(keeper)
        }
        None => Keeper::start()
            .inspect_err(|error| {
                tracing::warn!("No keeper, sessions do not outlive this server: {error}");
            })
            .ok(),
    };
    config.partitions = limits.partitions.clone();
    let host = Hosting::start((opened, ahead), config, keeper, events)
        .context("cannot start the engine")?;
    let terms = (limits, options.quarantined.clone());
    Ok(serve(link, host, &receiver, terms, &control))
}

/// The connection to the previous server's keeper: standard output, which is the log from then on.
fn take_keeper(fd: RawFd) -> anyhow::Result<Keeper> {
    ensure!(fd == 1, "descriptor {fd} is not the keeper's");
    let connection = std::io::stdout().as_fd().try_clone_to_owned()?;
    nix::unistd::dup2_stdout(std::io::stderr())?;
    Ok(Keeper::on(connection)?)
}

/// Duplicates the link into a descriptor that children do not inherit.
fn take_link(fd: RawFd) -> anyhow::Result<Link> {
    use nix::sys::socket::{SockType, getsockopt, sockopt};
    ensure!(
        Path::new(&format!("/proc/self/fd/{fd}")).exists(),
        "descriptor {fd} is not open"
    );
    // SAFETY: the descriptor was open just now, and this process, which has one thread yet, does not
    // close it while it is borrowed.
    let given = unsafe { BorrowedFd::borrow_raw(fd) };
    ensure!(
        getsockopt(&given, sockopt::SockType) == Ok(SockType::SeqPacket),
        "descriptor {fd} is not a link"
    );
    let link = given.try_clone_to_owned()?;
    // The end of the link must be seen when `link` is dropped.
    if fd == 0 {
        nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
    } else {
        nix::unistd::close(fd)?;
    }
    Ok(Link::new(link))
}

// These replace the C library's functions for the driver: the loader searches the executable first.

/// # Safety
/// As of POSIX's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_mutex_lock(mutex: *mut libc::pthread_mutex_t) -> libc::c_int {
    // SAFETY: the caller's promise.
    unsafe { driver_locks::lock_mutex(mutex) }
}

/// # Safety
/// As of POSIX's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_rwlock_rdlock(lock: *mut libc::pthread_rwlock_t) -> libc::c_int {
    // SAFETY: the caller's promise.
    unsafe { driver_locks::lock_shared(lock) }
}

/// # Safety
/// As of POSIX's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_rwlock_wrlock(lock: *mut libc::pthread_rwlock_t) -> libc::c_int {
    // SAFETY: the caller's promise.
    unsafe { driver_locks::lock_exclusive(lock) }
}
