//! Lists as csv and json.

use mpsshim_tests::control_daemon::{Client, Place, wait_until};
use mpsshim_tests::programs::{Running, client};
use mpsshim_tests::scene::daemon;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn list(place: &Place, arguments: &[&str]) -> Value {
    let done = place.control(&[&["--format", "json"], arguments].concat());
    assert_eq!(done.code, 0, "{}", done.out);
    serde_json::from_str(&done.out).expect("JSON")
}

#[test]
fn what_clients_have() {
    let place = daemon();
    place.control(&["set_default_device_pinned_mem_limit", "0", "3G"]);
    place.control(&["set_default_active_thread_percentage", "33.3"]);
    assert_eq!(list(&place, &["ps"]), json!([]));
    let run = Running::start_until(&mut client(&place, &["work"]), "busy");
    let servers = list(&place, &["get_server_list"]);
    let server = servers[0]["pid"].as_i64().expect("a server").to_string();
    assert_eq!(servers[0]["state"], "ACTIVE");
    assert_eq!(servers[0]["clients"], 1);
    let weight = place.control(&["set_client_weight", &server, &run.pid().to_string(), "250"]);
    assert_eq!(weight.code, 0, "{}", weight.out);

    let rows = list(&place, &["ps"]);
    let row = &rows[0];
    assert_eq!(rows.as_array().map(Vec::len), Some(1));
    let uid = place.uid();
    let expected =
        json!({"pid": run.pid(), "id": 1, "device": 0, "uid": uid, "priority": 0, "weight": 250});
    for (name, value) in expected.as_object().expect("an object") {
        assert_eq!(&row[name], value, "{name}");
    }
    assert_eq!(row["server"].to_string(), server);
    assert_eq!(row["active_thread_percentage"], 33.3);
    assert_eq!(row["memory_limit"], 3_u64 << 30);
    assert!(row["memory"].as_u64() > Some(0), "{row}");
    assert!(row["pinned_host_memory"].is_u64() && row["namespace"].is_u64());
    if uid == 0 {
        assert_eq!(row["user"], "root");
    }
    // The same with a comma.
    let csv = place
        .control_stdin("ps --format=csv\nget_server_list\n")
        .out;
    let lines: Vec<&str> = csv.lines().collect();
    assert!(lines[0].starts_with("pid,id,server,device,uuid,namespace,command,uid,user,"));
    assert!(lines[1].starts_with(&format!("{},1,{server},0,GPU-", run.pid())));
    assert_eq!(lines[2..], [server.as_str()]);

    for (arguments, key, value) in [
        (
            &["get_server_status", &server][..],
            "state",
            json!("ACTIVE"),
        ),
        (&["get_client_list", &server], "pid", json!(run.pid())),
        (&["get_device_client_list"], "pid", json!(run.pid())),
        (&["device_query"], "server", Value::Null),
        (
            &["get_default_active_thread_percentage"],
            "active_thread_percentage",
            json!(33.3),
        ),
        (
            &["get_active_thread_percentage_all"],
            "active_thread_percentage",
            json!(33.3),
        ),
        (
            &["get_default_device_pinned_mem_limit", "0"],
            "memory_limit",
            json!(3_u64 << 30),
        ),
        (&["get_default_client_priority"], "priority", json!(0)),
        (
            &["get_client_weight", &server, &run.pid().to_string()],
            "weight",
            json!(250),
        ),
    ] {
        assert_eq!(list(&place, arguments)[0][key], value, "{arguments:?}");
    }
    run.kill();
}

#[test]
fn a_server_that_does_not_answer_leaves_fields_empty() {
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    let server = client.welcome().expect("welcome").server_pid as i32;
    wait_until("the client is listed", || {
        !place.control(&["ps"]).out.is_empty()
    });
    kill(Pid::from_raw(server), Signal::SIGSTOP).expect("stop");
    let begun = Instant::now();
    let done = place.control(&["--format", "json", "ps"]);
    let took = begun.elapsed();
    let note =
        format!("Server {server} has not answered in 2 s: what its clients have is left out\n");
    assert_eq!((done.code, done.err), (0, note));
    let rows: Value = serde_json::from_str(&done.out).expect("JSON");
    assert!(took >= Duration::from_secs(2), "{took:?}");
    assert_eq!(rows[0]["pid"], std::process::id());
    assert_eq!(rows[0]["weight"], Value::Null);
    let weight = place.control(&[
        "get_client_weight",
        &server.to_string(),
        &std::process::id().to_string(),
    ]);
    assert_eq!(
        (weight.code, weight.out),
        (1, format!("Server {server} does not answer\n"))
    );
    kill(Pid::from_raw(server), Signal::SIGCONT).expect("go on");
    assert_eq!(list(&place, &["ps"])[0]["weight"], 100);
}

#[test]
fn formats_before_and_behind_a_command() {
    let place = Place::with_daemon();
    let expected = "[{\"priority\":0}]\n";
    for arguments in [
        &["--format", "json", "get_default_client_priority"][..],
        &["get_default_client_priority", "--format", "json"],
        &["get_default_client_priority", "--format=json"],
        &[
            "--format=csv",
            "get_default_client_priority",
            "--format=json",
        ],
    ] {
        let done = place.control(arguments);
        assert_eq!(
            (done.code, done.out.as_str()),
            (0, expected),
            "{arguments:?}"
        );
    }
    for line in ["--format json", "--format=json"] {
        let done = place.control_stdin(&format!("get_default_client_priority {line}\n"));
        assert_eq!((done.code, done.out.as_str()), (0, expected), "{line}");
    }
    let done = place.control(&["get_client_list", "7", "--format", "csv"]);
    assert_eq!((done.code, done.out.as_str()), (1, "Server 7 not found\n"));
    // The option of the command keeps its value.
    let done = place.control(&["ps", "--format", "json", "-p", "7"]);
    assert!(!done.out.contains("expected"), "{}", done.out);
    let config = place.path().join("none.toml").display().to_string();
    let done = place.control(&["get_server_list", "--config", &config]);
    assert_eq!((done.code, done.out.as_str()), (1, ""));
    assert!(done.err.contains(&config), "{}", done.err);
}

#[test]
fn a_form_that_there_is_not() {
    let place = Place::with_daemon();
    assert_eq!(place.control(&["--format", "xml", "ps"]).code, 2);
    let done = place.control(&["ps", "--format=xml"]);
    assert_eq!((done.code, done.out.as_str()), (2, ""));
    assert!(
        done.err.contains("[possible values: table, csv, json]"),
        "{}",
        done.err
    );
    let done = place.control_stdin("ps --format xml\nps --format\n");
    assert_eq!(done.code, 0);
    assert!(
        done.out
            .contains("\"--format=xml\": a format is table, csv or json")
            && done.out.contains("--format takes table, csv or json"),
        "{}",
        done.out
    );
    // A command without a list takes none.
    let done = place.control(&["quit", "--format", "json"]);
    assert_eq!(done.code, 1);
    assert!(done.out.contains("unexpected \"--format\""), "{}", done.out);
    // What lists nothing is done as ever.
    assert_eq!(
        place
            .control(&["--format", "json", "set_default_client_priority", "1"])
            .out,
        ""
    );
    assert_eq!(place.control(&["--format", "json", "quit"]).code, 0);
}
