//! A client that is refused, or has to wait, says so on standard error, if mps-run has started it.

use mpsshim_tests::artifacts::{artifact, driver};
use mpsshim_tests::control_daemon::{Place, as_user, two_users, wait_until};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::programs::{Running, client, finish};
use mpsshim_tests::scene::{control, daemon, daemon_with};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// A client under mps-run, in whose environment nothing says whether there are notices.
fn under_mps_run(place: &Place, options: &[&str]) -> Command {
    let mut command = place.command("mps-run");
    command
        .env_remove("MPSSHIM_NOTICES")
        .env("MPSSHIM_CUDA_LIBRARY", driver())
        .arg("--shim")
        .arg(artifact("libmpsshim.so"))
        .args(options)
        .arg(artifact("client"))
        .args(["work", "1"]);
    command
}

#[test]
fn a_refused_client_says_who_refuses_and_why() {
    let place = daemon_with(&[("MPSSHIM_SERVER", "/bin/false")]);
    let owner = match place.uid() {
        0 => "root".to_owned(),
        uid => format!("user {uid}"),
    };
    let done = finish(&mut under_mps_run(&place, &[]));
    let line = format!(
        "mpsshim: daemon in {}, of {owner}: no session (CUDA_ERROR_MPS_CONNECTION_FAILED (805)): no server can be \
         started; server.log says why; see docs/troubleshooting.md\n",
        place.pipe().display()
    );
    assert_eq!((done.code, done.err.as_str()), (1, line.as_str()));
    // Neither without mps-run nor with --quiet.
    for mut silent in [
        under_mps_run(&place, &["--quiet"]),
        client(&place, &["work", "1"]),
    ] {
        let done = finish(&mut silent);
        assert_eq!((done.code, done.err.as_str()), (1, ""));
    }
}

#[test]
fn a_client_of_a_full_server_is_told_how_to_make_room() {
    let place = daemon_with(&[("MPSSHIM_MAX_CLIENTS", "1")]);
    let mut first = client(&place, &["idle"]);
    let first = Running::start_until(&mut first, "ready");
    let done = finish(&mut under_mps_run(&place, &[]));
    for said in [
        "(808)",
        "the server has as many clients as it may",
        "raise MPSSHIM_MAX_CLIENTS for the daemon",
    ] {
        assert!(done.err.contains(said), "{}", done.err);
    }
    assert_eq!(done.err.lines().count(), 1, "{}", done.err);
    first.kill();
}

#[test]
fn a_client_behind_another_user_is_told_for_whom_it_waits() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon();
    let occupies = as_user(one, || Peer::connect(&control(&place)).expect("peer"));
    let waits = Running::start(under_mps_run(&place, &[]).uid(two).gid(two));
    wait_until("it has been told", || {
        let log = place.log("control.log");
        log.contains("waits for a session")
    });
    let rows = place.ps_with_waiting();
    let row = rows
        .iter()
        .find(|row| row["pid"] == waits.pid().to_string());
    let row = row.expect("a row");
    assert_eq!(row["state"], "waiting");
    assert!(row["waits_for"].contains("serves user"), "{row:?}");
    let top = place.control(&["top", "--once", "--interval", "0.1"]).out;
    assert!(top.contains("waiting: server "), "{top}");
    drop(occupies);
    let done = waits.finish(PATIENCE);
    assert_eq!(done.code, 0, "{}", done.err);
    let said = "the program waits for a session: server ";
    assert_eq!(done.err.matches(said).count(), 1, "{}", done.err);
    assert!(done.err.contains(", who has 1 client;"), "{}", done.err);
}
