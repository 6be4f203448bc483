//! The server of mpsshim. The control daemon starts it; nobody else has a use for it.

use anyhow::{Context, ensure};
use clap::Parser;
use mpsshim_server::engine::{Engine, EngineConfig, MarkKind};
use mpsshim_server::link::Link;
use mpsshim_server::logging;
use mpsshim_server::serve::{End, serve};
use mpsshim_server::settings::{self, Settings};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::path::Path;
use std::process::ExitCode;

/// Executes the CUDA calls of mpsshim's clients. Started by mps-control, not by hand.
#[derive(Parser)]
#[command(name = "mps-server", version, after_help = settings::help_text())]
struct Options {
    /// Descriptor of the link to the control daemon
    #[arg(long, value_name = "FD")]
    link_fd: Option<RawFd>,
    /// Threads that execute clients' calls; 0: chosen from the number of CPUs
    #[arg(long, value_name = "N", default_value_t = 0)]
    dispatch_threads: usize,
    /// Clients at a time
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_clients: usize,
    /// How a stream tells that it got to a point: by a word the GPU writes, by an event the server asks about, or
    /// as suits the number of clients
    #[arg(long, value_name = "KIND", default_value = "auto")]
    marks: MarkKind,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let (link, settings) = match prepare(&options) {
        Ok(prepared) => prepared,
        Err(error) => {
            eprintln!("mps-server: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    match run(&options, link, settings) {
        Ok(End::Orderly) => ExitCode::SUCCESS,
        Ok(End::Fault) => {
            // No destructor, no exit handler of the driver: after a fault they may hang.
            // SAFETY: _exit ends the process and touches nothing of it.
            unsafe { nix::libc::_exit(1) }
        }
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Link, settings and log: what is wrong until here is said on standard error.
fn prepare(options: &Options) -> anyhow::Result<(Link, Settings)> {
    let by_hand = "mps-server is started by the control daemon with a link to it; start `mps-control -d`, \
                   or run a program with `mps-run`";
    let link = take_link(options.link_fd.context(by_hand)?).context(by_hand)?;
    let settings = Settings::from_env()?;
    // The daemon has opened server.log, which this user may not be able to do, as standard error.
    let log = File::from(std::io::stderr().as_fd().try_clone_to_owned()?);
    logging::install("Server", vec![log], settings.log.as_deref());
    Ok((link, settings))
}

fn run(options: &Options, link: Link, settings: Settings) -> anyhow::Result<End> {
    tracing::info!(target: logging::OTHER, "Startup");
    tracing::info!(
        target: logging::OTHER,
        "Connecting to control daemon on socket: {}",
        settings.control_socket().display()
    );
    let config = EngineConfig {
        cuda_library: settings.cuda_library,
        dispatch_threads: options.dispatch_threads,
        max_clients: options.max_clients,
        marks: options.marks,
    };
    let (engine, events) = Engine::start(config).context("cannot start the engine")?;
    Ok(serve(link, engine, &events))
}

/// The link as an own descriptor that children do not inherit.
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
        "descriptor {fd} is no link"
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
