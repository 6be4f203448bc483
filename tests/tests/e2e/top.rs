//! `mps-control top`: tables, JSON, and the screen.

use crate::terminal::Session;
use mpsshim_tests::control_daemon::Place;
use mpsshim_tests::programs::{Running, client};
use mpsshim_tests::scene::daemon;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

/// Two clients that launch and synchronize on and on, one in each mode.
fn busy(place: &Place) -> [Running; 2] {
    let mut direct = client(place, &["launch"]);
    direct.env("MPSSHIM_MODE", "direct");
    [client(place, &["launch"]), direct]
        .map(|mut command| Running::start_until(&mut command, "busy"))
}

/// The clients of a look, in the order of these processes.
fn clients(line: &str, of: &[Running]) -> Vec<Value> {
    let look: Value = serde_json::from_str(line).expect("JSON");
    assert!(look["interval"].as_f64() > Some(0.0), "{look}");
    let clients = look["clients"].as_array().expect("clients").clone();
    let find = |running: &Running| clients.iter().find(|client| client["pid"] == running.pid());
    of.iter()
        .map(|running| find(running).expect("a client").clone())
        .collect()
}

#[test]
fn what_clients_do_is_told() {
    let place = daemon();
    let both = busy(&place);
    let mut top = place.command("mps-control");
    top.args(["top", "--json", "--interval", "0.3"]);
    let mut top = top.stdout(Stdio::piped()).spawn().expect("run");
    let mut lines = BufReader::new(top.stdout.take().expect("piped")).lines();
    // A client in direct mode tells what it has submitted when it is asked the next time.
    let mut look = || lines.nth(2).expect("a line").expect("UTF-8");
    let found = clients(&look(), &both);
    let modes: Vec<&Value> = found.iter().map(|client| &client["mode"]).collect();
    assert_eq!(modes, ["proxy", "direct"]);
    for client in &found {
        let number = |name: &str| client[name].as_f64().unwrap_or(-1.0);
        assert!(number("launches_per_second") > 1.0, "{client}");
        assert!(
            number("launches") >= 1.0 && number("held_ms") > 0.0,
            "{client}"
        );
        let held = number("held_percentage");
        assert!(held > 0.0 && held <= 100.0, "{client}");
        assert_eq!(client["active_thread_percentage"], 100.0);
        assert!(
            client["command"]
                .as_str()
                .is_some_and(|name| name.ends_with("client"))
        );
    }
    let proxied = &found[0];
    assert!(proxied["memory"].as_u64() > Some(0), "{proxied}");
    assert!(proxied["queued"].is_u64(), "{proxied}");
    let share = proxied["device_share_percentage"].as_f64();
    assert!(share >= Some(0.0) && share <= Some(100.0), "{proxied}");
    // It is alone in its server's contexts.
    assert_eq!(
        (&proxied["level"], &found[1]["level"]),
        (&Value::from(0), &Value::Null)
    );
    // What launches no more has no rate.
    let [first, second] = both;
    second.kill();
    let idle = Running::start_until(&mut client(&place, &["idle"]), "ready");
    let found = clients(&look(), &[first, idle]);
    assert_eq!(found[1]["launches_per_second"], 0.0);
    assert_eq!(found[1]["held_percentage"], 0.0);
    assert_eq!(found[1]["queued"], 0);
    top.kill().expect("kill");
    top.wait().expect("wait");
    // The daemon writes a question that is asked on and on once.
    let asked = place
        .log("control.log")
        .matches("Cmd:ps --format=json")
        .count();
    assert_eq!(asked, 1);
}

#[test]
fn a_table_without_a_terminal() {
    let place = daemon();
    let both = busy(&place);
    let done = place.control(&["top", "--once", "--interval", "0.5", "--sort", "pid"]);
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    let lines: Vec<&str> = done.out.lines().collect();
    assert_eq!(lines.len(), 4, "{}", done.out);
    assert!(lines[0].contains("2 clients, 1 server"), "{}", lines[0]);
    let head: Vec<&str> = lines[1].split_whitespace().collect();
    assert_eq!(
        head.join(" "),
        "PID USER MODE DEV GPU% THR% MEMORY LIMIT LAUNCH/S QUEUE WAIT% GATE% CTX LVL SHARE% DWAIT% MWAIT% HELD WAITED MANAGED AWAITS GATED BLOCKERS PROGRAM"
    );
    let mut pids: Vec<u32> = both.iter().map(Running::pid).collect();
    pids.sort_unstable();
    for (line, pid) in lines[2..].iter().zip(pids) {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words.len(), head.len(), "{line}");
        assert_eq!((words[0], words[23]), (pid.to_string().as_str(), "client"));
    }
    // Among other commands too.
    let done = place.control_stdin("top --once --interval 0.1\nget_default_client_priority\n");
    assert!(
        done.out.contains("2 clients") && done.out.ends_with("\n0\n"),
        "{}",
        done.out
    );
}

#[test]
fn the_screen_and_its_keys() {
    let place = daemon();
    let run = Running::start_until(&mut client(&place, &["launch"]), "busy");
    let mut session = Session::start(&place, &["top", "--interval", "0.2"]);
    // The other screen, so that the terminal is as before in the end.
    session.shows("\u{1b}[?1049h");
    session.displays("1 client, 1 server");
    session.displays("LAUNCH/S");
    session.displays(&run.pid().to_string());
    session.displays("sorted by gpu; h: help, q: quit");
    session.types("m");
    session.displays("sorted by memory");
    session.types("?");
    session.displays("sort by device memory");
    session.types("h");
    run.kill();
    session.displays("0 clients");
    session.types("q");
    assert!(session.program.wait().expect("wait").success());
    session.shows("\u{1b}[?1049l");
    // Within the prompt; Ctrl-C ends it, not the prompt.
    let mut session = Session::start(&place, &[]);
    session.shows("mps> ");
    session.types("top\r");
    session.displays("sorted by");
    session.types("\u{3}");
    session.shows("\u{1b}[?1049l");
    session.settles();
    session.types("get_default_client_priority\r");
    session.shows("\n0\r\n");
}

#[test]
fn a_daemon_that_goes_and_comes_is_said() {
    let place = Place::with_daemon();
    let mut session = Session::start(&place, &["top", "--interval", "0.1"]);
    session.displays("0 clients");
    assert_eq!(place.control(&["quit"]).code, 0);
    session.displays("Cannot find MPS control daemon process");
    assert_eq!(place.control(&["-d"]).code, 0);
    session.displays("0 clients");
    session.types("q");
    assert!(session.program.wait().expect("wait").success());
}

#[test]
fn what_makes_no_sense_is_said() {
    let place = Place::new();
    let done = place.control(&["top", "--once"]);
    assert_eq!(
        (done.code, done.err.as_str()),
        (1, "Cannot find MPS control daemon process\n")
    );
    for wrong in [
        &["top", "--interval", "0"][..],
        &["top", "--interval", "soon"],
        &["top", "--sort", "colour"],
        &["top", "1"],
    ] {
        let done = place.control(wrong);
        assert_eq!(done.code, 2, "{wrong:?}");
        assert!(done.err.contains("--help"), "{}", done.err);
    }
}
