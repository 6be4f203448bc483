//! Users who would fill the disk with the daemon's logs.

use mpsshim_control::seqpacket;
use mpsshim_tests::control_daemon::{Client, Place, as_user, other_user, wait_until};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

/// More than a stranger's burst of lines takes, bytes.
const BOUND: u64 = 2 << 20;

fn length(place: &Place, name: &str) -> u64 {
    let path = place.pipe().join("logs").join(name);
    fs::metadata(path).map_or(0, |found| found.len())
}

/// What the operator does is in the log, whatever else is.
fn own_lines_are_there(place: &Place) {
    for number in 0..20 {
        let command = format!("get_server_status {number}");
        place.control(&[&command]);
        assert!(
            place
                .log("control.log")
                .contains(&format!("Cmd:{command}\n"))
        );
    }
}

#[test]
fn commands_do_not_fill_the_disk() {
    let Some(user) = other_user() else { return };
    let place = Place::with_daemon();
    as_user(user, || {
        let path = place.pipe().join("control");
        let connection = seqpacket::connect(&path).expect("connect");
        let mut answer = vec![0; 1 << 16];
        for round in 0..3000 {
            // What each byte is printed as takes five more.
            let mut line = vec![1; 4000];
            line.extend(format!("{round}").bytes());
            let packet = [&b"MPSU"[..], &line].concat();
            seqpacket::send(connection.as_fd(), &packet, None).expect("send");
            let len = seqpacket::receive(connection.as_fd(), &mut answer).expect("receive");
            assert!(len > 0, "closed");
        }
    });
    assert!(length(&place, "control.log") < BOUND);
    own_lines_are_there(&place);
    wait_until("the log says that there was more", || {
        place
            .log("control.log")
            .contains(&format!("lines of user {user} suppressed"))
    });
}

#[test]
fn connections_do_not_fill_the_disk() {
    let Some(user) = other_user() else { return };
    let place = Place::with_daemon();
    as_user(user, || {
        for round in 0..10_000_u32 {
            let connection = seqpacket::connect(&place.pipe().join("control")).expect("connect");
            let packet = [&b"MPSX"[..], &round.to_le_bytes()].concat();
            // The daemon may have closed it to make room.
            let _ = seqpacket::send(connection.as_fd(), &packet, None);
        }
    });
    own_lines_are_there(&place);
    assert!(length(&place, "control.log") < BOUND);
    assert!(place.log("control.log").lines().count() < 5000);
}

#[test]
fn the_log_pipe_does_not_fill_the_disk() {
    let place = Place::with_daemon();
    let mut pipe = OpenOptions::new()
        .write(true)
        .open(place.pipe().join("log"))
        .expect("pipe");
    writeln!(pipe, "a line of its own").expect("write");
    wait_until("it is there", || {
        place.log("control.log").contains("Other")
            && place.log("control.log").contains("a line of its own\n")
    });
    for _ in 0..256 {
        pipe.write_all(&[b'\n'; 4096]).expect("write");
        pipe.write_all(&[1; 4096]).expect("write");
    }
    wait_until("the log says that there was more", || {
        place
            .log("control.log")
            .contains("lines of the log pipe suppressed")
    });
    own_lines_are_there(&place);
    assert!(length(&place, "control.log") < BOUND);
}

#[test]
fn a_log_that_is_too_long_is_set_aside() {
    let place = Place::with_daemon();
    // So that there is a server, which goes on in the new file.
    let client = Client::connect(&place);
    client.welcome().expect("welcome");
    let path = |name: &str| place.pipe().join("logs").join(name);
    for name in ["control.log", "server.log"] {
        let old = format!("{name}.old");
        assert!(!path(&old).exists());
        for round in 0..2 {
            let long = OpenOptions::new()
                .write(true)
                .custom_flags(libc::O_NOFOLLOW)
                .open(path(name))
                .expect("log");
            // Without taking any of the disk.
            long.set_len((64 << 20) + 1).expect("length");
            let inode = long.metadata().expect("metadata").ino();
            wait_until("it is set aside", || {
                place.control(&["get_server_list"]);
                fs::metadata(path(&old)).is_ok_and(|found| found.ino() == inode)
            });
            wait_until("there is another", || {
                fs::metadata(path(name)).is_ok_and(|found| found.ino() != inode)
            });
            assert!(length(&place, name) < BOUND, "round {round}");
        }
    }
    own_lines_are_there(&place);
    wait_until("the server writes there", || {
        place.log("server.log").contains("Continuing in this file")
    });
    assert!(
        place
            .log("control.log")
            .contains("had grown too long; earlier lines")
    );
}
