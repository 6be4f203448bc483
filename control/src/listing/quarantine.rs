//! `quarantine list`: the quarantined programs.

use super::{Listing, user_name};
use crate::quarantine::Entry;
use chrono::{DateTime, Local};
use serde_json::json;
use std::fmt::Write as _;
use std::time::UNIX_EPOCH;

/// A row for each program, with the process id of its server, if it has one; nothing, not even a header, without programs.
pub fn quarantine<'a>(programs: impl Iterator<Item = (&'a Entry, Option<i32>)>) -> Listing {
    let mut table = String::new();
    let mut rows = Vec::new();
    for (entry, server) in programs {
        let Entry {
            program,
            since,
            faults,
            clean,
        } = entry;
        let time = DateTime::<Local>::from(*since).format("%Y-%m-%d %H:%M:%S");
        let pid = server.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let _ = writeln!(
            table,
            "{:<12}{time:<21}{faults:<8}{clean:<7}{pid:<10}{}",
            program.uid, program.name
        );
        let seconds = since.duration_since(UNIX_EPOCH).unwrap_or_default();
        rows.push(vec![
            json!(program.uid),
            user_name(program.uid),
            json!(program.name),
            json!(seconds.as_secs()),
            json!(faults),
            json!(clean),
            json!(server),
        ]);
    }
    if !table.is_empty() {
        let header = format!(
            "{:<12}{:<21}{:<8}{:<7}{:<10}PROGRAM\n",
            "UID", "SINCE", "FAULTS", "CLEAN", "SERVER"
        );
        table.insert_str(0, &header);
    }
    Listing {
        table,
        columns: &[
            "uid",
            "user",
            "program",
            "since",
            "faults",
            "clean_runs",
            "server",
        ],
        rows,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::*;
    use crate::program::Program;
    use serde_json::Value;
    use std::time::Duration;

    #[test]
    fn programs_are_listed_with_their_servers() {
        let entry = Entry {
            program: Program::named(4_000_000, "/opt/a b"),
            since: UNIX_EPOCH + Duration::from_secs(1_800_000_000),
            faults: 2,
            clean: 1,
        };
        let rows = [(&entry, Some(77)), (&entry, None)];
        let listing = quarantine(rows.into_iter());
        let table = listing.print(Format::Table);
        let lines: Vec<&str> = table.lines().collect();
        let head = "UID         SINCE                FAULTS  CLEAN  SERVER    PROGRAM";
        assert_eq!(lines[0], head);
        assert!(
            lines[1].ends_with("2       1      77        /opt/a b"),
            "{table}"
        );
        assert!(
            lines[2].ends_with("2       1      -         /opt/a b"),
            "{table}"
        );
        let json: Value = serde_json::from_str(&listing.print(Format::Json)).expect("JSON");
        let row = json!({
            "uid": 4_000_000, "user": null, "program": "/opt/a b", "since": 1_800_000_000,
            "faults": 2, "clean_runs": 1, "server": 77
        });
        assert_eq!(json[0], row);
        assert_eq!(quarantine(std::iter::empty()).print(Format::Table), "");
    }
}
