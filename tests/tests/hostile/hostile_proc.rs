//! Processes whose command lines cannot be read: a pipe is mounted in the place of such a file.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Place, as_user, has_ended, other_user, two_users, wait_until};
use mpsshim_tests::programs::{Running, preloaded, survivor, well};
use mpsshim_tests::scene::{daemon, daemon_with, daemon_with_options};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use serde_json::{Value, json};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::null;

fn c_string(path: &Path) -> CString {
    CString::new(path.to_owned().into_os_string().into_vec()).expect("no NUL")
}

/// A pipe in the place of a process's command line, until it is dropped or the process ends.
struct Blocked {
    pipe: PathBuf,
    line: PathBuf,
}

impl Blocked {
    fn new(place: &Place, pid: u32) -> Blocked {
        let pipe = place.path().join(format!("line-{pid}"));
        nix::unistd::mkfifo(&pipe, Mode::S_IRUSR | Mode::S_IWUSR).expect("a pipe");
        let line = PathBuf::from(format!("/proc/{pid}/cmdline"));
        let (source, target) = (c_string(&pipe), c_string(&line));
        // SAFETY: strings that live through the call; a bind mount needs no type and no data.
        let mounted = unsafe {
            let flags = libc::MS_BIND;
            libc::mount(source.as_ptr(), target.as_ptr(), null(), flags, null())
        };
        assert_eq!(mounted, 0, "{}", Errno::last());
        Blocked { pipe, line }
    }

    /// Waits for a reader. It goes on when the result is dropped.
    fn reader(&self) -> File {
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(libc::O_NONBLOCK);
        let mut opened = options.open(&self.pipe);
        wait_until("the command line is being read", || {
            opened = options.open(&self.pipe);
            opened.is_ok()
        });
        opened.expect("just opened")
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        let line = c_string(&self.line);
        // SAFETY: a string that lives through the call, which fails if the process has ended.
        unsafe { libc::umount2(line.as_ptr(), libc::MNT_DETACH) };
    }
}

fn start(place: &Place, program: &Path) -> Running {
    Running::start_until(&mut preloaded(program, place.pipe()), "started")
}

/// A process of this program and user whose command line cannot be read. It connects once it was told to go.
fn unreadable(place: &Place, program: &Path, user: u32) -> (Running, Blocked) {
    let mut command = preloaded("sh", place.pipe());
    command.args(["-c", "read go && exec \"$0\""]).arg(program);
    let mut running = as_user(user, || Running::start(&mut command));
    let blocked = Blocked::new(place, running.pid());
    running.say("go");
    (running, blocked)
}

fn list(place: &Place, command: &[&str]) -> Vec<Value> {
    let done = place.control(&[&["--format", "json"], command].concat());
    assert_eq!(done.code, 0, "{}{}", done.out, done.err);
    serde_json::from_str(&done.out).expect("an array")
}

/// Numbers of clients that are served and that wait.
fn clients(place: &Place) -> (u64, u64) {
    let rows = list(place, &["users"]);
    let sum = |name: &str| rows.iter().filter_map(|row| row[name].as_u64()).sum();
    (sum("clients"), sum("waiting"))
}

/// Whether the server of a process is one for a quarantined program.
fn is_apart(place: &Place, running: &Running) -> bool {
    let rows = list(place, &["ps"]);
    let row = rows.iter().find(|row| row["pid"] == running.pid());
    row.expect("a client")["quarantined"] == 1
}

/// Quarantines `program train.py` of this user, and returns the command line that it is known by.
fn quarantine_training(place: &Place, program: &Path, uid: u32) -> &'static [u8] {
    let (uid, name) = (uid.to_string(), program.display().to_string());
    let done = place.control(&["quarantine", "add", "-uid", &uid, &name, "/train.py"]);
    assert_eq!((done.code, &*done.out, &*done.err), (0, "", ""));
    b"python3\0/train.py\0"
}

#[test]
fn a_program_that_cannot_be_read_keeps_no_other_user_waiting() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon_with_options(&["-d", "-M"], &[]);
    let (python, other) = (survivor(&place, "python3"), survivor(&place, "other"));
    let line = quarantine_training(&place, &python, one);
    let first = as_user(two, || start(&place, &other));

    let (mut slow, blocked) = unreadable(&place, &python, one);
    let mut reader = blocked.reader();
    // The daemon serves others and answers, and the client waits for its program.
    let second = as_user(two, || start(&place, &other));
    assert_eq!(clients(&place), (2, 1));
    assert_eq!(place.ps().len(), 2);
    reader.write_all(line).expect("a reader");
    drop((reader, blocked));
    assert_eq!(slow.line(), "started");
    assert!(is_apart(&place, &slow));
    assert!(!is_apart(&place, &first) && !is_apart(&place, &second));
    assert_eq!(clients(&place), (3, 0));
}

/// `get_client_list` of the only server, and `ps`, each as process ids and commands.
fn commands(place: &Place) -> [Vec<(Value, Value)>; 2] {
    let server = list(place, &["get_server_list"])[0]["pid"].to_string();
    let commands: [&[&str]; 2] = [&["get_client_list", &server], &["ps"]];
    commands.map(|command| {
        let rows = list(place, command).into_iter();
        rows.map(|row| (row["pid"].clone(), row["command"].clone()))
            .collect()
    })
}

#[test]
fn clients_are_listed_without_reading_their_command_lines() {
    if other_user().is_none() {
        return;
    }
    for (quarantine, mode) in [("auto", "proxy"), ("off", "proxy"), ("auto", "direct")] {
        let place = daemon_with(&[("MPSSHIM_QUARANTINE", quarantine)]);
        let program = survivor(&place, "program");
        let mut command = preloaded(&program, place.pipe());
        let command = command.env("MPSSHIM_MODE", mode);
        let client = Running::start_until(command, "started");
        let _blocked = Blocked::new(&place, client.pid());
        let row = (json!(client.pid()), json!(program));
        let listed = commands(&place);
        assert_eq!(
            listed,
            [vec![row.clone()], vec![row]],
            "{quarantine} {mode}"
        );
        let table = place.control(&["ps"]).out;
        assert!(table.contains(&program.display().to_string()), "{table}");
    }
}

#[test]
fn a_client_that_cannot_be_read_delays_no_trace() {
    if other_user().is_none() {
        return;
    }
    let place = daemon();
    let other = survivor(&place, "other");
    for mode in ["proxy", "direct"] {
        let mut command = preloaded(&other, place.pipe());
        let mut first = Running::start_until(command.env("MPSSHIM_MODE", mode), "started");
        let blocked = Blocked::new(&place, first.pid());
        let path = place.path().join(format!("{mode}.json"));
        let done = place.control(&["trace", "start", path.to_str().expect("UTF-8")]);
        assert_eq!((done.code, &*done.out, &*done.err), (0, "", ""));
        let mut command = preloaded(&other, place.pipe());
        let mut second = Running::start_until(command.env("MPSSHIM_MODE", mode), "started");
        for client in [&mut first, &mut second] {
            client.say("round");
            assert!(client.line().starts_with("ok 2 "));
        }
        let _reader = blocked.reader();
        let done = place.control(&["trace", "stop"]);
        assert_eq!((done.code, &*done.err), (0, ""), "{}", done.out);
        let text = fs::read_to_string(&path).expect("a file");
        let events: Vec<Value> = serde_json::from_str(&text).expect("JSON");
        let name = |client: &Running| {
            let mut events = events.iter();
            let is_it =
                |event: &&Value| event["name"] == "process_name" && event["pid"] == client.pid();
            events.find(is_it).expect("a name")["args"]["name"].clone()
        };
        assert_eq!(name(&first), format!("unknown ({})", first.pid()));
        assert_eq!(name(&second), format!("other ({})", second.pid()));
    }
}

#[test]
fn clients_whose_programs_cannot_be_read_leave_are_refused_or_go_on_without() {
    if other_user().is_none() {
        return;
    }
    let place = daemon();
    let python = survivor(&place, "python3");
    quarantine_training(&place, &python, 0);
    // It leaves.
    let (gone, blocked) = unreadable(&place, &python, 0);
    let reader = blocked.reader();
    assert_eq!(clients(&place), (0, 1));
    gone.kill();
    wait_until("it has gone", || clients(&place) == (0, 0));
    drop(reader);

    // Its time passes. The usual server serves it.
    let (mut late, blocked) = unreadable(&place, &python, 0);
    let reader = blocked.reader();
    assert_eq!(late.line(), "started");
    drop((reader, blocked));
    assert!(!is_apart(&place, &late));
    let log = place.log("control.log");
    let said = format!("The program of client {} of user 0 is unknown", late.pid());
    assert!(log.contains(&said), "{log}");
    assert_eq!(well(&late.finish(PATIENCE)), "");

    // The daemon ends.
    let (refused, blocked) = unreadable(&place, &python, 0);
    let _reader = blocked.reader();
    let daemon = place.daemon_pid();
    let done = place.control(&["quit"]);
    assert_eq!((done.code, &*done.out, &*done.err), (0, "", ""));
    wait_until("the daemon has ended", || has_ended(daemon));
    let refused = refused.finish(PATIENCE);
    assert_eq!(refused.code, 1, "{}{}", refused.out, refused.err);
}

/// Whether a process has a thread that reads a program.
fn has_reader(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm"));
    tasks
        .flatten()
        .filter_map(|task| name(task).ok())
        .any(|name| name.trim() == "program")
}

#[test]
fn a_daemon_that_takes_over_waits_for_no_program() {
    if other_user().is_none() {
        return;
    }
    let place = daemon();
    let (python, other) = (survivor(&place, "python3"), survivor(&place, "other"));
    let mut slow = start(&place, &python);
    let blocked = Blocked::new(&place, slow.pid());
    let daemon = place.daemon_pid();
    place.signal_daemon(Signal::SIGKILL);
    wait_until("the daemon has ended", || has_ended(daemon));
    let done = place.control(&["-d"]);
    assert_eq!((done.code, &*done.out, &*done.err), (0, "", ""));

    let mut reader = blocked.reader();
    let second = start(&place, &other);
    assert_eq!(clients(&place), (2, 0));
    reader.write_all(b"python3\0/train.py\0").expect("a reader");
    drop((reader, blocked));
    wait_until("its program is known", || !has_reader(place.daemon_pid()));
    drop(second);
    slow.say("stray");
    wait_until("its program is quarantined", || {
        let rows = list(&place, &["quarantine", "list"]);
        let name = json!(format!("{} /train.py", python.display()));
        rows.iter().any(|row| row["program"] == name)
    });
}
