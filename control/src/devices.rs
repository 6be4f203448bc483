//! The devices of the machine, as the daemon knows them: it opens no driver itself, but learns them from a server or from
//! `mps-server --list-devices`.

use super::spawn::{Launcher, SpawnError};
use crate::seqpacket;
use mpsshim_model::device::DeviceInfo;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Child, ChildStdout, ExitStatus};
use std::time::{Duration, Instant};

/// How long `mps-server --list-devices` may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Poll interval of callers that wait for the result.
const LOOK: Duration = Duration::from_millis(5);
/// Maximum output, bytes; more than the description of any machine's devices.
const OUTPUT_LIMIT: usize = 64 * 1024;

/// The daemon's knowledge of the devices.
#[derive(Default)]
pub struct Devices {
    found: Option<Vec<DeviceInfo>>,
    search: Option<Search>,
    failure: String,
}

/// A running `mps-server --list-devices`.
struct Search {
    child: Child,
    /// `None`: closed.
    output: Option<ChildStdout>,
    said: Vec<u8>,
    until: Instant,
}

impl Devices {
    /// All devices, by ordinal; `None`: not known yet.
    pub fn known(&self) -> Option<&[DeviceInfo]> {
        self.found.as_deref()
    }

    /// A server has reported its devices.
    pub fn learn(&mut self, devices: &[DeviceInfo]) {
        if self.found.is_none() && !devices.is_empty() {
            self.found = Some(devices.to_owned());
        }
    }

    /// Starts a search, unless one is running.
    ///
    /// # Errors
    /// When the program cannot be run.
    pub fn search(&mut self, launcher: &Launcher) -> Result<(), SpawnError> {
        if self.search.is_none() {
            self.search = Some(Search::of(launcher.list_devices()?, PATIENCE)?);
        }
        Ok(())
    }

    /// Searches and waits for the result. `None`: nothing was found, and [`Devices::failure`] says why.
    ///
    /// # Errors
    /// When the program cannot be run.
    pub fn find_now(&mut self, launcher: &Launcher) -> Result<Option<&[DeviceInfo]>, SpawnError> {
        self.search(launcher)?;
        while self.is_searching() {
            self.hear();
            self.reap();
            self.expire(Instant::now());
            std::thread::sleep(LOOK);
        }
        Ok(self.known())
    }

    /// Whether a search is running.
    pub fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    /// Whether this process is the running search.
    pub fn is_child(&self, pid: i32) -> bool {
        let search = self.search.as_ref();
        search.is_some_and(|search| search.child.id() == pid as u32)
    }

    /// Why the last search found nothing.
    pub fn failure(&self) -> &str {
        &self.failure
    }

    /// Output of the running search, to be watched.
    pub fn output(&self) -> Option<BorrowedFd<'_>> {
        Some(self.search.as_ref()?.output.as_ref()?.as_fd())
    }

    /// When [`Devices::expire`] has something to do.
    pub fn deadline(&self) -> Option<Instant> {
        self.search.as_ref().map(|search| search.until)
    }

    /// [`Devices::output`] has something to read.
    pub fn hear(&mut self) {
        if let Some(search) = &mut self.search {
            search.read();
        }
    }

    /// Some child has ended.
    pub fn reap(&mut self) {
        let ended = self
            .search
            .as_mut()
            .map(|search| search.child.try_wait())
            .transpose();
        let result = match ended {
            Ok(None | Some(None)) => return,
            Ok(Some(Some(status))) => Ok(status),
            Err(error) => Err(error),
        };
        let Some(mut search) = self.search.take() else {
            return;
        };
        match result
            .map_err(|error| error.to_string())
            .and_then(|status| search.result(status))
        {
            Ok(devices) => self.found = Some(devices),
            Err(why) => self.fail(why),
        }
    }

    /// Ends a search that has exceeded its time limit.
    pub fn expire(&mut self, now: Instant) {
        if self.search.take_if(|search| search.until <= now).is_some() {
            self.fail(format!("no answer within {} s", PATIENCE.as_secs()));
        }
    }

    fn fail(&mut self, why: String) {
        self.failure = format!(
            "cannot list the devices: mps-server --list-devices: {why}; server.log may say more"
        );
        tracing::error!("{}", self.failure);
    }
}

impl Drop for Search {
    /// Does not wait for the process, which may hang in the driver; once it has ended, it is reaped like an orphan.
    fn drop(&mut self) {
        // Fails only if the process has ended already.
        let _ = self.child.kill();
    }
}

impl Search {
    fn of(mut child: Child, patience: Duration) -> io::Result<Search> {
        let output = child.stdout.take();
        if let Some(output) = &output {
            seqpacket::set_nonblocking(output, true)?;
        }
        Ok(Search {
            child,
            output,
            said: Vec::new(),
            until: Instant::now() + patience,
        })
    }

    /// Reads the output available so far.
    fn read(&mut self) {
        let mut buffer = [0; 4096];
        while let Some(output) = &mut self.output {
            match output.read(&mut buffer) {
                Ok(len @ 1..) if self.said.len() + len <= OUTPUT_LIMIT => {
                    self.said.extend_from_slice(&buffer[..len]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The end, an error, or too much output.
                _ => self.output = None,
            }
        }
    }

    fn result(&mut self, status: ExitStatus) -> Result<Vec<DeviceInfo>, String> {
        self.read();
        if !status.success() {
            return Err(format!("ended with {status}"));
        }
        // The driver may print other lines first.
        let text = String::from_utf8_lossy(&self.said);
        let last = text.lines().last().unwrap_or_default();
        serde_json::from_str(last).map_err(|_| "printed no list".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn search(script: &str, patience: Duration) -> Devices {
        let child = Command::new("sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh");
        Devices {
            search: Some(Search::of(child, patience).expect("search")),
            ..Devices::default()
        }
    }

    fn wait(mut devices: Devices) -> Devices {
        while devices.is_searching() {
            devices.hear();
            devices.reap();
            devices.expire(Instant::now());
            std::thread::sleep(Duration::from_millis(1));
        }
        devices
    }

    #[test]
    fn what_a_search_finds() {
        let one = [DeviceInfo {
            name: "A device".into(),
            uuid: "GPU-aa00".into(),
            pci: "0000:00:06.0".into(),
            memory: 1 << 30,
            compute_mode: Default::default(),
            chunks: Default::default(),
        }];
        let json = serde_json::to_string(&one).expect("json");
        let minute = Duration::from_secs(60);
        let found = wait(search(&format!("echo some notice; echo '{json}'"), minute));
        assert_eq!(found.known(), Some(&one[..]));
        for (script, why) in [
            ("exit 3", "exit status: 3"),
            ("true", "printed no list"),
            ("echo '{'", "printed no list"),
            // Output beyond the limit ends it.
            ("yes", "ended with"),
        ] {
            let devices = wait(search(script, minute));
            assert_eq!(devices.known(), None);
            assert!(devices.failure().contains(why), "{}", devices.failure());
        }
        let devices = wait(search("exec sleep 60", Duration::from_millis(20)));
        assert!(devices.failure().contains("no answer within 30 s"));
    }
}
