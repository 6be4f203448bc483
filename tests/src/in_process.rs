//! A server's engine inside the test's own process, with softgpu as its driver: what it holds can be counted exactly, and
//! a panic or a crash of any of its threads is the test's own.
//!
//! One engine a process: softgpu's objects are the process's. The engine captures standard output for what kernels print;
//! here the process gets its own back.

use crate::peer::{Peer, hello};
use crossbeam_channel::{Receiver, unbounded};
use mpsshim_control::link::MoveMemory;
use mpsshim_control::{seqpacket, settings};
use mpsshim_model::client::{Credentials, EngineEvent};
use mpsshim_model::host_memory::HostMemory;
use mpsshim_model::limits::{Limits, Usage};
use mpsshim_model::mode::Modes;
use mpsshim_model::policy::{LAUNCH_RUN, MarkKind, TurnPolicy};
use mpsshim_proto::handshake::ClientHello;
use mpsshim_server::engine::{Ahead, Kept, OpenDriver};
use mpsshim_server::hosting::{Hosting, HostingConfig};
use mpsshim_server::keeper::{self, Keeper};
use mpsshim_server::serve::Host;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a client waits for its welcome.
const PATIENCE: Duration = Duration::from_secs(20);

/// Objects by kind, and bytes of each device, as softgpu counts them.
pub type Counts = BTreeMap<String, u64>;

/// An engine, its events and the counts of its driver.
pub struct InProcess {
    host: Hosting,
    /// What the engine tells its owner.
    pub events: Receiver<EngineEvent>,
    counts: extern "C" fn(*mut u8, usize) -> usize,
}

impl InProcess {
    /// Starts an engine on the softgpu at `driver`, which reads its `SOFTGPU_` variables now.
    ///
    /// # Errors
    /// When the driver is not softgpu, or the engine cannot start.
    pub fn start(driver: &Path, marks: MarkKind) -> io::Result<InProcess> {
        let config = HostingConfig {
            cuda_library: Some(driver.to_owned()),
            nvml_library: None,
            max_clients: settings::DEFAULT_MAX_CLIENTS,
            modes: Modes::default(),
            visible_devices: None,
            turns: TurnPolicy::default(),
            dispatch_threads: 2,
            marks,
            launch_run: LAUNCH_RUN,
            partitions: None,
            host_memory: HostMemory::default(),
            moved_memory_directory: None,
            max_spin: Duration::from_micros(settings::DEFAULT_MAX_SPIN_US),
            further_context: Duration::from_secs(15),
        };
        let (sender, events) = unbounded();
        let output = io::stdout().as_fd().try_clone_to_owned()?;
        let opened = OpenDriver::open(config.cuda_library.as_deref()).map_err(io::Error::other)?;
        let host = Hosting::start(
            (opened, Ahead::default()),
            config,
            Some(keeper(driver)?),
            sender,
        )
        .map_err(io::Error::other)?;
        // SAFETY: two open descriptors.
        if unsafe { libc::dup2(output.as_raw_fd(), libc::STDOUT_FILENO) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let counts = counts_of(driver)?;
        Ok(InProcess {
            host,
            events,
            counts,
        })
    }

    /// Moves a session's device memory; an event says when that is done.
    pub fn move_memory(&self, order: MoveMemory) {
        self.host.move_memory(order);
    }

    /// What the engine keeps for sessions to come.
    pub fn kept(&self) -> Kept {
        self.host.kept()
    }

    /// What each client has.
    pub fn usage(&self) -> Vec<Usage> {
        self.host.usage()
    }

    /// What clients that come from now on may have.
    pub fn set_limits(&self, limits: Limits) {
        self.host.set_limits(limits);
    }

    /// Ends a session as an operator does.
    pub fn terminate(&self, session: u64) {
        self.host.terminate(session);
    }

    /// A session of a proper client.
    ///
    /// # Errors
    /// A refusal, or no welcome in time.
    pub fn connect(&self) -> io::Result<Peer> {
        self.connect_as(hello())
    }

    /// A session of a client that says this.
    ///
    /// # Errors
    /// As [`InProcess::connect`].
    pub fn connect_as(&self, hello: ClientHello) -> io::Result<Peer> {
        let (ours, theirs) = seqpacket::pair()?;
        // SAFETY: the socket is open, and the value is a timeval of the size given.
        let set = unsafe {
            let patience = libc::timeval {
                tv_sec: PATIENCE.as_secs() as libc::time_t,
                tv_usec: 0,
            };
            libc::setsockopt(
                ours.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVTIMEO,
                (&raw const patience).cast(),
                size_of::<libc::timeval>() as libc::socklen_t,
            )
        };
        if set < 0 {
            return Err(io::Error::last_os_error());
        }
        let who = Credentials {
            pid: std::process::id() as i32,
            // SAFETY: plain system calls.
            uid: unsafe { libc::getuid() },
            // SAFETY: as above.
            gid: unsafe { libc::getgid() },
        };
        self.host.add_client(theirs, hello, who.into());
        Peer::over(ours)
    }

    /// What softgpu has given out, less what the engine keeps for sessions to come.
    ///
    /// Descriptions of parts of a device are left out: CUDA has no call that ends one.
    pub fn counts(&self) -> Counts {
        self.host.give_back_unused();
        let mut counts = self.given_out();
        let kept = self.host.kept();
        for (name, kept) in [
            ("streams", kept.streams),
            ("green-contexts", kept.green_contexts),
        ] {
            if let Some(count) = counts.get_mut(name) {
                *count = count.saturating_sub(kept as u64);
            }
        }
        counts.remove("resource-descriptions");
        counts
    }

    fn given_out(&self) -> Counts {
        let mut text = vec![0; 16 << 10];
        let len = (self.counts)(text.as_mut_ptr(), text.len());
        assert!(
            len <= text.len(),
            "softgpu counts more than there is room for"
        );
        let text = String::from_utf8_lossy(&text[..len]).into_owned();
        text.lines()
            .filter_map(|line| {
                let (name, count) = line.split_once(' ')?;
                Some((name.to_owned(), count.parse().ok()?))
            })
            .collect()
    }

    /// Waits until the counts are these, with up to `spare_blocks` more of registered memory.
    ///
    /// # Errors
    /// The counts that differ: name, expected, found.
    pub fn await_counts(
        &self,
        expected: &Counts,
        spare_blocks: u64,
        patience: Duration,
    ) -> Result<(), Vec<(String, u64, u64)>> {
        let began = Instant::now();
        loop {
            let found = self.counts();
            let differs: Vec<(String, u64, u64)> = found
                .iter()
                .map(|(name, count)| {
                    (
                        name.clone(),
                        expected.get(name).copied().unwrap_or(0),
                        *count,
                    )
                })
                .filter(|(name, expected, found)| {
                    let spare = if name == "registered" {
                        spare_blocks
                    } else {
                        0
                    };
                    found < expected || *found > expected + spare
                })
                .collect();
            if differs.is_empty() {
                return Ok(());
            }
            if began.elapsed() > patience {
                return Err(differs);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends all sessions and stops the threads that touch them.
    pub fn shutdown(self) {
        self.host.shutdown();
    }
}

fn counts_of(driver: &Path) -> io::Result<extern "C" fn(*mut u8, usize) -> usize> {
    let name = CString::new(driver.as_os_str().as_encoded_bytes()).map_err(io::Error::other)?;
    // SAFETY: a NUL-ended name of a library that is loaded already, and a NUL-ended symbol.
    let address = unsafe {
        let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() {
            std::ptr::null_mut()
        } else {
            libc::dlsym(library, c"softgpu_counts".as_ptr())
        }
    };
    if address.is_null() {
        return Err(io::Error::other("the driver is not softgpu"));
    }
    // SAFETY: softgpu exports the function of this name with this signature.
    Ok(unsafe {
        std::mem::transmute::<*mut libc::c_void, extern "C" fn(*mut u8, usize) -> usize>(address)
    })
}

/// Descriptors that this process has open.
///
/// # Errors
/// Those of reading `/proc`.
pub fn open_descriptors() -> io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

/// Threads of this process.
///
/// # Errors
/// Those of reading `/proc`.
pub fn threads() -> io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/task")?.count())
}

/// Bytes of memory that this process has in use.
///
/// # Errors
/// Those of reading `/proc`.
pub fn resident_bytes() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    Ok(pages.unwrap_or(0u64) * 4096)
}

/// The keeper of the mps-server beside the driver; it ends with its connection.
fn keeper(driver: &Path) -> io::Result<Keeper> {
    let (own, others) = seqpacket::pair()?;
    Command::new(driver.with_file_name("mps-server"))
        .arg(keeper::OPTION)
        .stdin(Stdio::from(others))
        .spawn()?;
    Keeper::on(own)
}
