//! Device memory of clients in direct mode beyond their own counts: contexts, code, memory kept by pools. NVML reports
//! the total memory of a process; the client's own count is subtracted, and the difference is written into its page.
//!
//! This runs in a separate thread, since NVML can be slow. The thread polls the pages, which costs almost nothing, and
//! queries NVML only for clients whose pages have changed.

use super::page::{Counts, SharedPage};
use crate::nvml::{Device, Nvml};
use mpsshim_api::cuda::CUuuid;
use mpsshim_control::user_memory::Place;
use mpsshim_proto::handshake::MAX_DEVICES;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Interval between checks of the pages.
const LOOK: Duration = Duration::from_millis(250);
/// Interval between queries about a client whose count has changed; a client that uses another device is queried at
/// once.
const INTERVAL: Duration = Duration::from_secs(1);

/// A client, which may have ended.
#[derive(Debug)]
struct Client {
    /// Process id as the server sees it.
    pid: i32,
    page: Weak<SharedPage>,
    place: Weak<Place>,
}

/// A client that has not ended.
struct Present {
    session: u64,
    pid: i32,
    page: Arc<SharedPage>,
    place: Arc<Place>,
}

#[derive(Default)]
struct State {
    clients: BTreeMap<u64, Client>,
    ending: bool,
}

fn forget_ended(state: &mut State) {
    let is_there = |client: &Client| client.page.strong_count() > 0;
    state.clients.retain(|_, client| is_there(client));
}

/// The thread, which ends when this is dropped.
pub struct Overheads {
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl Overheads {
    /// Starts it. `devices`: UUIDs by ordinal; `library`: NVML, when not the one the loader finds.
    ///
    /// # Errors
    /// No thread.
    pub fn start(devices: &[[u8; 16]], library: Option<PathBuf>) -> io::Result<Overheads> {
        let shared: Arc<(Mutex<State>, Condvar)> = Arc::default();
        let looking = Looking {
            library,
            uuids: devices.to_vec(),
            shared: Arc::clone(&shared),
            seen: HashMap::new(),
        };
        std::thread::Builder::new()
            .name("overheads".into())
            .spawn(move || looking.run())?;
        Ok(Overheads { shared })
    }

    /// Adds a client. It is forgotten when its page is dropped.
    pub fn add(&self, session: u64, pid: i32, page: &Arc<SharedPage>, place: &Arc<Place>) {
        if pid <= 0 {
            // A process in a PID namespace that is not visible from here.
            return;
        }
        let client = Client {
            pid,
            page: Arc::downgrade(page),
            place: Arc::downgrade(place),
        };
        let (state, changed) = &*self.shared;
        let mut state = state.lock();
        forget_ended(&mut state);
        state.clients.insert(session, client);
        changed.notify_one();
    }
}

impl Drop for Overheads {
    fn drop(&mut self) {
        let (state, changed) = &*self.shared;
        state.lock().ending = true;
        changed.notify_one();
    }
}

/// Results of the last query about a client.
#[derive(Default)]
struct Seen {
    counts: Counts,
    asked: Option<Instant>,
    overhead: [u64; MAX_DEVICES],
    /// Two results in a row were the same.
    settled: bool,
}

impl Seen {
    /// Whether NVML must be queried, given these counts in the page.
    fn is_due(&self, counts: &Counts, now: Instant) -> bool {
        if counts.devices == 0 || (self.settled && self.counts == *counts) {
            return false;
        }
        let other_devices = counts.devices != self.counts.devices;
        other_devices || self.asked.is_none_or(|asked| now - asked >= INTERVAL)
    }

    /// Takes the total memory of the process on each device that it uses.
    fn take(&mut self, counts: Counts, held: impl Fn(usize) -> u64) {
        let overhead = std::array::from_fn(|device| match counts.devices >> device & 1 {
            0 => 0,
            _ => held(device).saturating_sub(counts.held[device]),
        });
        self.settled = overhead == self.overhead && counts == self.counts;
        (self.overhead, self.counts) = (overhead, counts);
    }
}

struct Looking {
    library: Option<PathBuf>,
    uuids: Vec<[u8; 16]>,
    shared: Arc<(Mutex<State>, Condvar)>,
    seen: HashMap<u64, Seen>,
}

impl Looking {
    fn run(mut self) {
        let Some(clients) = self.next() else { return };
        drop(clients);
        let nvml = match Nvml::open(self.library.as_deref()) {
            Ok(nvml) => nvml,
            Err(error) => {
                tracing::info!(
                    "NVML cannot be asked, so memory of contexts in direct mode is not counted: {error}"
                );
                return;
            }
        };
        let devices: Vec<Option<Device>> =
            self.uuids.iter().map(|uuid| find(&nvml, uuid)).collect();
        while let Some(clients) = self.next() {
            self.look(&nvml, &devices, &clients);
        }
    }

    /// Waits for the polling interval, or for the first client, and returns the clients. `None`: the thread must end.
    fn next(&mut self) -> Option<Vec<Present>> {
        let (state, changed) = &*self.shared;
        let mut state = state.lock();
        let until = Instant::now() + LOOK;
        loop {
            if state.ending {
                return None;
            }
            forget_ended(&mut state);
            if state.clients.is_empty() {
                changed.wait(&mut state);
            } else if changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        let present = |(session, client): (&u64, &Client)| {
            Some(Present {
                session: *session,
                pid: client.pid,
                page: client.page.upgrade()?,
                place: client.place.upgrade()?,
            })
        };
        let clients: Vec<Present> = state.clients.iter().filter_map(present).collect();
        drop(state);
        self.seen
            .retain(|session, _| clients.iter().any(|client| client.session == *session));
        Some(clients)
    }

    fn look(&mut self, nvml: &Nvml, devices: &[Option<Device>], clients: &[Present]) {
        let now = Instant::now();
        let due: Vec<(&Present, Counts)> = clients
            .iter()
            .map(|client| (client, client.page.counts(self.uuids.len())))
            .filter(|(client, counts)| {
                let seen = self.seen.entry(client.session).or_default();
                seen.is_due(counts, now)
            })
            .collect();
        if due.is_empty() {
            return;
        }
        let used = due
            .iter()
            .fold(0, |used, (_, counts)| used | counts.devices);
        let held: Vec<HashMap<u32, u64>> = devices
            .iter()
            .enumerate()
            .map(|(ordinal, device)| match device {
                Some(device) if used >> ordinal & 1 != 0 => {
                    nvml.held(*device).unwrap_or_else(|error| {
                        tracing::debug!("device {ordinal}: {error}");
                        HashMap::new()
                    })
                }
                _ => HashMap::new(),
            })
            .collect();
        for (client, counts) in due {
            let Some(seen) = self.seen.get_mut(&client.session) else {
                continue;
            };
            seen.asked = Some(now);
            if client.page.counts(self.uuids.len()) != counts {
                // It is unknown which of the two counts NVML's result includes.
                seen.settled = false;
                continue;
            }
            let before = seen.overhead;
            let pid = client.pid as u32;
            seen.take(counts, |device| {
                let held = held.get(device).and_then(|held| held.get(&pid));
                held.copied().unwrap_or(0)
            });
            for (device, (before, now)) in before.into_iter().zip(seen.overhead).enumerate() {
                if now != before {
                    client.page.set_overhead(device, now);
                    client.place.change(device, before, now);
                }
            }
        }
    }
}

/// Finds a device by its UUID as reported by the driver: a whole device or a MIG device.
fn find(nvml: &Nvml, uuid: &[u8; 16]) -> Option<Device> {
    let name = CUuuid(*uuid).to_string();
    let part = name.replacen("GPU-", "MIG-", 1);
    let found = nvml.device(&name).or_else(|_| nvml.device(&part));
    found
        .inspect_err(|error| tracing::info!("NVML does not know device {name}: {error}"))
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(devices: u32, held: u64) -> Counts {
        let mut counts = Counts {
            devices,
            ..Counts::default()
        };
        counts.held[0] = held;
        counts
    }

    #[test]
    fn a_client_is_asked_about_when_its_page_has_changed() {
        let mut seen = Seen::default();
        let now = Instant::now();
        assert!(!seen.is_due(&counts(0, 0), now), "it uses no device");
        assert!(seen.is_due(&counts(1, 0), now));
        seen.asked = Some(now);
        seen.take(counts(1, 0), |_| 300);
        assert_eq!(seen.overhead[..2], [300, 0]);
        let soon = now + Duration::from_millis(500);
        assert!(!seen.is_due(&counts(1, 100), soon), "not so often");
        assert!(seen.is_due(&counts(3, 100), soon), "another device");
        // Until the result is the same twice.
        let later = now + INTERVAL;
        assert!(seen.is_due(&counts(1, 0), later));
        seen.take(counts(1, 0), |_| 300);
        assert!(!seen.is_due(&counts(1, 0), later + INTERVAL));
        assert!(seen.is_due(&counts(1, 7), later + INTERVAL));
    }

    #[test]
    fn what_is_counted_is_taken_off() {
        let mut seen = Seen::default();
        seen.take(counts(1, 100), |_| 350);
        assert_eq!(seen.overhead[0], 250);
        // A total below its own count, or no total at all.
        seen.take(counts(1, 100), |_| 50);
        assert_eq!(seen.overhead[0], 0);
        seen.take(counts(1, u64::MAX), |_| 50);
        seen.take(counts(2, 0), |_| 50);
        assert_eq!(seen.overhead[..2], [0, 50]);
    }
}
