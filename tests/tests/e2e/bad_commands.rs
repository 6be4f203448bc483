//! Commands that make no sense: an error line each, and nobody else notices.

use mpsshim_control::commands::TABLE;
use mpsshim_control::seqpacket;
use mpsshim_control::settings::Settings;
use mpsshim_control::ui::Ui;
use mpsshim_tests::control_daemon::{Client, Place, wait_until};
use std::ffi::OsString;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::Stdio;
use std::time::{Duration, Instant};

fn ui(place: &Place) -> Ui {
    let pipe = OsString::from(place.pipe());
    let lookup = |name: &str| (name == "MPSSHIM_PIPE_DIRECTORY").then(|| pipe.clone());
    let settings = Settings::from_lookup(lookup, true).expect("settings");
    Ui::connect(&settings).expect("connect")
}

#[test]
fn every_command_with_arguments_that_make_no_sense() {
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    let server = client.welcome().expect("welcome").server_pid;
    let mut ui = ui(&place);
    let nonsense = [
        "-1",
        "0",
        "99999999999999999999999999",
        "abc",
        "\u{0}",
        "\u{fffd}\u{1b}[2J",
        "--",
        "-p",
        "-p -p",
        "-uid",
        "-uid -1",
        "-uid 99999999999",
        "-t",
        "-t -1",
        "-f -f",
        "1 2 3 4 5 6 7",
        "0 0G",
        "9 1G",
        "1 1 0",
        "--format",
        "--format=",
        "--format=xml",
        "--csv --csv --csv x y",
        "; reboot",
        "$(reboot)",
        "../../etc/passwd",
    ];
    let is_list =
        |name: &str| name.starts_with("get_") || ["ps", "device_query", "users"].contains(&name);
    for row in TABLE.iter().filter(|row| row.name != "help") {
        for arguments in nonsense {
            if (row.name, arguments) == ("set_default_client_priority", "0") {
                continue;
            }
            let line = format!("{} {arguments}", row.name);
            let answer = ui.command(&line).expect(&line);
            // A few happen to make sense to a command that lists.
            assert!(!answer.ok || is_list(row.name), "{line}: {}", answer.text);
            assert!(
                answer.ok || !answer.text.is_empty() || !answer.note.is_empty(),
                "{line}"
            );
        }
    }
    // Nothing has changed.
    for (line, expected) in [
        ("get_default_active_thread_percentage", "100.0\n".to_owned()),
        ("get_default_device_pinned_mem_limit 0", String::new()),
        ("get_default_client_priority", "0\n".to_owned()),
        ("get_server_list", format!("{server}\n")),
        (
            &format!("get_client_list {server}"),
            format!("{}\n", std::process::id()),
        ),
    ] {
        assert_eq!(ui.command(line).expect(line).text, expected, "{line}");
    }
    assert!(client.is_connected());
}

#[test]
fn bytes_that_are_no_text() {
    let place = Place::with_daemon();
    let mut command = place.command("mps-control");
    let program = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut program = program.expect("run");
    let mut input = program.stdin.take().expect("piped");
    let every: Vec<u8> = (0..=255).filter(|byte| *byte != b'\n').collect();
    for line in [
        &every[..],
        b"\xff\xfe\n",
        b"\0\0\0\n",
        &[b'x'; 5000],
        b"\n",
        b"get_server_list\xff\n",
        b"get_default_client_priority\n",
    ] {
        input.write_all(line).expect("write");
        if !line.ends_with(b"\n") {
            input.write_all(b"\n").expect("write");
        }
    }
    drop(input);
    let output = program.wait_with_output().expect("wait");
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.ends_with("\n0\n"), "{text}");
    assert!(text.contains("a command line may have 4096 bytes"));
    // In the log they are one line each, whatever they are.
    let log = place.log("control.log");
    assert!(log.lines().all(|line| line.starts_with('[')), "{log}");
    assert!(log.contains("Cmd:\\u{0}\\u{1}"));
    // The daemon itself takes no more than it should, on both sockets.
    for socket in ["control", "control_privileged"] {
        let connection = seqpacket::connect(&place.pipe().join(socket)).expect("connect");
        for len in [0, 1, 4096, 4097, 60_000] {
            let packet = [b"MPSU", &vec![0xc3; len][..]].concat();
            seqpacket::send(connection.as_fd(), &packet, None).expect("send");
            let mut answer = vec![0; 16 * 1024];
            // Three bytes for each that is no text: such a line comes back in several packets.
            let received = seqpacket::receive(connection.as_fd(), &mut answer).expect("an answer");
            assert!(answer[..received].starts_with(b"MPSR"));
        }
    }
    assert_eq!(place.control(&["get_server_list"]).code, 0);
}

#[test]
fn a_peer_that_asks_and_never_listens() {
    let place = Place::with_daemon_env(&[("FAKE_SERVER", "stuck")]);
    let commands = [
        &b"MPSUhelp"[..],
        b"MPSUdevice_query",
        b"MPSUget_server_list",
    ];
    let connections: Vec<_> = commands
        .iter()
        .map(|packet| {
            let connection = seqpacket::connect(&place.pipe().join("control")).expect("connect");
            seqpacket::set_nonblocking(&connection, true).expect("non-blocking");
            let mut sent = 0;
            let until = Instant::now() + Duration::from_millis(500);
            while Instant::now() < until && sent < 10_000 {
                match seqpacket::send(connection.as_fd(), packet, None) {
                    Ok(()) => sent += 1,
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            connection
        })
        .collect();
    wait_until("others are served", || place.control(&["help"]).code == 0);
    drop(connections);
    let descriptors = || {
        let path = format!("/proc/{}/fd", place.daemon_pid());
        std::fs::read_dir(path).expect("descriptors").count()
    };
    wait_until("their connections are closed", || descriptors() < 30);
}
