//! Descriptors whose `close` blocks, sent to the daemon: nobody but their user notices.

use mpsshim_control::seqpacket;
use mpsshim_tests::control_daemon::{Client, Place, as_user, other_user, wait_until};
use mpsshim_tests::lingering::lingering;
use mpsshim_tests::programs::Running;
use nix::sys::signal::Signal;
use std::fs;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

fn connect(place: &Place, socket: &str) -> OwnedFd {
    seqpacket::connect(&place.pipe().join(socket)).expect("connect")
}

fn stop(place: &Place) {
    let pid = place.daemon_pid();
    place.signal_daemon(Signal::SIGSTOP);
    wait_until("it has stopped", || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('T'))
    });
}

/// The daemon answers, and hands clients to servers.
fn daemon_goes_on(place: &Place) {
    let mut command = place.command("mps-control");
    let running = Running::start(command.arg("get_default_active_thread_percentage"));
    let done = running.finish(Duration::from_secs(60));
    assert_eq!(
        (done.code, done.out.as_str()),
        (0, "100.0\n"),
        "{}",
        done.err
    );
    Client::connect(place).welcome().expect("welcome");
}

/// What sends such a descriptor, with more of them than one user has closers.
fn unharmed(send: impl Fn(&Place, &TcpStream) -> OwnedFd + Sync) {
    let Some(user) = other_user() else { return };
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    client.welcome().expect("welcome");
    let mut listeners = Vec::new();
    for _ in 0..20 {
        let (listener, stream) = lingering();
        listeners.push(listener);
        // Ours is closed while the packet still holds another, which the daemon's close is then the last of.
        stop(&place);
        let connection = as_user(user, || send(&place, &stream));
        drop(stream);
        place.signal_daemon(Signal::SIGCONT);
        daemon_goes_on(&place);
        drop(connection);
        daemon_goes_on(&place);
    }
    assert!(client.is_connected());
}

#[test]
fn sent_with_a_command() {
    unharmed(|place, stream| {
        let connection = connect(place, "control");
        let packet = b"MPSUget_server_list";
        seqpacket::send(connection.as_fd(), packet, Some(stream.as_fd())).expect("send");
        connection
    });
}

#[test]
fn sent_to_the_privileged_socket() {
    unharmed(|place, stream| {
        // Who may not connect there sends it where everyone may.
        let path = place.pipe().join("control_privileged");
        let connection = seqpacket::connect(&path).unwrap_or_else(|_| connect(place, "control"));
        let packet = b"MPSUtrace start /tmp/never";
        seqpacket::send(connection.as_fd(), packet, Some(stream.as_fd())).expect("send");
        connection
    });
}

#[test]
fn sent_with_a_hello_that_is_refused() {
    unharmed(|place, stream| {
        let connection = connect(place, "control");
        seqpacket::send(connection.as_fd(), b"MPSC", Some(stream.as_fd())).expect("send");
        connection
    });
}

#[test]
fn left_in_the_queue_of_a_connection() {
    unharmed(|place, stream| {
        let connection = connect(place, "control");
        // Refused and closed, with what follows unread.
        for packet in [&b"nothing known"[..], b"MPSUhelp"] {
            // It may be closed by then.
            let _ = seqpacket::send(connection.as_fd(), packet, Some(stream.as_fd()));
        }
        connection
    });
}
