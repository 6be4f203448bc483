//! `mps-control doctor`: its findings for a healthy installation and for each way in which one is broken.

use mpsshim_tests::artifacts::{artifact, driver, write_program};
use mpsshim_tests::control_daemon::{Done, Place, other_user, wait_until};
use mpsshim_tests::peer::Worker;
use mpsshim_tests::programs::preloaded;
use mpsshim_tests::scene::{control, daemon, daemon_with};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A place with the real server and softgpu, without a daemon.
fn place() -> Place {
    let mut place = Place::new();
    place.set_env("MPSSHIM_SERVER", text(&artifact("mps-server")));
    place.set_env("MPSSHIM_CUDA_LIBRARY", text(&driver()));
    let nowhere = place.path().join("nvidia");
    place.set_env("CUDA_MPS_PIPE_DIRECTORY", text(&nowhere));
    place
}

/// The line of a check with this beginning, such as `error    server: `.
#[track_caller]
fn line(done: &Done, start: &str) -> String {
    let found = done.out.lines().find(|line| line.starts_with(start));
    found
        .map(str::to_owned)
        .unwrap_or_else(|| panic!("no {start}: {}{}", done.out, done.err))
}

#[track_caller]
fn is_healthy(done: &Done) {
    assert!(!done.out.contains("error  "), "{}", done.out);
    assert_eq!((done.code, done.err.as_str()), (0, ""), "{}", done.out);
}

#[test]
fn a_library_of_another_release_is_in_order_if_a_server_speaks_its_protocol() {
    let (_folder, library) = crate::releases::library("0.1.0");
    let mut place = place();
    place.set_env("MPSSHIM_LIBRARY", text(&library));
    let done = place.control(&["doctor"]);
    let found = line(&done, "ok       library: ");
    let server = artifact("mps-server");
    for said in [
        "is of release 0.1.0 (protocol 7), and this program of ",
        &format!("; {} of release ", server.display()),
        " serves its programs.",
    ] {
        assert!(found.contains(said), "{said} in {found}");
    }
}

#[test]
fn a_healthy_machine() {
    let place = daemon();
    let _client = Worker::connect(&control(&place)).expect("a client");
    let done = place.control(&["doctor"]);
    is_healthy(&done);
    assert!(line(&done, "ok       library: ").contains("libmpsshim.so is of this release"));
    let driver_line = line(&done, "ok       driver: ");
    assert!(
        driver_line.contains("supports CUDA") && driver_line.contains("device"),
        "{driver_line}"
    );
    assert!(line(&done, "ok       device: ").contains("Software GPU"));
    let daemon = line(&done, "ok       daemon: ");
    assert!(
        daemon.contains(&format!("The daemon {} of user", place.daemon_pid())),
        "{daemon}"
    );
    assert!(
        done.out
            .contains(" is ACTIVE, with 1 clients on Software GPU"),
        "{}",
        done.out
    );
    for check in [
        "pipe directory",
        "log directory",
        "open files",
        "addresses",
        "shared memory",
        "managed memory",
    ] {
        line(&done, &format!("{:<9}{check}: ", "ok"));
    }
    let rows = place.control(&["doctor", "--format", "json"]);
    let rows: Vec<Value> = serde_json::from_str(&rows.out).expect(&rows.out);
    assert_eq!(rows.len(), done.out.lines().count());
    for name in ["check", "state", "finding", "remedy"] {
        assert!(rows.iter().all(|row| row[name].is_string()), "{name}");
    }
    let csv = place.control(&["--format", "csv", "doctor"]);
    assert!(
        csv.out.starts_with("check,state,finding,remedy\n"),
        "{}",
        csv.out
    );
}

#[test]
fn without_a_daemon() {
    let mut place = place();
    let done = place.control(&["doctor"]);
    is_healthy(&done);
    let daemon = line(&done, "warning  daemon: ");
    assert!(
        daemon.contains(&format!("No daemon listens in {}", place.pipe().display())),
        "{daemon}"
    );
    assert!(daemon.contains("Start it with mps-control -d"), "{daemon}");
    assert!(line(&done, "ok       pipe directory: ").contains("the daemon creates it"));
    assert!(!place.pipe().exists(), "it changes nothing");
    place.set_env("MPSSHIM_REQUIRED", "1");
    let done = place.control(&["doctor"]);
    assert!(line(&done, "error    daemon: ").contains("805"));
    assert_eq!(done.code, 1);
}

#[test]
fn the_daemon_of_another_user() {
    let Some(user) = other_user() else { return };
    let mut place = place();
    place.become_user(user);
    let started = place.control(&["-d"]);
    assert_eq!(started.code, 0, "{}", started.err);
    is_healthy(&place.control(&["doctor"]));
    let done = place.command_of_root("mps-control", &["doctor"]);
    let daemon = line(&done, "error    daemon: ");
    assert!(daemon.contains(&format!("of user {user} ")), "{daemon}");
    assert!(
        daemon.contains("programs of user 0 are refused with 807"),
        "{daemon}"
    );
    assert_eq!(done.code, 1);
}

#[test]
fn a_wrong_library() {
    let mut place = place();
    let file = place.path().join("libmpsshim.so");
    place.set_env("MPSSHIM_LIBRARY", text(&file));
    let is_refused = |why: &str| {
        let done = place.control(&["doctor"]);
        let library = line(&done, "error    library: ");
        assert!(library.contains(why), "{library}");
        assert_eq!(done.code, 1);
    };
    is_refused("Install it, or set MPSSHIM_LIBRARY");
    fs::write(&file, "no library").expect("write");
    is_refused("it is not a shared library");
    fs::copy(driver(), &file).expect("copy");
    is_refused("is not a libmpsshim.so of this or a later release");
    let mut library = fs::read(artifact("libmpsshim.so")).expect("library");
    let note = b"\x01\0\0\0mpsshim\0";
    let at = library.windows(note.len()).position(|part| part == note);
    let version = at.expect("a note") + note.len() + 4;
    library[version..version + 6].copy_from_slice(b"9.8.7\0");
    fs::write(&file, library).expect("write");
    is_refused("is of release 9.8.7 (protocol ");
    is_refused("no server here speaks its protocol");
}

#[test]
fn a_missing_or_wrong_server() {
    let mut place = place();
    let file = place.path().join("server");
    place.set_env("MPSSHIM_SERVER", text(&file));
    let is_refused = |why: &str| {
        let done = place.control(&["doctor"]);
        let server = line(&done, "error    server: ");
        assert!(server.contains(why), "{server}");
        assert!(line(&done, "warning  driver: ").contains("was not checked"));
        assert_eq!(done.code, 1);
    };
    is_refused("There is no file");
    fs::write(&file, "#!/bin/sh\n").expect("write");
    is_refused("cannot be executed");
    write_program(&file, "#!/bin/sh\necho mps-server 9.8.7\n");
    is_refused("is of release 9.8.7");
    write_program(&file, "#!/bin/sh\nexit 3\n");
    is_refused("does not tell its version");
}

#[test]
fn no_driver_and_no_device() {
    let mut place = place();
    place.set_env("CUDA_VISIBLE_DEVICES", "");
    let done = place.control(&["doctor"]);
    let driver = line(&done, "error    driver: ");
    assert!(
        driver.contains("has no device") && driver.contains("CUDA_VISIBLE_DEVICES"),
        "{driver}"
    );
    place.set_env("MPSSHIM_CUDA_LIBRARY", "/none/libcuda.so.1");
    let done = place.control(&["doctor"]);
    let driver = line(&done, "error    driver: No CUDA driver can be used: ");
    assert!(
        driver.contains("/none/libcuda.so.1") && driver.contains("Install NVIDIA's driver"),
        "{driver}"
    );
    // The product's own library is no driver.
    place.set_env("MPSSHIM_CUDA_LIBRARY", text(&artifact("libmpsshim.so")));
    let done = place.control(&["doctor"]);
    assert!(line(&done, "error    driver: ").contains("libmpsshim.so"));
    assert_eq!(done.code, 1);
}

#[test]
fn directories_that_cannot_be_used() {
    let place = place();
    fs::create_dir(place.pipe()).expect("create");
    fs::set_permissions(place.pipe(), fs::Permissions::from_mode(0o777)).expect("mode");
    let done = place.control(&["doctor"]);
    let pipe = line(&done, "error    pipe directory: ");
    assert!(
        pipe.contains("others can write in") && pipe.contains("MPSSHIM_PIPE_DIRECTORY"),
        "{pipe}"
    );
    let mut place = self::place();
    place.set_env("MPSSHIM_LOG_DIRECTORY", "/dev/null/logs");
    let done = place.control(&["doctor"]);
    assert!(line(&done, "error    log directory: ").contains("/dev/null is not a directory"));
    place.set_env("MPSSHIM_MAX_CLIENTS", "0");
    let done = place.control(&["doctor"]);
    let settings = line(&done, "error    settings: ");
    assert!(
        settings.contains("MPSSHIM_MAX_CLIENTS=0 must be a positive integer"),
        "{settings}"
    );
    assert_eq!(done.code, 1);
}

#[test]
fn a_daemon_of_nvidia_s_is_noticed() {
    let place = place();
    let nvidia = place.path().join("nvidia");
    fs::create_dir(&nvidia).expect("create");
    line(&place.control(&["doctor"]), "ok       NVIDIA's MPS: ");
    let _listener = UnixListener::bind(nvidia.join("control")).expect("bind");
    let warning = line(&place.control(&["doctor"]), "warning  NVIDIA's MPS: ");
    assert!(warning.contains(text(&nvidia)), "{warning}");
}

#[test]
fn the_unexpected_end_of_a_server_is_told() {
    let place = daemon_with(&[]);
    let client = Worker::connect(&control(&place)).expect("a client");
    let server = place.control(&["get_server_list"]).out;
    let killed = Command::new("kill").args(["-KILL", server.trim()]).status();
    assert!(killed.expect("kill").success());
    wait_until("the daemon has noticed", || {
        place.log("control.log").contains("ended unexpectedly")
    });
    drop(client);
    let done = place.control(&["doctor"]);
    let told = line(
        &done,
        "warning  server: The last server did not end as ordered: ",
    );
    assert!(
        told.contains(&format!("Server {} ended unexpectedly", server.trim())),
        "{told}"
    );
}

/// A process that ends with the value.
struct Sleeper(Child);

impl Sleeper {
    fn start(mut command: Command) -> Sleeper {
        Sleeper(command.arg("600").spawn().expect("sleep"))
    }

    /// Waits until the loader has mapped the library.
    fn preloaded(command: Command) -> Sleeper {
        let sleeper = Sleeper::start(command);
        let maps = PathBuf::from(format!("/proc/{}/maps", sleeper.0.id()));
        wait_until("the library is loaded", || {
            fs::read_to_string(&maps).is_ok_and(|maps| maps.contains("/libmpsshim.so"))
        });
        sleeper
    }

    fn examine(&self, place: &Place) -> Done {
        place.control(&["doctor", "-p", &self.0.id().to_string()])
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_with_and_without_the_library() {
    let place = place();
    let mut plain = Command::new("sleep");
    plain.env_remove("LD_PRELOAD");
    let without = Sleeper::start(plain).examine(&place);
    let process = line(&without, "error    process: ");
    assert!(process.contains("has not loaded the library"), "{process}");
    assert!(process.contains("no LD_PRELOAD"), "{process}");
    assert_eq!(without.code, 1);

    let with = Sleeper::preloaded(preloaded("sleep", place.pipe())).examine(&place);
    is_healthy(&with);
    assert!(line(&with, "ok       process: ").contains("has loaded /"));

    let elsewhere = Sleeper::preloaded(preloaded("sleep", Path::new("/elsewhere")));
    let done = elsewhere.examine(&place);
    assert!(line(&done, "warning  process: ").contains("looks for the daemon in /elsewhere"));
    assert_eq!(done.code, 0);

    let mut disabled = preloaded("sleep", place.pipe());
    disabled.env("MPSSHIM_DISABLE", "1");
    let done = Sleeper::preloaded(disabled).examine(&place);
    assert!(line(&done, "error    process: ").contains("MPSSHIM_DISABLE"));
}

#[test]
fn what_is_no_process_or_no_option() {
    let place = place();
    // Beyond the highest process id of Linux.
    let done = place.control(&["doctor", "-p", "4194305"]);
    assert!(line(&done, "error    process: ").contains("There is no process 4194305"));
    assert_eq!(done.code, 1);
    for wrong in [
        &["doctor", "-p", "x"][..],
        &["doctor", "-p", "0"],
        &["doctor", "now"],
        &["doctor", "-d"],
    ] {
        assert_eq!(place.control(wrong).code, 2, "{wrong:?}");
    }
}
