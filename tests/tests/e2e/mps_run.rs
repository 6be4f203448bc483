//! mps-run: the daemon it starts, the environment and the exit status of the program.

use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Done, Place, wait_until};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A library that is loaded in every process: to preload it changes nothing.
fn harmless_library() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").expect("maps");
    let line = maps
        .lines()
        .find(|line| line.ends_with("/libc.so.6"))
        .expect("the C library");
    PathBuf::from(line.split_whitespace().last().expect("path"))
}

fn mps_run(place: &Place) -> Command {
    let mut command = place.command("mps-run");
    command.env("MPSSHIM_LIBRARY", harmless_library());
    command
}

fn run(place: &Place, arguments: &[&str]) -> Done {
    mps_run(place).args(arguments).output().expect("run").into()
}

#[test]
fn the_exit_status_is_the_program_s() {
    let place = Place::new();
    assert_eq!(run(&place, &["true"]).code, 0);
    assert_eq!(run(&place, &["--", "sh", "-c", "exit 42"]).code, 42);
    let status = mps_run(&place)
        .args(["sh", "-c", "kill -TERM $$"])
        .status()
        .expect("run");
    assert_eq!(status.signal(), Some(15));
}

#[test]
fn the_mode_is_the_program_s() {
    let place = Place::new();
    let show = ["sh", "-c", "echo $MPSSHIM_MODE"];
    for mode in ["direct", "proxy"] {
        let done = run(&place, &[&["--mode", mode], &show[..]].concat());
        assert_eq!((done.code, done.out), (0, format!("{mode}\n")));
    }
    assert_eq!(run(&place, &show).out, "\n");
    let refused = run(&place, &["--mode", "shared", "true"]);
    assert!(
        refused.err.contains("[possible values: proxy, direct]"),
        "{}",
        refused.err
    );
    assert_eq!(refused.code, 125);
}

#[test]
fn a_program_that_cannot_run() {
    let place = Place::new();
    let result = run(&place, &["-q", "/no/such/program"]);
    assert_eq!(result.code, 127);
    assert!(
        result
            .err
            .starts_with("mps-run: cannot run /no/such/program"),
        "{}",
        result.err
    );
    let plain = place.path().join("plain");
    fs::write(&plain, "no program").expect("write");
    let result = run(&place, &[plain.to_str().expect("text")]);
    assert_eq!(result.code, 126);
    assert!(result.err.contains("plain"), "{}", result.err);
}

#[test]
fn what_the_program_sees() {
    let place = Place::new();
    let library = harmless_library();
    let script =
        "echo $$; echo $LD_PRELOAD; echo $MPSSHIM_PIPE_DIRECTORY; echo $MPSSHIM_LOG; echo $*";
    let mut command = mps_run(&place);
    command.args([
        "--log",
        "debug",
        "sh",
        "-c",
        script,
        "sh",
        "--pipe-dir",
        "x",
        "-f",
    ]);
    command.env("LD_PRELOAD", &library).stdout(Stdio::piped());
    let child = command.spawn().expect("run");
    let pid = child.id();
    let result = Done::from(child.wait_with_output().expect("wait"));
    let library = library.canonicalize().expect("path");
    let expected = [
        // mps-run has become the program.
        pid.to_string(),
        format!("{}:{}", library.display(), harmless_library().display()),
        place.pipe().display().to_string(),
        "debug".to_owned(),
        "--pipe-dir x -f".to_owned(),
    ];
    assert_eq!(result.out.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn a_relative_pipe_directory_holds_wherever_the_program_goes() {
    let place = Place::new();
    let mut command = mps_run(&place);
    command.args([
        "--pipe-dir",
        "pipe",
        "sh",
        "-c",
        "cd /; echo $MPSSHIM_PIPE_DIRECTORY",
    ]);
    let result = Done::from(command.current_dir(place.path()).output().expect("run"));
    assert_eq!(result.out, format!("{}\n", place.pipe().display()));
    assert_eq!(
        place.control(&["get_server_list"]).code,
        0,
        "the daemon is there"
    );
}

#[test]
fn many_at_once_start_one_daemon() {
    let place = Place::new();
    let children: Vec<_> = (0..12)
        .map(|_| mps_run(&place).arg("true").spawn().expect("run"))
        .collect();
    for mut child in children {
        assert!(child.wait().expect("wait").success());
    }
    assert_eq!(
        place
            .log("control.log")
            .matches("Starting control daemon")
            .count(),
        1
    );
    // Not a child of what it was started for.
    let status =
        fs::read_to_string(format!("/proc/{}/status", place.daemon_pid())).expect("status");
    assert!(!status.contains(&format!("PPid:\t{}\n", std::process::id())));
    assert_eq!(place.control(&["quit"]).code, 0);
    wait_until("the daemon has ended", || {
        !place.pipe().join("mps-control.pid").exists()
    });
}

/// The processors that a process may run on.
fn processors(pid: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.expect("the list").trim().to_owned()
}

#[test]
fn the_daemon_is_not_bound_to_the_processors_of_the_program() {
    use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
    use nix::unistd::Pid;
    let place = Place::new();
    let all = processors("self");
    let may = sched_getaffinity(Pid::from_raw(0)).expect("affinity");
    let first = (0..CpuSet::count()).find(|&one| may.is_set(one) == Ok(true));
    let first = first.expect("a processor");
    // In a thread of its own, whose binding the program inherits.
    let seen = std::thread::scope(|scope| {
        let bound = scope.spawn(|| {
            let mut one = CpuSet::new();
            one.set(first).expect("a processor");
            sched_setaffinity(Pid::from_raw(0), &one).expect("affinity");
            run(&place, &["grep", "Cpus_allowed_list", "/proc/self/status"]).out
        });
        bound.join().expect("no panic")
    });
    assert_eq!(seen, format!("Cpus_allowed_list:\t{first}\n"));
    assert_eq!(processors(&place.daemon_pid().to_string()), all);
}

/// As under MPICH, whose mpirun waits until nobody holds the pipes that its ranks inherit.
#[test]
fn the_daemon_keeps_nothing_that_the_program_inherited() {
    let place = Place::new();
    let held = place.path().join("held");
    let line = "exec 7>held 251>>held; exec \"$0\" sh -c 'readlink /proc/$$/fd/7'";
    let mut command = place.command_like(&mps_run(&place), "bash");
    command.args(["-c", line]).arg(artifact("mps-run"));
    let seen = Done::from(command.current_dir(place.path()).output().expect("run"));
    assert_eq!(seen.out, format!("{}\n", held.display()), "{}", seen.err);
    let daemon = format!("/proc/{}/fd", place.daemon_pid());
    let open = fs::read_dir(daemon).expect("descriptors");
    let open = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    assert!(open.into_iter().all(|file| file != held));
}

#[test]
fn a_running_daemon_is_used() {
    let place = Place::with_daemon();
    let pid = place.daemon_pid();
    assert_eq!(run(&place, &["true"]).code, 0);
    assert_eq!(place.daemon_pid(), pid);
}

#[test]
fn what_mps_run_cannot_do() {
    let mut place = Place::new();
    assert_eq!(run(&place, &[]).code, 125);
    assert_eq!(run(&place, &["--help"]).code, 0);
    let result = run(&place, &["--shim", "/no/libmpsshim.so", "true"]);
    assert_eq!(result.code, 125);
    assert!(
        result.err.contains("/no/libmpsshim.so") && result.err.contains("--shim"),
        "{}",
        result.err
    );
    let spaced = place.path().join("a b.so");
    fs::copy(harmless_library(), &spaced).expect("copy");
    let result = run(&place, &["--shim", spaced.to_str().expect("text"), "true"]);
    assert!(
        result.code == 125 && result.err.contains("space or a colon"),
        "{}",
        result.err
    );
    let result = run(&place, &["--cuda-library", "/no/libcuda.so.1", "true"]);
    assert!(
        result.code == 125 && result.err.contains("/no/libcuda.so.1"),
        "{}",
        result.err
    );

    let file = place.path().join("file");
    fs::write(&file, "").expect("write");
    place.set_pipe(&file.join("below"));
    let result = run(&place, &["true"]);
    assert_eq!(result.code, 125);
    assert!(
        result.err.contains("cannot create the pipe directory"),
        "{}",
        result.err
    );
}

#[test]
fn disabled_it_starts_no_daemon() {
    let place = Place::new();
    let status = mps_run(&place)
        .env("MPSSHIM_DISABLE", "1")
        .arg("true")
        .status()
        .expect("run");
    assert!(status.success());
    assert!(!place.pipe().exists());
}

#[test]
fn what_cannot_be_preloaded_is_refused() {
    let place = Place::new();
    let text = place.path().join("text.so");
    fs::write(&text, "no library").expect("write");
    let mut command = mps_run(&place);
    command.env("MPSSHIM_LIBRARY", &text).arg("true");
    let done: Done = command.output().expect("run").into();
    assert_eq!(done.code, 125);
    let expected = format!(
        "mps-run: {} cannot be preloaded: it is not a shared library\n",
        text.display()
    );
    assert_eq!(done.err, expected);
}

#[test]
fn a_program_that_preloads_nothing_is_named_and_runs() {
    let place = Place::new();
    let program = place.path().join("program");
    fs::copy("/bin/echo", &program).expect("copy");
    if !nix::unistd::getuid().is_root() {
        println!("skipped: only root can make a program another user's");
        return;
    }
    let other = Some(nix::unistd::Uid::from_raw(12345));
    nix::unistd::chown(&program, other, None).expect("chown");
    let mode = fs::Permissions::from_mode(0o4755);
    fs::set_permissions(&program, mode).expect("chmod");
    let done = run(&place, &[program.to_str().expect("text"), "hello"]);
    assert_eq!((done.code, done.out.as_str()), (0, "hello\n"));
    assert!(
        done.err
            .contains("will not share the GPU: it is set-user-ID"),
        "{}",
        done.err
    );
}
