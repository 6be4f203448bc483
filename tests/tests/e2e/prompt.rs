//! mps-control on a terminal, its manual page and completions.

use crate::terminal::Session;
use mpsshim_tests::control_daemon::Place;
use std::fs;
use std::os::unix::fs::PermissionsExt;

#[test]
fn a_terminal_has_a_prompt_completion_and_history() {
    let place = Place::with_daemon();
    let mut session = Session::start(&place, &[]);
    session.shows("mps> ");
    session.types("get_default_client_p\t\r");
    session.shows("get_default_client_priority");
    session.shows("\n0\r\n");
    session.settles();
    session.types("frobnicate\r");
    session.shows("Unknown command \"frobnicate\"");
    // What is broken off is not done, and the session goes on.
    session.settles();
    session.types("quit\u{3}");
    session.settles();
    session.types("get_server_status 7\r");
    session.shows("Server 7 not found");
    session.settles();
    session.types("\u{4}");
    assert!(session.program.wait().expect("wait").success());
    let history = place.path().join("state/mpsshim/history");
    let kept = fs::read_to_string(&history).expect("history");
    let lines: Vec<&str> = kept.lines().filter(|line| !line.starts_with('#')).collect();
    let expected = [
        "get_default_client_priority",
        "frobnicate",
        "get_server_status 7",
    ];
    assert_eq!(lines, expected);
    let mode = fs::metadata(&history)
        .expect("history")
        .permissions()
        .mode();
    assert_eq!(mode & 0o077, 0, "nobody else's business");

    // The next one has it.
    let mut session = Session::start(&place, &["--format", "json"]);
    session.shows("mps> ");
    session.types("\u{1b}[A\u{1b}[A\u{1b}[A\r");
    session.shows("[{\"priority\":0}]");
    session.settles();
    session.types("quit\r");
    session.shows("End the daemon? [y/N] ");
    session.settles();
    session.types("y\r");
    assert!(session.program.wait().expect("wait").success());
    assert_eq!(place.control(&["get_server_list"]).code, 1);
}

#[test]
fn the_prompt_is_left_without_ending_the_daemon() {
    let place = Place::with_daemon();
    let mut session = Session::start(&place, &[]);
    session.shows("mps> ");
    // Neither another answer than yes nor Ctrl-C or Ctrl-D ends the daemon, or the prompt.
    for (quit, answer) in [
        ("quit\r", "\r"),
        ("quit -t 5\r", "n\r"),
        ("quit\r", "\u{3}"),
        ("quit\r", "\u{4}"),
    ] {
        session.screen.lock().expect("screen").clear();
        session.types(quit);
        session.shows("End the daemon? [y/N] ");
        session.settles();
        session.types(answer);
        session.shows("mps> ");
        session.settles();
    }
    session.types("get_default_client_priority\r");
    session.shows("\n0\r\n");
    session.settles();
    session.types("exit\r");
    assert!(session.program.wait().expect("wait").success());
    assert_eq!(place.control(&["get_server_list"]).code, 0);
    assert!(!place.log("control.log").contains("Cmd:quit"));
    // On standard input neither is special.
    let done = place.control_stdin("exit\nquit\n");
    assert_eq!(
        (done.code, done.out.as_str()),
        (0, "Unknown command \"exit\"\n")
    );
    assert_eq!(place.control(&["get_server_list"]).code, 1);
}

#[test]
fn a_history_that_cannot_be_written_is_none() {
    let place = Place::with_daemon();
    fs::write(place.path().join("state"), "in the way").expect("write");
    let mut session = Session::start(&place, &[]);
    session.shows("mps> ");
    session.types("get_default_client_priority\r");
    session.shows("\n0\r\n");
}

#[test]
fn no_terminal_no_prompt() {
    let place = Place::with_daemon();
    let done = place.control_stdin("get_default_client_priority\r\n\n  \nfrobnicate\n");
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    assert_eq!(done.out, "0\nUnknown command \"frobnicate\"\n");
}

#[test]
fn programs_describe_themselves() {
    let place = Place::new();
    let run = |program: &str, arguments: &[&str]| {
        let output = place.command(program).args(arguments).output();
        let output = output.expect("run");
        assert!(output.status.success(), "{program} {arguments:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    for program in ["mps-control", "mps-run", "mps-server"] {
        let page = run(program, &["--man"]);
        assert!(page.contains(&format!(".TH {program} 1")), "{page}");
        for shell in ["bash", "zsh", "fish"] {
            assert!(run(program, &["--completions", shell]).contains(program));
        }
    }
    assert_eq!(
        place
            .command("mps-control")
            .args(["--completions", "sh"])
            .output()
            .expect("run")
            .status
            .code(),
        Some(2)
    );
}

#[test]
fn devices_are_looked_for_at_the_start() {
    let place = Place::with_daemon_options(&["-d", "-q"], &[]);
    assert!(place.control(&["device_query"]).out.contains("Fake device"));
    assert_eq!(place.control(&["-q", "get_server_list"]).code, 2);
}
