//! The control daemon, its commands and mps-run, with a server that has no engine.

use mpsshim_control::seqpacket;
use mpsshim_proto::handshake::PROTOCOL_VERSION;
use mpsshim_tests::control_daemon::{
    Client, Place, SERVER_NOT_READY, hello, other_user, refused_status, wait_until,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

/// As in capabilities(7).
const CAP_KILL: libc::c_ulong = 5;

#[test]
fn a_second_daemon_says_that_there_is_one() {
    let place = Place::with_daemon();
    let second = place.control(&["-d"]);
    assert_eq!(second.code, 1);
    assert_eq!(
        second.err,
        "An instance of this daemon is already running\n"
    );
    assert_eq!(place.control(&["-f"]).code, 1);
    assert_eq!(
        place.control(&["get_server_list"]).code,
        0,
        "the first is not disturbed"
    );
}

#[test]
fn commands_without_a_daemon() {
    let place = Place::new();
    for result in [
        place.control(&["get_server_list"]),
        place.control_stdin("quit\n"),
    ] {
        assert_eq!(result.code, 1);
        assert_eq!(result.err, "Cannot find MPS control daemon process\n");
    }
}

#[test]
fn quit_ends_the_daemon_and_leaves_what_nvidia_s_leaves() {
    let place = Place::with_daemon();
    let pid = place.daemon_pid();
    let result = place.control(&["quit"]);
    assert_eq!((result.code, result.out.as_str()), (0, ""));
    // The answer comes last: all this is so without waiting for the daemon's end.
    let mut left: Vec<_> = place.list();
    left.retain(|name| name != "logs");
    assert_eq!(left, ["control", "control_lock", "control_privileged"]);
    assert_eq!(place.control(&["quit"]).code, 1);
    assert_eq!(place.control(&["-d"]).code, 0, "and again");
    wait_until("the first daemon has ended", || !running(pid));
}

#[test]
fn files_and_modes() {
    let place = Place::with_daemon();
    let mode = |name: &str| {
        fs::metadata(place.pipe().join(name))
            .expect(name)
            .permissions()
            .mode()
            & 0o777
    };
    let kind = |name: &str| {
        fs::metadata(place.pipe().join(name))
            .expect(name)
            .file_type()
    };
    assert!(
        kind("control").is_socket()
            && kind("control_privileged").is_socket()
            && kind("log").is_fifo()
    );
    let modes = [
        "control",
        "control_lock",
        "control_privileged",
        "log",
        "mps-control.pid",
    ]
    .map(mode);
    let log = if nix::unistd::geteuid().is_root() {
        0o622
    } else {
        0o600
    };
    assert_eq!(modes, [0o666, 0o600, 0o755, log, 0o644]);
}

#[test]
fn unknown_commands() {
    let place = Place::with_daemon();
    let result = place.control(&["frobnicate", "-x", "1"]);
    assert_eq!(
        (result.code, result.out.as_str()),
        (1, "Unknown command \"frobnicate\"\n")
    );
    let result = place
        .control_stdin("frobnicate\n\nget_client_list\nget_server_status 99999\nget_server_list\n");
    assert_eq!(result.code, 0);
    assert_eq!(
        result.out,
        "Unknown command \"frobnicate\"\nServer 0 not found\nServer 99999 not found\n"
    );
    let near = place.control(&["get_server_lst"]);
    assert_eq!(
        (near.code, near.out.as_str()),
        (
            1,
            "Unknown command \"get_server_lst\"; did you mean get_server_list?\n"
        )
    );
    assert_eq!(place.control(&["get_server_status", "99999"]).code, 1);
    let long = place.control_stdin(&format!("{}\nget_server_status 1\n", "x".repeat(100_000)));
    assert_eq!(
        (long.code, long.out.lines().count()),
        (0, 2),
        "{}",
        long.out
    );
}

#[test]
fn unknown_options_are_refused() {
    let place = Place::with_daemon();
    for (arguments, expected) in [
        (&["--foo"][..], "error: unexpected argument '--foo' found"),
        (
            &["--foo", "quit"],
            "error: unexpected argument '--foo' found",
        ),
        (
            &["--fromat", "json", "ps"],
            "a similar argument exists: '--format'",
        ),
        (&["-x"], "error: unexpected argument '-x' found"),
        (
            &["quit", "--daemon"],
            "'--daemon' cannot be used with a command",
        ),
    ] {
        let done = place.control(arguments);
        assert_eq!((done.code, done.out.as_str()), (2, ""), "{arguments:?}");
        assert!(done.err.contains(expected), "{}", done.err);
        assert!(!done.err.contains("Unknown command"), "{}", done.err);
    }
    // The daemon got none of them.
    assert!(!place.log("control.log").contains("Cmd:"));
    assert_eq!(place.control(&["get_server_list"]).code, 0);
}

#[test]
fn version_and_usage() {
    let place = Place::new();
    let version = concat!("mps-control ", env!("CARGO_PKG_VERSION"), "\n");
    for arguments in [&["-V"][..], &["-v"], &["--version"], &["ps", "-V"]] {
        let done = place.control(arguments);
        assert_eq!(
            (done.code, done.out.as_str()),
            (0, version),
            "{arguments:?}"
        );
    }
    let help = place.control(&["--help"]);
    assert_eq!(help.code, 0);
    let usage = help.out.lines().find(|line| line.starts_with("Usage:"));
    assert_eq!(usage, Some("Usage: mps-control [OPTIONS] [COMMAND]"));
}

#[test]
fn a_killed_daemon_leaves_no_obstacle() {
    let place = Place::with_daemon();
    let pid = place.daemon_pid();
    place.signal_daemon(Signal::SIGKILL);
    wait_until("the daemon has ended", || !running(pid));
    assert!(place.pipe().join("control").exists(), "the socket is stale");
    assert_eq!(place.control(&["get_server_list"]).code, 1);
    let again = place.control(&["-d"]);
    assert_eq!(again.code, 0, "{}", again.err);
    assert_ne!(place.daemon_pid(), pid);
    assert_eq!(place.control(&["get_server_list"]).code, 0);
}

#[test]
fn a_pipe_directory_that_cannot_be_used() {
    let mut place = Place::new();
    let file = place.path().join("file");
    fs::write(&file, "").expect("write");
    place.set_pipe(&file.join("below"));
    let result = place.control(&["-d"]);
    assert_eq!(result.code, 1);
    assert!(
        result.err.contains("file/below") && result.err.contains("MPSSHIM_PIPE_DIRECTORY"),
        "{}",
        result.err
    );

    place.set_pipe(&place.path().join("x".repeat(100)));
    let result = place.control(&["-d"]);
    assert_eq!(result.code, 1);
    assert!(
        result.err.contains(&"x".repeat(100)) && result.err.contains("107"),
        "{}",
        result.err
    );
}

#[test]
fn a_pipe_directory_of_another_user() {
    let Some(user) = other_user() else { return };
    let place = Place::new();
    fs::create_dir(place.pipe()).expect("create");
    let result = place.control_as(user, &["-d"]);
    assert_eq!(result.code, 1);
    let named = place.pipe().display().to_string();
    assert!(
        result.err.contains(&named) && result.err.contains("Permission denied"),
        "{}",
        result.err
    );
    assert!(
        result.err.contains(&format!("user {user}")),
        "{}",
        result.err
    );
}

#[test]
fn a_client_gets_a_server_and_is_listed() {
    let place = Place::with_daemon();
    assert_eq!(place.control(&["get_server_list"]).out, "");
    let first = Client::connect(&place);
    let server = first.welcome().expect("welcome").server_pid;
    let second = Client::connect(&place);
    assert_eq!(
        second.welcome().expect("welcome").server_pid,
        server,
        "one server for one user"
    );

    let server = server.to_string();
    assert_eq!(
        place.control(&["get_server_list"]).out,
        format!("{server}\n")
    );
    assert_eq!(
        place.control(&["get_server_status", &server]).out,
        "ACTIVE\n"
    );
    let me = std::process::id();
    wait_until("both are listed", || {
        place.control(&["get_client_list", &server]).out == format!("{me}\n{me}\n")
    });
    drop(first);
    wait_until("one is listed", || {
        place.control(&["get_client_list", &server]).out == format!("{me}\n")
    });
    drop(second);
    wait_until("none is listed", || {
        place.control(&["get_client_list", &server]).out.is_empty()
    });
    let result = place.control(&["quit"]);
    assert_eq!((result.code, result.out.as_str()), (0, ""));

    let daemon = place.stamped_pid("control.log");
    // The command is answered before the daemon's last line is written.
    let last = format!("Control {daemon:>5}] Exit with status 0");
    wait_until("the daemon has ended", || {
        place.log_after_stamp("control.log").contains(&last)
    });
    let log = place.log_after_stamp("control.log");
    for expected in [
        format!(
            "Control {daemon:>5}] Starting control daemon using socket {}/control",
            place.pipe().display()
        ),
        format!(
            "Control {daemon:>5}] To connect CUDA applications to this daemon, set env MPSSHIM_PIPE_DIRECTORY={}",
            place.pipe().display()
        ),
        format!("Control {daemon:>5}] Accepting connection..."),
        format!("Control {daemon:>5}] NEW UI"),
        format!("Control {daemon:>5}] Cmd:get_server_list"),
        format!("Control {daemon:>5}] UI closed"),
        format!(
            "Control {daemon:>5}] NEW CLIENT {me} from user {}: Server is not ready, push client to pending list",
            place.uid()
        ),
        format!(
            "Control {server:>5}] Starting new server {server} for user {}",
            place.uid()
        ),
        format!("Control {daemon:>5}] NEW SERVER {server}: Ready"),
        format!(
            "Control {daemon:>5}] NEW CLIENT {me} from user {}: Server already exists",
            place.uid()
        ),
        format!("Control {daemon:>5}] Try shutting down server {server}, backoff is disabled"),
        format!("Control {daemon:>5}] Server {server} exited with status 0"),
        format!("Control {daemon:>5}] Exit with status 0"),
    ] {
        assert!(log.contains(&expected), "{expected:?} is not in {log:#?}");
    }
    let log = place.log_after_stamp("server.log");
    for expected in [
        "Active Threads Percentage set to 100.0".to_owned(),
        "Server has started".to_owned(),
        format!("Received new client request for {{PID: {me}, Context ID: 0}}"),
        format!("Client {{PID: {me}, Context ID: 1}} connected"),
        format!("Status of client {{PID: {me}, Context ID: 1}} is ACTIVE"),
        format!(
            "Client {{PID: {me}, Context ID: 1}} exiting. Number of active client contexts is 1."
        ),
        format!("Client process {me} disconnected"),
        "Server has been notified to shutdown".to_owned(),
        "Destroy server context on device 0 (Fake device)".to_owned(),
        "Exiting".to_owned(),
    ] {
        let expected = format!("Server {server:>5}] {expected}");
        assert!(log.contains(&expected), "{expected:?} is not in {log:#?}");
    }
}

#[test]
fn every_log_line_has_its_stamp() {
    let place = Place::with_daemon();
    Client::connect(&place).welcome().expect("welcome");
    fs::write(place.pipe().join("log"), "a foreign\x07 line\n").expect("log pipe");
    wait_until("the foreign line is logged", || {
        place
            .log("control.log")
            .contains("] a foreign\\u{7} line\n")
    });
    assert!(place.control(&["quit"]).code == 0);
    for name in ["control.log", "server.log"] {
        for line in place.log(name).lines() {
            // [2026-11-20 09:09:36.566 Control  1105] text
            let shape: String = line[..25]
                .chars()
                .map(|c| if c.is_ascii_digit() { '9' } else { c })
                .collect();
            assert_eq!(shape, "[9999-99-99 99:99:99.999 ", "{line}");
            assert!(
                ["Control", "Server ", "Other  "].contains(&&line[25..32]),
                "{line}"
            );
        }
    }
}

#[test]
fn clients_wait_for_a_slow_server() {
    let place = Place::with_daemon_env(&[("FAKE_SERVER", "slow")]);
    let clients: Vec<Client> = (0..8).map(|_| Client::connect(&place)).collect();
    wait_until("a server is starting", || {
        !place.control(&["get_server_list"]).out.is_empty()
    });
    let server = place.control(&["get_server_list"]).out;
    assert_eq!(
        place.control(&["get_server_status", server.trim()]).out,
        "INITIALIZING\n"
    );
    for client in &clients {
        assert_eq!(
            client.welcome().expect("welcome").server_pid.to_string(),
            server.trim()
        );
    }
}

#[test]
fn a_server_can_be_started_before_its_first_client() {
    let place = Place::with_daemon();
    let uid = place.uid().to_string();
    assert_eq!(place.control(&["start_server", "-uid", &uid]).out, "");
    let first = place.control(&["get_server_list"]).out;
    assert_eq!(first.lines().count(), 1);
    let again = place.control(&["start_server", "-uid", &uid]);
    assert_eq!((again.code, again.out.as_str()), (0, ""));
    assert_eq!(place.control(&["get_server_list"]).out, first);
    assert_eq!(place.control(&["start_server", "-uid", "nobody"]).code, 1);
}

#[test]
fn wrong_protocol_version() {
    let place = Place::with_daemon();
    let status = refused_status(&place, &hello(PROTOCOL_VERSION + 6));
    assert_eq!(status, Some(805));
    let log = place.log("control.log");
    let line = log
        .lines()
        .find(|line| line.contains("refused"))
        .expect("a line");
    assert!(
        line.contains(&format!("protocol {}", PROTOCOL_VERSION + 6)),
        "{line}"
    );
    // The fake server's.
    assert!(line.ends_with("is of release 9.9.9"), "{line}");
}

#[test]
fn garbage_on_both_sockets() {
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    client.welcome().expect("welcome");
    let good = hello(PROTOCOL_VERSION);
    let packets = [
        &b"x"[..],
        &[0; 64],
        &[0xff; 4000],
        &good[..63],
        &good[..5],
        b"GET / HTTP/1.1\r\n\r\n",
        &[7; 60_000],
    ];
    for packet in packets {
        assert_eq!(
            refused_status(&place, packet),
            Some(805),
            "{} bytes",
            packet.len()
        );
        let connection =
            seqpacket::connect(&place.pipe().join("control_privileged")).expect("connect");
        seqpacket::send(connection.as_fd(), packet, None).expect("send");
    }
    assert_eq!(
        place.control_stdin("\u{1}\u{2}\n").out,
        "Unknown command \"\u{1}\u{2}\"\n"
    );
    assert_eq!(place.control(&["get_server_list"]).out.lines().count(), 1);
    assert!(client.is_connected());
}

#[test]
fn silent_connections_block_nobody() {
    let place = Place::with_daemon();
    let silent: Vec<_> = (0..300)
        .map(|_| seqpacket::connect(&place.pipe().join("control")).expect("connect"))
        .collect();
    let start = Instant::now();
    Client::connect(&place).welcome().expect("welcome");
    assert_eq!(place.control(&["get_server_list"]).code, 0);
    // They are closed in the end.
    assert_eq!(
        seqpacket::receive(silent[0].as_fd(), &mut [0; 8]).expect("end"),
        0
    );
    let waited = start.elapsed();
    assert!(waited > Duration::from_secs(8), "{waited:?}");
}

#[test]
fn a_server_that_cannot_start_is_tried_three_times() {
    let place = Place::with_daemon_env(&[("FAKE_SERVER", "crash")]);
    assert_eq!(
        Client::connect(&place).welcome().expect("refusal").status,
        805
    );
    let log = place.log("control.log");
    assert_eq!(log.matches("exited with status 3").count(), 3, "{log}");
    assert!(log.contains("3 servers for user"), "{log}");
    assert_eq!(place.control(&["get_server_list"]).out, "");
    assert_eq!(
        Client::connect(&place).welcome().expect("refusal").status,
        805
    );
    assert_eq!(
        place
            .log("control.log")
            .matches("exited with status 3")
            .count(),
        3,
        "no further try"
    );
}

#[test]
fn no_server_executable() {
    let place = Place::with_daemon_env(&[("MPSSHIM_SERVER", "/nowhere/mps-server")]);
    assert_eq!(
        Client::connect(&place).welcome().expect("refusal").status,
        805
    );
    assert!(
        place
            .log("control.log")
            .contains("cannot start the server /nowhere/mps-server")
    );
}

#[test]
fn a_dead_server_is_replaced() {
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    let first = client.welcome().expect("welcome").server_pid;
    client.say("die");
    wait_until("the client's connection is closed", || {
        !client.is_connected()
    });
    let second = Client::connect(&place)
        .welcome()
        .expect("welcome")
        .server_pid;
    assert_ne!(first, second);
    let log = place.log("control.log");
    assert!(
        log.contains(&format!("Server {first} exited with status 134")),
        "{log}"
    );
    assert!(
        log.contains(&format!(
            "Server {first} ended unexpectedly, with 1 clients; the next client gets a new server"
        )),
        "{log}"
    );
}

#[test]
fn a_fault_is_shown_and_the_server_replaced() {
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    let first = client.welcome().expect("welcome").server_pid.to_string();
    client.say("fault");
    wait_until("FAULT", || {
        place.control(&["get_server_status", &first]).out == "FAULT\n"
    });
    // Arrives while the old server is still there.
    let second = Client::connect(&place)
        .welcome()
        .expect("welcome")
        .server_pid
        .to_string();
    assert_ne!(first, second);
    assert!(place.log("control.log").contains(&format!(
        "Server {first} has lost its context: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    )));
}

#[test]
fn quit_waits_for_clients_and_quit_t_does_not() {
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    client.welcome().expect("welcome");
    let waiting = std::thread::scope(|scope| {
        let quit = scope.spawn(|| place.control(&["quit"]));
        std::thread::sleep(Duration::from_millis(500));
        assert!(!quit.is_finished(), "a client is there");
        assert!(client.is_connected());
        assert_eq!(
            Client::connect(&place).welcome().expect("refusal").status,
            805
        );
        assert_eq!(place.control(&["quit", "-t", "1"]).code, 0);
        quit.join().expect("quit")
    });
    assert_eq!(waiting.code, 0);
    wait_until("the client's connection is closed", || {
        !client.is_connected()
    });
}

#[test]
fn a_stuck_server_is_killed_on_quit() {
    let place = Place::with_daemon_env(&[("FAKE_SERVER", "stuck")]);
    let client = Client::connect(&place);
    wait_until("a server is starting", || {
        !place.control(&["get_server_list"]).out.is_empty()
    });
    assert_eq!(place.control(&["quit", "-t", "0"]).code, 0);
    assert_eq!(client.welcome().expect("refusal").status, 805);
    assert!(place.log("control.log").contains("exited with status 137"));
}

/// A server that nothing ends but this value.
struct Stuck(i32);

impl Stuck {
    fn start(place: &Place, user: u32) -> Stuck {
        let started = place.control(&["start_server", "-uid", &user.to_string()]);
        assert_eq!(started.code, 0, "{}", started.out);
        let server = place.control(&["get_server_list"]).out;
        Stuck(server.trim().parse().expect("a process id"))
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0), Signal::SIGKILL);
    }
}

fn says_that_it_remains(place: &Place, server: &Stuck, user: u32, why: &str) {
    let pid = server.0;
    let start = Instant::now();
    let (shutdown, quit) = std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| place.control(&["shutdown_server", &pid.to_string(), "-f"]));
        wait_until("the server is told to end", || {
            place.log("control.log").contains("Cmd:shutdown_server")
        });
        let quit = place.control(&["quit", "-t", "0"]);
        (shutdown.join().expect("shutdown"), quit)
    });
    // Six seconds, of which the machine may make more.
    assert!(start.elapsed() < Duration::from_secs(60));
    for done in [&shutdown, &quit] {
        assert_eq!(done.code, 1);
        let begin = format!("Server {pid} of user {user} does not end: {why}");
        assert!(done.out.starts_with(&begin), "{}", done.out);
    }
    assert!(place.log("control.log").ends_with("Exit with status 1\n"));
    assert!(kill(Pid::from_raw(pid), None).is_ok(), "it remains");
    assert_eq!(
        place.control(&["-d"]).code,
        0,
        "another daemon can be started"
    );
}

#[test]
fn quit_says_which_server_the_daemon_may_not_kill() {
    let Some(user) = other_user() else { return };
    let mut place = Place::new();
    place.set_env("FAKE_SERVER", "stuck");
    let mut daemon = place.command("mps-control");
    // SAFETY: a plain system call between fork and exec. Root's programs have what the bounding set has.
    unsafe {
        daemon.pre_exec(
            || match libc::prctl(libc::PR_CAPBSET_DROP, CAP_KILL, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            },
        );
    }
    assert!(daemon.arg("-d").status().expect("run").success());
    let server = Stuck::start(&place, user);
    let why = "this daemon may not kill it (Operation not permitted (os error 1))";
    says_that_it_remains(&place, &server, user, why);
}

#[test]
fn quit_says_which_server_outlives_its_kill() {
    let place = Place::with_daemon_env(&[("FAKE_SERVER", "stuck")]);
    let server = Stuck::start(&place, place.uid());
    // Nobody hears of the end of a traced process before who traces it, which stands for one that hangs in a driver.
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: a plain system call on another process.
    if unsafe { libc::ptrace(libc::PTRACE_SEIZE, server.0, none, none) } != 0 {
        let why = std::io::Error::last_os_error();
        return eprintln!("a server that outlives its kill is not tested: {why}");
    }
    let why = "it was killed and still has not ended";
    says_that_it_remains(&place, &server, place.uid(), why);
}

#[test]
fn signals_end_the_daemon() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let place = Place::with_daemon();
        Client::connect(&place).welcome().expect("welcome");
        let pid = place.daemon_pid();
        place.signal_daemon(signal);
        wait_until("the daemon has ended", || !running(pid));
        assert!(place.log("control.log").ends_with("Exit with status 0\n"));
    }
}

#[test]
fn clients_survive_a_killed_daemon() {
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    let server = client.welcome().expect("welcome").server_pid;
    place.signal_daemon(Signal::SIGKILL);
    std::thread::sleep(Duration::from_millis(300));
    assert!(client.is_connected() && running(server));
    drop(client);
    wait_until("the server has ended", || !running(server));
}

#[test]
fn other_users() {
    let Some(user) = other_user() else { return };
    let place = Place::with_daemon();
    let result = place.control_as(user, &["quit"]);
    assert_eq!(result.code, 1);
    assert!(result.out.contains("root"), "{}", result.out);
    assert_eq!(place.control_as(user, &["get_server_list"]).code, 0);

    // Root's daemon: a server for the other user waits until root's is idle.
    let client = Client::connect(&place);
    let first = client.welcome().expect("welcome").server_pid.to_string();
    assert_eq!(
        place
            .control(&["start_server", "-uid", &user.to_string()])
            .code,
        0
    );
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(
        place.control(&["get_server_list"]).out,
        format!("{first}\n")
    );
    drop(client);
    wait_until("the other user's server runs", || {
        let list = place.control(&["get_server_list"]).out;
        !list.is_empty() && list != format!("{first}\n")
    });
    let second = place.control(&["get_server_list"]).out;
    wait_until("under that user", || {
        let status =
            fs::read_to_string(format!("/proc/{}/status", second.trim())).unwrap_or_default();
        status.contains(&format!("Uid:\t{user}\t{user}\t{user}\t{user}\n"))
    });
}

#[test]
fn a_user_s_daemon_serves_only_that_user() {
    let Some(user) = other_user() else { return };
    let mut place = Place::new();
    place.become_user(user);
    let result = place.control(&["-d"]);
    assert_eq!(result.code, 0, "{}", result.err);
    assert!(place.pipe().join("logs/control.log").exists());
    // This process is root.
    assert_eq!(
        Client::connect(&place).welcome().expect("refusal").status,
        SERVER_NOT_READY
    );
    let result = place.control(&["start_server", "-uid", "0"]);
    assert_eq!(result.code, 1);
    assert!(
        result.out.contains("does not run as root"),
        "{}",
        result.out
    );
}

#[test]
fn an_idle_daemon_uses_no_cpu() {
    let place = Place::with_daemon();
    Client::connect(&place).welcome().expect("welcome");
    let ticks = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", place.daemon_pid())).expect("stat");
        let after_name = stat.rsplit_once(')').expect("name").1.to_owned();
        let numbers: Vec<&str> = after_name.split_whitespace().collect();
        numbers[11].parse::<u64>().expect("utime") + numbers[12].parse::<u64>().expect("stime")
    };
    let switches = || {
        let status =
            fs::read_to_string(format!("/proc/{}/status", place.daemon_pid())).expect("status");
        status
            .lines()
            .filter(|line| line.contains("ctxt_switches"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    wait_until("the client's end has been dealt with", || {
        let before = switches();
        std::thread::sleep(Duration::from_millis(300));
        before == switches()
    });
    let before = ticks();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(ticks(), before);
}

fn running(pid: u32) -> bool {
    // A zombie has ended; where init does not reap, it stays one.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| !rest.starts_with('Z'))
    })
}
