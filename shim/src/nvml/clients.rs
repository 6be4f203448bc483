//! The daemon's clients, as `mps-control ps` lists them for this user.
//!
//! Their list is kept for [`FRESH`], so that programs that poll do not load the daemon. The connection is kept open.

use std::io::Cursor;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use csv::StringRecord;
use parking_lot::Mutex;

use super::connection::Connection;
use crate::{log, settings};

/// How long a list is used.
const FRESH: Duration = Duration::from_millis(100);
/// How long the daemon may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a daemon is not asked again that did not answer, and that was not there.
const PAUSE: Duration = Duration::from_secs(5);
const ABSENT: Duration = Duration::from_secs(1);
const COMMAND: &str = "ps --format=csv";

/// A client on a device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Client {
    pub pid: u32,
    /// The process id of its server.
    pub server: u32,
    /// Bytes of the device that it holds.
    pub memory: u64,
    /// Percentage of the device that it had lately, estimated.
    pub share: Option<f64>,
}

/// All clients in proxy mode at one time.
#[derive(PartialEq, Debug)]
pub struct Snapshot {
    /// With the UUIDs of their devices.
    clients: Vec<(String, Client)>,
    /// Microseconds since 1970.
    pub time: u64,
}

impl Snapshot {
    /// The clients on a device.
    pub fn on(&self, uuid: &str) -> Vec<Client> {
        let is_it = |other: &str| digits(other).eq_ignore_ascii_case(digits(uuid));
        let on_it = self.clients.iter().filter(|(uuid, _)| is_it(uuid));
        on_it.map(|(_, client)| *client).collect()
    }
}

/// A UUID without `GPU-` or `MIG-`.
fn digits(uuid: &str) -> &str {
    let prefixes = ["GPU-", "MIG-"];
    let rest = prefixes.iter().find_map(|prefix| uuid.strip_prefix(prefix));
    rest.unwrap_or(uuid)
}

/// The last list, and the connection.
struct Known {
    snapshot: Option<Arc<Snapshot>>,
    /// Until when the list, or the lack of one, is used.
    until: Option<Instant>,
    connection: Option<Connection>,
}

static KNOWN: Mutex<Known> = Mutex::new(Known {
    snapshot: None,
    until: None,
    connection: None,
});

/// The clients now. `None`: there is no daemon, or it does not answer in time.
pub fn snapshot() -> Option<Arc<Snapshot>> {
    // In a forked child the lock may stay locked.
    let mut known = KNOWN.try_lock_for(2 * PATIENCE)?;
    if known.until.is_none_or(|until| until <= Instant::now()) {
        log::init();
        let (snapshot, wait) = match read(&mut known.connection) {
            Ok(snapshot) => (Some(Arc::new(snapshot)), FRESH),
            Err(error) => {
                if error == Error::NoAnswer {
                    tracing::info!("no list of clients from the daemon: NVML's own processes only");
                }
                known.connection = None;
                (None, error.wait())
            }
        };
        known.snapshot = snapshot;
        known.until = Some(Instant::now() + wait);
    }
    known.snapshot.clone()
}

/// Why there is no list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// No daemon is used.
    Absent,
    /// It does not answer in time, or not with a list.
    NoAnswer,
}

impl Error {
    /// How long the daemon is not asked again.
    fn wait(self) -> Duration {
        match self {
            Error::Absent => ABSENT,
            Error::NoAnswer => PAUSE,
        }
    }
}

/// Asks the daemon.
fn read(connection: &mut Option<Connection>) -> Result<Snapshot, Error> {
    if settings::disabled() {
        return Err(Error::Absent);
    }
    let deadline = Instant::now() + PATIENCE;
    // The daemon may have closed an idle connection, or be another one by now.
    if let Some(old) = connection.take().and_then(Connection::if_intact)
        && let Ok(text) = old.ask(COMMAND, deadline)
    {
        *connection = Some(old);
        return Ok(snapshot_of(&text));
    }
    if Instant::now() >= deadline {
        return Err(Error::NoAnswer);
    }
    let new = Connection::open(PATIENCE)?;
    if !new.has_our_process_ids() {
        tracing::info!("the daemon is in another PID namespace: NVML's own processes only");
        return Err(Error::Absent);
    }
    let text = new.ask(COMMAND, deadline)?;
    *connection = Some(new);
    Ok(snapshot_of(&text))
}

/// The clients in proxy mode of a list as csv. A client is on the devices of which it holds memory, or else on its
/// server's only device.
fn snapshot_of(text: &str) -> Snapshot {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut rows: Vec<Row> = Vec::new();
    let mut lines = records(text);
    let header = lines.next().unwrap_or_default();
    for line in lines {
        let field = |name: &str| {
            let column = header.iter().position(|column| column == name)?;
            line.get(column)
        };
        let Some(row) = Row::of(field) else {
            continue;
        };
        match rows.iter_mut().find(|other| other.is_same(&row)) {
            // Another session of the process.
            Some(other) => other.add(&row),
            None => rows.push(row),
        }
    }
    let devices = |row: &Row| {
        let of_it = rows.iter().filter(|other| {
            (other.client.pid, other.client.server) == (row.client.pid, row.client.server)
        });
        (
            of_it.clone().count(),
            of_it.filter(|other| other.client.memory > 0).count(),
        )
    };
    let clients = rows.iter().filter_map(|row| {
        let (all, used) = devices(row);
        let mut client = row.client;
        // Memory that was moved to host memory is known for all devices together.
        if used == 1 && client.memory > 0 {
            client.memory = client.memory.saturating_sub(row.moved_out);
        }
        let is_on_it = all == 1 || row.client.memory > 0;
        is_on_it.then(|| (row.uuid.clone(), client))
    });
    Snapshot {
        clients: clients.collect(),
        time: time.map_or(0, |time| time.as_micros() as u64),
    }
}

/// A client and one of its server's devices.
struct Row {
    uuid: String,
    client: Client,
    /// Bytes of its memory that are in host memory, over all devices.
    moved_out: u64,
}

impl Row {
    /// `None`: a client in direct mode, one without a server, or one whose server has not answered.
    fn of<'a>(field: impl Fn(&str) -> Option<&'a str>) -> Option<Row> {
        if field("mode")? != "proxy" {
            return None;
        }
        Some(Row {
            uuid: field("uuid")?.to_owned(),
            client: Client {
                pid: field("pid")?.parse().ok()?,
                server: field("server")?.parse().ok()?,
                memory: field("memory")?.parse().ok()?,
                share: field("device_share_percentage").and_then(|share| share.parse().ok()),
            },
            moved_out: field("moved_out_memory")
                .and_then(|bytes| bytes.parse().ok())
                .unwrap_or(0),
        })
    }

    fn is_same(&self, other: &Row) -> bool {
        let key = |row: &Row| (row.client.pid, row.client.server);
        key(self) == key(other) && self.uuid == other.uuid
    }

    fn add(&mut self, other: &Row) {
        self.client.memory = self.client.memory.saturating_add(other.client.memory);
        self.moved_out = self.moved_out.saturating_add(other.moved_out);
        let shares = [self.client.share, other.client.share];
        self.client.share = shares.into_iter().flatten().reduce(|one, two| one + two);
    }
}

/// The records of a text in csv, up to a malformed one.
fn records(text: &str) -> impl Iterator<Item = StringRecord> {
    let mut reader = csv::ReaderBuilder::new();
    let reader = reader.has_headers(false).flexible(true);
    let records = reader.from_reader(Cursor::new(text.to_owned()));
    records.into_records().map_while(Result::ok)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    const HEADER: &str =
        "pid,server,uuid,command,memory,mode,device_share_percentage,moved_out_memory";

    fn listed(rows: &[&str]) -> Snapshot {
        snapshot_of(&format!("{HEADER}\n{}\n", rows.join("\n")))
    }

    /// A client of server 10.
    pub fn client(pid: u32, memory: u64, share: Option<f64>) -> Client {
        Client {
            pid,
            server: 10,
            memory,
            share,
        }
    }

    #[test]
    fn csv_is_read_as_it_is_written() {
        let text = "a,b\n\"x,\"\"y\"\"\n\",\n1,2";
        let found: Vec<StringRecord> = records(text).collect();
        let found: Vec<Vec<&str>> = found.iter().map(|one| one.iter().collect()).collect();
        assert_eq!(found, [["a", "b"], ["x,\"y\"\n", ""], ["1", "2"]]);
        assert!(records("").next().is_none());
    }

    #[test]
    fn clients_in_proxy_mode_are_on_the_devices_that_they_use() {
        let snapshot = listed(&[
            "1,10,GPU-aa,\"a, b\",100,proxy,12.5,0",
            "2,10,GPU-aa,c,0,proxy,,0",
            "3,10,GPU-aa,c,100,direct,,",
            "4,10,GPU-aa,c,,,,",
            "5,,,c,,,,",
            // Another session of the first.
            "1,10,GPU-aa,a,5,proxy,,0",
        ]);
        assert_eq!(
            snapshot.on("GPU-AA"),
            [client(1, 105, Some(12.5)), client(2, 0, None)]
        );
        assert!(snapshot.on("GPU-bb").is_empty());
        assert!(snapshot_of("").on("GPU-aa").is_empty());
        assert!(snapshot_of("pid,server\n1,2\n").clients.is_empty());
    }

    #[test]
    fn of_several_devices_the_ones_with_memory_count() {
        let snapshot = listed(&[
            "1,10,GPU-aa,c,100,proxy,,30",
            "1,10,GPU-bb,c,0,proxy,,30",
            "2,10,GPU-aa,c,0,proxy,,0",
            "2,10,GPU-bb,c,0,proxy,,0",
            // It is not known of which device memory is in host memory.
            "3,10,GPU-aa,c,50,proxy,,30",
            "3,10,GPU-bb,c,50,proxy,,30",
        ]);
        assert_eq!(
            snapshot.on("GPU-aa"),
            [client(1, 70, None), client(3, 50, None)]
        );
        assert_eq!(snapshot.on("GPU-bb"), [client(3, 50, None)]);
    }
}
