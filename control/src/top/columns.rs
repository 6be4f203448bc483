//! The table: its columns, and the summary line above it.

use super::{Client, Look, Waiting};

/// A width in which every column has room.
pub const WHOLE: usize = 217;

/// One column.
struct Column {
    head: &'static str,
    width: usize,
    /// Smallest line width at which the column is shown.
    from: usize,
    text: fn(&Client) -> String,
}

const fn column(
    head: &'static str,
    width: usize,
    from: usize,
    text: fn(&Client) -> String,
) -> Column {
    Column {
        head,
        width,
        from,
        text,
    }
}

const COLUMNS: &[Column] = &[
    column("PID", 7, 0, |client| client.pid.to_string()),
    column("USER", 8, 0, |client| {
        let uid = || client.uid.to_string();
        client.user.clone().unwrap_or_else(uid)
    }),
    column("MODE", 6, 0, |client| known(client.mode.clone())),
    column("DEV", 3, 0, |client| client.device.to_string()),
    column("GPU%", 5, 0, |client| tenths(client.held_percentage)),
    column("THR%", 5, 94, |client| {
        tenths(client.active_thread_percentage)
    }),
    column("MEMORY", 6, 0, |client| bytes(client.memory)),
    column("LIMIT", 6, 101, |client| bytes(client.memory_limit)),
    column("LAUNCH/S", 8, 0, |client| {
        known(client.launches_per_second.map(|rate| format!("{rate:.0}")))
    }),
    column("QUEUE", 5, 0, |client| known(client.queued)),
    column("WAIT%", 5, 0, |client| tenths(client.waited_percentage)),
    column("GATE%", 5, 80, |client| tenths(client.gate_percentage)),
    column("CTX", 3, 105, |client| known(client.device_context)),
    column("LVL", 3, 109, |client| known(client.level)),
    column("SHARE%", 6, 116, |client| {
        tenths(client.device_share_percentage)
    }),
    column("DWAIT%", 6, 123, |client| {
        tenths(client.device_wait_percentage)
    }),
    column("MWAIT%", 6, 130, |client| {
        tenths(client.memory_wait_percentage)
    }),
    column("HELD", 7, 146, |client| time(client.held_ms)),
    column("WAITED", 7, 146, |client| time(client.waited_ms)),
    column("MANAGED", 7, 154, |client| {
        bytes(client.managed_bytes_per_second.map(|rate| rate as u64))
    }),
    column("AWAITS", 15, 170, |client| {
        let pids = client.device_waits_for.iter().flatten();
        let text = pids.map(i32::to_string).collect::<Vec<_>>().join(",");
        known(Some(text).filter(|text| !text.is_empty()))
    }),
    column("GATED", 7, 194, |client| time(client.gate_ms)),
    column("BLOCKERS", 15, 194, |client| {
        let blockers = client.gate_blockers.as_ref();
        known(
            blockers
                .filter(|text| !text.is_empty())
                .map(|text| text.replace(' ', ",")),
        )
    }),
];

fn known(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

fn tenths(value: Option<f64>) -> String {
    known(value.map(|value| format!("{value:.1}")))
}

/// With three digits: `1.25G`, `312M`.
fn bytes(value: Option<u64>) -> String {
    let Some(bytes) = value else {
        return "-".into();
    };
    let mut amount = bytes as f64;
    for unit in ["B", "K", "M", "G"] {
        if amount < 999.5 {
            return digits(amount, unit, bytes < 1000);
        }
        amount /= 1024.0;
    }
    digits(amount, "T", false)
}

fn digits(amount: f64, unit: &str, whole: bool) -> String {
    match amount {
        amount if whole || amount >= 99.95 => format!("{amount:.0}{unit}"),
        amount if amount >= 9.995 => format!("{amount:.1}{unit}"),
        amount => format!("{amount:.2}{unit}"),
    }
}

/// Milliseconds as seconds, minutes or hours.
fn time(milliseconds: Option<f64>) -> String {
    let Some(seconds) = milliseconds.map(|milliseconds| milliseconds / 1e3) else {
        return "-".into();
    };
    match seconds {
        seconds if seconds < 100.0 => format!("{seconds:.2}s"),
        seconds if seconds < 6000.0 => format!("{:.1}m", seconds / 60.0),
        seconds => format!("{:.1}h", seconds / 3600.0),
    }
}

/// The program's file name; its directory would leave no room for that.
fn program(client: &Client) -> &str {
    let name = client.command.rsplit('/').next().unwrap_or_default();
    if name.is_empty() {
        &client.command
    } else {
        name
    }
}

/// The table for lines of `width` characters, header first.
pub fn table(look: &Look, width: usize) -> Vec<String> {
    let columns: Vec<&Column> = COLUMNS
        .iter()
        .filter(|column| width >= column.from)
        .collect();
    let header = columns
        .iter()
        .map(|column| cell(column, column.head))
        .chain(["PROGRAM".to_owned()]);
    let header = header.collect::<Vec<_>>().join(" ");
    let row = |client: &Client| {
        let cells = columns
            .iter()
            .map(|column| cell(column, &(column.text)(client)));
        let cells = cells.chain([program(client).to_owned()]);
        cells.collect::<Vec<_>>().join(" ")
    };
    let rows = look.clients.iter().map(row);
    std::iter::once(header)
        .chain(rows)
        .chain(look.waiting.iter().map(wait))
        .map(|line| line.chars().take(width).collect())
        .collect()
}

/// The line of a client that waits for a server.
fn wait(client: &Waiting) -> String {
    let Waiting {
        pid,
        user,
        uid,
        command,
        waits_for,
    } = client;
    let user = user.clone().unwrap_or_else(|| uid.to_string());
    format!("{pid:>7} {user:<8} waiting: {waits_for} {command}")
}

/// Aligns numbers right and names left. Text that is too long is cut, so that the columns stay aligned.
fn cell(column: &Column, text: &str) -> String {
    let width = column.width;
    let text: String = text.chars().take(width).collect();
    match column.head {
        "USER" | "MODE" => format!("{text:<width$}"),
        _ => format!("{text:>width$}"),
    }
}

/// The line above the table.
pub fn summary(look: &Look) -> String {
    let mut clients: Vec<_> = look
        .clients
        .iter()
        .map(|client| (client.server, client.id, client.launches_per_second))
        .collect();
    clients.sort_by_key(|(server, id, _)| (*server, *id));
    clients.dedup_by_key(|(server, id, _)| (*server, *id));
    let mut servers: Vec<i32> = clients.iter().map(|(server, ..)| *server).collect();
    servers.dedup();
    // An empty sum would be -0.
    let rate = clients
        .iter()
        .filter_map(|(_, _, rate)| *rate)
        .fold(0.0, |sum, rate| sum + rate);
    let memory: u64 = look.clients.iter().filter_map(|client| client.memory).sum();
    let count = |number: usize, what: &str| {
        let plural = if number == 1 { "" } else { "s" };
        format!("{number} {what}{plural}")
    };
    format!(
        "{}  {}, {}  {rate:.0} launches/s  {} of device memory  in {:.1} s",
        look.time,
        count(clients.len(), "client"),
        count(servers.len(), "server"),
        bytes(Some(memory)),
        look.interval
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_and_times_have_few_digits() {
        let amounts: Vec<String> = [0, 999, 1000, 1 << 20, 5 << 29, 100 << 30, u64::MAX]
            .iter()
            .map(|value| bytes(Some(*value)))
            .collect();
        let expected = ["0B", "999B", "0.98K", "1.00M", "2.50G", "100G", "16777216T"];
        assert_eq!(amounts, expected);
        let times = [0.0, 99_990.0, 600_000.0, 36_000_000.0].map(|ms| time(Some(ms)));
        assert_eq!(times, ["0.00s", "99.99s", "10.0m", "10.0h"]);
        assert_eq!((bytes(None), time(None)), ("-".into(), "-".into()));
    }

    #[test]
    fn who_waits_at_the_gate_has_blockers() {
        let row = |client: Client| {
            let look = Look {
                time: "12:00:00".into(),
                interval: 1.0,
                clients: vec![client],
                waiting: Vec::new(),
                at: None,
            };
            let rows = table(&look, WHOLE);
            let cells = |line: &str| -> Vec<String> {
                line.split_whitespace().map(str::to_owned).collect()
            };
            let heads = cells(&rows[0]);
            let of = |head: &str| heads.iter().position(|one| one == head).expect("a column");
            let found = cells(&rows[1]);
            ["GATE%", "CTX", "GATED", "BLOCKERS"].map(|head| found[of(head)].clone())
        };
        let waits = Client {
            gate_ms: Some(1500.0),
            gate_percentage: Some(75.0),
            gate_blockers: Some("7 8 left".into()),
            device_context: Some(2),
            user: Some("root".into()),
            ..Client::default()
        };
        assert_eq!(row(waits.clone()), ["75.0", "2", "1.50s", "7,8,left"]);
        let passed = Client {
            gate_blockers: Some(String::new()),
            device_context: Some(1),
            ..waits.clone()
        };
        assert_eq!(row(passed), ["75.0", "1", "1.50s", "-"]);
        let direct = Client {
            user: waits.user,
            ..Client::default()
        };
        assert_eq!(row(direct), ["-"; 4]);
    }

    #[test]
    fn levels_and_shares_are_of_proxy_mode() {
        let cells = |level, device_share_percentage| {
            let client = Client {
                level,
                device_share_percentage,
                ..Client::default()
            };
            let text = |head: &str| {
                let column = COLUMNS.iter().find(|column| column.head == head);
                (column.expect("a column").text)(&client)
            };
            [text("LVL"), text("SHARE%")]
        };
        assert_eq!(cells(Some(1), Some(33.3)), ["1", "33.3"]);
        assert_eq!(cells(Some(0), None), ["0", "-"]);
        assert_eq!(cells(None, None), ["-", "-"]);
    }

    #[test]
    fn clients_that_had_the_device_are_named() {
        let cells = |device_wait_percentage, pids: Option<Vec<i32>>| {
            let client = Client {
                device_wait_percentage,
                device_waits_for: pids,
                ..Client::default()
            };
            ["DWAIT%", "AWAITS"].map(|head| {
                let column = COLUMNS.iter().find(|column| column.head == head);
                (column.expect("a column").text)(&client)
            })
        };
        assert_eq!(cells(Some(50.0), Some(vec![7, 8])), ["50.0", "7,8"]);
        assert_eq!(cells(Some(0.0), Some(vec![])), ["0.0", "-"]);
        assert_eq!(cells(None, None), ["-", "-"]);
    }

    #[test]
    fn managed_memory_that_moves_is_told_per_second() {
        let column = COLUMNS.iter().find(|column| column.head == "MANAGED");
        let text = |managed_bytes_per_second| {
            (column.expect("a column").text)(&Client {
                managed_bytes_per_second,
                ..Client::default()
            })
        };
        assert_eq!(text(Some(2.5 * f64::from(1 << 20))), "2.50M");
        assert_eq!((text(Some(0.0)), text(None)), ("0B".into(), "-".into()));
    }

    #[test]
    fn a_narrow_table_has_fewer_columns() {
        let look = Look {
            time: "12:00:00".into(),
            interval: 1.0,
            clients: vec![Client {
                pid: 7,
                uid: 1000,
                command: "/opt/bin/train".into(),
                ..Client::default()
            }],
            waiting: Vec::new(),
            at: None,
        };
        let whole = table(&look, WHOLE);
        assert!(whole[0].contains("THR%") && whole[0].contains("WAITED"));
        assert!(whole[1].ends_with(" train"), "{whole:?}");
        let narrow = table(&look, 80);
        assert!(!narrow[0].contains("THR%") && narrow[0].ends_with("PROGRAM"));
        assert!(narrow[1].ends_with(" train"), "{narrow:?}");
        assert!(table(&look, 10).iter().all(|line| line.len() <= 10));
        let shown = |width, head: &str| table(&look, width)[0].contains(head);
        for (width, head) in [
            (80, "GATE%"),
            (105, "CTX"),
            (109, "LVL"),
            (116, "SHARE%"),
            (123, "DWAIT%"),
            (130, "MWAIT%"),
            (146, "WAITED"),
            (154, "MANAGED"),
            (170, "AWAITS"),
            (194, "BLOCKERS"),
        ] {
            assert!(shown(width, head) && !shown(width - 1, head), "{head}");
        }
        let words: Vec<&str> = whole[1].split_whitespace().collect();
        assert_eq!(words[..4], ["7", "1000", "-", "0"]);
    }
}
