//! `mps-control -d --metrics`: what a scrape gets.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Done, Place, wait_until};
use mpsshim_tests::programs::{Running, client};
use mpsshim_tests::scene::daemon_with_options;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::Instant;

const FREE: &str = "127.0.0.1:0";

/// Where the daemon says that its metrics are.
fn address(place: &Place) -> String {
    let log = place.log("control.log");
    let (_, rest) = log
        .split_once("Metrics are at http://")
        .expect("an address");
    let (address, _) = rest.split_once("/metrics\n").expect("a path");
    address.to_owned()
}

/// Head and text of the answer to these bytes.
fn request(address: &str, bytes: &[u8]) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.write_all(bytes).expect("send");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    let (head, text) = answer.split_once("\r\n\r\n").expect("a head");
    (head.to_owned(), text.to_owned())
}

fn scrape(address: &str) -> String {
    let (head, text) = request(address, b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("Content-Type: application/openmetrics-text; version=1.0.0"));
    assert!(head.contains(&format!("Content-Length: {}", text.len())));
    text
}

/// A sample: name, labels, value.
#[derive(Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Sample {
    fn read(line: &str) -> Sample {
        let (series, value) = line.rsplit_once(' ').expect("a value");
        let (name, mut rest) = match series.split_once('{') {
            Some((name, labels)) => (name, labels.strip_suffix('}').expect("an end")),
            None => (series, ""),
        };
        let mut labels = BTreeMap::new();
        while !rest.is_empty() {
            let (label, behind) = rest.split_once("=\"").expect("a label");
            let mut text = String::new();
            let mut characters = behind.char_indices();
            let end = loop {
                match characters.next().expect("a quote") {
                    (at, '"') => break at,
                    (_, '\\') => match characters.next().expect("a character").1 {
                        'n' => text.push('\n'),
                        other @ ('"' | '\\') => text.push(other),
                        other => panic!("\\{other}"),
                    },
                    (_, other) => text.push(other),
                }
            };
            assert_eq!(labels.insert(label.to_owned(), text), None, "{line}");
            rest = &behind[end + 1..];
            rest = rest.strip_prefix(',').unwrap_or(rest);
        }
        Sample {
            name: name.to_owned(),
            labels,
            value: value.parse().expect("a number"),
        }
    }
}

/// Reads the text, and looks that it keeps to the format and to Prometheus' conventions.
fn strictly(text: &str) -> Vec<Sample> {
    let (body, eof) = text.split_at(text.len() - "# EOF\n".len());
    assert_eq!(eof, "# EOF\n");
    let word = |text: &str| {
        let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        !text.is_empty()
            && text.chars().all(valid)
            && !text.starts_with(|c: char| c.is_ascii_digit())
    };
    let (mut families, mut series) = (BTreeSet::new(), BTreeSet::new());
    let (mut samples, mut family) = (Vec::new(), (String::new(), String::new()));
    let mut described = BTreeSet::new();
    for line in body.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let [kind, name, rest] =
                <[&str; 3]>::try_from(comment.splitn(3, ' ').collect::<Vec<_>>())
                    .expect("a kind, a name and a text");
            match kind {
                "HELP" => {
                    assert!(families.insert(name.to_owned()), "{name} comes twice");
                    assert!(word(name) && name.starts_with("mpsshim_"), "{name}");
                    family = (name.to_owned(), String::new());
                }
                "TYPE" => {
                    assert_eq!(name, family.0);
                    assert!(["counter", "gauge"].contains(&rest), "{line}");
                    rest.clone_into(&mut family.1);
                    described.insert(name.to_owned());
                }
                "UNIT" => assert!(
                    name == family.0 && name.ends_with(&format!("_{rest}")),
                    "{line}"
                ),
                _ => panic!("{line}"),
            }
            continue;
        }
        let sample = Sample::read(line);
        let expected = match family.1.as_str() {
            "counter" => format!("{}_total", family.0),
            _ => family.0.clone(),
        };
        assert_eq!(sample.name, expected, "{line}");
        assert!(sample.labels.keys().all(|label| word(label)), "{line}");
        assert!(sample.value.is_finite() && sample.value >= 0.0, "{line}");
        let (key, _) = line.rsplit_once(' ').expect("a value");
        assert!(series.insert(key.to_owned()), "{key} comes twice");
        samples.push(sample);
    }
    assert_eq!(families, described);
    samples
}

/// Has Python's parser read the text, where there is one.
fn python_reads(text: &str) {
    const PARSE: &str = "import sys\n\
        from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse\n\
        print(sum(len(family.samples) for family in parse(sys.stdin.read())))";
    for python in ["python3", "/usr/bin/python3"] {
        let has = Command::new(python)
            .args(["-c", "import prometheus_client"])
            .output();
        if !has.is_ok_and(|output| output.status.success()) {
            continue;
        }
        let mut parser = Command::new(python)
            .args(["-c", PARSE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("run");
        parser
            .stdin
            .take()
            .expect("piped")
            .write_all(text.as_bytes())
            .expect("write");
        let output = parser.wait_with_output().expect("wait");
        assert!(output.status.success(), "{text}");
        let count: usize = String::from_utf8_lossy(&output.stdout)
            .trim()
            .parse()
            .expect("a number");
        return assert_eq!(count, strictly(text).len());
    }
    eprintln!("no prometheus_client for Python: its parser is not asked");
}

#[test]
fn a_scrape_has_what_there_is() {
    let place = daemon_with_options(&["-d", "--metrics", FREE], &[]);
    let address = address(&place);
    let of = |samples: &[Sample], name: &str, labels: &[(&str, &str)]| -> Option<f64> {
        let fits = |sample: &&Sample| {
            let has = |(label, value): &(&str, &str)| {
                sample
                    .labels
                    .get(*label)
                    .is_some_and(|found| found == value)
            };
            sample.name == name && labels.iter().all(has)
        };
        samples.iter().find(fits).map(|sample| sample.value)
    };
    let empty = strictly(&scrape(&address));
    let version = [("version", env!("CARGO_PKG_VERSION"))];
    assert_eq!(of(&empty, "mpsshim_build_info", &version), Some(1.0));
    assert!(of(&empty, "mpsshim_device_size_bytes", &[("device", "0")]) > Some(0.0));
    assert_eq!(
        of(&empty, "mpsshim_device_clients", &[("device", "0")]),
        Some(0.0)
    );

    let uid = place.uid().to_string();
    place.control(&["set_default_device_pinned_mem_limit", "0", "3G"]);
    let mut direct = client(&place, &["launch"]);
    direct.env("MPSSHIM_MODE", "direct");
    let proxied = Running::start_until(&mut client(&place, &["launch"]), "busy");
    let direct = Running::start_until(&mut direct, "busy");
    let pids = [proxied.pid().to_string(), direct.pid().to_string()];
    let mut before: Vec<f64> = Vec::new();
    // A client in direct mode tells what it has submitted at the next question.
    wait_until("both go on", || {
        let text = scrape(&address);
        let samples = strictly(&text);
        let mut now = Vec::new();
        for (pid, mode) in pids.iter().zip(["proxy", "direct"]) {
            let labels = [("pid", pid.as_str()), ("mode", mode), ("uid", &uid)];
            let value = |name: &str| {
                of(&samples, name, &labels).unwrap_or_else(|| panic!("{name} in {text}"))
            };
            now.extend([
                value("mpsshim_client_launches_total"),
                value("mpsshim_client_held_seconds_total"),
            ]);
            assert!(value("mpsshim_client_memory_bytes") > 0.0, "{text}");
            assert_eq!(
                value("mpsshim_client_memory_limit_bytes"),
                f64::from(3 << 10) * f64::from(1 << 20)
            );
            assert_eq!(value("mpsshim_client_active_threads_ratio"), 1.0);
        }
        let grown = !before.is_empty() && before.iter().zip(&now).all(|(before, now)| now > before);
        assert!(
            before.iter().zip(&now).all(|(before, now)| now >= before),
            "a counter has shrunk"
        );
        before = now;
        grown
    });
    let text = scrape(&address);
    let samples = strictly(&text);
    let [user, device] = [("uid", uid.as_str()), ("device", "0")];
    assert_eq!(of(&samples, "mpsshim_user_clients", &[user]), Some(2.0));
    assert_eq!(
        of(&samples, "mpsshim_user_waiting_clients", &[user]),
        Some(0.0)
    );
    assert_eq!(
        of(
            &samples,
            "mpsshim_server_clients",
            &[("state", "ACTIVE"), user]
        ),
        Some(2.0)
    );
    assert_eq!(of(&samples, "mpsshim_device_clients", &[device]), Some(2.0));
    let held = of(&samples, "mpsshim_device_memory_bytes", &[device]);
    assert!(held > Some(0.0) && held == of(&samples, "mpsshim_user_memory_bytes", &[user]));
    let of_proxied = [("pid", pids[0].as_str())];
    let share = of(&samples, "mpsshim_client_device_share_ratio", &of_proxied);
    assert!(share >= Some(0.0) && share <= Some(1.0), "{text}");
    assert_eq!(of(&samples, "mpsshim_client_level", &of_proxied), Some(0.0));
    // No other client has the device in proxy mode.
    let waited = "mpsshim_client_device_wait_seconds_total";
    assert_eq!(of(&samples, waited, &of_proxied), Some(0.0));
    let managed = "mpsshim_client_managed_device_memory_bytes";
    assert_eq!(of(&samples, managed, &of_proxied), Some(0.0));
    // There is no such thing in the other mode.
    let of_direct = [("pid", pids[1].as_str())];
    assert_eq!(of(&samples, "mpsshim_client_level", &of_direct), None);
    assert_eq!(of(&samples, waited, &of_direct), None);
    assert_eq!(of(&samples, managed, &of_direct), None);
    assert_eq!(
        of(&samples, "mpsshim_client_messages_total", &of_direct),
        None
    );
    assert!(of(&samples, "mpsshim_client_turns_total", &of_direct) >= Some(1.0));
    python_reads(&text);
    // Questions that are asked on and on are logged once.
    assert_eq!(
        place
            .log("control.log")
            .matches("Cmd:ps --format=json")
            .count(),
        1
    );
    direct.kill();
    proxied.kill();
    wait_until("who has gone is not there", || {
        !scrape(&address).contains("mpsshim_client_launches_total{")
    });
}

#[test]
fn requests_that_make_no_sense() {
    let place = Place::with_daemon_options(&["-d", "--metrics", FREE], &[]);
    let address = address(&place);
    for (bytes, status) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "404 Not Found"),
        (
            b"DELETE /metrics HTTP/1.1\r\n\r\n",
            "405 Method Not Allowed",
        ),
        (b"\x16\x03\x01 no TLS here\r\n\r\n", "400 Bad Request"),
    ] {
        let (head, _) = request(&address, bytes);
        assert!(
            head.starts_with(&format!("HTTP/1.1 {status}\r\n")),
            "{head}"
        );
    }
    let (head, text) = request(&address, b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK") && text.is_empty());
    // Who says nothing is not waited for long, and holds up scrapes only.
    let silent = TcpStream::connect(&address).expect("connect");
    let mut endless = TcpStream::connect(&address).expect("connect");
    endless.write_all(&[b'x'; 16 << 10]).expect("send");
    assert_eq!(place.control(&["get_server_list"]).code, 0);
    let began = Instant::now();
    strictly(&scrape(&address));
    assert!(began.elapsed() < PATIENCE);
    drop(silent);
}

#[test]
fn an_address_that_cannot_be_used_is_said() {
    let taken = TcpListener::bind(FREE).expect("bind");
    let taken = taken.local_addr().expect("an address").to_string();
    let place = Place::new();
    for start in ["-d", "-f"] {
        let done = place.control(&[start, "--metrics", &taken]);
        assert_eq!((done.code, done.out.as_str()), (1, ""));
        let why = format!(
            "cannot listen for metrics at {taken} (MPSSHIM_METRICS or --metrics): Address already in use"
        );
        assert!(done.err.contains(&why), "{}", done.err);
    }
    for address in ["9400", "localhost", "127.0.0.1:70000", "nowhere:1"] {
        let done = place.control(&["-d", "--metrics", address]);
        assert_eq!(done.code, 2, "{address}");
        let mut command = place.command("mps-control");
        let output = command.arg("-d").env("MPSSHIM_METRICS", address).output();
        let done: Done = output.expect("run").into();
        let why = format!(
            "MPSSHIM_METRICS={address} is not an address and a port, such as 127.0.0.1:9400\n"
        );
        assert_eq!((done.code, done.err), (1, why));
    }
    let done = place.control(&["--metrics", FREE, "get_server_list"]);
    assert_eq!(
        (done.code, done.err.contains("--metrics is a daemon option")),
        (2, true)
    );
    assert!(!place.pipe().join("mps-control.pid").exists());
    // By default there is none.
    let place = Place::with_daemon();
    assert!(!place.log("control.log").contains("Metrics"));
}
