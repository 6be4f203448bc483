//! Limits of the clients of a server. The daemon decides them, the server enforces them; a client's environment can only
//! lower them.

use crate::bonds::Bonds;
use crate::mode::Mode;
use crate::named::{Named, UnknownNamespace};
use crate::partitions::Partitions;
use crate::policy::{OversubscriptionPolicy, SchedulingPolicy, UserWeights};
use mpsshim_proto::handshake::ClientHello;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// A share of a device's multiprocessors in hundredths of a percent: above 0, at most 10,000. A cap, not a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Percentage(u32);

impl Percentage {
    /// No limit.
    pub const ALL: Percentage = Percentage(10_000);

    /// A number of hundredths of a percent; `None` unless it is between 1 and 10,000.
    pub fn from_hundredths(hundredths: u32) -> Option<Percentage> {
        (1..=10_000)
            .contains(&hundredths)
            .then_some(Percentage(hundredths))
    }

    /// Hundredths of a percent.
    pub fn hundredths(self) -> u32 {
        self.0
    }

    /// This share of `count`, rounded down.
    pub fn of(self, count: u32) -> u32 {
        (u64::from(count) * u64::from(self.0) / 10_000) as u32
    }
}

/// Not a number above 0 and at most 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a percentage is a number above 0 and at most 100")]
pub struct NoPercentage;

impl FromStr for Percentage {
    type Err = NoPercentage;
    /// Such as `50` or `33.3`; digits beyond hundredths are cut off.
    fn from_str(text: &str) -> Result<Percentage, NoPercentage> {
        let number: f64 = text.trim().parse().map_err(|_| NoPercentage)?;
        if !(number > 0.0 && number <= 100.0) {
            return Err(NoPercentage);
        }
        // Corrects for binary fractions, so that 33.3 becomes 3,330; and rounds tiny values up to 1.
        let hundredths = (number * 100.0 + 1e-6) as u32;
        Percentage::from_hundredths(hundredths.max(1)).ok_or(NoPercentage)
    }
}

impl fmt::Display for Percentage {
    /// As NVIDIA prints it: `50.0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, hundredths) = (self.0 / 100, self.0 % 100);
        if hundredths.is_multiple_of(10) {
            write!(f, "{whole}.{}", hundredths / 10)
        } else {
            write!(f, "{whole}.{hundredths:02}")
        }
    }
}

/// How long a client in direct mode keeps its turn while others wait: 0.1 ms to 10 s. Microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Quantum(u64);

impl Quantum {
    /// Quantum of a server without a configured one.
    pub const DEFAULT: Quantum = Quantum(10_000);
    const LEAST: u64 = 100;
    const MOST: u64 = 10_000_000;

    /// A number of microseconds; `None` if it is out of range for a quantum.
    pub fn from_microseconds(microseconds: u64) -> Option<Quantum> {
        (Quantum::LEAST..=Quantum::MOST)
            .contains(&microseconds)
            .then_some(Quantum(microseconds))
    }

    /// In nanoseconds.
    pub fn nanoseconds(self) -> u64 {
        self.0 * 1_000
    }

    /// In milliseconds.
    pub fn milliseconds(self) -> f64 {
        self.0 as f64 / 1e3
    }
}

impl Default for Quantum {
    fn default() -> Quantum {
        Quantum::DEFAULT
    }
}

/// Not a number of milliseconds from 0.1 to 10000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a quantum is a number of milliseconds from 0.1 to 10000")]
pub struct NoQuantum;

impl TryFrom<u64> for Quantum {
    type Error = NoQuantum;
    fn try_from(microseconds: u64) -> Result<Quantum, NoQuantum> {
        Quantum::from_microseconds(microseconds).ok_or(NoQuantum)
    }
}

impl From<Quantum> for u64 {
    fn from(quantum: Quantum) -> u64 {
        quantum.0
    }
}

impl FromStr for Quantum {
    type Err = NoQuantum;
    /// Milliseconds, such as `10` or `2.5`; rounded to microseconds.
    fn from_str(text: &str) -> Result<Quantum, NoQuantum> {
        let milliseconds: f64 = text.trim().parse().map_err(|_| NoQuantum)?;
        if !(0.1..=10_000.0).contains(&milliseconds) {
            return Err(NoQuantum);
        }
        Quantum::from_microseconds((milliseconds * 1e3).round() as u64).ok_or(NoQuantum)
    }
}

impl fmt::Display for Quantum {
    /// Milliseconds, such as `10` or `2.5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.milliseconds().fmt(f)
    }
}

/// Device memory that a client may hold at most, or that stays on the device although others need room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryBound {
    /// It may hold no more.
    Limit,
    /// So much of it is never moved to host memory for other clients.
    Guarantee,
}

impl MemoryBound {
    /// Both.
    pub const ALL: [MemoryBound; 2] = [MemoryBound::Limit, MemoryBound::Guarantee];
}

impl fmt::Display for MemoryBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryBound::Limit => "limit",
            MemoryBound::Guarantee => "guarantee",
        })
    }
}

/// Limits of future clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Active-thread percentage.
    pub threads: Percentage,
    /// Maximum bytes of device memory of a client, by the server's ordinal. Devices without an entry have no limit.
    pub memory: BTreeMap<usize, u64>,
    /// Maximum bytes of device memory of all clients of a user together, by user id and the server's ordinal. A change
    /// applies to connected clients, too.
    #[serde(default)]
    pub user_memory: BTreeMap<u32, BTreeMap<usize, u64>>,
    /// Bytes of device memory of a client that are never moved to host memory for other clients, by the server's ordinal.
    #[serde(default)]
    pub guarantee: BTreeMap<usize, u64>,
    /// The same for each client of a user, which replaces [`Limits::guarantee`], by user id and the server's ordinal. A
    /// change applies to connected clients, too.
    #[serde(default)]
    pub user_guarantee: BTreeMap<u32, BTreeMap<usize, u64>>,
    /// Client priority: 0 normal, 1 below normal.
    pub priority: u32,
    /// How long a client in direct mode keeps its turn while others wait; a change applies to connected clients, too.
    #[serde(default)]
    pub quantum: Quantum,
    /// In which order the kernels of clients in proxy mode are served; a change applies to connected clients, too.
    #[serde(default)]
    pub scheduling: SchedulingPolicy,
    /// Whether clients in proxy mode may have more device memory together than the device has; a change applies to connected
    /// clients, too.
    #[serde(default)]
    pub oversubscription: OversubscriptionPolicy,
    /// Users' shares of the devices, which the daemon enforces; a server only tells them to the next daemon.
    #[serde(default)]
    pub user_weights: UserWeights,
    /// Static partitions; `None`: the daemon was started without them.
    #[serde(default)]
    pub partitions: Option<Partitions>,
    /// The named server whose clients these are; `None`: a user's server.
    #[serde(default)]
    pub named: Option<Box<Named>>,
}

impl Limits {
    /// These limits without those of other users, which a user's server need not know.
    pub fn of_user(&self, uid: u32) -> Limits {
        let mut limits = self.clone();
        limits.user_memory.retain(|user, _| *user == uid);
        limits.user_guarantee.retain(|user, _| *user == uid);
        limits.scheduling = limits.scheduling.of_user(uid);
        limits.oversubscription = limits.oversubscription.of_user(uid);
        limits.user_weights = limits.user_weights.of_user(uid);
        limits
    }

    /// The limits of a client in this namespace: for each one the lower of the server's and the namespace's. `None`: a client
    /// without a namespace.
    ///
    /// # Errors
    /// The server has no namespace of that name.
    pub fn in_namespace(&self, name: Option<&str>) -> Result<Cow<'_, Limits>, UnknownNamespace> {
        let Some(name) = name else {
            return Ok(Cow::Borrowed(self));
        };
        let own = self.named.as_ref().and_then(|one| one.namespaces.get(name));
        let own = own.ok_or_else(|| UnknownNamespace(name.to_owned()))?;
        let mut limits = self.clone();
        limits.threads = own
            .threads
            .map_or(limits.threads, |own| own.min(limits.threads));
        limits.priority = limits.priority.max(own.priority.unwrap_or(0));
        for (device, bytes) in &own.memory {
            let limit = limits.memory.entry(*device).or_insert(*bytes);
            *limit = (*limit).min(*bytes);
        }
        Ok(Cow::Owned(limits))
    }

    /// Limits or guarantees of a client, in bytes by the server's ordinal.
    pub fn memory_of(&self, bound: MemoryBound) -> &BTreeMap<usize, u64> {
        match bound {
            MemoryBound::Limit => &self.memory,
            MemoryBound::Guarantee => &self.guarantee,
        }
    }

    /// As [`Limits::memory_of`], to change them.
    pub fn memory_of_mut(&mut self, bound: MemoryBound) -> &mut BTreeMap<usize, u64> {
        match bound {
            MemoryBound::Limit => &mut self.memory,
            MemoryBound::Guarantee => &mut self.guarantee,
        }
    }

    /// Limits or guarantees of users, in bytes by user id and the server's ordinal.
    pub fn user_memory_of(&self, bound: MemoryBound) -> &BTreeMap<u32, BTreeMap<usize, u64>> {
        match bound {
            MemoryBound::Limit => &self.user_memory,
            MemoryBound::Guarantee => &self.user_guarantee,
        }
    }

    /// As [`Limits::user_memory_of`], to change them.
    pub fn user_memory_of_mut(
        &mut self,
        bound: MemoryBound,
    ) -> &mut BTreeMap<u32, BTreeMap<usize, u64>> {
        match bound {
            MemoryBound::Limit => &mut self.user_memory,
            MemoryBound::Guarantee => &mut self.user_guarantee,
        }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            threads: Percentage::ALL,
            memory: BTreeMap::new(),
            user_memory: BTreeMap::new(),
            guarantee: BTreeMap::new(),
            user_guarantee: BTreeMap::new(),
            priority: 0,
            quantum: Quantum::DEFAULT,
            scheduling: SchedulingPolicy::default(),
            oversubscription: OversubscriptionPolicy::default(),
            user_weights: UserWeights::default(),
            partitions: None,
            named: None,
        }
    }
}

/// Limits of a client other than memory, fixed for its lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// Active-thread percentage.
    pub threads: Percentage,
    /// Client priority: 0 normal, 1 below normal.
    pub priority: u32,
}

impl Terms {
    /// The stricter of the server's limits and the client's own request.
    pub fn new(limits: &Limits, hello: &ClientHello) -> Terms {
        let asked = Percentage::from_hundredths(hello.active_thread_centipercent);
        Terms {
            threads: limits.threads.min(asked.unwrap_or(Percentage::ALL)),
            priority: limits.priority.max(hello.priority.clamp(0, 1) as u32),
        }
    }
}

/// Default weight of a client; see [`Usage::weight`].
pub const DEFAULT_WEIGHT: u32 = 100;

/// A client's resources and limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Number of its session.
    pub session: u64,
    /// Active-thread percentage in force: the lower of the daemon's limit and the client's request.
    pub threads: Percentage,
    /// Client priority in force.
    pub priority: u32,
    /// Share of dispatch, or of turns, under contention, relative to the other clients.
    pub weight: u32,
    /// Bytes of device memory it holds, by the server's ordinal.
    pub memory: BTreeMap<usize, u64>,
    /// Bytes it may hold.
    pub memory_limit: BTreeMap<usize, u64>,
    /// Bytes of it that are never moved to host memory for other clients.
    #[serde(default)]
    pub memory_guarantee: BTreeMap<usize, u64>,
    /// Bytes of pinned host memory it holds.
    pub host: u64,
    /// Its mode.
    #[serde(default)]
    pub mode: Mode,
    /// Its turns, in direct mode.
    #[serde(default)]
    pub turns: Option<TurnUsage>,
    /// Launches of kernels and graphs; in direct mode all submissions, as last reported.
    #[serde(default)]
    pub launches: u64,
    /// Its activity, in proxy mode.
    #[serde(default)]
    pub activity: Option<Activity>,
    /// Its level, in proxy mode.
    #[serde(default)]
    pub level: Option<LevelUsage>,
    /// Its waits for its devices, in proxy mode; `None` if they are not estimated.
    #[serde(default)]
    pub device_waits: Option<DeviceWaits>,
    /// Its waits at the gate, and its context, in proxy mode.
    #[serde(default)]
    pub gate: Option<GateUsage>,
    /// Its managed memory, in proxy mode.
    #[serde(default)]
    pub managed: Option<ManagedUsage>,
    /// Reasons that bind its session to its server, in proxy mode; without any, the session continues in the next
    /// server if this server ends unexpectedly.
    #[serde(default)]
    pub bonds: Option<Bonds>,
    /// Bytes of its device memory that are in host memory now, for a client in proxy mode.
    #[serde(default)]
    pub moved_out: Option<u64>,
    /// Moves of its device memory, for a client in proxy mode.
    #[serde(default)]
    pub moves: Option<MoveUsage>,
}

impl Usage {
    /// Nanoseconds that it held its turn (in proxy mode: had work on the device), and that it waited for it.
    pub fn held_and_waited(&self) -> Option<(u64, u64)> {
        let turns = self.turns.map(|turns| (turns.held_ns, turns.waited_ns));
        let activity = |activity: Activity| (activity.held_ns, activity.waited_ns);
        turns.or(self.activity.map(activity))
    }
}

/// Activity of a client in proxy mode, done and pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Copies and memsets.
    pub copies: u64,
    /// Messages executed.
    pub messages: u64,
    /// Operations on the device not known to be complete, and messages that wait for the client.
    pub queued: u64,
    /// Bytes of messages in its ring.
    pub ring: u64,
    /// Nanoseconds in which it had work on the device, sampled.
    pub held_ns: u64,
    /// Nanoseconds in which one of its messages waited for dispatch, sampled.
    pub waited_ns: u64,
}

/// By which level a client in proxy mode is served, and its share of its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelUsage {
    /// 1 is served first; 0: its kernels are served in the order of their submission. The last one over the devices that it
    /// uses.
    pub level: u32,
    /// Part of a device that it has had in the last second, estimated, in thousandths: the greatest over the devices that
    /// it uses. `None` if that is not estimated.
    pub thousandths: Option<u32>,
}

/// Maximum number of clients named for waits for the device.
pub const MOST_AWAITED: usize = 8;

/// Times for which kernels of a client in proxy mode got less of their device than they could fill, estimated. The sum over
/// its devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceWaits {
    /// Nanoseconds that it has waited.
    pub waited_ns: u64,
    /// Process ids of the clients that had the device meanwhile, and nanoseconds that it waited for each: the longest, at
    /// most [`MOST_AWAITED`], longest first. Some may have ended.
    pub awaited: Vec<(i32, u64)>,
}

/// Maximum number of clients named for a wait at the gate.
pub const MOST_BLOCKERS: usize = 6;

/// Waits of a client in proxy mode at the gate, where calls wait until nothing is in flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateUsage {
    /// Nanoseconds that it has waited, including the current wait.
    pub waited_ns: u64,
    /// Process ids of the clients whose long kernels it is waiting for, at most [`MOST_BLOCKERS`].
    pub blockers: Vec<i32>,
    /// It is also waiting for kernels of clients that have left.
    pub blockers_left: bool,
    /// The context of its devices that it works in, from 1.
    pub device_context: u32,
}

/// Managed memory of a client in proxy mode, on all its devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManagedUsage {
    /// Bytes with home on a device.
    pub device: u64,
    /// Bytes in host memory.
    pub host: u64,
    /// Copied to the host, for the program.
    pub to_host: Moved,
    /// Copied to a device, after the program has changed it.
    pub to_device: Moved,
    /// Faults of the program's threads, counted by the client.
    pub faults: u64,
    /// Nanoseconds that threads waited for faults, counted by the client.
    pub waited_ns: u64,
}

/// Moves of a client's device memory to host memory and back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveUsage {
    /// Bytes on each device that cannot move, by the server's ordinal.
    pub fixed: BTreeMap<usize, u64>,
    /// Bytes moved to host memory so far.
    pub to_host: u64,
    /// Bytes moved back so far.
    pub to_device: u64,
    /// Nanoseconds in which the client had work, and its memory or room for more was lacking; a present wait included.
    pub waited_ns: u64,
}

/// Copies in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes copied.
    pub bytes: u64,
    /// Number of copies.
    pub copies: u64,
}

impl Moved {
    /// Counts one copy.
    pub fn add(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.copies += 1;
    }
}

/// Turns of a client in direct mode on its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnUsage {
    /// Turns.
    pub turns: u64,
    /// Nanoseconds that it held turns, drains included.
    pub held_ns: u64,
    /// Nanoseconds that it waited for turns.
    pub waited_ns: u64,
    /// It was asked for its turn over a second ago and has not given it up.
    pub not_draining: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Scheduling;

    #[test]
    fn percentages_are_read_and_printed() {
        for (text, printed) in [
            ("50", "50.0"),
            ("33.3", "33.3"),
            ("12.34567", "12.34"),
            ("100", "100.0"),
            ("0.001", "0.01"),
            (" 7 ", "7.0"),
        ] {
            let read: Percentage = text.parse().expect(text);
            assert_eq!(read.to_string(), printed);
        }
        for text in ["", "abc", "0", "-5", "100.01", "nan", "inf", "5%"] {
            assert_eq!(text.parse::<Percentage>(), Err(NoPercentage), "{text}");
        }
        assert_eq!(Percentage::from_hundredths(10_001), None);
    }

    #[test]
    fn quanta_are_read_and_printed() {
        for (text, nanoseconds, printed) in [
            ("10", 10_000_000, "10"),
            ("0.1", 100_000, "0.1"),
            ("2.5", 2_500_000, "2.5"),
            ("10000", 10_000_000_000, "10000"),
            (" 1e1 ", 10_000_000, "10"),
        ] {
            let quantum: Quantum = text.parse().expect(text);
            assert_eq!(
                (quantum.nanoseconds(), quantum.to_string().as_str()),
                (nanoseconds, printed)
            );
        }
        for text in ["", "0", "-1", "0.05", "10001", "1e30", "nan", "inf", "10ms"] {
            assert_eq!(text.parse::<Quantum>(), Err(NoQuantum), "{text}");
        }
    }

    #[test]
    fn limits_of_an_older_daemon_have_the_usual_quantum_and_scheduling() {
        let json = r#"{"threads":10000,"memory":{},"priority":0}"#;
        assert_eq!(
            serde_json::from_str::<Limits>(json).expect("limits"),
            Limits::default()
        );
        let json = r#"{"threads":10000,"memory":{},"priority":0,"quantum":0}"#;
        assert!(serde_json::from_str::<Limits>(json).is_err());
    }

    #[test]
    fn a_user_s_server_knows_nothing_of_other_users() {
        let mut limits = Limits::default();
        limits.scheduling.default = Scheduling::Fifo;
        for uid in [7, 8] {
            for bound in MemoryBound::ALL {
                limits
                    .user_memory_of_mut(bound)
                    .insert(uid, [(0, 1)].into());
            }
            limits.scheduling.users.insert(uid, Scheduling::Auto);
        }
        let own = limits.of_user(7);
        for bound in MemoryBound::ALL {
            let users = own.user_memory_of(bound).keys();
            assert_eq!(users.collect::<Vec<_>>(), [&7]);
        }
        assert_eq!(own.scheduling.users.keys().collect::<Vec<_>>(), [&7]);
        assert_eq!(own.scheduling.default, Scheduling::Fifo);
    }

    #[test]
    fn a_percentage_is_rounded_down() {
        let of = |text: &str, count| text.parse::<Percentage>().expect(text).of(count);
        assert_eq!(
            [
                of("33", 132),
                of("25", 132),
                of("75", 132),
                of("100", 132),
                of("0.5", 132)
            ],
            [43, 33, 99, 132, 0]
        );
    }
}
