//! The daemon as a service: log rotation, a supervisor that wants to be told, the first process of a container.

use mpsshim_tests::control_daemon::{Client, Place, other_user, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// All lines of a log and of what it was renamed to.
fn everything(place: &Place, name: &str) -> Vec<String> {
    let entries = fs::read_dir(place.pipe().join("logs")).expect("logs");
    let paths = entries.map(|entry| entry.expect("entry").path());
    let mut texts = paths
        .filter(|path| {
            path.file_name()
                .is_some_and(|file| file.to_string_lossy().starts_with(name))
        })
        .map(|path| fs::read_to_string(path).expect("log"));
    let mut lines = Vec::new();
    texts.by_ref().for_each(|text| {
        assert!(text.is_empty() || text.ends_with('\n'), "a whole line");
        lines.extend(text.lines().map(str::to_owned));
    });
    lines
}

fn count(place: &Place, name: &str, text: &str) -> usize {
    let lines = everything(place, name);
    lines.iter().filter(|line| line.contains(text)).count()
}

#[test]
fn no_line_is_lost_when_logs_are_rotated() {
    let place = Place::with_daemon();
    let first = Client::connect(&place);
    first.welcome().expect("welcome");
    let logs = place.pipe().join("logs");
    let clients = 60;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 1..clients {
                Client::connect(&place).welcome().expect("welcome");
            }
        });
        for rotation in 1..=3 {
            for name in ["control.log", "server.log"] {
                fs::rename(logs.join(name), logs.join(format!("{name}.{rotation}"))).expect(name);
            }
            place.signal_daemon(Signal::SIGHUP);
            wait_until("both are there again", || {
                let told = |name: &str| {
                    fs::read_to_string(logs.join(name)).is_ok_and(|text| !text.is_empty())
                };
                told("control.log") && told("server.log")
            });
        }
    });
    wait_until("all are in server.log", || {
        count(&place, "server.log", "Received new client request") == clients
    });
    assert_eq!(count(&place, "control.log", "NEW CLIENT"), clients);
    assert_eq!(count(&place, "control.log", "signal to reopen the logs"), 3);
    // Both write into the new files only.
    let old = |name: &str| fs::metadata(logs.join(name)).expect(name).len();
    let before = (old("control.log.3"), old("server.log.3"));
    drop(first);
    wait_until("the server has noticed", || {
        place
            .log("server.log")
            .contains("Number of active client contexts is 0.")
    });
    place.control(&["get_server_list"]);
    assert_eq!((old("control.log.3"), old("server.log.3")), before);
    // A server that starts later, too.
    let server = place.control(&["get_server_list"]).out.trim().to_owned();
    place.control(&["shutdown_server", &server]);
    assert!(place.log("server.log").ends_with("Exiting\n"));
}

#[test]
fn logs_that_cannot_be_opened_stay_as_they_are() {
    let place = Place::with_daemon();
    let logs = place.pipe().join("logs");
    let aside = place.pipe().join("aside");
    fs::rename(&logs, &aside).expect("rename");
    fs::write(&logs, "in the way").expect("write");
    place.signal_daemon(Signal::SIGHUP);
    wait_until("it is said where it can be", || {
        let log = fs::read_to_string(aside.join("control.log")).expect("log");
        log.contains("The logs stay as they are: cannot write the log")
    });
    // Who gives the command is told so.
    let answer = place.control(&["reopen_logs"]);
    assert_eq!(answer.code, 1);
    assert!(
        answer.out.starts_with("The logs stay as they are: "),
        "{}",
        answer.out
    );
    fs::remove_file(&logs).expect("remove");
    let answer = place.control(&["reopen_logs"]);
    assert_eq!((answer.code, answer.out.as_str()), (0, ""));
    assert!(logs.join("control.log").exists() && logs.join("server.log").exists());
    assert_eq!(place.control(&["get_server_list"]).code, 0);
}

/// `mps-control -f`, ended with the value.
struct Foreground(Child);

impl Drop for Foreground {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn foreground(mut command: Command) -> Foreground {
    command.stdin(Stdio::null()).stdout(Stdio::null());
    Foreground(command.stderr(Stdio::null()).spawn().expect("run"))
}

fn received(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 256];
    let len = socket.recv(&mut buffer).expect("a notification");
    String::from_utf8_lossy(&buffer[..len]).trim().to_owned()
}

#[test]
fn a_supervisor_is_told() {
    let place = Place::new();
    let path = place.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("socket");
    let patience = Some(Duration::from_secs(10));
    socket.set_read_timeout(patience).expect("time limit");
    let mut command = place.command("mps-control");
    command.arg("-f").env("NOTIFY_SOCKET", &path);
    let mut daemon = foreground(command);
    assert_eq!(received(&socket), "READY=1");
    // It listens, and its server hears nothing of the supervisor.
    let client = Client::connect(&place);
    let server = client.welcome().expect("welcome").server_pid;
    let environment = fs::read(format!("/proc/{server}/environ")).expect("environment");
    assert!(!String::from_utf8_lossy(&environment).contains("NOTIFY_SOCKET"));
    let pid = Pid::from_raw(daemon.0.id() as i32);
    kill(pid, Signal::SIGTERM).expect("signal");
    assert_eq!(received(&socket), "STOPPING=1");
    drop(client);
    assert!(daemon.0.wait().expect("wait").success());
}

/// Process ids and states of a process's children.
fn children(pid: u32) -> Vec<(u32, char)> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let list = fs::read_to_string(path).unwrap_or_default();
    let state = |child: u32| {
        let stat = fs::read_to_string(format!("/proc/{child}/stat")).ok()?;
        Some((child, stat.rsplit_once(") ")?.1.chars().next()?))
    };
    list.split_whitespace()
        .filter_map(|word| state(word.parse().ok()?))
        .collect()
}

#[test]
fn the_first_process_of_a_container() {
    if other_user().is_none() {
        return eprintln!("not root: a PID namespace is not tested");
    }
    let place = Place::new();
    let inner = place.command("mps-control");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc"]);
    command.arg(inner.get_program()).arg("-f");
    command.envs(
        inner
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    let mut unshare = foreground(command);
    let outer = unshare.0.id();
    wait_until("it listens", || {
        place.control(&["get_server_list"]).code == 0
    });
    let pid_file = fs::read_to_string(place.pipe().join("mps-control.pid"));
    assert_eq!(pid_file.expect("pid file"), "1\n");
    let daemon = children(outer)[0].0;

    // A server, which is its own, and processes whose parent ends before they do.
    let client = Client::connect(&place);
    client.welcome().expect("welcome");
    let orphans = Command::new("nsenter")
        .args(["--pid", "--target", &daemon.to_string(), "--", "sh", "-c"])
        .arg("for i in 1 2 3; do sleep 0.2 & done")
        .status();
    assert!(orphans.expect("nsenter").success());
    wait_until("it has inherited them", || children(daemon).len() == 4);
    wait_until("they are gone, and no zombie is left", || {
        let left = children(daemon);
        left.len() == 1 && left[0].1 != 'Z'
    });
    // It still knows how its own children end.
    client.say("die");
    wait_until("the server's end is told", || {
        place.log("control.log").contains("exited with status 134")
    });
    kill(Pid::from_raw(daemon as i32), Signal::SIGTERM).expect("signal");
    assert!(unshare.0.wait().expect("wait").success());
    assert!(place.log("control.log").ends_with("Exit with status 0\n"));
    assert!(!Path::new(&format!("/proc/{daemon}")).exists());
}
